//! Frames as clients make them, through the library that reads them in production.

use std::time::Duration;

use futures::{SinkExt, StreamExt};
use tokio::{
    io::{AsyncReadExt, DuplexStream, duplex},
    time::timeout,
};
use tokio_tungstenite::{
    WebSocketStream,
    tungstenite::{
        Bytes, Error, Message,
        error::ProtocolError,
        protocol::{
            Role,
            frame::{
                Frame,
                coding::{Data, OpCode},
            },
        },
    },
};
use tokio_util::sync::CancellationToken;

use super::*;
use crate::{
    stream::{self, End, Limits},
    websocket,
};

const MASK: [u8; 4] = [0x11, 0xa2, 0x03, 0xf4];
const PING: u8 = 9;

/// Numbers that look like chance, the same each time.
struct Chance(u64);

impl Chance {
    fn below(&mut self, end: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        usize::try_from(self.0 >> 16).unwrap() % end
    }

    fn of<T: Copy>(&mut self, choices: &[T]) -> T {
        choices[self.below(choices.len())]
    }
}

/// A connection that gives what it has in pieces of any size, and not always at once.
struct Drip {
    bytes: Vec<u8>,
    at: usize,
    most: usize,
    chance: Chance,
    /// Whether it breaks in the end.
    breaks: bool,
}

impl Drip {
    fn new(bytes: &[u8], most: usize, seed: u64) -> Self {
        Self { bytes: bytes.to_vec(), at: 0, most, chance: Chance(seed + 1), breaks: false }
    }
}

impl AsyncRead for Drip {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        if self.chance.below(3) == 0 {
            context.waker().wake_by_ref();
            return Poll::Pending;
        }
        let (at, most) = (self.at, self.most);
        let length = (1 + self.chance.below(most)).min(buffer.remaining()).min(self.bytes.len() - at);
        if length == 0 && self.breaks {
            self.breaks = false;
            return Poll::Ready(Err(io::ErrorKind::TimedOut.into()));
        }
        buffer.put_slice(&self.bytes[at..at + length]);
        self.at += length;
        Poll::Ready(Ok(()))
    }
}

impl AsyncWrite for Drip {
    fn poll_write(self: Pin<&mut Self>, _: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        Poll::Ready(Ok(bytes.len()))
    }

    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }
}

/// A frame of a client.
fn frame(first: u8, payload: &[u8]) -> Vec<u8> {
    let length = payload.len();
    let mut bytes = match length {
        0..=125 => vec![first, 0x80 + length as u8],
        126..=0xffff => vec![first, 0x80 + 126, (length >> 8) as u8, length as u8],
        _ => [&[first, 0x80 + 127][..], &(length as u64).to_be_bytes()].concat(),
    };
    bytes.extend(MASK);
    bytes.extend(payload.iter().enumerate().map(|(at, byte)| byte ^ MASK[at % 4]));
    bytes
}

fn pattern(length: usize) -> Vec<u8> {
    (0..length).map(|at| (at % 251) as u8).collect()
}

/// What the library reads, and how it ends.
async fn received(drip: Drip, content: Content) -> (Vec<Message>, Error) {
    let frames = Frames::new(drip, content);
    let mut socket = WebSocketStream::from_raw_socket(frames, Role::Server, Some(websocket::config())).await;
    let mut messages = Vec::new();
    loop {
        match socket.next().await.unwrap() {
            Ok(message) => messages.push(message),
            Err(error) => return (messages, error),
        }
    }
}

/// All bytes that pass, read into buffers of up to `room` bytes.
async fn passed(drip: Drip, room: usize) -> Vec<u8> {
    let mut frames = Frames::new(drip, Content::Bytes);
    let mut passed = Vec::new();
    let mut buffer = vec![0; room];
    loop {
        match frames.read(&mut buffer).await.unwrap() {
            0 => return passed,
            length => passed.extend_from_slice(&buffer[..length]),
        }
    }
}

#[tokio::test]
async fn a_frame_of_any_size_becomes_messages_of_bounded_size() {
    for size in [0, 1, 3, 4, 125, 126, 127, 65_533, 65_535, 65_536, 65_537, 65_539, 131_071, 131_072, 131_073, 1 << 20]
    {
        let payload = pattern(size);
        for most in [7, 1000, 1 << 20] {
            let drip = Drip::new(&frame(FINAL | BINARY, &payload), most, size as u64);
            let (messages, _) = received(drip, Content::Bytes).await;
            assert_eq!(messages.len(), size.div_ceil(PIECE).max(1), "{size}");
            let mut whole = Vec::new();
            for message in messages {
                let Message::Binary(data) = message else { panic!("{message:?}") };
                assert!(data.len() <= PIECE);
                whole.extend_from_slice(&data);
            }
            assert!(whole == payload, "{size} bytes, {most} at a time");
        }
    }
}

