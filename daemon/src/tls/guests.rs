//! TLS towards a program in a guest.

use std::{io, sync::Arc};

use rustls::{ClientConfig, pki_types::ServerName};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio_rustls::{TlsConnector, client::TlsStream};

use super::{Identity, ServerVerifier, TlsError, provider};

/// Server name, which rustls requires. It is neither sent nor compared.
const NAME: &str = "guest";

/// Speaks TLS 1.3 over a stream to a guest and shows it `identity`.
///
/// The guest's certificate may be any: the stream identifies the guest. The guest identifies the caller by the certificate of
/// `identity`, so there is no connection without one.
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
        .with_custom_certificate_verifier(Arc::new(ServerVerifier::Any))
        .with_client_cert_resolver(Arc::new(identity.clone()));
    config.enable_sni = false;
    config.resumption = rustls::client::Resumption::disabled();
    Ok(Arc::new(config))
}
