//! vCPUs and memory of a running VMI: the resources of its launcher pod, and the conditions of the change.
//!
//! ```text
//!   growth:  condition True -> pods/resize -> PodResized -> virt-handler plugs, writes the status and removes the condition
//!                                  └─> Deferred, Infeasible, Refused: the domain is not touched; a migration to
//!                                                      another pod, if workload updates may migrate
//!   huge pages: those of a pod are fixed, so that memory grows by a migration only
//!   shrink:  condition True -> the guest gives memory back -> pods/resize -> condition removed
//! ```
//! A VMI without a change in progress costs nothing here: its pod is compared with nothing, so that a new version or another
//! configuration resizes no pod.

use api::{
    Condition, VirtualMachineInstance, VmiPhase,
    condition::{remove, set},
    constants::condition::{HOT_MEMORY_CHANGE, HOT_VCPU_CHANGE},
    quantity,
    resize::{
        POD_RESIZE_DEFERRED, POD_RESIZE_INFEASIBLE, POD_RESIZE_REFUSED, POD_RESIZED, cpu_change, is_held, memory_change,
    },
};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use serde_json::{Map, Value, json};

use super::{Observed, pods::inputs};
use crate::{
    launcher_pod::{self, Inputs, NamespaceLimits},
    resources::pods::{Amounts, CachedPod, ComputeResources},
    runtime::{Decision, Effect, Event, Kind},
};

/// Reason under which a refused resize is remembered, and of its event.
const REFUSED: &str = POD_RESIZE_REFUSED;
/// Share of a CPU request that the kubelet may lose when it converts it to the weight of a cgroup, in percent.
const CPU_ROUNDING: i64 = 5;
/// Message about a guest in huge pages that grows.
const PAGES_FIXED: &str = "the launcher pod cannot be resized: the huge pages of a running pod are fixed";

