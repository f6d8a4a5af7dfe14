//! What presets and preferences give to machines that leave things open.

use std::time::Duration;

use anyhow::ensure;
use ferrovirt_e2e_tests::story;

use crate::manifests;

#[test]
fn preset_gives_memory_and_processors_to_machines_with_its_labels() {
    story("preset", async |s| {
        s.apply(
            "
apiVersion: kubevirt.io/v1
kind: VirtualMachineInstancePreset
metadata: {name: medium}
spec:
  selector: {matchLabels: {size: medium}}
  domain:
    resources: {requests: {memory: 160Mi}}
    cpu: {cores: 2}
    devices: {}
",
        )
        .await?;
        // Under emulation QEMU may abort where several processors run while PCI devices are set up (its issue 1921): of the
        // guest's only the first is brought up.
        let machine = manifests::kernel_vmi("box")
            .replace("    memory: {guest: 128Mi}\n", "")
            .replace("console=ttyS0 quiet", "console=ttyS0 quiet maxcpus=1");
        let said = s.refused(&machine).await?;
        ensure!(said.contains("no memory requested"), "{said}");
        let labelled = machine.replace("metadata: {name: box}", "metadata: {name: box, labels: {size: medium}}");
        // A preset counts from the moment that virt-api's watch tells of it.
        s.apply_when_accepted(&labelled).await?;
        let vmi = s.wait_running("box").await?;
        ensure!(vmi["spec"]["domain"]["memory"]["guest"] == "160Mi", "memory is {}", vmi["spec"]["domain"]["memory"]);
        let applied = &vmi["metadata"]["annotations"]["virtualmachinepreset.kubevirt.io/medium"];
        ensure!(applied == "kubevirt.io/v1", "the machine does not say which preset it has: {}", vmi["metadata"]);

        let mut console = s.console("box")?;
        console.login("root", "ferrovirt").await?;
        let (memory, _) = console.run("awk '/MemTotal/ {print int($2 / 1024)}' /proc/meminfo").await?;
        // The kernel keeps a part for itself.
        let megabytes: u32 = memory.trim().parse()?;
        ensure!((100..160).contains(&megabytes), "the guest has {megabytes} MiB");
        let (processors, _) = console.run("cat /sys/devices/system/cpu/present").await?;
        ensure!(processors.trim() == "0-1", "the guest has processors {processors}");
        console.leave().await?;

        let twice = "
apiVersion: kubevirt.io/v1
kind: VirtualMachineInstancePreset
metadata: {name: large}
spec:
  selector: {matchLabels: {size: medium}}
  domain: {resources: {requests: {memory: 1Gi}}, devices: {}}
";
        s.apply(twice).await?;
        let other = labelled.replace("name: box", "name: other");
        let said = s.refused_soon(&other).await?;
        ensure!(["'large'", "'medium'", "conflict"].iter().all(|word| said.contains(word)), "{said}");
        Ok(())
    });
}

#[test]
fn preference_chooses_the_bus_and_firmware_that_a_machine_leaves_open() {
    story("preference", async |s| {
        s.apply(
            "
apiVersion: instancetype.kubevirt.io/v1beta1
kind: VirtualMachinePreference
metadata: {name: modern}
spec:
  annotations: {example.com/made-by: preference}
  cpu: {preferredCPUTopology: cores}
  devices: {preferredDiskBus: scsi, preferredInterfaceModel: virtio, preferredAutoattachGraphicsDevice: false}
  firmware: {preferredEfi: {secureBoot: false}}
  preferredTerminationGracePeriodSeconds: 7
---
apiVersion: instancetype.kubevirt.io/v1beta1
kind: VirtualMachineInstancetype
metadata: {name: small}
spec: {cpu: {guest: 1}, memory: {guest: 256Mi}}
",
        )
        .await?;
        let machine = manifests::vm("box", "Always")
            .replace("  runStrategy: Always\n", "  runStrategy: Always\n  preference: {kind: VirtualMachinePreference, name: modern}\n  instancetype: {kind: VirtualMachineInstancetype, name: small}\n")
            .replace("        memory: {guest: 128Mi}\n", "")
            .replace("      terminationGracePeriodSeconds: 30\n", "")
            .replace("{name: root, disk: {bus: virtio}}", "{name: root, disk: {}}");
        s.apply(&machine).await?;
        let vmi = s.wait_running("box").await?;
        let spec = &vmi["spec"];
        ensure!(spec["domain"]["devices"]["disks"][0]["disk"]["bus"] == "scsi", "{}", spec["domain"]["devices"]);
        // What the machine says itself stays.
        ensure!(spec["domain"]["devices"]["disks"][1]["disk"]["bus"] == "virtio", "{}", spec["domain"]["devices"]);
        ensure!(spec["domain"]["devices"]["autoattachGraphicsDevice"] == false, "{}", spec["domain"]["devices"]);
        ensure!(spec["terminationGracePeriodSeconds"] == 7, "{}", spec["terminationGracePeriodSeconds"]);
        ensure!(vmi["metadata"]["annotations"]["example.com/made-by"] == "preference", "{}", vmi["metadata"]);

        let mut console = s.console("box")?;
        console.login("root", "story").await?;
        for (what, command) in [
            (
                "disk on the SCSI bus",
                "for i in $(seq 20); do test -b /dev/sda && break; sleep 1; done; test -b /dev/sda",
            ),
            ("UEFI firmware", "test -d /sys/firmware/efi"),
        ] {
            let (said, code) = console.run(command).await?;
            ensure!(code == 0, "the guest has no {what}: {said}");
        }
        console.leave().await?;
        let pictures = s.virt(&["vnc", "box", "--screenshot", "/dev/null"]);
        let pictures = tokio::time::timeout(Duration::from_secs(20), pictures).await?;
        ensure!(pictures.is_err(), "there is a display though the preference wants none");
        Ok(())
    });
}
