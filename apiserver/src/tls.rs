//! The TLS side of the server.
//!
//! A client certificate is asked for, and the client has to prove that it holds the key, but whom the certificate
//! belongs to and who vouches for it is judged with each request ([`crate::authentication`]). So a change of the trusted
//! authorities counts for connections that are open already, and a webhook client that presents some certificate of its
//! own is served like one without.

use std::sync::Arc;

use process::tls::{Identity, provider};
use rustls::{
    DigitallySignedStruct, DistinguishedName, Error, ServerConfig, SignatureScheme,
    client::danger::HandshakeSignatureValid,
    crypto::{CryptoProvider, verify_tls12_signature, verify_tls13_signature},
    server::{
        NoServerSessionStorage,
        danger::{ClientCertVerified, ClientCertVerifier},
    },
};
use rustls_pki_types::{CertificateDer, UnixTime};

/// The configuration of the server, with the certificate in force at each handshake. HTTP/1.1 only, since streams are
/// opened by its upgrade.
pub fn server_config(identity: &Identity) -> Result<Arc<ServerConfig>, Error> {
    let mut config = ServerConfig::builder_with_provider(provider())
        .with_safe_default_protocol_versions()?
        .with_client_cert_verifier(Arc::new(Deferred { provider: provider() }))
        .with_cert_resolver(Arc::new(identity.clone()));
    config.alpn_protocols = vec![b"http/1.1".to_vec()];
    // A resumed session would carry a certificate whose key has not been proven for this connection.
    config.session_storage = Arc::new(NoServerSessionStorage {});
    config.send_tls13_tickets = 0;
    Ok(Arc::new(config))
}

/// Lets every certificate in and proves possession only.
#[derive(Debug)]
struct Deferred {
    provider: Arc<CryptoProvider>,
}

impl ClientCertVerifier for Deferred {
    fn client_auth_mandatory(&self) -> bool {
        false
    }

    // No hints: a client that has a certificate shall send it.
    fn root_hint_subjects(&self) -> &[DistinguishedName] {
        &[]
    }

    fn verify_client_cert(
        &self,
        _end_entity: &CertificateDer<'_>,
        _intermediates: &[CertificateDer<'_>],
        _now: UnixTime,
    ) -> Result<ClientCertVerified, Error> {
        Ok(ClientCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        verify_tls12_signature(message, certificate, signature, &self.provider.signature_verification_algorithms)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        verify_tls13_signature(message, certificate, signature, &self.provider.signature_verification_algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.provider.signature_verification_algorithms.supported_schemes()
    }
}
