//! Tests of the rendered pod, by part. Here are the objects that they share, and tests of the container.

mod identity;
mod networks;
mod resources;
mod scheduling;
mod target;
mod volumes;

use serde_json::{Value, json};

use super::*;
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;

fn vmi(spec: Value) -> VirtualMachineInstance {
    serde_json::from_value(json!({
        "apiVersion": "kubevirt.io/v1",
        "kind": "VirtualMachineInstance",
        "metadata": {
            "name": "web", "namespace": "shop", "uid": "u-1",
            "labels": {"app": "web"},
            "annotations": {"note": "x", "kubevirt.io/latest-observed-api-version": "v1"},
        },
        "spec": spec,
    }))
    .unwrap()
}

fn small() -> Value {
    json!({
        "architecture": "amd64",
        "domain": {
            "cpu": {"cores": 1, "sockets": 1, "threads": 1},
            "memory": {"guest": "128Mi"},
            "devices": {
                "disks": [{"name": "cd", "disk": {"bus": "virtio"}}],
                "interfaces": [{"name": "default", "masquerade": {}, "ports": [{"port": 80}]}],
            },
        },
        "networks": [{"name": "default", "pod": {}}],
        "volumes": [
            {"name": "cd", "containerDisk": {"image": "registry/disk:1"}},
            {"name": "ci", "cloudInitNoCloud": {"secretRef": {"name": "user"}}},
        ],
    })
}

fn rendered_with(spec: Value, config: &ClusterConfig, limits: NamespaceLimits) -> Result<Value, RenderError> {
    rendered_vmi(&vmi(spec), config, limits)
}

fn claims() -> BTreeMap<String, Arc<CachedClaim>> {
    BTreeMap::from([
        (
            "shared".to_owned(),
            Arc::new(CachedClaim { access_modes: vec!["ReadWriteMany".to_owned()], ..CachedClaim::default() }),
        ),
        ("raw".to_owned(), Arc::new(CachedClaim { block: true, ..CachedClaim::default() })),
    ])
}

/// Returns the inputs of a pod without limits, definitions and state.
fn inputs<'a>(
    instance: &'a VirtualMachineInstance,
    config: &'a ClusterConfig,
    claims: &'a BTreeMap<String, Arc<CachedClaim>>,
) -> Inputs<'a> {
    Inputs {
        instance,
        config,
        launcher_image: "launcher:1",
        claims,
        limits: NamespaceLimits::default(),
        definitions: None,
        state: None,
    }
}

fn rendered_vmi(
    instance: &VirtualMachineInstance,
    config: &ClusterConfig,
    limits: NamespaceLimits,
) -> Result<Value, RenderError> {
    let claims = claims();
    let inputs = Inputs { limits, ..inputs(instance, config, &claims) };
    render(&inputs).map(|pod| serde_json::to_value(pod).unwrap())
}

fn rendered(spec: Value) -> Value {
    rendered_with(spec, &ClusterConfig::default(), NamespaceLimits::default()).unwrap()
}

/// One volume of each source that a VMI can have, and what else of a spec carries a path or a name of a file.
fn sources() -> Vec<Value> {
    let volume = |name: &str, source: Value| merged(json!({"name": name}), &source);
    vec![
        json!({"volumes": [
            volume("image", json!({"containerDisk": {"image": "i", "path": "/../../etc/shadow"}})),
            volume("claim", json!({"persistentVolumeClaim": {"claimName": "raw"}})),
            volume("data", json!({"dataVolume": {"name": "shared"}})),
            volume("layer", json!({"ephemeral": {"persistentVolumeClaim": {"claimName": "shared"}}})),
            volume("empty", json!({"emptyDisk": {"capacity": "1Gi"}})),
            volume("secret", json!({"secret": {"secretName": "s"}})),
            volume("map", json!({"configMap": {"name": "c"}})),
            volume("down", json!({"downwardAPI": {"fields": [{"path": "p", "fieldRef": {"fieldPath": "metadata.name"}}]}})),
            volume("prep", json!({"sysprep": {"secret": {"name": "s"}}})),
            volume("cloud", json!({"cloudInitNoCloud": {"secretRef": {"name": "s"}}})),
            volume("drive", json!({"cloudInitConfigDrive": {"userData": "x"}})),
        ]}),
        json!({"domain": {"firmware": {"kernelBoot": {"container": {"image": "i", "kernelPath": "/../etc/shadow"}}}}}),
        json!({"volumes": [volume("v", json!({"hostDisk": {"path": "/etc/shadow", "type": "DiskOrCreate"}}))]}),
        json!({"volumes": [volume("v", json!({"containerPath": {"path": "/etc"}}))]}),
        json!({"volumes": [volume("v", json!({"downwardMetrics": {}}))]}),
    ]
}

