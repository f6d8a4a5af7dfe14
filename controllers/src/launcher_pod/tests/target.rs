//! Tests of the target pods of migrations.

use k8s_openapi::api::core::v1::Node;

use super::*;
use crate::resources::{nodes::CachedNode, pods::CachedPod};

fn migration(change: &Value) -> api::VirtualMachineInstanceMigration {
    let migration = json!({"metadata": {"name": "mig", "namespace": "shop", "uid": "g"}, "spec": {"vmiName": "web"}});
    serde_json::from_value(merged(migration, change)).unwrap()
}

fn node(labels: &Value) -> CachedNode {
    serde_json::from_value::<Node>(json!({"metadata": {"name": "a", "labels": labels}})).unwrap().into()
}

fn target(
    vmi: &VirtualMachineInstance,
    migration: &api::VirtualMachineInstanceMigration,
    source: &CachedPod,
    node: &CachedNode,
    config: &ClusterConfig,
) -> Result<Value, RenderError> {
    let claims = BTreeMap::new();
    let inputs = inputs(vmi, config, &claims);
    let target = Target { migration, source, source_node: Some(node), post_copy: false };
    render_target(&inputs, &target).map(|pod| serde_json::to_value(pod).unwrap())
}

fn intel() -> Value {
    json!({
        "host-model-cpu.node.kubevirt.io/Haswell": "true", "host-model-required-features.node.kubevirt.io/vmx": "true",
        "cpu-vendor.node.kubevirt.io/Intel": "true", "zone": "z",
    })
}

fn running() -> VirtualMachineInstance {
    let mut vmi = vmi(small());
    vmi.metadata.labels = serde_json::from_value(json!({
        "app": "web", "kubevirt.io/nodeName": "a", "kubevirt.io/outdatedLauncherImage": "",
    }))
    .unwrap();
    vmi.metadata.annotations = serde_json::from_value(json!({
        "note": "x", "ferrovirt.io/migration-progress": "{}", "kubevirt.io/eviction-source": "descheduler",
    }))
    .unwrap();
    vmi
}

#[test]
fn target_is_the_pod_of_the_vmi_on_another_node() {
    let vmi = running();
    let config = ClusterConfig::default();
    let first = rendered_vmi(&vmi, &config, NamespaceLimits::default()).unwrap();
    let pod = target(&vmi, &migration(&json!({})), &CachedPod::default(), &node(&intel()), &config).unwrap();
    let labels = &pod["metadata"]["labels"];
    assert_eq!((&labels["app"], &labels["kubevirt.io/created-by"]), (&json!("web"), &json!("u-1")));
    assert_eq!(labels["kubevirt.io/migrationJobUID"], "g");
    for label in ["kubevirt.io/nodeName", "kubevirt.io/outdatedLauncherImage"] {
        assert_eq!(labels[label], Value::Null);
    }
    let annotations = &pod["metadata"]["annotations"];
    assert_eq!((&annotations["note"], &annotations["kubevirt.io/migrationJobName"]), (&json!("x"), &json!("mig")));
    for key in ["ferrovirt.io/migration-progress", "kubevirt.io/eviction-source"] {
        assert_eq!(annotations[key], Value::Null);
    }
    let apart = &pod["spec"]["affinity"]["podAntiAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"][0];
    assert_eq!(apart["topologyKey"], "kubernetes.io/hostname");
    assert_eq!(apart["labelSelector"]["matchLabels"], json!({"kubevirt.io/created-by": "u-1"}));
    assert_eq!(pod["spec"]["containers"], first["spec"]["containers"]);
    assert_eq!(pod["spec"]["volumes"], first["spec"]["volumes"]);
}

