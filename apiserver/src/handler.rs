//! Calls to the node agent, virt-handler.
//!
//! The address comes from the status of the agent's pod, which kubelet writes; never from anything that a guest or a
//! user can set. Both ends prove who they are: we with the certificate of virt-api, the agent with one that names its
//! node, so another node's agent cannot answer in its place.

use std::{
    net::{IpAddr, SocketAddr},
    sync::Arc,
    time::Duration,
};

use axum::{body::Body, response::Response};
use bytes::Bytes;
use http::{HeaderValue, Method, Request, StatusCode, header};
use http_body_util::{BodyExt, Limited};
use hyper::{body::Incoming, client::conn::http1::SendRequest, upgrade::Upgraded};
use hyper_util::rt::TokioIo;
use k8s_openapi::api::core::v1::Pod;
use kube::{Api, Client, api::ListParams};
use process::shares::HOLDER_HEADER;
use rustls::ClientConfig;
use rustls_pki_types::ServerName;
use serde_json::Value;
use tokio::time::timeout;
use tokio_rustls::TlsConnector;
use tokio_tungstenite::{WebSocketStream, tungstenite::protocol::Role};

use crate::{address, dial::dial, websocket};

/// Port of the agent's console and lifecycle server.
const PORT: u16 = 8186;
/// Longest time for a call, and for a stream to be opened.
const CALL_TIMEOUT: Duration = Duration::from_secs(10);
/// Longest error text taken from the agent.
const MAX_ERROR: usize = 4096;
/// Largest picture taken from the agent: 8K in 32 bit, not compressed at all, is 127 MiB; as PNG a desktop stays far
/// below this.
const MAX_SCREENSHOT: usize = 64 << 20;
/// Largest document taken from the agent: lists of a guest's users and file systems.
const MAX_DOCUMENT: usize = 4 << 20;
/// Most pods looked at on one node.
const MAX_PODS: u32 = 16;

