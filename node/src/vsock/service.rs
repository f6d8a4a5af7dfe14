//! The VSOCK service for guests: it returns the certificates of the installation's authorities, with which guests authenticate
//! their clients. These are public.
//!
//! The service runs while the feature gate is enabled and the node has the device. Guests are hostile: the number and the
//! lifetime of connections are limited, and divided among guests.

use std::{
    io,
    path::PathBuf,
    pin::Pin,
    task::{Context, Poll},
    time::Duration,
};

use api::{FeatureGate, vsock::SYSTEM_PORT};
use daemon::{
    config::ConfigHandle,
    quota::{Quota, Slot},
    tls::Roots,
};
use futures::Stream;
use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    time::sleep,
};
use tokio_util::sync::CancellationToken;
use tokio_vsock::{VsockListener, VsockStream};
use tonic::{
    Request, Response, Status,
    transport::{Server, server::Connected},
};

use self::v1::{
    Bundle, EmptyRequest,
    system_server::{System, SystemServer},
};
use super::socket;
use crate::{
    devices::{VHOST_VSOCK, is_present},
    safe_dir::SafeDir,
};

/// The service's messages.
#[allow(
    missing_docs,
    unreachable_pub,
    clippy::all,
    reason = "generated from the proto file, which holds the documentation"
)]
mod v1 {
    tonic::include_proto!("kubevirt.vsock.system.v1");
}

/// Most connections at a time.
const CONNECTIONS: usize = 64;
/// Lifetime of a connection, and the limit of its last request after that.
const LIFE: (Duration, Duration) = (Duration::from_secs(10), Duration::from_secs(1));
/// Most requests of a connection at a time.
const REQUESTS: u32 = 4;
/// Largest request: it has no fields.
const MAX_REQUEST: usize = 1024;
/// Interval of checks for the device, and pause after a failure.
const RECHECK: Duration = Duration::from_secs(30);
const RETRY: Duration = Duration::from_secs(1);

/// Serves guests until `stop`.
pub(crate) async fn run(dev_dir: PathBuf, mut config: ConfigHandle, roots: Roots, stop: CancellationToken) {
    let serve = async {
        loop {
            gate(&mut config, true).await;
            if !SafeDir::trusted(&dev_dir).is_ok_and(|dev| is_present(&dev, VHOST_VSOCK)) {
                sleep(RECHECK).await;
                continue;
            }
            match socket::listen(SYSTEM_PORT) {
                Ok(listener) => {
                    tracing::info!("VSOCK service for guests started");
                    let shutdown = gate(&mut config, false);
                    if let Err(error) = server(roots.clone(), incoming(listener), shutdown).await {
                        tracing::warn!(%error, "VSOCK service for guests ended");
                    }
                }
                // A virt-handler that is about to exit may still use the port.
                Err(error) => tracing::info!(%error, "cannot listen on VSOCK"),
            }
            sleep(RETRY).await;
        }
    };
    tokio::select! {
        () = stop.cancelled() => {}
        () = serve => {}
    }
}

/// Waits until the feature gate for VSOCK is enabled, or disabled.
pub(crate) async fn gate(config: &mut ConfigHandle, on: bool) {
    while config.current().enabled(FeatureGate::Vsock) != on {
        config.changed().await;
    }
}

async fn server<S: AsyncRead + AsyncWrite + Unpin + Send + 'static>(
    roots: Roots,
    incoming: impl Stream<Item = io::Result<Guest<S>>>,
    shutdown: impl Future<Output = ()>,
) -> Result<(), tonic::transport::Error> {
    let service = SystemServer::new(Authorities(roots)).max_decoding_message_size(MAX_REQUEST);
    Server::builder()
        .max_connection_age(LIFE.0)
        .max_connection_age_grace(LIFE.1)
        .max_concurrent_streams(REQUESTS)
        .add_service(service)
        .serve_with_incoming_shutdown(incoming, shutdown)
        .await
}

/// Accepts the connections of guests within their quota.
fn incoming(listener: VsockListener) -> impl Stream<Item = io::Result<Guest>> {
    let quota = Quota::new(CONNECTIONS);
    futures::stream::unfold((listener, quota), |(listener, quota)| async move {
        let guest = next(&listener, &quota).await;
        Some((Ok(guest), (listener, quota)))
    })
}

async fn next(listener: &VsockListener, quota: &Quota<u32>) -> Guest {
    loop {
        match listener.accept().await {
            Ok((stream, address)) => match quota.acquire(address.cid()) {
                Ok(slot) => return Guest { stream, _slot: slot },
                Err(exceeded) => tracing::debug!(cid = address.cid(), %exceeded, "connection of a guest refused"),
            },
            Err(error) => {
                tracing::warn!(%error, "cannot accept a connection of a guest");
                sleep(RETRY).await;
            }
        }
    }
}

/// The connection of a guest with its slot.
struct Guest<S = VsockStream> {
    stream: S,
    _slot: Slot<u32>,
}

impl<S> Connected for Guest<S> {
    type ConnectInfo = ();

    fn connect_info(&self) {}
}

impl<S: AsyncRead + Unpin> AsyncRead for Guest<S> {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(cx, buffer)
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Guest<S> {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, data: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(cx, data)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}

/// The current authorities.
struct Authorities(Roots);

#[tonic::async_trait]
impl System for Authorities {
    async fn ca_bundle(&self, _: Request<EmptyRequest>) -> Result<Response<Bundle>, Status> {
        let raw = self.0.pem().ok_or_else(|| Status::unavailable("there is no authority yet"))?;
        Ok(Response::new(Bundle { raw }))
    }
}

#[cfg(test)]
mod tests {
    use futures::StreamExt;
    use hyper_util::rt::TokioIo;
    use rcgen::{BasicConstraints, CertificateParams, IsCa, KeyPair};
    use tokio::net::UnixStream;
    use tonic::transport::Endpoint;

    use super::{v1::system_client::SystemClient, *};

    #[tokio::test]
    async fn a_guest_gets_the_authorities() {
        let mut params = CertificateParams::new(Vec::<String>::new()).unwrap();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let bundle = params.self_signed(&KeyPair::generate().unwrap()).unwrap().pem();
        let (near, far) = UnixStream::pair().unwrap();
        let guest = Guest { stream: near, _slot: Quota::new(CONNECTIONS).acquire(7).unwrap() };
        let incoming = futures::stream::iter([Ok(guest)]).chain(futures::stream::pending());
        let roots = Roots::empty();
        tokio::spawn(server(roots.clone(), incoming, std::future::pending()));
        let mut far = Some(far);
        let channel = Endpoint::from_static("http://host")
            .connect_with_connector(tower::service_fn(move |_| {
                let far = far.take();
                async move { far.map(TokioIo::new).ok_or_else(|| io::Error::other("connected already")) }
            }))
            .await
            .unwrap();
        let mut client = SystemClient::new(channel);
        let missing = client.ca_bundle(EmptyRequest {}).await.unwrap_err();
        assert_eq!(missing.message(), "there is no authority yet");
        roots.set_pem(bundle.as_bytes()).unwrap();
        let answer = client.ca_bundle(EmptyRequest {}).await.unwrap().into_inner();
        assert_eq!(answer.raw, bundle.as_bytes());
    }
}
