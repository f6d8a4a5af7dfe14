//! Processes that are killed while an interface is plugged into a running guest, or unplugged.
//!
//! Each row stops one process, or leaves the pod's network as it is, so that the change stays in an observed phase, kills another
//! process and lets the change continue. The guest is the witness: it is not restarted, has the interface, and loses it.

use anyhow::{Context, Result, ensure};
use ferrovirt_e2e_tests::{Story, TIMEOUT, story_alone};
use serde_json::Value;

use crate::{
    hotplug_faults::signal,
    live_resize_faults::{Victim, in_guest, kill, launcher_uid},
    nics::{DynamicNetworks, MINUTES, is_plugged, lan, on_network, set, vm},
};

/// The change during which a process is killed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum During {
    /// The pod requests the network, and has not got it.
    Request,
    /// virt-handler is stopped: the pod has the link.
    Setup,
    /// libvirtd is stopped: the launcher is to attach the interface.
    Attach,
    /// libvirtd is stopped: the launcher is to detach the interface.
    Detach,
    /// The link is given back, and the pod still has it.
    Removal,
}

use self::{
    During::{Attach, Detach, Removal, Request, Setup},
    Victim::{ControllerLeader, Libvirtd, VirtHandler, Worker},
};

const TABLE: [(During, Victim); 16] = [
    (Request, VirtHandler),
    (Detach, VirtHandler),
    (Setup, VirtHandler),
    (Removal, VirtHandler),
    (Attach, VirtHandler),
    (Detach, Worker),
    (Request, ControllerLeader),
    (Removal, ControllerLeader),
    (Setup, Worker),
    (Removal, Worker),
    (Attach, Worker),
    (Detach, Libvirtd),
    (Attach, Libvirtd),
    (Detach, ControllerLeader),
    (Attach, ControllerLeader),
    (Removal, Libvirtd),
];

impl During {
    /// Returns the program that is stopped.
    const fn held(self) -> Option<&'static str> {
        match self {
            Self::Request | Self::Removal => None,
            Self::Setup => Some("virt-handler"),
            Self::Attach | Self::Detach => Some("libvirtd"),
        }
    }

    const fn plugs(self) -> bool {
        matches!(self, Self::Request | Self::Setup | Self::Attach)
    }

    /// Returns true while the VMI waits in the phase.
    fn is_observed(self, vmi: &Value) -> bool {
        let interfaces = vmi["spec"]["domain"]["devices"]["interfaces"].as_array();
        let mut of_spec = interfaces.into_iter().flatten().filter(|interface| interface["name"] == "lan");
        let is_absent = of_spec.next().map(|interface| interface["state"] == "absent");
        let sources = lan(vmi)["infoSource"].as_str().unwrap_or_default();
        match self {
            Self::Request => is_absent == Some(false) && sources.is_empty(),
            Self::Setup | Self::Attach => is_absent == Some(false) && sources == "multus-status",
            Self::Detach => is_absent == Some(true) && sources == "domain, multus-status",
            Self::Removal => is_absent == Some(true) && sources == "multus-status",
        }
    }
}

#[test]
fn interfaces_come_and_go_whatever_is_killed_meanwhile() {
    story_alone("nics-faults", async |s| {
        on_network(s, async |plugins, hostname| rows(s, plugins, hostname).await).await
    });
}

async fn rows(s: &Story, plugins: &DynamicNetworks<'_>, hostname: &str) -> Result<()> {
    s.apply(&vm(hostname, "guest")).await?;
    s.wait_running("guest").await?;
    let boot = in_guest(s, "cat /proc/sys/kernel/random/boot_id").await?;
    let mut outcome = Ok(());
    let mut is_plugged = false;
    for (during, victim) in TABLE {
        outcome = row(s, plugins, during, victim, &mut is_plugged)
            .await
            .with_context(|| format!("{victim:?} killed during {during:?}"));
        if outcome.is_err() {
            break;
        }
    }
    // A process that a failed row has stopped.
    let uid = launcher_uid(s).await?;
    for (program, cgroup) in [("virt-handler", ""), ("libvirtd", uid.as_str())] {
        plugins.node().run(&format!("{}; true", signal(program, cgroup, "CONT"))).await?;
    }
    outcome?;
    let now = in_guest(s, "cat /proc/sys/kernel/random/boot_id").await?;
    ensure!(now == boot, "the guest was restarted: {boot} {now}");
    unplug(s, plugins).await?;
    s.delete("vm", "guest").await?;
    s.wait_gone("vmi", "guest", MINUTES).await
}

