//! Every endpoint of the aggregated API for a running VM, in both versions, and discovery and OpenAPI documents.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use ferrovirt_e2e_tests::{Story, TIMEOUT, story};
use http::{Method, Request};
use kube::client::Body;
use serde_json::{Value, json};
use tokio::time::sleep;

use crate::manifests;

const GET: Method = Method::GET;
const PUT: Method = Method::PUT;
const VM: &str = "virtualmachines/box";
const VMI: &str = "virtualmachineinstances/box";
const GROUP: &str = "/apis/subresources.kubevirt.io";
const VERSIONS: [&str; 2] = ["v1", "v1alpha3"];

/// The answers of KubeVirt when no guest agent is connected.
const NOT_FROZEN: &str = "Internal error occurred: unexpected return code 400 (400 Bad Request), message: server error. \
    command Freeze failed: \"LibvirtError(Code=86, Domain=10, Message='Guest agent is not responding: QEMU guest agent is not connected')\"";
const NOT_THAWED: &str = "Internal error occurred: unexpected return code 400 (400 Bad Request), message: server error. \
    command Unfreeze failed: \"LibvirtError(Code=86, Domain=10, Message='Guest agent is not responding: QEMU guest agent is not connected')\"";

/// Method, object, subresource, body, expected status code and part of the text.
type Row = (Method, &'static str, &'static str, Value, u16, &'static str);

/// Returns the calls with the expected answers for a running VM from a container disk without guest agent. None changes it.
fn rows() -> Vec<Row> {
    let none = Value::Null;
    let all = json!({"dryRun": ["All"]});
    let volume = json!({"name": "more", "dryRun": ["All"], "disk": {"disk": {"bus": "scsi"}},
        "volumeSource": {"persistentVolumeClaim": {"claimName": "more", "hotpluggable": true}}});
    vec![
        (PUT, VM, "start", json!({}), 409, "VM is already running"),
        (PUT, VM, "stop", all.clone(), 202, ""),
        (PUT, VM, "stop", json!({"dryRun": ["Some"]}), 400, "dryRun"),
        (PUT, VM, "stop?dryRun=Some", json!({}), 400, "dryRun"),
        (PUT, VMI, "reset?dryRun=All", none.clone(), 400, "dryRun is not supported"),
        (PUT, VM, "stop", json!({"gracePeriod": "soon"}), 400, "Can not unmarshal Request body to struct"),
        (PUT, VM, "restart", all.clone(), 202, ""),
        (PUT, VM, "restart", json!({"gracePeriodSeconds": 5}), 400, "only gracePeriod=0 is supported"),
        (PUT, VM, "restart", json!({"gracePeriodSeconds": -1}), 400, "greater or equal to 0"),
        (PUT, VM, "migrate", json!({"dryRun": ["Some"]}), 400, "dryRun"),
        (PUT, VM, "migrate", all.clone(), 400, "Cannot migrate VMI, Reason: InterfaceNotLiveMigratable"),
        (GET, VM, "expand-spec", none.clone(), 200, "VirtualMachine"),
        (PUT, VM, "addvolume", json!({}), 400, "AddVolumeOptions requires name to be set"),
        (PUT, VM, "addvolume", volume.clone(), 202, ""),
        (PUT, VM, "removevolume", json!({}), 400, "RemoveVolumeOptions requires name to be set"),
        (
            PUT,
            VM,
            "removevolume",
            json!({"name": "more"}),
            409,
            "Unable to remove volume [more] because it does not exist",
        ),
        (PUT, VM, "removevolume", json!({"name": "root"}), 409, "because it is not hotpluggable"),
        (PUT, VM, "memorydump", json!({}), 400, "Memory dump requires claim name to be set"),
        (
            PUT,
            VM,
            "memorydump",
            json!({"claimName": "none"}),
            404,
            "persistentvolumeclaim.kubevirt.io \"none\" not found",
        ),
        (PUT, VM, "removememorydump", none.clone(), 409, "no association found"),
        (PUT, VM, "hibernate", json!({"discard": true}), 409, "VM is not hibernated"),
        (GET, VM, "objectgraph", none.clone(), 400, "ObjectGraph feature gate not enabled"),
        (PUT, VM, "evacuate/cancel", json!({}), 200, ""),
        (GET, VM, "portforward/80", none.clone(), 400, "websocket"),
        (GET, VM, "portforward/ssh", none.clone(), 400, "invalid port"),
        (GET, VM, "portforward/80/sctp", none.clone(), 400, "invalid protocol"),
        (PUT, VMI, "pause", all.clone(), 200, ""),
        (PUT, VMI, "unpause", json!({}), 409, "VMI is not paused"),
        (PUT, VMI, "freeze", json!({}), 400, "Unfreeze timeout in freeze request is not set"),
        (PUT, VMI, "freeze", json!({"unfreezeTimeout": "1m"}), 500, NOT_FROZEN),
        (PUT, VMI, "unfreeze", none.clone(), 500, NOT_THAWED),
        (GET, VMI, "guestosinfo", none.clone(), 500, "VMI does not have guest agent connected"),
        (GET, VMI, "userlist", none.clone(), 500, "VMI does not have guest agent connected"),
        (GET, VMI, "filesystemlist", none.clone(), 500, "VMI does not have guest agent connected"),
        (GET, VMI, "usage", none.clone(), 200, "cpuNanoseconds"),
        (GET, VMI, "console", none.clone(), 400, "websocket"),
        (GET, VMI, "vnc", none.clone(), 400, "websocket"),
        (GET, VMI, "vnc/screenshot", none.clone(), 200, "PNG"),
        (GET, VMI, "usbredir", none.clone(), 409, "Not configured with USB Redirection"),
        (GET, VMI, "vsock?port=22", none.clone(), 400, "VSOCK is not attached."),
        (GET, VMI, "portforward/80/tcp", none.clone(), 400, "websocket"),
        (PUT, VMI, "addvolume", volume, 400, "is owned by a VM"),
        (PUT, VMI, "removevolume", json!({"name": "root"}), 400, "is owned by a VM"),
        (PUT, VMI, "backup", json!({"backupName": "b"}), 501, "backup of running VMIs is not available yet"),
        (PUT, VMI, "redefine-checkpoint", json!({"name": "c"}), 409, "ChangedBlockTracking is not enabled"),
        (GET, VMI, "objectgraph", none.clone(), 400, "ObjectGraph feature gate not enabled"),
        (PUT, VMI, "evacuate/cancel", json!({"evacuationNodeName": "n"}), 200, ""),
        (GET, VMI, "sev/fetchcertchain", none.clone(), 500, "Attestation not requested for VMI"),
        (GET, VMI, "sev/querylaunchmeasurement", none.clone(), 500, "Attestation not requested for VMI"),
        (PUT, VMI, "sev/setupsession", json!({}), 400, "Session blob is required"),
        (PUT, VMI, "sev/setupsession", json!({"session": "s", "dhCert": "c"}), 409, "VMI is not in Scheduled phase"),
        (PUT, VMI, "sev/injectlaunchsecret", json!({}), 409, "Attestation not requested for VMI"),
        (GET, VM, "nothing", none.clone(), 404, "could not find the requested resource"),
        (GET, VMI, "sev", none.clone(), 404, "could not find the requested resource"),
        (GET, VM, "start", none.clone(), 405, "does not allow this method"),
        (Method::POST, VMI, "pause", none.clone(), 405, "does not allow this method"),
        (Method::PATCH, VM, "stop", none.clone(), 405, "does not allow this method"),
        (Method::DELETE, VMI, "console", none, 405, "does not allow this method"),
    ]
}

#[test]
fn every_subresource_answers_as_documented() {
    story("endpoints", async |s| {
        // The API server compares texts with these characters in Go's spelling, and explicit zero values as they are stored.
        let special = manifests::vm("box", "Always").replace("password: story", "password: story && <é>");
        let special = special.replace("bus: virtio", "bus: virtio, readonly: false");
        s.apply(&special).await?;
        let before = s.wait_running("box").await?;
        let mut wrong = Vec::new();
        for version in VERSIONS {
            for (method, object, subresource, body, code, text) in rows() {
                let path = s.subresource(version, object, subresource);
                let deadline = Instant::now() + TIMEOUT;
                let answer = loop {
                    let answer = s.call(&method, &path, &body).await?;
                    // A busy guest or node can be too late.
                    if code >= 300 || answer.code < 500 || Instant::now() > deadline {
                        break answer;
                    }
                    sleep(Duration::from_secs(1)).await;
                };
                if answer.code != code || !answer.message().contains(text) {
                    let message = answer.message().chars().take(300).collect::<String>();
                    wrong.push(format!("{method} {version} {object}/{subresource} {body}: {} {message}", answer.code));
                }
            }
        }
        ensure!(wrong.is_empty(), "{} answers are wrong:\n{}", wrong.len(), wrong.join("\n"));
        expand(s).await?;
        let after = s.get("vmi", "box").await?;
        ensure!(after["metadata"]["uid"] == before["metadata"]["uid"], "the VMI was recreated");
        ensure!(after["status"]["phase"] == "Running", "the VMI is {}", after["status"]["phase"]);
        plugin(s).await?;
        metrics(s).await
    });
}

/// Checks the subresource of namespaces, which applies the instance type of a VM in the body.
async fn expand(s: &Story) -> Result<()> {
    let vm = s.dry_run(&manifests::vm("new", "Halted")).await?;
    for version in VERSIONS {
        let path = format!("{GROUP}/{version}/namespaces/{}/expand-vm-spec", s.namespace);
        let expanded = s.call(&PUT, &path, &vm).await?;
        ensure!(expanded.code == 200 && expanded.json()["metadata"]["name"] == "new", "{}", expanded.text());
        let elsewhere = json!({"apiVersion": "kubevirt.io/v1", "kind": "VirtualMachine",
            "metadata": {"name": "new", "namespace": "elsewhere"}, "spec": vm["spec"]});
        for (body, text) in [
            (json!({"spec": {}}), "Object is not a valid VirtualMachine"),
            (json!("text"), ""),
            (elsewhere, "VM namespace must be empty or"),
        ] {
            let refused = s.call(&PUT, &path, &body).await?;
            ensure!(
                refused.code == 400 && refused.message().contains(text),
                "{body}: {} {}",
                refused.code,
                refused.message()
            );
        }
        let text = Request::put(&path).header("Content-Type", "text/plain").body(Body::from(b"{}".to_vec()))?;
        ensure!(s.send(text).await?.code == 415, "a VM that is no JSON");
        ensure!(s.call(&GET, &path, &Value::Null).await?.code == 405, "{path} is put to");
    }
    Ok(())
}

/// Checks the plugin: unsupported calls fail with the server's message.
async fn plugin(s: &Story) -> Result<()> {
    for (words, text) in [
        (&["migrate", "box"][..], "Cannot migrate VMI, Reason: InterfaceNotLiveMigratable"),
        (&["drain-status", "none"], "not found"),
        (&["addvolume", "box", "--volume-name=none"], "Volume none is not a DataVolume or PersistentVolumeClaim"),
        (&["removevolume", "box", "--volume-name=none"], "error removing volume, "),
        (&["memory-dump", "get", "box"], "Memory dump requires claim name to be set"),
        (&["memory-dump", "remove", "box"], "no association found"),
        (&["memory-dump", "download", "box"], "cannot be downloaded yet"),
        (&["usbredir", "1-1", "box"], "Not configured with USB Redirection"),
        (&["objectgraph", "box"], "ObjectGraph feature gate not enabled"),
        (&["guestosinfo", "box"], "VMI does not have guest agent connected"),
        (&["migrate-cancel", "box"], "Found no migration to cancel for box"),
        (&["evacuate-cancel", "vm", "none"], "not found"),
        (&["evacuate-cancel", "node", "none"], "not found"),
    ] {
        let refused = s.virt(words).await.err().map(|error| error.to_string());
        ensure!(refused.as_ref().is_some_and(|message| message.contains(text)), "{words:?}: {refused:?}");
    }
    let stays = s.virt(&["evacuate-cancel", "vm", "box"]).await?;
    ensure!(stays == format!("VM {}/box was canceled evacuation\n", s.namespace), "{stays:?}");
    let tried = s.virt(&["pause", "box", "--dry-run=true"]).await?;
    ensure!(tried.starts_with("Dry Run execution"), "{tried:?}");
    // Shell completion calls the plugin through kubectl.
    let completed = tokio::process::Command::new("kubectl").args(["__complete", "virt", "soft"]).output().await?;
    let completed = String::from_utf8_lossy(&completed.stdout);
    ensure!(completed.starts_with("soft-reboot\t"), "kubectl does not complete the plugin's commands: {completed:?}");
    let version = s.virt(&["version"]).await?;
    ensure!(version.contains("Server Version: v"), "{version:?}");
    let expanded = s.virt(&["expand", "--vm", "box", "-o", "json"]).await?;
    let expanded: Value = serde_json::from_str(&expanded)?;
    ensure!(expanded["kind"] == "VirtualMachine", "{expanded}");
    ensure!(expanded["spec"]["template"]["spec"]["domain"]["memory"]["guest"] == "128Mi", "{expanded}");
    Ok(())
}

/// Checks that calls are counted and the VMI's metrics have the names that dashboards use.
async fn metrics(s: &Story) -> Result<()> {
    let api = s.metrics("virt-api").await?;
    let created = format!(r#"kubevirt_vm_created_by_pod_total{{namespace="{}"}}"#, s.namespace);
    for part in [
        created.as_str(),
        "process_cpu_seconds_total ",
        r#"kubevirt_api_subresource_requests_total{code="409",subresource="virtualmachines/start"}"#,
        r#"kubevirt_api_subresource_request_seconds_count{subresource="virtualmachines/start"}"#,
        "kubevirt_api_admission_reviews_total{",
        "kubevirt_rest_client_requests_total{",
        "kubevirt_virt_api_ready_status 1",
    ] {
        ensure!(api.iter().any(|line| line.starts_with(part)), "{part} is not in virt-api's metrics");
    }
    let controller = s.metrics("virt-controller").await?;
    let own = format!(r#"name="box",namespace="{}""#, s.namespace);
    for part in [
        format!(r#"kubevirt_vm_labels{{{own}"#),
        format!(r#"kubevirt_vm_resource_requests{{{own},resource="cpu",source="guest_effective",unit="cores"}} "#),
        format!(r#"kubevirt_vmi_sync_total{{{own}}} "#),
        r#"kubevirt_workqueue_adds_total{name="virt-controller-vmi"} "#.to_owned(),
        r#"kubevirt_workqueue_queue_duration_seconds_count{name="virt-controller-vm"} "#.to_owned(),
    ] {
        ensure!(controller.iter().any(|line| line.starts_with(&part)), "{part} is not in virt-controller's metrics");
    }
    // A busy node can be too late for a scrape.
    let deadline = Instant::now() + TIMEOUT;
    while let Err(error) = of_vmi(s).await {
        ensure!(Instant::now() < deadline, "{error:#}");
        sleep(Duration::from_secs(1)).await;
    }
    scraped(s).await
}

/// Checks the metrics of the VMI from virt-handler.
async fn of_vmi(s: &Story) -> Result<()> {
    let handler = s.metrics("virt-handler").await?;
    let own = format!("namespace=\"{}\",name=\"box\",kubernetes_vmi_label_app=\"box\"", s.namespace);
    for (name, more) in [
        ("kubevirt_vmi_cpu_usage_seconds_total", ""),
        ("kubevirt_vmi_cpu_system_usage_seconds_total", ""),
        ("kubevirt_vmi_memory_resident_bytes", ""),
        ("kubevirt_vmi_memory_domain_bytes", ""),
        ("kubevirt_vmi_memory_actual_balloon_bytes", ""),
        ("kubevirt_vmi_node_cpu_affinity", ""),
        ("kubevirt_vmi_vcpu_seconds_total", r#"id="0",state="running""#),
        ("kubevirt_vmi_network_receive_bytes_total", r#"interface="default""#),
        ("kubevirt_vmi_network_traffic_bytes_total", r#"type="tx""#),
        ("kubevirt_vmi_storage_iops_read_total", r#"drive="root""#),
        ("kubevirt_vmi_storage_read_times_seconds_total", r#"drive="seed""#),
    ] {
        let found = handler
            .iter()
            .find(|line| line.starts_with(&format!("{name}{{node=")) && line.contains(&own) && line.contains(more));
        let line =
            found.with_context(|| format!("{name} of the VMI with {more:?} is not in virt-handler's metrics"))?;
        let value = line.rsplit(' ').next().and_then(|value| value.parse::<f64>().ok());
        ensure!(value.is_some_and(|value| value >= 0.0), "{line}");
    }
    Ok(())
}

/// Checks that Prometheus finds the metrics of all components by one Service.
async fn scraped(s: &Story) -> Result<()> {
    let path = "/apis/discovery.k8s.io/v1/namespaces/kubevirt/endpointslices\
                ?labelSelector=kubernetes.io/service-name=kubevirt-prometheus-metrics";
    let found = s.call(&GET, path, &Value::Null).await?.json();
    let slices = found["items"].as_array().map(Vec::as_slice).unwrap_or_default();
    for component in ["virt-api", "virt-controller", "virt-handler"] {
        let listed = slices.iter().any(|slice| {
            let endpoints = slice["endpoints"].as_array().map(Vec::as_slice).unwrap_or_default();
            let mut pods = endpoints.iter().filter_map(|endpoint| endpoint["targetRef"]["name"].as_str());
            slice["ports"][0]["name"] == "metrics"
                && slice["ports"][0]["port"] == 8443
                && pods.any(|pod| pod.starts_with(component))
        });
        ensure!(listed, "{component} is not among the targets: {found}");
    }
    Ok(())
}

#[test]
fn aggregated_api_describes_itself() {
    story("documents", async |s| {
        for version in VERSIONS {
            let version_info = s.call(&GET, &format!("{GROUP}/{version}/version"), &Value::Null).await?.json();
            ensure!(version_info["gitVersion"].as_str().is_some_and(|v| v.starts_with('v')), "{version_info}");
            // All are empty in images that were built without git.
            let known = ["gitCommit", "gitTreeState", "buildDate"].map(|key| version_info[key] != "");
            ensure!(known == [known[0]; 3], "{version_info}");
            let health = s.call(&GET, &format!("{GROUP}/{version}/healthz"), &Value::Null).await?;
            let health = (health.code, health.json());
            ensure!(health.0 == 200 && health.1["apiserver"]["connectivity"] == "ok", "healthz: {health:?}");
            ensure!(health.1["config-resource-version"].as_str().is_some_and(|v| !v.is_empty()), "{health:?}");
            let list = s.call(&GET, &format!("{GROUP}/{version}"), &Value::Null).await?.json();
            let names = list["resources"].as_array().map(Vec::as_slice).unwrap_or_default();
            ensure!(names.iter().any(|r| r["name"] == "virtualmachineinstances/console"), "{list}");
            let document = format!("/openapi/v3{GROUP}/{version}");
            let document = s.call(&GET, &document, &Value::Null).await?.json();
            let path = format!("{GROUP}/{version}/namespaces/{{namespace}}/virtualmachines/{{name}}/start");
            ensure!(document["paths"][&path]["put"]["operationId"].is_string(), "{path} is not described");
            for (action, text) in [
                ("start", "Unable to start profiler."),
                ("stop", "Unable to stop profiler."),
                ("dump", "Unable to dump profiler results."),
            ] {
                let path = format!("{GROUP}/{version}/{action}-cluster-profiler");
                let answer = s.call(&GET, &path, &Value::Null).await?;
                let text = format!("{text} \"ClusterProfiler\" feature gate must be enabled");
                ensure!(answer.code == 403 && answer.message() == text, "{path}: {} {}", answer.code, answer.message());
            }
            for (method, path, code) in
                [(&GET, "nothing", 401), (&Method::POST, "version", 405), (&PUT, "healthz", 405)]
            {
                let answer = s.call(method, &format!("{GROUP}/{version}/{path}"), &Value::Null).await?;
                ensure!(answer.code == code, "{method} {version}/{path}: {} {}", answer.code, answer.message());
            }
        }
        let unknown = s.call(&GET, &format!("{GROUP}/v2/version"), &Value::Null).await?;
        ensure!(unknown.code == 404, "a version that is none: {} {}", unknown.code, unknown.message());
        guestfs(s).await?;
        configuration_version(s).await?;
        kubectl(s).await
    });
}

/// Checks the version of the configuration that every component reports. Tools read it from all pods after a change of the
/// KubeVirt object, through a forwarded port and with a repeated slash.
async fn configuration_version(s: &Story) -> Result<()> {
    for component in ["virt-api", "virt-controller", "virt-handler"] {
        let pods = s.pods_of(component).await?;
        ensure!(!pods.is_empty(), "there is no pod of {component}");
        for pod in pods {
            let deadline = Instant::now() + TIMEOUT;
            loop {
                // Status and annotations of the object change as well, so both are read again.
                let object = s.installation_api("KubeVirt").get("kubevirt").await?;
                let answer = match s.get_through_forward(&pod, "//healthz").await {
                    Err(_) if Instant::now() < deadline => {
                        sleep(Duration::from_secs(1)).await;
                        continue;
                    }
                    answer => answer?,
                };
                let health: Value = serde_json::from_slice(&answer.body).unwrap_or_default();
                if answer.status == 200 && health["config-resource-version"] == json!(object.metadata.resource_version)
                {
                    ensure!(health["apiserver"]["connectivity"] == "ok", "{component}: {health}");
                    break;
                }
                ensure!(Instant::now() < deadline, "{component}: {} {health}", answer.status);
                sleep(Duration::from_millis(250)).await;
            }
        }
    }
    Ok(())
}

/// Checks the image of `virtctl guestfs` against the status of the installation.
async fn guestfs(s: &Story) -> Result<()> {
    let installation = s.installation_api("KubeVirt").get("kubevirt").await?;
    let status = &installation.data["status"];
    for (observed, target) in [
        ("observedKubeVirtRegistry", "targetKubeVirtRegistry"),
        ("observedKubeVirtVersion", "targetKubeVirtVersion"),
        ("observedDeploymentConfig", "targetDeploymentConfig"),
        ("observedDeploymentID", "targetDeploymentID"),
    ] {
        ensure!(status[observed].is_string() && status[observed] == status[target], "{observed}: {status}");
    }
    for version in VERSIONS {
        let text = s.kubectl(&["get", "--raw", &format!("{GROUP}/{version}/guestfs")]).await?;
        let found: Value = serde_json::from_str(&text)?;
        ensure!(
            found["registry"] == status["observedKubeVirtRegistry"]
                && found["tag"] == status["observedKubeVirtVersion"],
            "guestfs: {text}"
        );
        ensure!(found["digest"] == "" && found["gsImage"].is_string() && found["imagePrefix"] == "", "guestfs: {text}");
    }
    Ok(())
}

/// Checks kubectl's view of the API.
async fn kubectl(s: &Story) -> Result<()> {
    let versions = s.kubectl(&["api-versions"]).await?;
    for version in VERSIONS {
        let version = format!("subresources.kubevirt.io/{version}");
        ensure!(versions.lines().any(|line| line == version), "{version} is not among {versions}");
    }
    // Short names of other groups still resolve.
    let resources = s.kubectl(&["api-resources", "--api-group", "kubevirt.io", "-o", "name"]).await?;
    ensure!(resources.contains("virtualmachineinstances.kubevirt.io"), "{resources}");
    s.kubectl(&["get", "vm,vmi,vmirs"]).await?;
    // Subresources are not resources: kubectl neither lists nor explains them.
    let listed = s.kubectl(&["api-resources", "--api-group", "subresources.kubevirt.io", "-o", "name"]).await?;
    ensure!(listed.trim().is_empty(), "kubectl offers subresources as resources: {listed}");
    let explained = s.kubectl(&["explain", "virtualmachines", "--api-version", "subresources.kubevirt.io/v1"]).await;
    let refused = explained.err().map(|error| error.to_string()).context("a subresource was explained")?;
    ensure!(refused.contains("subresources.kubevirt.io"), "{refused}");
    let raw = s.kubectl(&["get", "--raw", "/openapi/v3/apis/subresources.kubevirt.io/v1"]).await?;
    ensure!(raw.contains("\"v1Start\""), "no operation to start a VM");
    merged_document(s).await.map(drop)
}

/// Returns the document of OpenAPI 2. The API server merges it at the first request, which takes long on a busy host.
pub(crate) async fn merged_document(s: &Story) -> Result<String> {
    let deadline = Instant::now() + TIMEOUT;
    loop {
        match s.kubectl(&["get", "--raw", "/openapi/v2"]).await {
            Err(_) if Instant::now() < deadline => sleep(Duration::from_secs(1)).await,
            document => return document.context("the merged document"),
        }
    }
}
