//! Guests of arm64, which QEMU emulates on nodes of amd64.

use anyhow::{Context, Result, ensure};
use ferrovirt_e2e_tests::{Story, TIMEOUT, storage::delete_vmis_after, story_alone};
use kube::api::{Patch, PatchParams};
use serde_json::{Value, json};

use crate::{
    live_resize::{condition, run},
    moves::{console, migrate, two_nodes, vm},
};

/// Label of nodes that emulate such guests.
const LABEL: &str = "kubevirt.io/vm-arch-arm64";
const NAME: &str = "arm";

#[test]
fn guest_of_arm64_boots_by_uefi_and_moves_with_its_gate() {
    story_alone("arm64", async |s| {
        let vm = vm_of_arm64();
        let refused = s.refused(&vm).await?;
        ensure!(refused.contains("CrossArchitectureVirtualization"), "refused without naming the gate: {refused}");
        set_gates(s, &json!(["CrossArchitectureVirtualization"])).await?;
        let outcome = boots_and_moves(s, &vm).await;
        let gone = delete_vmis_after(s, &outcome).await;
        set_gates(s, &Value::Null).await?;
        outcome.and(gone)
    });
}

/// Returns a VM that boots the kernel of the small guest of arm64.
fn vm_of_arm64() -> String {
    vm(NAME, "Always")
        .replace("tiny-kernel:", "tiny-arm64:")
        .replace("console=ttyS0", "console=ttyAMA0")
        .replace("memory: {guest: 128Mi}", "memory: {guest: 256Mi}")
        .replace("      domain:\n", "      architecture: arm64\n      domain:\n")
}

async fn boots_and_moves(s: &Story, vm: &str) -> Result<()> {
    s.apply_when_accepted(vm).await?;
    let lacking = json!({"domain": {"features": {"hyperv": {"relaxed": {}}}}});
    let patch = json!({"spec": {"template": {"spec": lacking}}}).to_string();
    let refused = s.kubectl(&["patch", "vm", NAME, "--type=merge", "--dry-run=server", "-p", &patch]).await;
    let refused = refused.err().context("a field that arm64 does not have is accepted")?;
    ensure!(format!("{refused:#}").contains("guests of arm64 do not have it"), "refused by {refused:#}");

    let running = s.wait_running(NAME).await?;
    ensure!(running["spec"]["domain"]["machine"]["type"] == "virt", "{}", running["spec"]["domain"]["machine"]);
    let emulated = |vmi: &Value| {
        condition(vmi, "SoftwareEmulation").is_some_and(|shown| shown["reason"] == "CrossArchitectureEmulation")
    };
    s.wait("vmi", NAME, "show its emulation", TIMEOUT, emulated).await?;
    let node = running["status"]["nodeName"].as_str().context("no node")?;
    let node = s.cluster_api("Node").get(node).await?;
    ensure!(node.metadata.labels.is_some_and(|labels| labels.contains_key(LABEL)), "the node has no label {LABEL}");
    let pod = s.launcher_pod(NAME).await?;
    let container = &pod["spec"]["containers"][0];
    ensure!(container["image"].as_str().is_some_and(|image| image.ends_with("-arm64")), "{}", container["image"]);
    ensure!(container["resources"]["limits"]["devices.kubevirt.io/kvm"].is_null(), "{}", container["resources"]);

    let mut guest = console(s, NAME).await?;
    let machine = run(&mut guest, "uname -m").await?;
    ensure!(machine.trim() == "aarch64", "the guest is of {machine:?}");
    run(&mut guest, "test -d /sys/firmware/efi && test -d /sys/firmware/acpi && echo stays >/mark").await?;
    // DHCP goes on in the background.
    let leased = "for i in $(seq 100); do ip -4 -o addr show eth0 | grep -q inet && break; sleep 1; done; ip -4 -o addr show eth0";
    let address = run(&mut guest, leased).await?;
    ensure!(address.contains("inet "), "the guest has no address: {address:?}");
    guest.leave().await?;

    if two_nodes(s).await?.is_some() {
        migrate(s, NAME).await?;
        let mut guest = console(s, NAME).await?;
        let mark = run(&mut guest, "cat /mark; uname -m").await?;
        ensure!(mark.split_whitespace().eq(["stays", "aarch64"]), "after the migration: {mark:?}");
        guest.leave().await?;
    }
    s.virt(&["stop", NAME]).await?;
    s.wait_gone("vmi", NAME, TIMEOUT).await
}

async fn set_gates(s: &Story, gates: &Value) -> Result<()> {
    let patch = json!({"spec": {"configuration": {"developerConfiguration": {"featureGates": gates}}}});
    s.installation_api("KubeVirt").patch("kubevirt", &PatchParams::default(), &Patch::Merge(patch)).await?;
    Ok(())
}
