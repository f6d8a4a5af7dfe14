//! State of VMs that outlives their pods: TPM and UEFI variables in claims.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use ferrovirt_e2e_tests::{
    Console, Story, condition, own_cluster, skip,
    storage::{Backing, Storage, delete_vmis_after},
    story, story_large,
};
use kube::api::{Patch, PatchParams};
use serde_json::{Value, json};
use tokio::time::{Instant, sleep};

use crate::{
    copies::with_snapshots,
    hotplug::run,
    moves::{migrate, two_nodes},
};

const MINUTES: Duration = Duration::from_secs(240);
/// Claims with the state of a VM.
const LABEL: &str = "persistent-state-for";

/// Sends a command to the TPM and prints the answer in hexadecimal.
const TPM: &str = "tpm() { exec 3<>/dev/tpm0; printf \"$1\" >&3; od -An -v -tx1 <&3 | tr -d ' \\n'; exec 3>&-; }";
/// Authorization by an empty password.
const PASSWORD: &str = "00000009 40000009 0000 00 0000";
/// TPM2_NV_DefineSpace: an index of eight bytes.
const DEFINE: &str = "8002 0000002d 0000012a 40000001 PASSWORD 0000 000e 01800001 000b 02060006 0000 0008";
/// TPM2_NV_Write of `kept-42!`.
const WRITE: &str = "8002 0000002b 00000137 40000001 01800001 PASSWORD 0008 6b6570742d343221 0000";
/// TPM2_NV_Read.
const READ: &str = "8002 00000023 0000014e 40000001 01800001 PASSWORD 0008 0000";
/// Content of the index in the answer to [`READ`].
const KEPT: &str = "00086b6570742d343221";
/// Directory of the variables of UEFI, each a file with its attributes before the content.
const VARIABLES: &str = "/sys/firmware/efi/efivars";
/// Vendor of the variables of the stories.
const VENDOR: &str = "7a61e2b4-0c2f-4a5e-9d1b-5f1c3a7e9b01";
/// Mounts the variables, unless they are. A guest that has moved still has them.
const MOUNT: &str = "{ grep -q ' efivarfs ' /proc/mounts || \
     { modprobe efivarfs && mount -t efivarfs none /sys/firmware/efi/efivars; }; }";

/// Sends a command to the TPM of the guest, and returns the answer.
async fn tpm(console: &mut Console, command: &str) -> Result<String> {
    let digits: Vec<char> = command.replace("PASSWORD", PASSWORD).chars().filter(|c| *c != ' ').collect();
    let bytes: String = digits.chunks(2).map(|pair| format!("\\x{}", pair.iter().collect::<String>())).collect();
    run(console, &format!("{TPM}; tpm '{bytes}'")).await
}

/// Writes the index of the TPM.
async fn write_index(console: &mut Console) -> Result<()> {
    for command in [DEFINE, WRITE] {
        let answer = tpm(console, command).await?;
        ensure!(answer.get(12..20) == Some("00000000"), "the TPM refuses {command}: {answer}");
    }
    has_index(console, true).await
}

/// Checks that the TPM has the index with its content, or not.
async fn has_index(console: &mut Console, expected: bool) -> Result<()> {
    let answer = tpm(console, READ).await?;
    ensure!(answer.contains(KEPT) == expected, "the index of the TPM: {answer}");
    Ok(())
}

/// Makes a variable of UEFI. The kernel lets nobody write one of an unknown vendor again.
pub(crate) async fn write_variable(console: &mut Console, name: &str) -> Result<()> {
    let write = format!("{MOUNT} && printf '\\7\\0\\0\\0kept-%s' $((40+2)) >{VARIABLES}/{name}-{VENDOR}");
    run(console, &write).await.map(drop)
}

/// Checks that UEFI has the variable with its content, or not.
async fn has_variable(console: &mut Console, name: &str, expected: bool) -> Result<()> {
    let read =
        format!("{MOUNT} && if [ -e {VARIABLES}/{name}-{VENDOR} ]; then tail -c 7 {VARIABLES}/{name}-{VENDOR}; fi");
    let kept = run(console, &read).await?;
    let wanted = if expected { "kept-42" } else { "" };
    ensure!(kept == wanted, "variable {name} of UEFI: {kept:?}");
    Ok(())
}

