//! New connections to components.

use std::{io, net::SocketAddr, time::Duration};

use axum::body::Body;
use hyper::client::conn::http1::{self, SendRequest};
use hyper_util::rt::TokioIo;
use rustls_pki_types::ServerName;
use tokio::{net::TcpStream, time::timeout};
use tokio_rustls::TlsConnector;

/// Longest time for a TCP and TLS handshake.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);

/// Connects to `address` and verifies that the certificate is for `name`.
pub(super) async fn dial(
    tls: &TlsConnector,
    address: SocketAddr,
    name: ServerName<'static>,
) -> io::Result<SendRequest<Body>> {
    let stream = timeout(CONNECT_TIMEOUT, async {
        let stream = TcpStream::connect(address).await?;
        // Streams carry single keystrokes.
        stream.set_nodelay(true)?;
        tls.connect(name, stream).await
    })
    .await
    .map_err(|_| io::Error::from(io::ErrorKind::TimedOut))??;
    let (sender, connection) = http1::handshake(TokioIo::new(stream)).await.map_err(io::Error::other)?;
    // The task ends with the connection: when sender and answer, or the upgraded stream, are dropped.
    tokio::spawn(async move {
        if let Err(error) = connection.with_upgrades().await {
            tracing::debug!(%address, %error, "connection ended");
        }
    });
    Ok(sender)
}
