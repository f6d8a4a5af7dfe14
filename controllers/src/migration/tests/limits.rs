//! Tests of the time limits of the phases.

use jiff::SignedDuration;

use super::*;
use crate::migration::limits::{sign, wait};

const BEGUN: &str = "2030-01-01T00:09:40Z";

/// Follows a migration whose VMI, pods and writes stand still. Returns its last phase and the seconds until it entered it.
fn follow(mut observed: Observed) -> (String, i64, Vec<String>) {
    let mut own = VirtualMachineInstanceMigration::clone(&observed.migration);
    let mut all = Vec::new();
    let began = observed.now;
    let mut now = began;
    for _ in 0..100 {
        observed.migration = Arc::new(own.clone());
        observed.now = now;
        observed.silence = sign(&observed).map(|_| now.duration_since(began).unsigned_abs());
        let mut decision = decide(&observed).unwrap();
        all.extend(messages(&decision));
        if let Some(patch) = patch_of(&decision, Kind::Migration) {
            let mut object = serde_json::to_value(&own).unwrap();
            json_patch::merge(&mut object, &patch);
            let former = own.phase().clone();
            own = serde_json::from_value(object).unwrap();
            if *own.phase() != former {
                decision.wake(std::time::Duration::ZERO);
            }
        }
        let Some(wake) = decision.wake_after.filter(|_| !own.is_final()) else { break };
        now += wake;
    }
    (own.phase().as_str().to_owned(), now.duration_since(began).as_secs(), all)
}

