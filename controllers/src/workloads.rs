//! Machines whose launcher is of a former version, as after an upgrade. Where the installation's strategy says so they are
//! evicted, some at a time; the VM of one that is to run starts it anew, with the present launcher.
//!
//! Method `LiveMigrate` moves machines that can be moved. None can yet, so it does nothing.

use std::{
    sync::{Mutex, PoisonError},
    time::Duration,
};

use api::{KubeVirt, VirtualMachineInstance, VmiPhase, constants::event, duration};
use jiff::Timestamp;
use sha2::{Digest, Sha256};

use crate::{
    node::Machine,
    runtime::{Decision, Effect, Kind, Note, effect::Notes},
    views::PodView,
};

/// The method that is carried out.
const EVICT: &str = "Evict";
/// Phase of an installation that is not being changed.
const DEPLOYED: &str = "Deployed";
/// Machines evicted at once, unless the strategy says otherwise.
const USUAL_SIZE: usize = 10;
/// Time between two batches, unless the strategy says otherwise.
const USUAL_INTERVAL: Duration = Duration::from_secs(60);
/// Least time between two batches.
const SHORTEST_INTERVAL: Duration = Duration::from_secs(1);
/// Longest time until the next look.
const LONGEST_WAIT: Duration = Duration::from_secs(24 * 3600);

/// Everything a decision rests on.
pub struct Observed<'a> {
    /// The installation.
    pub kubevirt: &'a KubeVirt,
    /// Machines whose launcher is of a former version.
    pub outdated: &'a [Machine],
    /// Now.
    pub now: Timestamp,
}

/// When machines were evicted last. A new leader starts with a batch.
#[derive(Debug, Default)]
pub struct Batches(Mutex<Option<Timestamp>>);

impl Batches {
    /// Decides which machines are evicted now.
    pub fn decide(&self, observed: &Observed<'_>) -> Decision {
        let mut last = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let decision = decide(observed, *last);
        if !decision.effects.is_empty() {
            *last = Some(observed.now);
        }
        decision
    }
}

fn decide(observed: &Observed<'_>, last: Option<Timestamp>) -> Decision {
    let mut decision = Decision::settled();
    let strategy = &observed.kubevirt.spec.workload_update_strategy;
    let evicts = strategy.workload_update_methods.iter().any(|method| method == EVICT);
    if !evicts || observed.outdated.is_empty() || !is_deployed(observed.kubevirt) {
        return decision;
    }
    let interval = strategy.batch_eviction_interval.as_deref().and_then(|text| duration::parse(text).ok());
    let interval = interval.unwrap_or(USUAL_INTERVAL).max(SHORTEST_INTERVAL);
    let waited = last.map(|last| Duration::try_from(observed.now.duration_since(last)).unwrap_or_default());
    let left = waited.and_then(|waited| interval.checked_sub(waited)).filter(|left| !left.is_zero());
    decision.wake(left.unwrap_or(interval).min(LONGEST_WAIT));
    if left.is_some() {
        return decision;
    }
    let size = strategy.batch_eviction_size.map_or(USUAL_SIZE, |size| usize::try_from(size).unwrap_or(0));
    let mut candidates: Vec<(&VirtualMachineInstance, &PodView)> =
        observed.outdated.iter().filter_map(candidate).collect();
    // In another order each time, so that those that may not be evicted hold up no other.
    candidates.sort_by_cached_key(|(instance, _)| rank(instance, observed.now));
    for (instance, pod) in candidates.into_iter().take(size) {
        decision.push(evict(instance, pod));
    }
    decision
}

/// True when all processes are of the version that the machines are to get.
fn is_deployed(kubevirt: &KubeVirt) -> bool {
    kubevirt.status.as_ref().is_some_and(|status| {
        status.phase.as_deref() == Some(DEPLOYED) && status.observed_deployment_id == status.target_deployment_id
    })
}

/// A machine that runs, with its pod, unless it is on its way out or was asked to leave already.
fn candidate(machine: &Machine) -> Option<(&VirtualMachineInstance, &PodView)> {
    let instance: &VirtualMachineInstance = &machine.instance;
    let leaves = instance.status.as_ref().and_then(|status| status.evacuation_node_name.as_deref());
    if *instance.phase() != VmiPhase::Running || instance.is_deleting() || leaves.is_some_and(|node| !node.is_empty()) {
        return None;
    }
    let pod: &PodView = machine.pods.iter().find(|pod| !pod.is_going_down())?;
    Some((instance, pod))
}

fn rank(instance: &VirtualMachineInstance, now: Timestamp) -> Vec<u8> {
    let uid = instance.metadata.uid.as_deref().unwrap_or_default();
    Sha256::digest(format!("{uid} {}", now.as_second())).to_vec()
}

