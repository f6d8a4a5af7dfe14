//! Follows VMIs whose ports are forwarded, and their launcher pods.
//!
//! A guest that is switched off closes no connections. Its silence proves nothing, since a paused guest is as silent, and bytes
//! from the address of a pod that has ended may be another pod's. So both objects are watched while ports of the VMI are
//! forwarded, once for all ports.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, Weak},
};

use api::{VirtualMachineInstance, enums::VmiPhase};
use daemon::{CancellationToken, lock};
use futures::StreamExt;
use k8s_openapi::{api::core::v1::Pod, jiff::Timestamp};
use kube::{Api, Client, Resource};
use serde::de::DeserializeOwned;
use tokio_util::task::AbortOnDropHandle;

use crate::clients::address::{Holds, LauncherAddress};

/// The VMIs that are watched now.
#[derive(Clone, Default)]
pub(crate) struct VmiWatches {
    watched: Arc<Mutex<HashMap<Key, Weak<Watched>>>>,
}

/// The UIDs of a VMI and of its pod.
type Key = (String, String);

struct Watched {
    gone: CancellationToken,
    /// The watch ends with the last forwarded port.
    _watch: AbortOnDropHandle<()>,
}

/// A watch of a VMI, which ends when the last handle is dropped.
pub(crate) struct VmiWatch(Arc<Watched>);

impl VmiWatches {
    /// Watches a VMI and its launcher pod as they were just read.
    pub(crate) fn watch(&self, client: &Client, vmi: &VirtualMachineInstance, target: &LauncherAddress) -> VmiWatch {
        let key = (vmi.metadata.uid.clone().unwrap_or_default(), target.uid.clone());
        let mut watched = lock(&self.watched);
        let known = watched.get(&key).and_then(Weak::upgrade).filter(|known| !known.gone.is_cancelled());
        if let Some(known) = known {
            return VmiWatch(known);
        }
        let gone = CancellationToken::new();
        let watch = watch(client.clone(), vmi.clone(), target.clone(), gone.clone());
        let started = Arc::new(Watched { gone, _watch: AbortOnDropHandle::new(tokio::spawn(watch)) });
        watched.retain(|_, known| known.strong_count() > 0);
        watched.insert(key, Arc::downgrade(&started));
        VmiWatch(started)
    }
}

impl VmiWatch {
    /// Resolves when the VMI no longer runs on its node, or its pod has ended.
    pub(crate) async fn gone(&self) {
        self.0.gone.cancelled().await;
    }
}

async fn watch(client: Client, vmi: VirtualMachineInstance, target: LauncherAddress, gone: CancellationToken) {
    let name = vmi.metadata.name.clone().unwrap_or_default();
    let namespace = vmi.metadata.namespace.clone().unwrap_or_default();
    let vmis = Api::<VirtualMachineInstance>::namespaced(client.clone(), &namespace);
    let vmi_gone = end(vmis, &name, |now| if runs_on(&vmi, now) { Holds::Yes } else { Holds::No });
    let pods = Api::<Pod>::namespaced(client, &namespace);
    let pod_gone = end(pods, &target.pod, |now| target.holds(now));
    tokio::select! {
        () = vmi_gone => {}
        () = pod_gone => {}
    }
    gone.cancel();
}

/// Resolves when `holds` is false for the latest version of an object.
async fn end<K>(api: Api<K>, name: &str, holds: impl Fn(Option<&K>) -> Holds)
where
    K: Resource + Clone + std::fmt::Debug + DeserializeOwned + Send + 'static,
{
    let mut versions = std::pin::pin!(daemon::watch::versions(api, name));
    let mut until = None;
    loop {
        let version = tokio::select! {
            version = versions.next() => version,
            () = sleep_until(until) => return,
        };
        match version {
            Some(Ok(now)) => match holds(now.as_ref()) {
                Holds::Yes => until = None,
                Holds::Until(end) => until = Some(end),
                Holds::No => return,
            },
            // An error of the watch says nothing about the object.
            Some(Err(error)) => tracing::debug!(name, %error, "watch of a VMI or its pod was interrupted"),
            None => return,
        }
    }
}

/// Resolves at a time of day, or never.
async fn sleep_until(time: Option<Timestamp>) {
    match time {
        Some(time) => {
            let left = time.duration_since(Timestamp::now());
            tokio::time::sleep(left.try_into().unwrap_or_default()).await;
        }
        None => std::future::pending().await,
    }
}

/// Returns true while the VMI is the same one and on the same node.
fn runs_on(then: &VirtualMachineInstance, now: Option<&VirtualMachineInstance>) -> bool {
    let node = |vmi: &VirtualMachineInstance| vmi.status.as_ref().and_then(|status| status.node_name.clone());
    now.is_some_and(|now| {
        let ended = now.status.as_ref().and_then(|status| status.phase.as_ref()).is_some_and(VmiPhase::is_final);
        now.metadata.uid == then.metadata.uid && !ended && node(now) == node(then)
    })
}

#[cfg(test)]
mod tests {
    use std::{convert::Infallible, time::Duration};

    use axum::body::Body;
    use serde_json::{Value, json};
    use tokio::{sync::mpsc, time::timeout};

    use super::*;

    fn object(uid: &str, node: &str, phase: &str) -> Value {
        json!({
            "apiVersion": "kubevirt.io/v1", "kind": "VirtualMachineInstance",
            "metadata": {"name": "vmi", "namespace": "ns", "uid": uid, "resourceVersion": "7"},
            "spec": {"domain": {"devices": {}}}, "status": {"phase": phase, "nodeName": node},
        })
    }

