//! The CA certificates that are trusted, replaceable while connections are accepted.

use std::{fmt, sync::Arc};

use arc_swap::ArcSwapOption;
use k8s_openapi::api::core::v1::ConfigMap;
use kube::{Api, Client};
use rustls::{
    RootCertStore,
    client::{WebPkiServerVerifier, danger::ServerCertVerifier},
    pki_types::{CertificateDer, UnixTime, pem::PemObject},
    server::{WebPkiClientVerifier, danger::ClientCertVerifier},
};
use tokio::sync::watch;

use super::{Peer, TlsError, provider};

/// Verifiers for one version of the bundle.
pub(super) struct RootSet {
    pub(super) pem: Vec<u8>,
    pub(super) clients: Arc<dyn ClientCertVerifier>,
    pub(super) servers: Arc<dyn ServerCertVerifier>,
}

/// A CA bundle. Cheap to clone; all clones change together. Nothing is trusted while it is empty.
#[derive(Clone)]
pub struct Roots {
    set: Arc<ArcSwapOption<RootSet>>,
    version: watch::Sender<u64>,
}

impl Roots {
    /// A bundle that trusts nothing yet.
    #[must_use]
    pub fn empty() -> Self {
        Self { set: Arc::new(ArcSwapOption::empty()), version: watch::Sender::new(0) }
    }

    /// The bundle under `key` of the ConfigMap `name`, followed live. Spawns the task that watches.
    /// A ConfigMap that is deleted or unusable leaves the last bundle in force.
    #[must_use]
    pub fn follow(client: Client, namespace: &str, name: &str, key: &'static str) -> Self {
        let roots = Self::empty();
        let (followed, map_name) = (roots.clone(), name.to_owned());
        let watched = crate::object::follow(
            Api::<ConfigMap>::namespaced(client, namespace),
            name.to_owned(),
            move |map: Option<ConfigMap>| {
                let Some(pem) = map.and_then(|map| map.data).and_then(|mut data| data.remove(key)) else {
                    tracing::debug!(config_map = %map_name, "CA bundle does not exist yet");
                    return;
                };
                match followed.set_pem(pem.as_bytes()) {
                    Ok(true) => tracing::info!(config_map = %map_name, "CA bundle in force"),
                    Ok(false) => {}
                    Err(error) => tracing::warn!(
                        config_map = %map_name,
                        error = %crate::object::chain(&error),
                        "CA bundle cannot be used; the last one stays in force"
                    ),
                }
            },
        );
        tokio::spawn(watched);
        roots
    }

    /// Puts a PEM bundle in force; tells whether it differs from the one before.
    pub fn set_pem(&self, pem: &[u8]) -> Result<bool, TlsError> {
        if self.set.load().as_ref().is_some_and(|set| set.pem == pem) {
            return Ok(false);
        }
        let mut store = RootCertStore::empty();
        for certificate in CertificateDer::pem_slice_iter(pem) {
            let certificate =
                certificate.map_err(|error| TlsError::Pem { what: "CA bundle", reason: error.to_string() })?;
            store.add(certificate).map_err(TlsError::Rustls)?;
        }
        if store.is_empty() {
            return Err(TlsError::Missing("CA certificate"));
        }
        let store = Arc::new(store);
        let clients = WebPkiClientVerifier::builder_with_provider(store.clone(), provider())
            .build()
            .map_err(|error| TlsError::Certificate(error.to_string()))?;
        let servers = WebPkiServerVerifier::builder_with_provider(store, provider())
            .build()
            .map_err(|error| TlsError::Certificate(error.to_string()))?;
        self.set.store(Some(Arc::new(RootSet { pem: pem.to_vec(), clients, servers })));
        self.version.send_modify(|version| *version += 1);
        Ok(true)
    }

    /// The bundle in force, PEM.
    #[must_use]
    pub fn pem(&self) -> Option<Vec<u8>> {
        self.set.load().as_ref().map(|set| set.pem.clone())
    }

    /// Waits until there is a bundle.
    pub async fn ready(&self) {
        let mut versions = self.version.subscribe();
        // The sender lives in self, so waiting cannot fail.
        let _ = versions.wait_for(|version| *version > 0).await;
    }

    /// Counts the bundles put in force; changes are seen on the receiver.
    #[must_use]
    pub fn versions(&self) -> watch::Receiver<u64> {
        self.version.subscribe()
    }

    /// Whether the certificate that a peer presented, and whose key it holds, is the one of `common_name`.
    #[must_use]
    pub fn vouch_for(&self, peer: &Peer, common_name: &str) -> bool {
        let (Some(set), Some((first, others))) = (self.current(), peer.certificates.split_first()) else {
            return false;
        };
        peer.is(common_name) && set.clients.verify_client_cert(first, others, UnixTime::now()).is_ok()
    }

    pub(super) fn current(&self) -> Option<Arc<RootSet>> {
        self.set.load_full()
    }
}

impl fmt::Debug for Roots {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("Roots").field("version", &*self.version.borrow()).finish_non_exhaustive()
    }
}
