//! ControllerRevisions that record the specs of pools, reduced to digests of their templates. See `start_revisions.rs` about digests.

use std::collections::{BTreeMap, BTreeSet};

use api::{constants::label, owner, pool::VirtualMachinePoolSpec};
use k8s_openapi::{api::apps::v1::ControllerRevision, apimachinery::pkg::apis::meta::v1::ObjectMeta};

use super::{
    declaration::{Declaration, Selection},
    metadata::slim,
    start_revisions::{Digest, digest},
};
use crate::{cache::Cached, runtime::Kind};

/// Digests of a pool's template.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct PoolTemplate {
    /// Everything.
    whole: Digest,
    /// Templates of DataVolumes.
    pub data_volumes: Digest,
    /// Parts that a running VMI depends on.
    pub vmi: Digest,
    /// Keys of the VM's labels.
    pub labels: BTreeSet<String>,
    /// Keys of the VM's annotations.
    pub annotations: BTreeSet<String>,
}

impl PoolTemplate {
    /// Computes the digests.
    pub(crate) fn of(pool: &VirtualMachinePoolSpec) -> Self {
        let template = &pool.virtual_machine_template;
        let vm = template.spec.as_ref();
        let vmi = vm.map(|vm| (&vm.template, &vm.instancetype, &vm.preference));
        let names = pool.name_generation.as_ref();
        let (config_maps, secrets) = (
            names.and_then(|names| names.append_index_to_config_map_refs) == Some(true),
            names.and_then(|names| names.append_index_to_secret_refs) == Some(true),
        );
        let keys =
            |map: Option<&BTreeMap<String, String>>| map.into_iter().flatten().map(|(key, _)| key.clone()).collect();
        Self {
            whole: digest(&(template, config_maps, secrets)),
            data_volumes: digest(&vm.map(|vm| &vm.data_volume_templates)),
            vmi: digest(&(vmi, config_maps, secrets)),
            labels: keys(template.metadata.labels.as_ref()),
            annotations: keys(template.metadata.annotations.as_ref()),
        }
    }

    /// Returns true if both result in the same VMs.
    pub(crate) fn is_same(&self, other: &Self) -> bool {
        self.whole == other.whole
    }
}

/// The record of a pool's spec.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct PoolRevision {
    /// Metadata, reduced.
    pub metadata: ObjectMeta,
    /// Generation of the pool.
    pub generation: i64,
    /// The template, if the record can be read.
    pub template: Option<PoolTemplate>,
}

impl From<ControllerRevision> for PoolRevision {
    fn from(revision: ControllerRevision) -> Self {
        let spec = revision.data.and_then(|data| serde_json::from_value(data.0).ok());
        Self {
            metadata: slim(revision.metadata),
            generation: revision.revision,
            template: spec.map(|spec| PoolTemplate::of(&spec)),
        }
    }
}

/// Indices of the records.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum PoolRevisionIndex {
    /// UID of the pool.
    Pool(String),
}

impl Cached for PoolRevision {
    type Index = PoolRevisionIndex;

    fn meta(&self) -> &ObjectMeta {
        &self.metadata
    }

    fn indices(&self) -> Vec<PoolRevisionIndex> {
        let controller = owner::controller(&self.metadata);
        controller.map(|owner| PoolRevisionIndex::Pool(owner.uid.clone())).into_iter().collect()
    }
}

impl Declaration for PoolRevision {
    type Wire = ControllerRevision;
    type Kept = Self;
    const SELECTION: Selection = Selection::HasLabel(label::OF_POOL);
    const WRITTEN: Option<Kind> = Some(Kind::ControllerRevision);
}
