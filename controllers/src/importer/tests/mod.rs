//! Decisions about DataVolumes, as tables.

mod ends;
mod pulls;

use importer::task::{Outcome, Reason, Report};
use k8s_openapi::{
    api::core::v1::{PersistentVolumeClaim, Pod},
    apimachinery::pkg::apis::meta::v1::ObjectMeta,
};
use serde_json::Value;

use super::*;
use crate::runtime::WriteOptions;

const UID: &str = "u";

fn at(seconds: i64) -> Timestamp {
    Timestamp::from_second(1_800_000_000 + seconds).unwrap()
}

/// A DataVolume with this change, which the importer may begin.
fn observed(change: &Value) -> Observed {
    let mut object = json!({
        "apiVersion": "cdi.kubevirt.io/v1beta1", "kind": "DataVolume",
        "metadata": {"name": "d", "namespace": "n", "uid": UID, "resourceVersion": "1"},
        "spec": {"source": {"registry": {"url": "docker://r/i"}}, "storage": {"resources": {"requests": {"storage": "100Mi"}}}},
    });
    json_patch::merge(&mut object, change);
    let metadata = serde_json::from_value(json!({"name": "fast"})).unwrap();
    Observed {
        volume: Arc::new(serde_json::from_value(object).unwrap()),
        claim: None,
        pod: None,
        class: Some(Arc::new(CachedStorageClass { metadata, ..CachedStorageClass::default() })),
        is_csi: false,
        profile: None,
        begins: true,
        beside_cdi: false,
        warning: None,
        clone: None,
        tolerations: Vec::new(),
        percent: None,
        image: "importer:1".to_owned(),
        pull_policy: "IfNotPresent".to_owned(),
        failures: Failures::default(),
        now: at(100),
    }
}

fn begun() -> Value {
    json!({"metadata": {"annotations": {"ferrovirt.io/import": UID, "cdi.kubevirt.io/storage.prePopulated": "d"}}})
}

fn claim(phase: &str, change: &Value) -> Option<Arc<CachedClaim>> {
    let owner = json!({"apiVersion": "cdi.kubevirt.io/v1beta1", "kind": "DataVolume", "name": "d", "uid": UID, "controller": true});
    let mut claim = json!({
        "metadata": {"name": "d", "namespace": "n", "uid": "c", "ownerReferences": [owner], "creationTimestamp": at(0).to_string(),
            "annotations": {"cdi.kubevirt.io/createdForDataVolume": UID}},
        "spec": {"storageClassName": "fast", "resources": {"requests": {"storage": "106Mi"}}}, "status": {"phase": phase},
    });
    json_patch::merge(&mut claim, change);
    Some(Arc::new(serde_json::from_value::<PersistentVolumeClaim>(claim).unwrap().into()))
}

fn pod(phase: &str, container: &Value, created: i64) -> Option<Arc<CachedImportPod>> {
    let mut status = json!({"name": "importer", "ready": false, "image": "", "imageID": "", "restartCount": 0});
    json_patch::merge(&mut status, container);
    let pod = json!({
        "metadata": {"name": "importer-d", "namespace": "n", "uid": "p", "creationTimestamp": at(created).to_string()},
        "status": {"phase": phase, "reason": if phase == "Failed" { json!("Evicted") } else { json!(null) },
            "containerStatuses": [status]},
    });
    Some(Arc::new(serde_json::from_value::<Pod>(pod).unwrap().into()))
}

fn ended(report: &Report) -> Value {
    let code = i32::from(report.result == Outcome::Failed);
    let message = report.to_termination_message();
    json!({"restartCount": 2, "lastState": {"terminated": {"exitCode": code, "reason": "Error", "message": message}},
        "state": {"waiting": {"reason": "CrashLoopBackOff"}}})
}

