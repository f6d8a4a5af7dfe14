//! The world of a run: a namespace of the test cluster.

use std::collections::BTreeMap;

use anyhow::{Context, Result, ensure};
use ferrovirt_e2e_tests::Story;
use serde_json::{Value, json};
use tokio::time::{Duration, Instant, sleep};

use super::{
    actions::{Action, Guest, Kill, Model, Step, Vm},
    play::{Seen, SeenVm, World, running, violations},
};
use crate::{
    data_volumes::{condition, kernel_vm, storage},
    host,
    hotplug::{HELPERS, run},
};

/// Time for an action, under emulation and while components are started again.
const MINUTES: Duration = Duration::from_secs(240);
/// Bytes of the number on a disk.
const LENGTH: usize = 15;

const SNAPSHOT: &str = "VirtualMachineSnapshot";
const RESTORE: &str = "VirtualMachineRestore";
const CLONE: &str = "VirtualMachineClone";

pub(super) struct Cluster<'a> {
    story: &'a Story,
    /// Number of steps, which names restores and clones.
    steps: u32,
}

/// Returns the name of an object.
fn name(object: &Value) -> String {
    object["metadata"]["name"].as_str().unwrap_or_default().to_owned()
}

/// Returns true if the launcher pod or VMI is not final.
fn is_live(object: &Value) -> bool {
    object["status"]["phase"] != "Succeeded" && object["status"]["phase"] != "Failed"
}

impl World for Cluster<'_> {
    async fn act(&mut self, step: Step, before: &Model, after: &Model) -> Result<()> {
        self.steps += 1;
        eprintln!("{} {}: {step}", self.story.namespace, self.steps);
        let Some(kill) = step.kill else { return self.perform(step.action, before, after).await };
        // At another moment of the action each time.
        let pause = Duration::from_millis(u64::from(self.steps * 700 % 4000));
        let killed = async {
            sleep(pause).await;
            self.kill(kill).await.with_context(|| format!("kill {kill:?}"))
        };
        let (performed, killed) = futures::join!(self.perform(step.action, before, after), killed);
        performed?;
        killed?;
        self.story.components_are_ready().await
    }

    async fn look(&mut self, model: &Model) -> Result<Seen> {
        let deadline = Instant::now() + MINUTES;
        let mut seen = loop {
            let seen = self.objects().await?;
            if violations(model, &seen).is_empty() || Instant::now() > deadline {
                break seen;
            }
            sleep(Duration::from_millis(500)).await;
        };
        for vm in running(model) {
            if let Some(seen) = seen.vms.get_mut(vm).filter(|seen| seen.guests == 1) {
                seen.data = Some(self.read(vm).await.with_context(|| format!("read the disk of VM {vm}"))?);
            }
        }
        Ok(seen)
    }
}

impl<'a> Cluster<'a> {
    pub(super) fn new(story: &'a Story) -> Self {
        Self { story, steps: 0 }
    }

    async fn kill(&self, kill: Kill) -> Result<()> {
        let s = self.story;
        match kill {
            Kill::Leader => host::kill_leader(s).await,
            Kill::VirtHandler => host::kill_handlers(s).await,
            Kill::Worker(vm) => host::kill("virt-launcher", &s.launcher_pod(vm).await?),
            Kill::Libvirtd(vm) => host::kill("libvirtd", &s.launcher_pod(vm).await?),
        }
    }

