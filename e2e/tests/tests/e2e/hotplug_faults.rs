//! Processes that are killed while a volume is attached to a running guest, or detached from it: see [`kills`](crate::kills).
//!
//! The disk appears in the guest with its content, and disappears, and nothing is left of it.

use anyhow::{Result, ensure};
use ferrovirt_e2e_tests::{
    Story, TIMEOUT,
    storage::{Backing, Storage, delete_vmis_after, on_host},
    story_alone,
};
use serde_json::Value;
use tokio::time::{Duration, Instant, sleep};

use crate::{
    kills::{GUEST, Holder, Kills, MINUTES, Victim, attachment_pods, in_guest, table},
    manifests,
};

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

const DURING: [During; 3] = [During::AttachToPod, During::AttachToGuest, During::DetachFromGuest];
const VICTIMS: [Victim; 7] = [
    Victim::VirtHandler,
    Victim::Worker,
    Victim::Libvirtd,
    Victim::AttachmentPod,
    Victim::ControllerLeader,
    Victim::Kubelet,
    Victim::Qemu,
];

impl During {
    /// Returns the process that is stopped, and the phase in which the volume stays.
    const fn held(self) -> (Holder, &'static str) {
        match self {
            Self::AttachToPod => (Holder::VirtHandler, "AttachedToNode"),
            Self::AttachToGuest => (Holder::Libvirtd, "MountedToPod"),
            Self::DetachFromGuest => (Holder::Libvirtd, "Ready"),
        }
    }
}

#[test]
fn volumes_are_attached_and_detached_whatever_is_killed_meanwhile() {
    story_alone("hotplug-faults", async |s| {
        let storage = Storage::make(s, NAME, Backing::Directory).await?;
        let outcome = rows(s, &storage).await;
        let gone = delete_vmis_after(s, &outcome).await;
        storage.remove(s).await?;
        outcome.and(gone)
    });
}

async fn rows(s: &Story, storage: &Storage) -> Result<()> {
    let image = format!("{}/disk.img", storage.directory);
    on_host(s, &storage.node, &format!("truncate -s 16M {image} && printf \"{MARK}\" | dd of={image} conv=notrunc"))
        .await?;
    start(s, &storage.hostname).await?;
    let node = s.enter_node(&storage.node).await?;
    let kills = Kills { story: s, node: &node };
    let outcome = kills
        .rows(&table(&DURING, &VICTIMS)?, async |during, victim| row(&kills, &storage.hostname, during, victim).await)
        .await;
    node.leave().await?;
    outcome
}

async fn start(s: &Story, hostname: &str) -> Result<()> {
    s.apply(&manifests::kernel_vmi_on(hostname, GUEST)).await?;
    s.wait_running(GUEST).await?;
    in_guest(s, "modprobe -qab virtio_blk; true").await.map(drop)
}

async fn row(kills: &Kills<'_>, hostname: &str, during: During, victim: Victim) -> Result<()> {
    let s = kills.story;
    let (holder, phase) = during.held();
    let is_detached = during == During::DetachFromGuest;
    if is_detached {
        add(s).await?;
        attached(s).await?;
    }
    let is_held = |vmi: &Value| phase_of(vmi) == phase && has_volume(vmi) != is_detached;
    let change = async || if is_detached { remove(s).await } else { add(s).await };
    kills.during(&format!("{during:?}"), Some(holder), victim, change, is_held).await?;
    if victim == Victim::Qemu {
        // A VMI of its own ends with QEMU, and its attachment pods with it.
        s.wait("vmi", GUEST, "fail", MINUTES, |vmi| vmi["status"]["phase"] == "Failed").await?;
        no_pods(s).await?;
        s.delete("vmi", GUEST).await?;
        s.wait_gone("vmi", GUEST, MINUTES).await?;
        return start(s, hostname).await;
    }
    if !is_detached {
        attached(s).await?;
        remove(s).await?;
    }
    detached(s).await
}

async fn add(s: &Story) -> Result<()> {
    let volume = format!("--volume-name={NAME}");
    s.virt(&["addvolume", GUEST, &volume, "--bus=virtio", "--serial=plugged"]).await.map(drop)
}

async fn remove(s: &Story) -> Result<()> {
    s.virt(&["removevolume", GUEST, &format!("--volume-name={NAME}")]).await.map(drop)
}

/// Waits until the guest has the disk with its content.
async fn attached(s: &Story) -> Result<()> {
    let ready = |vmi: &Value| phase_of(vmi) == "Ready" && entry(vmi).is_some_and(|entry| entry["target"] != "");
    s.wait("vmi", GUEST, "show the volume as Ready", MINUTES, ready).await?;
    let find = "for i in $(seq 30); do d=$(grep -ls plugged /sys/block/*/serial) && break; sleep 1; done; \
                head -c 24 /dev/$(echo $d | cut -d/ -f4)";
    let content = in_guest(s, find).await?;
    ensure!(content.contains(MARK), "the guest reads {content:?} from the disk");
    Ok(())
}

/// Waits until neither guest, status nor namespace shows anything of the volume.
async fn detached(s: &Story) -> Result<()> {
    s.wait("vmi", GUEST, "show the volume no longer", MINUTES, |vmi| entry(vmi).is_none()).await?;
    let left = in_guest(s, "grep -ls plugged /sys/block/*/serial; true").await?;
    ensure!(left.trim().is_empty(), "the guest still has {left:?}");
    no_pods(s).await?;
    let vmi = s.get("vmi", GUEST).await?;
    ensure!(vmi["status"]["phase"] == "Running", "the VMI is {}", vmi["status"]["phase"]);
    Ok(())
}

async fn no_pods(s: &Story) -> Result<()> {
    let deadline = Instant::now() + TIMEOUT;
    while let Some(pod) = attachment_pods(s).await?.first() {
        ensure!(Instant::now() < deadline, "attachment pod {pod} is left");
        sleep(Duration::from_millis(250)).await;
    }
    Ok(())
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
