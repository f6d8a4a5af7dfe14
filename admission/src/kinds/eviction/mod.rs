//! Evictions of pods: effect of a node drain on VMIs.
//!
//! A drain evicts each pod and retries while the response is 429. A VMI that can migrate is marked for evacuation and
//! migrates; its pod then ends. A VMI that is only shut down is evicted like any pod.
//!
//! ```text
//! hotplug pod  -> does its launcher run an existing VMI?   no: evicted   yes: refused, it ends with the launcher
//! launcher pod -> does its VMI exist?                      no: evicted   yes: the VMI's strategy, or the cluster's
//!                   None                                   evicted: the guest is shut down
//!                   LiveMigrateIfPossible, not migratable  evicted
//!                   LiveMigrate, not migratable            refused
//!                   otherwise (External: migratable)       marked with its node, and refused until it has left
//! other pods   -> evicted
//! ```
//!
//! A pod or VMI that cannot be read is refused: the drain repeats its request. While a VMI migrates it has two pods, and only
//! that on its node leads to a mark.
//!
//! Only the owner reference makes a pod the launcher of a VMI: users can write labels and annotations.

use std::collections::BTreeMap;

use api::{
    EvictionStrategy, VirtualMachineInstance,
    constants::{self, annotation, condition, label},
    owner,
};
use json_patch::{Patch, jsonptr::PointerBuf};
use k8s_openapi::api::core::v1::Pod;
use serde::Deserialize;
use serde_json::{Value, json};

use crate::context::{
    Context, Decision, Effect, Failure, Interrupt, LookupResult, ObjectQuery, Outcome, decode, patch,
};

/// HTTP status after which drains retry.
const TOO_MANY_REQUESTS: u16 = 429;
const HOTPLUG_POD: &str = "hotplug-disk";
const VMIS: &str = "virtualmachineinstances";
/// Annotation of an eviction with its source, and its value for the descheduler.
const REQUESTED_BY: &str = "requested-by";
const DESCHEDULER: &str = "sigs.k8s.io/descheduler";
/// Value of the VMI's annotation for the descheduler.
const SOURCE_DESCHEDULER: &str = "descheduler";

/// Serves `/pod-eviction-validate`.
pub(crate) fn validate(context: &Context<'_>) -> Result<Decision, Interrupt> {
    let request = context.request;
    let (Some(namespace), Some(name)) = (request.namespace.as_deref(), request.name.as_deref()) else {
        return Ok(context.allowed());
    };
    let pod = match context.lookups.result(&pod_query(namespace, name))? {
        // The API server has the better message for a pod that does not exist.
        LookupResult::Object(None) => return Ok(context.allowed()),
        result => decode_result::<Pod>(result)
            .map_err(|error| refused(format!("kubevirt failed getting the pod: {error}")))?,
    };
    let app = pod.metadata.labels.as_ref().and_then(|labels| labels.get(label::APP)).map(String::as_str);
    if app == Some(HOTPLUG_POD) {
        return validate_hotplug_pod(context, namespace, &pod);
    }
    match vmi_name(&pod) {
        Some(name) => validate_launcher(context, namespace, &pod, name),
        None => Ok(context.allowed()),
    }
}

fn pod_query(namespace: &str, name: &str) -> ObjectQuery {
    ObjectQuery::get("", "v1", "pods", Some(namespace), name)
}

fn is_completed(pod: &Pod) -> bool {
    let phase = pod.status.as_ref().and_then(|status| status.phase.as_deref());
    matches!(phase, Some("Succeeded" | "Failed"))
}

/// Returns the name of the VMI of a launcher pod that has not ended.
fn vmi_name(pod: &Pod) -> Option<&str> {
    let owner = owner::controller_of_kind::<VirtualMachineInstance>(&pod.metadata)?;
    (!is_completed(pod)).then_some(owner.name.as_str())
}

fn refused(message: impl Into<String>) -> Interrupt {
    Interrupt::failed(TOO_MANY_REQUESTS, message)
}

