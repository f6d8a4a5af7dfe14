//! Taking a cluster, or what a crash left of one, away.

use std::{fs, io::ErrorKind, path::Path};

use crate::{
    command::{program, run},
    error::{FileContext, Result},
    host::{self, Record},
    plan::{Node, Plan},
    progress::Progress,
};

/// Removes everything the cluster made; logs and the audit log stay. Harmless when there is nothing.
///
/// # Errors
/// When something does not go away.
pub fn down(plan: &Plan, progress: &Progress) -> Result<()> {
    host::check_owner(plan)?;
    let namespaces = host::namespaces(plan);
    let record = Record::load(&plan.record())?;
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
    if record.namespaces_mounted {
        release_namespace_folder()?;
    }
    host::remove_cgroup(&plan.cgroup())?;
    for (name, value) in &record.sysctls {
        host::set_sysctl(name, value)?;
    }
    // Children come after their parents in the record.
    for folder in record.folders.iter().rev() {
        match fs::remove_dir(folder) {
            Err(error) if !matches!(error.kind(), ErrorKind::NotFound | ErrorKind::DirectoryNotEmpty) => {
                return Err(error).at("remove", folder);
            }
            _ => {}
        }
    }
    remove_files(plan)?;
    progress.step("the cluster is gone");
    Ok(())
}

/// Takes one node away, so that it can be started afresh.
///
/// # Errors
/// When something does not go away.
pub fn remove_node(node: &Node) -> Result<()> {
    let namespaces = [node.namespace.clone()].into();
    host::kill_all(&namespaces)?;
    if host::namespace_path(&node.namespace).exists() {
        run("removing a network namespace", &mut program("ip", ["netns", "delete", &node.namespace]))?;
    }
    host::remove_cgroup(&node.cgroup)?;
    remove_tree(&node.folder)
}

/// `ip netns add` mounts the folder over itself once; that is undone when nobody else uses it.
fn release_namespace_folder() -> Result<()> {
    let folder = Path::new(host::NAMESPACES);
    let empty = fs::read_dir(folder).is_ok_and(|mut entries| entries.next().is_none());
    if !empty {
        return Ok(());
    }
    if host::is_mount_point(host::NAMESPACES) {
        run("releasing the folder of network namespaces", &mut program("umount", [host::NAMESPACES]))?;
    }
    fs::remove_dir(folder).at("remove", folder)
}

fn remove_files(plan: &Plan) -> Result<()> {
    let keep = [plan.logs(), plan.audit_log()];
    let entries = match fs::read_dir(plan.state()) {
        Ok(entries) => entries,
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(error).at("list", plan.state()),
    };
    for path in entries.flatten().map(|entry| entry.path()).filter(|path| !keep.contains(path)) {
        if path == plan.record() {
            continue;
        }
        remove_tree(&path)?;
    }
    remove_tree(&plan.kubeconfig())?;
    // Last: as long as it is there, the next `down` knows what is left to undo.
    remove_tree(&plan.record())
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
