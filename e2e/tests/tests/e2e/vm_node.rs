//! Stories on the node in a VM, which has systemd, cgroup v2 and a distribution's kernel: `make node-test`. Each prints the
//! cgroup files of the launcher's container, so that its log shows on which version it ran.

use std::{collections::BTreeMap, time::Duration};

use anyhow::{Context, Result, ensure};
use ferrovirt_e2e_tests::{
    Console, Story, is_true, skip,
    storage::{Backing, Storage, delete_vmis_after, on_host},
    story_alone,
};
use kube::{
    ResourceExt,
    api::{ListParams, Patch, PatchParams},
};
use serde_json::{Value, json};

use crate::{
    hotplug::{HELPERS, run, wait_phase},
    live_resize, manifests,
    moves::{self, CHANGE_MEMORY, begin, slow, with_policy, with_spec},
    virt_handlers,
    witness::Witness,
};

const MINUTES: Duration = Duration::from_secs(120);
/// The same for waits of this file, which `STORY_PATIENCE` does not multiply.
const MANY_MINUTES: Duration = Duration::from_secs(480);
/// Files of a container's cgroup that the stories print. containerd limits huge pages of no container by default, kubelet those of
/// the pod.
const FILES: &str = "memory.max memory.current cpu.max cpu.weight cpuset.cpus.effective pids.max \
                     hugetlb.2MB.max hugetlb.2MB.current ../hugetlb.2MB.max";

/// Returns name and host name of the node.
async fn node(s: &Story) -> Result<(String, String)> {
    let (name, hostname) = s.one_node().await?;
    ensure!(name == "node-vm", "the stories of the node in a VM run on {name}: use `make node-test`");
    Ok((name, hostname))
}

/// Prints and returns the files of the cgroup of the launcher's container `compute`, as lines `FILE VALUE`. Fails on another
/// version of cgroups than 2.
async fn cgroup(s: &Story, vmi: &str) -> Result<String> {
    let (node, _) = node(s).await?;
    let script = format!(
        "set -e; {} stat -f /sys/fs/cgroup; stat -f -c %T /sys/fs/cgroup; cd $c; echo cgroup $c; \
         for f in {FILES}; do echo $f $(cat $f); done",
        find_cgroup(s, vmi).await?
    );
    let files = on_host(s, &node, &script).await?;
    eprintln!("{files}");
    ensure!(files.lines().any(|line| line == "cgroup2fs"), "no cgroup v2: {files}");
    Ok(files)
}

/// Returns shell commands that set `c` to the cgroup of the container `compute` and `id` to the container's ID.
async fn find_cgroup(s: &Story, vmi: &str) -> Result<String> {
    let pod = s.launcher_pod(vmi).await?;
    let name = pod["metadata"]["name"].as_str().context("pod without name")?;
    // The guest can run before kubelet shows the container.
    let pod = s.wait("Pod", name, "show its container", MINUTES, |pod| container_id(pod).is_some()).await?;
    let id = container_id(&pod).context("no ID")?;
    Ok(format!("id={id}; c=$(find /sys/fs/cgroup/kubepods.slice -type d -name \"cri-containerd-$id.scope\");"))
}

/// Returns the ID of the container `compute` of a pod.
fn container_id(pod: &Value) -> Option<&str> {
    let statuses = pod["status"]["containerStatuses"].as_array()?;
    let compute = statuses.iter().find(|status| status["name"] == "compute")?;
    compute["containerID"].as_str()?.split("://").nth(1)
}

/// Returns the value of a file of [`cgroup`].
fn value<'a>(files: &'a str, file: &str) -> Result<&'a str> {
    let mut lines = files.lines().filter_map(|line| line.split_once(' '));
    lines.find(|(name, _)| *name == file).map(|(_, value)| value.trim()).with_context(|| format!("no {file}: {files}"))
}

async fn logged_in(s: &Story) -> Result<Console> {
    let mut console = s.console("box")?;
    console.login("root", "ferrovirt").await?;
    Ok(console)
}

