//! Forwards connections between a local program and a server, both simulated.

use tokio::io::{DuplexStream, duplex};
use tokio_tungstenite::tungstenite::protocol::{CloseFrame, Role};

use super::*;

const SIZE: usize = 10 << 20;

struct Ends {
    local: TcpStream,
    server: WebSocketStream<DuplexStream>,
    copy: tokio::task::JoinHandle<Result<(), Error>>,
}

/// Forwards a connection between a simulated local program and a simulated server.
async fn forwarded_by(protocol: Protocol) -> Ends {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let local = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
    let accepted = listener.accept().await.unwrap().0;
    let (near, far) = duplex(64 << 10);
    let stream = WebSocketStream::from_raw_socket(near, Role::Client, None).await;
    let server = WebSocketStream::from_raw_socket(far, Role::Server, None).await;
    Ends { local, server, copy: tokio::spawn(copy(stream, accepted, protocol)) }
}

async fn forwarded() -> Ends {
    forwarded_by(Protocol::Tcp).await
}

fn pattern() -> Vec<u8> {
    (0..SIZE).map(|i| u8::try_from(i % 251).unwrap()).collect()
}

fn close(code: CloseCode, reason: &'static str) -> Message {
    Message::Close(Some(CloseFrame { code, reason: reason.into() }))
}

/// Reads messages up to one without bytes.
async fn until_half_close(server: &mut WebSocketStream<DuplexStream>) -> Vec<u8> {
    let mut bytes = Vec::new();
    loop {
        match server.next().await.unwrap().unwrap() {
            Message::Binary(data) if data.is_empty() => return bytes,
            Message::Binary(data) => bytes.extend_from_slice(&data),
            other => panic!("{other:?}"),
        }
    }
}

#[test]
fn guests_that_do_not_answer_get_a_hint() {
    let hint = "\nhint: the guest may still boot, or no program listens on its port 22; for SSH, sshd must be installed and \
                run in the guest";
    let refused = |message: &str| Error::Refused { code: 500, message: message.to_owned() };
    for (error, expected) in [
        (refused("cannot connect: No route to host (os error 113)"), true),
        (Error::Stream("the connection was closed: Connection refused (os error 111)".to_owned()), true),
        (refused("VMI is paused"), false),
        (Error::Transport("Connection refused".to_owned()), false),
    ] {
        let text = error.to_string();
        let shown = with_hint(error, 22).to_string();
        assert_eq!(shown, if expected { format!("{text}{hint}") } else { text });
    }
}

#[tokio::test]
async fn nothing_is_lost_when_the_guest_closes_its_half_first() {
    let Ends { mut local, mut server, copy } = forwarded().await;
    server.send(Message::Binary(Bytes::from_static(b"hello"))).await.unwrap();
    server.send(Message::Binary(Bytes::new())).await.unwrap();
    let mut greeting = Vec::new();
    local.read_to_end(&mut greeting).await.unwrap();
    assert_eq!(greeting, b"hello");
    let sent = pattern();
    let expected = sent.clone();
    tokio::spawn(async move {
        local.write_all(&sent).await.unwrap();
        local.shutdown().await.unwrap();
        local
    });
    assert!(until_half_close(&mut server).await == expected);
    server.send(close(CloseCode::Normal, "")).await.unwrap();
    assert!(server.next().await.unwrap().unwrap().is_close());
    copy.await.unwrap().unwrap();
}

#[tokio::test]
async fn nothing_is_lost_when_the_local_program_closes_its_half_first() {
    let Ends { mut local, mut server, copy } = forwarded().await;
    local.write_all(b"question").await.unwrap();
    local.shutdown().await.unwrap();
    assert_eq!(until_half_close(&mut server).await, b"question");
    let answer = pattern();
    let expected = answer.clone();
    let server = tokio::spawn(async move {
        for chunk in answer.chunks(100_000) {
            server.send(Message::Binary(Bytes::copy_from_slice(chunk))).await.unwrap();
        }
        server.send(close(CloseCode::Normal, "")).await.unwrap();
        server
    });
    let mut received = Vec::new();
    local.read_to_end(&mut received).await.unwrap();
    assert!(received == expected, "{} bytes", received.len());
    copy.await.unwrap().unwrap();
    drop(server.await.unwrap());
}

#[tokio::test]
async fn stream_of_a_server_without_half_close_ends_with_its_close() {
    let Ends { mut local, mut server, copy } = forwarded().await;
    server.send(Message::Binary(Bytes::from_static(b"bye"))).await.unwrap();
    server.send(close(CloseCode::Normal, "")).await.unwrap();
    let mut received = Vec::new();
    local.read_to_end(&mut received).await.unwrap();
    assert_eq!(received, b"bye");
    copy.await.unwrap().unwrap();
}

