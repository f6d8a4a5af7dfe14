//! One end of a migration of no VMI, without a cluster: `examples/channels.rs` measures channels with it.

use std::{
    io,
    net::SocketAddr,
    path::{Path, PathBuf},
    sync::Arc,
};

use daemon::{
    CancellationToken,
    tls::{Identity, Roots, listen},
};
use protocol::channels::Channel;
use tokio::net::UnixStream;
use tonic::async_trait;

use crate::{
    metrics::Metrics,
    migration::{Channels, LauncherSocket, Migration, SourceEnd, Target, TargetEnd, Threads, serve},
    process::Error,
};

/// Relays channels as virt-handler does, between the other end and a socket that stands for a launcher and its QEMU. Dropping it
/// ends them.
pub struct StandaloneChannels {
    _threads: Threads,
    _end: End,
}

enum End {
    Source { _end: SourceEnd },
    Target { _end: TargetEnd },
}

impl StandaloneChannels {
    /// Name of the node at the source, for its certificate.
    pub const SOURCE: &'static str = "source";
    /// Name of the node at the target.
    pub const TARGET: &'static str = "target";

    /// Sends the channels of the launcher at `launcher` to the target.
    ///
    /// # Errors
    /// When threads or TLS cannot be set up.
    pub fn source(target: SocketAddr, identity: &Identity, roots: &Roots, launcher: PathBuf) -> Result<Self, Error> {
        let threads = Threads::start().map_err(Error::Threads)?;
        let entered = threads.enter();
        let channels = channels(SocketAddr::from(([0; 4], 0)), identity, roots)?;
        let target = Target { node: Self::TARGET.to_owned(), address: target.ip(), port: target.port() };
        let end = channels.send(migration(), target, Arc::new(Socket(launcher)));
        drop(entered);
        Ok(Self { _threads: threads, _end: End::Source { _end: end } })
    }

    /// Listens for the source and connects its channels to the QEMU at `qemu`.
    ///
    /// # Errors
    /// When threads or TLS cannot be set up, or the address cannot be used.
    pub fn target(address: SocketAddr, identity: &Identity, roots: &Roots, qemu: PathBuf) -> Result<Self, Error> {
        let threads = Threads::start().map_err(Error::Threads)?;
        let entered = threads.enter();
        let listener = listen(address).map_err(|source| Error::Listen { address, source })?;
        let channels = channels(address, identity, roots)?;
        tokio::spawn(serve(channels.clone(), listener, CancellationToken::new()));
        let end = channels.receive(migration(), Self::SOURCE.to_owned(), Arc::new(Socket(qemu)));
        drop(entered);
        Ok(Self { _threads: threads, _end: End::Target { _end: end } })
    }
}

fn channels(endpoint: SocketAddr, identity: &Identity, roots: &Roots) -> Result<Channels, Error> {
    let metrics = Metrics::new()?.migration;
    Ok(Channels::new(endpoint, identity, roots, metrics, CancellationToken::new())?)
}

fn migration() -> Migration {
    Migration { vmi: "standalone".to_owned(), migration: "standalone".to_owned() }
}

/// A socket outside of any pod.
struct Socket(PathBuf);

#[async_trait]
impl LauncherSocket for Socket {
    async fn open(&self) -> io::Result<UnixStream> {
        connect(&self.0).await
    }

    async fn open_qemu(&self, _: Channel) -> io::Result<UnixStream> {
        connect(&self.0).await
    }
}

#[expect(clippy::disallowed_methods, reason = "the path is an argument of the program, and no pod owns it")]
async fn connect(path: &Path) -> io::Result<UnixStream> {
    UnixStream::connect(path).await
}
