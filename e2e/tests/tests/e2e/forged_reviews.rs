//! Forged reviews, and the secret path segment that detects them.

use std::{cell::Cell, time::Duration};

use anyhow::{Context, Result, ensure};
use ferrovirt_e2e_tests::{
    Story, TIMEOUT, connect_without_retries, story, story_alone,
    webhook::{Connection, Endpoint},
};
use http::Method;
use k8s_openapi::api::core::v1::{Namespace, Pod};
use kube::{
    Api,
    api::{DeleteParams, ListParams, Patch, PatchParams},
};
use serde_json::{Value, json};
use tokio::time::Instant;

use crate::{installation::upgrade, manifests};

/// Secret with the segments.
const SECRET: &str = "kubevirt-webhook-path";
/// Pause between reviewed writes.
const PAUSE: Duration = Duration::from_millis(50);
/// Polling interval.
const LOOK: Duration = Duration::from_millis(250);

/// Returns a review as kube-apiserver sends it.
fn review(resource: [&str; 3], kind: &str, namespace: &str, name: &str, operation: &str, object: &Value) -> String {
    let [group, version, plural] = resource;
    let kind = json!({"group": group, "version": version, "kind": kind});
    let (plural, subresource) = plural.split_once('/').map_or((plural, None), |(plural, sub)| (plural, Some(sub)));
    let resource = json!({"group": group, "version": version, "resource": plural});
    json!({
        "apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview",
        "request": {
            "uid": "6a6b1d6c-0b5e-4c43-9d5c-000000000001",
            "kind": kind, "resource": resource, "requestKind": kind, "requestResource": resource,
            "subResource": subresource, "requestSubResource": subresource,
            "name": name, "namespace": namespace, "operation": operation,
            "userInfo": {"username": "system:admin", "groups": ["system:masters", "system:authenticated"]},
            "object": object, "oldObject": null, "dryRun": false,
            "options": {"kind": "CreateOptions", "apiVersion": "meta.k8s.io/v1"},
        },
    })
    .to_string()
}

/// Returns requests about another namespace: paths, and reviews that virt-api answers when an API server sends them.
fn forgeries(namespace: &str, pod: &str) -> [(&'static str, String); 3] {
    let eviction =
        json!({"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": pod, "namespace": namespace}});
    let vmi = json!({
        "apiVersion": "kubevirt.io/v1", "kind": "VirtualMachineInstance",
        "metadata": {"name": "spy", "namespace": namespace, "labels": {"size": "large"}},
        "spec": {"domain": {"memory": {"guest": "64Mi"}, "devices": {}}},
    });
    let vm = json!({
        "apiVersion": "kubevirt.io/v1", "kind": "VirtualMachine", "metadata": {"name": "spy", "namespace": namespace},
        "spec": {
            "runStrategy": "Halted", "instancetype": {"inferFromVolume": "data"},
            "template": {"spec": {
                "domain": {"devices": {}},
                "volumes": [{"name": "data", "persistentVolumeClaim": {"claimName": "data"}}],
            }},
        },
    });
    let pods = ["", "v1", "pods/eviction"];
    let vmis = ["kubevirt.io", "v1", "virtualmachineinstances"];
    let vms = ["kubevirt.io", "v1", "virtualmachines"];
    [
        ("/pod-eviction-validate", review(pods, "Eviction", namespace, pod, "CREATE", &eviction)),
        ("/virtualmachineinstances-mutate", review(vmis, "VirtualMachineInstance", namespace, "spy", "CREATE", &vmi)),
        ("/virtualmachines-mutate", review(vms, "VirtualMachine", namespace, "spy", "CREATE", &vm)),
    ]
}

/// Returns the HTTP status of the answer to a review.
async fn post(connection: &mut Connection, path: &str, body: &str) -> Result<u16> {
    let answer = connection.review(path, body.to_owned()).await.with_context(|| format!("review to {path}"))?;
    if answer.status == 404 {
        ensure!(answer.body.is_empty(), "{path}: a refusal says {:?}", answer.body);
    }
    Ok(answer.status)
}

