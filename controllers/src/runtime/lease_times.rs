//! Times of the election.

use std::time::Duration;

/// Times of the election. With the defaults another replica takes the lease 8 s after it saw the last renewal, which it sees at once by a
/// watch, and within a second without one.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Times {
    /// Life of a lease without renewal. No write of the leader lasts longer.
    pub duration: Duration,
    /// Time for which the leader begins writes without a renewal.
    pub deadline: Duration,
    /// Time between renewals.
    pub renew: Duration,
    /// Time between reads of another replica's lease without a watch or a renewal, and before a failed renewal is repeated.
    pub poll: Duration,
    /// Time without a renewal after which the leader ends, although no other replica leads.
    pub patience: Duration,
}

impl Times {
    /// Returns the longest time for a read and a write of the lease.
    pub(super) fn limit(&self) -> Duration {
        self.poll * 3
    }

    /// Returns the time after which a renewal is overdue.
    pub(super) fn overdue(&self) -> Duration {
        self.renew + self.poll / 2
    }
}

impl Default for Times {
    fn default() -> Self {
        Self {
            duration: Duration::from_secs(8),
            deadline: Duration::from_secs(6),
            renew: Duration::from_secs(3),
            poll: Duration::from_secs(1),
            patience: Duration::from_secs(15),
        }
    }
}
