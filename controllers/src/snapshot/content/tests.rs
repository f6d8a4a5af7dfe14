//! Tests of decisions about contents.

use api::constants::{event, label};
use k8s_openapi::api::core::v1::PersistentVolumeClaim;
use serde_json::{Value, json};

use super::*;
use crate::{
    cache::Key,
    resources::Caches,
    runtime::{Controller, Failure},
};

fn now() -> Timestamp {
    "2030-01-01T00:01:00Z".parse().unwrap()
}

fn content(status: &Value) -> VirtualMachineSnapshotContent {
    let backup = |name: &str| {
        json!({
            "volumeName": name, "volumeSnapshotName": format!("vs-{name}"),
            "persistentVolumeClaim": {"metadata": {"name": name, "uid": name}},
        })
    };
    serde_json::from_value(json!({
        "metadata": {
            "name": "vmsnapshot-content-u", "namespace": "n", "uid": "c", "resourceVersion": "1",
            "finalizers": ["snapshot.kubevirt.io/vmsnapshotcontent-protection"],
        },
        "spec": {
            "source": {"virtualMachine": {"metadata": {"name": "v"}}}, "virtualMachineSnapshotName": "s",
            "volumeBackups": [backup("a"), backup("b")],
        },
        "status": status,
    }))
    .unwrap()
}

fn snapshot(change: &Value) -> Option<Arc<VirtualMachineSnapshot>> {
    let mut snapshot = json!({
        "metadata": {"name": "s", "namespace": "n", "uid": "u"},
        "spec": {"source": {"apiGroup": "kubevirt.io", "kind": "VirtualMachine", "name": "v"}},
        "status": {"phase": "InProgress"},
    });
    json_patch::merge(&mut snapshot, change);
    Some(Arc::new(serde_json::from_value(snapshot).unwrap()))
}

fn vmi(conditions: &[&str]) -> Option<Arc<VirtualMachineInstance>> {
    let conditions: Vec<Value> = conditions.iter().map(|name| json!({"type": name, "status": "True"})).collect();
    let vmi = json!({
        "metadata": {"name": "v", "namespace": "n"}, "spec": {"domain": {"devices": {}}},
        "status": {"phase": "Running", "conditions": conditions},
    });
    Some(Arc::new(serde_json::from_value(vmi).unwrap()))
}

fn claims() -> Claims {
    let claim = |name: &str| {
        let claim = json!({"metadata": {"name": name, "uid": name}});
        let claim: PersistentVolumeClaim = serde_json::from_value(claim).unwrap();
        (name.to_owned(), (Arc::new(CachedClaim::from(claim)), Ok(Some("class".to_owned()))))
    };
    ["a", "b"].map(claim).into_iter().collect()
}

fn taken(names: &[(&str, Option<&str>)]) -> BTreeMap<String, Arc<CachedSnapshot>> {
    let taken = |(name, created): &(&str, Option<&str>)| {
        let created = created.map(|time| Time(time.parse().unwrap()));
        (format!("vs-{name}"), Arc::new(CachedSnapshot { created, ready: false, ..CachedSnapshot::default() }))
    };
    names.iter().map(taken).collect()
}

fn failure(reason: &'static str, message: &str, attempts: u32) -> Option<Failure> {
    Some(Failure { reason, message: message.to_owned(), retry_at: now(), attempts })
}

fn observed(status: &Value) -> Observed {
    Observed {
        content: Arc::new(content(status)),
        snapshot: snapshot(&json!({})),
        vm: None,
        vmi: vmi(&["AgentConnected"]),
        taken: BTreeMap::new(),
        claims: claims(),
        is_in_use: false,
        failures: Failures::default(),
        now: now(),
    }
}

/// Returns the effects in short.
fn shown(decision: &Decision) -> String {
    let shown = decision.effects.iter().map(|effect| match effect {
        Effect::Quiesce { freeze: Some(_), .. } => "freeze".to_owned(),
        Effect::Quiesce { .. } => "thaw".to_owned(),
        Effect::RequireTaken { content, .. } => format!("read {content}"),
        Effect::Create { object, .. } => object["metadata"]["name"].as_str().unwrap_or_default().to_owned(),
        Effect::Patch { subresource: Some(_), patch, .. } => {
            let status = &patch["status"];
            let state = status["quiesce"]["state"].as_str().unwrap_or_default();
            let created = if status["creationTime"].is_string() { "+created" } else { "" };
            format!("{state}{created}")
        }
        Effect::Patch { .. } => "released".to_owned(),
        Effect::Delete { .. } => "deleted".to_owned(),
        other => format!("{other:?}"),
    });
    shown.filter(|text| !text.is_empty()).collect::<Vec<_>>().join(" ")
}

