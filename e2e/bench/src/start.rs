//! Measures the time from creation to Running and to a booted guest, compared with a bare pod.

use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use anyhow::{Context, Result, bail};
use ferrovirt_e2e_tests::Story;
use futures::{AsyncBufReadExt, TryStreamExt};
use k8s_openapi::api::core::v1::Pod;
use kube::{
    Api,
    api::{DynamicObject, LogParams},
    runtime::wait::{Condition, await_condition, conditions},
};

use crate::{Figures, median};

/// Time limit of a start.
const TIMEOUT: Duration = Duration::from_secs(120);

/// Prefix of the line that the tiny guest prints when its user space is up.
const UP: &str = "tiny: up";

/// A started VMI with its times.
pub(crate) struct StartedVmi<'a> {
    story: &'a Story,
    /// Its name.
    pub name: String,
    /// Creation to phase Running, seconds.
    running: f64,
    /// Seconds from creation until user space of the guest is up.
    guest_up: f64,
}

impl<'a> StartedVmi<'a> {
    /// Creates a VMI from the tiny container disk and waits until its guest is up.
    pub(crate) async fn start(story: &'a Story, name: &str) -> Result<Self> {
        let manifest = format!(
            "
apiVersion: kubevirt.io/v1
kind: VirtualMachineInstance
metadata: {{name: {name}}}
spec:
  terminationGracePeriodSeconds: 0
  domain:
    memory: {{guest: 128Mi}}
    devices:
      disks: [{{name: root, disk: {{bus: virtio}}}}]
  volumes: [{{name: root, containerDisk: {{image: 'ferrovirt.io/guests/tiny:devel', imagePullPolicy: IfNotPresent}}}}]
"
        );
        out_of_phase().await;
        let created = Instant::now();
        story.apply(&manifest).await?;
        let running = |vmi: Option<&DynamicObject>| vmi.is_some_and(|vmi| vmi.data["status"]["phase"] == "Running");
        wait(story.api("vmi"), name, running).await.context("VMI was not Running")?;
        let running = created.elapsed().as_secs_f64();
        let pod = story.launcher_pod(name).await?;
        let pod = pod["metadata"]["name"].as_str().context("pod without name")?.to_owned();
        tokio::time::timeout(TIMEOUT, guest_up(story, &pod)).await.context("guest was not up")??;
        Ok(Self { story, name: name.to_owned(), running, guest_up: created.elapsed().as_secs_f64() })
    }

    /// Deletes the VMI, waits until it is deleted and returns the seconds.
    pub(crate) async fn delete(self) -> Result<f64> {
        out_of_phase().await;
        let deleted = Instant::now();
        self.story.delete("vmi", &self.name).await?;
        wait(self.story.api("vmi"), &self.name, gone()).await.context("VMI was not gone")?;
        Ok(deleted.elapsed().as_secs_f64())
    }
}

/// Measures `rounds` starts of each kind, one at a time and alternating, so that both see the same load of the host.
pub(crate) async fn measure(story: &Story, rounds: usize, figures: &mut Figures) -> Result<()> {
    let (mut pods, mut running, mut up, mut deleted) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
    let mut without_volumes = Vec::new();
    for round in 0..rounds {
        let name = format!("pod-{round}");
        let pod = pod(story, &name, bare_pod(story, &name)).await?;
        let name = format!("empty-{round}");
        without_volumes.push(self::pod(story, &name, story.toolbox_without_wait(&name)).await?);
        let vmi = StartedVmi::start(story, &format!("vmi-{round}")).await?;
        println!(
            "round {round}: pod Running {pod:.2} s, VMI Running {:.2} s, guest up {:.2} s",
            vmi.running, vmi.guest_up
        );
        pods.push(pod);
        running.push(vmi.running);
        up.push(vmi.guest_up);
        deleted.push(vmi.delete().await?);
    }
    let pod = median(pods).context("no round")?;
    let vmi = median(running).context("no round")?;
    figures.insert("pod_running_s".into(), pod);
    figures.insert("vmi_running_s".into(), vmi);
    figures.insert("vmi_running_over_pod".into(), vmi / pod);
    let pod = median(without_volumes).context("no round")?;
    figures.insert("pod_without_volumes_running_s".into(), pod);
    figures.insert("vmi_running_over_pod_without_volumes".into(), vmi / pod);
    figures.insert("vmi_guest_up_s".into(), median(up).context("no round")?);
    figures.insert("delete_s".into(), median(deleted).context("no round")?);
    Ok(())
}

/// Creates a usual pod. It has the default volume with the token of its service account. kubelet checks every 0.3 s if the
/// volumes of a pod are mounted, and skips the check for a pod without volumes.
async fn bare_pod(story: &Story, name: &str) -> Result<()> {
    story
        .apply(&format!(
            "
apiVersion: v1
kind: Pod
metadata: {{name: {name}}}
spec:
  terminationGracePeriodSeconds: 0
  securityContext: {{runAsNonRoot: true, runAsUser: 1000, seccompProfile: {{type: RuntimeDefault}}}}
  containers:
  - name: toolbox
    image: ferrovirt.io/toolbox:devel
    imagePullPolicy: IfNotPresent
    command: [sleep, '3600']
    securityContext: {{allowPrivilegeEscalation: false, capabilities: {{drop: [ALL]}}}}
"
        ))
        .await
}

/// Returns the seconds until a pod with one idle container is Running. `create` creates the pod.
async fn pod(story: &Story, name: &str, create: impl Future<Output = Result<()>>) -> Result<f64> {
    out_of_phase().await;
    let created = Instant::now();
    create.await?;
    let running = |pod: Option<&DynamicObject>| pod.is_some_and(|pod| pod.data["status"]["phase"] == "Running");
    wait(story.api("Pod"), name, running).await.context("pod was not Running")?;
    let took = created.elapsed().as_secs_f64();
    story.delete("Pod", name).await?;
    wait(story.api("Pod"), name, gone()).await.context("pod was not gone")?;
    Ok(took)
}

fn gone() -> impl Condition<DynamicObject> {
    |object: Option<&DynamicObject>| object.is_none()
}

async fn wait(api: Api<DynamicObject>, name: &str, condition: impl Condition<DynamicObject>) -> Result<()> {
    tokio::time::timeout(TIMEOUT, await_condition(api, name, condition)).await??;
    Ok(())
}

/// Follows the log of the pod, which contains the guest's serial output, to the line for user space.
async fn guest_up(story: &Story, pod: &str) -> Result<()> {
    let pods: Api<Pod> = Api::namespaced(story.client.clone(), &story.namespace);
    await_condition(pods.clone(), pod, conditions::is_pod_running()).await?;
    let follow = LogParams { container: Some("compute".into()), follow: true, ..LogParams::default() };
    let mut lines = pods.log_stream(pod, &follow).await?.lines();
    while let Some(line) = lines.try_next().await? {
        if line.contains(UP) {
            return Ok(());
        }
    }
    bail!("the log of {pod} ended before the guest was up")
}

/// Waits for a random part of a second. kubelet publishes container states once a second, and starts at fixed intervals would
/// all hit the same point of its period.
pub(crate) async fn out_of_phase() {
    let nanos = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.subsec_nanos());
    // Digits below the clock resolution are sufficiently random.
    let wait = u64::from(nanos / 100).wrapping_mul(6_364_136_223_846_793_005).rotate_left(17) % 1000;
    tokio::time::sleep(Duration::from_millis(wait)).await;
}
