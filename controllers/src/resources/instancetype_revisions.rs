//! Copies of instance types and preferences that VMs keep.

use api::instancetype::revision;
use k8s_openapi::{api::apps::v1::ControllerRevision, apimachinery::pkg::apis::meta::v1::ObjectMeta};

use super::{
    declaration::{Declaration, Selection},
    metadata::slim,
};
use crate::runtime::Kind;

/// The copy of an instance type or preference.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct InstancetypeRevision {
    /// Metadata, reduced.
    pub metadata: ObjectMeta,
    /// The copied object as JSON.
    pub object: Box<str>,
}

impl From<ControllerRevision> for InstancetypeRevision {
    fn from(revision: ControllerRevision) -> Self {
        let mut object = revision.data.map(|data| data.0).unwrap_or_default();
        if let Some(object) = object.as_object_mut() {
            object.remove("metadata");
        }
        Self { metadata: slim(revision.metadata), object: object.to_string().into() }
    }
}

unindexed!(InstancetypeRevision);

impl Declaration for InstancetypeRevision {
    type Wire = ControllerRevision;
    type Kept = Self;
    const SELECTION: Selection = Selection::HasLabel(revision::OBJECT_KIND);
    const WRITTEN: Option<Kind> = Some(Kind::ControllerRevision);
}
