//! Sockets and memory of a VM's template: the running VMI follows them as far as its domain can.
//!
//! The guards, their order and their messages are those of the reference, except that a live migration is the exception, and that
//! a change which waits for its pod can be taken back.

use api::{
    Condition, VirtualMachineInstance, VirtualMachineInstanceSpec, VmiPhase,
    condition::set,
    config::ClusterConfig,
    constants::condition::{HOT_MEMORY_CHANGE, HOT_VCPU_CHANGE},
    quantity, resize,
};
use k8s_openapi::apimachinery::pkg::{api::resource::Quantity, apis::meta::v1::Time};

use super::SyncError;

const CPU_CONTEXT: &str = "Error encountered while handling CPU change request";
const MEMORY_CONTEXT: &str = "error encountered while handling memory hotplug requests";

/// Sockets and memory that a template names.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Size {
    pub(super) sockets: Option<u32>,
    pub(super) guest: Option<Quantity>,
    /// The template has a CPU request, a CPU limit, a memory limit.
    sets: [bool; 3],
}

impl Size {
    pub(super) fn of(spec: &VirtualMachineInstanceSpec) -> Self {
        let domain = &spec.domain;
        let resources = &domain.resources;
        Self {
            sockets: domain.cpu.as_ref().and_then(|cpu| cpu.sockets).filter(|sockets| *sockets != 0),
            guest: domain.memory.as_ref().and_then(|memory| memory.guest.clone()),
            sets: [
                resources.requests.contains_key("cpu"),
                resources.limits.contains_key("cpu"),
                resources.limits.contains_key("memory"),
            ],
        }
    }

