//! Tests of decisions about snapshots.

use api::snapshot::content::VirtualMachineSnapshotContent;
use k8s_openapi::api::core::v1::PersistentVolumeClaim;
use serde_json::{Value, json};

use super::*;
use crate::resources::claim_facts::ClaimUsers;
use crate::runtime::{ClaimUser, Failure};

mod state;

fn now() -> Timestamp {
    "2030-01-01T00:01:00Z".parse().unwrap()
}

fn merged(mut object: Value, change: &Value) -> Value {
    json_patch::merge(&mut object, change);
    object
}

fn snapshot(change: &Value) -> Arc<VirtualMachineSnapshot> {
    let snapshot = json!({
        "metadata": {
            "name": "s", "namespace": "n", "uid": "u", "resourceVersion": "1", "creationTimestamp": "2030-01-01T00:00:00Z",
            "finalizers": ["snapshot.kubevirt.io/vmsnapshot-protection"],
        },
        "spec": {"source": {"apiGroup": "kubevirt.io", "kind": "VirtualMachine", "name": "v"}},
        "status": {"phase": "InProgress", "readyToUse": false},
    });
    Arc::new(serde_json::from_value(merged(snapshot, change)).unwrap())
}

fn vm(change: &Value) -> Arc<VirtualMachine> {
    let vm = json!({
        "metadata": {"name": "v", "namespace": "n", "uid": "v", "resourceVersion": "1", "generation": 1},
        "spec": {"template": {"spec": {"domain": {"devices": {}}, "volumes": [
            {"name": "root", "persistentVolumeClaim": {"claimName": "c"}}, {"name": "cd", "containerDisk": {"image": "i"}},
        ]}}},
        "status": {},
    });
    Arc::new(serde_json::from_value(merged(vm, change)).unwrap())
}

/// Returns a VM whose lease the snapshot holds.
fn held() -> Arc<VirtualMachine> {
    vm(&json!({
        "metadata": {"finalizers": ["snapshot.kubevirt.io/snapshot-source-protection"]},
        "status": {"operation": {"operation": "Snapshot", "name": "s", "uid": "u"}, "snapshotInProgress": "s"},
    }))
}

fn content(status: &Value) -> Arc<VirtualMachineSnapshotContent> {
    let vm = held();
    let content = json!({
        "metadata": {
            "name": "vmsnapshot-content-u", "namespace": "n", "uid": "c", "resourceVersion": "1",
            "finalizers": ["snapshot.kubevirt.io/vmsnapshotcontent-protection"],
        },
        "spec": {
            "source": {"virtualMachine": {"metadata": {}, "spec": vm.spec}}, "virtualMachineSnapshotName": "s",
            "volumeBackups": [{"volumeName": "root", "persistentVolumeClaim": {}, "volumeSnapshotName": "vs"}],
        },
        "status": status,
    });
    Arc::new(serde_json::from_value(content).unwrap())
}

fn volume(change: &Value, users: &[&str]) -> SourceVolume {
    let claim =
        merged(json!({"metadata": {"name": "c", "namespace": "n", "uid": "c"}, "status": {"phase": "Bound"}}), change);
    let claim: PersistentVolumeClaim = serde_json::from_value(claim).unwrap();
    let known: crate::resources::claims::CachedClaim = claim.into();
    let users = users.iter().map(|pod| ClaimUser { pod: (*pod).to_owned(), vmi: None }).collect();
    SourceVolume {
        name: "root".to_owned(),
        claim: "c".to_owned(),
        users: Some(Arc::new(ClaimUsers { metadata: known.metadata.clone(), read_at: now(), users })),
        known: Some(Arc::new(known)),
        class: Ok(Some("class".to_owned())),
    }
}

fn observed(
    snapshot: Arc<VirtualMachineSnapshot>,
    vm: Option<Arc<VirtualMachine>>,
    content: Option<Arc<VirtualMachineSnapshotContent>>,
) -> Observed {
    Observed {
        snapshot,
        vm,
        vmi: None,
        content,
        volumes: vec![volume(&json!({}), &[])],
        state: None,
        data_volumes: DataVolumes::default(),
        is_in_use: false,
        failures: Failures::default(),
        now: now(),
    }
}