    fn vmi(uid: &str, node: &str, phase: &str) -> VirtualMachineInstance {
        serde_json::from_value(object(uid, node, phase)).unwrap()
    }

    #[test]
    fn vmi_is_present_until_it_ends_moves_or_is_replaced() {
        let then = vmi("u1", "n1", "Running");
        for (uid, node, phase, there) in [
            ("u1", "n1", "Running", true),
            // Its node does not answer, which says nothing about the VMI.
            ("u1", "n1", "Unknown", true),
            ("u1", "n1", "Succeeded", false),
            ("u1", "n1", "Failed", false),
            ("u1", "n2", "Running", false),
            ("u2", "n1", "Running", false),
        ] {
            assert_eq!(runs_on(&then, Some(&vmi(uid, node, phase))), there, "{uid} {node} {phase}");
        }
        assert!(!runs_on(&then, None));
    }

    fn pod(phase: &str, deleted: Value) -> Value {
        json!({
            "apiVersion": "v1", "kind": "Pod",
            "metadata": {
                "name": "launcher", "namespace": "ns", "uid": "p1", "resourceVersion": "7", "deletionTimestamp": deleted,
            },
            "spec": {"containers": []}, "status": {"phase": phase, "podIP": "10.1.0.5"},
        })
    }

    fn target() -> LauncherAddress {
        LauncherAddress { pod: "launcher".into(), uid: "p1".into(), address: "10.1.0.5".parse().unwrap() }
    }

    /// An API server with one VMI and its pod. Events of the channels go to every watch of them; the receiver yields the kind
    /// of each watch.
    fn server() -> (Client, [mpsc::UnboundedSender<Value>; 2], mpsc::UnboundedReceiver<&'static str>) {
        let (of_vmi, vmi_source) = mpsc::unbounded_channel::<Value>();
        let (of_pod, pod_source) = mpsc::unbounded_channel::<Value>();
        let (opened, watches) = mpsc::unbounded_channel();
        let sources = [vmi_source, pod_source].map(|source| Arc::new(tokio::sync::Mutex::new(source)));
        let service = tower::service_fn(move |request: http::Request<kube::client::Body>| {
            let of_pod = request.uri().path().ends_with("/pods");
            let (source, opened) = (sources[usize::from(of_pod)].clone(), opened.clone());
            async move {
                let query = request.uri().query().unwrap_or_default();
                assert!(query.contains("metadata.name"), "one object, not all: {query}");
                let body = if query.contains("watch=true") {
                    opened.send(if of_pod { "pod" } else { "vmi" }).unwrap();
                    Body::from_stream(futures::stream::unfold(source, |source| async move {
                        let event = source.lock().await.recv().await?;
                        Some((Ok::<_, Infallible>(format!("{event}\n")), source))
                    }))
                } else {
                    let list = if of_pod {
                        json!({
                            "apiVersion": "v1", "kind": "PodList", "metadata": {"resourceVersion": "7"},
                            "items": [pod("Running", Value::Null)],
                        })
                    } else {
                        json!({
                            "apiVersion": "kubevirt.io/v1", "kind": "VirtualMachineInstanceList",
                            "metadata": {"resourceVersion": "7"}, "items": [object("u1", "n1", "Running")],
                        })
                    };
                    Body::from(list.to_string())
                };
                Ok::<_, Infallible>(http::Response::new(body))
            }
        });
        (Client::new(service, "default"), [of_vmi, of_pod], watches)
    }

    #[tokio::test]
    async fn one_watch_serves_all_ports_of_a_vmi_and_ends_with_the_last() {
        let (client, [events, _pods], mut watches) = server();
        let watches_of_vmis = VmiWatches::default();
        let then = vmi("u1", "n1", "Running");
        let (first, second) =
            (watches_of_vmis.watch(&client, &then, &target()), watches_of_vmis.watch(&client, &then, &target()));
        let mut opened = [watches.recv().await.unwrap(), watches.recv().await.unwrap()];
        opened.sort_unstable();
        assert_eq!(opened, ["pod", "vmi"]);
        events.send(json!({"type": "MODIFIED", "object": object("u1", "n1", "Running")})).unwrap();
        assert!(timeout(Duration::from_millis(100), first.gone()).await.is_err());
        events.send(json!({"type": "MODIFIED", "object": object("u1", "n1", "Failed")})).unwrap();
        timeout(Duration::from_secs(5), first.gone()).await.unwrap();
        timeout(Duration::from_secs(5), second.gone()).await.unwrap();
        assert!(watches.try_recv().is_err(), "a second watch");
        drop((first, second));
        assert!(watches_of_vmis.watched.lock().unwrap().values().all(|known| known.strong_count() == 0));
    }

    #[tokio::test]
    async fn ports_are_forwarded_until_the_pod_ends_or_its_grace_period_is_over() {
        let later = (Timestamp::now() + Duration::from_secs(600)).to_string();
        let soon = (Timestamp::now() + Duration::from_millis(1500)).to_string();
        for (last, kind) in [
            (pod("Succeeded", Value::Null), "MODIFIED"),
            (pod("Running", json!(later)), "DELETED"),
            // No further events, as for a pod on a lost node.
            (pod("Running", json!(soon)), "MODIFIED"),
        ] {
            let (client, [_vmis, events], _watches) = server();
            let watch = VmiWatches::default().watch(&client, &vmi("u1", "n1", "Running"), &target());
            events.send(json!({"type": "MODIFIED", "object": pod("Running", json!(later))})).unwrap();
            assert!(timeout(Duration::from_millis(100), watch.gone()).await.is_err(), "{last}");
            events.send(json!({"type": kind, "object": last})).unwrap();
            timeout(Duration::from_secs(5), watch.gone()).await.unwrap();
        }
    }
}
