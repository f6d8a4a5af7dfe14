//! Processes that are killed while an interface is plugged into a running guest, or unplugged: see [`kills`](crate::kills).
//!
//! In some rows the pod's network stays as it is, so that the change stays in its phase. The guest has the interface in the end, or
//! has lost it.

use anyhow::{Context, Result};
use ferrovirt_e2e_tests::{Story, TIMEOUT, story_alone};
use serde_json::Value;

use crate::{
    kills::{GUEST, Holder, Kills, MINUTES, Victim, in_guest, table, vmi_uid},
    nics::{DynamicNetworks, is_plugged, lan, on_network, set, vm},
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

use self::During::{Attach, Detach, Removal, Request, Setup};

const DURING: [During; 5] = [Request, Detach, Setup, Removal, Attach];
const VICTIMS: [Victim; 6] =
    [Victim::VirtHandler, Victim::Worker, Victim::Libvirtd, Victim::ControllerLeader, Victim::Kubelet, Victim::Qemu];

impl During {
    const fn holder(self) -> Option<Holder> {
        match self {
            Self::Request | Self::Removal => None,
            Self::Setup => Some(Holder::VirtHandler),
            Self::Attach | Self::Detach => Some(Holder::Libvirtd),
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
    s.apply(&vm(hostname, GUEST)).await?;
    s.wait_running(GUEST).await?;
    let kills = Kills { story: s, node: plugins.node() };
    let mut is_there = false;
    let row = async |during, victim| row(&kills, plugins, during, victim, &mut is_there).await;
    kills.rows(&table(&DURING, &VICTIMS)?, row).await?;
    unplug(s, plugins).await?;
    s.delete("vm", GUEST).await?;
    s.wait_gone("vmi", GUEST, MINUTES).await
}

async fn row(
    kills: &Kills<'_>,
    plugins: &DynamicNetworks<'_>,
    during: During,
    victim: Victim,
    is_there: &mut bool,
) -> Result<()> {
    let s = kills.story;
    match (*is_there, during.plugs()) {
        (true, true) => unplug(s, plugins).await?,
        (false, false) => plug(s, plugins).await?,
        _ => {}
    }
    let former = vmi_uid(s).await?;
    let change = async || {
        set(s, GUEST, if during.plugs() { "" } else { "absent" }).await?;
        if matches!(during, Setup | Attach) {
            plugins.follow(GUEST, 1).await?;
        }
        Ok(())
    };
    kills.during(&format!("{during:?}"), during.holder(), victim, change, |vmi| during.is_observed(vmi)).await?;
    if victim == Victim::Qemu {
        // The new pod starts with the networks of the template.
        kills.started_again(&former).await?;
    } else if during == Request {
        plugins.follow(GUEST, 1).await?;
    }
    if during.plugs() {
        plugged(s).await?;
    } else {
        unplugged(s, plugins).await?;
    }
    *is_there = during.plugs();
    Ok(())
}

async fn plug(s: &Story, plugins: &DynamicNetworks<'_>) -> Result<()> {
    set(s, GUEST, "").await?;
    plugins.follow(GUEST, 1).await?;
    plugged(s).await
}

async fn unplug(s: &Story, plugins: &DynamicNetworks<'_>) -> Result<()> {
    set(s, GUEST, "absent").await?;
    unplugged(s, plugins).await
}

/// Waits until the guest has the interface.
async fn plugged(s: &Story) -> Result<()> {
    let vmi = s.wait("vmi", GUEST, "have the interface", MINUTES, is_plugged).await?;
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
    plugins.follow(GUEST, 0).await?;
    let is_gone = |object: &Value, spec: &Value| lan(object).is_null() && !spec.to_string().contains("\"lan\"");
    s.wait("vmi", GUEST, "be without the interface", MINUTES, |vmi| is_gone(vmi, &vmi["spec"])).await?;
    s.wait("vm", GUEST, "be without the interface", TIMEOUT, |vm| is_gone(vm, &vm["spec"])).await?;
    in_guest(s, "[ ! -e /sys/class/net/eth1 ]").await?;
    Ok(())
}
