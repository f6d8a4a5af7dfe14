//! Pods that read from a claim if a migration has taken the state of a VMI away from it.

use api::{
    VirtualMachineInstanceMigration,
    constants::{component, label},
    owner,
};
use k8s_openapi::{api::core::v1::Pod, apimachinery::pkg::apis::meta::v1::ObjectMeta};

use super::{
    declaration::{Declaration, Selection},
    metadata::slim,
};
use crate::{
    cache::{Key, Watch},
    runtime::Kind,
};

/// A pod that reads the marker of a migration.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct CachedRecovery {
    /// Metadata, reduced.
    pub metadata: ObjectMeta,
    /// Its phase.
    pub phase: String,
    /// Exit code of its program.
    pub code: Option<i32>,
}

impl CachedRecovery {
    /// Returns its migration.
    #[must_use]
    pub(crate) fn migration(&self) -> Option<Key> {
        let migration = owner::controller_of_kind::<VirtualMachineInstanceMigration>(&self.metadata)?;
        Some(Key::beside(&self.metadata, migration.name.clone()))
    }
}

fn is_of_migration(metadata: &ObjectMeta) -> bool {
    owner::controller_of_kind::<VirtualMachineInstanceMigration>(metadata).is_some()
}

unindexed!(CachedRecovery);

impl Declaration for CachedRecovery {
    type Wire = Pod;
    type Kept = Self;
    const SELECTION: Selection = Selection::Label(label::APP, component::STATE_RECOVERY);
    const WRITTEN: Option<Kind> = Some(Kind::Pod);

    fn keep(object: Pod) -> Option<Self> {
        is_of_migration(&object.metadata).then(|| object.into())
    }

    fn adjust(watch: Watch<Pod, Self>, _caches: &super::Caches) -> Watch<Pod, Self> {
        watch.selecting(is_of_migration)
    }
}

impl From<Pod> for CachedRecovery {
    fn from(pod: Pod) -> Self {
        let status = pod.status.unwrap_or_default();
        let state = status.container_statuses.into_iter().flatten().next().and_then(|container| container.state);
        Self {
            metadata: slim(pod.metadata),
            phase: status.phase.unwrap_or_default(),
            code: state.and_then(|state| state.terminated).map(|ended| ended.exit_code),
        }
    }
}