/// Returns the effects in short: verb, kind, and whether the status is written.
fn shown(effects: &[Effect]) -> Vec<String> {
    let name = |kind: &Kind| {
        let short = kind.kind().strip_prefix("VirtualMachine").filter(|short| !short.is_empty());
        short.unwrap_or(kind.kind())
    };
    let shown = effects.iter().map(|effect| match effect {
        Effect::Patch { kind, subresource: Some(_), .. } => format!("status {}", name(kind)),
        Effect::Patch { kind, .. } => format!("patch {}", name(kind)),
        Effect::Delete { kind, .. } => format!("delete {}", name(kind)),
        Effect::CreateSnapshotContent { .. } => "create content".to_owned(),
        Effect::CopyRevision { copy, .. } => format!("copy {}", copy.name),
        Effect::Event(event) => format!("event {}", event.reason),
        other => format!("{other:?}"),
    });
    shown.collect()
}

fn status(effects: &[Effect]) -> Value {
    let found = effects.iter().find_map(|effect| match effect {
        Effect::Patch { kind: Kind::VmSnapshot, subresource: Some(_), patch, .. } => Some(patch["status"].clone()),
        _ => None,
    });
    found.unwrap_or_default()
}

#[test]
fn snapshot_goes_through_its_stages() {
    let taken = json!({"creationTime": "2030-01-01T00:00:30Z", "readyToUse": true, "quiesce": {"state": "Thawed"}});
    let frozen = merged(taken.clone(), &json!({"quiesce": {"state": "Frozen"}}));
    let none = json!({});
    let new = json!({"status": null});
    let late = json!({"spec": {"failureDeadline": "30s"}});
    let now_failed = json!({"spec": {"failureDeadline": "-1s"}});
    let endless = json!({"spec": {"failureDeadline": "0"}, "metadata": {"creationTimestamp": "2029-01-01T00:00:00Z"}});
    let done = json!({"status": {"phase": "Succeeded"}});
    let failed = json!({"status": {"phase": "Failed"}});
    let deleted = json!({"metadata": {"deletionTimestamp": "2030-01-01T00:00:50Z"}});
    let kept = merged(merged(deleted.clone(), &done), &json!({"spec": {"deletionPolicy": "Retain"}}));
    let free = || Some(vm(&json!({})));
    // Snapshot, VM, content; effects and phase.
    for (change, vm, content, effects, phase) in [
        (&new, free(), None, vec!["status Snapshot"], "InProgress"),
        (&none, None, None, vec!["status Snapshot"], ""),
        (&none, free(), None, vec!["status VirtualMachine", "patch VirtualMachine", "status Snapshot"], ""),
        (&none, Some(held()), None, vec!["create content", "status Snapshot"], ""),
        (&none, Some(held()), Some(content(&json!({}))), vec!["status Snapshot"], ""),
        (&none, Some(held()), Some(content(&frozen)), vec!["status Snapshot"], ""),
        (
            &none,
            Some(held()),
            Some(content(&taken)),
            vec!["patch VirtualMachine", "status VirtualMachine", "status Snapshot"],
            "Succeeded",
        ),
        (
            &late,
            Some(held()),
            Some(content(&none)),
            vec!["delete SnapshotContent", "status Snapshot", "event VirtualMachineSnapshotFailed"],
            "Failed",
        ),
        (
            &late,
            Some(held()),
            Some(content(&taken)),
            vec!["patch VirtualMachine", "status VirtualMachine", "status Snapshot"],
            "Succeeded",
        ),
        (&now_failed, free(), None, vec!["status Snapshot", "event VirtualMachineSnapshotFailed"], "Failed"),
        (&endless, Some(held()), Some(content(&json!({}))), vec!["status Snapshot"], ""),
        (&failed, Some(held()), None, vec!["patch VirtualMachine", "status VirtualMachine", "status Snapshot"], ""),
        (
            &deleted,
            Some(held()),
            Some(content(&json!({}))),
            vec!["delete SnapshotContent", "status Snapshot"],
            "Deleting",
        ),
        (&deleted, Some(held()), None, vec!["patch VirtualMachine", "status VirtualMachine", "patch Snapshot"], ""),
        (&deleted, None, None, vec!["patch Snapshot"], ""),
        // A kept content is let go by its own controller first.
        (&kept, free(), Some(content(&taken)), vec![], ""),
    ] {
        let decision = decide(&observed(snapshot(change), vm, content)).unwrap();
        assert_eq!(shown(&decision.effects), effects, "{change}");
        let found = status(&decision.effects)["phase"].as_str().unwrap_or_default().to_owned();
        assert_eq!(found, phase, "{change}");
    }
}

