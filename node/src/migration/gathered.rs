//! A stream whose reads return all bytes that are there.
//!
//! TLS returns one record of 16 KiB at a time. Each would be written by a system call of its own, and wake its reader.

use std::{
    io,
    pin::Pin,
    task::{Context, Poll, ready},
};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

/// A stream that is read until the buffer is full or no byte is left. Writes pass unchanged.
pub(super) struct Gathered<S> {
    inner: S,
    /// An error after bytes that were returned first.
    failed: Option<io::Error>,
}

impl<S> Gathered<S> {
    pub(super) fn new(inner: S) -> Self {
        Self { inner, failed: None }
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for Gathered<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        if let Some(error) = self.failed.take() {
            return Poll::Ready(Err(error));
        }
        let mut before = buffer.filled().len();
        ready!(Pin::new(&mut self.inner).poll_read(context, buffer))?;
        // A read without bytes is the end, which the next read returns again.
        while buffer.remaining() > 0 && buffer.filled().len() > before {
            before = buffer.filled().len();
            match Pin::new(&mut self.inner).poll_read(context, buffer) {
                Poll::Ready(Ok(())) => {}
                Poll::Ready(Err(error)) => self.failed = Some(error),
                Poll::Pending => break,
            }
        }
        Poll::Ready(Ok(()))
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Gathered<S> {
    fn poll_write(mut self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.inner).poll_write(context, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.inner).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.inner).poll_shutdown(context)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;

    use futures::poll;
    use tokio::io::AsyncReadExt as _;

    use super::*;

    /// Results of reads, one after the other; nothing is there after the last.
    struct Records(VecDeque<Result<&'static [u8], io::ErrorKind>>);

    impl AsyncRead for Records {
        fn poll_read(mut self: Pin<&mut Self>, _: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
            match self.0.pop_front() {
                Some(Ok(bytes)) => {
                    let (now, rest) = bytes.split_at(bytes.len().min(buffer.remaining()));
                    buffer.put_slice(now);
                    if !rest.is_empty() {
                        self.0.push_front(Ok(rest));
                    }
                    Poll::Ready(Ok(()))
                }
                Some(Err(kind)) => Poll::Ready(Err(kind.into())),
                None => Poll::Pending,
            }
        }
    }

    fn gathered(records: &[Result<&'static [u8], io::ErrorKind>]) -> Gathered<Records> {
        Gathered::new(Records(records.iter().copied().collect()))
    }

    #[tokio::test]
    async fn reads_return_all_records_that_are_there() {
        let mut stream = gathered(&[Ok(b"ab"), Ok(b"cd"), Ok(b"efgh")]);
        let mut buffer = [0; 6];
        assert_eq!(stream.read(&mut buffer).await.unwrap(), 6);
        assert_eq!(&buffer, b"abcdef");
        assert_eq!(stream.read(&mut buffer).await.unwrap(), 2);
        assert_eq!(&buffer[..2], b"gh");
        assert!(poll!(std::pin::pin!(stream.read(&mut buffer))).is_pending());
    }

    #[tokio::test]
    async fn end_and_errors_follow_the_last_byte() {
        let mut buffer = [0; 6];
        let mut stream = gathered(&[Ok(b"ab"), Err(io::ErrorKind::TimedOut)]);
        assert_eq!(stream.read(&mut buffer).await.unwrap(), 2);
        assert_eq!(stream.read(&mut buffer).await.unwrap_err().kind(), io::ErrorKind::TimedOut);
        let mut stream = gathered(&[Ok(b"ab"), Ok(b""), Ok(b"")]);
        assert_eq!(stream.read(&mut buffer).await.unwrap(), 2);
        assert_eq!(stream.read(&mut buffer).await.unwrap(), 0);
    }
}
