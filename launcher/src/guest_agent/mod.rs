//! The guest agent: facts about the guest, and freezing of its file systems.
//!
//! ```text
//!            connected, guest runs              guest is paused
//!   Absent ------------------------> Polled <-------------------> Known (kept, not asked)
//!      ^                               |                             |
//!      +------- disconnected ----------+-----------------------------+
//!
//!   thawed -- freeze --> frozen -- unfreeze, or the automatic thaw --> thawed
//! ```
//!
//! Facts for the VMI's status are polled slowly ([`poll`]); users and file systems are queried on request. One query
//! runs at a time, each with a deadline: a guest that does not answer blocks one call, and earlier facts stay.

mod answers;
pub(crate) mod credentials;
mod exec;
mod freeze;
mod poll;
#[cfg(test)]
mod tests;

use std::{
    path::PathBuf,
    sync::{Arc, Mutex, MutexGuard, PoisonError, atomic::AtomicBool},
    time::Duration,
};

use futures::future::BoxFuture;
use protocol::{GuestFileSystem, GuestInfo, GuestInterface, GuestLoad, GuestReportReply, GuestUser};
use thiserror::Error;
use tokio::{
    sync::{Notify, watch},
    task::AbortHandle,
    time::{Instant, timeout_at},
};

use self::freeze::Thaw;
pub(crate) use self::{
    answers::{Answer, Query},
    exec::Executed,
};
use crate::{hypervisor::HypervisorError, tasks::Tasks};

/// Time limit for one query of the poll.
const POLL_DEADLINE: Duration = Duration::from_secs(10);
/// Time limit for all queries of one report; virt-handler gives up after 10 s.
const REPORT_DEADLINE: Duration = Duration::from_secs(6);
/// Age up to which requests get a cached answer.
const FRESH: Duration = Duration::from_secs(2);
/// Age up to which metrics get cached file systems and a cached load, and how long they wait for new ones.
const RECENT: Duration = Duration::from_secs(60);
const RECENT_LOAD: Duration = Duration::from_secs(15);
const RECENT_DEADLINE: Duration = Duration::from_secs(1);

/// Failure of a request to the guest agent.
#[derive(Debug, Error)]
pub(crate) enum GuestAgentError {
    /// No guest agent is connected. Clients match libvirt's text in the form that KubeVirt gives it.
    #[error(
        "LibvirtError(Code=86, Domain=10, Message='Guest agent is not responding: QEMU guest agent is not connected')"
    )]
    NotConnected,
    /// The guest agent does not support the command.
    #[error("the guest agent does not support {0}")]
    Unsupported(&'static str),
    /// The answer cannot be parsed.
    #[error("the guest agent returned a malformed answer to {0}")]
    Answer(&'static str),
    /// A program in the guest has not ended in time.
    #[error("Timed out waiting for guest pid [{pid}] for command [{command}] to exit")]
    TooLong {
        /// The program's process.
        pid: i64,
        /// The program.
        command: String,
    },
    /// Other queries held the channel until the deadline.
    #[error("the guest agent is busy")]
    Busy,
    /// libvirt or the guest agent failed.
    #[error(transparent)]
    Hypervisor(#[from] HypervisorError),
}

/// Transport of commands to the guest agent.
pub(crate) trait Channel: Send + Sync + 'static {
    /// Sends a command (JSON) and returns the whole answer (JSON), within the deadline.
    fn ask(&self, command: String, deadline: Duration) -> BoxFuture<'static, Result<String, HypervisorError>>;
}

/// Facts from the guest agent that belong to the domain's state.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct GuestFacts {
    /// The guest agent itself.
    pub(crate) agent: Option<protocol::GuestAgent>,
    /// The operating system, host name and time zone, once one of them is known.
    pub(crate) guest: Option<GuestInfo>,
    /// Interfaces except loopback.
    pub(crate) interfaces: Vec<GuestInterface>,
    /// `frozen`, `thawed`, or empty if not known.
    pub(crate) file_systems: String,
    /// Number of processors that the guest uses; 0 if not known.
    pub(crate) online_vcpus: u32,
    /// Number of times the guest agent stopped answering probes. It outlives the agent's connection.
    pub(crate) silences: u32,
}

