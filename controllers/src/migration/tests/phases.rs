//! Tests of the phases.

use super::*;

type Pods = [Arc<CachedPod>];
type Vmi = VirtualMachineInstance;

#[test]
fn migration_follows_its_pod_and_virt_handler() {
    let (idle, address) = (vmi(&json!({})), json!({"targetNodeAddress": "10.0.0.2"}));
    let started = json!({"targetNodeAddress": "10.0.0.2", "startTimestamp": "2030-01-01T00:09:40Z"});
    let mut done = started.clone();
    json_patch::merge(&mut done, &json!({"endTimestamp": "2030-01-01T00:09:50Z", "completed": true}));
    let (only, pending, both) = (vec![source()], vec![source(), pending_target()], vec![source(), target(&json!({}))]);
    // Phase, VMI, pods; phases entered.
    let table: [(&str, &Vmi, &Pods, &[&str]); 6] = [
        ("", &idle, &only, &["Pending"]),
        ("Pending", &idle, &only, &[]),
        ("Pending", &idle, &pending, &["Scheduling"]),
        ("Scheduling", &idle, &pending, &[]),
        ("Scheduling", &idle, &both, &["Scheduled"]),
        ("Scheduled", &idle, &both, &[]),
    ];
    for (phase, vmi, pods, expected) in table {
        let decision = decided(&migration(phase, &json!({})), Some(vmi), pods);
        assert_eq!(entered(&decision, usize::from(!phase.is_empty())), expected, "{phase}");
    }
    // Phase, state of the migration; phases entered.
    for (phase, state, expected) in [
        ("Scheduling", json!({}), &["Scheduled", "PreparingTarget"][..]),
        ("Scheduled", json!({}), &["PreparingTarget"]),
        ("PreparingTarget", json!({}), &[]),
        ("PreparingTarget", address.clone(), &["TargetReady"]),
        ("TargetReady", address, &[]),
        ("TargetReady", started.clone(), &["Running"]),
        ("PreparingTarget", started.clone(), &["TargetReady", "Running"]),
        ("Running", started, &[]),
        ("Running", done.clone(), &["Succeeded"]),
        ("TargetReady", done, &["Succeeded"]),
    ] {
        let decision = decided(&migration(phase, &json!({})), Some(&handed(&state)), &both);
        assert_eq!(entered(&decision, 1), expected, "{phase} {state}");
    }
}

#[test]
fn migration_fails_for_the_first_reason_that_applies() {
    let (idle, ended) = (vmi(&json!({})), vmi(&json!({"status": {"phase": "Succeeded"}})));
    let failed = handed(&json!({"failed": true}));
    let (other, begun) = (handed(&json!({"migrationUid": "x"})), handed(&json!({})));
    let (only, both) = (vec![source()], vec![source(), target(&json!({}))]);
    let down = vec![source(), target(&json!({"status": {"phase": "Failed"}}))];
    let cause = json!({"phase": "Failed", "reason": "TopologyAffinityError", "message": "Pod was rejected"});
    let rejected = vec![source(), target(&json!({"status": cause}))];
    let is_rejected =
        "Migration failed because target pod shutdown during migration: TopologyAffinityError: Pod was rejected";
    let going = vec![source(), target(&json!({"metadata": {"deletionTimestamp": "2030-01-01T00:09:50Z"}}))];
    let is_down = "Migration failed because target pod shutdown during migration";
    let is_gone = "Migration target pod was removed during active migration.";
    let table: [(&str, Value, Option<&Vmi>, &Pods, &str); 14] = [
        ("Pending", json!({}), None, &only, "Migration failed because vmi does not exist."),
        ("Pending", json!({}), Some(&ended), &only, "Migration failed vmi shutdown during migration."),
        ("", deleted(), Some(&idle), &only, "Migration failed due to being canceled"),
        ("Scheduled", deleted(), Some(&idle), &both, "Migration failed due to being canceled"),
        ("Scheduling", json!({}), Some(&idle), &down, is_down),
        ("Scheduling", json!({}), Some(&idle), &rejected, is_rejected),
        ("Scheduling", json!({}), Some(&idle), &going, is_down),
        ("Scheduling", json!({}), Some(&idle), &only, is_gone),
        ("PreparingTarget", json!({}), Some(&begun), &only, is_gone),
        ("Running", json!({}), Some(&idle), &both, "VMI's migration state was cleared during the active migration."),
        (
            "Running",
            json!({}),
            Some(&other),
            &both,
            "VMI's migration state was taken over by another migration job during active migration.",
        ),
        ("Running", json!({}), Some(&failed), &both, "source node reported migration failed"),
        ("Scheduled", deleted(), Some(&failed), &both, "source node reported migration failed"),
        (
            "",
            json!({"spec": {"sendTo": {"connectURL": "x", "migrationID": "y"}}}),
            Some(&idle),
            &only,
            "migrations between clusters or namespaces (sendTo, receive) are not supported",
        ),
    ];
    for (phase, change, vmi, pods, message) in table {
        let decision = decided(&migration(phase, &change), vmi, pods);
        assert_eq!(entered(&decision, usize::from(!phase.is_empty())), ["Failed"], "{phase} {message}");
        assert!(messages(&decision).iter().any(|known| known == message), "{phase} {message} {decision:?}");
    }
}

