//! The controller of the end of the KubeVirt object: its watches and observations.

use std::sync::Arc;

use api::{KubeVirt, constants::KUBEVIRT_NAME};
use jiff::Timestamp;

use super::{Counts, Workloads, decide, removes_workloads};
use crate::{
    cache::{Cached, Key},
    resources::{Caches, Resource, needs},
    runtime::{Attempt, Controller, Decision, Needs, Wake},
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
        let key = Key::new(self.namespace.clone(), KUBEVIRT_NAME);
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
        let kubevirt = caches.kubevirts.get(attempt.key)?;
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
        Some(Observed { kubevirt, counts, workloads, now: attempt.now })
    }

    fn decide(&self, observed: &Observed) -> Result<Decision, serde_json::Error> {
        Ok(decide(&observed.kubevirt, observed.counts, &observed.workloads, observed.now))
    }
}
