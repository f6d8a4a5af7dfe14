//! Presets and preferences set fields that a VMI leaves open.

use anyhow::ensure;
use ferrovirt_e2e_tests::{TIMEOUT, story};

use crate::manifests;

#[test]
fn preset_sets_memory_and_processors_of_vmis_with_its_labels() {
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
        // QEMU may abort under emulation when several processors run while PCI devices are set up (QEMU issue 1921), so the
        // guest starts only one.
        let vmi_yaml = manifests::kernel_vmi("box")
            .replace("    memory: {guest: 128Mi}\n", "")
            .replace("console=ttyS0 quiet", "console=ttyS0 quiet maxcpus=1");
        let message = s.refused(&vmi_yaml).await?;
        ensure!(message.contains("no memory requested"), "{message}");
        let labelled = vmi_yaml.replace("metadata: {name: box}", "metadata: {name: box, labels: {size: medium}}");
        // virt-api sees the preset with a delay.
        s.apply_when_accepted(&labelled).await?;
        let vmi = s.wait_running("box").await?;
        ensure!(vmi["spec"]["domain"]["memory"]["guest"] == "160Mi", "memory is {}", vmi["spec"]["domain"]["memory"]);
        let applied = &vmi["metadata"]["annotations"]["virtualmachinepreset.kubevirt.io/medium"];
        ensure!(applied == "kubevirt.io/v1", "the annotation of the preset is missing: {}", vmi["metadata"]);

        let mut console = s.console("box")?;
        console.login("root", "ferrovirt").await?;
        let (memory, _) = console.run("awk '/MemTotal/ {print int($2 / 1024)}' /proc/meminfo").await?;
        // The kernel reserves a part.
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
        let message = s.refused_soon(&other).await?;
        ensure!(["'large'", "'medium'", "conflict"].iter().all(|word| message.contains(word)), "{message}");
        Ok(())
    });
}

#[test]
fn preference_sets_bus_and_firmware_that_a_vm_leaves_open() {
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
        let vm_yaml = manifests::vm("box", "Always")
            .replace("  runStrategy: Always\n", "  runStrategy: Always\n  preference: {kind: VirtualMachinePreference, name: modern}\n  instancetype: {kind: VirtualMachineInstancetype, name: small}\n")
            .replace("        memory: {guest: 128Mi}\n", "")
            .replace("      terminationGracePeriodSeconds: 30\n", "")
            .replace("{name: root, disk: {bus: virtio}}", "{name: root, disk: {}}");
        s.apply(&vm_yaml).await?;
        let vmi = s.wait_running("box").await?;
        let spec = &vmi["spec"];
        ensure!(spec["domain"]["devices"]["disks"][0]["disk"]["bus"] == "scsi", "{}", spec["domain"]["devices"]);
        // Fields of the VM take precedence.
        ensure!(spec["domain"]["devices"]["disks"][1]["disk"]["bus"] == "virtio", "{}", spec["domain"]["devices"]);
        ensure!(spec["domain"]["devices"]["autoattachGraphicsDevice"] == false, "{}", spec["domain"]["devices"]);
        ensure!(spec["terminationGracePeriodSeconds"] == 7, "{}", spec["terminationGracePeriodSeconds"]);
        ensure!(vmi["metadata"]["annotations"]["example.com/made-by"] == "preference", "{}", vmi["metadata"]);

        let mut console = s.console("box")?;
        console.login("root", "story").await?;
        for (what, command) in [
            (
                "disk on the SCSI bus",
                "for i in $(seq 100); do test -b /dev/sda && break; sleep 1; done; test -b /dev/sda",
            ),
            ("UEFI firmware", "test -d /sys/firmware/efi"),
        ] {
            let (message, code) = console.run(command).await?;
            ensure!(code == 0, "the guest has no {what}: {message}");
        }
        console.leave().await?;
        let pictures = s.virt(&["vnc", "box", "--screenshot", "/dev/null"]);
        let pictures = tokio::time::timeout(TIMEOUT, pictures).await?;
        ensure!(pictures.is_err(), "there is a display though the preference wants none");
        Ok(())
    });
}
