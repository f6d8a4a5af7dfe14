//! VirtualMachineInstanceMigrations.

use api::{MigrationPhase, VirtualMachineInstanceMigration};

use crate::cache::{Cached, Key};

/// Indices of migrations.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum MigrationIndex {
    /// VMI of a migration.
    Vmi(Key),
    /// VMI of a migration that has not ended.
    UnfinishedOfVmi(Key),
    /// Migrations that have not ended.
    Unfinished,
    /// Phase of a migration.
    Phase(MigrationPhase),
    /// Namespace of a migration that a quota rejects.
    RejectedByQuota(String),
}

impl Cached for VirtualMachineInstanceMigration {
    type Index = MigrationIndex;
    whole!();

    fn indices(&self) -> Vec<MigrationIndex> {
        let mut indices = vec![MigrationIndex::Phase(self.phase().clone())];
        let vmi = vmi_key(self);
        if !self.is_final() {
            indices.push(MigrationIndex::Unfinished);
            indices.extend(vmi.clone().map(MigrationIndex::UnfinishedOfVmi));
            if self.has_condition(api::constants::condition::MIGRATION_REJECTED_BY_QUOTA) {
                indices.push(MigrationIndex::RejectedByQuota(self.metadata.namespace.clone().unwrap_or_default()));
            }
        }
        indices.extend(vmi.map(MigrationIndex::Vmi));
        indices
    }
}

kept!(whole VirtualMachineInstanceMigration written as Migration);

/// Returns the VMI of a migration.
pub(crate) fn vmi_key(migration: &VirtualMachineInstanceMigration) -> Option<Key> {
    let name = migration.spec.vmi_name.as_deref().filter(|name| !name.is_empty())?;
    Some(Key::beside(&migration.metadata, name))
}

/// Returns true for the change with which a migration ends, or is gone before its end.
pub(crate) fn ends(
    former: Option<&VirtualMachineInstanceMigration>,
    present: Option<&VirtualMachineInstanceMigration>,
) -> bool {
    let is_open = |migration: &VirtualMachineInstanceMigration| !migration.is_final();
    former.is_some_and(is_open) && !present.is_some_and(is_open)
}