#[test]
fn target_has_the_cpu_on_which_the_guest_started() {
    let (vmi, config) = (running(), ClusterConfig::default());
    let (haswell, vmx) = ("cpu-model-migration.node.kubevirt.io/Haswell", "cpu-feature.node.kubevirt.io/vmx");
    let vendor = "cpu-vendor.node.kubevirt.io/Intel";
    let selector = |source: &CachedPod, node: &CachedNode, config: &ClusterConfig| {
        let pod = target(&vmi, &migration(&json!({})), source, node, config);
        pod.map(|pod| pod["spec"]["nodeSelector"].clone())
    };
    let of_node = selector(&CachedPod::default(), &node(&intel()), &config).unwrap();
    let arch = "kubernetes.io/arch";
    assert_eq!(of_node, json!({arch: "amd64", haswell: "true", vmx: "true", vendor: "true"}));
    // The CPU of the node on which the guest started counts, not that of its present node.
    let cpu_selector = BTreeMap::from([("cpu-model-migration.node.kubevirt.io/Nehalem".to_owned(), "true".to_owned())]);
    let moved = selector(&CachedPod { cpu_selector, ..CachedPod::default() }, &node(&intel()), &config).unwrap();
    assert_eq!(
        (&moved["cpu-model-migration.node.kubevirt.io/Nehalem"], &moved[haswell]),
        (&json!("true"), &Value::Null)
    );
    let unknown = selector(&CachedPod::default(), &node(&json!({})), &config);
    assert!(matches!(unknown, Err(RenderError::NoHostModel(_))));
    let emulated = ClusterConfig { use_emulation: true, ..ClusterConfig::default() };
    assert_eq!(selector(&CachedPod::default(), &node(&intel()), &emulated).unwrap(), json!({arch: "amd64"}));
}

#[test]
fn labels_of_the_migration_restrict_the_choice_of_nodes() {
    let mut vmi = running();
    vmi.spec.node_selector = serde_json::from_value(json!({"zone": "z"})).unwrap();
    let added = migration(&json!({"spec": {"addedNodeSelector": {"zone": "other", "kubernetes.io/hostname": "b"}}}));
    let pod = target(&vmi, &added, &CachedPod::default(), &node(&intel()), &ClusterConfig::default()).unwrap();
    let selector = &pod["spec"]["nodeSelector"];
    assert_eq!((&selector["zone"], &selector["kubernetes.io/hostname"]), (&json!("z"), &json!("b")));
}

#[test]
fn target_has_the_selinux_level_of_the_source() {
    let typed = ClusterConfig { selinux_launcher_type: Some("t".to_owned()), ..ClusterConfig::default() };
    let mut own = ClusterConfig::default();
    own.migrations.match_selinux_level = Some(false);
    for (context, config, expected) in [
        ("system_u:system_r:t:s0:c1,c2", ClusterConfig::default(), json!({"level": "s0:c1,c2"})),
        ("system_u:system_r:t:s0:c1,c2", typed, json!({"level": "s0:c1,c2", "type": "t"})),
        ("system_u:system_r:t:s0:c1,c2", own, Value::Null),
        ("none", ClusterConfig::default(), Value::Null),
    ] {
        let mut vmi = running();
        vmi.status = serde_json::from_value(json!({"selinuxContext": context})).unwrap();
        let pod = target(&vmi, &migration(&json!({})), &CachedPod::default(), &node(&intel()), &config).unwrap();
        assert_eq!(pod["spec"]["securityContext"]["seLinuxOptions"], expected, "{context}");
    }
}

#[test]
fn container_disks_have_the_same_image_on_both_nodes() {
    let config = ClusterConfig::default();
    for (image, expected) in [
        ("registry:5000/disk:1", "registry:5000/disk@sha256:d"),
        ("registry:5000/disk", "registry:5000/disk@sha256:d"),
        ("disk:1@sha256:old", "disk@sha256:d"),
    ] {
        let mut vmi = running();
        vmi.spec.volumes = serde_json::from_value(json!([{"name": "cd", "containerDisk": {"image": image}}])).unwrap();
        let first = rendered_vmi(&vmi, &config, NamespaceLimits::default()).unwrap();
        let volumes = first["spec"]["volumes"].as_array().unwrap();
        let name = volumes.iter().find(|volume| volume["image"] != Value::Null).unwrap()["name"].as_str().unwrap();
        let image_digests = BTreeMap::from([(name.to_owned(), "sha256:d".to_owned())]);
        let source = CachedPod { image_digests, ..CachedPod::default() };
        let pod = target(&vmi, &migration(&json!({})), &source, &node(&intel()), &config).unwrap();
        let volumes = pod["spec"]["volumes"].as_array().unwrap();
        let volume = volumes.iter().find(|volume| volume["name"] == name).unwrap();
        assert_eq!(volume["image"]["reference"], expected, "{image}");
    }
}
