//! Unsupported fields of the KubeVirt object.
//!
//! One table, like [`crate::rules::unsupported`] for VMIs, so that no field is accepted and then ignored. A process that starts
//! to use a field removes its entry.

use api::{
    FeatureGate,
    kubevirt::{configuration::KubeVirtConfiguration, migrations::MigrationConfiguration, spec::KubeVirtSpec},
};

use super::CONFIGURATION;
use crate::{context::FieldErrors, rules::unsupported::migrations::DECENTRALIZED};

/// Path of a field, reason of the refusal, and test for its use.
type Entry<T> = (&'static str, &'static str, fn(&T) -> bool);

const BACKUP: &str = "incremental backup";
const CHART: &str = "the chart installs the components, by its values";
const LIMITS: &str = "limits on requests to the API server";
const CLAIMED: &str = "devices by resource claims";
const ENCRYPTION: &str = "encrypted guests";
const MEDIATED: &str = "mediated devices";
const PINNING: &str = "pinned CPUs";
const NO_SUCH_PROCESS: &str = "there is no such process";

/// virt-handler uses the interface `migration0` of its pod if there is one.
const NETWORK: &str = "the chart attaches virt-handler to networks: value virtHandler.podAnnotations, annotation k8s.v1.cni.cncf.io/networks: NAMESPACE/NAME@migration0";

fn is_set(text: Option<&String>) -> bool {
    text.is_some_and(|text| !text.is_empty())
}

fn migrations(from: &KubeVirtConfiguration, used: fn(&MigrationConfiguration) -> bool) -> bool {
    from.migrations.as_ref().is_some_and(used)
}

const SPEC: &[Entry<KubeVirtSpec>] = &[
    ("customizeComponents.flags", CHART, |spec| spec.customize_components.flags.is_some()),
    ("customizeComponents.patches", CHART, |spec| !spec.customize_components.patches.is_empty()),
    ("imagePullSecrets", CHART, |spec| !spec.image_pull_secrets.is_empty()),
    ("imageRegistry", CHART, |spec| is_set(spec.image_registry.as_ref())),
    ("imageTag", CHART, |spec| is_set(spec.image_tag.as_ref())),
    ("infra", CHART, |spec| spec.infra.is_some()),
    ("monitorAccount", CHART, |spec| is_set(spec.monitor_account.as_ref())),
    ("monitorNamespace", CHART, |spec| is_set(spec.monitor_namespace.as_ref())),
    ("productComponent", CHART, |spec| is_set(spec.product_component.as_ref())),
    ("productName", CHART, |spec| is_set(spec.product_name.as_ref())),
    ("productVersion", CHART, |spec| is_set(spec.product_version.as_ref())),
    ("serviceMonitorNamespace", CHART, |spec| is_set(spec.service_monitor_namespace.as_ref())),
    ("synchronizationPort", DECENTRALIZED, |spec| is_set(spec.synchronization_port.as_ref())),
    ("workloads", CHART, |spec| spec.workloads.is_some()),
];

const CLUSTER: &[Entry<KubeVirtConfiguration>] = &[
    ("apiConfiguration", LIMITS, |from| from.api_configuration.is_some()),
    ("architectureConfiguration.defaultArchitecture", "CPU architectures other than amd64", |from| {
        let architecture = from.architecture_configuration.as_ref().and_then(|arch| arch.default_architecture.as_ref());
        is_set(architecture) && architecture.is_some_and(|architecture| architecture != "amd64")
    }),
    ("changedBlockTrackingLabelSelectors", BACKUP, |from| from.changed_block_tracking_label_selectors.is_some()),
    ("confidentialCompute", ENCRYPTION, |from| from.confidential_compute.is_some()),
    ("controllerConfiguration", LIMITS, |from| from.controller_configuration.is_some()),
    ("developerConfiguration.logVerbosity.virtSynchronizationController", NO_SUCH_PROCESS, |from| {
        let developer = from.developer_configuration.as_ref();
        developer.and_then(|developer| developer.log_verbosity.as_ref()?.virt_synchronization_controller).is_some()
    }),
    ("handlerConfiguration", LIMITS, |from| from.handler_configuration.is_some()),
    ("hypervisors", "hypervisors other than kvm", |from| {
        from.hypervisors.iter().any(|hypervisor| hypervisor.name.as_deref().is_some_and(|name| name != "kvm"))
    }),
    ("ksmConfiguration", "kernel same-page merging", |from| from.ksm_configuration.is_some()),
    ("mediatedDevicesConfiguration", MEDIATED, |from| from.mediated_devices_configuration.is_some()),
    (
        "migrations.disableTLS",
        "migrations without encryption: virt-handlers identify each other by their certificates",
        |from| migrations(from, |set| set.disable_tls == Some(true)),
    ),
    ("migrations.network", NETWORK, |from| migrations(from, |set| is_set(set.network.as_ref()))),
    ("minCPUModel", "nodes offer all of their CPU models", |from| is_set(from.min_cpu_model.as_ref())),
    ("network.binding", "binding plugins", |from| {
        from.network.as_ref().is_some_and(|network| !network.binding.is_empty())
    }),
    ("network.permitSlirpInterface", "slirp", |from| {
        from.network.as_ref().is_some_and(|network| network.permit_slirp_interface == Some(true))
    }),
    ("permittedHostDevices.mediatedDevices", MEDIATED, |from| {
        from.permitted_host_devices.as_ref().is_some_and(|permitted| !permitted.mediated_devices.is_empty())
    }),
    ("persistentReservationConfiguration", "SCSI persistent reservations", |from| {
        let reservation = from.persistent_reservation_configuration.as_ref();
        reservation.is_some_and(|reservation| reservation.enabled == Some(true))
    }),
    ("supportContainerResources", "a launcher pod has one container", |from| {
        !from.support_container_resources.is_empty()
    }),
    ("supportedGuestAgentVersions", "guest agents are identified by their supported commands", |from| {
        !from.supported_guest_agent_versions.is_empty()
    }),
    ("virtTemplateDeployment", "templates of virtual machines", |from| {
        from.virt_template_deployment.as_ref().is_some_and(|deployment| deployment.enabled == Some(true))
    }),
    ("vmStateStorageClass", "persistent state of a VM", |from| is_set(from.vm_state_storage_class.as_ref())),
    ("webhookConfiguration", LIMITS, |from| from.webhook_configuration.is_some()),
];

