//! Processes that are killed while a volume is attached to a running guest, or detached from it.
//!
//! Each row stops one process, so that the change stays in an observed phase, kills another and lets the first continue. The
//! guest is the witness: it is not restarted, the disk appears with its content, and disappears.

use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use ferrovirt_e2e_tests::{
    Node, Story, TIMEOUT,
    storage::{Backing, Storage, delete_vmis, on_host},
    story_alone,
};
use kube::api::{DeleteParams, ListParams};
use serde_json::Value;

use crate::manifests;

const MINUTES: Duration = Duration::from_secs(150);
/// Volume, claim and disk.
const NAME: &str = "plug";
/// Text at the beginning of the disk.
const MARK: &str = "the content of the claim";

/// The change during which a process is killed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum During {
    /// virt-handler is stopped: the volume is attached to the node.
    AttachToPod,
    /// libvirtd is stopped: the launcher pod has the volume.
    AttachToGuest,
    /// libvirtd is stopped: the volume has left the spec.
    DetachFromGuest,
}

/// The process that is killed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Victim {
    VirtHandler,
    Worker,
    Libvirtd,
    AttachmentPod,
}

const TABLE: [(During, Victim); 12] = [
    (During::AttachToPod, Victim::VirtHandler),
    (During::AttachToPod, Victim::Worker),
    (During::AttachToPod, Victim::Libvirtd),
    (During::AttachToPod, Victim::AttachmentPod),
    (During::AttachToGuest, Victim::VirtHandler),
    (During::AttachToGuest, Victim::Worker),
    (During::AttachToGuest, Victim::Libvirtd),
    (During::AttachToGuest, Victim::AttachmentPod),
    (During::DetachFromGuest, Victim::VirtHandler),
    (During::DetachFromGuest, Victim::Worker),
    (During::DetachFromGuest, Victim::Libvirtd),
    (During::DetachFromGuest, Victim::AttachmentPod),
];

impl During {
    /// Returns the program that is stopped, and the phase in which the volume stays.
    const fn held(self) -> (&'static str, &'static str) {
        match self {
            Self::AttachToPod => ("virt-handler", "AttachedToNode"),
            Self::AttachToGuest => ("libvirtd", "MountedToPod"),
            Self::DetachFromGuest => ("libvirtd", "Ready"),
        }
    }
}

#[test]
fn volumes_are_attached_and_detached_whatever_is_killed_meanwhile() {
    story_alone("hotplug-faults", async |s| {
        let storage = Storage::make(s, NAME, Backing::Directory).await?;
        let outcome = rows(s, &storage).await;
        let gone = delete_vmis(s).await;
        storage.remove(s).await?;
        outcome.and(gone)
    });
}

async fn rows(s: &Story, storage: &Storage) -> Result<()> {
    let image = format!("{}/disk.img", storage.directory);
    on_host(s, &storage.node, &format!("truncate -s 16M {image} && printf \"{MARK}\" | dd of={image} conv=notrunc"))
        .await?;
    s.apply(&manifests::kernel_vmi("guest")).await?;
    s.wait_running("guest").await?;
    let boot = in_guest(s, "modprobe -qab virtio_blk; cat /proc/sys/kernel/random/boot_id").await?;
    let node = s.enter_node(&s.node_of("guest").await?).await?;
    let mut outcome = Ok(());
    for (during, victim) in TABLE {
        outcome = row(s, &node, during, victim).await.with_context(|| format!("{victim:?} killed during {during:?}"));
        if outcome.is_err() {
            break;
        }
    }
    // A process that a failed row has stopped.
    let uid = launcher_uid(s).await?;
    for (program, cgroup) in [("virt-handler", ""), ("libvirtd", uid.as_str())] {
        node.run(&format!("{}; true", signal(program, cgroup, "CONT"))).await?;
    }
    node.leave().await?;
    outcome?;
    ensure!(in_guest(s, "cat /proc/sys/kernel/random/boot_id").await? == boot, "the guest was restarted");
    Ok(())
}

async fn row(s: &Story, node: &Node, during: During, victim: Victim) -> Result<()> {
    let uid = launcher_uid(s).await?;
    let (program, phase) = during.held();
    let cgroup = if program == "virt-handler" { "" } else { uid.as_str() };
    if during == During::DetachFromGuest {
        add(s).await?;
        attached(s).await?;
    }
    node.run(&signal(program, cgroup, "STOP")).await.with_context(|| format!("stop {program}"))?;
    match during {
        During::AttachToPod | During::AttachToGuest => add(s).await?,
        During::DetachFromGuest => remove(s).await?,
    }
    let is_held = |vmi: &Value| phase_of(vmi) == phase && has_volume(vmi) != (during == During::DetachFromGuest);
    s.wait("vmi", "guest", &format!("show the volume as {phase}"), MINUTES, is_held).await?;
    kill(s, node, victim, &uid).await?;
    let vmi = s.get("vmi", "guest").await?;
    eprintln!("{during:?}: killed {victim:?} while the volume was {phase}, it is {} now", phase_of(&vmi));
    // Without its pod, a volume that the guest does not have falls back to an earlier phase.
    let fell_back = during != During::DetachFromGuest && phase_of(&vmi) != "Ready";
    let kept = is_held(&vmi) || (victim == Victim::AttachmentPod && fell_back);
    // A killed process does not hold the change any more.
    let was_holder =
        matches!((program, victim), ("virt-handler", Victim::VirtHandler) | ("libvirtd", Victim::Libvirtd));
    ensure!(kept || was_holder, "the kill missed: the volume is {}", phase_of(&vmi));
    if !was_holder {
        node.run(&signal(program, cgroup, "CONT")).await.with_context(|| format!("continue {program}"))?;
    }
    if during != During::DetachFromGuest {
        attached(s).await?;
        remove(s).await?;
    }
    detached(s).await
}

