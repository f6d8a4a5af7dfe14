//! The job of a migration to another launcher.
//!
//! ```text
//!   Opening -> Copying -> Settling -> (the domain has ended)  Releasing -> moved
//!                 |          ^   +--> (the guest runs)        not moved
//!                 v          |   +--> (it stands still)       Restoring -> Settling
//!              Watching -----+
//! ```
//! Copying also goes to Releasing as soon as libvirt has decided that the guest has left and QEMU was ended, before libvirt says so.
//!
//! `post_copy.rs` has the way on after the time limit, if post-copy is allowed.
//!
//! A call that ends without result, and a restarted worker, watch libvirt's job until it has ended. Only the state of the domain
//! decides then: while it exists here, the guest runs here, and once it has ended, the target may run it.

use std::{sync::Arc, time::Duration};

use protocol::{Lifecycle, MigrateRequest, MigrationMode, MigrationReport, MigrationStep};

use super::{Turn, requests::disconnected};
use crate::{
    domain::parse::DomainConfig,
    engine::model::{
        Action, AfterRead, ChannelMode, Direction, Effect, Job, JobName, Limit, Link, MigrationOut, MigrationRecord,
        OutStep, PostCopy, RequestError, RequestId, Stage, copied_disks,
    },
    hypervisor::{HypervisorError, MigrateWay, Progress},
};

/// Interval of reads of the progress, and pause between attempts.
pub(super) const INTERVAL: Duration = Duration::from_secs(1);
/// Time for which a guest is released that may not have arrived, since its domain has not ended by the migration.
const UNCERTAIN: Duration = Duration::from_secs(30);
/// Failure of an aborted migration.
const ABORTED: &str = "Live migration has been aborted";
/// The reason of a domain that has ended by a migration.
const MIGRATED: &str = "migrated";

/// Returns why this domain cannot move. QEMU 10 aborts under emulation when it looks for changed pages of a plugged memory device
/// that is larger than the memory at boot: `physical_memory_sync_dirty_bitmap` takes offsets within the device for addresses.
fn obstacle(domain: &DomainConfig) -> Option<&'static str> {
    let device = domain.memory_device.as_ref().filter(|device| domain.software_emulation && device.current > 0)?;
    (device.size > domain.memory.unwrap_or(0)).then_some(
        "under software emulation QEMU cannot move a guest that can have more plugged memory than it has booted with",
    )
}

impl Turn {
    pub(super) fn outgoing(&mut self) -> Option<&mut MigrationOut> {
        match &mut self.state.job {
            Some(Job::MigrationOut(out)) => Some(out),
            _ => None,
        }
    }

    /// Decides on a request to move the domain.
    pub(super) fn migrate(&mut self, id: RequestId, request: Arc<MigrateRequest>) {
        if let Some(out) = self.outgoing()
            && out.request.migration == request.migration
        {
            if out.step == OutStep::Opening {
                out.requests.push(id);
                return;
            }
            return self.answer(id, Ok(false));
        }
        if self.state.published.migration.as_ref().is_some_and(|known| known.migration == request.migration) {
            return self.answer(id, Ok(false));
        }
        if let Err(error) = self.begin_migration(id, request) {
            self.answer(id, Err(error));
        }
    }

    fn begin_migration(&mut self, id: RequestId, request: Arc<MigrateRequest>) -> Result<(), RequestError> {
        if let Some(job) = &self.state.job {
            return Err(RequestError::Conflict { job: job.name(), progress: job.progress() });
        }
        if self.state.sync.is_some() || !self.state.actions.is_empty() {
            return Err(RequestError::Conflict { job: JobName::Sync, progress: "waiting for its end" });
        }
        let lifecycle = self.state.published.lifecycle();
        if self.state.stage != Stage::Live || !matches!(lifecycle, Lifecycle::Running | Lifecycle::Paused) {
            return Err(RequestError::NoDomain);
        }
        if self.state.link != Link::Up {
            return Err(disconnected());
        }
        if let Some(failure) = obstacle(&self.state.active) {
            tracing::warn!(migration = request.migration, failure, "the domain cannot move");
            let now = self.state.nanoseconds(self.now);
            let report = MigrationReport {
                migration: request.migration.clone(),
                step: MigrationStep::NotMoved.into(),
                failure: failure.to_owned(),
                begin: now,
                end: now,
                ..MigrationReport::default()
            };
            let record = MigrationRecord::of(&report, Direction::Out, false);
            self.state.published.migration = Some(report);
            self.effects.push(Effect::SaveMigration(Box::new(record), ChannelMode::Closed));
            self.answer(id, Ok(false));
            return Ok(());
        }
        let mut out = MigrationOut::new(request, vec![id], self.now);
        out.copied = copied_disks(&self.state.active, &self.state.own_images, &out.request.copied_volumes)?;
        out.was_paused = lifecycle == Lifecycle::Paused && self.state.published.reason == "user";
        tracing::info!(migration = out.request.migration, disks = ?out.copied, "moving the domain to another launcher");
        let report = MigrationReport {
            migration: out.request.migration.clone(),
            step: MigrationStep::Copying.into(),
            begin: self.state.nanoseconds(self.now),
            ..MigrationReport::default()
        };
        let record = MigrationRecord::of(&report, Direction::Out, out.was_paused);
        self.state.job = Some(Job::MigrationOut(Box::new(out)));
        self.effects.push(Effect::OpenMigration(Box::new(record), ChannelMode::Outgoing));
        Ok(())
    }

