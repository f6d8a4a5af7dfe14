//! Changes of the cluster to the host, with the records for undoing them.

use std::{
    collections::BTreeSet,
    fs,
    io::ErrorKind,
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
    time::Duration,
};

use nix::{
    errno::Errno,
    fcntl::{Flock, FlockArg},
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use serde::{Deserialize, Serialize};

use crate::{
    command::{program, run, wait},
    error::{Error, FileContext, Result},
    plan::{Network, Plan, lock_of},
};

/// Folder of named network namespaces.
pub const NAMESPACES: &str = "/run/netns";
/// Time limit for killed processes to exit.
const KILL_LIMIT: Duration = Duration::from_secs(20);

/// File with the record of changes to the host. All clusters share it, since they share what it names.
const RECORD: &str = "/run/ferrovirt-clusters.json";

/// Changes to the host that the last `down` undoes. The record is written before each change.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Record {
    /// Folders that did not exist before, parents first.
    pub folders: Vec<PathBuf>,
    /// Kernel settings: (path below /proc/sys, value before).
    pub sysctls: Vec<(String, String)>,
    /// True if we mounted `/run/netns`.
    pub namespaces_mounted: bool,
}

impl Record {
    fn load(path: &Path) -> Result<Self> {
        match fs::read_to_string(path) {
            Ok(text) => serde_json::from_str(&text)
                .map_err(|source| Error::Document { what: path.display().to_string(), source }),
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(Self::default()),
            Err(error) => Err(error).at("read", path),
        }
    }

    fn store(&self, path: &Path) -> Result<()> {
        let text = serde_json::to_string_pretty(self)
            .map_err(|source| Error::Document { what: path.display().to_string(), source })?;
        let partial = path.with_extension("partial");
        fs::write(&partial, text).at("write", &partial)?;
        fs::rename(&partial, path).at("rename", partial)
    }

    /// Adds folders and settings. Existing entries keep their first value, which is the original one.
    fn add(&mut self, folders: Vec<PathBuf>, sysctls: Vec<(String, String)>) {
        for folder in folders {
            if !self.folders.contains(&folder) {
                self.folders.push(folder);
            }
        }
        for (name, value) in sysctls {
            if !self.sysctls.iter().any(|(known, _)| *known == name) {
                self.sysctls.push((name, value));
            }
        }
    }
}

/// Locks changes to the host against other clusters until dropped. The lock is on a folder that always exists, so it leaves no
/// file behind.
fn lock_host() -> Result<Flock<fs::File>> {
    let folder = Path::new("/run");
    let file = fs::File::open(folder).at("open", folder)?;
    Flock::lock(file, FlockArg::LockExclusive).map_err(|(_, error)| error.into()).at("lock", folder)
}

/// Records the changes of nodes to the host, then creates folders and raises limits.
///
/// # Errors
/// Fails if a folder, setting or the record cannot be written.
pub fn prepare(folders: &[PathBuf]) -> Result<()> {
    let _lock = lock_host()?;
    let path = Path::new(RECORD);
    let mut record = Record::load(path)?;
    record.namespaces_mounted |= !is_mount_point(NAMESPACES);
    let absent = folders.iter().flat_map(|folder| {
        let mut absent: Vec<_> = folder.ancestors().take_while(|part| !part.exists()).map(Path::to_path_buf).collect();
        absent.reverse();
        absent
    });
    let current: Vec<_> =
        SYSCTLS.iter().filter_map(|(name, least)| sysctl(name).map(|value| (*name, value, *least))).collect();
    record.add(absent.collect(), current.iter().map(|(name, value, _)| ((*name).into(), value.clone())).collect());
    record.store(path)?;
    for folder in folders {
        fs::create_dir_all(folder).at("create", folder)?;
    }
    for (name, value, least) in current {
        if let (Ok(value), Some(least)) = (value.parse::<u64>(), least)
            && value < least
        {
            set_sysctl(name, &least.to_string())?;
        }
    }
    Ok(())
}

