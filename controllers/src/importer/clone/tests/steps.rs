//! The decisions about clones.

use k8s_openapi::{api::core::v1::PersistentVolumeClaim, apimachinery::pkg::apis::meta::v1::Time};
use serde_json::{Value, json};

use super::super::*;
use crate::{resources::snapshots::CachedSnapshot, runtime::ClaimUser};

const NOW: &str = "2030-01-01T00:01:00Z";
const UID: &str = "u";

/// Everything that an observation borrows.
struct World {
    data_volume: ObjectMeta,
    source_key: Key,
    source: Option<CachedClaim>,
    snapshot: Option<Option<CachedSnapshot>>,
    is_filled: bool,
    is_begun: bool,
    is_permitted: bool,
    spec: PersistentVolumeClaimSpec,
    class: Class,
    source_provisioner: &'static str,
    is_immediate: bool,
    target: Option<CachedClaim>,
    temporary: Option<CachedClaim>,
    users: Option<ClaimUsers>,
    warning: Option<ClaimWarning>,
    is_copying: bool,
}

fn time(text: &str) -> Timestamp {
    text.parse().unwrap()
}

/// Returns a claim after this merge patch.
fn claim(namespace: &str, name: &str, change: &Value) -> CachedClaim {
    let mut object = json!({
        "metadata": {"namespace": namespace, "name": name, "uid": name, "creationTimestamp": "2030-01-01T00:00:55Z"},
        "spec": {"storageClassName": "fast", "volumeMode": "Block", "resources": {"requests": {"storage": "1Gi"}}},
        "status": {"phase": "Bound", "capacity": {"storage": "1Gi"}},
    });
    json_patch::merge(&mut object, change);
    serde_json::from_value::<PersistentVolumeClaim>(object).unwrap().into()
}

fn used_by(users: &[(&str, Option<&str>)], read_at: &str) -> ClaimUsers {
    let user = |(pod, vmi): &(&str, Option<&str>)| ClaimUser { pod: (*pod).to_owned(), vmi: vmi.map(str::to_owned) };
    let metadata = ObjectMeta { uid: Some("disk".to_owned()), ..ObjectMeta::default() };
    ClaimUsers { metadata, read_at: time(read_at), users: users.iter().map(user).collect() }
}

fn warned(uid: &str, message: &str) -> ClaimWarning {
    let metadata = ObjectMeta { uid: Some(uid.to_owned()), ..ObjectMeta::default() };
    let warning = Some(("ProvisioningFailed".to_owned(), message.to_owned()));
    ClaimWarning { metadata, read_at: time(NOW), warning }
}

/// A clone of a claim in this namespace whose source was found to be free.
fn world(namespace: &str) -> World {
    World {
        data_volume: serde_json::from_value(
            json!({"namespace": "user", "name": "root", "uid": UID, "resourceVersion": "1"}),
        )
        .unwrap(),
        source_key: Key::new(namespace, "disk"),
        source: Some(claim(namespace, "disk", &json!({}))),
        snapshot: None,
        is_filled: true,
        is_begun: true,
        is_permitted: true,
        spec: serde_json::from_value(json!({
            "storageClassName": "fast", "volumeMode": "Block", "resources": {"requests": {"storage": "1Gi"}}}))
        .unwrap(),
        class: Class { provisioner: "csi".to_owned(), is_csi: true, ..Class::default() },
        source_provisioner: "csi",
        is_immediate: false,
        target: None,
        temporary: None,
        users: Some(used_by(&[], NOW)),
        warning: None,
        is_copying: false,
    }
}

impl World {
    fn recorded(mut self, strategy: &str) -> Self {
        self.data_volume.annotations.get_or_insert_default().insert(STRATEGY.to_owned(), strategy.to_owned());
        self
    }

    fn with(mut self, change: impl FnOnce(&mut Self)) -> Self {
        change(&mut self);
        self
    }

