//! Hibernated VMs.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;

use super::*;

const FILE: &str = "v-cafe-1.memory.save";
const CLAIM: &str = "hibernation-of-v-cafe";

fn status(phase: &str, more: &Value) -> Value {
    let mut known = json!({"phase": phase, "claimName": CLAIM, "fileName": FILE, "ownsClaim": true});
    json_patch::merge(&mut known, more);
    json!({"hibernation": known, "runStrategy": "Always", "operation": {
        "operation": "Hibernation", "name": "v", "uid": "vm-uid",
    }})
}

/// A VM in this phase, whose saved guest has one more volume than its template.
fn hibernating(strategy: &str, phase: &str) -> VirtualMachine {
    let volumes = json!([{"name": "cd", "containerDisk": {"image": "i"}}, {"name": "was", "secret": {}}]);
    let spec = json!({"domain": {"devices": {}}, "volumes": volumes});
    let instance =
        json!({"spec": spec, "annotations": {"kubevirt.io/vm-generation": "1"}, "revisionName": "r", "nodeName": "n"});
    vm(
        &json!({"runStrategy": strategy, "template": {"spec": {"volumes": []}}}),
        &status(
            phase,
            &if ["Hibernated", "Resuming"].contains(&phase) { json!({"instance": instance}) } else { json!({}) },
        ),
    )
}

/// A VMI in this phase, with saved memory in that phase.
fn vmi(vm: &VirtualMachine, phase: &str, memory: Option<&str>) -> VirtualMachineInstance {
    let mut vmi = instance(vm, phase);
    let status = vmi.status.as_mut().unwrap();
    status.hibernation = memory.map(|phase| {
        serde_json::from_value(json!({"claimName": CLAIM, "fileName": FILE, "phase": phase, "message": "why"})).unwrap()
    });
    if memory.is_some() {
        memory_dump::put(&mut vmi.spec, CLAIM, true);
    }
    vmi
}

fn claim() -> Arc<CachedClaim> {
    let metadata = json!({"name": CLAIM, "namespace": "d", "uid": "c", "ownerReferences": [{
        "apiVersion": "kubevirt.io/v1", "kind": "VirtualMachine", "name": "v", "uid": "vm-uid", "controller": true,
    }]});
    Arc::new(CachedClaim { metadata: serde_json::from_value(metadata).unwrap(), ..CachedClaim::default() })
}

fn decided_with_claim(vm: &VirtualMachine, vmi: Option<&VirtualMachineInstance>, has_claim: bool) -> Decision {
    let hibernation_claim = has_claim.then(claim);
    decide(&Observed { hibernation_claim, ..observed(vm, vmi, None, &ClusterConfig::default()) }).unwrap()
}

/// Returns the writes of claims and VMIs, in their order, and the phase that is written.
fn acts(decision: &Decision) -> (Vec<&'static str>, Option<String>) {
    let names = decision.effects.iter().filter_map(|effect| match effect {
        Effect::Create { kind: Kind::Claim, .. } => Some("create claim"),
        Effect::Delete { kind: Kind::Claim, .. } => Some("delete claim"),
        Effect::Create { kind: Kind::Instance, .. } => Some("create VMI"),
        Effect::Delete { kind: Kind::Instance, .. } => Some("delete VMI"),
        Effect::Patch { kind: Kind::Instance, .. } => Some("change VMI"),
        _ => None,
    });
    let status = status_patch(decision);
    let written = match status.get("hibernation") {
        None => None,
        Some(Value::Null) => Some("none".to_owned()),
        Some(changed) => changed["phase"].as_str().map(str::to_owned),
    };
    (names.collect(), written)
}

