//! Readiness: VMIs can start on this node as far as devices are concerned.
//!
//! kubelet registers a device plugin at once, but reports the devices to the API server with its next node status, up to ten
//! seconds later. A pod that requests a device before that is unschedulable, and the scheduler retries late. virt-handler is
//! therefore not ready until the node shows the devices of its plugins; neither are then the DaemonSet and the installation.
//!
//! ```text
//!      all plugins are registered         the node shows them, or two minutes are over
//!   Offered ────────────────────▶ Known ──────────────────────────────────────────────▶ Ready
//!      ▲                            │ kubelet restarts                                    │ kubelet restarts
//!      └────────────────────────────┴─────────────────────────────────────────────────────┘
//! ```
//!
//! The whole node is watched in the middle state only, so that ready virt-handlers of a large cluster cause no load on the API
//! server. A device that is plugged or unplugged later does not change the readiness: kubelet reports it, and running VMIs
//! have their devices.

use std::time::Duration;

use daemon::ops::Readiness;
use futures::StreamExt;
use k8s_openapi::api::core::v1::Node;
use kube::{
    Api, Client,
    api::{ApiResource, DynamicObject},
};
use serde_json::Value;
use tokio::{sync::watch, time::timeout};
use tokio_util::sync::CancellationToken;

use crate::devices::plugin::{self, Offers, Registration};

/// Name of the condition.
pub(crate) const GATE: &str = "devices";
/// Longest wait for the node to show its devices. VMIs that already run are served meanwhile.
const LIMIT: Duration = Duration::from_secs(120);

/// State of the devices.
#[derive(Debug, PartialEq, Eq)]
enum DeviceState {
    /// Not all plugins are registered, for this reason.
    Offered(String),
    /// The node does not show all devices, for this reason.
    Known(String),
    /// The node shows all devices.
    Shown,
}

/// Compares the offers with the allocatable resources of the node.
fn decide(offers: &Offers, allocatable: &Value) -> DeviceState {
    if offers.is_empty() {
        return DeviceState::Offered("no plugin is offered yet".to_owned());
    }
    let unknown: Vec<String> = offers
        .iter()
        .filter_map(|(resource, offer)| match (&offer.registration, offer.healthy) {
            (Registration::Failed(why), _) => Some(format!("the plugin of {resource} is not registered: {why}")),
            (Registration::Awaited, _) => Some(format!("kubelet has not registered the plugin of {resource} yet")),
            (Registration::Done, None) => Some(format!("the device of {resource} has not been checked yet")),
            (Registration::Done, Some(_)) => None,
        })
        .collect();
    if !unknown.is_empty() {
        return DeviceState::Offered(unknown.join("; "));
    }
    // A missing device has no usable unit, and the node never shows it.
    let usable = offers.iter().filter(|(_, offer)| offer.healthy == Some(true)).map(|(resource, _)| resource.as_str());
    let hidden: Vec<&str> = usable.filter(|resource| !is_some(&allocatable[*resource])).collect();
    if hidden.is_empty() {
        return DeviceState::Shown;
    }
    DeviceState::Known(format!("the node does not show {} yet", hidden.join(", ")))
}

/// Returns true if a quantity exists and is not zero. kubelet always writes zero as `0`.
fn is_some(quantity: &Value) -> bool {
    quantity.as_str().is_some_and(|quantity| quantity != "0")
}

/// Keeps the condition [`GATE`] up to date until `stop`.
pub(crate) async fn follow(
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
                Err(_) => tracing::warn!(limit = ?LIMIT, "the node does not show its devices in time"),
            }
            readiness.set(GATE, true);
            while plugin::all_known(&offers.borrow_and_update()) {
                plugin::changed(&mut offers).await;
            }
        }
    };
    tokio::select! {
        () = stop.cancelled() => {}
        () = rounds => {}
    }
}

/// Waits until all plugins are registered.
async fn known(offers: &mut watch::Receiver<Offers>, readiness: &Readiness) {
    loop {
        let state = decide(&offers.borrow_and_update(), &Value::Null);
        let DeviceState::Offered(why) = state else { return };
        readiness.hold_back(GATE, why);
        plugin::changed(offers).await;
    }
}

