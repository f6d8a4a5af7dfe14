use serde_json::{Value, json};

use super::*;
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;

fn machine(spec: Value) -> VirtualMachineInstance {
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
    rendered_machine(&machine(spec), config, limits)
}

fn rendered_machine(
    instance: &VirtualMachineInstance,
    config: &ClusterConfig,
    limits: NamespaceLimits,
) -> Result<Value, RenderError> {
    let claims = BTreeMap::from([
        (
            "shared".to_owned(),
            Arc::new(ClaimView { access_modes: vec!["ReadWriteMany".to_owned()], ..ClaimView::default() }),
        ),
        ("raw".to_owned(), Arc::new(ClaimView { block: true, ..ClaimView::default() })),
    ]);
    let inputs = Inputs { instance, config, launcher_image: "launcher:1", claims: &claims, limits, definitions: None };
    render(&inputs).map(|pod| serde_json::to_value(pod).unwrap())
}

fn rendered(spec: Value) -> Value {
    rendered_with(spec, &ClusterConfig::default(), NamespaceLimits::default()).unwrap()
}

fn merged(mut base: Value, change: &Value) -> Value {
    json_patch::merge(&mut base, change);
    base
}

#[test]
fn pod_is_owned_by_its_machine_and_named_after_it() {
    let pod = rendered(small());
    assert_eq!(pod["metadata"]["generateName"], "virt-launcher-web-");
    let owner = &pod["metadata"]["ownerReferences"][0];
    assert_eq!((&owner["uid"], &owner["controller"]), (&json!("u-1"), &json!(true)));
    let labels = &pod["metadata"]["labels"];
    assert_eq!(labels["app"], "web");
    assert_eq!(labels["kubevirt.io"], "virt-launcher");
    assert_eq!(labels["kubevirt.io/created-by"], "u-1");
    assert_eq!(labels["vm.kubevirt.io/name"], "web");
    let annotations = &pod["metadata"]["annotations"];
    assert_eq!(annotations["note"], "x");
    assert_eq!(annotations["kubevirt.io/latest-observed-api-version"], Value::Null);
    assert_eq!(annotations["kubevirt.io/domain"], "web");
    assert_eq!(annotations["kubevirt.io/migrationTransportUnix"], "true");
    assert_eq!(annotations["descheduler.alpha.kubernetes.io/request-evict-only"], "");
    assert_eq!(annotations["kubectl.kubernetes.io/default-container"], "compute");
    assert_eq!(labels["sidecar.istio.io/inject"], Value::Null);
}

#[test]
fn istio_is_asked_for_its_proxy_as_the_machine_says() {
    for (value, token) in [("true", true), ("false", false)] {
        let mut instance = machine(small());
        let annotations = instance.metadata.annotations.get_or_insert_default();
        annotations.insert("sidecar.istio.io/inject".to_owned(), value.to_owned());
        let pod = rendered_machine(&instance, &ClusterConfig::default(), NamespaceLimits::default()).unwrap();
        assert_eq!(pod["metadata"]["labels"]["sidecar.istio.io/inject"], value);
        assert_eq!(pod["spec"]["automountServiceAccountToken"], token);
    }
}

#[test]
fn service_account_is_the_machines_or_that_of_its_disk() {
    let disk = json!({"volumes": [{"name": "sa", "serviceAccount": {"serviceAccountName": "disk"}}]});
    let none = json!({});
    for (asked, of_disk, expected, token) in [
        (Value::Null, &none, Value::Null, false),
        (json!("machine"), &none, json!("machine"), false),
        (json!("machine"), &disk, json!("machine"), true),
        (json!(""), &disk, json!("disk"), true),
        (Value::Null, &disk, json!("disk"), true),
    ] {
        let pod = rendered(merged(merged(small(), of_disk), &json!({"serviceAccountName": asked})));
        let found = (&pod["spec"]["serviceAccountName"], &pod["spec"]["automountServiceAccountToken"]);
        assert_eq!(found, (&expected, &json!(token)), "{asked} {of_disk}");
    }
}

#[test]
fn pod_has_one_container_and_passes_the_restricted_standard() {
    let pod = rendered(small());
    let containers = pod["spec"]["containers"].as_array().unwrap();
    assert_eq!(containers.len(), 1);
    assert_eq!(pod["spec"]["initContainers"], Value::Null);
    let security = &containers[0]["securityContext"];
    assert_eq!(security["allowPrivilegeEscalation"], false);
    assert_eq!(security["runAsNonRoot"], true);
    assert_eq!(security["capabilities"], json!({"add": ["NET_BIND_SERVICE"], "drop": ["ALL"]}));
    assert_eq!(pod["spec"]["securityContext"]["seccompProfile"]["type"], "RuntimeDefault");
    assert_eq!(pod["spec"]["automountServiceAccountToken"], false);
    for volume in pod["spec"]["volumes"].as_array().unwrap() {
        assert_eq!(volume["hostPath"], Value::Null);
    }
}

