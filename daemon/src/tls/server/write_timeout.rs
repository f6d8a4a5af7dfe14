//! A time limit for the client to read an answer.
//!
//! ```text
//!            write has to wait            ┌─────────┐ all is written
//!   free ───────────────────────────────▶ │ waiting │ ──────────────▶ free
//!                                         └─────────┘ limit is over ──▶ error: the connection ends
//! ```
//!
//! The limit counts until all written bytes are flushed. `tokio-io-timeout` does not serve: it restarts its timer with every
//! byte that the client takes, so that a client which reads one byte from time to time would hold its answer for ever. Streams
//! of upgraded connections have limits of their own and are exempt.

use std::{
    io::{self, IoSlice},
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    task::{Context, Poll},
    time::Duration,
};

use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    time::{Sleep, sleep},
};

/// A connection whose writes have a time limit.
pub(super) struct WriteTimeout<S> {
    inner: S,
    limit: Duration,
    /// Ends when the waiting write has reached the limit.
    waiting: Option<Pin<Box<Sleep>>>,
    upgraded: Arc<AtomicBool>,
}

impl<S> WriteTimeout<S> {
    /// Limits writes to `inner` until `upgraded` is set.
    pub(super) fn new(inner: S, limit: Duration, upgraded: Arc<AtomicBool>) -> Self {
        Self { inner, limit, waiting: None, upgraded }
    }

    /// Returns the result of a step, or an error after the limit.
    fn bounded<T>(&mut self, step: Poll<io::Result<T>>, context: &mut Context<'_>) -> Poll<io::Result<T>> {
        if step.is_ready() || self.upgraded.load(Ordering::Relaxed) {
            return step;
        }
        let limit = self.limit;
        let waiting = self.waiting.get_or_insert_with(|| Box::pin(sleep(limit)));
        match waiting.as_mut().poll(context) {
            Poll::Ready(()) => {
                Poll::Ready(Err(io::Error::new(io::ErrorKind::TimedOut, "the client does not read the answer")))
            }
            Poll::Pending => Poll::Pending,
        }
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for WriteTimeout<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.inner).poll_read(context, buffer)
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for WriteTimeout<S> {
    fn poll_write(mut self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let step = Pin::new(&mut self.inner).poll_write(context, bytes);
        self.bounded(step, context)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        slices: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let step = Pin::new(&mut self.inner).poll_write_vectored(context, slices);
        self.bounded(step, context)
    }

    fn is_write_vectored(&self) -> bool {
        self.inner.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let step = Pin::new(&mut self.inner).poll_flush(context);
        if step.is_ready() {
            self.waiting = None;
        }
        self.bounded(step, context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let step = Pin::new(&mut self.inner).poll_shutdown(context);
        self.bounded(step, context)
    }
}

#[cfg(test)]
mod tests {
    use tokio::{
        io::{AsyncReadExt, AsyncWriteExt, DuplexStream, duplex},
        time::{Instant, timeout},
    };

    use super::*;

    const LIMIT: Duration = Duration::from_secs(60);

    fn pair() -> (WriteTimeout<DuplexStream>, DuplexStream, Arc<AtomicBool>) {
        let (near, far) = duplex(8);
        let upgraded = Arc::new(AtomicBool::new(false));
        (WriteTimeout::new(near, LIMIT, upgraded.clone()), far, upgraded)
    }

    async fn send(near: &mut WriteTimeout<DuplexStream>, bytes: &[u8]) -> io::Result<()> {
        near.write_all(bytes).await?;
        near.flush().await
    }

    #[tokio::test(start_paused = true)]
    async fn write_that_is_not_read_ends_the_connection() {
        let (mut near, _far, _) = pair();
        send(&mut near, &[1; 8]).await.unwrap();
        let began = Instant::now();
        assert_eq!(send(&mut near, &[1]).await.unwrap_err().kind(), io::ErrorKind::TimedOut);
        assert!((LIMIT..LIMIT * 2).contains(&began.elapsed()), "{:?}", began.elapsed());
    }

    #[tokio::test(start_paused = true)]
    async fn single_bytes_read_from_time_to_time_do_not_extend_the_limit() {
        let (mut near, mut far, _) = pair();
        let reader = tokio::spawn(async move {
            while far.read_u8().await.is_ok() {
                sleep(LIMIT / 4).await;
            }
        });
        let began = Instant::now();
        assert_eq!(send(&mut near, &[1; 1000]).await.unwrap_err().kind(), io::ErrorKind::TimedOut);
        assert!((LIMIT..LIMIT * 2).contains(&began.elapsed()), "{:?}", began.elapsed());
        reader.abort();
    }

    #[tokio::test(start_paused = true)]
    async fn each_flush_restarts_the_limit() {
        let (mut near, mut far, _) = pair();
        let reader = tokio::spawn(async move {
            let mut bytes = [0; 8];
            while far.read_exact(&mut bytes).await.is_ok() {
                sleep(LIMIT / 3).await;
            }
        });
        for _ in 0..20 {
            send(&mut near, &[1; 16]).await.unwrap();
        }
        reader.abort();
    }

    #[tokio::test(start_paused = true)]
    async fn upgraded_streams_have_no_limit() {
        let (mut near, mut far, upgraded) = pair();
        upgraded.store(true, Ordering::Relaxed);
        assert!(timeout(LIMIT * 10, send(&mut near, &[1; 9])).await.is_err());
        far.read_exact(&mut [0; 8]).await.unwrap();
        send(&mut near, &[1]).await.unwrap();
    }
}
