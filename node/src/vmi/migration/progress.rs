//! Progress of a migration, for `kubectl virt migrate --wait`.

use std::time::Duration;

use api::constants::annotation::MIGRATION_PROGRESS;
use serde_json::json;

use crate::vmi::observed::{Now, Observed};

/// Least interval of writes of the progress.
const INTERVAL: Duration = Duration::from_secs(2);

/// Returns the progress to write and the time from which it may be written; `None` without a transfer.
pub(in crate::vmi) fn due(observed: &Observed, now: Now) -> Option<(String, Duration)> {
    let report = observed.copying().filter(|report| report.total > 0)?;
    // virt-controller gives up a migration whose progress shows no sign of life. To the minute, for a transfer that stands still.
    let minute = now.wall.as_second().div_euclid(60) * 60;
    let value = json!({
        "migration": report.migration,
        "total": report.total,
        "processed": report.processed,
        "remaining": report.remaining,
        "rate": report.rate,
        "time": jiff::Timestamp::from_second(minute).unwrap_or(now.wall),
    })
    .to_string();
    let shown = observed.vmi.metadata.annotations.as_ref().and_then(|annotations| annotations.get(MIGRATION_PROGRESS));
    let next_minute = Duration::from_secs(60u64.saturating_sub(now.wall.as_second().rem_euclid(60).unsigned_abs()));
    let at = if shown == Some(&value) {
        now.since_start + next_minute
    } else {
        observed.progress_written_at.map_or(now.since_start, |at| at + INTERVAL)
    };
    Some((value, at))
}
