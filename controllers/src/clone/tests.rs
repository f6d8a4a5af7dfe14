//! Tests of clones.

use k8s_openapi::api::core::v1::PersistentVolumeClaim;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};

use super::*;
use crate::runtime::Effect;

fn object<T: DeserializeOwned>(mut value: Value, change: &Value) -> Arc<T> {
    json_patch::merge(&mut value, change);
    Arc::new(serde_json::from_value(value).unwrap())
}

fn owner() -> Value {
    json!([{
        "apiVersion": "clone.kubevirt.io/v1beta1", "kind": "VirtualMachineClone", "name": "c", "uid": "clone-uid", "controller": true,
    }])
}

fn clone(change: &Value) -> Arc<VirtualMachineClone> {
    let reference = |name: &str| json!({"apiGroup": "kubevirt.io", "kind": "VirtualMachine", "name": name});
    let clone = json!({
        "apiVersion": "clone.kubevirt.io/v1beta1", "kind": "VirtualMachineClone",
        "metadata": {"name": "c", "namespace": "n", "uid": "clone-uid", "resourceVersion": "1"},
        "spec": {"source": reference("v"), "target": reference("w")},
    });
    object(clone, change)
}

fn spec() -> Value {
    json!({"runStrategy": "Halted", "template": {
        "metadata": {"labels": {"a": "b", "kubevirt.io/x": "y"}},
        "spec": {
            "domain": {
                "devices": {"interfaces": [{"name": "a"}, {"name": "b", "macAddress": "02:00:00:00:00:01"}]},
                "firmware": {"uuid": "u", "serial": "s"},
            },
            "volumes": [
                {"name": "disk", "persistentVolumeClaim": {"claimName": "disk"}},
                {"name": "dump", "memoryDump": {"claimName": "dump"}},
            ],
        },
    }})
}

fn vm(name: &str, change: &Value) -> Arc<VirtualMachine> {
    let vm = json!({
        "apiVersion": "kubevirt.io/v1", "kind": "VirtualMachine",
        "metadata": {"name": name, "namespace": "n", "uid": format!("uid-{name}")}, "spec": spec(),
        "status": {"volumeSnapshotStatuses": [{"name": "disk", "enabled": true}]},
    });
    object(vm, change)
}

fn snapshot(status: &Value) -> Arc<VirtualMachineSnapshot> {
    let snapshot = json!({
        "apiVersion": "snapshot.kubevirt.io/v1beta1", "kind": "VirtualMachineSnapshot",
        "metadata": {"name": "tmp-snapshot-clone-uid", "namespace": "n", "uid": "snapshot-uid", "ownerReferences": owner()},
        "spec": {"source": {"apiGroup": "kubevirt.io", "kind": "VirtualMachine", "name": "v"}}, "status": status,
    });
    object(snapshot, &json!({}))
}

fn content(volumes: &[&str]) -> Arc<VirtualMachineSnapshotContent> {
    let backup = |name: &&str| json!({"volumeName": name, "volumeSnapshotName": "x", "persistentVolumeClaim": {}});
    let backups: Vec<Value> = volumes.iter().map(backup).collect();
    let captured = json!({"metadata": {"name": "v", "labels": {"app": "x"}}, "spec": spec()});
    let spec = json!({"source": {"virtualMachine": captured}, "volumeBackups": backups});
    object(json!({"metadata": {"name": "content"}, "spec": spec}), &json!({}))
}

fn restore(status: &Value) -> Arc<VirtualMachineRestore> {
    let restore = json!({
        "apiVersion": "snapshot.kubevirt.io/v1beta1", "kind": "VirtualMachineRestore",
        "metadata": {"name": "tmp-restore-clone-uid", "namespace": "n", "uid": "restore-uid", "ownerReferences": owner()},
        "spec": {"target": {"kind": "VirtualMachine", "name": "w"}, "virtualMachineSnapshotName": "s"}, "status": status,
    });
    object(restore, &json!({}))
}

fn observed(change: &Value) -> Observed {
    Observed {
        clone: clone(change),
        source: Some(vm("v", &json!({}))),
        snapshot: None,
        content: None,
        restore: None,
        target: None,
        claims: BTreeMap::new(),
        missing_for: Some(MISSING),
        failure: None,
        now: "2030-01-01T00:01:00Z".parse().unwrap(),
    }
}

fn in_phase(phase: &str) -> Observed {
    observed(
        &json!({"status": {"phase": phase, "snapshotName": "tmp-snapshot-clone-uid", "restoreName": "tmp-restore-clone-uid"}}),
    )
}

