//! The job of a migration to this launcher.
//!
//! ```text
//!   Preparing -> Connecting -> Serving -> Opening -> Waiting -> Releasing -> moved
//!                                                       +----> (the domain is gone)  not moved
//! ```
//! The domain arrives paused. Only a release of the source's launcher, whose domain has ended, lets the guest run. In post-copy it
//! runs before, and is released when all of its memory is here. The domain comes twice then: first without post-copy. A source that
//! has switched never runs the guest again, so that this launcher decides alone if the source is silent: a whole guest is released,
//! one with a broken connection is lost.

use std::{sync::Arc, time::Duration};

use protocol::{Lifecycle, MigrationMode, MigrationReport, MigrationStep};

use super::{Turn, migration_out::INTERVAL, post_copy::is_apart, requests::disconnected, start::DAEMON_DEADLINE};
use crate::{
    domain::Domain,
    engine::model::{
        Action, AfterRead, ChannelMode, Direction, Effect, InStep, Job, Link, MigrationIn, MigrationRecord,
        RequestError, RequestId, Stage, Wanted,
    },
    hypervisor::HypervisorError,
};

/// Time for the source to release a guest in post-copy that is whole, or to report one that is lost.
const SOURCE_LIMIT: Duration = Duration::from_secs(60);
/// Time for the domain to come again with post-copy.
const RETURN_LIMIT: Duration = Duration::from_secs(120);
/// Failure of a guest whose memory was at two places.
const LOST: &str = "the guest was lost in post-copy";

impl Turn {
    pub(super) fn incoming(&mut self) -> Option<&mut MigrationIn> {
        match &mut self.state.job {
            Some(Job::MigrationIn(incoming)) => Some(incoming),
            _ => None,
        }
    }

    /// Decides on a request to prepare for the domain of another launcher.
    pub(super) fn prepare_migration(&mut self, id: RequestId, migration: String, wanted: Arc<Wanted>) {
        if let Some(incoming) = self.incoming().filter(|incoming| incoming.migration == migration) {
            return match (&incoming.step, &incoming.wanted) {
                (InStep::Waiting | InStep::Releasing, Some(_)) => self.answer(id, Ok(false)),
                // The services of a former worker have ended with it.
                (InStep::Waiting | InStep::Releasing, None) => {
                    incoming.wanted = Some(wanted.clone());
                    incoming.requests.push(id);
                    self.effects.push(Effect::Serve(wanted));
                }
                _ => incoming.requests.push(id),
            };
        }
        if self.state.published.migration.as_ref().is_some_and(|known| known.migration == migration) {
            return self.answer(id, Ok(false));
        }
        if let Err(error) = self.begin_incoming(id, migration, wanted) {
            self.answer(id, Err(error));
        }
    }

    fn begin_incoming(&mut self, id: RequestId, migration: String, wanted: Arc<Wanted>) -> Result<(), RequestError> {
        self.check_vmi(&wanted)?;
        // Another migration replaces one that has not begun.
        let replaces =
            self.incoming().is_some_and(|incoming| matches!(incoming.step, InStep::Waiting) && !incoming.seen);
        match &self.state.job {
            Some(job) if !replaces => {
                return Err(RequestError::Conflict { job: job.name(), progress: job.progress() });
            }
            _ => {}
        }
        match self.state.stage {
            Stage::Ended => return Err(RequestError::Ended),
            Stage::Live => return Err(RequestError::Runs),
            Stage::Waiting => {}
        }
        wanted.check_supported()?;
        if !self.state.cache_written {
            return Err(RequestError::NoHello);
        }
        tracing::info!(migration, "preparing for the domain of another launcher");
        self.state.published.migration = None;
        let incoming = MigrationIn::new(migration, wanted.clone(), vec![id], self.now);
        self.state.job = Some(Job::MigrationIn(Box::new(incoming)));
        self.effects.push(Effect::PrepareTarget { wanted, allow_emulation: self.state.allow_emulation });
        Ok(())
    }

    /// Decides on the prepared disks.
    pub(super) fn incoming_prepared(&mut self, result: Result<Box<Domain>, RequestError>) {
        let until = self.now + DAEMON_DEADLINE;
        let Some(incoming) = self.incoming().filter(|incoming| matches!(incoming.step, InStep::Preparing)) else {
            return;
        };
        match result {
            Ok(domain) => {
                incoming.step = InStep::Connecting { domain, until };
                self.continue_incoming();
            }
            Err(error) => self.fail_incoming(&error),
        }
    }