    /// Decides on the opened channels of a migration to another launcher.
    pub(super) fn outgoing_opened(&mut self, result: Result<(), RequestError>) {
        let (now, begin) = (self.now, self.state.nanoseconds(self.now));
        let Some(out) = self.outgoing().filter(|out| out.step == OutStep::Opening) else { return };
        let requests = std::mem::take(&mut out.requests);
        if let Err(error) = result {
            let then = std::mem::take(&mut out.then);
            self.state.job = None;
            self.answer_all(requests, &Err(error));
            return self.act_all(then);
        }
        out.step = OutStep::Copying;
        (out.began, out.progress.1, out.next) = (now, now, now + INTERVAL);
        let (request, copied) = (out.request.clone(), out.copied.clone());
        self.state.published.migration = Some(MigrationReport {
            migration: request.migration.clone(),
            step: MigrationStep::Copying.into(),
            begin,
            ..MigrationReport::default()
        });
        self.effects.push(Effect::AwaitDeparture);
        self.limit_downtime(0);
        self.effects.push(Effect::Migrate { request, copied, way: MigrateWay::PreCopy });
        self.answer_all(requests, &Ok(false));
    }

    /// Decides on the end of libvirt's call.
    pub(super) fn migrated(&mut self, result: Result<(), HypervisorError>) {
        let Some(out) = self.outgoing().filter(|out| out.step == OutStep::Copying) else { return };
        // The progress does not matter any more if it is being read.
        out.calling = false;
        match result {
            Ok(()) => out.step = OutStep::Settling,
            Err(error) => {
                tracing::warn!(%error, "libvirt's migration has failed");
                // libvirt's job may go on if its answer is lost.
                out.step = if error.is_transient() { OutStep::Watching } else { OutStep::Settling };
                out.failure = error.to_string();
            }
        }
        self.settle_now();
    }

    /// Continues at once.
    fn settle_now(&mut self) {
        let now = self.now;
        if let Some(out) = self.outgoing() {
            out.next = now;
            self.continue_outgoing();
        }
    }

    /// Continues a migration whose time has come.
    pub(super) fn continue_outgoing(&mut self) {
        let now = self.now;
        let is_connected = self.state.link == Link::Up;
        let is_broken = self.has_broken_job();
        let Some(out) = self.outgoing().filter(|out| !out.calling && out.next <= now) else { return };
        out.next = now + INTERVAL;
        if is_broken {
            out.step = OutStep::Settling;
        }
        let effect = match out.step {
            OutStep::Opening => return,
            OutStep::Releasing | OutStep::Asking => Effect::Release { paused: out.was_paused },
            _ if !is_connected => return,
            OutStep::Copying if out.post_copy == PostCopy::Ready => Effect::StartPostCopy,
            OutStep::Copying | OutStep::Watching => Effect::ReadProgress,
            OutStep::Restoring => Effect::RunAfterMigration,
            OutStep::Settling => {
                out.calling = true;
                return self.read_then(Some(AfterRead::Settled));
            }
        };
        out.calling = true;
        self.effects.push(effect);
    }