/// State of the pod's resize.
#[derive(Clone, Debug, PartialEq)]
enum Progress {
    /// Requested, or about to be.
    Running,
    /// The pod has the resources.
    Done,
    /// It has not got them, for this reason.
    Held(&'static str, String),
}

/// Updates the conditions of changes in progress. Returns the resources that the pod must get.
pub(super) fn update(
    observed: &Observed,
    pod: Option<&CachedPod>,
    wanted: &mut VirtualMachineInstance,
) -> Option<ComputeResources> {
    let instance = &*observed.instance;
    // A pod that the guest leaves is not resized, and conditions are left to the target.
    let stays = !wanted.is_final() && !instance.is_deleting() && !instance.is_migrating();
    let runs = *instance.phase() == VmiPhase::Running && stays;
    let pod = pod.filter(|pod| runs && !pod.is_going_down() && !pod.unseen)?;
    let (cpu, memory) = (cpu_change(instance), memory_change(instance));
    let is_shown = |type_: &str| instance.condition(type_).is_some();
    let is_changing = cpu.is_some() || memory.is_some() || is_shown(HOT_VCPU_CHANGE) || is_shown(HOT_MEMORY_CHANGE);
    if !is_changing && pod.resize_pending.is_none() {
        return None;
    }
    let limits = NamespaceLimits {
        cpu: pod.wanted.limits.cpu.is_some(),
        memory: pod.wanted.limits.memory.is_some(),
        below_guest: is_below_guest(pod, instance),
        ..observed.limits
    };
    // A VMI that cannot be rendered any more keeps its pod.
    let (rendered, overhead) = launcher_pod::compute_resources(&Inputs { limits, ..inputs(observed) }).ok()?;
    let resources = pod_resources(pod, rendered, guest_is_larger(instance));
    let progress = progress(observed, pod, resources);
    let lacks_pages = rendered.requests.huge_pages > pod.wanted.requests.huge_pages;
    let of_memory =
        if lacks_pages { Progress::Held(POD_RESIZE_INFEASIBLE, PAGES_FIXED.to_owned()) } else { progress.clone() };
    let status = wanted.status.get_or_insert_default();
    let now = Time(observed.now);
    let shown = |type_: &str, growth: bool, progress: &Progress| {
        let known = instance.condition(type_);
        let (reason, message) = match progress {
            // virt-handler may be plugging already.
            _ if known.is_some_and(|known| known.reason.as_deref() == Some(POD_RESIZED)) => (POD_RESIZED, ""),
            _ if !growth => ("", ""),
            Progress::Running => ("", ""),
            Progress::Done => (POD_RESIZED, ""),
            Progress::Held(reason, message) => (*reason, message.as_str()),
        };
        Condition::new(type_, true, reason, message, &now)
    };
    // The pod of a change that was taken back, or of a guest that has shrunk, follows first.
    let is_settled = pod.wanted == resources || matches!(progress, Progress::Held(..));
    let has_failed = |type_: &str| instance.condition(type_).is_some_and(Condition::is_false);
    match cpu {
        Some(change) if !has_failed(HOT_VCPU_CHANGE) => {
            set(&mut status.conditions, shown(HOT_VCPU_CHANGE, change.is_growth(), &progress));
        }
        Some(_) => {}
        None if is_settled => {
            remove(&mut status.conditions, HOT_VCPU_CHANGE);
        }
        None => {}
    }
    match memory {
        Some(change) if !has_failed(HOT_MEMORY_CHANGE) => {
            set(&mut status.conditions, shown(HOT_MEMORY_CHANGE, change.is_growth(), &of_memory));
        }
        Some(_) => {}
        None if !guest_is_larger(instance) && is_settled => {
            remove(&mut status.conditions, HOT_MEMORY_CHANGE);
        }
        None => {}
    }
    if progress == Progress::Done && pod.wanted == resources {
        status.memory.get_or_insert_default().memory_overhead = Some(quantity::bytes(overhead));
    }
    Some(resources)
}

/// Returns true if the guest still has more memory than the spec.
fn guest_is_larger(instance: &VirtualMachineInstance) -> bool {
    let bytes = |amount: Option<&_>| quantity::units(amount?).ok();
    let spec = instance.spec.domain.memory.as_ref();
    let status = instance.status.as_ref().and_then(|status| status.memory.as_ref());
    let wanted = bytes(spec.and_then(|memory| memory.guest.as_ref()));
    let current = bytes(status.and_then(|memory| memory.guest_current.as_ref()));
    current.zip(wanted).is_some_and(|(current, wanted)| current > wanted)
}

/// Returns true if the memory limit of the pod is less than the guest has.
fn is_below_guest(pod: &CachedPod, instance: &VirtualMachineInstance) -> bool {
    let memory = instance.status.as_ref().and_then(|status| status.memory.as_ref());
    let guest = memory.and_then(|memory| quantity::units(memory.guest_current.as_ref()?).ok());
    pod.wanted.limits.memory.zip(guest).is_some_and(|(limit, guest)| limit < guest)
}

/// Returns the resources for the pod: those that a pod for the spec would have, in the fields that the pod has. Memory of the
/// guest is not taken from its pod.
fn pod_resources(pod: &CachedPod, rendered: ComputeResources, keeps_memory: bool) -> ComputeResources {
    let amount = |present: Option<i64>, rendered: Option<i64>| present.map(|present| rendered.unwrap_or(present));
    let memory = |present: Option<i64>, rendered: Option<i64>| {
        let amount = amount(present, rendered);
        if keeps_memory { amount.max(present) } else { amount }
    };
    let both = |present: Amounts, rendered: Amounts| Amounts {
        cpu: amount(present.cpu, rendered.cpu),
        memory: memory(present.memory, rendered.memory),
        huge_pages: present.huge_pages,
    };
    ComputeResources {
        requests: both(pod.wanted.requests, rendered.requests),
        limits: both(pod.wanted.limits, rendered.limits),
    }
}

fn progress(observed: &Observed, pod: &CachedPod, resources: ComputeResources) -> Progress {
    if pod.wanted != resources {
        let refused = observed.failures.of(REFUSED);
        return refused.map_or(Progress::Running, |refused| {
            Progress::Held(POD_RESIZE_REFUSED, format!("the launcher pod cannot be resized: {}", refused.message))
        });
    }
    if let Some(pending) = &pod.resize_pending {
        let reason = match pending.reason.as_deref() {
            Some("Infeasible") => POD_RESIZE_INFEASIBLE,
            _ => POD_RESIZE_DEFERRED,
        };
        let message = pending.message.as_deref().unwrap_or_default();
        return Progress::Held(reason, format!("the node cannot resize the launcher pod: {message}"));
    }
    let has = |granted: Option<i64>, wanted: Option<i64>| wanted.is_none_or(|wanted| granted >= Some(wanted));
    let (granted, wanted) = (pod.granted, resources);
    let cpu = wanted.requests.cpu.map(|cpu| cpu.saturating_sub(cpu.saturating_mul(CPU_ROUNDING) / 100));
    let is_granted = has(granted.requests.cpu, cpu)
        && has(granted.requests.memory, wanted.requests.memory)
        && has(granted.limits.cpu, wanted.limits.cpu)
        && has(granted.limits.memory, wanted.limits.memory);
    if is_granted && !pod.is_resizing { Progress::Done } else { Progress::Running }
}

/// Returns an event for each change that does not fit. A refusal of the API server has its own.
pub(super) fn events(former: &VirtualMachineInstance, wanted: &VirtualMachineInstance) -> Vec<Effect> {
    let event = |type_: &str| {
        let held = wanted.condition(type_).filter(|held| is_held(held))?;
        if former.condition(type_).is_some_and(|former| former.says_same(held)) {
            return None;
        }
        let reasons = [POD_RESIZE_DEFERRED, POD_RESIZE_INFEASIBLE];
        let reason = reasons.into_iter().find(|reason| held.reason.as_deref() == Some(*reason))?;
        let regarding = Kind::Instance.reference(&former.metadata);
        Some(Effect::Event(Event::warning(regarding, reason, held.message.clone()?)))
    };
    [HOT_VCPU_CHANGE, HOT_MEMORY_CHANGE].into_iter().filter_map(event).collect()
}

/// Requests the resources for the pod.
pub(super) fn patch(observed: &Observed, pod: &CachedPod, resources: ComputeResources, decision: &mut Decision) {
    if pod.wanted == resources {
        return;
    }
    if decision.must_wait(&observed.failures, REFUSED, observed.now) {
        return;
    }
    let amounts = |amounts: Amounts| {
        let cpu = amounts.cpu.map(|cpu| ("cpu".to_owned(), json!(quantity::from_milli(cpu))));
        let memory = amounts.memory.map(|memory| ("memory".to_owned(), json!(quantity::bytes(memory))));
        cpu.into_iter().chain(memory).collect::<Map<String, Value>>()
    };
    let mut changed = Map::new();
    for (name, amounts) in [("requests", amounts(resources.requests)), ("limits", amounts(resources.limits))] {
        if !amounts.is_empty() {
            changed.insert(name.to_owned(), Value::Object(amounts));
        }
    }
    let patch = json!({"spec": {"containers": [
        {"name": api::constants::component::COMPUTE_CONTAINER, "resources": changed},
    ]}});
    let patch = Effect::merge(Kind::Pod, &pod.metadata, patch).by_keys().of_subresource("resize").of_any_version();
    let regarding = Kind::Instance.reference(&observed.instance.metadata);
    decision.push(patch.on_failure(Event::warning(regarding, REFUSED, "Error resizing virtual machine pod: {error}")));
}
