//! Backing of a guest's memory: huge pages, NUMA nodes, locked pages, and pages that guests share.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use ferrovirt_e2e_tests::{Story, TIMEOUT, skip, story_alone};
use kube::api::{Patch, PatchParams};
use serde_json::{Value, json};

use crate::{
    dedicated_cpus::{label, static_nodes},
    live_resize::{condition, run},
    moves::{self, MINUTES, console, migrate},
    witness::Witness,
};

const PAGE: &str = "hugepages-2Mi";
const KSM_LABEL: &str = "ferrovirt.test/ksm";

/// Returns a VM that can migrate, with this memory.
fn vm(name: &str, memory: &str) -> String {
    moves::vm(name, "Once").replace("memory: {guest: 128Mi}", memory)
}

fn mebibytes(amount: &Value) -> u64 {
    let text = amount.as_str().unwrap_or_default();
    let (number, unit) = text.split_at(text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len()));
    let number: u64 = number.parse().unwrap_or(0);
    match unit {
        "Gi" => number << 10,
        "Mi" => number,
        _ => number >> 20,
    }
}

/// Returns the nodes that take VMIs and offer this much memory in huge pages.
async fn nodes_with_pages(s: &Story, least: u64) -> Result<Vec<String>> {
    let mut found = Vec::new();
    for (node, _) in s.takers().await? {
        let object = s.cluster_api("Node").get(&node).await?;
        if mebibytes(&object.data["status"]["allocatable"][PAGE]) >= least {
            found.push(node);
        }
    }
    Ok(found)
}

/// Returns QEMU's mappings of the guest's memory in the VMI's pod, as the kernel shows them.
async fn mappings(s: &Story, vmi: &str) -> Result<String> {
    let pod = s.launcher_pod(vmi).await?;
    let uid = pod["metadata"]["uid"].as_str().context("pod without UID")?.replace('-', "[-_]");
    let script = format!(
        "for p in $(pidof qemu-system-x86_64); do grep -q 'pod{uid}' /proc/$p/cgroup || continue; \
         grep -A22 -E 'memfd:|hugepages' /proc/$p/smaps | grep -E 'memfd:|KernelPageSize|Private_Hugetlb|Shared_Hugetlb'; \
         grep 'Max locked memory' /proc/$p/limits; done"
    );
    s.on_node(&s.node_of(vmi).await?, &script).await
}

#[test]
fn guest_in_huge_pages_runs_and_moves() {
    story_alone("huge-pages", async |s| {
        let nodes = nodes_with_pages(s, 128).await?;
        if nodes.is_empty() {
            return skip("a node with 64 huge pages");
        }
        s.apply(&vm("box", "memory: {guest: 128Mi, hugepages: {pageSize: 2Mi}}")).await?;
        s.wait_running("box").await?;
        let pod = s.launcher_pod("box").await?;
        let containers = pod["spec"]["containers"].as_array().context("pod without containers")?;
        let resources = &containers.first().context("no container")?["resources"];
        ensure!(resources["requests"][PAGE] == "128Mi" && resources["limits"][PAGE] == "128Mi", "{resources}");
        let shown = mappings(s, "box").await?;
        ensure!(shown.contains("KernelPageSize:     2048 kB"), "the guest is not in huge pages: {shown}");
        let mut guest = console(s, "box").await?;
        run(&mut guest, "head -c 16777216 /dev/urandom >/mark && md5sum </mark >/sum").await?;
        if nodes.len() > 1 {
            let witness = Witness::start(&mut guest).await?;
            guest.leave().await?;
            migrate(s, "box").await?;
            let shown = mappings(s, "box").await?;
            ensure!(shown.contains("KernelPageSize:     2048 kB"), "the guest has left its huge pages: {shown}");
            guest = console(s, "box").await?;
            Witness::goes_on(&mut guest, &witness).await?;
            run(&mut guest, "[ \"$(md5sum </mark)\" = \"$(cat /sum)\" ]").await?;
        } else {
            skip("two nodes")?;
        }
        guest.leave().await?;
        // More pages than any node has.
        s.apply(&vm("large", "memory: {guest: 512Gi, hugepages: {pageSize: 2Mi}}")).await?;
        let unschedulable = |vm: &Value| vm["status"]["printableStatus"] == "ErrorUnschedulable";
        s.wait("vm", "large", "wait for a node with its huge pages", TIMEOUT, unschedulable).await?;
        let vmi = s.get("vmi", "large").await?;
        let shown = vmi["status"]["conditions"].to_string();
        ensure!(shown.contains("Insufficient hugepages-2Mi"), "the missing pages are not named: {shown}");
        for vm in ["box", "large"] {
            s.delete("vm", vm).await?;
            s.wait_gone("vmi", vm, MINUTES).await?;
        }
        Ok(())
    });
}

