//! Tests of restores.

mod care;
mod end;
mod replace;
mod vms;

use k8s_openapi::api::core::v1::PersistentVolumeClaim;
use serde::de::DeserializeOwned;

use super::*;

const ID: &str = "r-restore-uid";

fn object<T: DeserializeOwned>(mut value: Value, change: &Value) -> Arc<T> {
    json_patch::merge(&mut value, change);
    Arc::new(serde_json::from_value(value).unwrap())
}

fn restore(change: &Value) -> Arc<VirtualMachineRestore> {
    let restore = json!({
        "apiVersion": "snapshot.kubevirt.io/v1beta1", "kind": "VirtualMachineRestore",
        "metadata": {
            "name": "r", "namespace": "n", "uid": "restore-uid", "resourceVersion": "1",
            "creationTimestamp": "2030-01-01T00:00:00Z", "finalizers": ["snapshot.kubevirt.io/vmrestore-protection"],
        },
        "spec": {
            "target": {"apiGroup": "kubevirt.io", "kind": "VirtualMachine", "name": "v"},
            "virtualMachineSnapshotName": "s",
        },
        "status": {"complete": false},
    });
    object(restore, change)
}

/// Returns the spec of a VM with a disk of a template and one of a claim.
fn spec(strategy: &str) -> Value {
    json!({
        "runStrategy": strategy,
        "dataVolumeTemplates": [{"metadata": {"name": "root"}, "spec": {"source": {"blank": {}}}}],
        "template": {"spec": {
            "domain": {"devices": {"interfaces": [{"name": "default", "macAddress": "02:00:00:00:00:01"}]}},
            "volumes": [
                {"name": "root", "dataVolume": {"name": "root"}},
                {"name": "data", "persistentVolumeClaim": {"claimName": "data"}},
                {"name": "seed", "cloudInitNoCloud": {"userData": "x"}},
            ],
        }},
    })
}

fn vm(change: &Value) -> Arc<VirtualMachine> {
    let vm = json!({
        "apiVersion": "kubevirt.io/v1", "kind": "VirtualMachine",
        "metadata": {"name": "v", "namespace": "n", "uid": "vm-uid", "resourceVersion": "1"},
        "spec": spec("Manual"),
        "status": {"operation": {"operation": "Restore", "name": "r", "uid": "restore-uid"}, "restoreInProgress": "r"},
    });
    object(vm, change)
}

fn claim(name: &str, phase: &str, change: &Value) -> (String, Arc<CachedClaim>) {
    let claim = json!({
        "metadata": {"name": name, "namespace": "n", "uid": format!("uid-{name}"), "resourceVersion": "1"},
        "spec": {"storageClassName": "fast"}, "status": {"phase": phase},
    });
    let claim: Arc<PersistentVolumeClaim> = object(claim, change);
    (name.to_owned(), Arc::new((*claim).clone().into()))
}

fn own() -> Value {
    json!({"metadata": {"annotations": {"restore.kubevirt.io/lastRestoreUID": ID, "restore.kubevirt.io/name": "r"}}})
}

fn backup(volume: &str) -> Value {
    json!({
        "volumeName": volume, "volumeSnapshotName": format!("snap-{volume}"),
        "persistentVolumeClaim": {
            "metadata": {
                "name": volume, "labels": {"app": "x"},
                "annotations": {
                    "a": "b", "pv.kubernetes.io/bind-completed": "yes", "ferrovirt.io/import": "u",
                    "restore.kubevirt.io/owned-by-vm": "former",
                },
                "ownerReferences": [{"apiVersion": "kubevirt.io/v1", "kind": "VirtualMachine", "name": "v", "uid": "vm-uid"}],
            },
            "spec": {
                "accessModes": ["ReadWriteOnce"], "storageClassName": "fast", "volumeMode": "Block", "volumeName": "pv-1",
                "resources": {"requests": {"storage": "1Mi"}},
            },
        },
    })
}