async fn add(s: &Story) -> Result<()> {
    let volume = format!("--volume-name={NAME}");
    s.virt(&["addvolume", "guest", &volume, "--bus=virtio", "--serial=plugged"]).await.map(drop)
}

async fn remove(s: &Story) -> Result<()> {
    s.virt(&["removevolume", "guest", &format!("--volume-name={NAME}")]).await.map(drop)
}

/// Waits until the guest has the disk with its content.
async fn attached(s: &Story) -> Result<()> {
    let ready = |vmi: &Value| phase_of(vmi) == "Ready" && entry(vmi).is_some_and(|entry| entry["target"] != "");
    s.wait("vmi", "guest", "show the volume as Ready", MINUTES, ready).await?;
    let find = "for i in $(seq 30); do d=$(grep -ls plugged /sys/block/*/serial) && break; sleep 1; done; \
                head -c 24 /dev/$(echo $d | cut -d/ -f4)";
    let content = in_guest(s, find).await?;
    ensure!(content.contains(MARK), "the guest reads {content:?} from the disk");
    Ok(())
}

/// Waits until neither guest, status nor namespace shows anything of the volume.
async fn detached(s: &Story) -> Result<()> {
    s.wait("vmi", "guest", "show the volume no longer", MINUTES, |vmi| entry(vmi).is_none()).await?;
    let left = in_guest(s, "grep -ls plugged /sys/block/*/serial; true").await?;
    ensure!(left.trim().is_empty(), "the guest still has {left:?}");
    let deadline = tokio::time::Instant::now() + TIMEOUT;
    while let Some(pod) = attachment_pods(s).await?.first() {
        ensure!(tokio::time::Instant::now() < deadline, "attachment pod {pod} is left");
        tokio::time::sleep(Duration::from_millis(250)).await;
    }
    let vmi = s.get("vmi", "guest").await?;
    ensure!(vmi["status"]["phase"] == "Running", "the VMI is {}", vmi["status"]["phase"]);
    Ok(())
}

async fn kill(s: &Story, node: &Node, victim: Victim, launcher: &str) -> Result<()> {
    let (program, cgroup) = match victim {
        Victim::VirtHandler => ("virt-handler", ""),
        Victim::Worker => ("virt-launcher", launcher),
        Victim::Libvirtd => ("libvirtd", launcher),
        Victim::AttachmentPod => {
            let pods = attachment_pods(s).await?;
            let [pod] = pods.as_slice() else { bail!("attachment pods: {pods:?}") };
            s.api("Pod").delete(pod, &DeleteParams::default().grace_period(0)).await?;
            return s.wait_gone("Pod", pod, TIMEOUT).await;
        }
    };
    node.run(&signal(program, cgroup, "KILL")).await.map(drop).with_context(|| format!("kill {program}"))
}

/// Returns a script that sends a signal to the processes of a program whose cgroup contains `cgroup`. It fails without one.
pub(crate) fn signal(program: &str, cgroup: &str, signal: &str) -> String {
    let name: String = program.chars().take(15).collect();
    format!(
        "sent=1; for p in /proc/[0-9]*; do \
           if grep -qs -e '{cgroup}' $p/cgroup && [ \"$(cat $p/comm 2>/dev/null)\" = '{name}' ]; then \
             kill -{signal} ${{p#/proc/}} && sent=0; fi; \
         done; exit $sent"
    )
}

async fn launcher_uid(s: &Story) -> Result<String> {
    let pod = s.launcher_pod("guest").await?;
    pod["metadata"]["uid"].as_str().map(str::to_owned).context("pod without uid")
}

async fn attachment_pods(s: &Story) -> Result<Vec<String>> {
    let pods = s.api("Pod").list(&ListParams::default().labels("kubevirt.io=hotplug-disk")).await?;
    Ok(pods.items.into_iter().filter_map(|pod| pod.metadata.name).collect())
}

fn entry(vmi: &Value) -> Option<&Value> {
    vmi["status"]["volumeStatus"].as_array()?.iter().find(|entry| entry["name"] == NAME)
}

fn phase_of(vmi: &Value) -> &str {
    entry(vmi).and_then(|entry| entry["phase"].as_str()).unwrap_or_default()
}

fn has_volume(vmi: &Value) -> bool {
    vmi["spec"]["volumes"].as_array().into_iter().flatten().any(|volume| volume["name"] == NAME)
}

/// Runs a command in the guest and returns its output.
async fn in_guest(s: &Story, command: &str) -> Result<String> {
    let mut console = s.reopen_console("guest", "root", "ferrovirt").await?;
    let (output, _) = console.run(command).await?;
    console.leave().await?;
    Ok(output)
}