fn merged(mut base: Value, change: &Value) -> Value {
    json_patch::merge(&mut base, change);
    base
}

#[test]
fn pod_has_one_container_and_passes_the_restricted_standard() {
    let pod = rendered(small());
    let containers = pod["spec"]["containers"].as_array().unwrap();
    assert_eq!(containers.len(), 1);
    assert_eq!(pod["spec"]["initContainers"], Value::Null);
    let security = &containers[0]["securityContext"];
    assert_eq!((&security["privileged"], &security["allowPrivilegeEscalation"]), (&json!(false), &json!(false)));
    assert_eq!(security["runAsNonRoot"], true);
    assert_eq!(security["capabilities"], json!({"add": ["NET_BIND_SERVICE"], "drop": ["ALL"]}));
    assert_eq!(pod["spec"]["securityContext"]["seccompProfile"]["type"], "RuntimeDefault");
    // kubelet gives each file of a claim to the group, also in a directory that has it.
    assert_eq!(pod["spec"]["securityContext"]["fsGroup"], 107);
    assert_eq!(pod["spec"]["securityContext"]["fsGroupChangePolicy"], Value::Null);
    assert_eq!(pod["spec"]["automountServiceAccountToken"], false);
    for volume in pod["spec"]["volumes"].as_array().unwrap() {
        assert_eq!(volume["hostPath"], Value::Null);
    }
}

#[test]
fn guest_that_sees_numa_nodes_has_the_profile_that_binds_memory() {
    let of = |numa: Value, own: Option<&str>| {
        let config = ClusterConfig { seccomp_localhost_profile: own.map(str::to_owned), ..ClusterConfig::default() };
        let mut instance = vmi(small());
        instance.spec.domain.cpu = serde_json::from_value(json!({"numa": numa})).unwrap();
        let pod = rendered_vmi(&instance, &config, NamespaceLimits::default()).unwrap();
        pod["spec"]["securityContext"]["seccompProfile"].clone()
    };
    let local = |profile: &str| json!({"type": "Localhost", "localhostProfile": profile});
    let mapped = || json!({"guestMappingPassthrough": {}});
    assert_eq!(of(json!({}), None), json!({"type": "RuntimeDefault"}));
    assert_eq!(of(mapped(), None), local("ferrovirt/numa.json"));
    assert_eq!(of(mapped(), Some("own.json")), local("own.json"));
}

#[test]
fn probes_of_the_guest_agent_run_a_program_in_the_container() {
    for (probe, timeout, words) in [
        (json!({"guestAgentPing": {}}), 2, "virt-probe --domainName shop_web --timeoutSeconds 1 --guestAgentPing"),
        (
            json!({"exec": {"command": ["cat", "-n", "/x"]}, "timeoutSeconds": 5}),
            6,
            "virt-probe --domainName shop_web --timeoutSeconds 5 --command cat -- -n /x",
        ),
        (json!({"exec": {"command": ["virt-probe", "--guestAgentPing"]}}), 1, "virt-probe --guestAgentPing"),
    ] {
        let spec = merged(small(), &json!({"livenessProbe": probe}));
        let pod = rendered_with(spec, &ClusterConfig::default(), NamespaceLimits::default()).unwrap();
        let rendered = &pod["spec"]["containers"][0]["livenessProbe"];
        let command = rendered["exec"]["command"].as_array().unwrap();
        let command: Vec<&str> = command.iter().map(|word| word.as_str().unwrap()).collect();
        assert_eq!(command.join(" "), words);
        assert_eq!(rendered["timeoutSeconds"], timeout);
    }
}

