//! Tests of restores that meet other operations, other owners of claims, and objects that are gone.

use super::{replace::in_place, *};
use crate::resources::instancetype_revisions::InstancetypeRevision;

fn instance(phase: &str) -> Option<Arc<VirtualMachineInstance>> {
    let vmi = json!({
        "apiVersion": "kubevirt.io/v1", "kind": "VirtualMachineInstance", "metadata": {"name": "v", "uid": "vmi-uid"},
        "spec": {"domain": {"devices": {}}}, "status": {"phase": phase},
    });
    Some(object(vmi, &json!({})))
}

#[test]
fn start_in_the_instant_of_the_lease_is_undone() {
    // Phase, lease; the VMI is deleted, and the lease is kept.
    for (phase, holds, is_deleted) in
        [("Pending", true, true), ("Scheduling", true, false), ("Running", true, false), ("Pending", false, false)]
    {
        for is_done in [false, true] {
            let mut observed = if is_done { end::done() } else { observed(&named()) };
            observed.claims = bound();
            observed.vmi = instance(phase);
            if !holds {
                observed.vm = Some(vm(&json!({"status": {"operation": null, "restoreInProgress": null}})));
            }
            let lines = lines(&observed);
            let found = lines.contains(&"delete VirtualMachineInstance v".to_owned());
            assert_eq!(found, is_deleted, "{phase} {holds} {is_done}: {lines:?}");
            if found {
                assert!(!lines.contains(&"patch VirtualMachine v status".to_owned()), "{lines:?}");
            }
        }
    }
}

#[test]
fn restore_that_holds_its_vm_does_not_wait_for_ever() {
    let since = json!([{"type": "Progressing", "status": "False", "lastTransitionTime": "2030-01-01T00:10:00Z"}]);
    let without = |now: &str, lease: &str, lose: &dyn Fn(&mut Observed)| {
        let mut change = named();
        change["status"]["conditions"] = since.clone();
        let mut observed = observed(&change);
        observed.vm = Some(vm(&json!({"status": {"operation": {"since": lease}}})));
        observed.now = format!("2030-01-01T00:{now}:00Z").parse().unwrap();
        lose(&mut observed);
        let has_failed = texts(&observed)[2].starts_with("True");
        assert_eq!(lines(&observed).contains(&"patch VirtualMachine v status".to_owned()), has_failed, "the lease");
        has_failed
    };
    for lose in [&(|o: &mut Observed| o.snapshot = None) as &dyn Fn(&mut Observed), &|o| o.content = None, &|o| {
        o.volume_snapshots.remove("snap-data");
    }] {
        let early = "2030-01-01T00:00:00Z";
        assert!(!without("14", early, lose) && without("15", early, lose));
        // The error was there before the lease.
        assert!(!without("15", "2030-01-01T00:14:00Z", lose));
    }
    // A new VM has no lease, but its clone waits.
    for (lose, status, fails) in [
        (&(|o: &mut Observed| drop(o.volume_snapshots.remove("snap-data"))) as &dyn Fn(&mut Observed), named(), true),
        (&|o| o.classes.clear(), named(), true),
        // Nothing was begun.
        (&|o| o.snapshot = None, json!({}), false),
    ] {
        let mut change = status;
        change["status"]["conditions"] = since.clone();
        let mut observed = observed(&change);
        (observed.vm, observed.now) = (None, "2030-01-01T00:14:00Z".parse().unwrap());
        lose(&mut observed);
        assert!(!texts(&observed)[2].starts_with("True"));
        observed.now = "2030-01-01T00:15:00Z".parse().unwrap();
        assert_eq!(texts(&observed)[2].starts_with("True"), fails);
    }
    // A VM that has lost a disk gets it back.
    let mut begun = in_place();
    begun.claims.remove("root");
    begun.volume_snapshots.remove("snap-data");
    begun.vm = Some(vm(&json!({"status": {"operation": {"since": "2029-01-01T00:00:00Z"}}})));
    assert_eq!(texts(&begun)[2], "");
}

