//! The job of a migration to another launcher.
//!
//! ```text
//!   Opening -> Comparing -> Copying -> ...
//!   Copying -> Settling -> (the domain has ended)  Releasing -> moved
//!      |          ^   +--> (the guest runs)        not moved
//!      v          |   +--> (it stands still)       Restoring -> Settling
//!   Watching -----+
//! ```
//! Copying also goes to Releasing as soon as libvirt has decided that the guest has left and QEMU was ended, before libvirt says so.
//!
//! `compare.rs` has the comparison of images, `post_copy.rs` the way on after the time limit, if post-copy is allowed; `limits.rs` has
//! the limits, `abort.rs` the abort, `end.rs` the end.
//!
//! A call that ends without result, and a restarted worker, watch libvirt's job until it has ended. Only the state of the domain
//! decides then: while it exists here, the guest runs here, and once it has ended, the target may run it.

mod abort;
mod compare;
mod end;
mod limits;
mod post_copy;

use std::{sync::Arc, time::Duration};

use protocol::{Lifecycle, MigrateRequest, MigrationMode, MigrationStep};
use tokio::time::Instant;

use self::{limits::Limit, post_copy::PostCopy};
use super::{ABORTED, EndRequest, INTERVAL, Steps, WAITING};
use crate::{
    domain::parse::DomainConfig,
    engine::model::{
        Action, Base, BaseImage, ChannelMode, DomainCall, JobInput, Link, MigrationEnd, MigrationLimits,
        MigrationRecord, RequestError, RequestId, Stage, Work, base_images, copied_disks,
    },
    hypervisor::{HypervisorError, MigrateWay, Progress},
};

/// Failure of libvirt's call, in the words of KubeVirt, which clients match.
const CALL_FAILED: &str = "Live migration failed error encountered during MigrateToURI3 libvirt api call";

/// A migration to another launcher.
#[derive(Clone, Debug)]
pub(crate) struct MigrationSource {
    /// The request; after a restart of the worker only its name and its limits are known.
    request: Arc<MigrateRequest>,
    /// The user has paused the guest.
    was_paused: bool,
    /// Device names of the disks that are copied.
    copied: Vec<String>,
    /// Images over which these are overlays.
    images: Vec<BaseImage>,
    step: Step,
    /// Time of the begin.
    began: Instant,
    /// Time of the next read of the progress or of the next attempt.
    next: Instant,
    /// A call of this job is in progress.
    calling: bool,
    /// Bytes that remained at the last progress, and its time.
    progress: (u64, Instant),
    /// Size of the disks that are copied.
    disks: u64,
    /// The longest downtime that was set, in milliseconds.
    pub(crate) downtime: u64,
    /// Since when memory is copied again that has changed.
    repeats_since: Option<Instant>,
    /// An abort is in progress.
    aborting: bool,
    /// The abort is repeated: libvirt could not carry it out yet.
    abort_again: bool,
    /// Reason of an abort.
    abort: Option<String>,
    /// Error of libvirt's call.
    failure: String,
    /// Reason with which the domain has ended here.
    ended: Option<&'static str>,
    /// The domain was to be destroyed: no guest is released at the target.
    killed: bool,
    /// How far post-copy has come.
    post_copy: PostCopy,
    /// Requests to end the guest that follow.
    then: Vec<EndRequest>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Step {
    /// Writes the record and opens the channels. Requests wait for it.
    Opening { requests: Vec<RequestId> },
    /// The images beneath the disks are compared with those of the target.
    Comparing,
    /// libvirt's call is in progress.
    Copying,
    /// The call has ended without result, or a former worker made it: libvirt's job may go on.
    Watching,
    /// The job has ended: reads the domain.
    Settling,
    /// Lets the guest run again.
    Restoring,
    /// Asks the target for a guest in post-copy whose connection is broken, until the time limit.
    Asking { until: Instant },
    /// The domain has ended here: the target may run the guest. A guest that may not have arrived is released until then.
    Releasing { until: Instant },
}

/// Returns why this domain cannot move. QEMU 10 aborts under emulation when it looks for changed pages of a plugged memory device
/// that is larger than the memory at boot: `physical_memory_sync_dirty_bitmap` takes offsets within the device for addresses.
fn obstacle(domain: &DomainConfig) -> Option<&'static str> {
    let device = domain.memory_device.as_ref().filter(|device| domain.software_emulation && device.current > 0)?;
    (device.size > domain.memory.unwrap_or(0)).then_some(
        "under software emulation QEMU cannot move a guest that can have more plugged memory than it has booted with",
    )
}

