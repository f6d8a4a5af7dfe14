//! A guest does not reach listeners on the loopback address of its launcher pod.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use ferrovirt_e2e_tests::{Console, story};

use crate::manifests;

/// Routes the guest's packets for 127.0.0.1 to its gateway and accepts the answers.
const TURN: &str = "for link in all eth0; do \
        echo 1 > /proc/sys/net/ipv4/conf/$link/route_localnet; echo 0 > /proc/sys/net/ipv4/conf/$link/rp_filter; \
    done; \
    ip address del 127.0.0.1/8 dev lo; ip route add 127.0.0.1/32 via 10.0.2.1 dev eth0 src 10.0.2.2";

#[test]
fn guest_does_not_reach_the_loopback_of_its_pod() {
    story("loopback", async |s| {
        s.apply(&manifests::masqueraded("box", "Always")).await?;
        s.wait_running("box").await?;
        let pod = s.launcher_pod("box").await?;
        let uid = pod["metadata"]["uid"].as_str().context("pod without uid")?.to_owned();
        let node = s.node_of("box").await?;
        let mut console = s.console("box")?;
        console.login("root", "story").await?;
        let (message, code) = console.run(TURN).await?;
        ensure!(code == 0, "{message}");
        // Two listeners in the pod's network, on the loopback address and on all addresses. The second is the counter-check.
        let listen = format!(
            "for p in /proc/[0-9]*; do \
               if grep -qs {uid} $p/cgroup && [ \"$(cat $p/comm)\" = virt-launcher ]; then pid=${{p#/proc/}}; fi; \
             done; \
             for address in 127.0.0.1:5555 0.0.0.0:5556; do \
               timeout 25 nsenter -t $pid -n httpd -f -p $address & \
             done; \
             wait"
        );
        let ((open, secret), _) = tokio::try_join!(attempts(&mut console), s.on_node(&node, &listen))?;
        ensure!(open, "the guest does not reach its pod");
        ensure!(!secret, "the guest reaches the loopback address of its pod");
        console.leave().await
    });
}

/// Returns whether the guest reaches the listener on all addresses, and that on the loopback address meanwhile.
async fn attempts(console: &mut Console) -> Result<(bool, bool)> {
    let mut answers = async |address: &str| {
        let ask = format!("printf 'GET / HTTP/1.0\\r\\n\\r\\n' | nc -w 2 {address}");
        anyhow::Ok(console.run(&ask).await?.0.contains("HTTP/1."))
    };
    for _ in 0..120 {
        if answers("10.0.2.1 5556").await? {
            return Ok((true, answers("127.0.0.1 5555").await?));
        }
        tokio::time::sleep(Duration::from_millis(500)).await;
    }
    Ok((false, false))
}