/// Writes the index of the TPM and the variable `Kept` of UEFI.
pub(crate) async fn write_state(console: &mut Console) -> Result<()> {
    write_index(console).await?;
    write_variable(console, "Kept").await
}

/// Logs in to the guest and checks that it has the index of the TPM and a variable of UEFI.
pub(crate) async fn has_state(s: &Story, vm: &str, variable: &str) -> Result<()> {
    let mut console = s.reopen_console(vm, "root", "ferrovirt").await?;
    has_index(&mut console, true).await?;
    has_variable(&mut console, variable, true).await?;
    console.leave().await
}

/// Returns the claims with the state of a VM.
async fn claims(s: &Story, vm: &str) -> Result<Vec<Value>> {
    s.list("PersistentVolumeClaim", &format!("{LABEL}={vm}")).await
}

/// Returns the name of the one claim with the state of a VM, once its VMI shows it.
async fn claim_of(s: &Story, vm: &str) -> Result<String> {
    let deadline = Instant::now() + MINUTES;
    loop {
        let names: Vec<String> = claims(s, vm)
            .await?
            .iter()
            // That of the source is protected while its pod exists.
            .filter(|claim| claim["metadata"]["deletionTimestamp"].is_null())
            .filter_map(|claim| Some(claim["metadata"]["name"].as_str()?.to_owned()))
            .collect();
        let vmi = s.get("vmi", vm).await?;
        let shown = &vmi["status"]["volumeStatus"][0];
        if let [name] = names.as_slice()
            && shown["name"] == "persistent-state-for-this-vm"
            && shown["persistentVolumeClaimInfo"]["claimName"] == **name
        {
            return Ok(name.clone());
        }
        ensure!(Instant::now() < deadline, "claims {names:?}, the VMI shows {shown}");
        sleep(Duration::from_millis(250)).await;
    }
}

/// Waits until a claim is deleted. Kubernetes protects it while the ended pod of the source exists.
async fn is_deleted(s: &Story, claim: &str) -> Result<()> {
    let deadline = Instant::now() + MINUTES;
    while let Some(present) = s.api("PersistentVolumeClaim").get_opt(claim).await? {
        if present.metadata.deletion_timestamp.is_some() {
            break;
        }
        ensure!(Instant::now() < deadline, "claim {claim} is not deleted");
        sleep(Duration::from_millis(250)).await;
    }
    Ok(())
}

/// Waits until no claim with the state of a VM is left.
async fn no_claims(s: &Story, vm: &str) -> Result<()> {
    let deadline = Instant::now() + MINUTES;
    loop {
        let left = claims(s, vm).await?;
        if left.is_empty() {
            return Ok(());
        }
        ensure!(Instant::now() < deadline, "claims are left: {left:?}");
        sleep(Duration::from_millis(250)).await;
    }
}

/// Stops a VM and starts it again.
pub(crate) async fn restart(s: &Story, vm: &str) -> Result<()> {
    s.virt(&["stop", vm]).await?;
    s.wait_gone("vmi", vm, MINUTES).await?;
    start(s, vm).await?;
    s.wait_running(vm).await.map(drop)
}

/// Starts a stopped VM once its former request to stop is done.
async fn start(s: &Story, vm: &str) -> Result<()> {
    let is_idle = |vm: &Value| vm["status"]["stateChangeRequests"].as_array().is_none_or(Vec::is_empty);
    s.wait("vm", vm, "be stopped", MINUTES, is_idle).await?;
    s.virt(&["start", vm]).await.map(drop)
}