/// Refuses to evict the pod of a hotplugged volume while its launcher runs a VMI.
fn validate_hotplug_pod(context: &Context<'_>, namespace: &str, pod: &Pod) -> Result<Decision, Interrupt> {
    let Some(owner) = owner::controller_of_kind::<Pod>(&pod.metadata) else { return Ok(context.allowed()) };
    let launcher = match context.lookups.result(&pod_query(namespace, &owner.name))? {
        LookupResult::Object(None) => return Ok(context.allowed()),
        result => decode_result::<Pod>(result)
            .map_err(|error| refused(format!("failed getting owner for hotplug pod: {error}")))?,
    };
    let owns = owner::is_controlled_by(&pod.metadata, &launcher);
    let Some(name) = vmi_name(&launcher).filter(|_| owns) else { return Ok(context.allowed()) };
    if owning_vmi(context, namespace, &launcher, name)?.is_none() {
        return Ok(context.allowed());
    }
    let pod = pod.metadata.name.as_deref().unwrap_or_default();
    Err(refused(format!(
        "cannot evict hotplug pod: {pod} associated with running vmi: {name} in namespace {namespace}"
    )))
}

/// Returns the VMI that owns a launcher pod; `None` if it does not exist or has another UID.
fn owning_vmi(
    context: &Context<'_>,
    namespace: &str,
    launcher: &Pod,
    name: &str,
) -> Result<Option<VirtualMachineInstance>, Interrupt> {
    let query = ObjectQuery::get(constants::GROUP, constants::VERSION, VMIS, Some(namespace), name);
    let vmi: VirtualMachineInstance = match context.lookups.result(&query)? {
        LookupResult::Object(None) => return Ok(None),
        result => {
            decode_result(result).map_err(|error| refused(format!("kubevirt failed getting the vmi: {error}")))?
        }
    };
    Ok(owner::is_controlled_by(&launcher.metadata, &vmi).then_some(vmi))
}

