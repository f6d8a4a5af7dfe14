//! Evictions of pods: what a drain of a node does to machines.
//!
//! A drain asks to evict each pod and asks again while it is answered 429. A machine that can move is marked here, and
//! moves; its pod is gone then. A machine that is only shut down goes like any pod.
//!
//! ```text
//! hotplug pod  -> its launcher runs a machine that exists?           no: evicted   yes: refused, it goes with the launcher
//! launcher pod -> its machine exists?                                no: evicted   yes: the machine's strategy, else the cluster's
//!                   None                                             evicted: the guest is shut down
//!                   LiveMigrateIfPossible, machine cannot move       evicted
//!                   LiveMigrate, machine cannot move                 refused
//!                   otherwise (External: it can)                     marked with its node, and refused until it is gone
//! other pods   -> evicted
//! ```
//!
//! A pod is a launcher, and of a machine, by its owner reference alone: labels and annotations are the user's to write.

use std::collections::BTreeMap;

use api::{
    EvictionStrategy, VirtualMachineInstance,
    constants::{self, annotation, condition, label},
    owner,
};
use k8s_openapi::api::core::v1::Pod;
use serde::Deserialize;
use serde_json::{Value, json};

use crate::{
    neighbours::{Needs, Outcome, Wanted},
    review::AdmissionReview,
    webhook::{Context, Stop},
};

/// HTTP status that makes drains ask again.
const TRY_AGAIN: u16 = 429;
const HOTPLUG_POD: &str = "hotplug-disk";
const MACHINES: [&str; 3] = [constants::GROUP, constants::VERSION, "virtualmachineinstances"];
/// Annotation of an eviction that says who asks, and who is meant.
const REQUESTED_BY: &str = "requested-by";
const DESCHEDULER: &str = "sigs.k8s.io/descheduler";
/// Value of the machine's annotation that says the same.
const SOURCE_DESCHEDULER: &str = "descheduler";

/// The webhook of the eviction subresource of pods.
pub(crate) fn validate(context: &Context<'_>) -> Result<AdmissionReview, Stop> {
    let request = context.request;
    let (Some(namespace), Some(name)) = (request.namespace.as_deref(), request.name.as_deref()) else {
        return Ok(context.allowed());
    };
    // Without a pod there is nothing to evict; the API server says so better than we could.
    let Outcome::Object(Some(pod)) = context.neighbours.outcome(&pod(namespace, name))? else {
        return Ok(context.allowed());
    };
    let Ok(pod) = Pod::deserialize(pod) else { return Ok(context.allowed()) };
    let app = pod.metadata.labels.as_ref().and_then(|labels| labels.get(label::APP)).map(String::as_str);
    if app == Some(HOTPLUG_POD) {
        return hotplug(context, namespace, &pod);
    }
    match machine_of(&pod) {
        Some(name) => launcher(context, namespace, &pod, name),
        None => Ok(context.allowed()),
    }
}

fn pod(namespace: &str, name: &str) -> Wanted {
    Wanted::get("", "v1", "pods", Some(namespace), name)
}

fn is_completed(pod: &Pod) -> bool {
    let phase = pod.status.as_ref().and_then(|status| status.phase.as_deref());
    matches!(phase, Some("Succeeded" | "Failed"))
}

/// Name of the machine of a launcher pod that has not ended.
fn machine_of(pod: &Pod) -> Option<&str> {
    let owner = owner::controller_of_kind::<VirtualMachineInstance>(&pod.metadata)?;
    (!is_completed(pod)).then_some(owner.name.as_str())
}

fn refused(message: impl Into<String>) -> Stop {
    Stop::refused(TRY_AGAIN, message)
}

/// A pod that holds a hotplugged volume at a node goes with the launcher that owns it.
fn hotplug(context: &Context<'_>, namespace: &str, holder: &Pod) -> Result<AdmissionReview, Stop> {
    let Some(owner) = owner::controller_of_kind::<Pod>(&holder.metadata) else { return Ok(context.allowed()) };
    let launcher = match context.neighbours.outcome(&pod(namespace, &owner.name))? {
        Outcome::Object(None) => return Ok(context.allowed()),
        outcome => {
            read::<Pod>(outcome).map_err(|error| refused(format!("failed getting owner for hotplug pod: {error}")))?
        }
    };
    let owns = owner::is_controlled_by(&holder.metadata, &launcher);
    let Some(name) = machine_of(&launcher).filter(|_| owns) else { return Ok(context.allowed()) };
    if owner_of(context, namespace, &launcher, name)?.is_none() {
        return Ok(context.allowed());
    }
    let holder = holder.metadata.name.as_deref().unwrap_or_default();
    Err(refused(format!(
        "cannot evict hotplug pod: {holder} associated with running vmi: {name} in namespace {namespace}"
    )))
}

/// The machine that a launcher pod names as its owner; `None` when it does not exist, or is another one of that name.
fn owner_of(
    context: &Context<'_>,
    namespace: &str,
    launcher: &Pod,
    name: &str,
) -> Result<Option<VirtualMachineInstance>, Stop> {
    let found: VirtualMachineInstance = match context.neighbours.outcome(&machine(namespace, name))? {
        Outcome::Object(None) => return Ok(None),
        outcome => read(outcome).map_err(|error| refused(format!("kubevirt failed getting the vmi: {error}")))?,
    };
    Ok(owner::is_controlled_by(&launcher.metadata, &found).then_some(found))
}

fn machine(namespace: &str, name: &str) -> Wanted {
    let [group, version, plural] = MACHINES;
    Wanted::get(group, version, plural, Some(namespace), name)
}