/// Returns a restore of a VM with two disks that holds the lease.
fn observed(change: &Value) -> Observed {
    let snapshot = json!({
        "metadata": {"name": "s", "namespace": "n"},
        "spec": {"source": {"apiGroup": "kubevirt.io", "kind": "VirtualMachine", "name": "v"}},
        "status": {"phase": "Succeeded", "readyToUse": true, "sourceUID": "vm-uid", "virtualMachineSnapshotContentName": "c"},
    });
    let content = json!({
        "metadata": {"name": "c", "namespace": "n"},
        "spec": {
            "virtualMachineSnapshotName": "s",
            "source": {"virtualMachine": {
                "metadata": {"name": "v", "namespace": "n", "uid": "vm-uid", "labels": {"app": "x"}}, "spec": spec("Always"),
            }},
            "volumeBackups": [backup("root"), backup("data")],
        },
        "status": {"readyToUse": true},
    });
    let snapshots = ["snap-root", "snap-data"].map(|name| {
        let content = Some(format!("{name}-content"));
        let snapshot =
            CachedSnapshot { ready: true, content, restore_size: Some(2 << 20), ..CachedSnapshot::default() };
        (name.to_owned(), Arc::new(snapshot))
    });
    Observed {
        restore: restore(change),
        vm: Some(vm(&json!({}))),
        vmi: None,
        snapshot: Some(object(snapshot, &json!({}))),
        content: Some(object(content, &json!({}))),
        volume_snapshots: snapshots.into(),
        claims: BTreeMap::new(),
        others: BTreeMap::new(),
        states: Vec::new(),
        data_volumes: BTreeMap::new(),
        classes: [("fast".to_owned(), Arc::default())].into(),
        revisions: BTreeMap::new(),
        failure: None,
        now: "2030-01-01T00:01:00Z".parse().unwrap(),
    }
}

/// Returns the status of a restore whose claims are named.
fn named() -> Value {
    let restored = |volume: &str| {
        let claim = format!("restore-restore-uid-{volume}");
        json!({"volumeName": volume, "persistentVolumeClaim": claim, "volumeSnapshotName": format!("snap-{volume}")})
    };
    let mut root = restored("root");
    root["dataVolumeName"] = root["persistentVolumeClaim"].clone();
    json!({"status": {"restores": [root, restored("data")], "deletedDataVolumes": ["root"]}})
}

fn bound() -> BTreeMap<String, Arc<CachedClaim>> {
    ["root", "data"].map(|name| claim(&format!("restore-restore-uid-{name}"), "Bound", &own())).into()
}

fn effects(observed: &Observed) -> Vec<Effect> {
    decide(observed).unwrap().effects
}

/// Returns a decision as lines: verb, kind, name.
fn lines(observed: &Observed) -> Vec<String> {
    let line = |effect: &Effect| match effect {
        Effect::Create { kind, object, .. } => {
            format!("create {} {}", kind.kind(), object["metadata"]["name"].as_str().unwrap())
        }
        Effect::Delete { kind, name, .. } => format!("delete {} {name}", kind.kind()),
        Effect::Patch { kind, name, subresource, .. } => {
            format!("patch {} {name} {}", kind.kind(), subresource.unwrap_or_default()).trim_end().to_owned()
        }
        Effect::Event(event) => format!("event {}", event.reason),
        Effect::RequireTaken { content, .. } => format!("read {content}"),
        other => panic!("{other:?}"),
    };
    effects(observed).iter().map(line).collect()
}

/// Returns a patch of a kind.
fn patch(observed: &Observed, of: Kind, sub: Option<&str>) -> Value {
    let patch = effects(observed).into_iter().find_map(|effect| match effect {
        Effect::Patch { kind, subresource, patch, .. } if kind == of && subresource == sub => Some(patch),
        _ => None,
    });
    patch.unwrap_or_default()
}

/// Returns the texts of conditions Progressing, Ready and Failure that a decision writes.
fn texts(observed: &Observed) -> [String; 3] {
    let conditions = patch(observed, Kind::VmRestore, Some("status"))["status"]["conditions"].clone();
    ["Progressing", "Ready", "Failure"].map(|type_| {
        let known = conditions.as_array().into_iter().flatten().find(|known| known["type"] == type_);
        known
            .map(|known| format!("{} {}", known["status"].as_str().unwrap(), known["reason"].as_str().unwrap()))
            .unwrap_or_default()
    })
}

#[test]
fn first_pass_holds_the_restore_and_shows_it() {
    let mut new = observed(&json!({"metadata": {"finalizers": null}}));
    assert_eq!(lines(&new), ["patch VirtualMachineRestore r", "patch VirtualMachineRestore r status"]);
    let text = "Initializing VirtualMachineRestore";
    assert_eq!(texts(&new)[..2], [format!("True {text}"), format!("False {text}")]);
    // An object that is deleted before is let go.
    new.restore = restore(&json!({"metadata": {"finalizers": null, "deletionTimestamp": "2030-01-01T00:00:00Z"}}));
    assert!(lines(&new).is_empty());
}

