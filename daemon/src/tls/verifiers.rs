//! The verifiers of certificates: one for servers, one for clients. Both check signatures alike and read trust anew at each
//! handshake.

use std::sync::Arc;

use rustls::{
    CertificateError, DigitallySignedStruct, DistinguishedName, Error, SignatureScheme,
    client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier},
    crypto::{verify_tls12_signature, verify_tls13_signature},
    pki_types::{CertificateDer, ServerName, UnixTime},
    server::danger::{ClientCertVerified, ClientCertVerifier},
};

use super::{Roots, peer::common_name, provider, roots::RootSet};

/// Implements the checks of signatures, which both traits of rustls ask for.
macro_rules! check_signatures {
    () => {
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
    };
}

/// Verifies servers.
#[derive(Debug)]
pub enum ServerVerifier {
    /// Accepts every certificate whose key the server holds. For servers that are known by the stream to them, and for
    /// tests.
    Any,
    /// Accepts certificates for the server's name that chain to the bundle in force.
    Bundle(Roots),
}

impl ServerCertVerifier for ServerVerifier {
    fn verify_server_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        server_name: &ServerName<'_>,
        ocsp_response: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        match self {
            Self::Any => Ok(ServerCertVerified::assertion()),
            Self::Bundle(roots) => {
                in_force(roots)?.servers.verify_server_cert(end_entity, intermediates, server_name, ocsp_response, now)
            }
        }
    }

    check_signatures!();
}

/// Certificates of clients that are accepted.
#[derive(Debug)]
pub(super) enum ClientTrust {
    /// All: requests are judged one by one.
    Any,
    /// Those of the bundle in force with one of these common names; empty: with any.
    Bundle {
        /// The bundle.
        roots: Roots,
        /// The common names.
        common_names: Arc<[String]>,
    },
}

/// Verifies clients.
#[derive(Debug)]
pub(super) struct ClientVerifier {
    /// Certificates that are accepted.
    pub(super) trust: ClientTrust,
    /// A client without a certificate is rejected.
    pub(super) mandatory: bool,
}

impl ClientCertVerifier for ClientVerifier {
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
        let ClientTrust::Bundle { roots, common_names } = &self.trust else {
            return Ok(ClientCertVerified::assertion());
        };
        let verified = in_force(roots)?.clients.verify_client_cert(end_entity, intermediates, now)?;
        let named = || common_name(end_entity).is_some_and(|name| common_names.contains(&name));
        if common_names.is_empty() || named() {
            Ok(verified)
        } else {
            Err(Error::InvalidCertificate(CertificateError::ApplicationVerificationFailure))
        }
    }

    check_signatures!();
}

fn in_force(roots: &Roots) -> Result<Arc<RootSet>, Error> {
    roots.current().ok_or(Error::InvalidCertificate(CertificateError::UnknownIssuer))
}