fn is_paused(vmi: &Value) -> bool {
    live_resize::condition(vmi, "Paused").is_some()
}

#[test]
#[ignore = "needs the node in a VM: make node-test"]
fn guest_starts_and_pauses_and_stops() {
    story_alone("vm-start", async |s| {
        let (_, hostname) = node(s).await?;
        s.apply(&manifests::kernel_vm_on(&hostname, "box")).await?;
        s.wait_running("box").await?;
        let mut console = logged_in(s).await?;
        let said = run(&mut console, "uname -s").await?;
        ensure!(said == "Linux", "{said}");
        let files = cgroup(s, "box").await?;
        ensure!(value(&files, "memory.current")?.parse::<u64>()? > 64 << 20, "{files}");
        s.virt(&["pause", "vmi", "box"]).await?;
        s.wait("vmi", "box", "be paused", MINUTES, is_paused).await?;
        s.virt(&["unpause", "vmi", "box"]).await?;
        s.wait("vmi", "box", "go on", MINUTES, |vmi| !is_paused(vmi)).await?;
        run(&mut console, "true").await?;
        console.leave().await?;
        s.virt(&["stop", "box"]).await?;
        s.wait_gone("vmi", "box", MINUTES).await
    });
}

#[test]
#[ignore = "needs the node in a VM: make node-test"]
fn volumes_are_plugged_while_runtime_and_systemd_rewrite_device_rules() {
    story_alone("vm-hotplug", async |s| {
        let block = Storage::make(s, "block", Backing::Device).await?;
        let body = async |_: &Storage| {
            let files = Storage::make(s, "files", Backing::Directory).await?;
            files.lend(s, async |files: &Storage| plugged(s, files).await).await
        };
        block.lend(s, body).await
    });
}

async fn plugged(s: &Story, files: &Storage) -> Result<()> {
    let (node, hostname) = node(s).await?;
    let image = format!("truncate -s 8M {0}/disk.img && chown 107:107 {0}/disk.img", files.directory);
    on_host(s, &node, &image).await?;
    s.apply(&manifests::kernel_vm_on(&hostname, "box")).await?;
    s.wait_running("box").await?;
    let mut console = logged_in(s).await?;
    run(&mut console, HELPERS).await?;
    cgroup(s, "box").await?;
    for round in 0..2 {
        s.virt(&["addvolume", "box", "--volume-name=block", "--serial=BLOCK"]).await?;
        wait_phase(s, "block", "Ready").await?;
        run(&mut console, "comes BLOCK").await?;
        rewrite_device_program(s, &node).await?;
        run(&mut console, &format!("echo kept-{round} | dd of=$(disk BLOCK) bs=512 conv=sync,fsync")).await?;
        s.virt(&["addvolume", "box", "--volume-name=files", "--serial=FILES"]).await?;
        wait_phase(s, "files", "Ready").await?;
        run(&mut console, "comes FILES").await?;
        let kept = run(&mut console, "dd if=$(disk BLOCK) bs=512 count=1 2>/dev/null | tr -d '\\000'").await?;
        ensure!(kept == format!("kept-{round}"), "{kept:?}");
        for (volume, serial) in [("block", "BLOCK"), ("files", "FILES")] {
            s.virt(&["removevolume", "box", &format!("--volume-name={volume}")]).await?;
            run(&mut console, &format!("goes {serial}")).await?;
            let gone = |vmi: &Value| !vmi["status"]["volumeStatus"].to_string().contains(volume);
            s.wait("vmi", "box", "lose the volume", MINUTES, gone).await?;
        }
        rewrite_device_program(s, &node).await?;
    }
    console.leave().await
}

/// Lets container runtime and systemd write the device program of the container anew, without the grants of virt-handler.
async fn rewrite_device_program(s: &Story, node: &str) -> Result<()> {
    let find = find_cgroup(s, "box").await?;
    let update = "runc --root /run/containerd/runc/k8s.io update --cpu-share 200 $id";
    on_host(s, node, &format!("set -e; {find} {update}; systemctl daemon-reload")).await.map(drop)
}

