//! Replica sets: as many VMIs as wanted from one template.
//!
//! Start with [`decide`]; `controller.rs` holds the watches.

mod controller;
#[cfg(test)]
mod tests;

use std::{collections::BTreeMap, sync::Arc};

use api::{
    Condition, VirtualMachineInstance, VirtualMachineInstanceReplicaSet,
    condition::{remove, set, set_or_remove},
    constants::{condition, event, reason},
    owner,
    replicaset::VirtualMachineInstanceReplicaSetStatus,
};
use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, Time};
use kube::core::{Selector, SelectorExt};
use serde_json::json;

pub(crate) use self::controller::ReplicaSets;
use crate::{
    owned_vmis::{self, create_vmi, delete_vmi, set_owners},
    runtime::{Decision, Effect, Event, Failure, Failures, Kind},
};

/// VMIs that are created or deleted in one reconcile at most.
const BURST: usize = 250;

/// Everything that a decision about a replica set depends on.
pub(crate) struct Observed {
    /// The replica set.
    pub set: Arc<VirtualMachineInstanceReplicaSet>,
    /// VMIs that it owns or may adopt.
    pub instances: Vec<Arc<VirtualMachineInstance>>,
    /// The writes for this set that were refused.
    pub failures: Failures,
    /// The current time.
    pub now: Timestamp,
}

/// Decides what to do about a replica set.
pub(crate) fn decide(observed: &Observed) -> Result<Decision, serde_json::Error> {
    let set = &*observed.set;
    let mut decision = Decision::settled();
    let Some(selector) = selector(set) else {
        // Admission rejects these.
        tracing::warn!("selector is empty or does not match the template's labels");
        return Ok(decision);
    };
    let deleting = set.metadata.deletion_timestamp.is_some();
    let mut owned: Vec<&VirtualMachineInstance> = Vec::new();
    for instance in observed.instances.iter().map(Arc::as_ref) {
        let matches = selector.matches(instance.metadata.labels.as_ref().unwrap_or(&BTreeMap::new()));
        let ours = owner::is_controlled_by(&instance.metadata, set);
        match (ours, matches) {
            (true, true) => owned.push(instance),
            (true, false) if !deleting => release(set, instance, &mut decision),
            (false, true)
                if !deleting && owner::controller(&instance.metadata).is_none() && !instance.is_deleting() =>
            {
                adopt(set, instance, &mut decision);
            }
            _ => {}
        }
    }
    let adopting = !decision.effects.is_empty();
    let active: Vec<&VirtualMachineInstance> =
        owned.iter().copied().filter(|instance| !instance.is_final() && !instance.is_deleting()).collect();
    // Adoption and release change the counts. Scaling follows in the reconcile that they cause.
    let changes = if deleting || adopting || set.spec.paused {
        Changes::default()
    } else {
        Changes::of(wanted_replicas(set), &owned, &active)
    };
    scale(observed, &changes, &mut decision)?;
    // The refusal of a write that is not needed any more is no failure.
    let refused = |reason: &str| observed.failures.of(reason).filter(|_| changes.want(reason));
    let failure = refused(event::FAILED_CREATE).or_else(|| refused(event::FAILED_DELETE));
    status(observed, &selector, &active, failure, &mut decision)?;
    Ok(decision)
}

/// The changes that result in the wanted number of VMIs.
#[derive(Default)]
struct Changes<'a> {
    /// VMIs that have ended, to be deleted.
    finished: Vec<&'a VirtualMachineInstance>,
    /// VMIs to be stopped.
    stopped: Vec<&'a VirtualMachineInstance>,
    /// Number of VMIs to be created.
    made: usize,
}

impl<'a> Changes<'a> {
    fn of(wanted: usize, owned: &[&'a VirtualMachineInstance], active: &[&'a VirtualMachineInstance]) -> Self {
        let finished = owned.iter().copied().filter(|instance| instance.is_final() && !instance.is_deleting());
        let (unknown, known): (Vec<&VirtualMachineInstance>, Vec<&VirtualMachineInstance>) =
            active.iter().partition(|instance| {
                // Its pod is ending or its node is lost, so it may or may not run. It is replaced and deleted.
                let ready = instance.condition(condition::READY);
                ready.is_some_and(|ready| ready.is_false() && ready.reason.as_deref() == Some(reason::POD_TERMINATING))
            });
        let kept = known.len();
        let surplus = in_order_of_deletion(known).into_iter().take(kept.saturating_sub(wanted));
        Self {
            finished: finished.take(BURST).collect(),
            stopped: unknown.into_iter().chain(surplus).take(BURST).collect(),
            made: wanted.saturating_sub(kept).min(BURST),
        }
    }

    /// Returns true if a write that was refused for this reason is part of the changes.
    fn want(&self, reason: &str) -> bool {
        if reason == event::FAILED_CREATE {
            return self.made > 0;
        }
        !self.finished.is_empty() || !self.stopped.is_empty()
    }
}

fn selector(set: &VirtualMachineInstanceReplicaSet) -> Option<Selector> {
    let selector = Selector::try_from(set.spec.selector.clone()).ok()?;
    let template = owned_vmis::template_labels(&set.spec.template.metadata)?;
    (!selector.selects_all() && selector.matches(&template)).then_some(selector)
}

fn wanted_replicas(set: &VirtualMachineInstanceReplicaSet) -> usize {
    usize::try_from(set.spec.replicas.unwrap_or(1)).unwrap_or(0)
}