#[test]
fn container_disk_is_a_read_only_image_volume_at_its_index() {
    let pod = rendered(small());
    let volumes = pod["spec"]["volumes"].as_array().unwrap();
    let disk = volumes.iter().find(|volume| volume["name"] == "cd").unwrap();
    assert_eq!(disk["image"]["reference"], "registry/disk:1");
    let mounts = pod["spec"]["containers"][0]["volumeMounts"].as_array().unwrap();
    let mount = mounts.iter().find(|mount| mount["name"] == "cd").unwrap();
    assert_eq!(mount["mountPath"], "/var/run/kubevirt-image-volume/disk_0");
    assert_eq!(mount["readOnly"], true);
}

#[test]
fn cloud_init_secret_is_mounted_in_both_spellings() {
    let pod = rendered(small());
    let mounts = pod["spec"]["containers"][0]["volumeMounts"].as_array().unwrap();
    let paths: Vec<&str> = mounts
        .iter()
        .filter(|mount| mount["name"] == "ci-udata")
        .filter_map(|mount| mount["mountPath"].as_str())
        .collect();
    let base = "/var/run/kubevirt-private/secret/ci";
    assert_eq!(paths, [format!("{base}/userdata"), format!("{base}/userData")]);
}

#[test]
fn grace_period_is_padded_for_launcher_and_pod() {
    let pod = rendered(merged(small(), &json!({"terminationGracePeriodSeconds": 5})));
    assert_eq!(pod["spec"]["terminationGracePeriodSeconds"], 35);
    let args: Vec<&str> =
        pod["spec"]["containers"][0]["command"].as_array().unwrap().iter().filter_map(Value::as_str).collect();
    let at = args.iter().position(|arg| *arg == "--grace-period-seconds").unwrap();
    assert_eq!(args[at + 1], "20");
    assert_eq!(rendered(small())["spec"]["terminationGracePeriodSeconds"], 60);
}

#[test]
fn launcher_is_told_to_fail_by_an_annotation_of_any_value() {
    for (key, fails) in [
        ("kubevirt.io/func-test-virt-launcher-fail-fast", true),
        ("kubevirt.io/func-test-virt-launcher-fail-slow", false),
    ] {
        let mut instance = machine(small());
        instance.metadata.annotations.get_or_insert_default().insert(key.to_owned(), String::new());
        let (config, claims) = (ClusterConfig::default(), BTreeMap::new());
        let limits = NamespaceLimits::default();
        let inputs = Inputs {
            instance: &instance,
            config: &config,
            launcher_image: "launcher:1",
            claims: &claims,
            limits,
            definitions: None,
        };
        let pod = serde_json::to_value(render(&inputs).unwrap()).unwrap();
        let args = pod["spec"]["containers"][0]["command"].as_array().unwrap();
        assert_eq!(args.contains(&json!("--simulate-crash")), fails, "{key}");
    }
}

#[test]
fn networks_are_asked_for_by_annotations() {
    let interfaces = json!([
        {"name": "default", "masquerade": {}},
        {"name": "lan", "bridge": {}},
        {"name": "far", "bridge": {}, "macAddress": "02-00-00-00-00-0A"},
        {"name": "gone", "bridge": {}, "state": "absent"},
    ]);
    let networks = json!([
        {"name": "default", "pod": {}},
        {"name": "lan", "multus": {"networkName": "blue"}},
        {"name": "far", "multus": {"networkName": "depot/green"}},
        {"name": "gone", "multus": {"networkName": "grey"}},
    ]);
    let change = json!({"domain": {"devices": {"interfaces": interfaces}}, "networks": networks});
    let annotations = rendered(merged(small(), &change))["metadata"]["annotations"].clone();
    let asked: Value = serde_json::from_str(annotations["k8s.v1.cni.cncf.io/networks"].as_str().unwrap()).unwrap();
    assert_eq!(
        asked,
        json!([
            {"name": "blue", "namespace": "shop", "interface": "pod094a367b026"},
            {"name": "green", "namespace": "depot", "mac": "02:00:00:00:00:0a", "interface": "pod512eea46ceb"},
        ])
    );
    assert_eq!(annotations["v1.multus-cni.io/default-network"], Value::Null);
    assert_eq!(annotations["traffic.sidecar.istio.io/kubevirtInterfaces"], "k6t-eth0");

    let change = json!({
        "domain": {"devices": {"interfaces": [{"name": "main", "bridge": {}}]}},
        "networks": [{"name": "main", "multus": {"networkName": "depot/green", "default": true}}],
    });
    let annotations = rendered(merged(small(), &change))["metadata"]["annotations"].clone();
    assert_eq!(annotations["v1.multus-cni.io/default-network"], "depot/green");
    assert_eq!(annotations["k8s.v1.cni.cncf.io/networks"], Value::Null);
}

