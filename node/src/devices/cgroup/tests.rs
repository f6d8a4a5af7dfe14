#![allow(clippy::disallowed_methods, reason = "tests make groups and device nodes of their own")]

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use rustix::fs::{CWD, FileType, Mode, makedev, mknodat};

use super::*;

#[test]
fn the_group_that_controls_devices_is_found() {
    let v1 = |path: &str| Some(Group::V1(path.into()));
    let v2 = |path: &str| Some(Group::V2(path.into()));
    for (content, expected) in [
        ("5:devices:/kubepods/pod1/c\n0::/\n", v1("kubepods/pod1/c")),
        ("4:cpu,devices:/a\n3:memory:/b\n0::/x\n", v1("a")),
        ("0::/kubepods.slice/kubepods-pod1.slice/cri-1.scope\n", v2("kubepods.slice/kubepods-pod1.slice/cri-1.scope")),
        ("3:memory:/b\n0::/x/y\n", v2("x/y")),
        ("3:memory:/b\n0::/\n", None),
        ("", None),
        ("garbage", None),
    ] {
        assert_eq!(group(content), expected, "{content:?}");
    }
}

#[test]
fn programs_of_the_container_and_of_groups_between_it_and_its_pod_are_changed() {
    for (path, expected) in [
        ("kubepods/burstable/pod1/c", vec!["kubepods/burstable/pod1/c", "kubepods/burstable/pod1"]),
        (
            "kubepods.slice/kubepods-pod1.slice/crio-c.scope/container",
            vec![
                "kubepods.slice/kubepods-pod1.slice/crio-c.scope/container",
                "kubepods.slice/kubepods-pod1.slice/crio-c.scope",
                "kubepods.slice/kubepods-pod1.slice",
            ],
        ),
        ("elsewhere/a/b/c/d/e", vec!["elsewhere/a/b/c/d/e"]),
    ] {
        let expected: Vec<&Path> = expected.into_iter().map(Path::new).collect();
        assert_eq!(up_to_pod(Path::new(path)), expected);
    }
}

/// A group of one test, removed at the end.
struct TestGroup(PathBuf);

impl TestGroup {
    fn new(hierarchy: &str) -> Option<Self> {
        let path = Path::new(hierarchy).join(format!("ferrovirt-test-{}", std::process::id()));
        fs::create_dir(&path).ok()?;
        Some(Self(path))
    }

    fn dir(&self) -> SafeDir {
        SafeDir::trusted(&self.0).unwrap()
    }

    /// Returns true if a process in the group may open the node for reading and writing.
    fn opens(&self, node: &Path) -> bool {
        let script = "echo $$ > \"$0/cgroup.procs\" && exec 2>&1 && : <> \"$1\"";
        let output = Command::new("sh").args(["-c", script]).arg(&self.0).arg(node).output().unwrap();
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        // Without a device behind the node, the kernel answers so only after the permission.
        let allowed = output.status.success() || text.contains("No such device");
        assert!(allowed || text.contains("not permitted"), "{text}");
        allowed
    }
}

impl Drop for TestGroup {
    fn drop(&mut self) {
        let _ = fs::remove_dir(&self.0);
    }
}

/// Makes a node of a block device that no driver serves.
fn node(minor: u32) -> Option<PathBuf> {
    let path = std::env::temp_dir().join(format!("ferrovirt-block-{}-{minor}", std::process::id()));
    let _ = fs::remove_file(&path);
    let mode = Mode::from_raw_mode(0o600);
    mknodat(CWD, &path, FileType::BlockDevice, mode, makedev(MAJOR, minor)).ok()?;
    Some(path)
}

/// A major number for local and experimental use.
const MAJOR: u32 = 242;

/// Checks that devices are granted one by one, and withdrawn again.
fn granted_and_withdrawn(group: &TestGroup, apply: impl Fn(Change) -> Result<(), Error>, nodes: [&Path; 2], base: u32) {
    let [one, two] = nodes;
    let number = |minor: u32| (MAJOR, base + minor);
    assert!(!group.opens(one) && !group.opens(two));
    apply(Change::Grant(number(0))).unwrap();
    assert!(group.opens(one) && !group.opens(two));
    apply(Change::Grant(number(1))).unwrap();
    // Repeated by a restarted virt-handler.
    apply(Change::Grant(number(0))).unwrap();
    assert!(group.opens(one) && group.opens(two));
    apply(Change::Withdraw(number(0))).unwrap();
    assert!(!group.opens(one) && group.opens(two));
    apply(Change::Withdraw(number(0))).unwrap();
    apply(Change::Withdraw(number(1))).unwrap();
    assert!(!group.opens(one) && !group.opens(two));
}

#[test]
fn devices_are_granted_in_the_unified_hierarchy() {
    let hierarchy = ["/sys/fs/cgroup/unified", "/sys/fs/cgroup"].into_iter();
    let hierarchy = hierarchy.filter(|path| Path::new(path).join("cgroup.procs").exists()).find_map(TestGroup::new);
    let (Some(group), Some(one), Some(two)) = (hierarchy, node(0), node(1)) else {
        skips::skip("permission to make groups of cgroup v2 and device nodes: root");
        return;
    };
    // As a container runtime does: character devices only, beside a program that permits all.
    let move_zero = [0xb7, 0, 0, 0, 0, 0, 0, 0];
    let move_one = [0xb7, 0, 0, 0, 1, 0, 0, 0];
    let exit = [0x95, 0, 0, 0, 0, 0, 0, 0];
    let (load, and) = ([0x61, 0x12, 0, 0, 0, 0, 0, 0], [0x57, 2, 0, 0, 0xff, 0xff, 0, 0]);
    let unless_character = [0x55, 2, 2, 0, 2, 0, 0, 0];
    let runtime = [load, and, unless_character, move_one, exit, move_zero, exit];
    let programs = [&runtime[..], &[move_one, exit]];
    let loaded: Result<Vec<_>, Error> = programs.iter().map(|program| kernel::load(program)).collect();
    let loaded = match loaded {
        Ok(loaded) => loaded,
        Err(error) => {
            skips::skip(&format!("permission to load device programs ({error:?})"));
            return;
        }
    };
    loaded.iter().for_each(|program| kernel::attach(&group.dir(), program).unwrap());
    granted_and_withdrawn(&group, |change| apply_v2(&group.dir(), change), [&one, &two], 0);
    // Without granted devices, the programs are the former ones.
    let left = kernel::query(&group.dir()).unwrap().programs;
    let left: Vec<_> = left.into_iter().map(|id| kernel::instructions(&kernel::open(id).unwrap()).unwrap()).collect();
    assert_eq!(left, programs.map(<[_]>::to_vec));
    for path in [one, two] {
        fs::remove_file(path).unwrap();
    }
}

#[test]
fn devices_are_granted_in_the_hierarchy_of_version_1() {
    let (Some(group), Some(one), Some(two)) = (TestGroup::new("/sys/fs/cgroup/devices"), node(2), node(3)) else {
        skips::skip(
            "a hierarchy of cgroup v1 with the controller of devices, and permission to make device nodes: root",
        );
        return;
    };
    // As a container runtime does: everything is denied, then some devices are permitted.
    fs::write(group.0.join("devices.deny"), "a").unwrap();
    fs::write(group.0.join("devices.allow"), "c *:* rwm").unwrap();
    granted_and_withdrawn(&group, |change| apply_v1(&group.dir(), change), [&one, &two], 2);
    for path in [one, two] {
        fs::remove_file(path).unwrap();
    }
}