#[test]
fn data_volume_of_a_disk_without_a_snapshot_stays() {
    let mut observed = observed(&json!({}));
    let mut content = (**observed.content.as_ref().unwrap()).clone();
    content.spec.volume_backups.retain(|backup| backup.volume_name != "root");
    // The template was added later.
    content.spec.source.virtual_machine.as_mut().unwrap().spec.as_mut().unwrap().data_volume_templates.clear();
    observed.content = Some(Arc::new(content));
    let status = patch(&observed, Kind::VmRestore, Some("status"))["status"].clone();
    assert_eq!(status["restores"].as_array().unwrap().len(), 1);
    assert!(status["deletedDataVolumes"].as_array().is_none_or(Vec::is_empty), "{status}");
}

#[test]
fn copies_of_instance_types_are_reused_or_made_again() {
    let owner = |uid: &str| {
        let name = if uid == "other" { "w" } else { "v" };
        json!([{"apiVersion": "kubevirt.io/v1", "kind": "VirtualMachine", "name": name, "uid": uid, "controller": true}])
    };
    let revision = |name: &str, cpus: u32, uid: &str| {
        let revision = json!({
            "apiVersion": "apps/v1", "kind": "ControllerRevision", "revision": 1,
            "metadata": {"name": name, "namespace": "n", "uid": name, "ownerReferences": owner(uid)},
            "data": {
                "apiVersion": "instancetype.kubevirt.io/v1beta1", "kind": "VirtualMachineInstancetype",
                "metadata": {"name": "small"}, "spec": {"cpu": {"guest": cpus}, "memory": {"guest": "1Gi"}},
            },
        });
        let revision: k8s_openapi::api::apps::v1::ControllerRevision = serde_json::from_value(revision).unwrap();
        (name.to_owned(), Arc::new(InstancetypeRevision::from(revision)))
    };
    for (present, made, text) in [
        (None, Some(false), ""),
        (Some((1, "vm-uid")), None, ""),
        (Some((2, "vm-uid")), Some(true), ""),
        (Some((1, "other")), None, ""),
        (Some((1, "former")), Some(true), ""),
        (Some((2, "other")), None, "True found existing ControllerRevision with unexpected data: v-small"),
    ] {
        let mut observed = observed(&named());
        observed.claims = bound();
        let mut content = (**observed.content.as_ref().unwrap()).clone();
        let captured = content.spec.source.virtual_machine.as_mut().unwrap().spec.as_mut().unwrap();
        captured.instancetype = serde_json::from_value(json!({"name": "small", "revisionName": "s-small"})).unwrap();
        observed.content = Some(Arc::new(content));
        observed.revisions = [revision("s-small", 1, "vm-uid")].into();
        observed.revisions.extend(present.map(|(cpus, uid)| revision("v-small", cpus, uid)));
        assert_eq!(texts(&observed)[2], text, "{present:?}");
        let effects = effects(&observed);
        let copies = effects.iter().filter(|effect| matches!(effect, Effect::CopyRevision { .. })).count();
        let deleted =
            effects.iter().any(|effect| matches!(effect, Effect::Delete { kind: Kind::ControllerRevision, .. }));
        assert_eq!((copies, deleted), (usize::from(made.is_some()), made == Some(true)), "{present:?}");
    }
}

#[test]
fn restored_copies_get_the_name_of_the_revision() {
    let snapshot = ObjectMeta { name: Some("s".to_owned()), uid: Some("u".to_owned()), ..ObjectMeta::default() };
    let end = format!("-{}", api::names::hash("u"));
    for (copy, target, name) in [
        ("v-small".to_owned() + &end, "v", "v-small"),
        ("v-small".to_owned() + &end, "w", "w-small"),
        ("mine".to_owned() + &end, "w", "mine"),
        // By a former release.
        ("mine".to_owned(), "w", "mine"),
        ("s-small".to_owned(), "w", "w-small"),
    ] {
        assert_eq!(crate::snapshot::restored_copy_name(&copy, "v", &snapshot, target), name, "{copy}");
    }
}

