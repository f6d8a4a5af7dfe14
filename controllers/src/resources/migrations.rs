//! VirtualMachineInstanceMigrations and MigrationPolicies with their indices.

use std::collections::BTreeMap;

use api::{MigrationPhase, MigrationPolicy, VirtualMachineInstanceMigration, policy::MigrationPolicySpec};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;

use super::metadata::slim;
use crate::cache::{Cached, Key, trim_meta};

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

    fn meta(&self) -> &ObjectMeta {
        &self.metadata
    }

    fn trim(&mut self) {
        trim_meta(&mut self.metadata);
    }

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

/// Returns the VMI of a migration.
pub(crate) fn vmi_key(migration: &VirtualMachineInstanceMigration) -> Option<Key> {
    let name = migration.spec.vmi_name.as_deref().filter(|name| !name.is_empty())?;
    Some(Key::new(migration.metadata.namespace.clone().unwrap_or_default(), name))
}

/// A migration policy.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct CachedPolicy {
    /// Metadata, reduced.
    pub metadata: ObjectMeta,
    /// Its settings.
    pub spec: MigrationPolicySpec,
}

impl Cached for CachedPolicy {
    type Index = ();

    fn meta(&self) -> &ObjectMeta {
        &self.metadata
    }
}

impl From<MigrationPolicy> for CachedPolicy {
    fn from(policy: MigrationPolicy) -> Self {
        Self { metadata: slim(policy.metadata), spec: policy.spec }
    }
}

impl CachedPolicy {
    /// Returns the number of matching labels of the VMI and of its namespace, if both selectors match.
    #[must_use]
    pub(crate) fn matches(
        &self,
        vmi: &BTreeMap<String, String>,
        namespace: &BTreeMap<String, String>,
    ) -> Option<(usize, usize)> {
        let selectors = &self.spec.selectors;
        let all = |wanted: &BTreeMap<String, String>, labels: &BTreeMap<String, String>| {
            wanted.iter().all(|(key, value)| labels.get(key) == Some(value))
        };
        let (of_vmi, of_namespace) = (&selectors.virtual_machine_instance_selector, &selectors.namespace_selector);
        (all(of_vmi, vmi) && all(of_namespace, namespace)).then_some((of_vmi.len(), of_namespace.len()))
    }
}
