//! Fixtures of the network tests: VMIs, observed links, and a kernel that executes plans.

#![allow(clippy::disallowed_methods, reason = "tests create the files that virt-handler finds")]

mod bridge;
mod namespaces;
mod plan;
mod requests;
mod ruleset;

use std::net::{IpAddr, Ipv4Addr};

use api::VirtualMachineInstance;
use serde_json::{Value, json};

use super::{
    observed::{Address, Link, Observed, Route},
    plan::decide,
    request::{Binding, Forward, Masquerade, Protocol, Request},
    step::{Plan, Step},
    *,
};

fn vmi(interfaces: &Value, networks: &Value) -> VirtualMachineInstance {
    serde_json::from_value(json!({
        "apiVersion": "kubevirt.io/v1",
        "kind": "VirtualMachineInstance",
        "metadata": {"name": "vm", "namespace": "default"},
        "spec": {"domain": {"devices": {"interfaces": interfaces}}, "networks": networks},
    }))
    .unwrap()
}

fn masquerade() -> VirtualMachineInstance {
    vmi(&json!([{"name": "default", "masquerade": {}}]), &json!([{"name": "default", "pod": {}}]))
}

/// Returns the requests of all interfaces, or the first error.
fn requests(vmi: &VirtualMachineInstance) -> Result<Vec<Request>, Error> {
    request::requests(vmi).into_iter().map(|(_, request)| request).collect()
}

fn request_of(vmi: &VirtualMachineInstance) -> Request {
    requests(vmi).unwrap().remove(0)
}

fn nat(request: &mut Request) -> &mut Masquerade {
    match &mut request.binding {
        Binding::Masquerade(requested) => requested,
        Binding::Bridge { .. } => panic!("not masquerade"),
    }
}

fn ip(text: &str) -> IpAddr {
    text.parse().unwrap()
}

fn eth0(addresses: &[&str]) -> Observed {
    let link = |index, name: &str| Link {
        index,
        name: name.to_owned(),
        kind: "veth".to_owned(),
        mac: Some([0x0a, 0x58, 0, 0, 0, 7]),
        mtu: 1450,
        controller: None,
        up: true,
        alias: None,
    };
    Observed {
        links: vec![link(1, "lo"), link(2, "eth0")],
        addresses: addresses.iter().map(|text| Address { link: 2, ip: ip(text), prefix: 24 }).collect(),
        routes: vec![],
    }
}

/// Returns what a kernel shows after the steps.
fn after(mut observed: Observed, plan: &Plan) -> Observed {
    let at = |observed: &Observed, name: &str| observed.links.iter().position(|link| link.name == name).unwrap();
    for step in &plan.steps {
        let index = 10 + u32::try_from(observed.links.len()).unwrap();
        let made = |name: &str, kind: &str, mac: Option<[u8; 6]>, mtu| Link {
            index,
            name: name.to_owned(),
            kind: kind.to_owned(),
            mac,
            mtu,
            controller: None,
            up: false,
            alias: None,
        };
        match step {
            Step::CreateBridge { name, mac, mtu, up } => {
                observed.links.push(Link { up: *up, ..made(name, "bridge", Some(*mac), *mtu) });
            }
            Step::CreateTap { name, .. } => observed.links.push(made(name, "tun", None, 1500)),
            Step::Rename { from, to } => {
                let link = at(&observed, from);
                let index = observed.links[link].index;
                observed.links[link].name = to.clone();
                if std::mem::take(&mut observed.links[link].up) {
                    observed.addresses.retain(|address| address.link != index || address.ip.is_ipv4());
                }
                observed.routes.retain(|route| route.link != index);
            }
            Step::SetMac { link, mac } => {
                let link = at(&observed, link);
                observed.links[link].mac = Some(*mac);
            }
            Step::TakeAddresses { link } => {
                let link = observed.links[at(&observed, link)].index;
                observed.addresses.retain(|address| address.link != link);
            }
            Step::SetLink { name, mtu, controller, up } => {
                let controller = controller.as_ref().map(|name| observed.links[at(&observed, name)].index);
                let link = at(&observed, name);
                let link = &mut observed.links[link];
                link.mtu = mtu.unwrap_or(link.mtu);
                link.controller = controller.or(link.controller);
                link.up |= up;
            }
            Step::AddAddress { link, ip, prefix } => {
                let link = observed.links[at(&observed, link)].index;
                observed.addresses.push(Address { link, ip: *ip, prefix: *prefix });
            }
            Step::Mark { link, mark } => {
                let link = at(&observed, link);
                observed.links[link].alias = Some(mark.clone());
            }
            Step::Delete { link } => {
                let at = at(&observed, link);
                let index = observed.links.remove(at).index;
                observed.addresses.retain(|address| address.link != index);
                for port in observed.links.iter_mut().filter(|port| port.controller == Some(index)) {
                    port.controller = None;
                }
            }
            Step::SetKernel { .. } | Step::Rules(_) | Step::StopLearning { .. } => {}
        }
    }
    observed
}

/// Returns the kinds of a plan's steps.
fn kinds(plan: &Plan) -> Vec<&'static str> {
    plan.steps
        .iter()
        .map(|step| match step {
            Step::CreateBridge { .. } => "bridge",
            Step::CreateTap { .. } => "tap",
            Step::SetLink { .. } => "set",
            Step::AddAddress { .. } => "address",
            Step::Rename { .. } => "rename",
            Step::SetMac { .. } => "mac",
            Step::TakeAddresses { .. } => "take",
            Step::StopLearning { .. } => "port",
            Step::SetKernel { .. } => "kernel",
            Step::Rules(_) => "rules",
            Step::Mark { .. } => "mark",
            Step::Delete { .. } => "delete",
        })
        .collect()
}