/// Returns true once the node shows all devices, false if a plugin is no longer registered.
async fn shown(
    nodes: &Api<DynamicObject>,
    node: &str,
    offers: &mut watch::Receiver<Offers>,
    readiness: &Readiness,
) -> bool {
    let mut versions = std::pin::pin!(daemon::watch::versions(nodes.clone(), node));
    let mut allocatable = Value::Null;
    loop {
        let state = decide(&offers.borrow_and_update(), &allocatable);
        match state {
            DeviceState::Offered(_) => return false,
            DeviceState::Known(why) => readiness.hold_back(GATE, why),
            DeviceState::Shown => return true,
        }
        tokio::select! {
            () = plugin::changed(offers) => {}
            version = versions.next() => match version {
                Some(Ok(Some(mut node))) => {
                    allocatable = node.data.pointer_mut("/status/allocatable").map(Value::take).unwrap_or_default();
                }
                Some(Ok(None)) => allocatable = Value::Null,
                Some(Err(error)) => tracing::warn!(%error, "watch of the node was interrupted"),
                // The watch never ends by itself; the time limit covers the case.
                None => std::future::pending().await,
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::devices::plugin::offers::Offer;

    const KVM: &str = "devices.kubevirt.io/kvm";
    const TUN: &str = "devices.kubevirt.io/tun";

    fn offers(all: &[(&str, Registration, Option<bool>)]) -> Offers {
        let offer = |registration: &Registration, healthy| Offer { registration: registration.clone(), healthy };
        all.iter().map(|(name, registration, healthy)| ((*name).to_owned(), offer(registration, *healthy))).collect()
    }

    #[test]
    fn devices_are_ready_when_the_node_shows_the_existing_ones() {
        use DeviceState::{Known, Offered, Shown};
        use Registration::{Awaited, Done, Failed};
        let unknown = |why: &str| Offered(why.to_owned());
        let hidden = |resources: &str| Known(format!("the node does not show {resources} yet"));
        let refused = Failed("kubelet refused it".to_owned());
        let rows = [
            (offers(&[]), json!({}), unknown("no plugin is offered yet")),
            (
                offers(&[(TUN, Awaited, Some(true)), (KVM, Done, Some(true))]),
                json!({KVM: "1k", TUN: "1k"}),
                unknown("kubelet has not registered the plugin of devices.kubevirt.io/tun yet"),
            ),
            (
                offers(&[(TUN, refused, Some(true)), (KVM, Awaited, None)]),
                json!(null),
                unknown(
                    "kubelet has not registered the plugin of devices.kubevirt.io/kvm yet; \
                     the plugin of devices.kubevirt.io/tun is not registered: kubelet refused it",
                ),
            ),
            (
                offers(&[(TUN, Done, None)]),
                json!({TUN: "1k"}),
                unknown("the device of devices.kubevirt.io/tun has not been checked yet"),
            ),
            (offers(&[(TUN, Done, Some(true))]), json!({TUN: "0"}), hidden(TUN)),
            (
                offers(&[(TUN, Done, Some(true)), (KVM, Done, Some(true))]),
                json!(null),
                hidden("devices.kubevirt.io/kvm, devices.kubevirt.io/tun"),
            ),
            (offers(&[(TUN, Done, Some(true)), (KVM, Done, Some(true))]), json!({KVM: "1k", TUN: "1k"}), Shown),
            // Without hardware virtualization the node never shows kvm.
            (offers(&[(TUN, Done, Some(true)), (KVM, Done, Some(false))]), json!({KVM: "0", TUN: "1k"}), Shown),
        ];
        for (offers, allocatable, state) in rows {
            assert_eq!(decide(&offers, &allocatable), state, "{offers:?} {allocatable}");
        }
    }

    /// An API server whose node shows no device in the list, and all of them in the first watch.
    fn api_server() -> Client {
        let service = tower::service_fn(|call: http::Request<kube::client::Body>| async move {
            let query = call.uri().query().unwrap_or_default().to_owned();
            assert!(query.contains("metadata.name%3Dnode-1"), "only the own node is requested: {query}");
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
    async fn virt_handler_is_ready_while_the_node_shows_its_devices_and_kubelet_is_available() {
        let (plugins, offered) = watch::channel(Offers::new());
        let (readiness, stop) = (Readiness::new(), CancellationToken::new());
        readiness.set(GATE, false);
        let followed = follow(api_server(), "node-1".to_owned(), offered, readiness.clone(), stop.clone());
        let running = tokio::spawn(followed);
        until(&readiness, &["devices (no plugin is offered yet)"]).await;
        plugins.send_replace(offers(&[(TUN, Registration::Done, Some(true))]));
        until(&readiness, &[]).await;
        // Another device appears, and this one disappears: readiness stays.
        plugins.send_replace(offers(&[(TUN, Registration::Done, Some(false)), (KVM, Registration::Done, Some(true))]));
        tokio::time::sleep(Duration::from_millis(50)).await;
        assert!(readiness.missing().is_empty());
        plugins.send_replace(offers(&[(TUN, Registration::Awaited, Some(true))]));
        until(&readiness, &["devices (kubelet has not registered the plugin of devices.kubevirt.io/tun yet)"]).await;
        plugins.send_replace(offers(&[(TUN, Registration::Done, Some(true))]));
        until(&readiness, &[]).await;
        stop.cancel();
        timeout(Duration::from_secs(5), running).await.unwrap().unwrap();
    }
}
