//! Facts about single claims that no watch shows: the pods that can write to a claim, and the newest warning about one that is not
//! bound. They are read on demand.

use jiff::{SignedDuration, Timestamp};
use k8s_openapi::{
    api::core::v1::Event,
    apimachinery::pkg::apis::meta::v1::{ObjectMeta, Time},
};

use super::pod_warnings;
use crate::runtime::ClaimUser;

/// Age up to which a read of the pods that use a claim counts.
const FRESH: SignedDuration = SignedDuration::from_secs(5);
/// The same for one that found none after an operation was requested.
const FREE: SignedDuration = SignedDuration::from_mins(5);

/// The pods that can write to a claim.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct ClaimUsers {
    /// Name, namespace and UID of the claim.
    pub metadata: ObjectMeta,
    /// Time of the read.
    pub read_at: Timestamp,
    /// The first of them.
    pub users: Vec<ClaimUser>,
}

impl ClaimUsers {
    /// Returns true if the read counts for an operation that was requested at this time. One that found no pod counts longer: nothing
    /// keeps pods away after it anyway, and many operations at once, each with several claims, would read them again and again.
    #[must_use]
    pub(crate) fn counts(&self, requested: Option<&Time>, now: Timestamp) -> bool {
        let is_later = requested.is_some_and(|requested| self.read_at >= requested.0);
        let limit = if is_later && self.users.is_empty() { FREE } else { FRESH };
        !is_old(self.read_at, now, limit)
    }
}

/// The newest warning about a claim.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct ClaimWarning {
    /// Name, namespace and UID of the claim.
    pub metadata: ObjectMeta,
    /// Time of the read.
    pub read_at: Timestamp,
    /// Its reason and message.
    pub warning: Option<(String, String)>,
}

impl ClaimWarning {
    /// Returns the newest of these events.
    pub(super) fn newest(metadata: ObjectMeta, events: &[Event]) -> Self {
        let newest = events.iter().max_by_key(|event| pod_warnings::seen(event));
        let text = |text: &Option<String>| pod_warnings::text(text.as_deref().unwrap_or_default());
        let warning = newest.map(|event| (text(&event.reason), text(&event.message)));
        Self { metadata, read_at: Timestamp::now(), warning }
    }
}

/// Returns true if what was read at this time is too old.
#[must_use]
pub(crate) fn is_old(read_at: Timestamp, now: Timestamp, limit: SignedDuration) -> bool {
    now.duration_since(read_at) >= limit
}

unindexed!(ClaimUsers, ClaimWarning);
