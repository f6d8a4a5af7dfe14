//! The hot-plugged volumes of a launcher, as observed by work for them.

use std::time::Duration;

use daemon::backoff;

use super::event::Event;
use crate::volumes::Volumes;

/// First and longest pause before failed work is repeated.
const RETRY: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(15));
/// The same while attachment pods start. Each attempt waits for their sockets, and other volumes wait for its end.
const POD_RETRY: (Duration, Duration) = (Duration::from_millis(100), Duration::from_secs(1));

/// Interval at which devices are granted again. With cgroup v2 and the systemd driver, an update of the container, such as an
/// in-place resize of the pod, lets systemd write its device program anew, without these devices.
const GRANT_INTERVAL: Duration = Duration::from_secs(30);

/// The volumes of the launcher, as last observed.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct LauncherVolumes {
    /// The result of the last work.
    pub(super) volumes: Volumes,
    /// Consecutive results with failures.
    attempts: u32,
    /// Time of the next attempt.
    pub(super) retry_at: Duration,
    /// Time from which devices are granted again.
    pub(super) grant_at: Duration,
}

impl LauncherVolumes {
    /// Returns the state after some work, given the one before.
    pub(super) fn after(before: Option<&Self>, volumes: Volumes, now: Duration) -> Self {
        let attempts = match before {
            _ if volumes.failures.is_empty() => 0,
            Some(known) => known.attempts.saturating_add(1),
            None => 1,
        };
        // An attachment pod that starts is not announced.
        let waits_only = volumes.failures.values().all(|failure| failure.waiting);
        let pause = backoff::pause(if waits_only { POD_RETRY } else { RETRY }, attempts);
        Self { volumes, attempts, retry_at: now + pause, grant_at: now + GRANT_INTERVAL }
    }

    /// Returns an event for each failure that was not there before.
    pub(super) fn events(&self, before: Option<&Self>) -> Vec<Event> {
        let known = |volume: &String| before.and_then(|before| before.volumes.failures.get(volume));
        let failures = self.volumes.failures.iter().filter(|(_, failure)| !failure.waiting);
        let new = failures.filter(|(volume, failure)| known(volume) != Some(failure));
        new.map(|(volume, failure)| Event::warning("HotplugFailed", format!("volume {volume}: {}", failure.message)))
            .collect()
    }
}