#[test]
fn templates_are_matched_by_name_and_hot_plugged_cpus_are_restored() {
    let mut observed = observed(&named());
    observed.claims = bound();
    let mut content = (**observed.content.as_ref().unwrap()).clone();
    let captured = content.spec.source.virtual_machine.as_mut().unwrap().spec.as_mut().unwrap();
    let first = json!({"metadata": {"name": "first"}, "spec": {"source": {"blank": {}}}});
    captured.data_volume_templates.insert(0, serde_json::from_value(first).unwrap());
    captured.template.spec.as_mut().unwrap().domain.cpu =
        serde_json::from_value(json!({"sockets": 3, "maxSockets": 4})).unwrap();
    observed.content = Some(Arc::new(content));
    let spec = patch(&observed, Kind::VirtualMachine, None)["spec"].clone();
    let names: Vec<&Value> =
        spec["dataVolumeTemplates"].as_array().unwrap().iter().map(|one| &one["metadata"]["name"]).collect();
    assert_eq!(names, ["first", "restore-restore-uid-root"]);
    assert_eq!(spec["template"]["spec"]["domain"]["cpu"], json!({"sockets": 3, "maxSockets": 4}));
}

#[test]
fn names_of_claims_fit_their_limits() {
    let long = "v".repeat(63);
    for (policy, limit) in [("RandomizeNames", 253), ("PrefixTargetName", 63)] {
        let change = json!({"spec": {"volumeRestorePolicy": policy, "target": {"name": "t".repeat(60)}}});
        let mut observed = observed(&change);
        observed.vm = None;
        let mut content = (**observed.content.as_ref().unwrap()).clone();
        for (backup, end) in content.spec.volume_backups.iter_mut().zip(["a", "b"]) {
            backup.volume_name = format!("{long}{end}");
        }
        observed.content = Some(Arc::new(content));
        let status = patch(&observed, Kind::VmRestore, Some("status"))["status"].clone();
        let names: Vec<&str> = status["restores"]
            .as_array()
            .unwrap()
            .iter()
            .map(|one| one["persistentVolumeClaim"].as_str().unwrap())
            .collect();
        assert!(names.iter().all(|name| name.len() <= limit) && names[0] != names[1], "{names:?}");
    }
}

#[test]
fn restore_outlives_its_target() {
    // Only one that completes is owned by the VM, until that is deleted.
    for observed in [observed(&json!({"metadata": {"finalizers": null}})), observed(&named())] {
        for effect in effects(&observed) {
            if let Effect::Patch { kind: Kind::VmRestore, patch, .. } = effect {
                assert_eq!(patch["metadata"]["ownerReferences"], Value::Null);
            }
        }
    }
    let mut complete = end::done();
    complete.vm = None;
    complete.restore = restore(&json!({"status": {"complete": true}}));
    assert!(effects(&complete).is_empty());
    // One that was refused because of a foreign VM says so after that is gone.
    let failure = json!([{"type": "Failure", "status": "True", "reason": "x"}]);
    complete.restore = restore(&json!({"status": {"complete": false, "conditions": failure}}));
    assert!(effects(&complete).is_empty());
}