/// Names of feature gates of the reference whose features are refused.
const GATES: &[(&str, &str)] = &[
    ("AlignCPUs", PINNING),
    ("CPUManager", PINNING),
    ("ConfigurableHypervisor", "hypervisors other than kvm"),
    ("ContainerPathVolumes", "virtiofs"),
    ("CrossArchitectureVirtualization", "CPU architectures other than amd64"),
    ("DecentralizedLiveMigration", DECENTRALIZED),
    ("DownwardMetrics", "host metrics"),
    ("EnableVirtioFsStorageVolumes", "virtiofs"),
    ("GPUsWithDRA", CLAIMED),
    ("HostDevicesWithDRA", CLAIMED),
    ("HostDisk", "host disks"),
    ("IncrementalBackup", BACKUP),
    ("NetworkDevicesWithDRA", CLAIMED),
    ("OCIExport", "export of volumes"),
    ("PasstBinding", "passt"),
    ("Plugins", "plugins"),
    ("ReservedOverheadMemlock", "locked memory"),
    ("Snapshot", "snapshots"),
    ("Template", "templates of virtual machines"),
    ("WorkloadEncryptionSEV", ENCRYPTION),
    ("WorkloadEncryptionTDX", ENCRYPTION),
];

/// Returns the warning about a gate that is enabled and whose feature is refused.
pub(super) fn gate(gate: FeatureGate) -> Option<String> {
    let (_, feature) = GATES.iter().find(|(known, _)| *known == gate.name())?;
    Some(format!("feature gate {gate} has no effect, since its feature is not supported yet: {feature}"))
}

/// Adds an error for each unsupported field of a spec.
pub(super) fn field_errors(spec: &KubeVirtSpec, errors: &mut FieldErrors) {
    add_errors("spec", SPEC, spec, errors);
    add_errors(CONFIGURATION, CLUSTER, &spec.configuration, errors);
}

/// Returns the unsupported fields with their reasons, for documents.
pub(super) fn fields() -> Vec<(String, &'static str)> {
    let spec = SPEC.iter().map(|(path, reason, _)| (format!("spec.{path}"), *reason));
    let cluster = CLUSTER.iter().map(|(path, reason, _)| (format!("{CONFIGURATION}.{path}"), *reason));
    spec.chain(cluster).collect()
}

