//! Rights of user roles: each kind of user calls each subresource through the API server.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use ferrovirt_e2e_tests::{Story, TIMEOUT, story};
use http::{Method, Request};
use serde_json::{Value, json};

use crate::{
    manifests,
    moves::{self, MINUTES, begin, two_nodes, with_policy},
};

/// Roles of a namespace that may use a subresource.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum May {
    /// `admin` only.
    Admin,
    /// `admin` and `edit`.
    Edit,
    /// `admin`, `edit` and `view`.
    View,
    /// No role of a namespace.
    Nobody,
}

use May::{Admin, Edit, Nobody, View};

const GET: Method = Method::GET;
const PUT: Method = Method::PUT;
const VM: &str = "virtualmachines/none";
const VMI: &str = "virtualmachineinstances/none";

/// Verb, object, subresource, and the roles that may use it.
const RIGHTS: &[(Method, &str, &str, May)] = &[
    (GET, VMI, "console", Edit),
    (GET, VMI, "vnc", Edit),
    (GET, VMI, "portforward/80", Edit),
    (GET, VMI, "usbredir", Edit),
    (GET, VMI, "vnc/screenshot", Admin),
    (GET, VMI, "guestosinfo", View),
    (GET, VMI, "filesystemlist", View),
    (GET, VMI, "userlist", View),
    (GET, VMI, "usage", View),
    (GET, VMI, "sev/fetchcertchain", View),
    (GET, VMI, "sev/querylaunchmeasurement", View),
    (GET, VMI, "objectgraph", View),
    (GET, VM, "objectgraph", View),
    (PUT, VMI, "pause", Edit),
    (PUT, VMI, "unpause", Edit),
    (PUT, VMI, "addvolume", Edit),
    (PUT, VMI, "removevolume", Edit),
    (PUT, VMI, "freeze", Edit),
    (PUT, VMI, "unfreeze", Edit),
    (PUT, VMI, "softreboot", Edit),
    (PUT, VMI, "reset", Edit),
    (PUT, VMI, "sev/setupsession", Edit),
    (PUT, VMI, "sev/injectlaunchsecret", Edit),
    (PUT, VMI, "evacuate/cancel", Edit),
    (GET, VM, "expand-spec", View),
    (GET, VM, "portforward/80", Edit),
    (PUT, VM, "start", Edit),
    (PUT, VM, "stop", Edit),
    (PUT, VM, "restart", Edit),
    (PUT, VM, "addvolume", Edit),
    (PUT, VM, "removevolume", Edit),
    (PUT, VM, "memorydump", Edit),
    (PUT, VM, "removememorydump", Edit),
    (PUT, VM, "hibernate", Edit),
    (PUT, VM, "evacuate/cancel", Edit),
    (PUT, VM, "migrate", Nobody),
    (GET, VMI, "vsock", Nobody),
    (PUT, VMI, "backup", Nobody),
    (PUT, VMI, "redefine-checkpoint", Nobody),
];

#[test]
fn each_role_uses_exactly_its_subresources() {
    story("rights", async |s| {
        let users = bind_roles(s).await?;
        let mut wrong = Vec::new();
        for version in ["v1", "v1alpha3"] {
            for (verb, object, subresource, may) in RIGHTS {
                for (user, role) in &users {
                    let path = format!(
                        "/apis/subresources.kubevirt.io/{version}/namespaces/{}/{object}/{subresource}",
                        s.namespace
                    );
                    // The object does not exist: an authorized user gets 404. The API server checks the first part of a
                    // subresource and returns 403; virt-api checks the whole and returns 401.
                    let permitted = ![401, 403].contains(&code(s, verb, &path, user).await?);
                    let expected = match may {
                        Admin => *role == "admin",
                        Edit => ["admin", "edit"].contains(role),
                        View => ["admin", "edit", "view"].contains(role),
                        Nobody => false,
                    };
                    if permitted != expected {
                        wrong.push(format!("{role}: {verb} {version} {object}/{subresource} permitted: {permitted}"));
                    }
                }
            }
        }
        ensure!(wrong.is_empty(), "{} of the rights are wrong:\n{}", wrong.len(), wrong.join("\n"));
        Ok(())
    });
}

