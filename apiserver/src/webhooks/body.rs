//! The body of a review, within the memory budget of all reviews.
//!
//! Reviews wait for memory, since kube-apiserver retries nothing. Addresses that did not prove to be an API server share a
//! part of the budget.

use std::time::Duration;

use axum::body::Body;
use http::StatusCode;
use http_body_util::BodyExt;
use tokio::{
    sync::{Semaphore, SemaphorePermit},
    time::timeout,
};

use super::Answered;
use crate::limits::{
    MemoryBudget, Reservation,
    body::MAX_DISCARDED,
    memory::{VALUE, values},
};

/// Largest review. kube-apiserver accepts objects of up to 3 MiB, of which etcd stores 1.5; a review contains the new and the
/// old one.
const MAX_BODY: usize = 5 << 20;
/// Bytes of reviews at a time, from their arrival to their answer. Parsed into values they take about twenty times as much.
/// The budget has room for a review of the largest size and for all of other addresses, so that large ones of both do not
/// wait for each other.
const MAX_BODIES: usize = MAX_BODY + MAX_OTHER_BODIES;
/// The same for all addresses that did not prove to be an API server. Each of their reviews fits in, too.
const MAX_OTHER_BODIES: usize = 4 << 20;
/// Most values in a review: a VM of 256 disks, twice, has ten thousand.
const MAX_VALUES: usize = 32 << 10;
/// A larger review waits for its turn among the large ones, so that two halves do not wait for each other's memory.
const LARGE_BODY: usize = 1 << 20;
/// Longest time of a review that is spent waiting for its sender. kube-apiserver sends bodies from memory.
const BODY_DEADLINE: Duration = Duration::from_secs(2);

/// Memory for the bodies of reviews.
pub(super) struct ReviewMemory {
    all: MemoryBudget,
    /// The part of addresses without a proof.
    others: MemoryBudget,
}

/// The body of a review in memory.
#[derive(Default)]
pub(super) struct ReviewBody<'a> {
    /// The bytes.
    pub bytes: Vec<u8>,
    memory: Reservation,
    /// The part of the memory that counts for addresses without a proof.
    others: Reservation,
    large: Option<SemaphorePermit<'a>>,
}

impl Default for ReviewMemory {
    fn default() -> Self {
        Self { all: MemoryBudget::new(MAX_BODIES), others: MemoryBudget::new(MAX_OTHER_BODIES) }
    }
}

impl ReviewMemory {
    /// Reads a body. Memory is counted as the bytes arrive.
    pub(super) async fn receive<'a>(
        &self,
        body: &mut Body,
        trusted: bool,
        large: &'a Semaphore,
    ) -> Result<ReviewBody<'a>, Answered> {
        let max_body = if trusted { MAX_BODY } else { MAX_OTHER_BODIES };
        let mut received = ReviewBody::default();
        let mut discarded = 0;
        let mut rest = BODY_DEADLINE;
        loop {
            let waited = tokio::time::Instant::now();
            let Ok(frame) = timeout(rest, body.frame()).await else {
                return Err(Answered::refusal(StatusCode::REQUEST_TIMEOUT, "the review did not arrive in time"));
            };
            rest = rest.saturating_sub(waited.elapsed());
            let Some(frame) = frame else { break };
            let Ok(frame) = frame else {
                return Err(Answered::refusal(StatusCode::BAD_REQUEST, "the review ended early"));
            };
            let Ok(data) = frame.into_data() else { continue };
            if discarded > 0 || received.bytes.len() + data.len() > max_body {
                received = ReviewBody::default();
                discarded += data.len();
                if discarded > MAX_DISCARDED {
                    break;
                }
                continue;
            }
            let size = received.bytes.len() + data.len();
            self.count(&mut received, data.len(), size, trusted, large).await?;
            received.bytes.extend_from_slice(&data);
        }
        let values = values(&received.bytes);
        if values > MAX_VALUES {
            return Err(Answered::refusal(
                StatusCode::PAYLOAD_TOO_LARGE,
                &format!("a review has at most {MAX_VALUES} values"),
            ));
        }
        let weight = (values * VALUE).clamp(received.bytes.len(), max_body);
        let more = weight - received.bytes.len();
        self.count(&mut received, more, weight, trusted, large).await?;
        if discarded > 0 {
            let message = format!("a review is at most {} MiB large", max_body >> 20);
            return Err(Answered::refusal(StatusCode::PAYLOAD_TOO_LARGE, &message));
        }
        Ok(received)
    }

    /// Reserves memory for `more` bytes of a review, which then counts for `size`.
    async fn count<'a>(
        &self,
        body: &mut ReviewBody<'a>,
        more: usize,
        size: usize,
        trusted: bool,
        large: &'a Semaphore,
    ) -> Result<(), Answered> {
        if body.large.is_none() && size > LARGE_BODY {
            // The semaphore is never closed.
            let closed = |_| Answered::refusal(StatusCode::SERVICE_UNAVAILABLE, "no admission reviews are served");
            body.large = Some(large.acquire().await.map_err(closed)?);
        }
        // Other addresses reserve in their own part first, so they never hold or wait for more than it in the whole.
        if !trusted {
            self.others.reserve(&mut body.others, more).await;
        }
        self.all.reserve(&mut body.memory, more).await;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use futures::StreamExt;

    use super::*;

    /// Returns a body that stalls after `bytes` bytes.
    fn stalled(bytes: usize) -> Body {
        let first = futures::stream::iter([Ok::<_, std::io::Error>(bytes::Bytes::from(vec![b' '; bytes]))]);
        Body::from_stream(first.chain(futures::stream::pending()))
    }

    #[tokio::test(start_paused = true)]
    async fn stalled_bodies_do_not_delay_an_api_server() {
        let memory = ReviewMemory::default();
        let large = Semaphore::new(1);
        let stalls = (0..64).map(|_| async {
            let mut body = stalled(1 << 20);
            memory.receive(&mut body, false, &large).await.map(drop).unwrap_err().status
        });
        let api_server = async {
            tokio::time::sleep(Duration::from_secs(1)).await;
            assert_eq!(memory.others.available(), 0);
            assert_eq!(memory.all.available(), MAX_BODY);
            let own = Semaphore::new(1);
            let mut body = Body::from(vec![b' '; MAX_BODY]);
            let began = tokio::time::Instant::now();
            let received = memory.receive(&mut body, true, &own).await.map_err(|refusal| refusal.status).unwrap();
            assert_eq!((received.bytes.len(), began.elapsed()), (MAX_BODY, Duration::ZERO));
        };
        let (statuses, ()) = futures::join!(futures::future::join_all(stalls), api_server);
        assert!(statuses.iter().all(|status| *status == StatusCode::REQUEST_TIMEOUT), "{statuses:?}");
        assert_eq!(memory.all.available(), MAX_BODIES);
        assert_eq!(memory.others.available(), MAX_OTHER_BODIES);
    }

    #[tokio::test(start_paused = true)]
    async fn wait_for_memory_does_not_count_for_the_sender() {
        let memory = ReviewMemory::default();
        let large = Semaphore::new(1);
        let mut taken = Reservation::default();
        memory.all.reserve(&mut taken, MAX_BODIES).await;
        let release = async {
            tokio::time::sleep(BODY_DEADLINE * 2).await;
            drop(taken);
        };
        let mut body = Body::from(vec![b' '; 10]);
        let (received, ()) = futures::join!(memory.receive(&mut body, true, &large), release);
        assert_eq!(received.map_err(|refusal| refusal.status).unwrap().bytes.len(), 10);
    }
}
