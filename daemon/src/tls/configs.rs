//! rustls configurations that read identity and trust anew at each handshake.

use std::sync::Arc;

use rustls::{ClientConfig, ServerConfig, SupportedProtocolVersion, crypto::CryptoProvider};

use super::{
    Identity, Roots, TlsError, provider,
    verifiers::{ClientTrust, ClientVerifier, ServerVerifier},
};

/// The client certificates that a server requires.
#[derive(Clone, Debug)]
pub enum ClientPolicy {
    /// The server requests a certificate, and a client that presents one proves in the handshake that it holds the key. Issuer
    /// and name are checked with each request: a change of the trusted authorities takes effect on open connections, and a
    /// client with a certificate of its own making is served like one without.
    Unjudged,
    /// The server requests a certificate. One that does not chain to the bundle fails the handshake; a client without one is
    /// accepted.
    Optional(Roots),
    /// A certificate that chains to the bundle is required.
    Required {
        /// The bundle.
        roots: Roots,
        /// The accepted common names, of which the certificate carries exactly one; empty: any.
        common_names: Arc<[String]>,
    },
}

impl ClientPolicy {
    /// Returns the policy that requires a certificate of the bundle with exactly this common name.
    #[must_use]
    pub fn only(roots: Roots, common_name: &str) -> Self {
        Self::Required { roots, common_names: Arc::new([common_name.to_owned()]) }
    }
}

/// Returns a server configuration with a live identity and policy. `alpn` lists the protocols offered, for HTTP `h2` and
/// `http/1.1`.
pub fn server_config(identity: &Identity, clients: ClientPolicy, alpn: &[&str]) -> Result<Arc<ServerConfig>, TlsError> {
    server_config_with(provider(), rustls::DEFAULT_VERSIONS, identity, clients, alpn)
}

/// As [`server_config`], with these ciphers and versions.
pub(super) fn server_config_with(
    provider: Arc<CryptoProvider>,
    versions: &[&'static SupportedProtocolVersion],
    identity: &Identity,
    clients: ClientPolicy,
    alpn: &[&str],
) -> Result<Arc<ServerConfig>, TlsError> {
    let builder =
        ServerConfig::builder_with_provider(provider).with_protocol_versions(versions).map_err(TlsError::Rustls)?;
    let (trust, mandatory) = match clients {
        ClientPolicy::Unjudged => (ClientTrust::Any, false),
        ClientPolicy::Optional(roots) => (ClientTrust::Bundle { roots, common_names: Arc::new([]) }, false),
        ClientPolicy::Required { roots, common_names } => (ClientTrust::Bundle { roots, common_names }, true),
    };
    let builder = builder.with_client_cert_verifier(Arc::new(ClientVerifier { trust, mandatory }));
    let mut config = builder.with_cert_resolver(Arc::new(identity.clone()));
    config.alpn_protocols = alpn.iter().map(|name| name.as_bytes().to_vec()).collect();
    // A session resumed after a rotation would carry a peer's old certificate.
    config.session_storage = Arc::new(rustls::server::NoServerSessionStorage {});
    config.send_tls13_tickets = 0;
    Ok(Arc::new(config))
}

/// Returns a client configuration that trusts `roots` and presents `identity`, if there is one.
pub fn client_config(roots: &Roots, identity: Option<&Identity>, alpn: &[&str]) -> Result<Arc<ClientConfig>, TlsError> {
    client_config_with(provider(), rustls::DEFAULT_VERSIONS, roots, identity, alpn)
}

/// As [`client_config`], with these ciphers and versions.
pub(super) fn client_config_with(
    provider: Arc<CryptoProvider>,
    versions: &[&'static SupportedProtocolVersion],
    roots: &Roots,
    identity: Option<&Identity>,
    alpn: &[&str],
) -> Result<Arc<ClientConfig>, TlsError> {
    let builder = ClientConfig::builder_with_provider(provider)
        .with_protocol_versions(versions)
        .map_err(TlsError::Rustls)?
        .dangerous()
        .with_custom_certificate_verifier(Arc::new(ServerVerifier::Bundle(roots.clone())));
    let mut config = match identity {
        Some(identity) => builder.with_client_cert_resolver(Arc::new(identity.clone())),
        None => builder.with_no_client_auth(),
    };
    config.alpn_protocols = alpn.iter().map(|name| name.as_bytes().to_vec()).collect();
    config.resumption = rustls::client::Resumption::disabled();
    Ok(Arc::new(config))
}
