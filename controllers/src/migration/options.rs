//! The settings of a migration: those of the cluster, and of the migration policy that matches its VMI best.

use std::{cmp::Reverse, collections::BTreeMap, sync::Arc};

use api::{
    VirtualMachineInstance,
    config::ClusterConfig,
    policy::MigrationPolicySpec,
    vmi::{devices::Devices, migration::MigrationConfigurationOptions},
};

use super::Observed;
use crate::resources::policies::CachedPolicy;

/// Returns the policy with the most matching labels. Of those with as many, the one with more labels of the VMI applies, then
/// the one with the smallest name.
pub(super) fn best_policy<'a>(
    policies: &'a [Arc<CachedPolicy>],
    vmi: &VirtualMachineInstance,
    namespace: &BTreeMap<String, String>,
) -> Option<&'a CachedPolicy> {
    let labels = vmi.metadata.labels.clone().unwrap_or_default();
    let rated = policies.iter().filter_map(|policy| {
        let (of_vmi, of_namespace) = policy.matches(&labels, namespace)?;
        Some(((Reverse(of_vmi + of_namespace), Reverse(of_vmi), policy.metadata.name.as_deref()), policy))
    });
    rated.min_by(|left, right| left.0.cmp(&right.0)).map(|(_, policy)| policy.as_ref())
}

/// Returns true if a policy has a setting, even one that equals the cluster's. The status of a VMI names no other policies.
pub(super) fn sets_anything(policy: &MigrationPolicySpec) -> bool {
    let MigrationPolicySpec {
        allow_auto_converge,
        allow_post_copy,
        allow_workload_disruption,
        bandwidth_per_migration,
        completion_timeout_per_gib,
        experimental,
        max_downtime_ms,
        selectors: _,
    } = policy;
    [allow_auto_converge, allow_post_copy, allow_workload_disruption].into_iter().any(Option::is_some)
        || bandwidth_per_migration.is_some()
        || completion_timeout_per_gib.is_some()
        || experimental.is_some()
        || max_downtime_ms.is_some()
}

/// Returns the settings in effect for a VMI.
pub(super) fn settings(observed: &Observed, vmi: &VirtualMachineInstance) -> MigrationConfigurationOptions {
    let policy = best_policy(&observed.policies, vmi, &observed.namespace);
    for_devices(options(&observed.config, policy.map(|policy| &policy.spec)), &vmi.spec.domain.devices)
}

/// Forbids post-copy to a VMI with file systems. virtiofsd does not support it, so that QEMU would refuse the migration.
fn for_devices(options: MigrationConfigurationOptions, devices: &Devices) -> MigrationConfigurationOptions {
    let allow_post_copy = options.allow_post_copy.map(|allowed| allowed && devices.filesystems.is_empty());
    MigrationConfigurationOptions { allow_post_copy, ..options }
}

