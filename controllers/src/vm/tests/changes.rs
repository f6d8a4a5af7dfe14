//! What changes of a VM do to the machine that runs, and what is kept of a start.

use api::config::RolloutStrategy;

use super::*;

/// The VM of the tests at generation 3 with its spec changed, and the machine started at generation 2.
fn changed(change: &Value) -> (VirtualMachine, VirtualMachineInstance) {
    let spec = json!({"runStrategy": "Always", "template": {"spec": {"nodeSelector": {"disk": "fast"}}}});
    let first = vm(&spec, &json!({"runStrategy": "Always"}));
    let machine = instance(&first, "Running");
    let mut next = serde_json::to_value(first).unwrap();
    json_patch::merge(&mut next["spec"], change);
    next["metadata"]["generation"] = json!(3);
    (serde_json::from_value(next).unwrap(), machine)
}

fn machine_patch(decision: &Decision) -> Value {
    let patch = decision.effects.iter().find_map(|effect| match effect {
        Effect::Patch { kind: Kind::Instance, patch, .. } => Some(patch.clone()),
        _ => None,
    });
    patch.unwrap_or(Value::Null)
}

fn with_rollout(vm: &VirtualMachine, machine: &VirtualMachineInstance, rollout: RolloutStrategy) -> Decision {
    let config = ClusterConfig { vm_rollout_strategy: rollout, ..ClusterConfig::default() };
    decide(&observed(vm, Some(machine), None, &config)).unwrap()
}

#[test]
fn generation_says_what_the_machine_reflects_and_placement_reaches_it() {
    let raised = json!({"metadata": {"annotations": {"kubevirt.io/vm-generation": "3"}}});
    let tolerations = json!([{"key": "k", "operator": "Exists"}]);
    let (live, stage) = (RolloutStrategy::LiveUpdate, RolloutStrategy::Stage);
    // change, rollout strategy, patch of the machine, observed generation, asks for a restart
    let table: [(Value, RolloutStrategy, Value, i64, bool); 8] = [
        (json!({"runStrategy": "RerunOnFailure"}), live, raised, 3, false),
        (json!({"template": {"metadata": {"labels": {"key": "v"}}}}), live, Value::Null, 2, false),
        (json!({"template": {"metadata": {"annotations": {"key": "v"}}}}), live, Value::Null, 2, false),
        (json!({"template": {"spec": {"hostname": "other"}}}), live, Value::Null, 2, true),
        (
            json!({"template": {"spec": {"nodeSelector": {"disk": null}, "tolerations": tolerations}}}),
            live,
            json!({"spec": {"nodeSelector": null, "tolerations": tolerations}}),
            2,
            false,
        ),
        (
            json!({"template": {"spec": {"affinity": {"podAffinity": {}}}}}),
            live,
            json!({"spec": {"affinity": {"podAffinity": {}}}}),
            2,
            false,
        ),
        // A machine that waits for a restart gets the rest then, too.
        (
            json!({"template": {"spec": {"hostname": "other", "nodeSelector": {"disk": "slow"}}}}),
            live,
            Value::Null,
            2,
            true,
        ),
        (json!({"template": {"spec": {"nodeSelector": {"disk": "slow"}}}}), stage, Value::Null, 2, true),
    ];
    for (change, rollout, patch, generation, restart) in table {
        let (vm, machine) = changed(&change);
        let decision = with_rollout(&vm, &machine, rollout);
        assert_eq!(machine_patch(&decision), patch, "{change}");
        let status = status_patch(&decision);
        assert_eq!(status["observedGeneration"], generation, "{change}");
        assert_eq!(status["desiredGeneration"], 3);
        assert_eq!(status["conditions"].to_string().contains("RestartRequired"), restart, "{change} {status}");
    }
}

#[test]
fn machine_that_took_a_change_over_is_settled() {
    for change in [json!({"runStrategy": "RerunOnFailure"}), json!({"template": {"spec": {"nodeSelector": null}}})] {
        let (mut vm, mut machine) = changed(&change);
        let decision = decided(&vm, Some(&machine));
        let mut next = serde_json::to_value(&machine).unwrap();
        json_patch::merge(&mut next, &machine_patch(&decision));
        machine = serde_json::from_value(next).unwrap();
        let mut status = serde_json::to_value(&vm.status).unwrap();
        json_patch::merge(&mut status, &status_patch(&decision));
        vm.status = serde_json::from_value(status).unwrap();
        assert_eq!(decided(&vm, Some(&machine)), Decision::settled(), "{change}");
    }
}

#[test]
fn refused_change_of_a_machine_shows_and_waits() {
    let (vm, machine) = changed(&json!({"runStrategy": "RerunOnFailure"}));
    let failure = Failure {
        reason: "FailedUpdateError",
        message: "denied".to_owned(),
        retry_at: "2030-01-01T00:01:10Z".parse().unwrap(),
        attempts: 1,
    };
    let decision = decided_with(&vm, Some(&machine), Some(&failure));
    assert_eq!(machine_patch(&decision), Value::Null);
    assert_eq!(decision.wake_after, Some(std::time::Duration::from_secs(10)));
    let conditions = status_patch(&decision)["conditions"].to_string();
    assert!(conditions.contains("Failure while updating VMI: denied"), "{conditions}");
}

