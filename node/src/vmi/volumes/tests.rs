use std::{collections::BTreeMap, sync::Arc};

use protocol::{DiskTarget, LauncherState, Lifecycle};
use serde_json::{Value, json};

use super::*;
use crate::{
    vmi::{calls::HandVolumes, effect::Effect, launcher_volumes::LauncherVolumes, observed::Now},
    volumes::{Failure, Volumes},
};

const NODE: &str = "n1";
const POD: &str = "8f6e0c52-attach";

fn at(seconds: u64) -> Now {
    let wall = jiff::Timestamp::from_second(1_800_000_000).unwrap();
    Now { since_start: Duration::from_secs(seconds), wall }
}

/// A status entry of a hot-plugged volume.
fn entry(name: &str, phase: &str, pod: &str) -> Value {
    json!({"name": name, "target": "", "phase": phase, "hotplugVolume": {"attachPodUID": pod},
        "persistentVolumeClaimInfo": {"claimName": "c", "volumeMode": if name == "raw" { "Block" } else { "Filesystem" }}})
}

fn vmi(volumes: &[&str], entries: &[Value]) -> Arc<VirtualMachineInstance> {
    let volumes: Vec<Value> = volumes
        .iter()
        .map(|name| json!({"name": name, "persistentVolumeClaim": {"claimName": "c", "hotpluggable": true}}))
        .collect();
    let vmi = json!({
        "apiVersion": "kubevirt.io/v1", "kind": "VirtualMachineInstance",
        "metadata": {"name": "m", "namespace": "ns", "uid": "u", "labels": {"kubevirt.io/nodeName": NODE}},
        "spec": {"domain": {"devices": {}}, "volumes": volumes},
        "status": {"phase": "Running", "nodeName": NODE, "activePods": {"pod-1": NODE}, "volumeStatus": entries},
    });
    Arc::new(serde_json::from_value(vmi).unwrap())
}

/// A connected VMI whose launcher has these volumes and reports these disks.
fn observed(volumes: &[&str], entries: &[Value], mounted: &[&str], disks: &[&str]) -> Observed {
    let mut observed = Observed::new(vmi(volumes, entries), NODE);
    let synced = Some(observed.facts.fingerprint);
    let features = std::collections::BTreeSet::new();
    observed.link = Link::Up { connection: 1, greeted: true, features, networked: true, synced, results_from: 0 };
    let disks = disks.iter().map(|name| DiskTarget { volume: (*name).into(), target: "sda".into(), size: 0 });
    let mut report = LauncherState { disks: disks.collect(), ..LauncherState::default() };
    report.set_lifecycle(Lifecycle::Running);
    (observed.report, observed.reported) = (Some(report), true);
    observed.volumes = Some(LauncherVolumes::after(None, volumes_of(mounted, &[]), Duration::ZERO));
    observed
}

fn volumes_of(mounted: &[&str], failures: &[(&str, bool)]) -> Volumes {
    let failure = |waiting| Failure { message: "no".into(), waiting };
    let failures: BTreeMap<_, _> = failures.iter().map(|(name, waiting)| ((*name).into(), failure(*waiting))).collect();
    Volumes { mounted: mounted.iter().map(|name| (*name).to_owned()).collect(), failures }
}

fn planned(observed: &Observed) -> Option<(Vec<String>, Vec<String>)> {
    let (work, _) = plan(observed)?;
    Some((work.attach.into_iter().map(|handover| handover.volume).collect(), work.detach))
}

#[test]
fn volumes_are_handed_over_when_their_pod_is_known_and_taken_back_when_the_domain_has_let_go() {
    let names = |names: &[&str]| -> Vec<String> { names.iter().map(|name| (*name).to_owned()).collect() };
    let work = |attach: &[&str], detach: &[&str]| Some((names(attach), names(detach)));
    let (known, unknown) = (entry("data", "AttachedToNode", POD), entry("data", "Bound", ""));
    let outside = entry("data", "AttachedToNode", "../../etc");
    let ready = entry("data", "Ready", POD);
    for (volumes, entries, mounted, disks, expected) in [
        (vec!["data"], vec![known.clone()], vec![], vec![], work(&["data"], &[])),
        (vec!["data"], vec![unknown], vec![], vec![], None),
        (vec!["data"], vec![outside], vec![], vec![], None),
        (vec!["data"], vec![known], vec!["data"], vec![], None),
        (vec!["data"], vec![ready.clone()], vec!["data"], vec!["data"], None),
        // Removed from the spec: first the domain, then the launcher.
        (vec![], vec![ready.clone()], vec!["data"], vec!["data"], None),
        (vec![], vec![ready.clone()], vec!["data"], vec![], work(&[], &["data"])),
        (vec![], vec![ready.clone()], vec![], vec![], None),
        // Each on its own.
        (vec!["raw"], vec![ready, entry("raw", "Bound", POD)], vec!["data"], vec![], work(&["raw"], &["data"])),
        (vec![], vec![], vec![], vec![], None),
    ] {
        let observed = observed(&volumes, &entries, &mounted, &disks);
        assert_eq!(planned(&observed), expected, "{volumes:?} {entries:?} {mounted:?} {disks:?}");
    }
}