#[test]
fn what_networks_need_of_a_node_is_asked_for_where_nobody_else_does() {
    let change = json!({
        "domain": {"devices": {"interfaces": [{"name": "a", "bridge": {}}, {"name": "b", "bridge": {}}, {"name": "c", "bridge": {}}]}},
        "networks": [
            {"name": "a", "multus": {"networkName": "cards"}},
            {"name": "b", "multus": {"networkName": "shop/cards"}},
            {"name": "c", "multus": {"networkName": "depot/plain"}},
        ],
    });
    let (instance, config, claims) = (machine(merged(small(), &change)), ClusterConfig::default(), BTreeMap::new());
    let definition = |resource: Option<&str>| {
        Arc::new(DefinitionView { resource: resource.map(str::to_owned), ..DefinitionView::default() })
    };
    let mut definitions = BTreeMap::from([("shop/cards".to_owned(), definition(Some("example.org/card")))]);
    let render_with = |definitions: Option<&BTreeMap<String, Arc<DefinitionView>>>| {
        let inputs = Inputs {
            instance: &instance,
            config: &config,
            launcher_image: "launcher:1",
            claims: &claims,
            limits: NamespaceLimits::default(),
            definitions,
        };
        render(&inputs).map(|pod| serde_json::to_value(pod).unwrap()["spec"]["containers"][0]["resources"].clone())
    };
    assert_eq!(render_with(Some(&definitions)), Err(RenderError::DefinitionNotFound("depot/plain".to_owned())));
    definitions.insert("depot/plain".to_owned(), definition(None));
    let resources = render_with(Some(&definitions)).unwrap();
    assert_eq!(
        (&resources["requests"]["example.org/card"], &resources["limits"]["example.org/card"]),
        (&json!("2"), &json!("2"))
    );
    assert_eq!(render_with(None).unwrap()["requests"]["example.org/card"], Value::Null);
}

#[test]
fn what_plugins_are_to_tell_cannot_be_told_by_a_machine() {
    let mut instance = machine(small());
    let annotations = instance.metadata.annotations.get_or_insert_default();
    annotations.insert("k8s.v1.cni.cncf.io/network-status".to_owned(), "[]".to_owned());
    annotations.insert("k8s.v1.cni.cncf.io/networks".to_owned(), "blue".to_owned());
    let pod = rendered_machine(&instance, &ClusterConfig::default(), NamespaceLimits::default()).unwrap();
    assert_eq!(pod["metadata"]["annotations"]["k8s.v1.cni.cncf.io/network-status"], Value::Null);
    // As on any pod.
    assert_eq!(pod["metadata"]["annotations"]["k8s.v1.cni.cncf.io/networks"], "blue");
}

#[test]
fn memory_request_is_guest_plus_overhead_and_cpu_is_shared() {
    let pod = rendered(small());
    let resources = &pod["spec"]["containers"][0]["resources"];
    let overhead: i64 =
        pod["metadata"]["annotations"]["kubevirt.io/memory-overhead-bytes"].as_str().unwrap().parse().unwrap();
    let request = Quantity(resources["requests"]["memory"].as_str().unwrap().to_owned());
    assert_eq!(api::quantity::units(&request).unwrap(), 128 * 1024 * 1024 + overhead);
    assert_eq!(resources["requests"]["cpu"], "100m");
    assert_eq!(resources["requests"]["ephemeral-storage"], "50M");
    assert_eq!(resources["limits"]["memory"], Value::Null);
    assert_eq!(resources["limits"]["devices.kubevirt.io/kvm"], "1");
    assert_eq!(resources["limits"]["devices.kubevirt.io/tun"], "1");
    assert_eq!(resources["limits"]["devices.kubevirt.io/vhost-net"], "1");
}

