//! The controller of the common instance types and preferences: its watches and observations.

use std::sync::Arc;

use super::{Observed, decide, is_on};
use crate::{
    cache::{Cache, Key},
    resources::{Caches, Resource, instancetypes::CachedInstancetype, needs},
    runtime::{Attempt, Controller, Decision, Needs, Wake},
    setup::Setup,
};

/// The controller of the common instance types and preferences.
pub(crate) struct CommonInstancetypes {
    namespace: String,
}

impl CommonInstancetypes {
    /// Creates the controller.
    pub(crate) fn new(setup: &Setup) -> Self {
        Self { namespace: setup.options.namespace.clone() }
    }
}

/// Queues the key when an object is gone, which can be one that a user had taken over.
fn wake_on_deletion(wake: &Wake, cache: &Cache<CachedInstancetype>, key: &Key) {
    let (wake, key) = (wake.clone(), key.clone());
    cache.listen(move |(former, present)| {
        if present.is_none() && former.is_some() {
            wake.key(key.clone());
        }
    });
}

impl Controller for CommonInstancetypes {
    const NAME: &'static str = "common-instancetypes";
    const NEEDS: Needs = needs(&[Resource::KubeVirts, Resource::ClusterInstancetypes, Resource::ClusterPreferences]);
    type Caches = Caches;
    type Observed = Observed;

    fn watch(&self, caches: &Arc<Caches>, wake: &Wake) {
        // One decision covers all of them.
        let key = Key::new(self.namespace.clone(), "");
        let (woken, changed) = (wake.clone(), key.clone());
        caches.kubevirts.listen(move |(former, present)| {
            if former.and_then(is_on) != present.and_then(is_on) {
                woken.key(changed.clone());
            }
        });
        wake_on_deletion(wake, &caches.cluster_instancetypes, &key);
        wake_on_deletion(wake, &caches.cluster_preferences, &key);
        wake.at_start(move || vec![key.clone()]);
    }

    fn observe(&self, caches: &Caches, _attempt: &Attempt<'_>) -> Option<Observed> {
        let kubevirt = caches.kubevirt()?;
        let is_on = is_on(&kubevirt)?;
        let (instancetypes, preferences) = (caches.cluster_instancetypes.all(), caches.cluster_preferences.all());
        Some(Observed { is_on, instancetypes, preferences })
    }

    fn decide(&self, observed: &Observed) -> Result<Decision, serde_json::Error> {
        decide(observed)
    }
}