#[test]
fn deadline_has_a_timer() {
    let time = |change: &Value| {
        decide(&observed(snapshot(change), Some(held()), Some(content(&json!({}))))).unwrap().wake_after
    };
    for (deadline, left) in [(json!(null), Some(240)), (json!("90s"), Some(30)), (json!("0"), None)] {
        let change = json!({"spec": {"failureDeadline": deadline}});
        assert_eq!(time(&change), left.map(Duration::from_secs), "{deadline}");
    }
    assert_eq!(time(&json!({"status": {"phase": "Succeeded"}})), None);
}

#[test]
fn refusals_name_what_is_in_the_way() {
    let live = |status: &Value| -> Option<Arc<VirtualMachineInstance>> {
        let vmi = json!({"metadata": {"name": "v"}, "spec": {"domain": {"devices": {}}}, "status": status});
        Some(Arc::new(serde_json::from_value(vmi).unwrap()))
    };
    let running = || live(&json!({"phase": "Running"}));
    let migrating = live(&json!({"phase": "Running", "migrationState": {"startTimestamp": "2030-01-01T00:00:00Z"}}));
    let handed = live(&json!({"phase": "Running", "migrationState": {"migrationUid": "m"}}));
    let pending = json!({"status": {"phase": "Pending"}});
    let deleted = json!({"metadata": {"deletionTimestamp": "2030-01-01T00:00:00Z"}});
    let restored = vm(&json!({"status": {"operation": {"operation": "Restore", "name": "r", "uid": "r"}}}));
    let moving = json!([{"type": "ManualRecoveryRequired", "status": "True"}]);
    let interrupted = vm(&json!({"status": {"conditions": moving}}));
    let gone = SourceVolume { known: None, users: None, ..volume(&json!({}), &[]) };
    let several =
        SourceVolume { class: Err("2 matching VolumeSnapshotClasses for d".into()), ..volume(&json!({}), &[]) };
    for (vm, vmi, volume, text) in [
        (vm(&json!({})), None, volume(&json!({}), &["p"]), " source is offline but 1 pods using PVCs [c]: p"),
        (vm(&json!({})), running(), volume(&pending, &["p"]), " source n/v volume not bound: c"),
        (vm(&json!({})), running(), volume(&deleted, &[]), " source n/v volume is being deleted: c"),
        (vm(&json!({})), running(), gone, " source n/v volume doesnt exist: c"),
        (vm(&json!({})), running(), several, " source n/v volume root: 2 matching VolumeSnapshotClasses for d"),
        (vm(&json!({})), migrating, volume(&json!({}), &[]), " source n/v is migrating"),
        (vm(&json!({})), handed.clone(), volume(&json!({}), &[]), " source n/v is migrating"),
        // Both took place at once.
        (held(), handed, volume(&json!({}), &[]), " source n/v is migrating"),
        (vm(&deleted), running(), volume(&json!({}), &[]), " source n/v is being deleted"),
        (restored, running(), volume(&json!({}), &[]), " restore \"r\" in progress"),
        // Its template names claims that lack what the former ones have.
        (
            interrupted,
            None,
            volume(&json!({}), &[]),
            " source n/v has volumes that an interrupted migration did not move",
        ),
    ] {
        let observed = Observed { vmi, volumes: vec![volume], ..observed(snapshot(&json!({})), Some(vm), None) };
        let decision = decide(&observed).unwrap();
        let status = status(&decision.effects);
        let progressing = &status["conditions"][0];
        assert_eq!(progressing["reason"], format!("Source not locked{text}"));
        assert_eq!(progressing["status"], "False");
        assert!(shown(&decision.effects).contains(&"event SnapshotSourceNotLocked".to_owned()), "{text}");
        assert_eq!(decision.wake_after, Some(RETRY));
        assert!(!shown(&decision.effects).contains(&"create content".to_owned()), "{text}");
    }
}

