//! Faults while an interface is plugged into a running guest, or unplugged: see [`kills`](crate::kills).
//!
//! In some rows the pod's network stays as it is, so that the change stays in its phase. The guest has the interface in the end, or
//! has lost it.

use anyhow::{Context, Result};
use ferrovirt_e2e_tests::{Story, TIMEOUT, story_alone};
use serde_json::Value;

use crate::{
    kills::{Ends, Faults, GUEST, Holder, MINUTES, Phase, Row, VICTIMS, in_guest, run_on, started_again, table},
    nics::{DynamicNetworks, is_plugged, lan, on_network, set, vm},
};

#[derive(Clone, Copy, PartialEq, Eq)]
enum Change {
    Plug,
    /// The pod gets the network after the kill.
    PlugLate,
    Unplug,
}

const PHASES: &[Phase<Change>] = &[
    // The pod requests the network, and has not got it.
    Phase::new("Request", Holder::Nothing, Change::PlugLate, |vmi| shows(vmi, false, "")),
    // The launcher is to detach the interface.
    Phase::new("Detach", Holder::Libvirtd, Change::Unplug, |vmi| shows(vmi, true, "domain, multus-status")),
    // The pod has the link.
    Phase::new("Setup", Holder::VirtHandler, Change::Plug, |vmi| shows(vmi, false, "multus-status")),
    // The link is given back, and the pod still has it.
    Phase::new("Removal", Holder::Nothing, Change::Unplug, |vmi| shows(vmi, true, "multus-status")),
    // The launcher is to attach the interface.
    Phase::new("Attach", Holder::Libvirtd, Change::Plug, |vmi| shows(vmi, false, "multus-status")),
];

/// Returns true if the VMI has the interface in its spec, absent or not, and in its status from these sources.
fn shows(vmi: &Value, is_absent: bool, sources: &str) -> bool {
    let interfaces = vmi["spec"]["domain"]["devices"]["interfaces"].as_array();
    let mut of_spec = interfaces.into_iter().flatten().filter(|interface| interface["name"] == "lan");
    of_spec.next().is_some_and(|interface| (interface["state"] == "absent") == is_absent)
        && lan(vmi)["infoSource"].as_str().unwrap_or_default() == sources
}

#[test]
fn interfaces_come_and_go_whatever_is_killed_meanwhile() {
    story_alone("nics-faults", async |s| {
        on_network(s, async |plugins, hostname| {
            s.apply(&vm(hostname, GUEST)).await?;
            s.wait_running(GUEST).await?;
            let mut interface = Interface { plugins, is_there: false };
            run_on(s, plugins.node(), table(PHASES, VICTIMS)?, &mut interface).await?;
            unplug(s, plugins).await?;
            s.delete("vm", GUEST).await?;
            s.wait_gone("vmi", GUEST, MINUTES).await
        })
        .await
    });
}

struct Interface<'a> {
    plugins: &'a DynamicNetworks<'a>,
    is_there: bool,
}

impl Faults for Interface<'_> {
    type Change = Change;

    async fn prepare(&mut self, s: &Story, row: Row<Change>) -> Result<()> {
        match (self.is_there, row.phase.change) {
            (true, Change::Plug | Change::PlugLate) => unplug(s, self.plugins).await,
            (false, Change::Unplug) => plug(s, self.plugins).await,
            _ => Ok(()),
        }
    }

    async fn change(&mut self, s: &Story, change: Change) -> Result<()> {
        set(s, GUEST, if change == Change::Unplug { "absent" } else { "" }).await?;
        if change == Change::Plug { self.plugins.follow(GUEST, 1).await } else { Ok(()) }
    }

    async fn end(&mut self, ends: &Ends<'_>, row: Row<Change>, former: &Value) -> Result<()> {
        let s = ends.story;
        if row.kills_guest() {
            // The new pod starts with the networks of the template.
            started_again(s, former).await?;
        } else if row.phase.change == Change::PlugLate {
            self.plugins.follow(GUEST, 1).await?;
        }
        self.is_there = row.phase.change != Change::Unplug;
        if self.is_there { plugged(s).await } else { unplugged(s, self.plugins).await }
    }
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
    let find = format!("grep -q {mac} /sys/class/net/eth1/address");
    in_guest(s, &format!("for i in $(seq 200); do {find} && break; sleep 0.5; done; {find}")).await.map(drop)
}

/// Waits until neither guest, pod, VMI nor template has the interface.
async fn unplugged(s: &Story, plugins: &DynamicNetworks<'_>) -> Result<()> {
    plugins.follow(GUEST, 0).await?;
    let is_gone = |object: &Value, spec: &Value| lan(object).is_null() && !spec.to_string().contains("\"lan\"");
    s.wait("vmi", GUEST, "be without the interface", MINUTES, |vmi| is_gone(vmi, &vmi["spec"])).await?;
    s.wait("vm", GUEST, "be without the interface", TIMEOUT, |vm| is_gone(vm, &vm["spec"])).await?;
    in_guest(s, "[ ! -e /sys/class/net/eth1 ]").await.map(drop)
}
