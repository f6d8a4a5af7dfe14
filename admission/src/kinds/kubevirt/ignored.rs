//! Settings of the KubeVirt object that are stored without effect.
//!
//! An object of KubeVirt has settings for virt-operator, and for features that do not exist here. They are accepted, since
//! platforms write them, and never silently: admission warns about them, and virt-controller lists them in the condition
//! `SettingsIgnored`. Both derive from this table, as does docs/reference/not-yet.md. A process that starts to use a setting
//! removes its row. Settings that would change the meaning of VMs are refused instead, see [`super::unsupported`].

use api::{FeatureGate, constants::component, kubevirt::spec::KubeVirtSpec};
use serde_json::Value;

use super::gate_lists;
use crate::rules::unsupported::migrations::DECENTRALIZED;

/// A setting without effect.
#[derive(PartialEq)]
struct Setting {
    /// Path of the field.
    field: &'static str,
    /// Value of the chart that serves the purpose, or the reason why there is none.
    instead: &'static str,
}

/// Most names of feature gates that do not exist in one report: they are not bounded.
const UNKNOWN_GATES: usize = 8;
/// Most characters of such a name.
const NAME_LENGTH: usize = 64;

const COMPONENTS: &str = "the chart renders the components, use its values virtApi, virtController and virtHandler, or a post-renderer of Helm";
const LABELS: &str = "use the chart's value commonLabels";
const NO_SUCH_PROCESS: &str = "there is no such process";
const MEDIATED: &str = "mediated devices are not supported yet, VMs that use them are refused";
const POD_TERMS: &str =
    "use the chart's value virtHandler.affinity; nodeSelector and required node affinity have an effect";

const NO_LIMIT: &str = "only a positive number is a limit";
const ONE_CONTAINER: &str = "a launcher pod has one container; only type hotplug-disk has an effect";

const fn setting(field: &'static str, instead: &'static str) -> Setting {
    Setting { field, instead }
}

