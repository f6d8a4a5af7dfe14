//! Paths in a launcher pod.

use std::path::{Path, PathBuf};

/// Directories of a launcher pod. The defaults match the pod that virt-controller renders; tests use others.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Paths {
    /// Private files of the launcher, not shared with other containers.
    pub private: PathBuf,
    /// Directory of the launcher's socket, which virt-handler opens.
    pub sockets: PathBuf,
    /// `XDG_RUNTIME_DIR` of libvirt: its sockets are in `libvirt` beneath.
    pub runtime: PathBuf,
    /// Writable layers of disks.
    pub ephemeral: PathBuf,
    /// Images of container disks, one directory for each.
    pub container_disks: PathBuf,
    /// Image with kernel and initrd.
    pub kernel_boot: PathBuf,
    /// Hot-plugged volumes, put there by virt-handler.
    pub hotplug_disks: PathBuf,
    /// Claim with the state of the VMI, if it has one.
    pub vm_state: PathBuf,
    /// Devices.
    pub dev: PathBuf,
    /// The kernel's description of the host, with the control groups of the container.
    pub sys: PathBuf,
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
            hotplug_disks: api::hotplug::DIRECTORY.into(),
            vm_state: api::persistent_state::DIRECTORY.into(),
            dev: "/dev".into(),
            sys: "/sys".into(),
        }
    }
}

impl Paths {
    /// Directory of the domain's sockets.
    pub fn domain(&self, uid: &str) -> PathBuf {
        self.private.join(uid)
    }

    /// Socket of the serial console.
    pub fn serial(&self, uid: &str) -> PathBuf {
        self.domain(uid).join("virt-serial0")
    }

    /// Socket of the display.
    pub fn vnc(&self, uid: &str) -> PathBuf {
        self.domain(uid).join("virt-vnc")
    }

    /// Socket of a channel for USB redirection.
    pub fn usb_redirection(&self, uid: &str, channel: usize) -> PathBuf {
        self.domain(uid).join(format!("virt-usbredir-{channel}"))
    }

    /// File with the time of the automatic thaw.
    pub fn thaw_at(&self, uid: &str) -> PathBuf {
        self.domain(uid).join("thaw-at")
    }

    /// Socket of the protocol with virt-handler.
    pub fn launcher_socket(&self) -> PathBuf {
        self.sockets.join("launcher-sock")
    }

    /// Configuration directory of libvirt's session daemon, with the definition of the domain. It is in memory, as the
    /// daemon waits for the disk after each change.
    pub fn libvirt_config(&self) -> PathBuf {
        self.libvirt_runtime()
    }

    /// Directory of libvirt's capabilities of QEMU.
    pub fn capabilities_cache(&self) -> PathBuf {
        self.private.join("libvirt/qemu/cache/capabilities")
    }

    /// Log file of a domain's QEMU.
    pub fn domain_log(&self, domain: &str) -> PathBuf {
        self.private.join("libvirt/qemu/log").join(format!("{domain}.log"))
    }

    /// Directory of libvirt's sockets.
    pub fn libvirt_runtime(&self) -> PathBuf {
        self.runtime.join("libvirt")
    }

    /// Socket of libvirt's daemon, under the name that it has in every launcher pod.
    pub fn libvirt_socket(&self) -> PathBuf {
        self.libvirt_runtime().join("virtqemud-sock")
    }

    /// File with the process ID of a domain's QEMU.
    pub fn domain_process(&self, domain: &str) -> PathBuf {
        self.libvirt_runtime().join("qemu/run").join(format!("{domain}.pid"))
    }

    /// Directory of UEFI variables that end with the pod.
    pub fn nvram(&self) -> PathBuf {
        self.private.join("libvirt/qemu/nvram")
    }

    /// Files of the TPM emulator: configuration, logs, and the state of a TPM that ends with the pod.
    pub fn tpm_work(&self) -> PathBuf {
        self.private.join("swtpm")
    }

    /// State of a TPM that ends with the pod.
    pub fn volatile_tpm(&self) -> PathBuf {
        self.tpm_work().join("state")
    }

    /// Link to the state directory of the TPM that the emulator has.
    pub fn tpm_state(&self) -> PathBuf {
        self.libvirt_runtime().join("swtpm-state")
    }

    /// Socket of the TPM emulator, to which QEMU connects. The paths are the same in both pods of a migration.
    pub fn tpm_socket(&self) -> PathBuf {
        self.libvirt_runtime().join("swtpm.sock")
    }

    /// File with the process ID of the TPM emulator.
    pub fn tpm_process(&self) -> PathBuf {
        self.libvirt_runtime().join("swtpm.pid")
    }

    /// Directory of a volume's container disk.
    pub fn container_disk(&self, volume: &str) -> PathBuf {
        self.container_disks.join(volume)
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

    /// File with the guest's Ignition configuration.
    pub fn ignition(&self) -> PathBuf {
        self.private.join("ignition-data/data.ign")
    }

    /// Disk with metrics of the node, in memory.
    pub fn metrics_disk(&self) -> PathBuf {
        self.private.join("downwardmetric-disk/vhostmd0")
    }

    /// Socket of the channel through which the guest asks for metrics of the node.
    pub fn metrics_socket(&self, uid: &str) -> PathBuf {
        self.domain(uid).join("downwardmetrics.sock")
    }

    /// Directory of the volumes with a filesystem.
    pub fn filesystem_volumes(&self) -> PathBuf {
        self.private.join("vmi-disks")
    }

    /// Mount of a volume with a filesystem.
    pub fn filesystem_volume(&self, volume: &str) -> PathBuf {
        self.filesystem_volumes().join(volume)
    }

    /// Directories of the images that the launcher creates: they live as long as the pod.
    pub fn own_images(&self) -> [PathBuf; 4] {
        let ephemeral = |name| self.ephemeral.join(name);
        [
            ephemeral("disk-data"),
            ephemeral("empty-disks"),
            ephemeral("cloud-init-data"),
            self.private.join("config-disks"),
        ]
    }

    /// File with the last migration, for a restarted worker. It is in memory: a guest stands still while it is written.
    pub fn migration_record(&self) -> PathBuf {
        self.libvirt_runtime().join("migration.json")
    }

    /// File with the save of the guest's memory in progress, for a restarted worker.
    pub fn save_record(&self) -> PathBuf {
        self.libvirt_runtime().join("save.json")
    }

    /// Socket of a migration's channel. The paths are the same in both pods.
    pub fn migration_channel(&self, channel: protocol::channels::Channel) -> PathBuf {
        self.sockets.join(channel.socket())
    }

    /// Socket of migrations, beside that of the protocol.
    pub fn migration_socket(&self) -> PathBuf {
        self.sockets.join(protocol::channels::SOCKET)
    }

    /// Device of a block volume.
    pub fn block_volume(&self, volume: &str) -> PathBuf {
        self.dev.join(volume)
    }

    /// Device or image of a hot-plugged volume.
    pub fn hotplugged(&self, volume: &str, block: bool) -> PathBuf {
        self.hotplug_disks.join(api::hotplug::file_name(volume, block))
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

    /// Directory of the token of a service account.
    pub fn service_account(&self) -> PathBuf {
        "/var/run/secrets/kubernetes.io/serviceaccount".into()
    }

    /// Directory of the sockets of virtiofsd.
    pub fn virtiofs(&self) -> PathBuf {
        self.private.join("virtiofs")
    }

    /// Accepts a name that is one plain path component, so that it cannot leave the launcher's directories.
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
