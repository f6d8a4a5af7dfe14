//! UEFI firmware.

use std::time::Duration;

use anyhow::{Context, ensure};
use ferrovirt_e2e_tests::story;

/// Returns a VM from the tiny container disk with UEFI firmware.
fn uefi_vm(name: &str, secure_boot: bool) -> String {
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
fn guest_boots_by_uefi_and_secure_boot_refuses_an_unsigned_loader() {
    story("uefi", async |s| {
        s.apply(&uefi_vm("plain", false)).await?;
        s.apply(&uefi_vm("secure", true)).await?;
        s.wait_running("plain").await?;
        let mut console = s.console("plain")?;
        console.login("root", "ferrovirt").await?;
        let (message, code) = console.run("test -d /sys/firmware/efi").await?;
        ensure!(code == 0, "the guest was not started by UEFI firmware: {message}");
        console.leave().await?;
        s.delete("vmi", "plain").await?;

        // The boot loader of the tiny guest is not signed.
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