#[test]
fn emulation_asks_for_no_virtualization_device() {
    let config = ClusterConfig { use_emulation: true, ..ClusterConfig::default() };
    let pod = rendered_with(small(), &config, NamespaceLimits::default()).unwrap();
    let container = &pod["spec"]["containers"][0];
    assert_eq!(container["resources"]["limits"], json!({"devices.kubevirt.io/tun": "1"}));
    assert!(container["command"].as_array().unwrap().contains(&json!("--allow-emulation")));
}

#[test]
fn quota_on_limits_gives_the_pod_limits() {
    let limits = NamespaceLimits { memory: true, cpu: true, memory_ratio: None };
    let pod = rendered_with(small(), &ClusterConfig::default(), limits).unwrap();
    let resources = &pod["spec"]["containers"][0]["resources"];
    let bytes =
        |what: &str| api::quantity::units(&Quantity(resources[what]["memory"].as_str().unwrap().to_owned())).unwrap();
    assert_eq!(bytes("limits"), 2 * bytes("requests"));
    assert_eq!(resources["limits"]["cpu"], "1");
}

#[test]
fn users_own_requests_and_limits_win_with_the_overhead_added() {
    let resources =
        json!({"domain": {"resources": {"requests": {"cpu": "2", "memory": "1Gi"}, "limits": {"memory": "2Gi"}}}});
    let pod = rendered(merged(small(), &resources));
    let overhead: i64 =
        pod["metadata"]["annotations"]["kubevirt.io/memory-overhead-bytes"].as_str().unwrap().parse().unwrap();
    let resources = &pod["spec"]["containers"][0]["resources"];
    let bytes =
        |what: &str| api::quantity::units(&Quantity(resources[what]["memory"].as_str().unwrap().to_owned())).unwrap();
    assert_eq!(resources["requests"]["cpu"], "2");
    assert_eq!(bytes("requests"), (1 << 30) + overhead);
    assert_eq!(bytes("limits"), (2 << 30) + overhead);
}

#[test]
fn dedicated_cpus_are_requested_whole_with_a_memory_limit() {
    let cpu = json!({"domain": {"cpu": {"cores": 2, "dedicatedCpuPlacement": true, "isolateEmulatorThread": true}}});
    let pod = rendered(merged(small(), &cpu));
    let resources = &pod["spec"]["containers"][0]["resources"];
    assert_eq!(resources["requests"]["cpu"], "3");
    assert_eq!(resources["limits"]["cpu"], "3");
    assert_eq!(resources["limits"]["memory"], resources["requests"]["memory"]);
    assert_eq!(pod["spec"]["nodeSelector"]["kubevirt.io/cpumanager"], "true");
}

#[test]
fn hugepages_take_the_place_of_guest_memory() {
    let pages = json!({"domain": {"memory": {"guest": "128Mi", "hugepages": {"pageSize": "2Mi"}}}});
    let pod = rendered(merged(small(), &pages));
    let overhead =
        pod["metadata"]["annotations"]["kubevirt.io/memory-overhead-bytes"].as_str().unwrap().parse().unwrap();
    let resources = &pod["spec"]["containers"][0]["resources"];
    assert_eq!(resources["requests"]["hugepages-2Mi"], "128Mi");
    assert_eq!(resources["limits"]["hugepages-2Mi"], "128Mi");
    assert_eq!(resources["requests"]["memory"], json!(api::quantity::bytes(overhead)));
}

#[test]
fn claims_are_mounted_by_their_mode_and_missing_ones_are_named() {
    let with = |claim: &str| {
        merged(small(), &json!({"volumes": [{"name": "data", "persistentVolumeClaim": {"claimName": claim}}]}))
    };
    let pod = rendered(with("raw"));
    assert_eq!(pod["spec"]["containers"][0]["volumeDevices"], json!([{"name": "data", "devicePath": "/dev/data"}]));
    let pod = rendered(with("shared"));
    let env = pod["spec"]["containers"][0]["env"].as_array().unwrap();
    assert!(
        env.contains(&json!({"name": "SHARED_FILESYSTEM_PATHS", "value": "/var/run/kubevirt-private/vmi-disks/data"}))
    );
    let missing = rendered_with(with("absent"), &ClusterConfig::default(), NamespaceLimits::default());
    assert_eq!(missing.unwrap_err(), RenderError::ClaimNotFound("absent".to_owned()));
}