    /// Decides on the progress of libvirt's job.
    pub(super) fn progress_read(&mut self, result: Result<Option<Progress>, HypervisorError>) {
        let now = self.now;
        let Some(out) = self.outgoing() else { return };
        if !matches!(out.step, OutStep::Copying | OutStep::Watching) {
            return;
        }
        out.calling = false;
        match result {
            Ok(Some(progress)) => {
                out.advance(&progress, now);
                self.publish_progress(&progress);
                self.check_limits();
            }
            Err(error) if error.is_transient() => tracing::debug!(%error, "cannot read the progress of the migration"),
            // There is no job, or no running domain.
            Ok(None) | Err(_) if out.step == OutStep::Watching => {
                out.step = OutStep::Settling;
                self.settle_now();
            }
            // The call is about to return, or has not begun its job.
            Ok(None) | Err(_) => {}
        }
    }

    fn publish_progress(&mut self, progress: &Progress) {
        self.limit_downtime(progress.iteration);
        if let Some(report) = &mut self.state.published.migration {
            report.total = progress.total;
            report.processed = progress.processed;
            report.remaining = progress.remaining;
            report.rate = progress.rate;
            report.dirty_rate = progress.dirty_rate;
            report.iteration = progress.iteration;
            report.downtime_ms = progress.downtime_ms;
        }
    }

    /// Sets the longest downtime for this iteration.
    fn limit_downtime(&mut self, iteration: u64) {
        if let Some(milliseconds) = self.outgoing().and_then(|out| out.next_downtime(iteration)) {
            self.effects.push(Effect::SetMaxDowntime(milliseconds));
        }
    }

    pub(super) fn check_limits(&mut self) {
        let memory = self.state.active.memory_requested().unwrap_or(0);
        let mode = self.state.published.migration.as_ref().map_or(MigrationMode::PreCopy, MigrationReport::mode);
        let now = self.now;
        let Some(out) = self.outgoing().filter(|out| !out.aborting && out.abort.is_none()) else { return };
        let reason = match out.limit(memory, mode, now) {
            None => return,
            Some(Limit::PostCopy) => return self.prefer_post_copy(),
            Some(Limit::Pause) => {
                tracing::warn!("the migration takes too long, pausing the guest");
                if let Some(report) = &mut self.state.published.migration {
                    report.set_mode(MigrationMode::PausedCopy);
                }
                self.effects.push(Effect::PauseForCopy);
                return;
            }
            Some(Limit::Stuck(seconds)) => {
                format!("Live migration stuck for {seconds} seconds and has been aborted")
            }
            Some(Limit::TooLong(seconds)) => {
                format!("Live migration is not completed after {seconds} seconds and has been aborted")
            }
        };
        tracing::warn!(reason, "aborting the migration");
        self.abort_outgoing(reason);
    }

    fn abort_outgoing(&mut self, reason: String) {
        let Some(out) = self.outgoing() else { return };
        out.abort = Some(reason);
        if !out.aborting {
            out.aborting = true;
            self.effects.push(Effect::AbortMigration);
        }
    }

    /// Decides on a guest that was paused so that the rest can be copied.
    pub(super) fn paused_for_copy(&mut self, result: Result<(), HypervisorError>) {
        if let Err(error) = result {
            tracing::warn!(%error, "cannot pause the guest");
            if let Some(report) = &mut self.state.published.migration
                && report.step() == MigrationStep::Copying
            {
                report.set_mode(MigrationMode::PreCopy);
            }
        }
    }

    /// Decides on a request to abort a migration.
    pub(super) fn abort_migration(&mut self, id: RequestId, migration: String) {
        let result = match &self.state.job {
            Some(Job::MigrationOut(out)) if out.request.migration == migration => match out.step {
                OutStep::Copying | OutStep::Watching => {
                    self.abort_outgoing(ABORTED.to_owned());
                    Ok(())
                }
                OutStep::Opening => Err(HypervisorError::Busy.into()),
                _ => Err(RequestError::MigrationEnded(migration)),
            },
            Some(Job::MigrationIn(incoming)) if incoming.migration == migration => self.abort_incoming(ABORTED),
            _ => match &self.state.published.migration {
                Some(known) if known.migration == migration && known.step() == MigrationStep::NotMoved => Ok(()),
                Some(known) if known.migration == migration => Err(RequestError::MigrationEnded(migration)),
                _ => Err(RequestError::NoMigration(migration)),
            },
        };
        if let Err(error) = &result
            && let Some(report) = &mut self.state.published.migration
        {
            report.abort_failure = error.to_string();
        }
        self.answer(id, result.map(|()| false));
    }

