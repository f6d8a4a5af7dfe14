//! The controllers of certificates and of requests for them: watches and observations.

use std::{sync::Arc, time::Duration};

use api::tls;
use jiff::Timestamp;
use k8s_openapi::api::{certificates::v1::CertificateSigningRequest, core::v1::Secret};

use super::{Authority, CertificateError, Lives, Observed, inject, leaf_secrets, request};
use crate::{
    cache::Key,
    resources::{CERTIFICATES, Caches, certificate_requests::RequestIndex},
    runtime::{Attempt, Controller, Decision, Needs, Wake},
    setup::Setup,
};

/// Wait after a certificate could not be made.
const RETRY: Duration = Duration::from_secs(30);

/// The controller of the authority, the leaves and the bundle.
pub(crate) struct Certificates {
    namespace: String,
}

impl Certificates {
    /// Creates the controller.
    pub(crate) fn new(setup: &Setup) -> Self {
        Self { namespace: setup.options.namespace.clone() }
    }
}

impl Controller for Certificates {
    const NAME: &'static str = "certificates";
    const NEEDS: Needs = CERTIFICATES;
    type Caches = Caches;
    type Observed = Observed;

    fn watch(&self, caches: &Arc<Caches>, wake: &Wake) {
        // One decision covers all certificates.
        let key = Key::new(self.namespace.clone(), "");
        wake.key_on(&caches.secrets, &key);
        wake.key_on(&caches.config_maps, &key);
        wake.key_on(&caches.kubevirts, &key);
        wake.key_on(&caches.api_services, &key);
        wake.key_on(&caches.mutating_webhooks, &key);
        wake.key_on(&caches.validating_webhooks, &key);
        wake.at_start(move || vec![key.clone()]);
    }

    fn observe(&self, caches: &Caches, attempt: &Attempt<'_>) -> Option<Observed> {
        let namespace = &self.namespace;
        let leaf = |name: &str| Some((name.to_owned(), caches.secret(namespace, name)?));
        Some(Observed {
            namespace: namespace.as_str().into(),
            authority: caches.secret(namespace, tls::CA_SECRET),
            bundle: caches.config_maps.get(&Key::new(namespace.clone(), tls::CA_CONFIG_MAP)),
            leaves: leaf_secrets().into_iter().filter_map(leaf).collect(),
            lives: lives(caches),
            is_configured: caches.installation().is_some(),
            carriers: caches.bundle_carriers(),
            now: attempt.now,
        })
    }

    fn decide(&self, observed: &Observed) -> Result<Decision, serde_json::Error> {
        let mut decision = or_retry(super::decide(observed))?;
        if let Some(bundle) = super::bundle::text(observed.bundle.as_deref()) {
            let carriers = observed.carriers.iter();
            decision.effects.extend(carriers.filter_map(|(kind, object)| inject(*kind, object, bundle)));
        }
        Ok(decision)
    }
}

/// The controller of requests of virt-handlers for certificates.
pub(crate) struct Requests {
    namespace: String,
}

impl Requests {
    /// Creates the controller.
    pub(crate) fn new(setup: &Setup) -> Self {
        Self { namespace: setup.options.namespace.clone() }
    }
}

/// Everything in the caches that the answer to a request depends on.
pub(crate) struct ObservedRequest {
    request: Arc<CertificateSigningRequest>,
    authority: Option<Arc<Secret>>,
    bundle: String,
    lives: Lives,
    now: Timestamp,
}

impl Controller for Requests {
    const NAME: &'static str = "requests";
    const NEEDS: Needs = CERTIFICATES;
    type Caches = Caches;
    type Observed = ObservedRequest;

    fn watch(&self, caches: &Arc<Caches>, wake: &Wake) {
        wake.objects_of(&caches.requests);
        // Requests may wait for a new authority.
        let requests = caches.requests.clone();
        wake.on(&caches.secrets, move |_, present| {
            let authority = present.filter(|secret| secret.metadata.name.as_deref() == Some(tls::CA_SECRET));
            authority.map(|_| requests.keys_by(&RequestIndex::Unanswered)).into_iter().flatten()
        });
    }

    fn observe(&self, caches: &Caches, attempt: &Attempt<'_>) -> Option<ObservedRequest> {
        Some(ObservedRequest {
            request: caches.requests.get(attempt.key)?,
            authority: caches.secret(&self.namespace, tls::CA_SECRET),
            bundle: caches.ca_bundle(&self.namespace).unwrap_or_default(),
            lives: lives(caches),
            now: attempt.now,
        })
    }

    fn decide(&self, observed: &ObservedRequest) -> Result<Decision, serde_json::Error> {
        // Only a published authority signs.
        let authority = observed
            .authority
            .as_deref()
            .and_then(Authority::from_secret)
            .filter(|authority| observed.bundle.contains(authority.pem()));
        let (namespace, lives) = (&self.namespace, observed.lives);
        or_retry(request::decide(&observed.request, namespace, authority.as_ref(), lives, observed.now))
    }
}

fn lives(caches: &Caches) -> Lives {
    // The deletion of the object is no change of its configuration.
    let kubevirt = caches.installation();
    kubevirt.map_or_else(Lives::default, |object| Lives::from_strategy(&object.spec.certificate_rotate_strategy))
}

/// Replaces errors of the certificate library by a later attempt.
fn or_retry(decision: Result<Decision, CertificateError>) -> Result<Decision, serde_json::Error> {
    match decision {
        Ok(decision) => Ok(decision),
        Err(CertificateError::Json(error)) => Err(error),
        Err(error) => {
            tracing::error!(%error, "certificate cannot be made");
            let mut decision = Decision::settled();
            decision.wake(RETRY);
            Ok(decision)
        }
    }
}
