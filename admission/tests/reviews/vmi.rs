//! Reviews of VMIs.

use serde_json::{Value, json};

use crate::{CONTROLLER, Call, HANDLER, create, preset, update, validate, vmi};

#[test]
fn vmi_gets_defaults_and_is_accepted() {
    let object = create(vmi()).patched();
    assert_eq!(object["metadata"]["finalizers"], json!(["kubevirt.io/foregroundDeleteVirtualMachine"]));
    assert_eq!(object["metadata"]["annotations"]["kubevirt.io/pci-topology-version"], "v3");
    assert_eq!(object["metadata"]["labels"], json!({"app": "web"}));
    assert_eq!(object["status"]["phase"], "Pending");
    assert_eq!(object["status"]["runtimeUser"], 107);
    assert_eq!(object["status"]["phaseTransitionTimestamps"][0]["phase"], "Pending");
    assert_eq!(object["status"]["memory"]["guestAtBoot"], "128Mi");
    assert_eq!(object["status"]["currentCPUTopology"], json!({"sockets": 1, "cores": 1, "threads": 1}));
    assert_eq!(object["spec"]["networks"], json!([{"name": "default", "pod": {}}]));
    assert_eq!(
        object["spec"]["domain"]["devices"]["disks"],
        json!([{"name": "root", "disk": {"bus": "virtio", "readonly": false}}]),
        "what the user wrote stays as it was written"
    );
    validate(object.clone()).allowed();
    assert_eq!(create(object.clone()).by(CONTROLLER).patched(), object, "a second pass changes nothing");
}

#[test]
fn status_sent_by_a_user_on_creation_is_dropped() {
    let mut object = vmi();
    object["status"] = json!({"phase": "Running", "nodeName": "n1", "runtimeUser": 0});
    let object = create(object).patched();
    assert_eq!(object["status"]["phase"], "Pending");
    assert_eq!(object["status"].get("nodeName"), None);
    assert_eq!(object["status"]["runtimeUser"], 107);
}

#[test]
fn status_changed_by_a_user_is_restored() {
    let mut old = vmi();
    old["status"] = json!({"phase": "Running", "nodeName": "n1"});
    let mut object = old.clone();
    object["status"]["nodeName"] = json!("n2");
    object["metadata"]["labels"]["app"] = json!("db");
    let call = |object: &Value| {
        Call::new("/virtualmachineinstances-mutate", "virtualmachineinstances", "UPDATE", object.clone())
            .was(old.clone())
    };
    let kept = call(&object).patched();
    assert_eq!(kept["status"], old["status"]);
    assert_eq!(kept["metadata"]["labels"]["app"], "db");
    assert_eq!(call(&object).by(CONTROLLER).patched(), object);
    let mut without = old.clone();
    without.as_object_mut().unwrap().remove("status");
    assert_eq!(call(&without).patched(), old);
}

#[test]
fn only_components_change_the_spec_of_a_vmi() {
    let old = vmi();
    let mut object = old.clone();
    object["spec"]["terminationGracePeriodSeconds"] = json!(1);
    update(object.clone(), old.clone()).refused("update of VMI object is restricted");
    update(object, old.clone()).by(CONTROLLER).allowed();
    let mut same = old.clone();
    same["spec"]["domain"]["memory"]["guest"] = json!("131072Ki");
    update(same, old.clone()).allowed();
    let mut old = old;
    old["status"] = json!({"volumeStatus": [{"name": "root", "target": "vda"}]});
    let mut other = old.clone();
    other["spec"]["volumes"][0]["containerDisk"]["image"] = json!("c:d");
    update(other, old).by(CONTROLLER).refused("permanent volume root, changed");
}

#[test]
fn name_of_a_volume_that_is_being_detached_is_not_for_another_one() {
    let mut old = vmi();
    let info = json!({"claimName": "former"});
    let leaving = json!({"name": "a", "target": "sda", "hotplugVolume": {}, "persistentVolumeClaimInfo": info});
    old["status"] = json!({"volumeStatus": [{"name": "root", "target": "vda"}, leaving]});
    let with = |mut object: Value, volume: Value| {
        object["spec"]["volumes"].as_array_mut().unwrap().push(volume.clone());
        if volume.get("memoryDump").is_none() {
            let disk = json!({"name": volume["name"], "disk": {"bus": "scsi"}});
            object["spec"]["domain"]["devices"]["disks"].as_array_mut().unwrap().push(disk);
        }
        object
    };
    let claim = |name: &str, claim: &str| {
        let source = json!({"claimName": claim, "hotpluggable": true});
        json!({"name": name, "persistentVolumeClaim": source})
    };
    let dump = json!({"name": "a", "memoryDump": {"claimName": "a", "hotpluggable": true}});
    for (volume, refused) in [
        (claim("a", "new"), true),
        (json!({"name": "a", "dataVolume": {"name": "new", "hotpluggable": true}}), true),
        (dump, true),
        (claim("a", "former"), false),
        (claim("b", "new"), false),
    ] {
        let call = update(with(old.clone(), volume), old.clone()).by(CONTROLLER);
        if refused {
            call.refused("volume a is still being detached");
        } else {
            call.allowed();
        }
    }
}

