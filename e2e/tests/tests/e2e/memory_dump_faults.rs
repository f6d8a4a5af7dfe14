//! Processes that are killed while the memory of a guest is written to a claim.
//!
//! Each row stops one process, so that the dump stays in an observed phase, kills another and lets the first continue. The dump is
//! complete in the end, and the guest is not restarted.

use anyhow::{Context, Result, ensure};
use ferrovirt_e2e_tests::{Story, storage::Storage, story_alone};
use serde_json::Value;

use crate::{
    hotplug_faults::signal,
    live_resize_faults::{Victim, in_guest, kill, launcher_uid},
    memory_dump::{MINUTES, NAME, claim, request, vm},
};

/// The phase in which a process is killed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum During {
    /// virt-handler is stopped: the claim is attached to the node.
    Attach,
    /// libvirtd is stopped: the launcher is to write the dump.
    Dump,
}

use self::{
    During::{Attach, Dump},
    Victim::{ControllerLeader, Libvirtd, VirtHandler, Worker},
};

const TABLE: [(During, Victim); 7] = [
    (Attach, VirtHandler),
    (Attach, Worker),
    (Attach, ControllerLeader),
    (Dump, VirtHandler),
    (Dump, Worker),
    (Dump, Libvirtd),
    (Dump, ControllerLeader),
];

impl During {
    /// Returns the program that is stopped, and the phase in which the volume stays.
    const fn held(self) -> (&'static str, &'static str) {
        match self {
            Self::Attach => ("virt-handler", "AttachedToNode"),
            Self::Dump => ("libvirtd", "MemoryDumpInProgress"),
        }
    }
}

#[test]
fn memory_is_written_whatever_is_killed_meanwhile() {
    story_alone("memory-dump-faults", async |s| {
        let storage = Storage::for_claim(s, NAME, &claim()["spec"]).await?;
        let outcome = rows(s, &storage).await;
        let gone = async {
            s.delete("vm", "guest").await?;
            s.wait_gone("vmi", "guest", MINUTES).await
        };
        let gone = gone.await;
        storage.remove(s).await?;
        outcome.and(gone)
    });
}

async fn rows(s: &Story, storage: &Storage) -> Result<()> {
    s.apply(&claim().to_string()).await?;
    s.apply(&vm("guest", storage)).await?;
    s.wait_running("guest").await?;
    let boot = in_guest(s, "cat /proc/sys/kernel/random/boot_id").await?;
    let node = s.enter_node(&storage.node).await?;
    let (mut outcome, mut former) = (Ok(()), String::new());
    for (during, victim) in TABLE {
        let (uid, (program, phase)) = (launcher_uid(s).await?, during.held());
        let row = async {
            let cgroup = if program == "virt-handler" { "" } else { uid.as_str() };
            node.run(&signal(program, cgroup, "STOP")).await.with_context(|| format!("stop {program}"))?;
            s.virt(&["memory-dump", "get", "guest", &format!("--claim-name={NAME}")]).await?;
            let is_held = |vmi: &Value| entry(vmi)["phase"] == phase;
            s.wait("vmi", "guest", &format!("show the volume as {phase}"), MINUTES, is_held).await?;
            kill(s, &node, victim, &uid).await?;
            let held = is_held(&s.get("vmi", "guest").await?);
            // A killed process does not hold the dump any more.
            let was_holder = matches!((program, victim), ("virt-handler", VirtHandler) | ("libvirtd", Libvirtd));
            eprintln!("{during:?}: killed {victim:?}, the dump is {}", if held { "held" } else { "under way" });
            ensure!(held || was_holder, "the kill missed");
            if !was_holder {
                node.run(&signal(program, cgroup, "CONT")).await.with_context(|| format!("continue {program}"))?;
            }
            let is_done =
                |vm: &Value| request(vm)["phase"] == "Completed" && request(vm)["fileName"] != former.as_str();
            let vm = s.wait("vm", "guest", "have a memory dump", MINUTES, is_done).await?;
            request(&vm)["fileName"].as_str().map(str::to_owned).context("a dump without a file")
        };
        match row.await.with_context(|| format!("{victim:?} killed during {during:?}")) {
            Ok(file) => former = file,
            Err(error) => {
                outcome = Err(error);
                break;
            }
        }
    }
    // A process that a failed row has stopped.
    let uid = launcher_uid(s).await?;
    for (program, cgroup) in [("virt-handler", ""), ("libvirtd", uid.as_str())] {
        node.run(&format!("{}; true", signal(program, cgroup, "CONT"))).await?;
    }
    node.leave().await?;
    outcome?;
    let now = in_guest(s, "cat /proc/sys/kernel/random/boot_id").await?;
    ensure!(now == boot, "the guest was restarted: {boot} {now}");
    Ok(())
}

fn entry(vmi: &Value) -> &Value {
    let entries = vmi["status"]["volumeStatus"].as_array();
    entries.into_iter().flatten().find(|entry| entry["name"] == NAME).unwrap_or(&Value::Null)
}