const SETTINGS: &[Setting] = &[
    setting("spec.customizeComponents.flags", COMPONENTS),
    setting("spec.customizeComponents.patches", COMPONENTS),
    setting("spec.imagePullPolicy", "use the chart's value image.pullPolicy"),
    setting("spec.imagePullSecrets", "use the chart's value imagePullSecrets"),
    setting("spec.imageRegistry", "use the chart's value image.registry"),
    setting("spec.imageTag", "use the chart's value image.tag"),
    setting(
        "spec.infra.nodePlacement",
        "use the chart's values nodeSelector, affinity and tolerations of virtApi and virtController",
    ),
    setting("spec.infra.replicas", "use the chart's values virtApi.replicas and virtController.replicas"),
    setting("spec.monitorAccount", "use the chart's value metrics.readers"),
    setting(
        "spec.monitorNamespace",
        "use the chart's values metrics.readers, metrics.serviceMonitor.namespace and metrics.rules.namespace",
    ),
    setting("spec.productComponent", LABELS),
    setting("spec.productName", LABELS),
    setting("spec.productVersion", LABELS),
    setting("spec.serviceMonitorNamespace", "use the chart's value metrics.serviceMonitor.namespace"),
    setting("spec.synchronizationPort", NO_SUCH_PROCESS),
    setting(
        "spec.workloads.nodePlacement.affinity.nodeAffinity.preferredDuringSchedulingIgnoredDuringExecution",
        POD_TERMS,
    ),
    setting("spec.workloads.nodePlacement.affinity.podAffinity", POD_TERMS),
    setting("spec.workloads.nodePlacement.affinity.podAntiAffinity", POD_TERMS),
    setting("spec.workloads.nodePlacement.tolerations", "use the chart's value virtHandler.tolerations"),
    setting("spec.workloads.replicas", "virt-handler has one pod on each node"),
    setting("spec.configuration.apiConfiguration.restClient.rateLimiter.tokenBucketRateLimiter.qps", NO_LIMIT),
    setting(
        "spec.configuration.changedBlockTrackingLabelSelectors",
        "incremental backup is not supported yet, its objects are refused",
    ),
    setting("spec.configuration.confidentialCompute", "encrypted guests are refused"),
    setting("spec.configuration.controllerConfiguration.restClient.rateLimiter.tokenBucketRateLimiter.qps", NO_LIMIT),
    setting(
        "spec.configuration.developerConfiguration.diskVerification",
        "virt-launcher reads no more than the first 512 bytes of an image to verify it",
    ),
    setting("spec.configuration.developerConfiguration.logVerbosity.virtOperator", NO_SUCH_PROCESS),
    setting("spec.configuration.developerConfiguration.logVerbosity.virtSynchronizationController", NO_SUCH_PROCESS),
    setting("spec.configuration.handlerConfiguration.restClient.rateLimiter.tokenBucketRateLimiter.qps", NO_LIMIT),
    setting("spec.configuration.mediatedDevicesConfiguration", MEDIATED),
    setting(
        "spec.configuration.migrations.disableTLS",
        "migrations stay encrypted: virt-handlers identify each other by their certificates",
    ),
    setting(
        "spec.configuration.migrations.network",
        "attach virt-handler to the network by the chart's value virtHandler.podAnnotations: k8s.v1.cni.cncf.io/networks: NAMESPACE/NAME@migration0",
    ),
    setting("spec.configuration.minCPUModel", "nodes offer all of their CPU models except obsoleteCPUModels"),
    setting(
        "spec.configuration.network.binding",
        "network binding plugins are registered, but not carried out: VMs that use one are refused",
    ),
    setting("spec.configuration.network.permitSlirpInterface", "slirp is not supported any more, in KubeVirt neither"),
    setting("spec.configuration.permittedHostDevices.mediatedDevices", MEDIATED),
    setting(
        "spec.configuration.persistentReservationConfiguration.enabled",
        "SCSI persistent reservations are not supported yet, VMs that use them are refused",
    ),
    setting("spec.configuration.supportContainerResources", ONE_CONTAINER),
    setting(
        "spec.configuration.supportedGuestAgentVersions",
        "guest agents are identified by the commands that they support",
    ),
    setting("spec.configuration.virtTemplateDeployment.enabled", "templates of VMs are not supported yet"),
    setting(
        "spec.configuration.webhookConfiguration.restClient.rateLimiter",
        "virt-api has one client, which apiConfiguration limits",
    ),
];

const CLAIMED: &str = "devices by resource claims";
const ENCRYPTION: &str = "encrypted guests";

/// Names of feature gates of the reference whose features are refused.
const GATES: &[(&str, &str)] = &[
    ("ConfigurableHypervisor", "hypervisors other than kvm"),
    ("DecentralizedLiveMigration", DECENTRALIZED),
    ("GPUsWithDRA", CLAIMED),
    ("HostDevicesWithDRA", CLAIMED),
    ("IncrementalBackup", "incremental backup"),
    ("NetworkDevicesWithDRA", CLAIMED),
    ("OCIExport", "export of volumes"),
    ("PasstBinding", "passt"),
    ("Plugins", "plugins"),
    ("Template", "templates of virtual machines"),
    ("WorkloadEncryptionSEV", ENCRYPTION),
    ("WorkloadEncryptionTDX", ENCRYPTION),
];

/// Returns the feature of a gate whose feature is refused.
pub(super) fn refused_feature(gate: FeatureGate) -> Option<&'static str> {
    GATES.iter().find(|(known, _)| *known == gate.name()).map(|(_, feature)| *feature)
}

/// Returns the settings of the table with their reasons, for documents.
pub(super) fn fields() -> Vec<(&'static str, &'static str)> {
    SETTINGS.iter().map(|setting| (setting.field, setting.instead)).collect()
}

/// Returns a warning about each ignored setting of `new` that `old` has not.
pub(super) fn warnings(new: &KubeVirtSpec, old: &KubeVirtSpec) -> Vec<String> {
    let before: Vec<Used> = used(old).collect();
    let added = used(new).filter(|used| !before.contains(used));
    added.map(|Used { setting, .. }| format!("{} has no effect: {}", setting.field, setting.instead)).collect()
}

