//! Tests of the ends of restores, and of claims that are replaced.

use api::constants::event;

use super::*;

/// Returns a restore whose VM is restored already.
pub(super) fn done() -> Observed {
    let mut observed = observed(&named());
    observed.claims = bound();
    observed.vm = Some(vm(&json!({"metadata": {"annotations": {"restore.kubevirt.io/lastRestoreUID": ID}}})));
    observed
}

#[test]
fn restored_vm_loses_its_former_disks_and_the_lease() {
    let mut observed = done();
    let owner = json!([{"apiVersion": "kubevirt.io/v1", "kind": "VirtualMachine", "name": "v", "uid": "vm-uid", "controller": true}]);
    let volume = json!({
        "apiVersion": "cdi.kubevirt.io/v1beta1", "kind": "DataVolume",
        "metadata": {"name": "root", "namespace": "n", "ownerReferences": owner}, "spec": {},
    });
    observed.data_volumes = [("root".to_owned(), object(volume, &json!({})))].into();
    assert_eq!(
        lines(&observed),
        [
            "patch DataVolume root",
            "delete DataVolume root",
            "patch VirtualMachineRestore r",
            "patch VirtualMachine v status",
            "patch VirtualMachineRestore r status",
        ]
    );
    let status = patch(&observed, Kind::VmRestore, Some("status"))["status"].clone();
    assert_eq!((&status["complete"], &status["restoreTime"]), (&json!(true), &json!("2030-01-01T00:01:00Z")));
    assert_eq!(texts(&observed)[..2], ["False Operation complete", "True Operation complete"]);
    // Whatever is refused from now on is tried again.
    observed.failure =
        Some(Failure { reason: REFUSED, message: "denied".to_owned(), retry_at: observed.now, attempts: 99 });
    assert_eq!(texts(&observed)[1], "True Operation complete");
}

#[test]
fn hibernation_is_not_forgotten_before_its_claim_is_deleted() {
    for (claim, stays) in [("", false), ("hibernation-of-v", true)] {
        let mut observed = done();
        observed.vm = Some(vm(&json!({
            "metadata": {"annotations": {"restore.kubevirt.io/lastRestoreUID": ID}},
            "status": {"hibernation": {"phase": "Removing", "claimName": claim, "ownsClaim": true}},
        })));
        let status = patch(&observed, Kind::VirtualMachine, Some("status"))["status"].clone();
        assert_eq!(status.get("operation"), Some(&Value::Null));
        assert_eq!(status.get("hibernation").is_none(), stays, "{claim:?}");
    }
}

#[test]
fn complete_restore_is_owned_by_its_vm_or_its_clone() {
    let owner = |observed: &Observed| patch(observed, Kind::VmRestore, None)["metadata"]["ownerReferences"].clone();
    let mut observed = done();
    let of_vm = json!({"apiVersion": "kubevirt.io/v1", "kind": "VirtualMachine", "name": "v", "uid": "vm-uid"});
    assert_eq!(owner(&observed), json!([of_vm]));
    for (attempts, expected) in [(8, json!([of_vm])), (9, Value::Null)] {
        let refused = Failure { reason: REFUSED, message: "denied".to_owned(), retry_at: observed.now, attempts };
        observed.failure = Some(refused);
        assert_eq!(owner(&observed), expected, "{attempts}");
        assert_eq!(texts(&observed)[1], "True Operation complete", "{attempts}");
    }
    observed.failure = None;
    let clone =
        json!({"apiVersion": "clone.kubevirt.io/v1beta1", "kind": "VirtualMachineClone", "name": "c", "uid": "c"});
    for owned in [of_vm, clone] {
        let mut change = named();
        change["metadata"] = json!({"ownerReferences": [owned]});
        observed.restore = restore(&change);
        assert_eq!(owner(&observed), Value::Null);
    }
    // A VM that is being deleted does not become the owner.
    let annotations = json!({"restore.kubevirt.io/lastRestoreUID": ID});
    observed = done();
    observed.vm =
        Some(vm(&json!({"metadata": {"annotations": annotations, "deletionTimestamp": "2030-01-01T00:00:00Z"}})));
    assert_eq!(owner(&observed), Value::Null);
    assert_eq!(lines(&observed), ["patch VirtualMachine v status", "patch VirtualMachineRestore r status"]);
}

#[test]
fn new_vm_becomes_the_owner_of_its_claims_once() {
    let key = "restore.kubevirt.io/owned-by-vm";
    let name = "restore-restore-uid-data";
    let mut marked = own();
    marked["metadata"]["annotations"][key] = json!("r");
    let mut owned = marked.clone();
    owned["metadata"]["ownerReferences"] =
        json!([{"apiVersion": "v1", "kind": "ConfigMap", "name": "of-a-user", "uid": "x"}]);
    for (change, expected) in [(own(), None), (marked, Some("vm-uid")), (owned, None)] {
        let mut observed = done();
        observed.claims.extend([claim(name, "Bound", &change)]);
        let written = patch(&observed, Kind::Claim, None)["metadata"].clone();
        assert_eq!(written["ownerReferences"][0]["uid"].as_str(), expected, "{change}");
        if expected.is_some() {
            assert_eq!(written["annotations"], json!({key: null}));
        }
    }
}

