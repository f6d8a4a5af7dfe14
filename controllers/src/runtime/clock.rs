//! The clock of leases.

use std::time::Duration;

use rustix::time::{ClockId, clock_gettime};

/// A time of the clock that goes on while the host is suspended. The clock of [`std::time::Instant`] stands still then, so that a
/// holder would believe in a lease that others have taken meanwhile.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Moment(Duration);

impl Moment {
    /// Returns the current time.
    pub(crate) fn now() -> Self {
        let now = clock_gettime(ClockId::Boottime);
        let (seconds, nanoseconds) = (u64::try_from(now.tv_sec), u32::try_from(now.tv_nsec));
        Self(Duration::new(seconds.unwrap_or_default(), nanoseconds.unwrap_or_default()))
    }

    /// Returns the time that has passed since.
    pub(crate) fn elapsed(self) -> Duration {
        Self::now().0.saturating_sub(self.0)
    }

    /// Returns an earlier time.
    #[cfg(test)]
    pub(crate) fn checked_sub(self, age: Duration) -> Option<Self> {
        self.0.checked_sub(age).map(Self)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn time_passes() {
        let (early, late) = (Moment::now(), Moment::now());
        assert!(early <= late);
        let minute = Duration::from_secs(60);
        assert!(late.checked_sub(minute).unwrap().elapsed() >= minute);
    }
}