/// Returns the ignored settings of a spec, each with its reason: fields, then feature gates.
pub(super) fn settings(spec: &KubeVirtSpec) -> Vec<String> {
    let fields = used(spec).map(|Used { setting, .. }| format!("{}: {}", setting.field, setting.instead));
    let (enabled, _) = gate_lists(&spec.configuration);
    let (known, unknown): (Vec<_>, Vec<_>) =
        enabled.iter().map(|name| (name, FeatureGate::parse(name))).partition(|(_, gate)| gate.is_some());
    let refused = FeatureGate::ALL.iter().filter(|gate| known.iter().any(|(_, known)| *known == Some(**gate)));
    let refused = refused.filter_map(|gate| {
        Some(format!("feature gate {gate}: its feature is not supported yet: {}", refused_feature(*gate)?))
    });
    let unknown = unknown.into_iter().take(UNKNOWN_GATES).map(|(name, _)| {
        let name: String = name.chars().take(NAME_LENGTH).collect();
        format!("feature gate {name}: does not exist")
    });
    fields.chain(refused).chain(unknown).collect()
}

/// A setting and its value in an object.
#[derive(PartialEq)]
struct Used {
    setting: &'static Setting,
    value: Value,
}

/// Returns the settings of the table that a spec has.
fn used(spec: &KubeVirtSpec) -> impl Iterator<Item = Used> {
    let mut object = serde_json::json!({"spec": spec});
    SETTINGS.iter().filter_map(move |setting| {
        let value = object.pointer_mut(&format!("/{}", setting.field.replace('.', "/")))?.take();
        let is_used = match setting.instead {
            NO_LIMIT => value.as_f64().is_some_and(|qps| qps <= 0.0),
            ONE_CONTAINER => has_other_container(&value),
            _ => is_set(&value),
        };
        is_used.then_some(Used { setting, value })
    })
}

/// Returns true for resources of a container that does not exist.
fn has_other_container(value: &Value) -> bool {
    let is_other = |entry: &Value| entry.get("type").and_then(Value::as_str) != Some(component::HOTPLUG_DISK);
    value.as_array().is_some_and(|entries| entries.iter().any(is_other))
}

