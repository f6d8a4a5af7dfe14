//! Measures the time from creation to Running and to a booted guest, compared with a bare pod.

use std::{
    collections::BTreeMap,
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};

use anyhow::{Context, Result, bail};
use ferrovirt_e2e_tests::{Story, is_true};
use futures::{AsyncBufReadExt, TryStreamExt, future::try_join_all};
use k8s_openapi::api::core::v1::Pod;
use kube::{
    Api,
    api::{DynamicObject, LogParams},
    runtime::wait::{Condition, await_condition, conditions},
};

use crate::{Figures, add_medians};

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
    /// Phase Running to condition Ready, seconds.
    ready: f64,
    /// Seconds from creation until user space of the guest is up.
    guest_up: f64,
}

impl<'a> StartedVmi<'a> {
    /// Creates a VMI from the tiny container disk and waits until its guest is up.
    pub(crate) async fn start(story: &'a Story, name: &str) -> Result<Self> {
        out_of_phase().await;
        let created = Instant::now();
        story.apply(&manifest(name)).await?;
        wait(story.api("vmi"), name, is_running).await.context("VMI was not Running")?;
        let running = created.elapsed().as_secs_f64();
        wait(story.api("vmi"), name, is_ready).await.context("VMI was not Ready")?;
        let ready = created.elapsed().as_secs_f64() - running;
        wait_guest_up(story, name).await?;
        Ok(Self { story, name: name.to_owned(), running, ready, guest_up: created.elapsed().as_secs_f64() })
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

/// Returns a VMI that boots the tiny container disk.
pub(crate) fn manifest(name: &str) -> String {
    format!(
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
    )
}

/// Measures `rounds` starts and deletions of each kind, one at a time and alternating, so that all see the same load of the
/// host.
pub(crate) async fn measure(story: &Story, rounds: usize, figures: &mut Figures) -> Result<()> {
    let mut times = BTreeMap::<&str, Vec<f64>>::new();
    for round in 0..rounds {
        let name = format!("pod-{round}");
        let (pod, pod_deleted) = pod(story, &name, bare_pod(story, &name)).await?;
        let name = format!("empty-{round}");
        let (empty, _) = self::pod(story, &name, story.toolbox_without_wait(&name)).await?;
        let vmi = StartedVmi::start(story, &format!("vmi-{round}")).await?;
        let (running, ready, up) = (vmi.running, vmi.ready, vmi.guest_up);
        let deleted = vmi.delete().await?;
        println!(
            "round {round}: pod Running {pod:.2} s, deleted {pod_deleted:.2} s; VMI Running {running:.2} s, Ready {ready:.2} s later, guest up {up:.2} s, deleted {deleted:.2} s"
        );
        for (name, value) in [
            ("pod_running_s", pod),
            ("pod_delete_s", pod_deleted),
            ("pod_without_volumes_running_s", empty),
            ("vmi_running_s", running),
            ("vmi_ready_after_running_s", ready),
            ("vmi_ready_s", running + ready),
            ("vmi_guest_up_s", up),
            ("delete_s", deleted),
        ] {
            times.entry(name).or_default().push(value);
        }
    }
    add_medians(figures, times)
}

/// Creates a usual pod, which ends as soon as it is asked to. It has the default volume with the token of its service account.
/// kubelet checks every 0.3 s if the volumes of a pod are mounted, and skips the check for a pod without volumes.
pub(crate) async fn bare_pod(story: &Story, name: &str) -> Result<()> {
    story
        .apply(&format!(
            "
apiVersion: v1
kind: Pod
metadata: {{name: {name}}}
spec:
  securityContext: {{runAsNonRoot: true, runAsUser: 1000, seccompProfile: {{type: RuntimeDefault}}}}
  containers:
  - name: toolbox
    image: ferrovirt.io/toolbox:devel
    imagePullPolicy: IfNotPresent
    command: [sh, -c, 'trap \"exit 0\" TERM; sleep 3600 & wait']
    securityContext: {{allowPrivilegeEscalation: false, capabilities: {{drop: [ALL]}}}}
"
        ))
        .await
}

/// Returns the seconds until a pod with one idle container is Running, and those until it is deleted. `create` creates the pod.
pub(crate) async fn pod(story: &Story, name: &str, create: impl Future<Output = Result<()>>) -> Result<(f64, f64)> {
    out_of_phase().await;
    let created = Instant::now();
    create.await?;
    wait(story.api("Pod"), name, is_running).await.context("pod was not Running")?;
    let running = created.elapsed().as_secs_f64();
    out_of_phase().await;
    let deleted = Instant::now();
    story.delete("Pod", name).await?;
    wait(story.api("Pod"), name, gone()).await.context("pod was not gone")?;
    Ok((running, deleted.elapsed().as_secs_f64()))
}

/// Returns true for a pod or VMI in phase Running.
pub(crate) fn is_running(object: Option<&DynamicObject>) -> bool {
    object.is_some_and(|object| object.data["status"]["phase"] == "Running")
}

fn is_ready(object: Option<&DynamicObject>) -> bool {
    object.is_some_and(|object| is_true(&object.data, "Ready"))
}

/// Measures the time from the creation of ten objects at once until all are Running, for bare pods and for VMIs.
pub(crate) async fn measure_ten(story: &Story, figures: &mut Figures) -> Result<()> {
    for (kind, figure) in [("Pod", "ten_pods_running_s"), ("vmi", "ten_vmis_running_s")] {
        out_of_phase().await;
        let created = Instant::now();
        let one = async |name: &str| {
            match kind {
                "Pod" => bare_pod(story, name).await?,
                _ => story.apply(&manifest(name)).await?,
            }
            wait(story.api(kind), name, is_running).await.with_context(|| format!("{kind} {name} was not Running"))
        };
        let names: Vec<String> = (0..10).map(|number| format!("ten-{number}")).collect();
        try_join_all(names.iter().map(|name| one(name))).await?;
        figures.insert(figure.into(), created.elapsed().as_secs_f64());
        for name in &names {
            story.delete(kind, name).await?;
        }
        for name in &names {
            wait(story.api(kind), name, gone()).await.with_context(|| format!("{kind} {name} was not gone"))?;
        }
    }
    Ok(())
}

fn gone() -> impl Condition<DynamicObject> {
    |object: Option<&DynamicObject>| object.is_none()
}

/// Waits until a watch shows the condition.
pub(crate) async fn wait(api: Api<DynamicObject>, name: &str, condition: impl Condition<DynamicObject>) -> Result<()> {
    tokio::time::timeout(TIMEOUT, await_condition(api, name, condition)).await??;
    Ok(())
}

/// Waits until the user space of the VMI's guest is up.
pub(crate) async fn wait_guest_up(story: &Story, vmi: &str) -> Result<()> {
    let pod = story.launcher_pod(vmi).await?;
    let pod = pod["metadata"]["name"].as_str().context("pod without name")?;
    tokio::time::timeout(TIMEOUT, guest_up(story, pod)).await.context("guest was not up")?
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