/// Returns a clone whose snapshot is ready, and whose restore was not made.
fn restoring(clone: &VirtualMachineClone) -> Arc<VirtualMachineClone> {
    let status = json!({"phase": "RestoreInProgress", "snapshotName": snapshot_name(clone)});
    Arc::new(VirtualMachineClone { status: serde_json::from_value(status).unwrap(), ..clone.clone() })
}

fn effects(observed: &Observed) -> Vec<Effect> {
    decide(observed).unwrap().effects
}

/// Returns a decision as lines, and the status that it writes.
fn decided(observed: &Observed) -> (Vec<String>, Value) {
    let mut status = Value::Null;
    let mut line = |effect: Effect| match effect {
        Effect::Create { kind, object, .. } => {
            Some(format!("create {} {}", kind.kind(), object["metadata"]["name"].as_str().unwrap()))
        }
        Effect::Delete { kind, name, .. } => Some(format!("delete {} {name}", kind.kind())),
        Effect::Event(event) => Some(format!("event {}", event.reason)),
        Effect::Patch { kind: Kind::VmClone, subresource: Some("status"), patch, .. } => {
            status = patch["status"].clone();
            None
        }
        other => panic!("{other:?}"),
    };
    let lines = effects(observed).into_iter().filter_map(&mut line).collect();
    (lines, status)
}

fn created(observed: &Observed, of: Kind) -> Value {
    let created = effects(observed).into_iter().find_map(|effect| match effect {
        Effect::Create { kind, object, .. } if kind == of => Some(object),
        _ => None,
    });
    created.unwrap()
}

#[test]
fn snapshot_is_made_of_a_vm_whose_disks_have_snapshots() {
    let (lines, status) = decided(&observed(&json!({})));
    assert_eq!(lines, ["create VirtualMachineSnapshot tmp-snapshot-clone-uid"]);
    assert_eq!(
        (&status["phase"], &status["snapshotName"]),
        (&json!("SnapshotInProgress"), &json!("tmp-snapshot-clone-uid"))
    );
    let pending = |source: Option<Arc<VirtualMachine>>| {
        let observed = Observed { source, ..observed(&json!({})) };
        let (lines, status) = decided(&observed);
        assert_eq!((&status["phase"], &status["conditions"][0]["reason"]), (&Value::Null, &json!("Pending")));
        // The event is not repeated.
        let again = Observed { clone: clone(&json!({"status": status})), ..observed };
        assert_eq!(decided(&again), (vec![], Value::Null));
        // Clients of KubeVirt read the reason.
        assert_eq!(status["conditions"][1]["reason"], status["conditions"][1]["message"]);
        (lines, status["conditions"][1]["message"].as_str().unwrap().to_owned())
    };
    let none = || "Source doesnt exist: VirtualMachine n/v".to_owned();
    assert_eq!(pending(None), (vec!["event SourceDoesNotExist".to_owned()], none()));
    let invalid = vec!["event VMVolumeSnapshotsInvalid".to_owned()];
    for (statuses, text) in [
        (json!([]), "Virtual Machine volume disk snapshot support unknown"),
        (json!([{"name": "disk", "enabled": false}]), "Virtual Machine volume disk does not support snapshots"),
    ] {
        let vm = vm("v", &json!({"status": {"volumeSnapshotStatuses": statuses}}));
        assert_eq!(pending(Some(vm)), (invalid.clone(), text.to_owned()));
    }
    let two = ["a", "b"].map(|name| json!({"name": name, "persistentVolumeClaim": {"claimName": name}}));
    let vm = vm("v", &json!({"spec": {"template": {"spec": {"volumes": two}}}}));
    let text = "Virtual Machine volume a snapshot support unknown\nVirtual Machine volume b snapshot support unknown";
    assert_eq!(pending(Some(vm)), (invalid, text.to_owned()));
}

#[test]
fn vm_with_state_is_not_cloned() {
    let spec = |domain: Value| json!({"spec": {"template": {"spec": {"domain": domain}}}});
    let statuses = |names: &[&str]| {
        let known: Vec<Value> = names.iter().map(|name| json!({"name": name, "enabled": *name == "disk"})).collect();
        json!({"status": {"volumeSnapshotStatuses": known}})
    };
    for (change, fails) in [
        (spec(json!({"devices": {"tpm": {"persistent": true}}})), true),
        (spec(json!({"firmware": {"bootloader": {"efi": {"persistent": true}}}})), true),
        (statuses(&["disk", "persistent-state-for-v"]), true),
        (statuses(&["disk", "persistent-state-for-w"]), false),
        (spec(json!({"devices": {"tpm": {}}})), false),
    ] {
        let observed = Observed { source: Some(vm("v", &change)), ..observed(&json!({})) };
        let (lines, status) = decided(&observed);
        if fails {
            assert_eq!(lines, ["event SourceVMWithBackendStorageInvalid"], "{change}");
            assert_eq!(
                (&status["phase"], &status["conditions"][1]["message"]),
                (&json!("Failed"), &json!("Clone of source with backendstorage is not supported: VM n/v"))
            );
        } else {
            assert_eq!(lines, ["create VirtualMachineSnapshot tmp-snapshot-clone-uid"], "{change}");
        }
    }
}