#[test]
fn launchers_get_what_the_volume_is_for() {
    let named = json!({"name": "dump", "target": "", "phase": "AttachedToNode", "hotplugVolume": {"attachPodUID": POD},
        "memoryDumpVolume": {"claimName": "c", "targetFileName": "m-dump-1.memory.dump"}});
    for (volume, entry, expected) in [
        (json!({"volumes": [{"name": "data"}]}), entry("data", "Bound", POD), Some(Content::Image)),
        (json!({"volumes": [{"name": "raw"}]}), entry("raw", "Bound", POD), Some(Content::Device)),
        (
            json!({"utilityVolumes": [{"name": "data", "claimName": "c"}]}),
            entry("data", "Bound", POD),
            Some(Content::Directory),
        ),
        (json!({"utilityVolumes": [{"name": "raw", "claimName": "c"}]}), entry("raw", "Bound", POD), None),
        (
            json!({"volumes": [{"name": "dump", "memoryDump": {"claimName": "c"}}]}),
            named,
            Some(Content::Dump("m-dump-1.memory.dump".into())),
        ),
        (json!({"volumes": [{"name": "dump", "memoryDump": {"claimName": "c"}}]}), entry("dump", "Bound", POD), None),
    ] {
        let mut vmi = serde_json::to_value(&*vmi(&[], &[entry])).unwrap();
        json_patch::merge(&mut vmi, &json!({"spec": volume}));
        let mut observed = observed(&[], &[], &[], &[]);
        observed.vmi = Arc::new(serde_json::from_value(vmi).unwrap());
        let planned = plan(&observed).map(|(work, _)| work.attach);
        assert_eq!(planned.unwrap_or_default().pop().map(|handover| handover.content), expected, "{volume}");
    }
}

#[test]
fn nothing_is_taken_back_before_the_domain_is_known_to_be_in_line() {
    let ready = [entry("data", "Ready", POD)];
    let mut waiting = observed(&[], &ready, &["data"], &[]);
    assert!(plan(&waiting).is_some());
    waiting.busy.insert(SYNC);
    assert_eq!(plan(&waiting), None);
    waiting.busy.remove(SYNC);
    if let Link::Up { synced, .. } = &mut waiting.link {
        *synced = None;
    }
    assert_eq!(plan(&waiting), None, "the spec without the volume was not synced");
    if let Link::Up { synced, results_from, .. } = &mut waiting.link {
        (*synced, *results_from) = (Some(waiting.facts.fingerprint), 2);
    }
    assert_eq!(plan(&waiting), None, "the report is older than the answer to Sync");
    (waiting.report, waiting.reported) = (None, false);
    assert_eq!(plan(&waiting), None, "the launcher has not reported");
    let mut none = LauncherState::default();
    none.set_lifecycle(Lifecycle::NoDomain);
    (waiting.report, waiting.reported) = (Some(none), true);
    assert!(plan(&waiting).is_some(), "no domain runs");
    waiting.reported = false;
    assert_eq!(plan(&waiting), None, "reported over another connection");
}

#[test]
fn a_disk_that_leaves_the_spec_while_its_domain_comes_is_handed_over_and_stays() {
    let mut ready = entry("data", "Ready", "8f6e0c52-source");
    ready["target"] = json!("sda");
    let mut moving = serde_json::to_value(&*vmi(&[], &[ready])).unwrap();
    let state = json!({"migrationUid": "m1", "sourceNode": NODE, "targetNode": "n2", "targetPod": "launcher-2",
        "targetAttachmentPodUID": POD});
    let change = json!({
        "metadata": {"labels": {"kubevirt.io/migrationTargetNodeName": "n2"}},
        "status": {"activePods": {"pod-2": "n2"}, "migrationState": state},
    });
    json_patch::merge(&mut moving, &change);
    let mut coming = Observed::new(Arc::new(serde_json::from_value(moving).unwrap()), "n2");
    for (mounted, expected) in [(&[][..], Some((vec!["data".to_owned()], vec![]))), (&["data"], None)] {
        coming.volumes = Some(LauncherVolumes::after(None, volumes_of(mounted, &[]), Duration::ZERO));
        assert_eq!(planned(&coming), expected, "{mounted:?}");
        assert_eq!(has_moved_volumes(&coming), !mounted.is_empty(), "{mounted:?}");
    }
}

