//! Nodes whose agent is silent: they take no new machines, and machines without a pod there are given up. And what nodes
//! offer of what machines need, see [`crate::tsc`].
//!
//! A machine whose pod still looks alive to the API server is left alone: it may well be running.

use std::{collections::BTreeSet, sync::Arc, time::Duration};

use api::{
    VirtualMachineInstance, VmiPhase,
    constants::{annotation, event, label},
};
use jiff::Timestamp;
use serde_json::json;

use crate::{
    runtime::{Decision, Effect, Key, Kind, Note, effect::Notes},
    tsc,
    views::{NodeView, PodView, WorkloadView},
};

/// Silence after which an agent is taken for lost.
const HEARTBEAT_TIMEOUT: jiff::SignedDuration = jiff::SignedDuration::from_mins(5);
/// Time between looks at a silent node.
const RECHECK: Duration = Duration::from_secs(60);

/// A machine with its pods.
pub struct Machine {
    /// The machine.
    pub instance: Arc<VirtualMachineInstance>,
    /// Pods it controls.
    pub pods: Vec<Arc<PodView>>,
}

/// Everything a decision about a node rests on.
pub struct Observed<'a> {
    /// Name of the node.
    pub key: &'a Key,
    /// The node, if there is one.
    pub node: Option<&'a NodeView>,
    /// Machines whose status names the node.
    pub machines: &'a [Machine],
    /// The agent has a pod on the node.
    pub has_handler: bool,
    /// The agent's DaemonSet.
    pub daemon_set: Option<&'a WorkloadView>,
    /// Frequencies of time stamp counters that machines need.
    pub frequencies: &'a BTreeSet<u64>,
    /// Now.
    pub now: Timestamp,
}

/// Decides what to do about a node.
pub fn decide(observed: &Observed<'_>) -> Result<Decision, serde_json::Error> {
    let mut decision = Decision::settled();
    decision.effects.extend(observed.node.and_then(|node| tsc::relabel(node, observed.frequencies)));
    if let Some(left) = responsive_for(observed.node, observed.now) {
        // Nodes that never had an agent need no second look.
        if let Some(left) = left {
            decision.wake(left);
        }
        return Ok(decision);
    }
    if let Some(node) = observed.node {
        mark_unschedulable(node, &mut decision);
    }
    let affected: Vec<&Machine> = observed
        .machines
        .iter()
        .filter(|machine| matches!(machine.instance.phase(), VmiPhase::Running | VmiPhase::Scheduled))
        .collect();
    if affected.is_empty() {
        if observed.node.is_some() {
            decision.wake(RECHECK);
        }
        return Ok(decision);
    }
    decision.wake(RECHECK);
    if let Some(node) = observed.node
        && !observed.has_handler
        && observed.daemon_set.is_some_and(|set| set.wanted == set.scheduled || set.wanted == set.ready)
    {
        decision.push(Effect::Event(Note::warning(
            Kind::Node.reference(&node.metadata),
            event::NODE_UNRESPONSIVE,
            "virt-handler is not present, there are orphaned vmis on this node. \
             Run virt-handler on this node to migrate or remove them.",
        )));
    }
    for machine in affected.into_iter().filter(|machine| !machine.pods.iter().any(|pod| is_alive(pod))) {
        give_up(observed, &machine.instance, &mut decision)?;
    }
    Ok(decision)
}

/// `None`: silent for too long. Else the time until that would be so, if it can be told.
fn responsive_for(node: Option<&NodeView>, now: Timestamp) -> Option<Option<Duration>> {
    let node = node?;
    let Some(heartbeat) = node.metadata.annotations.as_ref().and_then(|all| all.get(annotation::HEARTBEAT)) else {
        return Some(None);
    };
    let Ok(heartbeat) = heartbeat.parse::<Timestamp>() else {
        tracing::warn!(%heartbeat, "heartbeat of the node agent is not a time");
        return Some(None);
    };
    let silence = now.duration_since(heartbeat);
    if silence >= HEARTBEAT_TIMEOUT {
        return None;
    }
    let left = HEARTBEAT_TIMEOUT.checked_sub(silence).unwrap_or(HEARTBEAT_TIMEOUT);
    Some(Some(Duration::try_from(left).unwrap_or(RECHECK)))
}

fn mark_unschedulable(node: &NodeView, decision: &mut Decision) {
    let schedulable = node.metadata.labels.as_ref().and_then(|labels| labels.get(label::SCHEDULABLE));
    if schedulable.is_none_or(|value| value != "true") {
        return;
    }
    decision.push(Effect::Patch {
        kind: Kind::Node,
        namespace: None,
        name: node.metadata.name.clone().unwrap_or_default(),
        // The agent that wrote meanwhile is not silent: then this write must fail.
        resource_version: node.metadata.resource_version.clone(),
        subresource: None,
        strategic: false,
        patch: json!({"metadata": {"labels": {label::SCHEDULABLE: "false"}}}),
        notes: Notes {
            success: Some(Note::normal(
                Kind::Node.reference(&node.metadata),
                event::NODE_UNRESPONSIVE,
                "virt-handler is not responsive, marking node as unresponsive",
            )),
            ..Notes::default()
        },
    });
}

fn is_alive(pod: &PodView) -> bool {
    !matches!(pod.phase.as_str(), "Succeeded" | "Failed") && !pod.all_ended
}