    async fn perform(&self, action: Action, before: &Model, after: &Model) -> Result<()> {
        let s = self.story;
        match action {
            Action::Create { vm, strategy } => {
                let disk = format!("source: {{blank: {{}}}}, storage: {}", storage("csi", "Block", 16));
                s.apply(&kernel_vm(vm, &format!("{strategy:?}"), &disk)).await
            }
            Action::Start(vm) => s.virt(&["start", vm]).await.map(drop),
            Action::Stop(vm) => s.virt(&["stop", vm]).await.map(drop),
            Action::Restart(vm) => {
                let former = s.get("vmi", vm).await?;
                s.virt(&["restart", vm]).await?;
                self.wait_another(vm, &former).await
            }
            Action::Write(vm) => {
                let number = after.vms.get(vm).context("no such VM")?.data;
                self.write(vm, number).await
            }
            Action::PowerOff(vm) | Action::Crash(vm) => {
                let former = s.get("vmi", vm).await?;
                match action {
                    Action::Crash(_) => host::kill("qemu-system-x86_64", &s.launcher_pod(vm).await?)?,
                    _ => self.power_off(vm, &former).await?,
                }
                match after.guest(vm) {
                    Some(Guest::Runs) => self.wait_another(vm, &former).await,
                    _ => s.wait("vmi", vm, "end", MINUTES, |vmi| !is_live(vmi)).await.map(drop),
                }
            }
            Action::DeleteVm(vm) => {
                s.delete("vm", vm).await?;
                s.wait_gone("vm", vm, MINUTES).await
            }
            Action::DeleteSnapshot(snapshot) => {
                s.delete(SNAPSHOT, snapshot).await?;
                s.wait_gone(SNAPSHOT, snapshot, MINUTES).await
            }
            Action::Snapshot { .. } | Action::Restore { .. } | Action::RestoreTo { .. } => {
                self.copy(action, before).await
            }
            Action::Clone { .. } | Action::CloneSnapshot { .. } => self.clone_vm(action).await,
        }
    }

    /// Takes or restores a snapshot.
    async fn copy(&self, action: Action, before: &Model) -> Result<()> {
        let reference = |vm: Vm| json!({"apiGroup": "kubevirt.io", "kind": "VirtualMachine", "name": vm});
        let (kind, name, spec) = match action {
            Action::Snapshot { vm, snapshot } => (SNAPSHOT, snapshot.to_owned(), json!({"source": reference(vm)})),
            Action::Restore { snapshot, in_place } => {
                let vm = before.snapshots.get(snapshot).context("no such snapshot")?.vm;
                let policy = if in_place { "InPlace" } else { "RandomizeNames" };
                let spec = json!({
                    "target": reference(vm), "virtualMachineSnapshotName": snapshot,
                    "targetReadinessPolicy": "StopTarget", "volumeRestorePolicy": policy,
                });
                (RESTORE, format!("r-{}", self.steps), spec)
            }
            Action::RestoreTo { snapshot, vm } => {
                let spec = json!({"target": reference(vm), "virtualMachineSnapshotName": snapshot});
                (RESTORE, format!("r-{}", self.steps), spec)
            }
            _ => return Ok(()),
        };
        let is_done = |object: &Value| object["status"]["readyToUse"] == true || object["status"]["complete"] == true;
        self.make("snapshot.kubevirt.io/v1beta1", kind, &name, spec, is_done).await
    }

    async fn clone_vm(&self, action: Action) -> Result<()> {
        let (source, to) = match action {
            Action::Clone { vm, to } => (json!({"apiGroup": "kubevirt.io", "kind": "VirtualMachine", "name": vm}), to),
            Action::CloneSnapshot { snapshot, to } => {
                (json!({"apiGroup": "snapshot.kubevirt.io", "kind": SNAPSHOT, "name": snapshot}), to)
            }
            _ => return Ok(()),
        };
        let target = json!({"apiGroup": "kubevirt.io", "kind": "VirtualMachine", "name": to});
        let (name, spec) = (format!("c-{}", self.steps), json!({"source": source, "target": target}));
        let is_done = |clone: &Value| clone["status"]["phase"] == "Succeeded";
        self.make("clone.kubevirt.io/v1beta1", CLONE, &name, spec, is_done).await
    }

    /// Creates an object of an operation and waits until this has succeeded.
    async fn make(
        &self,
        version: &str,
        kind: &str,
        name: &str,
        spec: Value,
        is_done: impl Fn(&Value) -> bool,
    ) -> Result<()> {
        let s = self.story;
        let object = json!({"apiVersion": version, "kind": kind, "metadata": {"name": name}, "spec": spec});
        // virt-api notices the objects that it refers to with a delay.
        s.apply_when_accepted(&object.to_string()).await?;
        let has_failed =
            |object: &Value| condition(object, "Failure")["status"] == "True" || object["status"]["phase"] == "Failed";
        let is_final = |object: &Value| is_done(object) || has_failed(object);
        let object = s.wait(kind, name, "end", MINUTES, is_final).await?;
        ensure!(is_done(&object), "{kind} {name} has failed: {}", object["status"]);
        Ok(())
    }

