//! A certificate chain with its key, replaceable while connections are accepted.

use std::{fmt, sync::Arc};

use arc_swap::ArcSwapOption;
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

use super::{TlsError, provider};

/// Certificate chain and key with which this process presents itself. Cheap to clone; all clones change together.
#[derive(Clone)]
pub struct Identity {
    key: Arc<ArcSwapOption<CertifiedKey>>,
    version: watch::Sender<u64>,
}

impl Identity {
    /// An identity that has no certificate yet. Handshakes fail until [`Identity::set_pem`].
    #[must_use]
    pub fn empty() -> Self {
        Self { key: Arc::new(ArcSwapOption::empty()), version: watch::Sender::new(0) }
    }

    /// The identity in the TLS Secret `name` (keys `tls.crt`, `tls.key`), followed live. Spawns the task that watches.
    /// A Secret that is deleted or unusable leaves the last identity in force.
    #[must_use]
    pub fn follow(client: Client, namespace: &str, name: &str) -> Self {
        let identity = Self::empty();
        let (followed, secret_name) = (identity.clone(), name.to_owned());
        let mut known = None;
        let watched = crate::object::follow(
            Api::<Secret>::namespaced(client, namespace),
            name.to_owned(),
            move |secret: Option<Secret>| {
                let Some(secret) = secret else {
                    tracing::debug!(secret = %secret_name, "Secret does not exist yet");
                    return;
                };
                if known.is_some() && known == secret.data {
                    return;
                }
                match followed.set_secret(&secret) {
                    Ok(()) => tracing::info!(secret = %secret_name, "certificate in force"),
                    Err(error) => tracing::warn!(
                        secret = %secret_name,
                        error = %crate::object::chain(&error),
                        "certificate cannot be used; the last one stays in force"
                    ),
                }
                known = secret.data;
            },
        );
        tokio::spawn(watched);
        identity
    }

    fn set_secret(&self, secret: &Secret) -> Result<(), TlsError> {
        let data = secret.data.as_ref().ok_or(TlsError::Missing("tls.crt"))?;
        let chain = data.get("tls.crt").ok_or(TlsError::Missing("tls.crt"))?;
        let key = data.get("tls.key").ok_or(TlsError::Missing("tls.key"))?;
        self.set_pem(&chain.0, &key.0)
    }

    /// Puts a chain and its key, both PEM, in force. The key has to belong to the first certificate.
    pub fn set_pem(&self, chain: &[u8], key: &[u8]) -> Result<(), TlsError> {
        let chain: Vec<CertificateDer<'static>> = CertificateDer::pem_slice_iter(chain)
            .collect::<Result<_, _>>()
            .map_err(|error| TlsError::Pem { what: "tls.crt", reason: error.to_string() })?;
        if chain.is_empty() {
            return Err(TlsError::Missing("tls.crt"));
        }
        let key = PrivateKeyDer::from_pem_slice(key)
            .map_err(|error| TlsError::Pem { what: "tls.key", reason: error.to_string() })?;
        let certified = CertifiedKey::from_der(chain, key, &provider()).map_err(TlsError::Rustls)?;
        self.key.store(Some(Arc::new(certified)));
        self.version.send_modify(|version| *version += 1);
        Ok(())
    }

    /// The chain and key in force.
    #[must_use]
    pub fn current(&self) -> Option<Arc<CertifiedKey>> {
        self.key.load_full()
    }

    /// Waits until there is a certificate.
    pub async fn ready(&self) {
        let mut versions = self.version.subscribe();
        // The sender lives in self, so waiting cannot fail.
        let _ = versions.wait_for(|version| *version > 0).await;
    }

    /// Counts the certificates put in force; changes are seen on the receiver.
    #[must_use]
    pub fn versions(&self) -> watch::Receiver<u64> {
        self.version.subscribe()
    }
}

impl fmt::Debug for Identity {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("Identity").field("version", &*self.version.borrow()).finish_non_exhaustive()
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
        self.key.load().is_some()
    }
}
