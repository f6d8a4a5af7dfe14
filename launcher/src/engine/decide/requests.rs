//! Requests: Hello, jobs, and actions on the domain and the guest.

use std::{sync::Arc, time::Duration};

use protocol::{Lifecycle, MemoryDump as DumpReport, MemoryFile, MigrateRequest, MigrationStep};

use super::State;
use crate::{
    engine::{
        jobs::{
            EndRequest, Job, WAITING, dump::MemoryDump, migration_source::MigrationSource,
            migration_target::MigrationTarget, save::MemorySave, shutdown::Shutdown,
        },
        model::{
            Action, DomainCall, Effect, GuestCall, JobInput, JobName, Looking, Next, Request, RequestError, RequestId,
            Stage, Wanted,
        },
    },
    hypervisor::{HypervisorError, RebootWay},
};

/// Limit of actions on the guest in progress.
const ACTIONS: usize = 4;
/// Longest wait of requests to end a domain that a former worker may have started.
const LOOK_DEADLINE: Duration = Duration::from_secs(10);

impl State {
    /// Decides on a request.
    pub(super) fn on_request(&mut self, id: RequestId, request: Request) {
        let begun = match request {
            Request::Hello { cache, allow_emulation } => return self.hello(id, cache, allow_emulation),
            Request::Sync(wanted) => return self.sync(vec![id], wanted),
            Request::DumpMemory { volume, file } => self.dump_memory(id, volume, file),
            Request::SaveMemory { volume, file } => self.save_memory(id, volume, file),
            Request::PrepareMigration { migration, wanted } => self.prepare_migration(id, migration, wanted),
            Request::Migrate(request) => self.migrate(id, request),
            Request::AbortMigration(migration) => return self.abort_migration(id, migration),
            Request::Release { paused } => return self.release(id, paused),
            Request::Act(action) => return self.act(id, action),
        };
        if let Err(error) = begun {
            self.base.answer(id, Err(error));
        }
    }

    fn hello(&mut self, id: RequestId, cache: Vec<protocol::CacheFile>, allow_emulation: bool) {
        if self.base.stage == Stage::Ended {
            return self.base.answer(id, Ok(false));
        }
        self.base.allow_emulation |= allow_emulation;
        let cache = (!self.base.cache_written).then_some(cache);
        self.base.effects.push(Effect::StartDaemon { cache, request: Some(id) });
    }

    /// Decides on the daemon's start, ahead of Hello if there is no request.
    pub(super) fn on_daemon_started(&mut self, request: Option<RequestId>, result: Result<(), RequestError>) {
        match (&result, request) {
            (Ok(()), Some(_)) => self.base.cache_written = true,
            (Ok(()), None) => self.base.cache_written = self.base.adopting,
            // Hello retries, and its answer holds the reason.
            (Err(error), None) => tracing::warn!(%error, "cannot start libvirt's daemon yet"),
            (Err(_), Some(_)) => {}
        }
        if let Some(id) = request {
            self.base.answer(id, result.map(|()| false));
        }
    }

    fn dump_memory(&mut self, id: RequestId, volume: String, file: String) -> Result<(), RequestError> {
        let is_same = |known: &DumpReport| known.volume == volume && known.file == file;
        if !self.base.published.memory_dump.as_ref().is_some_and(is_same) {
            self.check_slot()?;
            self.job = Some(MemoryDump::begin(&mut self.base, volume, file)?.into());
        }
        self.base.answer(id, Ok(false));
        Ok(())
    }

    fn save_memory(&mut self, id: RequestId, volume: String, file: String) -> Result<(), RequestError> {
        let is_same = |known: &MemoryFile| known.volume == volume && known.file == file;
        if !self.base.published.memory_save.as_ref().is_some_and(is_same) {
            self.check_slot()?;
            // The guest would run beside a complete file if it went on late.
            if !self.base.actions.is_empty() {
                return Err(RequestError::Conflict { job: JobName::Sync, progress: "waiting for its end" });
            }
            self.job = Some(MemorySave::begin(&mut self.base, volume, file)?.into());
        }
        self.base.answer(id, Ok(false));
        Ok(())
    }