/// Handle of the guest agent. Cheap to clone.
#[derive(Clone)]
pub(crate) struct GuestAgent {
    inner: Arc<Inner>,
}

struct Inner {
    channel: Box<dyn Channel>,
    tasks: Tasks,
    facts: watch::Sender<GuestFacts>,
    /// Held while a query runs.
    turn: tokio::sync::Mutex<()>,
    state: Mutex<State>,
    /// Notifies the poll of a change of the domain, or of an answer that differs from the one before.
    changed: Arc<Notify>,
    thaw: Mutex<Thaw>,
    /// Probes succeed without a query.
    probes_paused: AtomicBool,
    /// The last probe got no answer.
    silent: AtomicBool,
}

#[derive(Default)]
struct State {
    connected: bool,
    poll: Option<AbortHandle>,
    answers: Vec<(Query, Instant, Answer)>,
}

impl std::fmt::Debug for GuestAgent {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("GuestAgent")
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        if let Some(poll) = self.state.get_mut().unwrap_or_else(PoisonError::into_inner).poll.take() {
            poll.abort();
        }
    }
}

impl GuestAgent {
    /// Creates the handle of a guest agent behind `channel`. The file `thaw_at` keeps the time of an automatic thaw, in
    /// case the worker restarts before it.
    pub(crate) fn new(channel: impl Channel, thaw_at: PathBuf, tasks: Tasks) -> Self {
        Self {
            inner: Arc::new(Inner {
                channel: Box::new(channel),
                tasks,
                facts: watch::Sender::default(),
                turn: tokio::sync::Mutex::default(),
                state: Mutex::default(),
                changed: Arc::default(),
                thaw: Mutex::new(Thaw::new(thaw_at)),
                probes_paused: AtomicBool::new(false),
                silent: AtomicBool::new(false),
            }),
        }
    }

    /// Subscribes to the facts for the domain's state.
    pub(crate) fn facts(&self) -> watch::Receiver<GuestFacts> {
        self.inner.facts.subscribe()
    }

    /// Records a change of the connection or of the guest's state. Must run within a runtime.
    pub(crate) fn attend(&self, connected: bool, runs: bool) {
        let mut state = self.state();
        if connected && !state.connected {
            self.resume_thaw();
        }
        if !connected && state.connected {
            state.answers.clear();
            self.inner.thaw.lock().unwrap_or_else(PoisonError::into_inner).disconnect();
            self.inner.facts.send_if_modified(|facts| {
                let nothing = GuestFacts { silences: facts.silences, ..GuestFacts::default() };
                std::mem::replace(facts, nothing.clone()) != nothing
            });
        }
        state.connected = connected;
        match (&state.poll, connected && runs) {
            (None, true) => {
                let poll = poll::run(Arc::downgrade(&self.inner));
                state.poll = Some(self.inner.tasks.keep("guest agent poll", poll));
            }
            (Some(poll), false) => {
                poll.abort();
                state.poll = None;
            }
            _ => {}
        }
    }

    /// Begins the poll again at its shortest intervals: the domain has changed, so that the guest may, too.
    pub(crate) fn look_again(&self) {
        self.inner.changed.notify_one();
    }

    /// Returns a report on the guest. Queries without an answer in time fall back to the last known facts.
    pub(crate) async fn report(&self) -> Result<GuestReportReply, GuestAgentError> {
        let limit = Instant::now() + REPORT_DEADLINE;
        let mut open = None;
        // The poll keeps these up to date; query only those it has not reached yet.
        for query in [Query::Agent, Query::System, Query::HostName, Query::TimeZone, Query::Freeze] {
            if self.known(query).is_none() {
                leave_open(self.refreshed(query, limit).await, &mut open)?;
            }
        }
        let users = leave_open(self.users_within(limit).await, &mut open)?.unwrap_or_default();
        let file_systems = leave_open(self.file_systems_within(limit).await, &mut open)?.unwrap_or_default();
        let facts = self.inner.facts.borrow().clone();
        match open {
            Some(error) if facts.agent.is_none() && facts.guest.is_none() => Err(error),
            _ => Ok(GuestReportReply {
                guest: facts.guest,
                agent: facts.agent,
                users,
                file_systems,
                freeze: facts.file_systems,
            }),
        }
    }

