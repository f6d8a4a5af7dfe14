//! A minimal HTTP/1.1 client connection for load generation.
//!
//! The load generator shares the server's CPUs, so its own work distorts the figures. Requests are serialized in advance and
//! sent in one write, and answers are only scanned for their end. A full HTTP client with tasks, queues and headers would
//! cost more.

use anyhow::{Context, Result, bail, ensure};
use bytes::Bytes;
use ferrovirt_e2e_tests::webhook::Answer;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};

/// Initial buffer, large enough for a usual answer.
const INITIAL_BUFFER: usize = 4 << 10;
/// Largest answer.
const MAX_ANSWER: usize = 1 << 20;

/// A connection that carries one request at a time.
pub(crate) struct Lane<S> {
    stream: S,
}

impl<S: AsyncRead + AsyncWrite + Unpin> Lane<S> {
    /// Wraps an open stream.
    pub(crate) fn new(stream: S) -> Self {
        Self { stream }
    }

    /// Sends a complete request and reads the complete answer.
    pub(crate) async fn exchange(&mut self, request: &[u8]) -> Result<Answer> {
        self.stream.write_all(request).await?;
        self.stream.flush().await?;
        let mut received = Vec::with_capacity(INITIAL_BUFFER);
        let head = loop {
            self.receive(&mut received).await?;
            if let Some(head) = Head::read(&received)? {
                break head;
            }
        };
        while received.len() < head.end {
            self.receive(&mut received).await?;
        }
        ensure!(received.len() == head.end, "more came than the answer");
        Ok(Answer { status: head.status, body: Bytes::from(received).slice(head.start..) })
    }

    async fn receive(&mut self, received: &mut Vec<u8>) -> Result<()> {
        ensure!(received.len() < MAX_ANSWER, "the answer is too large");
        if self.stream.read_buf(received).await? == 0 {
            bail!("the connection ended before the answer");
        }
        Ok(())
    }
}

/// Head of an answer: status, start of the body and end of the body.
#[derive(Debug, PartialEq)]
struct Head {
    status: u16,
    start: usize,
    end: usize,
}

impl Head {
    /// Parses the head; returns `None` if it is incomplete. Answers without a length are not supported.
    fn read(received: &[u8]) -> Result<Option<Self>> {
        let Some(at) = received.windows(4).position(|bytes| bytes == b"\r\n\r\n") else { return Ok(None) };
        let start = at + 4;
        let mut lines =
            std::str::from_utf8(&received[..at]).context("the head of the answer is no text")?.split("\r\n");
        let status = lines.next().and_then(|line| line.split(' ').nth(1)).and_then(|word| word.parse::<u16>().ok());
        let length = lines
            .filter_map(|line| line.split_once(':'))
            .find(|(name, _)| name.eq_ignore_ascii_case("content-length"))
            .and_then(|(_, value)| value.trim().parse::<usize>().ok());
        Ok(Some(Self {
            status: status.context("the answer has no status")?,
            start,
            end: start.saturating_add(length.context("the answer has no content length")?),
        }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn heads_contain_the_end_of_the_body() {
        let head = |text: &str| Head::read(text.as_bytes()).unwrap();
        assert_eq!(head("HTTP/1.1 200 OK\r\nContent-Length: 5\r\n"), None);
        let whole = "HTTP/1.1 413 Payload Too Large\r\ndate: now\r\ncontent-length: 5\r\n\r\n";
        let start = whole.len();
        assert_eq!(head(whole), Some(Head { status: 413, start, end: start + 5 }));
        assert_eq!(head(&format!("{whole}12345")), Some(Head { status: 413, start, end: start + 5 }));
        for broken in ["\r\n\r\n", "HTTP/1.1 200 OK\r\n\r\n", "HTTP/1.1 fine\r\ncontent-length: 5\r\n\r\n"] {
            assert!(Head::read(broken.as_bytes()).is_err(), "{broken}");
        }
        assert!(Head::read(b"HTTP/1.1 200 \xff\r\n\r\n").is_err());
    }

    #[tokio::test]
    async fn answers_are_read_in_pieces() {
        let (near, mut far) = tokio::io::duplex(64);
        let server = async {
            let mut asked = [0; 3];
            far.read_exact(&mut asked).await.unwrap();
            for piece in ["HTTP/1.1 200 OK\r\ncontent-le", "ngth: 4\r\n\r\nbo", "dy"] {
                far.write_all(piece.as_bytes()).await.unwrap();
                tokio::task::yield_now().await;
            }
            asked
        };
        let mut lane = Lane::new(near);
        let (answer, asked) = tokio::join!(lane.exchange(b"ask"), server);
        assert_eq!(&asked, b"ask");
        assert_eq!(answer.unwrap(), Answer { status: 200, body: Bytes::from_static(b"body") });
        drop(far);
        assert!(lane.exchange(b"ask").await.is_err());
    }
}
