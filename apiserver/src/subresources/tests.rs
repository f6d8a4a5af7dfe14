//! Requests that are allowed, against a stand-in of the API server.

use std::sync::{Arc, Mutex};

use api::config::ClusterConfig;
use axum::{body::Body, response::Response};
use http::{Method, Request, StatusCode, header};
use kube::Client;
use process::{
    CancellationToken,
    config::ConfigHandle,
    ops::{Ops, Readiness},
    shares::Shares,
    tls::{Peer, Roots, TrustedAddresses, client_config},
};
use prometheus::Registry;
use serde_json::{Value, json};
use tokio_util::task::TaskTracker;

use super::{Object, Server};
use crate::{
    authentication::{ALLOWED_NAMES_KEY, CLIENT_CA_KEY},
    authorization::Authorizer,
    bodies::Bodies,
    endpoint::Subresource,
    front_proxy::FrontProxy,
    guestfs::GuestFs,
    handler::HandlerClient,
    metrics::Metrics,
    presence::Presence,
    profiles::Components,
};

type Calls = Arc<Mutex<Vec<(String, Value)>>>;

/// An API server that has these objects, by path, and notes what it is asked.
fn client(objects: Vec<(&'static str, Value)>) -> (Client, Calls) {
    let calls = Calls::default();
    let noted = calls.clone();
    let objects = Arc::new(objects);
    let service = tower::service_fn(move |request: Request<kube::client::Body>| {
        let (noted, objects) = (noted.clone(), objects.clone());
        async move {
            let (parts, body) = request.into_parts();
            let body = http_body_util::BodyExt::collect(body).await.unwrap().to_bytes();
            let path = parts.uri.path().to_owned();
            let body = serde_json::from_slice(&body).unwrap_or(Value::Null);
            noted.lock().unwrap().push((format!("{} {path}", parts.method), body));
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
    let server = Server {
        front_proxy: FrontProxy::default(),
        trusted: TrustedAddresses::default(),
        authorizer: Authorizer::new(client.clone()),
        handler: HandlerClient::new(client.clone(), "kubevirt", tls.clone()),
        components: Components::new(client.clone(), "kubevirt", tls),
        namespace: "kubevirt".into(),
        metrics: Metrics::register(&registry).unwrap(),
        ops: Ops::new(client.clone(), config.clone(), Readiness::new(), registry, Roots::empty()),
        config,
        client,
        guestfs: GuestFs::default(),
        presence: Presence::default(),
        bodies: Bodies::default(),
        shares: Shares::of(1),
        streams: TaskTracker::new(),
        stop: CancellationToken::new(),
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

fn request(subresource: Subresource, body: &'static str) -> Request<Body> {
    let uri = match subresource {
        Subresource::PortForward | Subresource::VmPortForward => "/apis/g/v1/namespaces/ns/r/a/portforward/22",
        _ => "/",
    };
    Request::builder()
        .method(subresource.method())
        .uri(uri)
        .header(header::CONTENT_TYPE, "application/json")
        .body(Body::from(body))
        .unwrap()
}

fn object() -> Object {
    Object { namespace: "ns".into(), name: "a".into(), holder: "me".into() }
}

async fn answer(server: &Server, subresource: Subresource, body: &'static str) -> (StatusCode, String) {
    let object = object();
    // On the heap: a test that asks often would otherwise have each of these large futures in its frame.
    read(Box::pin(server.dispatch(subresource, &object, request(subresource, body))).await).await
}

async fn read(response: Response) -> (StatusCode, String) {
    let status = response.status();
    let body = axum::body::to_bytes(response.into_body(), 1 << 20).await.unwrap();
    (status, String::from_utf8(body.to_vec()).unwrap())
}

fn message(text: &str) -> String {
    serde_json::from_str::<Value>(text).unwrap()["message"].as_str().unwrap().to_owned()
}

#[tokio::test]
async fn objects_that_are_missing_are_named() {
    let (server, _) = server(ClusterConfig { feature_gates: vec!["ObjectGraph".into()], ..Default::default() }, vec![]);
    for subresource in Subresource::ALL {
        let body = match subresource {
            Subresource::ExpandVmSpec => continue,
            Subresource::Freeze => r#"{"unfreezeTimeout": "5m"}"#,
            Subresource::AddVolume | Subresource::VmAddVolume => {
                r#"{"name": "v", "disk": {"name": "v"}, "volumeSource": {"dataVolume": {"name": "d"}}}"#
            }
            Subresource::RemoveVolume | Subresource::VmRemoveVolume => r#"{"name": "v"}"#,
            _ => "",
        };
        let (status, text) = answer(&server, subresource, body).await;
        let kind = subresource.endpoint().resource.trim_end_matches('s');
        let expected = format!("{kind}.kubevirt.io \"a\" not found");
        if subresource.fails_plainly() {
            assert_eq!((status, text), (StatusCode::INTERNAL_SERVER_ERROR, expected), "{subresource:?}");
        } else {
            assert_eq!((status, message(&text)), (StatusCode::NOT_FOUND, expected), "{subresource:?}");
        }
    }
}

#[tokio::test]
async fn what_is_not_available_says_so_after_all_else_has_been_checked() {
    let running = json!({"phase": "Running", "nodeName": "n1"});
    let (server, calls) =
        server(ClusterConfig::default(), vec![(VM, vm(json!({"created": true}))), (VMI, vmi(running))]);
    for (subresource, body, text) in [
        (Subresource::Migrate, "", "live migration is not available yet"),
        (Subresource::Backup, r#"{"cmd": "Start"}"#, "backup of running machines is not available yet"),
        (
            Subresource::VmAddVolume,
            r#"{"name": "v", "disk": {"name": "v"}, "volumeSource": {"dataVolume": {"name": "d"}}}"#,
            "hot-plug of volumes is not available yet",
        ),
    ] {
        let (status, answered) = answer(&server, subresource, body).await;
        assert_eq!((status, message(&answered).as_str()), (StatusCode::NOT_IMPLEMENTED, text), "{subresource:?}");
    }
    for (subresource, body, code) in [
        (Subresource::Migrate, r#"{"dryRun": ["Some"]}"#, StatusCode::BAD_REQUEST),
        (Subresource::Backup, r#"{"cmd": "Explode"}"#, StatusCode::BAD_REQUEST),
        (Subresource::VmRemoveVolume, r#"{"name": "v"}"#, StatusCode::CONFLICT),
        (Subresource::AddVolume, "{}", StatusCode::BAD_REQUEST),
        (Subresource::RedefineCheckpoint, "", StatusCode::CONFLICT),
        (Subresource::SetupSession, "", StatusCode::BAD_REQUEST),
        (Subresource::InjectLaunchSecret, "", StatusCode::CONFLICT),
        (Subresource::MemoryDump, "", StatusCode::BAD_REQUEST),
        (Subresource::MemoryDump, r#"{"claimName": "c"}"#, StatusCode::NOT_FOUND),
        (Subresource::RemoveMemoryDump, "", StatusCode::CONFLICT),
        (Subresource::ObjectGraph, "", StatusCode::BAD_REQUEST),
    ] {
        assert_eq!(answer(&server, subresource, body).await.0, code, "{subresource:?} {body}");
    }
    let calls = calls.lock().unwrap();
    assert!(calls.iter().all(|(call, _)| call.starts_with("GET ")), "{calls:?}");
}

#[tokio::test]
async fn query_asks_for_a_trial_as_the_body_does_and_gets_no_real_thing() {
    let running = json!({"phase": "Running", "nodeName": "n1"});
    let (server, calls) =
        server(ClusterConfig::default(), vec![(VM, vm(json!({"created": true}))), (VMI, vmi(running))]);
    let (ok, refused) = (StatusCode::OK, StatusCode::BAD_REQUEST);
    for (subresource, query, body, expected) in [
        (Subresource::Pause, "dryRun=All", "", ok),
        (Subresource::Pause, "x=y&dryRun=All", r#"{"dryRun": ["All"]}"#, ok),
        (Subresource::Pause, "dryRun=all", r#"{"dryRun": ["All"]}"#, refused),
        (Subresource::Pause, "dryRun=All", r#"{"dryRun": ["Some"]}"#, refused),
        (Subresource::Stop, "dryRun=", "", refused),
        (Subresource::Migrate, "dryRun=Some", "", refused),
        (Subresource::SoftReboot, "dryRun=All", "", refused),
        (Subresource::Reset, "dryRun=All", "", refused),
        // Nothing is changed by these.
        (Subresource::ExpandSpec, "dryRun=All", "", ok),
    ] {
        let mut asked = request(subresource, body);
        *asked.uri_mut() = format!("/?{query}").parse().unwrap();
        let (status, text) = read(server.dispatch(subresource, &object(), asked).await).await;
        assert_eq!(status, expected, "{subresource:?} {query} {body}: {text}");
    }
    let calls = calls.lock().unwrap();
    assert!(calls.iter().all(|(call, _)| call.starts_with("GET ") && !call.contains("/pods")), "{calls:?}");
}

#[tokio::test]
async fn evacuation_is_given_up_by_a_patch_of_the_machine() {
    let status = json!({"phase": "Running", "nodeName": "n1", "evacuationNodeName": "n1"});
    let node = json!({"apiVersion": "v1", "kind": "Node", "metadata": {"name": "n1"}, "spec": {}});
    let objects = vec![(VM, vm(json!({"created": true}))), (VMI, vmi(status)), ("/api/v1/nodes/n1", node)];
    let (server, calls) = server(ClusterConfig::default(), objects);
    let (status, text) = answer(&server, Subresource::VmCancelEvacuation, r#"{"evacuationNodeName": "n1"}"#).await;
    assert_eq!((status, text.as_str()), (StatusCode::OK, ""));
    let calls = calls.lock().unwrap();
    let (call, patch) = calls.last().unwrap();
    assert_eq!(call, &format!("PATCH {VMI}"));
    assert_eq!(patch[0], json!({"op": "test", "path": "/status/evacuationNodeName", "value": "n1"}));
}

#[tokio::test]
async fn vm_without_instance_type_is_expanded_to_itself() {
    let (server, _) = server(ClusterConfig::default(), vec![(VM, vm(json!({})))]);
    let (status, text) = answer(&server, Subresource::ExpandSpec, "").await;
    let expanded: Value = serde_json::from_str(&text).unwrap();
    assert_eq!((status, &expanded["kind"]), (StatusCode::OK, &json!("VirtualMachine")));
    let body = r#"{"apiVersion": "kubevirt.io/v1", "kind": "VirtualMachine", "metadata": {"name": "b"},
        "spec": {"runStrategy": "Halted", "template": {"spec": {"domain": {"devices": {}}}}}}"#;
    let (status, text) = answer(&server, Subresource::ExpandVmSpec, body).await;
    let expanded: Value = serde_json::from_str(&text).unwrap();
    assert_eq!((status, &expanded["metadata"]["namespace"]), (StatusCode::OK, &json!("ns")));
    let (status, text) = answer(&server, Subresource::ExpandVmSpec, r#"{"spec": {"unknown": 1}}"#).await;
    assert_eq!((status, message(&text).as_str()), (StatusCode::BAD_REQUEST, "Object is not a valid VirtualMachine"));
}

#[tokio::test]
async fn instance_type_is_applied_to_a_vm_that_names_one() {
    let class = json!({
        "apiVersion": "instancetype.kubevirt.io/v1beta1", "kind": "VirtualMachineClusterInstancetype",
        "metadata": {"name": "small"}, "spec": {"cpu": {"guest": 2}, "memory": {"guest": "1Gi"}},
    });
    let mut machine = vm(json!({}));
    machine["spec"]["instancetype"] = json!({"name": "small"});
    let path = "/apis/instancetype.kubevirt.io/v1beta1/virtualmachineclusterinstancetypes/small";
    let (server, _) = server(ClusterConfig::default(), vec![(VM, machine), (path, class)]);
    let (status, text) = answer(&server, Subresource::ExpandSpec, "").await;
    let expanded: Value = serde_json::from_str(&text).unwrap();
    assert_eq!(status, StatusCode::OK, "{text}");
    assert_eq!(expanded["spec"]["template"]["spec"]["domain"]["memory"]["guest"], "1Gi");
    assert!(expanded["spec"]["instancetype"].is_null());
    // A preference that is not there: the stored VM is our trouble, a VM that is sent along is the client's.
    let body = r#"{"apiVersion": "kubevirt.io/v1", "kind": "VirtualMachine", "metadata": {"name": "b"},
        "spec": {"runStrategy": "Halted", "preference": {"name": "none"}, "template": {"spec": {"domain": {"devices": {}}}}}}"#;
    assert_eq!(answer(&server, Subresource::ExpandVmSpec, body).await.0, StatusCode::BAD_REQUEST);
}

#[tokio::test]
async fn media_types_are_checked_before_anything_else() {
    let (server, calls) = server(ClusterConfig::default(), vec![]);
    let object = object();
    let mut asked = request(Subresource::GuestOsInfo, "");
    asked.headers_mut().insert(header::ACCEPT, header::HeaderValue::from_static("text/html"));
    let (status, _) = read(server.dispatch(Subresource::GuestOsInfo, &object, asked).await).await;
    assert_eq!(status, StatusCode::NOT_ACCEPTABLE);
    let mut typed = request(Subresource::UserList, "");
    typed.headers_mut().insert(header::CONTENT_TYPE, header::HeaderValue::from_static("text/plain"));
    let (status, _) = read(server.dispatch(Subresource::UserList, &object, typed).await).await;
    assert_eq!(status, StatusCode::UNSUPPORTED_MEDIA_TYPE);
    let mut sent = request(Subresource::ExpandVmSpec, "{}");
    sent.headers_mut().remove(header::CONTENT_TYPE);
    let (status, _) = read(server.dispatch(Subresource::ExpandVmSpec, &object, sent).await).await;
    assert_eq!(status, StatusCode::UNSUPPORTED_MEDIA_TYPE);
    assert!(calls.lock().unwrap().is_empty());
}

/// The request as a client of streams makes it.
fn upgrade(mut asked: Request<Body>) -> Request<Body> {
    *asked.method_mut() = Method::GET;
    for (name, value) in [
        (header::CONNECTION, "Upgrade"),
        (header::UPGRADE, "websocket"),
        (header::SEC_WEBSOCKET_VERSION, "13"),
        (header::SEC_WEBSOCKET_KEY, "dGhlIHNhbXBsZSBub25jZQ=="),
    ] {
        asked.headers_mut().insert(name, header::HeaderValue::from_static(value));
    }
    asked
}

#[tokio::test]
async fn port_is_forwarded_to_the_pod_and_to_nothing_else() {
    let interfaces = json!([{"name": "default", "ipAddress": "10.0.0.9"}]);
    let status = json!({"phase": "Running", "nodeName": "n1", "activePods": {"p1": "n1"}, "interfaces": interfaces});
    let mut machine = vmi(status);
    machine["spec"]["networks"] = json!([{"name": "default", "pod": {}}]);
    machine["spec"]["domain"]["devices"]["interfaces"] = json!([{"name": "default", "masquerade": {}}]);
    let owner = json!([{"apiVersion": "kubevirt.io/v1", "kind": "VirtualMachineInstance", "name": "a", "uid": "u1", "controller": true}]);
    let pods = json!({"apiVersion": "v1", "kind": "PodList", "metadata": {}, "items": [{
        "metadata": {"name": "p", "namespace": "ns", "uid": "p1", "ownerReferences": owner},
        "spec": {"nodeName": "n1", "containers": []}, "status": {"phase": "Running", "podIP": "169.254.169.254"},
    }]});
    let (server, calls) = server(ClusterConfig::default(), vec![(VMI, machine), ("/api/v1/namespaces/ns/pods", pods)]);
    let object = object();
    let asked = upgrade(request(Subresource::PortForward, ""));
    let (status, text) = read(server.dispatch(Subresource::PortForward, &object, asked).await).await;
    assert_eq!(status, StatusCode::INTERNAL_SERVER_ERROR);
    assert!(message(&text).contains("no usable address"), "{text}");
    assert!(calls.lock().unwrap().iter().any(|(call, _)| call == "GET /api/v1/namespaces/ns/pods"));
    assert_eq!(server.shares.taken(), 0);
}

#[tokio::test]
async fn cve_2026_35469_streams_are_counted_before_anything_is_dialled() {
    let interfaces = json!([{"name": "default"}]);
    let status = json!({"phase": "Running", "nodeName": "n1", "activePods": {"p1": "n1"}, "interfaces": interfaces});
    let mut machine = vmi(status);
    machine["spec"]["networks"] = json!([{"name": "default", "pod": {}}]);
    machine["spec"]["domain"]["devices"]["interfaces"] = json!([{"name": "default", "masquerade": {}}]);
    let (server, calls) = server(ClusterConfig::default(), vec![(VMI, machine)]);
    let _taken = server.shares.claim("somebody else".to_owned()).unwrap();
    let object = object();
    let asked = upgrade(request(Subresource::PortForward, ""));
    let refused = server.dispatch(Subresource::PortForward, &object, asked).await;
    assert_eq!(refused.headers()[header::RETRY_AFTER], "1");
    let (status, text) = read(refused).await;
    assert_eq!(status, StatusCode::TOO_MANY_REQUESTS, "{text}");
    assert_eq!(serde_json::from_str::<Value>(&text).unwrap()["details"]["retryAfterSeconds"], 1);
    assert!(!calls.lock().unwrap().iter().any(|(call, _)| call.contains("/pods")));
}

#[tokio::test]
async fn port_of_what_has_ended_is_not_dialled() {
    let status = |phase: &str| {
        let interfaces = json!([{"name": "default", "ipAddress": "10.0.0.9"}]);
        json!({"phase": phase, "nodeName": "n1", "activePods": {"p1": "n1"}, "interfaces": interfaces})
    };
    let owner = json!([{"apiVersion": "kubevirt.io/v1", "kind": "VirtualMachineInstance", "name": "a", "uid": "u1", "controller": true}]);
    // Nobody answers at the address: it is of those for documentation.
    for (phase, pod_phase, deleted) in [
        ("Succeeded", "Running", Value::Null),
        ("Failed", "Running", Value::Null),
        ("Running", "Succeeded", Value::Null),
        ("Running", "Failed", Value::Null),
        ("Running", "Running", json!("2030-01-01T00:00:00Z")),
    ] {
        let mut machine = vmi(status(phase));
        machine["spec"]["networks"] = json!([{"name": "default", "pod": {}}]);
        machine["spec"]["domain"]["devices"]["interfaces"] = json!([{"name": "default", "masquerade": {}}]);
        let pods = json!({"apiVersion": "v1", "kind": "PodList", "metadata": {}, "items": [{
            "metadata": {"name": "p", "uid": "p1", "ownerReferences": owner, "deletionTimestamp": deleted},
            "spec": {"nodeName": "n1", "containers": []}, "status": {"phase": pod_phase, "podIP": "192.0.2.1"},
        }]});
        let objects = vec![(VMI, machine), ("/api/v1/namespaces/ns/pods", pods)];
        let (server, _) = server(ClusterConfig::default(), objects);
        let object = object();
        let asked = upgrade(request(Subresource::PortForward, ""));
        let (status, text) = read(server.dispatch(Subresource::PortForward, &object, asked).await).await;
        assert_eq!(status, StatusCode::CONFLICT, "{phase} {pod_phase} {deleted}: {text}");
        assert!(message(&text).contains("VMI is not running"), "{text}");
        assert_eq!(server.shares.taken(), 0);
    }
}

#[tokio::test]
async fn profiles_are_for_users_who_may_read_their_document() {
    use rcgen::{BasicConstraints, CertificateParams, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair};

    let mut params = CertificateParams::new(Vec::<String>::new()).unwrap();
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    let key = KeyPair::generate().unwrap();
    let authority = params.self_signed(&key).unwrap().pem();
    let issuer = Issuer::new(params, key);
    let mut params = CertificateParams::new(Vec::<String>::new()).unwrap();
    params.distinguished_name.push(DnType::CommonName, "front-proxy-client");
    params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ClientAuth];
    let leaf = params.signed_by(&KeyPair::generate().unwrap(), &issuer).unwrap();
    let peer = Peer::new("10.0.0.1:1".parse().unwrap(), &[leaf.der().clone()]);
    let trust = FrontProxy::fixed(
        [(CLIENT_CA_KEY.to_owned(), authority), (ALLOWED_NAMES_KEY.to_owned(), "[]".to_owned())].into(),
    );

    const REVIEWS: &str = "/apis/authorization.k8s.io/v1/subjectaccessreviews";
    const PODS: &str = "/api/v1/namespaces/kubevirt/pods";
    for (allowed, code, calls_made) in [(false, StatusCode::UNAUTHORIZED, 1), (true, StatusCode::OK, 2)] {
        let review = json!({"spec": {}, "status": {"allowed": allowed}});
        let pods = json!({"apiVersion": "v1", "kind": "PodList", "metadata": {}, "items": []});
        let config = ClusterConfig { cluster_profiler: true, ..ClusterConfig::default() };
        let (server, calls) = server(config, vec![(REVIEWS, review), (PODS, pods)]);
        let server = Server { front_proxy: trust.clone(), ..server };
        let request = Request::get("/apis/subresources.kubevirt.io/v1/start-cluster-profiler")
            .header("X-Remote-User", "alice")
            .header("X-Remote-Group", "system:authenticated")
            .body(Body::empty())
            .unwrap();
        let (status, text) = read(Box::pin(server.answer(&peer, request)).await).await;
        assert_eq!(status, code, "{text}");
        let calls = calls.lock().unwrap();
        assert_eq!(calls.len(), calls_made, "{calls:?}");
        assert_eq!(calls[0].0, format!("POST {REVIEWS}"));
        assert_eq!(calls[0].1["spec"]["user"], "alice");
        assert_eq!(
            calls[0].1["spec"]["resourceAttributes"],
            json!({
                "verb": "list", "group": "subresources.kubevirt.io", "version": "v1",
                "resource": "start-cluster-profiler",
            })
        );
    }
}

#[tokio::test]
async fn object_and_its_state_come_before_a_body_that_cannot_be_read() {
    let (empty, _) = server(ClusterConfig::default(), vec![]);
    let waiting = json!({"phase": "Scheduling", "nodeName": "n1"});
    let node = json!({"apiVersion": "v1", "kind": "Node", "metadata": {"name": "n1"}, "spec": {}});
    let objects = vec![(VM, vm(json!({}))), (VMI, vmi(waiting)), ("/api/v1/nodes/n1", node)];
    let (waits, _) = server(ClusterConfig::default(), objects);
    for (subresource, expected) in [
        (Subresource::Start, StatusCode::CONFLICT),
        (Subresource::Freeze, StatusCode::CONFLICT),
        (Subresource::Backup, StatusCode::CONFLICT),
        (Subresource::RedefineCheckpoint, StatusCode::CONFLICT),
        (Subresource::InjectLaunchSecret, StatusCode::CONFLICT),
        // It was not asked to leave, so there is nothing that options could be for.
        (Subresource::CancelEvacuation, StatusCode::OK),
    ] {
        assert_eq!(answer(&empty, subresource, "{").await.0, StatusCode::NOT_FOUND, "{subresource:?}");
        let (status, text) = answer(&waits, subresource, "{").await;
        assert_eq!(status, expected, "{subresource:?}: {text}");
    }
    let running = json!({"phase": "Running", "nodeName": "n1"});
    let (runs, _) = server(ClusterConfig::default(), vec![(VMI, vmi(running))]);
    assert_eq!(answer(&runs, Subresource::Freeze, "{").await.0, StatusCode::BAD_REQUEST);
    assert_eq!(answer(&runs, Subresource::Freeze, "").await.0, StatusCode::BAD_REQUEST);
}

#[tokio::test]
async fn attestation_is_not_available_whichever_way_it_is_asked_for() {
    let status = json!({"phase": "Running", "nodeName": "n1", "conditions": [{"type": "Paused", "status": "True"}]});
    let mut machine = vmi(status);
    machine["spec"]["domain"]["launchSecurity"] = json!({"sev": {"attestation": {}}});
    let (server, _) = server(ClusterConfig::default(), vec![(VMI, machine)]);
    for subresource in
        [Subresource::FetchCertChain, Subresource::QueryLaunchMeasurement, Subresource::InjectLaunchSecret]
    {
        let (status, text) = answer(&server, subresource, "").await;
        assert_eq!(
            (status, message(&text).as_str()),
            (StatusCode::NOT_IMPLEMENTED, "attestation is not available yet")
        );
    }
}

#[tokio::test]
async fn whoever_asks_for_the_image_again_and_again_does_not_ask_the_api_server() {
    let installation = json!({
        "apiVersion": "kubevirt.io/v1", "kind": "KubeVirt", "metadata": {"name": "kubevirt"}, "spec": {},
        "status": {"observedKubeVirtRegistry": "registry.example", "observedKubeVirtVersion": "v1"},
    });
    let list = json!({"apiVersion": "kubevirt.io/v1", "kind": "KubeVirtList", "metadata": {}, "items": [installation]});
    let objects = vec![("/apis/kubevirt.io/v1/namespaces/kubevirt/kubevirts", list)];
    let (server, calls) = server(ClusterConfig::default(), objects);
    for _ in 0..3 {
        let (status, text) = read(server.guestfs.answer(&server.client, &server.namespace).await).await;
        assert_eq!(status, StatusCode::OK, "{text}");
    }
    assert_eq!(calls.lock().unwrap().len(), 1);
    let (without, calls) = self::server(ClusterConfig::default(), vec![]);
    for _ in 0..3 {
        let (status, text) = read(without.guestfs.answer(&without.client, &without.namespace).await).await;
        assert_eq!(status, StatusCode::INTERNAL_SERVER_ERROR, "{text}");
    }
    assert_eq!(calls.lock().unwrap().len(), 1);
}

#[tokio::test]
async fn front_proxy_certificate_proves_its_address_whatever_is_asked_for() {
    use std::collections::BTreeMap;

    use k8s_openapi::api::core::v1::ConfigMap;
    use process::tls::Peer;
    use rcgen::{BasicConstraints, CertificateParams, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair};

    use crate::authentication::{ALLOWED_NAMES_KEY, CLIENT_CA_KEY};

    let params = |name: &str| {
        let mut params = CertificateParams::new(Vec::<String>::new()).unwrap();
        params.distinguished_name.push(DnType::CommonName, name);
        params
    };
    let authority = || {
        let mut params = params("front-proxy-ca");
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let key = KeyPair::generate().unwrap();
        let pem = params.self_signed(&key).unwrap().pem();
        (pem, Issuer::new(params, key))
    };
    let leaf = |issuer: &Issuer<'_, KeyPair>, name: &str| {
        let mut params = params(name);
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ClientAuth];
        vec![params.signed_by(&KeyPair::generate().unwrap(), issuer).unwrap().der().clone()]
    };
    let ((pem, issuer), (_, other)) = (authority(), authority());
    let (server, _) = server(ClusterConfig::default(), vec![]);
    server.front_proxy.take(Some(ConfigMap {
        data: Some(BTreeMap::from([
            (CLIENT_CA_KEY.to_owned(), pem),
            (ALLOWED_NAMES_KEY.to_owned(), r#"["front-proxy-client"]"#.to_owned()),
        ])),
        ..ConfigMap::default()
    }));
    for (number, (chain, proves)) in [
        (vec![], false),
        (leaf(&other, "front-proxy-client"), false),
        (leaf(&issuer, "somebody-else"), false),
        (leaf(&issuer, "front-proxy-client"), true),
    ]
    .into_iter()
    .enumerate()
    {
        let peer = Peer::new(([192, 0, 2, u8::try_from(number).unwrap()], 1).into(), &chain);
        let request = Request::get("/apis/subresources.kubevirt.io/v1").body(Body::empty()).unwrap();
        assert_eq!(server.answer(&peer, request).await.status(), StatusCode::OK);
        assert_eq!(server.trusted.contains(peer.address.ip()), proves, "{number}");
    }
}