    fn observed(&self) -> Observed<'_> {
        Observed {
            data_volume: &self.data_volume,
            source_key: &self.source_key,
            source: match &self.snapshot {
                Some(snapshot) => Source::Snapshot(snapshot.as_ref()),
                None => Source::Claim(self.source.as_ref()),
            },
            source_is_filled: self.is_filled,
            source_provisioner: Some(self.source_provisioner),
            is_begun: self.is_begun,
            is_permitted: self.is_permitted,
            spec: &self.spec,
            class: Some(&self.class),
            is_immediate: self.is_immediate,
            target: self.target.as_ref(),
            temporary: self.temporary.as_ref(),
            volume: None,
            users: self.users.as_ref(),
            warning: self.warning.as_ref(),
            is_copying: self.is_copying,
            now: time(NOW),
        }
    }

    fn decide(&self) -> Next {
        decide(&self.observed()).unwrap()
    }
}

fn reason(next: &Next) -> Option<&'static str> {
    next.hold.as_ref().map(|hold| hold.reason)
}

/// Returns the annotations that the only effect writes.
fn annotations(next: &Next) -> Value {
    match next.effects.as_slice() {
        [Effect::Patch { kind: Kind::DataVolume, patch, resource_version: Some(_), .. }] => {
            patch["metadata"]["annotations"].clone()
        }
        other => panic!("{other:?}"),
    }
}

#[test]
fn source_that_cannot_be_cloned_yet_is_reported() {
    type Change = fn(&mut World);
    let cases: [(Change, &str, &str); 8] = [
        (|w| w.source = None, "CloneWithoutSource", "The source pvc disk doesn't exist"),
        (|w| w.snapshot = Some(None), "CloneWithoutSource", "The source snapshot disk doesn't exist"),
        (
            |w| w.snapshot = Some(Some(CachedSnapshot::default())),
            "Pending",
            "VolumeSnapshot user/disk is not ready to use",
        ),
        (|w| w.is_filled = false, "Pending", "PersistentVolumeClaim user/disk is not filled yet"),
        (
            |w| w.source = Some(claim("user", "disk", &json!({"status": {"phase": "Pending"}}))),
            "Pending",
            "PersistentVolumeClaim user/disk is not bound",
        ),
        (
            |w| {
                let importing = json!({"metadata": {"annotations": {"cdi.kubevirt.io/storage.pod.phase": "Running"}}});
                w.source = Some(claim("user", "disk", &importing));
            },
            "Pending",
            "PersistentVolumeClaim user/disk is not filled yet",
        ),
        (
            |w| {
                w.source =
                    Some(claim("user", "disk", &json!({"spec": {"resources": {"requests": {"storage": "2Gi"}}}})))
            },
            "CloneValidationFailed",
            "The clone doesn't meet the validation requirements: target resources requests storage size is smaller than the source \
             1073741824 < 2147483648",
        ),
        (
            |w| w.users = Some(used_by(&[("p", None)], NOW)),
            "CloneSourceInUse",
            "pod user/p using PersistentVolumeClaim disk",
        ),
    ];
    for (change, reason, message) in cases {
        let next = world("user").with(change).decide();
        let hold = next.hold.clone().unwrap();
        assert_eq!((hold.reason, hold.message.as_str()), (reason, message));
        assert_eq!((next.phase, &next.work, next.effects.len()), (phase::SCHEDULED, &Work::None, 0));
    }
}

#[test]
fn vm_that_uses_the_source_is_named() {
    let next = world("golden").with(|w| w.users = Some(used_by(&[("virt-launcher-m-x", Some("m"))], NOW))).decide();
    let hold = next.hold.unwrap();
    let text = "pod golden/virt-launcher-m-x using PersistentVolumeClaim disk; it belongs to VM m";
    assert!(hold.message.starts_with(text), "{}", hold.message);
    assert_eq!(next.wake, Some(RETRY));
}