fn report(result: Outcome, reason: Reason, fatal: bool) -> Report {
    let labels = [
        ("instancetype.kubevirt.io/default-preference", "linux"),
        ("instancetype.kubevirt.io/default-instancetype", "not a value"),
        ("app", "x"),
    ];
    Report {
        result,
        reason,
        message: "text".to_owned(),
        fatal,
        virtual_size: None,
        labels: labels.map(|(key, value)| (key.to_owned(), value.to_owned())).into(),
    }
}

/// Returns the writes in words.
fn writes(decision: &Decision) -> Vec<String> {
    let write = |effect: &Effect| match effect {
        Effect::Create { kind, .. } => Some(format!("create {}", kind.plural())),
        Effect::Patch { kind, subresource: Some(part), .. } => Some(format!("patch {}/{part}", kind.plural())),
        Effect::Patch { kind, .. } => Some(format!("patch {}", kind.plural())),
        Effect::Delete { kind, .. } => Some(format!("delete {}", kind.plural())),
        Effect::ReadClaimWarning { .. } => Some("read the warnings".to_owned()),
        Effect::Event(_) => None,
        other => Some(format!("{other:?}")),
    };
    decision.effects.iter().filter_map(write).collect()
}

/// Returns phase and condition Running in the status that is written.
fn shown(observed: &Observed) -> (String, String) {
    let step = next(observed).unwrap().unwrap().shown.unwrap();
    (step.phase.to_owned(), step.running.map(|fact| fact.reason).unwrap_or_default())
}

fn patch_of(decision: &Decision, kind: Kind) -> Value {
    let patch = decision.effects.iter().find_map(|effect| match effect {
        Effect::Patch { kind: of, subresource: None, patch, .. } if *of == kind => Some(patch.clone()),
        _ => None,
    });
    patch.unwrap_or_default()
}

#[test]
fn claim_is_marked_before_it_is_created() {
    let decision = decide(&observed(&json!({}))).unwrap();
    assert_eq!(writes(&decision), ["patch datavolumes", "create persistentvolumeclaims", "patch datavolumes/status"]);
    assert_eq!(
        patch_of(&decision, Kind::DataVolume)["metadata"]["annotations"],
        json!({"ferrovirt.io/import": UID, "cdi.kubevirt.io/storage.prePopulated": "d",
            "cdi.kubevirt.io/storage.usePopulator": "false", "cdi.kubevirt.io/cloneType": null,
            "cdi.kubevirt.io/cloneFallbackReason": null})
    );
    let Effect::Create { options: WriteOptions { failure_reason, .. }, .. } = &decision.effects[1] else { panic!() };
    assert_eq!(*failure_reason, Some(CLAIM));
}

#[test]
fn importer_steps_back_beside_cdi() {
    let beside = |change: &Value| Observed { begins: false, ..observed(change) };
    assert!(decide(&beside(&json!({}))).unwrap().is_settled());
    // Nothing was made yet: CDI may have it.
    let decision = decide(&beside(&begun())).unwrap();
    assert_eq!(writes(&decision), ["patch datavolumes"]);
    assert_eq!(
        patch_of(&decision, Kind::DataVolume)["metadata"]["annotations"],
        json!({"ferrovirt.io/import": null, "cdi.kubevirt.io/storage.prePopulated": null})
    );
    // Imports that run are finished.
    let runs = Observed { claim: claim("Bound", &json!({})), ..beside(&begun()) };
    // CDI shows their state until they end.
    assert_eq!(writes(&decide(&runs).unwrap()), ["create pods"]);
    for (outcome, reason, phase, expected) in [
        (
            Outcome::Complete,
            Reason::Completed,
            "Succeeded",
            &["patch persistentvolumeclaims", "patch datavolumes/status", "patch datavolumes", "delete pods"][..],
        ),
        (Outcome::Failed, Reason::RefusedImage, "Running", &["patch datavolumes/status", "delete pods"]),
        (Outcome::Failed, Reason::SourceError, "Running", &[]),
    ] {
        let report = report(outcome, reason, reason == Reason::RefusedImage);
        let ends = Observed { pod: pod(phase, &ended(&report), 50), ..runs.clone() };
        assert_eq!(writes(&decide(&ends).unwrap()), expected, "{reason:?}");
    }
    let foreign = Observed { claim: claim("Bound", &json!({})), ..beside(&json!({})) };
    assert!(decide(&foreign).unwrap().is_settled());
    // An annotation that was copied with its DataVolume means nothing.
    let copied = beside(&json!({"metadata": {"annotations": {"ferrovirt.io/import": "other"}}}));
    assert!(decide(&copied).unwrap().is_settled());
    let told = decide(&Observed { beside_cdi: true, ..beside(&json!({})) }).unwrap();
    assert!(matches!(&told.effects[..], [Effect::Event(event)] if event.reason == BESIDE_CDI));
}