#[test]
fn excluded_volumes_must_exist() {
    let excludes = |names: &str| json!({"metadata": {"annotations": {"ferrovirt.io/excluded-volumes": names}}});
    for (names, refusal) in [
        ("root, cd", ""),
        ("persistent-state-for-v", ""),
        ("rot", "Source not locked source n/v has no volume rot that could be excluded"),
    ] {
        let decision = decide(&observed(snapshot(&excludes(names)), Some(vm(&json!({}))), None)).unwrap();
        let reason = status(&decision.effects)["conditions"][0]["reason"].clone();
        assert_eq!(reason == refusal, !refusal.is_empty(), "{names}: {reason}");
    }
    // A volume that is left out shows as such.
    let captured = content(&json!({"creationTime": "2030-01-01T00:00:30Z", "quiesce": {"state": "Offline"}}));
    let mut captured = (*captured).clone();
    captured.spec.volume_backups.clear();
    let decision = decide(&observed(snapshot(&excludes("root")), Some(held()), Some(Arc::new(captured)))).unwrap();
    assert_eq!(status(&decision.effects)["snapshotVolumes"]["excludedVolumes"], json!(["root", "cd"]));
    assert!(shown(&decision.effects).contains(&"event PartialSnapshot".to_owned()));
}

#[test]
fn content_has_the_claims_with_classes_and_the_copies_in_use() {
    let vm = vm(&json!({
        "spec": {"instancetype": {"name": "small"}},
        "status": {"instancetypeRef": {"controllerRevisionRef": {"name": "v-small-1"}}, "desiredGeneration": 1},
    }));
    let other = SourceVolume { name: "data".into(), class: Ok(None), ..volume(&json!({}), &[]) };
    let mut observed = observed(snapshot(&json!({})), None, None);
    observed.volumes.push(other);
    let (copies, creation) = captured::content(&observed, &vm);
    let copy = &copies[0];
    let copied = format!("v-small-1-{}", api::names::hash("u"));
    assert_eq!((copy.source.as_str(), copy.name.as_str()), ("v-small-1", copied.as_str()));
    let spec = &creation.content.spec;
    let named: Vec<_> = spec.volume_backups.iter().map(|backup| backup.volume_snapshot_name.as_deref()).collect();
    assert_eq!(named, [Some("vmsnapshot-u-volume-root")]);
    let captured = spec.source.virtual_machine.as_ref().unwrap().spec.as_ref().unwrap();
    assert_eq!(captured.instancetype.as_ref().unwrap().revision_name.as_deref(), Some(copied.as_str()));
    assert_eq!(creation.start, None);
}

#[test]
fn names_of_a_content_fit_their_limits() {
    let revision = "v".repeat(253);
    let vm = vm(&json!({
        "spec": {"instancetype": {"name": "small"}},
        "status": {"instancetypeRef": {"controllerRevisionRef": {"name": revision}}},
    }));
    let mut observed = observed(snapshot(&json!({})), None, None);
    observed.volumes[0].name = format!("persistent-state-for-{}", "v".repeat(253));
    let (copies, creation) = captured::content(&observed, &vm);
    let volume_snapshot = creation.content.spec.volume_backups[0].volume_snapshot_name.as_ref().unwrap();
    assert_eq!((copies[0].name.len(), volume_snapshot.len()), (253, 253));
}

#[test]
fn state_of_a_vm_is_part_of_its_snapshots_whatever_asked_for_it() {
    // A preference can ask for a TPM that is kept, which the template does not show.
    let caches = crate::resources::Caches::default();
    let claim =
        json!({"metadata": {"name": "state-1", "namespace": "n", "uid": "s", "labels": {"persistent-state-for": "v"}}});
    let claim: PersistentVolumeClaim = serde_json::from_value(claim).unwrap();
    caches.claims.observe(claim.into());
    let volumes = source::volumes(&caches, &vm(&json!({})), None);
    let named: Vec<(&str, &str)> = volumes.iter().map(|volume| (volume.name.as_str(), volume.claim.as_str())).collect();
    assert_eq!(named, [("root", "c"), ("persistent-state-for-v", "state-1")]);
}

#[test]
fn status_tells_how_the_guest_was_treated() {
    for (state, indications) in [
        ("Offline", json!(null)),
        ("Paused", json!(["Online", "Paused"])),
        ("NoAgent", json!(["NoGuestAgent", "Online"])),
        ("Thawed", json!(["GuestAgent", "Online"])),
        ("TimedOut", json!(["GuestAgent", "Online", "QuiesceTimeout"])),
        ("Failed", json!(["GuestAgent", "Online", "QuiesceFailed"])),
    ] {
        let content = content(&json!({"creationTime": "2030-01-01T00:00:30Z", "quiesce": {"state": state}}));
        let decision = decide(&observed(snapshot(&json!({})), Some(held()), Some(content))).unwrap();
        let status = status(&decision.effects);
        assert_eq!(status["indications"], indications, "{state}");
        assert_eq!(status["snapshotVolumes"], json!({"includedVolumes": ["root"], "excludedVolumes": ["cd"]}));
    }
}

