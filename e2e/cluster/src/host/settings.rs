//! Folders and kernel settings that nodes change on the host, with a record for undoing the changes.

use std::{
    fs,
    io::ErrorKind,
    path::{Path, PathBuf},
};

use serde::{Deserialize, Serialize};

use super::namespaces::{NAMESPACES, any_cluster_runs};
use crate::{
    command::{program, run},
    error::{Error, FileContext, Result},
};

/// File with the record of changes to the host. All clusters share it, since they share what it names.
const RECORD: &str = "/run/ferrovirt-clusters.json";

/// Changes to the host that the last `down` undoes. The record is written before each change.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
struct Record {
    /// Folders that did not exist before, parents first.
    folders: Vec<PathBuf>,
    /// Kernel settings: (path below /proc/sys, value before).
    sysctls: Vec<(String, String)>,
    /// True if we mounted `/run/netns`.
    namespaces_mounted: bool,
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
fn lock_host() -> Result<fs::File> {
    let folder = Path::new("/run");
    let file = fs::File::open(folder).at("open", folder)?;
    file.lock().at("lock", folder)?;
    Ok(file)
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
            let set = set_sysctl(name, &least.to_string());
            // Nodes without huge pages run everything else.
            if name != HUGE_PAGES {
                set?;
            }
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
        if sysctl(name).as_ref() != Some(value) {
            set_sysctl(name, value)?;
        }
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

/// Huge pages of 2 MiB. Nodes offer those that exist when their kubelet starts: two guests of 128 MiB at a time.
const HUGE_PAGES: &str = "vm/nr_hugepages";

/// Kernel settings that processes of a node change, with the required minimum (`None`: only recorded).
const SYSCTLS: [(&str, Option<u64>); 9] = [
    ("fs/inotify/max_user_instances", Some(1024)),
    ("fs/inotify/max_user_watches", Some(262_144)),
    (HUGE_PAGES, Some(128)),
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

fn is_mount_point(path: &str) -> bool {
    fs::read_to_string("/proc/self/mountinfo")
        .is_ok_and(|text| text.lines().any(|line| line.split_whitespace().nth(4) == Some(path)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn record_keeps_the_first_value_of_a_setting() {
        let mut record = Record::default();
        record.add(vec!["/etc/cni".into()], vec![("kernel/panic".into(), "1".into())]);
        record.add(vec!["/etc/cni".into()], vec![("kernel/panic".into(), "10".into())]);
        assert_eq!(record.folders.len(), 1);
        assert_eq!(record.sysctls, [("kernel/panic".into(), "1".into())]);
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