    /// Returns the fields of the size, and true for those in which a VMI differs.
    pub(super) fn differences(&self, spec: &VirtualMachineInstanceSpec) -> [(&'static str, bool); 2] {
        let bytes = |guest: &Quantity| quantity::units(guest).ok();
        let guest = spec.domain.memory.as_ref().and_then(|memory| memory.guest.as_ref());
        let differs = self.guest.as_ref().zip(guest).is_some_and(|(wanted, guest)| bytes(wanted) != bytes(guest));
        let sockets = self.sockets.is_some_and(|sockets| sockets != present_sockets(spec));
        [("domain.cpu.sockets", sockets), ("domain.memory.guest", differs)]
    }
}

fn present_sockets(spec: &VirtualMachineInstanceSpec) -> u32 {
    spec.domain.cpu.as_ref().and_then(|cpu| cpu.sockets).unwrap_or(1).max(1)
}

/// Decision about one part of the size.
#[derive(Clone, Debug, PartialEq)]
enum Step<T> {
    /// The VMI has it.
    Same,
    /// The next start takes it over, for this reason.
    Restart(String),
    /// It has to wait, for this reason.
    Refused(&'static str),
    /// The VMI follows.
    Change(T),
}

/// A size and the resources that come with it.
#[derive(Clone, Debug, PartialEq)]
struct Target<T> {
    size: T,
    request: Option<Quantity>,
    limit: Option<Quantity>,
}

/// Decisions about sockets and memory.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Resize {
    cpu: Step<Target<u32>>,
    memory: Step<Target<Quantity>>,
}

/// Decides what a running VMI takes over from a template.
pub(super) fn decide(config: &ClusterConfig, template: &Size, vmi: &VirtualMachineInstance) -> Resize {
    if *vmi.phase() != VmiPhase::Running {
        return Resize { cpu: Step::Same, memory: Step::Same };
    }
    Resize { cpu: cpu(config, template, vmi), memory: memory(template, vmi) }
}

/// Returns true if a change is on its way into the guest. One that waits for its pod has not reached it, and a guest that
/// has not given all of its memory back can be changed again.
fn is_in_progress(vmi: &VirtualMachineInstance, type_: &str, change: Option<resize::Change>) -> bool {
    change.is_some() && vmi.condition(type_).is_some_and(|condition| condition.is_true() && !resize::is_held(condition))
}

fn cpu(config: &ClusterConfig, template: &Size, vmi: &VirtualMachineInstance) -> Step<Target<u32>> {
    let restart = |message: &str| Step::Restart(message.to_owned());
    let (Some(wanted), Some(cpu)) = (template.sockets, &vmi.spec.domain.cpu) else { return Step::Same };
    let present = present_sockets(&vmi.spec);
    if wanted == present {
        return Step::Same;
    }
    if is_in_progress(vmi, HOT_VCPU_CHANGE, resize::cpu_change(vmi)) {
        return Step::Refused("another CPU hotplug is in progress");
    }
    if vmi.is_migrating() {
        return Step::Refused("CPU hotplug is not allowed while VMI is migrating");
    }
    if wanted > cpu.max_sockets.unwrap_or(0) {
        return restart("CPU sockets updated in template spec to a value higher than what's available");
    }
    let plugged = vmi.status.as_ref().and_then(|status| status.current_cpu_topology.as_ref()?.sockets);
    if wanted < plugged.unwrap_or(present) {
        return restart("Reduction of CPU socket count requires a restart");
    }
    if vmi.spec.is_arm64() {
        return restart("ARM doesn't support CPU hotplug");
    }
    let part = |value: Option<u32>| i64::from(value.unwrap_or(1).max(1));
    let per_vcpu = 1000 / i64::from(config.cpu_allocation_ratio.max(1));
    let difference = i64::from(wanted) - i64::from(present);
    let added = difference.saturating_mul(part(cpu.cores)).saturating_mul(part(cpu.threads)).saturating_mul(per_vcpu);
    let resources = &vmi.spec.domain.resources;
    let grown = |amount: Option<&Quantity>, is_set: bool| {
        let milli = quantity::milli(amount.filter(|_| is_set)?).ok()?;
        Some(quantity::from_milli(milli.saturating_add(added).max(1)))
    };
    let [request, limit, _] = template.sets;
    let [requested, most] = [&resources.requests, &resources.limits].map(|amounts| amounts.get("cpu"));
    // Made from the limit by admission, as at the next start. A pod that is resized in place cannot leave the QoS class Guaranteed.
    let is_default = limit && requested.is_some() && requested.map(quantity::milli) == most.map(quantity::milli);
    Step::Change(Target { size: wanted, request: grown(requested, request || is_default), limit: grown(most, limit) })
}

fn memory(template: &Size, vmi: &VirtualMachineInstance) -> Step<Target<Quantity>> {
    let restart = |what: &str| Step::Restart(format!("memory updated in template spec{what}"));
    let bytes = |amount: &Quantity| quantity::units(amount).ok();
    let spec = vmi.spec.domain.memory.as_ref();
    let status = vmi.status.as_ref().and_then(|status| status.memory.as_ref());
    let (Some(target), Some(present), Some(status)) = (
        template.guest.as_ref(),
        spec.and_then(|memory| bytes(memory.guest.as_ref()?)),
        status.filter(|memory| memory.guest_current.is_some()),
    ) else {
        return Step::Same;
    };
    let Some(wanted) = bytes(target) else { return Step::Same };
    let requested = status.guest_requested.as_ref().and_then(bytes);
    if vmi.condition(HOT_MEMORY_CHANGE).is_some_and(Condition::is_false) {
        // The size that the domain still has needs no restart.
        if requested != Some(wanted) || wanted == present {
            return restart(". Memory-hotplug failed and is not available for this VM configuration");
        }
    } else if wanted == present {
        return Step::Same;
    }
    let Some(most) = spec.and_then(|memory| bytes(memory.max_guest.as_ref()?)) else {
        return restart(". Memory-hotplug is not available for this VM configuration");
    };
    if is_in_progress(vmi, HOT_MEMORY_CHANGE, resize::memory_change(vmi)) {
        return Step::Refused("another memory hotplug is in progress");
    }
    if vmi.is_migrating() {
        return Step::Refused("memory hotplug is not allowed while VMI is migrating");
    }
    let mut resized = vmi.spec.clone();
    resized.domain.memory.get_or_insert_default().guest = Some(target.clone());
    if let Err(error) = admission::rules::live_update::memory_hotplug(&resized) {
        return Step::Restart(format!("memory hotplug not supported, {error}"));
    }
    if status.guest_at_boot.as_ref().and_then(bytes).is_some_and(|boot| wanted < boot) {
        return restart(" to a value lower than what the VM started with");
    }
    if wanted > most {
        return restart(" to a value higher than what's available");
    }
    let resources = &vmi.spec.domain.resources;
    let mut difference = wanted.saturating_sub(present);
    let request = resources.requests.get("memory").and_then(bytes).map(|request| {
        let request = request.saturating_add(difference);
        if request < wanted {
            difference = 0;
        }
        quantity::bytes(request.max(wanted))
    });
    let [.., limit] = template.sets;
    let limit = resources.limits.get("memory").filter(|_| limit).and_then(bytes);
    Step::Change(Target {
        size: target.clone(),
        request,
        limit: limit.map(|limit| quantity::bytes(limit.saturating_add(difference))),
    })
}

impl Resize {
    /// Returns the reason why a restart is required.
    pub(super) fn restart(&self) -> Option<String> {
        match (&self.cpu, &self.memory) {
            (Step::Restart(message), _) | (_, Step::Restart(message)) => Some(message.clone()),
            _ => None,
        }
    }

