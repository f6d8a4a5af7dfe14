//! The engine's decisions: [`decide`] maps a state and an input to the next state and effects. Pure.
//!
//! Events of the domain (`events`) come first; `requests` decides on requests, `sync` on those to start or change the domain. A job in
//! the slot, or beside it, gets the inputs that name it.

mod events;
mod requests;
mod sync;
#[cfg(test)]
mod tests;

use protocol::{JobReport, Lifecycle, MigrationStep};
use tokio::time::Instant;

use self::sync::NextSync;
use super::{
    jobs::{Job, migration_source::MigrationSource, migration_target::MigrationTarget, save::MemorySave},
    model::{
        Base, ChannelMode, Effect, Input, JobInput, JobName, MigrationEnd, MigrationRecord, Next, RequestError,
        SaveRecord, Stage,
    },
};

/// The engine's state, a value.
#[derive(Clone, Debug)]
pub(crate) struct State {
    /// The base that all jobs share.
    pub(crate) base: Base,
    /// The job slot.
    pub(crate) job: Option<Job>,
    /// Jobs beside the slot: a Sync, and one that cannot be aborted for the shutdown in the slot.
    beside: Vec<Job>,
    /// Syncs that follow the one in progress or the start.
    next_sync: Option<NextSync>,
}

/// Decides on an input: returns the next state and the effects to carry out, in their order.
pub(crate) fn decide(state: &State, now: Instant, input: Input) -> (State, Vec<Effect>) {
    let mut state = state.clone();
    state.base.now = now;
    state.take(input);
    state.settle();
    let effects = std::mem::take(&mut state.base.effects);
    (state, effects)
}

impl State {
    /// Creates the state of a worker that has just started.
    pub(crate) fn new(base: Base) -> Self {
        Self { base, job: None, beside: Vec::new(), next_sync: None }
    }

    /// Returns the time of the next wake-up.
    pub(crate) fn next_wake(&self) -> Option<Instant> {
        self.jobs().filter_map(|job| job.wake()).chain(self.base.wake()).min()
    }

    fn take(&mut self, input: Input) {
        match input {
            Input::Begin { adopting, start_daemon, simulate_crash, migration, save } => {
                self.on_begin(adopting, start_daemon, simulate_crash, migration.as_deref(), save.as_ref());
            }
            Input::Request(id, request) => self.on_request(id, request),
            Input::Timer => self.on_timer(),
            Input::DomainChanged { closed, crashed } => self.on_domain_changed(closed, crashed),
            Input::GuestFacts(facts) => self.base.publish_guest(*facts),
            Input::Credentials(status) => self.base.published.access_credentials = status,
            Input::DaemonStarted(request, result) => self.on_daemon_started(request, result),
            Input::Connected(result) => self.on_connected(result),
            Input::Read(result, guest_agent) => self.on_read(result, guest_agent),
            Input::Crash(panic) => self.base.publish_crash(panic),
            Input::Acted(id, result) => self.on_acted(id, result),
            Input::Destroyed(result) => self.base.on_destroyed(result),
            Input::ClockSet => self.base.setting_clock = false,
            Input::Lost(reason) => self.base.on_lost(reason),
            Input::Job(name, input) => self.pass_to(name, input),
        }
    }

    /// Decides on the start of the worker.
    fn on_begin(
        &mut self,
        adopting: bool,
        start_daemon: bool,
        simulate_crash: bool,
        migration: Option<&MigrationRecord>,
        save: Option<&SaveRecord>,
    ) {
        if simulate_crash {
            // Report it to virt-handler first: in a pod that is kept after a failure nothing else shows it.
            self.base.published.failure = "simulated failure".to_owned();
            return self.base.end();
        }
        self.base.adopting = adopting;
        if adopting {
            tracing::info!("a former worker started a domain, adopting it");
        }
        if let Some(record) = migration {
            self.adopt_migration(record);
        }
        if let Some(record) = save.filter(|_| self.base.stage != Stage::Ended && self.job.is_none()) {
            tracing::info!(record.volume, record.file, "adopting a save of the guest's memory");
            self.job = MemorySave::adopted(&mut self.base, record).map(Job::from);
        }
        if start_daemon {
            self.base.effects.push(Effect::StartDaemon { cache: None, request: None });
        }
    }