/// Why a call to the agent failed.
#[derive(Debug, thiserror::Error)]
pub enum HandlerError {
    /// The agent's pods could not be listed.
    #[error("cannot list virt-handler pods: {0}")]
    List(#[source] kube::Error),
    /// No agent on the node.
    #[error("No virt-handler on node {0} found")]
    NoPod(String),
    /// More agents than one on the node.
    #[error("Expected to find one Pod, found {0} Pods")]
    ManyPods(usize),
    /// The pod's address is not one to dial.
    #[error("virt-handler on node {node} has no usable address ({address})")]
    Address {
        /// The node.
        node: String,
        /// What the pod's status says.
        address: String,
    },
    /// The node's name cannot be in a certificate.
    #[error("node name {0} has no TLS server name")]
    ServerName(String),
    /// TCP or TLS failed.
    #[error("cannot connect to virt-handler on node {node}: {source}")]
    Connect {
        /// The node.
        node: String,
        /// What the network or TLS said.
        source: std::io::Error,
    },
    /// HTTP failed.
    #[error("request to virt-handler failed: {0}")]
    Http(#[from] hyper::Error),
    /// The request could not be put together.
    #[error("request to virt-handler is not valid: {0}")]
    Request(#[from] http::Error),
    /// The answer broke off or is too long.
    #[error("answer of virt-handler cannot be read: {0}")]
    Body(#[source] Box<dyn std::error::Error + Send + Sync>),
    /// The answer is no JSON.
    #[error("answer of virt-handler is no JSON: {0}")]
    Document(#[source] serde_json::Error),
    /// The agent took too long.
    #[error("virt-handler on node {0} took too long")]
    Timeout(String),
    /// The agent refused a call.
    #[error("unexpected return code {} ({}), message: {message}", status.as_u16(), status)]
    Refused {
        /// Its status.
        status: StatusCode,
        /// Its text.
        message: String,
    },
    /// The agent refused a stream.
    #[error("Can't connect to websocket ({}): websocket: bad handshake{}", status.as_u16(), application_info(message))]
    Handshake {
        /// Its status.
        status: StatusCode,
        /// Its text.
        message: String,
    },
}

fn application_info(message: &str) -> String {
    if message.is_empty() { String::new() } else { format!(": application info: {message}") }
}

/// Names one machine to the agent of its node.
#[derive(Clone, Copy, Debug)]
pub struct Target<'a> {
    /// Node that the machine runs on.
    pub node: &'a str,
    /// Namespace of the VMI.
    pub namespace: &'a str,
    /// Name of the VMI.
    pub name: &'a str,
}

impl Target<'_> {
    fn path(&self, action: &str) -> String {
        format!("/v1/namespaces/{}/virtualmachineinstances/{}/{action}", self.namespace, self.name)
    }
}

/// A WebSocket to the agent.
pub type HandlerStream = WebSocketStream<TokioIo<Upgraded>>;

/// Dials agents.
pub struct HandlerClient {
    pods: Api<Pod>,
    tls: TlsConnector,
}

impl HandlerClient {
    /// Finds agents in `namespace` and dials them with `tls`.
    #[must_use]
    pub fn new(client: Client, namespace: &str, tls: Arc<ClientConfig>) -> Self {
        Self { pods: Api::namespaced(client, namespace), tls: TlsConnector::from(tls) }
    }

    /// Makes the agent do something that has no answer (PUT). `body` is what the client sent, or nothing.
    pub async fn call(&self, target: Target<'_>, action: &str, body: Bytes) -> Result<(), HandlerError> {
        self.bounded(target, async {
            let response = self.send(target, Method::PUT, action, body).await?;
            let status = response.status();
            if status.is_success() {
                return Ok(());
            }
            Err(HandlerError::Refused { status, message: error_text(response.into_body()).await })
        })
        .await
    }

    /// Gets a document of the agent (GET).
    pub async fn fetch(&self, target: Target<'_>, action: &str) -> Result<Value, HandlerError> {
        self.bounded(target, async {
            let body = self.get(target, action).await?;
            let text = Limited::new(body, MAX_DOCUMENT).collect().await.map_err(HandlerError::Body)?.to_bytes();
            serde_json::from_slice(&text).map_err(HandlerError::Document)
        })
        .await
    }

    /// Gets a picture from the agent (GET), passed on as it comes, up to a limit.
    pub async fn picture(&self, target: Target<'_>, action: &str) -> Result<Response, HandlerError> {
        self.bounded(target, async {
            let body = self.get(target, action).await?;
            let mut answer = Response::new(Body::new(Limited::new(body, MAX_SCREENSHOT)));
            // Not what the agent says: nothing but a picture may be shown in the name of this server.
            answer.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static("image/png"));
            Ok(answer)
        })
        .await
    }

    async fn get(&self, target: Target<'_>, action: &str) -> Result<Incoming, HandlerError> {
        let (parts, body) = self.send(target, Method::GET, action, Bytes::new()).await?.into_parts();
        if parts.status.is_success() {
            Ok(body)
        } else {
            Err(HandlerError::Refused { status: parts.status, message: error_text(body).await })
        }
    }

    /// Opens a stream that counts for `holder`. `action` may carry a query.
    pub async fn open(&self, target: Target<'_>, action: &str, holder: &str) -> Result<HandlerStream, HandlerError> {
        self.bounded(target, async {
            let (mut sender, host) = self.connect(target.node).await?;
            let (mut request, accept) = websocket::request(&host, &target.path(action))?;
            let holder = HeaderValue::from_str(holder).map_err(http::Error::from)?;
            request.headers_mut().insert(HOLDER_HEADER, holder);
            let mut response = sender.send_request(request).await?;
            if !websocket::is_accepted(response.status(), response.headers(), &accept) {
                let status = response.status();
                return Err(HandlerError::Handshake { status, message: error_text(response.into_body()).await });
            }
            let upgraded = hyper::upgrade::on(&mut response).await?;
            let stream = TokioIo::new(upgraded);
            Ok(WebSocketStream::from_raw_socket(stream, Role::Client, Some(websocket::config())).await)
        })
        .await
    }

    async fn bounded<T>(
        &self,
        target: Target<'_>,
        work: impl Future<Output = Result<T, HandlerError>>,
    ) -> Result<T, HandlerError> {
        timeout(CALL_TIMEOUT, work).await.unwrap_or_else(|_| Err(HandlerError::Timeout(target.node.to_owned())))
    }

    async fn send(
        &self,
        target: Target<'_>,
        method: Method,
        action: &str,
        body: Bytes,
    ) -> Result<hyper::Response<Incoming>, HandlerError> {
        let (mut sender, host) = self.connect(target.node).await?;
        let request = Request::builder()
            .method(method)
            .uri(target.path(action))
            .header(header::HOST, host)
            .header(header::CONNECTION, "close")
            .header(header::CONTENT_TYPE, "application/json")
            .body(Body::from(body))?;
        Ok(sender.send_request(request).await?)
    }

    /// A connection to the agent of a node, for one request.
    async fn connect(&self, node: &str) -> Result<(SendRequest<Body>, String), HandlerError> {
        let selector = ListParams::default()
            .labels("kubevirt.io=virt-handler")
            .fields(&format!("spec.nodeName={node}"))
            .limit(MAX_PODS);
        let pods = self.pods.list(&selector).await.map_err(HandlerError::List)?;
        let address = SocketAddr::new(agent_address(&pods.items, node)?, PORT);
        let host = api::tls::handler_server_name(node);
        let name = ServerName::try_from(host.clone()).map_err(|_| HandlerError::ServerName(node.to_owned()))?;
        let failed = |source| HandlerError::Connect { node: node.to_owned(), source };
        let sender = dial(&self.tls, address, name).await.map_err(failed)?;
        Ok((sender, host))
    }
}

async fn error_text(body: Incoming) -> String {
    // What exceeds the limit is of no use to the reader anyway.
    let bytes = Limited::new(body, MAX_ERROR).collect().await.map(|body| body.to_bytes()).unwrap_or(Bytes::new());
    String::from_utf8_lossy(&bytes).trim().to_owned()
}

/// The address of the agent among the pods found on a node.
///
/// A pod counts only if it belongs to the DaemonSet `virt-handler` and runs on that node. While the agent is replaced
/// there may be two: the one that is not being deleted is meant.
fn agent_address(pods: &[Pod], node: &str) -> Result<IpAddr, HandlerError> {
    let agents = pods.iter().filter(|pod| is_agent(pod, node)).collect::<Vec<_>>();
    let living = agents.iter().filter(|pod| pod.metadata.deletion_timestamp.is_none()).copied().collect::<Vec<_>>();
    let pod = match (living.as_slice(), agents.as_slice()) {
        ([pod], _) | ([], [pod]) => *pod,
        ([], []) => return Err(HandlerError::NoPod(node.to_owned())),
        ([], more) | (more, _) => return Err(HandlerError::ManyPods(more.len())),
    };
    let ip = pod.status.as_ref().and_then(|status| status.pod_ip.clone()).unwrap_or_default();
    ip.parse::<IpAddr>()
        .ok()
        .filter(|ip| address::is_dialable(*ip))
        .ok_or_else(|| HandlerError::Address { node: node.to_owned(), address: ip })
}

fn is_agent(pod: &Pod, node: &str) -> bool {
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
    fn agent_is_found_by_owner_label_and_node() {
        let address = |pods: &[Pod]| agent_address(pods, "node1").map_err(|error| error.to_string());
        assert_eq!(address(&[pod("10.1.0.5")]), Ok("10.1.0.5".parse().unwrap()));
        assert_eq!(address(&[pod("fd00::5")]), Ok("fd00::5".parse().unwrap()));
        assert_eq!(address(&[]), Err("No virt-handler on node node1 found".into()));
        assert_eq!(address(&[going(pod("10.1.0.4")), pod("10.1.0.5")]), Ok("10.1.0.5".parse().unwrap()));
        assert_eq!(address(&[going(pod("10.1.0.4"))]), Ok("10.1.0.4".parse().unwrap()));
        assert_eq!(address(&[pod("10.1.0.4"), pod("10.1.0.5")]), Err("Expected to find one Pod, found 2 Pods".into()));
    }

    #[test]
    fn cve_2025_64435_pod_that_only_looks_like_the_agent_is_passed_over() {
        let mut unowned = pod("10.1.0.6");
        unowned.metadata.owner_references = None;
        let mut of_a_job = pod("10.1.0.6");
        of_a_job.metadata.owner_references.iter_mut().flatten().for_each(|owner| owner.kind = "Job".into());
        let mut elsewhere = pod("10.1.0.6");
        elsewhere.spec = Some(PodSpec { node_name: Some("node2".into()), ..PodSpec::default() });
        for impostor in [unowned, of_a_job, elsewhere] {
            assert!(matches!(agent_address(&[impostor], "node1"), Err(HandlerError::NoPod(_))));
        }
    }

    #[test]
    fn agent_without_a_usable_address_is_not_dialled() {
        for address in ["127.0.0.1", "", "x"] {
            assert!(matches!(agent_address(&[pod(address)], "node1"), Err(HandlerError::Address { .. })), "{address}");
        }
    }

    #[test]
    fn refusals_carry_the_agents_words() {
        let refused = HandlerError::Refused { status: StatusCode::NOT_FOUND, message: "VMI a/b does not exist".into() };
        assert_eq!(refused.to_string(), "unexpected return code 404 (404 Not Found), message: VMI a/b does not exist");
        let busy = HandlerError::Handshake {
            status: StatusCode::SERVICE_UNAVAILABLE,
            message: "Active VNC connection. Request denied.".into(),
        };
        assert_eq!(
            busy.to_string(),
            "Can't connect to websocket (503): websocket: bad handshake: application info: Active VNC connection. Request denied."
        );
    }
}
