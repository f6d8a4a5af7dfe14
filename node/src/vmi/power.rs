//! The end of a domain, and of its launcher.

use protocol::{FinishRequest, KillRequest, ShutdownRequest, start_job_request::Job};

use super::{
    call::{Call, Connected},
    event::Event,
    observed::{Now, Observed, Stopping},
    role::Role,
};
use crate::launcher::LauncherError;

/// Requests the shutdown of the guest; the launcher stops it by force after the grace period.
#[derive(Debug, PartialEq)]
pub(super) struct Shutdown {
    /// Seconds that are left of the grace period.
    pub(super) grace: u64,
}

/// Stops the domain at once.
#[derive(Debug, PartialEq)]
pub(super) struct Kill;

/// Permits the launcher to exit after the final state was written.
#[derive(Debug, PartialEq)]
pub(super) struct Finish;

impl Call for Shutdown {
    type Reply = ();
    type Error = LauncherError;

    const NAME: &'static str = "shutdown";
    const SLOT: &'static str = Kill::SLOT;

    fn begin(&self, observed: &mut Observed, now: Now) {
        signal(observed, false, now);
    }

    async fn send(&self, to: &Connected) -> Result<(), LauncherError> {
        to.start(Job::Shutdown(ShutdownRequest { grace_period_seconds: self.grace })).await
    }

    fn apply(&self, _: &mut Observed, _: u64, result: Result<(), LauncherError>, _: Now) -> Vec<Event> {
        signalled(result)
    }
}

impl Call for Kill {
    type Reply = ();
    type Error = LauncherError;

    const NAME: &'static str = "kill";
    const SLOT: &'static str = "power";

    fn begin(&self, observed: &mut Observed, now: Now) {
        signal(observed, true, now);
    }

    async fn send(&self, to: &Connected) -> Result<(), LauncherError> {
        to.call(KillRequest {}).await.map(drop)
    }

    fn apply(&self, _: &mut Observed, _: u64, result: Result<(), LauncherError>, _: Now) -> Vec<Event> {
        signalled(result)
    }
}

fn signal(observed: &mut Observed, killed: bool, now: Now) {
    let since = observed.stopping.map_or(now.since_start, |stopping| stopping.since);
    observed.stopping = Some(Stopping { since, signalled: now.since_start, killed });
}

/// Returns the event for an error. A launcher that is gone has stopped its domain; after any other failure the next signal follows.
fn signalled(result: Result<(), LauncherError>) -> Vec<Event> {
    let error = result.err().filter(|error| !error.is_lost());
    error.map(|error| Event::warning("SyncFailed", error.to_string())).into_iter().collect()
}

impl Call for Finish {
    type Reply = ();
    type Error = LauncherError;

    const NAME: &'static str = "finish";

    async fn send(&self, to: &Connected) -> Result<(), LauncherError> {
        to.call(FinishRequest {}).await.map(drop)
    }

    fn apply(&self, observed: &mut Observed, _: u64, result: Result<(), LauncherError>, now: Now) -> Vec<Event> {
        observed.finished = result.is_ok() || result.is_err_and(|error| error.is_lost());
        if !observed.finished {
            observed.note_failure("virt-launcher did not accept Finish".into(), false, now);
            return Vec::new();
        }
        let ends = observed.role == Role::Owner;
        ends.then(|| Event::normal("Deleted", "Signaled Deletion")).into_iter().collect()
    }
}
