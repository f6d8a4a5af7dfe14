//! MigrationPolicies.

use std::collections::BTreeMap;

use api::{MigrationPolicy, policy::MigrationPolicySpec};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;

use super::metadata::slim;

/// A migration policy.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct CachedPolicy {
    /// Metadata, reduced.
    pub metadata: ObjectMeta,
    /// Its settings.
    pub spec: MigrationPolicySpec,
}

unindexed!(CachedPolicy);

kept!(CachedPolicy of MigrationPolicy);

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
