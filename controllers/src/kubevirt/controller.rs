//! The controller of the configuration object: its watches and observations.

use std::sync::Arc;

use api::{constants::component, tls, webhook_path::SECRET};

use super::{Components, Deployment, Observed};
use crate::{
    cache::Key,
    resources::{
        Caches, Resource, needs,
        vmis::{VmiIndex, counts_as_outdated},
    },
    runtime::{Attempt, Controller, Decision, Needs, Wake},
    setup::{Setup, VERSION},
    webhook_path,
};

/// The controller of the installation's status.
pub(crate) struct Installation {
    namespace: String,
    deployment: Arc<Deployment>,
    manages_roles: bool,
}

impl Installation {
    /// Creates the controller.
    pub(crate) fn new(setup: &Setup) -> Self {
        Self {
            namespace: setup.options.namespace.clone(),
            deployment: Deployment::new(&setup.options).into(),
            manages_roles: setup.options.manage_role_aggregation,
        }
    }
}

impl Controller for Installation {
    const NAME: &'static str = "kubevirt";
    const NEEDS: Needs = needs(&[
        Resource::KubeVirts,
        Resource::Secrets,
        Resource::ConfigMaps,
        Resource::ApiServices,
        Resource::MutatingWebhooks,
        Resource::ValidatingWebhooks,
        Resource::Deployments,
        Resource::DaemonSets,
        Resource::Vmis,
    ]);
    type Caches = Caches;
    type Observed = Observed;

    fn watch(&self, caches: &Arc<Caches>, wake: &Wake) {
        // One decision covers the whole installation.
        let key = Key::new(self.namespace.clone(), "");
        wake.key_on(&caches.kubevirts, &key);
        wake.key_on(&caches.secrets, &key);
        wake.key_on(&caches.config_maps, &key);
        wake.key_on(&caches.api_services, &key);
        wake.key_on(&caches.mutating_webhooks, &key);
        wake.key_on(&caches.validating_webhooks, &key);
        wake.key_on(&caches.deployments, &key);
        wake.key_on(&caches.daemon_sets, &key);
        wake.key_on(&caches.roles, &key);
        wake.key_on_change(&caches.vmis, &key, |vmi| vmi.is_some_and(counts_as_outdated));
        wake.at_start(move || vec![key.clone()]);
    }

    fn observe(&self, caches: &Caches, attempt: &Attempt<'_>) -> Option<Observed> {
        let namespace = &self.namespace;
        let kubevirt = caches.installation()?;
        let deployment = |name: &str| caches.deployments.get(&Key::new(namespace.clone(), name));
        let carriers = caches.bundle_carriers();
        let expected = tls::API_SERVICES.len() + 1 + tls::VALIDATING_WEBHOOKS.len();
        let bundle_in_place = caches.ca_bundle(namespace).is_some_and(|bundle| {
            carriers.len() == expected
                && carriers.iter().all(|(_, object)| object.bundles.iter().all(|(_, known)| known == bundle.as_bytes()))
        });
        let segments = caches.secret(namespace, SECRET);
        Some(Observed {
            kubevirt,
            components: Components {
                api: deployment(component::VIRT_API),
                controller: deployment(component::VIRT_CONTROLLER),
                handler: caches.daemon_sets.get(&Key::new(namespace.clone(), component::VIRT_HANDLER)),
                bundle_in_place,
                paths_in_place: webhook_path::in_place(segments.as_deref(), &caches.webhook_configurations()),
                api_services_available: carriers.iter().all(|(_, object)| object.available),
            },
            version: VERSION,
            deployment: self.deployment.clone(),
            architecture: architecture(),
            outdated_vmis: caches.vmis.count_by(&VmiIndex::CountedAsOutdated),
            roles: caches.roles.all(),
            manages_roles: self.manages_roles,
            now: attempt.now,
        })
    }

    fn decide(&self, observed: &Observed) -> Result<Decision, serde_json::Error> {
        super::decide(observed)
    }
}

fn architecture() -> &'static str {
    match std::env::consts::ARCH {
        "x86_64" => "amd64",
        "aarch64" => "arm64",
        other => other,
    }
}
