//! The source: libvirt, QEMU and the engine open channels, each of which takes a waiting connection of virt-handler.

use std::{
    collections::VecDeque,
    io::{Error, ErrorKind, Result},
    sync::{Mutex, PoisonError},
    time::Duration,
};

use protocol::channels::Channel;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{UnixListener, UnixStream},
    sync::{Notify, OwnedSemaphorePermit},
    time::{Instant, timeout, timeout_at},
};
use tracing::Instrument;

use super::{ChannelMode, Channels, SOCKETS};
use crate::socket;

/// Limit of connections of virt-handler that wait. It keeps one.
const WAITING: usize = 4;
/// Longest wait for a connection of virt-handler.
const AWAIT_LIMIT: Duration = Duration::from_secs(10);
/// Time limit of the target's answer to a release: its guest may be slow to resume.
const RELEASE_LIMIT: Duration = Duration::from_secs(30);

/// Bytes of a release, and its answers.
pub(super) const RUN: u8 = b'r';
pub(super) const STAY_PAUSED: u8 = b'p';
pub(super) const RELEASED: u8 = b'k';
pub(super) const NO_DOMAIN: u8 = b'n';

/// Connections of virt-handler that wait for a channel.
#[derive(Debug, Default)]
pub(super) struct Waiting {
    connections: Mutex<VecDeque<(UnixStream, OwnedSemaphorePermit)>>,
    arrived: Notify,
}

impl Waiting {
    /// Keeps a connection. The oldest one ends if there are too many.
    pub(super) fn push(&self, stream: UnixStream, permit: OwnedSemaphorePermit) {
        let mut connections = self.connections.lock().unwrap_or_else(PoisonError::into_inner);
        if connections.len() >= WAITING {
            connections.pop_front();
        }
        connections.push_back((stream, permit));
        drop(connections);
        self.arrived.notify_one();
    }

    /// Ends the waiting connections.
    pub(super) fn clear(&self) {
        self.connections.lock().unwrap_or_else(PoisonError::into_inner).clear();
    }

    fn pop(&self) -> Option<(UnixStream, OwnedSemaphorePermit)> {
        let mut connections = self.connections.lock().unwrap_or_else(PoisonError::into_inner);
        // The oldest that virt-handler has not closed. It sends nothing while it waits.
        while let Some((stream, permit)) = connections.pop_front() {
            match stream.try_read(&mut [0]) {
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Some((stream, permit)),
                _ => {}
            }
        }
        None
    }

    /// Waits for a connection and takes it for a channel.
    pub(super) async fn take(&self, channel: Channel) -> Result<(UnixStream, OwnedSemaphorePermit)> {
        let limit = Instant::now() + AWAIT_LIMIT;
        loop {
            if let Some((mut stream, permit)) = self.pop() {
                stream.write_u8(channel.byte()).await?;
                // Others may wait for the connections behind this one.
                self.arrived.notify_one();
                return Ok((stream, permit));
            }
            if timeout_at(limit, self.arrived.notified()).await.is_err() {
                return Err(Error::new(ErrorKind::TimedOut, "virt-handler does not relay the channel"));
            }
        }
    }
}

/// The sockets that libvirt and QEMU connect to.
pub(super) struct Listeners(Vec<(Channel, UnixListener)>);

impl Listeners {
    /// Creates the sockets.
    pub(super) fn bind(channels: &Channels) -> Result<Self> {
        let bind = |channel| {
            let path = channels.socket(channel);
            socket::remove(&path)?;
            Ok((channel, UnixListener::bind(path)?))
        };
        SOCKETS.into_iter().map(bind).collect::<Result<_>>().map(Self)
    }

    /// Listens until the channels of the source are closed.
    pub(super) fn listen(self, channels: &Channels) {
        for (channel, listener) in self.0 {
            let channels = channels.clone();
            let listen = async move {
                tokio::select! {
                    () = accept(&channels, channel, listener) => {}
                    () = channels.closed(ChannelMode::Source) => {}
                }
            };
            tokio::spawn(listen.in_current_span());
        }
    }
}

/// Accepts connections of a channel. The number is bounded by the waiting connections of virt-handler.
async fn accept(channels: &Channels, channel: Channel, listener: UnixListener) {
    loop {
        let stream = socket::accept(&listener, channel.name()).await;
        // One after the other: connections keep their order, and no more of them wait than the socket queues.
        match channels.inner.waiting.take(channel).await {
            Ok((handler, permit)) => {
                let channels = channels.clone();
                let relay = async move {
                    channels.relay(ChannelMode::Source, channel, stream, handler).await;
                    drop(permit);
                };
                tokio::spawn(relay.in_current_span());
            }
            Err(error) => tracing::warn!(channel = channel.name(), %error, "cannot open a channel of the migration"),
        }
    }
}

/// Reports the end of the domain to the target's launcher. The time of the thaw follows the answer: launchers of older releases do not
/// read it.
pub(super) async fn release(channels: &Channels, paused: bool, thaw_after: Option<u32>) -> Result<bool> {
    let exchange = async {
        let (mut stream, _permit) = channels.inner.waiting.take(Channel::Release).await?;
        stream.write_u8(if paused { STAY_PAUSED } else { RUN }).await?;
        let answer = stream.read_u8().await?;
        if let Some(seconds) = thaw_after.filter(|_| answer == RELEASED)
            && let Err(error) = stream.write_u32(seconds).await
        {
            tracing::warn!(%error, "cannot hand over the automatic thaw");
        }
        Ok::<u8, Error>(answer)
    };
    match timeout(RELEASE_LIMIT, exchange).await?? {
        RELEASED => Ok(true),
        NO_DOMAIN => Ok(false),
        _ => Err(Error::new(ErrorKind::InvalidData, "the target's answer is unknown")),
    }
}