#[test]
fn no_phase_lasts_longer_than_its_limit_when_all_stand_still() {
    let address = json!({"targetNodeAddress": "10.0.0.2"});
    let with = |change: Value| {
        let mut state = address.clone();
        json_patch::merge(&mut state, &change);
        state
    };
    let mut moved =
        handed(&with(json!({"startTimestamp": BEGUN, "targetNodeDomainReadyTimestamp": BEGUN, "endTimestamp": BEGUN})));
    moved.status.as_mut().unwrap().node_name = Some("b".to_owned());
    let plugged = json!({
        "spec": {"volumes": [{"name": "data", "persistentVolumeClaim": {"claimName": "c", "hotpluggable": true}}]},
        "status": {"volumeStatus": [{"name": "data", "target": "sda", "phase": "Ready", "hotplugVolume": {"attachPodName": "hp", "attachPodUID": "h"}}]},
    });
    let progress = |text: &str| {
        let mut vmi = handed(&with(json!({"startTimestamp": BEGUN})));
        let annotations = [("ferrovirt.io/migration-progress".to_owned(), text.to_owned())];
        vmi.metadata.annotations = Some(annotations.into());
        vmi
    };
    let vmis = [
        vmi(&json!({})),
        vmi(&plugged),
        vmi(&json!({"status": {"phase": "Scheduled"}})),
        vmi(&json!({"metadata": {"deletionTimestamp": BEGUN}})),
        handed(&json!({"migrationUid": "other"})),
        handed(&json!({"migrationUid": "other", "targetNodeAddress": "10.0.0.2"})),
        handed(&json!({})),
        handed(&address),
        handed(&with(json!({"abortRequested": true}))),
        handed(&with(json!({"startTimestamp": BEGUN}))),
        handed(&with(json!({"startTimestamp": BEGUN, "abortRequested": true}))),
        progress(r#"{"migration": "g", "time": "2030-01-01T00:09:00Z"}"#),
        progress(r#"{"migration": "g", "time": "2040-01-01T00:00:00Z"}"#),
        progress(r#"{"migration": "g"}"#),
        progress("?"),
        moved,
    ];
    let gone = |phase: &str, status: Value| target(&json!({"status": {"phase": phase, "containerStatuses": status}}));
    let all_pods = [
        vec![source()],
        vec![source(), pending_target()],
        vec![source(), gone("Running", json!(null))],
        vec![source(), gone("Unknown", json!(null))],
        vec![source(), target(&json!({"spec": {"nodeName": "a"}}))],
        vec![source(), target(&json!({}))],
    ];
    let owner =
        json!([{"apiVersion": "v1", "kind": "Pod", "name": "virt-launcher-m-t", "uid": "t", "controller": true}]);
    let metadata = json!({"name": "hp-2", "namespace": "d", "uid": "h2", "ownerReferences": owner,
        "creationTimestamp": "2030-01-01T00:09:50Z"});
    let metadata = serde_json::from_value(metadata).unwrap();
    let attachment =
        [Arc::new(CachedAttachment { metadata, phase: "Pending".to_owned(), ..CachedAttachment::default() })];
    let phases = ["", "Pending", "Scheduling", "Scheduled", "PreparingTarget", "TargetReady", "Running"];
    for (phase, change) in phases.into_iter().flat_map(|phase| [(phase, json!({})), (phase, deleted())]) {
        let own = migration(phase, &change);
        for (vmi, pods) in vmis.iter().flat_map(|vmi| all_pods.iter().map(move |pods| (vmi, pods))) {
            for attachments in [&[][..], &attachment[..]] {
                for is_admitted in [true, false] {
                    let all = [Arc::new(own.clone())];
                    let observed = Observed {
                        all: all.to_vec(),
                        attachments: attachments.to_vec(),
                        is_admitted,
                        ..observed(&own, Some(vmi), pods)
                    };
                    let has_target = observed.target().is_some();
                    let (last, after, _) = follow(observed);
                    let row = format!("{phase} {change} {:?} {pods:?} {attachments:?}", vmi.status);
                    let is_undated = vmi
                        .metadata
                        .annotations
                        .iter()
                        .flatten()
                        .any(|(_, text)| !text.contains("time") && text != "?");
                    let limit = if is_undated { 25 * 3600 } else { 4 * 3600 };
                    // It holds no place and waits for one, or for the outcome of another migration.
                    let waits = last == "Pending" && !has_target;
                    assert!(waits || ["Failed", "Succeeded"].contains(&last.as_str()), "{last}: {row}");
                    assert!(waits || after < limit, "{after}: {row}");
                }
            }
        }
    }
}

#[test]
fn progress_counts_from_its_arrival_whatever_the_clock_of_its_node_is() {
    let own = migration("Running", &json!({}));
    let hour = SignedDuration::from_hours(1);
    for time in ["2029-12-31T00:00:00Z", "2030-01-01T01:09:00Z", "2030-01-01T01:50:00Z", "2040-01-01T00:00:00Z"] {
        let mut vmi = handed(&json!({"targetNodeAddress": "10.0.0.2", "startTimestamp": BEGUN}));
        let progress = json!({"migration": "g", "time": time}).to_string();
        vmi.metadata.annotations = Some([("ferrovirt.io/migration-progress".to_owned(), progress)].into());
        // Seconds since the progress has changed; the rest of the time, an hour after the begin.
        for (silence, left) in [(Some(0), 600), (Some(60), 540), (Some(600), 0), (None, 600 - 3630)] {
            let silence = silence.map(Duration::from_secs);
            let observed = Observed { now: now() + hour, silence, ..observed(&own, Some(&vmi), &[source()]) };
            let limit = wait(&observed, &MigrationPhase::Running).unwrap();
            assert_eq!(limit.left, SignedDuration::from_secs(left), "{time} {silence:?}");
        }
    }
}

#[test]
fn failure_names_what_was_waited_for_and_leaves_a_guest_that_may_have_moved_alone() {
    let address = json!({"targetNodeAddress": "10.0.0.2"});
    let started = json!({"targetNodeAddress": "10.0.0.2", "startTimestamp": BEGUN});
    let (idle, with_target) = (vmi(&json!({})), [source(), target(&json!({}))]);
    let halted = [source(), target(&json!({"status": {"containerStatuses": null}}))];
    // Phase, VMI, pods; seconds, message, the failure is recorded on the VMI, an abort is requested, the target pod is deleted.
    for (phase, vmi, pods, expected) in [
        (
            "Scheduling",
            &idle,
            &halted,
            (930, "target pod virt-launcher-m-t did not run within 960 seconds.", false, false, true),
        ),
        (
            "PreparingTarget",
            &handed(&json!({})),
            &with_target,
            (270, "virt-handler of node b did not prepare the target within 300 seconds.", true, false, true),
        ),
        (
            "TargetReady",
            &handed(&address),
            &with_target,
            (270, "virt-handler of node a did not begin the migration within 300 seconds.", false, true, false),
        ),
        (
            "Running",
            &handed(&started),
            &with_target,
            (570, "virt-handler of node a showed no progress within 600 seconds.", false, true, false),
        ),
    ] {
        let own = migration(phase, &json!({}));
        let (last, after, said) = follow(observed(&own, Some(vmi), pods));
        let (seconds, message, is_recorded, is_aborted, is_deleted) = expected;
        assert_eq!((last.as_str(), after), ("Failed", seconds), "{phase}");
        let message = format!("Migration failed because {message}");
        assert!(said.contains(&message), "{said:?}");
        // At the limit, and when virt-handler has had time to record the failure.
        let later = now() + SignedDuration::from_secs(seconds);
        let decision = decide(&Observed { now: later, ..observed(&own, Some(vmi), pods) }).unwrap();
        let written = patch_of(&decision, Kind::Instance).unwrap_or_default()["status"]["migrationState"].clone();
        assert_eq!(written["failureReason"] == message.as_str(), is_recorded, "{phase} {written}");
        let times = json!([{"phase": "Failed", "phaseTransitionTimestamp": later.to_string()}]);
        let failed = migration("Failed", &json!({"status": {"phaseTransitionTimestamps": times}}));
        let now = later + SignedDuration::from_secs(61);
        let mut recorded = vmi.clone();
        if is_recorded {
            recorded.status.as_mut().unwrap().migration_state.as_mut().unwrap().failed = true;
        }
        let decision = decide(&Observed { now, ..observed(&failed, Some(&recorded), pods) }).unwrap();
        let written = patch_of(&decision, Kind::Instance).unwrap_or_default()["status"]["migrationState"].clone();
        assert_eq!((written["abortRequested"] == true, written["failed"] == true), (is_aborted, false), "{phase}");
        assert_eq!(!deleted_pods(&decision).is_empty(), is_deleted, "{phase}");
    }
}

#[test]
fn guest_that_has_moved_makes_the_migration_succeed() {
    let state = json!({"targetNodeAddress": "10.0.0.2", "startTimestamp": BEGUN, "endTimestamp": BEGUN,
        "targetNodeDomainReadyTimestamp": BEGUN});
    let mut moved = handed(&state);
    moved.status.as_mut().unwrap().node_name = Some("b".to_owned());
    let pods = [source(), target(&json!({}))];
    for phase in ["PreparingTarget", "TargetReady", "Running"] {
        let own = migration(phase, &json!({}));
        let (last, _, _) = follow(observed(&own, Some(&moved), &pods));
        assert_eq!(last, "Succeeded", "{phase}");
    }
}

#[test]
fn snapshot_that_goes_first_has_its_time_however_old_the_target_pod_is() {
    let (vmi, pods) = (vmi(&json!({})), [source(), target(&json!({}))]);
    for (phase, left) in [(MigrationPhase::Scheduling, 660), (MigrationPhase::Scheduled, 60)] {
        let own = migration(phase.as_str(), &json!({}));
        let seen = Observed {
            held: Some("snapshot \"s\" in progress".to_owned()),
            held_since: Some(now() + SignedDuration::from_mins(15)),
            now: now() + SignedDuration::from_mins(20),
            ..observed(&own, Some(&vmi), &pods)
        };
        assert_eq!(wait(&seen, &phase).unwrap().left, SignedDuration::from_secs(left), "{phase:?}");
        assert!(entered(&decide(&seen).unwrap(), 1).is_empty(), "{phase:?}");
        let free = Observed { held: None, held_since: None, ..seen };
        if phase == MigrationPhase::Scheduling {
            assert_eq!(entered(&decide(&free).unwrap(), 1), ["Scheduled"]);
        }
    }
    // The limit that the user has set for the pod is not one of the snapshot.
    let change = json!({"metadata": {"annotations": {"kubevirt.io/migrationPendingPodTimeoutSeconds": "30"}}});
    let own = migration("Scheduling", &change);
    let held = Some("snapshot \"s\" in progress".to_owned());
    let seen = Observed { held, held_since: Some(now()), ..observed(&own, Some(&vmi), &pods) };
    assert_eq!(wait(&seen, &MigrationPhase::Scheduling).unwrap().left, SignedDuration::from_mins(6));
}
