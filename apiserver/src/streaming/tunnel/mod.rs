//! Copies between a client's WebSocket and a socket of the guest.
//!
//! ```text
//!   client                                    guest
//!   message ────────────────────────────────▶ bytes, or one datagram
//!   message without bytes ──────────────────▶ end of the client's bytes (TCP), the guest may still answer
//!   close ──────────────────────────────────▶ both directions end
//!   message ◀──────────────────────────────── bytes, or one datagram
//!   message without bytes ◀────────────────── end of the guest's bytes (TCP), the client may still send
//!   close 1000 ◀───────────────────────────── both have ended
//! ```
//!
//! A WebSocket cannot be closed in one direction: the receiver of a close stops sending, and messages under way are lost. The
//! message without bytes is an extension for clients that request it (`halfClose=true`). For other clients the close means the
//! end of the guest's bytes, so it is delayed until they have sent nothing for a moment. Each direction holds at most one
//! message.

use std::{io, sync::Arc, time::Duration};

use bytes::{Bytes, BytesMut};
use futures::{
    Sink, SinkExt, Stream, StreamExt,
    future::{Either, join, select},
};
use tokio::{
    io::{AsyncRead, AsyncWrite, AsyncWriteExt},
    net::{
        TcpStream, UdpSocket,
        tcp::{OwnedReadHalf, OwnedWriteHalf},
    },
    sync::watch,
    time::{Instant, Interval, MissedTickBehavior, interval_at, sleep, timeout, timeout_at},
};
use tokio_tungstenite::{
    WebSocketStream,
    tungstenite::{
        Error, Message,
        protocol::{CloseFrame, frame::coding::CloseCode},
    },
};
use tokio_util::sync::CancellationToken;

use super::{
    guest::Connection,
    relay::{End, Limits},
    websocket::close_and_drain,
};

/// Most bytes read from the guest at once: with the header of their frame four whole records of TLS. A UDP datagram is never larger.
const CHUNK: usize = (64 << 10) - 4;
/// Time without a message after which a client without half-close counts as done: long enough for messages under way, short
/// enough for programs that read until the end of the guest's bytes.
const QUIET: Duration = Duration::from_millis(500);
/// Time for which bytes of a stopped guest are still forwarded.
const REST: Duration = Duration::from_secs(1);
/// Payload of pings.
const PING: &[u8] = b"keep alive";

enum Reader {
    Tcp(OwnedReadHalf),
    Udp(Arc<UdpSocket>),
}

enum Writer {
    Tcp(OwnedWriteHalf),
    Udp(Arc<UdpSocket>),
}

impl Reader {
    /// Reads the next bytes, or datagram; `None` at the end. Cancel safe. There is no buffer while the guest is silent.
    async fn read(&mut self) -> io::Result<Option<Bytes>> {
        loop {
            match self {
                Self::Tcp(half) => half.readable().await?,
                Self::Udp(socket) => socket.readable().await?,
            }
            let mut buffer = BytesMut::with_capacity(CHUNK);
            let (read, ends) = match self {
                Self::Tcp(half) => (half.try_read_buf(&mut buffer), true),
                Self::Udp(socket) => (socket.try_recv_buf(&mut buffer), false),
            };
            match read {
                Ok(0) if ends => return Ok(None),
                Ok(_) => return Ok(Some(buffer.freeze())),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                // No program listens at the port now; datagrams may be lost.
                Err(error) if error.kind() == io::ErrorKind::ConnectionRefused && !ends => {}
                Err(error) => return Err(error),
            }
        }
    }
}

impl Writer {
    /// Returns true if `data` means the end of the client's bytes. A datagram may be empty.
    fn ends_with(&self, data: &[u8]) -> bool {
        matches!(self, Self::Tcp(_)) && data.is_empty()
    }

    async fn write(&mut self, data: &[u8]) -> io::Result<()> {
        match self {
            Self::Tcp(half) => half.write_all(data).await,
            Self::Udp(socket) => match socket.send(data).await {
                Err(error) if error.kind() != io::ErrorKind::ConnectionRefused => Err(error),
                _ => Ok(()),
            },
        }
    }