/// What a client says, as far as it matters.
#[derive(Debug, PartialEq)]
enum Said {
    Bytes(Vec<u8>),
    Nothing,
    Ping(Vec<u8>),
}

fn say(said: &mut Vec<Said>, bytes: &[u8]) {
    match said.last_mut() {
        Some(Said::Bytes(before)) => before.extend_from_slice(bytes),
        _ if bytes.is_empty() => {}
        _ => said.push(Said::Bytes(bytes.to_vec())),
    }
}

/// Some messages with their bytes on the wire, whole or in fragments, with pings and text between.
fn conversation(chance: &mut Chance, sizes: &[usize]) -> (Vec<u8>, Vec<Said>) {
    let (mut wire, mut said) = (Vec::new(), Vec::new());
    for _ in 0..1 + chance.below(8) {
        let text = chance.below(4) == 0;
        let fragments = 1 + chance.below(5);
        let mut empty = true;
        for number in 1..=fragments {
            if chance.below(3) == 0 {
                let ping = pattern(chance.below(126));
                wire.extend(frame(FINAL | PING, &ping));
                said.push(Said::Ping(ping));
            }
            let payload = pattern(chance.of(sizes));
            empty &= payload.is_empty();
            let opcode = if number > 1 {
                CONTINUATION
            } else if text {
                TEXT
            } else {
                BINARY
            };
            wire.extend(frame(if number == fragments { FINAL | opcode } else { opcode }, &payload));
            if !text {
                say(&mut said, &payload);
            }
        }
        if empty && !text {
            said.push(Said::Nothing);
        }
    }
    (wire, said)
}

#[tokio::test]
async fn what_is_said_stays_the_same_however_it_is_cut() {
    let small: &[usize] = &[0, 0, 1, 2, 3, 5, 8, 125, 126, 127, 300];
    let large: &[usize] = &[0, 1, 126, 65_534, 65_535, 65_536, 65_537, 65_538, 131_073];
    for seed in 0..400 {
        let chance = &mut Chance(seed * 7 + 1);
        let (sizes, most) =
            if seed % 8 == 0 { (large, chance.of(&[1000, 70_000])) } else { (small, chance.of(&[1, 2, 5, 40, 2000])) };
        let (wire, said) = conversation(chance, sizes);
        let (messages, end) = received(Drip::new(&wire, most, seed), Content::Bytes).await;
        let mut heard = Vec::new();
        for message in messages {
            match message {
                Message::Binary(data) if data.is_empty() => heard.push(Said::Nothing),
                Message::Binary(data) => {
                    assert!(data.len() <= PIECE);
                    say(&mut heard, &data);
                }
                Message::Ping(data) => heard.push(Said::Ping(data.to_vec())),
                Message::Pong(data) => assert!(data.is_empty()),
                other => panic!("{other:?}"),
            }
        }
        assert!(heard == said, "seed {seed}");
        assert!(matches!(end, Error::Protocol(ProtocolError::ResetWithoutClosingHandshake)), "{end}");
    }
}

#[tokio::test]
async fn pieces_of_the_connection_and_of_the_reader_do_not_matter() {
    let wire = [
        frame(FINAL | BINARY, b"one"),
        frame(BINARY, b""),
        frame(FINAL | PING, b"alive"),
        frame(CONTINUATION, b"two"),
        frame(FINAL, b""),
        frame(FINAL | TEXT, b"text"),
        frame(BINARY, b""),
        frame(FINAL, b""),
        frame(FINAL | BINARY, &pattern(130)),
        frame(FINAL | CLOSE, &[0x03, 0xe8]),
    ]
    .concat();
    let expected = [
        frame(FINAL | BINARY, b"one"),
        frame(FINAL | PING, b"alive"),
        frame(FINAL | BINARY, b"two"),
        frame(FINAL | PONG, b""),
        frame(FINAL | BINARY, b""),
        frame(FINAL | BINARY, &pattern(130)),
        frame(FINAL | CLOSE, &[0x03, 0xe8]),
    ]
    .concat();
    for most in 1..wire.len() {
        for room in [1, 2, 3, 5, 14, 1000] {
            let got = passed(Drip::new(&wire, most, (most * room) as u64), room).await;
            assert!(got == expected, "{most} bytes at a time, read by {room}");
        }
    }
    // An end in the midst of a header is an end.
    for length in 0..wire.len() {
        let got = passed(Drip::new(&wire[..length], 1000, length as u64), 1000).await;
        assert!(expected.starts_with(&got), "{length} bytes of it");
    }
}