/// Undoes the changes to the host, unless another cluster still runs.
///
/// # Errors
/// Fails if a change cannot be undone.
pub fn release() -> Result<()> {
    let _lock = lock_host()?;
    let path = Path::new(RECORD);
    if any_cluster_runs() || !path.exists() {
        return Ok(());
    }
    let record = Record::load(path)?;
    for (name, value) in &record.sysctls {
        set_sysctl(name, value)?;
    }
    for folder in record.folders.iter().rev() {
        match fs::remove_dir(folder) {
            Err(error) if !matches!(error.kind(), ErrorKind::NotFound | ErrorKind::DirectoryNotEmpty) => {
                return Err(error).at("remove", folder);
            }
            _ => {}
        }
    }
    let namespaces = Path::new(NAMESPACES);
    if record.namespaces_mounted && fs::read_dir(namespaces).is_ok_and(|mut entries| entries.next().is_none()) {
        // `ip netns add` bind-mounts this folder onto itself once and never unmounts it.
        if is_mount_point(NAMESPACES) {
            run("releasing the folder of network namespaces", &mut program("umount", [NAMESPACES]))?;
        }
        fs::remove_dir(namespaces).at("remove", namespaces)?;
    }
    fs::remove_file(path).at("remove", path)
}

/// Returns true if the control plane of any cluster has a network namespace.
fn any_cluster_runs() -> bool {
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

/// Kernel settings that processes of a node change, with the required minimum (`None`: only recorded).
const SYSCTLS: [(&str, Option<u64>); 8] = [
    ("fs/inotify/max_user_instances", Some(1024)),
    ("fs/inotify/max_user_watches", Some(262_144)),
    ("vm/overcommit_memory", None),
    ("vm/panic_on_oom", None),
    ("kernel/panic", None),
    ("kernel/panic_on_oops", None),
    ("kernel/keys/root_maxkeys", None),
    ("kernel/keys/root_maxbytes", None),
];

fn sysctl(name: &str) -> Option<String> {
    fs::read_to_string(Path::new("/proc/sys").join(name)).ok().map(|text| text.trim().to_owned())
}

fn set_sysctl(name: &str, value: &str) -> Result<()> {
    let path = Path::new("/proc/sys").join(name);
    fs::write(&path, value).at("write", path)
}

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

/// Returns the processes in a named network namespace.
#[must_use]
pub fn processes(namespace: &str) -> Vec<i32> {
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
                let _ = kill(Pid::from_raw(*pid), Signal::SIGKILL);
            }
            Ok(pids.is_empty())
        },
        || format!("; still running: {:?}", found()),
    )
}

/// Returns the roots of the mounted cgroup hierarchies, of both versions.
#[must_use]
pub fn cgroup_roots(mountinfo: &str) -> Vec<PathBuf> {
    mountinfo
        .lines()
        .filter_map(|line| {
            let (before, after) = line.split_once(" - ")?;
            let kind = after.split_whitespace().next()?;
            let mut fields = before.split_whitespace().skip(3);
            // A mount of a part of the hierarchy is not its root.
            let whole = fields.next()? == "/";
            let point = fields.next()?;
            (whole && matches!(kind, "cgroup" | "cgroup2")).then(|| PathBuf::from(point))
        })
        .collect()
}

fn mounted_cgroup_roots() -> Result<Vec<PathBuf>> {
    let path = Path::new("/proc/self/mountinfo");
    Ok(cgroup_roots(&fs::read_to_string(path).at("read", path)?))
}

/// Creates a cgroup in every hierarchy.
///
/// # Errors
/// Fails if a cgroup cannot be created.
pub fn make_cgroup(name: &str) -> Result<()> {
    for root in mounted_cgroup_roots()? {
        let mut folder = root.clone();
        for part in Path::new(name).components() {
            let parent = folder.clone();
            folder.push(part);
            if !folder.exists() {
                fs::create_dir(&folder).at("create", &folder)?;
            }
            // A cpuset of version 1 starts empty, and no process can enter an empty one.
            for file in ["cpuset.cpus", "cpuset.mems"] {
                let (from, to) = (parent.join(file), folder.join(file));
                if let (Ok(inherited), Ok(own)) = (fs::read_to_string(&from), fs::read_to_string(&to))
                    && own.trim().is_empty()
                    && !root.join("cgroup.controllers").exists()
                {
                    fs::write(&to, inherited.trim()).at("write", to)?;
                }
            }
        }
    }
    Ok(())
}

