//! Nodes with a silent virt-handler: they become unschedulable for VMIs, and VMIs without a pod there fail. Also the labels
//! of nodes about their TSC, see [`crate::tsc`]. Start with [`decide`]; `controller.rs` holds the watches.
//!
//! A VMI whose pod is alive according to the API server stays as it is: it may be running. While a migration moves the guest, the
//! same holds for the pod on its target: the guest may run there already, or may be given up by the virt-handler of that node
//! (docs/design/migration.md).

mod controller;
#[cfg(test)]
mod tests;

use std::{collections::BTreeSet, sync::Arc, time::Duration};

use api::{
    VirtualMachineInstance, VmiPhase,
    constants::{event, label},
};
use serde_json::json;

pub(crate) use self::controller::Nodes;
use crate::{
    cache::Key,
    resources::{VmiWithPods, nodes::CachedNode, pods::CachedPod, workloads::CachedWorkload},
    runtime::{Decision, Effect, Event, Kind},
    tsc,
};

/// Silence after which virt-handler counts as lost.
const HEARTBEAT_TIMEOUT: Duration = Duration::from_secs(300);
/// Time between decisions about a silent node.
const RECHECK: Duration = Duration::from_secs(60);

/// Everything that a decision about a node depends on.
pub(crate) struct Observed {
    /// Name of the node.
    pub key: Key,
    /// The node, if there is one.
    pub node: Option<Arc<CachedNode>>,
    /// VMIs on the node that have not ended. Not needed unless the node is silent.
    pub vmis: Vec<VmiWithPods>,
    /// virt-handler has a pod on the node.
    pub has_handler: bool,
    /// The DaemonSet of virt-handler.
    pub daemon_set: Option<Arc<CachedWorkload>>,
    /// TSC frequencies that VMIs need.
    pub frequencies: BTreeSet<u64>,
    /// Time since the last heartbeat, if the node has one.
    pub silence: Option<Duration>,
}

/// Decides what to do about a node.
pub(crate) fn decide(observed: &Observed) -> Result<Decision, serde_json::Error> {
    let mut decision = Decision::settled();
    decision.effects.extend(observed.node.as_deref().and_then(|node| tsc::relabel(node, &observed.frequencies)));
    if let Some(left) = responsive_for(observed.node.as_deref(), observed.silence) {
        // Nodes that never had a virt-handler need no second decision.
        if let Some(left) = left {
            decision.wake(left);
        }
        return Ok(decision);
    }
    if let Some(node) = observed.node.as_deref() {
        mark_unschedulable(node, &mut decision);
    }
    let affected: Vec<&VmiWithPods> = observed
        .vmis
        .iter()
        .filter(|affected| matches!(affected.vmi.phase(), VmiPhase::Running | VmiPhase::Scheduled))
        .collect();
    if affected.is_empty() {
        if observed.node.is_some() {
            decision.wake(RECHECK);
        }
        return Ok(decision);
    }
    decision.wake(RECHECK);
    if let Some(node) = observed.node.as_deref()
        && !observed.has_handler
        && observed.daemon_set.as_deref().is_some_and(|set| set.wanted == set.scheduled || set.wanted == set.ready)
    {
        decision.push(Effect::Event(Event::warning(
            Kind::Node.reference(&node.metadata),
            event::NODE_UNRESPONSIVE,
            "virt-handler is not present, there are orphaned vmis on this node. \
             Run virt-handler on this node to migrate or remove them.",
        )));
    }
    for affected in affected.into_iter().filter(|affected| !may_run(observed, affected)) {
        fail_vmi(observed, &affected.vmi, &mut decision)?;
    }
    Ok(decision)
}

/// Returns true if virt-handler on the node has been silent for too long, or if there is no node.
fn is_silent(node: Option<&CachedNode>, silence: Option<Duration>) -> bool {
    responsive_for(node, silence).is_none()
}

/// Returns `None` for a node that was silent for too long, else the time until then, if it has a heartbeat.
fn responsive_for(node: Option<&CachedNode>, silence: Option<Duration>) -> Option<Option<Duration>> {
    node?;
    let Some(silence) = silence else { return Some(None) };
    let left = HEARTBEAT_TIMEOUT.checked_sub(silence).filter(|left| !left.is_zero())?;
    Some(Some(left))
}

fn mark_unschedulable(node: &CachedNode, decision: &mut Decision) {
    let schedulable = node.metadata.labels.as_ref().and_then(|labels| labels.get(label::SCHEDULABLE));
    if schedulable.is_none_or(|value| value != "true") {
        return;
    }
    // A virt-handler that has written since is not silent: then this write must fail.
    let mark =
        Effect::merge(Kind::Node, &node.metadata, json!({"metadata": {"labels": {label::SCHEDULABLE: "false"}}}));
    decision.push(mark.on_success(Event::normal(
        Kind::Node.reference(&node.metadata),
        event::NODE_UNRESPONSIVE,
        "virt-handler is not responsive, marking node as unresponsive",
    )));
}

fn is_alive(pod: &CachedPod) -> bool {
    !matches!(pod.phase.as_str(), "Succeeded" | "Failed") && !pod.all_ended
}

/// Returns true if the guest may run in one of the pods. The pod of a migration that has ended runs nothing.
fn may_run(observed: &Observed, affected: &VmiWithPods) -> bool {
    let is_moving = affected.vmi.is_handed_off();
    affected.pods.iter().filter(|pod| is_alive(pod)).any(|pod| {
        let is_here = pod.node_name.as_ref().is_none_or(|node| *node == observed.key.name);
        is_here || is_moving
    })
}

fn fail_vmi(
    observed: &Observed,
    instance: &VirtualMachineInstance,
    decision: &mut Decision,
) -> Result<(), serde_json::Error> {
    let mut wanted = instance.clone();
    let status = wanted.status.get_or_insert_default();
    status.phase = Some(VmiPhase::Failed);
    status.reason = Some(event::NODE_UNRESPONSIVE.to_owned());
    if let Some(change) = Effect::change(Kind::Instance, instance, &wanted, None)? {
        let message = format!("virt-handler on node {} is not responsive, marking VMI as failed", observed.key.name);
        decision.push(change.on_success(Event::normal(
            Kind::Instance.reference(&instance.metadata),
            event::NODE_UNRESPONSIVE,
            message,
        )));
    }
    Ok(())
}
