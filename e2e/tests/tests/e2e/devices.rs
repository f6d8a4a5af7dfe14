//! Watchdog, source of random numbers and sound card in the guest.

use std::time::Duration;

use anyhow::ensure;
use ferrovirt_e2e_tests::{TIMEOUT, story};

use crate::manifests;

const DEVICES: &str =
    "devices: {rng: {}, sound: {name: card, model: ich9}, watchdog: {name: dog, i6300esb: {action: reset}}}";
/// Prints vendor and device of each PCI device, such as `0x8086:0x293e`.
const PCI_DEVICES: &str = "for d in /sys/bus/pci/devices/*; do echo $(cat $d/vendor):$(cat $d/device); done";

#[test]
fn guest_uses_random_numbers_sees_its_sound_card_and_is_reset_by_its_watchdog() {
    story("extra-devices", async |s| {
        s.apply(&manifests::kernel_vmi("box").replace("devices: {}", DEVICES)).await?;
        let before = s.wait_running("box").await?;
        let mut console = s.console("box")?;
        console.login("root", "ferrovirt").await?;

        let (source, _) = console.run("cat /sys/class/misc/hw_random/rng_current").await?;
        ensure!(source.trim() == "virtio_rng.0", "the guest has random numbers from {source:?}");
        let read = "timeout 60 head -c 64 /dev/hwrng | wc -c";
        let (length, _) = console.run(read).await?;
        ensure!(length.trim() == "64", "the guest has read {length:?} random bytes");

        let (devices, _) = console.run(PCI_DEVICES).await?;
        for (name, id) in [("sound card (Intel HDA, ICH9)", "0x8086:0x293e"), ("watchdog", "0x8086:0x25ab")] {
            ensure!(devices.contains(id), "the guest has no {name}: {devices}");
        }
        let (name, _) = console.run("cat /sys/class/watchdog/watchdog0/identity").await?;
        ensure!(name.trim() == "i6300ESB timer", "the watchdog is {name:?}");

        // The guest feeds its watchdog ...
        let (boot, _) = console.run("cat /proc/sys/kernel/random/boot_id").await?;
        let (message, code) = console.run("watchdog -T 10 -t 1 /dev/watchdog").await?;
        ensure!(code == 0, "the watchdog does not start: {message:?}");
        tokio::time::sleep(Duration::from_secs(13)).await;
        let (state, _) = console.run("cat /sys/class/watchdog/watchdog0/state").await?;
        ensure!(state.trim() == "active", "the watchdog is {state:?}");
        let (same, _) = console.run("cat /proc/sys/kernel/random/boot_id").await?;
        ensure!(same == boot, "the guest was reset although it feeds its watchdog");
        // ... until the program hangs, here by the end of it.
        console.send("kill -9 $(pidof watchdog)\n").await?;
        console.expect("login: ", 2 * TIMEOUT).await?;
        console.login("root", "ferrovirt").await?;
        let (other, _) = console.run("cat /proc/sys/kernel/random/boot_id").await?;
        ensure!(other != boot, "the guest was not reset by its watchdog");
        console.leave().await?;
        let after = s.get("vmi", "box").await?;
        ensure!(after["metadata"]["uid"] == before["metadata"]["uid"], "a reset must keep the VMI");
        ensure!(after["status"]["phase"] == "Running", "the VMI is {}", after["status"]["phase"]);
        Ok(())
    });
}
