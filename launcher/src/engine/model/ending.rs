//! The end of the domain, and failures that end it.

use std::time::Duration;

use protocol::Lifecycle;

use super::{
    base::{Base, Kill, Link, Next, Stage, disconnected},
    effect::{DomainCall, Effect},
    publish::forget_guest,
    request::{RequestError, RequestId},
};
use crate::hypervisor::HypervisorError;

/// Time after which a VMI that never ran and keeps failing to start fails for good.
const GIVE_UP_AFTER: Duration = Duration::from_secs(300);
/// Time that virt-handler has to record the final state.
const FINISH_DEADLINE: Duration = Duration::from_secs(300);
/// The same while the pod terminates.
const FINISH_DEADLINE_TERMINATING: Duration = Duration::from_secs(10);

/// Decides that a VMI without running domain fails for good: the error is permanent, or starts have failed for minutes;
/// another pod, perhaps on another node, may succeed. A domain that a former worker may have started is left running.
fn gives_up(error: &RequestError, failing_for: Duration, adopting: bool) -> bool {
    match error {
        RequestError::Start { permanent: true, .. } | RequestError::Unsupported(_) => true,
        RequestError::Start { .. } | RequestError::Hypervisor(_) => !adopting && failing_for >= GIVE_UP_AFTER,
        _ => false,
    }
}

impl Base {
    /// Destroys the domain for these requests, or for a job if there are none.
    pub(crate) fn kill(&mut self, requests: Vec<RequestId>) {
        if let Some(kill) = &mut self.kill {
            kill.requests.extend(requests);
        } else if self.link == Link::Up {
            self.kill = Some(Kill { requests, gently: true });
            self.call(DomainCall::Destroy { gently: true });
        } else {
            self.answer_killed(requests, Err(disconnected()));
        }
    }

    /// Ends a domain that cannot go on. virt-handler reports the reason.
    pub(crate) fn on_lost(&mut self, reason: String) {
        if self.stage == Stage::Live && self.published.failure.is_empty() {
            tracing::error!(reason, "the domain is lost");
            self.published.failure = reason;
            self.kill(Vec::new());
        }
    }

    /// Decides on the result of a destruction: force follows if SIGTERM was not enough.
    pub(crate) fn on_destroyed(&mut self, result: Result<(), HypervisorError>) {
        let Some(kill) = &mut self.kill else { return };
        if let (true, Err(error)) = (kill.gently, &result) {
            tracing::warn!(%error, "QEMU does not end after SIGTERM");
            kill.gently = false;
            return self.call(DomainCall::Destroy { gently: false });
        }
        let requests = std::mem::take(&mut kill.requests);
        self.kill = None;
        self.read_then(Next::Killed(requests, result));
    }

    /// Answers requests to destroy the domain. A missing domain is destroyed.
    pub(crate) fn answer_killed(&mut self, requests: Vec<RequestId>, result: Result<(), RequestError>) {
        let answer = match result {
            Err(RequestError::Hypervisor(HypervisorError::NoDomain)) => Ok(false),
            Err(_) if self.stage == Stage::Ended => Ok(false),
            Err(error) if requests.is_empty() => {
                tracing::error!(%error, "cannot destroy the domain");
                return;
            }
            result => result.map(|()| false),
        };
        self.answer_all(requests, &answer);
    }

    /// Answers requests whose VMI cannot be started or changed. A running guest is never stopped by a failed Sync; other
    /// failures are retried by virt-handler for a limited time.
    pub(crate) fn fail_sync(&mut self, requests: Vec<RequestId>, error: RequestError) {
        // virt-handler logs the answer.
        tracing::debug!(%error, "Sync failed");
        let failing_for = self.now.duration_since(*self.failing_since.get_or_insert(self.now));
        let gives_up = self.stage != Stage::Live && gives_up(&error, failing_for, self.adopting);
        let message = error.to_string();
        self.answer_all(requests, &Err(error));
        if gives_up {
            self.published.failure = message;
            self.end();
        }
    }

    /// Publishes the state of a domain that has ended, and enters the final stage.
    pub(crate) fn end_as(&mut self, lifecycle: Lifecycle, reason: &str) {
        self.published.set_lifecycle(lifecycle);
        reason.clone_into(&mut self.published.reason);
        self.end();
    }

    /// Enters the final stage: virt-handler records the end.
    pub(crate) fn end(&mut self) {
        self.stage = Stage::Ended;
        self.effects.push(Effect::AttendGuestAgent { connected: false, runs: false, changed: false });
        let limit = if self.terminating { FINISH_DEADLINE_TERMINATING } else { FINISH_DEADLINE };
        let at = self.now + limit;
        self.finish_at = Some(self.finish_at.map_or(at, |earlier| earlier.min(at)));
        let published = &mut self.published;
        published.guest_agent_connected = false;
        published.disk_errors.clear();
        published.items.clear();
        forget_guest(published);
        if published.failure.is_empty() && published.lifecycle() == Lifecycle::NoDomain {
            published.set_lifecycle(Lifecycle::Shutoff);
            published.reason = "destroyed".into();
        }
    }

    /// Sets the guest's clock that has stood still in a migration, once its guest agent is connected.
    pub(crate) fn set_late_clock(&mut self) {
        if self.clock_is_late && self.published.guest_agent_connected {
            self.clock_is_late = false;
            self.set_clock();
        }
    }

    /// Sets the guest's clock. One at a time: each holds one of the few calls to libvirt until the guest agent answers.
    pub(crate) fn set_clock(&mut self) {
        if !std::mem::replace(&mut self.setting_clock, true) {
            self.call(DomainCall::SetClock);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::domain::unsupported::Unsupported;

    #[test]
    fn a_start_that_keeps_failing_is_given_up() {
        let start = |permanent| RequestError::Start { message: "no kernel".into(), permanent };
        let libvirt = || RequestError::Hypervisor(HypervisorError::NoDomain);
        for (error, seconds, adopting, expected) in [
            (start(true), 0, false, true),
            (start(true), 0, true, true),
            (RequestError::Unsupported(Unsupported::default()), 0, false, true),
            (start(false), 0, false, false),
            (start(false), 299, false, false),
            (start(false), 300, false, true),
            (libvirt(), 300, false, true),
            (start(false), 3000, true, false),
            (libvirt(), 3000, true, false),
            (RequestError::Ending, 3000, false, false),
            (RequestError::NoHello, 3000, false, false),
        ] {
            let given_up = gives_up(&error, Duration::from_secs(seconds), adopting);
            assert_eq!(given_up, expected, "{error:?} {seconds} {adopting}");
        }
    }
}
