//! Decisions of controllers, and the refused writes that they wait for.

use std::time::Duration;

use jiff::Timestamp;

use super::effect::Effect;

/// A refused write. It is passed to the next decisions about the key until a write for the same reason succeeds or nothing
/// is left to do. A decision that waits for it sets a wake-up.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Failure {
    /// Reason that the effect names.
    pub reason: &'static str,
    /// Message of the API server.
    pub message: String,
    /// Earliest time of the next attempt.
    pub retry_at: Timestamp,
    /// Refusals in a row.
    pub attempts: u32,
}

impl Failure {
    /// Returns true while the write must not be repeated.
    #[must_use]
    pub(crate) fn blocks(&self, now: Timestamp) -> bool {
        now < self.retry_at
    }

    /// Returns the time until the write can be repeated.
    #[must_use]
    pub(crate) fn remaining(&self, now: Timestamp) -> Duration {
        Duration::try_from(self.retry_at.duration_since(now)).unwrap_or(Duration::ZERO)
    }
}

/// The refused writes of a key, one for each reason: those that are refused in turns wait for times of their own. The newest is last.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Failures(Vec<Failure>);

impl Failures {
    /// Returns the refusal of the writes with this reason.
    #[must_use]
    pub(crate) fn of(&self, reason: &str) -> Option<&Failure> {
        self.0.iter().find(|failure| failure.reason == reason)
    }

    /// Returns the last refusal.
    #[must_use]
    pub(crate) fn newest(&self) -> Option<&Failure> {
        self.0.last()
    }

    /// Returns true if no write was refused.
    #[must_use]
    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Adds a refusal in place of the former one with its reason.
    pub(super) fn add(&mut self, failure: Failure) {
        self.remove(&[failure.reason]);
        self.0.push(failure);
    }

    /// Removes the refusals with these reasons. Returns true if there were any.
    pub(super) fn remove(&mut self, reasons: &[&str]) -> bool {
        let count = self.0.len();
        self.0.retain(|failure| !reasons.contains(&failure.reason));
        self.0.len() < count
    }
}

#[cfg(test)]
impl From<Option<Failure>> for Failures {
    fn from(failure: Option<Failure>) -> Self {
        Self(failure.into_iter().collect())
    }
}

#[cfg(test)]
impl From<[Failure; 2]> for Failures {
    fn from(failures: [Failure; 2]) -> Self {
        Self(failures.into())
    }
}

/// A decision: effects in order (the first that fails ends the rest) and the next wake-up.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Decision {
    /// Writes, in order.
    pub effects: Vec<Effect>,
    /// Time after which the key is reconciled even if nothing changes.
    pub wake_after: Option<Duration>,
}

impl Decision {
    /// Returns the decision to do nothing.
    #[must_use]
    pub(crate) fn settled() -> Self {
        Self::default()
    }

    /// Returns true when there is nothing to do and nothing to wait for.
    #[must_use]
    pub(crate) fn is_settled(&self) -> bool {
        self.effects.is_empty() && self.wake_after.is_none()
    }

    /// Sets the wake-up to `time`, unless an earlier one is set.
    pub(crate) fn wake(&mut self, time: Duration) {
        self.wake_after = Some(self.wake_after.map_or(time, |known| known.min(time)));
    }

    /// Returns true if a write that was refused for this reason must not be repeated yet. The key is reconciled then.
    pub(crate) fn must_wait(&mut self, failures: &Failures, reason: &str, now: Timestamp) -> bool {
        let blocking = failures.of(reason).filter(|failure| failure.blocks(now));
        if let Some(failure) = blocking {
            self.wake(failure.remaining(now));
        }
        blocking.is_some()
    }

    /// Adds an effect.
    pub(crate) fn push(&mut self, effect: Effect) {
        self.effects.push(effect);
    }
}
