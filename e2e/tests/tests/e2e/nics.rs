//! Interfaces of a running VM.

use std::{
    collections::BTreeSet,
    sync::{Mutex, PoisonError},
    time::Duration,
};

use anyhow::{Context, Result, bail, ensure};
use ferrovirt_e2e_tests::{Console, Node, Story, TIMEOUT, is_true, skip, storage::delete_vmis_after, story};
use kube::api::{Patch, PatchParams};
use serde_json::{Value, json};

use crate::{
    live_resize::{condition, run},
    manifests,
    moves::{self, migrate, two_nodes, vm_with_lan},
    networks,
    witness::Witness,
};

/// Annotation of a pod with the networks that it is to have.
pub(crate) const REQUEST: &str = "k8s.v1.cni.cncf.io/networks";
/// Annotation of a pod with the networks that it has.
const STATUS: &str = "k8s.v1.cni.cncf.io/network-status";
/// Time for a change in a guest under emulation.
pub(crate) const MINUTES: Duration = Duration::from_secs(240);

/// Changes the networks of running pods as Multus' dynamic networks controller does: with the network plugin of the node.
pub(crate) struct DynamicNetworks<'a> {
    story: &'a Story,
    node: Node,
    network: String,
    /// Links of pods that it has added, by UID of the pod.
    added: Mutex<BTreeSet<(String, String)>>,
}

impl<'a> DynamicNetworks<'a> {
    /// Enters a node on which the network of this name is.
    pub(crate) async fn enter(story: &'a Story, node: &str, network: &str) -> Result<Self> {
        let (node, added) = (story.enter_node(node).await?, Mutex::default());
        Ok(Self { story, node, network: network.to_owned(), added })
    }

    /// Releases the addresses of pods that have ended.
    pub(crate) async fn leave(self) -> Result<()> {
        let added = std::mem::take(&mut *self.added.lock().unwrap_or_else(PoisonError::into_inner));
        for (pod, link) in added {
            self.plugin("DEL", &pod, &link).await?;
        }
        self.node.leave().await
    }

    pub(crate) fn node(&self) -> &Node {
        &self.node
    }

    /// Waits until the pod of a VMI requests so many networks, and gives it these.
    pub(crate) async fn follow(&self, vmi: &str, networks: usize) -> Result<()> {
        let name =
            self.story.launcher_pod(vmi).await?["metadata"]["name"].as_str().context("pod without name")?.to_owned();
        let what = format!("request {networks} networks");
        let has = |pod: &Value| of(pod, REQUEST).is_ok_and(|requested| requested.len() == networks);
        let pod = self.story.wait("Pod", &name, &what, TIMEOUT, has).await?;
        let uid = pod["metadata"]["uid"].as_str().context("pod without UID")?;
        let (requested, mut present) = (of(&pod, REQUEST)?, of(&pod, STATUS)?);
        let link = |network: &Value| network["interface"].as_str().unwrap_or_default().to_owned();
        for network in &requested {
            if !present.iter().any(|known| link(known) == link(network)) {
                let added = self.plugin("ADD", uid, &link(network)).await?;
                self.added.lock().unwrap_or_else(PoisonError::into_inner).insert((uid.to_owned(), link(network)));
                let added: Value = serde_json::from_str(&added).with_context(|| added.clone())?;
                let ips: Vec<Value> =
                    added["ips"].as_array().into_iter().flatten().map(|ip| ip["address"].clone()).collect();
                let name = format!("{}/{}", self.story.namespace, network["name"].as_str().unwrap_or_default());
                present.push(json!({"name": name, "interface": link(network), "ips": ips, "dns": {}}));
            }
        }
        let (kept, gone): (Vec<Value>, Vec<Value>) = present.into_iter().partition(|known| {
            known["default"] == true || requested.iter().any(|network| link(network) == link(known))
        });
        for network in gone {
            self.plugin("DEL", uid, &link(&network)).await?;
            self.added.lock().unwrap_or_else(PoisonError::into_inner).remove(&(uid.to_owned(), link(&network)));
        }
        let patch = json!({"metadata": {"annotations": {STATUS: Value::from(kept).to_string()}}});
        self.story.api("Pod").patch(&name, &PatchParams::default(), &Patch::Merge(patch)).await?;
        Ok(())
    }