#[test]
fn authenticated_users_without_roles_read_only_the_version() {
    story("version", async |s| {
        for (path, expected) in [
            ("/apis/subresources.kubevirt.io/v1/version", 200),
            ("/apis/subresources.kubevirt.io/v1alpha3/version", 200),
            ("/apis/subresources.kubevirt.io/v1", 200),
        ] {
            let code = code(s, &GET, path, "nobody-at-all").await?;
            ensure!(code == expected, "{path}: {code} instead of {expected}");
        }
        Ok(())
    });
}

/// Creates users with the roles of a namespace, a user without roles, and a service account without roles.
async fn bind_roles(s: &Story) -> Result<Vec<(String, &'static str)>> {
    let mut users = Vec::new();
    for role in ["admin", "edit", "view"] {
        let user = format!("{role}-{}", s.namespace);
        s.apply(&format!(
            "
apiVersion: rbac.authorization.k8s.io/v1
kind: RoleBinding
metadata: {{name: {role}}}
roleRef: {{apiGroup: rbac.authorization.k8s.io, kind: ClusterRole, name: {role}}}
subjects: [{{apiGroup: rbac.authorization.k8s.io, kind: User, name: {user}}}]
"
        ))
        .await?;
        users.push((user, role));
    }
    users.push(("nobody-at-all".to_owned(), "nobody"));
    users.push((format!("system:serviceaccount:{}:default", s.namespace), "service account"));
    // The API server caches bindings: wait for the last one.
    let path = format!("/apis/subresources.kubevirt.io/v1/namespaces/{}/{VM}/expand-spec", s.namespace);
    let deadline = tokio::time::Instant::now() + TIMEOUT;
    while [401, 403].contains(&code(s, &GET, &path, &format!("view-{}", s.namespace)).await?) {
        ensure!(tokio::time::Instant::now() < deadline, "a viewer may not read what viewers may");
        tokio::time::sleep(Duration::from_millis(500)).await;
    }
    Ok(users)
}

/// Returns the HTTP status of a call as the user.
async fn code(s: &Story, verb: &Method, path: &str, user: &str) -> Result<u16> {
    let request = Request::builder()
        .method(verb)
        .uri(path)
        .header("Impersonate-User", user)
        .header("Content-Type", "application/json");
    // A service account has the groups of its token. A user without groups is not authenticated.
    let request = ["system:authenticated"].iter().fold(request, |r, group| r.header("Impersonate-Group", *group));
    match s.client.request_text(request.body(Vec::new())?).await {
        Ok(_) => Ok(200),
        Err(kube::Error::Api(status)) => Ok(status.code),
        Err(error) => Err(error).with_context(|| format!("{verb} {path} as {user}")),
    }
}

/// Calls the API as virt-handler with a token that is bound to a node, as kubelet requests it.
async fn as_handler(s: &Story, node: &str, verb: &Method, path: &str, body: &Value) -> Result<u16> {
    as_account(s, "kubevirt-handler", node, verb, path, body).await
}

/// Calls the API as a service account of the installation with a token that is bound to a node.
async fn as_account(s: &Story, account: &str, node: &str, verb: &Method, path: &str, body: &Value) -> Result<u16> {
    let request = Request::builder()
        .method(verb)
        .uri(path)
        .header("Impersonate-User", format!("system:serviceaccount:kubevirt:{account}"))
        .header("Impersonate-Group", "system:authenticated")
        .header("Impersonate-Extra-authentication.kubernetes.io%2Fnode-name", node)
        .header(
            "Content-Type",
            if *verb == Method::PATCH { "application/merge-patch+json" } else { "application/json" },
        );
    match s.client.request_text(request.body(body.to_string().into_bytes())?).await {
        Ok(_) => Ok(200),
        Err(kube::Error::Api(status)) => Ok(status.code),
        Err(error) => Err(error).with_context(|| format!("{verb} {path} as {account} on {node}")),
    }
}