#[tokio::test]
async fn close_reason_is_reported_and_a_local_disconnect_is_no_failure() {
    let Ends { mut server, copy, local } = forwarded().await;
    server.send(close(CloseCode::Away, "the VMI has stopped")).await.unwrap();
    let error = copy.await.unwrap().unwrap_err();
    assert_eq!(error.to_string(), "the connection was closed: the VMI has stopped");
    drop(local);

    let Ends { mut server, copy, local } = forwarded().await;
    drop(local);
    assert_eq!(until_half_close(&mut server).await, b"");
    // The first bytes cause a reset, which later writes report.
    while server.send(Message::Binary(Bytes::from_static(b"more"))).await.is_ok() && !copy.is_finished() {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    copy.await.unwrap().unwrap();
}

#[tokio::test]
async fn each_datagram_is_a_message_and_goes_to_its_sender() {
    let socket = UdpSocket::bind("127.0.0.1:0").await.unwrap();
    let local = UdpSocket::bind("127.0.0.1:0").await.unwrap();
    local.connect(socket.local_addr().unwrap()).await.unwrap();
    let peer = local.local_addr().unwrap();
    let (near, far) = duplex(64 << 10);
    let stream = WebSocketStream::from_raw_socket(near, Role::Client, None).await;
    let mut server = WebSocketStream::from_raw_socket(far, Role::Server, None).await;
    let (sender, receiver) = mpsc::channel(MAX_DATAGRAMS);
    let copy = tokio::spawn(async move { datagrams(receiver, &socket, peer, stream).await });
    for text in ["one", "", "two"] {
        let datagram = Bytes::from_static(text.as_bytes());
        sender.send(datagram.clone()).await.unwrap();
        assert_eq!(server.next().await.unwrap().unwrap(), Message::Binary(datagram.clone()));
        server.send(Message::Ping(Bytes::new())).await.unwrap();
        server.send(Message::Binary(datagram.clone())).await.unwrap();
        assert!(server.next().await.unwrap().unwrap().is_pong());
        let mut buffer = [0; 16];
        let length = local.recv(&mut buffer).await.unwrap();
        assert_eq!(&buffer[..length], &datagram[..]);
    }
    server.send(close(CloseCode::Normal, "")).await.unwrap();
    copy.await.unwrap().unwrap();
}

#[test]
fn ports_are_taken_in_all_their_forms() {
    let port = |protocol, local, remote| Port { protocol, local, remote };
    for (argument, vsock, expected) in [
        ("8080", false, port(Protocol::Tcp, Some(8080), 8080)),
        ("8080:80", false, port(Protocol::Tcp, Some(8080), 80)),
        ("udp/5353:53", false, port(Protocol::Udp, Some(5353), 53)),
        ("TCP/22", false, port(Protocol::Tcp, Some(22), 22)),
        ("0:22", false, port(Protocol::Tcp, Some(0), 22)),
        ("65535", false, port(Protocol::Tcp, Some(65535), 65535)),
        ("22", true, port(Protocol::Vsock, Some(22), 22)),
        ("70000", true, port(Protocol::Vsock, None, 70_000)),
        ("8080:4294967294", true, port(Protocol::Vsock, Some(8080), u32::MAX - 1)),
    ] {
        let found = Port::parse(argument, vsock).unwrap();
        assert_eq!(found, expected, "{argument}");
        assert_eq!(found.local().ok(), expected.local, "{argument}");
    }
    for argument in ["", "0", "8080:", ":80", "8080:0", "65536", "8080:65536", "sctp/1", "a", "1:2:3"] {
        assert!(Port::parse(argument, false).is_err(), "{argument}");
    }
    for argument in ["0", "65536:22", "4294967295", "1:4294967295", "a"] {
        assert!(Port::parse(argument, true).is_err(), "{argument}");
    }
}

#[test]
fn vsock_is_a_subresource_of_its_own() {
    let subresource = |argument: &str, tls| Port::parse(argument, true).map(|port| port.subresource(tls));
    assert_eq!(subresource("0:22", false).unwrap(), "vsock?port=22&tls=false");
    assert_eq!(subresource("tcp/80", true).unwrap(), "vsock?port=80&tls=true");
    assert!(subresource("udp/53", true).is_err());
    assert_eq!(Port::parse("udp/5353:53", false).unwrap().subresource(true), "portforward/53/udp");
}

#[tokio::test]
async fn vsock_connection_ends_with_the_local_program() {
    let Ends { mut local, mut server, copy } = forwarded_by(Protocol::Vsock).await;
    local.write_all(b"hello").await.unwrap();
    local.shutdown().await.unwrap();
    assert_eq!(server.next().await.unwrap().unwrap(), Message::Binary(Bytes::from_static(b"hello")));
    assert!(matches!(server.next().await, Some(Ok(Message::Close(_))) | None));
    copy.await.unwrap().unwrap();
}
