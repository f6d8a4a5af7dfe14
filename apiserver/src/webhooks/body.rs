//! The body of a review, within the memory budget of all reviews.
//!
//! Reviews wait for memory, since kube-apiserver retries nothing. Addresses that did not prove to be an API server share a
//! part of the budget.
//!
//! A review that waits for memory and holds some can wait for another one that does the same. So a review of an API server, which
//! announces its length, holds nothing while it waits, as soon as its first bytes have shown that it arrives, for its turn if it is large, and
//! for memory for its whole text. Then it waits for memory for its values. With the last it needs nothing more.

use std::time::Duration;

use axum::body::{Body, HttpBody};
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
/// Bytes of reviews at a time, from their arrival to their answer. Parsed they take about seven times as much: a value counts
/// for [`VALUE`] bytes and takes about a kilobyte. The budget has room for a review of the largest size and for all of other
/// addresses, so that large ones of both do not wait for each other. With the two budgets for values below, reviews count for
/// 18 MiB at most.
const MAX_BODIES: usize = MAX_BODY + MAX_OTHER_BODIES;
/// The same for all addresses that did not prove to be an API server. Each of their reviews fits in, too.
const MAX_OTHER_BODIES: usize = 4 << 20;
/// Bytes that the values in reviews of API servers count for at a time, beyond the bytes of their text.
const MAX_TRUSTED_VALUES: usize = 4 << 20;
/// The same for reviews whose values count for more than [`LARGE_BODY`]: the most that one review needs. The others do not
/// wait behind them.
const MAX_LARGE_VALUES: usize = MAX_BODY;
/// Most values in a review: a VM of 256 disks, twice, has ten thousand.
const MAX_VALUES: usize = 32 << 10;
/// A larger review waits for its turn among the large ones, so that two halves do not wait for each other's memory.
const LARGE_BODY: usize = 1 << 20;
/// Bytes that have to arrive before an API server's review gets memory for all that it announces: its sender may stall.
const FIRST_BYTES: usize = 16 << 10;
/// Longest time of a review that is spent waiting for its sender. kube-apiserver sends bodies from memory.
const BODY_DEADLINE: Duration = Duration::from_secs(2);

/// Memory for the bodies of reviews.
pub(super) struct ReviewMemory {
    all: MemoryBudget,
    /// The part of addresses without a proof.
    others: MemoryBudget,
    /// For values in reviews of API servers.
    values: MemoryBudget,
    /// The same for reviews of many values.
    large_values: MemoryBudget,
}

/// The body of a review in memory.
#[derive(Default)]
pub(super) struct ReviewBody<'a> {
    /// The bytes.
    pub bytes: Vec<u8>,
    memory: Reservation,
    /// The part of the memory that counts for addresses without a proof.
    others: Reservation,
    /// The memory for values in a review of an API server.
    values: Reservation,
    large: Option<SemaphorePermit<'a>>,
}

impl Default for ReviewMemory {
    fn default() -> Self {
        Self {
            all: MemoryBudget::new(MAX_BODIES),
            others: MemoryBudget::new(MAX_OTHER_BODIES),
            values: MemoryBudget::new(MAX_TRUSTED_VALUES),
            large_values: MemoryBudget::new(MAX_LARGE_VALUES),
        }
    }
}

impl ReviewMemory {
    /// Reads a body. Memory is counted as a whole, after the first bytes, if an API server announces the length, otherwise as the bytes
    /// arrive.
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
        let announced = body.size_hint().exact().filter(|_| trusted);
        let announced = announced.map(|length| usize::try_from(length).unwrap_or(usize::MAX));
        let too_long = announced.is_some_and(|length| length > max_body);
        if let Some(length) = announced.filter(|_| !too_long) {
            let first = length.min(FIRST_BYTES);
            self.count(&mut received, first, first, trusted, large).await?;
        }
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
            let size = received.bytes.len() + data.len();
            if too_long || discarded > 0 || size > max_body {
                received = ReviewBody::default();
                discarded += data.len();
                if discarded > MAX_DISCARDED {
                    break;
                }
                continue;
            }
            let more = size.saturating_sub(received.memory.bytes());
            match announced {
                _ if more == 0 => {}
                Some(length) => {
                    received.memory = Reservation::default();
                    let whole = length.max(size);
                    self.count(&mut received, whole, whole, trusted, large).await?;
                }
                None => self.count(&mut received, more, size, trusted, large).await?,
            }
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
        if trusted {
            // Without the turn of a large one, which another review may hold that waits for this one's memory.
            let budget = if more > LARGE_BODY { &self.large_values } else { &self.values };
            budget.reserve(&mut received.values, more).await;
        } else {
            self.count(&mut received, more, weight, trusted, large).await?;
        }
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
    use std::{
        convert::Infallible,
        pin::Pin,
        task::{Context, Poll},
    };

    use bytes::Bytes;
    use futures::StreamExt;
    use hyper::body::{Frame, SizeHint};

    use super::*;

