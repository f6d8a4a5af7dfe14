//! The guest agent: what it tells about its guest, and freezing of the guest's file systems.
//!
//! ```text
//!            connected, guest runs              guest is paused
//!   Absent ------------------------> Polled <-------------------> Known (kept, not asked)
//!      ^                               |                             |
//!      +------- disconnected ----------+-----------------------------+
//!
//!   thawed -- freeze --> frozen -- unfreeze, or the time given with the freeze is over --> thawed
//! ```
//!
//! What ends in the machine's status is asked for in a slow rhythm ([`poll`]); users and file systems are asked for when
//! somebody wants to know. One question is under way at a time, each with a deadline: a guest that does not answer costs
//! one blocked call, and what was known stays.

mod answers;
pub mod credentials;
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
use protocol::{GuestFileSystem, GuestInfo, GuestInterface, GuestReportReply, GuestUser};
use thiserror::Error;
use tokio::{
    sync::watch,
    task::AbortHandle,
    time::{Instant, timeout_at},
};

use self::freeze::Thaw;
pub use self::{
    answers::{Answer, Question},
    exec::Executed,
};
use crate::libvirt;

/// How long one question of the poll may take.
const POLL_DEADLINE: Duration = Duration::from_secs(10);
/// How long all questions of one report may take; virt-api gives up after 10 s.
const REPORT_DEADLINE: Duration = Duration::from_secs(6);
/// An answer is good for those who ask within this time.
const FRESH: Duration = Duration::from_secs(2);
/// An answer is good for metrics within this time, and this is how long they wait for another one.
const RECENT: Duration = Duration::from_secs(60);
const RECENT_DEADLINE: Duration = Duration::from_secs(1);

/// Why the guest agent was of no help.
#[derive(Debug, Error)]
pub enum AgentError {
    /// No agent is connected.
    #[error("VMI does not have guest agent connected")]
    NotConnected,
    /// The agent does not have the command.
    #[error("the guest agent does not support {0}")]
    Unsupported(&'static str),
    /// What came back is no answer.
    #[error("the guest agent's answer to {0} cannot be understood")]
    Answer(&'static str),
    /// A program in the guest has not ended in time.
    #[error("Timed out waiting for guest pid [{pid}] for command [{command}] to exit")]
    TooLong {
        /// The program's process.
        pid: i64,
        /// The program.
        command: String,
    },
    /// Others were asking for too long.
    #[error("the guest agent is busy")]
    Busy,
    /// libvirt or the agent failed.
    #[error(transparent)]
    Libvirt(#[from] libvirt::Error),
}

/// The way of commands to an agent.
pub trait Channel: Send + Sync + 'static {
    /// Sends a command (JSON) and returns the whole answer (JSON), within the deadline.
    fn ask(&self, command: String, deadline: Duration) -> BoxFuture<'static, Result<String, libvirt::Error>>;
}

/// What of an agent's answers belongs to the machine's state.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Told {
    /// The agent itself.
    pub agent: Option<protocol::GuestAgent>,
    /// The operating system, host name and time zone, once one of them is known.
    pub guest: Option<GuestInfo>,
    /// Interfaces but the loopback one.
    pub interfaces: Vec<GuestInterface>,
    /// `frozen`, `thawed`, or empty if not known.
    pub file_systems: String,
    /// How often the agent has ceased to answer probes. It outlives the agent's connection.
    pub silences: u32,
}

/// Handle of the guest agent. Cheap to clone.
#[derive(Clone)]
pub struct GuestAgent {
    inner: Arc<Inner>,
}

struct Inner {
    channel: Box<dyn Channel>,
    told: watch::Sender<Told>,
    /// Held while a question is under way.
    turn: tokio::sync::Mutex<()>,
    state: Mutex<State>,
    thaw: Mutex<Thaw>,
    /// Probes succeed without being asked.
    probes_paused: AtomicBool,
    /// The last probe met silence.
    silent: AtomicBool,
}

#[derive(Default)]
struct State {
    connected: bool,
    poll: Option<AbortHandle>,
    answers: Vec<(Question, Instant, Answer)>,
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
    /// An agent that is reached through `channel`. The file `thaw_at` keeps the time of an automatic thaw, for the case
    /// that the worker is restarted before it.
    pub fn new(channel: impl Channel, thaw_at: PathBuf) -> Self {
        Self {
            inner: Arc::new(Inner {
                channel: Box::new(channel),
                told: watch::Sender::default(),
                turn: tokio::sync::Mutex::default(),
                state: Mutex::default(),
                thaw: Mutex::new(Thaw::new(thaw_at)),
                probes_paused: AtomicBool::new(false),
                silent: AtomicBool::new(false),
            }),
        }
    }

