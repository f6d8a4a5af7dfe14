//! Writes of a start and a stop: which are joined, and how those that are missing are made up for.

use super::*;

/// Returns a VMI of a VM in a phase with a change.
fn reported(vm: &VirtualMachine, phase: &str, change: &Value) -> VirtualMachineInstance {
    let mut vmi = serde_json::to_value(instance(vm, phase)).unwrap();
    json_patch::merge(&mut vmi, change);
    serde_json::from_value(vmi).unwrap()
}

/// Returns the change of a VMI with these conditions that has entered its phase at a time.
fn since(phase: &str, at: &str, conditions: Value) -> Value {
    let times = json!([{"phase": phase, "phaseTransitionTimestamp": at}]);
    json!({"status": {"conditions": conditions, "phaseTransitionTimestamps": times, "activePods": {"p": "n"}}})
}

fn ready(status: &str, reason: &str, message: &str) -> Value {
    json!({"type": "Ready", "status": status, "reason": reason, "message": message})
}

fn not_running() -> Value {
    ready("False", "GuestNotRunning", "Guest VM is not reported as running")
}

/// Decides about a VM and writes its status. Returns the status that is written.
fn follow(vm: &mut VirtualMachine, instance: Option<&VirtualMachineInstance>) -> (Value, Decision) {
    let decision = decided(vm, instance);
    let patch = status_patch(&decision);
    if !patch.is_null() {
        let mut status = serde_json::to_value(&vm.status).unwrap();
        json_patch::merge(&mut status, &patch);
        vm.status = serde_json::from_value(status).unwrap();
    }
    (patch, decision)
}

const DELETED: &str = "2030-01-01T00:00:59Z";

#[test]
fn status_is_written_twice_at_a_start_and_twice_at_a_stop() {
    let mut vm = with_strategy("Always", &Value::Null);
    let filled = json!({"type": "DataVolumesReady", "status": "True", "reason": "AllDVsReady"});
    let now = "2030-01-01T00:01:00Z";
    let deleted = |mut vmi: Value| {
        vmi["metadata"] = json!({"deletionTimestamp": DELETED, "finalizers": ["f"]});
        vmi
    };
    let runs = ready("True", "", "");
    let terminating = ready("False", "PodTerminating", "virt-launcher pod is terminating");
    // Phase and change of the VMI; printable status that is written, ready, a change of the VMI is awaited
    for (phase, change, printed, is_ready, awaited) in [
        ("Pending", json!({}), Some("Starting"), false, false),
        ("Scheduling", since("Scheduling", now, json!([not_running(), filled])), None, false, false),
        ("Running", since("Running", now, json!([not_running(), filled])), None, false, true),
        ("Running", since("Running", now, json!([runs, filled])), Some("Running"), true, false),
        ("Running", deleted(since("Running", now, json!([runs]))), Some("Stopping"), false, false),
        ("Running", deleted(since("Running", now, json!([terminating]))), None, false, false),
        ("Succeeded", deleted(since("Succeeded", now, json!([terminating]))), None, false, true),
    ] {
        if phase == "Running" && change["metadata"].is_object() {
            vm.spec.run_strategy = Some(RunStrategy::Halted);
        }
        let vmi = reported(&vm, phase, &change);
        let (written, decision) = follow(&mut vm, Some(&vmi));
        assert_eq!(written["printableStatus"].as_str(), printed, "{phase} {change}: {written}");
        assert_eq!(written.is_null(), printed.is_none(), "{phase} {change}: {written}");
        let status = vm.status.as_ref().unwrap();
        assert_eq!((status.created, status.ready), (true, is_ready), "{phase} {change}");
        assert_eq!(decision.wake_after.is_some(), awaited, "{phase} {change}");
        let types: Vec<&str> = status.conditions.iter().map(|known| known.type_.as_str()).collect();
        assert_eq!(types.contains(&"DataVolumesReady"), is_ready, "{phase} {types:?}");
    }
    let (written, _) = follow(&mut vm, None);
    assert_eq!((&written["printableStatus"], &written["created"]), (&json!("Stopped"), &Value::Null));
    assert_eq!(decided(&vm, None), Decision::settled());
}