#[test]
fn each_phase_is_recorded_before_its_consequence() {
    // Run strategy, phase, the VMI and its memory, the claim; what is written, and the next phase.
    for (strategy, phase, vmi_phase, memory, has_claim, writes, next) in [
        ("Always", "Requested", Some("Running"), None, false, &[][..], Some("Saving")),
        ("Always", "Requested", Some("Scheduled"), None, false, &[], Some("Failed")),
        ("Always", "Saving", Some("Running"), None, false, &["create claim"], None),
        ("Always", "Saving", Some("Running"), None, true, &["change VMI"], None),
        ("Always", "Saving", Some("Running"), Some("Requested"), true, &[], None),
        ("Always", "Saving", Some("Running"), Some("Saving"), true, &[], None),
        ("Always", "Saving", Some("Running"), Some("SaveFailed"), true, &[], Some("Failed")),
        // The VMI stays until the record is written, whatever the run strategy says.
        ("Always", "Saving", Some("Succeeded"), Some("Saved"), true, &[], Some("Hibernated")),
        ("Manual", "Saving", Some("Succeeded"), Some("Saved"), true, &[], Some("Hibernated")),
        ("Halted", "Saving", Some("Succeeded"), Some("Saved"), true, &[], Some("Hibernated")),
        ("Always", "Saving", Some("Failed"), Some("Saving"), true, &[], Some("Failed")),
        ("Always", "Hibernated", Some("Succeeded"), Some("Saved"), true, &["delete VMI"], None),
        ("Once", "Hibernated", Some("Succeeded"), Some("Saved"), true, &["delete VMI"], None),
        ("Always", "Hibernated", None, None, true, &[], None),
        ("Once", "Hibernated", None, None, true, &[], None),
        ("RerunOnFailure", "Hibernated", None, None, true, &[], None),
        ("Halted", "Hibernated", None, None, true, &[], None),
        ("Always", "Resuming", None, None, true, &["create VMI"], None),
        ("Manual", "Resuming", None, None, true, &["create VMI"], None),
        ("Halted", "Resuming", None, None, true, &[], Some("Hibernated")),
        ("Always", "Resuming", Some("Scheduled"), Some("Restoring"), true, &[], None),
        ("Always", "Resuming", Some("Failed"), Some("Restoring"), true, &[], Some("Hibernated")),
        ("Always", "Resuming", Some("Running"), Some("Restored"), true, &[], Some("Removing")),
        ("Always", "Resuming", Some("Failed"), Some("Restored"), true, &[], Some("Removing")),
        ("Always", "Removing", Some("Running"), Some("Restored"), true, &["change VMI"], None),
        ("Always", "Removing", Some("Running"), None, true, &["delete claim"], None),
        ("Always", "Removing", Some("Running"), None, false, &[], Some("none")),
        ("Always", "Failed", Some("Running"), Some("SaveFailed"), true, &["change VMI"], None),
        ("Always", "Failed", Some("Running"), None, true, &["delete claim"], None),
    ] {
        let vm = hibernating(strategy, phase);
        let mut started_from = vm.clone();
        // The objects of the test are made without a resume.
        started_from.status = None;
        let vmi = vmi_phase.map(|at| vmi(&started_from, at, memory));
        let decision = decided_with_claim(&vm, vmi.as_ref(), has_claim);
        let (found, written) = acts(&decision);
        let row = format!("{strategy} {phase} {vmi_phase:?} {memory:?}");
        assert_eq!(found, writes, "{row}");
        assert_eq!(written.filter(|written| written != phase).as_deref(), next, "{row}");
    }
}

#[test]
fn guest_with_other_interfaces_than_at_its_start_is_not_saved() {
    // One may be plugged by the decision that accepts the request. A save that the VMI names holds them back.
    for (phase, memory, next) in
        [("Requested", None, Some("Failed")), ("Saving", None, Some("Failed")), ("Saving", Some("Requested"), None)]
    {
        let vm = hibernating("Always", phase);
        let mut vmi = vmi(&VirtualMachine { status: None, ..vm.clone() }, "Running", memory);
        let mark = ("ferrovirt.io/interfaces-changed".to_owned(), "true".to_owned());
        vmi.metadata.annotations.get_or_insert_default().extend([mark]);
        let (writes, written) = acts(&decided_with_claim(&vm, Some(&vmi), true));
        assert!(!writes.contains(&"change VMI"), "{phase} {memory:?}");
        assert_eq!(written.filter(|written| written != phase).as_deref(), next, "{phase} {memory:?}");
    }
}

