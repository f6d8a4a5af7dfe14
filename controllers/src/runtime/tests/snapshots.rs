//! Contents of snapshots, copies of revisions, and the freeze of guests.

use super::*;
use crate::runtime::{RevisionCopy, SnapshotContentCreation};

const CONTENTS: &str = "/apis/snapshot.kubevirt.io/v1beta1/namespaces/n/virtualmachinesnapshotcontents";

async fn carried_out(effect: Effect, script: Vec<Reply>) -> (Outcome, Vec<String>, Vec<Value>) {
    let server = Server::new(script);
    let fixture = fixture(&server);
    let outcome = fixture.executor.carry_out("vm-snapshot", vec![effect], None).await;
    let paths = server.requests().into_iter().map(|(_, path)| path).collect();
    (outcome, paths, server.bodies())
}

fn creation(start: Option<&str>) -> Effect {
    let spec = |volumes: Value| json!({"template": {"spec": {"domain": {"devices": {}}, "volumes": volumes}}});
    let content = json!({
        "metadata": {"name": "c", "namespace": "n"},
        "spec": {
            "source": {"virtualMachine": {"metadata": {"name": "v"}, "spec": spec(json!([{"name": "now"}]))}},
            "volumeBackups": [{"volumeName": "now", "persistentVolumeClaim": {"metadata": {"name": "claim", "uid": "u"}}}],
        },
    });
    Effect::create_snapshot_content(SnapshotContentCreation {
        content: serde_json::from_value(content).unwrap(),
        start: start.map(str::to_owned),
    })
}

fn claim(uid: &str) -> Reply {
    let metadata = json!({"name": "claim", "namespace": "n", "uid": uid, "labels": {"a": "b"}, "managedFields": []});
    Reply::Answer(200, json!({"metadata": metadata, "spec": {"storageClassName": "fast"}}))
}

#[tokio::test(start_paused = true)]
async fn content_holds_claims_whole_and_the_spec_of_the_start_with_the_present_volumes() {
    let started =
        json!({"template": {"spec": {"domain": {"cpu": {"cores": 3}, "devices": {}}, "volumes": [{"name": "then"}]}}});
    let record = Reply::Answer(200, json!({"metadata": {"name": "r"}, "revision": 1, "data": {"spec": started}}));
    let created = Reply::Answer(201, json!({"metadata": {"name": "c", "namespace": "n"}, "spec": {"source": {}}}));
    let (outcome, paths, bodies) = carried_out(creation(Some("r")), vec![record, claim("u"), created]).await;
    assert_eq!(outcome, Outcome::Done { succeeded: vec![] });
    assert_eq!(
        paths,
        [
            "/apis/apps/v1/namespaces/n/controllerrevisions/r",
            "/api/v1/namespaces/n/persistentvolumeclaims/claim",
            CONTENTS
        ]
    );
    let spec = &bodies[2]["spec"];
    let vm = &spec["source"]["virtualMachine"]["spec"]["template"]["spec"];
    assert_eq!((&vm["domain"]["cpu"]["cores"], &vm["volumes"]), (&json!(3), &json!([{"name": "now"}])));
    let backup = &spec["volumeBackups"][0]["persistentVolumeClaim"];
    assert_eq!(
        (&backup["metadata"]["labels"], &backup["spec"]["storageClassName"]),
        (&json!({"a": "b"}), &json!("fast"))
    );

    // Another claim has the name by now.
    let (outcome, paths, _) = carried_out(creation(None), vec![claim("other")]).await;
    assert_eq!((outcome, paths.len()), (Outcome::Stale, 1));
}

#[tokio::test(start_paused = true)]
async fn revision_is_copied_with_labels_and_data() {
    let owner = json!({"apiVersion": "snapshot.kubevirt.io/v1beta1", "kind": "VirtualMachineSnapshot", "name": "s", "uid": "u"});
    let copy = || {
        Effect::copy_revision(RevisionCopy {
            namespace: "n".to_owned(),
            source: "v-small".to_owned(),
            name: "s-small".to_owned(),
            owner: serde_json::from_value(owner.clone()).unwrap(),
        })
    };
    let found =
        json!({"metadata": {"name": "v-small", "labels": {"l": "1"}, "uid": "x"}, "revision": 0, "data": {"a": 1}});
    let (outcome, _, bodies) =
        carried_out(copy(), vec![Reply::Answer(200, found.clone()), Reply::Answer(201, found)]).await;
    assert_eq!(outcome, Outcome::Done { succeeded: vec![] });
    let made = &bodies[1];
    assert_eq!((&made["metadata"]["name"], &made["metadata"]["labels"]), (&json!("s-small"), &json!({"l": "1"})));
    assert_eq!((&made["metadata"]["uid"], &made["data"]), (&Value::Null, &json!({"a": 1})));
    let missing = Reply::Answer(404, crate::scripted::status(404, "NotFound"));
    let (outcome, ..) = carried_out(copy(), vec![missing]).await;
    let Outcome::Refused { message, .. } = outcome else { panic!("{outcome:?}") };
    assert!(message.starts_with("Unable to fetch ControllerRevision n/v-small: "), "{message}");
}