fn vmi() -> Option<Arc<VirtualMachineInstance>> {
    let vmi = json!({
        "apiVersion": "kubevirt.io/v1", "kind": "VirtualMachineInstance", "metadata": {"name": "v", "uid": "vmi-uid"},
        "spec": {"domain": {"devices": {}}}, "status": {"phase": "Running"},
    });
    Some(object(vmi, &json!({})))
}

#[test]
fn target_is_not_stopped_during_another_operation() {
    let holder = json!({"operation": "Snapshot", "name": "other", "uid": "other-uid"});
    let mut observed = observed(&json!({"spec": {"targetReadinessPolicy": "StopTarget"}}));
    observed.vm = Some(vm(&json!({"status": {"operation": holder, "restoreInProgress": null}})));
    observed.vmi = vmi();
    assert_eq!(lines(&observed), ["patch VirtualMachineRestore r status"]);
    assert_eq!(texts(&observed)[0], "True snapshot \"other\" in progress");
}

#[test]
fn target_that_runs_is_waited_for_by_policy() {
    let stop = "Waiting for target VM to be powered off. Please stop the restore target to proceed with restore";
    for (policy, now, progressing, fails) in [
        (json!(null), "00:01", format!("{stop}, or the operation will fail after 5m0s"), false),
        (json!("WaitGracePeriod"), "00:05", "Restore target failed to be ready within 5m0s".to_owned(), true),
        (json!("WaitEventually"), "00:59", stop.to_owned(), false),
        (
            json!("FailImmediate"),
            "00:01",
            "Restore target VMI must be powered off before restore operation".to_owned(),
            true,
        ),
        (json!("StopTarget"), "00:59", "Automatically stopping restore target for restore operation".to_owned(), false),
        (json!("Guess"), "00:01", "unknown targetReadinessPolicy: Guess".to_owned(), true),
    ] {
        let mut observed = observed(&json!({"spec": {"targetReadinessPolicy": policy}}));
        (observed.vmi, observed.now) = (vmi(), format!("2030-01-01T{now}:00Z").parse().unwrap());
        let [shown, _, failure] = texts(&observed);
        assert!(shown.starts_with(&format!("False {progressing}")), "{policy}: {shown}");
        assert_eq!(failure.starts_with("True"), fails, "{policy}: {failure}");
        let is_told = effects(&observed)
            .iter()
            .any(|effect| matches!(effect, Effect::Event(event) if event.reason == "RestoreTargetNotReady"));
        assert_eq!(is_told, !fails, "{policy}");
        // The lease would keep users from stopping the VM.
        assert_eq!(
            patch(&observed, Kind::VirtualMachine, Some("status"))["status"]["operation"],
            Value::Null,
            "{policy}"
        );
        let wakes = decide(&observed).unwrap().wake_after;
        assert_eq!(wakes, policy.is_null().then(|| Duration::from_secs(240)), "{policy}");
        let requests = patch(&observed, Kind::VirtualMachine, Some("status"));
        let is_stopped = effects(&observed).iter().any(|effect| format!("{effect:?}").contains("\"vmi-uid\""));
        assert_eq!(is_stopped, policy == "StopTarget", "{policy}: {requests}");
    }
}

#[test]
fn lease_is_taken_before_anything_is_made() {
    let mut free = observed(&json!({}));
    free.vm = Some(vm(&json!({"status": {"operation": null, "restoreInProgress": null}})));
    assert_eq!(lines(&free), ["patch VirtualMachine v status"]);
    assert_eq!(patch(&free, Kind::VirtualMachine, Some("status"))["status"]["restoreInProgress"], "r");
    let holder = json!({"operation": "Snapshot", "name": "other", "uid": "other-uid"});
    free.vm = Some(vm(&json!({"status": {"operation": holder, "restoreInProgress": null}})));
    assert_eq!(texts(&free)[0], "True snapshot \"other\" in progress");
    assert_eq!(lines(&free), ["patch VirtualMachineRestore r status"]);
}

