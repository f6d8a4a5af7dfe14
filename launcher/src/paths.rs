//! Where things are in a launcher pod.

use std::path::{Path, PathBuf};

/// Directories of a launcher pod. The defaults are those of the pod that virt-controller writes; tests put them elsewhere.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Paths {
    /// The launcher's own files, not shared with other containers.
    pub private: PathBuf,
    /// Where the agent finds the launcher's socket.
    pub sockets: PathBuf,
    /// `XDG_RUNTIME_DIR` of libvirt: its sockets are in `libvirt` below.
    pub runtime: PathBuf,
    /// Writable layers of disks.
    pub ephemeral: PathBuf,
    /// Images of container disks, one directory for each.
    pub container_disks: PathBuf,
    /// Image with kernel and initrd.
    pub kernel_boot: PathBuf,
    /// Devices.
    pub dev: PathBuf,
}

impl Default for Paths {
    fn default() -> Self {
        Self {
            private: "/var/run/kubevirt-private".into(),
            sockets: "/var/run/kubevirt/sockets".into(),
            runtime: "/var/run".into(),
            ephemeral: "/var/run/kubevirt-ephemeral-disks".into(),
            container_disks: "/var/run/kubevirt-image-volume".into(),
            kernel_boot: "/var/run/kubevirt-kernel-boot".into(),
            dev: "/dev".into(),
        }
    }
}

impl Paths {
    /// Directory of the machine's sockets.
    pub fn machine(&self, uid: &str) -> PathBuf {
        self.private.join(uid)
    }

    /// Serial console of the machine.
    pub fn serial(&self, uid: &str) -> PathBuf {
        self.machine(uid).join("virt-serial0")
    }

    /// Display of the machine.
    pub fn vnc(&self, uid: &str) -> PathBuf {
        self.machine(uid).join("virt-vnc")
    }

    /// Channel of the machine for USB redirection.
    pub fn usb_redirection(&self, uid: &str, channel: usize) -> PathBuf {
        self.machine(uid).join(format!("virt-usbredir-{channel}"))
    }

    /// File with the time at which the guest's file systems are to be thawed.
    pub fn thaw_at(&self, uid: &str) -> PathBuf {
        self.machine(uid).join("thaw-at")
    }

    /// Socket on which the agent talks to the launcher.
    pub fn launcher_socket(&self) -> PathBuf {
        self.sockets.join("launcher-sock")
    }

    /// Configuration directory of libvirt's session daemon.
    pub fn libvirt_config(&self) -> PathBuf {
        self.private.join("libvirt")
    }

    /// Directory in which libvirt keeps what it knows about QEMU.
    pub fn capabilities_cache(&self) -> PathBuf {
        self.private.join("libvirt/qemu/cache/capabilities")
    }

    /// Log of the QEMU of a domain.
    pub fn domain_log(&self, domain: &str) -> PathBuf {
        self.private.join("libvirt/qemu/log").join(format!("{domain}.log"))
    }

    /// Directory of libvirt's sockets.
    pub fn libvirt_runtime(&self) -> PathBuf {
        self.runtime.join("libvirt")
    }

    /// Variables of the UEFI firmware.
    pub fn nvram(&self) -> PathBuf {
        self.private.join("libvirt/qemu/nvram")
    }

    /// Directory of the container disk of the volume with this index.
    pub fn container_disk(&self, index: usize) -> PathBuf {
        self.container_disks.join(format!("disk_{index}"))
    }

    /// Writable layer of a volume.
    pub fn overlay(&self, volume: &str) -> PathBuf {
        self.ephemeral.join("disk-data").join(volume).join("disk.qcow2")
    }

    /// Image of an emptyDisk volume.
    pub fn empty_disk(&self, volume: &str) -> PathBuf {
        self.ephemeral.join("empty-disks").join(format!("{volume}.qcow2"))
    }

    /// Image that holds cloud-init's data.
    pub fn cloud_init(&self, volume: &str) -> PathBuf {
        self.ephemeral.join("cloud-init-data").join(format!("{volume}.iso"))
    }

    /// Image made of a configMap, secret, downwardAPI or serviceAccount volume.
    pub fn config_disk(&self, volume: &str) -> PathBuf {
        self.private.join("config-disks").join(format!("{volume}.iso"))
    }

    /// Mount of a volume with a filesystem.
    pub fn filesystem_volume(&self, volume: &str) -> PathBuf {
        self.private.join("vmi-disks").join(volume)
    }

    /// Device of a block volume.
    pub fn block_volume(&self, volume: &str) -> PathBuf {
        self.dev.join(volume)
    }

    /// Mount of a secret.
    pub fn secret(&self, volume: &str) -> PathBuf {
        self.private.join("secret").join(volume)
    }

    /// Mount of a configMap.
    pub fn config_map(&self, volume: &str) -> PathBuf {
        self.private.join("config-map").join(volume)
    }

    /// Mount of a downwardAPI volume.
    pub fn downward_api(&self, volume: &str) -> PathBuf {
        self.private.join("downwardapi").join(volume)
    }

    /// Whether `path` is beneath the launcher's own directories: used to keep names from spilling out of them.
    pub fn is_single_component(name: &str) -> bool {
        let mut components = Path::new(name).components();
        matches!(components.next(), Some(std::path::Component::Normal(only)) if only == name)
            && components.next().is_none()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_plain_names_are_single_components() {
        for name in ["", ".", "..", "a/b", "/a", "a/", "../a"] {
            assert!(!Paths::is_single_component(name), "{name}");
        }
        assert!(Paths::is_single_component("abc.xml"));
    }
}
