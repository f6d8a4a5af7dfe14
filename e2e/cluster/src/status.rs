//! Status of the cluster.

use std::{fmt::Write as _, fs};

use crate::{components, error::Result, host, images::running_nodes, kubectl::Kubectl, plan::Plan};

/// Describes the cluster. The second value is true if its API server is ready.
///
/// # Errors
/// Fails if kubectl cannot be started.
pub fn status(plan: &Plan) -> Result<(String, bool)> {
    let mut text = String::new();
    let Some(control) = host::init_process(&plan.control_namespace()) else {
        return Ok(("no cluster is running\n".into(), false));
    };
    // Writing to a string cannot fail.
    let _ = writeln!(text, "control plane  {:<14} process {control}: {}", plan.control_address(), children(control));
    for (node, pid) in running_nodes(plan) {
        let _ = writeln!(text, "{:<14} {:<14} process {pid}: {}", node.name, node.address, children(pid));
    }
    let kubectl = Kubectl::new(&components::bin(plan)?, plan.kubeconfig());
    let ready = kubectl.answer("reading /readyz", &["get", "--raw=/readyz"])?.is_some_and(|text| text == "ok");
    let _ = writeln!(text, "API server     {} ({})", plan.api_url(), if ready { "ready" } else { "not ready" });
    if let Some(nodes) = kubectl.answer("listing the nodes", &["get", "nodes", "-o", "wide"])? {
        text.push_str(&nodes);
    }
    let _ = writeln!(text, "export KUBECONFIG={}", plan.kubeconfig().display());
    Ok((text, ready))
}

/// Returns the names of the services that an init runs.
fn children(pid: i32) -> String {
    let tasks = fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten();
    let mut names: Vec<String> = tasks
        .filter_map(|task| fs::read_to_string(task.path().join("children")).ok())
        .flat_map(|text| text.split_whitespace().map(str::to_owned).collect::<Vec<_>>())
        .filter_map(|child| fs::read_to_string(format!("/proc/{child}/comm")).ok())
        .map(|name| name.trim().to_owned())
        // The shims belong to pods.
        .filter(|name| !name.starts_with("containerd-shim"))
        .collect();
    names.sort();
    names.join(" ")
}