#[test]
fn guest_sees_the_numa_node_of_its_cpus() {
    story_alone("numa", async |s| {
        let mut nodes = nodes_with_pages(s, 128).await?;
        let pinning = static_nodes(s).await?;
        nodes.retain(|node| pinning.contains(node));
        if nodes.is_empty() {
            return skip("a node with huge pages and a static CPU manager");
        }
        // Without the gate no node has the label that the pod selects.
        gate(s, &json!(["CPUManager"])).await?;
        let result = sees_its_numa_node(s, &nodes).await;
        gate(s, &Value::Null).await?;
        result
    });
}

async fn sees_its_numa_node(s: &Story, nodes: &[String]) -> Result<()> {
    for node in nodes {
        label(s, node).await?;
    }
    let memory = "memory: {guest: 128Mi, hugepages: {pageSize: 2Mi}}\n        \
                  cpu: {cores: 1, dedicatedCpuPlacement: true, numa: {guestMappingPassthrough: {}}}";
    s.apply(&vm("box", memory)).await?;
    s.wait_running("box").await?;
    let pod = s.launcher_pod("box").await?;
    let profile = &pod["spec"]["securityContext"]["seccompProfile"]["localhostProfile"];
    ensure!(profile == "ferrovirt/numa.json", "the profile of the pod is {profile}");
    is_mapped(s).await?;
    let mut guest = console(s, "box").await?;
    let seen = run(&mut guest, "cat /sys/devices/system/node/online /sys/devices/system/node/node0/cpulist").await?;
    ensure!(seen.split_whitespace().collect::<Vec<_>>() == ["0", "0"], "the guest sees nodes and CPUs {seen}");
    if nodes.len() > 1 {
        let witness = Witness::start(&mut guest).await?;
        guest.leave().await?;
        migrate(s, "box").await?;
        is_mapped(s).await?;
        guest = console(s, "box").await?;
        Witness::goes_on(&mut guest, &witness).await?;
    }
    guest.leave().await?;
    s.delete("vm", "box").await?;
    s.wait_gone("vmi", "box", MINUTES).await
}

/// Checks that the guest has its memory in the node of its CPUs.
async fn is_mapped(s: &Story) -> Result<()> {
    let pod = s.launcher_pod("box").await?;
    let name = pod["metadata"]["name"].as_str().context("pod without name")?;
    let xml = s.exec_in(name, "compute", &["virsh", "dumpxml", "1"]).await?;
    // vCPUs that can be plugged in are named, too.
    for part in ["<memnode cellid='0' mode='strict' nodeset='0'/>", "<cell id='0' cpus='0-3'", "mode='immediate'"] {
        ensure!(xml.contains(part), "the domain has no {part}: {xml}");
    }
    Ok(())
}

