//! Faults while a running guest gets a vCPU or memory, or gives memory back: see [`kills`](crate::kills).
//!
//! The guest has the processors and the memory in the end.

use anyhow::{Result, ensure};
use ferrovirt_e2e_tests::{Story, story_alone};
use serde_json::Value;

use crate::{
    kills::{Ends, Faults, GUEST, Holder, MINUTES, Phase, Row, VICTIMS, in_guest, run_at, started_again, table},
    live_resize::{READY, condition, memory_between, processors, vm},
    moves::with_spec,
};

#[derive(Clone, Copy, PartialEq, Eq)]
enum Change {
    Cpu,
    Growth,
    Shrink,
}

const PHASES: &[Phase<Change>] = &[
    // The pod has the resources for a vCPU.
    Phase::new("CpuOfPod", Holder::VirtHandler, Change::Cpu, |vmi| reason(vmi, "HotVCPUChange") == Some("PodResized")),
    // The launcher is to plug memory.
    Phase::new("Growth", Holder::Libvirtd, Change::Growth, |vmi| reason(vmi, "HotMemoryChange") == Some("PodResized")),
    // The launcher is to plug a vCPU.
    Phase::new("CpuOfGuest", Holder::Libvirtd, Change::Cpu, |vmi| reason(vmi, "HotVCPUChange") == Some("PodResized")),
    // The launcher is to take memory from the guest.
    Phase::new("Shrink", Holder::Libvirtd, Change::Shrink, |vmi| {
        reason(vmi, "HotMemoryChange").is_some() && vmi["status"]["memory"]["guestRequested"] == "2Gi"
    }),
];

/// Returns the reason of a change in the conditions of a VMI.
fn reason<'a>(vmi: &'a Value, type_: &str) -> Option<&'a str> {
    condition(vmi, type_).map(|change| change["reason"].as_str().unwrap_or_default())
}

#[test]
fn size_of_a_guest_changes_whatever_is_killed_meanwhile() {
    story_alone("live-resize-faults", async |s| {
        let rows = table(PHASES, VICTIMS)?;
        let most = rows.iter().filter(|row| row.phase.change == Change::Cpu).count() + 1;
        let manifest = vm(GUEST, &format!("sockets: 1, maxSockets: {most}"), "");
        // It starts there again after its QEMU was killed.
        let (node, hostname) = s.one_node().await?;
        let manifest = with_spec(&manifest, &format!("nodeSelector: {{kubernetes.io/hostname: {hostname}}}"));
        s.apply(&manifest.replace("runStrategy: Once", "runStrategy: Always")).await?;
        s.wait_running(GUEST).await?;
        in_guest(s, READY).await?;
        run_at(s, &node, rows, &mut Size { sockets: 1, memory: "1Gi" }).await
    });
}

/// The size of the guest.
#[derive(Clone, Copy, Debug)]
struct Size {
    sockets: u32,
    memory: &'static str,
}

impl Faults for Size {
    type Change = Change;

    async fn prepare(&mut self, s: &Story, row: Row<Change>) -> Result<()> {
        let memory = if row.phase.change == Change::Shrink { "2Gi" } else { "1Gi" };
        if row.phase.change == Change::Cpu || self.memory == memory {
            return Ok(());
        }
        self.memory = memory;
        set_memory(s, memory).await?;
        settled(s, *self).await
    }

    async fn change(&mut self, s: &Story, change: Change) -> Result<()> {
        match change {
            Change::Cpu => self.sockets += 1,
            Change::Growth => self.memory = "2Gi",
            Change::Shrink => self.memory = "1Gi",
        }
        match change {
            Change::Cpu => s.virt(&["set", "cpu", GUEST, &format!("--sockets={}", self.sockets)]).await.map(drop),
            Change::Growth | Change::Shrink => set_memory(s, self.memory).await,
        }
    }

    async fn end(&mut self, ends: &Ends<'_>, row: Row<Change>, former: &Value) -> Result<()> {
        let s = ends.story;
        if !row.kills_guest() {
            return settled(s, *self).await;
        }
        started_again(s, former).await?;
        in_guest(s, READY).await?;
        settled(s, *self).await?;
        if self.memory == "1Gi" {
            return Ok(());
        }
        // The guest cannot shrink below the memory that it was started with.
        self.memory = "1Gi";
        set_memory(s, self.memory).await?;
        let former = s.get("vmi", GUEST).await?;
        s.virt(&["restart", GUEST, "--grace-period=0", "--force"]).await?;
        started_again(s, &former).await?;
        in_guest(s, READY).await?;
        settled(s, *self).await
    }
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