#[test]
fn content_belongs_to_its_vm_before_its_snapshot_is_seen() {
    let (caches, key) = (Caches::default(), Key::new("n", "vmsnapshot-content-u"));
    caches.vm_snapshot_contents.observe(content(&Value::Null));
    assert_eq!(SnapshotContents::vm(&caches, &key), Key::new("n", "v"));
}

#[test]
fn guest_is_frozen_while_volume_snapshots_are_taken() {
    let frozen = |time: &str| json!({"quiesce": {"state": "Frozen", "time": time}});
    let (recent, old) = (frozen("2030-01-01T00:00:50Z"), frozen("2030-01-01T00:00:00Z"));
    let none = json!({});
    let (in_time, late) = (Some("2030-01-01T00:00:55Z"), Some("2030-01-01T00:02:00Z"));
    let all = |time| taken(&[("a", time), ("b", time)]);
    let agent = || vmi(&["AgentConnected"]);
    let refused = |attempts| failure(event::FAILED_VOLUME_SNAPSHOT_CREATE, "quota", attempts);
    // Status, guest, volume snapshots, the last refusal; effects.
    for (status, vmi, taken, failure, effects) in [
        (&none, agent(), taken(&[]), None, "freeze Frozen vs-a vs-b"),
        (&none, None, taken(&[]), None, "Offline vs-a vs-b"),
        (&none, vmi(&[]), taken(&[]), None, "NoAgent vs-a vs-b"),
        (&none, vmi(&["AgentConnected", "Paused"]), taken(&[]), None, "Paused vs-a vs-b"),
        (&none, agent(), taken(&[]), failure(quiesce::FREEZE, "no", 1), "freeze Frozen vs-a vs-b"),
        (&none, agent(), taken(&[]), failure(quiesce::FREEZE, "no", 3), "Failed vs-a vs-b"),
        (&recent, agent(), taken(&[("a", in_time)]), None, "vs-b"),
        (&recent, agent(), taken(&[("a", None), ("b", in_time)]), None, ""),
        // A volume that is refused thrice lets the guest run.
        (&recent, agent(), taken(&[("a", None)]), refused(2), "vs-b"),
        (&recent, agent(), taken(&[("a", None)]), refused(3), "thaw TimedOut vs-b"),
        (&recent, agent(), taken(&[("a", None)]), failure(quiesce::THAW, "no answer", 1), "TimedOut vs-b"),
        (&old, agent(), taken(&[("a", None), ("b", in_time)]), None, "TimedOut"),
        (&recent, agent(), all(in_time), None, "thaw Thawed+created"),
        (&recent, None, all(in_time), None, "Thawed+created"),
        (
            &recent,
            agent(),
            all(in_time),
            failure(quiesce::THAW, "fsfreeze is limited up to 10 seconds", 1),
            "TimedOut+created",
        ),
    ] {
        let mut observed = Observed { vmi, taken, failures: failure.into(), ..observed(status) };
        assert_eq!(shown(&decide(&observed).unwrap()), effects, "{status}");
        // The guest has thawed itself by then.
        observed.now = "2030-01-01T00:03:00Z".parse().unwrap();
        if *status == recent && observed.failures.is_empty() && observed.are_all_taken() {
            assert_eq!(shown(&decide(&observed).unwrap()), "Thawed+created");
            observed.taken = all(late);
            assert_eq!(shown(&decide(&observed).unwrap()), "TimedOut+created");
        }
    }
}

#[test]
fn content_of_a_stopped_vm_has_no_status_before_its_first_volume_snapshot() {
    let refused = |attempts| failure(event::FAILED_VOLUME_SNAPSHOT_CREATE, "denied", attempts);
    let created = Some("2030-01-01T00:00:55Z");
    // Volume snapshots, the last refusal; effects, error.
    for (taken, failure, effects, error) in [
        (taken(&[]), None, "vs-a vs-b", None),
        (taken(&[]), refused(2), "vs-a vs-b", None),
        (taken(&[]), refused(3), "Offline vs-a vs-b", Some("cannot create VolumeSnapshots: denied")),
        (taken(&[("a", None)]), None, "Offline vs-b", None),
        (taken(&[("a", created), ("b", created)]), None, "Offline+created", None),
    ] {
        let observed = Observed { vmi: None, taken, failures: failure.into(), ..observed(&Value::Null) };
        let decision = decide(&observed).unwrap();
        assert_eq!(shown(&decision), effects);
        let found = decision.effects.iter().find_map(|effect| match effect {
            Effect::Patch { patch, .. } => patch["status"]["error"]["message"].as_str(),
            _ => None,
        });
        assert_eq!(found, error, "{effects}");
    }
}