#[tokio::test(start_paused = true)]
async fn content_of_a_volume_snapshot_is_taken_if_it_says_so_of_this_one() {
    let path = "/apis/snapshot.storage.k8s.io/v1/volumesnapshotcontents/c";
    let check = |content: &str| {
        let snapshot = serde_json::from_value(json!({"name": "s", "namespace": "n", "uid": "u"})).unwrap();
        Effect::require_taken(&snapshot, content).refused_as("Read")
    };
    let content = |uid: &str, namespace: &str, status: Value| {
        let reference = json!({"name": "s", "namespace": namespace, "uid": uid});
        Reply::Answer(200, json!({"spec": {"volumeSnapshotRef": reference}, "status": status}))
    };
    let taken = || json!({"creationTime": 1_893_456_000_000_000_000_i64});
    for (reply, is_taken) in [
        (content("u", "n", taken()), true),
        (content("u", "n", json!({"readyToUse": true})), true),
        (content("u", "n", json!({"readyToUse": false})), false),
        (content("u", "n", Value::Null), false),
        (content("other", "n", taken()), false),
        (content("u", "other", taken()), false),
    ] {
        let (outcome, paths, _) = carried_out(check("c"), vec![reply]).await;
        let expected = if is_taken { Outcome::Done { succeeded: vec!["Read"] } } else { Outcome::Stale };
        assert_eq!((outcome, paths), (expected, vec![path.to_owned()]));
    }
    let key = "snapshot.storage.kubernetes.io/volumesnapshot-being-deleted";
    let reference = json!({"name": "s", "namespace": "n", "uid": "u"});
    for (annotations, policy, is_kept) in [
        // Its VolumeSnapshot is not deleted.
        (json!({}), "Delete", true),
        (json!({key: "yes"}), "Retain", true),
        (json!({key: "yes"}), "Delete", false),
    ] {
        let going = json!({
            "metadata": {"deletionTimestamp": "2030-01-01T00:00:00Z", "annotations": annotations},
            "spec": {"volumeSnapshotRef": reference, "deletionPolicy": policy}, "status": taken(),
        });
        let (outcome, ..) = carried_out(check("c"), vec![Reply::Answer(200, going)]).await;
        let message = "VolumeSnapshotContent c is being deleted".to_owned();
        let refused = Outcome::Refused { reason: Some("Read"), message, succeeded: vec![] };
        assert_eq!(outcome, if is_kept { Outcome::Done { succeeded: vec!["Read"] } } else { refused });
    }
    for (code, reason) in [(403, "Forbidden"), (404, "NotFound")] {
        let reply = Reply::Answer(code, crate::scripted::status(code, reason));
        let (outcome, ..) = carried_out(check("c"), vec![reply]).await;
        assert!(matches!(outcome, Outcome::Refused { reason: Some("Read"), .. }), "{outcome:?}");
    }
    let (outcome, paths, _) = carried_out(check("../volumesnapshots"), vec![]).await;
    assert!(matches!(outcome, Outcome::Refused { reason: Some("Read"), .. }), "{outcome:?}");
    assert_eq!(paths, Vec::<String>::new());
}

#[tokio::test(start_paused = true)]
async fn every_failure_of_a_freeze_is_a_refusal() {
    let path = "/apis/subresources.kubevirt.io/v1/namespaces/n/virtualmachineinstances/v/freeze";
    let freeze = || Effect::quiesce("n", "v", Some(Duration::from_secs(60))).refused_as("Freeze");
    let (outcome, paths, bodies) = carried_out(freeze(), vec![Reply::Answer(200, json!({}))]).await;
    assert_eq!((outcome, paths), (Outcome::Done { succeeded: vec!["Freeze"] }, vec![path.to_owned()]));
    assert_eq!(bodies[0], json!({"unfreezeTimeout": "60s"}));
    for reply in [Reply::Answer(503, crate::scripted::status(503, "busy")), Reply::Silence] {
        let (outcome, ..) = carried_out(freeze(), vec![reply]).await;
        assert!(matches!(outcome, Outcome::Refused { reason: Some("Freeze"), .. }), "{outcome:?}");
    }
}