impl MigrationSource {
    fn new(request: Arc<MigrateRequest>, step: Step, now: Instant) -> Self {
        Self {
            request,
            was_paused: false,
            copied: Vec::new(),
            images: Vec::new(),
            step,
            began: now,
            next: now,
            calling: false,
            progress: (u64::MAX, now),
            disks: 0,
            downtime: 0,
            repeats_since: None,
            aborting: false,
            abort_again: false,
            abort: None,
            failure: String::new(),
            ended: None,
            killed: false,
            post_copy: PostCopy::None,
            then: Vec::new(),
        }
    }

    /// Returns the job of a record. It does not switch to post-copy: too little is known for a second job of libvirt.
    pub(crate) fn adopted(record: &MigrationRecord, base: &Base) -> Self {
        let limits = record.limits.unwrap_or_default();
        // libvirt's job may be one that can switch, from which the guest must not leave before it does.
        let may_leave = record.limits.is_some() && !limits.post_copy;
        let request = MigrateRequest {
            migration: record.migration.clone(),
            progress_timeout: limits.progress_timeout,
            completion_timeout_per_gb: limits.completion_timeout_per_gb,
            allow_workload_disruption: limits.allow_workload_disruption && may_leave,
            max_downtime_ms: limits.max_downtime_ms,
            ..MigrateRequest::default()
        };
        let age = Duration::from_nanos(base.nanoseconds().saturating_sub(record.begin));
        let began = base.now.checked_sub(age).unwrap_or(base.now);
        // Otherwise the former worker has limited the downtime.
        let downtime = if may_leave { 0 } else { u64::MAX };
        let new = Self::new(Arc::new(request), Step::Watching, base.now);
        Self { was_paused: record.paused, downtime, began, ..new }
    }

    /// Begins to move the domain. `None` if it cannot move, which the published state reports.
    pub(crate) fn begin(
        base: &mut Base,
        id: RequestId,
        request: Arc<MigrateRequest>,
    ) -> Result<Option<Self>, RequestError> {
        let lifecycle = base.published.lifecycle();
        if base.stage != Stage::Live || !matches!(lifecycle, Lifecycle::Running | Lifecycle::Paused) {
            return Err(RequestError::NoDomain);
        }
        base.check_link()?;
        if let Some(failure) = obstacle(&base.active) {
            tracing::warn!(migration = request.migration, failure, "the domain cannot move");
            base.published.migration = Some(base.new_report(&request.migration, MigrationStep::NotMoved));
            base.publish_failure(failure.to_owned(), false);
            base.publish_step(MigrationStep::NotMoved, MigrationEnd::Source, false, ChannelMode::Closed);
            base.answer(id, Ok(false));
            return Ok(None);
        }
        let copied = copied_disks(&base.active, &base.own_images, &request.copied_volumes)?;
        let images = base_images(&base.active, &copied, &base.container_disks);
        let published = &base.published;
        // libvirt's reason until a guest that continues from saved memory runs.
        let is_restored = published.reason == "migration" && published.memory_restore.is_some();
        let was_paused = lifecycle == Lifecycle::Paused && (published.reason == "user" || is_restored);
        tracing::info!(migration = request.migration, disks = ?copied, "moving the domain to another launcher");
        let report = base.new_report(&request.migration, MigrationStep::Copying);
        let record = MigrationRecord {
            limits: Some(MigrationLimits::of(&request)),
            ..MigrationRecord::of(&report, MigrationEnd::Source, was_paused)
        };
        base.work_for(Self::NAME, Work::OpenMigration(Box::new(record), ChannelMode::Source));
        let new = Self::new(request, Step::Opening { requests: vec![id] }, base.now);
        Ok(Some(Self { copied, images, was_paused, ..new }))
    }

