//! The controller of the end of the KubeVirt object: its watches and observations.

use std::sync::Arc;

use api::{KubeVirt, constants::finalizer};
use jiff::Timestamp;

use super::{Counts, Workloads, decide, removes_workloads};
use crate::{
    cache::{Cached, Key},
    resources::{Caches, Resource, needs},
    runtime::{Attempt, Controller, Decision, Effect, Kind, Needs, Wake},
    setup::Setup,
};

/// The controller of the end of the KubeVirt object.
pub(crate) struct Uninstall {
    namespace: String,
}

impl Uninstall {
    /// Creates the controller.
    pub(crate) fn new(setup: &Setup) -> Self {
        Self { namespace: setup.options.namespace.clone() }
    }
}

/// Everything that the decision depends on.
pub(crate) struct Observed {
    kubevirt: Arc<KubeVirt>,
    /// Objects that do not count.
    others: Vec<Arc<KubeVirt>>,
    counts: Counts,
    workloads: Workloads,
    now: Timestamp,
}

/// Changes when an object appears, is deleted, or loses a finalizer.
fn stage<K: Cached>(object: Option<&K>) -> Option<(bool, usize)> {
    let meta = object?.meta();
    Some((meta.deletion_timestamp.is_some(), meta.finalizers.as_ref().map_or(0, Vec::len)))
}

impl Controller for Uninstall {
    const NAME: &'static str = "uninstall";
    const NEEDS: Needs = needs(&[
        Resource::KubeVirts,
        Resource::Vms,
        Resource::Vmis,
        Resource::ReplicaSets,
        Resource::Pools,
        Resource::Migrations,
    ]);
    type Caches = Caches;
    type Observed = Observed;

    fn watch(&self, caches: &Arc<Caches>, wake: &Wake) {
        // The object has any name.
        let key = Key::new(self.namespace.clone(), "");
        wake.key_on(&caches.kubevirts, &key);
        wake.key_on_change(&caches.vms, &key, stage);
        wake.key_on_change(&caches.vmis, &key, stage);
        wake.key_on_change(&caches.replica_sets, &key, stage);
        wake.key_on_change(&caches.pools, &key, stage);
        wake.key_on_change(&caches.migrations, &key, |migration| {
            migration.map(|migration| (migration.is_final(), migration.metadata.finalizers.clone()))
        });
        wake.at_start(move || vec![key.clone()]);
    }

    fn observe(&self, caches: &Caches, attempt: &Attempt<'_>) -> Option<Observed> {
        let kubevirt = caches.installation()?;
        let mut others = caches.kubevirts.all();
        others.retain(|other| other.metadata.name != kubevirt.metadata.name);
        let counts = Counts { vmis: caches.vmis.len(), vms: caches.vms.len(), replica_sets: caches.replica_sets.len() };
        let workloads = if removes_workloads(&kubevirt) {
            Workloads {
                vms: caches.vms.all(),
                vmis: caches.vmis.all(),
                replica_sets: caches.replica_sets.all(),
                pools: caches.pools.all(),
                migrations: caches.migrations.all(),
            }
        } else {
            Workloads::default()
        };
        Some(Observed { kubevirt, others, counts, workloads, now: attempt.now })
    }

    fn decide(&self, observed: &Observed) -> Result<Decision, serde_json::Error> {
        let mut decision = decide(&observed.kubevirt, observed.counts, &observed.workloads, observed.now);
        // Nothing holds an object that does not count, also if it did before.
        for other in &observed.others {
            decision.effects.extend(Effect::finalizer(Kind::KubeVirt, &other.metadata, finalizer::KUBEVIRT, false));
        }
        Ok(decision)
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn kubevirt(name: &str, created: &str, held: bool, deleted: bool) -> KubeVirt {
        serde_json::from_value(json!({
            "metadata": {
                "name": name, "namespace": "kubevirt", "uid": name, "resourceVersion": "1",
                "creationTimestamp": created, "finalizers": held.then_some([finalizer::KUBEVIRT]),
                "deletionTimestamp": deleted.then_some("2030-02-01T00:00:00Z"),
            },
            "spec": {},
        }))
        .unwrap()
    }

    /// Returns the objects whose finalizers are written while a VMI exists, and the finalizers.
    fn written(objects: Vec<KubeVirt>) -> Vec<(String, Value)> {
        let (caches, controller) = (Caches::default(), Uninstall { namespace: "kubevirt".to_owned() });
        for object in objects {
            // An answer about an object that is being deleted counts only if the object is known.
            let mut former = object.clone();
            former.metadata.deletion_timestamp = None;
            former.metadata.resource_version = Some("0".to_owned());
            caches.kubevirts.observe(former);
            caches.kubevirts.observe(object);
        }
        let now = "2030-03-01T00:00:00Z".parse().unwrap();
        let attempt = Attempt { key: &Key::new("kubevirt", ""), failures: &Default::default(), now };
        let observed = controller.observe(&caches, &attempt).unwrap();
        let observed = Observed { counts: Counts { vmis: 1, ..Counts::default() }, ..observed };
        let effects = controller.decide(&observed).unwrap().effects.into_iter();
        let finalizers = |effect: Effect| match effect {
            Effect::Patch { kind: Kind::KubeVirt, name, patch, .. } => (name, patch["metadata"]["finalizers"].clone()),
            other => panic!("{other:?}"),
        };
        effects.map(finalizers).collect()
    }

    #[test]
    fn object_that_counts_is_held_whatever_its_name() {
        let held = || json!([finalizer::KUBEVIRT]);
        let of = |name: &str, finalizers: Value| (name.to_owned(), finalizers);
        let (old, new) = ("2030-01-01T00:00:00Z", "2030-01-02T00:00:00Z");
        assert_eq!(written(vec![kubevirt("kv", old, false, false)]), [of("kv", held())]);
        let two = vec![kubevirt("a", new, false, false), kubevirt("kv", old, false, false)];
        assert_eq!(written(two), [of("kv", held())]);
        // An object that was deleted before another one was created ends.
        let replaced = vec![kubevirt("a", old, true, true), kubevirt("kv", new, false, false)];
        assert_eq!(written(replaced), [of("kv", held()), of("a", Value::Null)]);
    }
}
