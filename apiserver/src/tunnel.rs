//! Copying between a client's WebSocket and a socket to the guest.
//!
//! ```text
//!   client                                    guest
//!   message ────────────────────────────────▶ bytes, or one datagram
//!   message without bytes ──────────────────▶ end of the client's bytes (TCP), the guest may still answer
//!   close ──────────────────────────────────▶ both directions end
//!   message ◀──────────────────────────────── bytes, or one datagram
//!   close 1000 ◀───────────────────────────── end of the guest's bytes (TCP); what the client has sent is still passed on
//! ```
//!
//! A WebSocket cannot be closed in one direction only. The empty message is our own addition for it: other servers skip
//! it, and other clients never send one. Each direction holds one message at most.

use std::{io, sync::Arc};

use bytes::{Bytes, BytesMut};
use futures::{
    Sink, SinkExt, Stream, StreamExt,
    future::{Either, select},
};
use tokio::{
    io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt},
    net::{
        TcpStream, UdpSocket,
        tcp::{OwnedReadHalf, OwnedWriteHalf},
    },
    time::{Instant, MissedTickBehavior, interval_at, timeout, timeout_at},
};
use tokio_tungstenite::{
    WebSocketStream,
    tungstenite::{
        Error, Message,
        protocol::{CloseFrame, frame::coding::CloseCode},
    },
};
use tokio_util::sync::CancellationToken;

use crate::{
    port_forward::Connection,
    stream::{End, Limits},
};

/// Most bytes read from the guest at once; a UDP datagram is never larger.
const CHUNK: usize = 64 << 10;
/// What pings carry.
const PING: &[u8] = b"keep alive";

enum Reader {
    Tcp(OwnedReadHalf, BytesMut),
    Udp(Arc<UdpSocket>, Vec<u8>),
}

enum Writer {
    Tcp(OwnedWriteHalf),
    Udp(Arc<UdpSocket>),
}

impl Reader {
    /// The next bytes, or datagram; `None` at the end. Nothing is lost when it is dropped before it is done.
    async fn read(&mut self) -> io::Result<Option<Bytes>> {
        match self {
            Self::Tcp(half, buffer) => {
                buffer.reserve(CHUNK);
                let length = half.read_buf(buffer).await?;
                Ok((length > 0).then(|| buffer.split().freeze()))
            }
            Self::Udp(socket, buffer) => loop {
                match socket.recv(buffer).await {
                    Ok(length) => return Ok(Some(Bytes::copy_from_slice(&buffer[..length]))),
                    // Nobody listens at the port yet, or no longer: datagrams may be lost.
                    Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => {}
                    Err(error) => return Err(error),
                }
            },
        }
    }
}

impl Writer {
    async fn write(&mut self, data: &[u8]) -> io::Result<()> {
        match self {
            Self::Tcp(half) => half.write_all(data).await,
            Self::Udp(socket) => match socket.send(data).await {
                Err(error) if error.kind() != io::ErrorKind::ConnectionRefused => Err(error),
                _ => Ok(()),
            },
        }
    }

    /// Says that no more bytes follow.
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
            (Reader::Tcp(read, BytesMut::new()), Writer::Tcp(write))
        }
        Connection::Udp(socket) => {
            let socket = Arc::new(socket);
            (Reader::Udp(socket.clone(), vec![0; CHUNK]), Writer::Udp(socket))
        }
    }
}

/// How one direction ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Ended {
    ClientClosed,
    ClientLost,
    GuestClosed,
    GuestLost,
}

/// Copies until one side closes, breaks, or `stop` is cancelled.
pub async fn copy<C>(client: WebSocketStream<C>, guest: Connection, limits: Limits, stop: CancellationToken) -> End
where
    C: AsyncRead + AsyncWrite + Unpin,
{
    let (mut sink, mut source) = client.split();
    let (mut reader, mut writer) = halves(guest);
    let ended = {
        let upward = std::pin::pin!(upward(&mut source, &mut writer, limits));
        let downward = std::pin::pin!(downward(&mut reader, &mut sink, limits));
        tokio::select! {
            first = select(upward, downward) => match first {
                Either::Left((ended, _)) => Some(ended),
                Either::Right((ended, upward)) => {
                    if ended == Ended::GuestClosed {
                        // What the client sent before it read the close is still the guest's.
                        let _ = timeout(limits.close, upward).await;
                    }
                    Some(ended)
                }
            },
            () = stop.cancelled() => None,
        }
    };
    let (end, farewell) = match ended {
        Some(Ended::ClientClosed) => (End::ClientClosed, None),
        Some(Ended::GuestClosed) => (End::GuestClosed, None),
        Some(Ended::ClientLost) => (End::ClientLost, Some((CloseCode::Away, "client is gone"))),
        Some(Ended::GuestLost) => (End::GuestLost, Some((CloseCode::Error, "connection to the guest was lost"))),
        None => (End::Stopped, Some((CloseCode::Restart, "virt-api is stopping"))),
    };
    let _ = timeout(limits.close, async {
        if let Some((code, reason)) = farewell {
            let _ = sink.send(Message::Close(Some(CloseFrame { code, reason: reason.into() }))).await;
        }
        let _ = sink.close().await;
        let _ = writer.finish().await;
    })
    .await;
    end
}

