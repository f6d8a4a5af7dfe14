//! Whether machines with forwarded ports still run.
//!
//! A guest that is switched off closes no connections: nothing comes from its address any more, which looks like a guest
//! that has nothing to say. A paused one is as silent, so that silence proves nothing. The machine's object does: it is
//! watched while ports of the machine are forwarded, once for all of them.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, PoisonError, Weak},
};

use api::VirtualMachineInstance;
use futures::StreamExt;
use kube::{
    Api, Client,
    runtime::{WatchStreamExt, watcher::watch_object},
};
use process::CancellationToken;
use tokio_util::task::AbortOnDropHandle;

use crate::instance;

/// The machines that are watched now, by UID.
#[derive(Clone, Default)]
pub struct Presence {
    watched: Arc<Mutex<HashMap<String, Weak<Watched>>>>,
}

struct Watched {
    gone: CancellationToken,
    /// The watch ends with the last forwarded port.
    _watch: AbortOnDropHandle<()>,
}

/// Interest in a machine. It is watched until the last of these is dropped.
pub struct Interest(Arc<Watched>);

impl Presence {
    /// Watches a machine as it was just read.
    pub fn of(&self, client: &Client, vmi: &VirtualMachineInstance) -> Interest {
        let uid = vmi.metadata.uid.clone().unwrap_or_default();
        let mut watched = self.watched.lock().unwrap_or_else(PoisonError::into_inner);
        // One that has stopped may be followed by another on another node, which bears the same UID.
        let known = watched.get(&uid).and_then(Weak::upgrade).filter(|known| !known.gone.is_cancelled());
        if let Some(known) = known {
            return Interest(known);
        }
        let gone = CancellationToken::new();
        let watch = watch(client.clone(), vmi.clone(), gone.clone());
        let fresh = Arc::new(Watched { gone, _watch: AbortOnDropHandle::new(tokio::spawn(watch)) });
        watched.retain(|_, known| known.strong_count() > 0);
        watched.insert(uid, Arc::downgrade(&fresh));
        Interest(fresh)
    }
}

impl Interest {
    /// Resolves when the machine no longer runs where it ran.
    pub async fn gone(&self) {
        self.0.gone.cancelled().await;
    }
}

async fn watch(client: Client, vmi: VirtualMachineInstance, gone: CancellationToken) {
    let name = vmi.metadata.name.clone().unwrap_or_default();
    let namespace = vmi.metadata.namespace.clone().unwrap_or_default();
    let api = Api::<VirtualMachineInstance>::namespaced(client, &namespace);
    let mut versions = std::pin::pin!(watch_object(api, &name).default_backoff());
    while let Some(version) = versions.next().await {
        match version {
            Ok(now) if runs_on(&vmi, now.as_ref()) => {}
            Ok(_) => {
                gone.cancel();
                return;
            }
            // Who cannot be asked may have lost touch with us only.
            Err(error) => tracing::debug!(namespace, name, %error, "watch of a machine was interrupted"),
        }
    }
}

/// Whether the machine is still the one that it was, in the same place.
fn runs_on(then: &VirtualMachineInstance, now: Option<&VirtualMachineInstance>) -> bool {
    let node = |vmi: &VirtualMachineInstance| vmi.status.as_ref().and_then(|status| status.node_name.clone());
    now.is_some_and(|now| {
        now.metadata.uid == then.metadata.uid && !instance::phase(now).is_final() && node(now) == node(then)
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
    fn machine_is_there_until_it_ends_moves_or_is_another() {
        let then = vmi("u1", "n1", "Running");
        for (uid, node, phase, there) in [
            ("u1", "n1", "Running", true),
            // Its node cannot be asked, which says nothing about the machine.
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

    /// An API server with one machine; what is sent to the channel is sent to every watch of it, which are counted.
    fn server() -> (Client, mpsc::UnboundedSender<Value>, mpsc::UnboundedReceiver<()>) {
        let (events, source) = mpsc::unbounded_channel::<Value>();
        let (opened, watches) = mpsc::unbounded_channel();
        let source = Arc::new(tokio::sync::Mutex::new(source));
        let service = tower::service_fn(move |request: http::Request<kube::client::Body>| {
            let (source, opened) = (source.clone(), opened.clone());
            async move {
                let query = request.uri().query().unwrap_or_default();
                assert!(query.contains("metadata.name"), "one machine, not all: {query}");
                let body = if query.contains("watch=true") {
                    opened.send(()).unwrap();
                    Body::from_stream(futures::stream::unfold(source, |source| async move {
                        let event = source.lock().await.recv().await?;
                        Some((Ok::<_, Infallible>(format!("{event}\n")), source))
                    }))
                } else {
                    let items = [object("u1", "n1", "Running")];
                    let list = json!({
                        "apiVersion": "kubevirt.io/v1", "kind": "VirtualMachineInstanceList",
                        "metadata": {"resourceVersion": "7"}, "items": items,
                    });
                    Body::from(list.to_string())
                };
                Ok::<_, Infallible>(http::Response::new(body))
            }
        });
        (Client::new(service, "default"), events, watches)
    }

    #[tokio::test]
    async fn one_watch_serves_all_ports_of_a_machine_and_ends_with_the_last() {
        let (client, events, mut watches) = server();
        let presence = Presence::default();
        let then = vmi("u1", "n1", "Running");
        let (first, second) = (presence.of(&client, &then), presence.of(&client, &then));
        watches.recv().await.unwrap();
        events.send(json!({"type": "MODIFIED", "object": object("u1", "n1", "Running")})).unwrap();
        assert!(timeout(Duration::from_millis(100), first.gone()).await.is_err());
        events.send(json!({"type": "MODIFIED", "object": object("u1", "n1", "Failed")})).unwrap();
        timeout(Duration::from_secs(5), first.gone()).await.unwrap();
        timeout(Duration::from_secs(5), second.gone()).await.unwrap();
        assert!(watches.try_recv().is_err(), "a second watch");
        drop((first, second));
        assert!(presence.watched.lock().unwrap().values().all(|known| known.strong_count() == 0));
    }
}