#[test]
fn restore_fails_when_its_target_is_deleted() {
    let deleted = |at: &str| Some(vm(&json!({"metadata": {"deletionTimestamp": at}})));
    let (failed, waits) = ("True restore target was deleted", "True restore target is being deleted");
    let made = || Observed { claims: bound(), ..observed(&named()) };
    let runs = || Observed { vmi: instance("Running"), ..made() };
    let refused = || {
        let mut refused = made();
        let (message, retry_at) = ("denied".to_owned(), refused.now + jiff::SignedDuration::from_secs(9));
        refused.failure = Some(Failure { reason: REFUSED, message, retry_at, attempts: 1 });
        refused
    };
    let begun = || {
        let mut begun = in_place();
        begun.claims.remove("root");
        begun
    };
    // The restore, true if it was created before the deletion, true if it fails.
    for (restore, is_older, fails) in [
        (&made as &dyn Fn() -> Observed, true, true),
        (&runs, true, true),
        (&refused, true, true),
        (&in_place, true, true),
        // The VM would lack a disk.
        (&begun, true, false),
        // The VM is to be made again.
        (&made, false, false),
    ] {
        let mut observed = restore();
        observed.vm = deleted(if is_older { "2030-01-01T00:00:01Z" } else { "2030-01-01T00:00:00Z" });
        let claims = ["root", "data"].map(|name| format!("restore-restore-uid-{name}"));
        let gone = claims.iter().filter(|name| fails && observed.claims.contains_key(*name));
        let mut expected: Vec<String> = gone.map(|name| format!("delete PersistentVolumeClaim {name}")).collect();
        let shown = texts(&observed);
        assert_eq!(if fails { &shown[2] } else { &shown[0] }, if fails { failed } else { waits });
        expected.push("patch VirtualMachineRestore r status".to_owned());
        assert_eq!(lines(&observed), expected);
    }
}

#[test]
fn claims_of_a_former_vm_are_not_used() {
    let (updating, creating) = ("True Updating target spec", "True Creating new PVCs");
    let [root, data] = ["root", "data"].map(|volume| format!("restore-restore-uid-{volume}"));
    for (owner, has_vm, text) in [
        (None, false, updating),
        (Some("vm-uid"), true, updating),
        (Some("vm-uid"), false, creating),
        (Some("former"), true, creating),
    ] {
        // The owner of a claim, or of the DataVolume that takes it over.
        for is_of_volume in [false, true] {
            let owners = owner.map_or(Value::Null, |uid| {
                json!([{"apiVersion": "kubevirt.io/v1", "kind": "VirtualMachine", "name": "v", "uid": uid, "controller": true}])
            });
            let mut observed = observed(&named());
            observed.claims = bound();
            if is_of_volume {
                let volume = json!({
                    "apiVersion": "cdi.kubevirt.io/v1beta1", "kind": "DataVolume", "spec": {},
                    "metadata": {"name": root, "namespace": "n", "ownerReferences": owners},
                });
                observed.data_volumes = [(root.clone(), object(volume, &json!({})))].into();
            } else {
                let mut change = own();
                change["metadata"]["ownerReferences"] = owners;
                observed.claims.extend([claim(&data, "Bound", &change)]);
            }
            observed.vm = observed.vm.filter(|_| has_vm);
            assert_eq!(texts(&observed)[0], text, "{owner:?} {has_vm} {is_of_volume}");
            assert_eq!(lines(&observed).iter().any(|line| line.ends_with("VirtualMachine v")), text == updating);
        }
    }
}

#[test]
fn deleted_vm_is_made_again_with_its_state() {
    for (exists, labelled) in [(false, true), (true, false)] {
        let mut status = named();
        let state = json!({
            "volumeName": "persistent-state-for-v", "persistentVolumeClaim": "state-2", "volumeSnapshotName": "snap-data",
        });
        status["status"]["restores"].as_array_mut().unwrap().push(state);
        let mut observed = observed(&status);
        let mut content = (**observed.content.as_ref().unwrap()).clone();
        content.spec.volume_backups.push(serde_json::from_value(backup("persistent-state-for-v")).unwrap());
        observed.content = Some(Arc::new(content));
        if !exists {
            observed.vm = None;
        }
        let claim = effects(&observed).into_iter().find_map(|effect| match effect {
            Effect::Create { object, .. } if object["metadata"]["name"] == "state-2" => Some(object),
            _ => None,
        });
        let label = claim.unwrap()["metadata"]["labels"]["persistent-state-for"].clone();
        assert_eq!(label == "v", labelled, "{exists}");
    }
}
