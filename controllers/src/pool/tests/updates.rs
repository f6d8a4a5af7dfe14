//! Changes of the template.

use jiff::SignedDuration;

use super::*;
use crate::runtime::Controller;

/// The label of another revision.
fn of(name: &str) -> Value {
    json!({"metadata": {"labels": {"kubevirt.io/vm-pool-revision-name": name}}})
}

/// Changes of the pool's template.
fn guest_memory() -> Value {
    json!({"spec": {"virtualMachineTemplate": {"spec": {"template": {"spec": {"domain": {"memory": {"guest": "1Gi"}}}}}}}})
}

fn disks() -> Value {
    let templates = json!([{"metadata": {"name": "disk"}, "spec": {}}]);
    json!({"spec": {"virtualMachineTemplate": {"spec": {"dataVolumeTemplates": templates}}}})
}

fn labels() -> Value {
    json!({"spec": {"virtualMachineTemplate": {"metadata": {"labels": {"b": "c"}}}}})
}

/// Returns an observation of a pool whose template was changed: `p-1` is the former, `p-2` the present one.
fn changed(change: &Value, settings: &Value, members: Vec<Member>) -> Observed {
    let mut of_pool = change.clone();
    json_patch::merge(&mut of_pool, &json!({"metadata": {"generation": 2}}));
    json_patch::merge(&mut of_pool, settings);
    let (former, present) = (pool(settings), pool(&of_pool));
    let revisions = vec![revision("p-1", 1, &former.spec), revision("p-2", 2, &present.spec)];
    Observed { revisions, ..observed(present, members) }
}

#[test]
fn outdated_vms_get_the_template_and_keep_what_is_theirs() {
    let own = json!({
        "metadata": {"labels": {"mine": "1"}, "annotations": {"mine": "2"}},
        "spec": {"template": {
            "metadata": {"annotations": {"kubevirt.io/pci-topology-version": "v3"}},
            "spec": {
                "architecture": "amd64",
                "domain": {"machine": {"type": "pc-q35-9.2"}, "firmware": {"uuid": "u", "serial": "s"}},
            },
        }},
    });
    let mut observed =
        changed(&guest_memory(), &json!({}), vec![member(0, &own, &json!({})), member(1, &of("p-2"), &of("p-2"))]);
    // The former template had a label that the present one lacks.
    observed.revisions[0] = revision(
        "p-1",
        1,
        &pool(&json!({"spec": {"virtualMachineTemplate": {"metadata": {"labels": {"old": "x"}}}}})).spec,
    );
    let vm = Arc::make_mut(&mut observed.members[0].vm);
    vm.metadata.labels.get_or_insert_default().insert("old".to_owned(), "x".to_owned());
    let decision = decide(&observed).unwrap();
    let Effect::Patch { patch, name, .. } = &decision.effects[0] else { panic!("{decision:?}") };
    assert_eq!(name, "p-0");
    assert_eq!(patch["metadata"], json!({"labels": {"kubevirt.io/vm-pool-revision-name": "p-2", "old": null}}));
    let template = json!({
        "metadata": {"labels": {"kubevirt.io/vm-pool-revision-name": "p-2"}},
        "spec": {"domain": {"memory": {"guest": "1Gi"}}},
    });
    assert_eq!(patch["spec"], json!({"template": template}));
    assert_eq!(decision.effects.len(), 2, "{decision:?}");
}

#[test]
fn vm_of_another_revision_with_the_same_template_is_not_changed() {
    // Scaling is a change of the spec, but not of the template.
    let scaled = changed(&json!({"spec": {"replicas": 3}}), &json!({}), running(&[0, 1, 2]));
    assert_eq!(lines(&scaled), ["delete ControllerRevision p-2"]);
}

#[test]
fn strategies_decide_how_far_an_update_goes() {
    let members = || vec![member(0, &json!({}), &json!({})), member(1, &of("p-2"), &json!({}))];
    let patched = "patch VirtualMachine p-0 metadata:labels spec:template";
    for (strategy, expected) in [
        (json!(null), vec![patched, "delete VirtualMachineInstance p-1"]),
        (json!({"proactive": {}}), vec![patched, "delete VirtualMachineInstance p-1"]),
        (json!({"opportunistic": {}}), vec![patched]),
        (json!({"unmanaged": {}}), vec![]),
        (
            json!({"proactive": {"selectionPolicy": {"selectors": {"labelSelector": {"matchLabels": {"no": "such"}}}}}}),
            vec![],
        ),
    ] {
        let settings = json!({"spec": {"updateStrategy": strategy}});
        let mut found = lines(&changed(&guest_memory(), &settings, members()));
        // Revisions are kept as long as an object names them.
        found.retain(|line| !line.starts_with("delete ControllerRevision"));
        assert_eq!(found, expected, "{strategy}");
    }
}