    /// Runs the network plugin for a link of a pod.
    async fn plugin(&self, command: &str, pod: &str, link: &str) -> Result<String> {
        let configuration = networks::configuration(&self.network);
        let script = format!(
            "pid=$(for p in /proc/[0-9]*; do grep -qs {pod} $p/cgroup && echo ${{p#/proc/}}; done | head -n 1); \
             containerd=$(for p in /proc/[0-9]*; do [ \"$(cat $p/comm)\" = containerd ] && echo ${{p#/proc/}}; done | head -n 1); \
             for plugins in $(dirname $(readlink /proc/$containerd/exe)) /opt/cni/bin; do \
               [ -x /host$plugins/host-local ] && break; \
             done; \
             echo '{configuration}' | chroot /host env CNI_COMMAND={command} CNI_CONTAINERID={pod} CNI_IFNAME={link} \
               CNI_NETNS=${{pid:+/proc/$pid/ns/net}} CNI_PATH=$plugins $plugins/bridge"
        );
        self.node.run(&script).await.with_context(|| format!("{command} {link}"))
    }
}

/// Returns the networks in an annotation of a pod.
fn of(pod: &Value, annotation: &str) -> Result<Vec<Value>> {
    let text = pod["metadata"]["annotations"][annotation].as_str().unwrap_or("[]");
    serde_json::from_str(text).with_context(|| format!("{annotation}: {text}"))
}

/// Returns a VM with one interface on the pod network.
pub(crate) fn vm(hostname: &str, name: &str) -> String {
    let networks = "        devices: {interfaces: [{name: default, masquerade: {}}]}\n      \
                    networks: [{name: default, pod: {}}]\n";
    manifests::kernel_vm_on(hostname, name).replace("        devices: {}\n", networks)
}

/// Sets the interface `lan` of a VM to a state; empty: up. It keeps the MAC address that it has in the template.
pub(crate) async fn set(s: &Story, vm: &str, state: &str) -> Result<()> {
    let mac = template_mac(&s.get("vm", vm).await?).clone();
    let spec = json!({
        "domain": {"devices": {"interfaces": [
            {"name": "default", "masquerade": {}}, {"name": "lan", "bridge": {}, "state": state, "macAddress": mac}]}},
        "networks": [{"name": "default", "pod": {}}, {"name": "lan", "multus": {"networkName": "lan"}}],
    });
    let patch = json!({"spec": {"template": {"spec": spec}}}).to_string();
    s.kubectl(&["patch", "vm", vm, "--type=merge", "-p", &patch]).await?;
    Ok(())
}

/// Returns the MAC address of the interface `lan` in the template of a VM.
fn template_mac(vm: &Value) -> &Value {
    let interfaces = vm["spec"]["template"]["spec"]["domain"]["devices"]["interfaces"].as_array();
    let lan = interfaces.into_iter().flatten().find(|interface| interface["name"] == "lan");
    lan.map_or(&Value::Null, |lan| &lan["macAddress"])
}

/// Returns the interface `lan` in the status of a VMI.
pub(crate) fn lan(vmi: &Value) -> &Value {
    let interfaces = vmi["status"]["interfaces"].as_array();
    interfaces.into_iter().flatten().find(|shown| shown["name"] == "lan").unwrap_or(&Value::Null)
}

/// Returns true if pod and guest have the interface.
pub(crate) fn is_plugged(vmi: &Value) -> bool {
    lan(vmi)["infoSource"] == "domain, multus-status" && condition(vmi, "MigrationRequired").is_none()
}

