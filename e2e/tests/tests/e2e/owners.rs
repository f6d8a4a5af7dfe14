//! Ownership of pods: only pods of virt-controller are launchers, regardless of labels and owners in pods and templates.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use ferrovirt_e2e_tests::{Socket, Story, TIMEOUT, condition, connect_without_retries, story, story_alone};
use futures::{StreamExt, TryStreamExt, stream};
use http::{Method, Request};
use kube::api::{DeleteParams, ListParams};
use serde_json::{Value, json};

use crate::manifests;

/// Number of foreign pods, more than one page of a list.
const STRANGERS: usize = 70;
/// Number of pods for exhausting virt-controller.
const BURDENS: usize = 500;
/// Size of their annotations: the limit of Kubernetes.
const BURDEN: usize = 255 * 1024;
/// Concurrent requests.
const AT_ONCE: usize = 8;
const MERGE: &str = "application/merge-patch+json";

/// Calls the API as a service account with role edit in the namespace.
async fn as_tenant(s: &Story, method: &Method, path: &str, body: &Value) -> Result<(u16, String)> {
    let user = format!("system:serviceaccount:{}:default", s.namespace);
    call_as(s, &user, "system:authenticated", method, path, body).await
}

/// Calls the API as administrator.
async fn as_admin(s: &Story, method: &Method, path: &str, body: &Value) -> Result<(u16, String)> {
    call_as(s, "admin", "system:masters", method, path, body).await
}

async fn call_as(
    s: &Story,
    user: &str,
    group: &str,
    method: &Method,
    path: &str,
    body: &Value,
) -> Result<(u16, String)> {
    let request = Request::builder()
        .method(method)
        .uri(path)
        .header("Impersonate-User", user)
        .header("Impersonate-Group", group)
        .header("Content-Type", if *method == Method::PATCH { MERGE } else { "application/json" });
    match s.client.request_text(request.body(body.to_string().into_bytes())?).await {
        Ok(text) => Ok((200, text)),
        Err(kube::Error::Api(status)) => Ok((status.code, status.message.clone())),
        Err(error) => Err(error).with_context(|| format!("{method} {path}")),
    }
}

/// Binds the service account to role edit and waits until the binding is in effect.
async fn become_tenant(s: &Story) -> Result<()> {
    s.apply(&format!(
        "
apiVersion: rbac.authorization.k8s.io/v1
kind: RoleBinding
metadata: {{name: tenant}}
roleRef: {{apiGroup: rbac.authorization.k8s.io, kind: ClusterRole, name: edit}}
subjects: [{{kind: ServiceAccount, name: default, namespace: {}}}]
",
        s.namespace
    ))
    .await?;
    let deadline = tokio::time::Instant::now() + TIMEOUT;
    while as_tenant(s, &Method::GET, &pods(s), &Value::Null).await?.0 == 403 {
        ensure!(tokio::time::Instant::now() < deadline, "a service account that may edit cannot list pods");
        tokio::time::sleep(Duration::from_millis(250)).await;
    }
    Ok(())
}

fn pods(s: &Story) -> String {
    format!("/api/v1/namespaces/{}/pods", s.namespace)
}

/// Returns a pod that is never scheduled.
fn stranger(name: &str, metadata: &Value) -> Value {
    let mut pod = json!({
        "apiVersion": "v1", "kind": "Pod", "metadata": {"name": name},
        "spec": {
            "schedulerName": "nobody", "automountServiceAccountToken": false,
            "securityContext": {"runAsNonRoot": true, "runAsUser": 107, "seccompProfile": {"type": "RuntimeDefault"}},
            "containers": [{"name": "compute", "image": "ferrovirt.io/toolbox:devel", "securityContext": {
                "allowPrivilegeEscalation": false, "capabilities": {"drop": ["ALL"]},
            }}],
        },
    });
    if let (Some(all), Some(more)) = (pod["metadata"].as_object_mut(), metadata.as_object()) {
        all.extend(more.clone());
    }
    pod
}

fn owner(vmi: &Value) -> Value {
    json!({
        "apiVersion": "kubevirt.io/v1", "kind": "VirtualMachineInstance", "controller": true,
        "name": vmi["metadata"]["name"], "uid": vmi["metadata"]["uid"],
    })
}

/// Checks that `pod` is the only active pod of the VMI.
async fn runs_in(s: &Story, vmi: &str, pod: &Value) -> Result<()> {
    let vmi = s.get("vmi", vmi).await?;
    let active = vmi["status"]["activePods"].as_object().context("no active pods")?;
    let uid = pod["metadata"]["uid"].as_str().context("pod without UID")?;
    ensure!(active.len() == 1 && active.contains_key(uid), "active pods: {active:?}");
    ensure!(vmi["status"]["phase"] == "Running", "the VMI is {}", vmi["status"]["phase"]);
    Ok(())
}

