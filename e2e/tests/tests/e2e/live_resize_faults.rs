//! Processes that are killed while a running guest gets a vCPU or memory, or gives memory back.
//!
//! Each row stops one process, so that the change stays in an observed phase, kills another and lets the first continue. The
//! guest is the witness: it is not restarted, and has the processors and the memory in the end.

use anyhow::{Context, Result, ensure};
use ferrovirt_e2e_tests::{Node, Story, story_alone};
use k8s_openapi::api::coordination::v1::Lease;
use kube::Api;
use serde_json::Value;

use crate::{
    hotplug_faults::signal,
    live_resize::{MINUTES, READY, condition, memory_between, processors, run, vm},
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

/// The process that is killed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Victim {
    VirtHandler,
    Worker,
    Libvirtd,
    ControllerLeader,
}

const TABLE: [(During, Victim); 13] = [
    (During::CpuOfPod, Victim::VirtHandler),
    (During::CpuOfPod, Victim::Worker),
    (During::CpuOfPod, Victim::ControllerLeader),
    (During::CpuOfGuest, Victim::VirtHandler),
    (During::CpuOfGuest, Victim::Worker),
    (During::CpuOfGuest, Victim::Libvirtd),
    (During::CpuOfGuest, Victim::ControllerLeader),
    (During::Growth, Victim::VirtHandler),
    (During::Shrink, Victim::VirtHandler),
    (During::Growth, Victim::Worker),
    (During::Shrink, Victim::Worker),
    (During::Growth, Victim::Libvirtd),
    (During::Shrink, Victim::ControllerLeader),
];

impl During {
    /// Returns the program that is stopped.
    const fn held(self) -> &'static str {
        match self {
            Self::CpuOfPod => "virt-handler",
            Self::CpuOfGuest | Self::Growth | Self::Shrink => "libvirtd",
        }
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

#[test]
fn size_of_a_guest_changes_whatever_is_killed_meanwhile() {
    story_alone("live-resize-faults", async |s| {
        s.apply(&vm("guest", "sockets: 1, maxSockets: 12", "")).await?;
        s.wait_running("guest").await?;
        let boot = in_guest(s, &format!("{READY}; cat /proc/sys/kernel/random/boot_id")).await?;
        let boot = boot.lines().last().unwrap_or_default().trim().to_owned();
        let node = s.enter_node(&s.node_of("guest").await?).await?;
        let (mut outcome, mut sockets) = (Ok(()), 1);
        for (during, victim) in TABLE {
            let cpu = matches!(during, During::CpuOfPod | During::CpuOfGuest);
            sockets += u32::from(cpu);
            outcome = row(s, &node, during, victim, sockets)
                .await
                .with_context(|| format!("{victim:?} killed during {during:?}"));
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
        let now = in_guest(s, "cat /proc/sys/kernel/random/boot_id").await?;
        ensure!(now.trim() == boot, "the guest was restarted: {boot} {now}");
        Ok(())
    });
}

async fn row(s: &Story, node: &Node, during: During, victim: Victim, sockets: u32) -> Result<()> {
    let uid = launcher_uid(s).await?;
    let program = during.held();
    let cgroup = if program == "virt-handler" { "" } else { uid.as_str() };
    node.run(&signal(program, cgroup, "STOP")).await.with_context(|| format!("stop {program}"))?;
    match during {
        During::CpuOfPod | During::CpuOfGuest => {
            s.virt(&["set", "cpu", "guest", &format!("--sockets={sockets}")]).await?
        }
        During::Growth => s.virt(&["set", "memory", "guest", "--guest=2Gi"]).await?,
        During::Shrink => s.virt(&["set", "memory", "guest", "--guest=1Gi"]).await?,
    };
    s.wait("vmi", "guest", &format!("be held in {during:?}"), MINUTES, |vmi| during.is_observed(vmi)).await?;
    kill(s, node, victim, &uid).await?;
    let is_held = during.is_observed(&s.get("vmi", "guest").await?);
    // A killed process does not hold the change any more.
    let was_holder =
        matches!((program, victim), ("virt-handler", Victim::VirtHandler) | ("libvirtd", Victim::Libvirtd));
    eprintln!("{during:?}: killed {victim:?}, the change is {}", if is_held { "held" } else { "under way" });
    ensure!(is_held || was_holder, "the kill missed");
    if !was_holder {
        node.run(&signal(program, cgroup, "CONT")).await.with_context(|| format!("continue {program}"))?;
    }
    settled(s, during, sockets).await
}

/// Waits until the VMI shows the change as done, and the guest has it.
async fn settled(s: &Story, during: During, sockets: u32) -> Result<()> {
    let guest = if during == During::Growth { "2Gi" } else { "1Gi" };
    let is_cpu = matches!(during, During::CpuOfPod | During::CpuOfGuest);
    let done = |vmi: &Value| {
        let status = &vmi["status"];
        let has_size = if is_cpu {
            status["currentCPUTopology"]["sockets"] == sockets
        } else {
            status["memory"]["guestRequested"] == guest && status["memory"]["guestCurrent"] == guest
        };
        has_size && condition(vmi, "HotVCPUChange").is_none() && condition(vmi, "HotMemoryChange").is_none()
    };
    let vmi = s.wait("vmi", "guest", "show the change as done", MINUTES, done).await?;
    ensure!(vmi["status"]["phase"] == "Running", "the VMI is {}", vmi["status"]["phase"]);
    if !is_cpu {
        let (least, most) = if during == During::Growth { (1700, 2048) } else { (800, 1024) };
        in_guest(s, &memory_between(least, most)).await?;
        return Ok(());
    }
    let found = in_guest(s, &processors(sockets)).await?;
    ensure!(found == sockets.to_string(), "the guest has {found} processors, not {sockets}");
    Ok(())
}

/// Kills a process, of the launcher pod with this UID where it is one of its own.
pub(crate) async fn kill(s: &Story, node: &Node, victim: Victim, launcher: &str) -> Result<()> {
    let (program, cgroup) = match victim {
        Victim::VirtHandler => ("virt-handler", ""),
        Victim::Worker => ("virt-launcher", launcher),
        Victim::Libvirtd => ("libvirtd", launcher),
        Victim::ControllerLeader => {
            let leases: Api<Lease> = Api::namespaced(s.client.clone(), "kubevirt");
            let leader = leases.get("virt-controller").await?.spec.and_then(|spec| spec.holder_identity);
            return s.kill_installed(&leader.context("no leader")?, "virt-controller").await;
        }
    };
    node.run(&signal(program, cgroup, "KILL")).await.map(drop).with_context(|| format!("kill {program}"))
}

/// Returns the UID of the launcher pod of the VMI `guest`.
pub(crate) async fn launcher_uid(s: &Story) -> Result<String> {
    let pod = s.launcher_pod("guest").await?;
    pod["metadata"]["uid"].as_str().map(str::to_owned).context("pod without uid")
}

/// Runs a command that must succeed in the guest and returns its output.
pub(crate) async fn in_guest(s: &Story, command: &str) -> Result<String> {
    let mut console = s.reopen_console("guest", "root", "ferrovirt").await?;
    let output = run(&mut console, command).await?;
    console.leave().await?;
    Ok(output)
}