#[test]
fn ready_snapshot_is_restored_with_the_differences() {
    let mut observed = observed(&json!({
        "spec": {
            "newMacAddresses": {"a": "02:00:00:00:00:09", "b": ""}, "labelFilters": ["!app"],
            "volumeNamePolicy": "PrefixTargetName", "template": {"labelFilters": ["kubevirt.io/*"]}, "patches": ["{}"],
        },
        "status": {"phase": "SnapshotInProgress", "snapshotName": "tmp-snapshot-clone-uid"},
    }));
    observed.snapshot = Some(snapshot(&json!({"phase": "InProgress", "readyToUse": false})));
    assert!(decided(&observed).0.is_empty());
    (observed.snapshot, observed.content) = (Some(snapshot(&json!({"readyToUse": true}))), Some(content(&["disk"])));
    let (lines, status) = decided(&observed);
    assert_eq!(lines, ["event SnapshotReady"]);
    assert_eq!((&status["phase"], &status["restoreName"]), (&json!("RestoreInProgress"), &Value::Null));
    observed.clone = restoring(&observed.clone);
    let (lines, status) = decided(&observed);
    assert_eq!(lines, ["create VirtualMachineRestore tmp-restore-clone-uid", "event RestoreCreated"]);
    assert_eq!(status["restoreName"], "tmp-restore-clone-uid");
    let spec = created(&observed, Kind::VmRestore)["spec"].clone();
    assert_eq!(spec["target"], json!({"apiGroup": "kubevirt.io", "kind": "VirtualMachine", "name": "w"}));
    assert_eq!(
        (&spec["volumeRestorePolicy"], &spec["virtualMachineSnapshotName"]),
        (&json!("PrefixTargetName"), &json!("tmp-snapshot-clone-uid"))
    );
    let template = "/spec/template";
    let patches = [
        json!({"op": "replace", "path": format!("{template}/spec/domain/devices/interfaces/0/macAddress"), "value": "02:00:00:00:00:09"}),
        json!({"op": "remove", "path": format!("{template}/spec/domain/devices/interfaces/1/macAddress")}),
        json!({"op": "remove", "path": format!("{template}/spec/domain/firmware/serial")}),
        json!({"op": "remove", "path": format!("{template}/spec/domain/firmware/uuid")}),
        json!({"op": "remove", "path": format!("{template}/metadata/labels/a")}),
        json!({"op": "remove", "path": "/metadata/labels/app"}),
        json!({}),
    ];
    assert_eq!(spec["patches"], json!(patches.map(|patch| patch.to_string())));
}

#[test]
fn clone_fails_with_its_snapshot_and_its_restore() {
    let failure = json!([{"type": "Failure", "status": "True", "reason": "why"}]);
    let ready = || (Some(snapshot(&json!({"readyToUse": true}))), Some(content(&["disk"])));
    let with = |phase: &str, change: &dyn Fn(&mut Observed)| {
        let mut observed = in_phase(phase);
        (observed.snapshot, observed.content) = ready();
        change(&mut observed);
        let (lines, status) = decided(&observed);
        assert_eq!((&status["phase"], &status["conditions"][0]["reason"]), (&json!("Failed"), &json!("Failed")));
        assert_eq!(status["conditions"][1]["reason"], status["conditions"][1]["message"]);
        // Nothing temporary is left.
        let left = usize::from(observed.snapshot.is_some()) + usize::from(observed.restore.is_some());
        assert_eq!(lines.iter().filter(|line| line.starts_with("delete")).count(), left, "{lines:?}");
        (lines.last().unwrap().clone(), status["conditions"][1]["message"].as_str().unwrap().to_owned())
    };
    let (taking, restoring) = ("SnapshotInProgress", "RestoreInProgress");
    for (found, event, text) in [
        (
            with(taking, &|o| o.snapshot = None),
            "SnapshotDeleted",
            "snapshot tmp-snapshot-clone-uid does not exist anymore",
        ),
        (
            with(taking, &|o| o.snapshot = Some(snapshot(&json!({"phase": "Failed", "conditions": failure})))),
            "SnapshotFailed",
            "snapshot tmp-snapshot-clone-uid failed: why",
        ),
        (
            with(taking, &|o| o.content = Some(content(&[]))),
            "SnapshotContentInvalid",
            "volume disk is not backed up in snapshot tmp-snapshot-clone-uid",
        ),
        (
            with(taking, &|o| o.content = Some(content(&["disk", "persistent-state-for-v"]))),
            "SnapshotContentInvalid",
            "Clone of source with backendstorage is not supported: snapshot n/tmp-snapshot-clone-uid",
        ),
        (with(restoring, &|_| {}), "RestoreDeleted", "restore tmp-restore-clone-uid does not exist anymore"),
        (
            with(restoring, &|o| (o.snapshot, o.restore) = (None, Some(restore(&json!({"complete": false}))))),
            "SnapshotDeleted",
            "snapshot tmp-snapshot-clone-uid does not exist anymore",
        ),
        (
            with(restoring, &|o| o.restore = Some(restore(&json!({"complete": false, "conditions": failure})))),
            "RestoreFailed",
            "restore tmp-restore-clone-uid failed: why",
        ),
        (with("CreatingTargetVM", &|_| {}), "TargetVMDeleted", "target VM w does not exist anymore"),
    ] {
        assert_eq!(found, (format!("event {event}"), text.to_owned()));
    }
}

