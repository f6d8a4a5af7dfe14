//! The guest on the pod network.

use std::time::Duration;

use anyhow::{Context, Result, anyhow, ensure};
use ferrovirt_e2e_tests::{Console, Story, TIMEOUT, skip, story};
use serde_json::{Value, json};

use crate::{manifests, moves};

#[test]
fn guest_reaches_the_cluster_and_a_pod_reaches_the_guest_through_a_service() {
    story("network", async |s| {
        // One with masquerade, the other with the default binding.
        s.apply(&manifests::masqueraded("web", "Always")).await?;
        s.apply(&manifests::kernel_vm("plain", "Always")).await?;
        for name in ["web", "plain"] {
            s.virt(&["expose", "vm", name, &format!("--name={name}"), "--port=80", "--target-port=8080"]).await?;
        }
        s.toolbox("visitor").await?;
        let service = s.cluster_api("Service").list(&Default::default()).await?;
        let api_server = service
            .items
            .iter()
            .find(|service| service.metadata.name.as_deref() == Some("kubernetes"))
            .and_then(|service| service.data["spec"]["clusterIP"].as_str().map(str::to_owned))
            .context("no address of the API server")?;
        let node = s.cluster_api("Node").list(&Default::default()).await?;
        let node = node.items[0].data["status"]["addresses"]
            .as_array()
            .and_then(|addresses| addresses.iter().find(|a| a["type"] == "InternalIP"))
            .and_then(|a| a["address"].as_str().map(str::to_owned))
            .context("no address of the node")?;

        for (name, password) in [("web", "story"), ("plain", "ferrovirt")] {
            s.wait_running(name).await?;
            let address = s.pod_address(name).await?;
            let has_address = |vmi: &Value| vmi["status"]["interfaces"][0]["ipAddress"] == address.as_str();
            let vmi = s.wait("vmi", name, "have the address of its pod", TIMEOUT, has_address).await?;
            let asked = &vmi["spec"]["domain"]["devices"]["interfaces"][0];
            let own = if asked["masquerade"].is_object() { "10.0.2.2" } else { address.as_str() };
            ensure!(asked["bridge"].is_object() == (name == "plain"), "the binding of {name} is {asked}");

            let mut console = s.console(name)?;
            console.login("root", password).await?;
            reaches_the_cluster(&mut console, own, &api_server, &node).await.with_context(|| name.to_owned())?;
            let page = format!("mkdir -p /www && echo {name}-works > /www/index.html && httpd -p 8080 -h /www");
            console.run(&page).await?;
            console.leave().await?;
            let message = visited(s, name).await.with_context(|| name.to_owned())?;
            ensure!(message.trim() == format!("{name}-works"), "{message:?}");
        }
        Ok(())
    });
}

/// Checks that the guest has its address by DHCP, reaches services and nodes, and resolves cluster names.
async fn reaches_the_cluster(console: &mut Console, own: &str, api_server: &str, node: &str) -> Result<()> {
    let wait = "for look in $(seq 300); do ip -4 -o addr show dev eth0 | grep inet && break; usleep 300000; done";
    let (address, _) = console.run(wait).await?;
    ensure!(address.contains(&format!("inet {own}/")), "the guest has {address:?}, not {own}");
    // A TLS server answers a plain request with an error, which proves the connection.
    for (what, address, port) in [("the API server's service address", api_server, 443), ("its node", node, 10250)] {
        let ask = format!("printf 'GET / HTTP/1.0\\r\\n\\r\\n' | nc -w 10 {address} {port}");
        let message = answer(console, &ask, "HTTPS server").await?;
        ensure!(message.contains("HTTPS server"), "the guest does not reach {what}: {message:?}");
    }
    let names = answer(console, "nslookup kubernetes.default.svc.cluster.local", api_server).await?;
    ensure!(names.contains(api_server), "the guest does not resolve cluster names: {names}");
    Ok(())
}

/// Returns the output of a command in the guest, which is repeated until it contains the text: a busy server can be too late.
async fn answer(console: &mut Console, command: &str, text: &str) -> Result<String> {
    let deadline = tokio::time::Instant::now() + TIMEOUT;
    loop {
        let (message, _) = console.run(command).await?;
        if message.contains(text) || tokio::time::Instant::now() > deadline {
            return Ok(message);
        }
    }
}

