//! The CPUs of the pod in the topology of its node, and the affinity of the launcher's own threads.
//!
//! kubelet's CPU manager gives the container its CPUs when it starts, and changes them in no running container.

use std::{
    collections::BTreeSet,
    io::Read,
    path::{Path, PathBuf},
};

use nix::{
    sched::{CpuSet, sched_setaffinity},
    unistd::Pid,
};

use crate::{
    domain::{
        host_topology::{HostCell, HostCpu, HostDistance, HostNuma, HostTopology},
        pinning::{HostCpus, PinningError, parse_list},
    },
    paths::Paths,
};

/// Files with the CPUs of the container's control group: of cgroup v2, and of v1.
const CPUSETS: [&str; 2] = ["fs/cgroup/cpuset.cpus.effective", "fs/cgroup/cpuset/cpuset.cpus"];
/// Longest list of the kernel.
const LIST_LIMIT: u64 = 64 << 10;
/// Passes over the processes of the container. A thread that begins during one has the affinity of the thread that began it.
const PASSES: usize = 3;
/// QEMU's programs, whose threads libvirt pins.
const QEMU: &str = "qemu-";

/// Reads the CPUs of the pod. The affinity of this process is not asked: it may be confined.
pub(crate) fn read(paths: &Paths) -> Result<HostCpus, PinningError> {
    let cpuset = CPUSETS.iter().find_map(|file| list(&paths.sys.join(file)).filter(|cpus| !cpus.is_empty()));
    let cpuset = cpuset
        .ok_or_else(|| PinningError::Unreadable(format!("no {} in {}", CPUSETS.join(" nor "), paths.sys.display())))?;
    let devices = paths.sys.join("devices/system");
    let cells: Vec<HostCell> = match list(&devices.join("node/online")).filter(|cells| !cells.is_empty()) {
        Some(cells) => cells.into_iter().filter_map(|id| cell(&devices, id, &cpuset)).collect(),
        None => vec![HostCell { cpus: cpus(&devices, &cpuset), ..HostCell::default() }],
    };
    Ok(HostCpus { topology: HostTopology { numa: HostNuma { cells } }, cpuset })
}

/// Reads a NUMA cell, if the pod has CPUs of it.
fn cell(devices: &Path, id: u32, cpuset: &BTreeSet<u32>) -> Option<HostCell> {
    let directory = devices.join(format!("node/node{id}"));
    let own: BTreeSet<u32> = list(&directory.join("cpulist"))?.intersection(cpuset).copied().collect();
    let distances = text(&directory.join("distance")).unwrap_or_default();
    let known = list(&devices.join("node/online")).unwrap_or_default();
    let distances = known.into_iter().zip(distances.split_whitespace());
    let distances = distances.filter_map(|(id, value)| Some(HostDistance { id, value: value.parse().ok()? })).collect();
    (!own.is_empty()).then(|| HostCell { id, cpus: cpus(devices, &own), distances })
}

fn cpus(devices: &Path, ids: &BTreeSet<u32>) -> Vec<HostCpu> {
    let siblings = |id: u32| list(&devices.join(format!("cpu/cpu{id}/topology/thread_siblings_list")));
    let cpu =
        |id: &u32| HostCpu { id: *id, siblings: siblings(*id).unwrap_or_else(|| [*id].into()).into_iter().collect() };
    ids.iter().map(cpu).collect()
}

fn list(path: &Path) -> Option<BTreeSet<u32>> {
    parse_list(&text(path)?)
}

fn text(path: &Path) -> Option<String> {
    let mut text = String::new();
    std::fs::File::open(path).ok()?.take(LIST_LIMIT).read_to_string(&mut text).ok()?;
    Some(text)
}

/// Confines the processes of the container to these CPUs, except QEMU: its supervisor, this process, and libvirt's daemon. What they
/// start follows them.
pub(crate) fn confine(cpus: &[u32]) {
    let mut set = CpuSet::new();
    for cpu in cpus {
        let set = usize::try_from(*cpu).map(|cpu| set.set(cpu));
        if !matches!(set, Ok(Ok(()))) {
            tracing::warn!(cpu, "cannot confine the launcher to a CPU with this number");
        }
    }
    let mut known = BTreeSet::new();
    for _ in 0..PASSES {
        let new: Vec<i32> = threads(Path::new("/proc")).filter(|thread| known.insert(*thread)).collect();
        if new.is_empty() {
            return;
        }
        for thread in new {
            match sched_setaffinity(Pid::from_raw(thread), &set) {
                // Ended since.
                Ok(()) | Err(nix::Error::ESRCH) => {}
                Err(error) => tracing::warn!(thread, %error, "cannot confine a thread to the CPUs of the emulator"),
            }
        }
    }
}

