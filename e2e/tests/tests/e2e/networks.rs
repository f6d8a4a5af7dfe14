//! VMIs on secondary networks.

use anyhow::{Context, Result, ensure};
use ferrovirt_e2e_tests::{Console, Story, TIMEOUT, skip, story};
use serde_json::Value;

use crate::manifests;

/// The CRD of secondary networks. A cluster without it has no plugin for them.
const DEFINITIONS: &str = "network-attachment-definitions.k8s.cni.cncf.io";

#[test]
fn vmis_connect_on_a_second_network_and_leave_nothing_on_the_node() {
    story("lan", async |s| {
        if !are_there(s).await? {
            return skip("Multus");
        }
        let network = define(s).await?;
        // Bridges of the plugin do not connect nodes.
        let (node, hostname) = s.one_node().await?;
        let result = meet(s, &network, &hostname).await;
        // The address of the pod with bridge binding is released, too.
        let address = result.as_deref().unwrap_or("none");
        let left = left(s, &node, &network, address).await;
        result?;
        let left = left?;
        ensure!(left.is_empty(), "links or addresses are left on the node: {left}");
        Ok(())
    });
}

/// Returns true if the cluster has secondary networks.
pub(crate) async fn are_there(s: &Story) -> Result<bool> {
    Ok(s.cluster_api("CustomResourceDefinition").get_opt(DEFINITIONS).await?.is_some())
}

/// Returns the first three numbers of a network's addresses. Networks of stories at the same time are to differ.
pub(crate) fn prefix(network: &str) -> String {
    let number = network.bytes().fold(0_u8, |number, byte| number.wrapping_mul(31).wrapping_add(byte));
    format!("10.77.{number}")
}

/// Returns the configuration of the network plugin for a network of this name.
pub(crate) fn configuration(network: &str) -> String {
    let prefix = prefix(network);
    format!(
        r#"{{"cniVersion": "1.0.0", "name": "{network}", "type": "bridge", "bridge": "{network}",
             "ipam": {{"type": "host-local", "subnet": "{prefix}.0/24"}}}}"#
    )
}

/// Defines the network `lan`, and returns its name on nodes.
pub(crate) async fn define(s: &Story) -> Result<String> {
    define_as(s, "lan").await
}

/// Defines a network, and returns its name on nodes.
pub(crate) async fn define_as(s: &Story, name: &str) -> Result<String> {
    let network = format!("{name}-{}", s.namespace.rsplit('-').next().unwrap_or_default());
    let definition = serde_json::json!({
        "apiVersion": "k8s.cni.cncf.io/v1", "kind": "NetworkAttachmentDefinition", "metadata": {"name": name},
        "spec": {"config": configuration(&network)},
    });
    s.apply(&definition.to_string()).await?;
    Ok(network)
}

/// Removes the bridge of a network from a node, and returns links and addresses that are left of its pods, and of `address`.
pub(crate) async fn left(s: &Story, node: &str, network: &str, address: &str) -> Result<String> {
    // The network plugin does not remove its bridge.
    let look = format!(
        "for look in $(seq 300); do \
           left=$(ls /sys/class/net/{network}/brif; ls /host/var/lib/cni/networks/{network} | grep '^10[.]'; \
                  find /host/var/lib/cni/networks -name {address}); \
           [ -z \"$left\" ] && break; sleep 0.5; \
         done; ip link del {network}; echo $left"
    );
    Ok(s.on_node(node, &look).await?.trim().to_owned())
}

