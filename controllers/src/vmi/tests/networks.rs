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

#[test]
fn pod_that_requests_no_networks_has_none_once_it_runs() {
    let vmi = with_lan("absent", "multus-status", &json!([]));
    let shown = |requested: Option<&str>, reported: Option<&str>, runs: bool| {
        let running = running_pod(&json!({"type": "Ready", "status": "True"}));
        let known = [("k8s.v1.cni.cncf.io/networks", requested), ("k8s.v1.cni.cncf.io/network-status", reported)];
        let annotations: serde_json::Map<String, Value> =
            known.into_iter().filter_map(|(key, value)| Some((key.to_owned(), json!(value?)))).collect();
        let read = pod(&json!({"metadata": {"annotations": annotations}}));
        let (requested_networks, networks) = (read.requested_networks, read.networks);
        let pod = CachedPod { requested_networks, networks, compute_running: runs, ..running };
        let mut wanted = vmi.clone();
        derived_status(&observed(&vmi), &[&pod], Some(&pod), &mut wanted);
        wanted.status.unwrap().interfaces.len()
    };
    let lan = r#"[{"interface":"pod094a367b026","name":"net","namespace":"other"}]"#;
    let attached = r#"[{"interface":"pod094a367b026","name":"other/net"}]"#;
    // Request, report of the plugins, the pod runs; interfaces in the status.
    for (requested, reported, runs, expected) in [
        (None, None, true, 0),
        (Some("[]"), None, true, 0),
        (None, None, false, 1),
        // Plugins have not reported yet.
        (Some(lan), None, true, 1),
        (Some("[]"), Some(attached), true, 1),
        (None, Some("[]"), false, 0),
    ] {
        assert_eq!(shown(requested, reported, runs), expected, "{requested:?} {reported:?} {runs}");
    }
}

#[test]
fn pod_that_gets_other_networks_while_it_runs_was_created_for_others() {
    let vmi = with_lan("", "", &json!([]));
    for (networks, is_other) in
        [("[]", true), (r#"[{"interface":"pod094a367b026","name":"net","namespace":"other"}]"#, false)]
    {
        let created_for =
            json!({"launcher": "launcher:1", "networks": crate::launcher_pod::networks_digest(networks), "vcpus": 2});
        let mut pod = with_request("");
        pod.created_for = serde_json::from_value(created_for).unwrap();
        let decision = decided(&vmi, &[pod]);
        let mut patches = decision.effects.iter().filter_map(|effect| match effect {
            Effect::Patch { kind: Kind::Pod, subresource: None, patch, .. } => Some(patch),
            _ => None,
        });
        let annotations = &patches.next_back().unwrap()["metadata"]["annotations"];
        assert!(annotations["k8s.v1.cni.cncf.io/networks"].is_string());
        let text = annotations["ferrovirt.io/created-for"].as_str();
        assert_eq!(text, is_other.then_some(r#"{"launcher":"launcher:1","vcpus":2}"#), "{networks}");
    }
}

#[test]
fn update_without_effect_is_shown_with_an_event() {
    let at = |age: i64| (now() - jiff::SignedDuration::from_secs(age)).to_string();
    let required = || {
        json!({"type": "MigrationRequired", "status": "True", "reason": "AutoMigrationDueToLiveUpdate",
        "lastTransitionTime": at(30)})
    };
    let vmi = with_lan("", "", &json!([required()]));
    let created_for = |instance: &VirtualMachineInstance, image: &str| {
        Some(Box::new(crate::launcher_pod::created_for(instance, image)))
    };
    let other = with_lan("absent", "", &json!([]));
    // Created for, image; reason and message.
    for (created, image, expected) in [
        (created_for(&vmi, "launcher:1"), "launcher:1", Some(("PodNetworksDiffer", "created for the networks"))),
        (
            created_for(&vmi, "launcher:1"),
            "mirror/launcher:1",
            Some(("LauncherImageReplaced", "has mirror/launcher:1")),
        ),
        (created_for(&other, "launcher:0"), "launcher:0", None),
        (created_for(&other, "launcher:1"), "launcher:1", None),
        (None, "mirror/launcher:1", None),
    ] {
        let mut pod = with_request("");
        (pod.created_for, pod.image) = (created.clone(), Some(image.to_owned()));
        let decision = decided(&vmi, &[pod.clone()]);
        let status = patch_of(&decision, Kind::Instance).unwrap_or_default()["status"].clone();
        let conditions = status["conditions"].as_array().cloned().unwrap_or_default();
        let shown = conditions.iter().find(|shown| shown["type"] == "WorkloadUpdateIneffective");
        assert_eq!(
            shown.map(|shown| shown["reason"].as_str().unwrap()),
            expected.map(|(reason, _)| reason),
            "{created:?}"
        );
        let events = decision.effects.iter().filter_map(|effect| match effect {
            Effect::Event(event) if event.reason == "WorkloadUpdateIneffective" => Some(event.message.clone()),
            _ => None,
        });
        let events: Vec<String> = events.collect();
        assert_eq!(events.len(), usize::from(expected.is_some()));
        assert!(events.iter().all(|said| expected.is_some_and(|(_, text)| said.contains(text))), "{events:?}");
        // Once, and no longer than it holds.
        let mut known = serde_json::to_value(&vmi).unwrap();
        json_patch::merge(&mut known, &json!({"status": status}));
        let known: VirtualMachineInstance = serde_json::from_value(known).unwrap();
        let (mut wanted, free) = (known.clone(), CachedPod { created_for: None, ..pod });
        ineffective::update(&observed(&known), Some(&free), &mut wanted);
        assert!(wanted.condition("WorkloadUpdateIneffective").is_none());
        assert!(ineffective::event(&known, &known).is_none());
    }
}
