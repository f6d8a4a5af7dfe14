//! Checks and changes of subresources.

use super::*;

#[tokio::test]
async fn missing_objects_are_named() {
    let (server, _) = server(ClusterConfig { feature_gates: vec!["ObjectGraph".into()], ..Default::default() }, vec![]);
    for known in registry::ALL {
        let subresource = known.full_name();
        let body = match subresource.as_str() {
            "expand-vm-spec" => continue,
            "virtualmachineinstances/freeze" => r#"{"unfreezeTimeout": "5m"}"#,
            "virtualmachineinstances/addvolume" | "virtualmachines/addvolume" => {
                r#"{"name": "v", "disk": {"name": "v"}, "volumeSource": {"dataVolume": {"name": "d"}}}"#
            }
            "virtualmachineinstances/removevolume" | "virtualmachines/removevolume" => r#"{"name": "v"}"#,
            _ => "",
        };
        let (status, text) = answer(&server, &subresource, body).await;
        let kind = known.resource.trim_end_matches('s');
        let expected = format!("{kind}.kubevirt.io \"a\" not found");
        if known.plain_errors {
            assert_eq!((status, text), (StatusCode::INTERNAL_SERVER_ERROR, expected), "{subresource:?}");
        } else {
            assert_eq!((status, message(&text)), (StatusCode::NOT_FOUND, expected), "{subresource:?}");
        }
    }
}

