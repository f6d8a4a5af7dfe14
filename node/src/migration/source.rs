//! Relays the channels of a launcher of this node to the node of the target.
//!
//! One connection to the launcher waits for its next channel. Each channel becomes a connection to the other node.

use std::{io, net::SocketAddr, sync::Arc, time::Duration};

use api::tls::handler_server_name;
use daemon::{CancellationToken, backoff, tasks::panics, tls::TlsStream};
use protocol::channels::{AWAIT, CONNECTED, Channel};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::UnixStream,
    sync::{OwnedSemaphorePermit, Semaphore},
    task::JoinSet,
    time::{Instant, sleep, sleep_until, timeout},
};

use super::{
    Channels, LauncherSocket, Migration, Target,
    connection::{dial, prepare, tcp},
    frame::Header,
    relay::{End, relay},
    target::CHANNELS,
};

/// Longest time to connect to the other node, with the TLS handshake.
const CONNECT_LIMIT: Duration = Duration::from_secs(10);
/// Longest time for the other node to connect its launcher. Longer than the limit there (25 s).
const ANSWER_LIMIT: Duration = Duration::from_secs(30);
/// Shortest and longest pause before the launcher is dialled again.
const PAUSE: (Duration, Duration) = (Duration::from_millis(5), Duration::from_millis(250));
/// Channels that a launcher may open at once.
const BURST: u32 = 64;
/// Average interval of further channels.
const INTERVAL: Duration = Duration::from_millis(100);

/// Starts to wait for channels of the launcher, until `stop`.
pub(super) fn start(
    channels: Channels,
    migration: Migration,
    target: Target,
    launcher: Arc<dyn LauncherSocket>,
    stop: CancellationToken,
) {
    let runtime = channels.0.runtime.clone();
    runtime.spawn(async move {
        let source_end = SourceEnd { channels, migration, target };
        let ended = tokio::select! {
            ended = panics::catch(source_end.run(&*launcher)) => ended,
            () = stop.cancelled() => Ok(()),
        };
        if let Err(panic) = ended {
            tracing::error!(%panic, vmi = source_end.migration.vmi, "channels of a migration ended by a panic");
        }
    });
}

struct SourceEnd {
    channels: Channels,
    migration: Migration,
    target: Target,
}

/// A channel that the launcher opened.
struct Opened {
    stream: UnixStream,
    channel: Channel,
    /// Places of the migration and of the node.
    places: [OwnedSemaphorePermit; 2],
}

/// Result of a channel that was relayed.
enum Ended {
    Usually,
    /// The other node does not answer any more.
    PeerLost,
}

impl SourceEnd {
    async fn run(&self, launcher: &dyn LauncherSocket) {
        let places = [Arc::new(Semaphore::new(CHANNELS)), self.channels.0.source_places.clone()];
        let mut waiting = Waiting { launcher, places, due: Instant::now(), vmi: &self.migration.vmi };
        let mut relayed = JoinSet::new();
        loop {
            let opened = {
                let mut next = std::pin::pin!(waiting.next());
                loop {
                    tokio::select! {
                        opened = &mut next => break opened,
                        Some(ended) = relayed.join_next() => self.ended(ended, &mut relayed),
                    }
                }
            };
            let (channels, target) = (self.channels.clone(), self.target.clone());
            let header = Header { migration: self.migration.clone(), channel: opened.channel };
            relayed.spawn(channel(channels, target, header, opened));
        }
    }

    fn ended(&self, ended: Result<Ended, tokio::task::JoinError>, relayed: &mut JoinSet<Ended>) {
        let (vmi, node) = (&self.migration.vmi, &self.target.node);
        match ended {
            Ok(Ended::Usually) => {}
            Ok(Ended::PeerLost) => {
                tracing::warn!(vmi, node, "the node of the target does not answer, all channels of the migration end");
                // Those with bulk data would wait for minutes.
                relayed.abort_all();
            }
            Err(error) if error.is_cancelled() => {}
            Err(error) => tracing::error!(vmi, node, %error, "a channel of a migration ended by a panic"),
        }
    }
}