    /// Returns the name of the migration.
    pub(crate) fn migration(&self) -> &str {
        &self.request.migration
    }

    /// Answers a repeated request, now or when the migration has begun.
    pub(crate) fn repeat(&mut self, base: &mut Base, id: RequestId) {
        match &mut self.step {
            Step::Opening { requests } => requests.push(id),
            _ => base.answer(id, Ok(false)),
        }
    }

    fn on_opened(self, base: &mut Base, requests: Vec<RequestId>, result: Result<(), RequestError>) -> Option<Self> {
        if let Err(error) = result {
            base.answer_all(requests, &Err(error));
            base.act_later(self.then);
            return None;
        }
        base.published.migration = Some(base.new_report(self.migration(), MigrationStep::Copying));
        base.answer_all(requests, &Ok(false));
        Some(if self.images.is_empty() { self.copy(base) } else { self.compare(base) })
    }

    fn copy(mut self, base: &mut Base) -> Self {
        self.step = Step::Copying;
        (self.began, self.progress.1, self.next) = (base.now, base.now, base.now + INTERVAL);
        base.work_for(Self::NAME, Work::AwaitDeparture);
        self.limit_downtime(base, 0);
        self.call_migrate(base, MigrateWay::PreCopy);
        self
    }

    fn call_migrate(&self, base: &mut Base, way: MigrateWay) {
        let (request, copied) = (self.request.clone(), self.copied.clone());
        base.call_for(Self::NAME, DomainCall::Migrate { request, copied, way });
    }

    /// Decides on the end of libvirt's call.
    fn on_migrated(mut self, base: &mut Base, result: Result<(), HypervisorError>) -> Option<Self> {
        // The progress does not matter any more if it is being read.
        self.calling = false;
        self.step = Step::Settling;
        if let Err(error) = result {
            tracing::warn!(%error, "libvirt's migration has failed");
            if error.is_transient() {
                // libvirt's job may go on if its answer is lost.
                self.step = Step::Watching;
            }
            self.failure = match &error {
                HypervisorError::Libvirt { .. } => format!("{CALL_FAILED}: {error}"),
                _ => error.to_string(),
            };
        }
        self.advance_now(base)
    }

    fn advance_now(mut self, base: &mut Base) -> Option<Self> {
        self.next = base.now;
        Some(self.advance(base))
    }

    /// Continues when the time of the next call has come.
    fn advance(mut self, base: &mut Base) -> Self {
        if self.calling || self.next > base.now {
            return self;
        }
        self.next = base.now + INTERVAL;
        if self.has_broken_job(base.now) {
            self.step = Step::Settling;
        }
        self.repeat_abort(base);
        match &self.step {
            Step::Opening { .. } | Step::Comparing => return self,
            Step::Releasing { .. } | Step::Asking { .. } => {
                let (migration, paused) = (self.migration().to_owned(), self.was_paused);
                base.work_for(Self::NAME, Work::Release { migration, paused });
            }
            _ if base.link != Link::Up => return self,
            Step::Copying if self.post_copy == PostCopy::Ready && self.abort.is_none() => {
                base.call_for(Self::NAME, DomainCall::StartPostCopy);
            }
            Step::Copying | Step::Watching => base.call_for(Self::NAME, DomainCall::ReadProgress),
            Step::Restoring => base.call_for(Self::NAME, DomainCall::Resume),
            Step::Settling => base.read_for(Self::NAME),
        }
        self.calling = true;
        self
    }

