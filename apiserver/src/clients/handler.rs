//! Calls and streams of virt-handler.
//!
//! The pod of virt-handler is looked up for each call, since it changes with each update of the DaemonSet.

use std::{
    net::{IpAddr, SocketAddr},
    sync::Arc,
    time::Duration,
};

use axum::{body::Body, response::Response};
use bytes::Bytes;
use daemon::quota::HOLDER_HEADER;
use http::{HeaderValue, Method, Request, header};
use http_body_util::Limited;
use hyper::upgrade::Upgraded;
use hyper_util::rt::TokioIo;
use k8s_openapi::api::core::v1::Pod;
use kube::{Api, Client, api::ListParams};
use serde_json::Value;
use tokio::time::timeout;
use tokio_tungstenite::{WebSocketStream, tungstenite::protocol::Role};

use super::{
    address,
    component::{Component, ComponentClient, refused_stream},
    error::ComponentError,
    websocket,
};

/// Port of virt-handler's server for consoles and lifecycle.
const PORT: u16 = 8186;
/// Longest time for a call, and for opening a stream. Longer than that of virt-handler (20 s), whose answer has the reason; a
/// lost node must not hold back the end of a snapshot.
const CALL_TIMEOUT: Duration = Duration::from_secs(25);
/// Longest time for a freeze, whose guest first writes its caches. Longer than that of virt-handler (50 s), and shorter than the
/// minute after which kube-apiserver gives up a request.
const FREEZE_TIMEOUT: Duration = Duration::from_secs(55);
/// Largest screenshot: 8K in 32 bit is 127 MiB without compression; a desktop as PNG stays far below this.
const MAX_SCREENSHOT: usize = 64 << 20;
/// Largest document: lists of a guest's users and file systems.
const MAX_DOCUMENT: usize = 4 << 20;
/// Most pods considered on one node.
const MAX_PODS: u32 = 16;

/// A VMI on a node.
#[derive(Clone, Copy, Debug)]
pub(crate) struct VmiOnNode<'a> {
    /// Node of the VMI.
    pub node: &'a str,
    /// Namespace of the VMI.
    pub namespace: &'a str,
    /// Name of the VMI.
    pub name: &'a str,
}

impl VmiOnNode<'_> {
    fn path(&self, action: &str) -> String {
        format!("/v1/namespaces/{}/virtualmachineinstances/{}/{action}", self.namespace, self.name)
    }
}

/// A WebSocket to virt-handler.
pub(crate) type HandlerStream = WebSocketStream<TokioIo<Upgraded>>;

/// Calls virt-handler.
pub(crate) struct HandlerClient {
    pods: Api<Pod>,
    components: Arc<ComponentClient>,
}

impl HandlerClient {
    /// Returns a client for the pods of virt-handler in `namespace`.
    #[must_use]
    pub(crate) fn new(client: Client, namespace: &str, components: Arc<ComponentClient>) -> Self {
        Self { pods: Api::namespaced(client, namespace), components }
    }

    /// Requests an action that has no answer (PUT). `body` contains its options, or nothing.
    pub(crate) async fn call(&self, vmi: VmiOnNode<'_>, action: &str, body: Bytes) -> Result<(), ComponentError> {
        bounded(vmi, action, limit(action), async {
            let component = self.find(vmi.node).await?;
            let request = request(Method::PUT, &vmi.path(action), body)?;
            self.components.call(&component, request, MAX_DOCUMENT).await.map(drop)
        })
        .await
    }

    /// Reads a document (GET).
    pub(crate) async fn document(&self, vmi: VmiOnNode<'_>, action: &str) -> Result<Value, ComponentError> {
        bounded(vmi, action, CALL_TIMEOUT, async {
            let component = self.find(vmi.node).await?;
            let request = request(Method::GET, &vmi.path(action), Bytes::new())?;
            let text = self.components.call(&component, request, MAX_DOCUMENT).await?;
            serde_json::from_slice(&text)
                .map_err(|source| ComponentError::Document { component: component.name.clone(), source })
        })
        .await
    }

