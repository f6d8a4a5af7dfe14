//! Memory dumps of a running VM.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use ferrovirt_e2e_tests::{
    Story, TIMEOUT,
    storage::{Storage, on_host},
    story_alone,
};
use serde_json::{Value, json};

use crate::{live_resize::condition, manifests};

pub(crate) const MINUTES: Duration = Duration::from_secs(300);
/// Claim and volume.
pub(crate) const NAME: &str = "dump";
/// A word that the guest has in its memory.
const WORD: &str = "ferrovirt-remembers-this";

#[test]
fn memory_of_a_running_guest_is_written_to_a_claim() {
    story_alone("memory-dump", async |s| {
        let storage = Storage::for_claim(s, NAME, &claim()["spec"]).await?;
        let outcome = async {
            s.apply(&claim().to_string()).await?;
            dumped(s, &storage).await
        };
        let outcome = outcome.await;
        let gone = async {
            s.delete("vm", "box").await?;
            s.wait_gone("vmi", "box", MINUTES).await
        };
        let gone = gone.await;
        storage.remove(s).await?;
        outcome.and(gone)
    });
}

/// Returns the claim of the dumps.
pub(crate) fn claim() -> Value {
    json!({
        "apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": NAME},
        "spec": {
            "accessModes": ["ReadWriteOnce"], "storageClassName": "", "resources": {"requests": {"storage": "1Gi"}},
        },
    })
}

/// Returns a VM on the node of the storage.
pub(crate) fn vm(name: &str, storage: &Storage) -> String {
    manifests::kernel_vm_on(&storage.hostname, name)
}

/// Returns the request for a dump in the status of a VM.
pub(crate) fn request(vm: &Value) -> &Value {
    &vm["status"]["memoryDumpRequest"]
}

fn volumes(spec: &Value) -> bool {
    spec["volumes"].as_array().into_iter().flatten().any(|volume| volume["name"] == NAME)
}

async fn dumped(s: &Story, storage: &Storage) -> Result<()> {
    s.apply(&vm("box", storage)).await?;
    s.wait_running("box").await?;
    let mut console = s.console("box")?;
    console.login("root", "ferrovirt").await?;
    // Half of the word at a time, so that the console and the shell do not have it either.
    let (half, other) = WORD.split_at(12);
    console.run(&format!("printf '%s%s' {half} {other} > /tmp/word; wc -c < /tmp/word")).await?;
    let (boot, _) = console.run("cat /proc/sys/kernel/random/boot_id").await?;

    let mut former = String::new();
    for _ in 0..2 {
        s.virt(&["memory-dump", "get", "box", &format!("--claim-name={NAME}")]).await?;
        let is_done = |vm: &Value| request(vm)["phase"] == "Completed" && request(vm)["fileName"] != former.as_str();
        let vm = s.wait("vm", "box", "have a memory dump", MINUTES, is_done).await?;
        let file = request(&vm)["fileName"].as_str().context("a dump without a file")?.to_owned();
        ensure!(file.starts_with("box-dump-") && file.ends_with(".memory.dump"), "{file}");
        ensure!(
            request(&vm)["startTimestamp"].is_string() && request(&vm)["endTimestamp"].is_string(),
            "{}",
            request(&vm)
        );
        let claim = s.get("PersistentVolumeClaim", NAME).await?;
        ensure!(claim["metadata"]["annotations"]["kubevirt.io/memory-dump"] == file.as_str(), "{claim}");
        // An ELF core with the guest's memory, and the former one is gone.
        let look = format!(
            "cd {0}; ls; head -c 4 {file} | tail -c 3; echo; dd if={file} bs=1 skip=16 count=1 2>/dev/null | od -An -tu1; \
             grep -zc {WORD} {file}; stat -c %s {file}",
            storage.directory
        );
        let found = on_host(s, &storage.node, &look).await?;
        let lines: Vec<&str> = found.lines().map(str::trim).collect();
        let [only, elf, core, words, size] = lines[..] else { anyhow::bail!("{found}") };
        ensure!(only == file && elf == "ELF" && core == "4", "{found}");
        ensure!(words.parse::<u32>()? >= 1 && size.parse::<u64>()? >= 128 << 20, "{found}");
        // The template marks the claim; the VMI has given it back, and the guest goes on.
        ensure!(volumes(&vm["spec"]["template"]["spec"]), "the template lost the volume");
        let vmi = s.get("vmi", "box").await?;
        ensure!(
            !volumes(&vmi["spec"]) && !vmi["status"]["volumeStatus"].to_string().contains(NAME),
            "{}",
            vmi["status"]
        );
        ensure!(condition(&vm, "RestartRequired").is_none() && condition(&vm, "Failure").is_none(), "{}", vm["status"]);
        let (now, _) = console.run("cat /proc/sys/kernel/random/boot_id").await?;
        ensure!(now == boot, "the guest was restarted");
        former = file;
    }
    console.leave().await?;

    // A new VMI starts without the volume.
    let uid = s.get("vmi", "box").await?["metadata"]["uid"].clone();
    s.virt(&["restart", "box", "--grace-period=0", "--force"]).await?;
    let is_new = |vmi: &Value| vmi["metadata"]["uid"] != uid && vmi["status"]["phase"] == "Running";
    let vmi = s.wait("vmi", "box", "be restarted", MINUTES, is_new).await?;
    ensure!(!volumes(&vmi["spec"]), "{}", vmi["spec"]);

    // While the VM has a claim for dumps, the plugin makes no other.
    let create = ["memory-dump", "get", "box", "--claim-name=made", "--create-claim", "--storage-class=none"];
    let refusal = s.virt(&create).await.err().context("a second claim is accepted")?.to_string();
    ensure!(refusal.contains("please remove current memory dump association before"), "{refusal}");
    s.wait_gone("PersistentVolumeClaim", "made", TIMEOUT).await?;

    s.virt(&["memory-dump", "remove", "box"]).await?;
    let is_removed = |vm: &Value| request(vm).is_null() && !volumes(&vm["spec"]["template"]["spec"]);
    s.wait("vm", "box", "be dissociated from the claim", TIMEOUT, is_removed).await?;

    // A claim that exists is not created again, and one that virt-api refuses is deleted.
    let again = s.virt(&["memory-dump", "get", "box", &format!("--claim-name={NAME}"), "--create-claim"]).await;
    let conflict = again.err().context("the claim is created twice")?.to_string();
    ensure!(conflict.contains("error creating the claim") && conflict.contains("already exists"), "{conflict}");
    let create = ["memory-dump", "get", "box", "--claim-name=made.here", "--create-claim", "--storage-class=none"];
    let refusal = s.virt(&create).await.err().context("a claim that is no volume is accepted")?.to_string();
    ensure!(refusal.contains("cannot hold a memory dump") && refusal.contains("was deleted"), "{refusal}");
    s.wait_gone("PersistentVolumeClaim", "made.here", TIMEOUT).await?;
    Ok(())
}
