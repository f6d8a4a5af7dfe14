//! Forwarded ports.

use super::*;

/// Returns the request of a client of streams.
fn upgrade(mut sent: Request<Body>) -> Request<Body> {
    *sent.method_mut() = Method::GET;
    for (name, value) in [
        (header::CONNECTION, "Upgrade"),
        (header::UPGRADE, "websocket"),
        (header::SEC_WEBSOCKET_VERSION, "13"),
        (header::SEC_WEBSOCKET_KEY, "dGhlIHNhbXBsZSBub25jZQ=="),
    ] {
        sent.headers_mut().insert(name, header::HeaderValue::from_static(value));
    }
    sent
}

#[tokio::test]
async fn port_is_forwarded_to_the_pod_only() {
    let interfaces = json!([{"name": "default", "ipAddress": "10.0.0.9"}]);
    let status = json!({"phase": "Running", "nodeName": "n1", "activePods": {"p1": "n1"}, "interfaces": interfaces});
    let mut vmi_object = vmi(status);
    vmi_object["spec"]["networks"] = json!([{"name": "default", "pod": {}}]);
    vmi_object["spec"]["domain"]["devices"]["interfaces"] = json!([{"name": "default", "masquerade": {}}]);
    let owner = json!([{"apiVersion": "kubevirt.io/v1", "kind": "VirtualMachineInstance", "name": "a", "uid": "u1", "controller": true}]);
    let pods = json!({"apiVersion": "v1", "kind": "PodList", "metadata": {}, "items": [{
        "metadata": {"name": "p", "namespace": "ns", "uid": "p1", "ownerReferences": owner},
        "spec": {"nodeName": "n1", "containers": []}, "status": {"phase": "Running", "podIP": "169.254.169.254"},
    }]});
    let (server, calls) =
        server(ClusterConfig::default(), vec![(VMI, vmi_object), ("/api/v1/namespaces/ns/pods", pods)]);
    let object = object();
    let sent = upgrade(request("virtualmachineinstances/portforward", ""));
    let (status, text) = read(server.dispatch(find("virtualmachineinstances/portforward"), &object, sent).await).await;
    assert_eq!(status, StatusCode::INTERNAL_SERVER_ERROR);
    assert!(message(&text).contains("no usable address"), "{text}");
    assert!(calls.lock().unwrap().iter().any(|(call, _)| call == "GET /api/v1/namespaces/ns/pods"));
    assert_eq!(server.context.stream_quota.used(), 0);
}

#[tokio::test]
async fn cve_2026_35469_streams_are_counted_before_a_connection() {
    let interfaces = json!([{"name": "default"}]);
    let status = json!({"phase": "Running", "nodeName": "n1", "activePods": {"p1": "n1"}, "interfaces": interfaces});
    let mut vmi_object = vmi(status);
    vmi_object["spec"]["networks"] = json!([{"name": "default", "pod": {}}]);
    vmi_object["spec"]["domain"]["devices"]["interfaces"] = json!([{"name": "default", "masquerade": {}}]);
    let (server, calls) = server(ClusterConfig::default(), vec![(VMI, vmi_object)]);
    let _taken = server.context.stream_quota.acquire("another user".to_owned()).unwrap();
    let object = object();
    let sent = upgrade(request("virtualmachineinstances/portforward", ""));
    let refused = server.dispatch(find("virtualmachineinstances/portforward"), &object, sent).await;
    assert_eq!(refused.headers()[header::RETRY_AFTER], "1");
    let (status, text) = read(refused).await;
    assert_eq!(status, StatusCode::TOO_MANY_REQUESTS, "{text}");
    assert_eq!(serde_json::from_str::<Value>(&text).unwrap()["details"]["retryAfterSeconds"], 1);
    assert!(!calls.lock().unwrap().iter().any(|(call, _)| call.contains("/pods")));
}

#[tokio::test]
async fn port_of_an_ended_pod_is_not_dialled() {
    let status = |phase: &str| {
        let interfaces = json!([{"name": "default", "ipAddress": "10.0.0.9"}]);
        json!({"phase": phase, "nodeName": "n1", "activePods": {"p1": "n1"}, "interfaces": interfaces})
    };
    let owner = json!([{"apiVersion": "kubevirt.io/v1", "kind": "VirtualMachineInstance", "name": "a", "uid": "u1", "controller": true}]);
    // The address is one for documentation, without a server.
    for (phase, pod_phase, deleted) in [
        ("Succeeded", "Running", Value::Null),
        ("Failed", "Running", Value::Null),
        ("Running", "Succeeded", Value::Null),
        ("Running", "Failed", Value::Null),
        ("Running", "Running", json!("2030-01-01T00:00:00Z")),
    ] {
        let mut vmi_object = vmi(status(phase));
        vmi_object["spec"]["networks"] = json!([{"name": "default", "pod": {}}]);
        vmi_object["spec"]["domain"]["devices"]["interfaces"] = json!([{"name": "default", "masquerade": {}}]);
        let pods = json!({"apiVersion": "v1", "kind": "PodList", "metadata": {}, "items": [{
            "metadata": {"name": "p", "namespace": "ns", "uid": "p1", "ownerReferences": owner, "deletionTimestamp": deleted},
            "spec": {"nodeName": "n1", "containers": []}, "status": {"phase": pod_phase, "podIP": "192.0.2.1"},
        }]});
        let objects = vec![(VMI, vmi_object), ("/api/v1/namespaces/ns/pods", pods)];
        let (server, _) = server(ClusterConfig::default(), objects);
        let object = object();
        let sent = upgrade(request("virtualmachineinstances/portforward", ""));
        let (status, text) =
            read(server.dispatch(find("virtualmachineinstances/portforward"), &object, sent).await).await;
        assert_eq!(status, StatusCode::CONFLICT, "{phase} {pod_phase} {deleted}: {text}");
        assert!(message(&text).contains("VMI is not running"), "{text}");
        assert_eq!(server.context.stream_quota.used(), 0);
    }
}