#[test]
fn required_node_terms_do_not_flip_and_users_terms_are_kept() {
    let affinity = json!({"affinity": {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [
        {"matchExpressions": [{"key": "zone", "operator": "In", "values": ["a"]}]},
        {"matchExpressions": [{"key": "zone", "operator": "In", "values": ["b"]}]},
    ]}}}, "nodeSelector": {"disk": "fast"}});
    let pod = rendered(merged(small(), &affinity));
    assert_eq!(pod["spec"]["nodeSelector"], json!({"kubernetes.io/arch": "amd64", "disk": "fast"}));
    let terms =
        &pod["spec"]["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"];
    for term in terms.as_array().unwrap() {
        let expressions = term["matchExpressions"].as_array().unwrap();
        assert_eq!(expressions[0]["key"], "zone");
        assert!(expressions.contains(&json!({"key": "kubevirt.io/schedulable", "operator": "Exists"})));
    }
}

#[test]
fn cpu_and_board_ask_for_nodes_that_have_them() {
    let features = json!([
        {"name": "vmx"}, {"name": "aes", "policy": "require"}, {"name": "pcid", "policy": "optional"},
        {"name": "mpx", "policy": "forbid"},
    ]);
    let (vmx, aes) = ("cpu-feature.node.kubevirt.io/vmx", "cpu-feature.node.kubevirt.io/aes");
    let named = "cpu-model.node.kubevirt.io/Haswell";
    let known = "cpu-model-migration.node.kubevirt.io/Haswell";
    // model, emulation, what the node selector asks for
    let table: [(&str, bool, &[&str]); 6] = [
        ("host-model", false, &[aes, vmx]),
        ("host-passthrough", false, &[aes, vmx]),
        ("Haswell", false, &[aes, vmx, named]),
        ("", false, &[]),
        ("host-model", true, &[]),
        ("Haswell", true, &[known]),
    ];
    for (model, use_emulation, wanted) in table {
        let change = json!({"domain": {"machine": {"type": "q35"}, "cpu": {"model": model, "features": features}}});
        let config = ClusterConfig { use_emulation, ..ClusterConfig::default() };
        let pod = rendered_with(merged(small(), &change), &config, NamespaceLimits::default()).unwrap();
        let selector = pod["spec"]["nodeSelector"].as_object().unwrap();
        let asked: Vec<&str> = selector.keys().map(String::as_str).filter(|key| key.starts_with("cpu-")).collect();
        assert_eq!(asked, wanted, "{model} {use_emulation}");
        assert_eq!(selector["machine-type.node.kubevirt.io/q35"], "true");
    }
}

#[test]
fn enlightenments_ask_for_nodes_that_offer_them_where_the_cluster_is_strict() {
    let gate = ["HypervStrictCheck".to_owned()];
    // what the machine asks for, strict, what the node selector asks for
    let table: [(Value, bool, &[&str]); 4] = [
        (json!({"vpindex": {"enabled": true}, "evmcs": {}}), false, &[]),
        (
            json!({"vpindex": {"enabled": true}, "synic": {"enabled": true}, "synictimer": {"enabled": true},
                "tlbflush": {"enabled": true}, "ipi": {"enabled": false}, "reset": {}, "relaxed": {"enabled": true}}),
            true,
            &["synic", "synictimer", "tlbflush", "vpindex"],
        ),
        (json!({"evmcs": {}, "frequencies": {"enabled": true}}), true, &["Intel", "frequencies"]),
        (json!({"evmcs": {"enabled": false}}), true, &[]),
    ];
    for (hyperv, strict, wanted) in table {
        let change = json!({"domain": {"features": {"hyperv": hyperv}}});
        let feature_gates = if strict { gate.to_vec() } else { Vec::new() };
        let config = ClusterConfig { feature_gates, ..ClusterConfig::default() };
        let pod = rendered_with(merged(small(), &change), &config, NamespaceLimits::default()).unwrap();
        let selector = pod["spec"]["nodeSelector"].as_object().unwrap();
        let prefixes = ["cpu-vendor.node.kubevirt.io/", "hyperv.node.kubevirt.io/"];
        let name = |key: &String| prefixes.iter().find_map(|prefix| key.strip_prefix(*prefix)).map(str::to_owned);
        let asked: Vec<String> = selector.keys().filter_map(name).collect();
        assert_eq!(asked, wanted, "{change} {strict}");
    }
}

