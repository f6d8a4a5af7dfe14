//! What a task knows of its machine, and how news changes that.

use std::{sync::Arc, time::Duration};

use api::{VirtualMachineInstance, VmiPhase as Phase};
use protocol::{GuestPanic, Lifecycle, MachineState};
use sha2::{Digest, Sha256};

use super::{
    decide::Effect,
    facts::Facts,
    host::{ConnectError, NetworkFailure},
    phase::{Domain, simplified},
    records::WriteError,
};
use crate::{
    launcher::{LauncherError, bounded},
    network::PodNetwork,
};

/// The task's clocks: `since_start` for waiting, `wall` for what is written down.
#[derive(Clone, Copy, Debug)]
pub struct Now {
    /// Time since the task started.
    pub since_start: Duration,
    /// The time of day.
    pub wall: jiff::Timestamp,
}

/// Whether the VirtualMachineInstance is still this task's business.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Presence {
    /// It is there.
    Present,
    /// What is known of it may be out of date, or it may be gone: it has to be read.
    Unseen,
    /// It was deleted, since then.
    Deleted(Duration),
    /// It still exists, but belongs to another node now.
    Elsewhere,
}

/// The connection to the launcher.
#[derive(Clone, Debug)]
pub enum Link {
    /// There is none.
    Down {
        /// Since when.
        since: Duration,
        /// There was one before.
        had: bool,
        /// Not to be tried before.
        retry_at: Duration,
        /// The pod's directory has been missing from the node since.
        pod_missing_since: Option<Duration>,
        /// Attempts in a row that met more than a socket that is not there yet: since when, how many, and why.
        trouble: Option<Trouble>,
    },
    /// There is one.
    Up {
        /// The number of the connection.
        connection: u64,
        /// Hello was answered.
        greeted: bool,
        /// The pod's network is set up.
        networked: bool,
        /// `Sync` succeeded over this connection for this fingerprint.
        synced: Option<u64>,
    },
}

/// Connections that are refused, again and again.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Trouble {
    /// The first one.
    pub since: Duration,
    /// How many there were.
    pub attempts: u32,
    /// What the last one met.
    pub message: String,
}

/// A call that failed and is tried again later.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Failure {
    /// What went wrong.
    pub message: String,
    /// Failures in a row.
    pub count: u32,
    /// Next attempt.
    pub retry_at: Duration,
    /// No attempt can help.
    pub hopeless: bool,
}

/// A machine that is being stopped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stopping {
    /// Since when; the grace period runs from here.
    pub since: Duration,
    /// The guest was last asked to power off, or stopped by force.
    pub signalled: Duration,
    /// It was stopped by force.
    pub killed: bool,
}

/// A machine that stands still because of an I/O error, and when it is tried again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IoPause {
    /// Attempts so far.
    pub attempts: u32,
    /// Next attempt.
    pub retry_at: Duration,
    /// It has run on since; if it stands still again soon, that is the same trouble.
    pub gone_on_since: Option<Duration>,
}

/// Calls under way. At most one of each kind, so that their number is bounded.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Busy {
    /// Waiting for the socket, connecting.
    pub connect: bool,
    /// Hello.
    pub hello: bool,
    /// Network set-up.
    pub network: bool,
    /// Sync.
    pub sync: bool,
    /// Shutdown or Kill.
    pub power: bool,
    /// Finish.
    pub finish: bool,
    /// A write to or read of the object.
    pub record: bool,
    /// A user's request.
    pub request: bool,
}

/// True if label and status both name this node. The label selects what is watched, but users may write labels; only components write
/// the status.
pub(super) fn is_here(vmi: &VirtualMachineInstance, node: &str) -> bool {
    let label = vmi.metadata.labels.as_ref().and_then(|labels| labels.get(api::constants::label::NODE_NAME));
    let status = vmi.status.as_ref().and_then(|status| status.node_name.as_ref());
    [label, status].into_iter().all(|name| name.is_some_and(|name| name == node))
}

