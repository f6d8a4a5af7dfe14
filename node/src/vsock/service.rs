//! What guests can ask of the host: the certificates of the installation's authorities, by which they know whoever connects
//! to them. Anybody may have these.
//!
//! The service is there while the gate is on and the node has the device. Guests are hostile: their connections are few,
//! short, and shared among them.

use std::{
    io,
    path::PathBuf,
    pin::Pin,
    task::{Context, Poll},
    time::Duration,
};

use api::{gates, vsock::SYSTEM_PORT};
use futures::Stream;
use process::{
    config::ConfigHandle,
    shares::{Share, Shares},
    tls::Roots,
};
use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    net::UnixStream,
    time::sleep,
};
use tokio_util::sync::CancellationToken;
use tonic::{
    Request, Response, Status,
    transport::{Server, server::Connected},
};

use self::v1::{
    Bundle, EmptyRequest,
    system_server::{System, SystemServer},
};
use super::socket::Listener;
use crate::{device_access::is_there, device_plugin::VHOST_VSOCK, safe_dir::SafeDir};

/// The service's messages.
#[allow(missing_docs, clippy::all, reason = "generated from the proto file, which holds the documentation")]
mod v1 {
    tonic::include_proto!("kubevirt.vsock.system.v1");
}

/// Connections at a time.
const CONNECTIONS: usize = 64;
/// Time that a connection may be open, and that its last request may take from then on.
const LIFE: (Duration, Duration) = (Duration::from_secs(10), Duration::from_secs(1));
/// Requests of a connection at a time.
const REQUESTS: u32 = 4;
/// Largest request that is read: it has no fields.
const MAX_REQUEST: usize = 1024;
/// How often to look whether the device is there, and how soon to try again after a failure.
const RECHECK: Duration = Duration::from_secs(30);
const RETRY: Duration = Duration::from_secs(1);

/// Serves guests until `stop`.
pub async fn run(dev_dir: PathBuf, mut config: ConfigHandle, roots: Roots, stop: CancellationToken) {
    let serve = async {
        loop {
            wanted(&mut config, true).await;
            if !SafeDir::trusted(&dev_dir).is_ok_and(|dev| is_there(&dev, VHOST_VSOCK)) {
                sleep(RECHECK).await;
                continue;
            }
            match Listener::bind(SYSTEM_PORT) {
                Ok(listener) => {
                    tracing::info!("guests are served by VSOCK");
                    let shutdown = wanted(&mut config, false);
                    if let Err(error) = server(roots.clone(), incoming(listener), shutdown).await {
                        tracing::warn!(%error, "the service for guests ended");
                    }
                }
                // An agent that is about to go may still have the port.
                Err(error) => tracing::info!(%error, "guests cannot be served by VSOCK"),
            }
            sleep(RETRY).await;
        }
    };
    tokio::select! {
        () = stop.cancelled() => {}
        () = serve => {}
    }
}

/// Waits until machines may have VSOCK devices, or may not.
pub async fn wanted(config: &mut ConfigHandle, on: bool) {
    while config.current().enabled(gates::VSOCK) != on {
        config.changed().await;
    }
}

async fn server(
    roots: Roots,
    incoming: impl Stream<Item = io::Result<Guest>>,
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

/// The connections of guests for which there is a place.
fn incoming(listener: Listener) -> impl Stream<Item = io::Result<Guest>> {
    let shares = Shares::of(CONNECTIONS);
    futures::stream::unfold((listener, shares), |(listener, shares)| async move {
        let guest = next(&listener, &shares).await;
        Some((Ok(guest), (listener, shares)))
    })
}

async fn next(listener: &Listener, shares: &Shares<u32>) -> Guest {
    loop {
        match listener.accept().await {
            Ok((stream, cid)) => match shares.claim(cid) {
                Ok(share) => return Guest { stream, _share: share },
                Err(full) => tracing::debug!(cid, full = full.label(), "a guest has to wait for its place"),
            },
            Err(error) => {
                tracing::warn!(%error, "no connection of a guest can be taken");
                sleep(RETRY).await;
            }
        }
    }
}

/// The connection of a guest, and its place.
struct Guest {
    stream: UnixStream,
    _share: Share<u32>,
}

impl Connected for Guest {
    type ConnectInfo = ();

    fn connect_info(&self) {}
}

impl AsyncRead for Guest {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(cx, buffer)
    }
}

impl AsyncWrite for Guest {
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

/// The authorities that are in force.
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
    use tonic::transport::Endpoint;

    use super::{v1::system_client::SystemClient, *};

    #[tokio::test]
    async fn a_guest_gets_the_authorities() {
        let mut params = CertificateParams::new(Vec::<String>::new()).unwrap();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let bundle = params.self_signed(&KeyPair::generate().unwrap()).unwrap().pem();
        let (near, far) = UnixStream::pair().unwrap();
        let guest = Guest { stream: near, _share: Shares::of(CONNECTIONS).claim(7).unwrap() };
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