/// Returns the path of the story's VMI for requests that change nothing.
fn dry_run(s: &Story) -> String {
    format!("/apis/kubevirt.io/v1/namespaces/{}/virtualmachineinstances/box?dryRun=All", s.namespace)
}

/// Returns a patch with one volume in the status.
fn volumes(entry: &Value) -> Value {
    let mut volume = json!({"name": "x", "target": ""});
    if let (Some(volume), Some(entry)) = (volume.as_object_mut(), entry.as_object()) {
        volume.extend(entry.clone());
    }
    json!({"status": {"volumeStatus": [volume]}})
}

#[test]
fn cve_2023_26484_cve_2025_64436_virt_handler_writes_only_its_own_node_and_vmis_and_reads_no_secret() {
    story("handler-rights", async |s| {
        s.apply(&manifests::kernel_vmi("box")).await?;
        let vmi = s.wait_running("box").await?;
        let own = vmi["status"]["nodeName"].as_str().context("the VMI has no node")?;
        let node = format!("/api/v1/nodes/{own}?dryRun=All");
        let vmi_path = dry_run(s);
        for (handler_of, path, patch, expected) in [
            (own, &node, json!({"metadata": {"labels": {"kubevirt.io/x": "y"}}}), 200),
            ("another", &node, json!({"metadata": {"labels": {"kubevirt.io/x": "y"}}}), 403),
            ("", &node, json!({"metadata": {"labels": {"kubevirt.io/x": "y"}}}), 403),
            (own, &node, json!({"metadata": {"labels": {"node-role.kubernetes.io/control-plane": ""}}}), 403),
            (own, &node, json!({"spec": {"unschedulable": true}}), 403),
            (own, &vmi_path, json!({"status": {"reason": "x"}}), 200),
            ("another", &vmi_path, json!({"status": {"reason": "x"}}), 403),
            (own, &vmi_path, json!({"status": {"nodeName": "another"}}), 403),
            (own, &vmi_path, json!({"spec": {"hostname": "x"}}), 403),
            (own, &vmi_path, json!({"metadata": {"labels": {"kubevirt.io/nodeName": "another"}}}), 403),
            (own, &vmi_path, json!({"metadata": {"labels": {"kubevirt.io/migrationTargetNodeName": "another"}}}), 403),
            (own, &vmi_path, json!({"status": {"migrationState": {"targetNode": "another"}}}), 403),
            ("another", &vmi_path, json!({"status": {"nodeName": "another"}}), 403),
            (own, &vmi_path, json!({"metadata": {"finalizers": null}}), 403),
            (own, &vmi_path, json!({"status": {"activePods": {"p": "another"}}}), 403),
            (own, &vmi_path, json!({"status": {"VSOCKCID": 5}}), 403),
            (own, &vmi_path, json!({"metadata": {"annotations": {"x": "y"}}}), 403),
            (own, &vmi_path, json!({"status": {"migrationState": {"failed": true}}}), 403),
            (own, &vmi_path, volumes(&json!({"hotplugVolume": {"attachPodUID": "x"}})), 403),
            (own, &vmi_path, volumes(&json!({"persistentVolumeClaimInfo": {"claimName": "x"}})), 403),
            (own, &vmi_path, volumes(&json!({"size": 5})), 200),
        ] {
            let code = as_handler(s, handler_of, &Method::PATCH, path, &patch).await?;
            ensure!(code == expected, "virt-handler of {handler_of:?}, {path}, {patch}: {code} instead of {expected}");
        }
        let nothing = json!(null);
        for path in ["/api/v1/secrets", "/api/v1/namespaces/kubevirt/secrets/kubevirt-ca", "/api/v1/pods"] {
            let code = as_handler(s, own, &Method::GET, path, &nothing).await?;
            ensure!(code == 403, "virt-handler may read {path}: {code}");
        }
        // virt-controller may change the aggregation labels of the roles for users, and nothing else about roles.
        let labels = |key: &str, value: &str| json!({"metadata": {"labels": {(format!("rbac.authorization.k8s.io/aggregate-to-{key}")): value}}});
        for (role, patch, expected) in [
            ("kubevirt.io:edit", labels("edit", "false"), 200),
            ("kubevirt.io:edit", labels("edit", "perhaps"), 403),
            ("kubevirt.io:edit", labels("view", "true"), 403),
            ("kubevirt.io:edit", json!({"rules": [{"apiGroups": ["*"], "resources": ["*"], "verbs": ["*"]}]}), 403),
            ("kubevirt-controller", labels("edit", "true"), 403),
        ] {
            let path = format!("/apis/rbac.authorization.k8s.io/v1/clusterroles/{role}?dryRun=All");
            let code = as_account(s, "kubevirt-controller", own, &Method::PATCH, &path, &patch).await?;
            ensure!(code == expected, "virt-controller, {role}, {patch}: {code} instead of {expected}");
        }
        // A pod with the VMI as owner, created by an administrator.
        let owner = json!([{"apiVersion": "kubevirt.io/v1", "kind": "VirtualMachineInstance", "name": "box",
            "uid": vmi["metadata"]["uid"], "controller": true}]);
        let pod = json!({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "stranger", "ownerReferences": owner},
        "spec": {
            "securityContext": {"runAsNonRoot": true, "runAsUser": 1000, "seccompProfile": {"type": "RuntimeDefault"}},
            "containers": [{"name": "c", "image": "x", "securityContext": {
                "allowPrivilegeEscalation": false, "capabilities": {"drop": ["ALL"]},
            }}],
        }});
        let refused = s.refused(&pod.to_string()).await?;
        ensure!(refused.contains("only virt-controller makes pods"), "{refused}");
        Ok(())
    });
}

