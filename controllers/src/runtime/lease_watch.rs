//! How a replica follows the lease of another one: a watch of this object reports renewals, and a read confirms that there was none.
//!
//! ```text
//!  read ──version──> watch ──renewal──> wait until the next one is overdue ──> read each `poll`, the last one when the lease expires
//!   ^                  │  free, gone, watch ended                                │ renewed
//!   └──────────────────┴─────────────────────────────────────────────────────────┘
//! ```
//! A lease expires by reads only: a watch that is silent proves nothing, since the API server may not answer anybody. Without a watch the
//! lease is read at each `poll`.

use std::time::Duration;

use futures::{StreamExt, TryFutureExt, stream::BoxStream};
use k8s_openapi::api::coordination::v1::Lease;
use kube::{
    Api,
    api::{WatchEvent, WatchParams},
};
use tokio::time::Instant;

use super::lease_times::Times;

/// Least time between the starts of two watches of a lease. Meanwhile it is read.
const START_INTERVAL: Duration = Duration::from_secs(30);

/// A lease as it was last read or reported. Clocks of other hosts are not trusted.
#[derive(Debug)]
pub(super) struct Seen {
    /// Version of the Lease; `None`: it does not exist.
    pub version: Option<String>,
    at: Instant,
    /// Time for which it is known to be unchanged.
    pub unchanged: Duration,
    /// Time for which it lasts without a renewal. Zero: it is free.
    pub life: Duration,
}

impl Seen {
    /// Returns the lease that is seen in this version after `former`. Time between two answers counts in part: while reads get no answer,
    /// neither do renewals.
    pub(super) fn after(
        former: Option<Self>,
        version: Option<String>,
        life: Duration,
        at: Instant,
        times: &Times,
    ) -> Self {
        let unchanged = former.filter(|former| former.version == version).map_or(Duration::ZERO, |former| {
            let longest = if former.unchanged.is_zero() { times.overdue() } else { times.poll * 2 };
            former.unchanged + at.saturating_duration_since(former.at).min(longest)
        });
        Self { version, at, unchanged, life }
    }

    /// Returns the time until the next read, after an answer. A watch spares the reads until a renewal is overdue.
    pub(super) fn pause(&self, is_watched: bool, times: &Times) -> Duration {
        let pause = if is_watched && self.unchanged.is_zero() { times.overdue() } else { times.poll };
        let rest = self.life.saturating_sub(self.unchanged);
        // Free or expired: another replica should take it.
        if rest.is_zero() { times.poll } else { pause.min(rest) }
    }
}

/// Changes of a lease as the API server reports them.
type Changes = BoxStream<'static, Result<WatchEvent<Lease>, kube::Error>>;

/// The watch of a lease.
#[derive(Default)]
pub(super) struct Watch {
    changes: Option<Changes>,
    started: Option<Instant>,
    /// The version that it began with, or has delivered since.
    version: Option<String>,
}

impl Watch {
    /// Begins a watch after a read of this version, unless one goes on that has delivered the version.
    pub(super) fn follow(&mut self, leases: &Api<Lease>, name: &str, version: Option<&str>) {
        if self.is_on() && self.version.as_deref() == version {
            return;
        }
        self.changes = None;
        if let Some(version) = version
            && self.started.is_none_or(|at| at.elapsed() >= START_INTERVAL)
        {
            self.started = Some(Instant::now());
            self.version = Some(version.to_owned());
            self.changes = Some(changes(leases.clone(), name, version.to_owned()));
        }
    }

    /// Returns true while changes are reported.
    pub(super) fn is_on(&self) -> bool {
        self.changes.is_some()
    }

    /// Returns the lease when it has changed; `None` when it is gone or the watch has ended. Without a watch it waits for ever.
    pub(super) async fn next(&mut self) -> Option<Lease> {
        let Some(changes) = self.changes.as_mut() else { return std::future::pending().await };
        loop {
            match changes.next().await {
                Some(Ok(WatchEvent::Added(lease) | WatchEvent::Modified(lease))) => {
                    self.version.clone_from(&lease.metadata.resource_version);
                    return Some(lease);
                }
                Some(Ok(WatchEvent::Bookmark(_))) => continue,
                Some(Ok(WatchEvent::Deleted(_))) | None => {}
                Some(Ok(WatchEvent::Error(status))) => {
                    tracing::warn!(error = %status, "watch of the lease was interrupted, it is read");
                }
                Some(Err(error)) => tracing::warn!(%error, "lease cannot be watched, it is read"),
            }
            self.changes = None;
            return None;
        }
    }
}

