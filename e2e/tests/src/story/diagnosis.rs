//! Diagnosis of a failed story.

use k8s_openapi::api::core::v1::Event;
use kube::{
    Api, Client,
    api::{ListParams, LogParams},
};
use serde_json::Value;

use super::Story;

/// Kinds whose objects are printed.
const KINDS: [&str; 11] = [
    "vm",
    "vmi",
    "vmirs",
    "vmim",
    "VirtualMachineSnapshot",
    "VirtualMachineSnapshotContent",
    "VirtualMachineRestore",
    "VirtualMachineClone",
    "VolumeSnapshot",
    "DataVolume",
    "PersistentVolumeClaim",
];
/// Number of printed lines of a log.
const LINES: i64 = 60;

/// Prints events, objects and the ends of pod logs (the launcher's log holds the domain XML).
pub(super) async fn print(story: &Story) {
    for kind in KINDS {
        for mut object in story.list(kind, "").await.unwrap_or_default() {
            object["metadata"]["managedFields"] = Value::Null;
            eprintln!("-------- {kind} {}\n{object:#}", object["metadata"]["name"]);
        }
    }
    events(&story.client, &story.namespace).await;
    for pod in story.list("Pod", "").await.unwrap_or_default() {
        eprintln!("-------- pod {}\n{:#}", pod["metadata"]["name"], pod["status"]);
    }
    logs(story, &story.namespace, "").await;
    logs(story, "kubevirt", "kubevirt.io in (virt-api,virt-controller,virt-handler)").await;
}

/// Prints the events of a namespace.
pub(super) async fn events(client: &Client, namespace: &str) {
    let events: Api<Event> = Api::namespaced(client.clone(), namespace);
    let Ok(events) = events.list(&ListParams::default()).await else { return };
    for event in events {
        let (about, text) = (event.involved_object, |field: Option<String>| field.unwrap_or_default());
        let (kind, name) = (text(about.kind), text(about.name));
        eprintln!("event {} {kind}/{name} {}: {}", text(event.type_), text(event.reason), text(event.message));
    }
}

async fn logs(story: &Story, namespace: &str, labels: &str) {
    let pods: Api<k8s_openapi::api::core::v1::Pod> = Api::namespaced(story.client.clone(), namespace);
    let Ok(list) = pods.list(&ListParams::default().labels(labels)).await else { return };
    for pod in list {
        let name = pod.metadata.name.unwrap_or_default();
        for container in pod.spec.map(|s| s.containers).unwrap_or_default() {
            let params =
                LogParams { container: Some(container.name.clone()), tail_lines: Some(LINES), ..LogParams::default() };
            let log = pods.logs(&name, &params).await.unwrap_or_else(|error| error.to_string());
            eprintln!("-------- log of {name}/{}\n{log}", container.name);
        }
    }
}
