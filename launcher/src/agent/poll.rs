//! The rhythm in which a guest agent is asked for what belongs to the machine's status.

use std::{
    sync::{Arc, Weak},
    time::Duration,
};

use tokio::time::{Instant, sleep_until};

use super::{AgentError, GuestAgent, Inner, POLL_DEADLINE, Question};

/// Pause after the first answer; it doubles up to the question's own interval.
const FIRST: Duration = Duration::from_secs(5);
/// How often frozen file systems are looked at: the guest may thaw them by itself.
const FROZEN: Duration = Duration::from_secs(5);

/// The questions with the longest pause between two of a kind.
const RHYTHM: [(Question, Duration); 6] = [
    (Question::Agent, Duration::from_secs(300)),
    (Question::System, Duration::from_secs(120)),
    (Question::HostName, Duration::from_secs(120)),
    (Question::TimeZone, Duration::from_secs(120)),
    (Question::Interfaces, Duration::from_secs(120)),
    (Question::Freeze, Duration::from_secs(120)),
];

/// When a question is due.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Due {
    /// Next time.
    pub at: Instant,
    pause: Duration,
    longest: Duration,
}

impl Due {
    pub(super) fn now(longest: Duration, now: Instant) -> Self {
        Self { at: now, pause: FIRST.min(longest), longest }
    }

    /// The question was asked.
    pub(super) fn asked(&mut self, frozen: bool, now: Instant) {
        self.at = now + if frozen { FROZEN.min(self.pause) } else { self.pause };
        self.pause = (self.pause * 2).min(self.longest);
    }
}

/// Asks until the agent is no longer there; ended from outside when it disconnects.
pub(super) async fn run(agent: Weak<Inner>) {
    let start = Instant::now();
    let mut plan = RHYTHM.map(|(question, longest)| (question, Due::now(longest, start)));
    loop {
        let Some(next) = plan.iter_mut().min_by_key(|(_, due)| due.at) else { return };
        sleep_until(next.1.at).await;
        let Some(inner) = agent.upgrade() else { return };
        let frozen = ask(inner, next.0).await;
        next.1.asked(frozen && next.0 == Question::Freeze, Instant::now());
    }
}

/// Asks one question; true if the file systems are frozen.
async fn ask(inner: Arc<Inner>, question: Question) -> bool {
    let agent = GuestAgent { inner };
    match agent.ask(question, Instant::now() + POLL_DEADLINE).await {
        Ok(_) | Err(AgentError::Unsupported(_)) => {}
        Err(error) => tracing::debug!(%error, command = question.command(), "the guest agent does not tell"),
    }
    agent.inner.told.borrow().file_systems == "frozen"
}
