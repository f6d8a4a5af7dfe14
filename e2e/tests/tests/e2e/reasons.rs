//! VMs and migrations that do not start say why, and the reason goes when they do.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use ferrovirt_e2e_tests::{Story, TIMEOUT, condition, is_true, skip, story, story_alone};
use http::Request;
use serde_json::{Value, json};

use crate::{
    manifests,
    moves::{MINUTES, begin, ended, two_nodes, vm, while_cordoned, with_spec},
    networks,
};

/// Time in which the kubelet tries to mount again: its pauses grow to two minutes.
const MOUNTED: Duration = Duration::from_secs(300);

/// Waits until a condition of a VM has a text, and returns the VM and the condition.
async fn shown(s: &Story, name: &str, type_: &str, text: &str) -> Result<(Value, Value)> {
    let says = |vm: &Value| {
        condition(vm, type_).is_some_and(|shown| shown["message"].as_str().unwrap_or_default().contains(text))
    };
    let vm = s.wait("vm", name, &format!("say {text:?} in {type_}"), TIMEOUT, says).await?;
    let shown = condition(&vm, type_).context("no condition")?.clone();
    Ok((vm, shown))
}

#[test]
fn missing_secret_is_named_until_it_exists() {
    story("missing-secret", async |s| {
        let user_data = "          userData: |
            #cloud-config
            hostname: late-guest
            password: story
";
        let named = "          secretRef: {name: seed-of-late}\n";
        s.apply(&manifests::vm("late", "Always").replace(user_data, named)).await?;
        let (vm, synchronized) = shown(s, "late", "Synchronized", "seed-of-late").await?;
        ensure!(synchronized["status"] == "False" && synchronized["reason"] == "FailedMount", "{synchronized}");
        ensure!(vm["status"]["printableStatus"] == "Starting", "{}", vm["status"]["printableStatus"]);
        let event = s.wait_event("late", "FailedMount", TIMEOUT).await?;
        ensure!(event.contains("seed-of-late"), "{event}");

        let secret = json!({
            "apiVersion": "v1", "kind": "Secret", "metadata": {"name": "seed-of-late"},
            "stringData": {"userdata": "#cloud-config\npassword: story\n"},
        });
        s.apply(&secret.to_string()).await?;
        let runs = |vm: &Value| vm["status"]["printableStatus"] == "Running" && condition(vm, "Synchronized").is_none();
        s.wait("vm", "late", "run without the condition", MOUNTED, runs).await?;
        Ok(())
    });
}

#[test]
fn missing_network_is_named() {
    story("missing-network", async |s| {
        if !networks::are_there(s).await? {
            return skip("Multus");
        }
        let networks = "        devices: {interfaces: [{name: default, masquerade: {}}, {name: blue, bridge: {}}]}
      networks: [{name: default, pod: {}}, {name: blue, multus: {networkName: no-such-lan}}]
";
        s.apply(&manifests::kernel_vm("lost", "Always").replace("        devices: {}\n", networks)).await?;
        let (_, synchronized) = shown(s, "lost", "Synchronized", "no-such-lan").await?;
        let reason = synchronized["reason"].as_str().unwrap_or_default();
        ensure!(["NoNetworkFound", "FailedCreatePodSandBox"].contains(&reason), "{synchronized}");
        Ok(())
    });
}

#[test]
fn hardware_that_no_node_offers_is_named() {
    story("no-hardware", async |s| {
        let with_domain = |name: &str, field: &str| {
            let vm = manifests::kernel_vm(name, "Always");
            vm.replace("        devices: {}\n", &format!("        devices: {{}}\n        {field}\n"))
        };
        for (name, field, text) in [
            ("board", "machine: {type: pc-q35-99}", "no node offers the machine type pc-q35-99"),
            ("model", "cpu: {model: Skylakee}", "no node offers the CPU model Skylakee"),
        ] {
            s.apply(&with_domain(name, field)).await?;
            let (vm, scheduled) = shown(s, name, "PodScheduled", text).await?;
            ensure!(scheduled["reason"] == "Unschedulable", "{scheduled}");
            ensure!(vm["status"]["printableStatus"] == "ErrorUnschedulable", "{}", vm["status"]["printableStatus"]);
        }
        Ok(())
    });
}

