//! The claims of a VMI that keeps state.

use k8s_openapi::api::{core::v1::PersistentVolumeClaim, storage::v1::StorageClass};

use super::*;
use crate::{
    persistent_state::{Choice, name_for_migration},
    resources::recoveries::CachedRecovery,
};

/// A VMI with a TPM that it keeps.
fn keeps(vmi: VirtualMachineInstance) -> VirtualMachineInstance {
    let mut object = serde_json::to_value(vmi).unwrap();
    json_patch::merge(&mut object, &json!({"spec": {"domain": {"devices": {"tpm": {"persistent": true}}}}}));
    serde_json::from_value(object).unwrap()
}

/// A claim that was made for the VM, with these labels.
fn claim(name: &str, labels: &Value, change: &Value) -> (String, Arc<CachedClaim>) {
    let mut claim = json!({
        "metadata": {"name": name, "namespace": "d", "uid": name, "labels": labels,
            "creationTimestamp": if name == "old" { "2030-01-01T00:00:00Z" } else { "2030-01-01T00:09:10Z" },
            "ownerReferences": [{"apiVersion": "kubevirt.io/v1", "kind": "VirtualMachine", "name": "m", "uid": "v",
                "controller": true}]},
        "spec": {"accessModes": ["ReadWriteOnce"]}, "status": {"phase": "Bound"},
    });
    json_patch::merge(&mut claim, change);
    (name.to_owned(), Arc::new(serde_json::from_value::<PersistentVolumeClaim>(claim).unwrap().into()))
}

fn old() -> (String, Arc<CachedClaim>) {
    claim("old", &json!({"persistent-state-for": "m"}), &json!({}))
}

fn new() -> (String, Arc<CachedClaim>) {
    claim("new", &json!({"kubevirt.io/migrationName": "mig"}), &json!({}))
}

fn handed_over() -> (String, Arc<CachedClaim>) {
    claim("new", &json!({"persistent-state-for": "m"}), &json!({}))
}

fn names() -> Value {
    json!({"sourcePersistentStatePVCName": "old", "targetPersistentStatePVCName": "new"})
}

fn source_with(claim: &str) -> Arc<CachedPod> {
    Arc::new(CachedPod { state_claim: Some(claim.to_owned()), ..(*source()).clone() })
}

fn state<const N: usize>(claims: [(String, Arc<CachedClaim>); N]) -> State {
    let class = json!({"metadata": {"name": "fast"}, "provisioner": "p"});
    let class = Arc::new(serde_json::from_value::<StorageClass>(class).unwrap().into());
    State { known: claims.into(), choice: Some(Ok(Choice { class, shared: false })), ..State::default() }
}

/// Returns the writes of claims and recovery pods: the operation with the name.
fn writes(decision: &Decision) -> Vec<String> {
    let of = |effect: &Effect| match effect {
        Effect::Create { kind: kind @ (Kind::Claim | Kind::Pod), object, .. } => {
            Some(format!("create {} {}", kind.kind(), object["metadata"]["name"].as_str().unwrap_or("launcher")))
        }
        Effect::Patch { kind: Kind::Claim, name, patch, .. } => {
            Some(format!("patch {name} {}", patch["metadata"]["labels"]))
        }
        Effect::Delete { kind: Kind::Claim, name, .. } => Some(format!("delete {name}")),
        Effect::Delete { kind: Kind::Pod, name, .. } if name.starts_with("recover-") => Some(format!("delete {name}")),
        _ => None,
    };
    decision.effects.iter().filter_map(of).collect()
}