#[test]
fn migration_whose_vmi_is_gone_is_deleted() {
    let decision = decided(&migration("Pending", &json!({})), None, &[]);
    assert!(matches!(&decision.effects[..], [Effect::Patch { .. }, Effect::Delete { kind: Kind::Migration, .. }]));
    let change = json!({"metadata": {"deletionTimestamp": "2030-01-01T00:09:50Z"}});
    let decision = decided(&migration("Failed", &change), None, &[]);
    let patch = patch_of(&decision, Kind::Migration).unwrap();
    assert_eq!((decision.effects.len(), &patch["metadata"]["finalizers"]), (1, &Value::Null));
}

#[test]
fn only_one_migration_of_a_vmi_is_under_way() {
    let (idle, only) = (vmi(&json!({})), [source()]);
    let own = migration("", &json!({}));
    // Phase and creation of another one; phase of this one.
    for (phase, created, expected) in [
        ("", "2030-01-01T00:08:00Z", "Failed"),
        ("", "2030-01-01T00:09:30Z", "Pending"),
        ("Running", "2030-01-01T00:09:30Z", "Failed"),
        ("Failed", "2030-01-01T00:08:00Z", "Pending"),
    ] {
        let other = json!({"metadata": {"name": "other", "uid": "o", "creationTimestamp": created}});
        let all = [Arc::new(migration(phase, &other)), Arc::new(own.clone())];
        let decision = decide(&Observed { all: all.to_vec(), ..observed(&own, Some(&idle), &only) }).unwrap();
        assert_eq!(entered(&decision, 0), [expected], "{phase} {created}");
    }
}

#[test]
fn migration_waits_for_utility_volumes_for_some_time() {
    let busy = vmi(&json!({"spec": {"utilityVolumes": [{"name": "x", "claimName": "c"}]}}));
    let only = [source()];
    let decision = decided(&migration("Pending", &json!({})), Some(&busy), &only);
    let patch = patch_of(&decision, Kind::Migration).unwrap();
    let condition = &patch["status"]["conditions"][0];
    assert_eq!(condition["type"], "migrationBlockedByUtilityVolumes");
    let text = "Migration is waiting for utility volumes to detach. Will timeout in 90 seconds.";
    assert_eq!((&condition["reason"], &condition["message"]), (&json!("UtilityVolumesPresent"), &json!(text)));
    assert_eq!(decision.wake_after, Some(std::time::Duration::from_secs(90)));
    let known = json!({"status": {"conditions": [condition]}});
    // The first message stays.
    let later = now() + jiff::SignedDuration::from_secs(5);
    let again = migration("Pending", &known);
    let decision = decide(&Observed { now: later, ..observed(&again, Some(&busy), &only) }).unwrap();
    assert!(decision.effects.is_empty() && created_pod(&decision).is_none());
    let impatient = json!({"metadata": {"annotations": {"kubevirt.io/migrationUtilityVolumesTimeoutSeconds": "10"}}});
    let decision = decided(&migration("Pending", &impatient), Some(&busy), &only);
    assert_eq!(entered(&decision, 1), ["Failed"]);
    // Without them the condition goes.
    let decision = decided(&again, Some(&vmi(&json!({}))), &[source(), pending_target()]);
    assert_eq!(patch_of(&decision, Kind::Migration).unwrap()["status"]["conditions"], Value::Null);
}

#[test]
fn settled_migration_is_not_written() {
    let (idle, only) = (vmi(&json!({})), [source()]);
    let waiting = migration("Pending", &json!({}));
    let decision = decide(&Observed { is_admitted: false, ..observed(&waiting, Some(&idle), &only) }).unwrap();
    assert!(decision.is_settled(), "{decision:?}");
    let running = json!({"targetNodeAddress": "10.0.0.2", "startTimestamp": "2030-01-01T00:09:40Z"});
    let decision = decided(&migration("Running", &json!({})), Some(&handed(&running)), &[source(), target(&json!({}))]);
    assert!(decision.effects.is_empty(), "{decision:?}");
}