#[test]
fn forged_review_from_a_pod_is_refused() {
    story("forger", async |s| {
        let vmi = manifests::kernel_vmi("box");
        s.apply(&vmi.replace("spec:\n  term", "spec:\n  evictionStrategy: External\n  term")).await?;
        s.wait_running("box").await?;
        let launcher = s.launcher_pod("box").await?;
        let launcher = launcher["metadata"]["name"].as_str().context("pod without name")?;

        let outside = Story::of(s.client.clone(), format!("{}-outside", s.namespace));
        let namespaces: Api<Namespace> = Api::all(s.client.clone());
        let object = json!({"metadata": {"name": outside.namespace, "labels": {"ferrovirt.io/e2e": "forger"}}});
        namespaces.create(&Default::default(), &serde_json::from_value(object)?).await?;
        let result = forge(s, &outside, launcher).await;
        let removed = namespaces.delete(&outside.namespace, &DeleteParams::background()).await;
        result?;
        removed.context("cannot delete the namespace of the forger")?;
        Ok(())
    });
}

/// Posts reviews about the story's namespace from a pod in another one.
async fn forge(s: &Story, outside: &Story, launcher: &str) -> Result<()> {
    outside.wait("ServiceAccount", "default", "be created", TIMEOUT, |_| true).await?;
    outside.toolbox("forger").await?;
    let server = Endpoint::of_cluster(&s.client).await?;
    let pods: Api<Pod> = Api::namespaced(s.client.clone(), &outside.namespace);
    let endpoint = server.through_pod(pods, "forger");
    let segment = server.prefix().trim_start_matches("/admission/");
    let guess = segment.chars().rev().collect::<String>();
    let prefixes = [
        String::new(),
        "/admission".to_owned(),
        format!("/admission/{guess}"),
        format!("/admission/{}", segment.to_uppercase()),
        format!("/admission/{}", segment.get(1..).unwrap_or_default()),
        format!("/admission/{segment}0"),
    ];
    for (path, body) in forgeries(&s.namespace, launcher) {
        for prefix in &prefixes {
            let mut connection = endpoint.connect().await?;
            let status = post(&mut connection, &format!("{prefix}{path}"), &body).await?;
            ensure!(status == 404, "{prefix}{path} is answered {status}");
        }
        // Counter-check: the same review is answered with the segment.
        let dry = body.replace(r#""dryRun":false"#, r#""dryRun":true"#);
        let mut connection = endpoint.connect().await?;
        let prefix = Endpoint::of_cluster(&s.client).await?.prefix().to_owned();
        let status = post(&mut connection, &format!("{prefix}{path}"), &dry).await?;
        ensure!(status == 200, "an API server is answered {status} at {path}");
    }
    let vmi = s.get("vmi", "box").await?;
    ensure!(vmi["status"]["evacuationNodeName"].is_null(), "a made-up eviction moves the VMI: {}", vmi["status"]);
    Ok(())
}

#[test]
fn users_cannot_read_the_segment() {
    story("segment", async |s| {
        s.apply(
            "
apiVersion: rbac.authorization.k8s.io/v1
kind: RoleBinding
metadata: {name: jane}
roleRef: {apiGroup: rbac.authorization.k8s.io, kind: ClusterRole, name: admin}
subjects: [{apiGroup: rbac.authorization.k8s.io, kind: User, name: jane}]
",
        )
        .await?;
        // The binding takes effect with a delay.
        let began = Instant::now();
        while !may(s, "get", ["kubevirt.io", "virtualmachines", &s.namespace, "box"]).await? {
            ensure!(began.elapsed() < TIMEOUT, "an administrator of a namespace has no rights in it");
            tokio::time::sleep(LOOK).await;
        }
        let webhooks = "admissionregistration.k8s.io";
        for object in [
            ["", "secrets", "kubevirt", SECRET],
            [webhooks, "mutatingwebhookconfigurations", "", "virt-api-mutator"],
            [webhooks, "validatingwebhookconfigurations", "", "virt-api-validator"],
            [webhooks, "validatingwebhookconfigurations", "", "virt-operator-validator"],
        ] {
            for verb in ["get", "list", "watch"] {
                ensure!(!may(s, verb, object).await?, "an administrator of a namespace may {verb} {object:?}");
            }
        }
        Ok(())
    });
}

/// Returns true when the user jane may do this with an object, which is given by group, plural, namespace and name.
async fn may(s: &Story, verb: &str, [group, resource, namespace, name]: [&str; 4]) -> Result<bool> {
    let attributes = json!({"group": group, "resource": resource, "namespace": namespace, "name": name, "verb": verb});
    let spec = json!({"user": "jane", "groups": ["system:authenticated"], "resourceAttributes": attributes});
    let review = json!({"apiVersion": "authorization.k8s.io/v1", "kind": "SubjectAccessReview", "spec": spec});
    let answer = s.call(&Method::POST, "/apis/authorization.k8s.io/v1/subjectaccessreviews", &review).await?;
    answer.json()["status"]["allowed"].as_bool().with_context(|| format!("no answer: {}", answer.text()))
}

async fn scale(s: &Story, replicas: &Value) -> Result<()> {
    let patch = Patch::Merge(json!({"spec": {"replicas": replicas}}));
    let deployments = s.installation_api("Deployment");
    deployments.patch("virt-api", &PatchParams::default(), &patch).await.context("scale virt-api")?;
    Ok(())
}

#[test]
fn segment_in_an_error_message_becomes_invalid_soon() {
    story_alone("exposed", async |s| {
        let replicas = s.installation_api("Deployment").get("virt-api").await?.data["spec"]["replicas"].clone();
        scale(s, &json!(0)).await?;
        let read = exposed(s).await;
        // Later stories need virt-api, also after a failure.
        scale(s, &replicas).await?;
        let exposed = read?;
        s.apply_when_accepted(&manifests::kernel_vm("first", "Halted")).await?;

        let began = Instant::now();
        loop {
            // The rotation does not affect users.
            s.dry_run(&manifests::kernel_vm("next", "Halted")).await?;
            let endpoint = Endpoint::of_cluster(&s.client).await?;
            let mut connection = endpoint.without_prefix().connect().await?;
            let (path, body) = &forgeries(&s.namespace, "none")[0];
            let status = post(&mut connection, &format!("/admission/{exposed}{path}"), body).await?;
            if status == 404 {
                let now = endpoint.prefix();
                ensure!(!now.contains(&exposed), "the refused segment is in use");
                println!("refused {} ms after virt-api was back", began.elapsed().as_millis());
                break;
            }
            ensure!(began.elapsed() < TIMEOUT, "the exposed segment is still good");
            tokio::time::sleep(LOOK).await;
        }
        s.dry_run(&manifests::kernel_vm("next", "Halted")).await?;
        Ok(())
    });
}

/// Returns the segment from the error message of kube-apiserver while no virt-api runs.
async fn exposed(s: &Story) -> Result<String> {
    let message = s.refused_soon(&manifests::kernel_vm("first", "Halted")).await?;
    let (_, rest) = message.split_once("/admission/").with_context(|| format!("no URL in the error: {message}"))?;
    let (segment, _) = rest.split_once('/').with_context(|| format!("no path in the error: {message}"))?;
    // No VMI is created meanwhile, since the webhook fails for virt-controller, too.
    let labels = ListParams::default().labels("kubevirt.io=virt-api");
    let began = Instant::now();
    while !s.installation_api("Pod").list(&labels).await?.items.is_empty() {
        ensure!(began.elapsed() < TIMEOUT, "virt-api does not end");
        tokio::time::sleep(LOOK).await;
    }
    Ok(segment.to_owned())
}

async fn segments(s: &Story) -> Result<Option<Value>> {
    let secret = s.installation_api("Secret").get_opt(SECRET).await?;
    Ok(secret.map(|secret| secret.data["data"].clone()))
}

#[test]
fn no_review_fails_while_the_segment_of_a_deleted_secret_rotates() {
    story("rotation", async |s| {
        quiet(s).await?;
        let user = Story::of(connect_without_retries().await?, s.namespace.clone());
        let before = segments(s).await?.context("no Secret with segments")?["current"].clone();
        let over = Cell::new(false);
        let load = async |name: &str| -> Result<usize> {
            let mut count = 0;
            while !over.get() {
                user.dry_run(&manifests::kernel_vm(name, "Halted")).await?;
                count += 1;
                // Leaves processor time to other stories.
                tokio::time::sleep(PAUSE).await;
            }
            Ok(count)
        };
        let rotation = async {
            let rotated = rotate(s, &before).await;
            over.set(true);
            rotated
        };
        let (one, other, rotated) = futures::join!(load("one"), load("other"), rotation);
        rotated?;
        println!("{} reviewed writes during a rotation", one? + other?);
        Ok(())
    });
}

/// Deletes the Secret and waits until a new segment is the only one.
async fn rotate(s: &Story, before: &Value) -> Result<()> {
    s.installation_api("Secret").delete(SECRET, &DeleteParams::default()).await?;
    let began = Instant::now();
    loop {
        let now = segments(s).await?;
        if let Some(now) = &now
            && now["current"] != *before
            && now["next"].is_null()
            && now["previous"].is_null()
        {
            println!("rotated in {} ms", began.elapsed().as_millis());
            return Ok(());
        }
        let held: Vec<String> = now.iter().filter_map(Value::as_object).flat_map(|now| now.keys().cloned()).collect();
        ensure!(began.elapsed() < TIMEOUT, "the segment did not rotate; the Secret holds {held:?}");
        tokio::time::sleep(LOOK).await;
    }
}

/// Waits until no rotation is in progress, as after a story that stopped virt-api.
async fn quiet(s: &Story) -> Result<()> {
    let began = Instant::now();
    loop {
        let secret = s.installation_api("Secret").get(SECRET).await?;
        let held = secret.data["data"].as_object().map_or(0, serde_json::Map::len);
        let mut annotations = secret.metadata.annotations.iter().flatten();
        if held == 1 && annotations.all(|(name, _)| name != "ferrovirt.io/exposed-at") {
            return Ok(());
        }
        ensure!(began.elapsed() < TIMEOUT, "the segment still rotates");
        tokio::time::sleep(LOOK).await;
    }
}

/// Returns the generations of the webhook configurations, which count changes, and their paths.
async fn configurations(s: &Story) -> Result<Vec<(Option<i64>, Vec<Value>)>> {
    let mut found = Vec::new();
    for (kind, name) in [
        ("MutatingWebhookConfiguration", "virt-api-mutator"),
        ("ValidatingWebhookConfiguration", "virt-api-validator"),
        ("ValidatingWebhookConfiguration", "virt-operator-validator"),
    ] {
        let object = s.cluster_api(kind).get(name).await?;
        let webhooks = object.data["webhooks"].as_array().context("no webhooks")?;
        let paths = webhooks.iter().map(|webhook| webhook["clientConfig"]["service"]["path"].clone()).collect();
        found.push((object.metadata.generation, paths));
    }
    Ok(found)
}

#[test]
fn helm_keeps_the_paths_of_webhooks() {
    story_alone("paths", async |s| {
        quiet(s).await?;
        let before = configurations(s).await?;
        upgrade(&["--wait"]).await?;
        let after = configurations(s).await?;
        // Every intermediate change would increase the generation.
        let generations = |all: &[(Option<i64>, Vec<Value>)]| all.iter().map(|(count, _)| *count).collect::<Vec<_>>();
        ensure!(before == after, "changed from generations {:?} to {:?}", generations(&before), generations(&after));
        Ok(())
    });
}