#[test]
fn restore_is_made_once() {
    let mut observed = in_phase("RestoreInProgress");
    observed.clone = restoring(&observed.clone);
    (observed.snapshot, observed.content) = (Some(snapshot(&json!({"readyToUse": true}))), Some(content(&["disk"])));
    let made = ["create VirtualMachineRestore tmp-restore-clone-uid", "event RestoreCreated"];
    assert_eq!((decided(&observed).0, observed.missing()), (made.map(str::to_owned).to_vec(), None));
    // It is not made again if its name was not recorded, and a snapshot that is not ready any more is awaited.
    observed.restore = Some(restore(&json!({"complete": false})));
    let (lines, status) = decided(&observed);
    assert_eq!((lines, &status["restoreName"]), (vec![], &json!("tmp-restore-clone-uid")));
    (observed.restore, observed.content) = (None, None);
    let (lines, status) = decided(&observed);
    assert_eq!((lines, &status["phase"], &status["restoreName"]), (vec![], &Value::Null, &Value::Null));
    // A clone whose snapshot was deleted has nothing to restore.
    observed.snapshot = None;
    let lines = decided(&observed).0;
    assert_eq!((lines, observed.missing()), (vec!["event SnapshotDeleted".to_owned()], Some("snapshot")));
}

#[test]
fn missing_object_is_awaited_for_some_seconds() {
    for phase in ["SnapshotInProgress", "RestoreInProgress", "CreatingTargetVM", "Succeeded"] {
        let mut observed = in_phase(phase);
        assert!(!effects(&observed).is_empty(), "{phase}");
        observed.missing_for = Some(Duration::from_secs(9));
        let decision = decide(&observed).unwrap();
        assert_eq!((decision.effects, decision.wake_after), (vec![], Some(Duration::from_secs(1))), "{phase}");
    }
    // A restore needs its snapshot until it has ended.
    for (complete, missing) in [(true, None), (false, Some("snapshot"))] {
        let mut observed = in_phase("RestoreInProgress");
        observed.restore = Some(restore(&json!({"complete": complete})));
        observed.missing_for = missing.map(|_| Duration::from_secs(9));
        assert_eq!((observed.missing(), effects(&observed).is_empty()), (missing, missing.is_some()));
    }
}

#[test]
fn clone_fails_when_a_part_of_its_snapshot_stays_away() {
    let error = json!({"message": "gone", "time": "2030-01-01T00:00:00Z"});
    let broken = |phase: &str| Some(snapshot(&json!({"phase": phase, "readyToUse": false, "error": error})));
    let with = |names: &[&str]| {
        let mut known = (*content(&["disk"])).clone();
        let shown: Vec<Value> = names.iter().map(|name| json!({"volumeSnapshotName": name})).collect();
        known.status = serde_json::from_value(json!({"volumeSnapshotStatus": shown})).unwrap();
        Some(Arc::new(known))
    };
    for (phase, content, minutes, fails) in [
        ("Succeeded", None, 4, false),
        ("Succeeded", None, 5, true),
        ("Succeeded", with(&[]), 5, true),
        // The storage can take its time, and an error can pass.
        ("Succeeded", with(&["x"]), 5, false),
        // It is made again.
        ("InProgress", None, 5, false),
    ] {
        let mut observed = in_phase("SnapshotInProgress");
        (observed.snapshot, observed.content) = (broken(phase), content);
        observed.now = format!("2030-01-01T00:0{minutes}:00Z").parse().unwrap();
        let (_, status) = decided(&observed);
        assert_eq!(status["phase"] == "Failed", fails, "{phase} {minutes}");
        if fails {
            assert_eq!(status["conditions"][1]["message"], "snapshot tmp-snapshot-clone-uid failed: gone");
        }
    }
}