/// An object as its type; a sentence about it otherwise.
fn read<T: for<'de> Deserialize<'de>>(outcome: &Outcome) -> Result<T, String> {
    match outcome {
        Outcome::Object(Some(object)) => crate::read::stored(object).map_err(|error| error.to_string()),
        Outcome::Object(None) => Err("not found".to_owned()),
        Outcome::List(_) => Err("a list was read".to_owned()),
        Outcome::Failed { message, .. } => Err(message.clone()),
    }
}

fn launcher(context: &Context<'_>, namespace: &str, pod: &Pod, name: &str) -> Result<AdmissionReview, Stop> {
    // Nothing that does not exist holds up a drain.
    let Some(found) = owner_of(context, namespace, pod, name)? else { return Ok(context.allowed()) };
    let node = pod.spec.as_ref().and_then(|spec| spec.node_name.as_deref()).unwrap_or_default();
    match decide(&found, node, &context.config.eviction_strategy) {
        Verdict::Evict => Ok(context.allowed()),
        Verdict::Refuse(message) => Err(refused(message)),
        Verdict::Mark => {
            mark(context, namespace, name, node, &found)?;
            Err(refused(format!("Eviction triggered evacuation of VMI \"{namespace}/{name}\"")))
        }
    }
}

/// What becomes of a launcher pod.
#[derive(Clone, Debug, Eq, PartialEq)]
pub enum Verdict {
    /// It goes.
    Evict,
    /// It stays for now; a sentence why.
    Refuse(String),
    /// Its machine is told to leave the node.
    Mark,
}

/// What becomes of the launcher pod of a machine at `node`, when the cluster's strategy is `default`.
pub fn decide(machine: &VirtualMachineInstance, node: &str, default: &EvictionStrategy) -> Verdict {
    let name = machine.metadata.name.as_deref().unwrap_or_default();
    let namespace = machine.metadata.namespace.as_deref().unwrap_or_default();
    let empty = Default::default();
    let status = machine.status.as_ref().unwrap_or(&empty);
    let can_move = status
        .conditions
        .iter()
        .any(|condition| condition.type_ == condition::LIVE_MIGRATABLE && condition.status == "True");
    match machine.spec.eviction_strategy.as_ref().unwrap_or(default) {
        EvictionStrategy::None | EvictionStrategy::Other(_) => return Verdict::Evict,
        EvictionStrategy::LiveMigrateIfPossible if !can_move => return Verdict::Evict,
        EvictionStrategy::LiveMigrate if !can_move => {
            return Verdict::Refuse(format!(
                "VMI {name} is configured with an eviction strategy but is not live-migratable"
            ));
        }
        EvictionStrategy::LiveMigrate | EvictionStrategy::LiveMigrateIfPossible | EvictionStrategy::External => {}
    }
    let filled = |text: &Option<String>| text.clone().filter(|text| !text.is_empty());
    if filled(&status.evacuation_node_name).is_some() {
        let message = format!("Evacuation in progress: Eviction triggered evacuation of VMI \"{namespace}/{name}\"");
        return Verdict::Refuse(message);
    }
    if filled(&status.node_name).unwrap_or_default() != node {
        return Verdict::Refuse("Eviction request for target Pod".to_owned());
    }
    Verdict::Mark
}

/// What is read of an eviction.
#[derive(Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
struct Eviction {
    metadata: EvictionMetadata,
    delete_options: DeleteOptions,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct EvictionMetadata {
    annotations: Option<BTreeMap<String, String>>,
}

#[derive(Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
struct DeleteOptions {
    dry_run: Option<Vec<String>>,
}

/// Tells a machine to leave its node.
fn mark(
    context: &Context<'_>,
    namespace: &str,
    name: &str,
    node: &str,
    machine: &VirtualMachineInstance,
) -> Result<(), Stop> {
    let eviction = Eviction::deserialize(&context.request.object)
        .map_err(|error| refused(format!("failed to parse the eviction object: {error}")))?;
    let trial = eviction.delete_options.dry_run.unwrap_or_default().first().is_some_and(|word| word == "All");
    let dry_run = trial || context.request.dry_run == Some(true);
    let by_descheduler =
        eviction.metadata.annotations.is_some_and(|all| all.get(REQUESTED_BY).is_some_and(|by| by == DESCHEDULER));
    let patch = patch(machine, node, by_descheduler);
    let wanted = Wanted::patch(MACHINES, Some(namespace), name, &patch, dry_run);
    match context.neighbours.outcome(&wanted) {
        Ok(Outcome::Object(Some(_))) => Ok(()),
        Ok(outcome) => {
            let error = read::<Value>(outcome).err().unwrap_or_default();
            Err(refused(format!("kubevirt failed marking the vmi for eviction: {error}")))
        }
        Err(Needs::Failed(error)) => Err(refused(format!("kubevirt failed marking the vmi for eviction: {error}"))),
        Err(needs) => Err(needs.into()),
    }
}

fn patch(machine: &VirtualMachineInstance, node: &str, by_descheduler: bool) -> Value {
    let mut patch = vec![json!({"op": "add", "path": "/status/evacuationNodeName", "value": node})];
    if by_descheduler {
        patch.push(match &machine.metadata.annotations {
            Some(_) => {
                let key = annotation::EVICTION_SOURCE.replace('/', "~1");
                json!({"op": "add", "path": format!("/metadata/annotations/{key}"), "value": SOURCE_DESCHEDULER})
            }
            None => json!({
                "op": "add",
                "path": "/metadata/annotations",
                "value": {annotation::EVICTION_SOURCE: SOURCE_DESCHEDULER},
            }),
        });
    }
    Value::from(patch)
}

#[cfg(test)]
mod tests;
