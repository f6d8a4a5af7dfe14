//! Channels of a migration: connections of libvirt, QEMU and the launcher between two pods, see [`protocol::channels`].
//!
//! [`Channels`] is shared by the engine, which opens and closes them, and the server of the migration socket ([`serve`]).
//! `outgoing` listens in the pod of the source, `incoming` connects in the pod of the target. `carrier` passes each socket on to
//! virt-handler, or copies its bytes with buffers of bounded size for a virt-handler that takes no sockets.

mod carrier;
mod incoming;
mod outgoing;
#[cfg(test)]
mod tests;

use std::{
    io::{Error, ErrorKind, Result},
    path::PathBuf,
    sync::Arc,
    time::Duration,
};

use protocol::channels::{self, AWAIT, Channel};
use tokio::{
    io::AsyncReadExt,
    net::{UnixListener, UnixStream},
    sync::{OwnedSemaphorePermit, Semaphore, watch},
    time::timeout,
};
use tracing::Instrument;

use self::{
    carrier::Carrier,
    outgoing::{Listeners, Waiting},
};
use crate::{paths::Paths, socket};

/// Limit of connections of the migration socket.
const CONNECTIONS: usize = 64;
/// Time limit of virt-handler's first byte.
const FIRST_BYTE: Duration = Duration::from_secs(5);

/// Which channels the migration socket passes on.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum ChannelMode {
    /// None.
    #[default]
    Closed,
    /// Those that libvirt, QEMU and this launcher open.
    Outgoing,
    /// Those that another launcher opens.
    Incoming,
    /// The release alone: whether the domain has arrived is decided, and the other launcher may not know it.
    Settled,
}

/// The engine, for connections of virt-handler.
pub(crate) trait Engine: Clone + Send + Sync + 'static {
    /// Returns the channels of migrations.
    fn channels(&self) -> &Channels;

    /// Lets the guest run that has arrived. Returns false if no domain has arrived.
    ///
    /// # Errors
    /// When the domain is still arriving or cannot be resumed.
    fn release(&self, paused: bool) -> impl Future<Output = Result<bool>> + Send;
}

/// The channels of this pod. Cheap to clone.
#[derive(Clone, Debug)]
pub(crate) struct Channels {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    paths: Paths,
    uid: String,
    mode: watch::Sender<ChannelMode>,
    waiting: Waiting,
}

/// The channels that libvirt and QEMU open, by socket.
const SOCKETS: [Channel; 3] = [Channel::Control, Channel::Memory, Channel::Disks];

impl Channels {
    /// Creates the channels of a pod; none is open.
    pub(crate) fn new(paths: Paths, uid: String) -> Self {
        let (mode, waiting) = (watch::Sender::new(ChannelMode::Closed), Waiting::default());
        Self { inner: Arc::new(Inner { paths, uid, mode, waiting }) }
    }

    /// Returns the socket of a channel within the pod.
    pub(crate) fn socket(&self, channel: Channel) -> PathBuf {
        self.inner.paths.migration_channel(&self.inner.uid, channel.name())
    }

    /// Passes on these channels from now on. Connections of others end.
    ///
    /// # Errors
    /// When a socket cannot be created.
    pub(crate) fn open(&self, mode: ChannelMode) -> Result<()> {
        let before = *self.inner.mode.borrow();
        if before == mode {
            return Ok(());
        }
        self.inner.waiting.clear();
        match mode {
            ChannelMode::Outgoing => {
                let listeners = Listeners::bind(self)?;
                self.inner.mode.send_replace(mode);
                listeners.listen(self);
            }
            ChannelMode::Incoming => {
                // QEMU listens on these paths. A socket of an earlier migration must not look like it.
                for channel in SOCKETS {
                    remove(&self.socket(channel))?;
                }
                self.inner.mode.send_replace(mode);
            }
            ChannelMode::Settled | ChannelMode::Closed => {
                self.inner.mode.send_replace(mode);
            }
        }
        Ok(())
    }

    /// Returns the mode.
    fn mode(&self) -> ChannelMode {
        *self.inner.mode.borrow()
    }

    /// Waits until channels of this mode are closed.
    pub(crate) async fn closed(&self, mode: ChannelMode) {
        let mut modes = self.inner.mode.subscribe();
        if modes.wait_for(|now| *now != mode).await.is_err() {
            std::future::pending().await
        }
    }

    /// Reports the end of the domain to the target's launcher. Returns false if it has no domain.
    ///
    /// # Errors
    /// When it does not answer.
    pub(crate) async fn release(&self, paused: bool) -> Result<bool> {
        outgoing::release(self, paused).await
    }
}

/// Serves the migration socket.
pub(crate) async fn serve(listener: UnixListener, engine: impl Engine) {
    let connections = Arc::new(Semaphore::new(CONNECTIONS));
    loop {
        let stream = match listener.accept().await {
            Ok((stream, _)) => stream,
            Err(error) => {
                tracing::warn!(%error, "the migration socket does not accept");
                tokio::time::sleep(Duration::from_secs(1)).await;
                continue;
            }
        };
        if !socket::is_trusted(&stream) {
            continue;
        }
        let Ok(permit) = connections.clone().try_acquire_owned() else {
            tracing::warn!("too many connections to the migration socket");
            continue;
        };
        let engine = engine.clone();
        let connection = async move {
            if let Err(error) = take(stream, &engine, permit).await {
                tracing::debug!(%error, "a connection to the migration socket has failed");
            }
        };
        tokio::spawn(connection.in_current_span());
    }
}

/// Takes a connection of virt-handler.
async fn take(mut stream: UnixStream, engine: &impl Engine, permit: OwnedSemaphorePermit) -> Result<()> {
    let first = timeout(FIRST_BYTE, stream.read_u8()).await??;
    let own = engine.channels();
    let (request, takes_sockets) = channels::request(first);
    let carrier = |stream| Carrier::new(stream, takes_sockets, permit);
    match (own.mode(), Channel::of(request)) {
        (ChannelMode::Outgoing, None) if request == AWAIT => {
            own.inner.waiting.push(carrier(stream));
            Ok(())
        }
        (ChannelMode::Incoming | ChannelMode::Settled, Some(Channel::Release)) => {
            incoming::release(stream, engine).await
        }
        (ChannelMode::Incoming, Some(channel)) => incoming::connect(own, channel, carrier(stream)).await,
        _ => {
            carrier(stream).dismiss();
            Err(Error::new(ErrorKind::InvalidInput, "there is no migration that needs this channel"))
        }
    }
}

/// Removes a socket if it exists.
fn remove(path: &std::path::Path) -> Result<()> {
    match std::fs::remove_file(path) {
        Err(error) if error.kind() != ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}
