//! Reads a launcher's connection at a bounded rate.
//!
//! HTTP/2 flow control bounds the bytes of messages that a peer can send unread, not the number of other frames, each of
//! which costs time or an answer. A compromised launcher can send millions per second. Frames beyond the rate that a
//! launcher needs therefore stay in the socket, where they delay only their sender.

use std::{
    io,
    pin::Pin,
    task::{Context, Poll, ready},
    time::Duration,
};

use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    time::{Instant, Sleep, sleep},
};

/// Average rate of frames without message bytes, per second. An upload of 60 MiB/s over a USB channel causes about as many.
const PER_SECOND: u32 = 2000;
/// Frames that may arrive at once.
const BURST: u32 = 10_000;
const INTERVAL: Duration = Duration::from_micros(1_000_000 / PER_SECOND as u64);

/// Length of the header of a frame (RFC 9113, section 4.1).
const HEADER: usize = 9;
const DATA: u8 = 0;

/// A connection that is read at a bounded rate of frames. Writes are not delayed.
#[derive(Debug)]
pub(super) struct Paced<S> {
    inner: S,
    frames: Frames,
    /// Time at which the frames that were read are within the rate.
    due: Instant,
    pause: Option<Pin<Box<Sleep>>>,
}

impl<S> Paced<S> {
    pub(super) fn new(inner: S) -> Self {
        Self { inner, frames: Frames::default(), due: Instant::now(), pause: None }
    }

    /// Counts bytes that were read and returns the pause before the next read.
    fn after(&mut self, bytes: &[u8], now: Instant) -> Duration {
        let frames = self.frames.count(bytes);
        self.due = self.due.max(now) + INTERVAL.saturating_mul(frames);
        self.due.saturating_duration_since(now).saturating_sub(INTERVAL * BURST)
    }
}

/// Finds frame headers in the bytes of a connection, in pieces of any size.
#[derive(Debug, Default)]
struct Frames {
    header: [u8; HEADER],
    /// Bytes of the header that have arrived.
    known: usize,
    /// Bytes of the frame that are missing.
    rest: usize,
}

impl Frames {
    /// Counts the headers that end in `bytes`, except those of frames with message bytes.
    fn count(&mut self, mut bytes: &[u8]) -> u32 {
        let mut count = 0_u32;
        while !bytes.is_empty() {
            if self.rest > 0 {
                let passed = self.rest.min(bytes.len());
                self.rest -= passed;
                bytes = &bytes[passed..];
                continue;
            }
            let taken = (HEADER - self.known).min(bytes.len());
            self.header[self.known..self.known + taken].copy_from_slice(&bytes[..taken]);
            self.known += taken;
            bytes = &bytes[taken..];
            if self.known == HEADER {
                self.known = 0;
                let [high, middle, low, kind, ..] = self.header;
                self.rest = usize::from(high) << 16 | usize::from(middle) << 8 | usize::from(low);
                if kind != DATA || self.rest == 0 {
                    count = count.saturating_add(1);
                }
            }
        }
        count
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for Paced<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        if let Some(pause) = &mut self.pause {
            ready!(pause.as_mut().poll(context));
            self.pause = None;
        }
        let before = buffer.filled().len();
        ready!(Pin::new(&mut self.inner).poll_read(context, buffer))?;
        let wait = self.after(&buffer.filled()[before..], Instant::now());
        if !wait.is_zero() {
            self.pause = Some(Box::pin(sleep(wait)));
        }
        Poll::Ready(Ok(()))
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Paced<S> {
    fn poll_write(mut self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.inner).poll_write(context, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.inner).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.inner).poll_shutdown(context)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        parts: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.inner).poll_write_vectored(context, parts)
    }

    fn is_write_vectored(&self) -> bool {
        self.inner.is_write_vectored()
    }
}

#[cfg(test)]
mod tests {
    use tokio::{
        io::{AsyncReadExt, AsyncWriteExt, duplex},
        time::timeout,
    };

    use super::*;

    const PING: u8 = 6;

    fn frame(kind: u8, payload: usize) -> Vec<u8> {
        let length = u32::try_from(payload).unwrap().to_be_bytes();
        [&length[1..], &[kind, 0, 0, 0, 0, 0], &vec![7; payload]].concat()
    }

    #[test]
    fn frames_are_counted_in_pieces_of_any_size() {
        let bytes = [frame(4, 12), frame(PING, 8), frame(DATA, 70_000), frame(DATA, 0), frame(8, 4)].concat();
        for piece in [1, 2, 8, 9, 10, 17, 4096, bytes.len()] {
            let mut frames = Frames::default();
            let counted: u32 = bytes.chunks(piece).map(|part| frames.count(part)).sum();
            assert_eq!(counted, 4, "in pieces of {piece}");
        }
    }

    /// Returns the bytes that are read from an endless repetition of `frame` within `seconds`.
    async fn read_within(frame: &[u8], seconds: u64) -> usize {
        let (near, mut far) = duplex(64 << 10);
        let flood = frame.repeat(1 + (16 << 10) / frame.len());
        let sender = tokio::spawn(async move { while far.write_all(&flood).await.is_ok() {} });
        let mut paced = Paced::new(near);
        let (mut buffer, mut read) = (vec![0; 16 << 10], 0);
        let _ = timeout(Duration::from_secs(seconds), async {
            // Message bytes are not delayed.
            while read < 64 << 20 {
                read += paced.read(&mut buffer).await.unwrap();
            }
        })
        .await;
        sender.abort();
        read
    }

    #[tokio::test(start_paused = true)]
    async fn cve_2026_7374_a_flood_of_pings_is_read_at_a_bounded_rate() {
        let ping = frame(PING, 8);
        let read = read_within(&ping, 10).await / ping.len();
        let most = (BURST + 10 * PER_SECOND) as usize + (16 << 10) / ping.len();
        assert!((BURST as usize..=most).contains(&read), "{read} frames were read in ten seconds, {most} at most");
    }

    #[tokio::test(start_paused = true)]
    async fn frames_with_message_bytes_are_not_delayed() {
        assert!(read_within(&frame(DATA, 100), 1).await >= 64 << 20);
    }
}
