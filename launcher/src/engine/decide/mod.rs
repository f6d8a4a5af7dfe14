//! The engine's decisions: [`decide`] maps a state and an input to the next state and effects. Pure.
//!
//! Files by theme: `requests` (Hello, actions), `sync` (Sync of a running domain), `devices` (its changes), `start`, `shutdown`,
//! `dump`, `migration_out` and `migration_in` (the jobs), `events` (connection, reads, guest agent), `timer`.

mod devices;
mod dump;
mod events;
mod migration_in;
mod migration_out;
mod post_copy;
mod requests;
mod shutdown;
mod start;
mod sync;
#[cfg(test)]
mod tests;
mod timer;

use protocol::{Lifecycle, MigrationStep};
use tokio::time::Instant;

use super::model::{
    Answer, ChannelMode, Direction, Effect, Input, Job, MigrationIn, MigrationOut, MigrationRecord, RequestId, State,
};

/// Decides on an input: returns the next state and the effects to carry out, in their order.
pub(crate) fn decide(state: &State, now: Instant, input: Input) -> (State, Vec<Effect>) {
    let mut turn = Turn { state: state.clone(), effects: Vec::new(), now };
    turn.take(input);
    turn.state.published.jobs = turn.state.jobs();
    (turn.state, turn.effects)
}

/// A decision in progress.
struct Turn {
    state: State,
    effects: Vec<Effect>,
    now: Instant,
}

impl Turn {
    fn take(&mut self, input: Input) {
        match input {
            Input::Begin { adopting, start_daemon, simulate_crash, migration } => {
                self.begin(adopting, start_daemon, simulate_crash, migration.as_deref());
            }
            Input::Request(id, request) => self.request(id, request),
            Input::Timer => self.timer(),
            Input::DomainChanged { closed, crashed } => self.domain_changed(closed, crashed),
            Input::GuestFacts(facts) => self.guest_facts(*facts),
            Input::Credentials(status) => self.state.published.access_credentials = status,
            Input::DaemonStarted(request, result) => self.daemon_started(request, result),
            Input::Connected(result) => self.connected(result),
            Input::Read(result, guest_agent) => self.read_done(result, guest_agent),
            Input::Crash(panic) => self.crashed(panic),
            Input::Prepared(result) if matches!(self.state.job, Some(Job::MigrationIn(_))) => {
                self.incoming_prepared(result)
            }
            Input::Prepared(result) => self.prepared(result),
            Input::Served(result) => {
                if let Some(result) = self.incoming_served(result) {
                    self.served(result);
                }
            }
            Input::Defined(result) => self.defined(result),
            Input::TagsWritten(result) => self.tags_written(result),
            Input::Created(result) => self.created(result),
            Input::Compared { sizes, wanted, left_out } => self.compared(&sizes, wanted, &left_out),
            Input::DiskGrown(result) => self.disk_grown(result),
            Input::VcpusPlugged(result) => self.vcpus_plugged(result),
            Input::DeviceChanged(result) => self.device_changed(result),
            Input::MemoryDumped(result) => self.memory_dumped(result),
            Input::MigrationOpened(result) => match self.state.job {
                Some(Job::MigrationIn(_)) => self.incoming_opened(result),
                _ => self.outgoing_opened(result),
            },
            Input::Migrated(result) => self.migrated(result),
            Input::Departed(result) => self.departed(result),
            Input::ProgressRead(result) => self.progress_read(result),
            Input::MigrationAborted(result) => self.migration_aborted(result),
            Input::PausedForCopy(result) => self.paused_for_copy(result),
            Input::PostCopyStarted(result) => self.post_copy_started(result),
            Input::RunsAfterMigration(result) => match self.state.job {
                Some(Job::MigrationIn(_)) => self.arrived_runs(result),
                _ => self.restored(result),
            },
            Input::Released(result) => self.released(result),
            Input::Resumed(result) => self.resumed(result),
            Input::Acted(id, result) => self.acted(id, result),
            Input::ShutdownRequested(result) => self.shutdown_requested(result),
            Input::Destroyed(result) => self.destroyed(result),
            Input::ClockSet => self.state.setting_clock = false,
        }
    }

    /// Decides on the start of the worker.
    fn begin(&mut self, adopting: bool, start_daemon: bool, simulate_crash: bool, migration: Option<&MigrationRecord>) {
        if simulate_crash {
            // Report it to virt-handler first: in a pod that is kept after a failure nothing else shows it.
            self.state.published.failure = "simulated failure".to_owned();
            self.end();
            return;
        }
        self.state.adopting = adopting;
        if adopting {
            tracing::info!("a former worker started a domain, adopting it");
        }
        if let Some(record) = migration {
            self.adopt_migration(record);
        }
        if start_daemon {
            self.effects.push(Effect::StartDaemon { cache: None, request: None });
        }
    }

    /// Continues the migration of a former worker, or keeps its result.
    fn adopt_migration(&mut self, record: &MigrationRecord) {
        tracing::info!(migration = record.migration, ?record.direction, step = record.step().as_str_name(), "adopting a migration");
        let mut report = record.report();
        if report.step() == MigrationStep::Releasing && record.direction == Direction::In {
            report.set_step(MigrationStep::Copying);
        }
        self.state.published.migration = Some(report);
        let mode = match (record.direction, record.step()) {
            (Direction::Out, MigrationStep::Copying | MigrationStep::Releasing) => {
                self.state.job = Some(Job::MigrationOut(Box::new(MigrationOut::adopted(record, self.now))));
                ChannelMode::Outgoing
            }
            (Direction::In, MigrationStep::Prepared | MigrationStep::Copying | MigrationStep::Releasing) => {
                self.state.job = Some(Job::MigrationIn(Box::new(MigrationIn::adopted(record, self.now))));
                ChannelMode::Incoming
            }
            (Direction::In, MigrationStep::Moved | MigrationStep::NotMoved) => ChannelMode::Settled,
            (Direction::Out, MigrationStep::Moved) => {
                self.state.published.set_lifecycle(Lifecycle::Shutoff);
                self.state.published.reason = "migrated".into();
                self.end();
                return;
            }
            _ => return,
        };
        self.effects.push(Effect::SaveMigration(Box::new(record.clone()), mode));
    }

    fn answer(&mut self, id: RequestId, answer: Answer) {
        self.effects.push(Effect::Answer(id, answer));
    }

    fn answer_all(&mut self, ids: Vec<RequestId>, answer: &Answer) {
        self.effects.extend(ids.into_iter().map(|id| Effect::Answer(id, answer.clone())));
    }
}
