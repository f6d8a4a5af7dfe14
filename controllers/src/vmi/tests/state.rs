//! The claim with the state of a VMI.

use k8s_openapi::api::{core::v1::PersistentVolumeClaim, storage::v1::StorageClass};

use super::*;
use crate::persistent_state::Choice;

/// A VMI of a VM, with a TPM that is kept or not.
fn with_tpm(persistent: bool) -> VirtualMachineInstance {
    vmi(&json!({
        "metadata": {"ownerReferences": [{"apiVersion": "kubevirt.io/v1", "kind": "VirtualMachine", "name": "m", "uid": "v",
            "controller": true}]},
        "spec": {"domain": {"devices": {"tpm": {"persistent": persistent}}}},
    }))
}

fn class(late: bool) -> Arc<crate::resources::storage_classes::CachedStorageClass> {
    let mode = if late { "WaitForFirstConsumer" } else { "Immediate" };
    let class = json!({"metadata": {"name": "fast"}, "provisioner": "p", "volumeBindingMode": mode});
    Arc::new(serde_json::from_value::<StorageClass>(class).unwrap().into())
}

fn claim(name: &str, change: &Value) -> Arc<CachedClaim> {
    let mut claim = json!({
        "metadata": {"name": name, "namespace": "d", "uid": "c", "labels": {"persistent-state-for": "m"},
            "ownerReferences": [{"apiVersion": "kubevirt.io/v1", "kind": "VirtualMachine", "name": "m", "uid": "v",
                "controller": true}]},
        "spec": {"accessModes": ["ReadWriteMany"], "storageClassName": "fast"}, "status": {"phase": "Bound"},
    });
    json_patch::merge(&mut claim, change);
    Arc::new(serde_json::from_value::<PersistentVolumeClaim>(claim).unwrap().into())
}

fn state(claims: &[Arc<CachedClaim>], late: bool) -> State {
    State {
        known: claims.iter().map(|claim| (claim.metadata.name.clone().unwrap(), claim.clone())).collect(),
        classes: BTreeMap::from([("fast".to_owned(), class(late))]),
        choice: Some(Ok(Choice { class: class(late), shared: false })),
        undecided: None,
    }
}

/// Returns the created claim, the claim of the created pod, and reason and message of condition Synchronized.
fn seen(observed: Observed) -> (Option<String>, Option<String>, Value) {
    let decision = decide(&observed).unwrap();
    let created = |wanted: Kind| {
        decision.effects.iter().find_map(|effect| match effect {
            Effect::Create { kind, object, .. } if *kind == wanted => Some(object.clone()),
            _ => None,
        })
    };
    let name = created(Kind::Claim).map(|claim| claim["metadata"]["name"].as_str().unwrap().to_owned());
    let mounted = created(Kind::Pod).and_then(|pod| {
        let volumes = pod["spec"]["volumes"].as_array().unwrap().clone();
        let state = volumes.into_iter().find(|volume| volume["name"] == "vm-state");
        state.map(|volume| volume["persistentVolumeClaim"]["claimName"].as_str().unwrap().to_owned())
    });
    let status = patch_of(&decision, Kind::Instance).map(|patch| patch["status"].clone()).unwrap_or_default();
    (name, mounted, condition_in(&status, "Synchronized"))
}

#[test]
fn claim_is_made_before_the_pod_and_waited_for() {
    let vmi = with_tpm(true);
    let name = crate::persistent_state::name_for_vmi(&vmi);
    let own = |change: Value| claim(&name, &change);
    let pending = json!({"status": {"phase": "Pending"}});
    for (claims, late, creates, mounts, reason) in [
        (vec![], false, true, false, "BackendStorageNotReady"),
        (vec![], true, true, true, ""),
        (vec![own(json!({}))], false, false, true, ""),
        (vec![own(pending.clone())], true, false, true, ""),
        (vec![own(pending)], false, false, false, "BackendStorageNotReady"),
        (vec![own(json!({"status": {"phase": "Lost"}}))], false, false, false, "FailedBackendStorageProbe"),
        // Of the former start: it had no TPM.
        (
            vec![own(json!({"metadata": {"deletionTimestamp": "2030-01-01T00:00:00Z"}}))],
            false,
            false,
            false,
            "FailedBackendStorageCreate",
        ),
        (vec![own(json!({"metadata": {"labels": null}}))], false, false, false, "FailedBackendStorageCreate"),
    ] {
        let row = format!("{claims:?} {late}");
        let seen = seen(Observed { state: state(&claims, late), ..observed(&vmi) });
        assert_eq!((seen.0.is_some(), seen.1.is_some()), (creates, mounts), "{row}");
        assert!([seen.0, seen.1].into_iter().flatten().all(|found| found == name), "{row}");
        assert_eq!(seen.2["reason"].as_str().unwrap_or_default(), reason, "{row}");
    }
}