#[test]
fn restored_state_replaces_the_former_one() {
    let mut observed = done();
    let mut status = named();
    status["status"]["restores"].as_array_mut().unwrap().push(json!({
        "volumeName": "persistent-state-for-v", "persistentVolumeClaim": "state-2", "volumeSnapshotName": "snap-state",
    }));
    observed.restore = restore(&status);
    let mut labelled = json!({"metadata": {"labels": {"persistent-state-for": "v"}}});
    observed.claims.extend([claim("state-2", "Bound", &own())]);
    // One that was not made for the VM stays.
    observed.states = vec![claim("state-1", "Bound", &labelled).1];
    assert_eq!(
        lines(&observed)[..3],
        ["patch PersistentVolumeClaim state-2", "patch PersistentVolumeClaim state-1", "patch VirtualMachineRestore r"]
    );
    labelled["metadata"]["ownerReferences"] = json!([{"apiVersion": "kubevirt.io/v1", "kind": "VirtualMachine", "name": "v", "uid": "vm-uid", "controller": true}]);
    observed.states = vec![claim("state-1", "Bound", &labelled).1];
    assert_eq!(
        lines(&observed)[..3],
        [
            "patch PersistentVolumeClaim state-2",
            "patch PersistentVolumeClaim state-1",
            "delete PersistentVolumeClaim state-1"
        ]
    );
    // Its deletion is refused: it stays without the label, and the restore completes.
    observed.states.push(observed.claims["state-2"].clone());
    for (attempts, expected) in [(ATTEMPTS, &["patch", "delete"][..]), (ATTEMPTS + 1, &["patch"])] {
        let refused = Failure { reason: REFUSED, message: "denied".to_owned(), retry_at: observed.now, attempts };
        observed.failure = Some(refused);
        let mut writes = lines(&observed);
        writes.retain(|line| line.ends_with(" PersistentVolumeClaim state-1"));
        let expected: Vec<String> =
            expected.iter().map(|verb| format!("{verb} PersistentVolumeClaim state-1")).collect();
        assert_eq!(writes, expected, "{attempts}");
        let labels = patch(&observed, Kind::Claim, None)["metadata"]["labels"].clone();
        assert_eq!(labels.get("persistent-state-for"), (attempts > ATTEMPTS).then_some(&Value::Null), "{attempts}");
        assert_eq!(texts(&observed)[1], "True Operation complete", "{attempts}");
    }
}

#[test]
fn claims_in_place_are_replaced_only_when_all_snapshots_are_there() {
    let mut status = named();
    status["spec"] = json!({"volumeRestorePolicy": "InPlace"});
    for (index, name) in ["root", "data"].into_iter().enumerate() {
        status["status"]["restores"][index]["persistentVolumeClaim"] = json!(name);
    }
    status["status"]["restores"][0]["dataVolumeName"] = json!("root");
    let mut observed = observed(&status);
    let owned = json!({"metadata": {"ownerReferences": [{
        "apiVersion": "cdi.kubevirt.io/v1beta1", "kind": "DataVolume", "name": "root", "uid": "dv", "controller": true}]}});
    observed.claims = [claim("root", "Bound", &owned), claim("data", "Bound", &json!({}))].into();
    let volume = json!({"apiVersion": "cdi.kubevirt.io/v1beta1", "kind": "DataVolume", "metadata": {"name": "root", "namespace": "n"}, "spec": {}});
    observed.data_volumes = [("root".to_owned(), object(volume, &json!({})))].into();
    assert_eq!(
        lines(&observed)[1..],
        [
            "create PersistentVolumeClaim hold-restore-uid-root",
            "read snap-root-content",
            "create PersistentVolumeClaim hold-restore-uid-data",
            "read snap-data-content",
            "patch DataVolume root",
            "patch PersistentVolumeClaim root",
            "delete PersistentVolumeClaim root",
            "patch PersistentVolumeClaim data",
            "delete PersistentVolumeClaim data",
        ]
    );
    let refused = |observed: &mut Observed| {
        let failure = Failure { reason: REFUSED, message: "denied".to_owned(), retry_at: observed.now, attempts: 99 };
        observed.failure = Some(failure);
        texts(observed)[2].clone()
    };
    assert_eq!(refused(&mut observed), "True denied");
    // One is gone: its content is in the snapshot only.
    observed.claims.remove("root");
    assert_eq!(refused(&mut observed), "");
    observed.failure = None;
    let vmi = json!({
        "apiVersion": "kubevirt.io/v1", "kind": "VirtualMachineInstance", "metadata": {"name": "v"},
        "spec": {"domain": {"devices": {}}}, "status": {"phase": "Running"},
    });
    (observed.vmi, observed.now) = (Some(object(vmi, &json!({}))), "2030-01-01T00:06:00Z".parse().unwrap());
    assert!(texts(&observed)[0].starts_with("False Restore target failed") && texts(&observed)[2].is_empty());
    observed.vmi = None;
    // The other one is made, whatever is missing for the first. The content is not ready any more.
    let mut content = (**observed.content.as_ref().unwrap()).clone();
    content.status.as_mut().unwrap().ready_to_use = Some(false);
    observed.content = Some(Arc::new(content));
    for (lose, text, made) in [
        (
            &(|o: &mut Observed| drop(o.volume_snapshots.remove("snap-data"))) as &dyn Fn(&mut Observed),
            "False missing volumeSnapshot snap-data",
            &["create PersistentVolumeClaim root"][..],
        ),
        (&|o| o.classes.clear(), "False StorageClass fast does not exist", &[]),
    ] {
        lose(&mut observed);
        assert_eq!(texts(&observed)[0], text);
        let mut writes = lines(&observed);
        writes.retain(|line| line.starts_with("delete") || line.starts_with("create"));
        assert_eq!(writes, made, "{text}");
    }
}