/// Moves the calling process to a cgroup in every hierarchy.
///
/// # Errors
/// Fails if a cgroup cannot be entered.
pub fn enter_cgroup(name: &str) -> Result<()> {
    for root in mounted_cgroup_roots()? {
        let file = root.join(name).join("cgroup.procs");
        // 0 stands for the writing process.
        fs::write(&file, "0").at("write", file)?;
    }
    Ok(())
}

/// Removes a cgroup with all below it from every hierarchy. Its processes must have exited.
///
/// # Errors
/// Fails if a cgroup stays busy longer than the kernel needs to notice that its processes have exited.
pub fn remove_cgroup(name: &str) -> Result<()> {
    for root in mounted_cgroup_roots()? {
        let folder = root.join(name);
        wait(
            &format!("removing the cgroup {}", folder.display()),
            Duration::from_secs(10),
            Duration::from_millis(50),
            || Ok(remove_cgroup_tree(&folder)),
            String::new,
        )?;
    }
    Ok(())
}

fn remove_cgroup_tree(folder: &Path) -> bool {
    let Ok(entries) = fs::read_dir(folder) else { return true };
    let mut empty = true;
    for entry in entries.flatten() {
        if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            empty &= remove_cgroup_tree(&entry.path());
        }
    }
    empty && fs::remove_dir(folder).is_ok()
}

/// Returns the networks in the host's routes, from `ip -4 route show table all`, without default routes.
#[must_use]
pub fn routed_networks(routes: &str) -> Vec<(Network, String)> {
    routes
        .lines()
        .filter_map(|line| {
            let mut words = line.split_whitespace().peekable();
            while matches!(*words.peek()?, "local" | "broadcast" | "unicast" | "multicast") {
                words.next();
            }
            let network = words.next()?.parse().ok()?;
            Some((network, line.trim().to_owned()))
        })
        .collect()
}

/// Fails if the host already routes one of the cluster's networks elsewhere.
///
/// # Errors
/// Fails in that case, and if the routes cannot be listed.
pub fn check_routes(plan: &Plan) -> Result<()> {
    let routes = run("listing the host's routes", &mut program("ip", ["-4", "route", "show", "table", "all"]))?;
    let own = [plan.node_network(), plan.pods(), plan.services()];
    for (network, line) in routed_networks(&routes) {
        if own.iter().any(|own| own.overlaps(&network)) && network.prefix > 8 {
            return Err(Error::Refused(format!(
                "the host already has a route into the cluster's networks: `{line}`; choose another --instance"
            )));
        }
    }
    Ok(())
}

/// Returns the owner of this cluster's names on the host: the folder recorded in the host's link, if the link exists.
#[must_use]
pub fn owner(plan: &Plan) -> Option<String> {
    let path = Path::new("/sys/class/net").join(plan.host_link()).join("ifalias");
    fs::read_to_string(path).ok().map(|text| text.trim().to_owned())
}

/// Fails if a cluster of another working tree runs under this cluster's names. A cluster without processes does not count: its
/// names can be cleaned up and reused.
///
/// # Errors
/// Fails in that case.
pub fn check_owner(plan: &Plan) -> Result<()> {
    match owner(plan) {
        Some(owner) if Path::new(&owner) != plan.state() && (is_changing(&owner) || has_processes(plan)) => {
            Err(Error::Refused(format!(
                "the cluster of {owner} is running under the same names; stop it there, or choose another --instance"
            )))
        }
        _ => Ok(()),
    }
}

fn has_processes(plan: &Plan) -> bool {
    namespaces(plan).iter().any(|namespace| !processes(namespace).is_empty())
}