#[test]
fn only_a_start_by_a_user_resumes() {
    let start = json!({"stateChangeRequests": [{"action": "Start"}]});
    for (strategy, change, resumes) in [
        ("Always", json!({}), false),
        ("Always", start.clone(), true),
        ("Manual", start.clone(), true),
        ("RerunOnFailure", start.clone(), true),
        ("Once", start, true),
        // It was stopped while it was hibernated, or before.
        ("Always", json!({"runStrategy": "Halted"}), true),
        ("RerunOnFailure", json!({"runStrategy": "Halted"}), true),
        ("Halted", json!({"runStrategy": "Halted"}), false),
    ] {
        let mut vm = hibernating(strategy, "Hibernated");
        let mut status = serde_json::to_value(&vm.status).unwrap();
        json_patch::merge(&mut status, &change);
        vm.status = serde_json::from_value(status).unwrap();
        let (writes, next) = acts(&decided_with_claim(&vm, None, true));
        assert_eq!(
            (writes.as_slice(), next.as_deref()),
            (&[][..], resumes.then_some("Resuming")),
            "{strategy} {change}"
        );
    }
}

#[test]
fn save_that_does_not_begin_in_time_is_given_up_in_its_vmi() {
    let bound = "PVC hibernation-of-v-cafe was not bound within five minutes: no such image";
    let attached = "the save to PVC hibernation-of-v-cafe did not begin within five minutes: no such image";
    // The memory in the VMI, the claim, the minutes since the VM has the lease; why it is given up, or when it is looked at again.
    for (memory, claim_phase, minutes, given_up, wake) in [
        (Some("Requested"), Some("Pending"), 4, None, Some(60)),
        (Some("Requested"), Some("Pending"), 5, Some(bound), None),
        (Some("Requested"), Some("Bound"), 4, None, Some(60)),
        (Some("Requested"), Some("Bound"), 5, Some(attached), None),
        // It has begun.
        (Some("Saving"), Some("Bound"), 5, None, None),
        (Some("Saving"), Some("Pending"), 5, None, None),
        // A quota refuses it.
        (None, None, 4, None, Some(60)),
        (None, None, 5, Some(bound), None),
        // The VMI does not show it yet.
        (None, Some("Bound"), 4, None, Some(60)),
        (None, Some("Bound"), 5, Some(attached), None),
    ] {
        let mut vm = hibernating("Always", "Saving");
        let mut vmi = vmi(&VirtualMachine { status: None, ..vm.clone() }, "Running", memory);
        let entry = json!([{"name": CLAIM, "target": "", "message": "no such image"}]);
        vmi.status.as_mut().unwrap().volume_status = serde_json::from_value(entry).unwrap();
        let since = "2030-01-01T00:00:00Z".parse().unwrap();
        vm.status.as_mut().unwrap().operation.as_mut().unwrap().since = Some(Time(since));
        let made = claim_phase.map(|phase| Arc::new(CachedClaim { phase: phase.to_owned(), ..(*claim()).clone() }));
        let decision = decide(&Observed {
            hibernation_claim: made,
            now: format!("2030-01-01T00:0{minutes}:00Z").parse().unwrap(),
            ..observed(&vm, Some(&vmi), None, &ClusterConfig::default())
        })
        .unwrap();
        let row = format!("{memory:?} {claim_phase:?} {minutes}");
        let ends = decision.effects.iter().find_map(|effect| match effect {
            Effect::Patch { kind: Kind::Instance, patch, .. } => {
                Some(&patch["status"]["hibernation"]).filter(|memory| memory["phase"] == "SaveFailed")
            }
            _ => None,
        });
        assert_eq!(ends.and_then(|memory| memory["message"].as_str()), given_up, "{row}");
        assert!(acts(&decision).1.is_none_or(|written| written == "Saving"), "{row}: the VM follows its VMI");
        if let Some(wake) = wake {
            assert_eq!(decision.wake_after, Some(Duration::from_secs(wake)), "{row}");
        }
    }
}

