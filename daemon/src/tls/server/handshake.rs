//! TLS handshakes, those of addresses without a proof computed one at a time.

use std::{future::poll_fn, io, pin::pin, sync::Arc, task::ready, time::Duration};

use tokio::{
    io::{AsyncRead, AsyncWrite},
    sync::Semaphore,
};
use tokio_rustls::{TlsAcceptor, server::TlsStream};
use tokio_util::sync::PollSemaphore;

/// Does the TLS handshake within `limit`. With a gate it computes only while it holds a permit.
pub(super) async fn handshake<S: AsyncRead + AsyncWrite + Unpin>(
    stream: S,
    acceptor: TlsAcceptor,
    gate: Option<Arc<Semaphore>>,
    limit: Duration,
) -> io::Result<TlsStream<S>> {
    let accepted = acceptor.accept(stream);
    let accepted = async move {
        match gate {
            Some(gate) => gated(gate, accepted).await,
            None => accepted.await,
        }
    };
    let late = |_| Err(io::Error::new(io::ErrorKind::TimedOut, "it took too long"));
    tokio::time::timeout(limit, accepted).await.unwrap_or_else(late)
}

/// Polls the future only while it holds a permit of `gate`. It holds none while it waits for its peer, so that a silent peer
/// does not delay others.
async fn gated<F: Future>(gate: Arc<Semaphore>, future: F) -> F::Output {
    let mut gate = PollSemaphore::new(gate);
    let mut future = pin!(future);
    poll_fn(|context| {
        let permit = ready!(gate.poll_acquire(context));
        let polled = future.as_mut().poll(context);
        drop(permit);
        polled
    })
    .await
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};

    use tokio::task::{JoinSet, yield_now};

    use super::*;

    #[tokio::test(flavor = "multi_thread", worker_threads = 4)]
    async fn one_handshake_at_a_time_is_computed_and_waiting_ones_delay_no_other() {
        let gate = Arc::new(Semaphore::new(1));
        let computing = Arc::new(AtomicUsize::new(0));
        let silent = tokio::spawn(gated(gate.clone(), std::future::pending::<()>()));
        let mut handshakes = JoinSet::new();
        for _ in 0..32 {
            let computing = computing.clone();
            handshakes.spawn(gated(gate.clone(), async move {
                for _ in 0..4 {
                    assert_eq!(computing.fetch_add(1, SeqCst), 0);
                    std::thread::sleep(std::time::Duration::from_micros(100));
                    computing.fetch_sub(1, SeqCst);
                    yield_now().await;
                }
            }));
        }
        while let Some(ended) = handshakes.join_next().await {
            ended.unwrap();
        }
        silent.abort();
    }
}