    /// Continues a migration that has waited for the connection, or whose time has come.
    pub(super) fn continue_incoming(&mut self) {
        let (now, has_read) = (self.now, self.has_read());
        let Some(incoming) = self.incoming() else { return };
        match &incoming.step {
            InStep::Waiting if incoming.until.is_some_and(|until| until <= now) => {
                incoming.until = Some(now + INTERVAL);
                if has_read {
                    self.decide_alone();
                }
            }
            InStep::Connecting { domain, .. } if has_read => {
                let Some(wanted) = incoming.wanted.clone() else { return };
                let (disks, acpi) = (domain.disks.clone(), domain.acpi);
                incoming.step = InStep::Serving;
                self.state.disk_sizes = disks;
                self.state.acpi = acpi;
                self.effects.push(Effect::Serve(wanted));
            }
            InStep::Connecting { until, .. } if *until <= now => self.fail_incoming(&disconnected()),
            InStep::Releasing if !incoming.calling && incoming.next <= now => self.run_arrived(),
            _ => {}
        }
    }

    /// Decides on the services. Returns the result if they are not those of a migration.
    pub(super) fn incoming_served(&mut self, result: Result<(), RequestError>) -> Option<Result<(), RequestError>> {
        let begin = self.state.nanoseconds(self.now);
        let Some(incoming) = self.incoming() else { return Some(result) };
        match (&incoming.step, result) {
            (InStep::Serving, Ok(())) => {
                incoming.step = InStep::Opening;
                let report =
                    MigrationReport { migration: incoming.migration.clone(), begin, ..MigrationReport::default() };
                let record = MigrationRecord {
                    step: MigrationStep::Prepared.into(),
                    ..MigrationRecord::of(&report, Direction::In, false)
                };
                self.effects.push(Effect::OpenMigration(Box::new(record), ChannelMode::Incoming));
            }
            (InStep::Serving, Err(error)) => self.fail_incoming(&error),
            // After a restart of the worker.
            (_, result) => {
                if result.is_err() {
                    incoming.wanted = None;
                }
                let requests = std::mem::take(&mut incoming.requests);
                self.answer_all(requests, &result.map(|()| false));
            }
        }
        None
    }

    /// Decides on the opened channels of a migration to this launcher.
    pub(super) fn incoming_opened(&mut self, result: Result<(), RequestError>) {
        let begin = self.state.nanoseconds(self.now);
        let Some(incoming) = self.incoming().filter(|incoming| matches!(incoming.step, InStep::Opening)) else {
            return;
        };
        if let Err(error) = result {
            return self.fail_incoming(&error);
        }
        incoming.step = InStep::Waiting;
        let requests = std::mem::take(&mut incoming.requests);
        let migration = incoming.migration.clone();
        self.state.published.migration = Some(MigrationReport {
            migration,
            step: MigrationStep::Prepared.into(),
            begin,
            ..MigrationReport::default()
        });
        self.answer_all(requests, &Ok(false));
    }

    /// Fails a preparation. virt-handler repeats it.
    fn fail_incoming(&mut self, error: &RequestError) {
        tracing::warn!(%error, "cannot prepare for the domain of another launcher");
        if let Some(Job::MigrationIn(incoming)) = self.state.job.take_if(|job| matches!(job, Job::MigrationIn(_))) {
            self.answer_all(incoming.requests, &Err(error.clone()));
        }
    }

    /// Learns that the domain exists here.
    pub(super) fn arriving(&mut self, id: Option<u32>, lifecycle: Lifecycle, reason: &str) {
        let now = self.now;
        self.note_post_copy(reason);
        let has_left = self.has_left_its_memory();
        let Some(incoming) = self.incoming() else { return };
        // The source has nothing more to do, except to say so.
        let is_done = reason == "postcopyFailed" || (has_left && lifecycle == Lifecycle::Running && !is_apart(reason));
        incoming.until = is_done.then(|| incoming.until.unwrap_or(now + SOURCE_LIMIT));
        incoming.first = incoming.first.or(id);
        // Nothing may have been read between the end of the first domain and its return.
        incoming.returns |= (id.is_some() && incoming.first != id) || is_apart(reason);
        if !incoming.seen {
            (incoming.seen, incoming.next) = (true, now);
            tracing::info!("the domain of the other launcher arrives");
        }
        if let Some(report) = &mut self.state.published.migration
            && report.step() == MigrationStep::Prepared
        {
            report.set_step(MigrationStep::Copying);
        }
    }

    /// Records that the guest runs here before its memory has come.
    fn note_post_copy(&mut self, reason: &str) {
        if !is_apart(reason) || self.has_left_its_memory() || self.incoming().is_none() {
            return;
        }
        if let Some(report) = &mut self.state.published.migration {
            report.set_mode(MigrationMode::PostCopy);
            report.set_step(MigrationStep::Copying);
            let record = MigrationRecord::of(report, Direction::In, false);
            self.effects.push(Effect::SaveMigration(Box::new(record), ChannelMode::Incoming));
        }
    }

