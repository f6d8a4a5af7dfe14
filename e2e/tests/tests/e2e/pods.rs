//! Pod features of VMIs: probes, names, ports, scheduling, priority, eviction.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use ferrovirt_e2e_tests::{Story, condition, story};
use kube::{
    Api,
    api::{EvictParams, PostParams},
};
use serde_json::{Value, json};
use tokio::time::{Instant, sleep};

use crate::manifests;

const MINUTES: Duration = Duration::from_secs(300);

fn vmi_manifest(priority: &str) -> String {
    manifests::kernel_vmi("box")
        .replace("metadata: {name: box}", "metadata: {name: box, labels: {app: box}}")
        .replace("devices: {}\n", "devices: {disks: [{name: seed, disk: {bus: virtio}}], interfaces: [{name: default, masquerade: {}, ports: [{name: web, port: 8080}, {port: 8081, protocol: TCP}]}]}\n")
        .replace(
            "spec:\n",
            &format!(
                "spec:
  hostname: box-host
  subdomain: boxes
  priorityClassName: {priority}
  nodeSelector: {{kubernetes.io/os: linux}}
  evictionStrategy: None
  readinessProbe: {{httpGet: {{port: web, path: /}}, periodSeconds: 2, timeoutSeconds: 5, failureThreshold: 1}}
  livenessProbe: {{tcpSocket: {{port: 8081}}, initialDelaySeconds: 60, periodSeconds: 5, timeoutSeconds: 10, failureThreshold: 6}}
  networks: [{{name: default, pod: {{}}}}]
  volumes:
  - name: seed
    cloudInitNoCloud:
      userData: |
        #cloud-config
        runcmd:
        - mkdir -p /www && echo it-works > /www/index.html
        - httpd -p 8080 -h /www
        - httpd -p 8081 -h /www
        - httpd -p 8082 -h /www
"
            ),
        )
}

/// Returns a VM with this VMI as template.
fn vm(priority: &str) -> Result<String> {
    let instance: Value = serde_saphyr::from_str(&vmi_manifest(priority))?;
    let template = json!({"metadata": {"labels": instance["metadata"]["labels"]}, "spec": instance["spec"]});
    let vm = json!({"apiVersion": "kubevirt.io/v1", "kind": "VirtualMachine", "metadata": {"name": "box"},
        "spec": {"runStrategy": "Always", "template": template}});
    Ok(vm.to_string())
}

fn ready(vmi: &Value, status: &str) -> bool {
    condition(vmi, "Ready").is_some_and(|ready| ready["status"] == status)
}

#[test]
fn vmi_is_probed_named_scheduled_and_evicted_like_a_pod() {
    story("pods", async |s| {
        let priority = format!("{}-high", s.namespace);
        let class = json!({"apiVersion": "scheduling.k8s.io/v1", "kind": "PriorityClass",
            "metadata": {"name": priority}, "value": 1234, "description": "For a test of VMIs."});
        let classes = s.cluster_api("PriorityClass");
        classes.create(&PostParams::default(), &serde_json::from_value(class)?).await?;
        let result = like_any_pod(s, &priority).await;
        let removed = classes.delete(&priority, &Default::default()).await;
        result?;
        removed.context("cannot delete the priority class")?;
        Ok(())
    });
}

