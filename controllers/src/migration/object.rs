//! Migrations that virt-controller creates, by origin.

use std::collections::BTreeMap;

use api::{
    VirtualMachineInstance, VirtualMachineInstanceMigration,
    constants::{annotation, finalizer, label},
    migration::{Priority, VirtualMachineInstanceMigrationSpec},
    names,
};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;

/// Value of [`annotation::EVICTION_SOURCE`] for evictions by the descheduler.
const DESCHEDULER: &str = "descheduler";

/// The reason for a migration that virt-controller creates.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Origin<'a> {
    /// The VMI must leave this node.
    Evacuation {
        /// The node.
        node: &'a str,
    },
    /// The VMI has a launcher of another version, or its pod or domain must be brought in line with its spec.
    WorkloadUpdate {
        /// Priority in the queue.
        priority: Priority,
        /// Volumes move to other claims.
        volumes: bool,
    },
}

/// Returns true for a migration that has not been settled.
pub(super) fn has_finalizer(migration: &VirtualMachineInstanceMigration) -> bool {
    crate::runtime::has_finalizer(&migration.metadata, finalizer::MIGRATION)
}

/// Returns a migration of a VMI. The API server completes its name.
#[must_use]
pub(crate) fn migration_of(vmi: &VirtualMachineInstance, origin: Origin<'_>) -> VirtualMachineInstanceMigration {
    let name = vmi.metadata.name.clone().unwrap_or_default();
    let (prefix, (key, value), priority) = match origin {
        Origin::Evacuation { node } => {
            let source = vmi.metadata.annotations.as_ref().and_then(|all| all.get(annotation::EVICTION_SOURCE));
            let is_descheduler = source.is_some_and(|source| source == DESCHEDULER);
            let priority = if is_descheduler { Priority::SystemMaintenance } else { Priority::SystemCritical };
            ("kubevirt-evacuation-", (annotation::EVACUATION_MIGRATION, node), priority)
        }
        Origin::WorkloadUpdate { priority, .. } => {
            ("kubevirt-workload-update-", (annotation::WORKLOAD_UPDATE_MIGRATION, ""), priority)
        }
    };
    let labels = matches!(origin, Origin::WorkloadUpdate { volumes: true, .. }).then(|| {
        let uid = vmi.metadata.uid.clone().unwrap_or_default();
        let value = if name.len() <= names::LABEL_LIMIT { name.clone() } else { uid };
        BTreeMap::from([(label::VOLUME_UPDATE_MIGRATION.to_owned(), value)])
    });
    VirtualMachineInstanceMigration {
        metadata: ObjectMeta {
            generate_name: Some(prefix.to_owned()),
            namespace: vmi.metadata.namespace.clone(),
            annotations: Some(BTreeMap::from([(key.to_owned(), value.to_owned())])),
            labels,
            ..ObjectMeta::default()
        },
        spec: VirtualMachineInstanceMigrationSpec {
            vmi_name: Some(name),
            priority: Some(priority.as_str().to_owned()),
            ..VirtualMachineInstanceMigrationSpec::default()
        },
        status: None,
    }
}
