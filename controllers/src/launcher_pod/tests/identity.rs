//! Tests of metadata: owner, labels, annotations, service account.

use super::*;

#[test]
fn pod_is_owned_by_its_vmi_and_labelled_after_it() {
    let pod = rendered(small());
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
fn istio_proxy_is_requested_by_the_vmis_annotation() {
    for (value, token) in [("true", true), ("false", false)] {
        let mut instance = vmi(small());
        let annotations = instance.metadata.annotations.get_or_insert_default();
        annotations.insert("sidecar.istio.io/inject".to_owned(), value.to_owned());
        let pod = rendered_vmi(&instance, &ClusterConfig::default(), NamespaceLimits::default()).unwrap();
        assert_eq!(pod["metadata"]["labels"]["sidecar.istio.io/inject"], value);
        assert_eq!(pod["spec"]["automountServiceAccountToken"], token);
    }
}

#[test]
fn istio_proxy_is_ended_with_the_guest() {
    let inject = "sidecar.istio.io/inject";
    for (metadata, ends) in [
        (json!({}), false),
        (json!({"annotations": {inject: "true"}}), true),
        (json!({"annotations": {inject: "false"}}), false),
        (json!({"labels": {inject: "true"}}), true),
        (json!({"labels": {inject: "true"}, "annotations": {inject: "false"}}), false),
    ] {
        let mut instance = vmi(small());
        instance.metadata = serde_json::from_value(metadata.clone()).unwrap();
        let pod = rendered_vmi(&instance, &ClusterConfig::default(), NamespaceLimits::default()).unwrap();
        let args = pod["spec"]["containers"][0]["command"].as_array().unwrap();
        assert_eq!(args.contains(&json!("--end-proxy")), ends, "{metadata}");
    }
}

#[test]
fn service_account_is_the_vmis_or_that_of_its_disk() {
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
fn annotation_of_any_value_makes_the_launcher_fail() {
    for (key, fails) in [
        ("kubevirt.io/func-test-virt-launcher-fail-fast", true),
        ("kubevirt.io/func-test-virt-launcher-fail-slow", false),
    ] {
        let mut instance = vmi(small());
        instance.metadata.annotations.get_or_insert_default().insert(key.to_owned(), String::new());
        let pod = rendered_vmi(&instance, &ClusterConfig::default(), NamespaceLimits::default()).unwrap();
        let args = pod["spec"]["containers"][0]["command"].as_array().unwrap();
        assert_eq!(args.contains(&json!("--simulate-crash")), fails, "{key}");
    }
}

#[test]
fn launcher_waits_for_the_permission_to_lock_memory() {
    for (lock, waits) in [("Required", true), ("NotRequired", false)] {
        let mut instance = vmi(small());
        let overhead = serde_json::from_value(json!({"memLock": lock})).unwrap();
        instance.spec.domain.memory.get_or_insert_default().reserved_overhead = Some(overhead);
        let pod = rendered_vmi(&instance, &ClusterConfig::default(), NamespaceLimits::default()).unwrap();
        let args = pod["spec"]["containers"][0]["command"].as_array().unwrap();
        assert_eq!(args.contains(&json!("--await-limits")), waits, "{lock}");
    }
}

#[test]
fn long_names_become_labels_that_fit() {
    for length in [1, 63, 64, 169, 253] {
        let name = "a".repeat(length);
        let mut instance = vmi(small());
        instance.metadata.name = Some(name.clone());
        let pod = rendered_vmi(&instance, &ClusterConfig::default(), NamespaceLimits::default()).unwrap();
        let metadata = &pod["metadata"];
        for (key, value) in metadata["labels"].as_object().unwrap() {
            assert!(value.as_str().unwrap().len() <= 63, "{key}: {value}");
        }
        assert_eq!(metadata["labels"]["vmi.kubevirt.io/id"] == name.as_str(), length <= 63);
        assert_eq!(metadata["annotations"]["kubevirt.io/domain"], name);
        assert!(pod["spec"]["hostname"].as_str().unwrap().len() <= 63);
    }
}

#[test]
fn debug_settings_reach_the_launcher() {
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
        let mut instance = vmi(small());
        instance.metadata = serde_json::from_value(metadata.clone()).unwrap();
        let pod = rendered_vmi(&instance, &ClusterConfig::default(), NamespaceLimits::default()).unwrap();
        let args = pod["spec"]["containers"][0]["command"].as_array().unwrap().clone();
        let has = |start: &str| args.iter().filter_map(Value::as_str).any(|arg| arg.starts_with(start));
        assert!(has(wanted) && !has(absent), "{metadata}: {args:?}");
    }
}

#[test]
fn log_verbosity_comes_from_the_vmi_or_the_cluster() {
    let refused = Err(RenderError::Verbosity("loud".to_owned()));
    for (labels, expected) in [
        (json!({}), Ok(Value::Null)),
        (json!({"logVerbosity": "2"}), Ok(json!("2"))),
        (json!({"logVerbosity": "9"}), Ok(json!("9"))),
        (json!({"logVerbosity": "loud"}), refused),
    ] {
        let mut instance = vmi(small());
        instance.metadata.labels = serde_json::from_value(labels.clone()).unwrap();
        let pod = rendered_vmi(&instance, &ClusterConfig::default(), NamespaceLimits::default());
        let shown = pod.map(|pod| {
            let variables = pod["spec"]["containers"][0]["env"].as_array().cloned().unwrap_or_default();
            let found = variables.into_iter().find(|variable| variable["name"] == "VIRT_LAUNCHER_LOG_VERBOSITY");
            found.map_or(Value::Null, |variable| variable["value"].clone())
        });
        assert_eq!(shown, expected, "{labels}");
    }
}

#[test]
fn backups_freeze_the_guest_unless_turned_off() {
    let skip = "kubevirt.io/skip-backup-hooks";
    let freeze = r#"["/usr/bin/virt-freezer", "--freeze", "--name", "web", "--namespace", "shop"]"#;
    for (annotations, skip_backup_hooks, command) in [
        (json!({}), false, json!(freeze)),
        (json!({skip: "no"}), false, json!(freeze)),
        (json!({skip: "True"}), false, Value::Null),
        (json!({}), true, Value::Null),
    ] {
        let mut instance = vmi(small());
        instance.metadata.annotations = serde_json::from_value(annotations.clone()).unwrap();
        let config = ClusterConfig { skip_backup_hooks, ..ClusterConfig::default() };
        let pod = rendered_vmi(&instance, &config, NamespaceLimits::default()).unwrap();
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