    fn prepare_migration(&mut self, id: RequestId, migration: String, wanted: Arc<Wanted>) -> Result<(), RequestError> {
        let is_known = self.knows_migration(&migration);
        match &mut self.job {
            Some(Job::MigrationTarget(job)) if job.migration() == migration => job.repeat(&mut self.base, id, wanted),
            _ if is_known => self.base.answer(id, Ok(false)),
            _ => {
                self.base.check_vmi(&wanted)?;
                // Another migration replaces one that has not begun.
                if !matches!(&self.job, Some(Job::MigrationTarget(job)) if job.is_replaceable()) {
                    self.check_slot()?;
                }
                let job = MigrationTarget::begin(&mut self.base, id, migration, wanted)?;
                if let Some(Job::MigrationTarget(former)) = self.job.replace(job.into()) {
                    former.answer_releases(&mut self.base);
                }
            }
        }
        Ok(())
    }

    fn migrate(&mut self, id: RequestId, request: Arc<MigrateRequest>) -> Result<(), RequestError> {
        let is_known = self.knows_migration(&request.migration);
        match &mut self.job {
            Some(Job::MigrationSource(job)) if job.migration() == request.migration => job.repeat(&mut self.base, id),
            _ if is_known => self.base.answer(id, Ok(false)),
            _ => {
                self.check_slot()?;
                if !self.base.actions.is_empty() || self.is_syncing() {
                    return Err(RequestError::Conflict { job: JobName::Sync, progress: "waiting for its end" });
                }
                self.job = MigrationSource::begin(&mut self.base, id, request)?.map(Job::from);
            }
        }
        Ok(())
    }

    /// Reports that the published migration has this name.
    fn knows_migration(&self, migration: &str) -> bool {
        self.base.published.migration.as_ref().is_some_and(|known| known.migration == migration)
    }

    fn abort_migration(&mut self, id: RequestId, migration: String) {
        let is_in_progress = match &self.job {
            Some(Job::MigrationSource(job)) => job.migration() == migration,
            Some(Job::MigrationTarget(job)) => job.migration() == migration,
            _ => false,
        };
        if is_in_progress {
            return self.pass_to_slot(JobInput::Abort(id));
        }
        let result = match &self.base.published.migration {
            Some(known) if known.migration == migration && known.step() == MigrationStep::NotMoved => Ok(()),
            Some(known) if known.migration == migration => Err(RequestError::MigrationEnded(migration)),
            _ => Err(RequestError::NoMigration(migration)),
        };
        self.base.answer_abort(id, result);
    }

    /// Decides on a release: the source's domain has ended.
    fn release(&mut self, id: RequestId, paused: bool) {
        if let Some(Job::MigrationTarget(job)) = &mut self.job {
            return job.on_release(&mut self.base, id, paused);
        }
        // The answer to an earlier release was lost.
        let report = self.base.published.migration.as_ref();
        let is_here = report.is_some_and(|report| report.step() == MigrationStep::Moved);
        self.base.answer(id, Ok(is_here && self.base.stage == Stage::Live));
    }

    /// Decides on an action.
    pub(super) fn act(&mut self, id: RequestId, action: Action) {
        match action {
            Action::Finish => {
                self.base.finished |= self.base.stage == Stage::Ended;
                let ended = self.base.finished;
                self.base.answer(id, if ended { Ok(false) } else { Err(RequestError::NotEnded) });
            }
            Action::Shutdown { .. } | Action::Terminate { .. } | Action::Kill => self.end_domain(id, action),
            Action::Pause | Action::Unpause | Action::Reset | Action::SoftReboot => {
                if let Err(error) = self.act_on_guest(id, action) {
                    self.base.answer(id, Err(error));
                }
            }
        }
    }