async fn row(
    s: &Story,
    plugins: &DynamicNetworks<'_>,
    during: During,
    victim: Victim,
    is_there: &mut bool,
) -> Result<()> {
    match (*is_there, during.plugs()) {
        (true, true) => unplug(s, plugins).await?,
        (false, false) => plug(s, plugins).await?,
        _ => {}
    }
    let uid = launcher_uid(s).await?;
    let node = plugins.node();
    let cgroup = if during.held() == Some("virt-handler") { "" } else { uid.as_str() };
    if let Some(program) = during.held() {
        node.run(&signal(program, cgroup, "STOP")).await.with_context(|| format!("stop {program}"))?;
    }
    set(s, "guest", if during.plugs() { "" } else { "absent" }).await?;
    if matches!(during, Setup | Attach) {
        plugins.follow("guest", 1).await?;
    }
    s.wait("vmi", "guest", &format!("be held in {during:?}"), MINUTES, |vmi| during.is_observed(vmi)).await?;
    kill(s, node, victim, &uid).await?;
    let is_held = during.is_observed(&s.get("vmi", "guest").await?);
    // A killed process does not hold the change any more.
    let was_holder =
        matches!((during.held(), victim), (Some("virt-handler"), VirtHandler) | (Some("libvirtd"), Libvirtd));
    eprintln!("{during:?}: killed {victim:?}, the change is {}", if is_held { "held" } else { "under way" });
    ensure!(is_held || was_holder, "the kill missed");
    if let Some(program) = during.held().filter(|_| !was_holder) {
        node.run(&signal(program, cgroup, "CONT")).await.with_context(|| format!("continue {program}"))?;
    }
    if during.plugs() {
        if during == Request {
            plugins.follow("guest", 1).await?;
        }
        plugged(s).await?;
    } else {
        unplugged(s, plugins).await?;
    }
    *is_there = during.plugs();
    Ok(())
}

async fn plug(s: &Story, plugins: &DynamicNetworks<'_>) -> Result<()> {
    set(s, "guest", "").await?;
    plugins.follow("guest", 1).await?;
    plugged(s).await
}

async fn unplug(s: &Story, plugins: &DynamicNetworks<'_>) -> Result<()> {
    set(s, "guest", "absent").await?;
    unplugged(s, plugins).await
}

/// Waits until the guest has the interface.
async fn plugged(s: &Story) -> Result<()> {
    let vmi = s.wait("vmi", "guest", "have the interface", MINUTES, is_plugged).await?;
    let mac = lan(&vmi)["mac"].as_str().context("interface without address")?;
    in_guest(
        s,
        &format!(
            "for i in $(seq 60); do grep -q {mac} /sys/class/net/eth1/address && break; sleep 0.5; done; \
                          grep -q {mac} /sys/class/net/eth1/address"
        ),
    )
    .await?;
    Ok(())
}

/// Waits until neither guest, pod, VMI nor template has the interface.
async fn unplugged(s: &Story, plugins: &DynamicNetworks<'_>) -> Result<()> {
    plugins.follow("guest", 0).await?;
    let is_gone = |object: &Value, spec: &Value| lan(object).is_null() && !spec.to_string().contains("\"lan\"");
    s.wait("vmi", "guest", "be without the interface", MINUTES, |vmi| is_gone(vmi, &vmi["spec"])).await?;
    s.wait("vm", "guest", "be without the interface", TIMEOUT, |vm| is_gone(vm, &vm["spec"])).await?;
    in_guest(s, "[ ! -e /sys/class/net/eth1 ]").await?;
    Ok(())
}