/// Checks two VMIs of a node on the network, one with masquerade, the other with bridge binding. Returns the address of the latter's
/// pod.
async fn meet(s: &Story, network: &str, hostname: &str) -> Result<String> {
    for (name, binding) in [("alice", "masquerade"), ("bob", "bridge")] {
        let networks = format!(
            "    devices: {{interfaces: [{{name: default, {binding}: {{}}}}, {{name: lan, bridge: {{}}}}]}}\n  \
             networks: [{{name: default, pod: {{}}}}, {{name: lan, multus: {{networkName: lan}}}}]\n"
        );
        s.apply(&manifests::kernel_vmi_on(hostname, name).replace("    devices: {}\n", &networks)).await?;
    }
    let (alice, bob) = (connected(s, "alice").await?, connected(s, "bob").await?);
    ensure!(alice[1].address != bob[1].address && alice[1].mac != bob[1].mac, "{alice:?} {bob:?}");
    ensure!(s.pod_address("bob").await? == bob[0].address, "bob has the pod's address, not {:?}", bob[0]);

    let mut console = s.console("bob")?;
    console.login("root", "ferrovirt").await?;
    // With bridge binding the guest has the pod's addresses without translation.
    for (device, seen) in [("eth0", &bob[0]), ("eth1", &bob[1])] {
        has(&mut console, device, seen).await?;
    }
    console.run("mkdir -p /www && echo bob-is-here > /www/index.html && httpd -p 8080 -h /www").await?;
    console.leave().await?;

    let mut console = s.console("alice")?;
    console.login("root", "ferrovirt").await?;
    has(&mut console, "eth1", &alice[1]).await?;
    for (way, address) in [("the second network", &bob[1].address), ("the pod network", &bob[0].address)] {
        let (page, _) = console.run(&format!("wget -q -T 20 -O - http://{address}:8080/")).await?;
        ensure!(page.contains("bob-is-here"), "alice does not reach bob over {way} ({network}): {page:?}");
    }
    let (route, _) = console.run("ip route show default").await?;
    ensure!(route.contains("eth0"), "the way out is the pod network, not {route:?}");
    console.leave().await?;

    for name in ["alice", "bob"] {
        s.delete("vmi", name).await?;
    }
    for name in ["alice", "bob"] {
        s.wait_gone("vmi", name, 2 * TIMEOUT).await?;
    }
    let [pod_network, _] = bob;
    Ok(pod_network.address)
}

/// Returns an interface in the status of a VMI.
#[derive(Debug)]
struct Seen {
    mac: String,
    address: String,
}

/// Waits until the VMI runs and its status has both networks.
async fn connected(s: &Story, name: &str) -> Result<[Seen; 2]> {
    s.wait_running(name).await?;
    let tells = |vmi: &Value| {
        vmi["status"]["interfaces"][1]["infoSource"].as_str().is_some_and(|source| source == "domain, multus-status")
    };
    let vmi = s.wait("vmi", name, "tell of its second network", TIMEOUT, tells).await?;
    let interfaces = &vmi["status"]["interfaces"];
    let seen = |index: usize, network: &str, link: &str| -> Result<Seen> {
        let shown = &interfaces[index];
        ensure!(shown["name"] == network && shown["queueCount"] == 1, "{interfaces}");
        ensure!(shown["podInterfaceName"].as_str().is_some_and(|found| found.starts_with(link)), "{interfaces}");
        let text = |field: &str| shown[field].as_str().map(str::to_owned).with_context(|| format!("{field}: {shown}"));
        Ok(Seen { mac: text("mac")?, address: text("ipAddress")? })
    };
    let (default, lan) = (seen(0, "default", "eth0")?, seen(1, "lan", "pod")?);
    ensure!(lan.address.starts_with("10.77."), "{lan:?}");
    Ok([default, lan])
}

/// Checks that the guest has the address in the status by DHCP.
async fn has(console: &mut Console, device: &str, seen: &Seen) -> Result<()> {
    let wait =
        format!("for look in $(seq 300); do ip -4 -o addr show dev {device} | grep inet && break; usleep 300000; done");
    let (address, _) = console.run(&wait).await?;
    ensure!(address.contains(&format!("inet {}/", seen.address)), "{device} has {address:?}, not {seen:?}");
    let (mac, _) = console.run(&format!("cat /sys/class/net/{device}/address")).await?;
    ensure!(mac.trim() == seen.mac, "{device} has {mac:?}, not {seen:?}");
    Ok(())
}