    /// Returns true if the guest has left its memory behind: the source never runs it again.
    fn has_left_its_memory(&self) -> bool {
        self.state.published.migration.as_ref().is_some_and(|report| report.mode() == MigrationMode::PostCopy)
    }

    /// Decides without the source.
    fn decide_alone(&mut self) {
        let is_broken = is_apart(&self.state.published.reason);
        let Some(incoming) = self.incoming() else { return };
        if !incoming.seen {
            self.fail_arrival("the domain has not come again for post-copy");
        } else if is_broken {
            tracing::error!("the connection of post-copy is broken, the guest is lost");
            self.kill(Vec::new());
        } else {
            tracing::warn!("the source is silent, and all of the guest is here");
            self.begin_release(None);
        }
    }

    /// Decides on a domain that has ended or is gone. Returns false if no migration concerns it.
    pub(super) fn arrival_ended(&mut self) -> bool {
        let (until, is_lost) = (self.now + RETURN_LIMIT, self.has_left_its_memory());
        let Some(incoming) = self.incoming() else { return false };
        match incoming.step {
            // It was here, and its guest was released: its end is that of the VMI.
            InStep::Releasing => {
                let releases = std::mem::take(&mut incoming.releases);
                self.state.job = None;
                self.state.stage = Stage::Live;
                self.answer_all(releases, &Err(RequestError::Ended));
                false
            }
            InStep::Waiting if incoming.seen && incoming.may_return() => {
                (incoming.seen, incoming.returns, incoming.until) = (false, true, Some(until));
                tracing::info!("the domain has not arrived, waiting for its return with post-copy");
                self.state.stage = Stage::Waiting;
                let published = &mut self.state.published;
                published.set_lifecycle(Lifecycle::NoDomain);
                published.reason.clear();
                if let Some(report) = &mut published.migration {
                    report.set_step(MigrationStep::Prepared);
                }
                true
            }
            InStep::Waiting if incoming.seen => {
                self.fail_arrival(if is_lost { LOST } else { "the domain has not arrived" });
                true
            }
            _ => true,
        }
    }

    /// Ends a migration after which nothing of the domain is left here.
    fn fail_arrival(&mut self, failure: &str) {
        let Some(Job::MigrationIn(incoming)) = self.state.job.take_if(|job| matches!(job, Job::MigrationIn(_))) else {
            return;
        };
        tracing::warn!(failure, "the domain has not moved here");
        let end = self.state.nanoseconds(self.now);
        if let Some(report) = &mut self.state.published.migration {
            report.set_step(MigrationStep::NotMoved);
            report.failure = failure.to_owned();
            report.aborted = incoming.aborted;
            report.end = end;
            let record = MigrationRecord::of(report, Direction::In, false);
            self.effects.push(Effect::SaveMigration(Box::new(record), ChannelMode::Settled));
        }
        self.answer_all(incoming.requests, &Err(RequestError::Ending));
        self.answer_all(incoming.releases, &Ok(false));
        self.state.published.set_lifecycle(Lifecycle::NoDomain);
        self.state.published.reason.clear();
        self.end();
    }

    /// Decides on a release: the source's domain has ended.
    pub(super) fn release(&mut self, id: RequestId, paused: bool) {
        let moved = |report: &MigrationReport| report.step() == MigrationStep::Moved;
        let connected = self.state.link == Link::Up;
        match &mut self.state.job {
            Some(Job::MigrationIn(incoming)) => match incoming.step {
                InStep::Releasing => incoming.releases.push(id),
                InStep::Waiting if !connected => self.answer(id, Err(disconnected())),
                InStep::Waiting => {
                    incoming.paused = paused;
                    self.read_then(Some(AfterRead::Arrived(id)));
                }
                _ => self.answer(id, Ok(false)),
            },
            // The answer to an earlier release was lost.
            _ => {
                let is_here = self.state.published.migration.as_ref().is_some_and(moved);
                self.answer(id, Ok(is_here && self.state.stage == Stage::Live));
            }
        }
    }

