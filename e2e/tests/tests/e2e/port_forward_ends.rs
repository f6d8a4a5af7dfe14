//! Ports are forwarded to guests that run, and to nobody who comes after them.

use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use ferrovirt_e2e_tests::{PATIENCE, Socket, Story, connect_without_retries, echo, ends, story};
use kube::api::DeleteParams;

use crate::manifests;

#[test]
fn port_of_a_guest_that_has_ended_is_refused() {
    story("forward-ended", async |s| {
        s.apply(&manifests::kernel_vmi("box")).await?;
        s.wait_running("box").await?;
        let mut console = s.console("box")?;
        console.login("root", "ferrovirt").await?;
        // The console stays open: what was typed is on its way.
        console.send("poweroff\n").await?;
        s.wait("vmi", "box", "have ended", PATIENCE, |vmi| vmi["status"]["phase"] == "Succeeded").await?;
        // The pod that has ended still shows the address that it had, which is another pod's before long.
        let address = s.launcher_pod("box").await?["status"]["podIP"].clone();
        ensure!(address.is_string(), "the pod shows no address");
        let said = refused(s, "virtualmachineinstances/box", 7000).await?;
        ensure!(said.0 == 409 && said.1.contains("VMI is not running"), "{said:?}");
        Ok(())
    });
}

#[test]
fn forwarded_connection_ends_with_the_pod() {
    story("forward-pod", async |s| {
        s.apply(&manifests::masqueraded("box", "Always")).await?;
        s.wait_running("box").await?;
        let mut console = s.console("box")?;
        console.login("root", "story").await?;
        console.serve("nc -ll -p 7000 -e cat", 7000).await?;
        console.leave().await?;
        let forward = s.forward("vmi/box", 7000).await?;
        let mut stream = forward.connect().await?;
        echo(&mut stream, "before").await?;
        let pod = s.launcher_pod("box").await?;
        let pod = pod["metadata"]["name"].as_str().context("pod without name")?;
        // Its object goes at once, and says no more how it ended.
        s.api("Pod").delete(pod, &DeleteParams::default().grace_period(0)).await?;
        ends(stream, Duration::from_secs(60)).await?;
        forward.stop().await?;
        Ok(())
    });
}

/// Returns the server's refusal to forward a port.
async fn refused(s: &Story, object: &str, port: u16) -> Result<(u16, String)> {
    let path = s.subresource("v1", object, &format!("portforward/{port}"));
    match Socket::open(&connect_without_retries().await?, &path, None).await? {
        Ok(_) => bail!("port {port} of {object} is forwarded"),
        Err(answer) => Ok((answer.code, answer.said())),
    }
}
