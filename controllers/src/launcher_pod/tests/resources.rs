//! Tests of resources and devices.

use super::*;

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
fn emulation_requests_no_virtualization_device() {
    let config = ClusterConfig { use_emulation: true, ..ClusterConfig::default() };
    let pod = rendered_with(small(), &config, NamespaceLimits::default()).unwrap();
    let container = &pod["spec"]["containers"][0];
    assert_eq!(container["resources"]["limits"], json!({"devices.kubevirt.io/tun": "1"}));
    assert!(container["command"].as_array().unwrap().contains(&json!("--allow-emulation")));
    let memory = |pod: &Value| {
        let amount = pod["spec"]["containers"][0]["resources"]["requests"]["memory"].as_str().unwrap().to_owned();
        api::quantity::units(&Quantity(amount)).unwrap()
    };
    assert_eq!(memory(&pod) - memory(&rendered(small())), api::overhead::EMULATION);
}

#[test]
fn quota_on_limits_gives_the_pod_limits() {
    let pages = json!({"domain": {"memory": {"guest": "128Mi", "hugepages": {"pageSize": "2Mi"}}}});
    for spec in [small(), merged(small(), &pages)] {
        let limits = NamespaceLimits { memory: true, cpu: true, ..NamespaceLimits::default() };
        let pod = rendered_with(spec, &ClusterConfig::default(), limits).unwrap();
        let resources = &pod["spec"]["containers"][0]["resources"];
        let bytes = |what: &str| {
            api::quantity::units(&Quantity(resources[what]["memory"].as_str().unwrap().to_owned())).unwrap()
        };
        assert_eq!(bytes("limits"), 2 * bytes("requests"), "{resources}");
        assert_eq!(resources["limits"]["cpu"], "1");
    }
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
fn limit_that_users_did_not_set_has_room_for_the_guest() {
    let quota = |memory_ratio| NamespaceLimits { memory: true, memory_ratio, ..NamespaceLimits::default() };
    let pinned = json!({"domain": {"cpu": {"cores": 2, "dedicatedCpuPlacement": true}}});
    let less = json!({"domain": {"resources": {"requests": {"memory": "1Gi"}}}});
    // change, overcommit, the namespace, whether the request is the limit
    for (change, memory_overcommit, limits, is_equal) in [
        (pinned.clone(), 150, NamespaceLimits::default(), true),
        (merged(pinned, &less), 100, NamespaceLimits::default(), true),
        (json!({}), 300, quota(None), false),
        (json!({}), 200, quota(Some(1.0)), false),
        (less, 100, quota(Some(1.0)), false),
    ] {
        let row = format!("{change} {memory_overcommit} {limits:?}");
        let spec = merged(merged(small(), &json!({"domain": {"memory": {"guest": "4Gi"}}})), &change);
        let config = ClusterConfig { memory_overcommit, ..ClusterConfig::default() };
        let pod = rendered_with(spec, &config, limits).unwrap();
        let overhead: i64 =
            pod["metadata"]["annotations"]["kubevirt.io/memory-overhead-bytes"].as_str().unwrap().parse().unwrap();
        let resources = &pod["spec"]["containers"][0]["resources"];
        assert_eq!(resources["limits"]["memory"], json!(api::quantity::bytes((4 << 30) + overhead)), "{row}");
        assert_eq!(resources["requests"]["memory"] == resources["limits"]["memory"], is_equal, "{row}");
    }
}

#[test]
fn dedicated_cpus_include_those_of_the_pool_and_follow_amounts_without_a_topology() {
    for (domain, expected) in [
        (json!({"ioThreadsPolicy": "supplementalPool", "ioThreads": {"supplementalPoolThreadCount": 2}}), "3"),
        (json!({"resources": {"limits": {"cpu": "4"}}}), "4"),
    ] {
        let cpu = json!({"domain": {"cpu": {"dedicatedCpuPlacement": true, "cores": null, "sockets": null, "threads": null}}});
        let pod = rendered(merged(merged(small(), &cpu), &json!({"domain": domain})));
        let resources = &pod["spec"]["containers"][0]["resources"];
        assert_eq!((&resources["requests"]["cpu"], &resources["limits"]["cpu"]), (&json!(expected), &json!(expected)));
    }
}

#[test]
fn hugepages_replace_guest_memory() {
    for (requests, beside) in [
        (json!({}), 0),
        // Pages of the guest beyond a smaller request would belong to other pods.
        (json!({"memory": "64Mi"}), 0),
        (json!({"memory": "256Mi"}), 128 << 20),
    ] {
        let pages = json!({"domain": {"memory": {"guest": "128Mi", "hugepages": {"pageSize": "2Mi"}},
            "resources": {"requests": requests}}});
        let pod = rendered(merged(small(), &pages));
        let overhead: i64 =
            pod["metadata"]["annotations"]["kubevirt.io/memory-overhead-bytes"].as_str().unwrap().parse().unwrap();
        let resources = &pod["spec"]["containers"][0]["resources"];
        assert_eq!(resources["requests"]["hugepages-2Mi"], "128Mi");
        assert_eq!(resources["limits"]["hugepages-2Mi"], "128Mi");
        assert_eq!(resources["requests"]["memory"], json!(api::quantity::bytes(overhead + beside)), "{requests}");
    }
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
        // Without configured devices any resource can be requested, as by any pod.
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
fn device_that_is_also_among_the_resources_is_counted_once() {
    let one = |name: &str| json!({"name": name, "deviceName": "nvidia.com/x"});
    // devices, requests, limits; both in the pod
    for (devices, requests, limits, expected) in [
        (vec![one("a")], Value::Null, json!("1"), ["1", "1"]),
        (vec![one("a")], json!("1"), Value::Null, ["1", "1"]),
        (vec![one("a")], json!("1"), json!("1"), ["1", "1"]),
        (vec![one("a")], Value::Null, json!("2"), ["2", "2"]),
        (vec![one("a")], json!("2"), json!("2"), ["2", "2"]),
        (vec![one("a"), one("b")], Value::Null, json!("1"), ["2", "2"]),
        (vec![one("a"), one("b")], json!("1"), json!("1"), ["2", "2"]),
        // The API server says what is wrong with it.
        (vec![one("a")], json!("1"), json!("2"), ["1", "2"]),
    ] {
        let resources = json!({"requests": {"nvidia.com/x": requests}, "limits": {"nvidia.com/x": limits}});
        for list in ["gpus", "hostDevices"] {
            let change = json!({"domain": {"devices": {(list): devices}, "resources": resources}});
            let pod = rendered(merged(small(), &change));
            let resources = &pod["spec"]["containers"][0]["resources"];
            let found = ["requests", "limits"].map(|amounts| resources[amounts]["nvidia.com/x"].clone());
            assert_eq!(found, expected.map(Value::from), "{list} {change}");
        }
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
fn requests_beyond_any_node_are_kept() {
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

#[test]
fn no_vmi_requests_userfaultfd() {
    let name = "devices.kubevirt.io/userfaultfd";
    let devices =
        json!({"hostDevices": [{"name": "a", "deviceName": name}], "gpus": [{"name": "b", "deviceName": name}]});
    for change in
        [json!({"resources": {"requests": {(name): "1"}, "limits": {(name): "1"}}}), json!({"devices": devices})]
    {
        let pod = rendered(merged(small(), &json!({"domain": change})));
        assert!(!pod.to_string().contains(name), "{pod}");
    }
}
