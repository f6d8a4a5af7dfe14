//! The CA certificates that are trusted, replaceable while connections are accepted.

use std::{fmt, sync::Arc};

use k8s_openapi::api::core::v1::ConfigMap;
use kube::{Api, Client};
use rustls::{
    RootCertStore,
    client::{WebPkiServerVerifier, danger::ServerCertVerifier},
    pki_types::{CertificateDer, UnixTime, pem::PemObject},
    server::{WebPkiClientVerifier, danger::ClientCertVerifier},
};
use tokio::sync::watch;

use super::{
    Peer, TlsError,
    followed::{Followed, Read, follow_value},
    provider,
};
use crate::tasks::Spawner;

/// Verifiers for one version of the bundle.
pub(super) struct RootSet {
    pem: Vec<u8>,
    pub(super) clients: Arc<dyn ClientCertVerifier>,
    pub(super) servers: Arc<dyn ServerCertVerifier>,
}

/// A CA bundle. Cheap to clone; all clones change together. Nothing is trusted while it is empty.
#[derive(Clone)]
pub struct Roots(Followed<RootSet>);

impl Roots {
    /// Creates a bundle that trusts nothing yet.
    #[must_use]
    pub fn empty() -> Self {
        Self(Followed::empty())
    }

    /// Returns the bundle under `key` of the ConfigMap `name`, followed live in a task of its own.
    /// A ConfigMap that is deleted or unusable leaves the last bundle in force.
    #[must_use]
    pub fn follow(client: Client, namespace: &str, name: &str, key: &'static str, tasks: &Spawner) -> Self {
        let roots = Self::empty();
        let followed = roots.clone();
        let maps: Api<ConfigMap> = Api::namespaced(client, namespace);
        follow_value(maps, name, "CA bundle", tasks, move |map| {
            let Some(pem) = map.data.and_then(|mut data| data.remove(key)) else { return Ok(Read::Missing) };
            Ok(if followed.set_pem(pem.as_bytes())? { Read::Replaced } else { Read::Unchanged })
        });
        roots
    }

    /// Puts a PEM bundle in force. Returns true when it differs from the one before.
    ///
    /// # Errors
    /// When it is not valid or empty.
    pub fn set_pem(&self, pem: &[u8]) -> Result<bool, TlsError> {
        if self.current().is_some_and(|set| set.pem == pem) {
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
        self.0.replace(RootSet { pem: pem.to_vec(), clients, servers });
        Ok(true)
    }

    /// Returns the bundle in force, PEM.
    #[must_use]
    pub fn pem(&self) -> Option<Vec<u8>> {
        self.current().map(|set| set.pem.clone())
    }

    /// Waits until there is a bundle.
    pub async fn ready(&self) {
        self.0.ready().await;
    }

    /// Returns a receiver of the number of bundles so far.
    #[must_use]
    pub fn versions(&self) -> watch::Receiver<u64> {
        self.0.versions()
    }

    /// Returns true when the peer presented a certificate of `common_name` that chains to the bundle. Its handshake has proven
    /// that it holds the key.
    #[must_use]
    pub fn vouch_for(&self, peer: &Peer, common_name: &str) -> bool {
        let (Some(set), Some((first, others))) = (self.current(), peer.certificates.split_first()) else {
            return false;
        };
        peer.is(common_name) && set.clients.verify_client_cert(first, others, UnixTime::now()).is_ok()
    }

    pub(super) fn current(&self) -> Option<Arc<RootSet>> {
        self.0.current()
    }
}

impl fmt::Debug for Roots {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("Roots").field("version", &self.0.version()).finish_non_exhaustive()
    }
}