/// Returns a script that waits for output of a command.
fn until(command: &str) -> String {
    format!("for look in $(seq 300); do {command} && break; usleep 300000; done")
}

/// Runs a body with the network `lan`, on the node with a host name, and checks that nothing is left of it on the node.
pub(crate) async fn on_network(
    s: &Story,
    body: impl AsyncFnOnce(&DynamicNetworks<'_>, &str) -> Result<()>,
) -> Result<()> {
    if !networks::are_there(s).await? {
        return skip("Multus");
    }
    let network = networks::define(s).await?;
    let (node, hostname) = s.one_node().await?;
    let plugins = DynamicNetworks::enter(s, &node, &network).await?;
    let result = body(&plugins, &hostname).await;
    plugins.leave().await?;
    let left = networks::left(s, &node, &network, "none").await;
    result?;
    let left = left?;
    ensure!(left.is_empty(), "links or addresses are left on the node: {left}");
    Ok(())
}

#[test]
fn interfaces_are_plugged_into_a_running_guest_and_leave_it() {
    story("nics", async |s| {
        on_network(s, async |plugins, hostname| plugged_and_unplugged(s, plugins, hostname).await).await
    });
}

async fn plugged_and_unplugged(s: &Story, plugins: &DynamicNetworks<'_>, hostname: &str) -> Result<()> {
    s.apply(&vm(hostname, "box")).await?;
    s.wait_running("box").await?;
    let mut console = s.console("box")?;
    console.login("root", "ferrovirt").await?;

    set(s, "box", "").await?;
    let waits = |vmi: &Value| {
        condition(vmi, "MigrationRequired").is_some_and(|shown| shown["reason"] == "AutoMigrationPending")
    };
    s.wait("vmi", "box", "wait for the pod's networks", TIMEOUT, waits).await?;
    plugins.follow("box", 1).await?;
    let vmi = s.wait("vmi", "box", "have the interface", MINUTES, is_plugged).await?;
    let (mac, address) = (text(&lan(&vmi)["mac"])?, text(&lan(&vmi)["ipAddress"])?);
    run(&mut console, &until(&format!("grep -q {mac} /sys/class/net/eth1/address"))).await?;
    s.wait("vm", "box", "have the MAC address", TIMEOUT, |vm| template_mac(vm) == mac.as_str()).await?;
    // By DHCP, and over the network.
    let port = run(&mut console, "dirname $(readlink -f /sys/class/net/eth1/device)").await?;
    run(&mut console, "ip link set eth1 up; udhcpc -i eth1 -n -q -t 20 -s /usr/lib/tiny/lease").await?;
    let shown = run(&mut console, "ip -4 -o addr show dev eth1").await?;
    ensure!(shown.contains(&format!("inet {address}/")), "{shown:?} is not {address}");
    run(&mut console, "mkdir -p /www && echo plugged-in > /www/index.html && httpd -p 8080 -h /www").await?;
    let (network, prefix) = (&plugins.network, networks::prefix(&plugins.network));
    let fetch = format!("ip address replace {prefix}.250/24 dev {network}; wget -q -T 20 -O - http://{address}:8080/");
    ensure!(plugins.node().run(&fetch).await?.contains("plugged-in"), "the guest is not reached over the network");

    for (state, carrier) in [("down", "0"), ("up", "1")] {
        set(s, "box", state).await?;
        s.wait("vmi", "box", &format!("have the link {state}"), MINUTES, |vmi| lan(vmi)["linkState"] == state).await?;
        run(&mut console, &until(&format!("[ $(cat /sys/class/net/eth1/carrier) = {carrier} ]"))).await?;
    }
    no_restart_is_required(s).await?;
    console.leave().await?;

    // The interface is there after a restart, behind the same port.
    let uid = text(&vmi["metadata"]["uid"])?;
    s.virt(&["restart", "box", "--grace-period=0", "--force"]).await?;
    let is_new =
        |vmi: &Value| vmi["metadata"]["uid"] != uid.as_str() && is_plugged(vmi) && vmi["status"]["phase"] == "Running";
    s.wait("vmi", "box", "be restarted with the interface", MINUTES, is_new).await?;
    let mut console = s.console("box")?;
    console.login("root", "ferrovirt").await?;
    run(&mut console, &until("[ -e /sys/class/net/eth1/device ]")).await?;
    let found = run(&mut console, "dirname $(readlink -f /sys/class/net/eth1/device)").await?;
    ensure!(found == port, "the interface is at {found}, and was at {port}");
    let found = run(&mut console, "cat /sys/class/net/eth1/address").await?;
    ensure!(found == mac, "the interface has the MAC address {found}, and had {mac}");

    set(s, "box", "absent").await?;
    run(&mut console, &until("[ ! -e /sys/class/net/eth1 ]")).await?;
    let released = |vmi: &Value| lan(vmi)["infoSource"] == "multus-status";
    s.wait("vmi", "box", "have given the link back", MINUTES, released).await?;
    let pod = s.launcher_pod("box").await?;
    let links = links_of(plugins, &pod).await?;
    ensure!(!links.contains("-nic") && links.matches("tap").count() == 1, "links are left: {links}");
    plugins.follow("box", 0).await?;
    let is_gone = |object: &Value, spec: &Value| lan(object).is_null() && !spec.to_string().contains("\"lan\"");
    s.wait("vmi", "box", "be without the interface", MINUTES, |vmi| is_gone(vmi, &vmi["spec"])).await?;
    s.wait("vm", "box", "be without the interface", TIMEOUT, |vm| is_gone(vm, &vm["spec"])).await?;
    let links = links_of(plugins, &pod).await?;
    ensure!(!links.contains("pod"), "links are left: {links}");
    no_restart_is_required(s).await?;
    console.leave().await?;

    // A change that cannot be plugged says so.
    let patch = json!({"spec": {"template": {"spec": {"domain": {"devices": {"interfaces": [
        {"name": "default", "masquerade": {}, "model": "e1000"}]}}}}}})
    .to_string();
    s.kubectl(&["patch", "vm", "box", "--type=merge", "-p", &patch]).await?;
    let restart = |vm: &Value| {
        let message = condition(vm, "RestartRequired").and_then(|shown| shown["message"].as_str());
        message.is_some_and(|message| message.contains("interface default has other settings"))
    };
    s.wait("vm", "box", "require a restart", TIMEOUT, restart).await?;
    s.delete("vm", "box").await?;
    s.wait_gone("vmi", "box", MINUTES).await
}

#[test]
fn interface_reaches_another_network_by_a_migration() {
    story("nics-moved", async |s| {
        let Some(nodes) = two_nodes(s).await? else { return Ok(()) };
        if !networks::are_there(s).await? {
            return skip("Multus");
        }
        let lan = networks::define(s).await?;
        let other = networks::define_as(s, "else").await?;
        let result = moved(s, &lan, &other).await;
        let gone = delete_vmis_after(s, &result).await;
        let mut left = String::new();
        for node in &nodes {
            for network in [&lan, &other] {
                left += &networks::left(s, node, network, "none").await?;
            }
        }
        result.and(gone)?;
        ensure!(left.is_empty(), "links or addresses are left on the nodes: {left}");
        Ok(())
    });
}

async fn moved(s: &Story, first: &str, second: &str) -> Result<()> {
    s.apply(&vm_with_lan("box", "Always")).await?;
    s.wait_running("box").await?;
    let movable = |vmi: &Value| is_plugged(vmi) && is_true(vmi, "LiveMigratable");
    let before = s.wait("vmi", "box", "have the interface and be migratable", MINUTES, movable).await?;
    let mut guest = moves::console(s, "box").await?;
    let witness = Witness::start(&mut guest).await?;
    take_address(&mut guest, &lan_address(&before)?).await?;
    run(&mut guest, "mkdir -p /www && echo on-lan >/www/index.html && httpd -p 8080 -h /www").await?;
    guest.leave().await?;
    reached(s, &before, first).await.context("before the change")?;

    let patch = json!({"spec": {"template": {"spec": {"networks": [
        {"name": "default", "pod": {}}, {"name": "lan", "multus": {"networkName": "else"}}]}}}});
    s.kubectl(&["patch", "vm", "box", "--type=merge", "-p", &patch.to_string()]).await?;
    let waits = |vmi: &Value| {
        let due = is_true(vmi, "MigrationRequired");
        due && vmi["spec"]["networks"][1]["multus"]["networkName"] == "else"
    };
    s.wait("vmi", "box", "require a migration", TIMEOUT, waits).await?;
    no_restart_is_required(s).await?;

    migrate(s, "box").await?;
    let after = s.wait("vmi", "box", "be on the other network", MINUTES, is_plugged).await?;
    ensure!(lan(&after)["mac"] == lan(&before)["mac"], "{} {}", lan(&before), lan(&after));
    let pod = s.launcher_pod("box").await?;
    let attached = of(&pod, STATUS)?;
    let definition = format!("{}/else", s.namespace);
    ensure!(attached.iter().any(|network| network["name"] == definition.as_str()), "{attached:?}");
    let mut guest = moves::console(s, "box").await?;
    Witness::goes_on(&mut guest, &witness).await?;
    take_address(&mut guest, &lan_address(&after)?).await?;
    guest.leave().await?;
    reached(s, &after, second).await.context("after the migration")?;
    no_restart_is_required(s).await?;
    s.delete("vm", "box").await?;
    s.wait_gone("vmi", "box", MINUTES).await
}

fn lan_address(vmi: &Value) -> Result<String> {
    text(&lan(vmi)["ipAddress"])
}

/// Asks for an address on `eth1`, which must be that of the pod.
async fn take_address(guest: &mut Console, address: &str) -> Result<()> {
    run(guest, &until("[ -e /sys/class/net/eth1 ]")).await?;
    run(guest, "pkill -f 'i eth1'; ip addr flush dev eth1; ip link set eth1 up").await?;
    run(guest, "udhcpc -i eth1 -n -q -t 20 -s /usr/lib/tiny/lease").await?;
    let shown = run(guest, "ip -4 -o addr show dev eth1").await?;
    ensure!(shown.contains(&format!("inet {address}/")), "{shown:?} is not {address}");
    Ok(())
}

/// Reads the page of a guest from its node, over the bridge of a network.
async fn reached(s: &Story, vmi: &Value, network: &str) -> Result<()> {
    let (node, address) = (text(&vmi["status"]["nodeName"])?, lan_address(vmi)?);
    let prefix = networks::prefix(network);
    let fetch = format!(
        "ip address replace {prefix}.250/24 dev {network}; wget -q -T 20 -O - http://{address}:8080/; \
         ip address del {prefix}.250/24 dev {network}"
    );
    let page = s.on_node(&node, &fetch).await?;
    ensure!(page.contains("on-lan"), "the guest is not reached over {network}: {page:?}");
    Ok(())
}

/// Returns the links in the network namespace of a pod.
async fn links_of(plugins: &DynamicNetworks<'_>, pod: &Value) -> Result<String> {
    let uid = text(&pod["metadata"]["uid"])?;
    let script = format!(
        "for p in /proc/[0-9]*; do if grep -qs {uid} $p/cgroup; then cat $p/net/dev | cut -d: -f1; break; fi; done"
    );
    plugins.node().run(&script).await
}

async fn no_restart_is_required(s: &Story) -> Result<()> {
    let vm = s.get("vm", "box").await?;
    match condition(&vm, "RestartRequired").or(condition(&vm, "Failure")) {
        Some(shown) => bail!("{shown}"),
        None => Ok(()),
    }
}

fn text(value: &Value) -> Result<String> {
    value.as_str().map(str::to_owned).with_context(|| format!("{value} is no text"))
}
