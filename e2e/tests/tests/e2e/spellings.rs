//! Values with several spellings have the same meaning in every component.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use anyhow::{Context, ensure};
use ferrovirt_e2e_tests::{TIMEOUT, story};

use crate::manifests;

/// Offset of Asia/Kolkata, without daylight saving time.
const AHEAD: i64 = 5 * 3600 + 30 * 60;
/// Tolerance for the time of the boot.
const NEAR: i64 = 600;

#[test]
fn addresses_quantities_and_clocks_are_parsed_in_every_spelling() {
    story("spellings", async |s| {
        let manifest = manifests::kernel_vmi("odd")
            .replace(
                "    memory: {guest: 128Mi}\n",
                "    memory: {guest: 128Mi}\n    clock: {timezone: Asia/Kolkata}\n    resources: {requests: {cpu: 0.15}}\n",
            )
            .replace(
                "    devices: {}\n",
                "    devices: {interfaces: [{name: default, masquerade: {}, macAddress: BE-AF-00-00-DE-AD}]}\n  \
                 networks: [{name: default, pod: {vmNetworkCIDR: ''}}]\n",
            );
        s.apply(&manifest).await?;
        let vmi = s.wait_running("odd").await?;
        ensure!(vmi["spec"]["domain"]["resources"]["requests"]["cpu"] == "0.15", "{}", vmi["spec"]["domain"]);
        let mac = &vmi["status"]["interfaces"][0]["mac"];
        ensure!(mac == "be:af:00:00:de:ad", "the status shows {mac}");

        let mut console = s.console("odd")?;
        console.login("root", "ferrovirt").await?;
        let (mac, _) = console.run("cat /sys/class/net/eth0/address").await?;
        ensure!(mac.trim() == "be:af:00:00:de:ad", "the guest has {mac:?}");
        let (time, _) = console.run("date +%s").await?;
        let now = i64::try_from(SystemTime::now().duration_since(UNIX_EPOCH)?.as_secs())?;
        let ahead = time.trim().parse::<i64>().context("the guest's clock")? - now;
        ensure!((ahead - AHEAD).abs() < NEAR, "the guest's clock is ahead of UTC by {ahead} s");
        console.leave().await?;
        s.delete("vmi", "odd").await?;
        s.wait_gone("vmi", "odd", TIMEOUT).await
    });
}

#[test]
fn vmi_that_cannot_start_reports_the_reason() {
    story("waits", async |s| {
        let lost =
            manifests::kernel_vmi("lost").replace("    memory:", "    clock: {timezone: Mars/Olympus}\n    memory:");
        s.apply(&lost).await?;
        let message = s.wait_event("lost", "SyncFailed", TIMEOUT).await?;
        ensure!(message.contains("timezone"), "{message}");
        // Long enough for several attempts.
        tokio::time::sleep(Duration::from_secs(8)).await;
        let vmi = s.get("vmi", "lost").await?;
        ensure!(vmi["status"]["phase"] == "Scheduled", "{}", vmi["status"]);
        let conditions = vmi["status"]["conditions"].as_array().cloned().unwrap_or_default();
        let tells = conditions.iter().any(|known| {
            known["type"] == "Synchronized"
                && known["status"] == "False"
                && known["message"].as_str().is_some_and(|text| text.contains("timezone"))
        });
        ensure!(tells, "{conditions:?}");
        s.delete("vmi", "lost").await?;
        s.wait_gone("vmi", "lost", TIMEOUT).await
    });
}
