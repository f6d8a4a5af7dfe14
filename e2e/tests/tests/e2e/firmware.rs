//! Machines that boot by UEFI.

use std::time::Duration;

use anyhow::{Context, ensure};
use ferrovirt_e2e_tests::story;

/// A machine from the tiny container disk with UEFI firmware.
fn machine(name: &str, secure_boot: bool) -> String {
    format!(
        "
apiVersion: kubevirt.io/v1
kind: VirtualMachineInstance
metadata: {{name: {name}}}
spec:
  terminationGracePeriodSeconds: 10
  domain:
    memory: {{guest: 256Mi}}
    features: {{smm: {{enabled: {secure_boot}}}}}
    firmware: {{bootloader: {{efi: {{secureBoot: {secure_boot}}}}}}}
    devices:
      disks: [{{name: root, disk: {{bus: virtio}}}}]
  volumes:
  - {{name: root, containerDisk: {{image: 'ferrovirt.io/guests/tiny:devel', imagePullPolicy: IfNotPresent}}}}
"
    )
}

#[test]
fn machine_boots_by_uefi_and_with_secure_boot_only_what_is_signed() {
    story("uefi", async |s| {
        s.apply(&machine("plain", false)).await?;
        s.apply(&machine("secure", true)).await?;
        s.wait_running("plain").await?;
        let mut console = s.console("plain")?;
        console.login("root", "ferrovirt").await?;
        let (said, code) = console.run("test -d /sys/firmware/efi").await?;
        ensure!(code == 0, "the guest was not started by UEFI firmware: {said}");
        console.leave().await?;
        s.delete("vmi", "plain").await?;

        // Nobody has signed the boot loader of the tiny guest, and the firmware says so.
        s.wait_running("secure").await?;
        let pod = s.launcher_pod("secure").await?;
        let pod = pod["metadata"]["name"].as_str().context("pod without name")?;
        let deadline = tokio::time::Instant::now() + Duration::from_secs(120);
        loop {
            let log = s.log(pod, "compute").await?;
            if log.contains("Access Denied") || log.contains("Security Violation") {
                break;
            }
            ensure!(!log.contains("login:"), "secure boot let an unsigned boot loader pass");
            ensure!(tokio::time::Instant::now() < deadline, "the firmware does not refuse the boot loader: {log}");
            tokio::time::sleep(Duration::from_secs(1)).await;
        }
        Ok(())
    });
}
