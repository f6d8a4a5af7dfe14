//! Leadership by a Lease.
//!
//! ```text
//!            lease free, released, or expired by our own clock
//!   follow ─────────────────────────────────────────────────────> lead
//!                                                                  │ renew each period
//!                           another led, or renewed too long ago   │ stop asked
//!                              lost <──────────────────────────────┼────────────> released
//! ```
//! A replica follows a lease (`lease_watch.rs`) until it may take it; with several shards, the one that should hold a shard has a head
//! start. A lost lease ends the process, and the kubelet restarts it, so that nothing of the former leader remains. A killed leader that
//! is restarted in its pod releases its lease for a replica with full caches.
//!
//! Writes begin before the deadline and end with the lease. An API server that answers nobody changes no leader: renewals are tried again
//! beyond the deadline, and standbys count the time of silence only in part.

use std::{
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use daemon::lock;
use jiff::Timestamp;
use k8s_openapi::{
    api::coordination::v1::{Lease, LeaseSpec},
    apimachinery::pkg::apis::meta::v1::{MicroTime, ObjectMeta},
};
use kube::{Api, Client, api::PostParams};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::{
    clock::Moment,
    lease_times::Times,
    lease_watch::{Seen, Watch},
};

/// Leadership of this replica. Cheap to clone.
#[derive(Clone)]
pub(crate) struct Leadership {
    renewed: Arc<Mutex<Option<Moment>>>,
    /// The lease is about to be released.
    is_ending: Arc<AtomicBool>,
    times: Times,
}

impl Leadership {
    pub(super) fn new(times: Times) -> Self {
        Self { renewed: Arc::default(), is_ending: Arc::default(), times }
    }

    /// Returns true while writes may begin.
    #[must_use]
    pub(crate) fn holds(&self) -> bool {
        !self.is_ending.load(Ordering::Relaxed) && self.last().is_some_and(|at| at.elapsed() < self.times.deadline)
    }

    /// Lets no further writes begin, although the lease is still held.
    pub(crate) fn end(&self) {
        self.is_ending.store(true, Ordering::Relaxed);
    }

    /// Returns the time until the lease ends, and all writes with it.
    #[must_use]
    pub(super) fn time_left(&self) -> Duration {
        self.last().map_or(Duration::ZERO, |at| self.times.duration.saturating_sub(at.elapsed()))
    }

    fn last(&self) -> Option<Moment> {
        *lock(&self.renewed)
    }

    pub(super) fn set(&self, renewed: Option<Moment>) {
        *lock(&self.renewed) = renewed;
    }
}

/// The next operation on a lease.
#[derive(Debug, PartialEq, Eq)]
enum Step {
    /// Acquire it.
    Take,
    /// Renew it: this replica holds it.
    Renew,
    /// Wait: another replica holds it.
    Wait,
}

/// The election of one process.
pub(crate) struct Election {
    leases: Api<Lease>,
    name: String,
    identity: String,
    times: Times,
    leadership: Leadership,
    /// The lease as it was last read or reported.
    seen: Option<Seen>,
    /// The lease as this replica last wrote it.
    written: Option<Lease>,
}

impl Election {
    /// Creates an election by the Lease `name`. `identity` must be unique among the replicas.
    #[must_use]
    pub(crate) fn new(client: Client, namespace: &str, name: &str, identity: String, times: Times) -> Self {
        Self {
            leases: Api::namespaced(client, namespace),
            name: name.to_owned(),
            identity,
            times,
            leadership: Leadership::new(times),
            seen: None,
            written: None,
        }
    }

    /// Returns the leadership of this replica until its lease is released.
    #[must_use]
    pub(crate) fn leadership(&self) -> Leadership {
        self.leadership.clone()
    }

    /// Waits until this replica leads; false when `stop` came first.
    pub(crate) async fn win(&mut self, stop: &CancellationToken) -> bool {
        self.win_if(stop, &|_, _| true).await
    }

    /// Waits until this replica has the lease; false when `stop` came first. It takes a lease only if `may_take` returns true for the
    /// former holder and the time for which the lease has been free or expired.
    pub(crate) async fn win_if(&mut self, stop: &CancellationToken, may_take: MayTake<'_>) -> bool {
        let mut watch = Watch::default();
        loop {
            let mut pause = self.times.poll;
            match tokio::time::timeout(self.times.limit(), self.attempt(may_take)).await {
                Ok(Ok(true)) => return true,
                Ok(Ok(false)) => {
                    let version = self.seen.as_ref().and_then(|seen| seen.version.as_deref());
                    watch.follow(&self.leases, &self.name, version);
                    pause = self.pause(watch.is_on());
                }
                Ok(Err(error)) => tracing::warn!(error = %error, "lease cannot be read or written"),
                Err(_) => tracing::warn!("no answer about the lease in time"),
            }
            tokio::select! {
                () = self.wait(&mut watch, pause) => {}
                () = stop.cancelled() => return false,
            }
        }
    }

    /// Waits for this time, which begins anew with each renewal by another replica. Returns before if the lease may be free, and if the
    /// watch ends.
    async fn wait(&mut self, watch: &mut Watch, pause: Duration) {
        let mut due = Instant::now() + pause;
        loop {
            let changed = tokio::select! {
                () = tokio::time::sleep_until(due) => return,
                changed = watch.next() => changed,
            };
            let Some(lease) = changed else { return };
            let unchanged = self.see(Some(&lease));
            if next_step(lease.spec.as_ref(), &self.identity, unchanged, self.times.duration) != Step::Wait {
                return;
            }
            due = Instant::now() + self.pause(true);
        }
    }

    /// Returns the time until the next read, after an answer.
    fn pause(&self, is_watched: bool) -> Duration {
        self.seen.as_ref().map_or(self.times.poll, |seen| seen.pause(is_watched, &self.times))
    }

    /// Records the lease, or that there is none. Returns the time for which it is known to be unchanged.
    fn see(&mut self, lease: Option<&Lease>) -> Duration {
        let version = lease.and_then(|lease| lease.metadata.resource_version.clone());
        let life = lease.map_or(Duration::ZERO, |lease| life(lease.spec.as_ref(), self.times.duration));
        let seen = Seen::after(self.seen.take(), version, life, Instant::now(), &self.times);
        let unchanged = seen.unchanged;
        self.seen = Some(seen);
        unchanged
    }

    /// Renews the lease until it is lost (false) or `stop` comes (true).
    pub(crate) async fn keep(&mut self, stop: &CancellationToken) -> bool {
        let mut pause = self.times.renew;
        loop {
            tokio::select! {
                () = tokio::time::sleep(pause) => {}
                () = stop.cancelled() => return true,
            }
            pause = self.times.poll;
            match tokio::time::timeout(self.times.limit(), self.attempt(&|_, _| true)).await {
                Ok(Ok(true)) => pause = self.times.renew,
                Ok(Ok(false)) => {
                    self.leadership.set(None);
                    tracing::error!("another replica has taken the lease");
                    return false;
                }
                Ok(Err(error)) => tracing::warn!(error = %error, "lease was not renewed"),
                Err(_) => tracing::warn!("lease was not renewed in time"),
            }
            if self.leadership.last().is_none_or(|at| at.elapsed() >= self.times.patience) {
                tracing::error!("lease was not renewed for too long");
                return false;
            }
        }
    }

    /// Releases the lease, so that another replica need not wait for its end. Does nothing if another replica holds it.
    pub(crate) async fn release(&mut self) {
        self.leadership.set(None);
        // A decision that outlasts this term writes nothing in a later one.
        self.leadership = Leadership::new(self.times);
        self.written = None;
        let released = async {
            let Some(mut lease) = self.leases.get_opt(&self.name).await? else { return Ok(false) };
            let Some(spec) = lease.spec.as_mut() else { return Ok(false) };
            if spec.holder_identity.as_deref() != Some(&self.identity) {
                return Ok(false);
            }
            spec.holder_identity = None;
            spec.lease_duration_seconds = Some(1);
            self.leases.replace(&self.name, &PostParams::default(), &lease).await.map(|_| true)
        };
        match tokio::time::timeout(self.times.limit(), released).await {
            Ok(Ok(true)) => tracing::info!("lease given up"),
            Ok(Ok(false)) => {}
            Ok(Err(error)) => tracing::warn!(error = %error, "lease was not given up"),
            Err(_) => tracing::warn!("lease was not given up in time"),
        }
    }

    async fn attempt(&mut self, may_take: MayTake<'_>) -> Result<bool, kube::Error> {
        // Counted from before the request, so that we stop writing before others may take over.
        let started = Moment::now();
        // A lease that nobody else has changed is renewed without a read.
        if let Some(lease) = self.written.take() {
            let renewed = self.replace(lease).await;
            if !is_conflict(&renewed) {
                return self.outcome(renewed, started);
            }
        }
        let Some(lease) = self.leases.get_opt(&self.name).await? else {
            let over = self.see(None);
            if !may_take("", over) {
                return Ok(false);
            }
            let lease = Lease {
                metadata: ObjectMeta { name: Some(self.name.clone()), ..ObjectMeta::default() },
                spec: Some(self.spec(None)),
            };
            let created = self.leases.create(&PostParams::default(), &lease).await;
            return self.outcome(created, started);
        };
        let unchanged = self.see(Some(&lease));
        let step = next_step(lease.spec.as_ref(), &self.identity, unchanged, self.times.duration);
        let over = unchanged.saturating_sub(life(lease.spec.as_ref(), self.times.duration));
        match step {
            Step::Wait => Ok(false),
            // The caches of a leader may lack the writes of another one that led meanwhile.
            Step::Take if self.leadership.last().is_some() => Ok(false),
            Step::Take if !may_take(holder(lease.spec.as_ref()), over) => Ok(false),
            Step::Take | Step::Renew => {
                let written = self.replace(lease).await;
                self.outcome(written, started)
            }
        }
    }

    async fn replace(&self, mut lease: Lease) -> Result<Lease, kube::Error> {
        lease.spec = Some(self.spec(lease.spec.as_ref()));
        self.leases.replace(&self.name, &PostParams::default(), &lease).await
    }

    fn outcome(&mut self, result: Result<Lease, kube::Error>, started: Moment) -> Result<bool, kube::Error> {
        // Another replica was faster. The next read shows the holder.
        if is_conflict(&result) {
            return Ok(self.leadership.holds());
        }
        self.written = Some(result?);
        self.leadership.set(Some(started));
        Ok(true)
    }

    fn spec(&self, former: Option<&LeaseSpec>) -> LeaseSpec {
        let now = MicroTime(Timestamp::now());
        let ours = former.is_some_and(|spec| spec.holder_identity.as_deref() == Some(&self.identity));
        let transitions = former.and_then(|spec| spec.lease_transitions).unwrap_or(0);
        LeaseSpec {
            holder_identity: Some(self.identity.clone()),
            lease_duration_seconds: i32::try_from(self.times.duration.as_secs()).ok(),
            acquire_time: if ours { former.and_then(|spec| spec.acquire_time.clone()) } else { Some(now.clone()) },
            renew_time: Some(now),
            lease_transitions: Some(if ours || former.is_none() { transitions } else { transitions.saturating_add(1) }),
            ..LeaseSpec::default()
        }
    }
}

/// Returns true if a replica may take the lease of this former holder, which has been free or expired for this time.
type MayTake<'a> = &'a (dyn Fn(&str, Duration) -> bool + Send + Sync);

/// Returns true if the lease was changed since it was read.
fn is_conflict(result: &Result<Lease, kube::Error>) -> bool {
    matches!(result, Err(kube::Error::Api(status)) if status.code == 409)
}

/// Returns the next operation on a lease that has been unchanged for `age`.
fn next_step(spec: Option<&LeaseSpec>, identity: &str, age: Duration, default_duration: Duration) -> Step {
    if holder(spec) == identity {
        return Step::Renew;
    }
    if age >= life(spec, default_duration) { Step::Take } else { Step::Wait }
}

/// Returns the holder of a lease; empty: it is free.
fn holder(spec: Option<&LeaseSpec>) -> &str {
    spec.and_then(|spec| spec.holder_identity.as_deref()).unwrap_or_default()
}

/// Returns the time for which a lease lasts without a renewal.
fn life(spec: Option<&LeaseSpec>, default_duration: Duration) -> Duration {
    if holder(spec).is_empty() {
        return Duration::ZERO;
    }
    let seconds = spec.and_then(|spec| spec.lease_duration_seconds).and_then(|seconds| u64::try_from(seconds).ok());
    seconds.map_or(default_duration, Duration::from_secs)
}

#[cfg(test)]
mod tests {
    use http::Method;
    use serde_json::json;

    use super::*;
    use crate::scripted::{Reply, Server, status};

    fn lease(holder: &str, seconds: i32) -> LeaseSpec {
        LeaseSpec {
            holder_identity: Some(holder.to_owned()),
            lease_duration_seconds: Some(seconds),
            ..LeaseSpec::default()
        }
    }

    #[test]
    fn lease_of_another_is_taken_only_after_it_was_unchanged_for_its_duration() {
        let step = |age| next_step(Some(&lease("b", 12)), "a", Duration::from_secs(age), Duration::from_secs(99));
        assert_eq!(step(11), Step::Wait);
        assert_eq!(step(12), Step::Take);
    }

    #[test]
    fn released_lease_is_taken_at_once() {
        assert_eq!(next_step(Some(&lease("", 1)), "a", Duration::ZERO, Duration::from_secs(12)), Step::Take);
        assert_eq!(next_step(None, "a", Duration::ZERO, Duration::from_secs(12)), Step::Take);
    }

    #[test]
    fn own_lease_is_renewed() {
        assert_eq!(next_step(Some(&lease("a", 12)), "a", Duration::ZERO, Duration::from_secs(12)), Step::Renew);
    }

    #[test]
    fn leadership_ends_when_the_last_renewal_is_too_old() {
        let times = Times::default();
        let leadership = Leadership::new(times);
        assert!(!leadership.holds());
        assert_eq!(leadership.time_left(), Duration::ZERO);
        // Time since the renewal; writes may begin. They end with the lease.
        for (age, holds) in [(Duration::ZERO, true), (times.deadline, false), (times.duration, false)] {
            leadership.set(Moment::now().checked_sub(age));
            assert_eq!(leadership.holds(), holds, "{age:?}");
            assert!(leadership.time_left() <= times.duration - age, "{age:?}");
        }
    }

    #[test]
    fn failed_renewal_is_repeated_before_the_lease_ends() {
        let times = Times::default();
        assert!(times.renew + times.limit() <= times.deadline);
        assert!(times.renew + times.limit() + times.poll < times.duration);
        // A renewal may be seen late by one read.
        assert!(times.duration + times.poll <= Duration::from_secs(9));
        // After a silence of the API server the leader has time for another renewal.
        assert!(times.renew < times.overdue());
        assert!(times.overdue() + times.limit() + times.poll < times.duration);
    }

    /// An answer with a lease of this holder.
    fn answer(holder: &str) -> Reply {
        let metadata = json!({"name": "lease", "namespace": "kubevirt", "resourceVersion": "1"});
        Reply::Answer(200, json!({"metadata": metadata, "spec": lease(holder, 7)}))
    }

    fn election(server: &Server) -> Election {
        Election::new(server.client(), "kubevirt", "lease", "a".to_owned(), Times::default())
    }

    fn methods(server: &Server) -> Vec<Method> {
        server.requests().into_iter().map(|(method, _)| method).collect()
    }

    #[tokio::test]
    async fn lease_is_renewed_by_one_request_and_lost_when_another_replica_has_led() {
        // Created, renewed, changed by another replica that has released it.
        let created = [Reply::Answer(404, status(404, "NotFound")), answer("a"), answer("a")];
        let released = [Reply::Answer(409, status(409, "Conflict")), answer("")];
        let server = Server::new(created.into_iter().chain(released));
        let mut election = election(&server);
        assert!(election.attempt(&|_, _| true).await.unwrap());
        assert!(election.attempt(&|_, _| true).await.unwrap());
        assert_eq!(methods(&server), [Method::GET, Method::POST, Method::PUT]);
        assert!(!election.attempt(&|_, _| true).await.unwrap());
        assert_eq!(methods(&server)[3..], [Method::PUT, Method::GET]);
    }

    #[tokio::test]
    async fn free_and_expired_leases_are_taken_only_with_permission() {
        for found in [Reply::Answer(404, status(404, "NotFound")), answer("")] {
            let server = Server::new([found, Reply::Answer(404, status(404, "NotFound")), answer("a")]);
            let mut election = election(&server);
            let asked = Mutex::new(Vec::new());
            let refuse = |former: &str, over: Duration| {
                lock(&asked).push((former.to_owned(), over));
                false
            };
            assert!(!election.attempt(&refuse).await.unwrap());
            assert_eq!(*lock(&asked), [(String::new(), Duration::ZERO)]);
            assert_eq!(methods(&server), [Method::GET]);
            assert!(election.attempt(&|_, _| true).await.unwrap());
            assert_eq!(methods(&server)[1..], [Method::GET, Method::POST]);
        }
        // Of a holder that renews nobody asks.
        let server = Server::new([answer("b")]);
        assert!(!election(&server).attempt(&|_, _| panic!("asked")).await.unwrap());
    }

    #[test]
    fn nothing_is_written_once_the_lease_is_about_to_be_released() {
        let leadership = Leadership::new(Times::default());
        leadership.set(Some(Moment::now()));
        assert!(leadership.holds());
        leadership.end();
        // Renewals go on until the writes have ended.
        leadership.set(Some(Moment::now()));
        assert!(!leadership.holds());
        assert!(leadership.time_left() > Duration::ZERO);
    }
}