    /// Reads a screenshot (GET) and forwards it as it arrives, up to a limit.
    pub(crate) async fn screenshot(&self, vmi: VmiOnNode<'_>, action: &str) -> Result<Response, ComponentError> {
        bounded(vmi, action, CALL_TIMEOUT, async {
            let component = self.find(vmi.node).await?;
            let request = request(Method::GET, &vmi.path(action), Bytes::new())?;
            let body = self.components.fetch(&component, request).await?;
            let mut answer = Response::new(Body::new(Limited::new(body, MAX_SCREENSHOT)));
            // Set here, not by virt-handler: a browser shows nothing but a picture in the name of this server.
            answer.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static("image/png"));
            Ok(answer)
        })
        .await
    }

    /// Opens a stream that counts for the user `holder`. `action` may contain a query.
    pub(crate) async fn open(
        &self,
        vmi: VmiOnNode<'_>,
        action: &str,
        holder: &str,
    ) -> Result<HandlerStream, ComponentError> {
        bounded(vmi, action, CALL_TIMEOUT, async {
            let component = self.find(vmi.node).await?;
            let (mut request, accept) = websocket::request(&component.server_name, &vmi.path(action))?;
            let holder = HeaderValue::from_str(holder).map_err(http::Error::from)?;
            request.headers_mut().insert(HOLDER_HEADER, holder);
            let mut response = self.components.open(&component, request).await?;
            if !websocket::is_accepted(response.status(), response.headers(), &accept) {
                return Err(refused_stream(response.status(), response.into_body()).await);
            }
            let upgraded = hyper::upgrade::on(&mut response)
                .await
                .map_err(|source| ComponentError::Http { component: component.name.clone(), source })?;
            let stream = TokioIo::new(upgraded);
            Ok(WebSocketStream::from_raw_socket(stream, Role::Client, Some(websocket::config())).await)
        })
        .await
    }

    /// Finds the virt-handler of a node.
    async fn find(&self, node: &str) -> Result<Component, ComponentError> {
        let selector = ListParams::default()
            .labels("kubevirt.io=virt-handler")
            .fields(&format!("spec.nodeName={node}"))
            .limit(MAX_PODS);
        let pods = self.pods.list(&selector).await;
        let pods = pods.map_err(|source| ComponentError::List { component: "virt-handler", source })?;
        Ok(Component {
            name: name(node),
            address: SocketAddr::new(handler_address(&pods.items, node)?, PORT),
            server_name: api::tls::handler_server_name(node),
        })
    }
}

/// Returns the longest time for an action.
fn limit(action: &str) -> Duration {
    if action == "freeze" { FREEZE_TIMEOUT } else { CALL_TIMEOUT }
}

fn name(node: &str) -> String {
    format!("virt-handler on node {node}")
}

fn request(method: Method, path: &str, body: Bytes) -> Result<Request<Body>, http::Error> {
    Request::builder().method(method).uri(path).header(header::CONTENT_TYPE, "application/json").body(Body::from(body))
}

async fn bounded<T>(
    vmi: VmiOnNode<'_>,
    action: &str,
    limit: Duration,
    call: impl Future<Output = Result<T, ComponentError>>,
) -> Result<T, ComponentError> {
    timeout(limit, call).await.unwrap_or_else(|_| {
        // Without the options of a stream.
        let call = action.split('?').next().unwrap_or_default().to_owned();
        Err(ComponentError::Timeout { component: name(vmi.node), call, limit })
    })
}

/// Returns the address of virt-handler among the pods found on a node.
///
/// A pod counts only if it belongs to the DaemonSet `virt-handler` and runs on that node. During an update there may be two;
/// the one that is not being deleted is used.
fn handler_address(pods: &[Pod], node: &str) -> Result<IpAddr, ComponentError> {
    let handlers = pods.iter().filter(|pod| is_handler(pod, node)).collect::<Vec<_>>();
    let living = handlers.iter().filter(|pod| pod.metadata.deletion_timestamp.is_none()).copied().collect::<Vec<_>>();
    let pod = match (living.as_slice(), handlers.as_slice()) {
        ([pod], _) | ([], [pod]) => *pod,
        ([], []) => return Err(ComponentError::NoPod(node.to_owned())),
        ([], more) | (more, _) => return Err(ComponentError::ManyPods(more.len())),
    };
    let ip = pod.status.as_ref().and_then(|status| status.pod_ip.clone()).unwrap_or_default();
    ip.parse::<IpAddr>()
        .ok()
        .filter(|ip| address::is_dialable(*ip))
        .ok_or_else(|| ComponentError::Address { component: name(node), address: ip })
}

