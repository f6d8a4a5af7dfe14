//! Cluster roles that the default roles of a cluster can include.

use k8s_openapi::{api::rbac::v1::ClusterRole, apimachinery::pkg::apis::meta::v1::ObjectMeta};

use super::{
    declaration::{Declaration, Selection},
    metadata::slim,
};
use crate::runtime::Kind;

/// A cluster role for users.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct CachedRole {
    /// Metadata, reduced, with all labels.
    pub metadata: ObjectMeta,
}

unindexed!(CachedRole);

impl From<ClusterRole> for CachedRole {
    fn from(mut role: ClusterRole) -> Self {
        let labels = role.metadata.labels.take();
        Self { metadata: ObjectMeta { labels, ..slim(role.metadata) } }
    }
}

impl Declaration for CachedRole {
    type Wire = ClusterRole;
    type Kept = Self;
    const SELECTION: Selection = Selection::Names(&["kubevirt.io:admin", "kubevirt.io:edit", "kubevirt.io:view"]);
    const WRITTEN: Option<Kind> = Some(Kind::ClusterRole);
}