#[test]
fn kernel_boot_image_is_mounted_and_its_pull_secret_used_once() {
    let kernel = json!({
        "domain": {"firmware": {"kernelBoot": {"container": {
            "image": "kernel:1", "kernelPath": "/boot/vmlinuz", "imagePullSecret": "s",
        }}}},
        "volumes": [{"name": "cd", "containerDisk": {"image": "a", "imagePullSecret": "s"}}],
    });
    let pod = rendered(merged(small(), &kernel));
    assert_eq!(pod["spec"]["imagePullSecrets"], json!([{"name": "s"}]));
    let mounts = pod["spec"]["containers"][0]["volumeMounts"].as_array().unwrap();
    let mount = mounts.iter().find(|mount| mount["name"] == "kernel-boot-volume").unwrap();
    assert_eq!(mount["mountPath"], "/var/run/kubevirt-kernel-boot");
}

/// A configuration that permits devices of these resources.
fn permitting(resources: &[&str]) -> ClusterConfig {
    let devices: Vec<Value> =
        resources.iter().map(|resource| json!({"pciVendorSelector": "10de:1eb8", "resourceName": resource})).collect();
    let permitted = serde_json::from_value(json!({"pciHostDevices": devices})).unwrap();
    ClusterConfig { permitted_host_devices: Some(permitted), ..ClusterConfig::default() }
}

#[test]
fn device_that_is_not_permitted_is_refused() {
    let devices = json!({"domain": {"devices": {
        "gpus": [{"name": "g", "deviceName": "nvidia.com/x"}],
        "hostDevices": [{"name": "h", "deviceName": "intel.com/qat"}],
    }}});
    for (config, refusal) in [
        // Without a word about devices, any resource can be asked for, as by any pod.
        (ClusterConfig::default(), None),
        (permitting(&["nvidia.com/x", "intel.com/qat"]), None),
        (
            permitting(&["intel.com/qat"]),
            Some("GPU nvidia.com/x is not permitted in permittedHostDevices configuration"),
        ),
        (
            permitting(&["nvidia.com/x"]),
            Some("HostDevice intel.com/qat is not permitted in permittedHostDevices configuration"),
        ),
    ] {
        let outcome = rendered_with(merged(small(), &devices), &config, NamespaceLimits::default());
        assert_eq!(outcome.err().map(|error| error.to_string()).as_deref(), refusal);
    }
}

#[test]
fn devices_are_resources_of_the_container_and_cost_memory() {
    let devices = json!({"domain": {"devices": {
        "gpus": [{"name": "g", "deviceName": "nvidia.com/x"}, {"name": "h", "deviceName": "nvidia.com/x"}],
        "hostDevices": [{"name": "q", "deviceName": "intel.com/qat"}],
    }}});
    let config = permitting(&["nvidia.com/x", "intel.com/qat"]);
    let resources = |spec: Value| {
        let pod = rendered_with(spec, &config, NamespaceLimits::default()).unwrap();
        pod["spec"]["containers"][0]["resources"].clone()
    };
    let (without, with) = (resources(small()), resources(merged(small(), &devices)));
    for amounts in ["requests", "limits"] {
        assert_eq!(with[amounts]["nvidia.com/x"], "2");
        assert_eq!(with[amounts]["intel.com/qat"], "1");
    }
    let memory = |resources: &Value| {
        let text = resources["requests"]["memory"].as_str().unwrap().to_owned();
        api::quantity::units(&Quantity(text)).unwrap()
    };
    assert_eq!(memory(&with) - memory(&without), 1 << 30);
}

#[test]
fn probes_by_the_guest_agent_are_asked_for_by_a_program_in_the_container() {
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
        json!({"volumes": [{"name": "h", "hostDisk": {"path": "/x", "type": "Disk"}}]}),
        json!({"domain": {"devices": {"tpm": {"persistent": true}}}}),
    ] {
        let refused = rendered_with(merged(small(), &change), &ClusterConfig::default(), NamespaceLimits::default());
        assert!(matches!(refused, Err(RenderError::Unsupported(_))), "{change}");
    }
}

#[test]
fn long_names_become_a_label_that_fits() {
    let name = "a".repeat(70);
    assert_eq!(metadata::machine_id(&name).len(), 63);
    assert_eq!(metadata::machine_id("short"), "short");
}