    /// Returns the users logged in to the guest.
    pub(crate) async fn users(&self) -> Result<Vec<GuestUser>, GuestAgentError> {
        self.users_within(Instant::now() + REPORT_DEADLINE).await
    }

    /// Returns the guest's file systems.
    pub(crate) async fn file_systems(&self) -> Result<Vec<GuestFileSystem>, GuestAgentError> {
        self.file_systems_within(Instant::now() + REPORT_DEADLINE).await
    }

    /// Returns the guest's file systems, at most a minute old, and its load, for metrics. Nothing without an answer in time.
    pub(crate) async fn recent(&self) -> (Vec<GuestFileSystem>, Option<GuestLoad>) {
        let limit = Instant::now() + RECENT_DEADLINE;
        let file_systems = match self.inner.known(Query::FileSystems) {
            Some((at, Answer::FileSystems(list))) if at.elapsed() < RECENT => list,
            _ => self.file_systems_within(limit).await.unwrap_or_default(),
        };
        // An older load is not shown: it describes another time.
        let load = match self.inner.known(Query::Load) {
            Some((at, Answer::Load(load))) if at.elapsed() < RECENT_LOAD => Some(load),
            _ => match self.ask(Query::Load, limit).await {
                Ok(Answer::Load(load)) => Some(load),
                _ => None,
            },
        };
        (file_systems, load)
    }

    async fn users_within(&self, limit: Instant) -> Result<Vec<GuestUser>, GuestAgentError> {
        match self.refreshed(Query::Users, limit).await? {
            Some(Answer::Users(list)) => Ok(list),
            _ => Ok(Vec::new()),
        }
    }

    async fn file_systems_within(&self, limit: Instant) -> Result<Vec<GuestFileSystem>, GuestAgentError> {
        match self.refreshed(Query::FileSystems, limit).await? {
            Some(Answer::FileSystems(list)) => Ok(list),
            _ => Ok(Vec::new()),
        }
    }

    /// Returns the answer to a query, the last known one if necessary; `None` if the guest agent does not support the
    /// command.
    async fn refreshed(&self, query: Query, limit: Instant) -> Result<Option<Answer>, GuestAgentError> {
        match self.ask(query, limit).await {
            Ok(answer) => Ok(Some(answer)),
            Err(GuestAgentError::NotConnected) => Err(GuestAgentError::NotConnected),
            Err(GuestAgentError::Unsupported(_)) => Ok(None),
            // Guest agents before 2.10 lack some commands; with frozen file systems they refuse most.
            Err(GuestAgentError::Hypervisor(HypervisorError::GuestAgentRefused(_))) => Ok(self.known(query)),
            Err(error) => {
                tracing::debug!(%error, command = query.command(), "the guest agent query failed");
                self.known(query).map(Some).ok_or(error)
            }
        }
    }

    /// Runs a query unless a fresh answer is cached.
    async fn ask(&self, query: Query, limit: Instant) -> Result<Answer, GuestAgentError> {
        let _turn = timeout_at(limit, self.inner.turn.lock()).await.map_err(|_| GuestAgentError::Busy)?;
        self.inner.ask_in_turn(query, limit).await
    }

    fn known(&self, query: Query) -> Option<Answer> {
        self.inner.known(query).map(|(_, answer)| answer)
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.inner.state()
    }
}

/// Keeps an answer, or notes the error of a query that stays open, so that one unreachable file system does not hide
/// the other answers. Only a missing guest agent fails the report.
fn leave_open<T>(
    answer: Result<T, GuestAgentError>,
    open: &mut Option<GuestAgentError>,
) -> Result<Option<T>, GuestAgentError> {
    match answer {
        Ok(answer) => Ok(Some(answer)),
        Err(GuestAgentError::NotConnected) => Err(GuestAgentError::NotConnected),
        Err(error) => {
            *open = Some(error);
            Ok(None)
        }
    }
}

