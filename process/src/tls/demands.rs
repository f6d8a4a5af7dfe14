//! The TLS of a server as the cluster's configuration demands it, followed live.

use std::sync::{Arc, Mutex, PoisonError};

use api::kubevirt::configuration::TlsConfiguration;
use rustls::{CipherSuite, ServerConfig, SupportedProtocolVersion, crypto::CryptoProvider, version::TLS13};

use super::{ClientPolicy, Identity, TlsError, configs::server_config_with, provider};
use crate::config::ConfigHandle;

/// The TLS of a server: what the next connection gets.
#[derive(Clone)]
pub struct ServerTls(Arc<dyn Fn() -> Arc<ServerConfig> + Send + Sync>);

impl From<Arc<ServerConfig>> for ServerTls {
    /// The same for all connections.
    fn from(config: Arc<ServerConfig>) -> Self {
        Self(Arc::new(move || config.clone()))
    }
}

impl ServerTls {
    /// As [`super::server_config`], with the lowest version and the ciphers of `spec.configuration.tlsConfiguration` that
    /// are in force when a connection comes.
    ///
    /// # Errors
    /// When rustls refuses the material.
    pub fn following(
        identity: &Identity,
        clients: ClientPolicy,
        alpn: &'static [&'static str],
        config: ConfigHandle,
    ) -> Result<Self, TlsError> {
        let identity = identity.clone();
        let make = move |demands: &TlsConfiguration| {
            server_config_with(chosen(demands), versions(demands), &identity, clients.clone(), alpn)
        };
        let first = config.current().tls.clone();
        let made = make(&first)?;
        let kept = Mutex::new((first, made));
        Ok(Self(Arc::new(move || {
            let demands = &config.current().tls;
            let mut kept = kept.lock().unwrap_or_else(PoisonError::into_inner);
            if kept.0 != *demands {
                match make(demands) {
                    Ok(made) => *kept = (demands.clone(), made),
                    // Admission refuses what cannot be served; the last that could be stays.
                    Err(error) => tracing::warn!(%error, "the TLS configuration cannot be used"),
                }
            }
            kept.1.clone()
        })))
    }

    /// The configuration for a connection that comes now.
    #[must_use]
    pub fn current(&self) -> Arc<ServerConfig> {
        (self.0)()
    }
}

/// 1.2 is the lowest that is served, whatever is asked for.
fn versions(demands: &TlsConfiguration) -> &'static [&'static SupportedProtocolVersion] {
    const NEWEST: &[&SupportedProtocolVersion] = &[&TLS13];
    if demands.min_tls_version.as_deref() == Some("VersionTLS13") { NEWEST } else { rustls::DEFAULT_VERSIONS }
}

/// The provider with the ciphers that are asked for. As in Go, the list is about TLS 1.2: those of 1.3 are all good.
fn chosen(demands: &TlsConfiguration) -> Arc<CryptoProvider> {
    let all = provider();
    if demands.ciphers.is_empty() {
        return all;
    }
    let mut some = CryptoProvider::clone(&all);
    some.cipher_suites
        .retain(|suite| suite.tls13().is_some() || demands.ciphers.iter().any(|c| *c == name(suite.suite())));
    Arc::new(some)
}

/// A cipher's name at IANA, which is the one in the configuration.
fn name(suite: CipherSuite) -> String {
    format!("{suite:?}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn demands_decide_versions_and_ciphers() {
        let demands = |version: Option<&str>, ciphers: &[&str]| TlsConfiguration {
            min_tls_version: version.map(str::to_owned),
            ciphers: ciphers.iter().map(|&cipher| cipher.to_owned()).collect(),
        };
        for (version, count) in
            [(None, 2), (Some("VersionTLS10"), 2), (Some("VersionTLS12"), 2), (Some("VersionTLS13"), 1)]
        {
            assert_eq!(versions(&demands(version, &[])).len(), count, "{version:?}");
        }
        let older = |ciphers: &[&str]| {
            let provider = chosen(&demands(Some("VersionTLS12"), ciphers));
            assert!(provider.cipher_suites.iter().any(|suite| suite.tls13().is_some()));
            provider.cipher_suites.iter().filter(|suite| suite.tls13().is_none()).count()
        };
        assert!(older(&[]) > 1);
        assert_eq!(older(&["TLS_ECDHE_ECDSA_WITH_AES_128_GCM_SHA256"]), 1);
        assert_eq!(older(&["TLS_ECDHE_ECDSA_WITH_CHACHA20_POLY1305_SHA256", "TLS_RSA_WITH_AES_128_CBC_SHA"]), 1);
    }
}