fn adopt(set: &VirtualMachineInstanceReplicaSet, instance: &VirtualMachineInstance, decision: &mut Decision) {
    decision.push(owned_vmis::adopt(instance, &Kind::ReplicaSet.owner_reference(&set.metadata)));
}

fn release(set: &VirtualMachineInstanceReplicaSet, instance: &VirtualMachineInstance, decision: &mut Decision) {
    let left: Vec<_> = instance
        .metadata
        .owner_references
        .iter()
        .flatten()
        .filter(|owner| Some(owner.uid.as_str()) != set.metadata.uid.as_deref())
        .collect();
    decision.push(set_owners(instance, &json!(left)));
}

fn scale(observed: &Observed, changes: &Changes<'_>, decision: &mut Decision) -> Result<(), serde_json::Error> {
    let set = &*observed.set;
    // A refused write waits; the others continue.
    let now = observed.now;
    let mut waits = |reason: &str| changes.want(reason) && decision.must_wait(&observed.failures, reason, now);
    let (creation_waits, deletion_waits) = (waits(event::FAILED_CREATE), waits(event::FAILED_DELETE));
    let made = if creation_waits { 0 } else { changes.made };
    let regarding = || Kind::ReplicaSet.reference(&set.metadata);
    if !deletion_waits {
        for instance in &changes.finished {
            let name = instance.metadata.name.as_deref().unwrap_or_default();
            decision.push(Effect::delete(Kind::Instance, &instance.metadata).reported(
                regarding(),
                (event::SUCCESSFUL_DELETE, format!("Deleted finished virtual machine: {name}")),
                (event::FAILED_DELETE, format!("Error deleting finished virtual machine {name}: {{error}}")),
            ));
        }
        for instance in &changes.stopped {
            decision.push(delete_vmi(instance, regarding));
        }
    }
    for _ in 0..made {
        let namespace = set.metadata.namespace.as_deref();
        decision.push(create_vmi(namespace, &replica(set), regarding())?);
    }
    Ok(())
}

/// Sorts VMIs that are not ready first, then the youngest.
fn in_order_of_deletion(mut instances: Vec<&VirtualMachineInstance>) -> Vec<&VirtualMachineInstance> {
    instances.sort_by_key(|instance| {
        let ready = instance.condition(condition::READY).is_some_and(Condition::is_true);
        let created = instance.metadata.creation_timestamp.as_ref().map(|at| at.0);
        (ready, std::cmp::Reverse(created), instance.metadata.name.clone())
    });
    instances
}

fn replica(set: &VirtualMachineInstanceReplicaSet) -> VirtualMachineInstance {
    let template = &set.spec.template;
    let base = template.metadata.name.clone().filter(|name| !name.is_empty());
    let base = base.or_else(|| template.metadata.generate_name.clone().filter(|name| !name.is_empty()));
    VirtualMachineInstance {
        metadata: ObjectMeta {
            generate_name: base.or_else(|| set.metadata.name.clone()),
            namespace: set.metadata.namespace.clone(),
            labels: owned_vmis::template_labels(&template.metadata),
            annotations: owned_vmis::template_annotations(&template.metadata),
            owner_references: Some(vec![Kind::ReplicaSet.owner_reference(&set.metadata)]),
            ..ObjectMeta::default()
        },
        spec: template.spec.clone().unwrap_or_default(),
        status: None,
    }
}

fn status(
    observed: &Observed,
    selector: &Selector,
    active: &[&VirtualMachineInstance],
    failure: Option<&Failure>,
    decision: &mut Decision,
) -> Result<(), serde_json::Error> {
    let set = &*observed.set;
    let now = Time(observed.now);
    let former = set.status.clone().unwrap_or_default();
    let mut conditions = former.conditions.clone();
    let was_paused = conditions.iter().any(|known| known.type_ == condition::REPLICA_PAUSED);
    let regarding = || Kind::ReplicaSet.reference(&set.metadata);
    if set.spec.paused {
        let paused = Condition::new(condition::REPLICA_PAUSED, true, "Paused", "Controller got paused", &now);
        if !was_paused {
            decision.push(Effect::Event(Event::normal(regarding(), "SuccessfulPaused", "Paused")));
        }
        self::set(&mut conditions, paused);
    } else if remove(&mut conditions, condition::REPLICA_PAUSED) {
        decision.push(Effect::Event(Event::normal(regarding(), "SuccessfulResumed", "Resumed")));
    }
    let failed =
        failure.map(|failure| Condition::new(condition::REPLICA_FAILURE, true, failure.reason, &failure.message, &now));
    set_or_remove(&mut conditions, condition::REPLICA_FAILURE, failed);
    let ready = active.iter().filter(|instance| instance.condition(condition::READY).is_some_and(Condition::is_true));
    let count = |number: usize| Some(i32::try_from(number).unwrap_or(i32::MAX));
    let wanted = VirtualMachineInstanceReplicaSet {
        status: Some(VirtualMachineInstanceReplicaSetStatus {
            conditions,
            label_selector: Some(selector.to_string()),
            ready_replicas: count(ready.count()),
            replicas: count(active.len()),
        }),
        ..set.clone()
    };
    decision.effects.extend(Effect::change(Kind::ReplicaSet, set, &wanted, Some("status"))?);
    Ok(())
}