#[test]
fn features_without_support_are_refused_not_ignored() {
    for change in [
        json!({"domain": {"devices": {"filesystems": [{"name": "f", "virtiofs": {}}]}}}),
        json!({"domain": {"devices": {"interfaces": [{"name": "default", "sriov": {}}]}}}),
        json!({"domain": {"devices": {"filesystems": [{"name": "cd", "virtiofs": {}}]}}}),
        json!({"domain": {"devices": {"filesystems": [{"name": "raw", "virtiofs": {}}]}},
            "volumes": [{"name": "raw", "persistentVolumeClaim": {"claimName": "raw"}}]}),
    ] {
        let refused = rendered_with(merged(small(), &change), &ClusterConfig::default(), NamespaceLimits::default());
        assert!(matches!(refused, Err(RenderError::Unsupported(_))), "{change}");
    }
}

#[test]
fn path_of_the_container_needs_its_gate_and_is_read_only() {
    let with = |source: Value, gates: &[&str]| {
        let change = json!({"domain": {"devices": {"filesystems": [{"name": "v", "virtiofs": {}}]}},
            "volumes": [{"name": "v", "containerPath": source}]});
        let feature_gates = gates.iter().map(|gate| (*gate).to_owned()).collect();
        let config = ClusterConfig { feature_gates, ..ClusterConfig::default() };
        rendered_with(merged(small(), &change), &config, NamespaceLimits::default())
    };
    let path = json!({"path": "/etc/token", "readOnly": true});
    let refused = with(path.clone(), &[]).unwrap_err();
    assert_eq!(refused, RenderError::ContainerPathsDisabled("ContainerPathVolumes feature gate is not enabled"));
    assert!(with(path, &["ContainerPathVolumes"]).is_ok());
    let writable = with(json!({"path": "/etc/token"}), &["ContainerPathVolumes"]);
    assert!(matches!(writable, Err(RenderError::Unsupported(_))), "{writable:?}");
}

#[test]
fn state_is_in_a_claim_that_the_pod_mounts_as_a_whole() {
    let state = |shared| Some(StateMount { claim: "s".to_owned(), shared });
    let with = |change: Value, state: Option<StateMount>| {
        let (instance, config, claims) = (vmi(merged(small(), &change)), ClusterConfig::default(), claims());
        let inputs = Inputs { state: state.as_ref(), ..inputs(&instance, &config, &claims) };
        render(&inputs).map(|pod| serde_json::to_value(pod).unwrap())
    };
    let tpm = |tpm: Value| json!({"domain": {"devices": {"tpm": tpm}}});
    let efi = json!({"domain": {"firmware": {"bootloader": {"efi": {"persistent": true}}}}});
    let mount = json!({"name": "vm-state", "mountPath": "/var/run/kubevirt-private/vm-state"});
    for (change, shared, mounts) in [
        (tpm(json!({"persistent": true})), false, true),
        (tpm(json!({"persistent": true})), true, true),
        (efi, false, true),
        (tpm(json!({})), false, false),
        (tpm(json!({"enabled": false, "persistent": true})), false, false),
    ] {
        let pod = with(change.clone(), state(shared)).unwrap();
        let container = &pod["spec"]["containers"][0];
        let has = |list: &Value, item: &Value| list.as_array().unwrap().contains(item);
        let claim = json!({"name": "vm-state", "persistentVolumeClaim": {"claimName": "s"}});
        assert_eq!(has(&container["volumeMounts"], &mount), mounts, "{change}");
        assert_eq!(has(&pod["spec"]["volumes"], &claim), mounts, "{change}");
        let is_shared =
            container["env"].as_array().unwrap().iter().any(|variable| {
                variable["name"] == "SHARED_FILESYSTEM_PATHS" && variable["value"] == mount["mountPath"]
            });
        assert_eq!(is_shared, shared, "{change}");
        assert_eq!(with(change, None).is_err(), mounts);
    }
    // The user has a volume of this name.
    let mut taken = tpm(json!({"persistent": true}));
    taken["volumes"] =
        json!([{"name": "vm-state", "emptyDisk": {"capacity": "1Mi"}}, {"name": "d", "secret": {"secretName": "s"}}]);
    let pod = with(taken, state(false)).unwrap();
    let mounts = pod["spec"]["containers"][0]["volumeMounts"].as_array().unwrap();
    let own = mounts.iter().find(|found| found["mountPath"] == mount["mountPath"]).unwrap();
    assert_eq!(own["name"], "vm-state-own");
}
