//! rustls configurations that read identity and trust anew at each handshake.

use std::sync::Arc;

use rustls::{
    CertificateError, ClientConfig, DigitallySignedStruct, DistinguishedName, Error, ServerConfig, SignatureScheme,
    SupportedProtocolVersion,
    client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier},
    crypto::{CryptoProvider, verify_tls12_signature, verify_tls13_signature},
    pki_types::{CertificateDer, ServerName, UnixTime},
    server::danger::{ClientCertVerified, ClientCertVerifier},
};

use super::{Identity, Roots, TlsError, peer::common_name, provider};

/// What a server asks of its clients.
#[derive(Clone, Debug)]
pub enum ClientPolicy {
    /// A certificate is asked for, and whoever shows one has to prove that it holds the key. Whom it belongs to and who
    /// vouches for it is judged with each request: so a change of the trusted authorities counts for connections that
    /// are open already, and who shows a certificate of its own is served like one without.
    Unjudged,
    /// A certificate is asked for; one that does not chain to the bundle ends the handshake, none is let in.
    Optional(Roots),
    /// A certificate that chains to the bundle is required.
    Required {
        /// What it has to chain to.
        roots: Roots,
        /// The common names of which it has to carry one, as its only one; empty: any.
        common_names: Arc<[String]>,
    },
}

impl ClientPolicy {
    /// A certificate of the bundle with exactly this common name is required.
    #[must_use]
    pub fn only(roots: Roots, common_name: &str) -> Self {
        Self::Required { roots, common_names: Arc::new([common_name.to_owned()]) }
    }
}

/// A server configuration with a live identity and policy. `alpn`: the protocols offered, for HTTP `h2`, `http/1.1`.
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
    let builder = match clients {
        ClientPolicy::Unjudged => {
            builder.with_client_cert_verifier(Arc::new(LiveClientVerifier { trust: Trust::Unjudged, mandatory: false }))
        }
        ClientPolicy::Optional(roots) => {
            let trust = Trust::Bundle { roots, common_names: Arc::new([]) };
            builder.with_client_cert_verifier(Arc::new(LiveClientVerifier { trust, mandatory: false }))
        }
        ClientPolicy::Required { roots, common_names } => {
            let trust = Trust::Bundle { roots, common_names };
            builder.with_client_cert_verifier(Arc::new(LiveClientVerifier { trust, mandatory: true }))
        }
    };
    let mut config = builder.with_cert_resolver(Arc::new(identity.clone()));
    config.alpn_protocols = alpn.iter().map(|name| name.as_bytes().to_vec()).collect();
    // A session resumed after a rotation would carry a peer's old certificate.
    config.session_storage = Arc::new(rustls::server::NoServerSessionStorage {});
    config.send_tls13_tickets = 0;
    Ok(Arc::new(config))
}

/// A client configuration that trusts `roots` and presents `identity`, if there is one.
pub fn client_config(roots: &Roots, identity: Option<&Identity>, alpn: &[&str]) -> Result<Arc<ClientConfig>, TlsError> {
    let builder = ClientConfig::builder_with_provider(provider())
        .with_safe_default_protocol_versions()
        .map_err(TlsError::Rustls)?
        .dangerous()
        .with_custom_certificate_verifier(Arc::new(LiveServerVerifier { roots: roots.clone() }));
    let mut config = match identity {
        Some(identity) => builder.with_client_cert_resolver(Arc::new(identity.clone())),
        None => builder.with_no_client_auth(),
    };
    config.alpn_protocols = alpn.iter().map(|name| name.as_bytes().to_vec()).collect();
    config.resumption = rustls::client::Resumption::disabled();
    Ok(Arc::new(config))
}

/// Who vouches for a client.
#[derive(Debug)]
enum Trust {
    /// That is not this layer's business.
    Unjudged,
    /// The bundle in force, for these names; empty: for any.
    Bundle { roots: Roots, common_names: Arc<[String]> },
}

/// Verifies clients when they connect.
#[derive(Debug)]
struct LiveClientVerifier {
    trust: Trust,
    mandatory: bool,
}

impl ClientCertVerifier for LiveClientVerifier {
    fn client_auth_mandatory(&self) -> bool {
        self.mandatory
    }

    // No hints: they would have to outlive a change of the bundle, and clients here hold one certificate anyway.
    fn root_hint_subjects(&self) -> &[DistinguishedName] {
        &[]
    }

    fn verify_client_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        now: UnixTime,
    ) -> Result<ClientCertVerified, Error> {
        let Trust::Bundle { roots, common_names } = &self.trust else { return Ok(ClientCertVerified::assertion()) };
        let set = roots.current().ok_or(Error::InvalidCertificate(CertificateError::UnknownIssuer))?;
        let verified = set.clients.verify_client_cert(end_entity, intermediates, now)?;
        if !common_names.is_empty() {
            let name = common_name(end_entity);
            if !name.is_some_and(|name| common_names.contains(&name)) {
                return Err(Error::InvalidCertificate(CertificateError::ApplicationVerificationFailure));
            }
        }
        Ok(verified)
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        verify_tls12_signature(message, certificate, signature, &provider().signature_verification_algorithms)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        verify_tls13_signature(message, certificate, signature, &provider().signature_verification_algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        provider().signature_verification_algorithms.supported_schemes()
    }
}

/// Verifies servers, chain and name, by the bundle in force.
#[derive(Debug)]
struct LiveServerVerifier {
    roots: Roots,
}

impl ServerCertVerifier for LiveServerVerifier {
    fn verify_server_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        server_name: &ServerName<'_>,
        ocsp_response: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        let set = self.roots.current().ok_or(Error::InvalidCertificate(CertificateError::UnknownIssuer))?;
        set.servers.verify_server_cert(end_entity, intermediates, server_name, ocsp_response, now)
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        verify_tls12_signature(message, certificate, signature, &provider().signature_verification_algorithms)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        verify_tls13_signature(message, certificate, signature, &provider().signature_verification_algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        provider().signature_verification_algorithms.supported_schemes()
    }
}
