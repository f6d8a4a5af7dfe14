//! Block devices that kubelet has attached to pods.
//!
//! kubelet keeps a link to each device in `pods/POD/volumeDevices/PLUGIN/VOLUME`, from which the container runtime makes the node in
//! the pod. The device is also mounted on a file with the name of the pod, in the directory of the plugin. No pod can change
//! these directories.

use std::path::{Path, PathBuf};

use crate::safe_dir::{Error, Kind, SafeDir, Stat};

/// Most plugins, and most volumes of a plugin, of a pod.
const MOST: usize = 256;
/// The plugin of storage drivers.
const CSI: &str = "kubernetes.io~csi";
/// The node's directory of devices, as links of kubelet name it.
const DEV: &str = "/dev";

/// Directories of the node with the block devices of pods.
#[derive(Debug)]
pub(crate) struct Published {
    /// kubelet's directory, as links of kubelet name it.
    root: PathBuf,
    kubelet: SafeDir,
    devices: SafeDir,
}

impl Published {
    /// Opens kubelet's directory and the node's `/dev`.
    pub(crate) fn new(kubelet_root: &Path, device_dir: &Path) -> Result<Self, Error> {
        let (kubelet, devices) = (SafeDir::trusted(kubelet_root)?, SafeDir::trusted(device_dir)?);
        Ok(Self { root: kubelet_root.to_owned(), kubelet, devices })
    }

    /// Returns the numbers of the block devices of a pod.
    pub(super) fn numbers(&self, pod: &str) -> Result<Vec<(u32, u32)>, Error> {
        let links = match self.kubelet.open_dir(Path::new("pods").join(pod).join("volumeDevices")) {
            Err(error) if error.is_not_found() => return Ok(Vec::new()),
            links => links?,
        };
        let mut numbers = Vec::new();
        for plugin in links.list(MOST)? {
            let volumes = links.open_dir(&plugin.name)?;
            for volume in volumes.list(MOST)? {
                let mounted = match plugin.name == CSI {
                    true => Path::new("kubernetes.io/csi/volumeDevices").join(&volume.name).join("dev"),
                    false => Path::new(&plugin.name).join("volumeDevices").join(&volume.name),
                };
                let mounted = self.kubelet.stat(Path::new("plugins").join(mounted).join(pod));
                let linked = volumes.read_link(&volume.name).and_then(|target| self.linked(&target));
                let found = [mounted, linked].into_iter().flatten().filter(|stat| stat.kind == Kind::BlockDevice);
                numbers.extend(found.map(|stat| stat.rdev));
            }
        }
        Ok(numbers)
    }

    /// Looks at the target of a link of kubelet, as virt-handler sees it.
    fn linked(&self, target: &Path) -> Result<Stat, Error> {
        match (target.strip_prefix(&self.root), target.strip_prefix(DEV)) {
            (Ok(file), _) => self.kubelet.stat(file),
            // Names of disks are links to their devices.
            (_, Ok(device)) => self.devices.stat_through_links(device),
            _ => Err(Error::NotBeneath(target.to_owned())),
        }
    }
}

#[cfg(test)]
#[allow(clippy::disallowed_methods, reason = "tests create the files of kubelet")]
mod tests {
    use std::{fs, os::unix::fs::symlink};

    use rustix::fs::{CWD, FileType, Mode, makedev, mknodat};

    use super::*;

    #[test]
    fn devices_of_a_pod_are_those_that_kubelet_has_attached_to_it() {
        let scratch = std::env::temp_dir().join(format!("ferrovirt-published-{}", std::process::id()));
        let _ = fs::remove_dir_all(&scratch);
        let (root, dev) = (scratch.join("kubelet"), scratch.join("dev"));
        let made = |path: PathBuf, kind: FileType, minor: u32| {
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            mknodat(CWD, &path, kind, Mode::from_raw_mode(0o600), makedev(7, minor)).is_ok()
        };
        let link = |target: &str, pod: &str, plugin: &str, volume: &str| {
            let path = root.join("pods").join(pod).join("volumeDevices").join(plugin);
            fs::create_dir_all(&path).unwrap();
            symlink(target, path.join(volume)).unwrap();
        };
        fs::create_dir_all(dev.join("disk")).unwrap();
        if !made(dev.join("loop1"), FileType::BlockDevice, 1) {
            skips::skip("permission to make device nodes: root");
            fs::remove_dir_all(scratch).unwrap();
            return;
        }
        symlink("../loop1", dev.join("disk/name")).unwrap();
        made(dev.join("console"), FileType::CharacterDevice, 2);
        let csi = root.join("plugins/kubernetes.io/csi/volumeDevices");
        made(csi.join("publish/pv-3/p3"), FileType::BlockDevice, 3);
        made(csi.join("pv-4/dev/p4"), FileType::BlockDevice, 4);
        made(root.join("plugins/kubernetes.io~local-volume/volumeDevices/pv-5/p5"), FileType::BlockDevice, 5);
        // A node that the pod has made in a volume of its own.
        made(root.join("pods/p6/volumes/kubernetes.io~empty-dir/hotplug-disks/data/uid"), FileType::BlockDevice, 6);
        link("/dev/loop1", "p1", "kubernetes.io~local-volume", "pv-1");
        link("/dev/disk/name", "p2", "kubernetes.io~local-volume", "pv-1");
        link(&csi.join("publish/pv-3/p3").display().to_string(), "p3", CSI, "pv-3");
        link("/elsewhere", "p4", CSI, "pv-4");
        link("/mnt/disk", "p5", "kubernetes.io~local-volume", "pv-5");
        link("/dev/loop1", "both", "kubernetes.io~local-volume", "pv-1");
        link(&csi.join("publish/pv-3/p3").display().to_string(), "both", CSI, "pv-3");
        link("/dev/console", "none", CSI, "pv-7");
        link("/dev/../etc", "none", CSI, "pv-8");
        let published = Published::new(&root, &dev).unwrap();
        for (pod, minors) in [
            ("p1", vec![1]),
            ("p2", vec![1]),
            ("p3", vec![3]),
            ("p4", vec![4]),
            ("p5", vec![5]),
            ("p6", vec![]),
            ("both", vec![3, 1]),
            ("none", vec![]),
            ("absent", vec![]),
        ] {
            let expected: Vec<_> = minors.into_iter().map(|minor| (7, minor)).collect();
            assert_eq!(published.numbers(pod).unwrap(), expected, "{pod}");
        }
        fs::remove_dir_all(scratch).unwrap();
    }
}