#[test]
fn claim_that_a_restore_replaces_is_not_filled() {
    // The restore came before the marks of the import were removed.
    let mut change = begun();
    change["metadata"]["annotations"]["restore.kubevirt.io/name"] = json!("r");
    change["status"] = json!({"phase": "Succeeded"});
    let filled = json!({"metadata": {"annotations": {"cdi.kubevirt.io/storage.populatedFor": "d",
        "cdi.kubevirt.io/storage.pod.phase": "Succeeded"}}});
    let decision = decide(&Observed { claim: claim("Bound", &filled), ..observed(&change) }).unwrap();
    assert_eq!(writes(&decision), ["patch datavolumes/status", "patch datavolumes"]);
    let annotations = patch_of(&decision, Kind::DataVolume)["metadata"]["annotations"].clone();
    assert_eq!(annotations, json!({"ferrovirt.io/import": null}));
    let decision = decide(&observed(&change)).unwrap();
    assert!(!writes(&decision).iter().any(|write| write.starts_with("create")), "{:?}", writes(&decision));
}

#[test]
fn claim_is_followed_to_its_pod() {
    let late = || {
        let class = CachedStorageClass { is_late: true, ..CachedStorageClass::default() };
        Some(Arc::new(class))
    };
    let immediate = {
        let mut change = begun();
        change["metadata"]["annotations"]["cdi.kubevirt.io/storage.bind.immediate.requested"] = json!("");
        change
    };
    let none: [&str; 0] = [];
    for (phase, class, change, shows, creates) in [
        ("Pending", None, begun(), "Pending", &["read the warnings"][..]),
        ("Pending", late(), begun(), "WaitForFirstConsumer", &none),
        ("Pending", late(), immediate, "ImportScheduled", &["create pods"]),
        ("Bound", late(), begun(), "ImportScheduled", &["create pods"]),
        ("Lost", None, begun(), "Failed", &none),
    ] {
        let observed = Observed { claim: claim(phase, &json!({})), class, ..observed(&change) };
        assert_eq!(shown(&observed).0, shows, "{phase}");
        let writes = writes(&decide(&observed).unwrap());
        assert_eq!(writes[..writes.len() - 1], *creates, "{phase}");
    }
}