/// Returns true for a value that asks for something.
fn is_set(value: &Value) -> bool {
    match value {
        Value::Null | Value::Bool(false) => false,
        Value::Bool(true) | Value::Number(_) => true,
        Value::String(text) => !text.is_empty(),
        Value::Array(items) => !items.is_empty(),
        Value::Object(fields) => !fields.is_empty(),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn spec(spec: Value) -> KubeVirtSpec {
        serde_json::from_value(spec).unwrap()
    }

    fn fields_of(warnings: &[String]) -> Vec<&str> {
        warnings.iter().map(|warning| warning.split_once(" has no effect: ").unwrap().0).collect()
    }

    #[test]
    fn settings_with_an_effect_and_empty_ones_are_not_in_the_report() {
        let limit = json!({"restClient": {"rateLimiter": {"tokenBucketRateLimiter": {"qps": 5.0, "burst": 10}}}});
        for accepted in [
            json!({}),
            json!({"certificateRotateStrategy": {}, "customizeComponents": {}, "workloadUpdateStrategy": {}}),
            json!({"infra": {}, "workloads": {"nodePlacement": {"nodeSelector": {"a": "b"}}}}),
            json!({"workloads": {"nodePlacement": {"affinity": {"nodeAffinity": {}}}}}),
            json!({"uninstallStrategy": "RemoveWorkloads", "configuration": {"imagePullPolicy": "Always"}}),
            json!({"configuration": {
                "apiConfiguration": limit, "controllerConfiguration": limit, "handlerConfiguration": limit,
                "architectureConfiguration": {"defaultArchitecture": "amd64", "ppc64le": {}},
                "commonInstancetypesDeployment": {"enabled": true},
                "developerConfiguration": {
                    "featureGates": ["ObjectGraph"], "logVerbosity": {"virtAPI": 4, "nodeVerbosity": {"a": 5}},
                },
                "mediatedDevicesConfiguration": {},
                "migrations": {"disableTLS": false, "network": ""},
                "network": {"defaultNetworkInterface": "bridge", "permitSlirpInterface": false},
                "permittedHostDevices": {"pciHostDevices": []},
                "persistentReservationConfiguration": {"enabled": false},
                "supportContainerResources": [{"type": "hotplug-disk", "resources": {"limits": {"memory": "200M"}}}],
                "virtTemplateDeployment": {"enabled": false},
            }}),
        ] {
            assert_eq!(settings(&spec(accepted.clone())), Vec::<String>::new(), "{accepted}");
        }
    }

    #[test]
    fn each_ignored_setting_is_in_the_table() {
        let limit = json!({"tokenBucketRateLimiter": {"qps": 5.0, "burst": 10}});
        for (field, value) in [
            ("spec.customizeComponents.flags", json!({"api": {"v": "5"}})),
            (
                "spec.customizeComponents.patches",
                json!([{"resourceName": "virt-api", "resourceType": "Deployment", "type": "merge", "patch": "{}"}]),
            ),
            ("spec.imagePullPolicy", json!("Always")),
            ("spec.imagePullSecrets", json!([{"name": "registry"}])),
            ("spec.imageRegistry", json!("example.com")),
            ("spec.imageTag", json!("v2")),
            ("spec.infra.nodePlacement", json!({"nodeSelector": {"a": "b"}})),
            ("spec.infra.replicas", json!(3)),
            ("spec.monitorAccount", json!("prometheus")),
            ("spec.monitorNamespace", json!("monitoring")),
            ("spec.productComponent", json!("virtualization")),
            ("spec.productName", json!("suite")),
            ("spec.productVersion", json!("2")),
            ("spec.serviceMonitorNamespace", json!("monitoring")),
            ("spec.synchronizationPort", json!("9185")),
            (
                "spec.workloads.nodePlacement.affinity.nodeAffinity.preferredDuringSchedulingIgnoredDuringExecution",
                json!([{"weight": 1, "preference": {"matchExpressions": [{"key": "a", "operator": "Exists"}]}}]),
            ),
            (
                "spec.workloads.nodePlacement.affinity.podAffinity",
                json!({"requiredDuringSchedulingIgnoredDuringExecution": []}),
            ),
            (
                "spec.workloads.nodePlacement.affinity.podAntiAffinity",
                json!({"requiredDuringSchedulingIgnoredDuringExecution": []}),
            ),
            ("spec.workloads.nodePlacement.tolerations", json!([{"key": "a", "operator": "Exists"}])),
            ("spec.workloads.replicas", json!(2)),
            ("spec.configuration.apiConfiguration.restClient.rateLimiter.tokenBucketRateLimiter.qps", json!(0.0)),
            (
                "spec.configuration.controllerConfiguration.restClient.rateLimiter.tokenBucketRateLimiter.qps",
                json!(-0.5),
            ),
            ("spec.configuration.handlerConfiguration.restClient.rateLimiter.tokenBucketRateLimiter.qps", json!(0)),
            ("spec.configuration.changedBlockTrackingLabelSelectors", json!({"namespaceLabelSelector": {}})),
            ("spec.configuration.confidentialCompute", json!({"tdx": {}})),
            ("spec.configuration.developerConfiguration.diskVerification", json!({"memoryLimit": "1Gi"})),
            ("spec.configuration.developerConfiguration.logVerbosity.virtOperator", json!(0)),
            ("spec.configuration.developerConfiguration.logVerbosity.virtSynchronizationController", json!(4)),
            ("spec.configuration.mediatedDevicesConfiguration", json!({"mediatedDeviceTypes": ["nvidia-222"]})),
            ("spec.configuration.migrations.disableTLS", json!(true)),
            ("spec.configuration.migrations.network", json!("kubevirt/migrations")),
            ("spec.configuration.minCPUModel", json!("Penryn")),
            ("spec.configuration.network.binding", json!({"passt": {"networkAttachmentDefinition": "a/b"}})),
            ("spec.configuration.network.permitSlirpInterface", json!(true)),
            (
                "spec.configuration.permittedHostDevices.mediatedDevices",
                json!([{"mdevNameSelector": "a", "resourceName": "v.org/a"}]),
            ),
            ("spec.configuration.persistentReservationConfiguration.enabled", json!(true)),
            ("spec.configuration.supportContainerResources", json!([{"type": "container-disk", "resources": {}}])),
            ("spec.configuration.supportedGuestAgentVersions", json!(["4.*"])),
            ("spec.configuration.virtTemplateDeployment.enabled", json!(true)),
            ("spec.configuration.webhookConfiguration.restClient.rateLimiter", limit.clone()),
        ] {
            let value = if field.ends_with(".qps") { json!({"qps": value, "burst": 1}) } else { value };
            let path = field.trim_end_matches(".qps");
            let object = path.rsplit('.').fold(value, |inner, name| json!({name: inner}));
            let (ignored, empty) = (spec(object["spec"].clone()), KubeVirtSpec::default());
            assert_eq!(fields_of(&warnings(&ignored, &empty)), [field]);
            let listed = settings(&ignored);
            assert!(listed.len() == 1 && listed[0].starts_with(&format!("{field}: ")), "{listed:?}");
            // A stored setting is no news, and one that is taken out neither.
            assert_eq!(warnings(&ignored, &ignored), Vec::<String>::new());
            assert_eq!(warnings(&empty, &ignored), Vec::<String>::new());
        }
    }

    #[test]
    fn feature_gates_without_effect_are_listed() {
        let listed = settings(&spec(json!({"configuration": {"developerConfiguration": {
            "featureGates": ["PasstBinding", "NodeRestriction", "Snapshots", "IncrementalBackup"],
            "disabledFeatureGates": ["Template"],
        }}})));
        assert_eq!(
            listed,
            [
                "feature gate PasstBinding: its feature is not supported yet: passt",
                "feature gate IncrementalBackup: its feature is not supported yet: incremental backup",
                "feature gate Snapshots: does not exist",
            ]
        );
        let names: Vec<String> = (0..1000).map(|index| format!("Gate{index}")).collect();
        let many = settings(&spec(json!({"configuration": {"developerConfiguration": {"featureGates": names}}})));
        assert_eq!(many.len(), UNKNOWN_GATES);
        let long = json!({"featureGates": ["G".repeat(100_000)]});
        assert!(settings(&spec(json!({"configuration": {"developerConfiguration": long}})))[0].len() < 128);
        for (name, _) in GATES {
            assert!(FeatureGate::parse(name).is_some(), "{name}");
        }
    }

    /// Specs of KubeVirt objects as platforms write them, in the parts that matter here.
    const PLATFORMS: &str = include_str!("../../../tests/platforms.json");

    #[test]
    fn objects_of_platforms_are_accepted_with_warnings() {
        let platforms: Vec<Value> = serde_json::from_str(PLATFORMS).unwrap();
        assert_eq!(platforms.len(), 3);
        for row in platforms {
            let (platform, spec) = (&row["platform"], spec(row["spec"].clone()));
            let errors = super::super::configuration_errors(&api::KubeVirt::new("kubevirt", spec.clone()));
            assert!(errors.is_empty(), "{platform}: {:?}", errors.as_slice());
            let changes = super::super::update_errors(&spec, &KubeVirtSpec::default());
            assert!(changes.is_empty(), "{platform}: {:?}", changes.as_slice());
            let found = warnings(&spec, &KubeVirtSpec::default());
            assert_eq!(json!(fields_of(&found)), row["ignored"], "{platform}");
            let listed = settings(&spec);
            for warning in &found {
                assert!(listed.contains(&warning.replace(" has no effect: ", ": ")), "{platform}: {listed:?}");
            }
        }
    }
}