    /// What belongs to the machine's state, now and as it changes.
    pub fn told(&self) -> watch::Receiver<Told> {
        self.inner.told.subscribe()
    }

    /// Tells whether an agent is connected and whether its guest runs. To be called on each change, within a runtime.
    pub fn attend(&self, connected: bool, runs: bool) {
        let mut state = self.state();
        if connected && !state.connected {
            self.resume_thaw();
        }
        if !connected && state.connected {
            state.answers.clear();
            self.inner.told.send_if_modified(|told| {
                let nothing = Told { silences: told.silences, ..Told::default() };
                std::mem::replace(told, nothing.clone()) != nothing
            });
        }
        state.connected = connected;
        match (&state.poll, connected && runs) {
            (None, true) => state.poll = Some(tokio::spawn(poll::run(Arc::downgrade(&self.inner))).abort_handle()),
            (Some(poll), false) => {
                poll.abort();
                state.poll = None;
            }
            _ => {}
        }
    }

    /// What the agent tells about its guest. What it does not answer in time is as it was last known.
    ///
    /// # Errors
    /// When no agent is connected, or it has answered nothing so far.
    pub async fn report(&self) -> Result<GuestReportReply, AgentError> {
        let limit = Instant::now() + REPORT_DEADLINE;
        let mut open = None;
        // What the poll keeps is only asked for if it has not come so far.
        for question in [Question::Agent, Question::System, Question::HostName, Question::TimeZone, Question::Freeze] {
            if self.known(question).is_none() {
                leave_open(self.refreshed(question, limit).await, &mut open)?;
            }
        }
        let users = leave_open(self.users_within(limit).await, &mut open)?.unwrap_or_default();
        let file_systems = leave_open(self.file_systems_within(limit).await, &mut open)?.unwrap_or_default();
        let told = self.inner.told.borrow().clone();
        match open {
            Some(error) if told.agent.is_none() && told.guest.is_none() => Err(error),
            _ => Ok(GuestReportReply {
                guest: told.guest,
                agent: told.agent,
                users,
                file_systems,
                freeze: told.file_systems,
            }),
        }
    }

    /// Who is logged in to the guest.
    ///
    /// # Errors
    /// When no agent is connected, or it has never answered.
    pub async fn users(&self) -> Result<Vec<GuestUser>, AgentError> {
        self.users_within(Instant::now() + REPORT_DEADLINE).await
    }

    /// The guest's file systems.
    ///
    /// # Errors
    /// When no agent is connected, or it has never answered.
    pub async fn file_systems(&self) -> Result<Vec<GuestFileSystem>, AgentError> {
        self.file_systems_within(Instant::now() + REPORT_DEADLINE).await
    }

    /// The guest's file systems as of a minute ago at most, if the agent tells; for metrics.
    pub async fn recent_file_systems(&self) -> Vec<GuestFileSystem> {
        match self.inner.known(Question::FileSystems) {
            Some((at, Answer::FileSystems(list))) if at.elapsed() < RECENT => list,
            _ => self.file_systems_within(Instant::now() + RECENT_DEADLINE).await.unwrap_or_default(),
        }
    }

    async fn users_within(&self, limit: Instant) -> Result<Vec<GuestUser>, AgentError> {
        match self.refreshed(Question::Users, limit).await? {
            Some(Answer::Users(list)) => Ok(list),
            _ => Ok(Vec::new()),
        }
    }

    async fn file_systems_within(&self, limit: Instant) -> Result<Vec<GuestFileSystem>, AgentError> {
        match self.refreshed(Question::FileSystems, limit).await? {
            Some(Answer::FileSystems(list)) => Ok(list),
            _ => Ok(Vec::new()),
        }
    }

    /// The answer to a question, if need be the last one; `None` if the agent does not have the command.
    async fn refreshed(&self, question: Question, limit: Instant) -> Result<Option<Answer>, AgentError> {
        match self.ask(question, limit).await {
            Ok(answer) => Ok(Some(answer)),
            Err(AgentError::NotConnected) => Err(AgentError::NotConnected),
            Err(AgentError::Unsupported(_)) => Ok(None),
            // Agents before 2.10 lack some commands, and one with frozen file systems refuses most.
            Err(AgentError::Libvirt(libvirt::Error::AgentRefused(_))) => Ok(self.known(question)),
            Err(error) => {
                tracing::debug!(%error, command = question.command(), "the guest agent does not tell");
                self.known(question).map(Some).ok_or(error)
            }
        }
    }

