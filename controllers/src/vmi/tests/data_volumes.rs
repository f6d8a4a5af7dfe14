//! VMIs with claims that DataVolumes fill.

use super::*;
use crate::data_volumes::tests::{claim, volume};

/// A VMI with a volume for each DataVolume.
fn with_volumes(names: &[&str], change: &Value) -> VirtualMachineInstance {
    let volumes: Vec<Value> = names.iter().map(|name| json!({"name": name, "dataVolume": {"name": name}})).collect();
    let mut spec = json!({"spec": {"volumes": volumes}});
    json_patch::merge(&mut spec, change);
    vmi(&spec)
}

/// Returns what is observed of a VMI whose claims are in these phases, with DataVolumes in those.
fn with_phases(instance: &VirtualMachineInstance, phases: &[(&str, &str, &str)]) -> Observed {
    let ready = |phase: &str| {
        let status = if phase == "Succeeded" { "True" } else { "False" };
        json!([{"type": "Ready", "status": status}])
    };
    Observed {
        claims: phases.iter().map(|(name, claimed, _)| claim(name, claimed, &json!({}))).collect(),
        data_volumes: DataVolumes {
            known: phases.iter().map(|(name, _, phase)| volume(name, phase, &ready(phase))).collect(),
            absent: false,
        },
        ..observed(instance)
    }
}

fn temporary(change: &Value) -> Arc<CachedPod> {
    let mut bare = json!({
        "metadata": {"name": "virt-launcher-m-t", "uid": "t"},
        "spec": {"nodeName": null, "containers": [{"name": "compute", "command": ["/usr/bin/virt-launcher", "bind-claims"]}]},
        "status": {"conditions": null},
    });
    json_patch::merge(&mut bare, change);
    Arc::new(pod(&bare))
}

/// Returns `launcher` or `temporary` for a created pod, `delete` for a deleted one, and the reasons of events.
fn effects(decision: &Decision) -> Vec<&str> {
    let effects = decision.effects.iter().filter_map(|effect| match effect {
        Effect::Create { kind: Kind::Pod, object, .. } => {
            let is_temporary = object["metadata"]["annotations"]["kubevirt.io/ephemeral-provisioning"] == "true";
            Some(if is_temporary { "temporary" } else { "launcher" })
        }
        Effect::Delete { kind: Kind::Pod, name, grace_seconds: Some(0), .. } => {
            assert_eq!(name, "virt-launcher-m-t");
            Some("delete")
        }
        Effect::Event(event) => Some(event.reason),
        _ => None,
    });
    effects.collect()
}

#[test]
fn pod_follows_the_least_ready_claim() {
    let pending = |name| (name, "Pending", "WaitForFirstConsumer");
    // Claims with their DataVolumes, a temporary pod exists; effects.
    for (phases, exists, expected) in [
        (vec![("a", "Bound", "Succeeded")], false, vec!["launcher"]),
        (vec![("a", "Pending", "PendingPopulation")], false, vec!["launcher"]),
        (vec![pending("a")], false, vec!["temporary"]),
        (vec![pending("a")], true, vec![]),
        // It is bound, and its data is on its way.
        (vec![("a", "Bound", "WaitForFirstConsumer")], true, vec!["delete"]),
        (vec![("a", "Bound", "ImportInProgress")], false, vec![]),
        (vec![("a", "Bound", "Succeeded")], true, vec!["delete"]),
        // The other claim has a say in the choice of the node.
        (vec![pending("a"), ("b", "Bound", "ImportInProgress")], false, vec![]),
        (vec![pending("a"), ("b", "Pending", "PendingPopulation")], false, vec!["temporary"]),
        // Not all claims are bound yet.
        (vec![pending("a"), ("b", "Bound", "WaitForFirstConsumer")], true, vec![]),
        (vec![("a", "Lost", "Failed")], false, vec!["FailedDataVolumeImport"]),
        (vec![pending("a"), ("b", "Lost", "Failed")], true, vec!["FailedDataVolumeImport"]),
    ] {
        let names: Vec<&str> = phases.iter().map(|(name, ..)| *name).collect();
        let instance = with_volumes(&names, &json!({}));
        let pods = exists.then(|| temporary(&json!({}))).into_iter().collect();
        let decision = decide(&Observed { temporary: pods, ..with_phases(&instance, &phases) }).unwrap();
        assert_eq!(effects(&decision), expected, "{phases:?} {exists}");
        let fails = patch_of(&decision, Kind::Instance).is_some_and(|patch| patch["status"]["phase"] == "Failed");
        assert_eq!(fails, expected == ["FailedDataVolumeImport"], "{phases:?}");
    }
}

#[test]
fn ready_data_volumes_cause_no_write_before_the_pod_is_bound() {
    let instance = with_volumes(&["a"], &json!({}));
    let decision = decide(&with_phases(&instance, &[("a", "Bound", "Succeeded")])).unwrap();
    assert!(matches!(decision.effects.as_slice(), [Effect::Create { kind: Kind::Pod, .. }]), "{decision:?}");
}