/// Returns true if processes of the container can open the plugged device.
async fn opens(s: &Story, node: &str) -> Result<bool> {
    let find = find_cgroup(s, "box").await?;
    let open = "p=$(head -n 1 $c/cgroup.procs); echo $$ > $c/cgroup.procs; \
         dd if=/proc/$p/root/run/kubevirt/hotplug-disks/block of=/dev/null bs=512 count=1 2>&1 || true";
    let said = on_host(s, node, &format!("{find} {open}")).await?;
    ensure!(said.contains("copied") || said.contains("Operation not permitted"), "{said}");
    Ok(said.contains("copied"))
}

#[test]
#[ignore = "needs the node in a VM: make node-test"]
fn plugged_disk_is_granted_again_after_a_rewrite_of_device_rules() {
    story_alone("vm-grants", async |s| {
        let block = Storage::make(s, "block", Backing::Device).await?;
        block.lend(s, async |_: &Storage| granted_again(s).await).await
    });
}

async fn granted_again(s: &Story) -> Result<()> {
    let (node, hostname) = node(s).await?;
    s.apply(&manifests::kernel_vm_on(&hostname, "box")).await?;
    s.wait_running("box").await?;
    cgroup(s, "box").await?;
    s.virt(&["addvolume", "box", "--volume-name=block", "--serial=BLOCK"]).await?;
    wait_phase(s, "block", "Ready").await?;
    ensure!(opens(s, &node).await?, "the launcher's container may not open its device");
    rewrite_device_program(s, &node).await?;
    let deadline = tokio::time::Instant::now() + MANY_MINUTES;
    while !opens(s, &node).await? {
        ensure!(tokio::time::Instant::now() < deadline, "virt-handler does not grant the device again");
        tokio::time::sleep(Duration::from_secs(5)).await;
    }
    Ok(())
}

#[test]
#[ignore = "needs the node in a VM: make node-test"]
fn memory_and_processors_change_in_the_cgroup() {
    story_alone("vm-resize", async |s| {
        node(s).await?;
        let limits = "resources: {limits: {memory: 2Gi, cpu: 500m}}\n        firmware:";
        let vm = live_resize::vm("box", "sockets: 1, maxSockets: 2", ", maxGuest: 2Gi").replace("firmware:", limits);
        s.apply(&vm).await?;
        s.wait_running("box").await?;
        let mut console = logged_in(s).await?;
        live_resize::run(&mut console, live_resize::READY).await?;
        let before = cgroup(s, "box").await?;
        s.virt(&["set", "memory", "box", "--guest=1536Mi", "--wait"]).await?;
        live_resize::run(&mut console, &live_resize::memory_between(1300, 1536)).await?;
        // Under KVM, Linux uses the second processor.
        s.virt(&["set", "cpu", "box", "--sockets=2", "--wait"]).await?;
        let online = "cd /sys/devices/system/cpu; for i in $(seq 40); do [ -e cpu1/online ] && break; sleep 1; done; \
                      echo 1 > cpu1/online; nproc";
        ensure!(live_resize::run(&mut console, online).await? == "2", "the guest has one processor");
        let grown = cgroup(s, "box").await?;
        s.virt(&["set", "memory", "box", "--guest=1Gi", "--wait"]).await?;
        live_resize::run(&mut console, &live_resize::memory_between(800, 1024)).await?;
        console.leave().await?;
        let is_small = |vmi: &Value| vmi["status"]["memory"]["guestCurrent"] == "1Gi";
        s.wait("vmi", "box", "have 1Gi", MINUTES, is_small).await?;
        let number = |files: &str, file: &str| -> Result<u64> {
            Ok(value(files, file)?.split_whitespace().next().unwrap_or_default().parse()?)
        };
        for file in ["memory.max", "cpu.max", "cpu.weight"] {
            ensure!(number(&grown, file)? > number(&before, file)?, "{file} did not grow:\n{before}{grown}");
        }
        let deadline = tokio::time::Instant::now() + MANY_MINUTES;
        while number(&cgroup(s, "box").await?, "memory.max")? >= number(&grown, "memory.max")? {
            ensure!(tokio::time::Instant::now() < deadline, "memory.max does not shrink");
            tokio::time::sleep(Duration::from_secs(5)).await;
        }
        Ok(())
    });
}