#[test]
fn pod_that_kubelet_rejects_is_named() {
    story("rejected", async |s| {
        let (node, _) = s.one_node().await?;
        let choice = "schedulerName: nobody\n      nodeSelector: {ferrovirt.test/no-such-label: here}";
        s.apply(&with_spec(&manifests::kernel_vm("rejected", "Once"), choice)).await?;
        s.wait("vmi", "rejected", "wait for a scheduler", TIMEOUT, |vmi| vmi["status"]["phase"] == "Scheduling")
            .await?;
        // A scheduler with a false picture of the node, as all have of its CPUs, caches and NUMA nodes.
        let pod = s.launcher_pod("rejected").await?;
        let pod = pod["metadata"]["name"].as_str().context("pod without name")?.to_owned();
        let binding = json!({"apiVersion": "v1", "kind": "Binding", "metadata": {"name": pod},
            "target": {"apiVersion": "v1", "kind": "Node", "name": node}});
        let path = format!("/api/v1/namespaces/{}/pods/{pod}/binding", s.namespace);
        let request = Request::post(path).header("Content-Type", "application/json");
        s.client.request_text(request.body(binding.to_string().into_bytes())?).await?;
        let event = s.wait_event("rejected", "PodRejected", TIMEOUT).await?;
        ensure!(event.contains(&format!("ended on node {node} before the guest started: NodeAffinity")), "{event}");
        Ok(())
    });
}

#[test]
fn vm_with_a_missing_instance_type_is_starting_and_names_it() {
    story("no-instance-type", async |s| {
        let vm = "
apiVersion: kubevirt.io/v1
kind: VirtualMachine
metadata: {name: typeless}
spec:
  runStrategy: Always
  instancetype: {name: no-such-type, kind: VirtualMachineInstancetype}
  template: {spec: {domain: {devices: {}}}}
";
        s.apply(vm).await?;
        let (vm, failure) = shown(s, "typeless", "Failure", "no-such-type").await?;
        ensure!(failure["reason"] == "FailedFindInstancetype", "{failure}");
        ensure!(vm["status"]["printableStatus"] == "Starting", "{}", vm["status"]["printableStatus"]);
        let event = s.wait_event("typeless", "FailedCreate", TIMEOUT).await?;
        ensure!(event.contains("cannot use the instance type") && event.contains("no-such-type"), "{event}");
        Ok(())
    });
}

#[test]
fn migration_without_a_node_says_so_until_there_is_one() {
    story_alone("waiting-migration", async |s| {
        let Some([node, other]) = two_nodes(s).await? else { return Ok(()) };
        let migration = while_cordoned(s, &other, async || {
            s.apply(&with_spec(&vm("waiting", "Always"), "evictionStrategy: LiveMigrate")).await?;
            s.wait_running("waiting").await?;
            let migratable = |vmi: &Value| is_true(vmi, "LiveMigratable");
            s.wait("vmi", "waiting", "be migratable", TIMEOUT, migratable).await?;
            let migration = begin(s, "waiting").await?;
            let names_nodes = |vmim: &Value| {
                condition(vmim, "migrationWaiting").is_some_and(|waiting| {
                    let message = waiting["message"].as_str().unwrap_or_default();
                    waiting["reason"] == "TargetPodUnschedulable" && message.contains("nodes are available")
                })
            };
            s.wait("vmim", &migration, "say that it waits for a node", TIMEOUT, names_nodes).await?;
            let said = s.virt(&["drain-status", &node]).await?;
            ensure!(said.contains("blocked: target pod"), "{said}");
            Ok(migration)
        })
        .await?;
        let goes_on = |vmim: &Value| condition(vmim, "migrationWaiting").is_none();
        s.wait("vmim", &migration, "go on", MINUTES, goes_on).await?;
        let vmim = ended(s, &migration).await?;
        ensure!(vmim["status"]["phase"] == "Succeeded", "{}", vmim["status"]);
        Ok(())
    });
}