    /// A body of a known length in frames of 64 KiB, which arrive one by one.
    struct Announced {
        byte: u8,
        rest: usize,
        arrived: bool,
        /// Frames until the sender stalls.
        frames: usize,
    }

    impl HttpBody for Announced {
        type Data = Bytes;
        type Error = Infallible;

        fn poll_frame(
            mut self: Pin<&mut Self>,
            context: &mut Context<'_>,
        ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
            if self.frames == 0 {
                return Poll::Pending;
            }
            self.arrived = !self.arrived;
            if self.arrived {
                context.waker().wake_by_ref();
                return Poll::Pending;
            }
            self.frames -= 1;
            let size = self.rest.min(64 << 10);
            self.rest -= size;
            Poll::Ready((size > 0).then(|| Ok(Frame::data(Bytes::from(vec![self.byte; size])))))
        }

        fn size_hint(&self) -> SizeHint {
            SizeHint::with_exact(self.rest as u64)
        }
    }

    fn announced(byte: u8, length: usize) -> Body {
        Body::new(Announced { byte, rest: length, arrived: false, frames: usize::MAX })
    }

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
    async fn announced_bodies_that_stall_delay_nobody() {
        let (memory, large) = (ReviewMemory::default(), Semaphore::new(1));
        let stalls = (0..64).map(|_| async {
            let mut body = Body::new(Announced { byte: b' ', rest: 1 << 20, arrived: false, frames: 0 });
            memory.receive(&mut body, true, &large).await.map(drop).unwrap_err().status
        });
        let other = async {
            tokio::time::sleep(Duration::from_secs(1)).await;
            let began = tokio::time::Instant::now();
            let received = memory.receive(&mut announced(b' ', 2 << 20), true, &large).await;
            assert_eq!(received.map_err(|refusal| refusal.status).unwrap().bytes.len(), 2 << 20);
            assert!(began.elapsed() < Duration::from_millis(100), "{:?}", began.elapsed());
        };
        let (statuses, ()) = futures::join!(futures::future::join_all(stalls), other);
        assert!(statuses.iter().all(|status| *status == StatusCode::REQUEST_TIMEOUT), "{statuses:?}");
        assert_eq!(memory.all.available(), MAX_BODIES);
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

    #[tokio::test(start_paused = true)]
    async fn reviews_of_api_servers_do_not_lock_each_other_out() {
        for (count, length, byte) in [
            (12, 2 << 20, b' '),
            (20, 972 << 10, b' '),
            // Four fit into the memory for values.
            (20, 6 << 10, b','),
            // Each needs nearly all of the memory for many values.
            (12, MAX_VALUES, b','),
        ] {
            let (memory, large) = (ReviewMemory::default(), Semaphore::new(1));
            let mut lengths = vec![length; count];
            lengths.insert(count / 2, 1 << 10);
            let (budgets, turn) = (&memory, &large);
            let reviews = lengths.iter().map(|length| async move {
                let mut body = announced(byte, *length);
                let received = budgets.receive(&mut body, true, turn).await.map_err(|refusal| refusal.status)?;
                tokio::time::sleep(Duration::from_millis(1)).await;
                Ok::<usize, StatusCode>(received.bytes.len())
            });
            let received = timeout(Duration::from_millis(100), futures::future::join_all(reviews)).await.unwrap();
            assert_eq!(received.into_iter().collect::<Result<Vec<_>, _>>(), Ok(lengths));
            assert_eq!(memory.all.available(), MAX_BODIES);
            assert_eq!(memory.values.available(), MAX_TRUSTED_VALUES);
            assert_eq!(memory.large_values.available(), MAX_LARGE_VALUES);
        }
    }

    #[tokio::test(start_paused = true)]
    async fn reviews_of_many_values_do_not_delay_others() {
        let (memory, large) = (ReviewMemory::default(), Semaphore::new(1));
        let [mut first, mut second, mut other] = [MAX_VALUES, MAX_VALUES, 1 << 10].map(|size| announced(b',', size));
        let held = memory.receive(&mut first, true, &large).await.map_err(|refusal| refusal.status).unwrap();
        let (waiting, received) = futures::join!(
            timeout(BODY_DEADLINE, memory.receive(&mut second, true, &large)),
            timeout(BODY_DEADLINE, memory.receive(&mut other, true, &large)),
        );
        assert!(waiting.is_err() && received.is_ok_and(|received| received.is_ok()));
        drop(held);
        assert_eq!(memory.all.available(), MAX_BODIES);
        assert_eq!(memory.large_values.available(), MAX_LARGE_VALUES);
    }

    #[tokio::test(start_paused = true)]
    async fn review_that_announces_too_many_bytes_takes_no_memory() {
        let memory = ReviewMemory::default();
        let large = Semaphore::new(0);
        let mut taken = Reservation::default();
        memory.all.reserve(&mut taken, MAX_BODIES).await;
        let mut body = announced(b' ', MAX_BODY + 1);
        let refusal = memory.receive(&mut body, true, &large).await.map(drop).unwrap_err();
        assert_eq!(refusal.status, StatusCode::PAYLOAD_TOO_LARGE);
    }
}
