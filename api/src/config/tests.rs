//! Tests of the configuration.

use serde_json::json;

use super::*;

fn read(configuration: serde_json::Value) -> Result<ClusterConfig, ConfigError> {
    let object = serde_json::from_value(json!({
        "apiVersion": "kubevirt.io/v1",
        "kind": "KubeVirt",
        "metadata": {"name": "kubevirt", "resourceVersion": "7"},
        "spec": {"configuration": configuration},
    }))
    .unwrap();
    ClusterConfig::from_kubevirt(&object)
}

#[test]
fn empty_object_gives_the_defaults() {
    let want = ClusterConfig { resource_version: "7".to_owned(), ..ClusterConfig::default() };
    assert_eq!(read(json!({})), Ok(want));
}

#[test]
fn zero_values_do_not_override() {
    let config = read(json!({
        "imagePullPolicy": "",
        "developerConfiguration": {"cpuAllocationRatio": 0, "memoryOvercommit": 0},
        "smbios": {"family": "", "product": "Box"},
        "network": {"defaultNetworkInterface": ""},
    }))
    .unwrap();
    assert_eq!(config.default_network_interface, "bridge");
    assert_eq!(config.image_pull_policy, "IfNotPresent");
    assert_eq!(config.cpu_allocation_ratio, 10);
    assert_eq!(config.memory_overcommit, 100);
    assert_eq!((config.smbios.family.as_str(), config.smbios.product.as_str()), ("KubeVirt", "Box"));
}

#[test]
fn values_of_the_object_override_defaults() {
    let config = read(json!({
        "machineType": "pc-q35-8.2",
        "memBalloonStatsPeriod": 0,
        "architectureConfiguration": {"amd64": {"emulatedMachines": ["pc-i440fx*"]}},
        "developerConfiguration": {
            "useEmulation": true,
            "featureGates": ["HostDisk"],
            "logVerbosity": {"virtAPI": 5, "nodeVerbosity": {"n1": 9}},
        },
        "migrations": {"nodeDrainTaintKey": "example.com/drain"},
        "virtualMachineInstancesPerNode": 20,
        "virtualMachineOptions": {"disableSerialConsoleLog": {}},
    }))
    .unwrap();
    assert!(config.use_emulation && config.enabled(FeatureGate::HostDisk));
    assert_eq!(config.arch("amd64").machine_type, "pc-q35-8.2");
    assert!(config.arch("amd64").allows_machine("pc-i440fx-9.0"));
    assert!(!config.arch("amd64").allows_machine("q35"));
    assert_eq!(config.mem_balloon_stats_period, 0);
    assert_eq!(config.node_drain_taint_key, "example.com/drain");
    assert_eq!(config.virtual_machine_instances_per_node, Some(20));
    assert!(!config.log_serial_console);
    assert_eq!(config.verbosity(component::VIRT_API, None), 5);
    assert_eq!(config.verbosity(component::VIRT_HANDLER, Some("n1")), 9);
    assert_eq!(config.verbosity(component::VIRT_HANDLER, Some("n2")), 2);
}

#[test]
fn invalid_values_are_rejected() {
    for configuration in [
        json!({"imagePullPolicy": "Sometimes"}),
        json!({"developerConfiguration": {"memoryOvercommit": -1}}),
        json!({"developerConfiguration": {"cpuAllocationRatio": -1}}),
        json!({"developerConfiguration": {"pvcTolerateLessSpaceUpToPercent": 101}}),
        json!({"network": {"defaultNetworkInterface": "tunnel"}}),
        json!({"additionalGuestMemoryOverheadRatio": "much"}),
        json!({"cpuRequest": "some"}),
        json!({"virtualMachineInstancesPerNode": -1}),
        json!({"virtualMachineInstancesPerNode": 10_001}),
    ] {
        assert!(read(configuration.clone()).is_err(), "{configuration}");
    }
}

#[test]
fn annotations_of_the_object_are_part_of_the_configuration() {
    for (annotations, vga, skips) in [
        (json!({}), false, false),
        (json!({"kubevirt.io/vga-display-efi-x86": ""}), true, false),
        (json!({"kubevirt.io/skip-backup-hooks": "true"}), false, true),
        (json!({"kubevirt.io/skip-backup-hooks": "no"}), false, false),
    ] {
        let mut object = KubeVirt::new("kubevirt", crate::kubevirt::spec::KubeVirtSpec::default());
        object.metadata.annotations = serde_json::from_value(annotations.clone()).unwrap();
        let config = ClusterConfig::from_kubevirt(&object).unwrap();
        assert_eq!((config.vga_display_for_efi, config.skip_backup_hooks), (vga, skips), "{annotations}");
    }
    let mut object = KubeVirt::new("kubevirt", crate::kubevirt::spec::KubeVirtSpec::default());
    let even = [("alpha.kubevirt.io/EmulatorThreadCompleteToEvenParity".to_owned(), "x".to_owned())];
    object.metadata.annotations = Some(even.into());
    assert_eq!(ClusterConfig::from_kubevirt(&object).unwrap().even_cpus.as_deref(), Some("x"));
}

#[test]
fn settings_of_migrations_have_defaults_and_a_meaningful_zero() {
    let default = Migrations::default();
    assert_eq!((default.parallel_per_cluster, default.parallel_outbound_per_node), (5, 2));
    assert_eq!(read(json!({"migrations": {}})).unwrap().migrations, default);
    let migrations = read(json!({"migrations": {
        "parallelMigrationsPerCluster": 9, "completionTimeoutPerGiB": 0, "allowPostCopy": true, "network": "",
        "matchSELinuxLevelOnMigration": false,
    }}))
    .unwrap()
    .migrations;
    assert_eq!((migrations.parallel_per_cluster, migrations.completion_timeout_per_gib), (9, 0));
    assert!(migrations.allow_post_copy && migrations.allow_workload_disruption);
    assert_eq!((migrations.network, migrations.match_selinux_level), (None, Some(false)));
    assert!(read(json!({"migrations": {"bandwidthPerMigration": "much"}})).is_err());
}
