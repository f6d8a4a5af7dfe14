//! Finalizers of VMs, and disks that outlive them.

use super::*;

const LEAVING: &str = "2030-01-01T00:00:00Z";

/// The finalizer of pools, and the time of the deletion.
fn vm(is_held: bool, is_deleting: bool) -> Value {
    let held = if is_held { json!(["other", "pool.kubevirt.io/finalizer"]) } else { json!(["other"]) };
    let volumes = json!([{"name": "a", "dataVolume": {"name": "disk"}}]);
    json!({
        "metadata": {"finalizers": held, "deletionTimestamp": is_deleting.then_some(LEAVING)},
        "spec": {"template": {"spec": {"volumes": volumes}}},
    })
}

fn preserving(state: &str) -> Value {
    json!({"spec": {"replicas": 1, "scaleInStrategy": {"proactive": {"statePreservation": state}}}})
}

#[test]
fn finalizer_is_there_while_the_state_is_preserved() {
    let deleted = |mut pool: Value| {
        json_patch::merge(&mut pool, &json!({"metadata": {"deletionTimestamp": LEAVING}}));
        pool
    };
    let nothing = json!({"spec": {"replicas": 1}});
    let opportunistic =
        json!({"spec": {"replicas": 1, "scaleInStrategy": {"opportunistic": {"statePreservation": "Offline"}}}});
    let paused = json!({"spec": {"replicas": 1, "paused": true}});
    for (settings, is_held, is_deleting, expected) in [
        (nothing.clone(), false, false, None),
        (nothing.clone(), true, false, Some(false)),
        (nothing, true, true, Some(false)),
        (paused, true, true, Some(false)),
        (preserving("Disabled"), true, true, Some(false)),
        (preserving("Offline"), false, false, Some(true)),
        (preserving("Online"), false, false, Some(true)),
        (opportunistic, false, false, Some(true)),
        (preserving("Offline"), true, false, None),
        // A VM that is deleted takes no further finalizers.
        (preserving("Offline"), false, true, None),
        (preserving("Offline"), true, true, Some(false)),
        (deleted(preserving("Offline")), true, false, Some(false)),
        (deleted(preserving("Offline")), true, true, Some(false)),
    ] {
        let observed = observed(pool(&settings), vec![member(0, &vm(is_held, is_deleting), &json!({}))]);
        let effects = decide(&observed).unwrap().effects;
        let written = effects.iter().find_map(|effect| match effect {
            Effect::Patch { kind: Kind::VirtualMachine, patch, options, .. } => {
                assert!(options.independent);
                Some(patch["metadata"]["finalizers"].clone())
            }
            _ => None,
        });
        let list = |set: bool| if set { json!(["other", "pool.kubevirt.io/finalizer"]) } else { json!(["other"]) };
        assert_eq!(written, expected.map(list), "{settings} {is_held} {is_deleting}");
    }
}

#[test]
fn disks_are_detached_before_their_vm_goes() {
    let owners = |uid: &str| {
        json!([
            {"apiVersion": "v1", "kind": "ConfigMap", "name": "other", "uid": "other"},
            {"apiVersion": "kubevirt.io/v1", "kind": "VirtualMachine", "name": "p-0", "uid": uid, "controller": true},
        ])
    };
    let metadata = |name: &str, uid: &str| json!({"name": name, "namespace": "n", "uid": name, "resourceVersion": "1", "ownerReferences": owners(uid)});
    let mut observed = observed(pool(&preserving("Offline")), vec![member(0, &vm(true, true), &json!({}))]);
    let volume =
        |uid: &str| Arc::new(serde_json::from_value(json!({"metadata": metadata("disk", uid), "spec": {}})).unwrap());
    let claim = json!({"metadata": metadata("claim", "uid-0")});
    let claim: k8s_openapi::api::core::v1::PersistentVolumeClaim = serde_json::from_value(claim).unwrap();
    observed.data_volumes = vec![volume("uid-0")];
    observed.claims = vec![Arc::new(claim.into())];
    let decision = decide(&observed).unwrap();
    let detached: Vec<(Kind, &Value)> = decision
        .effects
        .iter()
        .filter_map(|effect| match effect {
            Effect::Patch { kind, patch, options, .. } if options.independent => {
                Some((*kind, &patch["metadata"]["ownerReferences"]))
            }
            _ => None,
        })
        .collect();
    let other = json!([{"apiVersion": "v1", "kind": "ConfigMap", "name": "other", "uid": "other"}]);
    assert_eq!(detached, [(Kind::DataVolume, &other), (Kind::Claim, &other)]);
    assert!(decision.wake_after.is_some());
    // Disks of others do not count.
    (observed.data_volumes, observed.claims) = (vec![volume("another")], vec![]);
    assert_eq!(lines(&observed), ["patch VirtualMachine p-0 metadata:finalizers"]);
}

#[test]
fn vm_is_deleted_only_once_its_disks_are_safe() {
    let failing = json!({"status": {"startFailure": {"consecutiveFailCount": 3}}});
    for (change, vm_change) in
        [(json!({"spec": {"replicas": 0}}), json!({})), (json!({"spec": {"autohealing": {}}}), failing)]
    {
        for (state, is_held, deletes) in [("Disabled", false, true), ("Offline", true, true), ("Offline", false, false)]
        {
            let mut settings = preserving(state);
            let former = pool(&settings);
            json_patch::merge(&mut settings, &change);
            let mut object = vm(is_held, false);
            json_patch::merge(&mut object, &vm_change);
            let mut observed = observed(pool(&settings), vec![member(0, &object, &json!({}))]);
            observed.revisions = vec![revision("p-1", 1, &former.spec), revision("p-2", 2, &observed.pool.spec)];
            let lines = lines(&observed);
            let is_deleted = lines.contains(&"delete VirtualMachine p-0".to_owned());
            assert_eq!(is_deleted, deletes, "{change} {state} {is_held} {lines:?}");
            let is_marked = lines.contains(&"patch VirtualMachine p-0 metadata:finalizers".to_owned());
            assert_eq!(is_marked, state == "Offline" && !is_held, "{change} {state} {is_held} {lines:?}");
        }
    }
}

#[test]
fn deleted_pool_holds_no_vm_also_none_that_its_selector_lost() {
    let mut settings = preserving("Offline");
    json_patch::merge(&mut settings, &json!({"metadata": {"deletionTimestamp": LEAVING}}));
    for label in ["x", "y"] {
        let mut object = vm(true, true);
        json_patch::merge(&mut object, &json!({"metadata": {"labels": {"app": label}}}));
        let found = lines(&observed(pool(&settings), vec![member(0, &object, &json!({}))]));
        assert_eq!(found, ["patch VirtualMachine p-0 metadata:finalizers"], "{label}");
    }
}

#[test]
fn refused_writes_are_repeated_less_and_less_often() {
    for (deleted, seconds) in [
        (json!(null), 5),
        (json!("2030-01-01T01:00:00Z"), 1),
        (json!("2030-01-01T00:59:50Z"), 10),
        (json!("2030-01-01T00:00:00Z"), 60),
    ] {
        let mut object = vm(true, true);
        object["metadata"]["deletionTimestamp"] = deleted.clone();
        let observed = observed(pool(&preserving("Disabled")), vec![member(0, &object, &json!({}))]);
        let wait = decide(&observed).unwrap().wake_after.map(|wait| wait.as_secs());
        assert_eq!(wait, Some(seconds), "{deleted}");
    }
}