    /// Decides on the progress of libvirt's job.
    fn on_progress(mut self, base: &mut Base, result: Result<Option<Progress>, HypervisorError>) -> Option<Self> {
        self.calling = false;
        match result {
            Ok(Some(progress)) => {
                self.advance_progress(&progress, base.now);
                // The job that can switch does not end by itself.
                if self.post_copy != PostCopy::Ready {
                    self.limit_downtime(base, progress.iteration);
                }
                publish_progress(base, &progress);
                self.check_limits(base);
            }
            Err(error) if error.is_transient() => tracing::debug!(%error, "cannot read the progress of the migration"),
            // There is no job, or no running domain.
            Ok(None) | Err(_) if self.step == Step::Watching => {
                self.step = Step::Settling;
                return self.advance_now(base);
            }
            // The call is about to return, or has not begun its job.
            Ok(None) | Err(_) => {}
        }
        Some(self)
    }

    /// Sets the longest downtime for this iteration.
    fn limit_downtime(&mut self, base: &mut Base, iteration: u64) {
        if let Some(milliseconds) = self.next_downtime(iteration, base.now) {
            base.call(DomainCall::SetMaxDowntime(milliseconds));
        }
    }

    fn check_limits(&mut self, base: &mut Base) {
        if self.aborting || self.abort.is_some() {
            return;
        }
        // A restarted worker has not read the domain yet.
        let Some(memory) = base.active.memory_requested() else { return };
        let reason = match self.limit(memory, base.migration_mode(), base.now) {
            None => return,
            Some(Limit::PostCopy) => return self.prefer_post_copy(base),
            Some(Limit::Pause) => {
                tracing::warn!("the migration takes too long, pausing the guest");
                base.publish_mode(MigrationMode::PausedCopy);
                return base.call_for(Self::NAME, DomainCall::Pause);
            }
            Some(Limit::Stuck(seconds)) => {
                format!("Live migration stuck for {seconds} seconds and has been aborted")
            }
            Some(Limit::TooLong(seconds)) => {
                format!("Live migration is not completed after {seconds} seconds and has been aborted")
            }
        };
        tracing::warn!(reason, "aborting the migration");
        self.abort(base, reason);
    }

    /// Returns true if the domain is here and can be destroyed.
    fn has_domain(&self) -> bool {
        matches!(self.step, Step::Copying | Step::Watching | Step::Restoring | Step::Asking { .. })
    }
}

