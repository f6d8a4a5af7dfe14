//! Processes that are killed while a running guest gets a vCPU or memory, or gives memory back: see [`kills`](crate::kills).
//!
//! The guest has the processors and the memory in the end.

use anyhow::{Result, ensure};
use ferrovirt_e2e_tests::{Story, story_alone};
use serde_json::Value;

use crate::{
    kills::{GUEST, Holder, Kills, MINUTES, Victim, in_guest, table, vmi_uid},
    live_resize::{READY, condition, memory_between, processors, vm},
    moves::with_spec,
};

/// The change during which a process is killed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum During {
    /// virt-handler is stopped: the pod has the resources for a vCPU.
    CpuOfPod,
    /// libvirtd is stopped: the launcher is to plug a vCPU.
    CpuOfGuest,
    /// libvirtd is stopped: the launcher is to plug memory.
    Growth,
    /// libvirtd is stopped: the launcher is to take memory from the guest.
    Shrink,
}

const DURING: [During; 4] = [During::CpuOfPod, During::Growth, During::CpuOfGuest, During::Shrink];
const VICTIMS: [Victim; 6] =
    [Victim::VirtHandler, Victim::Worker, Victim::Libvirtd, Victim::ControllerLeader, Victim::Kubelet, Victim::Qemu];

impl During {
    const fn holder(self) -> Holder {
        match self {
            Self::CpuOfPod => Holder::VirtHandler,
            Self::CpuOfGuest | Self::Growth | Self::Shrink => Holder::Libvirtd,
        }
    }

    const fn is_cpu(self) -> bool {
        matches!(self, Self::CpuOfPod | Self::CpuOfGuest)
    }

    /// Returns true while the VMI waits in the phase.
    fn is_observed(self, vmi: &Value) -> bool {
        let reason = |type_: &str| condition(vmi, type_).map(|change| change["reason"].as_str().unwrap_or_default());
        match self {
            Self::CpuOfPod | Self::CpuOfGuest => reason("HotVCPUChange") == Some("PodResized"),
            Self::Growth => reason("HotMemoryChange") == Some("PodResized"),
            Self::Shrink => reason("HotMemoryChange").is_some() && vmi["status"]["memory"]["guestRequested"] == "2Gi",
        }
    }
}

/// The size of the guest.
#[derive(Clone, Copy, Debug)]
struct Size {
    sockets: u32,
    memory: &'static str,
}

#[test]
fn size_of_a_guest_changes_whatever_is_killed_meanwhile() {
    story_alone("live-resize-faults", async |s| {
        let rows = table(&DURING, &VICTIMS)?;
        let most = rows.iter().filter(|(during, _)| during.is_cpu()).count() + 1;
        let manifest = vm(GUEST, &format!("sockets: 1, maxSockets: {most}"), "");
        // It starts there again after its QEMU was killed.
        let (node, hostname) = s.one_node().await?;
        let manifest = with_spec(&manifest, &format!("nodeSelector: {{kubernetes.io/hostname: {hostname}}}"));
        s.apply(&manifest.replace("runStrategy: Once", "runStrategy: Always")).await?;
        s.wait_running(GUEST).await?;
        in_guest(s, READY).await?;
        let node = s.enter_node(&node).await?;
        let kills = Kills { story: s, node: &node };
        let mut size = Size { sockets: 1, memory: "1Gi" };
        let outcome = kills.rows(&rows, async |during, victim| row(&kills, during, victim, &mut size).await).await;
        node.leave().await?;
        outcome
    });
}

async fn row(kills: &Kills<'_>, during: During, victim: Victim, size: &mut Size) -> Result<()> {
    let s = kills.story;
    let memory = if during == During::Shrink { "2Gi" } else { "1Gi" };
    if !during.is_cpu() && size.memory != memory {
        size.memory = memory;
        set_memory(s, memory).await?;
        settled(s, *size).await?;
    }
    match during {
        During::CpuOfPod | During::CpuOfGuest => size.sockets += 1,
        During::Growth => size.memory = "2Gi",
        During::Shrink => size.memory = "1Gi",
    }
    let wanted = *size;
    let change = async || match during.is_cpu() {
        true => s.virt(&["set", "cpu", GUEST, &format!("--sockets={}", wanted.sockets)]).await.map(drop),
        false => set_memory(s, wanted.memory).await,
    };
    let former = vmi_uid(s).await?;
    kills.during(&format!("{during:?}"), Some(during.holder()), victim, change, |vmi| during.is_observed(vmi)).await?;
    if victim != Victim::Qemu {
        return settled(s, wanted).await;
    }
    kills.started_again(&former).await?;
    in_guest(s, READY).await?;
    settled(s, wanted).await?;
    if size.memory == "1Gi" {
        return Ok(());
    }
    // The guest cannot shrink below the memory that it was started with.
    size.memory = "1Gi";
    set_memory(s, size.memory).await?;
    let former = vmi_uid(s).await?;
    s.virt(&["restart", GUEST, "--grace-period=0", "--force"]).await?;
    kills.started_again(&former).await?;
    in_guest(s, READY).await?;
    settled(s, *size).await
}

async fn set_memory(s: &Story, guest: &str) -> Result<()> {
    s.virt(&["set", "memory", GUEST, &format!("--guest={guest}")]).await.map(drop)
}

/// Waits until the VMI shows this size and no change, and the guest has it.
async fn settled(s: &Story, size: Size) -> Result<()> {
    let is_done = |vmi: &Value| {
        let status = &vmi["status"];
        status["currentCPUTopology"]["sockets"] == size.sockets
            && status["memory"]["guestRequested"] == size.memory
            && status["memory"]["guestCurrent"] == size.memory
            && condition(vmi, "HotVCPUChange").is_none()
            && condition(vmi, "HotMemoryChange").is_none()
    };
    let vmi = s.wait("vmi", GUEST, &format!("have {size:?}"), MINUTES, is_done).await?;
    ensure!(vmi["status"]["phase"] == "Running", "the VMI is {}", vmi["status"]["phase"]);
    let (least, most) = if size.memory == "2Gi" { (1700, 2048) } else { (800, 1024) };
    in_guest(s, &memory_between(least, most)).await?;
    let found = in_guest(s, &processors(size.sockets)).await?;
    ensure!(found == size.sockets.to_string(), "the guest has {found} processors, not {}", size.sockets);
    Ok(())
}