#[test]
fn claim_that_is_not_bound_shows_the_warning_of_its_storage() {
    let warned = |uid: &str, read_at: i64| {
        let metadata = ObjectMeta { uid: Some(uid.to_owned()), ..ObjectMeta::default() };
        let warning = Some(("ProvisioningFailed".to_owned(), "no class".to_owned()));
        Some(Arc::new(ClaimWarning { metadata, read_at: at(read_at), warning }))
    };
    let late = CachedStorageClass { is_late: true, ..CachedStorageClass::default() };
    let (plain, told, read) = ("PVC d Pending", "target PVC d Pending: no class", "read the warnings");
    let node = json!({"metadata": {"annotations": {"volume.kubernetes.io/selected-node": "n"}}});
    let young = json!({"metadata": {"creationTimestamp": at(95).to_string()}});
    let old = json!({"metadata": {"creationTimestamp": at(-100_000).to_string()}});
    let cases = [
        ("nothing was read", json!({}), None, None, plain, true, Some(10)),
        ("nothing was read, and it is young", young, None, None, plain, false, Some(10)),
        ("something was read", json!({}), None, warned("c", 91), told, false, Some(10)),
        ("the read is due again", json!({}), None, warned("c", 90), told, true, Some(10)),
        ("an old claim is read seldom", old, None, warned("c", 0), told, false, Some(300)),
        ("it was about a former claim", json!({}), None, warned("b", 99), plain, true, Some(10)),
        ("no pod has a node", json!({}), Some(&late), warned("c", 90), plain, false, None),
        ("a pod has a node", node, Some(&late), warned("c", 91), told, false, Some(10)),
    ];
    for (name, change, class, warning, message, reads, wake) in cases {
        let class = class.cloned().unwrap_or_default();
        let observed =
            Observed { claim: claim("Pending", &change), class: Some(Arc::new(class)), warning, ..observed(&begun()) };
        let step = next(&observed).unwrap().unwrap();
        let bound = step.shown.unwrap().bound;
        assert_eq!((bound.reason.as_str(), bound.message.as_str()), ("Pending", message), "{name}");
        assert_eq!(step.wake, wake.map(Duration::from_secs), "{name}");
        assert_eq!(writes(&decide(&observed).unwrap()).contains(&read.to_owned()), reads, "{name}");
        // CDI shows the state.
        let beside = Observed { begins: false, ..observed };
        assert!(!writes(&decide(&beside).unwrap()).contains(&read.to_owned()), "{name}");
    }
}

#[test]
fn pod_shows_in_phase_and_condition() {
    let running = json!({"state": {"running": {}}});
    let pulls = json!({"state": {"waiting": {"reason": "ImagePullBackOff", "message": "m"}}});
    let creating = json!({"state": {"waiting": {"reason": "ContainerCreating"}}});
    let fails = ended(&report(Outcome::Failed, Reason::SourceError, false));
    for (container, phase, reason) in [
        (json!({}), "ImportScheduled", "Pending"),
        (creating, "ImportScheduled", "ContainerCreating"),
        (pulls, "ImportInProgress", "ImagePullFailed"),
        (running, "ImportInProgress", "Pod is running"),
        (fails, "ImportInProgress", "Error"),
    ] {
        let pod = pod("Running", &container, 50);
        let observed = Observed { claim: claim("Bound", &json!({})), pod, percent: Some(12.5), ..observed(&begun()) };
        assert_eq!(shown(&observed), (phase.to_owned(), reason.to_owned()), "{container}");
        let progress = next(&observed).unwrap().unwrap().shown.unwrap().progress;
        assert_eq!(progress.as_deref(), (reason == "Pod is running").then_some("12.50%"), "{container}");
        assert_eq!(writes(&decide(&observed).unwrap()), ["patch datavolumes/status"], "{container}");
    }
}

#[test]
fn success_is_recorded_at_the_claim_first() {
    let done = report(Outcome::Complete, Reason::Completed, false);
    let pod = pod("Succeeded", &ended(&done), 50);
    let filled = Observed { claim: claim("Bound", &json!({})), pod, ..observed(&begun()) };
    let decision = decide(&filled).unwrap();
    let expected = ["patch persistentvolumeclaims", "patch datavolumes/status", "patch datavolumes", "delete pods"];
    assert_eq!(writes(&decision), expected);
    let metadata = &patch_of(&decision, Kind::Claim)["metadata"];
    assert_eq!(metadata["annotations"]["cdi.kubevirt.io/storage.populatedFor"], "d");
    assert_eq!(metadata["annotations"]["cdi.kubevirt.io/storage.pod.phase"], "Succeeded");
    // An image sets the labels that VMs infer from, and no others.
    assert_eq!(metadata["labels"], json!({"instancetype.kubevirt.io/default-preference": "linux"}));
    // After a crash between the writes.
    let annotations = json!({"metadata": {"annotations": {"cdi.kubevirt.io/storage.populatedFor": "d"}}});
    let recorded = Observed { claim: claim("Bound", &annotations), pod: None, ..filled.clone() };
    assert_eq!(writes(&decide(&recorded).unwrap()), ["patch datavolumes/status", "patch datavolumes"]);
    let mut change = begun();
    json_patch::merge(&mut change, &json!({"status": {"phase": "Succeeded"}}));
    let shown = Observed { claim: claim("Bound", &annotations), ..observed(&change) };
    assert_eq!(
        writes(&decide(&Observed { pod: filled.pod.clone(), ..shown.clone() }).unwrap()),
        ["patch datavolumes/status", "patch datavolumes", "delete pods"]
    );
    change["metadata"]["annotations"]["cdi.kubevirt.io/storage.pod.retainAfterCompletion"] = json!("true");
    let retained = Observed { claim: shown.claim, pod: filled.pod, ..observed(&change) };
    assert_eq!(writes(&decide(&retained).unwrap()), ["patch datavolumes/status", "patch datavolumes"]);
}