#[test]
fn hibernated_vm_without_its_claim_waits_for_the_user() {
    let mut vm = hibernating("Manual", "Hibernated");
    let start = json!([{"action": "Start"}]);
    vm.status.as_mut().unwrap().state_change_requests = serde_json::from_value(start).unwrap();
    let decision = decided_with_claim(&vm, None, false);
    let status = status_patch(&decision);
    let message = status["hibernation"]["message"].as_str().unwrap();
    assert!(message.starts_with(&format!("PVC {CLAIM} not found")), "{message}");
    let shown = status["conditions"].as_array().unwrap().iter().find(|shown| shown["type"] == "Hibernated").unwrap();
    assert_eq!((&shown["status"], &shown["reason"]), (&json!("True"), &json!("ResumeFailed")));
    let (writes, phase) = acts(&decision);
    assert!(writes.is_empty() && phase.is_none_or(|phase| phase == "Hibernated"));
    // The claim is there again, and nobody has started the VM.
    let known = vm.status.as_mut().unwrap();
    known.state_change_requests = Vec::new();
    known.hibernation.as_mut().unwrap().message = Some(message.to_owned());
    let status = status_patch(&decided_with_claim(&vm, None, true));
    assert_eq!(status["hibernation"].get("message"), Some(&Value::Null));
}

#[test]
fn guest_is_not_resumed_with_other_disks() {
    let disk = |uid: &str| {
        let metadata = serde_json::from_value(json!({"name": "root", "namespace": "d", "uid": uid})).unwrap();
        Arc::new(CachedClaim { metadata, ..CachedClaim::default() })
    };
    let other = "PVC root was deleted after the guest was saved, and a new one has other data: \
                 discard the saved memory to boot";
    // The phase, the claims in the record, the disk, the last message; the next phase, and its message.
    for (phase, recorded, present, message, next, shown) in [
        ("Hibernated", json!({"root": "a"}), Some("a"), None, Some("Resuming"), None),
        ("Hibernated", json!({"root": "a"}), Some("b"), None, None, Some(other)),
        ("Hibernated", json!({"root": "a"}), None, None, None, Some(other)),
        ("Hibernated", json!({"root": "a"}), Some("a"), Some(other), Some("Resuming"), None),
        // An older release wrote the record.
        ("Hibernated", json!({}), Some("b"), None, Some("Resuming"), None),
        ("Hibernated", json!({}), None, None, Some("Resuming"), None),
        // The start had to wait.
        ("Resuming", json!({"root": "a"}), Some("b"), None, Some("Hibernated"), Some(other)),
    ] {
        let mut vm = hibernating("Manual", phase);
        let status = vm.status.as_mut().unwrap();
        status.state_change_requests = serde_json::from_value(json!([{"action": "Start"}])).unwrap();
        let known = status.hibernation.as_mut().unwrap();
        known.message = message.map(str::to_owned);
        known.instance.as_mut().unwrap().claims = serde_json::from_value(recorded.clone()).unwrap();
        let observed = Observed {
            hibernation_claim: Some(claim()),
            claims: present.map(|uid| ("root".to_owned(), disk(uid))).into_iter().collect(),
            ..observed(&vm, None, None, &ClusterConfig::default())
        };
        let decision = decide(&observed).unwrap();
        let (writes, written) = acts(&decision);
        let row = format!("{phase} {recorded} {present:?} {message:?}");
        assert!(writes.is_empty(), "{row}");
        assert_eq!(written.as_deref().filter(|written| *written != phase), next, "{row}");
        assert_eq!(status_patch(&decision)["hibernation"]["message"].as_str(), shown, "{row}");
    }
}

#[test]
fn the_saved_guest_is_resumed_as_it_was() {
    let decision = decided_with_claim(&hibernating("Always", "Resuming"), None, true);
    let created = decision.effects.iter().find_map(|effect| match effect {
        Effect::Create { kind: Kind::Instance, object, .. } => Some(object),
        _ => None,
    });
    let created = created.unwrap();
    let names: Vec<&Value> =
        created["spec"]["volumes"].as_array().unwrap().iter().map(|volume| &volume["name"]).collect();
    assert_eq!(names, ["cd", "was", CLAIM]);
    assert_eq!(created["metadata"]["annotations"]["kubevirt.io/vm-generation"], "1");
    assert_eq!(created["status"]["virtualMachineRevisionName"], "r");
    let memory = json!({"claimName": CLAIM, "fileName": FILE, "phase": "Restoring", "preferredNode": "n"});
    assert_eq!(created["status"]["hibernation"], memory);
    assert!(records(&decision).is_empty(), "the record of the start stays");
}