    /// Ends the bytes to the guest.
    async fn finish(&mut self) -> io::Result<()> {
        match self {
            Self::Tcp(half) => half.shutdown().await,
            Self::Udp(_) => Ok(()),
        }
    }
}

fn halves(connection: Connection) -> (Reader, Writer) {
    match connection {
        Connection::Tcp(stream) => {
            let (read, write) = TcpStream::into_split(stream);
            (Reader::Tcp(read), Writer::Tcp(write))
        }
        Connection::Udp(socket) => {
            let socket = Arc::new(socket);
            (Reader::Udp(socket.clone()), Writer::Udp(socket))
        }
    }
}

/// The end of a direction, or of the tunnel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Ended {
    ClientClosed,
    ClientLost,
    GuestClosed,
    GuestLost,
    VmiGone,
}

/// State of the client.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Client {
    /// Nothing.
    Quiet,
    /// A message of it is under way to the guest.
    Sending,
    /// It has ended its bytes.
    Done,
}

/// Copies until both sides have ended, one fails, the VMI is `gone`, or `stop` is cancelled. `half_close`: the client supports
/// messages without bytes.
pub(crate) async fn copy<C>(
    client: WebSocketStream<C>,
    guest: Connection,
    half_close: bool,
    limits: Limits,
    gone: impl Future<Output = ()>,
    stop: CancellationToken,
) -> End
where
    C: AsyncRead + AsyncWrite + Unpin,
{
    let (mut sink, mut source) = client.split();
    let (mut reader, mut writer) = halves(guest);
    let ended = {
        let mut relayed = std::pin::pin!(relay(&mut source, &mut sink, &mut reader, &mut writer, half_close, limits));
        tokio::select! {
            ended = &mut relayed => Some(ended),
            // A guest that is switched off does not close its connections.
            () = gone => Some(timeout(REST, relayed).await.unwrap_or(Ended::VmiGone)),
            () = stop.cancelled() => None,
        }
    };
    let (end, close) = match ended {
        Some(Ended::ClientClosed) => (End::ClientClosed, None),
        Some(Ended::GuestClosed) => (End::GuestClosed, Some((CloseCode::Normal, ""))),
        Some(Ended::ClientLost) => (End::ClientLost, Some((CloseCode::Away, "client is gone"))),
        Some(Ended::GuestLost) => (End::GuestLost, Some((CloseCode::Error, "connection to the guest was lost"))),
        Some(Ended::VmiGone) => (End::VmiGone, Some((CloseCode::Away, "the VMI has stopped"))),
        None => (End::Stopped, Some((CloseCode::Restart, "virt-api is stopping"))),
    };
    let closing = join(close_and_drain(&mut sink, &mut source, close, end == End::ClientLost), writer.finish());
    let _ = timeout(limits.close, closing).await;
    end
}

/// Runs both directions until both have ended or one has failed.
async fn relay<R, W>(
    source: &mut R,
    sink: &mut W,
    reader: &mut Reader,
    writer: &mut Writer,
    half_close: bool,
    limits: Limits,
) -> Ended
where
    R: Stream<Item = Result<Message, Error>> + Unpin,
    W: Sink<Message, Error = Error> + Unpin,
{
    let (state, mut states) = watch::channel(Client::Quiet);
    let mut upward = std::pin::pin!(upward(source, writer, &state, limits));
    let first = {
        let downward = std::pin::pin!(downward(reader, sink, limits));
        match select(upward.as_mut(), downward).await {
            Either::Left((Ended::GuestLost, downward)) => {
                // Bytes that the guest sent before it stopped reading still go to the client.
                let _ = timeout(limits.close, downward).await;
                Ended::GuestLost
            }
            Either::Left((ended, _)) | Either::Right((ended, _)) => ended,
        }
    };
    if first != Ended::GuestClosed {
        return first;
    }
    let (last, client_goes_on) = {
        let drained = std::pin::pin!(drain_client(sink, &mut states, half_close, limits));
        match select(upward.as_mut(), drained).await {
            // A guest that has ended its bytes may stop reading.
            Either::Left((Ended::GuestLost, _)) => (Ended::GuestClosed, false),
            Either::Left((ended, _)) => (ended, false),
            Either::Right((ended, _)) => (ended, true),
        }
    };
    if last == Ended::GuestClosed && client_goes_on {
        let _ = timeout(limits.close, async {
            let close = CloseFrame { code: CloseCode::Normal, reason: "".into() };
            let _ = sink.send(Message::Close(Some(close))).await;
            // Its answer; earlier messages are forwarded.
            upward.await;
        })
        .await;
    }
    last
}