#[test]
fn clone_of_a_snapshot_keeps_it() {
    let source = json!({"apiGroup": "snapshot.kubevirt.io", "kind": "VirtualMachineSnapshot", "name": "mine"});
    let mut observed = observed(&json!({"spec": {"source": source}}));
    observed.source = None;
    assert_eq!(decided(&observed).0, ["event SourceDoesNotExist"]);
    let mine = json!({
        "metadata": {"name": "mine", "namespace": "n"}, "status": {"readyToUse": true},
        "spec": {"source": {"kind": "VirtualMachine", "name": "v"}},
    });
    (observed.snapshot, observed.content) = (Some(object(mine, &json!({}))), Some(content(&["disk"])));
    assert_eq!(decided(&observed).0, ["event SnapshotReady"]);
    observed.clone = restoring(&observed.clone);
    assert_eq!(created(&observed, Kind::VmRestore)["spec"]["virtualMachineSnapshotName"], "mine");
    observed.clone = clone(&json!({"spec": {"source": source}, "status": {"phase": "Succeeded", "restoreName": "r"}}));
    (observed.restore, observed.target) = (Some(restore(&json!({"complete": true}))), Some(vm("w", &json!({}))));
    assert_eq!(decided(&observed).0, ["delete VirtualMachineRestore tmp-restore-clone-uid", "event PVCBound"]);
}

#[test]
fn snapshot_and_restore_stay_until_the_claims_are_bound() {
    let mut observed = in_phase("RestoreInProgress");
    observed.restore = Some(restore(&json!({"complete": true})));
    let (lines, status) = decided(&observed);
    assert_eq!((lines, &status["phase"]), (vec!["event RestoreReady".to_owned()], &json!("CreatingTargetVM")));
    let mut observed = in_phase("CreatingTargetVM");
    observed.target = Some(vm("w", &json!({})));
    let (lines, status) = decided(&observed);
    assert_eq!(
        (lines, &status["phase"], &status["targetName"]),
        (vec!["event TargetVMCreated".to_owned()], &json!("Succeeded"), &json!("w"))
    );
    let mut observed = in_phase("Succeeded");
    observed.snapshot = Some(snapshot(&json!({"readyToUse": true})));
    (observed.restore, observed.target) = (Some(restore(&json!({"complete": true}))), Some(vm("w", &json!({}))));
    let claim = |phase: &str| {
        let claim: Arc<PersistentVolumeClaim> =
            object(json!({"metadata": {"name": "p"}, "status": {"phase": phase}}), &json!({}));
        BTreeMap::from([("p".to_owned(), Arc::new((*claim).clone().into()))])
    };
    observed.claims = claim("Pending");
    assert!(decided(&observed).0.is_empty());
    observed.claims = claim("Bound");
    let (lines, status) = decided(&observed);
    assert_eq!(
        lines,
        [
            "delete VirtualMachineRestore tmp-restore-clone-uid",
            "delete VirtualMachineSnapshot tmp-snapshot-clone-uid",
            "event PVCBound",
        ]
    );
    assert_eq!((&status["restoreName"], &status["snapshotName"]), (&Value::Null, &Value::Null));
    // The clone goes with the VM that it made.
    observed.target = None;
    assert_eq!(decided(&observed).0, ["delete VirtualMachineClone c"]);
}

#[test]
fn refusals_end_the_clone_when_they_stay() {
    let mut observed = observed(&json!({}));
    for (attempts, wait, lines) in [(1, 10, 0), (1, 0, 1), (ATTEMPTS, 10, 1)] {
        let retry_at = observed.now + jiff::SignedDuration::from_secs(wait);
        observed.failure = Some(Failure { reason: REFUSED, message: "denied".to_owned(), retry_at, attempts });
        assert_eq!(decided(&observed).0.len(), lines);
        assert_eq!(decided(&observed).1["phase"] == "Failed", attempts == ATTEMPTS);
    }
}

#[test]
fn target_without_a_name_gets_one_of_the_clone() {
    assert_eq!(target_name(&clone(&json!({"spec": {"target": null}}))), "v-clone-e-uid");
    assert_eq!(target_name(&clone(&json!({}))), "w");
}
