//! The shutdown job, and the end of the domain.

use std::time::Duration;

use protocol::Lifecycle;

use super::{Turn, requests::disconnected};
use crate::{
    engine::model::{
        AfterRead, Effect, Job, Kill, Link, RequestError, RequestId, Shutdown, Stage, StartStep, forget_guest,
    },
    hypervisor::HypervisorError,
};

/// Interval of shutdown requests to the guest.
const SHUTDOWN_REPEAT: Duration = Duration::from_secs(5);
/// Longest grace period.
const LONGEST_GRACE: Duration = Duration::from_secs(365 * 24 * 3600);
/// Time that virt-handler has to record the final state.
const FINISH_DEADLINE: Duration = Duration::from_secs(300);
/// The same while the pod terminates.
const FINISH_DEADLINE_TERMINATING: Duration = Duration::from_secs(10);

impl Turn {
    /// Starts the shutdown of the guest, or shortens its grace period.
    pub(super) fn stop_within(&mut self, grace: u64) {
        let force_at = self.now + Duration::from_secs(grace).min(LONGEST_GRACE);
        match &mut self.state.job {
            Some(Job::Shutdown(shutdown)) => shutdown.force_at = shutdown.force_at.min(force_at),
            _ => {
                let shutdown = Shutdown { force_at, signal_at: self.now, signalling: false };
                self.state.job = Some(Job::Shutdown(shutdown));
            }
        }
        self.continue_shutdown();
    }

    /// Requests the shutdown again, or destroys the domain when the grace period is over.
    pub(super) fn continue_shutdown(&mut self) {
        let now = self.now;
        let ready = self.state.link == Link::Up && self.state.published.lifecycle() != Lifecycle::ShuttingDown;
        let Some(Job::Shutdown(shutdown)) = &mut self.state.job else { return };
        if now >= shutdown.force_at {
            tracing::warn!("the grace period is over, destroying the domain");
            shutdown.force_at = now + SHUTDOWN_REPEAT;
            shutdown.signal_at = shutdown.force_at;
            self.kill(Vec::new());
        } else if now >= shutdown.signal_at {
            shutdown.signal_at = (now + SHUTDOWN_REPEAT).min(shutdown.force_at);
            if ready && !shutdown.signalling {
                shutdown.signalling = true;
                self.effects.push(Effect::Shutdown);
            }
        }
    }

    /// Decides on the result of a shutdown request to the guest.
    pub(super) fn shutdown_requested(&mut self, result: Result<(), HypervisorError>) {
        if let Some(Job::Shutdown(shutdown)) = &mut self.state.job {
            shutdown.signalling = false;
        }
        match result {
            Ok(()) => {}
            Err(HypervisorError::NoDomain) => self.read_then(None),
            Err(error) => tracing::warn!(%error, "cannot request a shutdown of the guest"),
        }
    }

    /// Destroys the domain for these requests, or for a shutdown if there are none.
    pub(super) fn kill(&mut self, requests: Vec<RequestId>) {
        if let Some(kill) = &mut self.state.kill {
            kill.requests.extend(requests);
        } else if self.state.link == Link::Up {
            self.state.kill = Some(Kill { requests, gently: true });
            self.effects.push(Effect::Destroy { gently: true });
        } else {
            self.killed(requests, Err(disconnected()));
        }
    }

    /// Decides on the result of a destruction: force follows if SIGTERM was not enough.
    pub(super) fn destroyed(&mut self, result: Result<(), HypervisorError>) {
        let Some(kill) = &mut self.state.kill else { return };
        if let (true, Err(error)) = (kill.gently, &result) {
            tracing::warn!(%error, "QEMU does not end after SIGTERM");
            kill.gently = false;
            self.effects.push(Effect::Destroy { gently: false });
            return;
        }
        if let Some(kill) = self.state.kill.take() {
            self.read_then(Some(AfterRead::Killed(kill.requests, result)));
        }
    }

    /// Answers requests to destroy the domain. A missing domain is destroyed.
    pub(super) fn killed(&mut self, requests: Vec<RequestId>, result: Result<(), RequestError>) {
        let answer = match result {
            Err(RequestError::Hypervisor(HypervisorError::NoDomain)) => Ok(false),
            Err(_) if self.state.stage == Stage::Ended => Ok(false),
            Err(error) if requests.is_empty() => {
                tracing::error!(%error, "cannot destroy the domain");
                return;
            }
            result => result.map(|()| false),
        };
        self.answer_all(requests, &answer);
    }

    /// Enters the final stage: virt-handler records the end.
    pub(super) fn end(&mut self) {
        self.state.stage = Stage::Ended;
        self.effects.push(Effect::AttendGuestAgent { connected: false, runs: false, changed: false });
        let limit = if self.state.terminating { FINISH_DEADLINE_TERMINATING } else { FINISH_DEADLINE };
        let at = self.now + limit;
        self.state.finish_at = Some(self.state.finish_at.map_or(at, |earlier| earlier.min(at)));
        let published = &mut self.state.published;
        published.guest_agent_connected = false;
        published.disk_errors.clear();
        published.items.clear();
        forget_guest(published);
        if published.failure.is_empty() && published.lifecycle() == Lifecycle::NoDomain {
            published.set_lifecycle(Lifecycle::Shutoff);
            published.reason = "destroyed".into();
        }
        self.end_work();
    }

    /// Answers the requests of work that the end of the domain makes pointless.
    fn end_work(&mut self) {
        match self.state.job.take() {
            // QEMU has started; the read in progress completes the start.
            Some(Job::Start(start)) if matches!(start.step, StartStep::Reading) => {
                self.state.job = Some(Job::Start(start));
            }
            Some(Job::Start(start)) => self.answer_all(start.requests, &Err(RequestError::Ending)),
            Some(Job::MemoryDump) => self.end_dump("the domain has ended"),
            Some(Job::MigrationOut(out)) => {
                self.answer_all(out.requests, &Err(RequestError::Ended));
                out.then.into_iter().for_each(|(id, _)| self.answer(id, Ok(false)));
            }
            Some(Job::MigrationIn(incoming)) => {
                self.answer_all(incoming.requests, &Err(RequestError::Ended));
                self.answer_all(incoming.releases, &Err(RequestError::Ended));
            }
            Some(Job::Shutdown(_)) | None => {}
        }
        if let Some(sync) = self.state.sync.take() {
            self.answer_all(sync.requests, &Err(RequestError::Ended));
        }
        if let Some(next) = self.state.next_sync.take() {
            self.answer_all(next.requests, &Err(RequestError::Ended));
        }
        for (id, _) in self.state.looking.take().into_iter().flat_map(|looking| looking.then) {
            self.answer(id, Ok(false));
        }
    }
}