async fn upward<R>(source: &mut R, writer: &mut Writer, state: &watch::Sender<Client>, limits: Limits) -> Ended
where
    R: Stream<Item = Result<Message, Error>> + Unpin,
{
    let mut last_message = Instant::now();
    loop {
        let message = match timeout_at(last_message + limits.silence, source.next()).await {
            Ok(Some(Ok(message))) => message,
            Err(_) | Ok(None | Some(Err(_))) => return Ended::ClientLost,
        };
        let (written, then) = match &message {
            Message::Binary(data) if writer.ends_with(data) => {
                (timeout(limits.write, writer.finish()).await, Client::Done)
            }
            Message::Binary(data) => {
                state.send_replace(Client::Sending);
                (timeout(limits.write, writer.write(data)).await, Client::Quiet)
            }
            Message::Close(_) => return Ended::ClientClosed,
            Message::Ping(_) | Message::Pong(_) | Message::Text(_) | Message::Frame(_) => {
                last_message = Instant::now();
                continue;
            }
        };
        if !matches!(written, Ok(Ok(()))) {
            return Ended::GuestLost;
        }
        state.send_replace(then);
        // Counted from here: a slow guest delays the read from the client.
        last_message = Instant::now();
    }
}

async fn downward<W>(reader: &mut Reader, sink: &mut W, limits: Limits) -> Ended
where
    W: Sink<Message, Error = Error> + Unpin,
{
    let mut pings = pings(limits);
    loop {
        let message = tokio::select! {
            read = reader.read() => match read {
                Ok(Some(data)) => Message::Binary(data),
                Ok(None) => return Ended::GuestClosed,
                Err(_) => return Ended::GuestLost,
            },
            _ = pings.tick() => Message::Ping(Bytes::from_static(PING)),
        };
        if !matches!(timeout(limits.write, sink.send(message)).await, Ok(Ok(()))) {
            return Ended::ClientLost;
        }
    }
}

/// Waits for the end of the client after that of the guest.
async fn drain_client<W>(sink: &mut W, states: &mut watch::Receiver<Client>, half_close: bool, limits: Limits) -> Ended
where
    W: Sink<Message, Error = Error> + Unpin,
{
    let mut pings = pings(limits);
    let mut next = half_close.then(|| Message::Binary(Bytes::new()));
    loop {
        if let Some(message) = next.take()
            && !matches!(timeout(limits.write, sink.send(message)).await, Ok(Ok(())))
        {
            return Ended::ClientLost;
        }
        let client = *states.borrow_and_update();
        if client == Client::Done {
            return Ended::GuestClosed;
        }
        tokio::select! {
            changed = states.changed() => if changed.is_err() {
                return Ended::GuestClosed;
            },
            () = sleep(QUIET), if client == Client::Quiet && !half_close => return Ended::GuestClosed,
            _ = pings.tick() => next = Some(Message::Ping(Bytes::from_static(PING))),
        }
    }
}

fn pings(limits: Limits) -> Interval {
    let mut pings = interval_at(Instant::now() + limits.ping, limits.ping);
    pings.set_missed_tick_behavior(MissedTickBehavior::Delay);
    pings
}

#[cfg(test)]
mod tests;