#[test]
fn guest_is_not_frozen_for_a_volume_that_cannot_be_snapshotted() {
    let frozen = json!({"quiesce": {"state": "Frozen", "time": "2030-01-01T00:00:50Z"}});
    for (status, effects) in [(&json!({}), ""), (&frozen, "thaw TimedOut vs-a")] {
        let mut observed = observed(status);
        let (claim, _) = observed.claims["b"].clone();
        observed.claims.insert("b".to_owned(), (claim, Ok(None)));
        let decision = decide(&observed).unwrap();
        assert_eq!((shown(&decision).as_str(), decision.wake_after), (effects, Some(RETRY)));
        let error = decision.effects.iter().find_map(|effect| match effect {
            Effect::Patch { patch, .. } => patch["status"]["error"]["message"].as_str(),
            _ => None,
        });
        assert_eq!(error, Some("n/b VolumeSnapshot requested but no storage class"));
    }
}

#[test]
fn guest_is_thawed_once_the_contents_are_taken() {
    let frozen = json!({"quiesce": {"state": "Frozen", "time": "2030-01-01T00:00:50Z"}});
    let thawed = json!({"quiesce": {"state": "Thawed", "time": "2030-01-01T00:00:50Z"}});
    let failed = json!({"quiesce": {"state": "Failed"}});
    let bound = |created: Option<&str>| {
        let mut all = taken(&[("a", created), ("b", None)]);
        for (name, snapshot) in &mut all {
            let content = Some(name.replace("vs-", "c-"));
            *snapshot = Arc::new(CachedSnapshot { content, ..(**snapshot).clone() });
        }
        all
    };
    let unbound = || bound(None).into_iter().chain(taken(&[("b", None)])).collect::<BTreeMap<_, _>>();
    let incomplete = || bound(None).into_iter().take(1).collect::<BTreeMap<_, _>>();
    let agent = || vmi(&["AgentConnected"]);
    let later = |reason| {
        let retry_at = "2030-01-01T00:01:10Z".parse().unwrap();
        failure(reason, "refused", 1).map(|failure| Failure { retry_at, ..failure })
    };
    let all = "read c-a read c-b thaw Thawed";
    // Status, guest, volume snapshots, the last refusal; effects, milliseconds until the next decision.
    for (status, vmi, taken, failure, effects, wake) in [
        (&frozen, agent(), bound(None), None, all, Some(500)),
        (&frozen, agent(), bound(Some("2030-01-01T00:00:55Z")), None, "read c-b thaw Thawed", Some(500)),
        (&frozen, agent(), unbound(), None, "", Some(50_000)),
        (&frozen, agent(), incomplete(), None, "vs-b", Some(50_000)),
        (&frozen, vmi(&["AgentConnected", "Paused"]), bound(None), None, "read c-a read c-b Thawed", Some(500)),
        (&frozen, agent(), bound(None), later(quiesce::READ), "", Some(10_000)),
        (&frozen, agent(), bound(None), failure(quiesce::READ, "forbidden", 1), all, Some(500)),
        (&frozen, agent(), bound(None), later(quiesce::THAW), "", Some(10_000)),
        (&frozen, agent(), bound(None), failure(quiesce::THAW, "no answer", 1), all, Some(500)),
        (&thawed, agent(), bound(None), None, "", None),
        (&failed, agent(), bound(None), None, "", None),
    ] {
        let decision = decide(&Observed { vmi, taken, failures: failure.into(), ..observed(status) }).unwrap();
        assert_eq!(shown(&decision), effects, "{status}");
        assert_eq!(decision.wake_after, wake.map(Duration::from_millis), "{effects}");
    }
    // Read less often as time passes.
    for (now, wake) in [("2030-01-01T00:00:50Z", 30), ("2030-01-01T00:00:54Z", 250)] {
        let observed = Observed { taken: bound(None), now: now.parse().unwrap(), ..observed(&frozen) };
        assert_eq!(decide(&observed).unwrap().wake_after, Some(Duration::from_millis(wake)));
    }
}

#[test]
fn guest_that_was_frozen_before_is_thawed_first() {
    let mut frozen = (*vmi(&["AgentConnected"]).unwrap()).clone();
    frozen.status.get_or_insert_default().fs_freeze_status = Some("frozen".to_owned());
    for (failure, effects) in [
        (None, "thaw"),
        (failure(quiesce::FREEZE, "no answer", 1), "thaw"),
        (failure(quiesce::FREEZE, "no answer", 3), "Failed vs-a vs-b"),
    ] {
        let vmi = Some(Arc::new(frozen.clone()));
        let observed = Observed { vmi, failures: failure.into(), ..observed(&json!({})) };
        assert_eq!(shown(&decide(&observed).unwrap()), effects);
    }
}

