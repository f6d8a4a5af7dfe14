//! The limit of this process's requests to the API server, as the cluster configuration sets it. Without one, requests do not wait.
//!
//! A token bucket: requests take tokens in the order of their arrival, and each waits until its own is due. They hold no lock
//! meanwhile: one that its caller stops to poll, or gives up, delays no others. Requests about leases do not wait, because a leader that
//! cannot renew its lease in time loses the lead, and neither do those about the KubeVirt object, which holds the limit.

use std::{
    sync::{LazyLock, Mutex},
    time::Duration,
};

use api::config::RequestLimit;
use tokio::time::Instant;

use crate::lock;

/// Longest wait before the limit is looked at again, which can change meanwhile.
const LOOK_AGAIN: Duration = Duration::from_secs(1);
/// Longest wait for a token.
const LONGEST: Duration = Duration::from_secs(24 * 60 * 60);
/// Group of leases in the path of a request.
const LEASES: &str = "/apis/coordination.k8s.io/";
/// Resource of the KubeVirt object in the path of a request.
const KUBEVIRTS: &str = "/kubevirts";

/// The limit in force. All clients of a process share it.
static LIMITER: LazyLock<Limiter> = LazyLock::new(Limiter::default);

/// Sets the limit of this process; `None` for none.
pub fn limit_requests(limit: Option<RequestLimit>) {
    *lock(&LIMITER.limit) = limit;
}

/// Waits until a request for `path` may be sent. Returns the time of the wait where there is a limit.
pub(super) async fn wait(path: &str) -> Option<Duration> {
    if is_limited(path) { LIMITER.wait().await } else { None }
}

fn is_limited(path: &str) -> bool {
    !path.starts_with(LEASES) && !path.contains(KUBEVIRTS)
}

#[derive(Default)]
struct Limiter {
    limit: Mutex<Option<RequestLimit>>,
    bucket: Mutex<Option<Bucket>>,
}

impl Limiter {
    fn limit(&self) -> Option<RequestLimit> {
        *lock(&self.limit)
    }

    async fn wait(&self) -> Option<Duration> {
        self.limit()?;
        let started = Instant::now();
        while let Some(limit) = self.limit() {
            let mut token = Token::take(&self.bucket, limit, Instant::now());
            while self.limit() == Some(limit) {
                let now = Instant::now();
                if now >= token.due {
                    token.used = true;
                    return Some(started.elapsed());
                }
                tokio::time::sleep_until(token.due.min(now + LOOK_AGAIN)).await;
            }
        }
        Some(started.elapsed())
    }
}

/// Tokens of a limit at a time. Fewer than none: requests wait for them.
struct Bucket {
    limit: RequestLimit,
    tokens: f64,
    since: Instant,
}

impl Bucket {
    /// Takes a token and returns the time at which it is due. A bucket of another limit is replaced by a full one.
    fn take(bucket: &mut Option<Self>, limit: RequestLimit, now: Instant) -> Instant {
        let full = Self { limit, tokens: limit.burst, since: now };
        let bucket = match bucket {
            Some(bucket) if bucket.limit == limit => bucket,
            other => other.insert(full),
        };
        let passed = now.duration_since(bucket.since).as_secs_f64();
        bucket.tokens = limit.burst.min(bucket.tokens + passed * limit.qps) - 1.0;
        bucket.since = now;
        let pause = Duration::try_from_secs_f64((-bucket.tokens).max(0.0) / limit.qps);
        now + pause.unwrap_or(LONGEST).min(LONGEST)
    }
}

/// A token of a request. It goes back into the bucket unless it is used.
struct Token<'a> {
    bucket: &'a Mutex<Option<Bucket>>,
    limit: RequestLimit,
    due: Instant,
    used: bool,
}

impl<'a> Token<'a> {
    fn take(bucket: &'a Mutex<Option<Bucket>>, limit: RequestLimit, now: Instant) -> Self {
        let due = Bucket::take(&mut lock(bucket), limit, now);
        Self { bucket, limit, due, used: false }
    }
}

impl Drop for Token<'_> {
    fn drop(&mut self) {
        if !self.used
            && let Some(bucket) = lock(self.bucket).as_mut().filter(|bucket| bucket.limit == self.limit)
        {
            bucket.tokens += 1.0;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_come_back_with_time_up_to_the_burst() {
        let (limit, start) = (RequestLimit { qps: 2.0, burst: 3.0 }, Instant::now());
        let mut bucket = None;
        // milliseconds since the start, wait in milliseconds
        for (at, expected) in [
            (0, 0),
            (0, 0),
            (0, 0),
            (0, 500),
            (250, 750),
            (1000, 500),
            // Nine tokens, of which three fit.
            (5500, 0),
            (5500, 0),
            (5500, 0),
            (5500, 500),
        ] {
            let now = start + Duration::from_millis(at);
            let due = Bucket::take(&mut bucket, limit, now);
            assert_eq!(due.duration_since(now).as_millis(), expected, "at {at}");
        }
        // A changed limit begins with a full bucket, and one that is hardly any has an end.
        for (qps, burst, expected) in
            [(1.0, 1.0, 0), (1.0, 1.0, 1000), (1e-300, 1.0, 0), (1e-300, 1.0, LONGEST.as_millis())]
        {
            let due = Bucket::take(&mut bucket, RequestLimit { qps, burst }, start);
            assert_eq!(due.duration_since(start).as_millis(), expected, "{qps}");
        }
    }

    #[test]
    fn leases_and_the_holder_of_the_limit_do_not_wait() {
        for (path, limited) in [
            ("/api/v1/namespaces/n/pods", true),
            ("/apis/kubevirt.io/v1/namespaces/n/virtualmachines/a/status", true),
            ("/apis/coordination.k8s.io/v1/namespaces/n/leases/a", false),
            ("/apis/kubevirt.io/v1/kubevirts", false),
            ("/apis/kubevirt.io/v1/namespaces/n/kubevirts/kubevirt/status", false),
        ] {
            assert_eq!(is_limited(path), limited, "{path}");
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
        // Neither does one that nobody polls any more: streams of requests stop while their answers are processed.
        let mut unpolled = std::pin::pin!(limiter.wait());
        assert!(futures::poll!(&mut unpolled).is_pending());
        let next = tokio::time::timeout(Duration::from_millis(2100), limiter.wait()).await;
        assert!(next.is_ok(), "blocked by a request that is not polled");
        assert!(futures::poll!(&mut unpolled).is_ready());
        assert!(start.elapsed() < Duration::from_millis(2100), "{:?}", start.elapsed());
        // A limit that ends releases the requests that wait.
        *limiter.limit.lock().unwrap() = Some(RequestLimit { qps: 0.001, burst: 1.0 });
        limiter.wait().await;
        let (start, released) = (Instant::now(), async {
            tokio::time::sleep(Duration::from_secs(5)).await;
            *limiter.limit.lock().unwrap() = None;
        });
        tokio::join!(limiter.wait(), released);
        assert!((5..7).contains(&start.elapsed().as_secs()), "{:?}", start.elapsed());
    }
}
