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
    net::UnixListener,
    sync::Notify,
    time::{Instant, timeout, timeout_at},
};
use tracing::Instrument;

use super::{Carrier, ChannelMode, Channels, SOCKETS, remove};

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
    connections: Mutex<VecDeque<Carrier>>,
    arrived: Notify,
}

impl Waiting {
    /// Keeps a connection. The oldest one ends if there are too many.
    pub(super) fn push(&self, carrier: Carrier) {
        let mut connections = self.connections.lock().unwrap_or_else(PoisonError::into_inner);
        if connections.len() >= WAITING {
            connections.pop_front().inspect(Carrier::dismiss);
        }
        connections.push_back(carrier);
        drop(connections);
        self.arrived.notify_one();
    }

    /// Ends the waiting connections.
    pub(super) fn clear(&self) {
        let mut connections = self.connections.lock().unwrap_or_else(PoisonError::into_inner);
        connections.drain(..).for_each(|carrier| carrier.dismiss());
    }

    /// Returns the oldest connection that virt-handler has not closed.
    fn pop(&self) -> Option<Carrier> {
        let mut connections = self.connections.lock().unwrap_or_else(PoisonError::into_inner);
        std::iter::from_fn(|| connections.pop_front()).find(Carrier::is_open)
    }

    /// Waits for a connection and takes it.
    async fn take(&self) -> Result<Carrier> {
        let limit = Instant::now() + AWAIT_LIMIT;
        loop {
            if let Some(carrier) = self.pop() {
                // Others may wait for the connections behind this one.
                self.arrived.notify_one();
                return Ok(carrier);
            }
            if timeout_at(limit, self.arrived.notified()).await.is_err() {
                return Err(Error::new(ErrorKind::TimedOut, "virt-handler does not carry the channel"));
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
            remove(&path)?;
            Ok((channel, UnixListener::bind(path)?))
        };
        SOCKETS.into_iter().map(bind).collect::<Result<_>>().map(Self)
    }

    /// Listens until the outgoing channels are closed.
    pub(super) fn listen(self, channels: &Channels) {
        for (channel, listener) in self.0 {
            let channels = channels.clone();
            let listen = async move {
                tokio::select! {
                    () = accept(&channels, channel, listener) => {}
                    () = channels.closed(ChannelMode::Outgoing) => {}
                }
            };
            tokio::spawn(listen.in_current_span());
        }
    }
}

/// Accepts connections of a channel. The number is bounded by the waiting connections of virt-handler.
async fn accept(channels: &Channels, channel: Channel, listener: UnixListener) {
    loop {
        let stream = match listener.accept().await {
            Ok((stream, _)) => stream,
            Err(error) => {
                tracing::warn!(channel = channel.name(), %error, "a channel of the migration does not accept");
                tokio::time::sleep(Duration::from_secs(1)).await;
                continue;
            }
        };
        // One after the other: connections keep their order, and no more of them wait than the socket queues.
        let failed = move |error: Error| {
            tracing::warn!(channel = channel.name(), %error, "cannot open a channel of the migration");
        };
        match channels.inner.waiting.take().await {
            Ok(carrier) => {
                let channels = channels.clone();
                let carry = async move {
                    let carried = carrier.carry(&channels, ChannelMode::Outgoing, channel, channel.byte(), stream);
                    carried.await.unwrap_or_else(failed);
                };
                tokio::spawn(carry.in_current_span());
            }
            Err(error) => failed(error),
        }
    }
}

/// Reports the end of the domain to the target's launcher.
pub(super) async fn release(channels: &Channels, paused: bool) -> Result<bool> {
    let exchange = async {
        let mut carrier = channels.inner.waiting.take().await?;
        let stream = carrier.answer(Channel::Release.byte()).await?;
        stream.write_u8(if paused { STAY_PAUSED } else { RUN }).await?;
        stream.read_u8().await
    };
    match timeout(RELEASE_LIMIT, exchange).await?? {
        RELEASED => Ok(true),
        NO_DOMAIN => Ok(false),
        _ => Err(Error::new(ErrorKind::InvalidData, "the target's answer is unknown")),
    }
}
