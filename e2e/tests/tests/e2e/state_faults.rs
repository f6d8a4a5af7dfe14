//! Processes that are killed while a VM with a TPM and UEFI runs and migrates. What both keep is there afterwards.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use ferrovirt_e2e_tests::{
    Story, own_cluster, skip,
    storage::{Backing, Storage},
    story_alone, story_large,
};
use kube::api::{Patch, PatchParams};
use serde_json::{Value, json};

use crate::{
    kills::{During, GUEST, Has, Process, Victim, migration_rows, run_migrations, started_again},
    live_resize::{condition, run},
    moves::{console, two_nodes, vm},
    rows::chosen,
    state::{has_state, secure_vm, write_state},
};

const MINUTES: Duration = Duration::from_secs(240);
/// A sample has every so many rows of the table.
const SAMPLE: usize = 11;

const VICTIMS: &[Victim] = &[
    Victim::Leader,
    Victim::Source(Process::VirtHandler),
    Victim::Target(Process::VirtHandler),
    Victim::Source(Process::Worker),
    Victim::Target(Process::Worker),
    Victim::Source(Process::Libvirtd),
    Victim::Target(Process::Libvirtd),
    Victim::Source(Process::Swtpm),
    Victim::Target(Process::Swtpm),
    Victim::Target(Process::Qemu),
];

/// Returns true if the victim exists in the phase, and its end can concern the state.
fn exists(during: During, victim: Victim) -> bool {
    use During::{PreparingTarget, Running, Switchover, TargetReady};
    match victim {
        Victim::Source(Process::Swtpm) => matches!(during, TargetReady | Running),
        Victim::Target(Process::Swtpm | Process::Qemu) => during == Running,
        _ => matches!(during, PreparingTarget | Running | Switchover),
    }
}

#[test]
fn table_has_twenty_five_rows() {
    assert_eq!(migration_rows(VICTIMS, exists).len(), 25);
}

/// Starts the VM of the rows, which has the index of the TPM and the variable `Kept` of UEFI.
async fn start(s: &Story) -> Result<()> {
    s.apply(&secure_vm(GUEST, "Always", true)).await?;
    s.wait_running(GUEST).await?;
    let mut guest = console(s, GUEST).await?;
    write_state(&mut guest).await?;
    guest.leave().await
}

#[test]
fn guest_ends_with_its_tpm_emulator_and_its_vm_starts_again_with_the_state() {
    story_large("state-emulator", async |s| {
        if own_cluster()?.is_none() {
            return skip("a default storage class");
        }
        start(s).await?;
        let former = s.get("vmi", GUEST).await?;
        let pod = s.launcher_pod(GUEST).await?;
        s.kill_in_launcher(pod["metadata"]["name"].as_str().context("pod without name")?, "swtpm").await?;
        started_again(s, &former).await?;
        has_state(s, GUEST, "Kept").await?;
        s.delete("vm", GUEST).await?;

        // One that starts once shows why it has ended.
        s.apply(&vm("once", "Once").replace("devices: {interfaces", "devices: {tpm: {}, interfaces")).await?;
        s.wait_running("once").await?;
        let pod = s.launcher_pod("once").await?;
        s.kill_in_launcher(pod["metadata"]["name"].as_str().context("pod without name")?, "swtpm").await?;
        let failed = s.wait("vmi", "once", "fail", MINUTES, |vmi| vmi["status"]["phase"] == "Failed").await?;
        let shown = condition(&failed, "Synchronized").map_or(Value::Null, |shown| shown["message"].clone());
        ensure!(shown == "the TPM emulator of the guest has ended", "{shown}");
        Ok(())
    });
}

#[test]
fn state_is_there_whatever_is_killed_while_it_moves_to_another_claim() {
    story_alone("state-faults", async |s| {
        let Some(nodes) = two_nodes(s).await? else { return Ok(()) };
        if own_cluster()?.is_none() {
            return skip("a default storage class");
        }
        start(s).await?;
        let rows = chosen(migration_rows(VICTIMS, exists), SAMPLE)?;
        run_migrations(s, &nodes, rows, Has::State, |_| json!({"bandwidthPerMigration": "24Mi"})).await?;
        s.delete("vm", GUEST).await
    });
}

