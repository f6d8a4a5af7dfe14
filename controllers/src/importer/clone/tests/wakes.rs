use std::sync::Arc;

use api::cdi::DataVolume;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use serde_json::json;

use super::super::facts::watch;
use crate::{
    cache::Key,
    resources::{Caches, claim_facts::ClaimWarning},
    runtime::Wake,
};

fn volume(name: &str, source: &serde_json::Value, phase: &str, version: &str) -> DataVolume {
    serde_json::from_value(json!({
        "apiVersion": "cdi.kubevirt.io/v1beta1", "kind": "DataVolume",
        "metadata": {"name": name, "namespace": "shop", "uid": name, "resourceVersion": version},
        "spec": {"source": source, "storage": {}},
        "status": {"phase": phase},
    }))
    .unwrap()
}

#[test]
fn end_of_an_import_wakes_the_clones_of_its_claim() {
    let (caches, wake) = (Arc::new(Caches::default()), Wake::default());
    watch(&caches, &wake);
    caches.data_volumes.observe(volume(
        "copy",
        &json!({"pvc": {"namespace": "shop", "name": "image"}}),
        "Pending",
        "1",
    ));
    assert_eq!(wake.woken(), []);
    let image = json!({"http": {"url": "http://images.example/disk"}});
    for (phase, version, wakes) in
        [("ImportInProgress", "2", true), ("ImportInProgress", "3", false), ("Succeeded", "4", true)]
    {
        caches.data_volumes.observe(volume("image", &image, phase, version));
        let expected: &[Key] = if wakes { &[Key::new("shop", "copy")] } else { &[] };
        assert_eq!(wake.woken(), expected, "{phase} in version {version}");
    }
}

#[test]
fn warning_about_a_claim_wakes_its_data_volume() {
    let (caches, wake) = (Arc::new(Caches::default()), Wake::default());
    watch(&caches, &wake);
    assert_eq!(wake.woken(), []);
    let metadata = ObjectMeta {
        name: Some("image".to_owned()),
        namespace: Some("shop".to_owned()),
        resource_version: Some("1".to_owned()),
        ..ObjectMeta::default()
    };
    caches.claim_warnings.observe(ClaimWarning { metadata, ..ClaimWarning::default() });
    assert_eq!(wake.woken(), [Key::new("shop", "image")]);
}
