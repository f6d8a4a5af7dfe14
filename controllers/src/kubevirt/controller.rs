//! The controller of the configuration object: its watches and observations.

use std::sync::Arc;

use api::{KubeVirt, constants::component, tls, webhook_path::SECRET};

use super::{Components, Deployment, Observed};
use crate::{
    cache::Key,
    resources::{
        Caches, Resource, needs,
        roles::CachedRole,
        vmis::{VmiIndex, is_outdated},
        workloads::CachedWorkload,
    },
    runtime::{Attempt, Controller, Decision, Needs, Wake},
    setup::{Setup, VERSION},
    webhook_path,
};

/// The controller of the installation's status.
pub(crate) struct Installation {
    namespace: String,
    deployment: Deployment,
    manages_roles: bool,
}

impl Installation {
    /// Creates the controller.
    pub(crate) fn new(setup: &Setup) -> Self {
        Self {
            namespace: setup.options.namespace.clone(),
            deployment: Deployment::new(&setup.options),
            manages_roles: setup.options.manage_role_aggregation,
        }
    }
}

/// Everything in the caches that the status depends on.
pub(crate) struct Snapshot {
    kubevirt: Arc<KubeVirt>,
    api: Option<Arc<CachedWorkload>>,
    controller: Option<Arc<CachedWorkload>>,
    handler: Option<Arc<CachedWorkload>>,
    bundle_in_place: bool,
    paths_in_place: bool,
    api_services_available: bool,
    outdated_vmis: usize,
    roles: Vec<Arc<CachedRole>>,
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
    type Snapshot = Snapshot;

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
        let (woken, outdated) = (wake.clone(), key.clone());
        caches.vmis.listen(move |(former, present)| {
            if former.is_some_and(is_outdated) != present.is_some_and(is_outdated) {
                woken.key(outdated.clone());
            }
        });
        wake.at_start(move || vec![key.clone()]);
    }

    fn observe(&self, caches: &Caches, _key: &Key) -> Option<Snapshot> {
        let namespace = &self.namespace;
        let kubevirt = caches.kubevirt().or_else(|| caches.kubevirts.all().into_iter().next())?;
        let deployment = |name: &str| caches.deployments.get(&Key::new(namespace.clone(), name));
        let carriers = caches.bundle_carriers();
        let expected = tls::API_SERVICES.len() + 1 + tls::VALIDATING_WEBHOOKS.len();
        let bundle_in_place = caches.ca_bundle(namespace).is_some_and(|bundle| {
            carriers.len() == expected
                && carriers.iter().all(|(_, object)| object.bundles.iter().all(|(_, known)| known == bundle.as_bytes()))
        });
        let segments = caches.secret(namespace, SECRET);
        Some(Snapshot {
            kubevirt,
            api: deployment(component::VIRT_API),
            controller: deployment(component::VIRT_CONTROLLER),
            handler: caches.daemon_sets.get(&Key::new(namespace.clone(), component::VIRT_HANDLER)),
            bundle_in_place,
            paths_in_place: webhook_path::in_place(segments.as_deref(), &caches.webhook_configurations()),
            api_services_available: carriers.iter().all(|(_, object)| object.available),
            outdated_vmis: caches.vmis.count_by(&VmiIndex::Outdated),
            roles: caches.roles.all(),
        })
    }

    fn decide(&self, snapshot: &Snapshot, attempt: &Attempt<'_>) -> Result<Decision, serde_json::Error> {
        super::decide(&Observed {
            kubevirt: &snapshot.kubevirt,
            components: Components {
                api: snapshot.api.as_deref(),
                controller: snapshot.controller.as_deref(),
                handler: snapshot.handler.as_deref(),
                bundle_in_place: snapshot.bundle_in_place,
                paths_in_place: snapshot.paths_in_place,
                api_services_available: snapshot.api_services_available,
            },
            version: VERSION,
            deployment: &self.deployment,
            architecture: architecture(),
            outdated_vmis: snapshot.outdated_vmis,
            roles: &snapshot.roles,
            manages_roles: self.manages_roles,
            now: attempt.now,
        })
    }
}

fn architecture() -> &'static str {
    match std::env::consts::ARCH {
        "x86_64" => "amd64",
        "aarch64" => "arm64",
        other => other,
    }
}
