//! The pod that attaches claims of hot-plugged volumes to the node of a launcher pod.
//!
//! virt-handler takes the volumes from this pod and hands them to the launcher. Each volume has a pod of its own, so that a claim
//! that cannot be attached delays no other volume, and a change of one volume replaces no pod of another. Only the target of a
//! migration has one pod for all volumes: it needs all of them at once.

use std::collections::BTreeMap;

use api::{
    VirtualMachineInstance,
    config::ClusterConfig,
    constants::{annotation, component, label},
};
use k8s_openapi::{
    api::core::v1::{
        Affinity, Container, EmptyDirVolumeSource, NodeAffinity, NodeSelector, NodeSelectorRequirement,
        NodeSelectorTerm, Pod, PodSecurityContext, PodSpec, SELinuxOptions, Toleration, Volume,
    },
    apimachinery::pkg::apis::meta::v1::{ObjectMeta, OwnerReference},
};

use crate::{
    pod_parts,
    resources::{
        attachments::VMI_UID,
        claims::CachedClaim,
        pods::{BIND_CLAIMS, CachedPod},
    },
    runtime::Kind,
};

/// Prefix of the names of these pods, by which the webhook for evictions selects them.
pub(crate) const NAME_PREFIX: &str = "hp-volume-";
/// Volume of the socket and of device nodes.
const SHARED_VOLUME: &str = "hotplug-disks";
/// Mount path of [`SHARED_VOLUME`].
const SHARED_PATH: &str = "/path";
/// Directory of the claims with file systems. A claim named `usr` at the root would hide the programs of the image.
const FILE_SYSTEMS: &str = "/volumes";
/// Seconds from SIGTERM, at which the process ends, to SIGKILL.
const GRACE_SECONDS: i64 = 5;
/// Taints of nodes that a running VMI ignores.
const TOLERATED_TAINTS: [&str; 5] = [
    "node.kubernetes.io/disk-pressure",
    "node.kubernetes.io/memory-pressure",
    "node.kubernetes.io/network-unavailable",
    "node.kubernetes.io/pid-pressure",
    "node.kubernetes.io/unschedulable",
];

/// Everything that a pod is rendered from.
pub(crate) struct Inputs<'a> {
    /// The VMI.
    pub instance: &'a VirtualMachineInstance,
    /// Its launcher pod.
    pub launcher: &'a CachedPod,
    /// Metadata of the migration to the launcher pod, if it is the target of one.
    pub migration: Option<&'a ObjectMeta>,
    /// Node of the launcher pod.
    pub node: &'a str,
    /// The cluster's configuration.
    pub config: &'a ClusterConfig,
    /// Image of the launcher.
    pub image: &'a str,
    /// The volumes.
    pub volumes: &'a [Attached<'a>],
}

/// A volume of an attachment pod.
pub(crate) struct Attached<'a> {
    /// Name of the volume.
    pub name: &'a str,
    /// Its claim is mounted read-only.
    pub read_only: bool,
    /// The claim.
    pub claim: &'a CachedClaim,
}

/// Renders the pod.
pub(crate) fn render(inputs: &Inputs<'_>) -> Pod {
    let spec = &inputs.instance.spec;
    let metadata = &inputs.instance.metadata;
    let mut labels = BTreeMap::from([(label::APP.to_owned(), component::HOTPLUG_DISK.to_owned())]);
    let mut annotations = BTreeMap::from([
        (annotation::OWNER_VMI_NAME.to_owned(), metadata.name.clone().unwrap_or_default()),
        (annotation::OWNER_VMI_UID.to_owned(), metadata.uid.clone().unwrap_or_default()),
    ]);
    if let Some(migration) = inputs.migration {
        labels.insert(label::MIGRATION_JOB_UID.to_owned(), migration.uid.clone().unwrap_or_default());
        annotations.insert(annotation::MIGRATION_JOB_NAME.to_owned(), migration.name.clone().unwrap_or_default());
    }
    Pod {
        metadata: ObjectMeta {
            generate_name: Some(NAME_PREFIX.to_owned()),
            labels: Some(labels),
            annotations: Some(annotations),
            // It delays the deletion of the launcher pod in no case.
            owner_references: Some(vec![OwnerReference {
                block_owner_deletion: None,
                ..Kind::Pod.owner_reference(&inputs.launcher.metadata)
            }]),
            ..ObjectMeta::default()
        },
        spec: Some(PodSpec {
            automount_service_account_token: Some(false),
            enable_service_links: Some(false),
            termination_grace_period_seconds: Some(GRACE_SECONDS),
            priority_class_name: spec.priority_class_name.clone().filter(|name| !name.is_empty()),
            affinity: Some(on_node(inputs.node)),
            tolerations: Some(tolerations(&spec.tolerations)),
            security_context: Some(PodSecurityContext {
                // Without OnRootMismatch: root may write an image after the directory got its group.
                se_linux_options: selinux(inputs),
                ..pod_parts::pod_security()
            }),
            containers: vec![container(inputs)],
            volumes: Some(volumes(inputs)),
            ..PodSpec::default()
        }),
        ..Pod::default()
    }
}

