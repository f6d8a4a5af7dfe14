//! Runs one command against an installed Ferrovirt and cleans up. `make test` consists of it.

use std::{ffi::OsString, process::Command};

use crate::{
    command::start_error,
    down,
    error::Result,
    host, install,
    lock::lock,
    plan::Plan,
    progress::Progress,
    target::{Target, foreign},
    uninstall,
    up::Size,
    vm,
};

/// The parts that a run removes at its end, because they were not up before.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Removal {
    Nothing,
    VmNode,
    Cluster,
}

/// `own`: on the own cluster. `vm_node`: with the node in a VM.
fn removal(own: bool, cluster_was_up: bool, vm_node: bool, vm_node_was_up: bool) -> Removal {
    match (own, cluster_was_up) {
        (true, false) => Removal::Cluster,
        (true, true) if vm_node && !vm_node_was_up => Removal::VmNode,
        _ => Removal::Nothing,
    }
}

/// Installs Ferrovirt, runs the command, and removes the cluster, or the node in a VM, if it was not up before, also after a
/// failure. After a success it also uninstalls Ferrovirt from a cluster that it removes and checks that nothing is left. Returns
/// true if the command succeeded.
///
/// # Errors
/// Fails if a step fails.
pub fn run(plan: &Plan, size: Size, command: &[OsString], progress: &Progress) -> Result<bool> {
    let own = foreign(plan, std::env::var_os("KUBECONFIG").map(Into::into)).is_none();
    let was_up = |namespace: &str| host::init_process(namespace).is_some();
    let removal = removal(own, was_up(&plan.control_namespace()), size.vm_node, was_up(&plan.vm_node().namespace));
    let result = run_installed(plan, size, command, progress).and_then(|(target, succeeded)| {
        if removal == Removal::Cluster && succeeded {
            uninstall::uninstall(&target, progress)?;
        }
        Ok(succeeded)
    });
    if own && !matches!(result, Ok(true)) {
        vm::keep_state(plan, progress);
    }
    if removal == Removal::Nothing {
        return result;
    }
    if !matches!(result, Ok(true)) {
        progress.step(format!("failed; the logs of the cluster are in {}", plan.logs().display()));
    }
    let _lock = lock(plan, progress)?;
    match removal {
        Removal::Cluster => down::down(plan, progress)?,
        _ => vm::remove(plan, progress)?,
    }
    result
}

fn run_installed(plan: &Plan, size: Size, command: &[OsString], progress: &Progress) -> Result<(Target, bool)> {
    let target = Target::ready(plan, size, progress)?;
    install::install(plan, &target, progress)?;
    let Some((program, arguments)) = command.split_first() else { return Ok((target, true)) };
    let mut command = Command::new(program);
    command.args(arguments).env("KUBECONFIG", &target.kubeconfig).env("PATH", target.path(plan));
    progress.step(format!("running {}", crate::command::line(&command)));
    let status = command.status().map_err(|source| start_error("running the command", &command, source))?;
    progress.step(format!("the command ended with {status}"));
    Ok((target, status.success()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn run_removes_what_was_not_up_before() {
        for (own, cluster_was_up, vm_node, vm_node_was_up, expected) in [
            (true, false, false, false, Removal::Cluster),
            (true, false, true, false, Removal::Cluster),
            (true, true, false, false, Removal::Nothing),
            (true, true, true, false, Removal::VmNode),
            (true, true, true, true, Removal::Nothing),
            (true, true, false, true, Removal::Nothing),
            (false, false, true, false, Removal::Nothing),
            (false, true, true, false, Removal::Nothing),
        ] {
            let found = removal(own, cluster_was_up, vm_node, vm_node_was_up);
            assert_eq!(found, expected, "{own} {cluster_was_up} {vm_node} {vm_node_was_up}");
        }
    }
}
