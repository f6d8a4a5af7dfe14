//! The lease on the data of a VM.

use super::*;

fn lease(operation: &str) -> Value {
    json!({"operation": {"operation": operation, "name": "o", "uid": "u"}})
}

#[test]
fn vm_starts_after_the_operation_that_holds_its_data() {
    for (operation, starts) in [("Snapshot", false), ("Restore", false), ("Hibernation", false), ("Export", true)] {
        let decision = decided(&with_strategy("Always", &lease(operation)), None);
        assert_eq!(creates(&decision), starts, "{operation}");
        let conditions = status_patch(&decision)["conditions"].to_string();
        assert_eq!(conditions.contains("\\\"o\\\" in progress"), !starts, "{operation}: {conditions}");
    }
}

#[test]
fn memory_dump_waits_for_the_lease_holds_it_and_releases_it() {
    let request = |phase: &str| json!({"memoryDumpRequest": {"claimName": "dump", "phase": phase}});
    let with = |mut status: Value, change: Value| {
        json_patch::merge(&mut status, &change);
        with_strategy("Always", &status)
    };
    for (vm, expected) in [
        (with(request("Associating"), json!({})), Some("MemoryDump")),
        (with(request("InProgress"), lease("MemoryDump")), None),
        (with(request("Completed"), lease("MemoryDump")), Some("")),
        (with(json!({}), lease("MemoryDump")), Some("")),
        (with(request("Associating"), lease("Snapshot")), None),
    ] {
        let decision = decided(&vm, Some(&instance(&vm, "Running")));
        let status = status_patch(&decision);
        let written = status.get("operation").map(|lease| lease["operation"].as_str().unwrap_or_default());
        assert_eq!(written, expected, "{:?}", vm.status);
        let attaches = decision.effects.iter().any(|effect| {
            matches!(effect, Effect::Patch { kind: Kind::Instance, patch, .. } if patch.to_string().contains("dump"))
        });
        let is_held = vm.status.as_ref().and_then(|status| status.snapshot_in_progress.as_ref()).is_some()
            || status["memoryDumpRequest"]["message"].as_str().is_some_and(|text| text.contains("snapshot"));
        assert!(!(attaches && is_held), "{decision:?}");
    }
}

#[test]
fn volumes_that_move_hold_the_lease() {
    let vm = with_strategy("Always", &Value::Null);
    let mut vmi = instance(&vm, "Running");
    vmi.status.as_mut().unwrap().migrated_volumes = serde_json::from_value(json!([{"volumeName": "a"}])).unwrap();
    let status = status_patch(&decided(&vm, Some(&vmi)));
    assert_eq!(status["operation"]["operation"], "VolumeMigration");
    let moved = with_strategy("Always", &lease("VolumeMigration"));
    let status = status_patch(&decided(&moved, Some(&instance(&moved, "Running"))));
    assert_eq!(status.get("operation"), Some(&Value::Null));
}

#[test]
fn volume_of_a_class_with_snapshots_can_be_snapshotted() {
    let volumes = json!([{"name": "data", "persistentVolumeClaim": {"claimName": "c"}}]);
    let vm = vm(&json!({"runStrategy": "Halted", "template": {"spec": {"volumes": volumes}}}), &Value::Null);
    let claim = Arc::new(CachedClaim { storage_class: Some("fast".to_owned()), ..CachedClaim::default() });
    for (class, expected) in [
        (Ok(Some("c".to_owned())), json!([true, null])),
        (
            Err("2 matching VolumeSnapshotClasses for d".to_owned()),
            json!([false, "2 matching VolumeSnapshotClasses for d"]),
        ),
    ] {
        let observed = Observed {
            claims: [("c".to_owned(), claim.clone())].into(),
            state_claim: Some(claim.clone()),
            snapshot_classes: [("fast".to_owned(), class)].into(),
            ..observed(&vm, None, None, &ClusterConfig::default())
        };
        let status = status_patch(&decide(&observed).unwrap());
        for (shown, name) in
            status["volumeSnapshotStatuses"].as_array().unwrap().iter().zip(["data", "persistent-state-for-v"])
        {
            assert_eq!((json!([shown["enabled"], shown["reason"]]), &shown["name"]), (expected.clone(), &json!(name)));
        }
    }
}
