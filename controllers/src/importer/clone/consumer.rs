//! The first consumer of a claim whose driver makes the volume from its data source, where no pod of a VMI is.
//!
//! ```text
//!   claim pending ── pod created ── scheduled ── driver makes the volume ── claim bound ── pod deleted
//! ```
//! Its program writes nothing. The content is there once the claim is bound, whether the program has run or not.

use super::Observed;
use crate::resources::claims::CachedClaim;

/// Returns true if a claim with a data source waits for such a pod: it is handed over to another namespace, or wanted at once.
pub(super) fn is_needed(observed: &Observed<'_>, claim: &CachedClaim) -> bool {
    let is_late = observed.class.is_some_and(|class| class.is_late);
    is_late
        && (observed.is_remote() || observed.is_immediate)
        && claim.phase == "Pending"
        && claim.metadata.deletion_timestamp.is_none()
}

/// Returns true if no pod has work with a claim any more: it is filled, or bound with the content of its data source, or it goes.
pub(super) fn is_done(claim: &CachedClaim) -> bool {
    let is_made = claim.data_source.is_some() && claim.phase == "Bound";
    is_made || claim.is_filled() || claim.metadata.deletion_timestamp.is_some()
}