#[test]
fn migration_target_writes_only_its_part_of_a_vmi() {
    story("migration-rights", async |s| {
        if two_nodes(s).await?.is_none() {
            return Ok(());
        }
        s.apply(&moves::vm("box", "Always")).await?;
        s.wait_running("box").await?;
        // Slow enough for all rows.
        with_policy(s, json!({"bandwidthPerMigration": "1Mi", "completionTimeoutPerGiB": 9000}), async |_| {
            let migration = begin(s, "box").await?;
            let copied = |vmi: &Value| vmi["status"]["migrationState"]["targetNodeDomainDetected"] == true;
            let vmi = s.wait("vmi", "box", "be copied", MINUTES, copied).await?;
            during_a_migration(s, &vmi["status"]["migrationState"]).await?;
            let now = s.get("vmi", "box").await?;
            ensure!(now["status"]["migrationState"]["completed"] != true, "the migration was too fast for the story");
            s.virt(&["migrate-cancel", "box"]).await?;
            s.wait_gone("vmim", &migration, MINUTES).await?;
            let failed = |vmi: &Value| vmi["status"]["migrationState"]["failed"] == true;
            let vmi = s.wait("vmi", "box", "show the failure", MINUTES, failed).await?;
            after_its_failure(s, &vmi["status"]["migrationState"]).await
        })
        .await
    });
}

/// Returns a patch of the state of the migration.
fn migration(fields: Value) -> Value {
    json!({"status": {"migrationState": fields}})
}

/// Returns the write that passes ownership to the target, with more fields of the status.
fn take_over(target: &Value, more: &Value) -> Value {
    let mut status = json!({
        "nodeName": target, "evacuationNodeName": null, "migrationTransport": "Unix",
        "migrationState": {"endTimestamp": "2030-01-01T00:00:00Z", "targetNodeDomainReadyTimestamp": "2030-01-01T00:00:00Z"},
    });
    json_patch::merge(&mut status, more);
    json!({"metadata": {"labels": {"kubevirt.io/nodeName": target}}, "status": status})
}

