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
    clients::websocket,
    streaming::relay::{self, End, Limits},
};

mod cases;

const MASK: [u8; 4] = [0x11, 0xa2, 0x03, 0xf4];
const PING: u8 = 9;

/// Reproducible pseudo-random numbers.
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

/// A connection that returns its bytes in pieces of any size, some of them later.
struct Drip {
    bytes: Vec<u8>,
    at: usize,
    most: usize,
    chance: Chance,
    /// True if the connection fails at the end.
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

/// Returns a frame of a client.
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

/// Returns the messages that the library reads, and the end.
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

/// Returns all bytes that pass, read into buffers of up to `room` bytes.
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