#[test]
fn cve_2025_64435_pod_of_a_tenant_is_never_used_as_launcher() {
    story("fake-launcher", async |s| {
        s.apply(&manifests::kernel_vmi("box")).await?;
        become_tenant(s).await?;
        let vmi = s.wait_running("box").await?;
        let launcher = s.launcher_pod("box").await?;
        let uid = &vmi["metadata"]["uid"];
        let labels = json!({"kubevirt.io": "virt-launcher", "kubevirt.io/created-by": uid});
        let made_by = "only virt-controller makes pods of virtual machine instances";

        let direct = stranger("direct", &json!({"ownerReferences": [owner(&vmi)]}));
        let (code, message) = as_tenant(s, &Method::POST, &pods(s), &direct).await?;
        ensure!(code == 403 && message.contains(made_by), "{code} {message}");
        // An owner of an unknown kind is allowed, until it is changed to the VMI.
        let mut invented = owner(&vmi);
        invented["apiVersion"] = json!("example.org/v1");
        invented["kind"] = json!("Invented");
        let fake = stranger("fake", &json!({"labels": labels, "ownerReferences": [invented]}));
        let (code, message) = as_tenant(s, &Method::POST, &pods(s), &fake).await?;
        ensure!(code == 200, "{code} {message}");
        let path = format!("{}/fake", pods(s));
        let become_launcher = json!({"metadata": {"ownerReferences": [owner(&vmi)]}});
        let (code, message) = as_tenant(s, &Method::PATCH, &path, &become_launcher).await?;
        ensure!(code == 403 && message.contains(made_by), "{code} {message}");

        // The launcher cannot be changed.
        let name = launcher["metadata"]["name"].as_str().context("pod without name")?;
        let path = format!("{}/{name}", pods(s));
        let mut other_name = owner(&vmi);
        other_name["name"] = json!("other");
        let mut no_controller = owner(&vmi);
        no_controller["controller"] = json!(false);
        for (change, words) in [
            (json!({"ownerReferences": null}), made_by),
            (json!({"ownerReferences": [other_name]}), made_by),
            (json!({"ownerReferences": [no_controller]}), made_by),
            (json!({"labels": {"kubevirt.io": null}}), "cannot be changed"),
            (json!({"labels": {"kubevirt.io": "web"}}), "cannot be changed"),
            (json!({"labels": {"kubevirt.io/created-by": null}}), "cannot be changed"),
            (json!({"labels": null}), "cannot be changed"),
        ] {
            let body = json!({"metadata": change});
            let (code, message) = as_tenant(s, &Method::PATCH, &path, &body).await?;
            ensure!(code == 403 && message.contains(words), "{change}: {code} {message}");
            // Through the status, where the API server keeps the owners.
            if change.get("labels").is_some() {
                let (code, message) = as_admin(s, &Method::PATCH, &format!("{path}/status"), &body).await?;
                ensure!(code == 403 && message.contains(words), "{change} of the status: {code} {message}");
            }
        }
        let own = json!({"metadata": {"labels": {"team": "blue"}, "annotations": {"team": "blue"}}});
        let (code, message) = as_tenant(s, &Method::PATCH, &path, &own).await?;
        ensure!(code == 200, "{code} {message}");
        runs_in(s, "box", &launcher).await
    });
}

#[test]
fn pod_of_a_tenant_with_the_name_of_a_launcher_keeps_it() {
    story("taken-name", async |s| {
        s.apply(
            "{apiVersion: v1, kind: ResourceQuota, metadata: {name: little}, spec: {hard: {requests.memory: 8Mi}}}",
        )
        .await?;
        let is_in_force = |quota: &Value| quota["status"]["hard"]["requests.memory"] == "8Mi";
        s.wait("ResourceQuota", "little", "be in force", TIMEOUT, is_in_force).await?;
        become_tenant(s).await?;
        s.apply(&manifests::kernel_vmi("box")).await?;
        let refused = |vmi: &Value| refusal(vmi).is_some_and(|message| message.contains("exceeded quota"));
        let vmi = s.wait("vmi", "box", "report the quota", TIMEOUT, refused).await?;
        // pods "virt-launcher-box-..." is forbidden
        let message = refusal(&vmi).unwrap_or_default();
        let name = message.split('"').nth(1).filter(|name| name.starts_with("virt-launcher-box-"));
        let name = name.with_context(|| format!("no name in {message:?}"))?;

        let mut taken = stranger(name, &json!({}));
        taken["spec"]["containers"][0]["resources"] = json!({"requests": {"memory": "4Mi"}});
        let (code, answer) = as_tenant(s, &Method::POST, &pods(s), &taken).await?;
        ensure!(code == 200, "{code} {answer}");
        s.delete("ResourceQuota", "little").await?;
        s.wait_running("box").await?;
        let launcher = s.launcher_pod("box").await?;
        let own = launcher["metadata"]["name"].as_str().context("pod without name")?;
        ensure!(own != name && own.starts_with("virt-launcher-box-"), "the launcher is {own}");
        runs_in(s, "box", &launcher).await?;
        let stranger = s.get("Pod", name).await?;
        let metadata = &stranger["metadata"];
        ensure!(metadata["deletionTimestamp"].is_null() && metadata["ownerReferences"].is_null(), "{metadata}");
        Ok(())
    });
}

