//! Network namespaces of clusters and the processes in them.

use std::{
    collections::BTreeSet,
    fs,
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
    time::Duration,
};

use rustix::process::{Pid, Signal, kill_process};

use crate::{command::wait, error::Result, plan::Plan};

/// Folder of named network namespaces.
pub(super) const NAMESPACES: &str = "/run/netns";

/// Time limit for killed processes to exit.
const KILL_LIMIT: Duration = Duration::from_secs(20);

/// Returns the path of a named network namespace.
#[must_use]
pub fn namespace_path(name: &str) -> PathBuf {
    Path::new(NAMESPACES).join(name)
}

/// Returns the names of this cluster's existing network namespaces.
#[must_use]
pub fn namespaces(plan: &Plan) -> BTreeSet<String> {
    let Ok(entries) = fs::read_dir(NAMESPACES) else { return BTreeSet::new() };
    entries
        .flatten()
        .filter_map(|entry| entry.file_name().into_string().ok())
        .filter(|name| *name == plan.control_namespace() || plan.node_of_namespace(name).is_some())
        .collect()
}

/// Returns true if the control plane of any cluster has a network namespace.
pub(super) fn any_cluster_runs() -> bool {
    fs::read_dir(NAMESPACES)
        .into_iter()
        .flatten()
        .flatten()
        .filter_map(|entry| entry.file_name().into_string().ok())
        .any(|name| is_control_namespace(&name))
}

fn is_control_namespace(name: &str) -> bool {
    name.strip_prefix("fv")
        .and_then(|rest| rest.strip_suffix("-control"))
        .is_some_and(|instance| instance.parse::<u8>().is_ok())
}

/// Returns the processes in a named network namespace.
#[must_use]
pub(super) fn processes(namespace: &str) -> Vec<i32> {
    let Ok(wanted) = fs::metadata(namespace_path(namespace)) else { return Vec::new() };
    let Ok(entries) = fs::read_dir("/proc") else { return Vec::new() };
    entries
        .flatten()
        .filter_map(|entry| entry.file_name().to_str()?.parse().ok())
        .filter(|pid: &i32| {
            fs::metadata(format!("/proc/{pid}/ns/net"))
                .is_ok_and(|found| found.ino() == wanted.ino() && found.dev() == wanted.dev())
        })
        .collect()
}

/// Returns the first process of a node or of the control plane: the process in its network namespace that is process 1 of a
/// PID namespace directly below ours.
#[must_use]
pub fn init_process(namespace: &str) -> Option<i32> {
    processes(namespace)
        .into_iter()
        .find(|pid| fs::read_to_string(format!("/proc/{pid}/status")).is_ok_and(|status| is_init(&status)))
}

fn is_init(status: &str) -> bool {
    status
        .lines()
        .find_map(|line| line.strip_prefix("NSpid:"))
        .is_some_and(|pids| pids.split_whitespace().skip(1).eq(["1"]))
}

/// Kills every process in the named namespaces and waits until all have exited.
///
/// # Errors
/// Fails if a process does not exit.
pub fn kill_all(namespaces: &BTreeSet<String>) -> Result<()> {
    let found = || namespaces.iter().flat_map(|namespace| processes(namespace)).collect::<Vec<_>>();
    wait(
        "killing the cluster's processes",
        KILL_LIMIT,
        Duration::from_millis(50),
        || {
            let pids = found();
            for pid in &pids {
                // The process may have exited meanwhile.
                let _ = Pid::from_raw(*pid).map(|pid| kill_process(pid, Signal::KILL));
            }
            Ok(pids.is_empty())
        },
        || format!("; still running: {:?}", found()),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn init_is_process_one_exactly_one_level_down() {
        assert!(is_init("Name:\tcluster\nNSpid:\t4711\t1\n"));
        assert!(!is_init("Name:\tpause\nNSpid:\t4711\t30\t1\n"));
        assert!(!is_init("Name:\tkubelet\nNSpid:\t4711\t7\n"));
        assert!(!is_init("Name:\tinit\nNSpid:\t1\n"));
    }

    #[test]
    fn control_planes_of_all_clusters_are_recognized() {
        assert!(is_control_namespace("fv0-control") && is_control_namespace("fv9-control"));
        assert!(!is_control_namespace("fv0-node-1") && !is_control_namespace("fvx-control"));
    }
}
