//! Authorized requests, with a fake API server.

use std::sync::{Arc, Mutex};

use api::config::ClusterConfig;
use axum::{body::Body, response::Response};
use daemon::{
    CancellationToken,
    config::ConfigHandle,
    ops::{Ops, Readiness},
    quota::StreamQuota,
    tls::{Peer, Roots, TrustedAddresses, client_config},
};
use http::{Method, Request, StatusCode, header};
use kube::Client;
use prometheus::Registry;
use serde_json::{Value, json};
use tokio_util::task::TaskTracker;

use super::Server;
use crate::{
    auth::{authorization::Authorizer, front_proxy::FrontProxy},
    clients::{ComponentClient, handler::HandlerClient, objects::Objects},
    discovery::{cluster_profiler::ClusterProfiler, guestfs::GuestFs},
    metrics::Metrics,
    requests::body::BodyReader,
    streaming::vmi_watch::VmiWatches,
    subresources::{
        common::{
            call::{Context, Object},
            specification::Specification,
        },
        registry,
    },
};

mod documents;
mod port_forward;
mod subresources;
mod unit;

type Calls = Arc<Mutex<Vec<(String, Value)>>>;

/// Returns an API server with these objects, by path, and its recorded requests.
fn client(objects: Vec<(&'static str, Value)>) -> (Client, Calls) {
    let calls = Calls::default();
    let recorded = calls.clone();
    let objects = Arc::new(objects);
    let service = tower::service_fn(move |request: Request<kube::client::Body>| {
        let (recorded, objects) = (recorded.clone(), objects.clone());
        async move {
            let (parts, body) = request.into_parts();
            let body = http_body_util::BodyExt::collect(body).await.unwrap().to_bytes();
            let path = parts.uri.path().to_owned();
            let body = serde_json::from_slice(&body).unwrap_or(Value::Null);
            recorded.lock().unwrap().push((format!("{} {path}", parts.method), body));
            let found = objects.iter().find(|(known, _)| *known == path).map(|(_, object)| object.clone());
            let code = if found.is_some() { 200 } else { 404 };
            let answer = found.unwrap_or_else(|| {
                json!({"kind": "Status", "apiVersion": "v1", "status": "Failure", "message": "not found", "reason": "NotFound", "code": 404})
            });
            let answer = Body::from(answer.to_string());
            Ok::<_, std::convert::Infallible>(http::Response::builder().status(code).body(answer).unwrap())
        }
    });
    (Client::new(service, "default"), calls)
}

fn server(config: ClusterConfig, objects: Vec<(&'static str, Value)>) -> (Server, Calls) {
    let (client, calls) = client(objects);
    let registry = Registry::new();
    let config = ConfigHandle::fixed(config);
    let tls = client_config(&Roots::empty(), None, &["http/1.1"]).unwrap();
    let components = Arc::new(ComponentClient::new(tls));
    let metrics = Metrics::register(&registry, &crate::subresources::registry::stream_kinds()).unwrap();
    let server = Server {
        front_proxy: FrontProxy::default(),
        trusted: TrustedAddresses::default(),
        authorizer: Authorizer::new(client.clone()),
        profiler: ClusterProfiler::new(client.clone(), "kubevirt", components.clone()),
        namespace: "kubevirt".into(),
        ops: Ops::new(client.clone(), config.clone(), Readiness::new(), registry, Roots::empty()),
        guestfs: GuestFs::default(),
        context: Context {
            objects: Objects { client: client.clone() },
            handler: HandlerClient::new(client.clone(), "kubevirt", components),
            config,
            metrics,
            bodies: BodyReader::default(),
            stream_quota: StreamQuota::new(1),
            streams: TaskTracker::new(),
            vmi_watches: VmiWatches::default(),
            stop: CancellationToken::new(),
        },
        client,
    };
    (server, calls)
}

const VM: &str = "/apis/kubevirt.io/v1/namespaces/ns/virtualmachines/a";
const VMI: &str = "/apis/kubevirt.io/v1/namespaces/ns/virtualmachineinstances/a";

fn vm(status: Value) -> Value {
    json!({
        "apiVersion": "kubevirt.io/v1", "kind": "VirtualMachine",
        "metadata": {"name": "a", "namespace": "ns", "uid": "v1"},
        "spec": {"runStrategy": "Always", "template": {"spec": {"domain": {"devices": {}}}}}, "status": status,
    })
}

fn vmi(status: Value) -> Value {
    json!({
        "apiVersion": "kubevirt.io/v1", "kind": "VirtualMachineInstance",
        "metadata": {
            "name": "a", "namespace": "ns", "uid": "u1",
            "ownerReferences": [{"apiVersion": "kubevirt.io/v1", "kind": "VirtualMachine", "name": "a", "uid": "v1", "controller": true}],
        },
        "spec": {"domain": {"devices": {}}}, "status": status,
    })
}

/// Returns the subresource of a name in discovery.
fn find(name: &str) -> &'static Specification {
    registry::ALL.into_iter().find(|known| known.full_name() == name).unwrap()
}

fn request(subresource: &str, body: &'static str) -> Request<Body> {
    let uri = match subresource {
        "virtualmachineinstances/portforward" | "virtualmachines/portforward" => {
            "/apis/g/v1/namespaces/ns/r/a/portforward/22"
        }
        _ => "/",
    };
    Request::builder()
        .method(find(subresource).http_method())
        .uri(uri)
        .header(header::CONTENT_TYPE, "application/json")
        .body(Body::from(body))
        .unwrap()
}

fn object() -> Object {
    Object { namespace: "ns".into(), name: "a".into(), holder: "me".into(), is_controller: false }
}

async fn answer(server: &Server, subresource: &str, body: &'static str) -> (StatusCode, String) {
    let object = object();
    // On the heap: a test with many requests would otherwise have each of these large futures in its frame.
    read(Box::pin(server.dispatch(find(subresource), &object, request(subresource, body))).await).await
}

async fn read(response: Response) -> (StatusCode, String) {
    let status = response.status();
    let body = axum::body::to_bytes(response.into_body(), 1 << 20).await.unwrap();
    (status, String::from_utf8(body.to_vec()).unwrap())
}

fn message(text: &str) -> String {
    serde_json::from_str::<Value>(text).unwrap()["message"].as_str().unwrap().to_owned()
}
