//! Migrations on a network of their own, to which the chart attaches virt-handler.

use std::collections::BTreeMap;

use anyhow::{Context, Result, ensure};
use ferrovirt_e2e_cluster::plan::LAN;
use ferrovirt_e2e_tests::{Story, own_cluster, skip, story_alone};
use kube::api::{DeleteParams, PostParams};
use serde_json::{Value, json};

use crate::{
    installation::{helm, revision, upgrade},
    moves::{console, migrate, two_nodes, vm},
    networks,
    witness::Witness,
};

/// The network.
const NETWORK: &str = "migrations";
/// The plugin's records of its addresses on a node.
const RECORDS: &str = "/host/var/lib/cni/networks/migrations";
/// First numbers of its addresses.
const PREFIX: &str = "10.89.0.";
/// Least bytes of a migration of the guest.
const LEAST: u64 = 16 << 20;

#[test]
fn migrations_use_the_interface_migration0_of_virt_handler() {
    story_alone("migration-network", async |s| {
        let Some(nodes) = two_nodes(s).await? else { return Ok(()) };
        if own_cluster()?.is_none() || !networks::are_there(s).await? {
            return skip("a layer-2 network of all nodes");
        }
        s.apply(&vm("box", "Always")).await?;
        s.wait_running("box").await?;
        let mut guest = console(s, "box").await?;
        let mut witness = Witness::start(&mut guest).await?;
        guest.leave().await?;

        let former = revision().await?;
        let moved = moved(s, &nodes, &mut witness).await.context("with the network");
        // Later stories need the installation without it, also after a failure.
        let (back, said) =
            helm(&["rollback", "ferrovirt", &former, "-n", "kubevirt", "--wait", "--timeout", "6m"]).await?;
        let removed = remove(s, &nodes).await;
        moved?;
        ensure!(back, "helm rollback: {said}");
        removed?;
        moves(s, &mut witness, false).await.context("without the network")
    });
}

/// Attaches virt-handlers to the network, and moves the guest there and back.
async fn moved(s: &Story, nodes: &[String; 2], witness: &mut Witness) -> Result<()> {
    // The plugin knows only the addresses of its own node.
    for (node, first) in nodes.iter().zip(["100", "200"]) {
        s.on_node(node, &format!("mkdir -p {RECORDS} && printf {PREFIX}{first} >{RECORDS}/last_reserved_ip.0")).await?;
    }
    let configuration = json!({
        "cniVersion": "1.0.0", "name": NETWORK, "type": "bridge", "bridge": LAN,
        "ipam": {"type": "host-local", "subnet": format!("{PREFIX}0/24")},
    });
    let definition = json!({
        "apiVersion": "k8s.cni.cncf.io/v1", "kind": "NetworkAttachmentDefinition",
        "metadata": {"name": NETWORK, "namespace": "kubevirt"}, "spec": {"config": configuration.to_string()},
    });
    let definitions = s.installation_api("NetworkAttachmentDefinition");
    definitions.create(&PostParams::default(), &serde_json::from_value(definition)?).await?;
    let annotations = json!({"k8s.v1.cni.cncf.io/networks": format!("kubevirt/{NETWORK}@migration0")});
    let value = format!("virtHandler.podAnnotations={annotations}");
    upgrade(&["--set-json", &value, "--wait"]).await?;
    for way in ["there", "back"] {
        moves(s, witness, true).await.context(way)?;
    }
    Ok(())
}

/// Moves the guest, and checks which interface of the target's virt-handler has relayed it.
async fn moves(s: &Story, witness: &mut Witness, own_network: bool) -> Result<()> {
    let source = s.node_of("box").await?;
    let handlers = serde_json::to_value(s.pods_of("virt-handler").await?)?;
    let mut handlers = handlers.as_array().into_iter().flatten();
    let handler = handlers.find(|pod| pod["spec"]["nodeName"] != *source).context("one virt-handler")?;
    let target = handler["spec"]["nodeName"].as_str().context("virt-handler without node")?;
    let expected = if own_network {
        let shown = handler["metadata"]["annotations"]["k8s.v1.cni.cncf.io/network-status"].as_str();
        let networks: Vec<Value> = serde_json::from_str(shown.context("virt-handler has no other network")?)?;
        let network = networks.into_iter().find(|network| network["interface"] == "migration0");
        let address = network.context("virt-handler has no migration0")?["ips"][0].clone();
        ensure!(address.as_str().is_some_and(|address| address.starts_with(PREFIX)), "{address}");
        address
    } else {
        handler["status"]["podIP"].clone()
    };
    let node = s.enter_node(target).await?;
    let look = async || -> Result<BTreeMap<String, u64>> {
        let seen = node.run("cat /proc/$(pidof virt-handler)/net/dev").await?;
        Ok(seen.lines().filter_map(received).collect())
    };
    let moved = async {
        let before = look().await?;
        let vmi = migrate(s, "box").await?;
        Ok::<_, anyhow::Error>((before, vmi, look().await?))
    };
    let moved = moved.await;
    node.leave().await?;
    let (before, vmi, after) = moved?;

    let state = &vmi["status"]["migrationState"];
    ensure!(state["targetNode"] == target && state["targetNodeAddress"] == expected, "{expected}: {state}");
    let came = |name: &str| after.get(name).unwrap_or(&0).saturating_sub(*before.get(name).unwrap_or(&0));
    let (pod, own) = (came("eth0"), came("migration0"));
    eprintln!("to {target} at {expected}: {pod} bytes by eth0, {own} by migration0");
    let (carrier, other) = if own_network { (own, pod) } else { (pod, own) };
    ensure!(carrier >= LEAST && other < LEAST / 4, "{pod} bytes by eth0, {own} by migration0");
    let mut guest = console(s, "box").await?;
    *witness = Witness::goes_on(&mut guest, witness).await?;
    guest.leave().await
}

/// Returns name and received bytes of an interface, of a line of `/proc/net/dev`.
fn received(line: &str) -> Option<(String, u64)> {
    let (name, numbers) = line.split_once(':')?;
    Some((name.trim().to_owned(), numbers.split_whitespace().next()?.parse().ok()?))
}

/// Removes the network, and the plugin's records of its addresses.
async fn remove(s: &Story, nodes: &[String; 2]) -> Result<()> {
    let definitions = s.installation_api("NetworkAttachmentDefinition");
    if definitions.get_opt(NETWORK).await?.is_some() {
        definitions.delete(NETWORK, &DeleteParams::default()).await?;
    }
    for node in nodes {
        // Pods that were replaced give their addresses back.
        let left = format!(
            "left() {{ ls {RECORDS} | grep '^10'; }}; \
             for look in $(seq 300); do left >/dev/null || break; sleep 0.5; done; left; rm -rf {RECORDS}"
        );
        let left = s.on_node(node, &left).await?;
        ensure!(left.trim().is_empty(), "addresses are left on {node}: {left}");
    }
    Ok(())
}