    async fn wait_another(&self, vm: Vm, former: &Value) -> Result<()> {
        let uid = &former["metadata"]["uid"];
        let is_new = |vmi: &Value| vmi["metadata"]["uid"] != *uid && vmi["status"]["phase"] == "Running";
        self.story.wait("vmi", vm, "be started again", MINUTES, is_new).await.map(drop)
    }

    /// Runs a command in the guest until it succeeds: a killed virt-handler ends consoles.
    async fn in_guest(&self, vm: Vm, command: &str) -> Result<String> {
        let deadline = Instant::now() + MINUTES;
        loop {
            let output = async {
                let mut console = self.story.reopen_console(vm, "root", "ferrovirt").await?;
                run(&mut console, HELPERS).await?;
                let output = run(&mut console, command).await?;
                console.leave().await?;
                Ok::<_, anyhow::Error>(output)
            };
            match output.await {
                Ok(output) => return Ok(output),
                Err(error) => ensure!(Instant::now() < deadline, "{command:?} fails in the guest: {error:#}"),
            }
            sleep(Duration::from_secs(1)).await;
        }
    }

    async fn write(&self, vm: Vm, number: u32) -> Result<()> {
        let write = format!("printf '%-{LENGTH}s' {number} | dd of=$(disk DATA) conv=notrunc,fsync 2>/dev/null");
        self.in_guest(vm, &write).await.map(drop)
    }

    async fn read(&self, vm: Vm) -> Result<u32> {
        let seen = self.in_guest(vm, &format!("head -c {LENGTH} $(disk DATA) | tr -d ' \\000'")).await?;
        // An empty disk has no number.
        if seen.is_empty() { Ok(0) } else { seen.parse().with_context(|| format!("its disk has {seen:?}")) }
    }

    /// Shuts the guest down.
    async fn power_off(&self, vm: Vm, former: &Value) -> Result<()> {
        let s = self.story;
        let deadline = Instant::now() + MINUTES;
        loop {
            if let Ok(mut console) = s.reopen_console(vm, "root", "ferrovirt").await {
                // The console ends with the guest.
                let _ = console.send("poweroff\n").await;
                let _ = console.wait_end(Duration::from_secs(20)).await;
            }
            let now = s.api("vmi").get_opt(vm).await?.map(serde_json::to_value).transpose()?;
            if now.is_none_or(|now| now["metadata"]["uid"] != former["metadata"]["uid"] || !is_live(&now)) {
                return Ok(());
            }
            ensure!(Instant::now() < deadline, "the guest of VM {vm} does not shut down");
        }
    }

    /// Returns what exists, without the numbers on disks.
    async fn objects(&self) -> Result<Seen> {
        let s = self.story;
        let mut seen = Seen::default();
        let (vms, vmis) = (s.list("vm", "").await?, s.list("vmi", "").await?);
        for vm in &vms {
            let guests = host::guests(s, &name(vm))?;
            seen.vms.insert(name(vm), shown(vm, guests));
        }
        for vmi in &vmis {
            let is_orphan = !seen.vms.contains_key(&name(vmi));
            if is_orphan || (is_live(vmi) && vmi["status"]["phase"] != "Running") {
                seen.wrong.push(format!("VMI {} is {}", name(vmi), vmi["status"]["phase"]));
            }
        }
        let pods = s.list("Pod", "kubevirt.io=virt-launcher").await?;
        let live: Vec<String> = pods.iter().filter(|pod| is_live(pod)).map(name).collect();
        let guests = vmis.iter().filter(|vmi| is_live(vmi)).count();
        if live.len() != guests {
            seen.wrong.push(format!("{guests} VMIs have launcher pods {live:?}"));
        }
        self.claims(&vms, &mut seen).await?;
        self.copies(&mut seen).await?;
        Ok(seen)
    }