#[test]
fn passed_deadline_names_what_was_waited_for() {
    let late = snapshot(&json!({"spec": {"failureDeadline": "30s"}}));
    let connected = json!([{"type": "AgentConnected", "status": "True"}]);
    let refused = json!({"error": {"message": "refused"}});
    for (conditions, found, text) in [
        (&connected, Some(json!({})), "the guest agent has not answered"),
        (&connected, Some(json!({"quiesce": {"state": "Frozen"}})), "the storage has not taken"),
        (&json!([]), Some(json!({})), "the storage has not taken"),
        (&connected, Some(refused), "refused"),
        (&connected, None, ""),
    ] {
        let vmi = json!({
            "metadata": {"name": "v"}, "spec": {"domain": {"devices": {}}},
            "status": {"phase": "Running", "conditions": conditions},
        });
        let vmi: Option<Arc<VirtualMachineInstance>> = Some(Arc::new(serde_json::from_value(vmi).unwrap()));
        let content = found.as_ref().map(content);
        let observed = Observed { vmi, ..observed(late.clone(), Some(held()), content) };
        let status = status(&decide(&observed).unwrap().effects);
        let message = status["error"]["message"].as_str().unwrap_or_default();
        assert!(message.starts_with(text) && message.is_empty() == text.is_empty(), "{text}: {message}");
    }
    let held = "Source not locked hibernation \"v\" in progress";
    for (shown, text) in [(held, held), ("Source does not exist", "Source does not exist"), ("Source not locked", "")] {
        let conditions = json!([{"type": "Progressing", "status": "False", "reason": shown}]);
        let late = snapshot(&json!({"spec": {"failureDeadline": "30s"}, "status": {"conditions": conditions}}));
        let status = status(&decide(&observed(late, None, None)).unwrap().effects);
        assert_eq!(status["error"]["message"].as_str().unwrap_or_default(), text);
    }
}

#[test]
fn deleted_content_of_a_complete_snapshot_shows() {
    let done = snapshot(&json!({"status": {"phase": "Succeeded", "readyToUse": true}}));
    let status = status(&decide(&observed(done, Some(vm(&json!({}))), None)).unwrap().effects);
    assert_eq!((&status["readyToUse"], &status["phase"]), (&json!(false), &Value::Null));
    assert_eq!(status["error"]["message"], "the content of the snapshot was deleted");
    let progressing = &status["conditions"][0];
    assert_eq!((&progressing["status"], &progressing["reason"]), (&json!("False"), &json!("In error state")));
}

#[test]
fn pods_that_use_the_disks_of_a_stopped_vm_are_read_first() {
    let unread = SourceVolume { users: None, ..volume(&json!({}), &[]) };
    let observed = Observed { volumes: vec![unread], ..observed(snapshot(&json!({})), Some(vm(&json!({}))), None) };
    let decision = decide(&observed).unwrap();
    assert!(matches!(decision.effects.first(), Some(Effect::ReadUsers { .. })));
    assert_eq!(shown(&decision.effects[1..]), ["status Snapshot"]);
}

#[test]
fn claims_without_users_are_read_once_for_a_snapshot() {
    let read = |name: &str, ago: Option<i64>, pods: &[&str]| {
        let known = volume(&json!({"metadata": {"name": name, "uid": name}}), pods);
        let users = known.users.clone().zip(ago).map(|(users, ago)| {
            Arc::new(ClaimUsers { read_at: now() - jiff::SignedDuration::from_secs(ago), ..(*users).clone() })
        });
        SourceVolume { name: name.to_owned(), claim: name.to_owned(), users, ..known }
    };
    // Reads of two claims in seconds before now, the pods of the first one, the claims that are read; the snapshot is a minute old.
    for (first, second, pods, unread) in [
        (Some(6), Some(0), &[][..], &[][..]),
        (Some(60), Some(0), &[], &[]),
        (Some(61), Some(0), &[], &["a"]),
        (Some(4), Some(0), &["p"], &[]),
        (Some(6), Some(0), &["p"], &["a"]),
        (None, None, &[], &["a", "b"]),
    ] {
        let volumes = vec![read("a", first, pods), read("b", second, &[])];
        let observed = Observed { volumes, ..observed(snapshot(&json!({})), Some(vm(&json!({}))), None) };
        let effects = decide(&observed).unwrap().effects;
        let claims = effects.iter().filter_map(|effect| match effect {
            Effect::ReadUsers { claims, .. } => Some(claims.keys().map(String::as_str).collect::<Vec<_>>()),
            _ => None,
        });
        assert_eq!(claims.collect::<Vec<_>>(), if unread.is_empty() { vec![] } else { vec![unread.to_vec()] });
        let is_taken = shown(&effects).contains(&"status VirtualMachine".to_owned());
        assert_eq!(is_taken, unread.is_empty() && pods.is_empty(), "{first:?} {pods:?}");
    }
}