/// Watches the lease `name` from a version on. The name in the selector is the one that RBAC compares. A silent watch is noticed by reads.
fn changes(leases: Api<Lease>, name: &str, version: String) -> Changes {
    let selector = format!("metadata.name={name}");
    let parameters = WatchParams::default().fields(&selector).timeout(daemon::watch::duration()).disable_bookmarks();
    async move { leases.watch(&parameters, &version).await }.try_flatten_stream().boxed()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::scripted::{Reply, Server};

    const LIFE: Duration = Duration::from_secs(8);

    #[test]
    fn time_without_answers_about_the_lease_counts_in_part() {
        let (start, times) = (Instant::now(), Times::default());
        let mut seen = None;
        // Milliseconds since the start, version, milliseconds for which it is unchanged.
        for (at, version, unchanged) in [
            (0, "1", 0),
            (1000, "1", 1000),
            (2100, "1", 2100),
            // Renewed.
            (3200, "2", 0),
            (4200, "2", 1000),
            // No answer for a minute.
            (64_200, "2", 3000),
            (65_200, "2", 4000),
            // Renewed, and reported by the watch, which is silent until a read.
            (66_200, "3", 0),
            (69_700, "3", 3500),
            (70_700, "3", 4500),
            // No answer for a minute, in which the watch is silent.
            (71_200, "4", 0),
            (131_200, "4", 3500),
            (191_200, "4", 5500),
        ] {
            let now = start + Duration::from_millis(at);
            let next = Seen::after(seen.take(), Some(version.to_owned()), LIFE, now, &times);
            assert_eq!(next.unchanged, Duration::from_millis(unchanged), "at {at}");
            seen = Some(next);
        }
    }

    #[test]
    fn lease_is_read_when_a_renewal_is_overdue_and_when_it_expires() {
        let (at, times) = (Instant::now(), Times::default());
        // Milliseconds for which it is unchanged and for which it lasts, a watch, milliseconds until the next read.
        for (unchanged, life, is_watched, expected) in [
            (0, 8000, true, 3500),
            (0, 8000, false, 1000),
            (3500, 8000, true, 1000),
            (3500, 8000, false, 1000),
            (7600, 8000, true, 400),
            (7600, 8000, false, 400),
            // Expired or free, and another replica should take it.
            (8000, 8000, true, 1000),
            (9000, 8000, false, 1000),
            (0, 0, true, 1000),
            // Of a holder with other times.
            (0, 2000, true, 2000),
        ] {
            let (unchanged, life) = (Duration::from_millis(unchanged), Duration::from_millis(life));
            let seen = Seen { version: None, at, unchanged, life };
            let pause = seen.pause(is_watched, &times);
            assert_eq!(pause, Duration::from_millis(expected), "{unchanged:?} of {life:?} {is_watched}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn watch_reports_changes_and_is_not_repeated_soon() {
        let event = |kind: &str, version: &str| {
            let metadata = json!({"name": "lease", "namespace": "kubevirt", "resourceVersion": version});
            Reply::Answer(200, json!({"type": kind, "object": {"metadata": metadata}}))
        };
        let server = Server::new([event("MODIFIED", "2"), event("DELETED", "3")]);
        let leases = Api::<Lease>::namespaced(server.client(), "kubevirt");
        let mut watch = Watch::default();
        watch.follow(&leases, "lease", None);
        assert!(!watch.is_on());
        watch.follow(&leases, "lease", Some("1"));
        let changed = watch.next().await.unwrap();
        assert_eq!(changed.metadata.resource_version.as_deref(), Some("2"));
        watch.follow(&leases, "lease", Some("2"));
        assert!(watch.is_on());
        // It ends.
        assert!(watch.next().await.is_none());
        watch.follow(&leases, "lease", Some("2"));
        assert!(!watch.is_on());
        tokio::time::advance(START_INTERVAL).await;
        watch.follow(&leases, "lease", Some("2"));
        assert!(watch.is_on());
        // Deleted.
        assert!(watch.next().await.is_none());
        assert!(!watch.is_on());
        assert_eq!(server.requests().len(), 2);
        // A read that shows what the watch has not reported.
        tokio::time::advance(START_INTERVAL).await;
        watch.follow(&leases, "lease", Some("4"));
        assert!(watch.is_on());
        watch.follow(&leases, "lease", Some("5"));
        assert!(!watch.is_on());
    }
}
