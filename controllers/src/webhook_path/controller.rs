//! The controller of webhook paths: its watches and observations.

use std::sync::{Arc, OnceLock};

use api::{constants::component, webhook_path::SECRET};
use jiff::Timestamp;

use super::Observed;
use crate::{
    cache::Key,
    resources::{Caches, Resource, needs},
    runtime::{Attempt, Controller, Decision, Needs, Wake},
    setup::Setup,
};

/// The controller of the path segment of webhooks.
pub(crate) struct WebhookPaths {
    namespace: String,
    /// Time of the first decision. Later changes of virt-api were seen by this process.
    since: OnceLock<Timestamp>,
}

impl WebhookPaths {
    /// Creates the controller.
    pub(crate) fn new(setup: &Setup) -> Self {
        Self { namespace: setup.options.namespace.clone(), since: OnceLock::new() }
    }
}

impl Controller for WebhookPaths {
    const NAME: &'static str = "webhook-path";
    const NEEDS: Needs =
        needs(&[Resource::Secrets, Resource::MutatingWebhooks, Resource::ValidatingWebhooks, Resource::Deployments]);
    type Caches = Caches;
    type Observed = Observed;

    fn watch(&self, caches: &Arc<Caches>, wake: &Wake) {
        // One decision covers the paths of all webhooks.
        let key = Key::new(self.namespace.clone(), "");
        wake.key_on(&caches.secrets, &key);
        wake.key_on(&caches.mutating_webhooks, &key);
        wake.key_on(&caches.validating_webhooks, &key);
        wake.key_on(&caches.deployments, &key);
        wake.at_start(move || vec![key.clone()]);
    }

    fn observe(&self, caches: &Caches, attempt: &Attempt<'_>) -> Option<Observed> {
        let since = *self.since.get_or_init(|| attempt.now);
        let api = caches.deployments.get(&Key::new(self.namespace.clone(), component::VIRT_API));
        Some(Observed {
            namespace: self.namespace.as_str().into(),
            secret: caches.secret(&self.namespace, SECRET),
            configurations: caches.webhook_configurations(),
            ready: api.as_ref().is_some_and(|api| api.ready > 0),
            missed: api.and_then(|api| api.availability_changed_at).filter(|at| *at <= since),
            now: attempt.now,
        })
    }

    fn decide(&self, observed: &Observed) -> Result<Decision, serde_json::Error> {
        super::decide(observed)
    }
}