#[test]
fn read_of_pods_does_not_show_in_the_refusal() {
    let pending = json!({"status": {"phase": "Pending"}});
    let unread = SourceVolume { users: None, ..volume(&pending, &[]) };
    let reason = |volume: SourceVolume| {
        let observed = Observed { volumes: vec![volume], ..observed(snapshot(&json!({})), Some(vm(&json!({}))), None) };
        status(&decide(&observed).unwrap().effects)["conditions"][0]["reason"].clone()
    };
    let text = "Source not locked source n/v volume not bound: c";
    assert_eq!([reason(unread), reason(volume(&pending, &[]))], [text, text]);
    // The pod for which the claim waits may write to it afterwards.
    let mut known = volume(&pending, &[]);
    let read_at = now() - jiff::SignedDuration::from_secs(6);
    known.users = known.users.map(|users| Arc::new(ClaimUsers { read_at, ..(*users).clone() }));
    let observed = Observed { volumes: vec![known], ..observed(snapshot(&json!({})), Some(vm(&json!({}))), None) };
    assert!(matches!(decide(&observed).unwrap().effects.first(), Some(Effect::ReadUsers { .. })));
}

#[test]
fn snapshot_stays_while_its_content_is_the_only_one() {
    let deleted = json!({"metadata": {"deletionTimestamp": "2030-01-01T00:00:00Z"}, "status": {"phase": "Succeeded"}});
    for (is_in_use, effects) in [(true, &[][..]), (false, &["delete SnapshotContent"])] {
        let mut observed =
            observed(snapshot(&deleted), None, Some(content(&json!({"creationTime": "2030-01-01T00:00:00Z"}))));
        observed.is_in_use = is_in_use;
        assert_eq!(shown(&decide(&observed).unwrap().effects), effects);
    }
}

#[test]
fn snapshot_that_cannot_lock_its_vm_holds_no_lease() {
    // Without the finalizer, which was refused.
    let leased = vm(&json!({"status": {
        "operation": {"operation": "Snapshot", "name": "s", "uid": "u"}, "snapshotInProgress": "s",
    }}));
    for (users, is_released) in [(&["pod"][..], true), (&[], false)] {
        let mut observed = observed(snapshot(&json!({})), Some(leased.clone()), None);
        observed.volumes = vec![volume(&json!({}), users)];
        let effects = decide(&observed).unwrap().effects;
        let found = shown(&effects).contains(&"status VirtualMachine".to_owned());
        assert_eq!(found, is_released, "{users:?}: {effects:?}");
    }
}

#[test]
fn refused_lock_shows_and_leaves_the_vm_free_until_the_next_attempt() {
    let leased = vm(&json!({"status": {
        "operation": {"operation": "Snapshot", "name": "s", "uid": "u"}, "snapshotInProgress": "s",
    }}));
    let text = "Source not locked source n/v cannot be locked: denied";
    let waits = &["status VirtualMachine", "status Snapshot", "event SnapshotSourceNotLocked"][..];
    for (seconds, effects, reason) in
        [(1, waits, text), (0, &["patch VirtualMachine", "status Snapshot"], "Source locked and operation in progress")]
    {
        let mut observed = observed(snapshot(&json!({})), Some(leased.clone()), None);
        let retry_at = now() + jiff::SignedDuration::from_secs(seconds);
        let failure = Failure { reason: LOCK, message: "denied".to_owned(), retry_at, attempts: 1 };
        observed.failures = Some(failure).into();
        let decision = decide(&observed).unwrap();
        assert_eq!(shown(&decision.effects), effects);
        assert_eq!(status(&decision.effects)["conditions"][0]["reason"], reason);
        let is_remembered = |effect: &Effect| match effect {
            Effect::Patch { kind: Kind::VirtualMachine, subresource: None, options, .. } => {
                options.failure_reason == Some(LOCK)
            }
            _ => true,
        };
        assert!(decision.effects.iter().all(is_remembered));
    }
}