#[test]
fn pods_are_listed_right_before_the_clone_begins() {
    for (users, reads) in [
        (None, true),
        (Some(used_by(&[], "2030-01-01T00:00:58Z")), false),
        (Some(used_by(&[], "2030-01-01T00:00:50Z")), true),
        (Some(used_by(&[("p", None)], "2030-01-01T00:00:55Z")), false),
        (Some(used_by(&[("p", None)], "2030-01-01T00:00:50Z")), true),
    ] {
        let next = world("user").with(|w| w.users.clone_from(&users)).decide();
        assert_eq!(matches!(next.effects.as_slice(), [Effect::ReadUsers { .. }]), reads, "{users:?}");
    }
    // One that has found no pod since the clone was requested.
    let requested = |at: &str| {
        let users = Some(used_by(&[], "2030-01-01T00:00:50Z"));
        let created = Some(Time(time(at)));
        world("user").with(|w| (w.users, w.data_volume.creation_timestamp) = (users, created)).decide()
    };
    assert!(requested("2030-01-01T00:00:49Z").effects.iter().all(|effect| !matches!(effect, Effect::ReadUsers { .. })));
    assert!(matches!(requested("2030-01-01T00:00:51Z").effects.as_slice(), [Effect::ReadUsers { .. }]));
    // Of a former claim with this name.
    let other = world("user").with(|w| w.users.as_mut().unwrap().metadata.uid = Some("former".to_owned()));
    assert!(matches!(other.decide().effects.as_slice(), [Effect::ReadUsers { .. }]));
}

#[test]
fn claim_of_a_late_class_gets_a_consumer_where_no_vm_is() {
    let source = json!({"apiGroup": "snapshot.storage.k8s.io", "kind": "VolumeSnapshot", "name": "disk"});
    let label = json!({"cdi.kubevirt.io/OwnedByUID": UID});
    let made = |namespace: &str, name: &str, phase: &str| {
        let change = json!({"metadata": {"labels": label}, "spec": {"dataSource": source}, "status": {"phase": phase}});
        claim(namespace, name, &change)
    };
    let consumed = |namespace: &str, name: &str| Work::Consume(Key::new(namespace, name));
    for (namespace, late, immediate, phase, work, shown) in [
        ("golden", true, false, "Pending", consumed("golden", "tmp-pvc-u"), phase::SNAPSHOT),
        ("user", true, true, "Pending", consumed("user", "root"), phase::SNAPSHOT),
        ("user", true, false, "Pending", Work::None, phase::FIRST_CONSUMER),
        ("golden", false, false, "Pending", Work::None, phase::SNAPSHOT),
        ("user", true, true, "Bound", Work::Complete, phase::SNAPSHOT),
    ] {
        let snapshot = CachedSnapshot { ready: true, restore_size: Some(1), ..CachedSnapshot::default() };
        let with = world(namespace).recorded("csi-clone").with(|w| {
            (w.snapshot, w.class.is_late, w.is_immediate) = (Some(Some(snapshot)), late, immediate);
            match namespace {
                "user" => w.target = Some(made("user", "root", phase)),
                _ => w.temporary = Some(made("golden", "tmp-pvc-u", phase)),
            }
        });
        let next = with.decide();
        assert_eq!((next.work, next.phase), (work, shown), "{namespace} {late} {immediate} {phase}");
    }
}

#[test]
fn pod_leaves_a_claim_that_needs_it_no_more() {
    let source = json!({"kind": "VolumeSnapshot", "name": "disk"});
    let filled = json!({"cdi.kubevirt.io/storage.pod.phase": "Succeeded"});
    for (change, done) in [
        (json!({"spec": {"dataSource": source}, "status": {"phase": "Pending"}}), false),
        (json!({"spec": {"dataSource": source}}), true),
        // It copies.
        (json!({}), false),
        (json!({"metadata": {"annotations": filled}}), true),
        (json!({"metadata": {"deletionTimestamp": NOW}}), true),
    ] {
        assert_eq!(consumer::is_done(&claim("golden", "tmp-pvc-u", &change)), done, "{change}");
    }
}

#[test]
fn clone_from_another_namespace_needs_the_mark() {
    let next = world("golden").with(|w| (w.is_permitted, w.source) = (false, None)).decide();
    // The state of the source is not revealed.
    assert_eq!(reason(&next), Some("CloneNotPermitted"));
    assert!(next.effects.is_empty());
    assert!(reason(&world("user").with(|w| w.is_permitted = false).decide()).is_none());
}