impl Inner {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn known(&self, query: Query) -> Option<(Instant, Answer)> {
        let state = self.state();
        state.answers.iter().find(|(known, ..)| *known == query).map(|(_, at, answer)| (*at, answer.clone()))
    }

    async fn ask_in_turn(&self, query: Query, limit: Instant) -> Result<Answer, GuestAgentError> {
        if !self.state().connected {
            return Err(GuestAgentError::NotConnected);
        }
        if let Some((at, answer)) = self.known(query)
            && at.elapsed() < FRESH
            && query != Query::Freeze
        {
            return Ok(answer);
        }
        let answer = self.command(query.command(), limit).await?;
        let answer = query.read(&answer).ok_or(GuestAgentError::Answer(query.command()))?;
        self.learn(query, answer.clone());
        Ok(answer)
    }

    /// Sends a command without arguments.
    async fn command(&self, command: &'static str, limit: Instant) -> Result<String, GuestAgentError> {
        self.send(command, format!(r#"{{"execute":"{command}"}}"#), limit).await
    }

    /// Sends the text of a command unless the guest agent does not support it.
    async fn send(&self, command: &'static str, text: String, limit: Instant) -> Result<String, GuestAgentError> {
        if self.lacks(command) {
            return Err(GuestAgentError::Unsupported(command));
        }
        let left = limit.saturating_duration_since(Instant::now());
        if left < Duration::from_millis(100) {
            return Err(GuestAgentError::Busy);
        }
        Ok(self.channel.ask(text, left).await?)
    }

    /// Reports that the guest agent's list of commands lacks a command.
    fn lacks(&self, command: &str) -> bool {
        let facts = self.facts.borrow();
        facts.agent.as_ref().is_some_and(|agent| {
            !agent.commands.is_empty() && !agent.commands.iter().any(|known| known.name == command && known.enabled)
        })
    }

    /// Drops the cached answer, so that the next query runs.
    fn forget(&self, query: Query) {
        self.state().answers.retain(|(known, ..)| *known != query);
    }

    fn learn(&self, query: Query, answer: Answer) {
        let mut state = self.state();
        if !state.connected {
            return;
        }
        self.facts.send_if_modified(|facts| {
            let before = facts.clone();
            let guest = || before.guest.clone().unwrap_or_default();
            match &answer {
                Answer::Agent(agent) => {
                    let mut agent = agent.clone();
                    // With frozen file systems the guest agent lists most commands as disabled. Keep the earlier list.
                    if let Some(known) = before.agent.as_ref().filter(|_| before.file_systems == "frozen") {
                        agent.commands.clone_from(&known.commands);
                    }
                    facts.agent = Some(agent);
                }
                Answer::System(system) => {
                    let GuestInfo { hostname, timezone, .. } = guest();
                    facts.guest = Some(GuestInfo { hostname, timezone, ..system.clone() });
                }
                Answer::HostName(hostname) => {
                    facts.guest = Some(GuestInfo { hostname: hostname.clone(), ..guest() });
                }
                Answer::TimeZone(timezone) => {
                    facts.guest = Some(GuestInfo { timezone: timezone.clone(), ..guest() });
                }
                Answer::Interfaces(interfaces) => facts.interfaces.clone_from(interfaces),
                Answer::Processors(online) => facts.online_vcpus = *online,
                Answer::Freeze(status) => facts.file_systems.clone_from(status),
                Answer::Users(_) | Answer::FileSystems(_) | Answer::Load(_) => {}
            }
            *facts != before
        });
        if let Answer::Freeze(status) = &answer {
            self.thaw.lock().unwrap_or_else(PoisonError::into_inner).learn(status);
        }
        let is_polled = !matches!(answer, Answer::Users(_) | Answer::FileSystems(_) | Answer::Load(_));
        if is_polled && state.answers.iter().any(|(known, _, before)| *known == query && *before != answer) {
            self.changed.notify_one();
        }
        state.answers.retain(|(known, ..)| *known != query);
        state.answers.push((query, Instant::now(), answer));
    }
}