    fn act_on_guest(&mut self, id: RequestId, action: Action) -> Result<(), RequestError> {
        if let Some(job) = self.job.as_ref().filter(|job| job.conflicts(action)) {
            return Err(job.conflict());
        }
        let published = &self.base.published;
        let lifecycle = published.lifecycle();
        let alive = matches!(
            lifecycle,
            Lifecycle::Running | Lifecycle::Paused | Lifecycle::PmSuspended | Lifecycle::ShuttingDown
        );
        if self.base.stage != Stage::Live || !alive {
            return Err(RequestError::NoDomain);
        }
        self.base.check_link()?;
        if self.base.actions.len() >= ACTIONS {
            return Err(RequestError::Busy);
        }
        let call = match action {
            Action::Pause if lifecycle == Lifecycle::Running => GuestCall::Suspend,
            Action::Unpause if lifecycle == Lifecycle::Paused => GuestCall::Resume,
            Action::Reset => GuestCall::Reset,
            Action::SoftReboot => GuestCall::Reboot(match (published.guest_agent_connected, published.acpi) {
                (true, _) => RebootWay::GuestAgent,
                (false, true) => RebootWay::Acpi,
                (false, false) => return Err(RequestError::NoWayToReboot),
            }),
            // The guest is paused, or runs, already.
            _ => {
                self.base.read_then(Next::Answer(id, Ok(false)));
                return Ok(());
            }
        };
        self.base.actions.insert(id, action);
        self.base.call(DomainCall::Act(id, call));
        Ok(())
    }

    /// Decides on the result of an action on the guest.
    pub(super) fn on_acted(&mut self, id: RequestId, result: Result<(), HypervisorError>) {
        let action = self.base.actions.remove(&id);
        if let Err(error) = result {
            return self.base.answer(id, Err(error.into()));
        }
        if action == Some(Action::Unpause) && self.base.published.guest_agent_connected {
            self.base.set_clock();
        }
        self.base.read_then(Next::Answer(id, Ok(false)));
    }

    /// Decides on a request to end the domain. A domain that a former worker may have started is looked for first: its guest
    /// has a grace period, too.
    fn end_domain(&mut self, id: RequestId, action: Action) {
        self.base.terminating |= matches!(action, Action::Terminate { .. });
        if self.base.stage != Stage::Waiting || !self.base.adopting || self.base.has_read() {
            return self.end_known_domain((id, action));
        }
        let until = self.base.now + LOOK_DEADLINE;
        let looking = self.base.looking.get_or_insert_with(|| Looking { until, then: Vec::new() });
        if looking.then.len() < WAITING {
            looking.then.push((id, action));
        } else {
            self.base.answer(id, Err(RequestError::Busy));
        }
    }

    /// Decides on the requests that have waited for a look at the domain.
    pub(super) fn on_looked(&mut self) {
        for request in self.base.looking.take().into_iter().flat_map(|looking| looking.then) {
            self.end_known_domain(request);
        }
    }

    /// Ends the domain, unless its job decides on it.
    fn end_known_domain(&mut self, request: EndRequest) {
        let mut request = Some(request);
        if let (Some(job), Some(asked)) = (self.job.take(), request) {
            (self.job, request) = job.end_domain(&mut self.base, asked);
            self.settle();
        }
        let Some((id, action)) = request else { return };
        match (self.base.stage, action) {
            (Stage::Live, Action::Shutdown { grace } | Action::Terminate { grace }) => self.stop_within(grace),
            (Stage::Live, _) => return self.base.kill(vec![id]),
            (Stage::Waiting, Action::Terminate { .. }) => {
                self.base.end();
                // No domain ran, so virt-handler has nothing to record.
                self.base.finished = true;
            }
            (Stage::Waiting, _) => {
                self.base.published.reason = "destroyed".into();
                self.base.end();
            }
            (Stage::Ended, Action::Terminate { .. }) => self.base.end(),
            (Stage::Ended, _) => {}
        }
        self.base.answer(id, Ok(false));
        self.settle();
    }

    /// Starts the shutdown of the guest, or shortens its grace period.
    fn stop_within(&mut self, grace: u64) {
        let job = match self.job.take() {
            Some(Job::Shutdown(job)) => job.shorten(&mut self.base, grace),
            other => {
                self.beside.extend(other);
                Shutdown::begin(&mut self.base, grace)
            }
        };
        self.job = Some(job.into());
    }
}
