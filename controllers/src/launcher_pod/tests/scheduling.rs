//! Tests of the selection of nodes.

use super::*;

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
fn placement_of_workloads_restricts_the_users_terms() {
    let expression = |key: &str, value: &str| json!({"key": key, "operator": "In", "values": [value]});
    let schedulable = json!({"key": "kubevirt.io/schedulable", "operator": "Exists"});
    let users = json!({"affinity": {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [
        {"matchExpressions": [expression("zone", "a")]}, {"matchExpressions": [expression("zone", "b")]},
    ]}}}});
    let workloads =
        json!([{"matchExpressions": [expression("rack", "1")]}, {"matchExpressions": [expression("rack", "2")]}]);
    let pairs = [("a", "1"), ("a", "2"), ("b", "1"), ("b", "2")];
    for (affinity, workloads, expected) in [
        (json!({}), json!([]), vec![vec![]]),
        (json!({}), workloads.clone(), vec![vec![expression("rack", "1")], vec![expression("rack", "2")]]),
        (users.clone(), json!([]), vec![vec![expression("zone", "a")], vec![expression("zone", "b")]]),
        (users, workloads, pairs.map(|(zone, rack)| vec![expression("zone", zone), expression("rack", rack)]).to_vec()),
    ] {
        let config = ClusterConfig {
            workload_terms: serde_json::from_value(workloads.clone()).unwrap(),
            ..ClusterConfig::default()
        };
        let pod = rendered_with(merged(small(), &affinity), &config, NamespaceLimits::default()).unwrap();
        let selector = &pod["spec"]["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"];
        let found = selector["nodeSelectorTerms"].as_array().unwrap().iter();
        let found: Vec<Vec<Value>> = found
            .map(|term| {
                let (ours, own) =
                    term["matchExpressions"].as_array().unwrap().iter().cloned().partition::<Vec<_>, _>(|one| {
                        *one == schedulable || one["key"] == "node-labeller.kubevirt.io/obsolete-host-model"
                    });
                assert!(ours.contains(&schedulable), "{term}");
                own
            })
            .collect();
        assert_eq!(found, expected, "{affinity} {workloads}");
    }
}

#[test]
fn cpu_and_machine_type_select_nodes_that_have_them() {
    let features = json!([
        {"name": "vmx"}, {"name": "aes", "policy": "require"}, {"name": "pcid", "policy": "optional"},
        {"name": "mpx", "policy": "forbid"},
    ]);
    let (vmx, aes) = ("cpu-feature.node.kubevirt.io/vmx", "cpu-feature.node.kubevirt.io/aes");
    let named = "cpu-model.node.kubevirt.io/Haswell";
    let known = "cpu-model-migration.node.kubevirt.io/Haswell";
    // model, emulation, node selector
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
fn guests_of_arm64_run_on_nodes_of_amd64_without_its_devices() {
    let change = json!({
        "architecture": "arm64",
        "nodeSelector": {"kubernetes.io/arch": "arm64", "disk": "fast"},
        "domain": {"machine": {"type": "virt"}, "cpu": {"model": "host-passthrough"}},
    });
    let pod = rendered(merged(small(), &change));
    assert_eq!(
        pod["spec"]["nodeSelector"],
        json!({"kubernetes.io/arch": "amd64", "kubevirt.io/vm-arch-arm64": "true", "disk": "fast"})
    );
    let container = &pod["spec"]["containers"][0];
    assert_eq!(container["resources"]["limits"], json!({"devices.kubevirt.io/tun": "1"}));
    let command = container["command"].as_array().unwrap();
    let path = command.iter().position(|word| word == "--ovmf-path").unwrap();
    assert_eq!(command[path + 1], "/usr/share/AAVMF");

    let images = LauncherImages::of_tests("launcher:1");
    assert_eq!(images.of(&vmi(merged(small(), &change)).spec), "launcher:1-arm64");
    assert_eq!((images.of(&vmi(small()).spec), images.plain()), ("launcher:1", "launcher:1"));
}

#[test]
fn enlightenments_select_nodes_that_offer_them_where_the_cluster_is_strict() {
    let gate = ["HypervStrictCheck".to_owned()];
    // features of the VMI, strict, node selector
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
