//! A tunnel between a client and a guest that the test plays.

use tokio::{
    io::{AsyncReadExt, DuplexStream, duplex},
    net::TcpListener,
    task::JoinHandle,
};
use tokio_tungstenite::tungstenite::protocol::Role;

use super::*;
use crate::clients::websocket;

struct Ends {
    client: WebSocketStream<DuplexStream>,
    copy: JoinHandle<End>,
    stop: CancellationToken,
}

/// A tunnel of a client that understands half-closed connections.
async fn tunnel(guest: Connection, limits: Limits) -> Ends {
    tunnel_of(guest, limits, true, std::future::pending()).await
}

async fn tunnel_of(
    guest: Connection,
    limits: Limits,
    half_close: bool,
    gone: impl Future<Output = ()> + Send + 'static,
) -> Ends {
    let (far, near) = duplex(64 << 10);
    let config = Some(websocket::config());
    let client = WebSocketStream::from_raw_socket(far, Role::Client, config).await;
    let from_client = WebSocketStream::from_raw_socket(near, Role::Server, config).await;
    let stop = CancellationToken::new();
    let copy = tokio::spawn(copy(from_client, guest, half_close, limits, gone, stop.clone()));
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

const SIZE: usize = 10 << 20;

fn pattern() -> Vec<u8> {
    (0..SIZE).map(|i| u8::try_from(i % 251).unwrap()).collect()
}

/// Sends all of it in messages.
async fn send_all(client: &mut (impl Sink<Message, Error = Error> + Unpin), bytes: &[u8]) {
    for chunk in bytes.chunks(100_000) {
        client.send(binary(chunk)).await.unwrap();
    }
}

async fn next(client: &mut (impl Stream<Item = Result<Message, Error>> + Unpin)) -> Message {
    // Signs of life come between.
    let message = async {
        loop {
            match client.next().await.unwrap().unwrap() {
                Message::Ping(_) => {}
                other => return other,
            }
        }
    };
    timeout(Duration::from_secs(20), message).await.unwrap()
}

fn closes(message: &Message, with: CloseCode) -> bool {
    matches!(message, Message::Close(Some(frame)) if frame.code == with)
}

#[tokio::test]
async fn guest_answers_after_the_end_of_the_clients_bytes() {
    for half_close in [true, false] {
        let (connection, mut guest) = tcp().await;
        let mut ends = tunnel_of(connection, Limits::tunnel(), half_close, std::future::pending()).await;
        ends.client.send(Message::Text("ignored".into())).await.unwrap();
        ends.client.send(binary(b"question")).await.unwrap();
        ends.client.send(binary(b"")).await.unwrap();
        let mut found = Vec::new();
        guest.read_to_end(&mut found).await.unwrap();
        assert_eq!(found, b"question");
        guest.write_all(b"answer").await.unwrap();
        drop(guest);
        assert_eq!(next(&mut ends.client).await, binary(b"answer"));
        if half_close {
            assert_eq!(next(&mut ends.client).await, binary(b""));
        }
        assert!(closes(&next(&mut ends.client).await, CloseCode::Normal));
        assert!(ends.client.next().await.is_none());
        assert_eq!(ends.copy.await.unwrap(), End::GuestClosed);
    }
}

#[tokio::test]
async fn client_sends_after_the_end_of_the_guests_bytes() {
    let (connection, mut guest) = tcp().await;
    let mut ends = tunnel(connection, Limits::tunnel()).await;
    guest.shutdown().await.unwrap();
    assert_eq!(next(&mut ends.client).await, binary(b""));
    // Far longer than the wait for a client without half-close.
    sleep(2 * QUIET).await;
    let sent = pattern();
    let reader = tokio::spawn(async move {
        let mut found = Vec::new();
        guest.read_to_end(&mut found).await.unwrap();
        found
    });
    send_all(&mut ends.client, &sent).await;
    ends.client.send(binary(b"")).await.unwrap();
    assert!(closes(&next(&mut ends.client).await, CloseCode::Normal));
    assert!(reader.await.unwrap() == sent);
    assert!(ends.client.next().await.is_none());
    assert_eq!(ends.copy.await.unwrap(), End::GuestClosed);
}

#[tokio::test]
async fn client_without_half_close_is_closed_after_a_quiet_moment() {
    let (connection, mut guest) = tcp().await;
    let ends = tunnel_of(connection, Limits::tunnel(), false, std::future::pending()).await;
    guest.shutdown().await.unwrap();
    let (mut sink, mut source) = ends.client.split();
    // The client sends to a guest that reads nothing for longer than the wait for a quiet client.
    let sent = pattern();
    let sender = tokio::spawn(async move {
        send_all(&mut sink, &sent).await;
        (sink, sent)
    });
    let reader = tokio::spawn(async move {
        sleep(2 * QUIET).await;
        let mut found = Vec::new();
        guest.read_to_end(&mut found).await.unwrap();
        found
    });
    assert!(closes(&next(&mut source).await, CloseCode::Normal));
    let (sink, sent) = sender.await.unwrap();
    assert!(source.next().await.is_none());
    drop(sink);
    assert_eq!(ends.copy.await.unwrap(), End::GuestClosed);
    let found = reader.await.unwrap();
    assert!(found == sent, "{} bytes of {SIZE} came", found.len());
}

#[tokio::test]
async fn closed_guest_ends_the_tunnel_of_a_sending_client() {
    let (connection, guest) = tcp().await;
    let mut ends = tunnel(connection, Limits::tunnel()).await;
    drop(guest);
    assert_eq!(next(&mut ends.client).await, binary(b""));
    // The first is answered by a reset, the second finds it.
    for _ in 0..2 {
        ends.client.send(binary(b"hello?")).await.unwrap();
        sleep(Duration::from_millis(50)).await;
    }
    assert!(closes(&next(&mut ends.client).await, CloseCode::Normal));
    assert!(ends.client.next().await.is_none());
    assert_eq!(ends.copy.await.unwrap(), End::GuestClosed);
}

#[tokio::test]
async fn stopped_vmi_ends_the_tunnel_after_its_last_bytes() {
    let (connection, mut guest) = tcp().await;
    let gone = CancellationToken::new();
    let off = gone.clone().cancelled_owned();
    let mut ends = tunnel_of(connection, Limits::tunnel(), true, off).await;
    guest.write_all(b"last words").await.unwrap();
    gone.cancel();
    assert_eq!(next(&mut ends.client).await, binary(b"last words"));
    let Message::Close(Some(frame)) = next(&mut ends.client).await else { panic!("no close") };
    assert_eq!((frame.code, frame.reason.as_str()), (CloseCode::Away, "the VMI has stopped"));
    assert!(ends.client.next().await.is_none());
    assert_eq!(ends.copy.await.unwrap(), End::VmiGone);
}

#[tokio::test]
async fn ten_mebibytes_pass_each_way_unchanged() {
    let (connection, guest) = tcp().await;
    let mut ends = tunnel(connection, Limits::tunnel()).await;
    let pattern = pattern();
    // The guest is an echo.
    let echo = tokio::spawn(async move {
        let (mut read, mut write) = guest.into_split();
        tokio::io::copy(&mut read, &mut write).await.unwrap();
    });
    let (mut sink, mut source) = ends.client.split();
    let sent = pattern.clone();
    let sender = tokio::spawn(async move {
        send_all(&mut sink, &sent).await;
        sink.send(binary(b"")).await.unwrap();
        sink
    });
    let mut received = Vec::new();
    loop {
        match next(&mut source).await {
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
async fn stopping_process_closes_the_clients_stream() {
    let (connection, _guest) = tcp().await;
    let mut ends = tunnel(connection, Limits::tunnel()).await;
    ends.stop.cancel();
    let message = ends.client.next().await.unwrap().unwrap();
    assert!(closes(&message, CloseCode::Restart));
    assert!(ends.client.next().await.is_none());
    assert_eq!(ends.copy.await.unwrap(), End::Stopped);
}

#[tokio::test]
async fn sending_client_receives_the_reason_of_the_end() {
    // A real socket: it is reset when it is closed with unread bytes.
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let far = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
    let near = listener.accept().await.unwrap().0;
    let config = Some(websocket::config());
    let mut client = WebSocketStream::from_raw_socket(far, Role::Client, config).await;
    let from_client = WebSocketStream::from_raw_socket(near, Role::Server, config).await;
    let ((connection, _guest), stop) = (tcp().await, CancellationToken::new());
    let gone = std::future::pending();
    let copying = tokio::spawn(copy(from_client, connection, true, Limits::tunnel(), gone, stop.clone()));
    stop.cancel();
    for _ in 0..20 {
        client.send(binary(b"typed")).await.unwrap();
        sleep(Duration::from_millis(10)).await;
    }
    assert!(closes(&next(&mut client).await, CloseCode::Restart));
    assert!(client.next().await.is_none());
    assert_eq!(copying.await.unwrap(), End::Stopped);
}

#[tokio::test]
async fn silent_client_ends_the_tunnel() {
    let (connection, mut guest) = tcp().await;
    let limits = Limits { ping: Duration::from_millis(20), silence: Duration::from_millis(100), ..Limits::tunnel() };
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
    for text in [&b"one"[..], b"", b"two"] {
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
