//! A certificate chain with its key, replaceable while connections are accepted.

use std::{fmt, sync::Arc};

use k8s_openapi::api::core::v1::Secret;
use kube::{Api, Client};
use rustls::{
    SignatureScheme,
    client::ResolvesClientCert,
    pki_types::{CertificateDer, PrivateKeyDer, pem::PemObject},
    server::{ClientHello, ResolvesServerCert},
    sign::CertifiedKey,
};
use tokio::sync::watch;

use super::{
    TlsError,
    followed::{Followed, Read, follow_value},
    provider,
};
use crate::tasks::Spawner;

/// Certificate chain and key with which this process presents itself. Cheap to clone; all clones change together.
#[derive(Clone)]
pub struct Identity(Followed<CertifiedKey>);

impl Identity {
    /// Creates an identity without a certificate. Handshakes fail until [`Identity::set_pem`].
    #[must_use]
    pub fn empty() -> Self {
        Self(Followed::empty())
    }

    /// Returns the identity in the TLS Secret `name` (keys `tls.crt`, `tls.key`), followed live in a task of its own.
    /// A Secret that is deleted or unusable leaves the last identity in force.
    #[must_use]
    pub fn follow(client: Client, namespace: &str, name: &str, tasks: &Spawner) -> Self {
        let identity = Self::empty();
        let followed = identity.clone();
        let secrets: Api<Secret> = Api::namespaced(client, namespace);
        follow_value(secrets, name, "certificate", tasks, move |secret| followed.set_secret(&secret));
        identity
    }

    fn set_secret(&self, secret: &Secret) -> Result<Read, TlsError> {
        let data = secret.data.as_ref().ok_or(TlsError::Missing("tls.crt"))?;
        let chain = data.get("tls.crt").ok_or(TlsError::Missing("tls.crt"))?;
        let key = data.get("tls.key").ok_or(TlsError::Missing("tls.key"))?;
        let chain = parse_chain(&chain.0)?;
        // A new certificate never has the key of another one here: equal chains have equal keys.
        if self.current().is_some_and(|current| current.cert == chain) {
            return Ok(Read::Unchanged);
        }
        self.set(chain, &key.0)?;
        Ok(Read::Replaced)
    }

    /// Puts a chain and its key, both PEM, in force.
    ///
    /// # Errors
    /// When one is not valid, or the key is not that of the first certificate.
    pub fn set_pem(&self, chain: &[u8], key: &[u8]) -> Result<(), TlsError> {
        self.set(parse_chain(chain)?, key)
    }

    fn set(&self, chain: Vec<CertificateDer<'static>>, key: &[u8]) -> Result<(), TlsError> {
        let key = PrivateKeyDer::from_pem_slice(key)
            .map_err(|error| TlsError::Pem { what: "tls.key", reason: error.to_string() })?;
        self.0.replace(CertifiedKey::from_der(chain, key, &provider()).map_err(TlsError::Rustls)?);
        Ok(())
    }

    /// Returns the chain and key in force.
    #[must_use]
    pub fn current(&self) -> Option<Arc<CertifiedKey>> {
        self.0.current()
    }

    /// Waits until there is a certificate.
    pub async fn ready(&self) {
        self.0.ready().await;
    }

    /// Returns a receiver of the number of certificates so far.
    #[must_use]
    pub fn versions(&self) -> watch::Receiver<u64> {
        self.0.versions()
    }
}

fn parse_chain(pem: &[u8]) -> Result<Vec<CertificateDer<'static>>, TlsError> {
    let chain: Vec<CertificateDer<'static>> = CertificateDer::pem_slice_iter(pem)
        .collect::<Result<_, _>>()
        .map_err(|error| TlsError::Pem { what: "tls.crt", reason: error.to_string() })?;
    if chain.is_empty() { Err(TlsError::Missing("tls.crt")) } else { Ok(chain) }
}

impl fmt::Debug for Identity {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("Identity").field("version", &self.0.version()).finish_non_exhaustive()
    }
}

impl ResolvesServerCert for Identity {
    fn resolve(&self, _hello: ClientHello<'_>) -> Option<Arc<CertifiedKey>> {
        self.current()
    }
}

impl ResolvesClientCert for Identity {
    fn resolve(&self, _hints: &[&[u8]], _schemes: &[SignatureScheme]) -> Option<Arc<CertifiedKey>> {
        self.current()
    }

    fn has_certs(&self) -> bool {
        self.current().is_some()
    }
}
