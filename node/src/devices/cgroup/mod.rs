//! Grants block devices to the control group of a container.
//!
//! With cgroup v1 the kernel keeps a list of devices for each group (`devices.allow`, `devices.deny`). With cgroup v2 a group
//! has programs that decide on each `open`, and all of them must agree. The container runtime and systemd attach such
//! programs; their rules are not known here. Each program is therefore replaced by one with a [prologue](program) that permits
//! the granted devices and then continues with the former program. The prologue also is the record of what was granted, so
//! that a restarted virt-handler needs no other.

mod kernel;
mod program;

use std::path::{Path, PathBuf};

use crate::safe_dir::{self, Peer, SafeDir};

/// The hierarchies of the node. virt-handler has the node's process ids.
const HIERARCHIES: &str = "/proc/1/root/sys/fs/cgroup";
/// Directory of the hierarchy of cgroup v2 on a hybrid node.
const UNIFIED: &str = "unified";
/// Most groups between a container and its pod.
const MAX_DEPTH: usize = 4;

/// Reason why a device was not granted or withdrawn.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Error {
    /// A file cannot be accessed.
    #[error(transparent)]
    Path(#[from] safe_dir::Error),
    /// The process is in no group that controls devices.
    #[error("no control group of process {0} controls devices")]
    NoGroup(i32),
    /// The kernel rejected a call about a program.
    #[error("cannot {operation} a device program")]
    Kernel { operation: &'static str, source: std::io::Error },
    /// A program cannot be changed.
    #[error(transparent)]
    Program(#[from] program::Error),
}

/// A change of the granted devices.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Change {
    /// Permits reading and writing a block device, by major and minor number.
    Grant((u32, u32)),
    /// Withdraws the permission.
    Withdraw((u32, u32)),
}

/// The group of a process that controls devices.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Group {
    /// Its path in the hierarchy of the controller `devices`.
    V1(PathBuf),
    /// Its path in the unified hierarchy.
    V2(PathBuf),
}

/// Applies a change to the container of a process.
pub(crate) fn apply(peer: &Peer, change: Change) -> Result<(), Error> {
    let groups = peer.control_groups()?;
    let hierarchies = SafeDir::trusted(Path::new(HIERARCHIES))?;
    match group(&groups).ok_or(Error::NoGroup(peer.pid()))? {
        Group::V1(path) => apply_v1(&hierarchies.open_dir(Path::new("devices").join(path))?, change),
        Group::V2(path) => {
            let unified = match hierarchies.open_dir(UNIFIED) {
                Ok(unified) => unified,
                Err(error) if error.is_not_found() => hierarchies,
                Err(error) => return Err(error.into()),
            };
            for path in up_to_pod(&path) {
                apply_v2(&unified.open_dir(path)?, change)?;
            }
            Ok(())
        }
    }
}

/// Finds the group in `/proc/<pid>/cgroup`. A hierarchy of version 1 with the controller goes before the unified one, which
/// cannot have it then.
fn group(content: &str) -> Option<Group> {
    let mut unified = None;
    for line in content.lines() {
        let mut fields = line.splitn(3, ':');
        let (id, controllers, path) = (fields.next()?, fields.next()?, fields.next()?);
        let path = PathBuf::from(path.strip_prefix('/')?);
        if controllers.split(',').any(|controller| controller == "devices") {
            return Some(Group::V1(path));
        }
        if id == "0" && !path.as_os_str().is_empty() {
            unified = Some(Group::V2(path));
        }
    }
    unified
}

/// Returns the group and those above it up to that of the pod. Above it no container runtime restricts devices.
fn up_to_pod(path: &Path) -> Vec<&Path> {
    let is_pod = |path: &Path| {
        let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
        name.starts_with("pod") || (name.ends_with(".slice") && name.contains("-pod"))
    };
    let mut groups = Vec::new();
    for group in path.ancestors().take(MAX_DEPTH).filter(|path| !path.as_os_str().is_empty()) {
        groups.push(group);
        if is_pod(group) {
            return groups;
        }
    }
    // No pod among them: only the group itself is the container's.
    groups.truncate(1);
    groups
}

fn apply_v1(group: &SafeDir, change: Change) -> Result<(), Error> {
    let (file, (major, minor)) = match change {
        Change::Grant(device) => ("devices.allow", device),
        Change::Withdraw(device) => ("devices.deny", device),
    };
    Ok(group.write_existing(file, format!("b {major}:{minor} rw").as_bytes())?)
}

fn apply_v2(group: &SafeDir, change: Change) -> Result<(), Error> {
    let attached = kernel::query(group)?;
    for id in attached.programs {
        let former = kernel::open(id)?;
        let (mut devices, rest) = program::split(&kernel::instructions(&former)?)?;
        let changed = match change {
            Change::Grant(device) => devices.insert(device),
            Change::Withdraw(device) => devices.remove(&device),
        };
        if changed {
            let new = kernel::load(&program::join(&devices, &rest)?)?;
            kernel::replace(group, &former, &new, attached.flags)?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests;
