//! Runs a first VM for new users.

use std::{fs, time::Duration};

use crate::{
    command::{last_lines, output, wait},
    error::{Error, FileContext, Result},
    plan::Plan,
    progress::Progress,
    target::Target,
};

/// Namespace of the VM.
const NAMESPACE: &str = "ferrovirt-demo";
/// Name of the VM in `examples/vm-tiny.yaml`.
const NAME: &str = "tiny";
const LIMIT: Duration = Duration::from_secs(300);
/// Memory in KiB that must be available for a second node: the cluster and some small guests need half of it.
const TWO_NODES: u64 = 4 << 20;

/// Returns the number of nodes of a new cluster: two, between which VMs migrate, where the memory suffices.
#[must_use]
pub fn nodes() -> u8 {
    nodes_with(&fs::read_to_string("/proc/meminfo").unwrap_or_default())
}

fn nodes_with(meminfo: &str) -> u8 {
    let available = meminfo.lines().find_map(|line| line.strip_prefix("MemAvailable:"));
    let kibibytes = available.and_then(|text| text.split_whitespace().next()?.parse::<u64>().ok());
    if kibibytes.is_some_and(|kibibytes| kibibytes >= TWO_NODES) { 2 } else { 1 }
}

/// Creates the example VM, waits until it runs and prints how to connect to it.
///
/// # Errors
/// Fails if the VM does not run in time, with the status of its objects.
pub fn demo(plan: &Plan, target: &Target, progress: &Progress) -> Result<()> {
    let kubectl = &target.kubectl;
    progress.step(format!("creating VM {NAME} in namespace {NAMESPACE}"));
    let namespace =
        format!("{{\"apiVersion\": \"v1\", \"kind\": \"Namespace\", \"metadata\": {{\"name\": \"{NAMESPACE}\"}}}}");
    kubectl.apply("creating the namespace", &namespace)?;
    let example = plan.workspace.join("examples/vm-tiny.yaml");
    let mut manifest = fs::read_to_string(&example).at("read", &example)?;
    if let Ok(registry) = std::env::var("REGISTRY")
        && !target.own
    {
        manifest = manifest.replace("ferrovirt.io/guests/", &format!("{registry}/guests/"));
    }
    let apply = crate::command::run_with_input(
        "creating the VM",
        &mut kubectl.command(&["apply", "-n", NAMESPACE, "-f", "-"]),
        &manifest,
    )?;
    progress.step(format!("  {}", apply.trim()));
    let get = ["get", "vmi", NAME, "-n", NAMESPACE, "-o", "jsonpath={.status.phase}"];
    let mut shown = String::new();
    wait(
        "waiting until the VMI runs",
        LIMIT,
        Duration::from_millis(300),
        || {
            let phase = kubectl.answer("reading the VMI", &get)?.unwrap_or_default();
            if phase != shown {
                progress.step(format!("  phase {}", if phase.is_empty() { "(none yet)" } else { &phase }));
                shown.clone_from(&phase);
            }
            if phase == "Failed" {
                return Err(Error::Refused(format!("the VMI failed{}", diagnosis(target))));
            }
            Ok(phase == "Running")
        },
        || diagnosis(target),
    )?;
    println!("\n$ kubectl get vm,vmi,pods -n {NAMESPACE}");
    print!("{}", kubectl.run("listing the VM", &["get", "vm,vmi,pods", "-n", NAMESPACE])?);
    let bin = target.bin.as_ref().map_or(String::new(), |bin| format!("{}:", bin.display()));
    println!(
        "
Use the cluster, and log in on the VM's console (user root, password ferrovirt; leave with Ctrl+]):

  export KUBECONFIG={kubeconfig} PATH={ours}:{bin}$PATH
  kubectl virt console {NAME} -n {NAMESPACE}
",
        kubeconfig = target.kubeconfig.display(),
        ours = plan.build().join("bin").display(),
    );
    Ok(())
}

fn diagnosis(target: &Target) -> String {
    let calls: [&[&str]; 3] = [
        &["get", "vm,vmi,pods", "-n", NAMESPACE, "-o", "wide"],
        &["get", "vmi", NAME, "-n", NAMESPACE, "-o", "jsonpath={.status.conditions}"],
        &["get", "events", "-n", NAMESPACE, "--sort-by=.lastTimestamp"],
    ];
    let mut text = String::new();
    for call in calls {
        if let Ok(found) = output("diagnosing", &mut target.kubectl.command(call)) {
            text.push_str(&format!("\n  kubectl {}:\n", call.join(" ")));
            text.push_str(&last_lines(&String::from_utf8_lossy(&found.stdout)));
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn two_nodes_need_four_gibibytes() {
        let meminfo = |kibibytes: &str| format!("MemTotal: 99999999 kB\nMemAvailable:  {kibibytes} kB\n");
        for (text, nodes) in
            [(meminfo("4194304"), 2), (meminfo("4194303"), 1), (meminfo("much"), 1), (String::new(), 1)]
        {
            assert_eq!(nodes_with(&text), nodes, "{text}");
        }
    }
}
