//! TLS versions and ciphers of a server by `spec.configuration.tlsConfiguration`, followed live.

use std::sync::{Arc, Mutex};

use api::kubevirt::configuration::TlsConfiguration;
use rustls::{CipherSuite, ServerConfig, SupportedProtocolVersion, crypto::CryptoProvider, version::TLS13};

use super::{ClientPolicy, Identity, TlsError, configs::server_config_with, provider};
use crate::config::ConfigHandle;
use crate::lock;

/// The TLS configuration for the next connection of a server.
#[derive(Clone)]
pub struct ServerTls(Arc<dyn Fn() -> Arc<ServerConfig> + Send + Sync>);

impl From<Arc<ServerConfig>> for ServerTls {
    /// Uses the same configuration for all connections.
    fn from(config: Arc<ServerConfig>) -> Self {
        Self(Arc::new(move || config.clone()))
    }
}

impl ServerTls {
    /// Creates configurations like [`super::server_config`] with the lowest version and the ciphers of
    /// `spec.configuration.tlsConfiguration` at the time of the connection.
    ///
    /// # Errors
    /// When rustls rejects the material.
    pub fn following(
        identity: &Identity,
        clients: ClientPolicy,
        alpn: &'static [&'static str],
        config: ConfigHandle,
    ) -> Result<Self, TlsError> {
        let identity = identity.clone();
        let make = move |wanted: &TlsConfiguration| {
            server_config_with(provider_for(wanted), versions(wanted), &identity, clients.clone(), alpn)
        };
        let first = config.current().tls.clone();
        let made = make(&first)?;
        let kept = Mutex::new((first, made));
        Ok(Self(Arc::new(move || {
            let wanted = &config.current().tls;
            let mut kept = lock(&kept);
            if kept.0 != *wanted {
                match make(wanted) {
                    Ok(made) => *kept = (wanted.clone(), made),
                    // Admission rejects such a configuration; the last usable one stays in force.
                    Err(error) => tracing::warn!(%error, "the TLS configuration cannot be used"),
                }
            }
            kept.1.clone()
        })))
    }

    /// Returns the configuration for a new connection.
    #[must_use]
    pub fn current(&self) -> Arc<ServerConfig> {
        (self.0)()
    }
}

/// Returns the versions served: from 1.2 on, whatever is configured.
fn versions(wanted: &TlsConfiguration) -> &'static [&'static SupportedProtocolVersion] {
    const NEWEST: &[&SupportedProtocolVersion] = &[&TLS13];
    if wanted.min_tls_version.as_deref() == Some("VersionTLS13") { NEWEST } else { rustls::DEFAULT_VERSIONS }
}

/// Returns the provider with the configured ciphers. As in Go, the list concerns TLS 1.2; those of 1.3 are always served.
fn provider_for(wanted: &TlsConfiguration) -> Arc<CryptoProvider> {
    let all = provider();
    if wanted.ciphers.is_empty() {
        return all;
    }
    let mut some = CryptoProvider::clone(&all);
    some.cipher_suites
        .retain(|suite| suite.tls13().is_some() || wanted.ciphers.iter().any(|c| *c == name(suite.suite())));
    Arc::new(some)
}

/// Returns the IANA name of a cipher, which the configuration uses.
fn name(suite: CipherSuite) -> String {
    format!("{suite:?}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn configuration_decides_versions_and_ciphers() {
        let wanted = |version: Option<&str>, ciphers: &[&str]| TlsConfiguration {
            min_tls_version: version.map(str::to_owned),
            ciphers: ciphers.iter().map(|&cipher| cipher.to_owned()).collect(),
        };
        for (version, count) in
            [(None, 2), (Some("VersionTLS10"), 2), (Some("VersionTLS12"), 2), (Some("VersionTLS13"), 1)]
        {
            assert_eq!(versions(&wanted(version, &[])).len(), count, "{version:?}");
        }
        let older = |ciphers: &[&str]| {
            let provider = provider_for(&wanted(Some("VersionTLS12"), ciphers));
            assert!(provider.cipher_suites.iter().any(|suite| suite.tls13().is_some()));
            provider.cipher_suites.iter().filter(|suite| suite.tls13().is_none()).count()
        };
        assert!(older(&[]) > 1);
        assert_eq!(older(&["TLS_ECDHE_ECDSA_WITH_AES_128_GCM_SHA256"]), 1);
        assert_eq!(older(&["TLS_ECDHE_ECDSA_WITH_CHACHA20_POLY1305_SHA256", "TLS_RSA_WITH_AES_128_CBC_SHA"]), 1);
    }
}