#[test]
fn claim_that_is_made_again_is_filled_again() {
    let mut change = begun();
    json_patch::merge(&mut change, &json!({"status": {"phase": "Succeeded"}}));
    let empty = json!({"metadata": {"annotations": {"cdi.kubevirt.io/storage.pod.phase": "Pending"}}});
    let again = Observed { claim: claim("Bound", &empty), ..observed(&change) };
    assert_eq!(shown(&again).0, "ImportScheduled");
    assert_eq!(writes(&decide(&again).unwrap()), ["create pods", "patch datavolumes/status"]);
    // CDI has filled it.
    let other = Observed { claim: claim("Bound", &empty), ..observed(&json!({"status": {"phase": "Succeeded"}})) };
    assert_eq!(writes(&decide(&other).unwrap()), ["patch datavolumes/status"]);
    assert_eq!(shown(&other).0, "Succeeded");
}

#[test]
fn fatal_report_ends_the_import() {
    for (reason, shows) in [(Reason::ChecksumError, "ChecksumError"), (Reason::RefusedImage, "Error")] {
        let pod = pod("Running", &ended(&report(Outcome::Failed, reason, true)), 50);
        let observed = Observed { claim: claim("Bound", &json!({})), pod, ..observed(&begun()) };
        assert_eq!(shown(&observed), ("Failed".to_owned(), shows.to_owned()));
        assert_eq!(writes(&decide(&observed).unwrap()), ["patch datavolumes/status", "delete pods"]);
    }
}

#[test]
fn pod_without_a_result_is_replaced_at_a_bounded_pace() {
    let none = json!({});
    let with = |pod| Observed { claim: claim("Bound", &json!({})), pod, ..observed(&begun()) };
    let young = decide(&with(pod("Failed", &none, 95))).unwrap();
    assert_eq!(
        (writes(&young), young.wake_after),
        (vec!["patch datavolumes/status".to_owned()], Some(Duration::from_secs(5)))
    );
    let old = decide(&with(pod("Failed", &none, 50))).unwrap();
    assert_eq!(writes(&old), ["patch datavolumes/status", "delete pods"]);
    // It filled a former claim of the name.
    let done = ended(&report(Outcome::Complete, Reason::Completed, false));
    let former = decide(&with(pod("Succeeded", &done, -1))).unwrap();
    assert_eq!(writes(&former), ["delete pods", "patch datavolumes/status"]);
    let gone = Observed { claim: None, ..with(pod("Succeeded", &done, 50)) };
    assert_eq!(writes(&decide(&gone).unwrap()), ["delete pods", "patch datavolumes/status"]);
}

