//! VSOCK on the side of the host: connections to guests, and what guests can ask of the host ([`service`]).

pub mod service;
mod socket;

use std::{io, sync::Arc, time::Duration};

use futures::future::BoxFuture;
use process::tls::{Identity, connect_to_guest};
use tokio::{
    io::{AsyncRead, AsyncWrite},
    net::UnixStream,
    time::timeout,
};

/// Longest wait for a guest to take a connection, and to agree on TLS. virt-api waits ten seconds for the answer.
const REACH: Duration = Duration::from_secs(8);

/// Bytes both ways.
pub trait Duplex: AsyncRead + AsyncWrite + Send + Unpin {}

impl<S: AsyncRead + AsyncWrite + Send + Unpin> Duplex for S {}

type Dial = dyn Fn(u32, u32) -> BoxFuture<'static, io::Result<UnixStream>> + Send + Sync;

/// How guests are reached. Cheap to clone.
#[derive(Clone)]
pub struct Guests {
    dial: Arc<Dial>,
    identity: Identity,
}

impl Guests {
    /// Guests of this host, which are shown `identity` where TLS is spoken.
    #[must_use]
    pub fn new(identity: Identity) -> Self {
        Self::dialled(identity, |cid, port| Box::pin(socket::connect(cid, port)))
    }

    /// Guests that are reached in some other way than the kernel's.
    pub(crate) fn dialled(
        identity: Identity,
        dial: impl Fn(u32, u32) -> BoxFuture<'static, io::Result<UnixStream>> + Send + Sync + 'static,
    ) -> Self {
        Self { dial: Arc::new(dial), identity }
    }

    /// Connects to a port of the guest with this context id.
    ///
    /// # Errors
    /// When the guest does not take the connection, or not in time, or TLS fails.
    pub async fn connect(&self, cid: u32, port: u32, tls: bool) -> io::Result<Box<dyn Duplex>> {
        let reached = timeout(REACH, self.reach(cid, port, tls)).await;
        reached.unwrap_or_else(|_| Err(io::ErrorKind::TimedOut.into()))
    }

    async fn reach(&self, cid: u32, port: u32, tls: bool) -> io::Result<Box<dyn Duplex>> {
        let stream = (self.dial)(cid, port).await?;
        if tls { Ok(Box::new(connect_to_guest(&self.identity, stream).await?)) } else { Ok(Box::new(stream)) }
    }
}

#[cfg(test)]
impl Guests {
    /// Guests whose ports say what was dialled, and then return what they get.
    pub(crate) fn echoing() -> Self {
        use tokio::io::AsyncWriteExt;

        Self::dialled(Identity::empty(), |cid, port| {
            Box::pin(async move {
                let (near, mut far) = UnixStream::pair()?;
                far.write_all(format!("{cid}:{port}\n").as_bytes()).await?;
                tokio::spawn(async move {
                    let (mut read, mut write) = far.split();
                    tokio::io::copy(&mut read, &mut write).await
                });
                Ok(near)
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
        let mut said = String::new();
        stream.read_to_string(&mut said).await.unwrap();
        assert_eq!(said, "7:22\nhello");
    }

    #[tokio::test]
    async fn there_is_no_tls_without_a_certificate_to_show() {
        let error = Guests::echoing().connect(7, 22, true).await.err().unwrap();
        assert_eq!(error.to_string(), "there is no certificate to show to guests yet");
    }
}