#[test]
#[ignore = "needs the node in a VM: make node-test"]
fn guest_outlives_virt_handler_kubelet_and_containerd() {
    story_alone("vm-restarts", async |s| {
        let (node, hostname) = node(s).await?;
        s.apply(&manifests::kernel_vm_on(&hostname, "box")).await?;
        s.wait_running("box").await?;
        let mut console = logged_in(s).await?;
        let boot = run(&mut console, "cat /proc/sys/kernel/random/boot_id").await?;
        console.leave().await?;
        cgroup(s, "box").await?;
        virt_handlers::replace(s).await?;
        virt_handlers::serves(s, "box").await?;
        for unit in ["kubelet", "containerd"] {
            // Later: the end of the command comes through both.
            on_host(s, &node, &format!("systemd-run --quiet --on-active=3 systemctl restart {unit}")).await?;
            tokio::time::sleep(Duration::from_secs(20)).await;
            virt_handlers::serves(s, "box").await?;
        }
        let mut console = s.console("box")?;
        console.login_or_shell("root", "ferrovirt").await?;
        ensure!(run(&mut console, "cat /proc/sys/kernel/random/boot_id").await? == boot, "the guest was restarted");
        console.leave().await?;
        cgroup(s, "box").await.map(drop)
    });
}

#[test]
#[ignore = "needs the node in a VM: make node-test"]
fn vm_is_started_again_after_its_container_was_out_of_memory() {
    story_alone("vm-oom", async |s| {
        let (node, hostname) = node(s).await?;
        s.apply(&manifests::kernel_vm_on(&hostname, "box")).await?;
        let uid = s.wait_running("box").await?["metadata"]["uid"].clone();
        logged_in(s).await?.leave().await?;
        cgroup(s, "box").await?;
        let find = find_cgroup(s, "box").await?;
        // The runtime removes the cgroup of the container as soon as its processes are gone. That of the pod counts the same events.
        let kill = "p=${c%/*}; echo 40M > $c/memory.max; \
                    for i in $(seq 30); do grep -q \"oom_kill [1-9]\" $p/memory.events && break; sleep 0.1; done; \
                    cat $p/memory.events";
        let events = on_host(s, &node, &format!("{find} {kill}")).await?;
        eprintln!("{events}");
        ensure!(!events.contains("oom_kill 0"), "{events}");
        let is_new = |vmi: &Value| vmi["metadata"]["uid"] != uid && vmi["status"]["phase"] == "Running";
        s.wait("vmi", "box", "be started again", MINUTES, is_new).await.map(drop)
    });
}

#[test]
#[ignore = "needs the node in a VM: make node-test"]
fn guest_has_its_memory_in_huge_pages() {
    story_alone("vm-huge-pages", async |s| {
        let (node, hostname) = node(s).await?;
        let memory = "memory: {guest: 128Mi, hugepages: {pageSize: 2Mi}}";
        s.apply(&manifests::kernel_vm_on(&hostname, "box").replace("memory: {guest: 128Mi}", memory)).await?;
        s.wait_running("box").await?;
        logged_in(s).await?.leave().await?;
        let files = cgroup(s, "box").await?;
        eprintln!("{}", on_host(s, &node, "grep -i huge /proc/meminfo").await?);
        ensure!(value(&files, "../hugetlb.2MB.max")?.parse::<u64>()? == 128 << 20, "{files}");
        ensure!(value(&files, "hugetlb.2MB.current")?.parse::<u64>()? > 0, "the guest has no huge page: {files}");
        Ok(())
    });
}