#[test]
fn a_new_connection_observes_the_volumes_and_grants_them_again() {
    let mut observed = observed(&["data"], &[entry("data", "Ready", POD)], &["data"], &["data"]);
    observed.volumes = None;
    let (work, when) = plan(&observed).unwrap();
    let handover = Handover { volume: "data".into(), content: Content::Image, pod: POD.into() };
    assert_eq!((work.attach, when), (vec![handover], Duration::ZERO));
    // Without hot-plugged volumes nothing is looked at.
    observed.vmi = vmi(&[], &[]);
    assert_eq!(plan(&observed), None);
}

#[test]
fn devices_are_granted_again_at_intervals_and_with_other_work() {
    let (raw, data) = (entry("raw", "Ready", POD), entry("data", "Ready", POD));
    let idle = observed(&["data", "raw"], &[data, raw.clone()], &["data", "raw"], &["data", "raw"]);
    let (work, when) = plan(&idle).unwrap();
    let device = Handover { volume: "raw".into(), content: Content::Device, pod: POD.into() };
    assert_eq!((work.attach, work.detach), (vec![device], vec![]));
    assert_eq!(when, Duration::from_secs(30));
    let more = observed(&["data", "raw"], &[entry("data", "Bound", POD), raw], &["raw"], &["raw"]);
    assert_eq!(planned(&more), Some((vec!["data".to_owned(), "raw".to_owned()], vec![])));
    assert_eq!(plan(&more).unwrap().1, Duration::ZERO);
}

#[test]
fn a_failed_volume_is_repeated_at_growing_intervals_and_delays_no_other() {
    let entries = [entry("data", "Bound", POD), entry("raw", "Bound", POD)];
    let mut observed = observed(&["data"], &entries[..1], &[], &[]);
    let hand = |observed: &mut Observed, failures: &[(&str, bool)], now: u64| {
        let (work, _) = plan(observed).unwrap();
        observed.begin(&Effect::Call(Arc::new(HandVolumes { pod: "pod-1".into(), work })), at(now));
        observed.apply_answer(&HandVolumes::default(), 1, Ok(volumes_of(&[], failures)), at(now))
    };
    let mut now = 100;
    for (wait, events) in [(1, 1), (2, 0), (4, 0), (8, 0), (15, 0), (15, 0)] {
        assert_eq!(hand(&mut observed, &[("data", false)], now).len(), events, "{now}");
        assert_eq!(plan(&observed).unwrap().1, Duration::from_secs(now + wait));
        now += wait;
    }
    // Another volume.
    observed.vmi = vmi(&["data", "raw"], &entries);
    assert_eq!(plan(&observed).unwrap().1, Duration::ZERO);
    // An attachment pod that is not ready is no failure for users.
    assert_eq!(hand(&mut observed, &[("data", true), ("raw", true)], now), []);
    assert_eq!(plan(&observed).unwrap().1, Duration::from_secs(now + 1));
}

#[test]
fn a_pod_that_starts_is_asked_again_soon() {
    let mut observed = observed(&["data"], &[entry("data", "AttachedToNode", POD)], &[], &[]);
    for milliseconds in [100, 200, 400, 800, 1000, 1000] {
        observed.apply_answer(&HandVolumes::default(), 1, Ok(volumes_of(&[], &[("data", true)])), at(7));
        assert_eq!(plan(&observed).unwrap().1, Duration::from_millis(7000 + milliseconds));
    }
}

#[test]
fn a_removed_volume_that_is_being_handed_over_is_not_reported_as_unmounted() {
    let mut observed = observed(&["data"], &[entry("data", "AttachedToNode", POD)], &[], &[]);
    let shown = |observed: &Observed| {
        let mut next = observed.vmi.status.clone().unwrap();
        apply(&mut next, observed, &Time(jiff::Timestamp::UNIX_EPOCH));
        next.volume_status[0].phase.clone().unwrap_or_default()
    };
    let (work, _) = plan(&observed).unwrap();
    let call = HandVolumes { pod: "pod-1".into(), work };
    observed.begin(&Effect::Call(Arc::new(HandVolumes { pod: "pod-1".into(), work: call.work.clone() })), at(1));
    observed.vmi = vmi(&[], &[entry("data", "AttachedToNode", POD)]);
    assert_eq!(shown(&observed), "AttachedToNode");
    // It was mounted meanwhile: it is taken back first.
    observed.apply_answer(&call, 1, Ok(volumes_of(&["data"], &[])), at(2));
    assert_eq!(shown(&observed), "AttachedToNode");
    assert_eq!(planned(&observed), Some((vec![], vec!["data".to_owned()])));
    observed.apply_answer(&call, 1, Ok(volumes_of(&[], &[])), at(3));
    assert_eq!(shown(&observed), "UnMountedFromPod");
}

