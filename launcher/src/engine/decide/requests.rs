//! Requests: Hello, and actions on the domain and the guest.

use std::time::Duration;

use protocol::Lifecycle;

use super::Turn;
use crate::{
    engine::model::{
        Action, AfterRead, Effect, GuestCall, Job, JobName, Link, Looking, Request, RequestError, RequestId, Stage,
    },
    hypervisor::{HypervisorError, RebootWay},
};

/// Limit of actions on the guest in progress.
const ACTIONS: usize = 4;
/// Limit of requests that wait for QEMU's start.
pub(super) const WAITING: usize = 16;
/// Longest wait of requests to end a domain that a former worker may have started.
const LOOK_DEADLINE: Duration = Duration::from_secs(10);

impl Turn {
    /// Decides on a request.
    pub(super) fn request(&mut self, id: RequestId, request: Request) {
        match request {
            Request::Hello { cache, allow_emulation } => self.hello(id, cache, allow_emulation),
            Request::Sync(wanted) => self.sync(vec![id], wanted),
            Request::DumpMemory { volume, file } => self.dump_memory(id, volume, file),
            Request::PrepareMigration { migration, wanted } => self.prepare_migration(id, migration, wanted),
            Request::Migrate(request) => self.migrate(id, request),
            Request::AbortMigration(migration) => self.abort_migration(id, migration),
            Request::Release { paused } => self.release(id, paused),
            Request::Act(action) => self.act(id, action),
        }
    }

    fn hello(&mut self, id: RequestId, cache: Vec<protocol::CacheFile>, allow_emulation: bool) {
        if self.state.stage == Stage::Ended {
            self.answer(id, Ok(false));
            return;
        }
        self.state.allow_emulation |= allow_emulation;
        let cache = (!self.state.cache_written).then_some(cache);
        self.effects.push(Effect::StartDaemon { cache, request: Some(id) });
    }

    /// Decides on the daemon's start, ahead of Hello if there is no request.
    pub(super) fn daemon_started(&mut self, request: Option<RequestId>, result: Result<(), RequestError>) {
        match (&result, request) {
            (Ok(()), Some(_)) => self.state.cache_written = true,
            (Ok(()), None) => self.state.cache_written = self.state.adopting,
            // Hello retries, and its answer holds the reason.
            (Err(error), None) => tracing::warn!(%error, "cannot start libvirt's daemon yet"),
            (Err(_), Some(_)) => {}
        }
        if let Some(id) = request {
            self.answer(id, result.map(|()| false));
        }
    }

    /// Decides on an action.
    pub(super) fn act(&mut self, id: RequestId, action: Action) {
        match action {
            Action::Finish => {
                self.state.finished |= self.state.stage == Stage::Ended;
                let ended = self.state.finished;
                self.answer(id, if ended { Ok(false) } else { Err(RequestError::NotEnded) });
            }
            Action::Shutdown { .. } | Action::Terminate { .. } | Action::Kill => self.end_domain(id, action),
            Action::Pause | Action::Unpause | Action::Reset | Action::SoftReboot => {
                if let Err(error) = self.act_on_guest(id, action) {
                    self.answer(id, Err(error));
                }
            }
        }
    }

    fn act_on_guest(&mut self, id: RequestId, action: Action) -> Result<(), RequestError> {
        if let Some(job) = self.state.job.as_ref().filter(|job| conflicts(job.name(), action)) {
            return Err(RequestError::Conflict { job: job.name(), progress: job.progress() });
        }
        let lifecycle = self.state.published.lifecycle();
        let alive = matches!(
            lifecycle,
            Lifecycle::Running | Lifecycle::Paused | Lifecycle::PmSuspended | Lifecycle::ShuttingDown
        );
        if self.state.stage != Stage::Live || !alive {
            return Err(RequestError::NoDomain);
        }
        if self.state.link != Link::Up {
            return Err(disconnected());
        }
        if self.state.actions.len() >= ACTIONS {
            return Err(RequestError::Busy);
        }
        let call = match action {
            Action::Pause if lifecycle == Lifecycle::Running => GuestCall::Suspend,
            Action::Unpause if lifecycle == Lifecycle::Paused => GuestCall::Resume,
            Action::Reset => GuestCall::Reset,
            Action::SoftReboot => {
                GuestCall::Reboot(match (self.state.published.guest_agent_connected, self.state.published.acpi) {
                    (true, _) => RebootWay::GuestAgent,
                    (false, true) => RebootWay::Acpi,
                    (false, false) => return Err(RequestError::NoWayToReboot),
                })
            }
            // The guest is paused, or runs, already.
            _ => {
                self.read_then(Some(AfterRead::Answer(id, Ok(false))));
                return Ok(());
            }
        };
        self.state.actions.insert(id, action);
        self.effects.push(Effect::Act(id, call));
        Ok(())
    }