fn evict(instance: &VirtualMachineInstance, pod: &PodView) -> Effect {
    let regarding = || Kind::Instance.reference(&instance.metadata);
    // The odd end is how the reference prints an error that there is not.
    let evicted = "Initiated eviction of VMI as part of automated workload update: <nil>";
    let failed = "Error deleting VMI during automated workload update: {error}";
    let effect = Effect::Evict {
        namespace: pod.metadata.namespace.clone(),
        name: pod.metadata.name.clone().unwrap_or_default(),
        uid: pod.metadata.uid.clone(),
        notes: Notes::default(),
    };
    effect.on_success(Note::normal(regarding(), event::SUCCESSFUL_EVICT, evicted)).on_failure(Note::warning(
        regarding(),
        event::FAILED_EVICT,
        failed,
    ))
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use serde_json::{Value, json};

    use super::*;

    fn now() -> Timestamp {
        "2030-01-01T00:10:00Z".parse().unwrap()
    }

    fn kubevirt(strategy: &Value, status: &Value) -> KubeVirt {
        serde_json::from_value(json!({
            "apiVersion": "kubevirt.io/v1", "kind": "KubeVirt",
            "metadata": {"name": "kubevirt", "namespace": "kubevirt"},
            "spec": {"workloadUpdateStrategy": strategy}, "status": status,
        }))
        .unwrap()
    }

    fn machine(number: usize, status: &Value, deleted: Option<&str>) -> Machine {
        let pod = PodView {
            metadata: serde_json::from_value(json!({
                "name": format!("virt-launcher-m{number}-x"), "namespace": "d", "uid": format!("p{number}"),
                "deletionTimestamp": deleted,
            }))
            .unwrap(),
            phase: "Running".to_owned(),
            ..PodView::default()
        };
        let instance = json!({
            "apiVersion": "kubevirt.io/v1", "kind": "VirtualMachineInstance",
            "metadata": {"name": format!("m{number}"), "namespace": "d", "uid": format!("u{number}")},
            "spec": {"domain": {"devices": {}}}, "status": status,
        });
        Machine { instance: Arc::new(serde_json::from_value(instance).unwrap()), pods: vec![Arc::new(pod)] }
    }

    fn evicted(decision: &Decision) -> Vec<String> {
        let mut names: Vec<String> = decision
            .effects
            .iter()
            .map(|effect| match effect {
                Effect::Evict { name, .. } => name.clone(),
                other => panic!("{other:?}"),
            })
            .collect();
        names.sort();
        names
    }

    #[test]
    fn machines_are_evicted_in_batches_where_the_strategy_says_so() {
        let running: Vec<Machine> = (0..12).map(|number| machine(number, &json!({"phase": "Running"}), None)).collect();
        let deployed = json!({"phase": "Deployed", "observedDeploymentID": "a", "targetDeploymentID": "a"});
        let changing = json!({"phase": "Deployed", "observedDeploymentID": "a", "targetDeploymentID": "b"});
        let evict = json!({"workloadUpdateMethods": ["Evict"]});
        let few = json!({"workloadUpdateMethods": ["Evict"], "batchEvictionSize": 3, "batchEvictionInterval": "5m0s"});
        let none = json!({"workloadUpdateMethods": ["Evict"], "batchEvictionSize": 0});
        let seconds = |seconds: u64| Some(Duration::from_secs(seconds));
        // strategy, status, time of the last batch, machines evicted, seconds until the next look
        for (strategy, status, last, count, wake) in [
            (&json!({}), &deployed, None, 0, None),
            (&evict, &deployed, None, 10, seconds(60)),
            (&evict, &deployed, Some("2030-01-01T00:09:15Z"), 0, seconds(15)),
            (&evict, &deployed, Some("2030-01-01T00:09:00Z"), 10, seconds(60)),
            (&evict, &changing, None, 0, None),
            (&evict, &json!({"phase": "Deploying"}), None, 0, None),
            (&few, &deployed, None, 3, seconds(300)),
            (&few, &deployed, Some("2030-01-01T00:09:00Z"), 0, seconds(240)),
            (&none, &deployed, None, 0, seconds(60)),
        ] {
            let kubevirt = kubevirt(strategy, status);
            let observed = Observed { kubevirt: &kubevirt, outdated: &running, now: now() };
            let decision = decide(&observed, last.map(|last| last.parse().unwrap()));
            assert_eq!(evicted(&decision).len(), count, "{strategy} {status} {last:?}");
            assert_eq!(decision.wake_after, wake, "{strategy} {status} {last:?}");
        }
        let kubevirt = kubevirt(&evict, &deployed);
        assert_eq!(decide(&Observed { kubevirt: &kubevirt, outdated: &[], now: now() }, None), Decision::settled());
    }

    #[test]
    fn only_machines_that_run_and_are_not_leaving_are_evicted() {
        let machines = [
            machine(0, &json!({"phase": "Running"}), None),
            machine(1, &json!({"phase": "Scheduling"}), None),
            machine(2, &json!({"phase": "Running", "evacuationNodeName": "n"}), None),
            machine(3, &json!({"phase": "Running"}), Some("2030-01-01T00:09:59Z")),
            machine(4, &json!({"phase": "Succeeded"}), None),
        ];
        let deployed = json!({"phase": "Deployed", "observedDeploymentID": "a", "targetDeploymentID": "a"});
        let kubevirt = kubevirt(&json!({"workloadUpdateMethods": ["Evict"]}), &deployed);
        let observed = Observed { kubevirt: &kubevirt, outdated: &machines, now: now() };
        let batches = Batches::default();
        assert_eq!(evicted(&batches.decide(&observed)), ["virt-launcher-m0-x"]);
        assert_eq!(evicted(&batches.decide(&observed)), Vec::<String>::new(), "the interval has not passed");
    }
}