/// Renders the pod that is the first consumer of a claim, beside the launcher pod. Its program ends at once, and nothing is mounted:
/// importers wait until no pod uses the claim.
pub(crate) fn render_trigger(inputs: &Inputs<'_>) -> Pod {
    let mut pod = render(inputs);
    let annotations = pod.metadata.annotations.get_or_insert_default();
    annotations.insert(annotation::EPHEMERAL_PROVISIONING.to_owned(), "true".to_owned());
    let Some(spec) = &mut pod.spec else { return pod };
    spec.restart_policy = Some("Never".to_owned());
    spec.volumes.get_or_insert_default().retain(|volume| volume.persistent_volume_claim.is_some());
    for container in &mut spec.containers {
        container.command = Some(BIND_CLAIMS.map(str::to_owned).to_vec());
        (container.volume_mounts, container.volume_devices) = (None, None);
    }
    pod
}

fn volumes(inputs: &Inputs<'_>) -> Vec<Volume> {
    let shared = pod_parts::empty_dir(SHARED_VOLUME, EmptyDirVolumeSource::default());
    let claims = inputs.volumes.iter().map(|volume| {
        let claim = volume.claim.metadata.name.as_deref().unwrap_or_default();
        pod_parts::claim(volume.name, claim, volume.read_only)
    });
    [shared].into_iter().chain(claims).collect()
}

fn container(inputs: &Inputs<'_>) -> Container {
    let mut mounts = vec![pod_parts::mount(SHARED_VOLUME, SHARED_PATH, false)];
    let mut devices = Vec::new();
    for volume in inputs.volumes {
        let name = volume.name;
        if volume.claim.block {
            let uid = volume.claim.metadata.uid.as_deref().unwrap_or_default();
            devices.push(pod_parts::device(name, &format!("{SHARED_PATH}/{name}/{uid}")));
        } else {
            mounts.push(pod_parts::mount(name, &format!("{FILE_SYSTEMS}/{name}"), volume.read_only));
        }
    }
    Container {
        name: component::HOTPLUG_CONTAINER.to_owned(),
        image: Some(inputs.image.to_owned()),
        image_pull_policy: Some(inputs.config.image_pull_policy.clone()),
        command: Some(command(inputs)),
        security_context: Some(pod_parts::container_security()),
        resources: Some(inputs.config.attachment_resources.clone()),
        volume_mounts: Some(mounts),
        volume_devices: (!devices.is_empty()).then_some(devices),
        ..Container::default()
    }
}

/// Returns the command. Its socket identifies the processes of the pod to virt-handler, and answers for these volumes of this VMI
/// only.
fn command(inputs: &Inputs<'_>) -> Vec<String> {
    let uid = inputs.instance.metadata.uid.as_deref().unwrap_or_default();
    let fixed = ["/usr/bin/virt-launcher", "hold-volumes", "--socket", "/path/hp.sock", VMI_UID, uid];
    let volumes = inputs.volumes.iter().flat_map(|volume| ["--volume", volume.name]);
    fixed.into_iter().chain(volumes).map(str::to_owned).collect()
}

/// Selects the node by its name. Its host name label may differ.
fn on_node(node: &str) -> Affinity {
    let requirement = NodeSelectorRequirement {
        key: "metadata.name".to_owned(),
        operator: "In".to_owned(),
        values: Some(vec![node.to_owned()]),
    };
    let term = NodeSelectorTerm { match_fields: Some(vec![requirement]), ..NodeSelectorTerm::default() };
    let required = NodeSelector { node_selector_terms: vec![term] };
    Affinity {
        node_affinity: Some(NodeAffinity {
            required_during_scheduling_ignored_during_execution: Some(required),
            ..NodeAffinity::default()
        }),
        ..Affinity::default()
    }
}

fn tolerations(of_vmi: &[Toleration]) -> Vec<Toleration> {
    let ignored = TOLERATED_TAINTS.map(|key| Toleration {
        key: Some(key.to_owned()),
        operator: Some("Exists".to_owned()),
        effect: Some("NoSchedule".to_owned()),
        ..Toleration::default()
    });
    let mut tolerations: Vec<Toleration> = ignored.into_iter().chain(of_vmi.iter().cloned()).collect();
    tolerations.sort_by(|left, right| left.key.cmp(&right.key));
    tolerations.dedup();
    tolerations
}

