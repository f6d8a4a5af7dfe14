//! Faults while a volume is attached to a running guest, or detached from it: see [`kills`](crate::kills).
//!
//! The disk appears in the guest with its content, and disappears, and nothing is left of it.

use anyhow::{Result, ensure};
use ferrovirt_e2e_tests::{
    Story, TIMEOUT,
    storage::{Backing, Storage, on_host},
    story_alone,
};
use serde_json::Value;
use tokio::time::{Duration, Instant, sleep};

use crate::{
    kills::{
        ATTACHMENT_POD, Ends, Faults, GUEST, Holder, MINUTES, Phase, Row, VICTIMS_OF_ATTACHMENTS, in_guest, run_at,
        table,
    },
    manifests,
};

/// Volume, claim and disk.
const NAME: &str = "plug";
/// Text at the beginning of the disk.
const MARK: &str = "the content of the claim";

#[derive(Clone, Copy, PartialEq, Eq)]
enum Change {
    Attach,
    Detach,
}

const PHASES: &[Phase<Change>] = &[
    // The volume is attached to the node.
    Phase::new("AttachToPod", Holder::VirtHandler, Change::Attach, |vmi| is_held(vmi, "AttachedToNode", true)),
    // The launcher pod has the volume.
    Phase::new("AttachToGuest", Holder::Libvirtd, Change::Attach, |vmi| is_held(vmi, "MountedToPod", true)),
    // The volume has left the spec.
    Phase::new("DetachFromGuest", Holder::Libvirtd, Change::Detach, |vmi| is_held(vmi, "Ready", false)),
];

#[test]
fn volumes_are_attached_and_detached_whatever_is_killed_meanwhile() {
    story_alone("hotplug-faults", async |s| {
        let storage = Storage::make(s, NAME, Backing::Directory).await?;
        let rows = async |storage: &Storage| {
            let image = format!("{}/disk.img", storage.directory);
            let fill = format!("truncate -s 16M {image} && printf \"{MARK}\" | dd of={image} conv=notrunc");
            on_host(s, &storage.node, &fill).await?;
            start(s, &storage.hostname).await?;
            let mut disk = Disk { hostname: &storage.hostname };
            run_at(s, &storage.node, table(PHASES, VICTIMS_OF_ATTACHMENTS)?, &mut disk).await
        };
        storage.lend(s, rows).await
    });
}

async fn start(s: &Story, hostname: &str) -> Result<()> {
    s.apply(&manifests::kernel_vmi_on(hostname, GUEST)).await?;
    s.wait_running(GUEST).await?;
    in_guest(s, "modprobe -qab virtio_blk; true").await.map(drop)
}

/// The disk in the guest, which runs on this host.
struct Disk<'a> {
    hostname: &'a str,
}

impl Faults for Disk<'_> {
    type Change = Change;

    async fn prepare(&mut self, s: &Story, row: Row<Change>) -> Result<()> {
        if row.phase.change == Change::Detach {
            add(s).await?;
            attached(s).await?;
        }
        Ok(())
    }

    async fn change(&mut self, s: &Story, change: Change) -> Result<()> {
        if change == Change::Attach { add(s).await } else { remove(s).await }
    }

    async fn end(&mut self, ends: &Ends<'_>, row: Row<Change>, _: &Value) -> Result<()> {
        let s = ends.story;
        if row.kills_guest() {
            // A VMI of its own ends with QEMU, and its attachment pods with it.
            s.wait("vmi", GUEST, "fail", MINUTES, |vmi| vmi["status"]["phase"] == "Failed").await?;
            no_pods(s).await?;
            s.delete("vmi", GUEST).await?;
            s.wait_gone("vmi", GUEST, MINUTES).await?;
            return start(s, self.hostname).await;
        }
        if row.phase.change == Change::Attach {
            attached(s).await?;
            remove(s).await?;
        }
        detached(s).await
    }
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
    let find = "for i in $(seq 120); do d=$(grep -ls plugged /sys/block/*/serial) && break; sleep 1; done; \
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
    while let Some(pod) = s.list("Pod", ATTACHMENT_POD).await?.first() {
        ensure!(Instant::now() < deadline, "attachment pod {} is left", pod["metadata"]["name"]);
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

fn is_held(vmi: &Value, phase: &str, has_volume: bool) -> bool {
    let mut volumes = vmi["spec"]["volumes"].as_array().into_iter().flatten();
    phase_of(vmi) == phase && volumes.any(|volume| volume["name"] == NAME) == has_volume
}