async fn upward<R>(source: &mut R, writer: &mut Writer, limits: Limits) -> Ended
where
    R: Stream<Item = Result<Message, Error>> + Unpin,
{
    let mut heard = Instant::now();
    loop {
        let message = match timeout_at(heard + limits.silence, source.next()).await {
            Ok(Some(Ok(message))) => message,
            Err(_) | Ok(None | Some(Err(_))) => return Ended::ClientLost,
        };
        let written = match &message {
            Message::Binary(data) if data.is_empty() => timeout(limits.write, writer.finish()).await,
            Message::Binary(data) => timeout(limits.write, writer.write(data)).await,
            Message::Close(_) => return Ended::ClientClosed,
            Message::Ping(_) | Message::Pong(_) | Message::Text(_) | Message::Frame(_) => Ok(Ok(())),
        };
        if !matches!(written, Ok(Ok(()))) {
            return Ended::GuestLost;
        }
        // Counted from here: while the guest was slow, nobody listened to the client.
        heard = Instant::now();
    }
}

async fn downward<W>(reader: &mut Reader, sink: &mut W, limits: Limits) -> Ended
where
    W: Sink<Message, Error = Error> + Unpin,
{
    let mut pings = interval_at(Instant::now() + limits.ping, limits.ping);
    pings.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        let message = tokio::select! {
            read = reader.read() => match read {
                Ok(Some(data)) => Message::Binary(data),
                Ok(None) => {
                    let close = CloseFrame { code: CloseCode::Normal, reason: "".into() };
                    let _ = timeout(limits.close, sink.send(Message::Close(Some(close)))).await;
                    return Ended::GuestClosed;
                }
                Err(_) => return Ended::GuestLost,
            },
            _ = pings.tick() => Message::Ping(Bytes::from_static(PING)),
        };
        if !matches!(timeout(limits.write, sink.send(message)).await, Ok(Ok(()))) {
            return Ended::ClientLost;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use tokio::{
        io::{DuplexStream, duplex},
        net::TcpListener,
        task::JoinHandle,
    };
    use tokio_tungstenite::tungstenite::protocol::Role;

    use super::*;
    use crate::websocket;

    struct Ends {
        client: WebSocketStream<DuplexStream>,
        copy: JoinHandle<End>,
        stop: CancellationToken,
    }

    async fn tunnel(guest: Connection, limits: Limits) -> Ends {
        let (far, near) = duplex(64 << 10);
        let config = Some(websocket::config());
        let client = WebSocketStream::from_raw_socket(far, Role::Client, config).await;
        let from_client = WebSocketStream::from_raw_socket(near, Role::Server, config).await;
        let stop = CancellationToken::new();
        let copy = tokio::spawn(copy(from_client, guest, limits, stop.clone()));
        Ends { client, copy, stop }
    }

    /// A connection to a guest that the test plays.
    async fn tcp() -> (Connection, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let near = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
        (Connection::Tcp(near), listener.accept().await.unwrap().0)
    }

    fn binary(bytes: &[u8]) -> Message {
        Message::Binary(Bytes::copy_from_slice(bytes))
    }

    #[tokio::test]
    async fn guest_answers_after_the_client_has_said_its_last_word() {
        let (connection, mut guest) = tcp().await;
        let mut ends = tunnel(connection, Limits::tunnel()).await;
        ends.client.send(Message::Text("ignored".into())).await.unwrap();
        ends.client.send(binary(b"question")).await.unwrap();
        ends.client.send(binary(b"")).await.unwrap();
        let mut heard = Vec::new();
        guest.read_to_end(&mut heard).await.unwrap();
        assert_eq!(heard, b"question");
        guest.write_all(b"answer").await.unwrap();
        drop(guest);
        assert_eq!(ends.client.next().await.unwrap().unwrap(), binary(b"answer"));
        assert!(
            matches!(ends.client.next().await.unwrap().unwrap(), Message::Close(Some(frame)) if frame.code == CloseCode::Normal)
        );
        assert!(ends.client.next().await.is_none());
        assert_eq!(ends.copy.await.unwrap(), End::GuestClosed);
    }

    #[tokio::test]
    async fn ten_mebibytes_pass_each_way_unchanged() {
        const SIZE: usize = 10 << 20;
        let (connection, guest) = tcp().await;
        let mut ends = tunnel(connection, Limits::tunnel()).await;
        let pattern = (0..SIZE).map(|i| u8::try_from(i % 251).unwrap()).collect::<Vec<_>>();
        // The guest is an echo.
        let echo = tokio::spawn(async move {
            let (mut read, mut write) = guest.into_split();
            tokio::io::copy(&mut read, &mut write).await.unwrap();
        });
        let (mut sink, mut source) = ends.client.split();
        let sent = pattern.clone();
        let sender = tokio::spawn(async move {
            for chunk in sent.chunks(100_000) {
                sink.send(binary(chunk)).await.unwrap();
            }
            sink.send(binary(b"")).await.unwrap();
            sink
        });
        let mut received = Vec::new();
        while let Some(Ok(message)) = source.next().await {
            match message {
                Message::Binary(data) => received.extend_from_slice(&data),
                Message::Close(_) => break,
                _ => {}
            }
        }
        assert!(received == pattern, "{} bytes came back", received.len());
        echo.await.unwrap();
        drop((sender.await.unwrap(), source));
        assert_eq!((&mut ends.copy).await.unwrap(), End::GuestClosed);
    }

    #[tokio::test]
    async fn close_of_the_client_ends_the_guests_connection() {
        let (connection, mut guest) = tcp().await;
        let mut ends = tunnel(connection, Limits::tunnel()).await;
        ends.client.close(None).await.unwrap();
        assert_eq!(guest.read(&mut [0; 8]).await.unwrap(), 0);
        assert_eq!(ends.copy.await.unwrap(), End::ClientClosed);
    }

    #[tokio::test]
    async fn stopping_process_tells_the_client() {
        let (connection, _guest) = tcp().await;
        let mut ends = tunnel(connection, Limits::tunnel()).await;
        ends.stop.cancel();
        let message = ends.client.next().await.unwrap().unwrap();
        assert!(matches!(message, Message::Close(Some(frame)) if frame.code == CloseCode::Restart));
        assert_eq!(ends.copy.await.unwrap(), End::Stopped);
    }

    #[tokio::test]
    async fn silent_client_is_let_go() {
        let (connection, mut guest) = tcp().await;
        let limits =
            Limits { ping: Duration::from_millis(20), silence: Duration::from_millis(100), ..Limits::tunnel() };
        let ends = tunnel(connection, limits).await;
        // The far end of the WebSocket is not read, so no ping is answered.
        assert_eq!(guest.read(&mut [0; 8]).await.unwrap_or(0), 0);
        assert_eq!(ends.copy.await.unwrap(), End::ClientLost);
        drop(ends.client);
    }

    #[tokio::test]
    async fn each_datagram_is_a_message() {
        let guest = UdpSocket::bind("127.0.0.1:0").await.unwrap();
        let near = UdpSocket::bind("127.0.0.1:0").await.unwrap();
        near.connect(guest.local_addr().unwrap()).await.unwrap();
        guest.connect(near.local_addr().unwrap()).await.unwrap();
        let mut ends = tunnel(Connection::Udp(near), Limits::tunnel()).await;
        for text in [&b"one"[..], b"two"] {
            ends.client.send(binary(text)).await.unwrap();
            let mut buffer = [0; 16];
            let length = guest.recv(&mut buffer).await.unwrap();
            assert_eq!(&buffer[..length], text);
            guest.send(&buffer[..length]).await.unwrap();
            assert_eq!(ends.client.next().await.unwrap().unwrap(), binary(text));
        }
        ends.client.close(None).await.unwrap();
        assert_eq!(ends.copy.await.unwrap(), End::ClientClosed);
    }
}
