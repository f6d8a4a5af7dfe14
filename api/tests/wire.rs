//! Checks the wire format of the types: objects with every field set are read and written without loss.

#![allow(clippy::unwrap_used, reason = "a test ends here")]

use api::{
    KubeVirt, MigrationPolicy, VirtualMachine, VirtualMachineInstance, VirtualMachineInstanceMigration,
    VirtualMachineInstancePreset, VirtualMachinePool,
    backup::{VirtualMachineBackup, VirtualMachineBackupTracker},
    clone::VirtualMachineClone,
    export::VirtualMachineExport,
    instancetype::{
        VirtualMachineClusterInstancetype, VirtualMachineClusterPreference, VirtualMachineInstancetype,
        VirtualMachinePreference,
    },
    plugin::Plugin,
    snapshot::{VirtualMachineSnapshot, content::VirtualMachineSnapshotContent, restore::VirtualMachineRestore},
};
use serde::{Serialize, de::DeserializeOwned};
use serde_json::{Value, json};

/// Brings the arbitrary numbers of the examples into the range of real objects.
fn tame(value: &mut Value) {
    match value {
        Value::Array(items) => items.iter_mut().for_each(tame),
        Value::Object(fields) => {
            // Old form of self links, no longer part of object metadata.
            if fields.contains_key("resourceVersion") {
                fields.remove("selfLink");
            }
            fields.values_mut().for_each(tame);
        }
        Value::Number(number) if number.as_i64().is_none() => *value = json!(12),
        _ => {}
    }
}

/// Lists the differences between `before` and `after`.
fn differences(path: &str, before: &Value, after: &Value, found: &mut Vec<String>) {
    match (before, after) {
        (Value::Object(before), Value::Object(after)) => {
            for key in before.keys().chain(after.keys().filter(|key| !before.contains_key(*key))) {
                let path = format!("{path}.{key}");
                match (before.get(key), after.get(key)) {
                    (Some(before), Some(after)) => differences(&path, before, after, found),
                    (Some(before), None) => found.push(format!("{path} lost: {before}")),
                    (None, _) => found.push(format!("{path} appeared")),
                }
            }
        }
        (Value::Array(before), Value::Array(after)) if before.len() == after.len() => {
            for (index, (before, after)) in before.iter().zip(after).enumerate() {
                differences(&format!("{path}[{index}]"), before, after, found);
            }
        }
        _ if before == after => {}
        // 3 and 3.0 are the same number on the wire.
        (Value::Number(a), Value::Number(b)) if a.as_f64() == b.as_f64() => {}
        _ => found.push(format!("{path}: {before} became {after}")),
    }
}

fn round_trip<T: DeserializeOwned + Serialize>(text: &str) {
    let mut before: Value = serde_json::from_str(text).unwrap();
    tame(&mut before);
    let object: T = serde_json::from_value(before.clone()).unwrap();
    let after = serde_json::to_value(&object).unwrap();
    let mut found = vec![];
    differences("", &before, &after, &mut found);
    assert!(found.is_empty(), "{}", found.join("\n"));
}

#[test]
fn kubevirt_survives() {
    round_trip::<KubeVirt>(include_str!("data/kubevirt.json"));
}

#[test]
fn virtual_machine_survives() {
    round_trip::<VirtualMachine>(include_str!("data/virtualmachine.json"));
}

#[test]
fn virtual_machine_instance_survives() {
    round_trip::<VirtualMachineInstance>(include_str!("data/virtualmachineinstance.json"));
}

#[test]
fn snapshot_survives() {
    round_trip::<VirtualMachineSnapshot>(include_str!("data/virtualmachinesnapshot.json"));
}

#[test]
fn snapshot_content_survives() {
    round_trip::<VirtualMachineSnapshotContent>(include_str!("data/virtualmachinesnapshotcontent.json"));
}

#[test]
fn restore_survives() {
    round_trip::<VirtualMachineRestore>(include_str!("data/virtualmachinerestore.json"));
}

#[test]
fn export_survives() {
    round_trip::<VirtualMachineExport>(include_str!("data/virtualmachineexport.json"));
}

#[test]
fn clone_survives() {
    round_trip::<VirtualMachineClone>(include_str!("data/virtualmachineclone.json"));
}

#[test]
fn backup_survives() {
    round_trip::<VirtualMachineBackup>(include_str!("data/virtualmachinebackup.json"));
}

#[test]
fn backup_tracker_survives() {
    round_trip::<VirtualMachineBackupTracker>(include_str!("data/virtualmachinebackuptracker.json"));
}

#[test]
fn plugin_survives() {
    round_trip::<Plugin>(include_str!("data/plugin.json"));
}