/// Prefixes of a node's labels that describe the processor of its guests under KVM, and of those that other nodes need to take them.
const PROCESSOR: [(&str, &str); 3] = [
    ("host-model-cpu.node.kubevirt.io/", "cpu-model-migration.node.kubevirt.io/"),
    ("host-model-required-features.node.kubevirt.io/", "cpu-feature.node.kubevirt.io/"),
    ("cpu-vendor.node.kubevirt.io/", "cpu-vendor.node.kubevirt.io/"),
];

/// Returns true if a node with these labels can take guests under KVM of the node with the labels `source`.
fn takes_processor(labels: &BTreeMap<String, String>, source: &BTreeMap<String, String>) -> bool {
    let needed = |key: &String| {
        PROCESSOR.iter().find_map(|(own, offered)| Some(format!("{offered}{}", key.strip_prefix(*own)?)))
    };
    source.keys().filter_map(needed).all(|key| labels.contains_key(&key))
}

#[test]
#[ignore = "needs the node in a VM: make node-test"]
fn guest_under_kvm_stays_where_no_other_node_has_its_processor() {
    story_alone("vm-stays", async |s| {
        let (node, hostname) = node(s).await?;
        let nodes = s.cluster_api("Node").list(&ListParams::default()).await?.items;
        let source = nodes.iter().find(|one| one.name_any() == node).context("the node is gone")?.labels();
        ensure!(source.keys().any(|key| key.starts_with(PROCESSOR[0].0)), "the node shows no processor: {source:?}");
        if nodes.iter().any(|other| other.name_any() != node && takes_processor(other.labels(), source)) {
            return skip("a node with a processor that no other node offers");
        }
        let vm =
            with_spec(&moves::vm("box", "Always"), &format!("nodeSelector: {{kubernetes.io/hostname: {hostname}}}"));
        s.apply(&vm).await?;
        s.wait_running("box").await?;
        let mut guest = logged_in(s).await?;
        let witness = Witness::start(&mut guest).await?;
        guest.leave().await?;
        cgroup(s, "box").await?;
        let_leave(s).await?;
        s.wait("vmi", "box", "be migratable", MINUTES, |vmi| is_true(vmi, "LiveMigratable")).await?;
        let migration = begin(s, "box").await?;
        let names_processor = |vmim: &Value| {
            live_resize::condition(vmim, "migrationWaiting").is_some_and(|waiting| {
                let message = waiting["message"].as_str().unwrap_or_default();
                waiting["reason"] == "TargetPodUnschedulable" && message.contains("no other node offers ")
            })
        };
        let vmim = s.wait("vmim", &migration, "name what no other node offers", MINUTES, names_processor).await?;
        eprintln!("{}", vmim["status"]["conditions"]);
        s.delete("vmim", &migration).await?;
        s.wait_gone("vmim", &migration, MINUTES).await?;
        let mut guest = moves::console(s, "box").await?;
        Witness::goes_on(&mut guest, &witness).await?;
        guest.leave().await?;
        ensure!(s.node_of("box").await? == node, "the VMI has left the node");
        Ok(())
    });
}

/// Sets software emulation for VMIs that start from now on.
async fn emulate(s: &Story, on: bool) -> Result<()> {
    let patch = json!({"spec": {"configuration": {"developerConfiguration": {"useEmulation": on}}}});
    s.installation_api("KubeVirt").patch("kubevirt", &PatchParams::default(), &Patch::Merge(patch)).await?;
    // Processes follow the configuration within two seconds.
    tokio::time::sleep(Duration::from_secs(3)).await;
    Ok(())
}

/// Runs a body whose VMIs are emulated, and deletes them.
async fn emulated(s: &Story, body: impl AsyncFnOnce(&Story) -> Result<()>) -> Result<()> {
    emulate(s, true).await?;
    let outcome = body(s).await;
    let gone = delete_vmis_after(s, &outcome).await;
    emulate(s, false).await?;
    outcome.and(gone)
}