#[test]
fn what_is_asked_for_a_look_into_the_pod_reaches_the_launcher() {
    let keep = "kubevirt.io/keep-launcher-alive-after-failure";
    let filters = "kubevirt.io/libvirt-log-filters";
    for (metadata, wanted, absent) in [
        (json!({"annotations": {keep: "true"}}), "--keep-after-failure", "--libvirt-log-filters="),
        (json!({"annotations": {(format!("{keep}-here")): ""}}), "--keep-after-failure", "--libvirt-log-filters="),
        (json!({"annotations": {filters: "-1:qemu"}}), "--libvirt-log-filters=-1:qemu", "--keep-after-failure"),
        (json!({"labels": {"debugLogs": "True"}}), "--libvirt-log-filters=3:object", "--keep-after-failure"),
        (json!({"annotations": {keep: "false", filters: ""}}), "--name", "--keep-after-failure"),
        (json!({"labels": {"debugLogs": "false"}}), "--name", "--libvirt-log-filters="),
        (json!({"labels": {"logVerbosity": "6"}}), "--libvirt-log-filters=3:object", "--keep-after-failure"),
        (json!({"labels": {"logVerbosity": "5"}}), "--name", "--libvirt-log-filters="),
    ] {
        let mut instance = machine(small());
        instance.metadata = serde_json::from_value(metadata.clone()).unwrap();
        let pod = rendered_machine(&instance, &ClusterConfig::default(), NamespaceLimits::default()).unwrap();
        let args = pod["spec"]["containers"][0]["command"].as_array().unwrap().clone();
        let has = |start: &str| args.iter().filter_map(Value::as_str).any(|arg| arg.starts_with(start));
        assert!(has(wanted) && !has(absent), "{metadata}: {args:?}");
    }
}

#[test]
fn how_much_a_launcher_logs_is_what_its_machine_or_the_cluster_says() {
    let refused = Err(RenderError::Verbosity("loud".to_owned()));
    for (labels, expected) in [
        (json!({}), Ok(Value::Null)),
        (json!({"logVerbosity": "2"}), Ok(json!("2"))),
        (json!({"logVerbosity": "9"}), Ok(json!("9"))),
        (json!({"logVerbosity": "loud"}), refused),
    ] {
        let mut instance = machine(small());
        instance.metadata.labels = serde_json::from_value(labels.clone()).unwrap();
        let pod = rendered_machine(&instance, &ClusterConfig::default(), NamespaceLimits::default());
        let told = pod.map(|pod| {
            let variables = pod["spec"]["containers"][0]["env"].as_array().cloned().unwrap_or_default();
            let found = variables.into_iter().find(|variable| variable["name"] == "VIRT_LAUNCHER_LOG_VERBOSITY");
            found.map_or(Value::Null, |variable| variable["value"].clone())
        });
        assert_eq!(told, expected, "{labels}");
    }
}

#[test]
fn a_pod_of_equal_requests_and_limits_costs_more_however_they_are_written() {
    let overhead = |requests: Value, limits: Value| {
        let resources = json!({"domain": {"resources": {"requests": requests, "limits": limits}}});
        let pod = rendered(merged(small(), &resources));
        let text = pod["metadata"]["annotations"]["kubevirt.io/memory-overhead-bytes"].as_str().unwrap().to_owned();
        text.parse::<i64>().unwrap()
    };
    let less = overhead(json!({"cpu": "1", "memory": "1Gi"}), json!({"cpu": "2", "memory": "1Gi"}));
    for (requests, limits, guaranteed) in [
        (json!({"cpu": "1", "memory": "1Gi"}), json!({"cpu": "1", "memory": "1Gi"}), true),
        (json!({"cpu": "1000m", "memory": "1024Mi"}), json!({"cpu": "1", "memory": "1Gi"}), true),
        (json!({"cpu": "1", "memory": "1Gi"}), json!({"cpu": "1", "memory": "2Gi"}), false),
        (json!({"cpu": "1", "memory": "1Gi"}), json!({"cpu": "1"}), false),
        (json!({"memory": "1Gi"}), json!({"memory": "1Gi"}), false),
    ] {
        let more = if guaranteed { api::overhead::GUARANTEED } else { 0 };
        assert_eq!(overhead(requests.clone(), limits.clone()), less + more, "{requests} {limits}");
    }
}

#[test]
fn backups_freeze_the_guest_unless_somebody_says_no() {
    let skip = "kubevirt.io/skip-backup-hooks";
    let freeze = r#"["/usr/bin/virt-freezer", "--freeze", "--name", "web", "--namespace", "shop"]"#;
    for (annotations, skip_backup_hooks, command) in [
        (json!({}), false, json!(freeze)),
        (json!({skip: "no"}), false, json!(freeze)),
        (json!({skip: "True"}), false, Value::Null),
        (json!({}), true, Value::Null),
    ] {
        let mut instance = machine(small());
        instance.metadata.annotations = serde_json::from_value(annotations.clone()).unwrap();
        let config = ClusterConfig { skip_backup_hooks, ..ClusterConfig::default() };
        let pod = rendered_machine(&instance, &config, NamespaceLimits::default()).unwrap();
        let found = &pod["metadata"]["annotations"];
        assert_eq!(found["pre.hook.backup.velero.io/command"], command, "{annotations}");
        let (container, timeout) =
            (&found["post.hook.backup.velero.io/container"], &found["pre.hook.backup.velero.io/timeout"]);
        assert_eq!(
            (container.as_str(), timeout.as_str()),
            if command.is_null() { (None, None) } else { (Some("compute"), Some("60s")) }
        );
    }
}

