//! Networks that are plugged into the pod of a running VMI, and unplugged.

use super::*;

/// A running VMI with the interface `lan`, which the status shows with these sources.
fn with_lan(state: &str, sources: &str, conditions: &Value) -> VirtualMachineInstance {
    let shown: Vec<Value> =
        (!sources.is_empty()).then(|| json!({"name": "lan", "infoSource": sources})).into_iter().collect();
    let mut vmi = serde_json::to_value(in_phase("Running")).unwrap();
    json_patch::merge(
        &mut vmi,
        &json!({
            "spec": {
                "domain": {"devices": {"interfaces": [{"name": "lan", "bridge": {}, "state": state}]}},
                "networks": [{"name": "lan", "multus": {"networkName": "other/net"}}],
            },
            "status": {"interfaces": shown, "conditions": conditions},
        }),
    );
    serde_json::from_value(vmi).unwrap()
}

/// A pod with this request for networks.
fn with_request(request: &str) -> CachedPod {
    let pod = json!({
        "metadata": {
            "name": "virt-launcher-m-x", "namespace": "d", "uid": "p", "labels": {"kubevirt.io/nodeName": "n"},
            "annotations": {"k8s.v1.cni.cncf.io/networks": request, "pre.hook.backup.velero.io/container": "compute"},
        },
        "spec": {"nodeName": "n", "containers": [{"name": "compute", "image": "launcher:1"}]},
        "status": {"phase": "Running"},
    });
    CachedPod::from(serde_json::from_value::<Pod>(pod).unwrap())
}

#[test]
fn request_of_the_pod_follows_the_interfaces_of_the_vmi() {
    let lan = r#"[{"interface":"pod094a367b026","name":"net","namespace":"other"}]"#;
    let requested = |vmi: &VirtualMachineInstance, pod: &str| {
        let patch = crate::vmi::networks::request(vmi, &with_request(pod));
        patch.unwrap_or_default()
    };
    for (state, sources, present, expected) in [
        ("", "", "", lan),
        ("", "", lan, ""),
        // Connected: whatever others write into the request of the pod stays.
        ("", "domain, multus-status", "", ""),
        ("absent", "domain, multus-status", lan, ""),
        ("absent", "multus-status", lan, "[]"),
        ("absent", "multus-status", "[]", ""),
    ] {
        let vmi = with_lan(state, sources, &json!([]));
        assert_eq!(requested(&vmi, present), expected, "{state} {sources} {present}");
    }
    let decision = decided(&with_lan("", "", &json!([])), &[with_request("")]);
    let patches: Vec<&Value> = decision
        .effects
        .iter()
        .filter_map(|effect| match effect {
            Effect::Patch { kind: Kind::Pod, subresource: None, patch, .. } => Some(patch),
            _ => None,
        })
        .collect();
    assert_eq!(patches[0]["metadata"]["annotations"]["k8s.v1.cni.cncf.io/networks"], lan);
}

#[test]
fn pod_without_the_networks_of_its_vmi_needs_a_migration() {
    let condition = |status: &str, age: i64| {
        let at = now() - jiff::SignedDuration::from_secs(age);
        json!([{"type": "MigrationRequired", "status": status, "lastTransitionTime": at.to_string()}])
    };
    let pending = Some(("False", "AutoMigrationPending"));
    let due = Some(("True", "AutoMigrationDueToLiveUpdate"));
    for (state, sources, conditions, expected, wakes) in [
        ("", "multus-status", json!([]), None, None),
        ("", "", json!([]), pending, Some(15)),
        ("", "", condition("False", 5), pending, Some(10)),
        ("", "", condition("False", 16), due, None),
        ("", "", condition("True", 3), due, None),
        ("", "domain", condition("True", 3), None, None),
        ("absent", "domain, multus-status", json!([]), None, None),
        ("absent", "multus-status", json!([]), pending, Some(15)),
        ("absent", "", condition("False", 3), None, None),
    ] {
        let vmi = with_lan(state, sources, &conditions);
        let (mut wanted, mut decision) = (vmi.clone(), Decision::settled());
        migration_required::update(&observed(&vmi), None, &mut wanted, &mut decision);
        let shown = wanted.condition("MigrationRequired");
        let found = shown.map(|shown| (shown.status.as_str(), shown.reason.as_deref().unwrap_or_default()));
        assert_eq!(found, expected, "{state} {sources} {conditions}");
        assert_eq!(decision.wake_after.map(|after| after.as_secs()), wakes, "{state} {sources} {conditions}");
    }
}

#[test]
fn pod_on_another_network_needs_a_migration_at_once() {
    let attached = |name: &str| {
        let status = json!([{"name": name, "interface": "pod094a367b026"}]).to_string();
        let pod = json!({
            "metadata": {"name": "p", "annotations": {"k8s.v1.cni.cncf.io/network-status": status}},
            "spec": {"containers": [{"name": "compute"}]},
        });
        CachedPod::from(serde_json::from_value::<Pod>(pod).unwrap())
    };
    let migrating = json!({"startTimestamp": "2030-01-01T00:00:00Z"});
    // Definition in the spec, network of the pod, state of a migration; condition.
    for (definition, present, state, expected) in [
        ("other/net", "other/net", Value::Null, None),
        ("other/net", "other/former", Value::Null, Some("True")),
        ("net", "d/net", Value::Null, None),
        ("net", "net", Value::Null, None),
        ("net", "other/net", Value::Null, Some("True")),
        // A plugin that reports no name proves nothing.
        ("other/net", "", Value::Null, None),
        ("other/net", "other/former", migrating, None),
    ] {
        let mut vmi = with_lan("", "domain, multus-status", &json!([]));
        vmi.spec.networks[0].multus.as_mut().unwrap().network_name = definition.to_owned();
        vmi.status.as_mut().unwrap().migration_state = serde_json::from_value(state.clone()).unwrap();
        let (mut wanted, mut decision) = (vmi.clone(), Decision::settled());
        migration_required::update(&observed(&vmi), Some(&attached(present)), &mut wanted, &mut decision);
        let shown = wanted.condition("MigrationRequired");
        assert_eq!(shown.map(|shown| shown.status.as_str()), expected, "{definition} {present} {state}");
        assert!(shown.is_none_or(|shown| shown.reason.as_deref() == Some("AutoMigrationDueToLiveUpdate")));
        assert_eq!(decision.wake_after, None);
    }
}
