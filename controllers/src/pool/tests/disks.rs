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