#[test]
fn guest_answers_over_both_address_families() {
    story("dual-stack", async |s| {
        let (node, _) = s.one_node().await?;
        if !s.cluster_api("Node").get(&node).await?.data["spec"]["podCIDRs"].to_string().contains(':') {
            return skip("nodes with both address families");
        }
        s.apply(&moves::vm("box", "Always")).await?;
        s.toolbox("visitor").await?;
        let expose = ["expose", "vm", "box", "--name=box", "--port=80", "--target-port=8080"];
        s.virt(&[&expose[..], &["--ip-family-policy=RequireDualStack"]].concat()).await?;
        s.wait_running("box").await?;
        let visitor = addresses_of_pod(s, "visitor").await?;
        let pod = s.launcher_pod("box").await?;
        let own = addresses_of_pod(s, pod["metadata"]["name"].as_str().context("pod without name")?).await?;
        let has_both = |vmi: &Value| vmi["status"]["interfaces"][0]["ipAddresses"] == json!(own);
        s.wait("vmi", "box", "show the addresses of its pod", TIMEOUT, has_both).await?;

        let mut console = s.console("box")?;
        console.login("root", "ferrovirt").await?;
        // The lease for IPv4 removes other addresses. Guests get the gateway of IPv6 from cloud-init.
        let configure = "for look in $(seq 300); do ip -4 -o addr show dev eth0 | grep -q inet && break; \
             usleep 300000; done; ip addr add fd10:0:2::2/120 dev eth0 && ip -6 route add default via fd10:0:2::1 dev eth0";
        console.output(configure).await?;
        for address in &visitor {
            let ping = format!(
                "n=0; until ping -c 1 -W 3 {address}; do n=$((n+1)); [ $n -lt 10 ] || break; sleep 1; done; [ $n -lt 10 ]"
            );
            console.output(&ping).await.with_context(|| format!("reach {address}"))?;
        }
        console.output("mkdir -p /www && echo both-work > /www/index.html && httpd -p 8080 -h /www").await?;
        console.leave().await?;
        let service = addresses(&s.get("Service", "box").await?["spec"]["clusterIPs"])?;
        let pages =
            own.iter().map(|address| format!("{}:8080", host(address))).chain(service.iter().map(|one| host(one)));
        for page in pages {
            let found = visited(s, &page).await.with_context(|| page.clone())?;
            ensure!(found.trim() == "both-work", "{page}: {found:?}");
        }
        Ok(())
    });
}

/// Waits until a pod has an address of each family, which kubelet can show after the guest runs, and returns them.
async fn addresses_of_pod(s: &Story, pod: &str) -> Result<[String; 2]> {
    let has_both = |pod: &Value| addresses(&pod["status"]["podIPs"]).is_ok();
    let pod = s.wait("Pod", pod, "have an address of each family", TIMEOUT, has_both).await?;
    addresses(&pod["status"]["podIPs"])
}

/// Returns an address of each family from a list of texts or of objects with the member `ip`.
fn addresses(list: &Value) -> Result<[String; 2]> {
    let found = list.as_array().into_iter().flatten();
    let found = found.filter_map(|one| one.as_str().or(one["ip"].as_str()).map(str::to_owned));
    let found: Vec<String> = found.collect();
    found.try_into().map_err(|found: Vec<String>| anyhow!("not an address of each family: {found:?}"))
}

/// Returns an address as the host of a URL.
fn host(address: &str) -> String {
    if address.contains(':') { format!("[{address}]") } else { address.to_owned() }
}

/// Returns the page that a pod gets through the Service, or from an address.
pub(crate) async fn visited(s: &Story, service: &str) -> Result<String> {
    let url = format!("http://{service}/");
    let deadline = tokio::time::Instant::now() + TIMEOUT;
    loop {
        match s.exec("visitor", &["wget", "-q", "-T", "5", "-O", "-", &url]).await {
            Ok(page) => return Ok(page),
            Err(error) if tokio::time::Instant::now() > deadline => return Err(error),
            Err(_) => tokio::time::sleep(Duration::from_millis(500)).await,
        }
    }
}