/// Returns the SELinux options: the level of the launcher, so that both can use the files of the claim.
fn selinux(inputs: &Inputs<'_>) -> Option<SELinuxOptions> {
    let context = inputs.instance.status.as_ref().and_then(|status| status.selinux_context.as_deref());
    let level = context
        .filter(|context| *context != "none")
        .map(|context| context.splitn(4, ':').nth(3).unwrap_or_default())
        .filter(|level| !level.is_empty())
        .map(str::to_owned);
    let type_ = inputs.config.selinux_launcher_type.clone();
    (level.is_some() || type_.is_some()).then(|| SELinuxOptions { level, type_, ..SELinuxOptions::default() })
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn rendered(block: bool, vmi: &Value, config: &ClusterConfig) -> Value {
        rendered_by(render, block, vmi, config)
    }

    fn rendered_by(render: fn(&Inputs<'_>) -> Pod, block: bool, vmi: &Value, config: &ClusterConfig) -> Value {
        let mut object = json!({
            "apiVersion": "kubevirt.io/v1", "kind": "VirtualMachineInstance",
            "metadata": {"name": "m", "namespace": "d", "uid": "u"}, "spec": {"domain": {"devices": {}}},
        });
        json_patch::merge(&mut object, vmi);
        let metadata = |name: &str, uid: &str| {
            serde_json::from_value::<ObjectMeta>(json!({"name": name, "namespace": "d", "uid": uid})).unwrap()
        };
        let inputs = Inputs {
            instance: &serde_json::from_value(object).unwrap(),
            launcher: &CachedPod { metadata: metadata("virt-launcher-m-x", "p"), ..CachedPod::default() },
            migration: None,
            node: "n",
            config,
            image: "launcher:1",
            volumes: &[Attached {
                name: "data",
                read_only: false,
                claim: &CachedClaim { metadata: metadata("c", "claim-uid"), block, ..CachedClaim::default() },
            }],
        };
        serde_json::to_value(render(&inputs)).unwrap()
    }

    #[test]
    fn pod_belongs_to_the_launcher_and_runs_beside_it() {
        let pod = rendered(false, &json!({}), &ClusterConfig::default());
        assert_eq!(pod["metadata"]["generateName"], "hp-volume-");
        assert_eq!(pod["metadata"]["labels"], json!({"kubevirt.io": "hotplug-disk"}));
        assert_eq!(
            pod["metadata"]["annotations"],
            json!({"kubevirt.io/owner-vmi-name": "m", "kubevirt.io/owner-vmi-uid": "u"})
        );
        let owner = &pod["metadata"]["ownerReferences"][0];
        assert_eq!((&owner["kind"], &owner["uid"], &owner["controller"]), (&json!("Pod"), &json!("p"), &json!(true)));
        let terms = &pod["spec"]["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"];
        assert_eq!(terms["nodeSelectorTerms"][0]["matchFields"][0]["values"], json!(["n"]));
    }

    #[test]
    fn claim_is_a_device_or_a_file_system() {
        let config = ClusterConfig::default();
        let shared = json!({"name": "hotplug-disks", "mountPath": "/path"});
        let device = &rendered(true, &json!({}), &config)["spec"]["containers"][0];
        assert_eq!(device["volumeDevices"], json!([{"name": "data", "devicePath": "/path/data/claim-uid"}]));
        assert_eq!(device["volumeMounts"], json!([shared]));
        let files = &rendered(false, &json!({}), &config)["spec"]["containers"][0];
        assert_eq!(files["volumeDevices"], Value::Null);
        assert_eq!(files["volumeMounts"], json!([shared, {"name": "data", "mountPath": "/volumes/data"}]));
    }

    #[test]
    fn pod_and_trigger_have_the_configured_resources() {
        let configuration = |configuration: Value| {
            let spec = json!({"configuration": configuration});
            let object = json!({"apiVersion": "kubevirt.io/v1", "kind": "KubeVirt", "metadata": {}, "spec": spec});
            ClusterConfig::from_kubevirt(&serde_json::from_value(object).unwrap()).unwrap()
        };
        let own = json!([{"type": "hotplug-disk", "resources": {"limits": {"memory": "200M"}}}]);
        for (config, memory) in
            [(configuration(json!({})), "80M"), (configuration(json!({"supportContainerResources": own})), "200M")]
        {
            for render in [render, render_trigger] {
                let pod = rendered_by(render, false, &json!({}), &config);
                let expected = json!({
                    "requests": {"cpu": "10m", "memory": "2M"}, "limits": {"cpu": "100m", "memory": memory},
                });
                assert_eq!(pod["spec"]["containers"][0]["resources"], expected);
            }
        }
    }

    #[test]
    fn pod_answers_for_its_vmi_and_volumes() {
        let pod = rendered(false, &json!({}), &ClusterConfig::default());
        let program = json!(["/usr/bin/virt-launcher", "hold-volumes", "--socket", "/path/hp.sock"]);
        let command = pod["spec"]["containers"][0]["command"].as_array().unwrap();
        assert_eq!(command[..4], *program.as_array().unwrap());
        assert_eq!(command[4..], [json!("--vmi-uid"), json!("u"), json!("--volume"), json!("data")]);
    }

    #[test]
    fn trigger_consumes_the_claim_beside_the_launcher_and_mounts_nothing() {
        for block in [false, true] {
            let [pod, trigger] = [render, render_trigger]
                .map(|render| rendered_by(render, block, &json!({}), &ClusterConfig::default()));
            for same in ["affinity", "tolerations", "securityContext", "automountServiceAccountToken"] {
                assert_eq!(trigger["spec"][same], pod["spec"][same], "{same}");
            }
            assert_eq!(trigger["metadata"]["ownerReferences"], pod["metadata"]["ownerReferences"]);
            assert_eq!(trigger["metadata"]["annotations"]["kubevirt.io/ephemeral-provisioning"], "true");
            assert_eq!(trigger["spec"]["restartPolicy"], "Never");
            let claim = json!([{"name": "data", "persistentVolumeClaim": {"claimName": "c"}}]);
            assert_eq!(trigger["spec"]["volumes"], claim);
            let container = &trigger["spec"]["containers"][0];
            assert_eq!(container["command"], json!(["/usr/bin/virt-launcher", "bind-claims"]));
            assert_eq!((&container["volumeMounts"], &container["volumeDevices"]), (&Value::Null, &Value::Null));
        }
    }

    #[test]
    fn pod_passes_the_restricted_standard() {
        let pod = rendered(true, &json!({}), &ClusterConfig::default());
        let of_pod = &pod["spec"]["securityContext"];
        assert_eq!((&of_pod["runAsNonRoot"], &of_pod["runAsUser"]), (&json!(true), &json!(107)));
        // kubelet gives each file to the group, also in a directory that has it.
        assert_eq!((&of_pod["fsGroup"], &of_pod["fsGroupChangePolicy"]), (&json!(107), &Value::Null));
        assert_eq!(of_pod["seccompProfile"], json!({"type": "RuntimeDefault"}));
        assert_eq!(of_pod["seLinuxOptions"], Value::Null);
        let own = &pod["spec"]["containers"][0]["securityContext"];
        assert_eq!(own["allowPrivilegeEscalation"], false);
        assert_eq!(own["capabilities"], json!({"drop": ["ALL"]}));
        assert_eq!(pod["spec"]["automountServiceAccountToken"], false);
    }

    #[test]
    fn pod_has_the_selinux_level_of_the_launcher() {
        let config = ClusterConfig { selinux_launcher_type: Some("t".to_owned()), ..ClusterConfig::default() };
        let none = ClusterConfig::default();
        for (context, config, expected) in [
            ("system_u:system_r:container_t:s0:c1,c2", &none, json!({"level": "s0:c1,c2"})),
            ("system_u:system_r:container_t:s0:c1,c2", &config, json!({"level": "s0:c1,c2", "type": "t"})),
            ("none", &config, json!({"type": "t"})),
            ("none", &none, Value::Null),
            ("odd", &none, Value::Null),
        ] {
            let pod = rendered(false, &json!({"status": {"selinuxContext": context}}), config);
            assert_eq!(pod["spec"]["securityContext"]["seLinuxOptions"], expected, "{context}");
        }
    }

    #[test]
    fn pod_tolerates_the_taints_of_the_vmi() {
        let own = json!([{"key": "node.kubernetes.io/unschedulable", "operator": "Exists", "effect": "NoSchedule"},
            {"key": "a", "operator": "Exists"}]);
        let pod = rendered(false, &json!({"spec": {"tolerations": own}}), &ClusterConfig::default());
        let tolerations = pod["spec"]["tolerations"].as_array().unwrap();
        assert_eq!(tolerations.len(), 6);
        assert_eq!(tolerations[0], json!({"key": "a", "operator": "Exists"}));
    }
}
