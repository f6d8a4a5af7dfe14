//! DataVolumes of another VM, and of a former one of the same name.

use super::*;

#[test]
fn data_volume_of_a_former_vm_is_awaited_and_that_of_another_is_an_error() {
    let template = json!({"metadata": {"name": "root"}, "spec": {"source": {"blank": {}}, "storage": {}}});
    let vm = vm(&json!({"runStrategy": "Always", "dataVolumeTemplates": [template]}), &Value::Null);
    let awaited = "the former DataVolume or its claim is being deleted";
    // Kind, name and UID of the controller; printable status, text in the conditions.
    for (kind, name, uid, printable, text) in [
        ("VirtualMachine", "v", "former", "Provisioning", awaited),
        ("VirtualMachine", "other", "former", "DataVolumeError", "it belongs to VirtualMachine other"),
        ("VirtualMachineInstance", "v", "former", "DataVolumeError", "it belongs to VirtualMachineInstance v"),
    ] {
        let owner = json!({"apiVersion": "kubevirt.io/v1", "kind": kind, "name": name, "uid": uid, "controller": true});
        let metadata = json!({"name": "root", "namespace": "d", "uid": "dv", "ownerReferences": [owner]});
        let present = json!({"metadata": metadata, "spec": {}, "status": {"phase": "Succeeded"}});
        let present: DataVolume = serde_json::from_value(present).unwrap();
        let decision = decide(&Observed {
            data_volumes: [("root".to_owned(), Arc::new(present))].into(),
            ..observed(&vm, None, None, &ClusterConfig::default())
        })
        .unwrap();
        let is_created = |effect: &Effect| matches!(effect, Effect::CreateDataVolume { .. });
        assert!(!creates(&decision) && !decision.effects.iter().any(is_created), "{kind} {name}");
        let status = status_patch(&decision);
        assert_eq!(status["printableStatus"], printable, "{kind} {name}");
        let conditions = status["conditions"].to_string();
        assert!(conditions.contains(text), "{kind} {name} {conditions}");
        let has_failed = conditions.contains("Failure");
        assert_eq!(has_failed, printable == "DataVolumeError", "{kind} {name} {conditions}");
    }
}