/// Waits for channels of a launcher.
struct Waiting<'a> {
    launcher: &'a dyn LauncherSocket,
    places: [Arc<Semaphore>; 2],
    /// Time at which the channels so far are within the rate.
    due: Instant,
    vmi: &'a str,
}

impl Waiting<'_> {
    /// Waits for the next channel.
    async fn next(&mut self) -> Opened {
        let [own, node] = self.places.clone();
        // The semaphores are never closed.
        let (Ok(own), Ok(node)) = (own.acquire_owned().await, node.acquire_owned().await) else {
            return std::future::pending().await;
        };
        let mut failures = 0_u32;
        loop {
            sleep_until(self.due.checked_sub(INTERVAL * BURST).unwrap_or(self.due)).await;
            match self.wait().await {
                Ok((stream, channel)) => {
                    self.due = self.due.max(Instant::now()) + INTERVAL;
                    return Opened { stream, channel, places: [own, node] };
                }
                Err(error) => {
                    // Usual while a launcher has no migration, or restarts.
                    tracing::debug!(vmi = self.vmi, %error, "no channel of the launcher");
                    failures = failures.saturating_add(1);
                    sleep(backoff::pause(PAUSE, failures)).await;
                }
            }
        }
    }

    /// Waits for a channel with one connection.
    async fn wait(&self) -> io::Result<(UnixStream, Channel)> {
        let mut stream = self.launcher.open().await?;
        stream.write_all(&[AWAIT]).await?;
        let byte = stream.read_u8().await?;
        match Channel::of(byte) {
            Some(channel) => Ok((stream, channel)),
            None => {
                tracing::warn!(vmi = self.vmi, byte, "the launcher opens an unknown channel");
                Err(io::ErrorKind::InvalidData.into())
            }
        }
    }
}

/// Relays one channel to the other node.
async fn channel(channels: Channels, target: Target, header: Header, opened: Opened) -> Ended {
    let Opened { stream: launcher, channel, places: _places } = opened;
    let (vmi, node) = (header.migration.vmi.clone(), target.node.clone());
    let open = channels.0.metrics.open(channel);
    let other_node = match connect(&channels, target, &header).await {
        Ok(stream) => stream,
        Err(error) => {
            tracing::warn!(vmi, node, channel = channel.name(), %error, "cannot open a channel of a migration");
            return Ended::Usually;
        }
    };
    match relay(other_node, launcher, End::Source, channel, &open).await {
        Ok(()) => Ended::Usually,
        Err(error) => {
            tracing::info!(vmi, node, channel = channel.name(), %error, "channel of a migration ended");
            if error.kind() == io::ErrorKind::TimedOut { Ended::PeerLost } else { Ended::Usually }
        }
    }
}

/// Opens a channel at the other node.
async fn connect(channels: &Channels, target: Target, header: &Header) -> io::Result<TlsStream> {
    let late = |what: &str| io::Error::new(io::ErrorKind::TimedOut, format!("{what} took too long"));
    let connected = async {
        let stream = dial(SocketAddr::new(target.address, target.port)).await?;
        let mut stream = channels.0.tls.connect(stream, handler_server_name(&target.node)).await?;
        prepare(tcp(&stream), header.channel)?;
        stream.write_all(&header.encode()?).await?;
        stream.flush().await?;
        io::Result::Ok(stream)
    };
    let mut stream = timeout(CONNECT_LIMIT, connected).await.map_err(|_| late("the connection"))??;
    match timeout(ANSWER_LIMIT, stream.read_u8()).await.map_err(|_| late("the answer"))? {
        Ok(CONNECTED) => Ok(stream),
        Ok(other) => Err(io::Error::other(format!("the node of the target answers with byte {other}"))),
        Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => {
            Err(io::Error::other("the node of the target refuses it; its log has the reason"))
        }
        Err(error) => Err(error),
    }
}
