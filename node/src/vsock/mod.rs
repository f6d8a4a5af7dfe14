//! VSOCK on the host: connections to guests, and the service for guests ([`service`]).

pub(crate) mod service;
mod socket;

use std::{io, sync::Arc, time::Duration};

use daemon::tls::{Identity, connect_to_guest};
use futures::future::BoxFuture;
use tokio::{
    io::{AsyncRead, AsyncWrite},
    time::timeout,
};

/// Limit of a connection with its TLS handshake. Shorter than that of virt-api (25 s).
const CONNECT_LIMIT: Duration = Duration::from_secs(8);

/// A byte stream in both directions.
pub(crate) trait Duplex: AsyncRead + AsyncWrite + Send + Unpin {}

impl<S: AsyncRead + AsyncWrite + Send + Unpin> Duplex for S {}

type Dial = dyn Fn(u32, u32) -> BoxFuture<'static, io::Result<Box<dyn Duplex>>> + Send + Sync;

/// Connects to guests. Cheap to clone.
#[derive(Clone)]
pub(crate) struct Guests {
    dial: Arc<Dial>,
    identity: Identity,
}

impl Guests {
    /// Returns a connector to the guests of this host. With TLS, it shows `identity`.
    pub(crate) fn new(identity: Identity) -> Self {
        Self::dialled(identity, |cid, port| {
            Box::pin(async move { Ok(Box::new(socket::connect(cid, port).await?) as Box<dyn Duplex>) })
        })
    }

    /// Returns a connector with another way to dial.
    pub(crate) fn dialled(
        identity: Identity,
        dial: impl Fn(u32, u32) -> BoxFuture<'static, io::Result<Box<dyn Duplex>>> + Send + Sync + 'static,
    ) -> Self {
        Self { dial: Arc::new(dial), identity }
    }

    /// Connects to a port of the guest with this context id.
    ///
    /// # Errors
    /// When the guest does not accept the connection in time, or TLS fails.
    pub(crate) async fn connect(&self, cid: u32, port: u32, tls: bool) -> io::Result<Box<dyn Duplex>> {
        let reached = timeout(CONNECT_LIMIT, self.dial_and_handshake(cid, port, tls)).await;
        reached.unwrap_or_else(|_| Err(io::ErrorKind::TimedOut.into()))
    }

    async fn dial_and_handshake(&self, cid: u32, port: u32, tls: bool) -> io::Result<Box<dyn Duplex>> {
        let stream = (self.dial)(cid, port).await?;
        if tls { Ok(Box::new(connect_to_guest(&self.identity, stream).await?)) } else { Ok(stream) }
    }
}

#[cfg(test)]
impl Guests {
    /// Returns a connector to guests whose ports send what was dialled, then echo their input.
    pub(crate) fn echoing() -> Self {
        use tokio::{io::AsyncWriteExt, net::UnixStream};

        Self::dialled(Identity::empty(), |cid, port| {
            Box::pin(async move {
                let (near, mut far) = UnixStream::pair()?;
                far.write_all(format!("{cid}:{port}\n").as_bytes()).await?;
                tokio::spawn(async move {
                    let (mut read, mut write) = far.split();
                    tokio::io::copy(&mut read, &mut write).await
                });
                Ok(Box::new(near) as Box<dyn Duplex>)
            })
        })
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};

    use super::*;

    #[tokio::test]
    async fn a_connection_carries_bytes_both_ways() {
        let guests = Guests::echoing();
        let mut stream = guests.connect(7, 22, false).await.unwrap();
        stream.write_all(b"hello").await.unwrap();
        stream.shutdown().await.unwrap();
        let mut received = String::new();
        stream.read_to_string(&mut received).await.unwrap();
        assert_eq!(received, "7:22\nhello");
    }

    #[tokio::test]
    async fn there_is_no_tls_without_a_certificate_to_show() {
        let error = Guests::echoing().connect(7, 22, true).await.err().unwrap();
        assert_eq!(error.to_string(), "there is no certificate to show to guests yet");
    }
}