#[test]
fn refused_write_shows_and_is_repeated_later() {
    let failure =
        |reason, message: &str, retry_at| Failure { reason, message: message.to_owned(), retry_at, attempts: 1 };
    for (message, shows) in [("exceeded quota: q", "ErrExceededQuota"), ("invalid", "ErrClaimNotValid")] {
        let blocked = Observed { failures: Some(failure(CLAIM, message, at(103))).into(), ..observed(&begun()) };
        let step = next(&blocked).unwrap().unwrap();
        let bound = step.shown.clone().unwrap().bound;
        assert_eq!(
            (bound.reason.as_str(), bound.message.as_str(), step.shown.unwrap().phase),
            (shows, message, "Pending")
        );
        assert_eq!((step.before.len(), step.wake), (0, Some(Duration::from_secs(3))));
        let due = Observed { failures: Some(failure(CLAIM, message, at(99))).into(), ..observed(&begun()) };
        assert_eq!(writes(&decide(&due).unwrap())[0], "create persistentvolumeclaims");
    }
    let claim = claim("Bound", &json!({}));
    let failures = Some(failure(POD, "exceeded quota: q", at(103))).into();
    let pod = Observed { claim, failures, ..observed(&begun()) };
    let fact = next(&pod).unwrap().unwrap().shown.unwrap().running.unwrap();
    assert_eq!(
        (fact.reason.as_str(), fact.message.as_str()),
        ("ErrExceededQuota", "Error starting pod 'importer-d': exceeded quota: q")
    );
}

#[test]
fn existing_claim_is_adopted_or_refused() {
    let foreign = json!({"metadata": {"ownerReferences": [
        {"apiVersion": "v1", "kind": "ConfigMap", "name": "x", "uid": "x", "controller": true}]}});
    let free = json!({"metadata": {"ownerReferences": null}});
    let populated =
        json!({"metadata": {"ownerReferences": null, "annotations": {"cdi.kubevirt.io/storage.populatedFor": "d"}}});
    let other =
        json!({"metadata": {"ownerReferences": null, "annotations": {"cdi.kubevirt.io/storage.populatedFor": "e"}}});
    let half =
        json!({"metadata": {"ownerReferences": null, "annotations": {"cdi.kubevirt.io/storage.pod.phase": "Running"}}});
    let allowed = json!({"metadata": {"annotations": {"cdi.kubevirt.io/allowClaimAdoption": "true"}}});
    let none = json!({});
    for (metadata, of, adopted) in [
        (&populated, &none, true),
        (&other, &none, false),
        (&free, &none, false),
        (&free, &allowed, true),
        (&half, &allowed, false),
        (&foreign, &allowed, false),
    ] {
        let observed = Observed { claim: claim("Pending", metadata), ..observed(of) };
        let decision = decide(&observed).unwrap();
        let expected: &[&str] = if adopted {
            &["patch persistentvolumeclaims", "patch datavolumes/status"]
        } else {
            &["patch datavolumes/status"]
        };
        assert_eq!(writes(&decision), expected, "{metadata} {of}");
        let step = next(&observed).unwrap().unwrap().shown.unwrap();
        let shows = if adopted { ("Succeeded", "Pending") } else { ("Pending", "ErrResourceExists") };
        assert_eq!((step.phase, step.bound.reason.as_str()), shows, "{metadata} {of}");
    }
    // Its content stays, also after a crash between the writes.
    let made_for_none = json!({"metadata": {"annotations": {"cdi.kubevirt.io/createdForDataVolume": null}}});
    let taken = Observed { claim: claim("Bound", &made_for_none), ..observed(&allowed) };
    assert_eq!(writes(&decide(&taken).unwrap()), ["patch datavolumes/status"]);
    assert_eq!(shown(&taken).0, "Succeeded");
    // CDI would keep it from being filled anew, too.
    let bound = Observed { claim: claim("Bound", &populated), ..observed(&none) };
    let patch = patch_of(&decide(&bound).unwrap(), Kind::DataVolume);
    assert_eq!(patch["metadata"]["annotations"], json!({"cdi.kubevirt.io/storage.prePopulated": "d"}));
}