#[test]
fn locked_memory_is_permitted_or_its_refusal_is_named() {
    story_alone("locked-memory", async |s| {
        let locked = "memory: {guest: 128Mi, reservedOverhead: {memLock: Required, addedOverhead: 16Mi}}";
        let message = s.refused(&vm("box", locked)).await?;
        ensure!(message.contains("Reserved overhead memlock feature gate is not enabled"), "{message}");
        gate(s, &json!(["ReservedOverheadMemlock"])).await?;
        let result = async {
            s.apply_when_accepted(&vm("box", locked)).await?;
            let named = |vmi: &Value| {
                let shown = condition(vmi, "Synchronized").and_then(|shown| shown["message"].as_str());
                shown.is_some_and(|text| text.contains("raise the limit of locked memory"))
            };
            let settled = |vmi: &Value| vmi["status"]["phase"] == "Running" || named(vmi);
            let vmi = s.wait("vmi", "box", "run or say why not", MINUTES, settled).await?;
            if named(&vmi) {
                // Containers that run the test cluster often lack the capability.
                eprintln!("virt-handler may not raise limits here");
            } else {
                let shown = mappings(s, "box").await?;
                let bytes = ((128_u64 + 16) << 20) + (2 << 30);
                ensure!(shown.contains(&bytes.to_string()), "QEMU may not lock {bytes} bytes: {shown}");
            }
            s.delete("vm", "box").await?;
            s.wait_gone("vmi", "box", MINUTES).await
        }
        .await;
        gate(s, &Value::Null).await?;
        result
    });
}

async fn gate(s: &Story, gates: &Value) -> Result<()> {
    configure(s, json!({"developerConfiguration": {"featureGates": gates}})).await
}

async fn configure(s: &Story, configuration: Value) -> Result<()> {
    let patch = Patch::Merge(json!({"spec": {"configuration": configuration}}));
    let installation = s.installation_api("KubeVirt");
    installation.patch("kubevirt", &PatchParams::default(), &patch).await.context("configure the installation")?;
    Ok(())
}

#[test]
fn nodes_merge_equal_pages_while_the_configuration_selects_them() {
    story_alone("same-pages", async |s| {
        let (node, _) = s.one_node().await?;
        if s.on_node(&node, "cat /sys/kernel/mm/ksm/run 2>/dev/null || echo none").await?.trim() != "0" {
            return skip("a node whose kernel can merge pages, and does not");
        }
        // Memory always counts as scarce.
        mark(s, &node, json!("true"), json!("1.0")).await?;
        let selector = json!({"nodeLabelSelector": {"matchLabels": {KSM_LABEL: "true"}}});
        let result = async {
            configure(s, json!({"ksmConfiguration": selector})).await?;
            shown(s, &node, "true", "true").await?;
            let running = s.on_node(&node, "cat /sys/kernel/mm/ksm/run /sys/kernel/mm/ksm/pages_to_scan").await?;
            ensure!(running.split_whitespace().collect::<Vec<_>>() == ["1", "100"], "run and pages: {running}");
            configure(s, json!({"ksmConfiguration": null})).await?;
            shown(s, &node, "false", "false").await?;
            let running = s.on_node(&node, "cat /sys/kernel/mm/ksm/run").await?;
            ensure!(running.trim() == "0", "merging goes on: {running}");
            Ok(())
        }
        .await;
        configure(s, json!({"ksmConfiguration": null})).await?;
        mark(s, &node, Value::Null, Value::Null).await?;
        result
    });
}

async fn mark(s: &Story, node: &str, label: Value, free: Value) -> Result<()> {
    let metadata =
        json!({"labels": {KSM_LABEL: label}, "annotations": {"kubevirt.io/ksm-free-percent-override": free}});
    let patch = Patch::Merge(json!({"metadata": metadata}));
    s.cluster_api("Node").patch(node, &PatchParams::default(), &patch).await.context("mark the node")?;
    Ok(())
}

/// Waits until a node shows whether it is selected, and whether virt-handler has started the merging.
async fn shown(s: &Story, node: &str, enabled: &str, managed: &str) -> Result<()> {
    let deadline = tokio::time::Instant::now() + TIMEOUT;
    loop {
        let metadata = s.cluster_api("Node").get(node).await?.metadata;
        let label = metadata.labels.unwrap_or_default().remove("kubevirt.io/ksm-enabled").unwrap_or_default();
        let annotations = metadata.annotations.unwrap_or_default();
        let annotation = annotations.get("kubevirt.io/ksm-handler-managed").cloned().unwrap_or_default();
        if (label.as_str(), annotation.as_str()) == (enabled, managed) {
            return Ok(());
        }
        ensure!(tokio::time::Instant::now() < deadline, "node {node} shows {label:?} and {annotation:?}");
        tokio::time::sleep(Duration::from_millis(500)).await;
    }
}
