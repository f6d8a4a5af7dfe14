//! The controller of webhook paths: its watches and observations.

use std::sync::{Arc, OnceLock};

use api::{constants::component, webhook_path::SECRET};
use jiff::Timestamp;
use k8s_openapi::api::core::v1::Secret;

use super::{Configuration, Observed};
use crate::{
    cache::Key,
    resources::{Caches, Resource, needs, workloads::CachedWorkload},
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

/// Everything in the caches that a decision about the paths depends on.
pub(crate) struct Snapshot {
    secret: Option<Arc<Secret>>,
    configurations: Vec<Configuration>,
    api: Option<Arc<CachedWorkload>>,
}

impl Controller for WebhookPaths {
    const NAME: &'static str = "webhook-path";
    const NEEDS: Needs =
        needs(&[Resource::Secrets, Resource::MutatingWebhooks, Resource::ValidatingWebhooks, Resource::Deployments]);
    type Caches = Caches;
    type Snapshot = Snapshot;

    fn watch(&self, caches: &Arc<Caches>, wake: &Wake) {
        // One decision covers the paths of all webhooks.
        let key = Key::new(self.namespace.clone(), "");
        wake.key_on(&caches.secrets, &key);
        wake.key_on(&caches.mutating_webhooks, &key);
        wake.key_on(&caches.validating_webhooks, &key);
        wake.key_on(&caches.deployments, &key);
        wake.at_start(move || vec![key.clone()]);
    }

    fn observe(&self, caches: &Caches, _key: &Key) -> Option<Snapshot> {
        Some(Snapshot {
            secret: caches.secret(&self.namespace, SECRET),
            configurations: caches.webhook_configurations(),
            api: caches.deployments.get(&Key::new(self.namespace.clone(), component::VIRT_API)),
        })
    }

    fn decide(&self, snapshot: &Snapshot, attempt: &Attempt<'_>) -> Result<Decision, serde_json::Error> {
        let since = *self.since.get_or_init(|| attempt.now);
        let api = snapshot.api.as_deref();
        super::decide(&Observed {
            namespace: &self.namespace,
            secret: snapshot.secret.as_deref(),
            configurations: &snapshot.configurations,
            ready: api.is_some_and(|api| api.ready > 0),
            missed: api.and_then(|api| api.availability_changed_at).filter(|at| *at <= since),
            now: attempt.now,
        })
    }
}
