//! A guest with systemd, cloud-init and the guest agent.

use std::{process::Stdio, time::Duration};

use anyhow::{Context, Result, ensure};
use ferrovirt_e2e_tests::{Story, story};
use serde_json::{Value, json};
use tokio::io::AsyncReadExt;

use crate::manifests;

/// From creation to a guest agent that answers: a whole distribution under emulation, beside other tests.
const BOOT: Duration = Duration::from_secs(420);

#[test]
fn guest_agent_tells_about_the_guest_and_cloud_init_ran() {
    story("agent", async |s| {
        s.apply(&manifests::debian("deb")).await?;
        let connected = |vmi: &Value| condition(vmi, "AgentConnected").is_some_and(|c| c["status"] == "True");
        let vmi = s.wait("vmi", "deb", "have its guest agent connected", BOOT, connected).await?;
        ensure!(vmi["status"]["phase"] == "Running", "the machine is {}", vmi["status"]["phase"]);
        let vmi = s
            .wait("vmi", "deb", "tell its operating system", Duration::from_secs(60), |vmi| {
                vmi["status"]["guestOSInfo"]["id"] == "debian"
                    && vmi["status"]["interfaces"][0]["interfaceName"].is_string()
            })
            .await?;
        ensure!(
            vmi["status"]["interfaces"][0]["infoSource"].as_str().is_some_and(|from| from.contains("guest-agent")),
            "the interface is not known from the guest: {}",
            vmi["status"]["interfaces"]
        );

        // Until cloud-init is done it writes over whatever is typed on the console.
        let pod = s.launcher_pod("deb").await?;
        let pod = pod["metadata"]["name"].as_str().context("pod without name")?.to_owned();
        let deadline = tokio::time::Instant::now() + Duration::from_secs(180);
        while !s.log(&pod, "compute").await?.contains("-----END SSH HOST KEY KEYS-----") {
            ensure!(tokio::time::Instant::now() < deadline, "cloud-init does not come to its end");
            tokio::time::sleep(Duration::from_secs(1)).await;
        }
        tokio::time::sleep(Duration::from_secs(5)).await;
        let mut console = s.console("deb")?;
        console.login("debian", "story").await?;
        let (hostname, _) = console.run("hostname").await?;
        ensure!(hostname.contains("deb-guest"), "hostname from user data, not {hostname:?}");
        let (marker, _) = console.run("cat /run/marker").await?;
        ensure!(marker.contains("from-user-data"), "cloud-init did not run the command: {marker:?}");

        queries(s).await?;
        console.leave().await?;
        freeze(s).await?;
        ssh(s).await
    });
}

/// What users ask the guest agent for; somebody is logged in on the console.
async fn queries(s: &Story) -> Result<()> {
    let info: Value = serde_json::from_str(&s.virt(&["guestosinfo", "deb"]).await?)?;
    ensure!(info["os"]["id"] == "debian", "guestosinfo: {info}");
    ensure!(info["hostname"].as_str().is_some_and(|name| name.starts_with("deb-guest")), "guestosinfo: {info}");
    ensure!(info["guestAgentVersion"].is_string(), "guestosinfo: {info}");
    let users: Value = serde_json::from_str(&s.virt(&["userlist", "deb"]).await?)?;
    let named = |name: &str| users["items"].as_array().is_some_and(|all| all.iter().any(|u| u["userName"] == name));
    ensure!(named("debian"), "userlist: {users}");
    let systems: Value = serde_json::from_str(&s.virt(&["fslist", "deb"]).await?)?;
    let root = systems["items"].as_array().and_then(|all| all.iter().find(|f| f["mountPoint"] == "/").cloned());
    let root = root.with_context(|| format!("no root in fslist: {systems}"))?;
    ensure!(root["totalBytes"].as_u64().unwrap_or_default() > 0, "fslist: {root}");
    let table = s.virt(&["fslist", "deb", "-o", "table"]).await?;
    ensure!(table.lines().count() > 1, "fslist as a table: {table}");
    Ok(())
}

/// The file systems of the guest stand still between freeze and thaw, and its status says so.
async fn freeze(s: &Story) -> Result<()> {
    let frozen = |vmi: &Value| vmi["status"]["fsFreezeStatus"] == "frozen";
    s.put("virtualmachineinstances/deb", "freeze", &json!({"unfreezeTimeout": "60s"})).await?;
    s.wait("vmi", "deb", "be frozen", Duration::from_secs(30), frozen).await?;
    s.put("virtualmachineinstances/deb", "unfreeze", &json!({})).await?;
    s.wait("vmi", "deb", "thaw", Duration::from_secs(30), |vmi| !frozen(vmi)).await?;
    // Nobody thaws this one but the time given.
    s.put("virtualmachineinstances/deb", "freeze", &json!({"unfreezeTimeout": "5s"})).await?;
    s.wait("vmi", "deb", "thaw by itself", Duration::from_secs(60), |vmi| !frozen(vmi)).await?;
    Ok(())
}

/// The SSH server of the guest greets through the stream that `kubectl virt ssh` uses.
async fn ssh(s: &Story) -> Result<()> {
    let mut command = s.virt_command(&["port-forward", "--stdio=true", "vmi/deb", "22"]);
    let mut forward = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn()?;
    let mut greeting = [0_u8; 8];
    let mut output = forward.stdout.take().context("no output")?;
    tokio::time::timeout(Duration::from_secs(60), output.read_exact(&mut greeting)).await.context("no greeting")??;
    ensure!(&greeting == b"SSH-2.0-", "{:?}", String::from_utf8_lossy(&greeting));
    forward.kill().await?;
    Ok(())
}

fn condition<'a>(object: &'a Value, name: &str) -> Option<&'a Value> {
    object["status"]["conditions"].as_array()?.iter().find(|condition| condition["type"] == name)
}