#[test]
fn the_fate_of_a_frame_depends_on_what_was_begun() {
    let (binary, empty) = (Some(Open { text: false, empty: false }), Some(Open { text: false, empty: true }));
    let text = Some(Open { text: true, empty: false });
    for (before, first, length, expected, after) in [
        (None, FINAL | BINARY, 5, Fate::Messages, None),
        (None, FINAL | BINARY, 0, Fate::Messages, None),
        (None, FINAL | BINARY, u64::MAX >> 1, Fate::Messages, None),
        (None, BINARY, 5, Fate::Messages, binary),
        (None, BINARY, 0, Fate::Gone, empty),
        (binary, CONTINUATION, 5, Fate::Messages, binary),
        (binary, CONTINUATION, 0, Fate::Gone, binary),
        (binary, FINAL, 5, Fate::Messages, None),
        (binary, FINAL, 0, Fate::Gone, None),
        (empty, CONTINUATION, 5, Fate::Messages, binary),
        (empty, CONTINUATION, 0, Fate::Gone, empty),
        (empty, FINAL, 0, Fate::Messages, None),
        (None, FINAL | TEXT, 5, Fate::Pongs, None),
        (None, TEXT, 5, Fate::Pongs, text),
        (text, FINAL, 0, Fate::Pongs, None),
        (None, FINAL | PING, 125, Fate::Same, None),
        (binary, FINAL | PONG, 0, Fate::Same, binary),
        (text, FINAL | CLOSE, 2, Fate::Same, text),
        // What the library refuses.
        (None, FINAL, 5, Fate::Untouched, None),
        (None, FINAL | 3, 5, Fate::Untouched, None),
        (None, FINAL | 11, 5, Fate::Untouched, None),
        (None, FINAL | PING, 126, Fate::Untouched, None),
        (None, PING, 5, Fate::Untouched, None),
        (None, FINAL | BINARY | 0x40, 5, Fate::Untouched, None),
        (binary, FINAL | 0x10, 5, Fate::Untouched, binary),
        (None, FINAL | BINARY, 1 << 63, Fate::Untouched, None),
    ] {
        let mut open = before;
        let header = Header { first, length, mask: Some(MASK) };
        assert_eq!(fate(&mut open, &header).unwrap(), expected, "{first:#x} {length} {before:?}");
        assert_eq!(open, after, "{first:#x} {length} {before:?}");
    }
    for first in [BINARY, FINAL | BINARY, FINAL | TEXT] {
        assert!(fate(&mut empty.clone(), &Header { first, length: 1, mask: None }).is_err());
    }
}

#[test]
fn headers_are_read_and_written() {
    for (length, size) in [
        (0, 2),
        (1, 2),
        (125, 2),
        (126, 4),
        (255, 4),
        (256, 4),
        (65_535, 4),
        (65_536, 10),
        (1 << 40, 10),
        (u64::MAX, 10),
    ] {
        for mask in [None, Some(MASK)] {
            let header = Header { first: FINAL | BINARY, length, mask };
            let part = header.bytes();
            let bytes = part.bytes();
            assert_eq!(bytes.len(), size + if mask.is_some() { 4 } else { 0 });
            assert_eq!(Header::parse(bytes), Ok(header));
            for missing in 0..bytes.len() {
                let wanted = if missing < 2 { 2 } else { bytes.len() };
                assert_eq!(Header::parse(&bytes[..missing]), Err(wanted));
            }
        }
    }
    // Not the shortest form, but understood.
    assert_eq!(Header::parse(&[0x82, 126, 0, 5]), Ok(Header { first: 0x82, length: 5, mask: None }));
}

#[tokio::test]
async fn the_library_still_refuses_what_it_refused() {
    let good = frame(FINAL | BINARY, b"good");
    let unmasked = |first: u8| [&[first, 4][..], b"good"].concat();
    let endless = [&[FINAL | BINARY, MASKED | 127, 0x80, 0, 0, 0, 0, 0, 0, 4][..], &MASK].concat();
    for (bad, refusal) in [
        (frame(FINAL | BINARY | 0x20, b"bits"), "reserved bits"),
        (frame(FINAL | 3, b"kind"), "invalid opcode"),
        (frame(FINAL | PING, &pattern(126)), "control frame too big"),
        (frame(PING, b"part"), "fragmented control frame"),
        (frame(FINAL, b"more"), "continue frame"),
        (unmasked(FINAL | BINARY), "unmasked frame"),
        (unmasked(FINAL | PING), "unmasked frame"),
        (unmasked(FINAL | TEXT), "unmasked frame"),
        (endless, "too long"),
        ([frame(BINARY, b"good"), good.clone()].concat(), "within another"),
        ([frame(TEXT, b"good"), frame(FINAL | TEXT, b"text")].concat(), "within another"),
    ] {
        let wire = [&good[..], &bad, &good].concat();
        let (messages, error) = received(Drip::new(&wire, 50, 3), Content::Bytes).await;
        assert!(error.to_string().to_lowercase().contains(refusal), "{error}, not {refusal}");
        let heard = messages.iter().filter(|message| message.is_binary()).collect::<Vec<_>>();
        let good = Message::Binary(Bytes::from_static(b"good"));
        assert!(heard.len() <= 2 && heard.iter().all(|message| **message == good), "{messages:?}");
    }
}