/// Removes the node selector of the VM and its VMI, which may move then.
async fn let_leave(s: &Story) -> Result<()> {
    let anywhere = json!({"spec": {"template": {"spec": {"nodeSelector": null}}}});
    s.api("vm").patch("box", &PatchParams::default(), &Patch::Merge(&anywhere)).await?;
    s.wait("vmi", "box", "take the node selector over", MINUTES, |vmi| vmi["spec"]["nodeSelector"].is_null())
        .await
        .map(drop)
}

/// Begins a migration to a node, in clusters with any number of nodes.
async fn migrate_to(s: &Story, node: &str) -> Result<()> {
    let selector = format!("--added-node-selector=kubernetes.io/hostname={node}");
    s.virt(&["migrate", "box", &selector]).await.map(drop)
}

/// Starts a VM that may move on the other node: emulated there, the guest starts in seconds.
async fn start_on_other_node(s: &Story) -> Result<Console> {
    s.apply(&with_spec(&moves::vm("box", "Always"), "nodeSelector: {kubernetes.io/hostname: node-1}")).await?;
    s.wait_running("box").await?;
    let_leave(s).await?;
    logged_in(s).await
}

#[test]
#[ignore = "needs the node in a VM: make node-test"]
fn vm_moves_between_nodes_of_both_cgroup_versions() {
    story_alone("vm-moves", async |s| emulated(s, async |s: &Story| moved(s).await).await);
}

async fn moved(s: &Story) -> Result<()> {
    let (node, _) = node(s).await?;
    let mut console = start_on_other_node(s).await?;
    let boot = run(&mut console, "cat /proc/sys/kernel/random/boot_id").await?;
    console.leave().await?;
    for target in [node.as_str(), "node-1"] {
        migrate_to(s, target).await?;
        s.wait("vmi", "box", &format!("be on {target}"), MINUTES, |vmi| {
            vmi["status"]["nodeName"] == target && vmi["status"]["migrationState"]["completed"] == true
        })
        .await?;
        if target == node {
            cgroup(s, "box").await?;
        }
        let mut console = s.console("box")?;
        console.login_or_shell("root", "ferrovirt").await?;
        let now = run(&mut console, "cat /proc/sys/kernel/random/boot_id").await?;
        ensure!(now == boot, "the guest was restarted");
        console.leave().await?;
    }
    Ok(())
}

#[test]
#[ignore = "needs the node in a VM: make node-test"]
fn busy_guest_arrives_by_post_copy() {
    story_alone("vm-post-copy", async |s| emulated(s, async |s: &Story| post_copied(s).await).await);
}

async fn post_copied(s: &Story) -> Result<()> {
    let (node, _) = node(s).await?;
    let mut guest = start_on_other_node(s).await?;
    let witness = Witness::start(&mut guest).await?;
    run(&mut guest, CHANGE_MEMORY).await?;
    guest.leave().await?;
    // Until the first job is aborted, the slow target has started QEMU and part of the memory was copied.
    with_policy(s, slow(40, json!({"allowPostCopy": true})), async |_| {
        migrate_to(s, &node).await?;
        let ended = |vmi: &Value| vmi["status"]["migrationState"]["completed"] == true;
        let vmi = s.wait("vmi", "box", "have moved", MINUTES, ended).await?;
        let state = &vmi["status"]["migrationState"];
        ensure!(state["mode"] == "PostCopy" && state["failed"] != true, "{state}");
        s.wait("vmi", "box", "be here", MINUTES, |vmi| vmi["status"]["nodeName"] == node.as_str()).await.map(drop)
    })
    .await?;
    cgroup(s, "box").await?;
    let mut guest = moves::console(s, "box").await?;
    Witness::goes_on(&mut guest, &witness).await?;
    guest.leave().await
}
