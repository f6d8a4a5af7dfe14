//! Leadership by a Lease.
//!
//! ```text
//!            lease free, released, or expired by our own clock
//!   follow ─────────────────────────────────────────────────────> lead
//!                                                                  │ renew each period
//!                                            renewed too long ago  │ stop asked
//!                              lost <──────────────────────────────┼────────────> released
//! ```
//! A lost lease ends the process, and the kubelet restarts it, so that nothing of the former leader remains.

use std::{
    sync::{Arc, Mutex},
    time::{Duration, Instant},
};

use daemon::lock;
use jiff::Timestamp;
use k8s_openapi::{
    api::coordination::v1::{Lease, LeaseSpec},
    apimachinery::pkg::apis::meta::v1::{MicroTime, ObjectMeta},
};
use kube::{Api, Client, api::PostParams};
use tokio_util::sync::CancellationToken;

/// Times of the election. With the defaults another replica leads at most 15 s after the leader was killed: the lease expires
/// 12 s after its last renewal was seen, standbys read it each second, and their caches are warm.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Times {
    /// Life of a lease without renewal.
    pub duration: Duration,
    /// Time for which the leader continues without a renewal. Shorter than `duration` by more than the time limit of a write.
    pub deadline: Duration,
    /// Time between renewals.
    pub renew: Duration,
    /// Time between reads of another replica's lease.
    pub poll: Duration,
}

impl Default for Times {
    fn default() -> Self {
        Self {
            duration: Duration::from_secs(12),
            deadline: Duration::from_secs(7),
            renew: Duration::from_secs(3),
            poll: Duration::from_secs(1),
        }
    }
}

/// Leadership of this replica. Cheap to clone.
#[derive(Clone)]
pub(crate) struct Leadership {
    renewed: Arc<Mutex<Option<Instant>>>,
    deadline: Duration,
}

impl Leadership {
    pub(super) fn new(deadline: Duration) -> Self {
        Self { renewed: Arc::default(), deadline }
    }

    /// Returns true while writes are allowed.
    #[must_use]
    pub(crate) fn holds(&self) -> bool {
        self.last().is_some_and(|at| at.elapsed() < self.deadline)
    }

    fn last(&self) -> Option<Instant> {
        *lock(&self.renewed)
    }

