//! Facts about single claims that no watch shows: the pods that can write to a claim, and the newest warning about one that is not
//! bound. They are read on demand.

use jiff::{SignedDuration, Timestamp};
use k8s_openapi::{api::core::v1::Event, apimachinery::pkg::apis::meta::v1::ObjectMeta};

use super::pod_warnings;
use crate::runtime::ClaimUser;

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
