//! Restores of a VM that is being deleted, and the claims that a restore has made.

use jiff::SignedDuration;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;

use super::{
    data_volumes::{claim, creation, with_template},
    *,
};

/// Returns a complete restore that the VM owns, with a change.
fn restore(change: &Value) -> Arc<VirtualMachineRestore> {
    let mut restore = json!({
        "apiVersion": "snapshot.kubevirt.io/v1beta1", "kind": "VirtualMachineRestore",
        "metadata": {
            "name": "r", "namespace": "d", "uid": "r-uid", "resourceVersion": "5", "ownerReferences": [owner(&json!({}))],
        },
        "spec": {
            "target": {"apiGroup": "kubevirt.io", "kind": "VirtualMachine", "name": "v"},
            "virtualMachineSnapshotName": "s",
        },
        "status": {"complete": true},
    });
    json_patch::merge(&mut restore, change);
    Arc::new(serde_json::from_value(restore).unwrap())
}

fn owner(change: &Value) -> Value {
    let mut owner = json!({"apiVersion": "kubevirt.io/v1", "kind": "VirtualMachine", "name": "v", "uid": "vm-uid"});
    json_patch::merge(&mut owner, change);
    owner
}

/// Returns a VM that restore `r` has changed, and that was deleted this many seconds ago.
fn deleted(seconds: i64) -> VirtualMachine {
    let mut vm = with_strategy("Halted", &Value::Null);
    vm.metadata.annotations = Some([("restore.kubevirt.io/lastRestoreUID".to_owned(), "r-r-uid".to_owned())].into());
    vm.metadata.deletion_timestamp = Some(Time(now() - SignedDuration::from_secs(seconds)));
    vm
}

/// Decides about a VM with a restore. Returns the kinds of the objects that are patched in their order, without status.
fn patched(
    vm: &VirtualMachine,
    instance: Option<&VirtualMachineInstance>,
    change: &Value,
    failure: Option<&Failure>,
) -> Vec<Kind> {
    let observed =
        Observed { restores: vec![restore(change)], ..observed(vm, instance, failure, &ClusterConfig::default()) };
    let decision = decide(&observed).unwrap();
    let kinds = decision.effects.iter().filter_map(|effect| match effect {
        Effect::Patch { kind: Kind::VmRestore, patch, resource_version, options, .. } => {
            assert_eq!(*patch, json!({"metadata": {"ownerReferences": null}}));
            assert_eq!(resource_version.as_deref(), Some("5"));
            // A refusal ends the decision before the VM is let go, except for the last attempt.
            assert_eq!(options.independent, failure.is_some_and(|failure| failure.attempts >= 6));
            Some(Kind::VmRestore)
        }
        Effect::Patch { kind, subresource: None, .. } => Some(*kind),
        _ => None,
    });
    let kinds: Vec<Kind> = kinds.collect();
    // A VM that is kept is looked at again.
    assert_eq!(kinds.is_empty(), decision.wake_after.is_some() || deletes(&decision), "{decision:?}");
    kinds
}

#[test]
fn deleted_vm_leaves_its_restores_before_it_goes() {
    let owned_by = |owners: &[Value]| json!({"metadata": {"ownerReferences": owners}});
    let clone =
        json!({"apiVersion": "clone.kubevirt.io/v1beta1", "kind": "VirtualMachineClone", "name": "c", "uid": "c"});
    let other = json!({"metadata": {"uid": "other"}, "status": {"complete": false}});
    let released = vec![Kind::VmRestore, Kind::VirtualMachine];
    let untouched = vec![Kind::VirtualMachine];
    for (change, expected) in [
        (json!({}), &released),
        // The reference that KubeVirt makes.
        (owned_by(&[owner(&json!({"controller": true, "blockOwnerDeletion": true}))]), &released),
        (owned_by(&[]), &untouched),
        (owned_by(std::slice::from_ref(&clone)), &untouched),
        (owned_by(&[owner(&json!({})), clone]), &untouched),
        // A former VM of the name.
        (owned_by(&[owner(&json!({"uid": "former"}))]), &untouched),
        (json!({"metadata": {"deletionTimestamp": "2030-01-01T00:00:00Z"}}), &untouched),
        // Not the restore that has changed the VM.
        (other, &released),
    ] {
        assert_eq!(patched(&deleted(0), None, &change, None), *expected, "{change}");
    }
    // Its VMI goes first.
    let vm = deleted(0);
    assert!(patched(&vm, Some(&instance(&vm, "Running")), &json!({}), None).is_empty());
}

#[test]
fn deleted_vm_waits_for_the_end_of_its_restore_for_a_short_time() {
    for owners in [json!(null), json!([owner(&json!({}))])] {
        let unfinished = json!({"metadata": {"ownerReferences": owners}, "status": {"complete": false}});
        assert!(patched(&deleted(9), None, &unfinished, None).is_empty());
        assert!(patched(&deleted(10), None, &unfinished, None).contains(&Kind::VirtualMachine));
    }
}

#[test]
fn deleted_vm_waits_for_the_failure_of_older_restores() {
    // Age of a restore that has not changed the VM, time since the deletion.
    for (age, seconds, waits) in [(60, 9, true), (60, 10, false), (5, 9, false)] {
        let created = Time(now() - SignedDuration::from_secs(age));
        let open = json!({"metadata": {"uid": "other", "creationTimestamp": created}, "status": {"complete": false}});
        assert_eq!(patched(&deleted(seconds), None, &open, None).is_empty(), waits, "{age} {seconds}");
    }
}

#[test]
fn refusals_do_not_keep_a_deleted_vm_for_ever() {
    let (soon, past) = (now() + SignedDuration::from_secs(1), now());
    for (attempts, retry_at, expected) in [
        (5, soon, vec![]),
        (5, past, vec![Kind::VmRestore, Kind::VirtualMachine]),
        // Each record is tried once more: one that is refused does not take the others with it.
        (6, soon, vec![Kind::VmRestore, Kind::VirtualMachine]),
    ] {
        let failure = Failure { reason: "RestoreRefused", message: "denied".to_owned(), retry_at, attempts };
        assert_eq!(patched(&deleted(0), None, &json!({}), Some(&failure)), expected, "{attempts} {retry_at}");
    }
}

#[test]
fn restored_claim_gets_its_data_volume_before_the_first_start() {
    let (restored, filled) = ("restore.kubevirt.io/name", "cdi.kubevirt.io/storage.populatedFor");
    for (annotations, is_taken_over) in [
        (json!({}), false),
        (json!({restored: "r"}), false),
        (json!({filled: "root"}), false),
        (json!({restored: "r", filled: "other"}), false),
        (json!({restored: "r", filled: "root"}), true),
    ] {
        let mut vm = with_template("Halted", &Value::Null);
        let key = api::constants::annotation::IMMEDIATE_DATA_VOLUME_CREATION;
        vm.metadata.annotations = Some([(key.to_owned(), "false".to_owned())].into());
        let claims = [("root".to_owned(), claim(&json!({"metadata": {"annotations": annotations}})))].into();
        let observed = Observed { claims, ..observed(&vm, None, None, &ClusterConfig::default()) };
        let adopts = creation(&decide(&observed).unwrap()).map(|made| made.adopts_claim);
        assert_eq!(adopts, is_taken_over.then_some(true), "{annotations}");
    }
}