#[tokio::test]
async fn an_error_comes_after_the_bytes_before_it_and_once() {
    for most in 1..40 {
        let wire = frame(FINAL | BINARY, b"last words");
        let mut frames = Frames::new(Drip { breaks: true, ..Drip::new(&wire, most, 9) }, Content::Bytes);
        let mut got = Vec::new();
        let error = frames.read_to_end(&mut got).await.unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::TimedOut);
        assert_eq!(got, wire);
        assert_eq!(frames.read(&mut [0; 8]).await.unwrap(), 0);
    }
}

#[tokio::test]
async fn datagrams_stay_whole() {
    let wire = [
        frame(BINARY, &pattern(10_000)),
        frame(FINAL | PING, b"alive"),
        frame(FINAL, &pattern(10_000)),
        frame(FINAL | BINARY, b""),
        frame(FINAL | BINARY, &pattern(65_507)),
    ]
    .concat();
    let (messages, _) = received(Drip::new(&wire, 5000, 4), Content::Datagrams).await;
    let sizes = messages.iter().filter(|message| message.is_binary()).map(Message::len).collect::<Vec<_>>();
    assert_eq!(sizes, [20_000, 0, 65_507]);
}

type Socket = WebSocketStream<DuplexStream>;

/// A client and an agent with a copy between them.
async fn copied() -> (Socket, Socket, tokio::task::JoinHandle<End>) {
    let config = Some(websocket::config());
    let ((client, from_client), (to_agent, agent)) = (duplex(64 << 10), duplex(64 << 10));
    let client = WebSocketStream::from_raw_socket(client, Role::Client, None).await;
    let from_client = Frames::new(from_client, Content::Bytes);
    let from_client = WebSocketStream::from_raw_socket(from_client, Role::Server, config).await;
    let to_agent = WebSocketStream::from_raw_socket(to_agent, Role::Client, config).await;
    // With the limit of the agent's server.
    let agent = WebSocketStream::from_raw_socket(agent, Role::Server, config).await;
    let copy = tokio::spawn(stream::copy(from_client, to_agent, Limits::default(), CancellationToken::new()));
    (client, agent, copy)
}

#[tokio::test]
async fn large_messages_and_many_fragments_reach_the_agent() {
    let (mut client, mut agent, copy) = copied().await;
    let large = pattern(3 << 20);
    let fragment = pattern(10_240);
    let mut expected = large.clone();
    expected.extend(fragment.repeat(300));
    let sender = tokio::spawn(async move {
        client.send(Message::Binary(large.into())).await.unwrap();
        for number in 0..300 {
            let opcode = OpCode::Data(if number == 0 { Data::Binary } else { Data::Continue });
            let frame = Frame::message(fragment.clone(), opcode, number == 299);
            client.send(Message::Frame(frame)).await.unwrap();
            if number % 100 == 50 {
                client.send(Message::Ping(Bytes::from_static(b"alive"))).await.unwrap();
            }
        }
        client.send(Message::Text("x".repeat(1 << 20).into())).await.unwrap();
        client.close(None).await.unwrap();
        while client.next().await.is_some() {}
    });
    let mut received = Vec::new();
    let closed = async {
        loop {
            match agent.next().await {
                Some(Ok(Message::Binary(data))) => {
                    assert!(!data.is_empty() && data.len() <= PIECE);
                    received.extend_from_slice(&data);
                }
                Some(Ok(Message::Close(_))) => return,
                Some(Ok(_)) => {}
                other => panic!("{other:?}"),
            }
        }
    };
    timeout(Duration::from_secs(60), closed).await.unwrap();
    assert!(received == expected, "{} of {} bytes", received.len(), expected.len());
    assert!(agent.next().await.is_none());
    sender.await.unwrap();
    assert_eq!(copy.await.unwrap(), End::ClientClosed);
}
