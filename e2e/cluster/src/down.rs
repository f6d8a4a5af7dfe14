//! Removes a cluster, or the remains of one after a crash.

use std::{fs, io::ErrorKind, path::Path};

use crate::{
    command::{program, run},
    error::{FileContext, Result},
    host,
    plan::{Node, Plan},
    progress::Progress,
};

/// Removes everything that the cluster created, except logs and the audit log. Does nothing if there is no cluster.
///
/// # Errors
/// Fails if something cannot be removed.
pub fn down(plan: &Plan, progress: &Progress) -> Result<()> {
    host::check_owner(plan)?;
    let namespaces = host::namespaces(plan);
    if !namespaces.is_empty() {
        progress.step(format!("stopping {}", namespaces.iter().cloned().collect::<Vec<_>>().join(", ")));
    }
    host::kill_all(&namespaces)?;
    for namespace in &namespaces {
        run("removing a network namespace", &mut program("ip", ["netns", "delete", namespace]))?;
    }
    if host::owner(plan).is_some() {
        run("removing the host's link", &mut program("ip", ["link", "delete", &plan.host_link()]))?;
    }
    host::remove_cgroup(&plan.cgroup())?;
    host::release()?;
    remove_files(plan)?;
    progress.step("the cluster is removed");
    Ok(())
}

/// Removes one node so that it can be started again.
///
/// # Errors
/// Fails if something cannot be removed.
pub fn remove_node(node: &Node) -> Result<()> {
    let namespaces = [node.namespace.clone()].into();
    host::kill_all(&namespaces)?;
    if host::namespace_path(&node.namespace).exists() {
        run("removing a network namespace", &mut program("ip", ["netns", "delete", &node.namespace]))?;
    }
    host::remove_cgroup(&node.cgroup)?;
    remove_tree(&node.folder)
}

fn remove_files(plan: &Plan) -> Result<()> {
    let keep = [plan.logs(), plan.audit_log()];
    let entries = match fs::read_dir(plan.state()) {
        Ok(entries) => entries,
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(error).at("list", plan.state()),
    };
    for path in entries.flatten().map(|entry| entry.path()).filter(|path| !keep.contains(path)) {
        remove_tree(&path)?;
    }
    remove_tree(&plan.kubeconfig())
}

fn remove_tree(path: &Path) -> Result<()> {
    let result = match fs::symlink_metadata(path) {
        Ok(found) if found.is_dir() => fs::remove_dir_all(path),
        Ok(_) => fs::remove_file(path),
        Err(error) => Err(error),
    };
    match result {
        Err(error) if error.kind() != ErrorKind::NotFound => Err(error).at("remove", path),
        _ => Ok(()),
    }
}