/// Everything a task knows of its machine.
#[derive(Clone, Debug)]
pub struct Machine {
    /// The object as last seen or written.
    pub vmi: Arc<VirtualMachineInstance>,
    /// What the decisions need of it.
    pub facts: Facts,
    /// Whether it is still there.
    pub presence: Presence,
    /// The connection to the launcher.
    pub link: Link,
    /// The last state the launcher reported. Outlives the connection.
    pub report: Option<MachineState>,
    /// The pod's network as last set up. Outlives the connection.
    pub network: Option<Arc<PodNetwork>>,
    /// The last call that failed and is tried again.
    pub failure: Option<Failure>,
    /// Connections lost in a row that did not last.
    pub losses: u32,
    /// When the last connection was made.
    pub connected_at: Duration,
    /// No call to the launcher before: the last one met a connection that is breaking.
    pub hold_until: Duration,
    /// Being stopped.
    pub stopping: Option<Stopping>,
    /// Standing still after an I/O error.
    pub io_pause: Option<IoPause>,
    /// The launcher was told that it may exit.
    pub finished: bool,
    /// What SELinux calls the launcher's container.
    pub security_context: Option<String>,
    /// First answer of the launcher.
    pub hello_at: Option<jiff::Timestamp>,
    /// The guest was seen running.
    pub ran: bool,
    /// Users have heard that the machine was made.
    pub creation_told: bool,
    /// Users have heard of a crash of the guest's kernel.
    pub crash_told: bool,
    /// When users last heard that probes met a guest agent that did not answer.
    pub silence_told_at: Option<Duration>,
    /// There was no domain although the machine ran, since.
    pub vanished_since: Option<Duration>,
    /// What the guest reports differs from what is recorded, since.
    pub guest_changed_at: Option<Duration>,
    /// Last write of what the guest reports.
    pub guest_written_at: Option<Duration>,
    /// No write before; grows with failed writes.
    pub write_retry: Option<Failure>,
    /// Grows by [`WRITE_INTERVAL`] with each write, and is never behind the clock: how far it is ahead says how much was
    /// written lately.
    pub paced: Duration,
    /// Calls under way.
    pub busy: Busy,
}

/// Where a machine stands; see the diagram of the module. For logs and metrics.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stage {
    /// No connection to a launcher.
    Waiting,
    /// Hello and network set-up.
    Preparing,
    /// Sync called, nothing runs yet.
    Starting,
    /// The guest runs.
    Live,
    /// The guest is being stopped.
    Stopping,
    /// The domain ended.
    Ended,
    /// The launcher was told to exit.
    Finishing,
}

/// What came of an effect.
#[derive(Debug)]
pub enum Outcome {
    /// The connection attempt ended.
    Connected(Result<u64, ConnectError>),
    /// Hello was answered, over that connection.
    Greeted(u64, Result<(), LauncherError>),
    /// The network was set up, over that connection.
    Network(u64, Result<PodNetwork, NetworkFailure>),
    /// Sync of a fingerprint was answered; true when it started the guest.
    Synced(u64, u64, Result<bool, LauncherError>),
    /// Shutdown or Kill was answered.
    Signalled(Result<(), LauncherError>),
    /// Finish was answered.
    Finished(Result<(), LauncherError>),
    /// The object was written; the new version, and what users should read about the change.
    Written(Result<Arc<VirtualMachineInstance>, WriteError>, Vec<Announcement>),
    /// The object was read; `None` when it does not exist.
    Read(Result<Option<Arc<VirtualMachineInstance>>, WriteError>),
    /// A user's request was carried out.
    Requested,
}

/// Something for the users to read in the object's events.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Announcement {
    /// `Warning` instead of `Normal`.
    pub warning: bool,
    /// The reason.
    pub reason: &'static str,
    /// The message: one line, not too long.
    pub message: String,
}

impl Announcement {
    /// A normal event.
    pub fn normal(reason: &'static str, message: impl Into<String>) -> Self {
        Self { warning: false, reason, message: bounded(&message.into()) }
    }