#[test]
fn record_holds_what_was_chosen_at_the_start() {
    let vm = hibernating("Always", "Saving");
    let mut vmi = vmi(&vm, "Succeeded", Some("Saved"));
    vmi.spec.domain.devices.interfaces =
        serde_json::from_value(json!([{"name": "default", "masquerade": {}}])).unwrap();
    let status = vmi.status.as_mut().unwrap();
    status.machine = serde_json::from_value(json!({"type": "pc-q35-9.2"})).unwrap();
    status.interfaces = serde_json::from_value(json!([{"name": "default", "mac": "02:00:00:00:00:01"}])).unwrap();
    let disk = json!({"name": "root", "persistentVolumeClaim": {"claimName": "root"}});
    vmi.spec.volumes.push(serde_json::from_value(disk).unwrap());
    let root = CachedClaim {
        metadata: serde_json::from_value(json!({"name": "root", "namespace": "d", "uid": "root-uid"})).unwrap(),
        ..CachedClaim::default()
    };
    let claims = [("root".to_owned(), Arc::new(root)), (CLAIM.to_owned(), claim())];
    let observed = Observed {
        hibernation_claim: Some(claim()),
        claims: claims.into(),
        ..observed(&vm, Some(&vmi), None, &ClusterConfig::default())
    };
    let written = status_patch(&decide(&observed).unwrap());
    assert_eq!(written["hibernation"]["instance"]["claims"], json!({"root": "root-uid"}));
    let saved = &written["hibernation"]["instance"]["spec"];
    assert_eq!(saved["domain"]["machine"]["type"], "pc-q35-9.2");
    assert_eq!(saved["domain"]["devices"]["interfaces"][0]["macAddress"], "02:00:00:00:00:01");
    assert_eq!(saved["volumes"].as_array().map(Vec::len), Some(1), "without that of the memory: {saved}");
}

#[test]
fn state_shows_in_lease_condition_and_status() {
    for (phase, vmi_phase, held, hibernated, printable) in [
        ("Saving", Some("Running"), true, Some("False"), "Running"),
        ("Hibernated", None, true, Some("True"), "Stopped"),
        ("Removing", None, false, None, "Starting"),
    ] {
        let mut vm = hibernating("Always", phase);
        vm.status.as_mut().unwrap().operation = None;
        let vmi = vmi_phase.map(|at| vmi(&vm, at, Some("Saving")));
        let decision = decided_with_claim(&vm, vmi.as_ref(), true);
        let status = status_patch(&decision);
        if status.is_null() {
            // The VMI is created first.
            assert!(creates(&decision) && phase == "Removing");
            continue;
        }
        assert_eq!(status["operation"]["operation"] == "Hibernation", held, "{phase}: {status}");
        let conditions = status["conditions"].as_array().unwrap();
        let shown = conditions.iter().find(|shown| shown["type"] == "Hibernated").map(|shown| &shown["status"]);
        assert_eq!(shown.and_then(Value::as_str), hibernated, "{phase}");
        assert_eq!(status["printableStatus"], printable, "{phase}");
    }
}

#[test]
fn claim_is_one_of_the_vm_with_room_for_its_memory() {
    let vm = hibernating("Always", "Saving");
    let mut vmi = vmi(&vm, "Running", None);
    vmi.spec.domain.memory = serde_json::from_value(json!({"guest": "1Gi"})).unwrap();
    let decision = decided_with_claim(&vm, Some(&vmi), false);
    let made = decision.effects.iter().find_map(|effect| match effect {
        Effect::Create { kind: Kind::Claim, object, .. } => Some(object),
        _ => None,
    });
    let made = made.unwrap();
    assert_eq!(made["spec"]["resources"]["requests"]["storage"], "1355Mi");
    assert_eq!(
        (&made["metadata"]["ownerReferences"][0]["uid"], &made["metadata"]["name"]),
        (&json!("vm-uid"), &json!(CLAIM))
    );
}
