//! The start job.
//!
//! ```text
//!   first worker:    Preparing -> Connecting -> Serving -> Defining [-> Tagging] -> Creating -> Reading -> done
//!   later worker:    Adopting -> (a domain runs)  Sync of the running domain
//!                             -> (none runs)      Preparing -> ...
//! ```
//! A worker that may find a former worker's domain looks for it before it prepares or defines anything.

use std::{sync::Arc, time::Duration};

use tokio::time::Instant;

use super::Turn;
use crate::{
    domain::Domain,
    engine::model::{AfterRead, Effect, Job, Link, RequestError, RequestId, Stage, Start, StartStep, Wanted},
    hypervisor::HypervisorError,
};

/// Time limit of a start's wait for libvirt's daemon.
pub(super) const DAEMON_DEADLINE: Duration = Duration::from_secs(60);
/// Time after which a VMI that never ran and keeps failing to start fails for good.
const GIVE_UP_AFTER: Duration = Duration::from_secs(300);

/// Decides that a VMI without running domain fails for good: the error is permanent, or starts have failed for minutes;
/// another pod, perhaps on another node, may succeed. A domain that a former worker may have started is left running.
pub(super) fn gives_up(error: &RequestError, failing_for: Duration, adopting: bool) -> bool {
    match error {
        RequestError::Start { permanent: true, .. } | RequestError::Unsupported(_) => true,
        RequestError::Start { .. } | RequestError::Hypervisor(_) => !adopting && failing_for >= GIVE_UP_AFTER,
        _ => false,
    }
}

impl Turn {
    /// Takes the job slot for a start.
    pub(super) fn begin_start(&mut self, requests: Vec<RequestId>, wanted: Arc<Wanted>) {
        let step = if self.state.adopting && !self.has_read() {
            StartStep::Adopting { until: self.now + DAEMON_DEADLINE }
        } else {
            self.prepare(wanted.clone());
            StartStep::Preparing
        };
        self.state.job = Some(Job::Start(Start { requests, wanted, step, then: Vec::new() }));
    }

    fn prepare(&mut self, wanted: Arc<Wanted>) {
        self.effects.push(Effect::Prepare { wanted, allow_emulation: self.state.allow_emulation });
    }

    /// Reports that the domain was read, or found missing, through the present connection.
    pub(super) fn has_read(&self) -> bool {
        self.state.link == Link::Up && self.state.has_read
    }

    fn start_job(&mut self) -> Option<&mut Start> {
        match &mut self.state.job {
            Some(Job::Start(start)) => Some(start),
            _ => None,
        }
    }

    /// Returns the time limit of a start that waits for the connection.
    pub(super) fn start_limit(&self) -> Option<Instant> {
        match &self.state.job {
            Some(Job::Start(Start {
                step: StartStep::Adopting { until } | StartStep::Connecting { until, .. },
                ..
            })) => Some(*until),
            _ => None,
        }
    }

    /// Continues a start that has waited for the first read through the connection.
    pub(super) fn continue_start(&mut self) {
        let live = self.state.stage == Stage::Live;
        let Some(Job::Start(start)) = &mut self.state.job else { return };
        match &start.step {
            StartStep::Adopting { .. } | StartStep::Connecting { .. } if live => self.adopt(),
            StartStep::Adopting { .. } => {
                let wanted = start.wanted.clone();
                match wanted.check_supported() {
                    Ok(()) => {
                        start.step = StartStep::Preparing;
                        self.prepare(wanted);
                    }
                    Err(error) => self.fail_start(error),
                }
            }
            StartStep::Connecting { domain, .. } => {
                let (domain, wanted) = (domain.clone(), start.wanted.clone());
                start.step = StartStep::Serving { domain };
                self.effects.push(Effect::Serve(wanted));
            }
            _ => {}
        }
    }

    /// Turns the start into a sync of the domain that was found running.
    fn adopt(&mut self) {
        if let Some(Job::Start(start)) = self.state.job.take() {
            self.begin_live_sync(start.requests, start.wanted);
            for (id, action) in start.then {
                self.act(id, action);
            }
        }
    }

    /// Decides on the rendered domain.
    pub(super) fn prepared(&mut self, result: Result<Box<Domain>, RequestError>) {
        let until = self.now + DAEMON_DEADLINE;
        let Some(start) = self.start_job().filter(|start| matches!(start.step, StartStep::Preparing)) else { return };
        match result {
            Ok(domain) => {
                start.step = StartStep::Connecting { domain, until };
                if self.has_read() {
                    self.continue_start();
                }
            }
            Err(error) => self.fail_start(error),
        }
    }