/// Returns the threads of all processes of the container but QEMU.
fn threads(proc: &Path) -> impl Iterator<Item = i32> {
    let processes = numbers(proc.to_path_buf());
    let processes: Vec<PathBuf> = processes.map(|id| proc.join(id.to_string())).collect();
    let is_qemu = |process: &PathBuf| text(&process.join("comm")).is_some_and(|name| name.starts_with(QEMU));
    processes.into_iter().filter(move |process| !is_qemu(process)).flat_map(|process| numbers(process.join("task")))
}

/// Returns the entries of a directory that are numbers.
fn numbers(directory: PathBuf) -> impl Iterator<Item = i32> {
    let entries = std::fs::read_dir(directory).into_iter().flatten().flatten();
    entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn host(name: &str, files: &[(&str, &str)]) -> Paths {
        let sys = std::env::temp_dir().join(format!("fv-host-cpus-{name}-{}", std::process::id()));
        let _ = std::fs::remove_dir_all(&sys);
        for (file, content) in files {
            let path = sys.join(file);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, content).unwrap();
        }
        Paths { sys, ..Paths::default() }
    }

    #[test]
    fn cpus_of_the_pod_are_read_with_their_cells_and_cores() {
        let paths = host(
            "cells",
            &[
                ("fs/cgroup/cpuset/cpuset.cpus", "1,3,5\n"),
                ("devices/system/node/online", "0-1\n"),
                ("devices/system/node/node0/cpulist", "0-3\n"),
                ("devices/system/node/node0/distance", "10 21\n"),
                ("devices/system/node/node1/cpulist", "4-7\n"),
                ("devices/system/node/node1/distance", "21 10\n"),
                ("devices/system/cpu/cpu1/topology/thread_siblings_list", "1,3\n"),
                ("devices/system/cpu/cpu3/topology/thread_siblings_list", "1,3\n"),
            ],
        );
        let found = read(&paths).unwrap();
        std::fs::remove_dir_all(&paths.sys).unwrap();
        assert_eq!(found.cpuset, [1, 3, 5].into());
        let cells: Vec<_> = found
            .topology
            .numa
            .cells
            .into_iter()
            .map(|cell| {
                let cpus: Vec<_> = cell.cpus.into_iter().map(|cpu| (cpu.id, cpu.siblings)).collect();
                let distances: Vec<_> = cell.distances.into_iter().map(|to| (to.id, to.value)).collect();
                (cell.id, cpus, distances)
            })
            .collect();
        assert_eq!(
            cells,
            [
                (0, vec![(1, vec![1, 3]), (3, vec![1, 3])], vec![(0, 10), (1, 21)]),
                (1, vec![(5, vec![5])], vec![(0, 21), (1, 10)]),
            ]
        );
    }

    #[test]
    fn node_without_cells_has_one_and_a_pod_without_a_group_is_an_error() {
        let paths =
            host("flat", &[("fs/cgroup/cpuset.cpus.effective", "0-1\n"), ("fs/cgroup/cpuset/cpuset.cpus", "7")]);
        let found = read(&paths).unwrap();
        std::fs::remove_dir_all(&paths.sys).unwrap();
        assert_eq!((found.cpuset, found.topology.numa.cells.len()), ([0, 1].into(), 1));
        let error = read(&host("none", &[])).unwrap_err().to_string();
        assert!(
            error.starts_with("cannot read the CPUs of the pod: no fs/cgroup/cpuset.cpus.effective nor"),
            "{error}"
        );
    }

    #[test]
    fn threads_of_qemu_are_left_alone() {
        let proc = host(
            "proc",
            &[
                ("1/comm", "virt-launcher-m\n"),
                ("1/task/1/comm", ""),
                ("7/comm", "rpc-libvirtd\n"),
                ("7/task/7/comm", ""),
                ("7/task/8/comm", ""),
                ("9/comm", "qemu-system-x86\n"),
                ("9/task/9/comm", ""),
                ("self/comm", "x"),
            ],
        );
        let mut found: Vec<i32> = threads(&proc.sys).collect();
        std::fs::remove_dir_all(&proc.sys).unwrap();
        found.sort_unstable();
        assert_eq!(found, [1, 7, 8]);
    }
}