/// Returns why a VMI has no pod.
fn refusal(vmi: &Value) -> Option<&str> {
    condition(vmi, "Synchronized")?["message"].as_str()
}

#[test]
fn launcher_is_found_among_many_pods_with_its_label() {
    story("strangers", async |s| {
        s.apply(&manifests::kernel_vmi("box")).await?;
        become_tenant(s).await?;
        let vmi = s.wait_running("box").await?;
        let launcher = s.launcher_pod("box").await?;
        let labels =
            json!({"labels": {"kubevirt.io": "virt-launcher", "kubevirt.io/created-by": vmi["metadata"]["uid"]}});
        let (labels, path) = (&labels, &pods(s));
        stream::iter(0..STRANGERS)
            .map(|number| async move {
                let (code, message) =
                    as_tenant(s, &Method::POST, path, &stranger(&format!("a{number}"), labels)).await?;
                ensure!(code == 200, "{code} {message}");
                Ok(())
            })
            .buffer_unordered(AT_ONCE)
            .try_collect::<Vec<()>>()
            .await?;
        // The port has no listener, but virt-api has found the launcher.
        let forward = format!(
            "/apis/subresources.kubevirt.io/v1/namespaces/{}/virtualmachineinstances/box/portforward/7",
            s.namespace
        );
        if let Err(answer) = Socket::open(&connect_without_retries().await?, &forward, None).await? {
            ensure!(answer.message().contains("dialing VM"), "{} {}", answer.code, answer.message());
        }
        runs_in(s, "box", &launcher).await?;
        let all = DeleteParams::default().grace_period(0);
        let strangers = ListParams::default().fields("status.phase=Pending");
        s.api("Pod").delete_collection(&all, &strangers).await?;
        Ok(())
    });
}

#[test]
fn vmi_that_does_not_exist_blocks_no_drain() {
    story("ghost", async |s| {
        let grace = "  terminationGracePeriodSeconds: 10\n";
        let strategy = format!("{grace}  evictionStrategy: LiveMigrate\n");
        s.apply(&manifests::kernel_vmi("ghost").replace(grace, &strategy)).await?;
        s.wait_running("ghost").await?;
        let pod = s.launcher_pod("ghost").await?;
        let name = pod["metadata"]["name"].as_str().context("pod without name")?;
        let path = format!("{}/{name}/eviction", pods(s));
        let eviction = json!({"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": name, "namespace": s.namespace}});
        let client = connect_without_retries().await?;
        let evict = async || {
            let request = Request::post(&path).header("Content-Type", "application/json");
            match client.request_text(request.body(eviction.to_string().into_bytes())?).await {
                Ok(_) => Ok((201, String::new())),
                Err(kube::Error::Api(status)) => Ok((status.code, status.message.clone())),
                Err(error) => Err(anyhow::Error::from(error)),
            }
        };
        let (code, message) = evict().await?;
        ensure!(code == 429, "a VMI that only a migration may move holds its launcher: {code} {message}");
        // Removed before its launcher, as after a removal of its finalizers.
        s.delete("vmi", "ghost").await?;
        let vmi = format!("/apis/kubevirt.io/v1/namespaces/{}/virtualmachineinstances/ghost", s.namespace);
        let bare = json!({"metadata": {"finalizers": null}});
        let (code, message) = as_admin(s, &Method::PATCH, &vmi, &bare).await?;
        ensure!([200, 404].contains(&code), "{code} {message}");
        s.wait_gone("vmi", "ghost", TIMEOUT).await?;
        // virt-api notices objects that it watches with a delay.
        let deadline = tokio::time::Instant::now() + TIMEOUT;
        loop {
            let (code, message) = evict().await?;
            if [201, 404].contains(&code) {
                break;
            }
            ensure!(tokio::time::Instant::now() < deadline, "{code} {message}");
            tokio::time::sleep(Duration::from_millis(250)).await;
        }
        s.wait_gone("Pod", name, TIMEOUT).await
    });
}

