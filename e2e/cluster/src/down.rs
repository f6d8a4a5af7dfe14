//! Removes a cluster, or the remains of one after a crash.

use std::{fs, io::ErrorKind, path::Path};

use crate::{
    command::{output, program, run},
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
    detach_devices(&plan.shared())?;
    host::release()?;
    remove_files(plan)?;
    progress.step("the cluster is removed");
    Ok(())
}

/// Detaches the loop devices of files below a folder, and those that kubelet keeps over them. They outlive all processes.
fn detach_devices(folder: &Path) -> Result<()> {
    let list = ["--list", "--noheadings", "--raw", "--output=NAME,BACK-FILE"];
    let step = "detaching the devices of volumes";
    for device in devices_below(&output(step, &mut program("losetup", list))?.stdout, folder) {
        let over = ["--list", "--noheadings", "--raw", "--output=NAME", "--associated", &device];
        let over = output(step, &mut program("losetup", over))?.stdout;
        for device in String::from_utf8_lossy(&over).lines().chain([device.as_str()]) {
            // Most detach themselves with the end of their last user.
            output(step, &mut program("losetup", ["--detach", device]))?;
        }
    }
    Ok(())
}

/// Returns the devices with a file below a folder, from lines `DEVICE FILE`.
fn devices_below(listed: &[u8], folder: &Path) -> Vec<String> {
    let listed = String::from_utf8_lossy(listed);
    let devices = listed.lines().filter_map(|line| line.split_once(' '));
    devices.filter(|(_, file)| Path::new(file).starts_with(folder)).map(|(device, _)| device.to_owned()).collect()
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn devices_of_the_cluster_are_told_from_others() {
        let listed = b"/dev/loop0 /src/build/cluster/shared/csi/volumes/a/content\\x20(deleted)\n\
            /dev/loop1 /src/build/cluster-3/shared/b\n/dev/loop2 /\n";
        assert_eq!(devices_below(listed, Path::new("/src/build/cluster/shared")), ["/dev/loop0"]);
    }
}