#[test]
fn vmi_is_handled_as_its_change_requires() {
    let requested = json!({"spec": {"runStrategy": "Manual"}});
    let strategy = |name: &str| json!({"spec": {"runStrategy": name}});
    let with = |mut vm: Value, other: &Value| {
        json_patch::merge(&mut vm, other);
        vm
    };
    let required = json!({"status": {"conditions": [{"type": "Ready", "status": "True"}, {"type": "RestartRequired", "status": "True"}]}});
    let unseen = json!({"metadata": {"generation": 2}});
    for (change, vm, vmi, expected) in [
        (guest_memory(), of("p-2"), of("p-2"), ""),
        (guest_memory(), of("p-2"), of("p-1"), "delete VirtualMachineInstance p-0"),
        (disks(), of("p-2"), of("p-1"), "delete VirtualMachine p-0 in the foreground"),
        (
            disks(),
            with(of("p-2"), &json!({"metadata": {"finalizers": ["snapshot.kubevirt.io/snapshot-source-protection"]}})),
            of("p-1"),
            "",
        ),
        (labels(), of("p-2"), of("p-1"), "patch VirtualMachineInstance p-0 metadata:labels"),
        (guest_memory(), with(of("p-2"), &requested), of("p-1"), "patch VirtualMachine p-0 status:stateChangeRequests"),
        (
            guest_memory(),
            with(of("p-2"), &strategy("RerunOnFailure")),
            of("p-1"),
            "patch VirtualMachine p-0 status:stateChangeRequests",
        ),
        (guest_memory(), with(of("p-2"), &strategy("Once")), of("p-1"), ""),
        (guest_memory(), with(of("p-2"), &strategy("Halted")), of("p-1"), ""),
        // Nobody knows the template of the VMI.
        (guest_memory(), of("p-2"), of("gone"), "patch VirtualMachineInstance p-0 metadata:labels"),
        (guest_memory(), with(of("p-2"), &required), of("gone"), "delete VirtualMachineInstance p-0"),
        (guest_memory(), with(of("p-2"), &unseen), of("gone"), ""),
        // It goes, or has gone.
        (guest_memory(), of("p-2"), json!(null), ""),
        (guest_memory(), of("p-2"), with(of("p-1"), &json!({"status": {"phase": "Succeeded"}})), ""),
    ] {
        let observed = changed(&change, &json!({"spec": {"replicas": 1}}), vec![member(0, &vm, &vmi)]);
        let mut found = lines(&observed);
        found.retain(|line| !line.starts_with("delete ControllerRevision"));
        assert_eq!(found, if expected.is_empty() { vec![] } else { vec![expected] }, "{change} {vm} {vmi}");
    }
}

#[test]
fn changed_disks_replace_no_vm_whose_state_is_preserved() {
    let strategy = json!({"proactive": {"statePreservation": "Offline"}});
    let preserving = json!({"spec": {"replicas": 1, "scaleInStrategy": strategy}});
    let mut held = of("p-2");
    held["metadata"]["finalizers"] = json!(["pool.kubevirt.io/finalizer"]);
    let mut both = disks();
    json_patch::merge(&mut both, &guest_memory());
    for (change, expected, is_reported) in [
        (disks(), "patch VirtualMachineInstance p-0 metadata:labels", false),
        (both, "delete VirtualMachineInstance p-0", true),
    ] {
        let observed = changed(&change, &preserving, vec![member(0, &held, &of("p-1"))]);
        let mut found = lines(&observed);
        found.retain(|line| !line.starts_with("delete ControllerRevision"));
        assert_eq!(found, [expected]);
        let reported = decide(&observed).unwrap().effects.iter().any(|effect| match effect {
            Effect::Patch { kind: Kind::Instance, options, .. }
            | Effect::Delete { kind: Kind::Instance, options, .. } => options.success.is_some(),
            _ => false,
        });
        assert_eq!(reported, is_reported, "{change}");
    }
}

