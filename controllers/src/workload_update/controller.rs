//! The workload update controller: its watches and observations.

use std::sync::{Arc, Mutex, PoisonError};

use api::KubeVirt;
use jiff::Timestamp;

use super::{Observed, time_left};
use crate::{
    cache::Key,
    kubevirt::Deployment,
    resources::{
        Caches, VmiWithPods,
        vmis::{VmiIndex, is_outdated},
    },
    runtime::{Attempt, Controller, Decision, Wake},
    setup::Setup,
};

/// The controller of VMIs whose launcher has another version.
pub(crate) struct WorkloadUpdates {
    key: Key,
    deployment: Deployment,
    /// Time of the last batch of evictions. A new leader starts with a batch.
    last_batch: Mutex<Option<Timestamp>>,
}

impl WorkloadUpdates {
    /// Creates the controller.
    pub(crate) fn new(setup: &Setup) -> Self {
        Self {
            key: Key::new(setup.options.namespace.clone(), ""),
            deployment: Deployment::new(&setup.options),
            last_batch: Mutex::default(),
        }
    }

    fn last_batch(&self) -> Option<Timestamp> {
        *self.last_batch.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Everything in the caches that a decision depends on.
pub(crate) struct Snapshot {
    kubevirt: Arc<KubeVirt>,
    outdated_count: usize,
    /// Empty until a batch is due.
    outdated: Vec<VmiWithPods>,
}

impl Controller for WorkloadUpdates {
    const NAME: &'static str = "workload-update";
    type Caches = Caches;
    type Snapshot = Snapshot;

    fn watch(&self, caches: &Arc<Caches>, wake: &Wake) {
        wake.key_on(&caches.kubevirts, &self.key);
        let key = self.key.clone();
        wake.at_start(move || vec![key.clone()]);
        let (woken, key) = (wake.clone(), self.key.clone());
        caches.vmis.listen(move |(former, present)| {
            if !former.is_some_and(is_outdated) && present.is_some_and(is_outdated) {
                woken.key(key.clone());
            }
        });
    }

    fn observe(&self, caches: &Caches, _key: &Key) -> Option<Snapshot> {
        let kubevirt = caches.kubevirt()?;
        let is_due = time_left(&kubevirt, self.last_batch(), Timestamp::now()).is_none();
        let outdated = if is_due { caches.vmis.by(&VmiIndex::Outdated) } else { Vec::new() };
        Some(Snapshot {
            outdated_count: caches.vmis.count_by(&VmiIndex::Outdated),
            outdated: outdated.into_iter().map(|vmi| caches.with_pods(vmi)).collect(),
            kubevirt,
        })
    }

    fn decide(&self, snapshot: &Snapshot, attempt: &Attempt<'_>) -> Result<Decision, serde_json::Error> {
        let observed = Observed {
            kubevirt: &snapshot.kubevirt,
            deployment: &self.deployment,
            outdated_count: snapshot.outdated_count,
            outdated: &snapshot.outdated,
            last_batch: self.last_batch(),
            now: attempt.now,
        };
        let decision = super::decide(&observed);
        if !decision.effects.is_empty() {
            *self.last_batch.lock().unwrap_or_else(PoisonError::into_inner) = Some(attempt.now);
        }
        Ok(decision)
    }
}