    /// Writes sockets and CPU resources into the VMI. Returns the error of a change that has to wait.
    pub(super) fn put_cpu(&self, vmi: &mut VirtualMachineInstance, now: &Time) -> Option<SyncError> {
        let target = match &self.cpu {
            Step::Change(target) => target,
            Step::Refused(message) => {
                return Some(SyncError::new("HotPlugCPUError", format!("{CPU_CONTEXT}: {message}")));
            }
            Step::Same | Step::Restart(_) => return None,
        };
        vmi.spec.domain.cpu.get_or_insert_default().sockets = Some(target.size);
        put_resources(vmi, "cpu", target);
        forget_failure(vmi, HOT_VCPU_CHANGE, now);
        None
    }

    /// Writes memory and its resources into the VMI. Returns the error of a change that has to wait.
    pub(super) fn put_memory(&self, vmi: &mut VirtualMachineInstance, now: &Time) -> Option<SyncError> {
        let target = match &self.memory {
            Step::Change(target) => target,
            Step::Refused(message) => {
                return Some(SyncError::new("HotPlugMemoryError", format!("{MEMORY_CONTEXT}: {message}")));
            }
            Step::Same | Step::Restart(_) => return None,
        };
        vmi.spec.domain.memory.get_or_insert_default().guest = Some(target.size.clone());
        put_resources(vmi, "memory", target);
        forget_failure(vmi, HOT_MEMORY_CHANGE, now);
        None
    }
}

fn put_resources<T>(vmi: &mut VirtualMachineInstance, name: &str, target: &Target<T>) {
    let resources = &mut vmi.spec.domain.resources;
    for (amounts, amount) in [(&mut resources.requests, &target.request), (&mut resources.limits, &target.limit)] {
        if let Some(amount) = amount {
            amounts.insert(name.to_owned(), amount.clone());
        }
    }
}

/// Replaces the failure of a former change: the new one is attempted, and the pod of the former one is taken back.
fn forget_failure(vmi: &mut VirtualMachineInstance, type_: &str, now: &Time) {
    if vmi.condition(type_).is_some_and(Condition::is_false)
        && let Some(status) = &mut vmi.status
    {
        set(&mut status.conditions, Condition::new(type_, true, "", "", now));
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn now() -> Time {
        Time(jiff::Timestamp::UNIX_EPOCH)
    }

    fn vmi(change: &Value) -> VirtualMachineInstance {
        let mut vmi = json!({
            "apiVersion": "kubevirt.io/v1", "kind": "VirtualMachineInstance", "metadata": {},
            "spec": {"architecture": "amd64", "domain": {
                "cpu": {"sockets": 2, "cores": 2, "threads": 1, "maxSockets": 4},
                "memory": {"guest": "2Gi", "maxGuest": "4Gi"}, "devices": {},
            }},
            "status": {
                "phase": "Running", "currentCPUTopology": {"sockets": 2, "cores": 2, "threads": 1},
                "memory": {"guestAtBoot": "1Gi", "guestRequested": "2Gi", "guestCurrent": "2Gi"},
            },
        });
        json_patch::merge(&mut vmi, change);
        serde_json::from_value(vmi).unwrap()
    }

    fn template(sockets: Value, guest: Value, resources: Value) -> Size {
        let spec = json!({"domain": {
            "cpu": {"sockets": sockets}, "memory": {"guest": guest}, "devices": {}, "resources": resources,
        }});
        Size::of(&serde_json::from_value(spec).unwrap())
    }

    fn with_condition(type_: &str, status: &str, reason: Value) -> Value {
        json!({"status": {"conditions": [{"type": type_, "status": status, "reason": reason}]}})
    }

    /// Returns what becomes of a template: the new size, or the reason why there is none.
    fn outcome(template: &Size, vmi: &VirtualMachineInstance) -> String {
        let resize = decide(&ClusterConfig::default(), template, vmi);
        let mut next = vmi.clone();
        let refused =
            [resize.put_cpu(&mut next, &now()), resize.put_memory(&mut next, &now())].into_iter().flatten().next();
        match (resize.restart(), refused) {
            (Some(message), _) => format!("restart: {message}"),
            (None, Some(error)) => format!("{}: {}", error.reason, error.message),
            (None, None) if next == *vmi => String::new(),
            (None, None) => {
                let domain = next.spec.domain;
                format!("{} {}", domain.cpu.unwrap().sockets.unwrap(), domain.memory.unwrap().guest.unwrap().0)
            }
        }
    }

    #[test]
    fn change_of_the_size_is_live_or_requires_a_restart() {
        let plain = || json!({});
        let migrating = || json!({"status": {"migrationState": {"startTimestamp": "2030-01-01T00:00:00Z"}}});
        let (cpu, memory) = ("HotVCPUChange", "HotMemoryChange");
        let waiting = json!({"spec": {"domain": {"cpu": {"sockets": 3}, "memory": {"guest": "3Gi"}}}});
        let held = |type_: &str, reason: Value| {
            let mut change = waiting.clone();
            json_patch::merge(&mut change, &with_condition(type_, "True", reason));
            change
        };
        let failed = |type_: &str| {
            let mut change = waiting.clone();
            json_patch::merge(&mut change, &with_condition(type_, "False", Value::Null));
            change
        };
        let nothing = || (json!(2), json!("2Gi"));
        for ((sockets, guest), change, expected) in [
            (nothing(), plain(), ""),
            ((Value::Null, Value::Null), plain(), ""),
            ((json!(2), json!("2048Mi")), plain(), ""),
            // CPUs.
            ((json!(4), json!("2Gi")), plain(), "4 2Gi"),
            ((json!(4), json!("2Gi")), json!({"status": {"phase": "Scheduled"}}), ""),
            (
                (json!(5), json!("2Gi")),
                plain(),
                "restart: CPU sockets updated in template spec to a value higher than what's available",
            ),
            (
                (json!(3), json!("2Gi")),
                json!({"spec": {"domain": {"cpu": {"maxSockets": null}}}}),
                "restart: CPU sockets updated in template spec to a value higher than what's available",
            ),
            ((json!(1), json!("2Gi")), plain(), "restart: Reduction of CPU socket count requires a restart"),
            (
                (json!(3), json!("2Gi")),
                json!({"spec": {"architecture": "arm64"}}),
                "restart: ARM doesn't support CPU hotplug",
            ),
            (
                (json!(3), json!("2Gi")),
                migrating(),
                "HotPlugCPUError: Error encountered while handling CPU change request: CPU hotplug is not allowed while \
                 VMI is migrating",
            ),
            (
                (json!(4), json!("3Gi")),
                held(cpu, Value::Null),
                "HotPlugCPUError: Error encountered while handling CPU change request: another CPU hotplug is in progress",
            ),
            (
                (json!(2), json!("3Gi")),
                held(cpu, json!("PodResized")),
                "HotPlugCPUError: Error encountered while handling CPU change request: another CPU hotplug is in progress",
            ),
            // A change that waits for its pod is taken back, or replaced.
            ((json!(2), json!("3Gi")), held(cpu, json!("PodResizeDeferred")), "2 3Gi"),
            ((json!(4), json!("3Gi")), held(cpu, json!("PodResizeRefused")), "4 3Gi"),
            ((json!(2), json!("3Gi")), failed(cpu), "2 3Gi"),
            ((json!(3), json!("2Gi")), held(memory, json!("PodResizeInfeasible")), "3 2Gi"),
            // Memory.
            ((json!(2), json!("4Gi")), plain(), "2 4Gi"),
            ((json!(2), json!("1Gi")), plain(), "2 1Gi"),
            (
                (json!(2), json!("512Mi")),
                json!({"status": {"memory": {"guestAtBoot": "2Gi"}}}),
                "restart: memory hotplug not supported, Memory hotplug is only available for VMs with at least 1Gi of \
                 guest memory",
            ),
            (
                (json!(2), json!("1Gi")),
                json!({"status": {"memory": {"guestAtBoot": "2Gi"}}}),
                "restart: memory updated in template spec to a value lower than what the VM started with",
            ),
            (
                (json!(2), json!("5Gi")),
                plain(),
                "restart: memory hotplug not supported, Guest memory is greater than the configured maxGuest memory",
            ),
            (
                (json!(2), json!("3Gi")),
                json!({"spec": {"domain": {"memory": {"maxGuest": null}}}}),
                "restart: memory updated in template spec. Memory-hotplug is not available for this VM configuration",
            ),
            (
                (json!(2), json!("3Gi")),
                migrating(),
                "HotPlugMemoryError: error encountered while handling memory hotplug requests: memory hotplug is not \
                 allowed while VMI is migrating",
            ),
            (
                (json!(3), json!("4Gi")),
                held(memory, Value::Null),
                "HotPlugMemoryError: error encountered while handling memory hotplug requests: another memory hotplug is \
                 in progress",
            ),
            (
                (json!(3), json!("3Gi")),
                failed(memory),
                "restart: memory updated in template spec. Memory-hotplug failed and is not available for this VM \
                 configuration",
            ),
            ((json!(3), json!("2Gi")), failed(memory), "3 2Gi"),
        ] {
            let size = template(sockets.clone(), guest.clone(), json!({}));
            assert_eq!(outcome(&size, &vmi(&change)), expected, "{sockets} {guest} {change}");
        }
    }

    #[test]
    fn resources_grow_with_the_guest() {
        let present = json!({"requests": {"cpu": "1", "memory": "2Gi"}, "limits": {"cpu": "4", "memory": "3Gi"}});
        let vmi = vmi(&json!({"spec": {"domain": {"resources": present}}}));
        // Resources of the template; resources of the VMI after growth by two vCPUs and 1 GiB.
        for (resources, expected) in [
            (json!({}), json!({"requests": {"cpu": "1", "memory": "3Gi"}, "limits": {"cpu": "4", "memory": "3Gi"}})),
            (
                present.clone(),
                json!({"requests": {"cpu": "1200m", "memory": "3Gi"}, "limits": {"cpu": "4200m", "memory": "4Gi"}}),
            ),
        ] {
            let mut next = vmi.clone();
            let resize = decide(&ClusterConfig::default(), &template(json!(3), json!("3Gi"), resources), &vmi);
            assert_eq!((resize.put_cpu(&mut next, &now()), resize.put_memory(&mut next, &now())), (None, None));
            assert_eq!(serde_json::to_value(&next.spec.domain.resources).unwrap(), expected);
        }
        // The request that admission makes from a limit follows it.
        let defaulted = json!({"requests": {"cpu": "500m"}, "limits": {"cpu": "0.5"}});
        let vmi = self::vmi(&json!({"spec": {"domain": {"resources": defaulted}}}));
        let mut next = vmi.clone();
        let size = template(json!(3), Value::Null, json!({"limits": {"cpu": "500m"}}));
        assert_eq!(decide(&ClusterConfig::default(), &size, &vmi).put_cpu(&mut next, &now()), None);
        let expected = json!({"requests": {"cpu": "700m"}, "limits": {"cpu": "700m"}});
        assert_eq!(serde_json::to_value(&next.spec.domain.resources).unwrap(), expected);
        // A request below the guest's memory is raised to it, and the limit stays.
        let small = json!({"requests": {"memory": "1Gi"}, "limits": {"memory": "3Gi"}});
        let vmi = self::vmi(&json!({"spec": {"domain": {"resources": small}}}));
        let mut next = vmi.clone();
        let resize = decide(&ClusterConfig::default(), &template(json!(2), json!("3Gi"), small), &vmi);
        assert_eq!(resize.put_memory(&mut next, &now()), None);
        let expected = json!({"requests": {"memory": "3Gi"}, "limits": {"memory": "3Gi"}});
        assert_eq!(serde_json::to_value(&next.spec.domain.resources).unwrap(), expected);
    }
}