fn give_up(
    observed: &Observed<'_>,
    instance: &VirtualMachineInstance,
    decision: &mut Decision,
) -> Result<(), serde_json::Error> {
    let mut wanted = instance.clone();
    let status = wanted.status.get_or_insert_default();
    status.phase = Some(VmiPhase::Failed);
    status.reason = Some(event::NODE_UNRESPONSIVE.to_owned());
    if let Some(change) = Effect::change(Kind::Instance, instance, &wanted, None)? {
        let message = format!("virt-handler on node {} is not responsive, marking VMI as failed", observed.key.name);
        decision.push(change.on_success(Note::normal(
            Kind::Instance.reference(&instance.metadata),
            event::NODE_UNRESPONSIVE,
            message,
        )));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use serde_json::Value;

    use super::*;

    fn now() -> Timestamp {
        "2030-01-01T00:10:00Z".parse().unwrap()
    }

    fn node(heartbeat: Option<&str>) -> NodeView {
        let mut metadata = json!({"name": "n", "resourceVersion": "7", "labels": {"kubevirt.io/schedulable": "true"}});
        if let Some(heartbeat) = heartbeat {
            metadata["annotations"] = json!({"kubevirt.io/heartbeat": heartbeat});
        }
        NodeView { metadata: serde_json::from_value(metadata).unwrap() }
    }

    fn machine(phase: &str, pod: Option<PodView>) -> Machine {
        let instance = json!({
            "apiVersion": "kubevirt.io/v1", "kind": "VirtualMachineInstance",
            "metadata": {"name": "m", "namespace": "d", "uid": "u", "resourceVersion": "3"},
            "spec": {"domain": {"devices": {}}},
            "status": {"phase": phase, "nodeName": "n"},
        });
        Machine {
            instance: Arc::new(serde_json::from_value(instance).unwrap()),
            pods: pod.into_iter().map(Arc::new).collect(),
        }
    }

    fn decided(node: Option<&NodeView>, machines: &[Machine]) -> Decision {
        let key = Key::new("", "n");
        let set = WorkloadView { wanted: 1, ready: 1, ..WorkloadView::default() };
        let frequencies = BTreeSet::new();
        let daemon_set = Some(&set);
        let observed = Observed {
            key: &key,
            node,
            machines,
            has_handler: true,
            daemon_set,
            frequencies: &frequencies,
            now: now(),
        };
        decide(&observed).unwrap()
    }

    fn patches(decision: &Decision) -> Vec<Value> {
        let patch = |effect: &Effect| match effect {
            Effect::Patch { patch, .. } => Some(patch.clone()),
            _ => None,
        };
        decision.effects.iter().filter_map(patch).collect()
    }

    #[test]
    fn fresh_heartbeat_changes_nothing_and_is_looked_at_when_it_would_be_too_old() {
        let decision = decided(Some(&node(Some("2030-01-01T00:08:00Z"))), &[machine("Running", None)]);
        assert!(decision.effects.is_empty());
        assert_eq!(decision.wake_after, Some(Duration::from_secs(180)));
    }

    #[test]
    fn node_without_agent_is_left_alone() {
        assert_eq!(decided(Some(&node(None)), &[]), Decision::settled());
    }

    #[test]
    fn silent_node_is_marked_once() {
        let mut silent = node(Some("2030-01-01T00:05:00Z"));
        let decision = decided(Some(&silent), &[]);
        assert_eq!(patches(&decision), [json!({"metadata": {"labels": {"kubevirt.io/schedulable": "false"}}})]);
        silent.metadata.labels = None;
        assert!(decided(Some(&silent), &[]).effects.is_empty());
    }

    #[test]
    fn machine_without_live_pod_on_a_silent_node_fails_and_one_with_a_live_pod_stays() {
        let silent = node(Some("2030-01-01T00:00:00Z"));
        let failed = json!({"status": {"phase": "Failed", "reason": "NodeUnresponsive"}});
        let decision = decided(Some(&silent), &[machine("Running", None)]);
        assert!(patches(&decision).contains(&failed));
        let alive = PodView { phase: "Running".to_owned(), ..PodView::default() };
        let decision = decided(Some(&silent), &[machine("Running", Some(alive))]);
        assert!(!patches(&decision).contains(&failed));
        let decision = decided(Some(&silent), &[machine("Scheduling", None)]);
        assert!(!patches(&decision).contains(&failed));
    }

    #[test]
    fn node_without_agent_is_told_of_once_the_agents_have_settled() {
        let silent = node(Some("2030-01-01T00:00:00Z"));
        let alive = PodView { phase: "Running".to_owned(), ..PodView::default() };
        let machines = [machine("Running", Some(alive))];
        // pods of agents that have a node, that are ready, of two wanted; whether it is told
        for (scheduled, ready, told) in [(2, 1, true), (1, 2, true), (1, 1, false)] {
            let set = WorkloadView { wanted: 2, scheduled, ready, ..WorkloadView::default() };
            let observed = Observed {
                key: &Key::new("", "n"),
                node: Some(&silent),
                machines: &machines,
                has_handler: false,
                daemon_set: Some(&set),
                frequencies: &BTreeSet::new(),
                now: now(),
            };
            let effects = decide(&observed).unwrap().effects;
            let tells = |effect: &Effect| matches!(effect, Effect::Event(note) if note.message.contains("orphaned"));
            assert_eq!(effects.iter().any(tells), told, "{scheduled} {ready}");
        }
    }

    #[test]
    fn machine_on_a_node_that_is_gone_fails_when_its_pod_is_gone_too() {
        let decision = decided(None, &[machine("Running", None)]);
        assert_eq!(patches(&decision), [json!({"status": {"phase": "Failed", "reason": "NodeUnresponsive"}})]);
    }
}
