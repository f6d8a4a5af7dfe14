//! Copies of instance types and preferences that VMs keep.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::{Arc, Mutex},
};

use api::{
    VirtualMachine,
    instancetype::{MatchedKind, VERSION, revision},
    owner,
};
use daemon::lock;
use k8s_openapi::{api::apps::v1::ControllerRevision, apimachinery::pkg::apis::meta::v1::ObjectMeta};
use serde_json::Value;

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
    /// The copied object as JSON. Most VMs have copies of a few objects, so equal texts are shared.
    pub object: Arc<str>,
    /// The origin of a copy in a former API version.
    pub former: Option<Box<Origin>>,
}

/// The object of which a copy was made.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Origin {
    /// Its kind.
    pub kind: MatchedKind,
    /// Its name, UID and generation.
    pub metadata: ObjectMeta,
}

impl Origin {
    /// Returns the origin of a copy whose labels tell another version than the present one.
    fn of_former(labels: &BTreeMap<String, String>, object: &Value) -> Option<Self> {
        let label = |key: &str| labels.get(key).map(String::as_str);
        if label(revision::OBJECT_VERSION) == Some(VERSION) {
            return None;
        }
        let kind = MatchedKind::ALL.into_iter().find(|kind| Some(kind.kind()) == label(revision::OBJECT_KIND))?;
        let known = &object["metadata"];
        // The first copies have no metadata, and labels shorten long names.
        let text = |field: &str, key| known[field].as_str().or(label(key)).map(str::to_owned);
        let generation = label(revision::OBJECT_GENERATION).and_then(|label| label.parse().ok());
        let metadata = ObjectMeta {
            name: text("name", revision::OBJECT_NAME),
            uid: text("uid", revision::OBJECT_UID),
            generation: known["generation"].as_i64().or(generation),
            ..ObjectMeta::default()
        };
        (metadata.name.is_some() && metadata.uid.is_some()).then_some(Self { kind, metadata })
    }
}

impl From<ControllerRevision> for InstancetypeRevision {
    fn from(revision: ControllerRevision) -> Self {
        let mut object = revision.data.map(|data| data.0).unwrap_or_default();
        let former = revision.metadata.labels.as_ref().and_then(|labels| Origin::of_former(labels, &object));
        if let Some(object) = object.as_object_mut() {
            object.remove("metadata");
        }
        Self { metadata: slim(revision.metadata), object: shared(object.to_string()), former: former.map(Box::new) }
    }
}

/// Returns true for a revision of a former VM of this name: it is about to go.
pub(crate) fn is_left(revision: &ObjectMeta, vm: &VirtualMachine) -> bool {
    let owner = owner::controller_of_kind::<VirtualMachine>(revision);
    owner.is_some_and(|owner| {
        vm.metadata.name.as_ref() == Some(&owner.name) && vm.metadata.uid.as_ref() != Some(&owner.uid)
    })
}

/// Texts of all copies.
static TEXTS: Mutex<BTreeSet<Arc<str>>> = Mutex::new(BTreeSet::new());

/// Returns a text that is shared with all copies that have the same.
fn shared(text: String) -> Arc<str> {
    let mut texts = lock(&TEXTS);
    if let Some(known) = texts.get(text.as_str()) {
        return known.clone();
    }
    // Texts of deleted copies go from time to time.
    if texts.len().is_power_of_two() {
        texts.retain(|text| Arc::strong_count(text) > 1);
    }
    let text: Arc<str> = text.into();
    texts.insert(text.clone());
    text
}

unindexed!(InstancetypeRevision);

impl Declaration for InstancetypeRevision {
    type Wire = ControllerRevision;
    type Kept = Self;
    const SELECTION: Selection = Selection::HasLabel(revision::OBJECT_KIND);
    const WRITTEN: Option<Kind> = Some(Kind::ControllerRevision);
}