#[test]
fn claims_of_the_source_are_not_replaced_for_another_vm() {
    for (claims, fails) in [(&[][..], false), (&["data"], true), (&["root", "data"], true)] {
        let mut observed = observed(&json!({"spec": {"volumeRestorePolicy": "InPlace", "target": {"name": "w"}}}));
        observed.vm = None;
        observed.claims = claims.iter().map(|name| claim(name, "Bound", &json!({}))).collect();
        assert_eq!(texts(&observed)[2].ends_with("exists and does not belong to this restore"), fails, "{claims:?}");
        assert_eq!(lines(&observed), ["patch VirtualMachineRestore r status"], "{claims:?}");
    }
}

#[test]
fn refusals_are_shown_and_end_the_restore_when_they_stay() {
    let mut observed = observed(&named());
    observed.claims = bound();
    for (attempts, wait, failed) in [(1, 10, false), (ATTEMPTS, 10, true), (ATTEMPTS, 0, true)] {
        let retry_at = observed.now + jiff::SignedDuration::from_secs(wait);
        observed.failure = Some(Failure { reason: REFUSED, message: "denied".to_owned(), retry_at, attempts });
        assert_eq!(texts(&observed)[0], "False denied");
        assert_eq!(texts(&observed)[2] == "True denied", failed, "{attempts}");
    }
    observed.failure =
        Some(Failure { reason: event::FAILED_CREATE, message: "x".to_owned(), retry_at: observed.now, attempts: 99 });
    assert_eq!(texts(&observed)[0], "True Updating target spec");
}

#[test]
fn deleted_restore_leaves_the_vm_as_it_was_or_complete() {
    let deleted = |mut observed: Observed, status: Value| {
        let mut change = named();
        json_patch::merge(
            &mut change,
            &json!({"metadata": {"deletionTimestamp": "2030-01-01T00:00:00Z"}, "status": status}),
        );
        observed.restore = restore(&change);
        lines(&observed)
    };
    let mut made = observed(&json!({}));
    made.claims = bound();
    let ends = ["patch VirtualMachineRestore r status", "patch VirtualMachineRestore r"];
    let claims = ["root", "data"].map(|name| format!("delete PersistentVolumeClaim restore-restore-uid-{name}"));
    let lease = ["patch VirtualMachine v status".to_owned()];
    assert_eq!(deleted(made, json!({})), [&claims[..], &lease, &ends.map(str::to_owned)].concat());
    assert_eq!(deleted(done(), json!({})), [&lease[..], &ends.map(str::to_owned)].concat());
    // Claims that another party keeps hold back nothing.
    for (attempts, wait, expected) in [
        (1, 10, vec![]),
        (ATTEMPTS, 0, [&claims[..], &lease, &ends.map(str::to_owned)].concat()),
        (ATTEMPTS + 1, 10, [&lease[..], &ends.map(str::to_owned)].concat()),
    ] {
        let mut refused = Observed { claims: bound(), ..observed(&json!({})) };
        let retry_at = refused.now + jiff::SignedDuration::from_secs(wait);
        refused.failure = Some(Failure { reason: REFUSED, message: "denied".to_owned(), retry_at, attempts });
        assert_eq!(deleted(refused, json!({})), expected, "{attempts}");
    }
    let mut complete = done();
    complete.vm = None;
    assert_eq!(deleted(complete, json!({"complete": true})), ends);
}