#[test]
fn both_claims_are_recorded_before_one_is_made() {
    let vmi = keeps(vmi(&json!({})));
    for (mode, shares) in [("ReadWriteOnce", false), ("ReadWriteMany", true)] {
        let modes = json!({"spec": {"accessModes": [mode]}});
        let known = state([claim("old", &json!({"persistent-state-for": "m"}), &modes)]);
        let all = |phase: &str, names: Value| {
            let migration = migration(phase, &json!({"status": {"migrationState": names}}));
            let claims_of_state = known.clone();
            decide(&Observed { claims_of_state, ..observed(&migration, Some(&vmi), &[source_with("old")]) }).unwrap()
        };
        let first = {
            let migration = migration("", &json!({}));
            let claims_of_state = known.clone();
            decide(&Observed { claims_of_state, ..observed(&migration, Some(&vmi), &[source_with("old")]) }).unwrap()
        };
        let recorded = patch_of(&first, Kind::Migration).unwrap()["status"]["migrationState"].clone();
        let target = recorded["targetPersistentStatePVCName"].as_str().unwrap().to_owned();
        assert_eq!((recorded["sourcePersistentStatePVCName"].as_str(), target == "old"), (Some("old"), shares));
        assert_eq!(writes(&first), Vec::<String>::new());
        // Not recorded yet.
        assert_eq!(writes(&all("Pending", json!({}))), Vec::<String>::new());

        let second = all("Pending", recorded);
        let expected_claim = format!("create PersistentVolumeClaim {target}");
        let pod = "create Pod virt-launcher-m-tprhw".to_owned();
        assert_eq!(writes(&second), if shares { vec![pod] } else { vec![expected_claim, pod] });
        let pod = created_pod(&second).unwrap();
        let volumes = pod["spec"]["volumes"].as_array().unwrap();
        let mounted = volumes.iter().find(|volume| volume["name"] == "vm-state").unwrap();
        assert_eq!(mounted["persistentVolumeClaim"]["claimName"], target);
    }
}

#[test]
fn target_pod_waits_for_a_class_and_for_the_end_of_another_migration() {
    let vmi = keeps(vmi(&json!({})));
    let name = name_for_migration(&vmi, &migration("", &json!({})));
    let names = json!({"sourcePersistentStatePVCName": "old", "targetPersistentStatePVCName": name});
    let migration = migration("Pending", &json!({"status": {"migrationState": names}}));
    let decided = |claims_of_state: State| {
        decide(&Observed { claims_of_state, ..observed(&migration, Some(&vmi), &[source_with("old")]) }).unwrap()
    };
    let no_class = decided(State { choice: Some(Err("no default storage class found".into())), ..state([old()]) });
    assert_eq!(writes(&no_class), Vec::<String>::new());
    assert!(messages(&no_class)[0].contains("no default storage class found"));
    let undecided = decided(State { undecided: Some("other".into()), ..state([old()]) });
    assert_eq!(writes(&undecided), Vec::<String>::new());
    assert!(undecided.wake_after.is_some());
    // Another claim has the name.
    let (_, taken) = claim(&name, &json!({}), &json!({}));
    let mut known = state([old()]);
    known.known.insert(name, taken);
    assert_eq!(writes(&decided(known)), Vec::<String>::new());
}

#[test]
fn hand_off_to_virt_handler_names_both_claims() {
    let vmi = keeps(vmi(&json!({})));
    let migration = migration("Scheduled", &json!({"status": {"migrationState": names()}}));
    let pods = [source_with("old"), target(&json!({}))];
    let decision =
        decide(&Observed { claims_of_state: state([old(), new()]), ..observed(&migration, Some(&vmi), &pods) });
    let handed = patch_of(&decision.unwrap(), Kind::Instance).unwrap()["status"]["migrationState"].clone();
    assert_eq!(handed["sourcePersistentStatePVCName"], "old");
    assert_eq!(handed["targetPersistentStatePVCName"], "new");
}