/// An object that could not be read.
#[derive(Debug, thiserror::Error)]
enum ReadError {
    #[error("not found")]
    NotFound,
    #[error("a list was read")]
    List,
    #[error("{0}")]
    ApiServer(String),
    #[error(transparent)]
    Decode(#[from] serde_json::Error),
}

fn decode_result<T: for<'de> Deserialize<'de>>(result: &LookupResult) -> Result<T, ReadError> {
    match result {
        LookupResult::Object(Some(object)) => Ok(decode::stored(object)?),
        LookupResult::Object(None) => Err(ReadError::NotFound),
        LookupResult::List(_) => Err(ReadError::List),
        LookupResult::Failed { message, .. } => Err(ReadError::ApiServer(message.clone())),
    }
}

fn validate_launcher(context: &Context<'_>, namespace: &str, pod: &Pod, name: &str) -> Result<Decision, Interrupt> {
    // A VMI that does not exist must not block a drain.
    let Some(vmi) = owning_vmi(context, namespace, pod, name)? else { return Ok(context.allowed()) };
    let node = pod.spec.as_ref().and_then(|spec| spec.node_name.as_deref()).unwrap_or_default();
    match decide(&vmi, node, &context.config.eviction_strategy) {
        Verdict::Evict => Ok(context.allowed()),
        Verdict::Refuse(message) => Err(refused(message)),
        Verdict::Mark => {
            let effect = mark(context, namespace, name, node, &vmi)?;
            let message = format!("Eviction triggered evacuation of VMI \"{namespace}/{name}\"");
            let outcome = Outcome::Failed(Failure::new(TOO_MANY_REQUESTS, message));
            Ok(Decision { outcome, effects: vec![effect] })
        }
    }
}

/// Decision about a launcher pod.
#[derive(Clone, Debug, Eq, PartialEq)]
enum Verdict {
    /// The pod is evicted.
    Evict,
    /// The pod stays for now; a message why.
    Refuse(String),
    /// The pod stays, and its VMI is marked for evacuation.
    Mark,
}

/// Decides about the launcher pod of a VMI at `node`; `default` is the cluster's strategy.
fn decide(vmi: &VirtualMachineInstance, node: &str, default: &EvictionStrategy) -> Verdict {
    let name = vmi.metadata.name.as_deref().unwrap_or_default();
    let namespace = vmi.metadata.namespace.as_deref().unwrap_or_default();
    let empty = Default::default();
    let status = vmi.status.as_ref().unwrap_or(&empty);
    let is_migratable = vmi.has_true(condition::LIVE_MIGRATABLE);
    match vmi.spec.eviction_strategy.as_ref().unwrap_or(default) {
        EvictionStrategy::None | EvictionStrategy::Other(_) => return Verdict::Evict,
        EvictionStrategy::LiveMigrateIfPossible if !is_migratable => return Verdict::Evict,
        EvictionStrategy::LiveMigrate if !is_migratable => {
            return Verdict::Refuse(format!(
                "VMI {name} is configured with an eviction strategy but is not live-migratable"
            ));
        }
        EvictionStrategy::LiveMigrate | EvictionStrategy::LiveMigrateIfPossible | EvictionStrategy::External => {}
    }
    // A mark of another node is of the past: the VMI has left that node.
    let marked = status.evacuation_node_name.as_deref().is_some_and(|marked| !marked.is_empty());
    if marked && status.evacuation_node_name == status.node_name {
        let message = format!("Evacuation in progress: Eviction triggered evacuation of VMI \"{namespace}/{name}\"");
        return Verdict::Refuse(message);
    }
    if node.is_empty() || status.node_name.as_deref() != Some(node) {
        return Verdict::Refuse("Eviction request for target Pod".to_owned());
    }
    Verdict::Mark
}

/// The fields of an eviction that are used.
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

/// Returns the write that marks a VMI for evacuation.
fn mark(
    context: &Context<'_>,
    namespace: &str,
    name: &str,
    node: &str,
    vmi: &VirtualMachineInstance,
) -> Result<Effect, Interrupt> {
    let eviction = Eviction::deserialize(&context.request.object)
        .map_err(|error| refused(format!("failed to parse the eviction object: {error}")))?;
    let dry_run = eviction.delete_options.dry_run.unwrap_or_default().first().is_some_and(|value| value == "All");
    let by_descheduler =
        eviction.metadata.annotations.is_some_and(|all| all.get(REQUESTED_BY).is_some_and(|by| by == DESCHEDULER));
    Ok(Effect {
        group: constants::GROUP,
        version: constants::VERSION,
        plural: VMIS,
        namespace: namespace.to_owned(),
        name: name.to_owned(),
        patch: mark_patch(vmi, node, by_descheduler),
        dry_run: dry_run || context.request.dry_run == Some(true),
        on_failure: Some(Failure::new(TOO_MANY_REQUESTS, "kubevirt failed marking the vmi for eviction")),
    })
}

fn mark_patch(vmi: &VirtualMachineInstance, node: &str, by_descheduler: bool) -> Patch {
    // A VMI that has moved since it was read needs no mark.
    let mut operations = vec![
        patch::test(PointerBuf::from_tokens(["status", "nodeName"]), Value::from(node)),
        patch::add(PointerBuf::from_tokens(["status", "evacuationNodeName"]), Value::from(node)),
    ];
    if by_descheduler {
        operations.push(match &vmi.metadata.annotations {
            Some(_) => patch::add(
                PointerBuf::from_tokens(["metadata", "annotations", annotation::EVICTION_SOURCE]),
                Value::from(SOURCE_DESCHEDULER),
            ),
            None => patch::add(
                PointerBuf::from_tokens(["metadata", "annotations"]),
                json!({annotation::EVICTION_SOURCE: SOURCE_DESCHEDULER}),
            ),
        });
    }
    Patch(operations)
}

#[cfg(test)]
mod tests;
