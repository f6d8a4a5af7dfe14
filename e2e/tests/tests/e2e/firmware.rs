//! UEFI firmware.

use std::time::Duration;

use anyhow::{Context, ensure};
use ferrovirt_e2e_tests::story_large;

/// Returns a VMI from a container disk of the tiny guest with UEFI firmware.
fn uefi_vmi(name: &str, image: &str, secure_boot: bool) -> String {
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
  - {{name: root, containerDisk: {{image: 'ferrovirt.io/guests/{image}:devel', imagePullPolicy: IfNotPresent}}}}
"
    )
}

#[test]
fn guest_boots_by_uefi_and_secure_boot_refuses_an_unsigned_loader() {
    story_large("uefi", async |s| {
        s.apply(&uefi_vmi("plain", "tiny", false)).await?;
        s.apply(&uefi_vmi("secure", "tiny", true)).await?;
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
        let deadline = tokio::time::Instant::now() + Duration::from_secs(300);
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

/// Prints the variable `SecureBoot`: four bytes of attributes, then its value.
const SECURE_BOOT: &str = "modprobe efivarfs && mount -t efivarfs none /sys/firmware/efi/efivars && \
    od -An -tu1 /sys/firmware/efi/efivars/SecureBoot-8be4df61-93ca-11d2-aa0d-00e098032b8c";

#[test]
fn secure_boot_starts_a_signed_guest_that_loads_only_signed_modules() {
    story_large("secure-boot", async |s| {
        s.apply(&uefi_vmi("signed", "tiny-signed", true)).await?;
        s.wait_running("signed").await?;
        let mut console = s.console("signed")?;
        console.login("root", "ferrovirt").await?;
        let (bytes, _) = console.run(SECURE_BOOT).await?;
        ensure!(bytes.split_whitespace().last() == Some("1"), "the firmware does not report secure boot: {bytes:?}");
        let (log, code) = console.run("dmesg | grep -i 'secure boot'").await?;
        ensure!(code == 0 && log.contains("Secure boot enabled"), "the guest was not started by secure boot: {log:?}");

        // The guest has no device for this driver, so it is not loaded yet.
        console.run("driver=$(find /lib/modules/ -name virtio-rng.ko)").await?;
        // The signature ends with a record of 12 bytes and a mark of 28.
        let (message, code) = console.run("head -c -40 $driver >/tmp/unsigned.ko && insmod /tmp/unsigned.ko").await?;
        ensure!(code != 0, "the guest has loaded a module without a signature");
        ensure!(message.contains("can't insert"), "the module without a signature was not tried: {message:?}");
        let (message, code) = console.run("insmod $driver").await?;
        ensure!(code == 0, "the guest does not load a signed module: {message:?}");
        console.leave().await
    });
}