    /// A warning.
    pub fn warning(reason: &'static str, message: impl Into<String>) -> Self {
        Self { warning: true, reason, message: bounded(&message.into()) }
    }
}

/// What a user may ask of a running machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Request {
    /// Stop its processors.
    Pause,
    /// Let them run on.
    Unpause,
    /// Press the reset button.
    Reset,
    /// Ask the guest to reboot.
    SoftReboot,
}

/// Why a request was not carried out.
#[derive(Clone, Debug, thiserror::Error)]
pub enum Refusal {
    /// There is no launcher to ask.
    #[error("No command socket found for vmi {0}")]
    NoLauncher(String),
    /// There is no guest to act on.
    #[error("the machine is not running")]
    NotRunning,
    /// Too many requests wait for this machine already.
    #[error("too many requests wait for this machine")]
    Busy,
    /// The launcher failed to do it.
    #[error(transparent)]
    Launcher(#[from] LauncherError),
}

impl Machine {
    /// What is known when a task starts: the object.
    pub fn new(vmi: Arc<VirtualMachineInstance>, node: &str) -> Self {
        Self {
            facts: Facts::of(&vmi, node),
            vmi,
            presence: Presence::Present,
            link: Link::down(Duration::ZERO, false),
            report: None,
            network: None,
            failure: None,
            losses: 0,
            connected_at: Duration::ZERO,
            hold_until: Duration::ZERO,
            stopping: None,
            io_pause: None,
            finished: false,
            security_context: None,
            hello_at: None,
            ran: false,
            creation_told: false,
            crash_told: false,
            silence_told_at: None,
            vanished_since: None,
            guest_changed_at: None,
            guest_written_at: None,
            write_retry: None,
            paced: Duration::ZERO,
            busy: Busy::default(),
        }
    }

    /// The domain as last reported.
    pub fn domain(&self) -> Domain {
        Domain::of(self.report.as_ref())
    }

    /// When the next call to the launcher may be made.
    pub fn call_at(&self) -> Duration {
        self.failure.as_ref().map_or(Duration::ZERO, |failure| failure.retry_at).max(self.hold_until)
    }

    /// The machine shall not run any longer: its object is going or gone.
    pub fn is_leaving(&self) -> bool {
        self.facts.deleting || matches!(self.presence, Presence::Deleted(_))
    }

    /// An effect is being started.
    pub fn begin(&mut self, effect: &Effect, now: Now) {
        match effect {
            Effect::Connect { .. } => self.busy.connect = true,
            Effect::Hello => self.busy.hello = true,
            Effect::SetUpNetwork => self.busy.network = true,
            Effect::Sync { .. } => self.busy.sync = true,
            Effect::Shutdown { .. } | Effect::Kill => {
                self.busy.power = true;
                let killed = matches!(effect, Effect::Kill);
                let since = self.stopping.map_or(now.since_start, |stopping| stopping.since);
                self.stopping = Some(Stopping { since, signalled: now.since_start, killed });
            }
            Effect::Finish => self.busy.finish = true,
            Effect::Write(..) | Effect::Read => self.busy.record = true,
            Effect::Announce(_) | Effect::Retire => {}
        }
    }

    /// Where the machine stands.
    pub fn stage(&self) -> Stage {
        let Link::Up { greeted, networked, .. } = &self.link else { return Stage::Waiting };
        if self.finished {
            return Stage::Finishing;
        }
        match self.domain() {
            Domain::Ended(_) => Stage::Ended,
            domain if domain.is_alive() && self.stopping.is_some() => Stage::Stopping,
            domain if domain.is_alive() => Stage::Live,
            _ if *greeted && *networked => Stage::Starting,
            _ => Stage::Preparing,
        }
    }

