//! Relays the connections of live migrations between the launchers of two nodes.
//!
//! ```text
//!   launcher ── migration-sock ── virt-handler ════ TLS ════ virt-handler ── migration-sock ── launcher
//!   (source)                      source                     target       └─ memory, disks ─── QEMU (target)
//! ```
//!
//! - [`Channels`]: start here. It registers targets and starts sources; each lasts until its guard is dropped. Before the end of the
//!   process, [`Channels::drain`] waits for those in progress.
//! - [`source`]: waits for channels of the source's launcher and opens connections to the target's node.
//! - [`server`]: accepts connections of other nodes, finds the [`target`] and connects the target's launcher.
//! - [`frame`]: the header of a connection. [`connection`]: its queues. [`relay`]: copies bytes, which nothing here parses;
//!   [`gathered`]: large reads. [`socket`]: sockets of a pod.
//! - [`Threads`]: the runtime of all of this.
//!
//! Both ends show the certificate of their virt-handler, which names the node. The target compares it with the source in the
//! status of the VMI, the source with the target.

mod connection;
mod frame;
mod gathered;
mod refusal;
mod relay;
mod server;
mod socket;
mod source;
mod target;
#[cfg(test)]
mod tests;
mod threads;

use std::{
    io,
    net::{IpAddr, SocketAddr},
    sync::{Arc, Mutex},
};

use api::tls::HANDLER_CN;
use daemon::lock;
use daemon::{
    CancellationToken,
    tls::{Identity, MutualTls, Roots, TlsError},
};
use protocol::channels::Channel;
use tokio::{net::UnixStream, runtime::Handle, sync::Semaphore};
use tokio_util::{
    sync::DropGuard,
    task::{TaskTracker, task_tracker::TaskTrackerToken},
};
use tonic::async_trait;

use self::target::Targets;
pub(crate) use self::{
    server::{address, follow_address, serve},
    socket::PodSocket,
    threads::Threads,
};
use crate::metrics::MigrationMetrics;

/// Protocol between virt-handlers, for ALPN.
const PROTOCOL: &str = "ferrovirt-migration/1";
/// Most channels of all launchers of this node at a time.
const SOURCE_CHANNELS: usize = 256;

/// A migration, as the status of the VMI names it.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Migration {
    /// UID of the VMI.
    pub(crate) vmi: String,
    /// UID of the migration.
    pub(crate) migration: String,
}

/// The virt-handler of the node to which a VMI migrates.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Target {
    /// Node, which its certificate must name.
    pub(crate) node: String,
    /// Address that the status of the VMI names.
    pub(crate) address: IpAddr,
    /// Port that the status of the VMI names.
    pub(crate) port: u16,
}

/// Opens connections to a launcher and its QEMU.
#[async_trait]
pub(crate) trait LauncherSocket: Send + Sync + 'static {
    /// Connects to the migration socket within a few seconds and checks the peer.
    async fn open(&self) -> io::Result<UnixStream>;

    /// Connects to the socket at which QEMU waits for a channel with bulk data, within a few seconds, and checks the peer.
    async fn open_qemu(&self, channel: Channel) -> io::Result<UnixStream>;
}

/// Lets the source's node open channels to a launcher of this node. Dropping it ends them.
pub(crate) struct TargetEnd {
    _registered: target::Registered,
}

/// Relays the channels of a launcher of this node to the target's node. Dropping it ends them.
pub(crate) struct SourceEnd {
    _stop: DropGuard,
    _in_progress: TaskTrackerToken,
}

/// Connections of migrations of this node. Cheap to clone; all clones are the same.
#[derive(Clone)]
pub(crate) struct Channels(Arc<Inner>);

struct Inner {
    /// Address and port that other nodes dial.
    endpoint: Mutex<SocketAddr>,
    tls: MutualTls,
    metrics: MigrationMetrics,
    targets: Targets,
    /// Places of channels that leave this node.
    source_places: Arc<Semaphore>,
    runtime: Handle,
    /// Migrations that a stop would cut. Closed once no other one may begin.
    in_progress: TaskTracker,
    draining: CancellationToken,
    stop: CancellationToken,
}

impl Channels {
    /// Creates the connections of a node whose listener has the address `endpoint`. Their tasks run on the runtime of the caller. All
    /// end with `stop`.
    pub(crate) fn new(
        endpoint: SocketAddr,
        identity: &Identity,
        roots: &Roots,
        metrics: MigrationMetrics,
        stop: CancellationToken,
    ) -> Result<Self, TlsError> {
        let tls = MutualTls::new(identity, roots, HANDLER_CN, PROTOCOL)?;
        let source_places = Arc::new(Semaphore::new(SOURCE_CHANNELS));
        let (endpoint, targets, runtime) = (Mutex::new(endpoint), Targets::default(), Handle::current());
        let (in_progress, draining) = (TaskTracker::new(), CancellationToken::new());
        let inner = Inner { endpoint, tls, metrics, targets, source_places, runtime, in_progress, draining, stop };
        Ok(Self(Arc::new(inner)))
    }

    /// Returns address and port that other nodes dial. The port is 0 without a listener.
    pub(crate) fn endpoint(&self) -> SocketAddr {
        *lock(&self.0.endpoint)
    }

    fn set_endpoint(&self, endpoint: SocketAddr) {
        *lock(&self.0.endpoint) = endpoint;
    }

    /// Lets `source_node` open channels of this migration to a launcher of this node, until the guard is dropped. A later call
    /// for the same migration replaces the earlier one and ends its channels.
    pub(crate) fn receive(
        &self,
        migration: Migration,
        source_node: String,
        launcher: Arc<dyn LauncherSocket>,
    ) -> TargetEnd {
        let stop = self.0.stop.child_token();
        TargetEnd { _registered: self.0.targets.register(migration, source_node, launcher, stop) }
    }

    /// Relays the channels of this migration from a launcher of this node to the target, until the guard is dropped.
    pub(crate) fn send(&self, migration: Migration, target: Target, launcher: Arc<dyn LauncherSocket>) -> SourceEnd {
        let stop = self.0.stop.child_token();
        let in_progress = self.0.in_progress.token();
        source::start(self.clone(), migration, target, launcher, stop.clone());
        SourceEnd { _stop: stop.drop_guard(), _in_progress: in_progress }
    }

    /// Refuses migrations to this node of which no channel was open yet, and waits until all others have ended: those whose target
    /// end had a channel, and those with a source end.
    pub(crate) async fn drain(&self) {
        self.0.in_progress.close();
        self.0.draining.cancel();
        let count = self.0.in_progress.len();
        if count > 0 {
            tracing::info!(count, "migrations in progress are awaited");
        }
        self.0.in_progress.wait().await;
    }

    /// Returns the token that is cancelled by [`Self::drain`].
    pub(crate) fn draining(&self) -> CancellationToken {
        self.0.draining.clone()
    }
}
