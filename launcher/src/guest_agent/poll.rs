//! Polls the guest agent for the facts in the VMI's status.

use std::{
    sync::{Arc, Weak},
    time::Duration,
};

use tokio::time::{Instant, sleep_until};

use super::{GuestAgent, GuestAgentError, Inner, POLL_DEADLINE, Query};

/// Pause after the first answer; it doubles up to the query's own interval.
const FIRST: Duration = Duration::from_secs(5);
/// Interval of the check for frozen file systems: the guest may thaw them itself.
const FROZEN: Duration = Duration::from_secs(5);

/// Queries with their longest intervals.
const RHYTHM: [(Query, Duration); 7] = [
    (Query::Agent, Duration::from_secs(300)),
    (Query::System, Duration::from_secs(120)),
    (Query::HostName, Duration::from_secs(120)),
    (Query::TimeZone, Duration::from_secs(120)),
    (Query::Interfaces, Duration::from_secs(120)),
    (Query::Processors, Duration::from_secs(120)),
    (Query::Freeze, Duration::from_secs(120)),
];

/// Schedule of one query.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Due {
    /// Time of the next query.
    pub(crate) at: Instant,
    pause: Duration,
    longest: Duration,
}

impl Due {
    pub(super) fn now(longest: Duration, now: Instant) -> Self {
        Self { at: now, pause: FIRST.min(longest), longest }
    }

    /// Schedules the next query after one has run.
    pub(super) fn asked(&mut self, frozen: bool, now: Instant) {
        self.at = now + if frozen { FROZEN.min(self.pause) } else { self.pause };
        self.pause = (self.pause * 2).min(self.longest);
    }

    /// Begins again at the shortest interval: something has changed, and more may follow.
    pub(super) fn begin_again(&mut self, now: Instant) {
        self.pause = FIRST.min(self.longest);
        self.at = self.at.min(now + self.pause);
    }
}

/// Runs the queries in turn; aborted from outside when the guest agent disconnects.
pub(super) async fn run(agent: Weak<Inner>) {
    let start = Instant::now();
    let mut plan = RHYTHM.map(|(query, longest)| (query, Due::now(longest, start)));
    let Some(changed) = agent.upgrade().map(|inner| inner.changed.clone()) else { return };
    loop {
        let Some(next) = plan.iter_mut().min_by_key(|(_, due)| due.at) else { return };
        tokio::select! {
            () = changed.notified() => {
                let now = Instant::now();
                plan.iter_mut().for_each(|(_, due)| due.begin_again(now));
            }
            () = sleep_until(next.1.at) => {
                let Some(inner) = agent.upgrade() else { return };
                let frozen = ask(inner, next.0).await;
                next.1.asked(frozen && next.0 == Query::Freeze, Instant::now());
            }
        }
    }
}

/// Runs one query. Returns true if the file systems are frozen.
async fn ask(inner: Arc<Inner>, query: Query) -> bool {
    let agent = GuestAgent { inner };
    match agent.ask(query, Instant::now() + POLL_DEADLINE).await {
        Ok(_) | Err(GuestAgentError::Unsupported(_)) => {}
        Err(error) => tracing::debug!(%error, command = query.command(), "the guest agent query failed"),
    }
    agent.inner.facts.borrow().file_systems == "frozen"
}
