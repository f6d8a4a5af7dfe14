//! A launcher pod in the hands of somebody else: what virt-handler meets in the place of the launcher's socket.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use ferrovirt_e2e_tests::{PATIENCE, Story, story, story_alone};
use k8s_openapi::api::core::v1::Pod;
use kube::{
    Api,
    api::{DeleteParams, ListParams, Patch, PatchParams},
};
use serde_json::{Value, json};
use tokio::time::{Instant, sleep};

use crate::manifests;

/// Most that virt-handler may grow by all of it, in KiB.
const GROWTH: u64 = 32 * 1024;
/// How long the floods last.
const FLOOD: Duration = Duration::from_secs(5);
/// kubelet's directory of pods, as process 1 of the node sees it, and where the socket is in that of a pod.
const PODS: &str = "/proc/1/root/var/lib/kubelet/pods";
const SOCKETS: &str = "volumes/kubernetes.io~empty-dir/sockets";

#[test]
fn cve_2026_7374_what_takes_the_place_of_a_launchers_socket_is_refused_and_harms_no_other_vm() {
    story_alone("cve-socket", async |s| {
        for name in ["prey", "bystander"] {
            s.apply(&manifests::kernel_vmi(name)).await?;
        }
        for name in ["prey", "bystander"] {
            s.wait_running(name).await?;
        }
        let intruder = Intruder::enter(s, "prey").await?;
        intruder.run("mv launcher-sock aside").await?;
        intruder.run("hostile-launcher count $PWD/decoy >/tmp/count 2>&1 </dev/null &").await?;
        intruder.wait_for("test -S decoy").await?;
        intruder.run("ln -s decoy launcher-sock").await?;
        restart_virt_handlers(s).await?;
        let restarts = restarts(s).await?;
        let before = s.memory("virt-handler", "").await?;

        // A link to a socket of the pod's own, which passes every check but that of the link.
        refused(s, "symbolic link").await.context("a link beside the socket")?;
        let dialled = intruder.run("cat /tmp/count").await?;
        ensure!(dialled.is_empty(), "the link was followed: {dialled}");
        intruder.swap("mkfifo launcher-sock").await?;
        refused(s, "named pipe").await.context("a FIFO")?;
        // The path leads to containerd from wherever process 1 of the node can be seen, as virt-handler can.
        intruder.swap("ln -s /proc/1/root/run/containerd/containerd.sock launcher-sock").await?;
        refused(s, "symbolic link").await.context("a link to the container runtime")?;
        intruder.swap("true").await?;
        let (prey, other) = (pod_uid(s, "prey").await?, pod_uid(s, "bystander").await?);
        s.on_node(&format!("ln {PODS}/{other}/{SOCKETS}/launcher-sock {PODS}/{prey}/{SOCKETS}/launcher-sock")).await?;
        refused(s, "is not in pod").await.context("the socket of another launcher")?;

        for mode in ["endless", "pings"] {
            intruder.swap("true").await?;
            intruder.run(&format!("hostile-launcher {mode} $PWD/launcher-sock >/tmp/{mode} 2>&1 </dev/null &")).await?;
            intruder.wait_for(&format!("grep -q connected /tmp/{mode}")).await.with_context(|| mode.to_owned())?;
            sleep(FLOOD).await;
            serves(s, "bystander").await.with_context(|| format!("{mode}: another VM"))?;
            let grown = s.memory("virt-handler", "").await?.saturating_sub(before);
            eprintln!("{mode}: virt-handler grew by {grown} KiB");
            ensure!(grown < GROWTH, "{mode}: virt-handler takes {grown} KiB more");
            if mode == "endless" {
                let said = s.wait_event("prey", "SyncFailed", PATIENCE).await.context("a message without end")?;
                ensure!(said.contains("too large"), "{said}");
            }
            intruder.run("killall hostile-launcher").await?;
        }

        intruder.swap("mv aside launcher-sock").await?;
        serves(s, "prey").await.context("after the launcher's own socket is back")?;
        ensure!(self::restarts(s).await? == restarts, "virt-handler was restarted");
        Ok(())
    });
}

#[test]
fn cve_2025_64435_a_pod_that_looks_like_the_launcher_in_all_but_its_owner_is_never_met() {
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
        // Networks are not for pods that say so themselves.
        if let Some(annotations) = pod["metadata"]["annotations"].as_object_mut() {
            annotations.retain(|name, _| !name.starts_with("k8s.v1.cni.cncf.io/"));
        }
        s.apply(&pod.to_string()).await?;
        let name = "virt-launcher-box-zzzzz";
        let running = |pod: &Value| pod["status"]["phase"] == "Running";
        let lookalike = s.wait("Pod", name, "be Running", PATIENCE, running).await?;
        let lookalike = lookalike["metadata"]["uid"].as_str().context("pod without uid")?;
        let vmi = s.get("vmi", "box").await?;
        let pods = vmi["status"]["activePods"].as_object().context("no active pods")?;
        ensure!(pods.len() == 1 && pods.contains_key(uid), "active pods: {pods:?}");

        // With the launcher gone nothing is left but the other: the VMI ends, and does not go on in that.
        let real = launcher["metadata"]["name"].as_str().context("pod without name")?;
        s.api("Pod").delete(real, &DeleteParams::default().grace_period(0)).await?;
        let over = |vmi: &Value| ["Failed", "Succeeded"].contains(&vmi["status"]["phase"].as_str().unwrap_or_default());
        let vmi = s.wait("vmi", "box", "end with its launcher", PATIENCE, over).await?;
        ensure!(vmi["status"]["activePods"][lookalike].is_null(), "active pods: {}", vmi["status"]["activePods"]);
        let dialled = s.log(name, "compute").await?;
        ensure!(dialled.is_empty(), "it was dialled: {dialled}");
        Ok(())
    });
}