#[test]
fn state_is_there_whatever_is_killed_while_its_vm_moves_in_a_shared_claim() {
    story_alone("state-shared-faults", async |s| {
        let Some(nodes) = two_nodes(s).await? else { return Ok(()) };
        let Some(storage) = Storage::make_for_many(s, "shared", Backing::Directory).await? else { return Ok(()) };
        let outcome = storage.lend(s, async |_| {
            let label = Patch::Merge(json!({"metadata": {"labels": {"persistent-state-for": GUEST}}}));
            s.api("PersistentVolumeClaim").patch("shared", &PatchParams::default(), &label).await?;
            start(s).await?;
            let rows = chosen(migration_rows(VICTIMS, exists), SAMPLE)?;
            run_migrations(s, &nodes, rows, Has::State, |_| json!({"bandwidthPerMigration": "24Mi"})).await
        });
        outcome.await
    });
}

/// A VM as Windows 11 wants it: secure boot, a TPM, both kept, and the features of Hyper-V. Disk and interface are virtio.
const WINDOWS: &str = "
apiVersion: kubevirt.io/v1
kind: VirtualMachine
metadata: {name: windows}
spec:
  runStrategy: Always
  template:
    spec:
      terminationGracePeriodSeconds: 0
      domain:
        cpu: {sockets: 2}
        memory: {guest: 256Mi}
        clock:
          utc: {}
          timer: {hpet: {present: false}, hyperv: {}, pit: {tickPolicy: delay}, rtc: {tickPolicy: catchup}}
        features:
          acpi: {}
          apic: {}
          smm: {}
          hyperv:
            relaxed: {}
            vapic: {}
            vpindex: {}
            spinlocks: {spinlocks: 8191}
            synic: {}
            synictimer: {direct: {}}
            reset: {}
            runtime: {}
        firmware: {bootloader: {efi: {secureBoot: true, persistent: true}}}
        devices:
          tpm: {persistent: true}
          inputs: [{name: tablet, type: tablet, bus: virtio}]
          disks: [{name: root, disk: {bus: virtio}}]
          interfaces: [{name: default, model: virtio, masquerade: {}}]
      networks: [{name: default, pod: {}}]
      volumes:
      - {name: root, containerDisk: {image: 'ferrovirt.io/guests/tiny-signed:devel', imagePullPolicy: IfNotPresent}}
";

#[test]
fn vm_with_the_hardware_of_windows_runs_its_firmware() {
    story_large("state-windows", async |s| {
        if own_cluster()?.is_none() {
            return skip("a default storage class");
        }
        s.apply(WINDOWS).await?;
        s.wait_running("windows").await?;
        let mut guest = s.console("windows")?;
        guest.login("root", "ferrovirt").await?;
        let version = run(&mut guest, "cat /sys/class/tpm/tpm0/tpm_version_major").await?;
        ensure!(version == "2", "the version of the TPM: {version:?}");
        // The firmware measures what it starts.
        let measured = run(&mut guest, "cat /sys/class/tpm/tpm0/pcr-sha256/7").await?;
        ensure!(measured.len() == 64 && measured.chars().any(|digit| digit != '0'), "register 7: {measured:?}");
        let secure = "modprobe efivarfs && mount -t efivarfs none /sys/firmware/efi/efivars && \
             od -An -tu1 /sys/firmware/efi/efivars/SecureBoot-8be4df61-93ca-11d2-aa0d-00e098032b8c";
        let secure = run(&mut guest, secure).await?;
        ensure!(secure.split_whitespace().last() == Some("1"), "secure boot: {secure:?}");
        guest.leave().await?;
        s.delete("vm", "windows").await
    });
}