#[test]
fn migration_survives() {
    round_trip::<VirtualMachineInstanceMigration>(include_str!("data/virtualmachineinstancemigration.json"));
}

#[test]
fn preset_survives() {
    round_trip::<VirtualMachineInstancePreset>(include_str!("data/virtualmachineinstancepreset.json"));
}

#[test]
fn pool_survives() {
    round_trip::<VirtualMachinePool>(include_str!("data/virtualmachinepool.json"));
}

#[test]
fn migration_policy_survives() {
    round_trip::<MigrationPolicy>(include_str!("data/migrationpolicy.json"));
}

/// Returns the properties of a schema that a sample does not set, except those below `shared` fields, which have their own
/// samples.
fn unset(path: &str, schema: &Value, sample: Option<&Value>, shared: &[&str], found: &mut Vec<String>) {
    let Some(sample) = sample else {
        found.push(path.to_owned());
        return;
    };
    if let Some(items) = schema.get("items") {
        unset(&format!("{path}[]"), items, sample.get(0), shared, found);
    }
    for (name, inner) in schema.get("properties").and_then(Value::as_object).into_iter().flatten() {
        if !shared.contains(&name.as_str()) {
            unset(&format!("{path}.{name}"), inner, sample.get(name), shared, found);
        }
    }
}

#[test]
fn samples_set_every_field() {
    let crds = api::crds::all().unwrap();
    for (kind, text, shared) in [
        (
            "VirtualMachineInstanceMigration",
            include_str!("data/virtualmachineinstancemigration.json"),
            &["metadata"][..],
        ),
        (
            "VirtualMachineInstancePreset",
            include_str!("data/virtualmachineinstancepreset.json"),
            &["metadata", "domain"],
        ),
        ("VirtualMachinePool", include_str!("data/virtualmachinepool.json"), &["metadata"]),
        ("MigrationPolicy", include_str!("data/migrationpolicy.json"), &["metadata"]),
        ("VirtualMachineSnapshot", include_str!("data/virtualmachinesnapshot.json"), &["metadata"]),
        ("VirtualMachineRestore", include_str!("data/virtualmachinerestore.json"), &["metadata"]),
        ("VirtualMachineExport", include_str!("data/virtualmachineexport.json"), &["metadata"]),
        ("VirtualMachineClone", include_str!("data/virtualmachineclone.json"), &["metadata"]),
        ("VirtualMachineBackup", include_str!("data/virtualmachinebackup.json"), &["metadata"]),
        ("VirtualMachineBackupTracker", include_str!("data/virtualmachinebackuptracker.json"), &["metadata"]),
        (
            "VirtualMachineSnapshotContent",
            include_str!("data/virtualmachinesnapshotcontent.json"),
            &["metadata", "virtualMachine", "persistentVolumeClaim"],
        ),
        ("Plugin", include_str!("data/plugin.json"), &["metadata", "sidecar"]),
        ("VirtualMachineInstancetype", include_str!("data/virtualmachineinstancetype.json"), &["metadata"]),
        ("VirtualMachinePreference", include_str!("data/virtualmachinepreference.json"), &["metadata"]),
    ] {
        let stored = crds.iter().find(|crd| crd.spec.names.kind == kind).unwrap();
        let mut schema = json!(stored.spec.versions[0].schema)["openAPIV3Schema"].take();
        if let Some(template) = schema.pointer_mut("/properties/spec/properties/virtualMachineTemplate/properties") {
            // The spec of VMs has its own sample.
            template["spec"] = json!({});
        }
        let sample: Value = serde_json::from_str(text).unwrap();
        let mut found = vec![];
        unset("", &schema, Some(&sample), shared, &mut found);
        assert!(found.is_empty(), "{kind}: {}", found.join(", "));
    }
}

#[test]
fn instance_types_survive() {
    let text = include_str!("data/virtualmachineinstancetype.json");
    round_trip::<VirtualMachineInstancetype>(text);
    round_trip::<VirtualMachineClusterInstancetype>(
        &text.replace("VirtualMachineInstancetype", "VirtualMachineClusterInstancetype"),
    );
}

#[test]
fn preferences_survive() {
    let text = include_str!("data/virtualmachinepreference.json");
    round_trip::<VirtualMachinePreference>(text);
    round_trip::<VirtualMachineClusterPreference>(
        &text.replace("VirtualMachinePreference", "VirtualMachineClusterPreference"),
    );
}

#[test]
fn structs_the_api_always_shows_are_always_written() {
    let vmi = VirtualMachineInstance::default();
    assert_eq!(
        serde_json::to_value(&vmi).unwrap(),
        json!({
            "apiVersion": "kubevirt.io/v1",
            "kind": "VirtualMachineInstance",
            "metadata": {},
            "spec": {"domain": {"devices": {}, "resources": {}}},
        })
    );
}