    /// Another version of the object was seen. One older than what is known is ignored: the watch runs behind the
    /// agent's own writes.
    pub fn see(&mut self, vmi: Arc<VirtualMachineInstance>, node: &str) {
        if self.presence != Presence::Elsewhere {
            self.presence = Presence::Present;
        }
        self.take(vmi, node);
    }

    /// Takes over a version, unless it is older. Says nothing about whether the object is still there: the answer to
    /// a write may come after the news of the deletion.
    fn take(&mut self, vmi: Arc<VirtualMachineInstance>, node: &str) {
        if is_older(&vmi, &self.vmi) {
            return;
        }
        self.facts = Facts::of(&vmi, node);
        self.vmi = vmi;
    }

    /// The launcher reported a state.
    ///
    /// Returns what users should read about it.
    pub fn hear(&mut self, state: MachineState, now: Now) -> Vec<Announcement> {
        // An agent that starts again finds a crash that was told before; the machine has mostly ended with it. A launcher
        // may take it back and tell it again as often as it likes.
        let told = self.crash_told || (self.report.is_none() && self.facts.is_final());
        self.crash_told |= state.guest_panic.is_some();
        let crash = state.guest_panic.as_ref().filter(|_| !told);
        let crash = crash.map(|panic| Announcement::warning("GuestPanicked", crash_text(panic)));
        let fell_silent = self.report.as_ref().is_some_and(|known| state.silences > known.silences);
        let heard = self.silence_told_at.is_some_and(|told| now.since_start < told.saturating_add(SILENCES_APART));
        let silence = (fell_silent && !heard).then(|| {
            self.silence_told_at = Some(now.since_start);
            let name = self.vmi.metadata.name.as_deref().unwrap_or_default();
            Announcement::warning("GuestAgentPingFailed", format!("GuestAgentPing probe failed for VMI {name}"))
        });
        let news: Vec<_> = crash.into_iter().chain(silence).collect();
        if self.report.as_ref().is_none_or(|known| guest_differs(known, &state)) {
            self.guest_changed_at.get_or_insert(now.since_start);
        }
        let io_paused = state.lifecycle() == Lifecycle::Paused && simplified(&state.reason) == "ioerror";
        let known =
            self.io_pause.filter(|pause| pause.gone_on_since.is_none_or(|at| now.since_start < at + IO_FORGOTTEN));
        self.io_pause = match (io_paused, known) {
            (false, None) => None,
            (false, Some(pause)) => {
                Some(IoPause { gone_on_since: Some(pause.gone_on_since.unwrap_or(now.since_start)), ..pause })
            }
            (true, Some(pause)) if pause.gone_on_since.is_none() => Some(pause),
            (true, known) => {
                let attempts = known.map_or(0, |pause| pause.attempts);
                let retry_at = now.since_start + io_wait(attempts);
                Some(IoPause { attempts, retry_at, gone_on_since: None })
            }
        };
        self.report = Some(state);
        self.ran |= self.domain().is_alive();
        if self.ran || self.facts.phase == Phase::Running {
            match self.domain() {
                Domain::None => {
                    self.vanished_since.get_or_insert(now.since_start);
                }
                _ => self.vanished_since = None,
            }
        }
        news
    }

    /// The connection broke.
    pub fn lose(&mut self, connection: u64, now: Now) {
        if matches!(self.link, Link::Up { connection: current, .. } if current == connection) {
            self.link = Link::down(now.since_start, true);
            // A launcher that accepts the machine and hangs up, again and again, is not met at once each time.
            if now.since_start >= self.connected_at.saturating_add(LASTING) {
                self.losses = 0;
            }
            if let Link::Down { retry_at, .. } = &mut self.link {
                *retry_at = now.since_start + AFTER_LOSS.saturating_mul(1 << self.losses.min(7));
            }
            self.losses = self.losses.saturating_add(1);
        }
    }