#[test]
fn phases_follow_the_table_of_the_reference() {
    let mounted = Some(("MountedToPod", "VolumeMountedToPod", "Volume d has been mounted in virt-launcher pod"));
    let ready = Some(("Ready", "VolumeReady", "Successfully attach hotplugged volume d to VM"));
    let gone =
        Some(("UnMountedFromPod", "VolumeUnMountedFromPod", "Volume d has been unmounted from virt-launcher pod"));
    for (phase, target, is_mounted, in_spec, expected) in [
        ("AttachedToNode", false, Some(true), true, mounted),
        ("Bound", false, Some(true), true, mounted),
        ("Pending", false, Some(true), true, mounted),
        ("Bound", false, Some(false), true, None),
        ("Bound", false, None, true, None),
        ("MountedToPod", false, Some(true), true, None),
        ("MountedToPod", true, Some(true), true, ready),
        ("Bound", true, None, true, ready),
        ("Ready", true, Some(true), true, None),
        ("Ready", true, Some(true), false, None),
        ("Ready", false, Some(true), false, None),
        ("Ready", false, Some(false), false, gone),
        ("MountedToPod", false, Some(false), false, gone),
        ("AttachedToNode", false, Some(false), false, gone),
        ("Detaching", false, Some(false), false, None),
        ("Ready", false, None, false, None),
    ] {
        let next = next_phase("d", phase, target, is_mounted, in_spec);
        let next = next.as_ref().map(|(phase, reason, message)| (*phase, *reason, message.as_str()));
        assert_eq!(next, expected, "{phase} {target} {is_mounted:?} {in_spec}");
    }
}

#[test]
fn the_status_shows_device_names_and_phases_with_an_event_each() {
    let entries = [entry("data", "MountedToPod", POD), entry("raw", "Bound", POD), entry("gone", "Ready", POD)];
    let observed = observed(&["data", "raw"], &entries, &["data", "raw"], &["data"]);
    let current = observed.vmi.status.clone().unwrap();
    let mut next = current.clone();
    apply(&mut next, &observed, &Time(jiff::Timestamp::UNIX_EPOCH));
    let shown: Vec<(&str, &str, &str)> = next
        .volume_status
        .iter()
        .map(|entry| (entry.name.as_str(), entry.target.as_str(), entry.phase.as_deref().unwrap()))
        .collect();
    assert_eq!(shown, [("data", "sda", "Ready"), ("raw", "", "MountedToPod"), ("gone", "", "UnMountedFromPod")]);
    let reasons: Vec<&str> = events(&current, &next).iter().map(|event| event.reason).collect();
    assert_eq!(reasons, ["VolumeReady", "VolumeMountedToPod", "VolumeUnMountedFromPod"]);
    assert_eq!(events(&next, &next), []);
}

#[test]
fn events_of_memory_dumps_have_the_reasons_of_the_status() {
    let status = |phase: &str| vmi(&["dump"], &[entry("dump", phase, POD)]).status.clone().unwrap();
    for (former, phase, expected) in [
        ("MountedToPod", "MemoryDumpInProgress", "MemoryDumpInProgress"),
        ("MemoryDumpInProgress", "MemoryDumpCompleted", "VolumeReady"),
        ("MemoryDumpInProgress", "MemoryDumpFailed", "MemoryDumpFailed"),
    ] {
        let reasons: Vec<&str> = events(&status(former), &status(phase)).iter().map(|event| event.reason).collect();
        assert_eq!(reasons, [expected], "{phase}");
    }
}

#[test]
fn a_start_waits_for_volumes_for_a_limited_time() {
    for (entries, limit) in [
        (vec![entry("data", "Ready", POD)], None),
        (vec![entry("data", "MountedToPod", POD)], None),
        (vec![entry("data", "AttachedToNode", POD)], Some(60)),
        (vec![entry("data", "Pending", "")], Some(10)),
        (vec![], Some(10)),
    ] {
        let observed = observed(&["data"], &entries, &[], &[]);
        assert_eq!(start_waits_until(&observed), limit.map(Duration::from_secs), "{entries:?}");
    }
    assert_eq!(start_waits_until(&observed(&[], &[], &[], &[])), None);
    // Its pod is known and does not run yet, or refuses.
    for (waiting, limit) in [(true, 10), (false, 60)] {
        let mut observed = observed(&["data"], &[entry("data", "AttachedToNode", POD)], &[], &[]);
        let failed = volumes_of(&[], &[("data", waiting)]);
        observed.volumes = Some(LauncherVolumes::after(None, failed, Duration::ZERO));
        assert_eq!(start_waits_until(&observed), Some(Duration::from_secs(limit)), "{waiting}");
    }
}