#[test]
fn strategy_is_recorded_before_anything_is_made() {
    type Change = fn(&mut World);
    let cases: [(&str, Change, bool); 10] = [
        ("user", |_| {}, true),
        ("golden", |_| {}, true),
        ("user", |w| w.class.copies = true, false),
        ("user", |w| w.class.is_csi = false, false),
        ("user", |w| w.source_provisioner = "other", false),
        ("user", |w| w.spec.volume_mode = None, false),
        ("user", |w| w.class.is_late = true, true),
        ("user", |w| (w.class.is_late, w.is_immediate) = (true, true), false),
        ("golden", |w| w.class.is_late = true, false),
        (
            "user",
            |w| {
                w.spec = serde_json::from_value(
                    json!({"storageClassName": "fast", "resources": {"requests": {"storage": "2Gi"}}}),
                )
                .unwrap();
                w.source = Some(claim("user", "disk", &json!({"spec": {"volumeMode": "Filesystem"}})));
            },
            false,
        ),
    ];
    for (index, (namespace, change, by_driver)) in cases.into_iter().enumerate() {
        let next = world(namespace).with(change).decide();
        let written = annotations(&next);
        assert_eq!(written[STRATEGY], if by_driver { "csi-clone" } else { "copy" }, "{index}");
        assert_eq!(written[FALLBACK].is_string(), !by_driver, "{index}");
        assert_eq!(next.work, Work::None);
    }
}

#[test]
fn strategy_of_another_clone_is_none() {
    // The DataVolume was copied, with another class.
    for namespace in ["user", "golden"] {
        let copied = |is_begun: bool| {
            let change = |w: &mut World| (w.is_begun, w.class.is_csi) = (is_begun, false);
            world(namespace).recorded("csi-clone").with(change).decide()
        };
        assert_eq!(annotations(&copied(false))[STRATEGY], "copy", "{namespace}");
        assert!(copied(true).effects.iter().all(|effect| !matches!(effect, Effect::Patch { .. })), "{namespace}");
    }
}

#[test]
fn snapshot_is_not_cloned_to_a_class_without_a_driver() {
    let snapshot = || Some(Some(CachedSnapshot { ready: true, ..CachedSnapshot::default() }));
    for namespace in ["user", "golden"] {
        // Also after the strategy is recorded.
        for recorded in ["", "csi-clone"] {
            let clone = world(namespace).recorded(recorded).with(|w| {
                (w.snapshot, w.is_begun) = (snapshot(), !recorded.is_empty());
            });
            assert_eq!(reason(&clone.decide()), None, "{namespace} {recorded}");
            let next = clone.with(|w| w.class.is_csi = false).decide();
            assert_eq!((reason(&next), next.wake), (Some("CloneValidationFailed"), Some(RETRY)));
            assert_eq!((&next.work, next.effects.len()), (&Work::None, 0), "{namespace} {recorded}");
            let message = next.hold.unwrap().message;
            assert!(message.contains("storage class fast has no CSI driver"), "{message}");
            assert!(message.contains(&format!("VolumeSnapshot {namespace}/disk")), "{message}");
        }
    }
}

#[test]
fn driver_clones_in_the_same_namespace() {
    let next = world("user").recorded("csi-clone").decide();
    let Work::Provision(source) = next.work else { panic!("{next:?}") };
    assert_eq!(
        (source.kind.as_str(), source.name.as_str(), next.phase),
        ("PersistentVolumeClaim", "disk", phase::DRIVER)
    );
    let snapshot = CachedSnapshot { ready: true, restore_size: Some(1), ..CachedSnapshot::default() };
    let next = world("user").recorded("csi-clone").with(|w| w.snapshot = Some(Some(snapshot))).decide();
    let Work::Provision(source) = next.work else { panic!("{next:?}") };
    assert_eq!(
        (source.kind.as_str(), source.api_group.as_deref()),
        ("VolumeSnapshot", Some("snapshot.storage.k8s.io"))
    );
    assert_eq!(next.phase, phase::SNAPSHOT);
    let bound =
        claim("user", "root", &json!({"spec": {"dataSource": {"kind": "PersistentVolumeClaim", "name": "disk"}}}));
    // The source may be used, or gone, once the driver has cloned it.
    let done = world("user").recorded("csi-clone").with(|w| (w.target, w.source, w.users) = (Some(bound), None, None));
    assert_eq!(done.decide().work, Work::Complete);
}

