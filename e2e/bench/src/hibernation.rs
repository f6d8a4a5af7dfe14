//! Measures how long a guest's memory takes to a claim and back, against plain `virsh save` and `virsh restore` of the same guest in its
//! launcher pod. The guest has 192 MiB that cannot be left out as zero.
//!
//! A hibernation is measured from the claim in the launcher pod to the record that the VM is hibernated, the memory's way back from the claim
//! in the launcher pod to the running guest. A resume as a whole is a start of the VM and a second pod, which brings the claim.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use ferrovirt_e2e_tests::{Node, Story, own_cluster, signal};
use serde_json::Value;
use tokio::time::Instant;

use crate::{
    Figures,
    actions::{act, running, startable},
    add_medians,
};

const NAME: &str = "sleeper";
const MINUTES: Duration = Duration::from_secs(180);
/// File of the plain save: on the node's disk, as are the claims of the test cluster.
const FILE: &str = "/var/run/kubevirt-ephemeral-disks/plain.save";

const VM: &str = "
apiVersion: kubevirt.io/v1
kind: VirtualMachine
metadata: {name: sleeper}
spec:
  runStrategy: Manual
  template:
    spec:
      terminationGracePeriodSeconds: 0
      domain:
        memory: {guest: 512Mi}
        firmware:
          kernelBoot:
            kernelArgs: console=ttyS0 quiet
            container:
              image: ferrovirt.io/guests/tiny-kernel:devel
              imagePullPolicy: IfNotPresent
              kernelPath: /boot/vmlinuz
              initrdPath: /boot/initrd
        devices: {}
";

/// Copies of random bytes, since an emulated guest needs minutes for as many of its own.
const FILL: &str =
    "head -c 1048576 /dev/urandom >/seed && for n in $(seq 192); do cat /seed; done >/fill && wc -c </fill";

/// Measures both and reports the medians. Does nothing on other clusters than the test cluster, whose default class is for file systems, too.
pub(crate) async fn measure(s: &Story, rounds: usize, figures: &mut Figures) -> Result<()> {
    if own_cluster()?.is_none() {
        return Ok(());
    }
    s.apply(VM).await?;
    let measured = measure_all(s, rounds, figures).await;
    s.delete("vm", NAME).await?;
    s.wait_gone("vmi", NAME, MINUTES).await?;
    measured
}

async fn measure_all(s: &Story, rounds: usize, figures: &mut Figures) -> Result<()> {
    // The first start pulls the image.
    act(s, NAME, &["start", NAME], "vmi", running).await?;
    let mut all: [Vec<f64>; 6] = Default::default();
    for _ in 0..rounds {
        stop(s).await?;
        let start = act(s, NAME, &["start", NAME], "vmi", running).await?;
        let mut console = s.console(NAME)?;
        console.login("root", "ferrovirt").await?;
        console.output(FILL).await?;
        console.leave().await?;
        let (save, restore) = plain(s).await?;
        let hibernate = hibernate(s).await?;
        let (resume, resume_memory) = resume(s).await?;
        let is_over = |vm: &Value| vm["status"]["hibernation"].is_null();
        s.wait("vm", NAME, "have no saved memory", MINUTES, is_over).await?;
        for (values, value) in all.iter_mut().zip([save, hibernate, start + restore, resume, restore, resume_memory]) {
            values.push(value);
        }
    }
    let names = [
        "plain_save_s",
        "hibernate_save_s",
        "start_and_plain_restore_s",
        "resume_s",
        "plain_restore_s",
        "resume_memory_s",
    ];
    add_medians(figures, names.into_iter().zip(all))
}

async fn stop(s: &Story) -> Result<()> {
    act(s, NAME, &["stop", NAME], "vm", |vm| vm["status"]["printableStatus"] == "Stopped").await?;
    startable(s, NAME).await
}

/// Saves and restores the guest by libvirt alone. Returns the seconds of both. The worker is stopped meanwhile: it would end the pod.
async fn plain(s: &Story) -> Result<(f64, f64)> {
    let pod = s.launcher_pod(NAME).await?;
    let field = |name: &str| pod["metadata"][name].as_str().map(str::to_owned).context("pod without name");
    let (name, uid) = (field("name")?, field("uid")?);
    let node = s.enter_node(&s.node_of(NAME).await?).await?;
    let measured = plain_with(s, &node, &name, &uid).await;
    node.leave().await?;
    measured
}

async fn plain_with(s: &Story, node: &Node, pod: &str, uid: &str) -> Result<(f64, f64)> {
    let [stop, proceed] = ["STOP", "CONT"].map(|sent| signal("virt-launcher", uid, sent));
    node.run(&stop).await.context("stop the worker")?;
    let domain = format!("{}_{NAME}", s.namespace);
    let timed = async {
        let save = virsh(s, pod, &format!("save {domain} {FILE}")).await?;
        Ok((save, virsh(s, pod, &format!("restore {FILE}")).await?))
    };
    let timed: Result<(f64, f64)> = timed.await;
    node.run(&proceed).await.context("let the worker go on")?;
    timed
}

async fn virsh(s: &Story, pod: &str, command: &str) -> Result<f64> {
    let uri = "qemu+unix:///session?socket=/var/run/libvirt/virtqemud-sock";
    let began = Instant::now();
    let said = s.exec_in(pod, "compute", &["virsh", "-c", uri, command]).await?;
    ensure!(said.contains("saved to") || said.contains("restored from"), "{said}");
    Ok(began.elapsed().as_secs_f64())
}

/// Hibernates the VM. Returns the seconds from the claim in the launcher pod to the record of the saved guest.
async fn hibernate(s: &Story) -> Result<f64> {
    s.virt(&["hibernate", NAME]).await?;
    let began = at_once(s, "vmi", has_claim).await?;
    let ended = at_once(s, "vm", |vm| vm["status"]["hibernation"]["phase"] == "Hibernated").await?;
    s.wait_gone("vmi", NAME, MINUTES).await?;
    startable(s, NAME).await?;
    Ok((ended - began).as_secs_f64())
}

/// Resumes the VM. Returns the seconds from the command, and from the claim in the launcher pod, to the running guest.
async fn resume(s: &Story) -> Result<(f64, f64)> {
    let began = Instant::now();
    s.virt(&["start", NAME]).await?;
    let claimed = at_once(s, "vmi", has_claim).await?;
    let ended = at_once(s, "vmi", running).await?;
    Ok(((ended - began).as_secs_f64(), (ended - claimed).as_secs_f64()))
}

fn has_claim(vmi: &Value) -> bool {
    let entries = vmi["status"]["volumeStatus"].as_array();
    entries.into_iter().flatten().any(|entry| entry["phase"] == "MountedToPod")
}

/// Returns when this is true for the object, which is read every 10 ms.
async fn at_once(s: &Story, kind: &str, done: impl Fn(&Value) -> bool) -> Result<Instant> {
    let deadline = Instant::now() + MINUTES;
    let objects = s.api(kind);
    loop {
        let seen = objects.get_opt(NAME).await?.map(serde_json::to_value).transpose()?;
        if seen.as_ref().is_some_and(&done) {
            return Ok(Instant::now());
        }
        ensure!(
            Instant::now() < deadline,
            "{kind} {NAME} does not get there: {:?}",
            seen.map(|it| it["status"].clone())
        );
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}