#[test]
fn never_more_vms_are_down_than_permitted() {
    let down = json!({"status": {"conditions": [{"type": "Ready", "status": "False"}]}, "metadata": {"labels": {"kubevirt.io/vm-pool-revision-name": "p-1"}}});
    let current =
        json!({"status": {"conditions": []}, "metadata": {"labels": {"kubevirt.io/vm-pool-revision-name": "p-2"}}});
    // limit, VMIs, restarted
    for (limit, vmis, restarted) in [
        (json!(null), vec![of("p-1"); 4], 4),
        (json!(1), vec![of("p-1"); 4], 1),
        (json!("50%"), vec![of("p-1"); 4], 2),
        (json!("10%"), vec![of("p-1"); 4], 1),
        // One is down already.
        (json!(1), vec![json!(null), of("p-1"), of("p-1"), of("p-1")], 0),
        (json!(2), vec![json!(null), of("p-1"), of("p-1"), of("p-1")], 1),
        (json!(1), vec![current, of("p-1"), of("p-1"), of("p-1")], 0),
        // One that is down itself is restarted in any case, the others wait for it.
        (json!(1), vec![down, of("p-1"), of("p-1"), of("p-1")], 1),
        // A VM is missing.
        (json!(1), vec![of("p-1"), of("p-1"), of("p-1")], 0),
    ] {
        let members = vmis.iter().zip(0..).map(|(vmi, index)| member(index, &of("p-2"), vmi)).collect();
        let settings = json!({"spec": {"replicas": 4, "maxUnavailable": limit}});
        let found = lines(&changed(&guest_memory(), &settings, members));
        let count = found.iter().filter(|line| line.starts_with("delete VirtualMachineInstance")).count();
        assert_eq!(count, restarted, "{limit} {vmis:?}");
    }
}

#[test]
fn records_are_kept_while_an_object_names_them() {
    let pruned = |members: Vec<Member>| {
        let observed = changed(&guest_memory(), &json!({"spec": {"updateStrategy": {"unmanaged": {}}}}), members);
        lines(&observed).into_iter().filter(|line| line.starts_with("delete ControllerRevision")).collect::<Vec<_>>()
    };
    assert_eq!(pruned(running(&[0, 1])), ["delete ControllerRevision p-2"]);
    let vmi_of_the_former = vec![member(0, &of("p-2"), &of("p-1")), member(1, &of("p-2"), &of("p-2"))];
    assert_eq!(pruned(vmi_of_the_former), Vec::<String>::new());
    let current = vec![member(0, &of("p-2"), &of("p-2")), member(1, &of("p-2"), &of("p-2"))];
    assert_eq!(pruned(current), ["delete ControllerRevision p-1"]);
}

#[test]
fn vm_whose_record_is_gone_is_changed() {
    let members = vec![member(0, &of("gone"), &json!({})), member(1, &of("p-1"), &json!({}))];
    let observed = observed(pool(&json!({})), members);
    assert_eq!(lines(&observed)[0], "patch VirtualMachine p-0 metadata:labels spec:template");
}

#[test]
fn missing_record_is_made_while_an_object_names_it() {
    let settings = json!({"spec": {"replicas": 1, "updateStrategy": {"unmanaged": {}}}});
    let creation = "create ControllerRevision p-1".to_owned();
    for (vm, vmi) in [("p-1", "p-1"), ("p-0", "p-1"), ("p-1", "p-0"), ("p-0", "p-0")] {
        let mut observed = observed(pool(&settings), vec![member(0, &of(vm), &of(vmi))]);
        assert!(!lines(&observed).contains(&creation), "{vm} {vmi}");
        observed.revisions.clear();
        assert_eq!(lines(&observed).contains(&creation), [vm, vmi].contains(&"p-1"), "{vm} {vmi}");
    }
}

#[test]
fn record_whose_name_is_taken_is_tried_once_a_minute() {
    let settings = json!({"spec": {"replicas": 1, "updateStrategy": {"unmanaged": {}}}});
    let (mut observed, pools) = (observed(pool(&settings), running(&[0])), Pools::default());
    observed.revisions.clear();
    for (seconds, is_made) in [(0, true), (59, false), (60, true), (61, false)] {
        observed.now = now().checked_add(SignedDuration::from_secs(seconds)).unwrap();
        observed.is_tried = pools.has_tried(&observed.pool, observed.now);
        let decision = pools.decide(&observed).unwrap();
        let is_record = |effect: &Effect| matches!(effect, Effect::Create { kind: Kind::ControllerRevision, .. });
        assert_eq!(decision.effects.iter().any(is_record), is_made, "{seconds}");
    }
    // A refusal is shown until it is tried again.
    observed.failure = failure("FailedUpdate");
    assert_eq!(status(&observed)["conditions"][0]["type"], "ReplicaFailure");
    observed.failure = None;
    // Another revision.
    Arc::make_mut(&mut observed.pool).metadata.generation = Some(2);
    assert!(!pools.has_tried(&observed.pool, observed.now));
}

