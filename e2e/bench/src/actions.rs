//! Measures start, stop, restart, pause and unpause of a VM, from the user's command to the requested state, and the stop of a guest
//! that obeys the power button.

use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use ferrovirt_e2e_tests::{Story, is_true};
use serde_json::Value;

use crate::{
    Figures, add_medians,
    start::{out_of_phase, wait_guest_up},
};

/// Time limit of an action.
const TIMEOUT: Duration = Duration::from_secs(120);
/// Time in which kubelet finishes with earlier changes of the pod. It handles changes of a pod one after the other and waits up to
/// a second for each, which a restart right after other actions would measure.
const IDLE: Duration = Duration::from_secs(5);
/// Seconds after which a guest that ignores the power button is ended.
const GRACE: u32 = 100;

/// Returns a VM whose guest is ended this number of seconds after the request to stop.
fn manifest(name: &str, grace: u32) -> String {
    format!(
        "
apiVersion: kubevirt.io/v1
kind: VirtualMachine
metadata: {{name: {name}}}
spec:
  runStrategy: Manual
  template:
    spec:
      terminationGracePeriodSeconds: {grace}
      domain:
        memory: {{guest: 128Mi}}
        devices:
          disks: [{{name: root, disk: {{bus: virtio}}}}]
      volumes: [{{name: root, containerDisk: {{image: 'ferrovirt.io/guests/tiny:devel', imagePullPolicy: IfNotPresent}}}}]
"
    )
}

/// Measures each action `rounds` times and reports the medians.
pub(crate) async fn measure(story: &Story, rounds: usize, figures: &mut Figures) -> Result<()> {
    story.apply(&manifest("actions", 0)).await?;
    let (mut start, mut pause, mut unpause) = (Vec::new(), Vec::new(), Vec::new());
    let (mut restart, mut stop, mut gone) = (Vec::new(), Vec::new(), Vec::new());
    for _ in 0..rounds {
        start.push(act(story, "actions", &["start", "actions"], "vmi", running).await?);
        pause.push(act(story, "actions", &["pause", "vm", "actions"], "vmi", |vmi| is_true(vmi, "Paused")).await?);
        unpause.push(act(story, "actions", &["unpause", "vm", "actions"], "vmi", |vmi| !is_true(vmi, "Paused")).await?);
        tokio::time::sleep(IDLE).await;
        let uid = story.get("vmi", "actions").await?["metadata"]["uid"].clone();
        restart.push(
            act(story, "actions", &["restart", "actions"], "vmi", |vmi| vmi["metadata"]["uid"] != uid && running(vmi))
                .await?,
        );
        tokio::time::sleep(IDLE).await;
        let ended =
            act(story, "actions", &["stop", "actions"], "vm", |vm| vm["status"]["printableStatus"] == "Stopped")
                .await?;
        stop.push(ended);
        let since = Instant::now();
        startable(story, "actions").await?;
        gone.push(ended + since.elapsed().as_secs_f64());
    }
    story.delete("vm", "actions").await?;
    let measured = [
        ("start_s", start),
        ("pause_s", pause),
        ("unpause_s", unpause),
        ("restart_s", restart),
        ("stop_s", stop),
        ("stop_until_startable_s", gone),
    ];
    add_medians(figures, measured)?;
    measure_acpi(story, rounds, figures).await
}

/// Measures the stop of a guest that is up and obeys the power button.
async fn measure_acpi(story: &Story, rounds: usize, figures: &mut Figures) -> Result<()> {
    story.apply(&manifest("obedient", GRACE)).await?;
    let mut stops = Vec::new();
    for _ in 0..rounds {
        act(story, "obedient", &["start", "obedient"], "vmi", running).await?;
        wait_guest_up(story, "obedient").await?;
        let stopped = |vm: &Value| vm["status"]["printableStatus"] == "Stopped";
        let stop = act(story, "obedient", &["stop", "obedient"], "vm", stopped).await?;
        ensure!(stop < f64::from(GRACE) / 2.0, "the guest has not obeyed: it stopped after {stop:.1} s");
        stops.push(stop);
        startable(story, "obedient").await?;
    }
    story.delete("vm", "obedient").await?;
    add_medians(figures, [("stop_by_acpi_s", stops)])
}

/// Runs the command and returns the seconds until the object of the VM satisfies `done`.
pub(crate) async fn act(
    story: &Story,
    vm: &str,
    command: &[&str],
    kind: &str,
    done: impl Fn(&Value) -> bool,
) -> Result<f64> {
    out_of_phase().await;
    let began = Instant::now();
    story.virt(command).await?;
    story.wait(kind, vm, &format!("follow {command:?}"), TIMEOUT, done).await?;
    Ok(began.elapsed().as_secs_f64())
}

/// Waits until a start is accepted. The status becomes Stopped when the guest has ended, but the VMI has to be deleted as well.
pub(crate) async fn startable(story: &Story, vm: &str) -> Result<()> {
    let is_idle = |vm: &Value| vm["status"]["created"] != true && vm["status"]["stateChangeRequests"].is_null();
    story.wait("vm", vm, "be ready to start", TIMEOUT, is_idle).await.map(drop)
}

pub(crate) fn running(vmi: &Value) -> bool {
    vmi["status"]["phase"] == "Running"
}
