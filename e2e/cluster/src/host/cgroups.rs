//! Cgroups of the cluster in every mounted hierarchy.

use std::{
    fs,
    path::{Path, PathBuf},
    time::Duration,
};

use crate::{
    command::wait,
    error::{FileContext, Result},
};

/// Returns the roots of the mounted cgroup hierarchies, of both versions.
fn cgroup_roots(mountinfo: &str) -> Vec<PathBuf> {
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
}