/// Returns a VM with TPM and secure boot that keeps the state of both or of neither, and can migrate.
pub(crate) fn secure_vm(name: &str, run_strategy: &str, persistent: bool) -> String {
    format!(
        "
apiVersion: kubevirt.io/v1
kind: VirtualMachine
metadata: {{name: {name}}}
spec:
  runStrategy: {run_strategy}
  template:
    spec:
      terminationGracePeriodSeconds: 0
      domain:
        memory: {{guest: 256Mi}}
        features: {{smm: {{}}}}
        firmware: {{bootloader: {{efi: {{secureBoot: true, persistent: {persistent}}}}}}}
        devices:
          tpm: {{persistent: {persistent}}}
          disks: [{{name: root, disk: {{bus: virtio}}}}]
          interfaces: [{{name: default, masquerade: {{}}}}]
      networks: [{{name: default, pod: {{}}}}]
      volumes:
      - {{name: root, containerDisk: {{image: 'ferrovirt.io/guests/tiny-signed:devel', imagePullPolicy: IfNotPresent}}}}
"
    )
}

#[test]
fn tpm_and_uefi_variables_outlive_the_pod_and_go_with_the_vm() {
    story_large("state", async |s| {
        if own_cluster()?.is_none() {
            return skip("a default storage class");
        }
        s.apply(&secure_vm("box", "Manual", true)).await?;
        start(s, "box").await?;
        s.wait_running("box").await?;
        let claim = claim_of(s, "box").await?;
        let mut console = s.console("box")?;
        console.login("root", "ferrovirt").await?;
        write_state(&mut console).await?;
        console.leave().await?;

        restart(s, "box").await?;
        ensure!(claim_of(s, "box").await? == claim, "the VM has another claim after its restart");
        has_state(s, "box", "Kept").await?;

        // A TPM that is not kept is a new one at each start, and the claim is of no more use.
        s.virt(&["stop", "box"]).await?;
        s.wait_gone("vmi", "box", MINUTES).await?;
        s.apply(&secure_vm("box", "Manual", false)).await?;
        start(s, "box").await?;
        s.wait_running("box").await?;
        let mut console = s.reopen_console("box", "root", "ferrovirt").await?;
        has_index(&mut console, false).await?;
        console.leave().await?;
        no_claims(s, "box").await?;

        s.virt(&["stop", "box"]).await?;
        s.wait_gone("vmi", "box", MINUTES).await?;
        s.apply(&secure_vm("box", "Manual", true)).await?;
        start(s, "box").await?;
        s.wait_running("box").await?;
        claim_of(s, "box").await?;
        s.delete("vm", "box").await?;
        no_claims(s, "box").await
    });
}

#[test]
fn restored_vm_has_the_tpm_and_the_uefi_variables_of_its_snapshot() {
    story_large("state-restored", async |s| with_snapshots(s, restored).await);
}

async fn restored(s: &Story) -> Result<()> {
    s.apply(&secure_vm("box", "Manual", true)).await?;
    start(s, "box").await?;
    s.wait_running("box").await?;
    let mut console = s.console("box")?;
    console.login("root", "ferrovirt").await?;
    write_variable(&mut console, "Kept").await?;
    console.leave().await?;
    s.virt(&["stop", "box"]).await?;
    s.wait_gone("vmi", "box", MINUTES).await?;
    s.virt(&["snapshot", "box", "s", "--wait"]).await?;
    let snapshot = s.get("VirtualMachineSnapshot", "s").await?;
    let volumes = &snapshot["status"]["snapshotVolumes"];
    ensure!(volumes["includedVolumes"] == json!(["persistent-state-for-box"]), "{volumes}");

    start(s, "box").await?;
    s.wait_running("box").await?;
    let former = claim_of(s, "box").await?;
    let mut console = s.reopen_console("box", "root", "ferrovirt").await?;
    write_index(&mut console).await?;
    write_variable(&mut console, "Late").await?;
    console.leave().await?;
    s.virt(&["restore", "box", "s", "--name=back", "--stop", "--wait"]).await?;
    s.wait_gone("PersistentVolumeClaim", &former, MINUTES).await?;
    start(s, "box").await?;
    s.wait_running("box").await?;
    let claim = claim_of(s, "box").await?;
    ensure!(claim.starts_with("restore-"), "the VM has its state in claim {claim}");
    let mut console = s.reopen_console("box", "root", "ferrovirt").await?;
    has_index(&mut console, false).await?;
    has_variable(&mut console, "Kept", true).await?;
    has_variable(&mut console, "Late", false).await?;
    console.leave().await?;
    s.delete("vm", "box").await?;
    no_claims(s, "box").await
}