    /// Asks, unless the answer is fresh.
    async fn ask(&self, question: Question, limit: Instant) -> Result<Answer, AgentError> {
        let _turn = timeout_at(limit, self.inner.turn.lock()).await.map_err(|_| AgentError::Busy)?;
        self.inner.ask_in_turn(question, limit).await
    }

    fn known(&self, question: Question) -> Option<Answer> {
        self.inner.known(question).map(|(_, answer)| answer)
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.inner.state()
    }
}

/// What was answered. A question that stays open, as one about a file system whose server is away, takes nothing from the
/// answers to others; only without an agent there are none.
fn leave_open<T>(answer: Result<T, AgentError>, open: &mut Option<AgentError>) -> Result<Option<T>, AgentError> {
    match answer {
        Ok(answer) => Ok(Some(answer)),
        Err(AgentError::NotConnected) => Err(AgentError::NotConnected),
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

    fn known(&self, question: Question) -> Option<(Instant, Answer)> {
        let state = self.state();
        state.answers.iter().find(|(known, ..)| *known == question).map(|(_, at, answer)| (*at, answer.clone()))
    }

    async fn ask_in_turn(&self, question: Question, limit: Instant) -> Result<Answer, AgentError> {
        if !self.state().connected {
            return Err(AgentError::NotConnected);
        }
        if let Some((at, answer)) = self.known(question)
            && at.elapsed() < FRESH
            && question != Question::Freeze
        {
            return Ok(answer);
        }
        let answer = self.command(question.command(), limit).await?;
        let answer = question.read(&answer).ok_or(AgentError::Answer(question.command()))?;
        self.learn(question, answer.clone());
        Ok(answer)
    }

    /// Sends a command without arguments.
    async fn command(&self, command: &'static str, limit: Instant) -> Result<String, AgentError> {
        self.send(command, format!(r#"{{"execute":"{command}"}}"#), limit).await
    }

    /// Sends the text of a command, unless the agent says that it does not have it.
    async fn send(&self, command: &'static str, text: String, limit: Instant) -> Result<String, AgentError> {
        if self.lacks(command) {
            return Err(AgentError::Unsupported(command));
        }
        let left = limit.saturating_duration_since(Instant::now());
        if left < Duration::from_millis(100) {
            return Err(AgentError::Busy);
        }
        Ok(self.channel.ask(text, left).await?)
    }

    /// Whether the agent says that it does not have a command.
    fn lacks(&self, command: &str) -> bool {
        let told = self.told.borrow();
        told.agent.as_ref().is_some_and(|agent| {
            !agent.commands.is_empty() && !agent.commands.iter().any(|known| known.name == command && known.enabled)
        })
    }

    /// Makes the next question like this one be asked.
    fn forget(&self, question: Question) {
        self.state().answers.retain(|(known, ..)| *known != question);
    }

    fn learn(&self, question: Question, answer: Answer) {
        let mut state = self.state();
        if !state.connected {
            return;
        }
        self.told.send_if_modified(|told| {
            let before = told.clone();
            let guest = || before.guest.clone().unwrap_or_default();
            match &answer {
                Answer::Agent(agent) => {
                    let mut agent = agent.clone();
                    // With frozen file systems the agent calls most of its commands disabled. It has them all the same.
                    if let Some(known) = before.agent.as_ref().filter(|_| before.file_systems == "frozen") {
                        agent.commands.clone_from(&known.commands);
                    }
                    told.agent = Some(agent);
                }
                Answer::System(system) => {
                    let GuestInfo { hostname, timezone, .. } = guest();
                    told.guest = Some(GuestInfo { hostname, timezone, ..system.clone() });
                }
                Answer::HostName(hostname) => {
                    told.guest = Some(GuestInfo { hostname: hostname.clone(), ..guest() });
                }
                Answer::TimeZone(timezone) => {
                    told.guest = Some(GuestInfo { timezone: timezone.clone(), ..guest() });
                }
                Answer::Interfaces(interfaces) => told.interfaces.clone_from(interfaces),
                Answer::Freeze(status) => told.file_systems.clone_from(status),
                Answer::Users(_) | Answer::FileSystems(_) => {}
            }
            *told != before
        });
        state.answers.retain(|(known, ..)| *known != question);
        state.answers.push((question, Instant::now(), answer));
    }
}
