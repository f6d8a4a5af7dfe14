//! A guest with systemd, cloud-init and the guest agent.

use std::time::Duration;

use anyhow::ensure;
use ferrovirt_e2e_tests::story;
use serde_json::Value;

use crate::manifests;

/// From creation to a guest agent that answers: a whole distribution under emulation, beside other tests.
const BOOT: Duration = Duration::from_secs(420);

#[test]
fn guest_agent_tells_about_the_guest() {
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
        Ok(())
    });
}

fn condition<'a>(object: &'a Value, name: &str) -> Option<&'a Value> {
    object["status"]["conditions"].as_array()?.iter().find(|condition| condition["type"] == name)
}