    /// Takes in what came of an effect. Returns what users should read about it.
    pub fn learn(&mut self, outcome: Outcome, node: &str, now: Now) -> Vec<Announcement> {
        match outcome {
            Outcome::Connected(result) => {
                self.busy.connect = false;
                self.connected(result, now);
            }
            Outcome::Greeted(connection, result) => {
                self.busy.hello = false;
                match result {
                    Ok(()) => {
                        self.hello_at.get_or_insert(now.wall);
                        self.with_link(connection, |greeted, _, _| *greeted = true);
                    }
                    Err(error) => return self.failed(&error, now),
                }
            }
            Outcome::Network(connection, result) => {
                self.busy.network = false;
                match result {
                    Ok(mut ready) => {
                        for nic in ready.nics.iter_mut().filter(|nic| nic.mac.is_empty()) {
                            nic.mac = generated_mac(&self.facts.uid, &nic.name);
                        }
                        self.network = Some(Arc::new(ready));
                        self.with_link(connection, |_, networked, _| *networked = true);
                    }
                    Err(failure) => {
                        let news = self.network_failed(&failure, now);
                        self.spare_guest();
                        return news;
                    }
                }
            }
            Outcome::Synced(connection, fingerprint, result) => {
                self.busy.sync = false;
                match result {
                    Ok(started) => {
                        self.failure = None;
                        self.ran |= started;
                        self.with_link(connection, |_, _, synced| *synced = Some(fingerprint));
                        self.delay_io_retry(now);
                        // Once, whatever the launcher says later.
                        if started && !std::mem::replace(&mut self.creation_told, true) {
                            return vec![Announcement::normal("Created", "VirtualMachineInstance defined.")];
                        }
                    }
                    Err(error) => {
                        self.delay_io_retry(now);
                        let news = self.failed(&error, now);
                        self.spare_guest();
                        return news;
                    }
                }
            }
            Outcome::Signalled(result) => {
                self.busy.power = false;
                // A launcher that is gone has stopped its machine; any other failure is tried again with the next signal.
                if let Err(error) = result
                    && !error.is_lost()
                {
                    return vec![Announcement::warning("SyncFailed", error.to_string())];
                }
            }
            Outcome::Finished(result) => {
                self.busy.finish = false;
                self.finished = match result {
                    Ok(()) => true,
                    Err(error) => error.is_lost(),
                };
                if self.finished {
                    return vec![Announcement::normal("Deleted", "Signaled Deletion")];
                }
                self.note_failure("the launcher did not accept that it may exit".into(), false, now);
            }
            Outcome::Written(result, announcements) => {
                self.busy.record = false;
                let written = result.is_ok();
                self.written(result, node, now);
                if written {
                    return announcements;
                }
            }
            Outcome::Read(result) => {
                self.busy.record = false;
                self.read(result, node, now);
            }
            Outcome::Requested => self.busy.request = false,
        }
        Vec::new()
    }

    fn with_link(&mut self, connection: u64, change: impl FnOnce(&mut bool, &mut bool, &mut Option<u64>)) {
        if let Link::Up { connection: current, greeted, networked, synced } = &mut self.link
            && *current == connection
        {
            change(greeted, networked, synced);
        }
    }

    /// Why the last attempt to connect was refused.
    pub fn trouble(&self) -> Option<&str> {
        match &self.link {
            Link::Down { trouble, .. } => trouble.as_ref().map(|trouble| trouble.message.as_str()),
            Link::Up { .. } => None,
        }
    }

    fn connected(&mut self, result: Result<u64, ConnectError>, now: Now) {
        match result {
            Ok(connection) => {
                self.connected_at = now.since_start;
                self.link = Link::Up { connection, greeted: false, networked: false, synced: None };
            }
            Err(error) => {
                let Link::Down { retry_at, pod_missing_since, trouble, .. } = &mut self.link else { return };
                // Usually the attempt itself was the wait; where it was not, this keeps it from being made all the time.
                *retry_at = now.since_start + RECONNECT;
                match error {
                    ConnectError::NoSocket => (*pod_missing_since, *trouble) = (None, None),
                    ConnectError::NoPod => {
                        pod_missing_since.get_or_insert(now.since_start);
                        *trouble = None;
                    }
                    ConnectError::Refused(message) => {
                        *pod_missing_since = None;
                        let (since, attempts) =
                            trouble.take().map_or((now.since_start, 0), |known| (known.since, known.attempts));
                        *retry_at = now.since_start + RECONNECT.saturating_mul(1 << attempts.min(5));
                        *trouble = Some(Trouble { since, attempts: attempts.saturating_add(1), message });
                    }
                }
            }
        }
    }

