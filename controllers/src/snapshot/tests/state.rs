//! Tests of volumes that a snapshot leaves out: the state of the VM, and volumes without a class of snapshots.

use api::snapshot::content::VolumeBackup;

use super::*;
use crate::runtime::{Attempt, Controller};

const STATE: &str = "persistent-state-for-v";

fn taken() -> Arc<VirtualMachineSnapshotContent> {
    content(&json!({"creationTime": "2030-01-01T00:00:30Z", "readyToUse": true, "quiesce": {"state": "Offline"}}))
}

/// Returns a content with these volumes.
fn with_volumes(names: &[&str]) -> Arc<VirtualMachineSnapshotContent> {
    let mut content = (*taken()).clone();
    let backup = content.spec.volume_backups[0].clone();
    let backups = names.iter().map(|name| VolumeBackup { volume_name: (*name).to_owned(), ..backup.clone() });
    content.spec.volume_backups = backups.collect();
    Arc::new(content)
}

#[test]
fn state_without_snapshots_shows() {
    // State of the VM, volumes of the content; included and excluded ones, and whether the snapshot is partial.
    for (state, backups, included, excluded, is_partial) in [
        (None, vec!["root"], json!(["root"]), json!(["cd"]), false),
        (Some(STATE), vec!["root"], json!(["root"]), json!(["cd", STATE]), true),
        (Some(STATE), vec!["root", STATE], json!(["root", STATE]), json!(["cd"]), false),
        (Some(STATE), vec![], json!(null), json!(["root", "cd", STATE]), true),
    ] {
        let mut observed = observed(snapshot(&json!({})), Some(held()), Some(with_volumes(&backups)));
        observed.state = state.map(str::to_owned);
        let effects = decide(&observed).unwrap().effects;
        let status = status(&effects);
        let lists = &status["snapshotVolumes"];
        assert_eq!((&lists["includedVolumes"], &lists["excludedVolumes"]), (&included, &excluded));
        let indications = status["indications"].as_array().cloned().unwrap_or_default();
        assert_eq!(indications.contains(&json!("PartialSnapshot")), is_partial, "{backups:?}");
        assert_eq!(shown(&effects).contains(&"event PartialSnapshot".to_owned()), is_partial, "{backups:?}");
    }
}

#[test]
fn recorded_volumes_of_a_complete_snapshot_stay() {
    for excluded in [json!(["cd", STATE]), json!(["cd"])] {
        let is_partial = excluded.as_array().unwrap().len() > 1;
        let recorded = json!({"status": {
            "phase": "Succeeded", "snapshotVolumes": {"includedVolumes": ["root"], "excludedVolumes": excluded},
            "indications": is_partial.then_some(["PartialSnapshot"]),
        }});
        // The VM has got a state since then, or is gone.
        for vm in [Some(vm(&json!({}))), None] {
            let mut observed = observed(snapshot(&recorded), vm, Some(taken()));
            observed.state = Some(STATE.to_owned());
            let effects = decide(&observed).unwrap().effects;
            let status = status(&effects);
            for key in ["snapshotVolumes", "indications"] {
                assert!(status.get(key).is_none(), "{excluded}: {status}");
            }
            assert!(!shown(&effects).contains(&"event PartialSnapshot".to_owned()));
        }
    }
}

#[test]
fn state_is_observed_until_the_snapshot_is_complete() {
    let caches = crate::resources::Caches::default();
    let claim =
        json!({"metadata": {"name": "state-1", "namespace": "n", "uid": "s", "labels": {"persistent-state-for": "v"}}});
    let claim: PersistentVolumeClaim = serde_json::from_value(claim).unwrap();
    caches.claims.observe(claim.into());
    caches.vms.observe((*vm(&json!({}))).clone());
    for (version, phase, state) in [("1", "InProgress", Some(STATE)), ("2", "Succeeded", None)] {
        let change = json!({"metadata": {"resourceVersion": version}, "status": {"phase": phase}});
        caches.vm_snapshots.observe((*snapshot(&change)).clone());
        let attempt = Attempt { key: &Key::new("n", "s"), failures: &Failures::default(), now: now() };
        let observed = Snapshots.observe(&caches, &attempt).unwrap();
        assert_eq!(observed.state.as_deref(), state, "{phase}");
    }
}

#[test]
fn volume_without_a_snapshot_class_shows() {
    let mut observed = observed(snapshot(&json!({})), Some(held()), None);
    observed.volumes = vec![SourceVolume { class: Ok(None), ..volume(&json!({}), &[]) }];
    let (_, creation) = captured::content(&observed, &held());
    let mut content = creation.content;
    assert!(content.spec.volume_backups.is_empty());
    content.status.clone_from(&taken().status);
    observed.content = Some(Arc::new(content));
    let effects = decide(&observed).unwrap().effects;
    let status = status(&effects);
    assert_eq!((&status["phase"], &status["readyToUse"]), (&json!("Succeeded"), &json!(true)));
    assert_eq!(status["snapshotVolumes"], json!({"excludedVolumes": ["root", "cd"]}));
    assert_eq!(status["indications"], json!(["PartialSnapshot"]));
    assert!(shown(&effects).contains(&"event PartialSnapshot".to_owned()));
}