/// Returns true if a command holds the lock of the cluster with this state folder.
fn is_changing(state: &str) -> bool {
    let Ok(file) = fs::File::open(lock_of(Path::new(state))) else { return false };
    // A lock taken here is released with the file.
    matches!(Flock::lock(file, FlockArg::LockExclusiveNonblock), Err((_, Errno::EWOULDBLOCK)))
}

fn is_mount_point(path: &str) -> bool {
    fs::read_to_string("/proc/self/mountinfo")
        .is_ok_and(|text| text.lines().any(|line| line.split_whitespace().nth(4) == Some(path)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hierarchies_of_both_versions_are_found_but_not_parts_of_them() {
        let mountinfo = "\
33 27 0:21 / /sys/fs/cgroup rw - tmpfs tmpfs rw
35 31 0:32 / /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory
41 31 0:38 / /sys/fs/cgroup/unified rw,relatime shared:4 - cgroup2 cgroup2 rw
42 31 0:38 /docker/1 /somewhere rw - cgroup2 cgroup2 rw";
        assert_eq!(
            cgroup_roots(mountinfo),
            [PathBuf::from("/sys/fs/cgroup/memory"), PathBuf::from("/sys/fs/cgroup/unified")]
        );
    }

    #[test]
    fn init_is_process_one_exactly_one_level_down() {
        assert!(is_init("Name:\tcluster\nNSpid:\t4711\t1\n"));
        assert!(!is_init("Name:\tpause\nNSpid:\t4711\t30\t1\n"));
        assert!(!is_init("Name:\tkubelet\nNSpid:\t4711\t7\n"));
        assert!(!is_init("Name:\tinit\nNSpid:\t1\n"));
    }

    #[test]
    fn routes_are_read_in_all_their_forms() {
        let routes = "default via 192.0.2.1 dev eth0\n10.210.0.0/24 dev fv0-host proto kernel\nlocal 10.210.0.254 dev fv0-host table local\n";
        let networks: Vec<String> = routed_networks(routes).iter().map(|(network, _)| network.to_string()).collect();
        assert_eq!(networks, ["10.210.0.0/24", "10.210.0.254/32"]);
    }

    #[test]
    fn record_keeps_the_first_value_of_a_setting() {
        let mut record = Record::default();
        record.add(vec!["/etc/cni".into()], vec![("kernel/panic".into(), "1".into())]);
        record.add(vec!["/etc/cni".into()], vec![("kernel/panic".into(), "10".into())]);
        assert_eq!(record.folders.len(), 1);
        assert_eq!(record.sysctls, [("kernel/panic".into(), "1".into())]);
    }

    #[test]
    fn control_planes_of_all_clusters_are_recognized() {
        assert!(is_control_namespace("fv0-control") && is_control_namespace("fv9-control"));
        assert!(!is_control_namespace("fv0-node-1") && !is_control_namespace("fvx-control"));
    }

    #[test]
    fn cluster_is_changing_while_its_lock_is_held() {
        let state = std::env::temp_dir().join(format!("ferrovirt-owner-{}", std::process::id()));
        let name = state.to_str().unwrap();
        assert!(!is_changing(name), "no lock file");
        let file = fs::File::create(lock_of(&state)).unwrap();
        assert!(!is_changing(name), "nobody holds it");
        let held = Flock::lock(file, FlockArg::LockExclusiveNonblock).unwrap();
        assert!(is_changing(name));
        drop(held);
        assert!(!is_changing(name));
        fs::remove_file(lock_of(&state)).unwrap();
    }

    #[test]
    fn record_survives_writing_and_reading() {
        let path = std::env::temp_dir().join(format!("ferrovirt-record-{}.json", std::process::id()));
        assert_eq!(Record::load(&path).unwrap(), Record::default());
        let record = Record { folders: vec!["/var/lib/kubelet".into()], namespaces_mounted: true, ..Record::default() };
        record.store(&path).unwrap();
        assert_eq!(Record::load(&path).unwrap(), record);
        fs::remove_file(path).unwrap();
    }
}
