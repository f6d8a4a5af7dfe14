//! A compromised launcher pod that replaces the launcher's socket.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use ferrovirt_e2e_tests::{Story, TIMEOUT, story, story_alone};
use k8s_openapi::api::core::v1::Pod;
use kube::{
    Api,
    api::{DeleteParams, Patch, PatchParams},
};
use serde_json::{Value, json};
use tokio::time::{Instant, sleep};

use crate::{manifests, virt_handlers};

/// Limit of virt-handler's memory growth in KiB.
const GROWTH: u64 = 32 * 1024;
/// Duration of each flood.
const FLOOD: Duration = Duration::from_secs(5);
/// kubelet's directory of pods in the file system of process 1 of the node, and the socket in a pod's directory.
const PODS: &str = "/proc/1/root/var/lib/kubelet/pods";
const SOCKETS: &str = "volumes/kubernetes.io~empty-dir/sockets";

#[test]
fn cve_2026_7374_replaced_launcher_sockets_are_refused_and_harm_no_other_vm() {
    story_alone("cve-socket", async |s| {
        let (node, hostname) = s.one_node().await?;
        for name in ["prey", "bystander"] {
            s.apply(&manifests::kernel_vmi_on(&hostname, name)).await?;
        }
        for name in ["prey", "bystander"] {
            s.wait_running(name).await?;
        }
        let intruder = Intruder::enter(s, "prey").await?;
        intruder.run("mv launcher-sock aside").await?;
        intruder.run("hostile-launcher count $PWD/decoy >/tmp/count 2>&1 </dev/null &").await?;
        intruder.wait_for("test -S decoy").await?;
        intruder.run("ln -s decoy launcher-sock").await?;
        virt_handlers::replace(s).await?;
        let restarts = virt_handlers::restarts(s).await?;
        let before = s.memory(&node, "virt-handler").await?;

        // A link to another socket of the same pod, which passes every check except that for links.
        virt_handlers::refuse(s, "prey", "symbolic link").await.context("a link beside the socket")?;
        let dialled = intruder.run("cat /tmp/count").await?;
        ensure!(dialled.is_empty(), "the link was followed: {dialled}");
        intruder.swap("mkfifo launcher-sock").await?;
        virt_handlers::refuse(s, "prey", "named pipe").await.context("a FIFO")?;
        // The path leads to containerd from every process that sees process 1 of the node, such as virt-handler.
        intruder.swap("ln -s /proc/1/root/run/containerd/containerd.sock launcher-sock").await?;
        virt_handlers::refuse(s, "prey", "symbolic link").await.context("a link to the container runtime")?;
        intruder.swap("true").await?;
        let (prey, other) = (pod_uid(s, "prey").await?, pod_uid(s, "bystander").await?);
        let link = format!("ln {PODS}/{other}/{SOCKETS}/launcher-sock {PODS}/{prey}/{SOCKETS}/launcher-sock");
        s.on_node(&node, &link).await?;
        virt_handlers::refuse(s, "prey", "is not in pod").await.context("the socket of another launcher")?;

        let mut modes = vec!["endless", "pings"];
        if refuses_descriptors(s, &node).await? {
            modes.push("passes");
        }
        for mode in modes {
            intruder.swap("true").await?;
            intruder.run(&format!("hostile-launcher {mode} $PWD/launcher-sock >/tmp/{mode} 2>&1 </dev/null &")).await?;
            intruder.wait_for(&format!("grep -q connected /tmp/{mode}")).await.with_context(|| mode.to_owned())?;
            sleep(FLOOD).await;
            virt_handlers::serves(s, "bystander").await.with_context(|| format!("{mode}: another VM"))?;
            let grown = s.memory(&node, "virt-handler").await?.saturating_sub(before);
            eprintln!("{mode}: virt-handler grew by {grown} KiB");
            ensure!(grown < GROWTH, "{mode}: virt-handler takes {grown} KiB more");
            if mode == "passes" {
                intruder.wait_for("grep -q EPERM /tmp/passes").await.context("virt-handler takes a descriptor")?;
            }
            if mode == "endless" {
                let message = s.wait_event("prey", "SyncFailed", TIMEOUT).await.context("a message without end")?;
                ensure!(message.contains("too large"), "{message}");
            }
            intruder.run("killall hostile-launcher").await?;
        }

        intruder.swap("mv aside launcher-sock").await?;
        virt_handlers::serves(s, "prey").await.context("after the launcher's own socket is back")?;
        ensure!(virt_handlers::restarts(s).await? == restarts, "virt-handler was restarted");
        Ok(())
    });
}