    /// Decides on a release, when the domain was read.
    pub(super) fn arrived(&mut self, id: RequestId) {
        let is_known = self.state.reading.is_fresh;
        let (lifecycle, reason) = (self.state.published.lifecycle(), self.state.published.reason.clone());
        let Some(incoming) = self.incoming() else { return self.release(id, false) };
        match lifecycle {
            _ if !is_known => self.answer(id, Err(disconnected())),
            _ if matches!(incoming.step, InStep::Releasing) => incoming.releases.push(id),
            _ if !incoming.seen => self.answer(id, Ok(false)),
            // Some of its memory is still at the source.
            _ if is_apart(&reason) => self.answer(id, Err(RequestError::Arriving)),
            // libvirt has completed the arrival. Before that the reason is `migration`.
            Lifecycle::Running => self.begin_release(Some(id)),
            Lifecycle::Paused if reason == "user" => self.begin_release(Some(id)),
            _ => self.answer(id, Err(RequestError::Arriving)),
        }
    }

    fn begin_release(&mut self, id: Option<RequestId>) {
        let Some(incoming) = self.incoming() else { return };
        incoming.step = InStep::Releasing;
        incoming.releases.extend(id);
        let paused = incoming.paused;
        if let Some(report) = &self.state.published.migration {
            let record = MigrationRecord::of(report, Direction::In, paused);
            let record = MigrationRecord { step: MigrationStep::Releasing.into(), ..record };
            self.effects.push(Effect::SaveMigration(Box::new(record), ChannelMode::Incoming));
        }
        self.run_arrived();
    }

    /// Lets the guest run that has arrived, or ends the migration if it runs or stays paused.
    fn run_arrived(&mut self) {
        let (now, connected) = (self.now, self.has_read());
        let lifecycle = self.state.published.lifecycle();
        let Some(incoming) = self.incoming() else { return };
        incoming.next = now + INTERVAL;
        if !connected || !incoming.seen {
            return;
        }
        if lifecycle == Lifecycle::Running || (incoming.paused && lifecycle == Lifecycle::Paused) {
            return self.settle_here();
        }
        incoming.calling = true;
        self.effects.push(Effect::RunAfterMigration);
    }

    /// Decides on the guest that was resumed.
    pub(super) fn arrived_runs(&mut self, result: Result<(), HypervisorError>) {
        let Some(incoming) = self.incoming() else { return };
        match result {
            Ok(()) => self.read_then(Some(AfterRead::Resumed)),
            Err(error) => {
                incoming.calling = false;
                tracing::warn!(%error, "cannot resume the guest that has arrived yet");
            }
        }
    }

    /// Decides on the guest that was resumed, when it was read.
    pub(super) fn arrived_resumed(&mut self) {
        if let Some(incoming) = self.incoming() {
            incoming.calling = false;
            self.run_arrived();
        }
    }

    /// Ends a migration after which the domain is this launcher's.
    fn settle_here(&mut self) {
        let Some(Job::MigrationIn(incoming)) = self.state.job.take_if(|job| matches!(job, Job::MigrationIn(_))) else {
            return;
        };
        tracing::info!(paused = incoming.paused, "the domain has moved here");
        self.state.adopting = false;
        self.state.published.items.clear();
        let end = self.state.nanoseconds(self.now);
        if let Some(report) = &mut self.state.published.migration {
            report.set_step(MigrationStep::Moved);
            report.end = end;
            let record = MigrationRecord::of(report, Direction::In, incoming.paused);
            self.effects.push(Effect::SaveMigration(Box::new(record), ChannelMode::Settled));
        }
        self.state.clock_is_late = !incoming.paused;
        self.set_late_clock();
        self.answer_all(incoming.requests, &Ok(false));
        self.answer_all(incoming.releases, &Ok(true));
    }

    /// Ends what has arrived.
    pub(super) fn abort_incoming(&mut self, failure: &str) -> Result<(), RequestError> {
        let Some(incoming) = self.incoming() else { return Ok(()) };
        if matches!(incoming.step, InStep::Releasing) {
            return Err(RequestError::MigrationEnded(incoming.migration.clone()));
        }
        incoming.aborted = true;
        if incoming.seen {
            self.kill(Vec::new());
        } else {
            self.fail_arrival(failure);
        }
        Ok(())
    }

    /// Decides on a request to end the domain that arrives. Returns false if it is to be decided as for any domain.
    pub(super) fn end_incoming_domain(&mut self, id: RequestId, action: Action) -> bool {
        let Some(incoming) = self.incoming() else { return false };
        if matches!(incoming.step, InStep::Releasing) {
            let Some(Job::MigrationIn(incoming)) = self.state.job.take() else { return false };
            self.answer_all(incoming.releases, &Err(RequestError::Ending));
            return false;
        }
        if incoming.seen {
            self.kill(vec![id]);
            return true;
        }
        let is_terminating = matches!(action, Action::Terminate { .. });
        self.fail_arrival("the launcher was stopped");
        // Nothing ran here, so virt-handler has nothing to record.
        self.state.finished |= is_terminating;
        self.answer(id, Ok(false));
        true
    }
}