    /// Compares claims, DataVolumes and volumes with those that the VMs name.
    async fn claims(&self, vms: &[Value], seen: &mut Seen) -> Result<()> {
        let s = self.story;
        let mut named = BTreeMap::new();
        for vm in vms {
            let volume = &vm["spec"]["template"]["spec"]["volumes"][0];
            let claim = volume["dataVolume"]["name"].as_str();
            let claim = claim.or_else(|| volume["persistentVolumeClaim"]["claimName"].as_str()).unwrap_or_default();
            if let Some(other) = named.insert(claim.to_owned(), name(vm)) {
                seen.wrong.push(format!("VMs {other} and {} have claim {claim}", name(vm)));
            }
        }
        let claims = s.list("PersistentVolumeClaim", "").await?;
        for (claim, vm) in &named {
            let found = claims.iter().find(|known| name(known) == *claim).map(|known| &known["status"]["phase"]);
            if found.is_none_or(|phase| phase != "Bound") {
                seen.wrong.push(format!("claim {claim} of VM {vm} is {found:?}"));
            }
        }
        for (kind, found) in [("claim", &claims), ("DataVolume", &s.list("DataVolume", "").await?)] {
            let orphans = found.iter().filter(|known| !named.contains_key(&name(known)));
            seen.wrong.extend(orphans.map(|known| format!("{kind} {} belongs to nobody", name(known))));
        }
        let volumes = s.cluster_api("PersistentVolume").list(&Default::default()).await?;
        let own = volumes.iter().filter(|volume| volume.data["spec"]["claimRef"]["namespace"] == s.namespace.as_str());
        let count = own.count();
        if count != claims.len() {
            seen.wrong.push(format!("{count} volumes for {} claims", claims.len()));
        }
        Ok(())
    }

    /// Compares contents and volume snapshots with the snapshots, and looks for operations that have not ended.
    async fn copies(&self, seen: &mut Seen) -> Result<()> {
        let s = self.story;
        let snapshots = s.list(SNAPSHOT, "").await?;
        for snapshot in &snapshots {
            if snapshot["status"]["readyToUse"] == true && snapshot["status"]["phase"] == "Succeeded" {
                seen.snapshots.insert(name(snapshot));
            } else {
                seen.wrong.push(format!("snapshot {} is {}", name(snapshot), snapshot["status"]));
            }
        }
        for kind in ["VirtualMachineSnapshotContent", "VolumeSnapshot"] {
            let found: Vec<String> = s.list(kind, "").await?.iter().map(name).collect();
            if found.len() != snapshots.len() {
                seen.wrong.push(format!("{} snapshots have {kind} {found:?}", snapshots.len()));
            }
        }
        for restore in s.list(RESTORE, "").await? {
            if restore["status"]["complete"] != true {
                seen.wrong.push(format!("restore {} is {}", name(&restore), restore["status"]));
            }
        }
        for clone in s.list(CLONE, "").await? {
            let status = &clone["status"];
            let is_clean = status["phase"] == "Succeeded" && status["snapshotName"].is_null();
            if !is_clean || !status["restoreName"].is_null() {
                seen.wrong.push(format!("clone {} is {status}", name(&clone)));
            }
        }
        Ok(())
    }
}

fn shown(vm: &Value, guests: usize) -> SeenVm {
    let status = &vm["status"];
    let fields = ["operation", "snapshotInProgress", "restoreInProgress"];
    let held = fields.into_iter().find(|field| !status[field].is_null());
    let held = held.map(|field| format!("{field} {}", status[field]));
    let finalizers = vm["metadata"]["finalizers"].to_string();
    let has_finalizer = finalizers.contains("snapshot-source-protection").then_some(finalizers);
    SeenVm {
        guests,
        strategy: vm["spec"]["runStrategy"].as_str().unwrap_or_default().to_owned(),
        holder: held.or(has_finalizer),
        data: None,
    }
}
