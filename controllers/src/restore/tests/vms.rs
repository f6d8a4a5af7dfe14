//! Tests of VMs that restores change and create.

use super::*;

#[test]
fn existing_vm_gets_the_captured_spec_but_keeps_its_run_strategy() {
    let mut observed = observed(&named());
    observed.claims = bound();
    let patch = patch(&observed, Kind::VirtualMachine, None);
    assert_eq!(patch["metadata"]["annotations"], json!({"restore.kubevirt.io/lastRestoreUID": ID}));
    assert_eq!(patch["spec"]["runStrategy"], Value::Null);
    assert_eq!(patch["spec"]["dataVolumeTemplates"][0]["metadata"]["name"], "restore-restore-uid-root");
    let volumes = &patch["spec"]["template"]["spec"]["volumes"];
    assert_eq!(volumes[0], json!({"name": "root", "dataVolume": {"name": "restore-restore-uid-root"}}));
    assert_eq!(volumes[1]["persistentVolumeClaim"]["claimName"], "restore-restore-uid-data");
}

#[test]
fn missing_vm_is_created_with_patches() {
    let mut status = named();
    let mac = json!({"op": "replace", "path": "/spec/template/spec/domain/devices/interfaces/0/macAddress", "value": "02:00:00:00:00:09"});
    status["spec"] = json!({"target": {"name": "w"}, "patches": [mac.to_string()]});
    let mut observed = observed(&status);
    (observed.vm, observed.claims) = (None, bound());
    let created = effects(&observed).into_iter().find_map(|effect| match effect {
        Effect::Create { kind: Kind::VirtualMachine, object, .. } => Some(object),
        _ => None,
    });
    let created = created.unwrap();
    assert_eq!(created["metadata"]["name"], "w");
    assert_eq!(created["metadata"]["labels"], json!({"app": "x"}));
    assert_eq!(created["spec"]["runStrategy"], "Halted");
    let domain = &created["spec"]["template"]["spec"]["domain"];
    assert_eq!(domain["devices"]["interfaces"][0]["macAddress"], "02:00:00:00:00:09");
    // Admission generates the UUID of another VM, but the same VM has the same hardware.
    assert_eq!(domain["firmware"], Value::Null);
    status["spec"]["target"]["name"] = json!("v");
    observed.restore = restore(&status);
    assert!(
        effects(&observed).iter().any(|effect| format!("{effect:?}").contains(&crate::owned_vmis::firmware_uuid("v")))
    );
    status["spec"]["patches"] = json!([json!({"op": "remove", "path": "/spec/missing"}).to_string()]);
    observed.restore = restore(&status);
    assert!(texts(&observed)[2].starts_with("True failed to apply patch for VM"), "{:?}", texts(&observed));
}

/// A clone of a clone whose filters exclude what restores write.
#[test]
fn created_vm_has_the_mark_of_its_restore_whatever_patches_remove() {
    let removed = json!({"op": "remove", "path": "/metadata/annotations/restore.kubevirt.io~1lastRestoreUID"});
    let spec = json!({"spec": {"target": {"name": "w"}, "patches": [removed.to_string()]}});
    let mut observed = without_claims(&spec, |vm| {
        vm.metadata.annotations = Some([(annotation::LAST_RESTORE.to_owned(), "former".to_owned())].into());
    });
    observed.vm = None;
    let created = effects(&observed).into_iter().find_map(|effect| match effect {
        Effect::Create { kind: Kind::VirtualMachine, object, .. } => Some(object),
        _ => None,
    });
    assert_eq!(created.unwrap()["metadata"]["annotations"], json!({"restore.kubevirt.io/lastRestoreUID": ID}));
}

#[test]
fn template_of_a_claim_volume_is_restored_with_it() {
    let mut observed = observed(&json!({}));
    let content = Arc::make_mut(observed.content.as_mut().unwrap());
    let captured = content.spec.source.virtual_machine.as_mut().unwrap().spec.as_mut().unwrap();
    let volume = json!({"name": "root", "persistentVolumeClaim": {"claimName": "root"}});
    captured.template.spec.as_mut().unwrap().volumes[0] = serde_json::from_value(volume).unwrap();
    let status = patch(&observed, Kind::VmRestore, Some("status"))["status"].clone();
    assert_eq!(status["restores"], named()["status"]["restores"]);
    assert_eq!(status["deletedDataVolumes"], json!(["root"]));
    (observed.restore, observed.claims) = (restore(&named()), bound());
    let spec = patch(&observed, Kind::VirtualMachine, None)["spec"].clone();
    let root = &spec["template"]["spec"]["volumes"][0];
    assert_eq!(spec["dataVolumeTemplates"][0]["metadata"]["name"], "restore-restore-uid-root");
    assert_eq!(root["persistentVolumeClaim"]["claimName"], "restore-restore-uid-root");
    assert_eq!(root["dataVolume"], Value::Null);
}

#[test]
fn new_vm_has_no_template_of_a_disk_that_it_shares() {
    for (target, shareable, templates) in [("w", true, 0), ("w", false, 1), ("v", true, 1)] {
        let mut status = named();
        status["spec"] = json!({"target": {"name": target}});
        status["status"]["restores"].as_array_mut().unwrap().remove(0);
        let mut observed = observed(&status);
        (observed.vm, observed.claims) = (None, bound());
        let content = Arc::make_mut(observed.content.as_mut().unwrap());
        content.spec.volume_backups.retain(|backup| backup.volume_name != "root");
        let captured = content.spec.source.virtual_machine.as_mut().unwrap().spec.as_mut().unwrap();
        let disks = json!([{"name": "root", "disk": {}, "shareable": shareable}]);
        captured.template.spec.as_mut().unwrap().domain.devices.disks = serde_json::from_value(disks).unwrap();
        let created = effects(&observed).into_iter().find_map(|effect| match effect {
            Effect::Create { kind: Kind::VirtualMachine, object, .. } => Some(object),
            _ => None,
        });
        let spec = created.unwrap()["spec"].clone();
        assert_eq!(spec["dataVolumeTemplates"].as_array().map_or(0, Vec::len), templates, "{target} {shareable}");
        assert_eq!(spec["template"]["spec"]["volumes"][0]["dataVolume"]["name"], "root");
    }
}