#[test]
fn a_tpm_that_is_switched_off_keeps_no_state() {
    let with = |tpm: Value| {
        let spec = merged(small(), &json!({"domain": {"devices": {"tpm": tpm}}}));
        rendered_with(spec, &ClusterConfig::default(), NamespaceLimits::default()).is_ok()
    };
    assert!(with(json!({"enabled": false, "persistent": true})));
    assert!(!with(json!({"persistent": true})) && !with(json!({"enabled": true, "persistent": true})));
}

#[test]
fn what_no_node_can_hold_is_asked_for_as_it_is() {
    let spec = merged(
        small(),
        &json!({"domain": {"cpu": {"sockets": 1_000_000}, "memory": {"guest": "1Ei"}, "resources": {"requests": {"cpu": "1M"}}}}),
    );
    let config = ClusterConfig { memory_overcommit: 200, ..ClusterConfig::default() };
    let pod = rendered_with(spec, &config, NamespaceLimits::default()).unwrap();
    let requests = &pod["spec"]["containers"][0]["resources"]["requests"];
    assert_eq!(requests["cpu"], "1M");
    let memory = api::quantity::units(&Quantity(requests["memory"].as_str().unwrap().to_owned())).unwrap();
    assert!(memory > 1 << 59 && memory < (1 << 59) + (1 << 53), "half of it, and the overhead: {memory}");
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
        json!({"volumes": [volume("v", json!({"memoryDump": {"claimName": "raw"}}))]}),
    ]
}

#[test]
fn cve_2020_14316_no_vmi_brings_a_file_of_the_node_into_its_pod() {
    let gates = ["HostDisk", "Root", "ExperimentalVirtiofsSupport", "DownwardMetrics", "HotplugVolumes"];
    let everything = ClusterConfig { feature_gates: gates.map(str::to_owned).to_vec(), ..ClusterConfig::default() };
    let mut pods = 0;
    for config in [ClusterConfig::default(), everything] {
        for source in sources() {
            let Ok(pod) = rendered_with(merged(small(), &source), &config, NamespaceLimits::default()) else {
                continue;
            };
            pods += 1;
            let text = pod.to_string();
            for host in ["hostPath", "hostPID\":true", "hostIPC\":true", "hostNetwork\":true", "privileged\":true"] {
                assert!(!text.contains(host), "{host}: {text}");
            }
            let sources = |volume: &Value| {
                let keys = volume.as_object().unwrap().keys().filter(|key| *key != "name").cloned();
                keys.collect::<Vec<_>>()
            };
            for volume in pod["spec"]["volumes"].as_array().unwrap() {
                let sources = sources(volume);
                let known = ["emptyDir", "image", "persistentVolumeClaim", "secret", "configMap", "downwardAPI"];
                assert!(sources.len() == 1 && known.contains(&sources[0].as_str()), "{volume}");
            }
        }
    }
    assert!(pods >= 4, "{pods} pods were rendered");
}

#[test]
fn cve_2024_33394_a_launcher_holds_no_token_unless_its_owner_asks_for_one_of_their_own() {
    let plain = rendered(small());
    assert_eq!(plain["spec"]["automountServiceAccountToken"], false);
    for source in sources() {
        let Ok(pod) = rendered_with(merged(small(), &source), &ClusterConfig::default(), NamespaceLimits::default())
        else {
            continue;
        };
        assert_eq!(pod["spec"]["automountServiceAccountToken"], false, "{source}");
        assert!(!pod.to_string().contains("serviceAccountToken\":{"), "a projected token: {source}");
        assert_eq!(pod["spec"]["serviceAccountName"], Value::Null, "{source}");
    }
    // The name alone is looked up in the VMI's own namespace, and brings no token.
    let named = rendered(merged(small(), &json!({"serviceAccountName": "kubevirt-handler"})));
    assert_eq!(
        (&named["metadata"]["namespace"], &named["spec"]["automountServiceAccountToken"]),
        (&Value::Null, &json!(false))
    );
}