#[test]
fn condition_of_the_wait_for_the_claim_goes_with_the_wait() {
    let mut vmi = with_tpm(true);
    let shown = json!([
        {"type": "Ready", "status": "False"},
        {"type": "Synchronized", "status": "False", "reason": "BackendStorageNotReady", "message": "PVC pending"},
    ]);
    vmi.status.as_mut().unwrap().conditions = serde_json::from_value(shown).unwrap();
    let name = crate::persistent_state::name_for_vmi(&vmi);
    let pending = json!({"status": {"phase": "Pending"}});
    for (change, stays) in [(pending, true), (json!({}), false)] {
        let decision = decide(&Observed { state: state(&[claim(&name, &change)], false), ..observed(&vmi) }).unwrap();
        let creates = |effect: &Effect| matches!(effect, Effect::Create { kind: Kind::Pod, .. });
        assert_eq!(decision.effects.iter().any(creates), !stays, "{change}");
        assert_eq!(condition_in(&status_of(&decision), "Synchronized").is_object(), stays, "{change}");
    }
}

#[test]
fn vm_whose_state_is_in_one_of_two_claims_does_not_start() {
    let vmi = with_tpm(true);
    let open = State { undecided: Some("mig".to_owned()), ..state(&[claim("c", &json!({}))], false) };
    let seen = seen(Observed { state: open, ..observed(&vmi) });
    assert_eq!((seen.0, seen.1), (None, None));
    assert_eq!(seen.2["reason"], "BackendStorageNotReady");
    assert!(seen.2["message"].as_str().unwrap().contains("migration mig"), "{}", seen.2);
}

#[test]
fn missing_class_and_refused_creation_are_shown() {
    let vmi = with_tpm(true);
    let none = State { choice: Some(Err("no default storage class found".to_owned())), ..State::default() };
    let without_class = seen(Observed { state: none, ..observed(&vmi) });
    assert_eq!((without_class.0, without_class.1), (None, None));
    assert_eq!(without_class.2["reason"], "FailedBackendStorageCreate");
    assert_eq!(without_class.2["message"], "no default storage class found");
    let failure = Failure {
        reason: "FailedBackendStorageCreate",
        message: "exceeded quota".to_owned(),
        retry_at: "2030-01-01T00:02:00Z".parse().unwrap(),
        attempts: 1,
    };
    let refused = seen(Observed { state: state(&[], false), failures: Some(failure).into(), ..observed(&vmi) });
    assert_eq!((refused.0, &refused.2["message"]), (None, &json!("exceeded quota")));
}

#[test]
fn claim_of_a_vm_that_keeps_no_state_any_more_is_deleted_and_no_other() {
    let deleted = |vmi: &VirtualMachineInstance, claim: Arc<CachedClaim>| {
        let decision = decide(&Observed { state: state(&[claim], false), ..observed(vmi) }).unwrap();
        let has = |wanted: Kind| {
            decision.effects.iter().any(|effect| match effect {
                Effect::Create { kind, .. } => wanted == Kind::Pod && *kind == wanted,
                Effect::Delete { kind, .. } => wanted == Kind::Claim && *kind == wanted,
                _ => false,
            })
        };
        (has(Kind::Claim), has(Kind::Pod))
    };
    assert_eq!(deleted(&with_tpm(false), claim("c", &json!({}))), (true, true));
    assert_eq!(deleted(&with_tpm(true), claim("c", &json!({}))), (false, true));
    let by_user = json!({"metadata": {"ownerReferences": null}});
    assert_eq!(deleted(&with_tpm(false), claim("c", &by_user)), (false, true));
    // It does not belong to the VM.
    let other = json!({"metadata": {"labels": {"persistent-state-for": "x"}}});
    assert_eq!(deleted(&with_tpm(false), claim("c", &other)), (false, true));
}

#[test]
fn claim_with_the_state_is_known_by_its_mount() {
    let pod_with = |name: &str, path: &str| {
        let volumes = json!([
            {"name": "vm-state", "persistentVolumeClaim": {"claimName": "of-the-user"}},
            {"name": "vm-state-own", "persistentVolumeClaim": {"claimName": "c"}},
        ]);
        let compute = json!({"name": "compute", "volumeMounts": [{"name": name, "mountPath": path}]});
        super::pod(&json!({"spec": {"volumes": volumes, "containers": [compute]}})).state_claim
    };
    let directory = "/var/run/kubevirt-private/vm-state";
    assert_eq!(pod_with("vm-state", directory).as_deref(), Some("of-the-user"));
    assert_eq!(pod_with("vm-state-own", directory).as_deref(), Some("c"));
    assert_eq!(pod_with("vm-state", "/var/run/kubevirt-private/vmi-disks/vm-state"), None);
}

#[test]
fn claim_of_the_present_pod_is_first_in_the_volume_status() {
    let mut vmi = in_phase("Running");
    vmi.spec = with_tpm(true).spec;
    let entries = json!([{"name": "a", "target": "vda"}]);
    vmi.status.as_mut().unwrap().volume_status = serde_json::from_value(entries).unwrap();
    let mut pod = running_pod(&json!({"type": "Ready", "status": "True"}));
    pod.state_claim = Some("c".to_owned());
    let decision = decide(&Observed {
        pods: vec![Arc::new(pod)],
        state: state(&[claim("c", &json!({}))], false),
        ..observed(&vmi)
    });
    assert_eq!(
        status_of(&decision.unwrap())["volumeStatus"],
        json!([
            {"name": "persistent-state-for-this-vm", "target": "",
                "persistentVolumeClaimInfo": {"claimName": "c", "accessModes": ["ReadWriteMany"]}},
            {"name": "a", "target": "vda"},
        ])
    );
}