#[test]
fn only_components_set_reserved_labels() {
    let old = vmi();
    let mut object = old.clone();
    object["metadata"]["labels"]["kubevirt.io/nodeName"] = json!("n1");
    update(object.clone(), old.clone()).refused("reserved kubevirt.io/ labels on a VMI object is prohibited");
    update(object.clone(), old).by(CONTROLLER).allowed();
    validate(create(object).patched()).refused("reserved kubevirt.io/ labels");
}

#[test]
fn virt_handlers_write_only_the_vmis_of_their_node() {
    let mut old = vmi();
    old["status"] = json!({"phase": "Running", "nodeName": "n1"});
    let mut object = old.clone();
    object["status"]["phase"] = json!("Succeeded");
    let call = |node| Call { node, ..update(object.clone(), old.clone()).by(HANDLER) };
    call(Some("n1")).allowed();
    call(Some("n2")).refused("virt-handler is only allowed to modify VMIs it owns");
    call(None).refused("virt-handler service account is missing node name");
    let mut moved = old.clone();
    moved["status"]["migrationState"] = json!({"targetNode": "n2"});
    Call { node: Some("n1"), ..update(moved, old).by(HANDLER) }.refused("not allowed to set target node");
}

#[test]
fn malformed_amount_is_refused_once() {
    let mut object = vmi();
    object["spec"]["architecture"] = json!("amd64");
    object["spec"]["domain"]["memory"] = json!({"guest": "much"});
    // Before defaults, which would copy it.
    for response in [create(object.clone()).send(), validate(object).send()] {
        let causes = response["status"]["details"]["causes"].as_array().unwrap();
        let fields: Vec<_> = causes.iter().map(|cause| cause["field"].clone()).collect();
        assert_eq!(fields, ["spec.domain.memory.guest"]);
    }
}

#[test]
fn presets_apply_to_new_vmis() {
    let cpu = |cores: u32| json!({"devices": {}, "cpu": {"cores": cores}});
    let call = || create(vmi()).beside("virtualmachineinstancepresets", preset("small", cpu(2)));
    let object = call().patched();
    assert_eq!(object["spec"]["domain"]["cpu"]["cores"], 2);
    assert_eq!(object["metadata"]["annotations"]["virtualmachinepreset.kubevirt.io/small"], "kubevirt.io/v1");
    let warning = "kubevirt.io/v1 VirtualMachineInstancePresets is now deprecated and will be removed in v2.";
    assert_eq!(call().allowed()["warnings"], json!([warning]));

    let response = call().beside("virtualmachineinstancepresets", preset("large", cpu(8))).send();
    assert_eq!(response["status"]["code"], 422);
    assert_eq!(response["status"].get("reason"), None);
    let message = response["status"]["message"].as_str().unwrap();
    let start =
        "VirtualMachinePresets cannot be applied due to conflicts: presets 'small' and 'large' conflict: spec.cpu: ";
    assert!(message.starts_with(start), "{message}");

    let mut plain = vmi();
    plain["metadata"]["annotations"] = json!({"virtualmachineinstancepresets.admission.kubevirt.io/exclude": "true"});
    let object = create(plain).beside("virtualmachineinstancepresets", preset("small", cpu(2))).patched();
    assert_eq!(object["spec"]["domain"]["cpu"]["cores"], 1);
}

#[test]
fn errors_are_in_the_order_of_the_rules() {
    let mut object = create(vmi()).patched();
    object["spec"]["hostname"] = json!("Web");
    object["spec"]["domain"]["memory"]["guest"] = json!("128");
    object["spec"]["domain"]["devices"]["interfaces"] = json!([
        {"name": "default", "masquerade": {}, "state": "sideways"},
        {"name": "b", "state": "sideways"},
    ]);
    object["spec"]["accessCredentials"] = json!([{"sshPublicKey": {
        "source": {}, "propagationMethod": {"configDrive": {}, "noCloud": {}},
    }}]);
    let response = validate(object).send();
    let causes = response["status"]["details"]["causes"].as_array().unwrap();
    let fields: Vec<_> = causes.iter().map(|cause| cause["field"].as_str().unwrap()).collect();
    let key = "spec.accessCredentials[0].sshPublicKey";
    assert_eq!(
        fields,
        [
            "spec.hostname",
            "spec.domain.memory.guest",
            "spec.domain.devices.interfaces[0].state",
            "spec.domain.devices.interfaces[1].state",
            "spec.domain.devices.interfaces[1]",
            "spec.domain.devices.interfaces[1].name",
            &format!("{key}.propagationMethod"),
            &format!("{key}.propagationMethod"),
            &format!("{key}.source"),
            &format!("{key}.propagationMethod"),
        ]
    );
}
