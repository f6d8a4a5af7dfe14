//! Progress of a migration, for `kubectl virt migrate --wait`.

use std::time::Duration;

use api::constants::annotation::MIGRATION_PROGRESS;
use serde_json::json;

use crate::vmi::observed::{Now, Observed};

/// Least interval of writes of the progress.
const INTERVAL: Duration = Duration::from_secs(2);

/// Returns the progress to write and the time from which it may be written; `None` if the object shows it.
pub(in crate::vmi) fn due(observed: &Observed, now: Now) -> Option<(String, Duration)> {
    let report = observed.copying().filter(|report| report.total > 0)?;
    let value = json!({
        "migration": report.migration,
        "total": report.total,
        "processed": report.processed,
        "remaining": report.remaining,
        "rate": report.rate,
    })
    .to_string();
    let shown = observed.vmi.metadata.annotations.as_ref().and_then(|annotations| annotations.get(MIGRATION_PROGRESS));
    let at = observed.progress_written_at.map_or(now.since_start, |at| at + INTERVAL);
    (shown != Some(&value)).then_some((value, at))
}