/// Somebody in a launcher pod, as its user and in its control group, with a shell where its sockets are.
struct Intruder<'s> {
    story: &'s Story,
    pod: String,
}

impl<'s> Intruder<'s> {
    /// A user who may debug pods comes by a container of their own.
    async fn enter(story: &'s Story, vmi: &str) -> Result<Self> {
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
        story.wait("Pod", &pod, "let the intruder in", PATIENCE, runs).await?;
        Ok(Self { story, pod })
    }

    /// Runs a script where the sockets are.
    async fn run(&self, script: &str) -> Result<String> {
        let script = format!("cd /sockets && {{ {script}\n}}");
        self.story.exec_in(&self.pod, "intruder", &["sh", "-c", &script]).await
    }

    /// Removes what has the name of the socket and runs a script that puts something else there.
    async fn swap(&self, script: &str) -> Result<()> {
        self.run(&format!("rm -f launcher-sock && {script}")).await.map(drop)
    }

    async fn wait_for(&self, script: &str) -> Result<()> {
        let deadline = Instant::now() + PATIENCE;
        while let Err(error) = self.run(script).await {
            ensure!(Instant::now() < deadline, "{error:#}");
            sleep(Duration::from_millis(500)).await;
        }
        Ok(())
    }
}

async fn pod_uid(s: &Story, vmi: &str) -> Result<String> {
    let pod = s.launcher_pod(vmi).await?;
    Ok(pod["metadata"]["uid"].as_str().context("pod without uid")?.to_owned())
}

/// Waits until the VMI that is attacked says why its launcher is not connected to.
async fn refused(s: &Story, why: &str) -> Result<()> {
    let says = |vmi: &Value| {
        let conditions = vmi["status"]["conditions"].as_array().into_iter().flatten();
        let mut messages = conditions.filter(|c| c["type"] == "Synchronized").filter_map(|c| c["message"].as_str());
        messages.any(|message| message.contains(why))
    };
    let vmi = s.wait("vmi", "prey", &format!("say that {why:?}"), Duration::from_secs(60), says).await?;
    ensure!(vmi["status"]["phase"] == "Running", "the VMI is {}", vmi["status"]["phase"]);
    Ok(())
}

/// Waits until a VMI is paused and goes on, by the hand of virt-handler and its launcher.
async fn serves(s: &Story, vmi: &str) -> Result<()> {
    let deadline = Instant::now() + PATIENCE;
    while let Err(error) = s.virt(&["pause", "vmi", vmi]).await {
        ensure!(Instant::now() < deadline, "it is not paused: {error:#}");
        sleep(Duration::from_secs(1)).await;
    }
    s.virt(&["unpause", "vmi", vmi]).await.map(drop)
}

fn virt_handlers(s: &Story) -> Api<Pod> {
    Api::namespaced(s.client.clone(), "kubevirt")
}

async fn list(s: &Story) -> Result<Vec<Pod>> {
    Ok(virt_handlers(s).list(&ListParams::default().labels("kubevirt.io=virt-handler")).await?.items)
}

/// Puts new virt-handlers in the place of those that run: a new one dials all launchers of its node.
async fn restart_virt_handlers(s: &Story) -> Result<()> {
    let former: Vec<Pod> = list(s).await?;
    for pod in &former {
        let name = pod.metadata.name.as_deref().unwrap_or_default();
        virt_handlers(s).delete(name, &DeleteParams::default().grace_period(0)).await?;
    }
    let deadline = Instant::now() + PATIENCE;
    loop {
        let pods = list(s).await?;
        let new = pods.iter().filter(|pod| former.iter().all(|known| known.metadata.uid != pod.metadata.uid));
        if new.filter(|pod| is_ready(pod)).count() == former.len() && pods.len() == former.len() {
            return Ok(());
        }
        ensure!(Instant::now() < deadline, "virt-handler does not come back");
        sleep(Duration::from_millis(500)).await;
    }
}

fn is_ready(pod: &Pod) -> bool {
    let conditions = pod.status.iter().flat_map(|status| status.conditions.iter().flatten());
    conditions.into_iter().any(|condition| condition.type_ == "Ready" && condition.status == "True")
}

/// The virt-handlers, and how often their containers were restarted. All of them are ready.
async fn restarts(s: &Story) -> Result<Vec<(Option<String>, i32)>> {
    let mut restarts = Vec::new();
    for pod in list(s).await? {
        ensure!(is_ready(&pod), "virt-handler is not ready");
        let statuses = pod.status.and_then(|status| status.container_statuses).unwrap_or_default();
        restarts.push((pod.metadata.uid, statuses.iter().map(|status| status.restart_count).sum()));
    }
    Ok(restarts)
}