#[test]
fn claim_that_no_driver_has_filled_is_copied_whatever_is_recorded() {
    let empty = claim("user", "root", &json!({}));
    for strategy in ["copy", "csi-clone", "invented"] {
        let next = world("user").recorded(strategy).with(|w| w.target = Some(empty.clone())).decide();
        assert_eq!(next.work, Work::Copy, "{strategy}");
    }
}

#[test]
fn refusal_of_the_driver_leads_to_a_copy() {
    let source = json!({"spec": {"dataSource": {"kind": "PersistentVolumeClaim", "name": "disk"}}, "status": {"phase": "Pending"}});
    for (namespace, made) in
        [("user", claim("user", "root", &source)), ("golden", claim("golden", "tmp-pvc-u", &source))]
    {
        let set = |w: &mut World, mut made: CachedClaim| {
            made.metadata.labels = Some([("cdi.kubevirt.io/OwnedByUID".to_owned(), UID.to_owned())].into());
            if namespace == "user" { w.target = Some(made) } else { w.temporary = Some(made) }
        };
        let uid = made.metadata.uid.clone().unwrap();
        // Nothing is known; another failure; a refusal.
        let waits = world(namespace).recorded("csi-clone").with(|w| set(w, made.clone()));
        assert_eq!((waits.decide().effects.len(), waits.decide().wake), (0, Some(RETRY)));
        let failed = waits.with(|w| w.warning = Some(warned(&uid, "rpc error: code = ResourceExhausted desc = full")));
        let next = failed.decide();
        assert_eq!((next.effects.len(), reason(&next)), (0, Some("Pending")));
        let refused = failed.with(|w| w.warning = Some(warned(&uid, "rpc error: code = FailedPrecondition desc = no")));
        let next = refused.decide();
        assert_eq!(annotations(&next)[STRATEGY], "copy");
        assert!(annotations(&next)[FALLBACK].as_str().unwrap().contains("FailedPrecondition"));
        // The claim is deleted by its UID, then the copy begins.
        let deleted = refused.recorded("copy");
        assert!(
            matches!(deleted.decide().effects.as_slice(), [Effect::Delete { uid: Some(found), .. }] if *found == uid)
        );
        let again = deleted.with(|w| (w.target, w.temporary) = (None, None)).decide();
        if namespace == "user" {
            assert_eq!(again.work, Work::Copy);
        } else {
            assert!(matches!(again.effects.as_slice(), [Effect::Create { kind: Kind::Claim, object, .. }]
                if object["spec"]["dataSource"].is_null()));
        }
    }
}

#[test]
fn events_of_a_claim_are_read_once_it_should_be_bound() {
    let pending = json!({"metadata": {"creationTimestamp": "2030-01-01T00:00:30Z"}, "status": {"phase": "Pending"},
        "spec": {"dataSource": {"kind": "PersistentVolumeClaim", "name": "disk"}}});
    let next = world("user").recorded("csi-clone").with(|w| w.target = Some(claim("user", "root", &pending))).decide();
    assert!(matches!(next.effects.as_slice(), [Effect::ReadClaimWarning { claim, .. }] if claim == "root"));
}