#[test]
fn record_of_a_former_pool_makes_room() {
    for members in [vec![], running(&[0, 1])] {
        let mut observed = observed(pool(&json!({})), members);
        observed.left = observed.revisions.pop();
        let decision = decide(&observed).unwrap();
        let [
            Effect::Delete { kind: Kind::ControllerRevision, uid: Some(uid), .. },
            Effect::Create { kind: Kind::ControllerRevision, object, .. },
            ..,
        ] = &decision.effects[..]
        else {
            panic!("{decision:?}")
        };
        assert_eq!((uid.as_str(), &object["metadata"]["name"]), ("p-1", &json!("p-1")));
        assert_eq!(decision.wake_after, Some(std::time::Duration::from_secs(5)));
        // A refusal shows and waits.
        let reason = if observed.members.is_empty() { "FailedCreate" } else { "FailedUpdate" };
        observed.failure = failure(reason);
        let found = lines(&observed);
        assert!(!found.iter().any(|line| line.contains("ControllerRevision")), "{found:?}");
        assert_eq!(status(&observed)["conditions"][0]["type"], "ReplicaFailure");
    }
}

#[test]
fn refusals_of_two_kinds_wait_and_take_turns() {
    let (patched, created) = ("patch VirtualMachine p-", "create VirtualMachine p-3");
    let earlier = "2030-01-01T00:59:59Z";
    let later = "2030-01-01T01:00:10Z";
    for (reason, attempts, retry_at, expected) in [
        // The other kind continues once.
        ("FailedUpdate", 1, later, vec![created]),
        ("FailedCreate", 1, later, vec!["0", "1", "2"]),
        ("FailedUpdate", 2, later, vec![]),
        ("FailedCreate", 2, later, vec![]),
        ("FailedCreate", 2, earlier, vec!["0", "1", "2", created]),
        // Each attempt begins with another VM.
        ("FailedUpdate", 2, earlier, vec![created, "2", "0", "1"]),
        ("FailedUpdate", 4, earlier, vec![created, "1", "2", "0"]),
    ] {
        let strategy = json!({"proactive": {"selectionPolicy": {"sortPolicy": "AscendingOrder"}}});
        let settings = json!({"spec": {"replicas": 4, "updateStrategy": strategy}});
        let mut observed = changed(&guest_memory(), &settings, running(&[0, 1, 2]));
        let retry_at = retry_at.parse().unwrap();
        observed.failure = Some(Failure { reason, message: "denied".to_owned(), retry_at, attempts });
        let found = lines(&observed);
        let found = found.iter().filter(|line| line.starts_with(patched) || *line == created);
        let number = |line: &String| line.strip_prefix(patched).map(|line| line[..1].to_owned());
        let found: Vec<String> = found.map(|line| number(line).unwrap_or_else(|| line.clone())).collect();
        assert_eq!(found, expected, "{reason} {attempts} {retry_at}");
    }
}

#[test]
fn refused_update_shows_as_one_of_a_vm_or_of_a_vmi() {
    for (reason, vm, text, message) in [
        ("FailedUpdate", "p-1", "Error updating virtual machine p-0/n: {error}", "error during VM update: denied"),
        (update::FAILED_ROLL, "p-2", "Error updating resource n/p-0: {error}", "error during VMI update: denied"),
    ] {
        let members = vec![member(0, &of(vm), &of("p-1"))];
        let mut observed = changed(&guest_memory(), &json!({"spec": {"replicas": 1}}), members);
        let effects = decide(&observed).unwrap().effects;
        let [
            Effect::Patch { kind: Kind::VirtualMachine, options, .. }
            | Effect::Delete { kind: Kind::Instance, options, .. },
            ..,
        ] = &effects[..]
        else {
            panic!("{effects:?}")
        };
        assert_eq!(options.failure_reason, Some(reason));
        let event = options.failure.as_ref().unwrap();
        assert_eq!((event.reason, event.message.as_str()), ("FailedUpdate", text));
        observed.failure = failure(reason);
        let shown = status(&observed)["conditions"][0].clone();
        assert_eq!((&shown["reason"], &shown["message"]), (&json!("FailedUpdate"), &json!(message)));
        // It waits.
        let found = lines(&observed);
        assert!(found.iter().all(|line| !line.contains(" p-0")), "{found:?}");
    }
}