#[test]
fn cve_2025_64435_pod_that_copies_a_launcher_without_its_owner_is_never_dialled() {
    story("cve-lookalike", async |s| {
        s.apply(&manifests::kernel_vmi("box")).await?;
        s.wait_running("box").await?;
        let launcher = s.launcher_pod("box").await?;
        let uid = launcher["metadata"]["uid"].as_str().context("pod without uid")?;
        let mut pod = json!({
            "apiVersion": "v1", "kind": "Pod",
            "metadata": {
                "name": "virt-launcher-box-zzzzz",
                "labels": launcher["metadata"]["labels"], "annotations": launcher["metadata"]["annotations"],
            },
            "spec": {
                "nodeName": launcher["spec"]["nodeName"],
                "terminationGracePeriodSeconds": 0, "automountServiceAccountToken": false,
                "securityContext": {"runAsNonRoot": true, "runAsUser": 107, "seccompProfile": {"type": "RuntimeDefault"}},
                "containers": [{
                    "name": "compute", "image": "ferrovirt.io/toolbox:devel", "imagePullPolicy": "IfNotPresent",
                    "command": ["hostile-launcher", "count", "/var/run/kubevirt/sockets/launcher-sock"],
                    "securityContext": {"allowPrivilegeEscalation": false, "capabilities": {"drop": ["ALL"]}},
                    "volumeMounts": [{"name": "sockets", "mountPath": "/var/run/kubevirt/sockets"}],
                }],
                "volumes": [{"name": "sockets", "emptyDir": {}}],
            },
        });
        // Only virt-controller may request networks by annotation.
        if let Some(annotations) = pod["metadata"]["annotations"].as_object_mut() {
            annotations.retain(|name, _| !name.starts_with("k8s.v1.cni.cncf.io/"));
        }
        s.apply(&pod.to_string()).await?;
        let name = "virt-launcher-box-zzzzz";
        let running = |pod: &Value| pod["status"]["phase"] == "Running";
        let lookalike = s.wait("Pod", name, "be Running", TIMEOUT, running).await?;
        let lookalike = lookalike["metadata"]["uid"].as_str().context("pod without uid")?;
        let vmi = s.get("vmi", "box").await?;
        let pods = vmi["status"]["activePods"].as_object().context("no active pods")?;
        ensure!(pods.len() == 1 && pods.contains_key(uid), "active pods: {pods:?}");

        // Without its launcher the VMI ends. The other pod does not replace the launcher.
        let real = launcher["metadata"]["name"].as_str().context("pod without name")?;
        s.api("Pod").delete(real, &DeleteParams::default().grace_period(0)).await?;
        let over = |vmi: &Value| ["Failed", "Succeeded"].contains(&vmi["status"]["phase"].as_str().unwrap_or_default());
        let vmi = s.wait("vmi", "box", "end with its launcher", TIMEOUT, over).await?;
        ensure!(vmi["status"]["activePods"][lookalike].is_null(), "active pods: {}", vmi["status"]["activePods"]);
        let dialled = s.log(name, "compute").await?;
        ensure!(dialled.is_empty(), "it was dialled: {dialled}");
        Ok(())
    });
}

/// A shell in a launcher pod, with the pod's user and cgroup, in the directory of the sockets.
pub(crate) struct Intruder<'s> {
    story: &'s Story,
    pod: String,
}

impl<'s> Intruder<'s> {
    /// Adds an ephemeral container, as a user may who debugs pods.
    pub(crate) async fn enter(story: &'s Story, vmi: &str) -> Result<Self> {
        let pod = story.launcher_pod(vmi).await?["metadata"]["name"].as_str().context("pod without name")?.to_owned();
        let container = json!({
            "name": "intruder", "image": format!("{}/toolbox:devel", ferrovirt_e2e_tests::registry()),
            "imagePullPolicy": "IfNotPresent", "command": ["sleep", "3600"],
            "securityContext": {
                "runAsNonRoot": true, "runAsUser": 107, "runAsGroup": 107, "allowPrivilegeEscalation": false,
                "capabilities": {"drop": ["ALL"]}, "seccompProfile": {"type": "RuntimeDefault"},
            },
            "volumeMounts": [{"name": "sockets", "mountPath": "/sockets"}],
        });
        let pods: Api<Pod> = Api::namespaced(story.client.clone(), &story.namespace);
        let patch = Patch::Strategic(json!({"spec": {"ephemeralContainers": [container]}}));
        pods.patch_ephemeral_containers(&pod, &PatchParams::default(), &patch).await.context("enter the pod")?;
        let runs = |pod: &Value| !pod["status"]["ephemeralContainerStatuses"][0]["state"]["running"].is_null();
        story.wait("Pod", &pod, "let the intruder in", TIMEOUT, runs).await?;
        Ok(Self { story, pod })
    }

    /// Runs a script in the directory of the sockets.
    pub(crate) async fn run(&self, script: &str) -> Result<String> {
        let script = format!("cd /sockets && {{ {script}\n}}");
        self.story.exec_in(&self.pod, "intruder", &["sh", "-c", &script]).await
    }

    /// Removes the socket and runs a script that replaces it.
    async fn swap(&self, script: &str) -> Result<()> {
        self.run(&format!("rm -f launcher-sock && {script}")).await.map(drop)
    }

    pub(crate) async fn wait_for(&self, script: &str) -> Result<()> {
        let deadline = Instant::now() + TIMEOUT;
        while let Err(error) = self.run(script).await {
            ensure!(Instant::now() < deadline, "{error:#}");
            sleep(Duration::from_millis(500)).await;
        }
        Ok(())
    }
}

/// Returns true if the kernel of a node lets virt-handler refuse descriptors: from Linux 6.16 on.
pub(crate) async fn refuses_descriptors(s: &Story, node: &str) -> Result<bool> {
    let node = s.cluster_api("Node").get(node).await?;
    let version = node.data["status"]["nodeInfo"]["kernelVersion"].as_str().context("node without kernel")?.to_owned();
    let mut numbers = version.split(|char: char| !char.is_ascii_digit()).map_while(|number| number.parse::<u32>().ok());
    Ok((numbers.next(), numbers.next()) >= (Some(6), Some(16)))
}

async fn pod_uid(s: &Story, vmi: &str) -> Result<String> {
    let pod = s.launcher_pod(vmi).await?;
    Ok(pod["metadata"]["uid"].as_str().context("pod without uid")?.to_owned())
}
