//! Channels of a migration: connections of libvirt, QEMU and the launcher between two pods, see [`protocol::channels`].
//!
//! [`Channels`] is shared by the engine, which opens and closes them, and the server of the migration socket ([`serve`]).
//! `source` listens in the pod of the source, `target` connects in the pod of the target; memory and disks go from virt-handler
//! to QEMU there. `relay` moves bytes, which nothing here parses. A connection ends when its direction does. `images` compares the
//! images over which disks are overlays with those of the other pod, by their contents (`fingerprint`).

mod fingerprint;
mod images;
mod relay;
mod source;
mod target;
#[cfg(test)]
mod tests;

use std::{
    io::{Error, ErrorKind, Result},
    path::PathBuf,
    sync::Arc,
    time::Duration,
};

use protocol::channels::{AWAIT, Channel};
use tokio::{
    io::AsyncReadExt,
    net::{UnixListener, UnixStream},
    sync::{Semaphore, watch},
    time::timeout,
};
use tracing::Instrument;

pub(crate) use self::fingerprint::BaseImage;
use self::{
    fingerprint::Fingerprints,
    source::{Listeners, Waiting},
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
    Source,
    /// Those that another launcher opens.
    Target,
    /// The release alone: whether the domain has arrived is decided, and the other launcher may not know it.
    Settled,
}

/// The engine, for connections of virt-handler.
pub(crate) trait Engine: Clone + Send + Sync + 'static {
    /// Returns the channels of migrations.
    fn channels(&self) -> &Channels;

    /// Lets the guest run that has arrived. Returns false if no domain has arrived.
    fn release(&self, paused: bool) -> impl Future<Output = Result<bool>> + Send;

    /// Thaws the file systems of the guest that has arrived after this time in seconds.
    fn thaw_after(&self, seconds: u32);
}

/// The channels of this pod. Cheap to clone.
#[derive(Clone, Debug)]
pub(crate) struct Channels {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    paths: Paths,
    mode: watch::Sender<ChannelMode>,
    waiting: Waiting,
    fingerprints: Fingerprints,
}

/// The channels that libvirt and QEMU open, by socket.
const SOCKETS: [Channel; 3] = [Channel::Control, Channel::Memory, Channel::Disks];

impl Channels {
    /// Creates the channels of a pod; none is open.
    pub(crate) fn new(paths: Paths) -> Self {
        let (mode, waiting) = (watch::Sender::new(ChannelMode::Closed), Waiting::default());
        let fingerprints = Fingerprints::new(paths.clone());
        Self { inner: Arc::new(Inner { paths, mode, waiting, fingerprints }) }
    }

    /// Returns the socket of a channel within the pod.
    pub(crate) fn socket(&self, channel: Channel) -> PathBuf {
        self.inner.paths.migration_channel(channel)
    }

    /// Passes on these channels from now on. Connections of others end.
    pub(crate) fn open(&self, mode: ChannelMode) -> Result<()> {
        let before = *self.inner.mode.borrow();
        if before == mode {
            return Ok(());
        }
        self.inner.waiting.clear();
        match mode {
            ChannelMode::Source => {
                let listeners = Listeners::bind(self)?;
                self.inner.mode.send_replace(mode);
                listeners.listen(self);
            }
            ChannelMode::Target => {
                // QEMU listens on these paths. A socket of an earlier migration must not look like it.
                for channel in SOCKETS {
                    socket::remove(&self.socket(channel))?;
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

    /// Reports the end of the domain to the target's launcher, and then the time until the automatic thaw of its file systems. Returns
    /// false if it has no domain.
    pub(crate) async fn release(&self, paused: bool, thaw_after: Option<u32>) -> Result<bool> {
        source::release(self, paused, thaw_after).await
    }

    /// Begins to read these images, which the source of a migration asks for later.
    pub(crate) fn read_images(&self, images: &[BaseImage]) {
        for image in images {
            drop(self.inner.fingerprints.begin(image));
        }
    }

    /// Compares these images with those of the target. Fails with the reason for which the disks over them cannot be copied.
    pub(crate) async fn compare_images(&self, images: &[BaseImage]) -> std::result::Result<(), String> {
        images::compare(self, images).await
    }

    /// Relays bytes between two sockets until both have ended, or channels of this mode are closed.
    async fn relay(&self, mode: ChannelMode, channel: Channel, one: UnixStream, other: UnixStream) {
        let name = channel.name();
        tracing::debug!(channel = name, "a channel of the migration is open");
        let result = tokio::select! {
            result = relay::relay(one, other) => result,
            () = self.closed(mode) => Err(Error::new(ErrorKind::ConnectionAborted, "the migration has ended")),
        };
        match result {
            Ok((sent, received)) => tracing::debug!(channel = name, sent, received, "a channel has ended"),
            Err(error) => tracing::debug!(channel = name, %error, "a channel has ended"),
        }
    }
}

/// Serves the migration socket.
pub(crate) async fn serve(listener: UnixListener, engine: impl Engine) {
    let connections = Arc::new(Semaphore::new(CONNECTIONS));
    loop {
        let stream = socket::accept(&listener, "migration").await;
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
async fn take(mut stream: UnixStream, engine: &impl Engine, permit: tokio::sync::OwnedSemaphorePermit) -> Result<()> {
    let first = timeout(FIRST_BYTE, stream.read_u8()).await??;
    let channels = engine.channels();
    match (channels.mode(), Channel::of(first)) {
        (ChannelMode::Source, None) if first == AWAIT => {
            channels.inner.waiting.push(stream, permit);
            Ok(())
        }
        (ChannelMode::Target | ChannelMode::Settled, Some(Channel::Release)) => target::release(stream, engine).await,
        (ChannelMode::Target, Some(Channel::Control)) => target::connect(channels, stream).await,
        _ => Err(Error::new(ErrorKind::InvalidInput, "there is no migration that needs this channel")),
    }
}