#[test]
fn start_is_kept_before_its_machine_is_made_and_names_it() {
    let vm = with_strategy("Always", &Value::Null);
    let decision = decided(&vm, None);
    let [Effect::Create { kind: Kind::ControllerRevision, object, notes, .. }, Effect::Create { object: machine, .. }] =
        decision.effects.as_slice()
    else {
        panic!("{decision:?}")
    };
    let name = "revision-start-vm-vm-uid-2";
    assert_eq!(object["metadata"]["name"], name);
    assert_eq!(object["metadata"]["ownerReferences"][0]["uid"], "vm-uid");
    assert_eq!(object["revision"], 2);
    assert_eq!(object["data"]["spec"], serde_json::to_value(&vm.spec).unwrap());
    assert!(notes.existing_will_do);
    assert_eq!(machine["status"]["virtualMachineRevisionName"], name);
}

#[test]
fn next_start_takes_the_place_of_the_former() {
    let vm = with_strategy("Always", &Value::Null);
    let start = |generation: i64| {
        let name = format!("revision-start-vm-vm-uid-{generation}");
        Arc::new(StartView { metadata: serde_json::from_value(json!({"name": name, "namespace": "d"})).unwrap() })
    };
    let config = ClusterConfig::default();
    // generations kept, deleted, made
    let table: [(&[i64], &[&str], usize); 3] =
        [(&[], &[], 1), (&[2], &[], 0), (&[1, 2], &["revision-start-vm-vm-uid-1"], 0)];
    for (kept, gone, made) in table {
        let starts: Vec<Arc<StartView>> = kept.iter().copied().map(start).collect();
        let decision = decide(&Observed { starts: &starts, ..observed(&vm, None, None, &config) }).unwrap();
        let deleted = decision.effects.iter().filter_map(|effect| match effect {
            Effect::Delete { kind: Kind::ControllerRevision, name, .. } => Some(name.as_str()),
            _ => None,
        });
        assert_eq!(deleted.collect::<Vec<_>>(), gone, "{kept:?}");
        let creations = decision
            .effects
            .iter()
            .filter(|effect| matches!(effect, Effect::Create { kind: Kind::ControllerRevision, .. }));
        assert_eq!(creations.count(), made, "{kept:?}");
        assert!(creates(&decision));
        // While it runs, nothing is taken away.
        let running = instance(&vm, "Running");
        let decision = decide(&Observed { starts: &starts, ..observed(&vm, Some(&running), None, &config) }).unwrap();
        assert!(!decision.effects.iter().any(|effect| matches!(effect, Effect::Delete { .. })));
    }
}

#[test]
fn failure_is_counted_before_its_machine_is_deleted() {
    for strategy in ["Always", "RerunOnFailure"] {
        let vm = with_strategy(strategy, &json!({"runStrategy": strategy}));
        let decision = decided(&vm, Some(&instance(&vm, "Failed")));
        let [Effect::Patch { subresource: Some("status"), patch, .. }, Effect::Delete { kind: Kind::Instance, .. }] =
            decision.effects.as_slice()
        else {
            panic!("{decision:?}")
        };
        assert_eq!(patch["status"]["startFailure"]["consecutiveFailCount"], 1, "{strategy}");
        assert_eq!(patch["status"]["printableStatus"], "CrashLoopBackOff", "{strategy}");
    }
}

#[test]
fn volumes_are_listed_as_not_to_be_snapshotted() {
    let status = status_patch(&decided(&with_strategy("Halted", &Value::Null), None));
    let reason = "Snapshot is not supported for this volumeSource type [cd]";
    assert_eq!(status["volumeSnapshotStatuses"], json!([{"name": "cd", "enabled": false, "reason": reason}]));
}

#[test]
fn what_a_vm_says_to_backups_and_deschedulers_reaches_its_machine() {
    let (skip, evict) = ("kubevirt.io/skip-backup-hooks", "descheduler.alpha.kubernetes.io/evict");
    // annotations of the VM, of its template, of the machine, patch of the machine
    let table = [
        (json!({skip: "true"}), json!({}), json!({}), json!({"metadata": {"annotations": {skip: "true"}}})),
        (json!({skip: "true"}), json!({}), json!({skip: "true"}), Value::Null),
        (json!({skip: "false"}), json!({skip: "true"}), json!({skip: "false"}), Value::Null),
        (json!({}), json!({skip: "true"}), json!({skip: "true"}), Value::Null),
        (json!({}), json!({}), json!({skip: "true"}), json!({"metadata": {"annotations": {skip: null}}})),
        (json!({}), json!({evict: "true"}), json!({}), json!({"metadata": {"annotations": {evict: "true"}}})),
        (json!({evict: "true"}), json!({}), json!({}), Value::Null),
    ];
    for (own, template, known, patch) in table {
        let template = json!({"metadata": {"annotations": template}});
        let mut vm = vm(&json!({"runStrategy": "Always", "template": template}), &json!({"runStrategy": "Always"}));
        vm.metadata.annotations = serde_json::from_value(own.clone()).unwrap();
        let mut machine = instance(&vm, "Running");
        let annotations = machine.metadata.annotations.get_or_insert_default();
        annotations.remove(skip);
        annotations.remove(evict);
        annotations
            .extend(serde_json::from_value::<std::collections::BTreeMap<String, String>>(known.clone()).unwrap());
        for rollout in [RolloutStrategy::LiveUpdate, RolloutStrategy::Stage] {
            assert_eq!(machine_patch(&with_rollout(&vm, &machine, rollout)), patch, "{own} {template} {known}");
        }
    }
}
