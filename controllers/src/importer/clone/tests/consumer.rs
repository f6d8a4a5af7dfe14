//! The pod that is the first consumer of a claim whose driver makes the volume.

use std::sync::Arc;

use api::cdi::{DataVolume, annotation::PERMITTED_CLONE};
use k8s_openapi::api::core::v1::{PersistentVolumeClaim, Pod};
use serde_json::{Value, json};

use super::super::{facts::Facts, strategy::Class, *};
use crate::{
    importer::{self, decide},
    resources::{import_pods::CachedImportPod, snapshots::CachedSnapshot, storage_classes::CachedStorageClass},
    runtime::Failures,
};

const UID: &str = "u";

fn data_volume() -> DataVolume {
    let object = json!({
        "apiVersion": "cdi.kubevirt.io/v1beta1", "kind": "DataVolume",
        "metadata": {"name": "disk", "namespace": "user", "uid": UID, "resourceVersion": "1",
            "finalizers": ["ferrovirt.io/clone"],
            "annotations": {"ferrovirt.io/import": UID, STRATEGY: "csi-clone", "k8s.v1.cni.cncf.io/networks": "net"}},
        "spec": {"source": {"snapshot": {"namespace": "golden", "name": "image"}}, "serviceAccountName": "builder",
            "storage": {"resources": {"requests": {"storage": "100Mi"}}}},
    });
    let mut volume: DataVolume = serde_json::from_value(object).unwrap();
    let path = volume.spec.source.as_ref().unwrap().clone_path().unwrap();
    volume.metadata.annotations.as_mut().unwrap().insert(PERMITTED_CLONE.to_owned(), path);
    volume
}

/// A clone of a snapshot of another namespace whose temporary claim is in this phase, and whose pod in that one.
fn observed(claim: &str, pod: Option<&str>) -> importer::Observed {
    let object = json!({
        "metadata": {"namespace": "golden", "name": "tmp-pvc-u", "uid": "c", "creationTimestamp": "2030-01-01T00:00:00Z",
            "labels": {"cdi.kubevirt.io/OwnedByUID": UID}},
        "spec": {"storageClassName": "late", "volumeName": if claim == "Bound" { json!("pv") } else { json!(null) },
            "dataSource": {"apiGroup": "snapshot.storage.k8s.io", "kind": "VolumeSnapshot", "name": "image"},
            "resources": {"requests": {"storage": "106Mi"}}},
        "status": {"phase": claim},
    });
    let temporary: CachedClaim = serde_json::from_value::<PersistentVolumeClaim>(object).unwrap().into();
    let pod = pod.map(|phase| {
        let metadata = json!({"namespace": "golden", "name": "importer-tmp-pvc-u", "uid": "p",
            "creationTimestamp": "2030-01-01T00:00:01Z"});
        let pod: Pod = serde_json::from_value(json!({"metadata": metadata, "status": {"phase": phase}})).unwrap();
        Arc::new(CachedImportPod::from(pod))
    });
    let metadata = ObjectMeta { name: Some("late".to_owned()), ..ObjectMeta::default() };
    let class = CachedStorageClass { metadata, is_late: true, ..CachedStorageClass::default() };
    importer::Observed {
        volume: Arc::new(data_volume()),
        claim: None,
        pod: None,
        class: Some(Arc::new(class)),
        is_csi: true,
        profile: None,
        begins: true,
        beside_cdi: false,
        warning: None,
        clone: Some(Facts {
            key: Key::new("golden", "image"),
            is_snapshot: true,
            source: None,
            snapshot: Some(Arc::new(CachedSnapshot {
                ready: true,
                restore_size: Some(1),
                ..CachedSnapshot::default()
            })),
            is_filled: true,
            provisioner: None,
            class: Some(Class { is_late: true, is_csi: true, ..Class::default() }),
            temporary: Some(Arc::new(temporary)),
            pod,
            percent: None,
            volume: None,
            users: None,
            warning: None,
        }),
        tolerations: Vec::new(),
        percent: None,
        image: "importer:1".to_owned(),
        pull_policy: "IfNotPresent".to_owned(),
        failures: Failures::default(),
        now: "2030-01-01T00:00:05Z".parse().unwrap(),
    }
}

/// Returns the writes but those of the status, and the phase that is shown.
fn decided(claim: &str, pod: Option<&str>) -> (Vec<Effect>, Value) {
    let decision = decide(&observed(claim, pod)).unwrap();
    let mut phase = json!(null);
    let writes = decision.effects.into_iter().filter(|effect| match effect {
        Effect::Patch { subresource: Some(_), patch, .. } => {
            phase = patch["status"]["phase"].clone();
            false
        }
        Effect::Event(_) => false,
        _ => true,
    });
    (writes.collect(), phase)
}

#[test]
fn pod_is_made_beside_the_temporary_claim_and_leaves_before_the_hand_over() {
    let (writes, phase) = decided("Pending", None);
    let [Effect::Create { kind: Kind::Pod, namespace, object, .. }] = writes.as_slice() else { panic!("{writes:?}") };
    assert_eq!((namespace.as_deref(), phase), (Some("golden"), json!(phase::SNAPSHOT)));
    let (metadata, spec) = (&object["metadata"], &object["spec"]);
    assert_eq!(
        (&metadata["name"], &metadata["ownerReferences"][0]["name"]),
        (&json!("importer-tmp-pvc-u"), &json!("tmp-pvc-u"))
    );
    assert!(metadata["annotations"]["k8s.v1.cni.cncf.io/networks"].is_null() && spec["serviceAccountName"].is_null());
    assert_eq!(
        spec["containers"][0]["volumeMounts"],
        json!([{"name": "data", "mountPath": "/data", "readOnly": true}])
    );
    assert!(spec["containers"][0]["env"][0]["value"].as_str().unwrap().contains(r#""source":{"existing":{}}"#));

    for phase in ["Pending", "Running", "Succeeded"] {
        let (writes, shown) = decided("Pending", Some(phase));
        assert_eq!((writes.len(), shown), (0, json!(phase::SNAPSHOT)), "{phase}: {writes:?}");
    }
    let (writes, shown) = decided("Bound", Some("Running"));
    let [Effect::Delete { kind: Kind::Pod, .. }, Effect::Patch { kind: Kind::Volume, name, .. }] = writes.as_slice()
    else {
        panic!("{writes:?}")
    };
    assert_eq!((name.as_str(), shown), ("pv", json!(phase::REBIND)));
}

#[test]
fn clone_that_failed_is_not_repeated_while_its_temporary_claim_exists() {
    let mut failed = observed("Pending", None);
    Arc::make_mut(&mut failed.volume).status = Some(serde_json::from_value(json!({"phase": "Failed"})).unwrap());
    assert!(decide(&failed).unwrap().is_settled());
    failed.clone.as_mut().unwrap().temporary = None;
    assert!(!decide(&failed).unwrap().is_settled());
}