    pub(super) fn set(&self, renewed: Option<Instant>) {
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
    /// The last version of another's lease, and when it was first seen. Clocks of other hosts are not trusted.
    seen: Option<(Option<String>, Instant)>,
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
            leadership: Leadership::new(times.deadline),
            seen: None,
        }
    }

    /// Returns the leadership of this replica.
    #[must_use]
    pub(crate) fn leadership(&self) -> Leadership {
        self.leadership.clone()
    }

    /// Waits until this replica leads; false when `stop` came first.
    pub(crate) async fn win(&mut self, stop: &CancellationToken) -> bool {
        loop {
            match tokio::time::timeout(self.times.poll * 3, self.attempt()).await {
                Ok(Ok(true)) => return true,
                Ok(Ok(false)) => {}
                Ok(Err(error)) => tracing::warn!(error = %error, "lease cannot be read or written"),
                Err(_) => tracing::warn!("no answer about the lease in time"),
            }
            tokio::select! {
                () = tokio::time::sleep(self.times.poll) => {}
                () = stop.cancelled() => return false,
            }
        }
    }

    /// Renews the lease until it is lost (false) or `stop` comes (true).
    pub(crate) async fn keep(&mut self, stop: &CancellationToken) -> bool {
        loop {
            tokio::select! {
                () = tokio::time::sleep(self.times.renew) => {}
                () = stop.cancelled() => return true,
            }
            match tokio::time::timeout(self.times.renew, self.attempt()).await {
                Ok(Ok(true)) => {}
                Ok(Ok(false)) => {
                    self.leadership.set(None);
                    tracing::error!("another replica has taken the lease");
                    return false;
                }
                Ok(Err(error)) => tracing::warn!(error = %error, "lease was not renewed"),
                Err(_) => tracing::warn!("lease was not renewed in time"),
            }
            if !self.leadership.holds() {
                tracing::error!("lease was not renewed for too long");
                return false;
            }
        }
    }

    /// Releases the lease, so that another replica need not wait for its end. Does nothing if another replica holds it.
    pub(crate) async fn release(&mut self) {
        self.leadership.set(None);
        let released = async {
            let Some(mut lease) = self.leases.get_opt(&self.name).await? else { return Ok(()) };
            let Some(spec) = lease.spec.as_mut() else { return Ok(()) };
            if spec.holder_identity.as_deref() != Some(&self.identity) {
                return Ok(());
            }
            spec.holder_identity = None;
            spec.lease_duration_seconds = Some(1);
            self.leases.replace(&self.name, &PostParams::default(), &lease).await.map(|_| ())
        };
        match tokio::time::timeout(self.times.renew, released).await {
            Ok(Ok(())) => tracing::info!("lease given up"),
            Ok(Err(error)) => tracing::warn!(error = %error, "lease was not given up"),
            Err(_) => tracing::warn!("lease was not given up in time"),
        }
    }

    async fn attempt(&mut self) -> Result<bool, kube::Error> {
        // Counted from before the request, so that we stop writing before others may take over.
        let started = Instant::now();
        let now = MicroTime(Timestamp::now());
        let Some(mut lease) = self.leases.get_opt(&self.name).await? else {
            let lease = Lease {
                metadata: ObjectMeta { name: Some(self.name.clone()), ..ObjectMeta::default() },
                spec: Some(self.spec(None, &now)),
            };
            return self.outcome(self.leases.create(&PostParams::default(), &lease).await, started);
        };
        let version = lease.metadata.resource_version.clone();
        if self.seen.as_ref().is_none_or(|(known, _)| *known != version) {
            self.seen = Some((version, started));
        }
        let age = self.seen.as_ref().map_or(Duration::ZERO, |(_, at)| at.elapsed());
        match next_step(lease.spec.as_ref(), &self.identity, age, self.times.duration) {
            Step::Wait => Ok(false),
            Step::Take | Step::Renew => {
                lease.spec = Some(self.spec(lease.spec.as_ref(), &now));
                self.outcome(self.leases.replace(&self.name, &PostParams::default(), &lease).await, started)
            }
        }
    }

    fn outcome(&self, result: Result<Lease, kube::Error>, started: Instant) -> Result<bool, kube::Error> {
        match result {
            Ok(_) => {
                self.leadership.set(Some(started));
                Ok(true)
            }
            // Another replica was faster. The next read shows the holder.
            Err(kube::Error::Api(status)) if status.code == 409 => Ok(self.leadership.holds()),
            Err(error) => Err(error),
        }
    }

    fn spec(&self, former: Option<&LeaseSpec>, now: &MicroTime) -> LeaseSpec {
        let ours = former.is_some_and(|spec| spec.holder_identity.as_deref() == Some(&self.identity));
        let transitions = former.and_then(|spec| spec.lease_transitions).unwrap_or(0);
        LeaseSpec {
            holder_identity: Some(self.identity.clone()),
            lease_duration_seconds: i32::try_from(self.times.duration.as_secs()).ok(),
            acquire_time: if ours { former.and_then(|spec| spec.acquire_time.clone()) } else { Some(now.clone()) },
            renew_time: Some(now.clone()),
            lease_transitions: Some(if ours || former.is_none() { transitions } else { transitions.saturating_add(1) }),
            ..LeaseSpec::default()
        }
    }
}

/// Returns the next operation on a lease that has been unchanged for `age`.
fn next_step(spec: Option<&LeaseSpec>, identity: &str, age: Duration, default_duration: Duration) -> Step {
    let holder = spec.and_then(|spec| spec.holder_identity.as_deref()).unwrap_or_default();
    if holder == identity {
        return Step::Renew;
    }
    let duration = spec
        .and_then(|spec| spec.lease_duration_seconds)
        .and_then(|seconds| u64::try_from(seconds).ok())
        .map_or(default_duration, Duration::from_secs);
    if holder.is_empty() || age >= duration { Step::Take } else { Step::Wait }
}

#[cfg(test)]
mod tests {
    use super::*;

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
        let leadership = Leadership::new(Duration::from_secs(7));
        assert!(!leadership.holds());
        leadership.set(Some(Instant::now()));
        assert!(leadership.holds());
        leadership.set(Instant::now().checked_sub(Duration::from_secs(8)));
        assert!(!leadership.holds());
    }

    #[test]
    fn lease_expires_only_after_the_last_write_of_the_former_leader_has_ended() {
        let times = Times::default();
        assert!(times.deadline + Duration::from_secs(5) <= times.duration);
        assert!(times.duration + times.poll * 2 <= Duration::from_secs(15));
    }
}