#[test]
fn vmi_shows_what_it_waits_for() {
    let instance = with_volumes(&["a", "b"], &json!({}));
    let observed = with_phases(&instance, &[("a", "Bound", "Succeeded"), ("b", "Bound", "ImportInProgress")]);
    let status = status_of(&decide(&observed).unwrap());
    let provisioning = condition_in(&status, "Provisioning");
    assert_eq!(provisioning["status"], "True");
    assert_eq!(provisioning["message"], "the phase of DataVolume b is ImportInProgress");
    let ready = condition_in(&status, "DataVolumesReady");
    assert_eq!((&ready["status"], &ready["reason"]), (&json!("False"), &json!("NotAllDVsReady")));
    assert_eq!(ready["message"], "Not all of the VMI's DVs are ready");
    assert_eq!(condition_in(&status, "Ready")["reason"], "PodNotExists");
    // Shown once.
    let shown = with_volumes(&["a", "b"], &json!({"status": status}));
    assert_eq!(decide(&Observed { instance: Arc::new(shown.clone()), ..observed }).unwrap(), Decision::settled());
    // Both conditions follow.
    let mut observed = with_phases(&shown, &[("a", "Bound", "Succeeded"), ("b", "Bound", "Succeeded")]);
    observed.pods = vec![Arc::new(pod(&json!({})))];
    let status = status_of(&decide(&observed).unwrap());
    assert_eq!(condition_in(&status, "Provisioning"), Value::Null);
    let ready = condition_in(&status, "DataVolumesReady");
    assert_eq!((&ready["status"], &ready["reason"]), (&json!("True"), &json!("AllDVsReady")));
    assert_eq!(ready["message"], "All of the VMI's DVs are bound and ready");
}

#[test]
fn condition_goes_with_the_data_volumes_and_is_unknown_without_theirs() {
    let condition = json!({"type": "DataVolumesReady", "status": "True", "reason": "AllDVsReady",
        "message": "All of the VMI's DVs are bound and ready"});
    let shown = with_volumes(&["a"], &json!({"status": {"phase": "Scheduling", "conditions": [condition]}}));
    let pods = || vec![Arc::new(pod(&json!({})))];
    let gone = Observed { pods: pods(), ..observed(&shown) };
    assert_eq!(condition_in(&status_of(&decide(&gone).unwrap()), "DataVolumesReady"), Value::Null);
    let known = [volume("a", "Succeeded", &json!([]))].into();
    let data_volumes = DataVolumes { known, absent: false };
    let silent = Observed { pods: pods(), data_volumes, ..observed(&shown) };
    assert_eq!(condition_in(&status_of(&decide(&silent).unwrap()), "DataVolumesReady")["status"], "Unknown");
}

#[test]
fn claim_without_its_data_volume_is_an_error_unless_there_are_none() {
    let instance = with_volumes(&["a"], &json!({}));
    let of = |absent| {
        let claims = [claim("a", "Bound", &json!({}))].into();
        decide(&Observed {
            claims,
            data_volumes: DataVolumes { absent, ..DataVolumes::default() },
            ..observed(&instance)
        })
    };
    let decision = of(false).unwrap();
    assert_eq!(effects(&decision), ["FailedPvcNotFound"]);
    let condition = condition_in(&status_of(&decision), "Synchronized");
    assert_eq!(condition["reason"], "FailedDataVolumeImport");
    assert_eq!(condition["message"], "Error determining if volume is ready: unable to find datavolume d/a");
    assert_eq!(effects(&of(true).unwrap()), ["launcher"]);
}

#[test]
fn hot_plugged_data_volumes_hold_nothing_back() {
    let volumes = json!([{"name": "a", "dataVolume": {"name": "a", "hotpluggable": true}}]);
    let instance = vmi(&json!({"spec": {"volumes": volumes}}));
    for phase in ["ImportInProgress", "WaitForFirstConsumer", "Failed"] {
        let decision = decide(&with_phases(&instance, &[("a", "Pending", phase)])).unwrap();
        assert_eq!(effects(&decision), ["launcher"], "{phase}");
    }
}

#[test]
fn temporary_pod_shows_that_it_cannot_be_scheduled_and_its_failure_ends_the_vmi() {
    let instance = with_volumes(&["a"], &json!({}));
    let with = |claimed: &str, status: Value| {
        let observed = with_phases(&instance, &[("a", claimed, "WaitForFirstConsumer")]);
        decide(&Observed { temporary: vec![temporary(&json!({"status": status}))], ..observed }).unwrap()
    };
    let unscheduled =
        json!({"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "no node"});
    let status = status_of(&with("Pending", json!({"conditions": [unscheduled]})));
    assert_eq!(status.get("phase"), None);
    assert_eq!(condition_in(&status, "PodScheduled")["message"], "no node");
    let decision = with("Pending", json!({"phase": "Failed", "reason": "Evicted"}));
    let status = status_of(&decision);
    assert_eq!((&status["phase"], &status["reason"]), (&json!("Failed"), &json!("Evicted")));
    // The claim was deleted and made again since the pod has ended.
    let ended = |created: &str| {
        let observed = with_phases(&instance, &[("a", "Pending", "WaitForFirstConsumer")]);
        let pod = temporary(&json!({"metadata": {"creationTimestamp": created}, "status": {"phase": "Succeeded"}}));
        decide(&Observed { temporary: vec![pod], ..observed }).unwrap()
    };
    assert_eq!(effects(&ended("2029-12-31T23:00:00Z")), ["delete"]);
    let young = ended(&now().to_string());
    assert_eq!((effects(&young), young.wake_after), (vec![], Some(std::time::Duration::from_secs(30))));
    // The claim was bound before.
    let decision = with("Bound", json!({"phase": "Failed"}));
    assert_eq!(effects(&decision), ["delete"]);
    assert_eq!(status_of(&decision).get("phase"), None);
}

#[test]
fn deleted_vmi_leaves_no_temporary_pod() {
    let deleted = json!({"metadata": {"deletionTimestamp": "2030-01-01T00:00:30Z"}});
    let instance = with_volumes(&["a"], &deleted);
    let observed = with_phases(&instance, &[("a", "Pending", "WaitForFirstConsumer")]);
    let decision = decide(&Observed { temporary: vec![temporary(&json!({}))], ..observed }).unwrap();
    assert_eq!(effects(&decision), ["delete"]);
    assert_eq!(status_of(&decision)["phase"], "Failed");
}