#[test]
fn refused_freeze_waits_and_shows() {
    let retry_at = "2030-01-01T00:01:10Z".parse().unwrap();
    let failure = Failure { retry_at, ..failure(quiesce::FREEZE, "busy", 1).unwrap() };
    let decision = decide(&Observed { failures: Some(failure).into(), ..observed(&json!({})) }).unwrap();
    let [Effect::Patch { patch, .. }] = decision.effects.as_slice() else { panic!("{decision:?}") };
    assert_eq!(patch["status"]["error"]["message"], "cannot freeze the file systems of the guest: busy");
    assert_eq!(decision.wake_after, Some(Duration::from_secs(10)));
}

#[test]
fn content_is_let_go_even_if_the_guest_cannot_be_thawed() {
    let deleted = snapshot(&json!({"metadata": {"deletionTimestamp": "2030-01-01T00:00:00Z"}}));
    let failed = snapshot(&json!({"status": {"phase": "Failed"}}));
    let frozen = json!({"quiesce": {"state": "Frozen", "time": "2030-01-01T00:00:50Z"}});
    let done = json!({"creationTime": "2030-01-01T00:00:55Z", "quiesce": {"state": "Thawed"}});
    for (status, snapshot, effects) in [
        (&frozen, deleted.clone(), "thaw released"),
        (&frozen, failed, "thaw released"),
        (&done, deleted, "released"),
        (&frozen, None, "thaw released deleted"),
        (&done, None, "released"),
    ] {
        let mut observed = Observed { snapshot, ..observed(status) };
        let decision = decide(&observed).unwrap();
        assert_eq!(shown(&decision), effects, "{status}");
        observed.is_in_use = true;
        assert_eq!(decide(&observed).unwrap(), Decision::settled(), "a restore in place needs it");
        let thaw = decision.effects.iter().find(|effect| matches!(effect, Effect::Quiesce { .. }));
        assert!(thaw.is_none_or(|thaw| *thaw == thaw.clone().independent()));
    }
}

#[test]
fn lost_volume_snapshot_makes_the_content_unusable() {
    let done = json!({
        "creationTime": "2030-01-01T00:00:55Z", "readyToUse": true,
        "volumeSnapshotStatus": [{"volumeSnapshotName": "vs-a"}, {"volumeSnapshotName": "vs-b"}],
    });
    let observed = Observed { taken: taken(&[("a", Some("2030-01-01T00:00:55Z"))]), ..observed(&done) };
    let decision = decide(&observed).unwrap();
    let [Effect::Patch { patch, .. }, Effect::Event(event)] = decision.effects.as_slice() else {
        panic!("{decision:?}")
    };
    assert_eq!(patch["status"]["error"]["message"], "VolumeSnapshots (vs-b) missing");
    assert_eq!((event.reason, &patch["status"]["readyToUse"]), ("VolumeSnapshotMissing", &json!(false)));
}

#[test]
fn another_claim_under_the_name_is_not_snapshotted() {
    let mut observed = observed(&json!({"quiesce": {"state": "NoAgent"}}));
    let (claim, class) = observed.claims["b"].clone();
    let mut other = (*claim).clone();
    other.metadata.uid = Some("other".to_owned());
    observed.claims.insert("b".to_owned(), (Arc::new(other), class));
    let decision = decide(&observed).unwrap();
    assert_eq!(shown(&decision), "vs-a");
    let Effect::Patch { patch, .. } = &decision.effects[0] else { panic!("{decision:?}") };
    assert_eq!(patch["status"]["error"]["message"], "PVC n/b no longer exists");
}

#[test]
fn label_with_the_name_of_the_vm_fits_its_limit() {
    for name in ["v".repeat(63), "v".repeat(64), "v".repeat(253)] {
        let mut content = content(&json!({"quiesce": {"state": "NoAgent"}}));
        content.spec.source.virtual_machine.as_mut().unwrap().metadata.name = Some(name.clone());
        let decision = decide(&Observed { content: Arc::new(content), ..observed(&Value::Null) }).unwrap();
        let labels = decision.effects.iter().filter_map(|effect| match effect {
            Effect::Create { object, .. } => object["metadata"]["labels"][label::SNAPSHOT_SOURCE_NAME].as_str(),
            _ => None,
        });
        let labels: Vec<&str> = labels.collect();
        assert_eq!(labels, vec![api::names::label_value(&name); 2]);
        assert!(labels.iter().all(|label| label.len() <= 63), "{labels:?}");
    }
}