#[test]
fn temporary_claim_is_made_filled_and_handed_over() {
    let made = |strategy: &str| world("golden").recorded(strategy).decide();
    for (strategy, source) in
        [("copy", Value::Null), ("csi-clone", json!({"kind": "PersistentVolumeClaim", "name": "disk"}))]
    {
        let next = made(strategy);
        let [Effect::Create { kind: Kind::Claim, namespace, object, .. }] = next.effects.as_slice() else {
            panic!("{next:?}")
        };
        assert_eq!((namespace.as_deref(), &object["metadata"]["name"]), (Some("golden"), &json!("tmp-pvc-u")));
        assert_eq!(object["metadata"]["labels"], json!({"cdi.kubevirt.io/OwnedByUID": "u"}));
        assert_eq!(object["metadata"]["annotations"], json!({"ferrovirt.io/hand-over-to": "user/root"}));
        assert_eq!(object["spec"]["dataSource"], source);
    }
    // Fields that name another source or a volume.
    let named = json!({"dataSourceRef": {"kind": "PersistentVolumeClaim", "name": "other"}, "volumeName": "pv", "selector": {}});
    let named: PersistentVolumeClaimSpec = serde_json::from_value(named).unwrap();
    let next = world("golden").recorded("copy").with(|w| w.spec = named).decide();
    let [Effect::Create { object, .. }] = next.effects.as_slice() else { panic!("{next:?}") };
    assert_eq!(object["spec"], json!({}));
    let label = json!({"metadata": {"labels": {"cdi.kubevirt.io/OwnedByUID": "u"}}, "spec": {"volumeName": "pv"}});
    let empty = claim("golden", "tmp-pvc-u", &label);
    let copied = world("golden").recorded("copy").with(|w| w.temporary = Some(empty.clone()));
    assert_eq!(copied.decide().work, Work::CopyInto(Key::new("golden", "tmp-pvc-u")));
    // While the pod copies, its source is not checked: the pod itself uses the temporary claim.
    let copying = copied.with(|w| (w.is_copying, w.users) = (true, None));
    assert_eq!(copying.decide().work, Work::CopyInto(Key::new("golden", "tmp-pvc-u")));
    let filled = copying.with(|w| {
        let done = [("cdi.kubevirt.io/storage.pod.phase".to_owned(), "Succeeded".to_owned())].into();
        w.temporary.as_mut().unwrap().metadata.annotations = Some(done);
    });
    assert!(
        matches!(filled.decide().effects.as_slice(), [Effect::Patch { kind: Kind::Volume, name, .. }] if name == "pv")
    );
    let foreign = copied_by_others(&empty);
    assert_eq!(reason(&foreign.decide()), Some("ErrResourceExists"));
    assert!(foreign.decide().effects.is_empty() && end(&foreign.observed()).effects.is_empty());
}

fn copied_by_others(claim: &CachedClaim) -> World {
    let mut other = claim.clone();
    other.metadata.labels = None;
    world("golden").recorded("copy").with(|w| w.temporary = Some(other))
}

#[test]
fn size_of_a_clone_is_that_of_its_source() {
    let source = |change: Value| claim("n", "disk", &change);
    let capacity = json!({"status": {"capacity": {"storage": "1500Mi"}}});
    let spec = |class: &str, mode: &str| -> PersistentVolumeClaimSpec {
        serde_json::from_value(json!({"storageClassName": class, "volumeMode": mode})).unwrap()
    };
    let (gib, mib) = (1 << 30, 1 << 20);
    for (spec, overhead, expected) in [
        (spec("fast", "Block"), 0.06, gib),
        (spec("slow", "Block"), 0.06, 1500 * mib),
        (spec("fast", "Filesystem"), 0.0, 1500 * mib),
        (spec("fast", "Filesystem"), 0.5, 2250 * mib),
    ] {
        let claim = source(capacity.clone());
        assert_eq!(source::size(&Source::Claim(Some(&claim)), &spec, overhead), Some(expected), "{spec:?}");
    }
    let snapshot = CachedSnapshot { restore_size: Some(7), ..CachedSnapshot::default() };
    assert_eq!(source::size(&Source::Snapshot(Some(&snapshot)), &spec("fast", "Block"), 0.0), Some(7));
    assert_eq!(source::size(&Source::Claim(None), &spec("fast", "Block"), 0.0), None);
}