async fn like_any_pod(s: &Story, priority: &str) -> Result<()> {
    s.apply(
        "
apiVersion: v1
kind: Service
metadata: {name: boxes}
spec: {clusterIP: None, selector: {app: box}, ports: [{name: web, port: 8080}]}
",
    )
    .await?;
    s.apply(&vm(priority)?).await?;
    s.toolbox("visitor").await?;
    let first = s.wait_running("box").await?;
    ensure!(!ready(&first, "True"), "a VMI whose guest does not answer yet is ready");
    let pod = s.launcher_pod("box").await?;
    let name = pod["metadata"]["name"].as_str().context("pod without name")?;
    let address = &s.pod_address("box").await?;
    ensure!(pod["spec"]["priority"] == 1234, "priority {}", pod["spec"]["priority"]);
    ensure!(pod["spec"]["nodeSelector"]["kubernetes.io/os"] == "linux", "{}", pod["spec"]["nodeSelector"]);
    ensure!(pod["metadata"]["labels"]["app"] == "box", "{}", pod["metadata"]["labels"]);
    // Ten seconds in the guest, and time for launcher and kubelet.
    ensure!(pod["spec"]["terminationGracePeriodSeconds"] == 40, "{}", pod["spec"]["terminationGracePeriodSeconds"]);

    s.wait("vmi", "box", "be ready by its probe", MINUTES, |vmi| ready(vmi, "True")).await?;
    let mut console = s.console("box")?;
    console.login("root", "ferrovirt").await?;
    let (hostname, _) = console.run("hostname").await?;
    ensure!(hostname.trim() == "box-host", "the guest calls itself {hostname:?}");
    let fqdn = format!("box-host.boxes.{}.svc.cluster.local", s.namespace);
    // The name follows the readiness of the pod, and a server may know for a while that there was none.
    let deadline = Instant::now() + MINUTES;
    loop {
        let found = s.exec("visitor", &["nslookup", &fqdn]).await;
        if found.as_ref().is_ok_and(|found| found.contains(address)) {
            break;
        }
        ensure!(Instant::now() < deadline, "{fqdn} is not {address}: {found:?}");
        sleep(Duration::from_secs(1)).await;
    }
    // By its short name, in the first search domain.
    loop {
        let (found, _) = console.run("nslookup box-host").await?;
        if found.contains(address) {
            break;
        }
        ensure!(Instant::now() < deadline, "box-host is not {address} to the guest: {found}");
    }

    let page = |port: u16| {
        let url = format!("http://{address}:{port}/");
        async move { s.exec("visitor", &["wget", "-q", "-T", "3", "-O", "-", &url]).await }
    };
    for port in [8080, 8081] {
        let message = loop {
            match page(port).await {
                Err(_) if Instant::now() < deadline => sleep(Duration::from_secs(1)).await,
                message => break message?,
            }
        };
        ensure!(message.trim() == "it-works", "port {port} says {message:?}");
    }
    ensure!(page(8082).await.is_err(), "a port that was not declared is reached");
    let (own, _) = console.run("wget -q -O - http://localhost:8082/").await?;
    ensure!(own.contains("it-works"), "the guest does not serve the port that was not declared: {own:?}");

    // An unready guest gets no traffic, a ready one does.
    let stop = "kill $(ps | awk '/httpd -p 8080/ && !/awk/ {print $1}')";
    console.run(stop).await?;
    s.wait("vmi", "box", "be unready by its probe", MINUTES, |vmi| ready(vmi, "False")).await?;
    s.wait("vm", "box", "tell that it is unready", MINUTES, |vm| vm["status"]["ready"] != true).await?;
    console.run("httpd -p 8080 -h /www").await?;
    s.wait("vmi", "box", "be ready again", MINUTES, |vmi| ready(vmi, "True")).await?;

    // A dry run has no effect; an eviction shuts the guest down, and its VM restarts it.
    let pods: Api<k8s_openapi::api::core::v1::Pod> = Api::namespaced(s.client.clone(), &s.namespace);
    let dry =
        EvictParams { post_options: PostParams { dry_run: true, ..PostParams::default() }, ..EvictParams::default() };
    pods.evict(name, &dry).await?;
    ensure!(s.get("vmi", "box").await?["metadata"]["uid"] == first["metadata"]["uid"], "the VMI was recreated");
    pods.evict(name, &EvictParams::default()).await?;
    console.expect("power button pressed", MINUTES).await?;
    let second = anew(s, &first).await?;

    // A failed liveness probe restarts the guest.
    s.wait("vmi", "box", "be ready", MINUTES, |vmi| ready(vmi, "True")).await?;
    let mut console = s.console("box")?;
    console.login("root", "ferrovirt").await?;
    console.run(&stop.replace("8080", "8081")).await?;
    anew(s, &second).await?;
    Ok(())
}

/// Waits until another VMI of the same name runs.
async fn anew(s: &Story, former: &Value) -> Result<Value> {
    s.wait("vmi", "box", "be Running anew", MINUTES, |vmi| {
        vmi["metadata"]["uid"] != former["metadata"]["uid"] && vmi["status"]["phase"] == "Running"
    })
    .await
}