#[test]
fn state_is_handed_over_when_the_guest_runs_at_the_target() {
    let label = "patch new {\"kubevirt.io/migrationName\":null,\"persistent-state-for\":\"m\"}";
    let ready = json!({"targetNodeDomainReadyTimestamp": "2030-01-01T00:09:40Z", "targetNodeAddress": "a:1"});
    let begun = json!({"startTimestamp": "2030-01-01T00:09:35Z", "targetNodeAddress": "a:1"});
    let by_user = claim("old", &json!({"persistent-state-for": "m"}), &json!({"metadata": {"ownerReferences": null}}));
    let younger = json!({"metadata": {"creationTimestamp": "2030-01-01T00:09:50Z"}});
    let younger = claim("old", &json!({"persistent-state-for": "m"}), &younger);
    let other = claim("new", &json!({"persistent-state-for": "x"}), &json!({}));
    let deleted = json!({"metadata": {"deletionTimestamp": "2030-01-01T00:09:50Z"}});
    for (phase, moved, claims, expected) in [
        ("Running", &ready, state([old(), new()]), vec![label, "delete old"]),
        ("Running", &begun, state([old(), new()]), vec![]),
        // The claims after a crash at each step.
        ("Running", &ready, state([old(), handed_over()]), vec!["delete old"]),
        ("Running", &ready, state([handed_over()]), vec![]),
        ("Running", &ready, state([claim("old", &json!({"persistent-state-for": "m"}), &deleted), new()]), vec![label]),
        ("Running", &ready, state([by_user, new()]), vec![label, "patch old {\"persistent-state-for\":null}"]),
        ("Running", &ready, state([younger, handed_over()]), vec![]),
        ("Running", &ready, state([old(), other]), vec![]),
        ("Running", &ready, state([old()]), vec![]),
        ("Succeeded", &ready, state([old(), new()]), vec![label, "delete old"]),
    ] {
        let mut all = names();
        json_patch::merge(&mut all, moved);
        let vmi = keeps(handed(&all));
        let migration = migration(phase, &json!({"status": {"migrationState": names()}}));
        let row = format!("{phase} {moved} {:?}", claims.known);
        let pods = [source(), target(&json!({}))];
        let decision =
            decide(&Observed { claims_of_state: claims, ..observed(&migration, Some(&vmi), &pods) }).unwrap();
        assert_eq!(writes(&decision), expected, "{row}");
    }
}

/// Returns true if the migration keeps its finalizer.
fn stays(decision: &Decision) -> bool {
    let patches = decision.effects.iter().filter_map(|effect| match effect {
        Effect::Patch { kind: Kind::Migration, patch, .. } => patch.pointer("/metadata/finalizers").cloned(),
        _ => None,
    });
    patches.count() == 0
}