#[test]
fn unusable_snapshots_and_foreign_targets_are_told() {
    let with = |change: &dyn Fn(&mut Observed)| {
        let mut observed = observed(&json!({}));
        change(&mut observed);
        let [progressing, _, failure] = texts(&observed);
        (progressing, failure)
    };
    let passing = |text: &str| (format!("False {text}"), String::new());
    let is_final = |text: &str| (format!("False {text}"), format!("True {text}"));
    let snapshot = |status: Value| {
        let snapshot = json!({
            "metadata": {"name": "s"}, "spec": {"source": {"kind": "VirtualMachine", "name": "v"}}, "status": status,
        });
        Some(object::<VirtualMachineSnapshot>(snapshot, &json!({})))
    };
    assert_eq!(with(&|o| o.snapshot = None), passing("VMSnapshot n/s does not exist"));
    assert_eq!(with(&|o| o.snapshot = snapshot(json!({"readyToUse": false}))), passing("VMSnapshot n/s not ready"));
    assert_eq!(
        with(&|o| o.snapshot = snapshot(json!({"phase": "Failed"}))),
        is_final("VMSnapshot n/s failed and is invalid to use")
    );
    assert_eq!(with(&|o| o.content = None), passing("VMSnapshotContent n/c does not exist"));
    let different = "restore source and restore target are different but restore target already exists";
    let foreign = |observed: &mut Observed| observed.vm = Some(vm(&json!({"metadata": {"uid": "other"}})));
    assert_eq!(with(&foreign), is_final(different));
    // KubeVirt never gives up on it, and its clients wait for the event of an error.
    let failed = |observed: &mut Observed| {
        observed.snapshot = snapshot(json!({"phase": "Failed", "sourceUID": "vm-uid"}));
    };
    for (change, reason) in
        [(&foreign as &dyn Fn(&mut Observed), "VirtualMachineRestoreError"), (&failed, "Operation failed")]
    {
        let mut observed = observed(&json!({}));
        change(&mut observed);
        let told = effects(&observed).into_iter().find_map(|effect| match effect {
            Effect::Patch { kind: Kind::VmRestore, options, .. } => options.success.map(|event| event.reason),
            _ => None,
        });
        assert_eq!(told, Some(reason));
    }
}

#[test]
fn data_volume_without_a_template_becomes_its_claim() {
    let templates = json!([{"metadata": {"name": "root"}, "spec": {"source": {"blank": {}}}}]);
    for (templates, data_volume, claim) in
        [(templates, json!("new"), json!(null)), (json!([]), json!(null), json!("new"))]
    {
        let mut changed = (*vm(&json!({"spec": {"dataVolumeTemplates": templates}}))).clone();
        // In place: the DataVolume takes over the claim.
        let restored = json!({
            "volumeName": "root", "persistentVolumeClaim": "new", "dataVolumeName": "new", "volumeSnapshotName": "snap-root",
        });
        volumes::rename(&mut changed.spec, &[serde_json::from_value(restored).unwrap()]);
        let spec = serde_json::to_value(&changed.spec).unwrap();
        let root = &spec["template"]["spec"]["volumes"][0];
        assert_eq!(root["dataVolume"]["name"], data_volume);
        assert_eq!(root["persistentVolumeClaim"]["claimName"], claim);
        if data_volume == "new" {
            assert_eq!(spec["dataVolumeTemplates"][0]["metadata"]["name"], "new");
        }
    }
}

#[test]
fn claims_are_recorded_and_then_made_from_the_snapshots() {
    let status = patch(&observed(&json!({})), Kind::VmRestore, Some("status"))["status"].clone();
    assert_eq!(status["restores"], named()["status"]["restores"]);
    assert_eq!(status["deletedDataVolumes"], json!(["root"]));
    let observed = observed(&named());
    let claims: Vec<Value> = effects(&observed)
        .into_iter()
        .filter_map(|effect| match effect {
            Effect::Create { kind: Kind::Claim, object, .. } => Some(object),
            _ => None,
        })
        .collect();
    let [root, data] = &claims[..] else { panic!("{claims:?}") };
    assert_eq!(root["metadata"]["name"], "restore-restore-uid-root");
    let source = json!({"apiGroup": "snapshot.storage.k8s.io", "kind": "VolumeSnapshot", "name": "snap-root"});
    assert_eq!(
        root["spec"],
        json!({
            "accessModes": ["ReadWriteOnce"], "storageClassName": "fast", "volumeMode": "Block", "dataSource": source,
            "dataSourceRef": source, "resources": {"requests": {"storage": "2Mi"}},
        })
    );
    let common = json!({"a": "b", "restore.kubevirt.io/name": "r", "restore.kubevirt.io/lastRestoreUID": ID});
    let mut of_template = common.clone();
    of_template["cdi.kubevirt.io/storage.populatedFor"] = json!("restore-restore-uid-root");
    assert_eq!((&root["metadata"]["annotations"], &data["metadata"]["annotations"]), (&of_template, &common));
    assert_eq!(
        data["metadata"]["labels"],
        json!({"app": "x", "restore.kubevirt.io/source-vm-name": "v", "restore.kubevirt.io/source-vm-namespace": "n"})
    );
    // A DataVolume takes over the claim of its template.
    assert_eq!(root["metadata"]["ownerReferences"], Value::Null);
    assert_eq!(data["metadata"]["ownerReferences"][0]["uid"], "vm-uid");
}

