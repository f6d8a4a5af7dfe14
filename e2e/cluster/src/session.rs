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

/// Installs Ferrovirt, runs the command, and removes everything that was not up before, also after a failure. After a success
/// it also uninstalls Ferrovirt and checks that nothing is left. Returns true if the command succeeded.
///
/// # Errors
/// Fails if a step fails.
pub fn run(plan: &Plan, size: Size, command: &[OsString], progress: &Progress) -> Result<bool> {
    let own = foreign(plan, std::env::var_os("KUBECONFIG").map(Into::into)).is_none();
    let ours_to_remove = own && host::init_process(&plan.control_namespace()).is_none();
    let result = run_installed(plan, size, command, progress).and_then(|(target, succeeded)| {
        if ours_to_remove && succeeded {
            uninstall::uninstall(&target, progress)?;
        }
        Ok(succeeded)
    });
    if own && !matches!(result, Ok(true)) {
        vm::keep_state(plan, progress);
    }
    if ours_to_remove {
        if !matches!(result, Ok(true)) {
            progress.step(format!("failed; the logs of the cluster are in {}", plan.logs().display()));
        }
        let _lock = lock(plan, progress)?;
        down::down(plan, progress)?;
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