    /// Decides on the result of an abort.
    pub(super) fn migration_aborted(&mut self, result: Result<(), HypervisorError>) {
        let Some(out) = self.outgoing() else { return };
        out.aborting = false;
        if let Err(error) = result {
            tracing::warn!(%error, "cannot abort the migration");
            if out.post_copy == PostCopy::Wanted {
                out.post_copy = PostCopy::None;
                return;
            }
            // The migration goes on and may succeed.
            out.abort = None;
            if let Some(report) = &mut self.state.published.migration {
                report.abort_failure = format!("cannot abort the migration: {error}");
            }
        }
    }

    /// Keeps the end of a domain whose guest may have moved. Returns false if no migration concerns it.
    pub(super) fn left(&mut self, reason: &'static str) -> bool {
        let now = self.now;
        let Some(out) = self.outgoing().filter(|out| out.step != OutStep::Opening) else { return false };
        if out.step == OutStep::Releasing {
            return true;
        }
        let is_new = out.ended.replace(reason).is_none();
        if !matches!(out.step, OutStep::Copying | OutStep::Settling) {
            // libvirt's job has ended with the domain.
            out.step = OutStep::Settling;
            (out.calling, out.next) = (false, now);
        }
        if is_new && reason == "crashed" {
            self.effects.push(Effect::LogLastLines);
        }
        true
    }

    /// Decides on the domain after the end of libvirt's job, when it was read.
    pub(super) fn settled(&mut self) {
        let now = self.now;
        let is_known = self.state.reading.is_fresh;
        let (lifecycle, reason) = (self.state.published.lifecycle(), self.state.published.reason.clone());
        let Some(out) = self.outgoing().filter(|out| out.step == OutStep::Settling) else { return };
        out.calling = false;
        if !is_known {
            out.next = now + INTERVAL;
        } else if let Some(ended) = out.ended {
            if out.killed {
                let failure = std::mem::take(&mut out.failure);
                let is_lost = out.post_copy == PostCopy::Switched && !failure.is_empty();
                return self.lose(if is_lost { &failure } else { "the domain was destroyed" });
            }
            self.begin_outgoing_release(ended);
        } else if out.post_copy == PostCopy::Switched {
            self.hold();
        } else if lifecycle == Lifecycle::Paused && !out.was_paused && reason != "ioError" {
            out.step = OutStep::Restoring;
            self.settle_now();
        } else {
            self.stay();
        }
    }

    /// Decides on a QEMU that was ended since libvirt has decided that the guest has left. libvirt itself reports it later.
    pub(super) fn departed(&mut self, result: Result<(), String>) {
        let steps = [OutStep::Copying, OutStep::Watching, OutStep::Settling];
        let Some(out) = self.outgoing().filter(|out| steps.contains(&out.step) && !out.killed) else { return };
        match result {
            Ok(()) => {
                out.ended = Some(MIGRATED);
                self.begin_outgoing_release(MIGRATED);
            }
            Err(error) => tracing::warn!(error, "cannot end QEMU after the migration, waiting for libvirt"),
        }
    }

    /// Lets the target run the guest, whose QEMU has ended here.
    fn begin_outgoing_release(&mut self, reason: &str) {
        let now = self.now;
        let Some(out) = self.outgoing() else { return };
        (out.step, out.calling, out.release_until) = (OutStep::Releasing, false, now + UNCERTAIN);
        tracing::info!(reason, "the domain has ended here, releasing it at the target");
        let published = &mut self.state.published;
        published.set_lifecycle(Lifecycle::Paused);
        published.reason = "migration".into();
        self.step_outgoing(MigrationStep::Releasing);
        self.settle_now();
    }

    /// Decides on the guest that was resumed after a migration that has failed.
    pub(super) fn restored(&mut self, result: Result<(), HypervisorError>) {
        let now = self.now;
        let Some(out) = self.outgoing().filter(|out| out.step == OutStep::Restoring) else { return };
        out.calling = false;
        out.step = OutStep::Settling;
        match result {
            Ok(()) => self.settle_now(),
            Err(error) => {
                tracing::warn!(%error, "cannot resume the guest after the migration yet");
                out.next = now + INTERVAL;
            }
        }
    }