    fn delay_io_retry(&mut self, now: Now) {
        if let Some(pause) = &mut self.io_pause {
            pause.attempts = pause.attempts.saturating_add(1);
            pause.retry_at = now.since_start + io_wait(pause.attempts);
        }
    }

    fn failed(&mut self, error: &LauncherError, now: Now) -> Vec<Announcement> {
        // The connection's own end is reported by the state stream, and a new one is made.
        if error.is_lost() {
            self.hold_until = now.since_start + RECONNECT;
            return Vec::new();
        }
        let hopeless = matches!(error, LauncherError::Refused { irrecoverable: true, .. });
        self.note_failure(error.to_string(), hopeless, now)
    }

    /// A guest that runs does not end because its launcher could not be told something, or because an agent that starts
    /// again finds fault with its network.
    fn spare_guest(&mut self) {
        let runs = match &self.report {
            Some(_) => self.domain().is_alive(),
            None => self.facts.phase == Phase::Running,
        };
        if let Some(failure) = self.failure.as_mut().filter(|_| runs) {
            failure.hopeless = false;
        }
    }

    fn network_failed(&mut self, failure: &NetworkFailure, now: Now) -> Vec<Announcement> {
        self.note_failure(format!("failed to configure vmi network: {}", failure.message), failure.permanent, now)
    }

    /// Remembers a failure, with a pause that doubles; users hear of each new text once.
    fn note_failure(&mut self, message: String, hopeless: bool, now: Now) -> Vec<Announcement> {
        let known = self.failure.take();
        let count = known.as_ref().map_or(0, |failure| failure.count).saturating_add(1);
        let news = known.is_none_or(|failure| failure.message != message);
        let failure = Failure { message: message.clone(), count, retry_at: now.since_start + pause(count), hopeless };
        self.failure = Some(failure);
        if news { vec![Announcement::warning("SyncFailed", message)] } else { Vec::new() }
    }

    fn written(&mut self, result: Result<Arc<VirtualMachineInstance>, WriteError>, node: &str, now: Now) {
        match result {
            Ok(vmi) => {
                self.write_retry = None;
                self.guest_changed_at = None;
                self.guest_written_at = Some(now.since_start);
                self.paced = self.paced.max(now.since_start) + WRITE_INTERVAL;
                self.take(vmi, node);
            }
            Err(WriteError::Gone) => self.presence = Presence::Unseen,
            Err(WriteError::Conflict) => self.delay_write("conflict".into(), now, true),
            Err(WriteError::Other(message)) => self.delay_write(message, now, false),
        }
    }

    /// `stale`: the object has to be read before the next attempt, which may then follow at once.
    fn delay_write(&mut self, message: String, now: Now, stale: bool) {
        let count = self.write_retry.as_ref().map_or(0, |failure| failure.count).saturating_add(1);
        let wait = if stale && count <= 3 { Duration::ZERO } else { pause(count) };
        self.write_retry = Some(Failure { message, count, retry_at: now.since_start + wait, hopeless: false });
        if stale {
            self.presence = Presence::Unseen;
        }
    }

