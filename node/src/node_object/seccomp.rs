//! The seccomp profile of launchers, in the directory from which kubelet takes profiles.
//!
//! Pods of guests that see NUMA nodes of the host name it, and configurations that were made for KubeVirt name it by its file there.
//! Without the file, kubelet does not start their containers.
//!
//! Profiles of runtimes forbid a container without `CAP_SYS_NICE` to bind its memory to a node, which QEMU does at the start. This
//! one permits it; otherwise it is that of containerd for amd64. The kernel binds memory only to nodes of the pod's cpuset.

use std::path::Path;

use api::constants::NUMA_SECCOMP_PROFILE;

use crate::safe_dir::{Error, SafeDir};

/// kubelet's directory of profiles.
const DIRECTORY: &str = "seccomp";
/// Longest profile of an earlier version.
const LIMIT: usize = 64 * 1024;
/// The profile.
const PROFILE: &str = include_str!("numa-seccomp.json");
/// Its files. The second is that of KubeVirt's virt-handler.
const FILES: [&str; 2] = [NUMA_SECCOMP_PROFILE, "kubevirt/kubevirt.json"];

/// Installs the profile below kubelet's directory, unless it is there.
pub(crate) fn install(kubelet: &Path) -> Result<(), Error> {
    FILES.into_iter().try_for_each(|file| install_as(file, kubelet))
}

fn install_as(file: &str, kubelet: &Path) -> Result<(), Error> {
    let (folder, name) = file.split_once('/').unwrap_or(("", file));
    let mut directory = SafeDir::trusted(kubelet)?;
    for name in [DIRECTORY, folder] {
        if !directory.exists(name)? {
            directory.create_dir(name)?;
        }
        directory = directory.open_dir(name)?;
    }
    match directory.read_text(name, LIMIT) {
        Ok(present) if present == PROFILE => return Ok(()),
        Err(error) if error.is_not_found() => {}
        _ => directory.remove_file(name)?,
    }
    directory.create_file(name)?;
    directory.write_existing(name, PROFILE.as_bytes())
}

#[cfg(test)]
#[allow(clippy::disallowed_methods, reason = "tests read the file that virt-handler writes")]
mod tests {
    use std::{collections::BTreeSet, fs};

    use serde_json::Value;

    use super::*;

    #[test]
    fn profile_is_installed_and_replaces_another_version() {
        let kubelet = std::env::temp_dir().join(format!("ferrovirt-seccomp-{}", std::process::id()));
        let _ = fs::remove_dir_all(&kubelet);
        fs::create_dir_all(&kubelet).unwrap();
        let paths = ["ferrovirt/numa.json", "kubevirt/kubevirt.json"].map(|file| kubelet.join("seccomp").join(file));
        for before in [None, Some(""), Some(PROFILE)] {
            for path in &paths {
                if let Some(before) = before {
                    fs::write(path, before).unwrap();
                }
            }
            install(&kubelet).unwrap();
            for path in &paths {
                assert_eq!(fs::read_to_string(path).unwrap(), PROFILE, "{}", path.display());
            }
        }
        fs::remove_dir_all(kubelet).unwrap();
    }

    #[test]
    fn profile_permits_no_call_that_needs_a_capability_but_those_for_memory() {
        let profile: Value = serde_json::from_str(PROFILE).unwrap();
        assert_eq!(profile["defaultAction"], "SCMP_ACT_ERRNO");
        let rows = profile["syscalls"].as_array().unwrap();
        let plain = rows.iter().filter(|row| row["args"].is_null() && row["action"] == "SCMP_ACT_ALLOW");
        let permitted: BTreeSet<&str> =
            plain.flat_map(|row| row["names"].as_array().unwrap()).map(|name| name.as_str().unwrap()).collect();
        assert!(["mbind", "set_mempolicy", "get_mempolicy"].iter().all(|name| permitted.contains(name)));
        for name in [
            "bpf",
            "clone",
            "clone3",
            "fsmount",
            "init_module",
            "io_uring_setup",
            "kexec_load",
            "keyctl",
            "mount",
            "move_pages",
            "open_by_handle_at",
            "perf_event_open",
            "pivot_root",
            "reboot",
            "setns",
            "socket",
            "swapon",
            "syslog",
            "umount2",
            "unshare",
            "userfaultfd",
        ] {
            assert!(!permitted.contains(name), "{name}");
        }
    }
}
