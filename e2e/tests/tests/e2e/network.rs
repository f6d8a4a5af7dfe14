//! The guest on the pod network.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use ferrovirt_e2e_tests::{Console, Story, TIMEOUT, story};

use crate::manifests;

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
            let vmi = s.wait_running(name).await?;
            let pod = s.launcher_pod(name).await?;
            let address = pod["status"]["podIP"].as_str().context("pod without address")?;
            let shown = &vmi["status"]["interfaces"][0];
            ensure!(shown["ipAddress"] == address, "the VMI does not have its pod's address {address}: {shown}");
            let asked = &vmi["spec"]["domain"]["devices"]["interfaces"][0];
            let own = if asked["masquerade"].is_object() { "10.0.2.2" } else { address };
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
    let wait = "for look in $(seq 100); do ip -4 -o addr show dev eth0 | grep inet && break; usleep 300000; done";
    let (address, _) = console.run(wait).await?;
    ensure!(address.contains(&format!("inet {own}/")), "the guest has {address:?}, not {own}");
    // A TLS server answers a plain request with an error, which proves the connection.
    for (what, address, port) in [("the API server's service address", api_server, 443), ("its node", node, 10250)] {
        let ask = format!("printf 'GET / HTTP/1.0\\r\\n\\r\\n' | nc -w 10 {address} {port}");
        let (message, _) = console.run(&ask).await?;
        ensure!(message.contains("HTTPS server"), "the guest does not reach {what}: {message:?}");
    }
    let (names, code) = console.run("nslookup kubernetes.default.svc.cluster.local").await?;
    ensure!(code == 0 && names.contains(api_server), "the guest does not resolve cluster names: {names}");
    Ok(())
}

/// Returns the page that a pod gets through the Service.
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
