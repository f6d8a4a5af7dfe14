//! Reviews of VMs.

use api::FeatureGate;
use serde_json::{Value, json};

use crate::{CONTROLLER, Call, validate_vm, vm};

#[test]
fn vm_gets_identity_once_and_stays_sparse() {
    let call = |operation, object| Call::new("/virtualmachines-mutate", "virtualmachines", operation, object);
    let object = call("CREATE", vm()).patched();
    let spec = &object["spec"]["template"]["spec"];
    assert!(spec["domain"]["firmware"]["uuid"].is_string());
    assert_ne!(spec["domain"]["firmware"]["uuid"], spec["domain"]["firmware"]["serial"]);
    assert_eq!(spec["architecture"], "amd64");
    assert_eq!(spec["domain"]["machine"]["type"], "q35");
    assert_eq!(spec.get("networks"), None);
    assert_eq!(object["spec"]["template"]["metadata"]["annotations"]["kubevirt.io/pci-topology-version"], "v3");
    assert_eq!(call("CREATE", object.clone()).patched(), object, "a second pass changes nothing");
    let response = call("UPDATE", object.clone()).was(object.clone()).allowed();
    assert_eq!(response.get("patch"), None);
    // The finalizer of an existing VM is the business of virt-controller.
    let mut released = object;
    assert!(released["metadata"].as_object_mut().unwrap().remove("finalizers").is_some());
    let response = call("UPDATE", released.clone()).was(released).allowed();
    assert_eq!(response.get("patch"), None);
}

#[test]
fn vm_runs_by_one_of_running_and_run_strategy() {
    validate_vm(vm()).allowed();
    for strategy in ["Halted", "Manual", "RerunOnFailure", "Once"] {
        let mut object = vm();
        object["spec"]["runStrategy"] = json!(strategy);
        validate_vm(object).allowed();
    }
    let mut object = vm();
    object["spec"]["running"] = json!(true);
    validate_vm(object.clone()).refused("Running and RunStrategy are mutually exclusive");
    object["spec"].as_object_mut().unwrap().remove("runStrategy");
    let response = validate_vm(object.clone()).allowed();
    assert_eq!(response["warnings"], json!(["spec.running is deprecated, please use spec.runStrategy instead."]));
    object["spec"].as_object_mut().unwrap().remove("running");
    validate_vm(object.clone()).refused("RunStrategy must be specified");
    object["spec"]["runStrategy"] = json!("Sometimes");
    validate_vm(object.clone()).refused("Invalid RunStrategy (Sometimes)");
    object["spec"]["runStrategy"] = json!("WaitAsReceiver");
    validate_vm(object).refused("spec.runStrategy WaitAsReceiver is not supported yet");
}

#[test]
fn vm_template_is_validated_like_a_vmi() {
    let mut object = vm();
    object["spec"]["template"]["spec"]["domain"]["devices"]["disks"][0]["name"] = json!("other");
    validate_vm(object).refused("spec.template.spec.domain.devices.disks[0].Name 'other' not found.");
    let mut object = vm();
    object["spec"]["template"]["spec"]["domain"]["launchSecurity"] = json!({"sev": {}});
    // Unsupported fields are reported only if no rule is broken.
    let response = validate_vm(object.clone()).send();
    assert_eq!(response["status"]["message"], "SEV requires OVMF (UEFI)");
    object["spec"]["template"]["spec"]["domain"]["firmware"] = json!({"bootloader": {"efi": {"secureBoot": false}}});
    validate_vm(object).refused("spec.template.spec.domain.launchSecurity is not supported yet: encrypted guests");
    let mut object = vm();
    object["spec"]["template"] = json!({});
    validate_vm(object).refused("missing virtual machine template.");
    let mut object = vm();
    object["metadata"]["deletionTimestamp"] = json!("2026-01-01T00:00:00Z");
    object["spec"]["runStrategy"] = json!("Sometimes");
    validate_vm(object).allowed();
}

#[test]
fn snapshot_in_progress_blocks_changes_of_a_vm() {
    let mut old = vm();
    old["status"] = json!({"snapshotInProgress": "s1"});
    let mut object = old.clone();
    object["spec"]["runStrategy"] = json!("Halted");
    let call = Call::new("/virtualmachines-validate", "virtualmachines", "UPDATE", object).was(old);
    call.refused("Cannot update vm running state until snapshot \"s1\" completes");
}

#[test]
fn restores_add_no_files_of_the_node() {
    let disk = json!({"name": "file", "hostDisk": {"path": "/var/disks/a.img", "type": "Disk"}});
    let mut object = vm();
    let spec = &mut object["spec"]["template"]["spec"];
    spec["volumes"].as_array_mut().unwrap().push(disk);
    spec["domain"]["devices"]["disks"].as_array_mut().unwrap().push(json!({"name": "file", "disk": {}}));
    let call = |object: &Value| validate_vm(object.clone()).with(FeatureGate::HostDisk).by(CONTROLLER);
    call(&object).allowed();
    let was = object.clone();
    object["metadata"]["annotations"] = json!({"restore.kubevirt.io/lastRestoreUID": "r-uid"});
    call(&object).refused("host disk file cannot be added by a restore or a clone");
    let update = |old: Value| {
        let update = Call::new("/virtualmachines-validate", "virtualmachines", "UPDATE", object.clone());
        update.with(FeatureGate::HostDisk).by(CONTROLLER).was(old)
    };
    update(vm()).refused("host disk file cannot be added by a restore or a clone");
    update(was).allowed();
}

#[test]
fn hotplug_requests_in_the_status_of_a_vm_are_refused() {
    let call = |status: Value| {
        let mut object = vm();
        object["status"] = status;
        Call::new("/status-validate", "virtualmachines", "UPDATE", object).was(vm())
    };
    call(json!({"ready": true})).allowed();
    call(json!({"volumeRequests": [{}]})).refused("require one of either addVolumeOptions or removeVolumeOptions");
    let removal = json!({"volumeRequests": [{"removeVolumeOptions": {"name": "a"}}]});
    call(removal.clone()).refused("not supported yet: hot-plug");
    // A stored request blocks nothing.
    let mut old = vm();
    old["status"] = removal.clone();
    call(removal).was(old).allowed();
}
