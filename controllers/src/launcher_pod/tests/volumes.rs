//! Tests of volumes.

use super::*;

#[test]
fn container_disk_is_a_read_only_image_volume_at_its_name() {
    let pod = rendered(small());
    let volumes = pod["spec"]["volumes"].as_array().unwrap();
    let disk = volumes.iter().find(|volume| volume["name"] == "cd").unwrap();
    assert_eq!(disk["image"]["reference"], "registry/disk:1");
    let mounts = pod["spec"]["containers"][0]["volumeMounts"].as_array().unwrap();
    let mount = mounts.iter().find(|mount| mount["name"] == "cd").unwrap();
    assert_eq!(mount["mountPath"], "/var/run/kubevirt-image-volume/cd");
    assert_eq!(mount["readOnly"], true);
}

#[test]
fn files_of_libvirt_are_in_memory_and_bounded() {
    let pod = rendered(small());
    let volumes = pod["spec"]["volumes"].as_array().unwrap();
    let runtime = volumes.iter().find(|volume| volume["name"] == "libvirt-runtime").unwrap();
    assert_eq!(runtime["emptyDir"], json!({"medium": "Memory", "sizeLimit": "16Mi"}));
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
fn hot_plugged_claims_are_left_to_attachment_pods() {
    let data = |source: Value| merged(small(), &json!({"volumes": [merged_into(json!({"name": "data"}), source)]}));
    let names = |pod: &Value| -> Vec<String> {
        let volumes = pod["spec"]["volumes"].as_array().unwrap().iter();
        volumes.map(|volume| volume["name"].as_str().unwrap().to_owned()).collect()
    };
    // The claim does not exist yet.
    for source in [
        json!({"persistentVolumeClaim": {"claimName": "absent", "hotpluggable": true}}),
        json!({"dataVolume": {"name": "absent", "hotpluggable": true}}),
    ] {
        let pod = rendered(data(source.clone()));
        assert!(!names(&pod).contains(&"data".to_owned()), "{source}");
        assert!(names(&pod).contains(&"hotplug-disks".to_owned()), "{source}");
        let mounts = pod["spec"]["containers"][0]["volumeMounts"].as_array().unwrap();
        let mount = mounts.iter().find(|mount| mount["name"] == "hotplug-disks").unwrap();
        assert_eq!(*mount, json!({"name": "hotplug-disks", "mountPath": "/var/run/kubevirt/hotplug-disks"}));
    }
    let without = rendered(merged(small(), &json!({"domain": {"devices": {"disableHotplug": true}}})));
    assert!(!names(&without).contains(&"hotplug-disks".to_owned()));
}

fn merged_into(mut object: Value, more: Value) -> Value {
    object.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    object
}

#[test]
fn shared_directories_are_mounted_as_those_of_disks() {
    let volumes = json!([
        {"name": "map", "configMap": {"name": "c"}},
        {"name": "secret", "secret": {"secretName": "s"}},
        {"name": "down", "downwardAPI": {}},
        {"name": "account", "serviceAccount": {"serviceAccountName": "a"}},
        {"name": "claim", "persistentVolumeClaim": {"claimName": "shared"}},
        {"name": "fixed", "persistentVolumeClaim": {"claimName": "shared", "readOnly": true}},
        {"name": "data", "dataVolume": {"name": "shared"}},
    ]);
    let names = volumes.as_array().unwrap().iter().map(|volume| json!({"name": volume["name"], "virtiofs": {}}));
    let filesystems: Vec<Value> = names.collect();
    let pod =
        rendered(merged(small(), &json!({"domain": {"devices": {"filesystems": filesystems}}, "volumes": volumes})));
    let containers = pod["spec"]["containers"].as_array().unwrap();
    assert_eq!((containers.len(), &pod["spec"]["automountServiceAccountToken"]), (1, &json!(true)));
    let mounts = containers[0]["volumeMounts"].as_array().unwrap();
    for (name, directory, read_only) in [
        ("map", "config-map/map", true),
        ("secret", "secret/secret", true),
        ("down", "downwardapi/down", true),
        ("claim", "vmi-disks/claim", false),
        ("fixed", "vmi-disks/fixed", true),
        ("data", "vmi-disks/data", false),
    ] {
        let mount = mounts.iter().find(|mount| mount["name"] == name).unwrap();
        assert_eq!(mount["mountPath"], format!("/var/run/kubevirt-private/{directory}"));
        assert_eq!(mount["readOnly"].as_bool().unwrap_or_default(), read_only, "{name}");
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

#[test]
fn cve_2020_14316_no_vmi_brings_a_file_of_the_node_into_its_pod() {
    let gates = ["Root", "ExperimentalVirtiofsSupport", "DownwardMetrics", "HotplugVolumes"];
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
fn host_disks_mount_their_directory_with_their_gate_only() {
    let config = ClusterConfig { feature_gates: vec!["HostDisk".to_owned()], ..ClusterConfig::default() };
    let of = |disk: Value, config: &ClusterConfig| {
        let spec = merged(small(), &json!({"volumes": [{"name": "data", "hostDisk": disk}]}));
        rendered_with(spec, config, NamespaceLimits::default())
    };
    for (disk, kind, shared) in [
        (json!({"path": "/data/a.img", "type": "Disk"}), "Directory", false),
        (json!({"path": "/data/a.img", "type": "DiskOrCreate", "capacity": "1Gi"}), "DirectoryOrCreate", false),
        (json!({"path": "/data/a.img", "type": "Disk", "shared": true}), "Directory", true),
    ] {
        let pod = of(disk.clone(), &config).unwrap();
        let volumes = pod["spec"]["volumes"].as_array().unwrap();
        let hosts: Vec<&Value> = volumes.iter().filter(|volume| !volume["hostPath"].is_null()).collect();
        assert_eq!(hosts, [&json!({"name": "data", "hostPath": {"path": "/data", "type": kind}})], "{disk}");
        let container = &pod["spec"]["containers"][0];
        let mount = json!({"name": "data", "mountPath": "/var/run/kubevirt-private/vmi-disks/data"});
        assert!(container["volumeMounts"].as_array().unwrap().contains(&mount), "{container}");
        let variable = json!({"name": "SHARED_FILESYSTEM_PATHS", "value": "/var/run/kubevirt-private/vmi-disks/data"});
        assert_eq!(container["env"].as_array().unwrap().contains(&variable), shared, "{disk}");
        let off = of(disk, &ClusterConfig::default()).unwrap_err();
        assert_eq!(off.to_string(), "HostDisk feature gate is not enabled");
    }
    for path in ["/a.img", "data/a.img", "/data/../etc/a.img", ""] {
        let refused = of(json!({"path": path, "type": "Disk"}), &config);
        assert!(matches!(refused, Err(RenderError::Unsupported(_))), "{path}");
    }
}

#[test]
fn the_disk_with_metrics_is_in_memory() {
    let spec = merged(small(), &json!({"volumes": [{"name": "metrics", "downwardMetrics": {}}]}));
    let pod = rendered(spec);
    let volumes = pod["spec"]["volumes"].as_array().unwrap();
    let expected = json!({"name": "metrics", "emptyDir": {"medium": "Memory", "sizeLimit": "1Mi"}});
    assert!(volumes.contains(&expected), "{volumes:?}");
    let mount = json!({"name": "metrics", "mountPath": "/var/run/kubevirt-private/downwardmetric-disk"});
    assert!(pod["spec"]["containers"][0]["volumeMounts"].as_array().unwrap().contains(&mount));
}

#[test]
fn temporary_pod_is_scheduled_as_the_launcher_and_mounts_nothing() {
    let spec = merged(
        small(),
        &json!({
            "nodeSelector": {"zone": "a"}, "schedulerName": "s", "priorityClassName": "high",
            "tolerations": [{"key": "t", "operator": "Exists"}],
            "topologySpreadConstraints": [{"maxSkew": 1, "topologyKey": "zone", "whenUnsatisfiable": "DoNotSchedule"}],
            "affinity": {"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [{"topologyKey": "zone"}]}},
            "livenessProbe": {"guestAgentPing": {}},
            "volumes": [
                {"name": "cd", "containerDisk": {"image": "i"}}, {"name": "ci", "cloudInitNoCloud": {"secretRef": {"name": "s"}}},
                {"name": "data", "dataVolume": {"name": "shared"}}, {"name": "device", "dataVolume": {"name": "raw"}},
                {"name": "account", "serviceAccount": {"serviceAccountName": "a"}},
            ],
        }),
    );
    let (vmi, config) = (vmi(spec), ClusterConfig::default());
    let claims = claims();
    let inputs = inputs(&vmi, &config, &claims);
    let [launcher, temporary] =
        [render(&inputs), render_temporary(&inputs)].map(|pod| serde_json::to_value(pod.unwrap()).unwrap());
    for same in ["generateName", "labels", "ownerReferences"] {
        assert_eq!(temporary["metadata"][same], launcher["metadata"][same], "{same}");
    }
    assert_eq!(temporary["metadata"]["annotations"]["kubevirt.io/ephemeral-provisioning"], "true");
    let (launcher, temporary) = (&launcher["spec"], &temporary["spec"]);
    for (field, value) in launcher.as_object().unwrap() {
        let differs = ["containers", "volumes", "automountServiceAccountToken"].contains(&field.as_str());
        assert_eq!(temporary[field] == *value, !differs, "{field}");
    }
    let claims = [("data", "shared"), ("device", "raw")]
        .map(|(name, claim)| json!({"name": name, "persistentVolumeClaim": {"claimName": claim}}));
    assert_eq!(temporary["volumes"], json!(claims));
    assert_eq!(temporary["automountServiceAccountToken"], false);
    let [launcher, temporary] = [launcher, temporary].map(|spec| &spec["containers"][0]);
    for same in ["name", "image", "resources", "securityContext", "ports"] {
        assert_eq!(temporary[same], launcher[same], "{same}");
    }
    assert_eq!(temporary["command"], json!(["/usr/bin/virt-launcher", "bind-claims"]));
    for none in ["env", "volumeMounts", "volumeDevices", "livenessProbe"] {
        assert!(!launcher[none].is_null() && temporary[none].is_null(), "{none}");
    }
}

#[test]
fn temporary_pod_has_no_proxy() {
    let mut vmi = vmi(small());
    let annotations = vmi.metadata.annotations.get_or_insert_default();
    annotations.insert("sidecar.istio.io/inject".to_owned(), "true".to_owned());
    let (config, claims) = (ClusterConfig::default(), claims());
    let inputs = inputs(&vmi, &config, &claims);
    let metadata = render_temporary(&inputs).unwrap().metadata;
    for marks in [metadata.labels, metadata.annotations] {
        assert_eq!(marks.unwrap()["sidecar.istio.io/inject"], "false");
    }
}

#[test]
fn secrets_with_any_name_can_have_credentials_and_cloud_init_data() {
    let credential = |secret: &str| json!({"sshPublicKey": {"source": {"secret": {"secretName": secret}}, "propagationMethod": {"noCloud": {}}}});
    let long = "k".repeat(253);
    let change = json!({
        "accessCredentials": [credential("keys"), credential("keys.example"), credential(&long)],
        "volumes": [{"name": "v".repeat(63), "cloudInitNoCloud": {"secretRef": {"name": "user"}}}],
    });
    let pod = rendered(merged(small(), &change));
    let volumes = pod["spec"]["volumes"].as_array().unwrap();
    let mounts = pod["spec"]["containers"][0]["volumeMounts"].as_array().unwrap();
    let name = |secret: &str| {
        let volume = volumes.iter().find(|volume| volume["secret"]["secretName"] == secret).unwrap();
        volume["name"].as_str().unwrap().to_owned()
    };
    assert_eq!(name("keys"), "keys-access-cred");
    for secret in ["keys", "keys.example", &long] {
        let name = name(secret);
        assert_eq!(name, api::vmi::access::pod_volume(secret));
        assert!(name.len() <= 63 && !name.contains('.'), "{name}");
        let mount = mounts.iter().find(|mount| mount["name"] == name).unwrap();
        assert_eq!(mount["mountPath"], format!("/var/run/kubevirt-private/secret/{name}"));
    }
    assert!(name("user").len() <= 63 && name("user").ends_with("-udata"));
}
