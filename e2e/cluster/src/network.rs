//! Links and addresses of the nodes.

use std::net::Ipv6Addr;

use crate::{
    command::{program, run, run_with_input},
    error::Result,
    host,
    plan::{LAN, LAN_PORT, Node, Plan},
    render,
};

/// Creates the namespace of a node and connects it with the control plane.
pub(crate) fn connect(plan: &Plan, node: &Node) -> Result<()> {
    run("creating the node's namespace", &mut program("ip", ["netns", "add", &node.namespace]))?;
    ip(
        "connecting the node",
        Some(&plan.control_namespace()),
        &format!(
            "link add {link} type veth peer name eth0 netns {namespace}
             link set {link} master br0
             link set {link} up
             route replace {pods} via {address}
             {second}
             link add {lan} type veth peer name {LAN_PORT} netns {namespace}
             link set {lan} master {LAN}
             link set {lan} up",
            link = node.link,
            lan = node.lan_link,
            namespace = node.namespace,
            pods = node.pods,
            address = node.address,
            second = if plan.variant.dual_stack {
                format!("route replace {} via {} dev br0", node.pods6, node.address6)
            } else {
                String::new()
            },
        ),
    )?;
    if node.is_vm() {
        return ip("connecting the VM", Some(&node.namespace), &render::vm::bridges());
    }
    ip("configuring the node's network", Some(&node.namespace), &node_network(plan, node))?;
    let mut nft = program("nsenter", [&format!("--net={}", host::namespace_path(&node.namespace).display())]);
    nft.args(["nft", "-f", "-"]);
    run_with_input("writing the node's address translation", &mut nft, &render::node::nat(plan, node)).map(drop)
}

/// Returns `ip` commands that configure the network of a node, inside it.
pub(crate) fn node_network(plan: &Plan, node: &Node) -> String {
    let mut second = second_address(plan, "eth0", node.address6);
    if plan.variant.dual_stack {
        // `default` would be a route of IPv4.
        second.push_str(&format!("\nroute add ::/0 via {} dev eth0", plan.control_address6()));
    }
    format!(
        "link set lo up
         address add {address}/{prefix} dev eth0
         link set eth0 up
         route add default via {control}
         link add {LAN} type bridge
         link set {LAN_PORT} master {LAN}
         link set {LAN_PORT} up
         link set {LAN} up
         {second}
",
        address = node.address,
        prefix = plan.node_network().prefix,
        control = plan.control_address(),
    )
}

/// Returns the `ip` command that adds the IPv6 address of a link that is up, in clusters with both families.
pub(crate) fn second_address(plan: &Plan, link: &str, address: Ipv6Addr) -> String {
    if !plan.variant.dual_stack {
        return String::new();
    }
    // Without a test for duplicates, which delays its use.
    format!("address add {address}/{} dev {link} nodad", plan.node_network6().prefix)
}

/// Runs lines of `ip` commands in a named namespace or on the host.
pub(crate) fn ip(step: &str, namespace: Option<&str>, lines: &str) -> Result<()> {
    let mut command = program("ip", namespace.map_or(Vec::new(), |name| vec!["-n", name]));
    command.args(["-batch", "-"]);
    run_with_input(step, &mut command, lines).map(drop)
}