#[test]
fn status_waits_for_a_change_that_follows_no_longer_than_two_seconds() {
    let (first, deleting) = ("2030-01-01T00:01:00Z", json!({"deletionTimestamp": DELETED, "finalizers": ["f"]}));
    let (kept, no_requests) = (json!({}), json!([]));
    let start = json!([{"action": "Start"}]);
    // Phase, since, condition Ready, metadata of the VMI, requests; the status waits for seconds
    for (phase, at, condition, metadata, requests, waits) in [
        ("Running", first, not_running(), &kept, &no_requests, Some(2)),
        ("Running", "2030-01-01T00:00:59Z", not_running(), &kept, &no_requests, Some(1)),
        ("Running", "2030-01-01T00:00:58Z", not_running(), &kept, &no_requests, None),
        // The clock of the node is ahead.
        ("Running", "2030-01-01T00:01:01Z", not_running(), &kept, &no_requests, None),
        ("Running", first, ready("False", "ContainersNotReady", ""), &kept, &no_requests, None),
        ("Running", first, ready("True", "", ""), &kept, &no_requests, None),
        // A request is fulfilled, which others wait for.
        ("Running", first, not_running(), &kept, &start, None),
        ("Succeeded", first, not_running(), &deleting, &no_requests, Some(2)),
        ("Succeeded", "2030-01-01T00:00:58Z", not_running(), &deleting, &no_requests, None),
        // It stays.
        ("Succeeded", first, not_running(), &kept, &no_requests, None),
    ] {
        let mut vm = with_strategy("Once", &json!({"runStrategy": "Once"}));
        let pending = instance(&vm, "Pending");
        follow(&mut vm, Some(&pending));
        vm.status.as_mut().unwrap().state_change_requests = serde_json::from_value(requests.clone()).unwrap();
        let mut change = since(phase, at, json!([condition]));
        change["metadata"] = metadata.clone();
        let vmi = reported(&vm, phase, &change);
        let (written, decision) = follow(&mut vm, Some(&vmi));
        assert_eq!(decision.wake_after, waits.map(Duration::from_secs), "{phase} {at} {condition} {requests}");
        assert_eq!(written.is_null(), waits.is_some(), "{phase} {at} {condition} {requests}: {written}");
    }
}

#[test]
fn missing_record_of_a_start_is_made_up_for() {
    let first = with_strategy("Always", &json!({"runStrategy": "Always"}));
    let config = ClusterConfig::default();
    let mut vmi = instance(&first, "Running");
    vmi.spec = start::defaulted_spec(&observed(&first, None, None, &config), &Chosen::default(), false).unwrap();
    let changed = |generation: i64, hostname: Option<&str>| {
        let mut vm = first.clone();
        vm.metadata.generation = Some(generation);
        vm.spec.template.spec.as_mut().unwrap().hostname = hostname.map(str::to_owned);
        vm
    };
    // The VM now; the template is that of the VM, a restart is required
    for (vm, is_of_vm, restart) in
        [(changed(2, None), true, false), (changed(3, None), false, false), (changed(3, Some("other")), false, true)]
    {
        let with = |starts: Vec<Arc<StartRevision>>| {
            decide(&Observed { starts, ..observed(&vm, Some(&vmi), None, &config) }).unwrap()
        };
        let decision = with(Vec::new());
        let Some(Effect::Create { kind: Kind::ControllerRevision, object, .. }) = decision.effects.last() else {
            panic!("{decision:?}")
        };
        assert_eq!(
            (&object["metadata"]["name"], &object["revision"]),
            (&json!("revision-start-vm-vm-uid-2"), &json!(2))
        );
        let template = &object["data"]["spec"]["template"]["spec"];
        let expected = if is_of_vm { json!(first.spec.template.spec) } else { json!(vmi.spec) };
        assert_eq!(*template, expected, "{:?}", vm.metadata.generation);
        let next = with(records(&decision));
        assert!(records(&next).is_empty());
        assert_eq!(status_patch(&next)["conditions"].to_string().contains("RestartRequired"), restart);
    }
}

#[test]
fn record_is_made_up_for_only_where_its_vmi_lives_and_no_refusal_forbids_it() {
    let vm = with_strategy("Once", &json!({"runStrategy": "Once"}));
    let refused = |retry_at: &str| Failure {
        reason: "FailedCreate",
        message: "exceeded quota".to_owned(),
        retry_at: retry_at.parse().unwrap(),
        attempts: 1,
    };
    let (later, due) = (refused("2030-01-01T00:01:10Z"), refused("2030-01-01T00:01:00Z"));
    let named = |name: &str| json!({"status": {"virtualMachineRevisionName": name}});
    let deleted = json!({"metadata": {"deletionTimestamp": DELETED, "finalizers": ["f"]}});
    // Phase and change of the VMI, refusal; the record is created, condition Failure
    for (phase, change, failure, creates, fails) in [
        ("Running", json!({}), None, true, false),
        ("Pending", json!({}), None, true, false),
        ("Running", json!({}), Some(&later), false, true),
        ("Running", json!({}), Some(&due), true, true),
        ("Succeeded", json!({}), None, false, false),
        ("Running", deleted, None, false, false),
        // An adopted VMI, and one without a name.
        ("Running", named("revision-start-vm-other-2"), None, false, false),
        ("Running", json!({"status": {"virtualMachineRevisionName": null}}), None, false, false),
    ] {
        let vmi = reported(&vm, phase, &change);
        let observed = observed(&vm, Some(&vmi), failure, &ClusterConfig::default());
        let decision = decide(&Observed { starts: Vec::new(), ..observed }).unwrap();
        assert_eq!(records(&decision).len(), usize::from(creates), "{phase} {change}");
        let conditions = status_patch(&decision)["conditions"].to_string();
        assert_eq!(conditions.contains("Failure while recording the start: exceeded quota"), fails, "{phase} {change}");
    }
}