#[tokio::test]
async fn unavailable_function_is_reported_after_all_checks() {
    let running = json!({"phase": "Running", "nodeName": "n1"});
    let (server, calls) =
        server(ClusterConfig::default(), vec![(VM, vm(json!({"created": true}))), (VMI, vmi(running))]);
    for (subresource, body, text) in
        [("virtualmachineinstances/backup", r#"{"cmd": "Start"}"#, "backup of running VMIs is not available yet")]
    {
        let (status, answered) = answer(&server, subresource, body).await;
        assert_eq!((status, message(&answered).as_str()), (StatusCode::NOT_IMPLEMENTED, text), "{subresource:?}");
    }
    for (subresource, body, code) in [
        ("virtualmachines/migrate", r#"{"dryRun": ["Some"]}"#, StatusCode::BAD_REQUEST),
        ("virtualmachineinstances/backup", r#"{"cmd": "Explode"}"#, StatusCode::BAD_REQUEST),
        ("virtualmachines/removevolume", r#"{"name": "v"}"#, StatusCode::CONFLICT),
        ("virtualmachineinstances/addvolume", "{}", StatusCode::BAD_REQUEST),
        ("virtualmachineinstances/redefine-checkpoint", "", StatusCode::CONFLICT),
        ("virtualmachineinstances/sev/setupsession", "", StatusCode::BAD_REQUEST),
        ("virtualmachineinstances/sev/injectlaunchsecret", "", StatusCode::CONFLICT),
        ("virtualmachines/memorydump", "", StatusCode::BAD_REQUEST),
        ("virtualmachines/memorydump", r#"{"claimName": "c"}"#, StatusCode::NOT_FOUND),
        ("virtualmachines/removememorydump", "", StatusCode::CONFLICT),
        ("virtualmachines/hibernate", r#"{"discard": true}"#, StatusCode::CONFLICT),
        ("virtualmachineinstances/objectgraph", "", StatusCode::BAD_REQUEST),
    ] {
        assert_eq!(answer(&server, subresource, body).await.0, code, "{subresource:?} {body}");
    }
    let calls = calls.lock().unwrap();
    assert!(calls.iter().all(|(call, _)| call.starts_with("GET ")), "{calls:?}");
}

#[tokio::test]
async fn migration_of_a_running_vm_is_created() {
    const MIGRATIONS: &str = "/apis/kubevirt.io/v1/namespaces/ns/virtualmachineinstancemigrations";
    let running = || vmi(json!({"phase": "Running", "nodeName": "n1"}));
    let created = json!({
        "apiVersion": "kubevirt.io/v1", "kind": "VirtualMachineInstanceMigration",
        "metadata": {"name": "kubevirt-migrate-vm-x", "namespace": "ns"}, "spec": {"vmiName": "a"},
    });
    let objects = vec![(VM, vm(json!({"created": true}))), (VMI, running()), (MIGRATIONS, created)];
    let (accepting, calls) = server(ClusterConfig::default(), objects);
    let (status, text) = answer(&accepting, "virtualmachines/migrate", r#"{"addedNodeSelector": {"zone": "a"}}"#).await;
    assert_eq!((status, text.as_str()), (StatusCode::ACCEPTED, ""));
    let (call, migration) = calls.lock().unwrap().last().unwrap().clone();
    assert_eq!(call, format!("POST {MIGRATIONS}"));
    assert_eq!(migration["spec"], json!({"vmiName": "a", "addedNodeSelector": {"zone": "a"}}));
    // The API server refuses the object.
    let objects = vec![(VM, vm(json!({"created": true}))), (VMI, running())];
    let (refusing, _) = server(ClusterConfig::default(), objects);
    let (status, text) = answer(&refusing, "virtualmachines/migrate", "").await;
    assert_eq!(
        (status, message(&text).as_str()),
        (StatusCode::INTERNAL_SERVER_ERROR, "Internal error occurred: not found")
    );
}

#[tokio::test]
async fn volume_is_added_by_a_patch_of_the_template_or_of_a_vmi_without_vm() {
    const PLUG: &str =
        r#"{"name": "v", "disk": {"name": "v"}, "volumeSource": {"persistentVolumeClaim": {"claimName": "c"}}}"#;
    let running = json!({"phase": "Running", "nodeName": "n1"});
    let mut unowned = vmi(running);
    unowned["metadata"]["ownerReferences"] = json!([]);
    let objects = || vec![(VM, vm(json!({"created": true}))), (VMI, unowned.clone())];
    for (subresource, call, path) in [
        ("virtualmachines/addvolume", format!("PATCH {VM}"), "/spec/template/spec/volumes"),
        ("virtualmachineinstances/addvolume", format!("PATCH {VMI}"), "/spec/volumes"),
    ] {
        let (server, calls) = server(ClusterConfig::default(), objects());
        let (status, text) = answer(&server, subresource, PLUG).await;
        assert_eq!((status, text.as_str()), (StatusCode::ACCEPTED, ""), "{subresource}");
        let calls = calls.lock().unwrap();
        let (last, patch) = calls.last().unwrap();
        assert_eq!((last, &patch[2]["path"]), (&call, &json!(path)));
    }
}

#[tokio::test]
async fn dry_run_in_the_query_changes_nothing() {
    let running = json!({"phase": "Running", "nodeName": "n1"});
    let (server, calls) =
        server(ClusterConfig::default(), vec![(VM, vm(json!({"created": true}))), (VMI, vmi(running))]);
    let (ok, refused) = (StatusCode::OK, StatusCode::BAD_REQUEST);
    for (subresource, query, body, expected) in [
        ("virtualmachineinstances/pause", "dryRun=All", "", ok),
        ("virtualmachineinstances/pause", "x=y&dryRun=All", r#"{"dryRun": ["All"]}"#, ok),
        ("virtualmachineinstances/pause", "dryRun=all", r#"{"dryRun": ["All"]}"#, refused),
        ("virtualmachineinstances/pause", "dryRun=All", r#"{"dryRun": ["Some"]}"#, refused),
        ("virtualmachines/stop", "dryRun=", "", refused),
        ("virtualmachines/migrate", "dryRun=Some", "", refused),
        ("virtualmachineinstances/softreboot", "dryRun=All", "", refused),
        ("virtualmachineinstances/reset", "dryRun=All", "", refused),
        // These change nothing.
        ("virtualmachines/expand-spec", "dryRun=All", "", ok),
    ] {
        let mut sent = request(subresource, body);
        *sent.uri_mut() = format!("/?{query}").parse().unwrap();
        let (status, text) = read(server.dispatch(find(subresource), &object(), sent).await).await;
        assert_eq!(status, expected, "{subresource:?} {query} {body}: {text}");
    }
    let calls = calls.lock().unwrap();
    assert!(calls.iter().all(|(call, _)| call.starts_with("GET ") && !call.contains("/pods")), "{calls:?}");
}

#[tokio::test]
async fn evacuation_is_cancelled_by_a_patch_of_the_vmi() {
    let status = json!({"phase": "Running", "nodeName": "n1", "evacuationNodeName": "n1"});
    let node = json!({"apiVersion": "v1", "kind": "Node", "metadata": {"name": "n1"}, "spec": {}});
    let objects = vec![(VM, vm(json!({"created": true}))), (VMI, vmi(status)), ("/api/v1/nodes/n1", node)];
    let (server, calls) = server(ClusterConfig::default(), objects);
    let (status, text) = answer(&server, "virtualmachines/evacuate/cancel", r#"{"evacuationNodeName": "n1"}"#).await;
    assert_eq!((status, text.as_str()), (StatusCode::OK, ""));
    let calls = calls.lock().unwrap();
    let (call, patch) = calls.last().unwrap();
    assert_eq!(call, &format!("PATCH {VMI}"));
    assert_eq!(patch[0], json!({"op": "test", "path": "/status/evacuationNodeName", "value": "n1"}));
}

#[tokio::test]
async fn vm_without_instance_type_is_expanded_to_itself() {
    let (server, _) = server(ClusterConfig::default(), vec![(VM, vm(json!({})))]);
    let (status, text) = answer(&server, "virtualmachines/expand-spec", "").await;
    let expanded: Value = serde_json::from_str(&text).unwrap();
    assert_eq!((status, &expanded["kind"]), (StatusCode::OK, &json!("VirtualMachine")));
    let body = r#"{"apiVersion": "kubevirt.io/v1", "kind": "VirtualMachine", "metadata": {"name": "b"},
        "spec": {"runStrategy": "Halted", "template": {"spec": {"domain": {"devices": {}}}}}}"#;
    let (status, text) = answer(&server, "expand-vm-spec", body).await;
    let expanded: Value = serde_json::from_str(&text).unwrap();
    assert_eq!((status, &expanded["metadata"]["namespace"]), (StatusCode::OK, &json!("ns")));
    let (status, text) = answer(&server, "expand-vm-spec", r#"{"spec": {"unknown": 1}}"#).await;
    assert_eq!((status, message(&text).as_str()), (StatusCode::BAD_REQUEST, "Object is not a valid VirtualMachine"));
}

#[tokio::test]
async fn instance_type_of_a_vm_is_applied() {
    let class = json!({
        "apiVersion": "instancetype.kubevirt.io/v1beta1", "kind": "VirtualMachineClusterInstancetype",
        "metadata": {"name": "small"}, "spec": {"cpu": {"guest": 2}, "memory": {"guest": "1Gi"}},
    });
    let mut vm_object = vm(json!({}));
    vm_object["spec"]["instancetype"] = json!({"name": "small"});
    let path = "/apis/instancetype.kubevirt.io/v1beta1/virtualmachineclusterinstancetypes/small";
    let (server, _) = server(ClusterConfig::default(), vec![(VM, vm_object), (path, class)]);
    let (status, text) = answer(&server, "virtualmachines/expand-spec", "").await;
    let expanded: Value = serde_json::from_str(&text).unwrap();
    assert_eq!(status, StatusCode::OK, "{text}");
    assert_eq!(expanded["spec"]["template"]["spec"]["domain"]["memory"]["guest"], "1Gi");
    assert!(expanded["spec"]["instancetype"].is_null());
    // A missing preference is an internal error for a stored VM, and a bad request for a VM in the request.
    let body = r#"{"apiVersion": "kubevirt.io/v1", "kind": "VirtualMachine", "metadata": {"name": "b"},
        "spec": {"runStrategy": "Halted", "preference": {"name": "none"}, "template": {"spec": {"domain": {"devices": {}}}}}}"#;
    assert_eq!(answer(&server, "expand-vm-spec", body).await.0, StatusCode::BAD_REQUEST);
}

#[tokio::test]
async fn media_types_are_checked_first() {
    let (server, calls) = server(ClusterConfig::default(), vec![]);
    let object = object();
    let mut sent = request("virtualmachineinstances/guestosinfo", "");
    sent.headers_mut().insert(header::ACCEPT, header::HeaderValue::from_static("text/html"));
    let (status, _) = read(server.dispatch(find("virtualmachineinstances/guestosinfo"), &object, sent).await).await;
    assert_eq!(status, StatusCode::NOT_ACCEPTABLE);
    let mut typed = request("virtualmachineinstances/userlist", "");
    typed.headers_mut().insert(header::CONTENT_TYPE, header::HeaderValue::from_static("text/plain"));
    let (status, _) = read(server.dispatch(find("virtualmachineinstances/userlist"), &object, typed).await).await;
    assert_eq!(status, StatusCode::UNSUPPORTED_MEDIA_TYPE);
    let mut sent = request("expand-vm-spec", "{}");
    sent.headers_mut().remove(header::CONTENT_TYPE);
    let (status, _) = read(server.dispatch(find("expand-vm-spec"), &object, sent).await).await;
    assert_eq!(status, StatusCode::UNSUPPORTED_MEDIA_TYPE);
    assert!(calls.lock().unwrap().is_empty());
}

#[tokio::test]
async fn object_and_its_state_precede_an_invalid_body() {
    let (empty, _) = server(ClusterConfig::default(), vec![]);
    let waiting = json!({"phase": "Scheduling", "nodeName": "n1"});
    let node = json!({"apiVersion": "v1", "kind": "Node", "metadata": {"name": "n1"}, "spec": {}});
    let objects = vec![(VM, vm(json!({}))), (VMI, vmi(waiting)), ("/api/v1/nodes/n1", node)];
    let (waits, _) = server(ClusterConfig::default(), objects);
    for (subresource, expected) in [
        ("virtualmachines/start", StatusCode::CONFLICT),
        ("virtualmachineinstances/freeze", StatusCode::CONFLICT),
        ("virtualmachineinstances/backup", StatusCode::CONFLICT),
        ("virtualmachineinstances/redefine-checkpoint", StatusCode::CONFLICT),
        ("virtualmachineinstances/sev/injectlaunchsecret", StatusCode::CONFLICT),
        // It is not evacuated, so the options are not read.
        ("virtualmachineinstances/evacuate/cancel", StatusCode::OK),
    ] {
        assert_eq!(answer(&empty, subresource, "{").await.0, StatusCode::NOT_FOUND, "{subresource:?}");
        let (status, text) = answer(&waits, subresource, "{").await;
        assert_eq!(status, expected, "{subresource:?}: {text}");
    }
    let running = json!({"phase": "Running", "nodeName": "n1"});
    let (runs, _) = server(ClusterConfig::default(), vec![(VMI, vmi(running))]);
    assert_eq!(answer(&runs, "virtualmachineinstances/freeze", "{").await.0, StatusCode::BAD_REQUEST);
    assert_eq!(answer(&runs, "virtualmachineinstances/freeze", "").await.0, StatusCode::BAD_REQUEST);
}

#[tokio::test]
async fn attestation_is_not_available() {
    let status = json!({"phase": "Running", "nodeName": "n1", "conditions": [{"type": "Paused", "status": "True"}]});
    let mut vmi_object = vmi(status);
    vmi_object["spec"]["domain"]["launchSecurity"] = json!({"sev": {"attestation": {}}});
    let (server, _) = server(ClusterConfig::default(), vec![(VMI, vmi_object)]);
    for subresource in [
        "virtualmachineinstances/sev/fetchcertchain",
        "virtualmachineinstances/sev/querylaunchmeasurement",
        "virtualmachineinstances/sev/injectlaunchsecret",
    ] {
        let (status, text) = answer(&server, subresource, "").await;
        assert_eq!(
            (status, message(&text).as_str()),
            (StatusCode::NOT_IMPLEMENTED, "attestation is not available yet")
        );
    }
}
