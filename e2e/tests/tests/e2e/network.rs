//! The guest on the pod network.

use std::time::Duration;

use anyhow::{Context, ensure};
use ferrovirt_e2e_tests::story;

use crate::manifests;

#[test]
fn guest_reaches_the_cluster_and_a_pod_reaches_the_guest_through_a_service() {
    story("network", async |s| {
        s.apply(&manifests::vm("web", "Always")).await?;
        s.virt(&["expose", "vm", "web", "--name=web", "--port=80", "--target-port=8080"]).await?;
        s.toolbox("visitor").await?;
        s.wait_running("web").await?;
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

        let mut console = s.console("web")?;
        console.login("root", "story").await?;
        let (address, _) = console.run("ip -4 -o addr show dev eth0").await?;
        ensure!(address.contains("10.0.2.2/24"), "address by DHCP, not {address:?}");
        // A server that expects TLS tells a client that talks plainly so: an answer from the server itself.
        for (what, address, port) in
            [("the API server's service address", &api_server, 443), ("its node", &node, 10250)]
        {
            let ask = format!("printf 'GET / HTTP/1.0\\r\\n\\r\\n' | nc -w 10 {address} {port}");
            let (said, _) = console.run(&ask).await?;
            ensure!(said.contains("HTTPS server"), "the guest does not reach {what}: {said:?}");
        }
        let (names, code) = console.run("nslookup kubernetes.default.svc.cluster.local").await?;
        ensure!(code == 0 && names.contains(&api_server), "the guest does not resolve cluster names: {names}");

        console.run("mkdir -p /www && echo it-works > /www/index.html && httpd -p 8080 -h /www").await?;
        console.leave().await?;
        let deadline = tokio::time::Instant::now() + Duration::from_secs(30);
        let page = loop {
            match s.exec("visitor", &["wget", "-q", "-T", "5", "-O", "-", "http://web/"]).await {
                Ok(page) => break page,
                Err(error) if tokio::time::Instant::now() > deadline => return Err(error),
                Err(_) => tokio::time::sleep(Duration::from_millis(500)).await,
            }
        };
        ensure!(page.trim() == "it-works", "{page:?}");
        Ok(())
    });
}