    /// Decides on the result of an action on the guest.
    pub(super) fn acted(&mut self, id: RequestId, result: Result<(), HypervisorError>) {
        let action = self.state.actions.remove(&id);
        if let Err(error) = result {
            self.answer(id, Err(error.into()));
            return;
        }
        if action == Some(Action::Unpause) && self.state.published.guest_agent_connected {
            self.set_clock();
        }
        self.read_then(Some(AfterRead::Answer(id, Ok(false))));
    }

    /// Sets the guest's clock that has stood still in a migration, once its guest agent is connected.
    pub(super) fn set_late_clock(&mut self) {
        if self.state.clock_is_late && self.state.published.guest_agent_connected {
            self.state.clock_is_late = false;
            self.set_clock();
        }
    }

    fn set_clock(&mut self) {
        // One at a time: each holds one of the few calls to libvirt until the guest agent answers.
        if !self.state.setting_clock {
            self.state.setting_clock = true;
            self.effects.push(Effect::SetClock);
        }
    }
}

/// Returns the error of a request while the connection is down.
pub(super) fn disconnected() -> RequestError {
    HypervisorError::Disconnected("reconnecting".into()).into()
}

/// Decides that an action on the guest is refused while a job is in progress: a domain that starts has no guest yet, and a
/// reboot would undo a shutdown.
const fn conflicts(job: JobName, action: Action) -> bool {
    match job {
        // The guest stands still for a dump, and goes on by itself.
        JobName::Start | JobName::MemoryDump => true,
        // A pause would end with the migration, and a reboot undo it.
        JobName::MigrationOut | JobName::MigrationIn => true,
        JobName::Sync => false,
        JobName::Shutdown => matches!(action, Action::Reset | Action::SoftReboot),
    }
}

impl Turn {
    /// Decides on a request to end the domain. A domain that a former worker may have started is looked for first: its guest
    /// has a grace period, too.
    fn end_domain(&mut self, id: RequestId, action: Action) {
        self.state.terminating |= matches!(action, Action::Terminate { .. });
        if self.state.stage != Stage::Waiting || !self.state.adopting || self.has_read() {
            return self.end_known_domain(id, action);
        }
        let until = self.now + LOOK_DEADLINE;
        let looking = self.state.looking.get_or_insert_with(|| Looking { until, then: Vec::new() });
        if looking.then.len() < WAITING {
            looking.then.push((id, action));
        } else {
            self.answer(id, Err(RequestError::Busy));
        }
    }

    /// Decides on the requests that have waited for a look at the domain.
    pub(super) fn looked(&mut self) {
        for (id, action) in self.state.looking.take().into_iter().flat_map(|looking| looking.then) {
            self.end_known_domain(id, action);
        }
    }

    /// Ends the domain. A start that has not reached QEMU is aborted; otherwise it is completed first.
    fn end_known_domain(&mut self, id: RequestId, action: Action) {
        if self.end_outgoing_domain(id, action) || self.end_incoming_domain(id, action) {
            return;
        }
        if let Some(Job::Start(start)) = &mut self.state.job
            && start.is_past_abort()
        {
            if start.then.len() < WAITING {
                start.then.push((id, action));
            } else {
                self.answer(id, Err(RequestError::Busy));
            }
            return;
        }
        if self.state.stage == Stage::Live {
            self.abort_start();
        }
        match (self.state.stage, action) {
            (Stage::Live, Action::Shutdown { grace } | Action::Terminate { grace }) => self.stop_within(grace),
            (Stage::Live, _) => return self.kill(vec![id]),
            (Stage::Waiting, Action::Terminate { .. }) => {
                self.end();
                // No domain ran, so virt-handler has nothing to record.
                self.state.finished = true;
            }
            (Stage::Waiting, _) => {
                self.state.published.reason = "destroyed".into();
                self.end();
            }
            (Stage::Ended, Action::Terminate { .. }) => self.end(),
            (Stage::Ended, _) => {}
        }
        self.answer(id, Ok(false));
    }
}
