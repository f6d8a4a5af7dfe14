//! Progress of a migration to another launcher, and its limits. Pure.

use std::time::Duration;

use protocol::MigrationMode;
use tokio::time::Instant;

use super::{MigrationSource, post_copy::PostCopy};
use crate::hypervisor::Progress;

/// QEMU's longest downtime if the request has none, in milliseconds.
const DEFAULT_DOWNTIME: u64 = 300;
/// Iterations over the guest's memory up to which a shorter downtime is tried, and the time for them after the first one: on a
/// busy node each can take seconds. QEMU stops the guest as soon as it can copy the rest within the longest downtime, even if
/// another short iteration would leave much less of a calm guest.
const DOWNTIMES: [Downtime; 2] = [
    Downtime { iterations: 3, time: Duration::from_secs(2), milliseconds: 50 },
    Downtime { iterations: 6, time: Duration::from_secs(4), milliseconds: 200 },
];

/// Limits count in decimal gigabytes.
const GIGABYTE: u64 = 1_000_000_000;

/// A downtime that is tried first.
struct Downtime {
    iterations: u64,
    time: Duration,
    milliseconds: u64,
}

/// A time limit that has passed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Limit {
    /// The guest is paused, so that the rest can be copied.
    Pause,
    /// The guest leaves before its memory is copied.
    PostCopy,
    /// Aborted: no progress for these seconds.
    Stuck(u64),
    /// Aborted after these seconds.
    TooLong(u64),
}

impl MigrationSource {
    /// Returns what the time limits demand, with the time since the begin.
    pub(super) fn limit(&self, memory: u64, mode: MigrationMode, now: Instant) -> Option<Limit> {
        let request = &self.request;
        if matches!(self.post_copy, PostCopy::Wanted | PostCopy::Switched { .. }) {
            return None;
        }
        let stuck = now.duration_since(self.progress.1);
        if request.progress_timeout > 0 && stuck >= Duration::from_secs(request.progress_timeout) {
            return Some(Limit::Stuck(request.progress_timeout));
        }
        // It switches as soon as the target is prepared, for which a slow node needs longer than short limits. The one of progress ends it.
        if self.post_copy == PostCopy::Ready && request.progress_timeout > 0 {
            return None;
        }
        let is_first = mode == MigrationMode::PreCopy && self.post_copy == PostCopy::None;
        let passes = if is_first { 1 } else { 2 };
        let size = memory.saturating_add(self.disks).div_ceil(GIGABYTE);
        let seconds = request.completion_timeout_per_gb.saturating_mul(size).saturating_mul(passes);
        if seconds == 0 || now.duration_since(self.began) < Duration::from_secs(seconds) {
            return None;
        }
        Some(match request.allow_workload_disruption && is_first {
            // The memory of a paused guest does not change.
            true if request.post_copy && !self.was_paused => Limit::PostCopy,
            true => Limit::Pause,
            false => Limit::TooLong(seconds),
        })
    }

    /// Returns the longest downtime to set before this iteration, in milliseconds; `None` if it is set.
    pub(super) fn next_downtime(&mut self, iteration: u64, now: Instant) -> Option<u64> {
        let longest = match self.request.max_downtime_ms {
            0 => DEFAULT_DOWNTIME,
            milliseconds => milliseconds,
        };
        if iteration > 1 {
            self.repeats_since.get_or_insert(now);
        }
        let time = self.repeats_since.map_or(Duration::ZERO, |since| now.duration_since(since));
        let step = DOWNTIMES.iter().find(|step| iteration <= step.iterations && time < step.time);
        let wanted = step.map_or(longest, |step| longest.min(step.milliseconds)).max(self.downtime);
        (wanted != self.downtime).then(|| {
            self.downtime = wanted;
            wanted
        })
    }

    /// Records progress. A decrease of what remains counts as progress.
    pub(super) fn advance_progress(&mut self, progress: &Progress, now: Instant) {
        self.disks = progress.disks;
        if progress.remaining < self.progress.0 || progress.total == 0 {
            self.progress.1 = now;
        }
        self.progress.0 = progress.remaining;
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use protocol::MigrateRequest;

    use super::{super::Step, *};

    #[test]
    fn limits_count_in_decimal_gigabytes_and_pause_or_abort() {
        let now = Instant::now();
        let out = |request| MigrationSource::new(Arc::new(request), Step::Copying, now);
        let request =
            MigrateRequest { completion_timeout_per_gb: 150, progress_timeout: 100, ..MigrateRequest::default() };
        let gentle = MigrateRequest { allow_workload_disruption: true, ..request.clone() };
        let unlimited = MigrateRequest::default();
        let switching = MigrateRequest { post_copy: true, ..gentle.clone() };
        let (pre, paused) = (MigrationMode::PreCopy, MigrationMode::PausedCopy);
        // Progress is made all the time, or for the first 10 s.
        for (request, memory, disks, mode, seconds, advances, expected) in [
            (&request, 512 << 20, 0, pre, 149, true, None),
            (&request, 512 << 20, 0, pre, 150, true, Some(Limit::TooLong(150))),
            (&request, 1 << 30, 0, pre, 150, true, None),
            (&request, 512 << 20, 600_000_000, pre, 299, true, None),
            (&request, 512 << 20, 600_000_000, pre, 300, true, Some(Limit::TooLong(300))),
            (&gentle, 512 << 20, 0, pre, 150, true, Some(Limit::Pause)),
            (&gentle, 512 << 20, 0, paused, 299, true, None),
            (&gentle, 512 << 20, 0, paused, 300, true, Some(Limit::TooLong(300))),
            (&request, 512 << 20, 0, pre, 109, false, None),
            (&request, 512 << 20, 0, pre, 110, false, Some(Limit::Stuck(100))),
            (&switching, 512 << 20, 0, pre, 150, true, Some(Limit::PostCopy)),
            (&unlimited, 512 << 20, 0, pre, 1_000_000, false, None),
        ] {
            let mut job = out(request.clone());
            let at = |seconds| now + Duration::from_secs(seconds);
            let progress = |remaining| Progress { total: 1 << 30, disks, remaining, ..Progress::default() };
            job.advance_progress(&progress(100), at(10));
            job.advance_progress(&progress(if advances { 50 } else { 100 }), at(seconds));
            assert_eq!(job.limit(memory, mode, at(seconds)), expected, "{request:?} {seconds}");
        }
        // The job that can switch has no other limit than that of progress, if it has that.
        for (progress_timeout, seconds, expected) in
            [(400, 399, None), (400, 400, Some(Limit::Stuck(400))), (0, 299, None), (0, 300, Some(Limit::TooLong(300)))]
        {
            let mut job = out(MigrateRequest { progress_timeout, ..switching.clone() });
            job.post_copy = PostCopy::Ready;
            let found = job.limit(512 << 20, pre, now + Duration::from_secs(seconds));
            assert_eq!(found, expected, "{progress_timeout} {seconds}");
        }
    }
}