impl Steps for MigrationSource {
    fn take(mut self, base: &mut Base, input: JobInput) -> Option<Self> {
        match (&mut self.step, input) {
            (_, JobInput::Timer) => Some(self.advance(base)),
            (_, JobInput::Seen(_)) => Some(self.on_seen(base)),
            (_, JobInput::Gone(reason)) => Some(self.on_gone(base, reason)),
            (Step::Comparing, JobInput::Abort(id)) => {
                base.answer_abort(id, Ok(()));
                self.stop_comparing(base)
            }
            (_, JobInput::Abort(id)) => Some(self.on_abort(base, id)),
            (_, JobInput::MigrationAborted(result)) => Some(self.on_aborted(base, result)),
            (_, JobInput::Paused(Err(error))) => {
                tracing::warn!(%error, "cannot pause the guest");
                if !matches!(self.step, Step::Releasing { .. }) {
                    base.publish_mode(MigrationMode::PreCopy);
                }
                Some(self)
            }
            (Step::Opening { requests }, JobInput::MigrationOpened(result)) => {
                let requests = std::mem::take(requests);
                self.on_opened(base, requests, result)
            }
            (Step::Comparing, JobInput::ImagesCompared { migration, result }) => {
                self.on_compared(base, &migration, result)
            }
            (Step::Copying, JobInput::Migrated(result)) => self.on_migrated(base, result),
            (Step::Copying, JobInput::PostCopyStarted(result)) => Some(self.on_post_copy_started(base, result)),
            (Step::Copying | Step::Watching, JobInput::ProgressRead(result)) => self.on_progress(base, result),
            (Step::Copying | Step::Watching | Step::Settling, JobInput::Departed(result)) if !self.killed => {
                self.on_departed(base, result)
            }
            (Step::Settling, JobInput::Read) => self.on_settled(base),
            (Step::Restoring, JobInput::Resumed(result)) => self.on_restored(base, result),
            (Step::Asking { until }, JobInput::Released(result)) => {
                let until = *until;
                Some(self.on_asked(base, until, result))
            }
            (Step::Releasing { until }, JobInput::Released(result)) => {
                let until = *until;
                self.on_released(base, until, result)
            }
            // Late.
            (
                _,
                JobInput::Read
                | JobInput::MigrationOpened(_)
                | JobInput::ImagesCompared { .. }
                | JobInput::Migrated(_)
                | JobInput::PostCopyStarted(_)
                | JobInput::ProgressRead(_)
                | JobInput::Departed(_)
                | JobInput::Resumed(_)
                | JobInput::Released(_)
                | JobInput::Paused(Ok(())),
            ) => Some(self),
            (_, JobInput::Connected | results_of!(start sync shutdown dump save prepared served)) => Some(self),
        }
    }

    fn progress(&self) -> &'static str {
        match self.step {
            Step::Opening { .. } => "opening its channels",
            Step::Comparing => "comparing the images of its disks",
            Step::Copying | Step::Watching => "copying the domain",
            Step::Settling => "looking for the domain",
            Step::Asking { .. } => "asking the target for the guest",
            Step::Restoring => "resuming the guest",
            Step::Releasing { .. } => "releasing the guest at the target",
        }
    }

    fn wake(&self) -> Option<Instant> {
        (!self.calling && !matches!(self.step, Step::Opening { .. } | Step::Comparing)).then_some(self.next)
    }

    /// A domain that leaves does not change.
    fn check_sync(&self) -> Result<(), RequestError> {
        Err(self.conflict())
    }

    fn end(self, base: &mut Base) -> Option<Self> {
        self.end_comparing(base);
        if let Step::Opening { requests } = self.step {
            base.answer_all(requests, &Err(RequestError::Ended));
        }
        base.answer_all(self.then.into_iter().map(|(id, _)| id).collect(), &Ok(false));
        None
    }

    fn end_domain(mut self, base: &mut Base, request: EndRequest) -> (Option<Self>, Option<EndRequest>) {
        let (id, action) = request;
        if self.step == Step::Comparing {
            return (self.stop_comparing(base), Some(request));
        }
        if action == Action::Kill && self.has_domain() {
            self.killed = true;
            base.kill(vec![id]);
        } else if self.then.len() >= WAITING {
            base.answer(id, Err(RequestError::Busy));
        } else {
            self.then.push(request);
            match self.step {
                // virt-handler gives the guest up here: there is nothing to end.
                Step::Releasing { .. } if action == Action::Kill => {
                    return (self.lose(base, "the launcher was stopped before the target confirmed"), None);
                }
                Step::Copying | Step::Watching => self.abort(base, ABORTED.to_owned()),
                _ => {}
            }
        }
        (Some(self), None)
    }

    fn keeps_end(&self) -> bool {
        !matches!(self.step, Step::Opening { .. } | Step::Comparing)
    }
}

fn publish_progress(base: &mut Base, progress: &Progress) {
    if let Some(report) = &mut base.published.migration {
        report.total = progress.total;
        report.processed = progress.processed;
        report.remaining = progress.remaining;
        report.rate = progress.rate;
        report.dirty_rate = progress.dirty_rate;
        report.iteration = progress.iteration;
        report.downtime_ms = progress.downtime_ms;
    }
}