#[test]
fn one_claim_is_left_of_a_migration_that_failed() {
    let down = json!({"status": {"phase": "Failed", "containerStatuses": null}});
    let (alive, ended) = (source(), pod("p", "a", &down));
    let gone = target(&down);
    let failed = |more: Value| {
        let mut all = json!({"failed": true, "completed": true, "startTimestamp": "2030-01-01T00:09:35Z"});
        json_patch::merge(&mut all, &more);
        all
    };
    let begun = failed(json!({"targetNodeAddress": "a:1"}));
    let label = "patch new {\"kubevirt.io/migrationName\":null,\"persistent-state-for\":\"m\"}";
    let recovery = |phase: &str, code: i32, created: &str| {
        let metadata =
            serde_json::from_value(json!({"name": "recover-mig", "namespace": "d", "creationTimestamp": created}));
        Some(Arc::new(CachedRecovery { metadata: metadata.unwrap(), phase: phase.into(), code: Some(code) }))
    };
    let now = "2030-01-01T00:09:59Z";
    let both = || state([old(), new()]);
    for (ending, pods, claims, recovery, expected, is_kept) in [
        // It could not begin.
        (failed(json!({})), vec![ended.clone()], both(), None, vec!["delete new"], true),
        // The guest goes on at the source.
        (begun.clone(), vec![alive.clone(), gone.clone()], both(), None, vec!["delete new"], true),
        (begun.clone(), vec![alive, gone.clone()], state([old()]), None, vec![], false),
        // Nobody knows while a pod may write, then the mark is read.
        (begun.clone(), vec![ended.clone(), target(&json!({}))], both(), None, vec![], true),
        (begun.clone(), vec![ended.clone(), gone], both(), None, vec!["create Pod recover-mig"], true),
        (begun.clone(), vec![ended.clone()], both(), recovery("Running", 0, now), vec![], true),
        (begun.clone(), vec![ended.clone()], both(), recovery("Succeeded", 0, now), vec![label, "delete old"], true),
        (begun.clone(), vec![ended.clone()], both(), recovery("Failed", 42, now), vec!["delete new"], true),
        (begun.clone(), vec![ended.clone()], both(), recovery("Failed", 1, now), vec![], true),
        (
            begun.clone(),
            vec![ended.clone()],
            both(),
            recovery("Failed", 1, "2030-01-01T00:09:00Z"),
            vec!["delete recover-mig"],
            true,
        ),
        // The pod is of no more use.
        (
            begun.clone(),
            vec![ended.clone()],
            state([handed_over()]),
            recovery("Succeeded", 0, now),
            vec!["delete recover-mig"],
            false,
        ),
        // Only one is left.
        (begun.clone(), vec![ended.clone()], state([new()]), None, vec![label], true),
        (begun, vec![ended], state([]), None, vec![], false),
    ] {
        let mut all = names();
        json_patch::merge(&mut all, &ending);
        let vmi = {
            let mut vmi = keeps(handed(&all));
            vmi.status.as_mut().unwrap().phase = Some(api::VmiPhase::Failed);
            vmi
        };
        let migration = migration("Failed", &json!({"status": {"migrationState": names()}}));
        let row = format!("{ending} {:?} {recovery:?}", claims.known.keys());
        let observed = Observed { claims_of_state: claims, recovery, ..observed(&migration, Some(&vmi), &pods) };
        let decision = decide(&observed).unwrap();
        assert_eq!(
            (writes(&decision), stays(&decision)),
            (expected.into_iter().map(str::to_owned).collect(), is_kept),
            "{row}"
        );
    }
}

#[test]
fn state_of_a_vmi_that_is_gone_is_found_by_the_mark() {
    let recorded = |more: Value, phases: &[&str]| {
        let mut all = names();
        json_patch::merge(&mut all, &more);
        let times: Vec<Value> = phases
            .iter()
            .map(|phase| json!({"phase": phase, "phaseTransitionTimestamp": "2030-01-01T00:09:30Z"}))
            .collect();
        migration("Failed", &json!({"status": {"migrationState": all, "phaseTransitionTimestamps": times}}))
    };
    let handed = ["Pending", "Scheduling", "Scheduled", "PreparingTarget"];
    let label = "patch new {\"kubevirt.io/migrationName\":null,\"persistent-state-for\":\"m\"}";
    for (migration, expected) in [
        (recorded(json!({}), &handed), vec!["create Pod recover-mig"]),
        (recorded(json!({}), &["Pending", "Scheduling"]), vec!["delete new"]),
        (recorded(json!({"migrationUid": "g", "completed": true}), &handed), vec![label, "delete old"]),
    ] {
        let decision =
            decide(&Observed { claims_of_state: state([old(), new()]), ..observed(&migration, None, &[]) }).unwrap();
        assert_eq!(writes(&decision), expected, "{migration:?}");
        assert!(stays(&decision));
    }
    // It was settled before, and the VM has another claim of the name of its source.
    let mut settled = recorded(json!({"migrationUid": "g", "completed": true}), &handed);
    settled.metadata.finalizers = None;
    let claims_of_state = state([old(), handed_over()]);
    assert_eq!(
        writes(&decide(&Observed { claims_of_state, ..observed(&settled, None, &[]) }).unwrap()),
        Vec::<String>::new()
    );
}