    /// Continues the migration of a former worker, or keeps its result.
    fn adopt_migration(&mut self, record: &MigrationRecord) {
        tracing::info!(migration = record.migration, ?record.direction, step = record.step().as_str_name(), "adopting a migration");
        let mut report = record.report();
        if report.step() == MigrationStep::Releasing && record.direction == MigrationEnd::Target {
            report.set_step(MigrationStep::Copying);
        }
        self.base.published.migration = Some(report);
        let mode = match (record.direction, record.step()) {
            (MigrationEnd::Source, MigrationStep::Copying | MigrationStep::Releasing) => {
                self.job = Some(MigrationSource::adopted(record, &self.base).into());
                ChannelMode::Source
            }
            (MigrationEnd::Target, MigrationStep::Prepared | MigrationStep::Copying | MigrationStep::Releasing) => {
                self.job = Some(MigrationTarget::adopted(record, self.base.now).into());
                ChannelMode::Target
            }
            (MigrationEnd::Target, MigrationStep::Moved | MigrationStep::NotMoved) => ChannelMode::Settled,
            (MigrationEnd::Source, MigrationStep::Moved) => return self.base.end_as(Lifecycle::Shutoff, "migrated"),
            _ => return,
        };
        self.base.effects.push(Effect::SaveMigration(Box::new(record.clone()), mode));
    }

    /// Returns the jobs in progress, that in the slot first.
    fn jobs(&self) -> impl Iterator<Item = &Job> {
        self.job.iter().chain(&self.beside)
    }

    /// Fails if a job holds the slot.
    fn check_slot(&self) -> Result<(), RequestError> {
        self.job.as_ref().map_or(Ok(()), |job| Err(job.conflict()))
    }

    /// Gives an input to the job of this name. The late result of a job that has ended changes nothing.
    fn pass_to(&mut self, name: JobName, input: JobInput) {
        if self.job.as_ref().is_some_and(|job| job.name() == name) {
            self.job = self.job.take().and_then(|job| job.take(&mut self.base, input));
        } else if let Some(at) = self.beside.iter().position(|job| job.name() == name) {
            let job = self.beside.remove(at).take(&mut self.base, input);
            self.beside.extend(job);
        }
        self.settle();
    }

    /// Gives an input to the job in the slot.
    fn pass_to_slot(&mut self, input: JobInput) {
        if let Some(name) = self.job.as_ref().map(|job| job.name()) {
            self.pass_to(name, input);
        }
    }

    /// Does the work that follows a decision.
    fn settle(&mut self) {
        loop {
            if self.base.stage == Stage::Ended {
                self.end_jobs();
            }
            self.base.stopping = matches!(self.job, Some(Job::Shutdown(_)));
            self.base.reading.held = self.job.as_ref().is_some_and(|job| job.holds_reads());
            if let Some(next) = self.base.due.pop_front() {
                self.follow(next);
            } else if let Some(next) = self.take_next_sync() {
                self.sync(next.requests, next.wanted);
            } else {
                break;
            }
        }
        self.base.published.jobs = self.reports();
    }

    /// Does the work that follows a read, or a decision.
    fn follow(&mut self, next: Next) {
        match next {
            Next::Answer(id, answer) => self.base.answer(id, answer),
            Next::Killed(requests, result) => self.base.answer_killed(requests, result.map_err(Into::into)),
            Next::Report(job) => self.pass_to(job, JobInput::Read),
            Next::Act(id, action) => self.act(id, action),
            Next::Sync(requests, wanted) => self.begin_sync(requests, wanted),
            Next::Read if self.base.stage != Stage::Ended => self.base.read(),
            Next::Read => {}
        }
    }

    /// Answers the requests of work that the end of the domain makes pointless.
    fn end_jobs(&mut self) {
        self.job = self.job.take().and_then(|job| job.end(&mut self.base));
        for job in std::mem::take(&mut self.beside) {
            self.beside.extend(job.end(&mut self.base));
        }
        if let Some(next) = self.next_sync.take() {
            self.base.answer_all(next.requests, &Err(RequestError::Ended));
        }
        for (id, _) in self.base.looking.take().into_iter().flat_map(|looking| looking.then) {
            self.base.answer(id, Ok(false));
        }
    }

    /// Returns the reports of the jobs that virt-handler has started by themselves.
    fn reports(&self) -> Vec<JobReport> {
        let started = self.jobs().filter(|job| !matches!(job, Job::Start(_) | Job::Sync(_)));
        started.map(|job| JobReport { name: job.name().to_string(), progress: job.progress().into() }).collect()
    }
}