    fn read(&mut self, result: Result<Option<Arc<VirtualMachineInstance>>, WriteError>, node: &str, now: Now) {
        match result {
            Ok(Some(vmi)) if vmi.metadata.uid.as_deref() != Some(self.facts.uid.as_str()) => {
                self.presence = Presence::Deleted(now.since_start);
            }
            Ok(None) | Err(WriteError::Gone) => self.presence = Presence::Deleted(now.since_start),
            Ok(Some(vmi)) => {
                self.presence = if is_here(&vmi, node) { Presence::Present } else { Presence::Elsewhere };
                self.take(vmi, node);
            }
            Err(WriteError::Conflict) => self.delay_write("conflict".into(), now, false),
            Err(WriteError::Other(message)) => self.delay_write(message, now, false),
        }
    }
}

impl Link {
    fn down(since: Duration, had: bool) -> Self {
        Self::Down { since, had, retry_at: since, pod_missing_since: None, trouble: None }
    }
}

/// A machine's object is written so often in the long run, whatever its launcher reports ...
pub const WRITE_INTERVAL: Duration = Duration::from_secs(2);
/// ... and so many writes at once are no more than a start and what a user does to a machine.
pub const WRITE_BURST: u32 = 12;
/// Pause after a lost connection: short, for a worker that is restarted is back at once. Doubles, up to some seconds,
/// while connections do not last.
const AFTER_LOSS: Duration = Duration::from_millis(50);
/// A connection that was there this long has lasted.
const LASTING: Duration = Duration::from_secs(10);
/// Least time between two events about a guest agent's silence, whatever the launcher counts.
const SILENCES_APART: Duration = Duration::from_secs(60);
/// Pause after an attempt to connect; doubles, up to some seconds, while connections are refused.
const RECONNECT: Duration = Duration::from_millis(100);
/// First and longest pause before a machine that stands still after an I/O error is tried again.
const IO_RETRY_FIRST: Duration = Duration::from_secs(10);
const IO_RETRY_LAST: Duration = Duration::from_secs(180);
/// A guest that has run this long since has overcome its I/O error.
const IO_FORGOTTEN: Duration = Duration::from_secs(30);

/// Pause before a machine that stands still is tried again, after so many attempts.
fn io_wait(attempts: u32) -> Duration {
    IO_RETRY_FIRST.saturating_mul(1 << attempts.min(8)).min(IO_RETRY_LAST)
}

/// Pause after the n-th failure in a row: 1 s, doubling, at most a minute.
fn pause(count: u32) -> Duration {
    Duration::from_secs(1 << count.saturating_sub(1).min(6)).min(Duration::from_secs(60))
}

/// The address of an interface whose object names none: the same each time, so that it outlives the agent, with the
/// prefix of QEMU's own addresses. It is seen inside the pod only.
fn generated_mac(uid: &str, name: &str) -> String {
    let digest = Sha256::new().chain_update(uid).chain_update([0]).chain_update(name).finalize();
    match digest.as_slice() {
        [a, b, c, ..] => format!("52:54:00:{a:02x}:{b:02x}:{c:02x}"),
        _ => String::new(),
    }
}

/// Resource versions are ordered numbers; where they are not, the newer arrival counts.
fn is_older(vmi: &VirtualMachineInstance, known: &VirtualMachineInstance) -> bool {
    let version = |vmi: &VirtualMachineInstance| vmi.metadata.resource_version.as_ref()?.parse::<u64>().ok();
    matches!((version(vmi), version(known)), (Some(new), Some(old)) if new < old)
}

/// What users read of a crash of the guest's kernel.
fn crash_text(panic: &GuestPanic) -> String {
    let values: Vec<String> = panic.values.iter().map(|value| format!("'{value}'")).collect();
    match panic.kind.as_str() {
        "" => "GuestPanicked (details unavailable)".into(),
        "hyper-v" if !values.is_empty() => format!("GuestPanicked: {}", values.join(", ")),
        kind => format!("GuestPanicked: type={kind}"),
    }
}

/// True when what the guest itself reports differs.
fn guest_differs(known: &MachineState, new: &MachineState) -> bool {
    known.guest_agent_connected != new.guest_agent_connected
        || known.guest != new.guest
        || known.agent != new.agent
        || known.interfaces != new.interfaces
        || known.memory_current != new.memory_current
}