/// Returns the settings of the cluster, changed by a policy.
fn options(config: &ClusterConfig, policy: Option<&MigrationPolicySpec>) -> MigrationConfigurationOptions {
    let cluster = &config.migrations;
    let mut options = MigrationConfigurationOptions {
        allow_auto_converge: Some(cluster.allow_auto_converge),
        allow_post_copy: Some(cluster.allow_post_copy),
        allow_workload_disruption: Some(cluster.allow_workload_disruption),
        bandwidth_per_migration: Some(cluster.bandwidth.clone()),
        completion_timeout_per_gib: Some(cluster.completion_timeout_per_gib),
        disable_tls: cluster.disable_tls,
        experimental: None,
        match_selinux_level_on_migration: cluster.match_selinux_level,
        max_downtime_ms: Some(cluster.max_downtime_ms),
        network: cluster.network.clone(),
        node_drain_taint_key: Some(config.node_drain_taint_key.clone()),
        parallel_migrations_per_cluster: Some(cluster.parallel_per_cluster),
        parallel_outbound_migrations_per_node: Some(cluster.parallel_outbound_per_node),
        progress_timeout: Some(cluster.progress_timeout),
        unsafe_migration_override: Some(cluster.unsafe_override),
        utility_volumes_timeout: Some(cluster.utility_volumes_timeout),
    };
    let Some(policy) = policy else { return options };
    options.allow_auto_converge = policy.allow_auto_converge.or(options.allow_auto_converge);
    options.bandwidth_per_migration = policy.bandwidth_per_migration.clone().or(options.bandwidth_per_migration);
    options.completion_timeout_per_gib = policy.completion_timeout_per_gib.or(options.completion_timeout_per_gib);
    options.max_downtime_ms = policy.max_downtime_ms.or(options.max_downtime_ms);
    options.allow_workload_disruption =
        policy.allow_workload_disruption.or(policy.allow_post_copy).or(options.allow_workload_disruption);
    options.allow_post_copy = policy.allow_post_copy.or(options.allow_post_copy);
    options.experimental.clone_from(&policy.experimental);
    options
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn policy(name: &str, spec: Value) -> Arc<CachedPolicy> {
        let metadata = serde_json::from_value(json!({"name": name})).unwrap();
        Arc::new(CachedPolicy { metadata, spec: serde_json::from_value(spec).unwrap() })
    }

    #[test]
    fn policy_with_the_most_matching_labels_applies() {
        let of_vmi = |labels: Value| json!({"selectors": {"virtualMachineInstanceSelector": labels}});
        let of_namespace = |labels: Value| json!({"selectors": {"namespaceSelector": labels}});
        let vmi: VirtualMachineInstance = serde_json::from_value(json!({
            "metadata": {"name": "m", "labels": {"a": "1", "b": "2"}}, "spec": {"domain": {"devices": {}}},
        }))
        .unwrap();
        let namespace = BTreeMap::from([("x".to_owned(), "1".to_owned())]);
        for (policies, expected) in [
            (vec![], None),
            (vec![policy("p", of_vmi(json!({"a": "2"})))], None),
            (vec![policy("p", of_namespace(json!({"y": "1"})))], None),
            (vec![policy("p", json!({"selectors": {}}))], Some("p")),
            (vec![policy("p", of_vmi(json!({"a": "1"}))), policy("o", of_vmi(json!({"a": "1"})))], Some("o")),
            (vec![policy("n", of_namespace(json!({"x": "1"}))), policy("v", of_vmi(json!({"a": "1"})))], Some("v")),
            (vec![policy("a", of_vmi(json!({"a": "1"}))), policy("b", of_vmi(json!({"a": "1", "b": "2"})))], Some("b")),
        ] {
            let best = best_policy(&policies, &vmi, &namespace);
            assert_eq!(best.and_then(|policy| policy.metadata.name.as_deref()), expected, "{policies:?}");
        }
    }

    #[test]
    fn policy_overrides_the_cluster() {
        let config = ClusterConfig::default();
        let with = |policy: Value| {
            let mut policy = policy;
            policy["selectors"] = json!({});
            serde_json::to_value(options(&config, Some(&serde_json::from_value(policy).unwrap()))).unwrap()
        };
        let none = serde_json::to_value(options(&config, None)).unwrap();
        assert_eq!(with(json!({})), none);
        assert_eq!(none["completionTimeoutPerGiB"], 150);
        assert_eq!(none["bandwidthPerMigration"], "0Mi");
        assert_eq!(none["parallelOutboundMigrationsPerNode"], 2);
        let changed = with(json!({
            "allowAutoConverge": true, "bandwidthPerMigration": "64Mi", "completionTimeoutPerGiB": 7, "maxDowntimeMs": 5,
        }));
        assert_eq!(changed["allowAutoConverge"], true);
        assert_eq!(changed["bandwidthPerMigration"], "64Mi");
        assert_eq!((&changed["completionTimeoutPerGiB"], &changed["maxDowntimeMs"]), (&json!(7), &json!(5)));
        assert_eq!(changed["progressTimeout"], 150);
        let with_post_copy: MigrationConfigurationOptions =
            serde_json::from_value(with(json!({"allowPostCopy": true}))).unwrap();
        for (filesystems, expected) in [(json!([]), true), (json!([{"name": "f", "virtiofs": {}}]), false)] {
            let devices = serde_json::from_value(json!({"filesystems": filesystems})).unwrap();
            let options = for_devices(with_post_copy.clone(), &devices);
            assert_eq!((options.allow_post_copy, options.switches_to_post_copy()), (Some(expected), expected));
        }
        let post_copy = with(json!({"allowPostCopy": true}));
        assert_eq!((&post_copy["allowPostCopy"], &post_copy["allowWorkloadDisruption"]), (&json!(true), &json!(true)));
    }
}
