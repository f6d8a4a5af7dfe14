use std::collections::BTreeSet;

use serde_json::{Value, json};

use super::*;
use crate::{context::ErrorType, rules::testing::vmi_spec};

fn refused(change: Value) -> Vec<String> {
    let mut errors = FieldErrors::new();
    spec("spec", &vmi_spec(change), &ClusterConfig::default(), &mut errors);
    assert!(errors.as_slice().iter().all(|error| error.type_ == Some(ErrorType::FieldValueNotSupported)));
    errors.as_slice().iter().map(|error| error.field.clone()).collect()
}

#[test]
fn supported_fields_are_accepted() {
    for change in [
        json!({}),
        json!({"evictionStrategy": "LiveMigrate"}),
        json!({"evictionStrategy": "LiveMigrateIfPossible"}),
        json!({"evictionStrategy": "External"}),
        json!({"domain": {"cpu": {"sockets": 2, "maxSockets": 4}}}),
        json!({"domain": {"cpu": {"dedicatedCpuPlacement": true, "isolateEmulatorThread": true, "realtime": {}}}}),
        json!({"domain": {"memory": {"guest": "1Gi", "maxGuest": "2Gi"}}}),
        json!({"domain": {"devices": {"tpm": {"enabled": false}}}}),
        json!({"domain": {"devices": {"tpm": {}}}}),
        json!({"domain": {"devices": {"tpm": {"persistent": true}}}}),
        json!({"domain": {"firmware": {"bootloader": {"efi": {"secureBoot": false, "persistent": true}}}}}),
        json!({"domain": {"devices": {"clientPassthrough": {}}}}),
        json!({"domain": {"devices": {"hostDevices": [{"name": "h", "deviceName": "v/h"}]}}}),
        json!({"domain": {"devices": {"gpus": [
            {"name": "g", "deviceName": "v/g", "virtualGPUOptions": {"display": {"enabled": false}}},
        ]}}}),
        json!({"domain": {"devices": {"interfaces": [{"name": "default", "bridge": {}}]}}}),
        json!({"networks": [{"name": "default", "multus": {"networkName": "n", "default": true}}]}),
        json!({"domain": {"firmware": {"bootloader": {"efi": {"secureBoot": false}}}}}),
        json!({"volumes": [
            {"name": "a", "cloudInitConfigDrive": {"userData": "x"}},
            {"name": "b", "ephemeral": {"persistentVolumeClaim": {"claimName": "c"}}},
            {"name": "c", "sysprep": {"secret": {"name": "s"}}},
            {"name": "d", "downwardAPI": {}},
        ]}),
    ] {
        assert_eq!(refused(change.clone()), Vec::<String>::new(), "{change}");
    }
}

#[test]
fn each_entry_names_its_field() {
    let devices = |devices: Value| json!({"domain": {"devices": devices}});
    let disk = |disk: Value| json!({"domain": {"devices": {"disks": [disk]}}});
    let interface = |interface: Value| json!({"domain": {"devices": {"interfaces": [interface]}}});
    let volume = |source: Value| json!({"volumes": [source]});
    let mut named = BTreeSet::new();
    for (change, field) in [
        (json!({"architecture": "s390x"}), "architecture"),
        (json!({"domain": {"launchSecurity": {"sev": {}}}}), "domain.launchSecurity"),
        (devices(json!({"gpus": [{"name": "g", "claimName": "c"}]})), "domain.devices.gpus[0].claimName"),
        (
            devices(json!({"hostDevices": [{"name": "h", "requestName": "r"}]})),
            "domain.devices.hostDevices[0].claimName",
        ),
        (
            devices(json!({"gpus": [{"name": "g", "deviceName": "v/g", "virtualGPUOptions": {"display": {}}}]})),
            "domain.devices.gpus[0].virtualGPUOptions.display",
        ),
        (json!({"resourceClaims": [{"name": "r"}]}), "resourceClaims[0]"),
        (disk(json!({"name": "root", "lun": {"reservation": true}})), "domain.devices.disks[0].lun.reservation"),
        (disk(json!({"name": "root", "changedBlockTracking": true})), "domain.devices.disks[0].changedBlockTracking"),
        (interface(json!({"name": "default", "sriov": {}})), "domain.devices.interfaces[0].sriov"),
        (interface(json!({"name": "default", "passtBinding": {}})), "domain.devices.interfaces[0].passtBinding"),
        (interface(json!({"name": "default", "binding": {"name": "b"}})), "domain.devices.interfaces[0].binding"),
        (json!({"networks": [{"name": "default", "resourceClaim": {}}]}), "networks[0].resourceClaim"),
        (volume(json!({"name": "root", "containerPath": {"path": "/p"}})), "volumes[0].containerPath.readOnly"),
        (
            json!({"volumes": [{"name": "a", "cloudInitNoCloud": {}}, {"name": "b", "cloudInitConfigDrive": {}}]}),
            "volumes[1]",
        ),
    ] {
        assert_eq!(refused(change.clone()), [format!("spec.{field}")], "{change}");
        named.insert(field.replace("[0]", "[]").replace("[1]", "[]"));
    }
    let reasoned = fields::FIELDS.iter().filter(|field| field.refusal.is_some_and(|refusal| refusal.reason.is_some()));
    let documented: BTreeSet<String> = reasoned.map(|field| field.path.to_owned()).collect();
    assert_eq!(named, documented, "the rows above and the fields for documents");
}

#[test]
fn unsupported_fields_of_a_vm_are_refused() {
    let refused = |spec: Value| super::vm("spec", &serde_json::from_value(spec).unwrap());
    for strategy in ["", "Replacement", "Migration"] {
        assert!(refused(json!({"template": {}, "updateVolumesStrategy": strategy})).is_empty(), "{strategy}");
    }
    let spec = json!({"template": {}, "updateVolumesStrategy": "Copy"});
    assert_eq!(refused(spec).as_slice()[0].field, "spec.updateVolumesStrategy");
}

#[test]
fn hot_plugged_claims_are_supported() {
    for source in [
        json!({"name": "root", "persistentVolumeClaim": {"claimName": "c", "hotpluggable": true}}),
        json!({"name": "root", "dataVolume": {"name": "c", "hotpluggable": true}}),
    ] {
        assert!(refused(json!({"volumes": [source]})).is_empty(), "{source}");
    }
}

#[test]
fn only_added_volumes_and_disks_are_checked() {
    let spec = |disks: Value| -> VirtualMachineInstanceSpec {
        serde_json::from_value(json!({"domain": {"devices": {"disks": disks}}})).unwrap()
    };
    let tracked = |name: &str| json!({"name": name, "changedBlockTracking": true, "disk": {"bus": "scsi"}});
    let old = spec(json!([tracked("a")]));
    for (new, expected) in [(json!([tracked("a")]), 0), (json!([tracked("a"), tracked("b")]), 1)] {
        let mut errors = FieldErrors::new();
        added_volumes("spec", &spec(new.clone()), &old, &mut errors);
        assert_eq!(errors.as_slice().len(), expected, "{new}");
    }
}