/// Checks the writes of both ends and of a third node while the guest is copied.
async fn during_a_migration(s: &Story, state: &Value) -> Result<()> {
    let (source, target, third) = (&state["sourceNode"], &state["targetNode"], json!("another"));
    let failed =
        || json!({"failed": true, "completed": true, "failureReason": "x", "endTimestamp": "2030-01-01T00:00:00Z"});
    let mut rows = vec![
        (source, migration(json!({"mode": "PostCopy", "abortStatus": "Failed"})), 200),
        (source, migration(failed()), 200),
        (source, migration(json!({"completed": true})), 403),
        (source, migration(json!({"startTimestamp": "2030-01-01T00:00:00Z"})), 403),
        (source, migration(json!({"targetNodeAddress": "127.0.0.1"})), 403),
        (source, migration(json!({"targetAttachmentPodUID": "x"})), 403),
        (source, migration(json!({"migrationConfiguration": {"allowPostCopy": true}})), 403),
        (source, json!({"status": {"migratedVolumes": [{"volumeName": "x"}]}}), 403),
        (source, json!({"status": {"nodeName": target}}), 403),
        (target, migration(json!({"targetNodeAddress": "10.0.0.1"})), 200),
        (target, take_over(target, &json!({})), 200),
        (target, take_over(target, &json!({"phase": "Failed"})), 403),
        (target, take_over(target, &json!({"activePods": {"x": target}})), 403),
        (target, take_over(target, &json!({"migrationState": {"targetPod": "x"}})), 403),
        // In the place of a silent source.
        (target, migration(failed()), 200),
        (target, migration(json!({"mode": "PostCopy"})), 403),
        (target, json!({"metadata": {"labels": {"kubevirt.io/nodeName": target}}}), 403),
        (target, json!({"metadata": {"labels": {"x": "y"}}}), 403),
        (target, json!({"metadata": {"annotations": {"x": "y"}}}), 403),
    ];
    for (field, value) in [
        ("phase", json!("Failed")),
        ("reason", json!("x")),
        ("conditions", json!([])),
        ("interfaces", json!([{"name": "default", "ipAddress": "10.0.0.1"}])),
        ("volumeStatus", json!([{"name": "x", "target": "vda"}])),
        ("evacuationNodeName", json!(target)),
        ("guestOSInfo", json!({"name": "x"})),
    ] {
        rows.push((target, json!({"status": {(field): value}}), 403));
    }
    rows.push((&third, take_over(&third, &json!({})), 403));
    written_as(s, &rows).await
}

/// Checks that neither end turns the failed migration into another one.
async fn after_its_failure(s: &Story, state: &Value) -> Result<()> {
    let (source, target) = (&state["sourceNode"], &state["targetNode"]);
    let revived = || json!({"failed": null, "completed": null, "endTimestamp": null, "failureReason": null});
    let mut rows = vec![(source, json!({"status": {"reason": "x"}}), 200)];
    for node in [source, target] {
        rows.extend([
            (node, migration(revived()), 403),
            (node, migration(json!({"failed": false})), 403),
            (node, migration(json!({"endTimestamp": "2030-01-01T00:00:00Z"})), 403),
            (node, json!({"status": {"migrationState": null}}), 403),
        ]);
    }
    rows.push((target, take_over(target, &json!({})), 403));
    rows.push((target, json!({"status": {"nodeName": target, "migrationState": revived()}}), 403));
    written_as(s, &rows).await
}

/// Checks the answers to writes by the virt-handlers of nodes.
async fn written_as(s: &Story, rows: &[(&Value, Value, u16)]) -> Result<()> {
    for (node, patch, expected) in rows {
        let node = node.as_str().context("no node")?;
        let code = as_handler(s, node, &Method::PATCH, &dry_run(s), patch).await?;
        ensure!(code == *expected, "virt-handler of {node}, {patch}: {code} instead of {expected}");
    }
    Ok(())
}
