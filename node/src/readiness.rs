//! Whether machines can start on the node, as far as its devices go.
//!
//! kubelet takes a device plugin at once, but tells the API server of the devices with its next report on the node: ten
//! seconds later at worst. A pod that asks for a device before that cannot be scheduled, and the scheduler looks at it
//! again late. So the agent is not ready until the node shows what its plugins offer; then neither are the DaemonSet
//! and the installation.
//!
//! ```text
//!      kubelet knows all plugins          the node shows them, or two minutes are over
//!   Offered ────────────────────▶ Known ──────────────────────────────────────────────▶ Ready
//!      ▲                            │ kubelet went away                                   │ kubelet went away
//!      └────────────────────────────┴─────────────────────────────────────────────────────┘
//! ```
//!
//! The node is watched in the state in the middle only, so that the agents of a large cluster cost the API server
//! nothing once they are ready. A device that comes or goes while the agent is ready does not take that back: it is
//! kubelet's to report, and running machines have what they need.

use std::time::Duration;

use futures::StreamExt;
use k8s_openapi::api::core::v1::Node;
use kube::{
    Api, Client,
    api::{ApiResource, DynamicObject},
    runtime::{WatchStreamExt, watcher},
};
use process::ops::Readiness;
use serde_json::Value;
use tokio::{sync::watch, time::timeout};
use tokio_util::sync::CancellationToken;

use crate::device_plugin::{self, Offers, Registration};

/// Name of the condition.
pub const GATE: &str = "devices";
/// Longest wait for the node to show its devices. A kubelet that reports that rarely is not waited for: machines that
/// run already, on a node whose agent was replaced, are served by then.
const LIMIT: Duration = Duration::from_secs(120);

/// How far the devices have come.
#[derive(Debug, PartialEq, Eq)]
enum Standing {
    /// kubelet does not know all plugins, for this reason.
    Offered(String),
    /// The node does not show all devices, for this reason.
    Known(String),
    /// Pods can ask for all there is.
    Shown,
}

/// Judges the offers by what the node shows as allocatable.
fn decide(offers: &Offers, allocatable: &Value) -> Standing {
    if offers.is_empty() {
        return Standing::Offered("no plugin is offered yet".to_owned());
    }
    let unknown: Vec<String> = offers
        .iter()
        .filter_map(|(resource, offer)| match (&offer.registration, offer.healthy) {
            (Registration::Failed(why), _) => Some(format!("the plugin of {resource} is not registered: {why}")),
            (Registration::Awaited, _) => Some(format!("kubelet does not know the plugin of {resource} yet")),
            (Registration::Done, None) => Some(format!("the device of {resource} has not been looked for yet")),
            (Registration::Done, Some(_)) => None,
        })
        .collect();
    if !unknown.is_empty() {
        return Standing::Offered(unknown.join("; "));
    }
    // What is not on the node is offered with no unit that can be used, and the node never shows any.
    let usable = offers.iter().filter(|(_, offer)| offer.healthy == Some(true)).map(|(resource, _)| resource.as_str());
    let hidden: Vec<&str> = usable.filter(|resource| !is_some(&allocatable[*resource])).collect();
    if hidden.is_empty() {
        return Standing::Shown;
    }
    Standing::Known(format!("the node does not show {} yet", hidden.join(", ")))
}

/// Whether a quantity is there and not zero, which kubelet always writes in the same way.
fn is_some(quantity: &Value) -> bool {
    quantity.as_str().is_some_and(|quantity| quantity != "0")
}

/// Keeps the condition [`GATE`] up to date until `stop`.
pub async fn follow(
    client: Client,
    node: String,
    mut offers: watch::Receiver<Offers>,
    readiness: Readiness,
    stop: CancellationToken,
) {
    let nodes = Api::<DynamicObject>::all_with(client, &ApiResource::erase::<Node>(&()));
    let rounds = async {
        loop {
            known(&mut offers, &readiness).await;
            match timeout(LIMIT, shown(&nodes, &node, &mut offers, &readiness)).await {
                Ok(true) => tracing::info!("the node shows its devices"),
                Ok(false) => continue,
                Err(_) => tracing::warn!(limit = ?LIMIT, "the node does not show its devices, which is not waited for"),
            }
            readiness.set(GATE, true);
            while device_plugin::all_known(&offers.borrow_and_update()) {
                device_plugin::changed(&mut offers).await;
            }
        }
    };
    tokio::select! {
        () = stop.cancelled() => {}
        () = rounds => {}
    }
}

/// Waits until kubelet knows all plugins.
async fn known(offers: &mut watch::Receiver<Offers>, readiness: &Readiness) {
    loop {
        let standing = decide(&offers.borrow_and_update(), &Value::Null);
        let Standing::Offered(why) = standing else { return };
        readiness.hold_back(GATE, why);
        device_plugin::changed(offers).await;
    }
}