    /// Decides on the services of a start: the domain is defined next.
    pub(super) fn start_served(&mut self, result: Result<(), RequestError>) {
        let Some(start) = self.start_job() else { return };
        let StartStep::Serving { domain } = &start.step else { return };
        if let Err(error) = result {
            return self.fail_start(error);
        }
        let domain = domain.clone();
        start.step = StartStep::Defining { paused: domain.start_paused };
        self.state.disk_sizes.clone_from(&domain.disks);
        self.state.acpi = domain.acpi;
        self.state.adopting = false;
        self.effects.push(Effect::Define(domain));
    }

    /// Decides on the definition.
    pub(super) fn defined(&mut self, result: Result<(), HypervisorError>) {
        let Some(start) = self.start_job() else { return };
        let StartStep::Defining { paused } = start.step else { return };
        match result {
            Ok(()) if start.wanted.has_tagged_interfaces() => {
                start.step = StartStep::Tagging { paused };
                let wanted = start.wanted.clone();
                self.effects.push(Effect::WriteTags(wanted));
            }
            Ok(()) => self.create(paused),
            Err(error) => self.fail_start(error.into()),
        }
    }

    /// Decides on the tags of interfaces.
    pub(super) fn tags_written(&mut self, result: Result<Option<(String, u64)>, RequestError>) {
        let Some(start) = self.start_job() else { return };
        let StartStep::Tagging { paused } = start.step else { return };
        match result {
            Ok(image) => {
                if let Some((volume, size)) = image {
                    let made = self.state.disk_sizes.iter_mut().filter(|disk| disk.volume == volume);
                    made.for_each(|disk| disk.size = size);
                }
                self.create(paused);
            }
            Err(error) => self.fail_start(error),
        }
    }

    fn create(&mut self, paused: bool) {
        if let Some(start) = self.start_job() {
            start.step = StartStep::Creating;
            self.effects.push(Effect::Create { paused });
        }
    }

    /// Decides on QEMU's start. After a failure the definition stays: the next attempt replaces it.
    pub(super) fn created(&mut self, result: Result<(), HypervisorError>) {
        let Some(start) = self.start_job().filter(|start| matches!(start.step, StartStep::Creating)) else { return };
        if let Err(error) = result {
            return self.fail_start(error.into());
        }
        start.step = StartStep::Reading;
        self.state.stage = Stage::Live;
        self.state.published.items.clear();
        self.read_then(Some(AfterRead::Started));
    }

    /// Completes the start after the first read of the domain.
    pub(super) fn started(&mut self) {
        let Some(Job::Start(start)) = self.state.job.take() else { return };
        tracing::info!("the domain is running");
        self.answer_all(start.requests, &Ok(true));
        for (id, action) in start.then {
            self.act(id, action);
        }
        self.sync_next();
    }

    /// Fails the start that is in progress.
    pub(super) fn fail_start(&mut self, error: RequestError) {
        let Some(Job::Start(start)) = self.state.job.take() else { return };
        self.fail_sync(start.requests, error);
        for (id, action) in start.then {
            self.act(id, action);
        }
        // Events during these steps were not followed by a read, and QEMU may have started although the call failed.
        if start.step.holds_reads() && self.state.stage != Stage::Ended {
            self.read_then(None);
        }
        self.sync_next();
    }

    /// Aborts a start during which the domain of an earlier start was found running.
    pub(super) fn abort_start(&mut self) {
        if let Some(Job::Start(start)) = self.state.job.take_if(|job| matches!(job, Job::Start(_))) {
            self.answer_all(start.requests, &Err(RequestError::Ending));
            self.sync_next();
        }
    }

    /// Answers requests whose VMI cannot be started or changed. A running guest is never stopped by a failed Sync; other
    /// failures are retried by virt-handler for a limited time.
    pub(super) fn fail_sync(&mut self, requests: Vec<RequestId>, error: RequestError) {
        // virt-handler logs the answer.
        tracing::debug!(%error, "Sync failed");
        let failing_for = self.now.duration_since(*self.state.failing_since.get_or_insert(self.now));
        let gives_up = self.state.stage != Stage::Live && gives_up(&error, failing_for, self.state.adopting);
        let message = error.to_string();
        self.answer_all(requests, &Err(error));
        if gives_up {
            self.state.published.failure = message;
            self.end();
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
