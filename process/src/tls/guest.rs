//! TLS towards a program in a guest.

use std::{io, sync::Arc};

use rustls::{
    ClientConfig, DigitallySignedStruct, Error, SignatureScheme,
    client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier},
    crypto::{verify_tls12_signature, verify_tls13_signature},
    pki_types::{CertificateDer, ServerName, UnixTime},
};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio_rustls::{TlsConnector, client::TlsStream};

use super::{Identity, TlsError, provider};

/// Name that TLS wants for the other end. It is neither sent nor compared.
const NAME: &str = "guest";

/// Speaks TLS 1.3 over a stream to a guest and shows it `identity`.
///
/// Nobody vouches for a guest's certificate: it may be any, and who is at the other end is known from the stream alone.
/// The guest learns from the certificate that it is shown who calls, so there is no connection without one.
///
/// # Errors
/// When there is no identity yet, or the handshake fails.
pub async fn connect_to_guest<S>(identity: &Identity, stream: S) -> io::Result<TlsStream<S>>
where
    S: AsyncRead + AsyncWrite + Unpin,
{
    if identity.current().is_none() {
        return Err(io::Error::other("there is no certificate to show to guests yet"));
    }
    let config = config(identity).map_err(io::Error::other)?;
    let name = ServerName::try_from(NAME).map_err(io::Error::other)?;
    TlsConnector::from(config).connect(name, stream).await
}

fn config(identity: &Identity) -> Result<Arc<ClientConfig>, TlsError> {
    let mut config = ClientConfig::builder_with_provider(provider())
        .with_protocol_versions(&[&rustls::version::TLS13])
        .map_err(TlsError::Rustls)?
        .dangerous()
        .with_custom_certificate_verifier(Arc::new(AnyGuest))
        .with_client_cert_resolver(Arc::new(identity.clone()));
    config.enable_sni = false;
    config.resumption = rustls::client::Resumption::disabled();
    Ok(Arc::new(config))
}

/// Takes any certificate whose key the guest has.
#[derive(Debug)]
struct AnyGuest;

impl ServerCertVerifier for AnyGuest {
    fn verify_server_cert(
        &self,
        _end_entity: &CertificateDer<'_>,
        _intermediates: &[CertificateDer<'_>],
        _server_name: &ServerName<'_>,
        _ocsp_response: &[u8],
        _now: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        Ok(ServerCertVerified::assertion())
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
