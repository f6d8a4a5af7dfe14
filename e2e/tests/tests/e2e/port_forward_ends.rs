//! Forwarded ports end with the pod of the guest.

use anyhow::{Context, Result, bail, ensure};
use ferrovirt_e2e_tests::{Socket, Story, TIMEOUT, connect_without_retries, echo, ends, story};
use kube::api::DeleteParams;

use crate::manifests;

#[test]
fn port_of_a_guest_that_has_ended_is_refused() {
    story("forward-ended", async |s| {
        s.apply(&manifests::kernel_vmi("box")).await?;
        s.wait_running("box").await?;
        let mut console = s.console("box")?;
        console.login("root", "ferrovirt").await?;
        // The console stays open until the input has arrived.
        console.send("poweroff\n").await?;
        s.wait("vmi", "box", "have ended", TIMEOUT, |vmi| vmi["status"]["phase"] == "Succeeded").await?;
        // A completed pod still shows its former address, which another pod may get.
        let address = s.launcher_pod("box").await?["status"]["podIP"].clone();
        ensure!(address.is_string(), "the pod shows no address");
        let message = refused(s, "virtualmachineinstances/box", 7000).await?;
        ensure!(message.0 == 409 && message.1.contains("VMI is not running"), "{message:?}");
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
        // The object is removed at once, without a final status.
        s.api("Pod").delete(pod, &DeleteParams::default().grace_period(0)).await?;
        ends(stream, TIMEOUT).await?;
        forward.stop().await?;
        Ok(())
    });
}

/// Returns the message of a refused port forwarding.
async fn refused(s: &Story, object: &str, port: u16) -> Result<(u16, String)> {
    let path = s.subresource("v1", object, &format!("portforward/{port}"));
    match Socket::open(&connect_without_retries().await?, &path, None).await? {
        Ok(_) => bail!("port {port} of {object} is forwarded"),
        Err(answer) => Ok((answer.code, answer.message())),
    }
}