/// Waits until the node shows all devices (true), or kubelet does not know all plugins any more.
async fn shown(
    nodes: &Api<DynamicObject>,
    node: &str,
    offers: &mut watch::Receiver<Offers>,
    readiness: &Readiness,
) -> bool {
    let mut versions = std::pin::pin!(watcher::watch_object(nodes.clone(), node).default_backoff());
    let mut allocatable = Value::Null;
    loop {
        let standing = decide(&offers.borrow_and_update(), &allocatable);
        match standing {
            Standing::Offered(_) => return false,
            Standing::Known(why) => readiness.hold_back(GATE, why),
            Standing::Shown => return true,
        }
        tokio::select! {
            () = device_plugin::changed(offers) => {}
            version = versions.next() => match version {
                Some(Ok(Some(mut node))) => {
                    allocatable = node.data.pointer_mut("/status/allocatable").map(Value::take).unwrap_or_default();
                }
                Some(Ok(None)) => allocatable = Value::Null,
                Some(Err(error)) => tracing::warn!(%error, "watch of the node was interrupted"),
                // It never ends by itself; should it, the time limit does.
                None => std::future::pending().await,
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::device_plugin::Offer;

    const KVM: &str = "devices.kubevirt.io/kvm";
    const TUN: &str = "devices.kubevirt.io/tun";

    fn offers(all: &[(&str, Registration, Option<bool>)]) -> Offers {
        let offer = |registration: &Registration, healthy| Offer { registration: registration.clone(), healthy };
        all.iter().map(|(name, registration, healthy)| ((*name).to_owned(), offer(registration, *healthy))).collect()
    }

    #[test]
    fn devices_are_ready_when_the_node_shows_those_that_are_there() {
        use Registration::{Awaited, Done, Failed};
        use Standing::{Known, Offered, Shown};
        let unknown = |why: &str| Offered(why.to_owned());
        let hidden = |resources: &str| Known(format!("the node does not show {resources} yet"));
        let refused = Failed("kubelet refused it".to_owned());
        let rows = [
            (offers(&[]), json!({}), unknown("no plugin is offered yet")),
            (
                offers(&[(TUN, Awaited, Some(true)), (KVM, Done, Some(true))]),
                json!({KVM: "1k", TUN: "1k"}),
                unknown("kubelet does not know the plugin of devices.kubevirt.io/tun yet"),
            ),
            (
                offers(&[(TUN, refused, Some(true)), (KVM, Awaited, None)]),
                json!(null),
                unknown(
                    "kubelet does not know the plugin of devices.kubevirt.io/kvm yet; \
                     the plugin of devices.kubevirt.io/tun is not registered: kubelet refused it",
                ),
            ),
            (
                offers(&[(TUN, Done, None)]),
                json!({TUN: "1k"}),
                unknown("the device of devices.kubevirt.io/tun has not been looked for yet"),
            ),
            (offers(&[(TUN, Done, Some(true))]), json!({TUN: "0"}), hidden(TUN)),
            (
                offers(&[(TUN, Done, Some(true)), (KVM, Done, Some(true))]),
                json!(null),
                hidden("devices.kubevirt.io/kvm, devices.kubevirt.io/tun"),
            ),
            (offers(&[(TUN, Done, Some(true)), (KVM, Done, Some(true))]), json!({KVM: "1k", TUN: "1k"}), Shown),
            // A node without hardware virtualization never shows it.
            (offers(&[(TUN, Done, Some(true)), (KVM, Done, Some(false))]), json!({KVM: "0", TUN: "1k"}), Shown),
        ];
        for (offers, allocatable, standing) in rows {
            assert_eq!(decide(&offers, &allocatable), standing, "{offers:?} {allocatable}");
        }
    }

    /// An API server whose node shows no device when it is listed, and all of them with the first watch.
    fn api_server() -> Client {
        let service = tower::service_fn(|call: http::Request<kube::client::Body>| async move {
            let query = call.uri().query().unwrap_or_default().to_owned();
            assert!(query.contains("metadata.name%3Dnode-1"), "only the own node is asked for: {query}");
            let node = |version: &str, tun: &str| {
                json!({
                    "apiVersion": "v1", "kind": "Node", "metadata": {"name": "node-1", "resourceVersion": version},
                    "spec": {}, "status": {"allocatable": {TUN: tun}},
                })
            };
            let body = if !query.contains("watch=true") {
                let items = [node("1", "0")];
                json!({"apiVersion": "v1", "kind": "NodeList", "metadata": {"resourceVersion": "1"}, "items": items})
            } else if query.contains("resourceVersion=1") {
                json!({"type": "MODIFIED", "object": node("2", "1k")})
            } else {
                std::future::pending().await
            };
            let body = kube::client::Body::from(format!("{body}\n").into_bytes());
            Ok::<_, std::convert::Infallible>(http::Response::new(body))
        });
        Client::new(service, "default")
    }

    async fn until(readiness: &Readiness, missing: &[&str]) {
        for _ in 0..500 {
            if readiness.missing() == missing {
                return;
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        panic!("{:?} instead of {missing:?}", readiness.missing());
    }

    #[tokio::test]
    async fn agent_is_ready_when_the_node_shows_its_devices_and_not_while_kubelet_is_away() {
        let (plugins, offered) = watch::channel(Offers::new());
        let (readiness, stop) = (Readiness::new(), CancellationToken::new());
        readiness.set(GATE, false);
        let followed = follow(api_server(), "node-1".to_owned(), offered, readiness.clone(), stop.clone());
        let running = tokio::spawn(followed);
        until(&readiness, &["devices (no plugin is offered yet)"]).await;
        plugins.send_replace(offers(&[(TUN, Registration::Done, Some(true))]));
        until(&readiness, &[]).await;
        // Another device comes, and this one goes: no reason to take readiness back.
        plugins.send_replace(offers(&[(TUN, Registration::Done, Some(false)), (KVM, Registration::Done, Some(true))]));
        tokio::time::sleep(Duration::from_millis(50)).await;
        assert!(readiness.missing().is_empty());
        plugins.send_replace(offers(&[(TUN, Registration::Awaited, Some(true))]));
        until(&readiness, &["devices (kubelet does not know the plugin of devices.kubevirt.io/tun yet)"]).await;
        plugins.send_replace(offers(&[(TUN, Registration::Done, Some(true))]));
        until(&readiness, &[]).await;
        stop.cancel();
        timeout(Duration::from_secs(5), running).await.unwrap().unwrap();
    }
}