/// Returns a restore whose snapshot has this captured VM and no claims.
fn without_claims(change: &Value, captured: impl FnOnce(&mut SourceVirtualMachine)) -> Observed {
    let mut observed = observed(change);
    let mut content = (**observed.content.as_ref().unwrap()).clone();
    content.spec.volume_backups.clear();
    captured(content.spec.source.virtual_machine.as_mut().unwrap());
    observed.content = Some(Arc::new(content));
    observed
}

#[test]
fn data_volumes_of_later_templates_go_also_without_restored_claims() {
    let without_disks = |vm: &mut SourceVirtualMachine| {
        let spec = vm.spec.as_mut().unwrap();
        spec.data_volume_templates.clear();
        spec.template.spec.as_mut().unwrap().volumes.clear();
    };
    let status = patch(&without_claims(&json!({}), without_disks), Kind::VmRestore, Some("status"))["status"].clone();
    assert_eq!(status["deletedDataVolumes"], json!(["root"]));
    let recorded = without_claims(&json!({"status": {"deletedDataVolumes": ["root"]}}), without_disks);
    assert_eq!(texts(&recorded)[0], "True Updating target spec");
    assert!(lines(&recorded).contains(&"patch VirtualMachine v".to_owned()));
}

#[test]
fn claims_are_named_by_policy_and_overrides() {
    for (spec, root, data) in [
        (json!({"volumeRestorePolicy": "InPlace"}), "root", "data"),
        (json!({"volumeRestorePolicy": "PrefixTargetName"}), "v-root", "v-data"),
        (
            json!({"volumeRestoreOverrides": [{"volumeName": "data", "restoreName": "x"}]}),
            "restore-restore-uid-root",
            "x",
        ),
    ] {
        let status = patch(&observed(&json!({"spec": spec})), Kind::VmRestore, Some("status"));
        let names: Vec<&Value> =
            status["status"]["restores"].as_array().unwrap().iter().map(|one| &one["persistentVolumeClaim"]).collect();
        assert_eq!(names, [root, data], "{spec}");
    }
    let twice = json!([{"volumeName": "root", "restoreName": "x"}, {"volumeName": "data", "restoreName": "x"}]);
    let observed = observed(&json!({"spec": {"volumeRestoreOverrides": twice}}));
    assert!(texts(&observed)[2].contains("two volumes of the snapshot"), "{:?}", texts(&observed));
}

#[test]
fn claims_are_waited_for_and_foreign_ones_end_the_restore() {
    let late = CachedStorageClass { is_late: true, ..CachedStorageClass::default() };
    let updating = "True Updating target spec";
    for (phase, class, change, expected) in [
        ("Bound", None, own(), updating),
        ("Pending", None, own(), "True Creating new PVCs"),
        ("Pending", Some(late), own(), updating),
        ("Lost", None, own(), "False PVC n/restore-restore-uid-root in status \"Lost\""),
        ("Bound", None, json!({}), "False PVC n/restore-restore-uid-root exists and does not belong to this restore"),
    ] {
        let mut observed = observed(&named());
        observed.classes.extend(class.map(|class| ("fast".to_owned(), Arc::new(class))));
        observed.claims = bound();
        observed.claims.extend([claim("restore-restore-uid-root", phase, &change)]);
        let shown = texts(&observed)[0].clone();
        assert_eq!(shown, expected);
        if expected.starts_with("False") {
            // It leaves the VM as it was. Claims of others stay.
            let deleted =
                lines(&observed).iter().filter(|line| line.starts_with("delete PersistentVolumeClaim")).count();
            assert_eq!(deleted, if change == own() { 2 } else { 1 });
            assert!(lines(&observed).contains(&"patch VirtualMachine v status".to_owned()));
        }
    }
}

#[test]
fn second_restore_of_one_new_vm_fails_and_deletes_its_claims() {
    let mut observed = observed(&named());
    observed.claims = bound();
    observed.vm =
        Some(vm(&json!({"metadata": {"uid": "other"}, "status": {"operation": null, "restoreInProgress": null}})));
    assert!(texts(&observed)[2].starts_with("True restore source and restore target are different"));
    let deleted = lines(&observed).iter().filter(|line| line.starts_with("delete PersistentVolumeClaim")).count();
    assert_eq!(deleted, 2);
}