#[test]
fn templates_carry_no_reserved_labels() {
    story("reserved-labels", async |s| {
        let set = |label: &str| {
            format!(
                "
apiVersion: kubevirt.io/v1
kind: VirtualMachineInstanceReplicaSet
metadata: {{name: set}}
spec:
  replicas: 0
  selector: {{matchLabels: {{app: set}}}}
  template:
    metadata: {{labels: {{app: set, {label}: a-node}}}}
    spec:
      domain:
        memory: {{guest: 128Mi}}
        devices: {{}}
"
            )
        };
        s.apply(&set("team")).await?;
        for label in ["kubevirt.io/nodeName", "kubevirt.io/migrationTargetNodeName", "kubevirt.io/created-by"] {
            let vm = manifests::kernel_vm("vm", "Halted").replace("{app: vm}", &format!("{{{label}: a-node}}"));
            for (manifest, field) in
                [(set(label), "spec.template.metadata.labels"), (vm, "spec.template.metadata.labels")]
            {
                let message = s.refused(&manifest).await?;
                ensure!(
                    message.contains("reserved kubevirt.io/ labels") && message.contains(field),
                    "{label}: {message}"
                );
            }
        }
        Ok(())
    });
}

/// Returns the memory of virt-controller's containers in bytes by kubelet, and their restarts.
async fn controllers(s: &Story) -> Result<Vec<(String, Option<u64>, i64)>> {
    let pods = s.installation_api("Pod").list(&ListParams::default().labels("kubevirt.io=virt-controller")).await?;
    let mut found = Vec::new();
    for pod in pods.items.into_iter().map(serde_json::to_value) {
        let pod = pod?;
        let (name, node) = (pod["metadata"]["name"].as_str(), pod["spec"]["nodeName"].as_str());
        let (Some(name), Some(node)) = (name, node) else { continue };
        let answer = s.call(&Method::GET, &format!("/api/v1/nodes/{node}/proxy/stats/summary"), &Value::Null).await?;
        let summary = answer.json();
        let of_pod = summary["pods"].as_array().into_iter().flatten().find(|entry| entry["podRef"]["name"] == name);
        let memory = of_pod.and_then(|entry| entry["containers"][0]["memory"]["rssBytes"].as_u64());
        let restarts = pod["status"]["containerStatuses"][0]["restartCount"].as_i64().unwrap_or_default();
        found.push((name.to_owned(), memory, restarts));
    }
    Ok(found)
}

#[test]
fn pods_with_the_label_of_launchers_do_not_exhaust_a_new_leader() {
    story_alone("burden", async |s| {
        let deployment = serde_json::to_value(s.installation_api("Deployment").get("virt-controller").await?)?;
        let limit = &deployment["spec"]["template"]["spec"]["containers"][0]["resources"]["limits"]["memory"];
        let limit = limit.as_str().and_then(|text| text.strip_suffix("Mi")).context("the limit is not in Mi")?;
        let limit = limit.parse::<u64>()? << 20;

        become_tenant(s).await?;
        // A key that virt-controller reads from launchers.
        let metadata = json!({
            "labels": {"kubevirt.io": "virt-launcher"},
            "annotations": {"descheduler.alpha.kubernetes.io/evict": "x".repeat(BURDEN)},
        });
        let (metadata, path) = (&metadata, &pods(s));
        stream::iter(0..BURDENS)
            .map(|number| async move {
                let (code, message) =
                    as_tenant(s, &Method::POST, path, &stranger(&format!("p{number}"), metadata)).await?;
                ensure!(code == 200, "{code} {message}");
                Ok(())
            })
            .buffer_unordered(AT_ONCE)
            .try_collect::<Vec<()>>()
            .await?;

        // A new leader fills its caches.
        let api = s.installation_api("Pod");
        for (name, ..) in controllers(s).await? {
            api.delete(&name, &DeleteParams::default().grace_period(0)).await?;
        }
        s.apply(&manifests::kernel_vmi("later")).await?;
        s.wait_running("later").await?;
        let deadline = tokio::time::Instant::now() + TIMEOUT;
        let measured = loop {
            let measured = controllers(s).await?;
            if measured.len() > 1 && measured.iter().all(|(_, memory, _)| memory.is_some_and(|memory| memory > 0)) {
                break measured;
            }
            ensure!(tokio::time::Instant::now() < deadline, "kubelet does not tell the memory: {measured:?}");
            tokio::time::sleep(Duration::from_secs(1)).await;
        };
        eprintln!("virt-controller with {BURDENS} burdens: {measured:?}, limit {limit}");
        // Far below the limit, since the measurement may miss the peak. Foreign pods are not kept, and pages are small.
        let most = limit / 4;
        let fits =
            |(_, memory, restarts): &(String, Option<u64>, i64)| *restarts == 0 && memory.is_some_and(|m| m < most);
        ensure!(measured.iter().all(fits), "{measured:?} with a limit of {limit}");
        let all = DeleteParams::default().grace_period(0);
        s.api("Pod").delete_collection(&all, &ListParams::default().fields("status.phase=Pending")).await?;
        Ok(())
    });
}