#[test]
fn volume_that_others_fill_waits_for_its_claim() {
    let marked = json!({"metadata": {"annotations": {"cdi.kubevirt.io/storage.prePopulated": "d"}}});
    assert_eq!(writes(&decide(&observed(&marked)).unwrap()), ["patch datavolumes/status"]);
    let mut copied = marked.clone();
    copied["metadata"]["annotations"]["ferrovirt.io/import"] = json!("former");
    assert_eq!(
        writes(&decide(&observed(&copied)).unwrap())[..2],
        ["patch datavolumes", "create persistentvolumeclaims"]
    );
    // CDI left it behind: a volume that exists may be meant.
    let fixed = json!({"metadata": {"annotations": {"cdi.kubevirt.io/storage.checkStaticVolume": "true"}}});
    assert_eq!(writes(&decide(&observed(&fixed)).unwrap()), ["patch datavolumes/status"]);
    assert_eq!(shown(&observed(&fixed)), ("Pending".to_owned(), "Error".to_owned()));
    let deleting = json!({"metadata": {"deletionTimestamp": at(1).to_string()}});
    let step = next(&Observed { claim: claim("Bound", &deleting), ..observed(&begun()) }).unwrap().unwrap();
    assert_eq!(step.shown.unwrap().bound.reason, "ErrResourceMarkedForDeletion");
    assert!(decide(&observed(&deleting)).unwrap().is_settled());
    let external =
        json!({"spec": {"source": null, "storage": {"dataSource": {"kind": "VolumeSnapshot", "name": "s"}}}});
    let decision = decide(&observed(&external)).unwrap();
    assert_eq!(writes(&decision), ["create persistentvolumeclaims", "patch datavolumes/status"]);
    // The provisioner of a class without a CSI driver makes an empty volume.
    for (phase, is_csi, shows) in
        [("Pending", true, "Succeeded"), ("Pending", false, "Pending"), ("Bound", false, "Pending")]
    {
        let made = Observed { claim: claim(phase, &json!({})), is_csi, ..observed(&external) };
        assert_eq!(shown(&made).0, shows, "{phase} {is_csi}");
        let bound = next(&made).unwrap().unwrap().shown.unwrap().bound;
        assert_eq!(bound.reason == "NoCSIDriverForExternalPopulation", !is_csi, "{phase} {is_csi}");
    }
}

#[test]
fn what_needs_cdi_shows_so() {
    let upload = json!({"spec": {"source": {"registry": null, "upload": {}}}});
    let step = next(&observed(&upload)).unwrap().unwrap();
    let shown = step.shown.unwrap();
    assert_eq!((shown.phase, step.before.len()), ("Pending", 0));
    let running = shown.running.unwrap();
    assert!(running.reason == "Error" && running.message.contains("source upload needs CDI"), "{running:?}");
    let unclear = Observed { class: None, ..observed(&json!({})) };
    let step = next(&unclear).unwrap().unwrap();
    assert_eq!((step.shown.unwrap().bound.reason.as_str(), step.wake), ("ErrClaimNotValid", Some(RETRY)));
}

#[test]
fn claim_of_a_restore_is_waited_for_and_never_filled() {
    let marks = json!({"cdi.kubevirt.io/storage.prePopulated": "d", "restore.kubevirt.io/name": "r"});
    let marked = json!({"metadata": {"annotations": marks}, "status": {"phase": "Succeeded"}});
    let mut observed = observed(&marked);
    assert_eq!(writes(&decide(&observed).unwrap()), ["patch datavolumes/status"]);
    assert_eq!(shown(&observed).0, "Pending");
    // The restore makes it from the snapshot, and says for which DataVolume.
    let restored = json!({"metadata": {
        "ownerReferences": null, "annotations": {"cdi.kubevirt.io/createdForDataVolume": null, "cdi.kubevirt.io/storage.populatedFor": "d"},
    }});
    for phase in ["Pending", "Bound"] {
        observed.claim = claim(phase, &restored);
        let decision = decide(&observed).unwrap();
        assert!(!writes(&decision).iter().any(|write| write.starts_with("create")), "{phase}: {decision:?}");
        assert_eq!(patch_of(&decision, Kind::Claim)["metadata"]["ownerReferences"][0]["name"], "d", "{phase}");
        assert_eq!(shown(&observed).0, "Succeeded", "{phase}");
    }
}
