//! The limit of this process's requests to the API server, as the cluster configuration sets it. Without one, requests do not wait.
//!
//! A token bucket: requests wait in their order for a token, and one that its caller gives up costs none. Requests about leases do
//! not wait, because a leader that cannot renew its lease in time loses the lead.

use std::{
    sync::{LazyLock, Mutex, PoisonError},
    time::Duration,
};

use api::config::RequestLimit;
use tokio::time::Instant;

/// Longest wait before the limit is looked at again, which can change meanwhile.
const LOOK_AGAIN: Duration = Duration::from_secs(1);
/// Shortest wait, that of a timer.
const SHORTEST: Duration = Duration::from_millis(1);
/// Group of leases in the path of a request.
const LEASES: &str = "/apis/coordination.k8s.io/";

/// The limit in force. All clients of a process share it.
static LIMITER: LazyLock<Limiter> = LazyLock::new(Limiter::default);

/// Sets the limit of this process; `None` for none.
pub fn limit_requests(limit: Option<RequestLimit>) {
    *LIMITER.limit.lock().unwrap_or_else(PoisonError::into_inner) = limit;
}

/// Waits until a request for `path` may be sent. Returns the time of the wait where there is a limit.
pub(super) async fn wait(path: &str) -> Option<Duration> {
    if path.starts_with(LEASES) { None } else { LIMITER.wait().await }
}

#[derive(Default)]
struct Limiter {
    limit: Mutex<Option<RequestLimit>>,
    /// Locked by the request that is next.
    bucket: tokio::sync::Mutex<Bucket>,
}

impl Limiter {
    fn limit(&self) -> Option<RequestLimit> {
        *self.limit.lock().unwrap_or_else(PoisonError::into_inner)
    }

    async fn wait(&self) -> Option<Duration> {
        self.limit()?;
        let started = Instant::now();
        let mut bucket = self.bucket.lock().await;
        while let Some(limit) = self.limit() {
            match bucket.take(limit, Instant::now()) {
                Ok(()) => break,
                Err(pause) => tokio::time::sleep(pause.min(LOOK_AGAIN)).await,
            }
        }
        Some(started.elapsed())
    }
}

/// Tokens at a time; none before the first request.
#[derive(Default)]
struct Bucket(Option<(f64, Instant)>);

impl Bucket {
    /// Takes a token, or returns the time until there is one.
    fn take(&mut self, limit: RequestLimit, now: Instant) -> Result<(), Duration> {
        let (tokens, since) = self.0.unwrap_or((limit.burst, now));
        let tokens = limit.burst.min(tokens + now.duration_since(since).as_secs_f64() * limit.qps);
        let left = tokens - 1.0;
        if left < 0.0 {
            self.0 = Some((tokens, now));
            let pause = Duration::try_from_secs_f64(-left / limit.qps).unwrap_or(LOOK_AGAIN);
            return Err(pause.max(SHORTEST));
        }
        self.0 = Some((left, now));
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_come_back_with_time_up_to_the_burst() {
        let (limit, start) = (RequestLimit { qps: 2.0, burst: 3.0 }, Instant::now());
        let mut bucket = Bucket::default();
        // milliseconds since the start, wait in milliseconds
        for (at, expected) in [
            (0, 0),
            (0, 0),
            (0, 0),
            (0, 500),
            (250, 250),
            (500, 0),
            (500, 500),
            // Ten tokens, of which three fit.
            (5500, 0),
            (5500, 0),
            (5500, 0),
            (5500, 500),
        ] {
            let found = bucket.take(limit, start + Duration::from_millis(at)).err().unwrap_or_default();
            assert_eq!(found.as_millis(), expected, "at {at}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn requests_wait_in_order_and_abandoned_ones_cost_nothing() {
        let limiter = Limiter::default();
        assert_eq!(limiter.wait().await, None, "without a limit");
        *limiter.limit.lock().unwrap() = Some(RequestLimit { qps: 1.0, burst: 1.0 });
        assert_eq!(limiter.wait().await, Some(Duration::ZERO));
        let start = Instant::now();
        for _ in 0..5 {
            let given_up = tokio::time::timeout(Duration::from_millis(10), limiter.wait()).await;
            assert!(given_up.is_err());
        }
        limiter.wait().await;
        assert!(start.elapsed() < Duration::from_millis(1100), "{:?}", start.elapsed());
        // A limit that ends releases the requests that wait.
        *limiter.limit.lock().unwrap() = Some(RequestLimit { qps: 0.001, burst: 1.0 });
        let (start, released) = (Instant::now(), async {
            tokio::time::sleep(Duration::from_secs(5)).await;
            *limiter.limit.lock().unwrap() = None;
        });
        tokio::join!(limiter.wait(), released);
        assert!(start.elapsed() < Duration::from_secs(7), "{:?}", start.elapsed());
    }
}
