//! Claims that the storage does not bind: the newest warning about one, which no watch shows.

use jiff::{SignedDuration, Timestamp};

use super::{
    Observed, Step,
    status::{Fact, reason},
};
use crate::{
    resources::{
        claim_facts::{ClaimWarning, is_old},
        claims::CachedClaim,
        storage_classes::CachedStorageClass,
    },
    runtime::Effect,
};

/// Least and greatest time between two reads of the warnings about a claim. A list of events is a search for the API server.
const SOONEST: SignedDuration = SignedDuration::from_secs(10);
const LATEST: SignedDuration = SignedDuration::from_mins(5);
/// Part of the age of a claim that passes between two reads.
const PART: i32 = 10;

/// Shows why a claim is not bound, and reads that anew when it is due.
pub(super) fn explained(observed: &Observed, claim: &CachedClaim, mut step: Step) -> Step {
    if !observed.begins || !is_asked(claim, observed.class.as_deref()) {
        return step;
    }
    let known = known(claim, observed.warning.as_deref());
    if let (Some(text), Some(shown)) = (known.and_then(|known| text(claim, known)), step.shown.as_mut()) {
        shown.bound = Fact::no(reason::PENDING, text);
    }
    let created = claim.metadata.creation_timestamp.as_ref();
    let age = created.map_or(SignedDuration::ZERO, |created| observed.now.duration_since(created.0));
    let interval = (age / PART).clamp(SOONEST, LATEST);
    let wake = std::time::Duration::try_from(interval).ok();
    Step { wake: wake.into_iter().chain(step.wake).min(), ..step.before(read(claim, known, observed.now, interval)) }
}

/// Returns true if the storage has to make an empty volume for a claim: its class does not wait for a pod, or a pod has a node. The
/// steps of clones read the warnings about a volume with content.
fn is_asked(claim: &CachedClaim, class: Option<&CachedStorageClass>) -> bool {
    let waits = !claim.has_node && class.is_some_and(|class| class.is_late);
    claim.phase == "Pending" && claim.data_source.is_none() && !waits
}

/// Returns what was read about this claim, as opposed to a former one of its name.
pub(super) fn known<'a>(claim: &CachedClaim, warning: Option<&'a ClaimWarning>) -> Option<&'a ClaimWarning> {
    warning.filter(|known| known.metadata.uid == claim.metadata.uid)
}

/// Returns the message of condition Bound with the newest warning.
pub(super) fn text(claim: &CachedClaim, known: &ClaimWarning) -> Option<String> {
    let name = claim.metadata.name.as_deref().unwrap_or_default();
    known.warning.as_ref().map(|(_, message)| format!("target PVC {name} Pending: {message}"))
}

/// Returns the read of the warnings about a claim, unless it was created or read within the interval.
pub(super) fn read(
    claim: &CachedClaim,
    known: Option<&ClaimWarning>,
    now: Timestamp,
    interval: SignedDuration,
) -> Option<Effect> {
    let metadata = &claim.metadata;
    let since = known.map(|known| known.read_at).or(metadata.creation_timestamp.as_ref().map(|at| at.0));
    since.is_none_or(|since| is_old(since, now, interval)).then(|| Effect::ReadClaimWarning {
        namespace: metadata.namespace.clone().unwrap_or_default(),
        claim: metadata.name.clone().unwrap_or_default(),
        uid: metadata.uid.clone().unwrap_or_default(),
    })
}