#[test]
fn state_moves_to_a_claim_of_the_target_with_the_vm() {
    story_large("state-moves", async |s| {
        if own_cluster()?.is_none() || two_nodes(s).await?.is_none() {
            return skip("a default storage class and two nodes");
        }
        s.apply(&secure_vm("box", "Manual", true)).await?;
        start(s, "box").await?;
        s.wait_running("box").await?;
        let mut console = s.console("box")?;
        console.login("root", "ferrovirt").await?;
        write_state(&mut console).await?;
        console.leave().await?;
        let mut claim = claim_of(s, "box").await?;
        for round in 1..=2 {
            migrate(s, "box").await?;
            let next = claim_of(s, "box").await?;
            ensure!(next != claim, "the VM has claim {claim} after migration {round}");
            is_deleted(s, &claim).await?;
            has_state(s, "box", "Kept").await?;
            claim = next;
        }
        restart(s, "box").await?;
        has_state(s, "box", "Kept").await?;
        ensure!(claim_of(s, "box").await? == claim, "the VM has another claim after its restart");
        s.delete("vm", "box").await?;
        no_claims(s, "box").await
    });
}

#[test]
fn state_in_a_claim_of_both_nodes_stays_when_the_vm_moves() {
    story_large("state-shared", async |s| {
        if two_nodes(s).await?.is_none() {
            return Ok(());
        }
        let Some(storage) = Storage::make_for_many(s, "shared", Backing::Directory).await? else { return Ok(()) };
        let result = moved_with_shared_claim(s).await;
        let gone = delete_vmis_after(s, &result).await;
        let removed = storage.remove(s).await;
        result.and(gone).and(removed)
    });
}

async fn moved_with_shared_claim(s: &Story) -> Result<()> {
    // The label makes it the claim of the VM.
    let label = Patch::Merge(json!({"metadata": {"labels": {LABEL: "box"}}}));
    s.api("PersistentVolumeClaim").patch("shared", &PatchParams::default(), &label).await?;
    s.apply(&secure_vm("box", "Manual", true)).await?;
    start(s, "box").await?;
    s.wait_running("box").await?;
    ensure!(claim_of(s, "box").await? == "shared", "the VM does not use the claim with its label");
    let mut console = s.console("box")?;
    console.login("root", "ferrovirt").await?;
    write_state(&mut console).await?;
    console.leave().await?;
    let after = migrate(s, "box").await?;
    let state = &after["status"]["migrationState"];
    ensure!(state["targetPersistentStatePVCName"] == "shared", "{state}");
    ensure!(claim_of(s, "box").await? == "shared", "the VM has another claim after its migration");
    has_state(s, "box", "Kept").await?;
    // The firmware that has moved reads its memory: only another start shows that the claim has the variables.
    restart(s, "box").await?;
    has_state(s, "box", "Kept").await?;
    // Made by a user, it outlives the VM.
    s.delete("vm", "box").await?;
    s.get("PersistentVolumeClaim", "shared").await.map(drop).context("the claim of a user")
}

#[test]
fn vm_without_a_class_for_its_state_says_so() {
    story("state-reasons", async |s| {
        s.apply(
            "
apiVersion: v1
kind: PersistentVolumeClaim
metadata: {name: waiting, labels: {persistent-state-for: box}}
spec:
  storageClassName: no-such-class
  accessModes: [ReadWriteOnce]
  resources: {requests: {storage: 10Mi}}
",
        )
        .await?;
        s.apply(&secure_vm("box", "Manual", true)).await?;
        start(s, "box").await?;
        let reason = |vmi: &Value| {
            condition(vmi, "Synchronized").is_some_and(|shown| {
                shown["reason"] == "FailedBackendStorageProbe"
                    && shown["message"] == "storage class no-such-class not found"
            })
        };
        s.wait("vmi", "box", "say that its claim has no class", MINUTES, reason).await.map(drop)
    });
}