fn add_errors<T>(root: &str, entries: &[Entry<T>], from: &T, errors: &mut FieldErrors) {
    for (path, why, _) in entries.iter().filter(|(_, _, used)| used(from)) {
        let field = format!("{root}.{path}");
        let message = format!("{field} is not supported yet: {why}");
        errors.not_supported(field, message);
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn refused(spec: Value) -> Vec<String> {
        let mut found = FieldErrors::new();
        field_errors(&serde_json::from_value(spec).unwrap(), &mut found);
        found.as_slice().iter().map(|error| error.field.clone()).collect()
    }

    #[test]
    fn supported_configuration_is_accepted() {
        for spec in [
            json!({}),
            json!({"certificateRotateStrategy": {}, "customizeComponents": {}, "workloadUpdateStrategy": {}}),
            json!({"workloadUpdateStrategy": {"workloadUpdateMethods": ["LiveMigrate", "Evict"], "batchEvictionSize": 5}}),
            json!({"imagePullPolicy": "IfNotPresent", "uninstallStrategy": "RemoveWorkloads"}),
            json!({"configuration": {
                "architectureConfiguration": {"defaultArchitecture": "amd64", "ppc64le": {}},
                "commonInstancetypesDeployment": {"enabled": true},
                "developerConfiguration": {
                    "featureGates": ["HostDisk"],
                    "logVerbosity": {"virtAPI": 4, "virtOperator": 4},
                },
                "hypervisors": [{"name": "kvm"}],
                "migrations": {
                    "allowAutoConverge": true, "allowPostCopy": true, "allowWorkloadDisruption": true,
                    "bandwidthPerMigration": "64Mi", "completionTimeoutPerGiB": 300, "disableTLS": false,
                    "matchSELinuxLevelOnMigration": false, "maxDowntimeMs": 500, "network": "",
                    "nodeDrainTaintKey": "example.com/drain", "parallelMigrationsPerCluster": 3,
                    "parallelOutboundMigrationsPerNode": 1, "progressTimeout": 60,
                    "unsafeMigrationOverride": true, "utilityVolumesTimeout": 60,
                },
                "network": {"defaultNetworkInterface": "bridge", "permitSlirpInterface": false},
                "permittedHostDevices": {"pciHostDevices": []},
                "persistentReservationConfiguration": {"enabled": false},
                "virtTemplateDeployment": {"enabled": false},
                "virtualMachineInstancesPerNode": 20,
            }}),
        ] {
            assert_eq!(refused(spec.clone()), Vec::<String>::new(), "{spec}");
        }
    }

    #[test]
    fn gates_of_unsupported_features_exist() {
        for (name, feature) in GATES {
            let text = FeatureGate::parse(name).and_then(gate).unwrap_or_default();
            assert!(text.ends_with(&format!("its feature is not supported yet: {feature}")), "{name}: {text}");
        }
        assert_eq!(gate(FeatureGate::NodeRestriction), None);
    }

    #[test]
    fn each_unsupported_field_is_refused() {
        let limit = json!({"restClient": {"rateLimiter": {"tokenBucketRateLimiter": {"qps": 5.0, "burst": 10}}}});
        for (field, value) in [
            ("customizeComponents.flags", json!({"api": {"v": "5"}})),
            (
                "customizeComponents.patches",
                json!([{"resourceName": "virt-api", "resourceType": "Deployment", "type": "merge", "patch": "{}"}]),
            ),
            ("imagePullSecrets", json!([{"name": "registry"}])),
            ("imageRegistry", json!("example.com")),
            ("imageTag", json!("v2")),
            ("infra", json!({"replicas": 3})),
            ("monitorAccount", json!("prometheus")),
            ("monitorNamespace", json!("monitoring")),
            ("productComponent", json!("virtualization")),
            ("productName", json!("suite")),
            ("productVersion", json!("2")),
            ("serviceMonitorNamespace", json!("monitoring")),
            ("synchronizationPort", json!("9185")),
            ("workloads", json!({"nodePlacement": {"nodeSelector": {"a": "b"}}})),
            ("configuration.apiConfiguration", limit.clone()),
            ("configuration.architectureConfiguration.defaultArchitecture", json!("arm64")),
            ("configuration.changedBlockTrackingLabelSelectors", json!({})),
            ("configuration.confidentialCompute", json!({"tdx": {}})),
            ("configuration.controllerConfiguration", limit.clone()),
            ("configuration.developerConfiguration.logVerbosity.virtSynchronizationController", json!(4)),
            ("configuration.handlerConfiguration", limit.clone()),
            ("configuration.hypervisors", json!([{"name": "hyperv-direct"}])),
            ("configuration.ksmConfiguration", json!({"nodeLabelSelector": {}})),
            ("configuration.mediatedDevicesConfiguration", json!({"mediatedDeviceTypes": ["nvidia-222"]})),
            ("configuration.migrations.disableTLS", json!(true)),
            ("configuration.migrations.network", json!("kubevirt/migrations")),
            ("configuration.minCPUModel", json!("Penryn")),
            ("configuration.network.binding", json!({"passt": {"networkAttachmentDefinition": "a/b"}})),
            ("configuration.network.permitSlirpInterface", json!(true)),
            (
                "configuration.permittedHostDevices.mediatedDevices",
                json!([{"mdevNameSelector": "a", "resourceName": "v.org/a"}]),
            ),
            ("configuration.persistentReservationConfiguration", json!({"enabled": true})),
            ("configuration.supportContainerResources", json!([{"type": "container-disk", "resources": {}}])),
            ("configuration.supportedGuestAgentVersions", json!(["4.*"])),
            ("configuration.virtTemplateDeployment", json!({"enabled": true})),
            ("configuration.vmStateStorageClass", json!("fast")),
            ("configuration.webhookConfiguration", limit.clone()),
        ] {
            let spec = field.rsplit('.').fold(value, |inner, name| json!({name: inner}));
            assert_eq!(refused(spec), [format!("spec.{field}")]);
        }
    }
}