    /// Decides on the target's answer to the release.
    pub(super) fn released(&mut self, result: Result<bool, String>) {
        let now = self.now;
        let steps = [OutStep::Releasing, OutStep::Asking];
        let Some(out) = self.outgoing().filter(|out| steps.contains(&out.step)) else { return };
        out.calling = false;
        match result {
            result if out.step == OutStep::Asking => self.asked(result),
            Ok(true) => self.leave(),
            Ok(false) => self.lose("the domain has ended before it had arrived at the target"),
            Err(error) => {
                tracing::info!(error, "the target has not confirmed the release yet");
                let is_uncertain = out.ended != Some(MIGRATED);
                if is_uncertain && now >= out.release_until {
                    self.lose("the domain has ended during the migration");
                }
            }
        }
    }

    /// Publishes a step and its record.
    fn step_outgoing(&mut self, step: MigrationStep) {
        let end = self.state.nanoseconds(self.now);
        let Some(Job::MigrationOut(out)) = &self.state.job else { return };
        let Some(report) = &mut self.state.published.migration else { return };
        report.set_step(step);
        let ended = matches!(step, MigrationStep::Moved | MigrationStep::NotMoved);
        if ended {
            report.end = end;
        }
        let record = MigrationRecord::of(report, Direction::Out, out.was_paused);
        let mode = if ended { ChannelMode::Closed } else { ChannelMode::Outgoing };
        self.effects.push(Effect::SaveMigration(Box::new(record), mode));
    }

    /// Ends a migration after which the guest runs on here.
    fn stay(&mut self) {
        if self.begin_post_copy() {
            return;
        }
        let Some(out) = self.outgoing() else { return };
        let aborted = out.abort.is_some();
        let mut failure = out.abort.take().unwrap_or_else(|| std::mem::take(&mut out.failure));
        if failure.is_empty() {
            "the migration was interrupted".clone_into(&mut failure);
        }
        tracing::warn!(failure, "the domain has not moved");
        self.fail_report(failure, aborted);
        self.end_outgoing();
    }

    fn fail_report(&mut self, failure: String, aborted: bool) {
        if let Some(report) = &mut self.state.published.migration {
            report.failure = failure;
            report.aborted = aborted;
        }
        self.step_outgoing(MigrationStep::NotMoved);
    }

    fn end_outgoing(&mut self) {
        if let Some(Job::MigrationOut(out)) = self.state.job.take_if(|job| matches!(job, Job::MigrationOut(_))) {
            self.act_all(out.then);
        }
    }

    /// Ends a migration after which the guest runs at the target.
    fn leave(&mut self) {
        tracing::info!("the guest runs at the target");
        self.step_outgoing(MigrationStep::Moved);
        self.end_here(Lifecycle::Shutoff, MIGRATED);
    }

    /// Ends a migration after which the guest runs nowhere.
    fn lose(&mut self, failure: &str) {
        let Some(ended) = self.outgoing().map(|out| out.ended) else { return };
        self.fail_report(failure.to_owned(), false);
        self.end_here(Lifecycle::Shutoff, ended.filter(|reason| *reason != MIGRATED).unwrap_or("failed"));
    }

    fn end_here(&mut self, lifecycle: Lifecycle, reason: &str) {
        let out = match self.state.job.take_if(|job| matches!(job, Job::MigrationOut(_))) {
            Some(Job::MigrationOut(out)) => out,
            _ => return,
        };
        self.state.published.set_lifecycle(lifecycle);
        reason.clone_into(&mut self.state.published.reason);
        self.end();
        self.act_all(out.then);
    }

    fn act_all(&mut self, actions: Vec<(RequestId, Action)>) {
        for (id, action) in actions {
            self.act(id, action);
        }
    }

    /// Decides on a request to end a domain that moves. Returns false if it is to be decided without regard to the migration.
    pub(super) fn end_outgoing_domain(&mut self, id: RequestId, action: Action) -> bool {
        let Some(out) = self.outgoing() else { return false };
        if action == Action::Kill && out.step.has_domain() {
            out.killed = true;
            self.kill(vec![id]);
            return true;
        }
        if out.then.len() >= super::requests::WAITING {
            self.answer(id, Err(RequestError::Busy));
            return true;
        }
        match out.step {
            // virt-handler gives the guest up here: there is nothing to end.
            OutStep::Releasing if action == Action::Kill => {
                out.then.push((id, action));
                self.lose("the launcher was stopped before the target confirmed");
            }
            OutStep::Copying | OutStep::Watching => {
                out.then.push((id, action));
                self.abort_outgoing(ABORTED.to_owned());
            }
            _ => out.then.push((id, action)),
        }
        true
    }
}