fn is_handler(pod: &Pod, node: &str) -> bool {
    let on_node = pod.spec.as_ref().and_then(|spec| spec.node_name.as_deref()) == Some(node);
    let labelled =
        pod.metadata.labels.as_ref().and_then(|labels| labels.get("kubevirt.io")).is_some_and(|v| v == "virt-handler");
    let owned = pod.metadata.owner_references.iter().flatten().any(|owner| {
        owner.controller == Some(true)
            && owner.api_version.starts_with("apps/")
            && owner.kind == "DaemonSet"
            && owner.name == "virt-handler"
    });
    on_node && labelled && owned
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use k8s_openapi::{
        api::core::v1::{PodSpec, PodStatus},
        apimachinery::pkg::apis::meta::v1::{ObjectMeta, OwnerReference, Time},
    };

    use super::*;

    fn pod(address: &str) -> Pod {
        Pod {
            metadata: ObjectMeta {
                labels: Some(BTreeMap::from([("kubevirt.io".to_owned(), "virt-handler".to_owned())])),
                owner_references: Some(vec![OwnerReference {
                    api_version: "apps/v1".into(),
                    kind: "DaemonSet".into(),
                    name: "virt-handler".into(),
                    controller: Some(true),
                    ..OwnerReference::default()
                }]),
                ..ObjectMeta::default()
            },
            spec: Some(PodSpec { node_name: Some("node1".into()), ..PodSpec::default() }),
            status: Some(PodStatus { pod_ip: Some(address.into()), ..PodStatus::default() }),
        }
    }

    fn going(mut pod: Pod) -> Pod {
        pod.metadata.deletion_timestamp = Some(Time("2026-01-01T00:00:00Z".parse().unwrap()));
        pod
    }

    #[test]
    fn virt_handler_is_found_by_owner_label_and_node() {
        let address = |pods: &[Pod]| handler_address(pods, "node1").map_err(|error| error.to_string());
        assert_eq!(address(&[pod("10.1.0.5")]), Ok("10.1.0.5".parse().unwrap()));
        assert_eq!(address(&[pod("fd00::5")]), Ok("fd00::5".parse().unwrap()));
        assert_eq!(address(&[]), Err("No virt-handler on node node1 found".into()));
        assert_eq!(address(&[going(pod("10.1.0.4")), pod("10.1.0.5")]), Ok("10.1.0.5".parse().unwrap()));
        assert_eq!(address(&[going(pod("10.1.0.4"))]), Ok("10.1.0.4".parse().unwrap()));
        assert_eq!(address(&[pod("10.1.0.4"), pod("10.1.0.5")]), Err("Expected to find one Pod, found 2 Pods".into()));
    }

    #[test]
    fn cve_2025_64435_pod_that_only_looks_like_virt_handler_is_ignored() {
        let mut unowned = pod("10.1.0.6");
        unowned.metadata.owner_references = None;
        let mut of_a_job = pod("10.1.0.6");
        of_a_job.metadata.owner_references.iter_mut().flatten().for_each(|owner| owner.kind = "Job".into());
        let mut elsewhere = pod("10.1.0.6");
        elsewhere.spec = Some(PodSpec { node_name: Some("node2".into()), ..PodSpec::default() });
        for impostor in [unowned, of_a_job, elsewhere] {
            assert!(matches!(handler_address(&[impostor], "node1"), Err(ComponentError::NoPod(_))));
        }
    }

    #[tokio::test(start_paused = true)]
    async fn late_answer_is_an_error_that_names_the_call_and_its_limit() {
        let vmi = VmiOnNode { node: "n1", namespace: "ns", name: "box" };
        for (action, expected) in [
            ("softreboot", "virt-handler on node n1 did not answer softreboot within 25 s"),
            ("freeze", "virt-handler on node n1 did not answer freeze within 55 s"),
            ("vnc?preserveSession=true", "virt-handler on node n1 did not answer vnc within 25 s"),
        ] {
            let late = bounded(vmi, action, limit(action), std::future::pending::<Result<(), ComponentError>>()).await;
            assert_eq!(late.unwrap_err().to_string(), expected);
        }
    }

    #[test]
    fn virt_handler_without_a_usable_address_is_not_dialled() {
        for address in ["127.0.0.1", "", "x"] {
            assert!(
                matches!(handler_address(&[pod(address)], "node1"), Err(ComponentError::Address { .. })),
                "{address}"
            );
        }
    }
}
