//! Volumes of the pod and their mount paths.

use std::collections::BTreeSet;

use api::{
    FeatureGate, VirtualMachineInstance, hotplug, names,
    persistent_state::{self, DIRECTORY, POD_VOLUME},
    virtiofs,
    vmi::{
        access,
        volumes::{HostDisk, Volume as VmiVolume},
    },
};
use k8s_openapi::{
    api::core::v1::{
        DownwardAPIVolumeSource, EmptyDirVolumeSource, LocalObjectReference, Volume, VolumeDevice, VolumeMount,
    },
    apimachinery::pkg::api::resource::Quantity,
};

use super::{Inputs, RenderError, gate_refusal, kernel_boot};
use crate::{
    pod_parts::{self, config_map, secret},
    resources::claims::mounted_claim,
};

/// Volume of the kernel and initrd images.
const KERNEL_BOOT_VOLUME: &str = "kernel-boot-volume";

/// Most memory for sockets and definitions of libvirt, which need about 100 KiB.
const LIBVIRT_FILES: &str = "16Mi";

/// Most memory for the disk with metrics of the node.
const METRICS_DISK: &str = "1Mi";

/// Volumes with their mounts in the container.
#[derive(Default)]
pub(super) struct Mounts {
    pub(super) volumes: Vec<Volume>,
    pub(super) mounts: Vec<VolumeMount>,
    pub(super) devices: Vec<VolumeDevice>,
    /// Mounts that other nodes may write to at the same time.
    pub(super) shared_paths: Vec<String>,
}

impl Mounts {
    fn empty_dir(&mut self, name: &str, path: &str, medium: Option<&str>) {
        let source = EmptyDirVolumeSource { medium: medium.map(str::to_owned), ..EmptyDirVolumeSource::default() };
        self.directory(name, path, source);
    }

    fn directory(&mut self, name: &str, path: &str, source: EmptyDirVolumeSource) {
        self.volumes.push(pod_parts::empty_dir(name, source));
        self.mount(name, path, false);
    }

    fn mount(&mut self, name: &str, path: &str, read_only: bool) {
        self.mounts.push(pod_parts::mount(name, path, read_only));
    }

    fn image(&mut self, name: &str, reference: &str, pull_policy: Option<&String>, path: &str) {
        self.volumes.push(pod_parts::image(name, reference, pull_policy));
        self.mount(name, path, true);
    }
}

pub(super) fn volumes(inputs: &Inputs<'_>) -> Result<Mounts, RenderError> {
    let spec = &inputs.instance.spec;
    let mut mounts = Mounts::default();
    mounts.empty_dir("private", "/var/run/kubevirt-private", None);
    mounts.empty_dir("sockets", "/var/run/kubevirt/sockets", None);
    let in_memory =
        EmptyDirVolumeSource { medium: Some("Memory".into()), size_limit: Some(Quantity(LIBVIRT_FILES.to_owned())) };
    mounts.directory("libvirt-runtime", "/var/run/libvirt", in_memory);
    mounts.empty_dir("ephemeral-disks", "/var/run/kubevirt-ephemeral-disks", None);
    if !spec.domain.devices.disable_hotplug {
        // virt-handler attaches mounts in the container itself, so that none is propagated from the node.
        mounts.empty_dir(hotplug::POD_VOLUME, hotplug::DIRECTORY, None);
    }
    let disks = spec.domain.devices.disks.iter().map(|disk| disk.name.as_str());
    let filesystems = spec.domain.devices.filesystems.iter().map(|filesystem| filesystem.name.as_str());
    let used: BTreeSet<&str> = disks.chain(filesystems).collect();
    for volume in spec.volumes.iter().filter(|volume| !hotplug::is_hotplugged(inputs.instance, volume)) {
        vmi_volume(inputs, &mut mounts, volume, used.contains(volume.name.as_str()))?;
    }
    if persistent_state::is_kept(spec) {
        let state = inputs.state.ok_or(RenderError::NoStateClaim)?;
        let name = free_name(POD_VOLUME, &spec.volumes);
        mounts.volumes.push(pod_parts::claim(&name, &state.claim, false));
        mounts.mount(&name, DIRECTORY, false);
        mounts.shared_paths.extend(state.shared.then(|| DIRECTORY.to_owned()));
    }
    if let Some(container) = kernel_boot(inputs.instance) {
        let policy = container.image_pull_policy.as_ref();
        mounts.image(KERNEL_BOOT_VOLUME, &container.image, policy, "/var/run/kubevirt-kernel-boot");
    }
    for name in credential_secrets(inputs.instance) {
        let volume = access::pod_volume(&name);
        mounts.volumes.push(secret(&volume, Some(name), None));
        let path = format!("/var/run/kubevirt-private/secret/{volume}");
        mounts.mount(&volume, &path, true);
    }
    if spec.domain.memory.as_ref().is_some_and(|memory| memory.hugepages.is_some()) {
        mounts.empty_dir("hugepages", "/dev/hugepages", Some("HugePages"));
    }
    Ok(mounts)
}

/// Returns a name that no volume of the VMI has.
fn free_name(name: &str, volumes: &[VmiVolume]) -> String {
    let mut name = name.to_owned();
    while volumes.iter().any(|volume| volume.name == name) {
        name.push_str("-own");
    }
    name
}

fn vmi_volume(inputs: &Inputs<'_>, mounts: &mut Mounts, volume: &VmiVolume, is_used: bool) -> Result<(), RenderError> {
    let name = &volume.name;
    if let Some(disk) = &volume.container_disk {
        let path = format!("/var/run/kubevirt-image-volume/{name}");
        mounts.image(name, &disk.image, disk.image_pull_policy.as_ref(), &path);
    } else if let Some((claim, read_only)) = mounted_claim(volume) {
        mount_claim(inputs, mounts, name, claim, read_only)?;
    } else if let Some(source) = &volume.secret {
        mounts.volumes.push(secret(name, source.secret_name.clone(), source.optional));
        if is_used {
            mounts.mount(name, &format!("/var/run/kubevirt-private/secret/{name}"), true);
        }
    } else if let Some(source) = &volume.config_map {
        mounts.volumes.push(config_map(name, &source.name, source.optional));
        if is_used {
            mounts.mount(name, &format!("/var/run/kubevirt-private/config-map/{name}"), true);
        }
    } else if let Some(source) = &volume.downward_api {
        let items = Some(source.fields.clone());
        let source = DownwardAPIVolumeSource { items, ..DownwardAPIVolumeSource::default() };
        mounts.volumes.push(Volume { downward_api: Some(source), ..pod_parts::volume(name) });
        if is_used {
            mounts.mount(name, &format!("/var/run/kubevirt-private/downwardapi/{name}"), true);
        }
    } else if let Some(source) = &volume.sysprep {
        if let Some(reference) = &source.secret {
            mounts.volumes.push(secret(name, Some(reference.name.clone()), None));
        } else if let Some(reference) = &source.config_map {
            mounts.volumes.push(config_map(name, &reference.name, None));
        } else {
            return Err(RenderError::Unsupported(format!("sysprep volume {name} without a source")));
        }
        mounts.mount(name, &format!("/var/run/kubevirt-private/sysprep/{name}"), true);
    } else if let Some(source) = &volume.cloud_init_no_cloud {
        cloud_init(mounts, name, source.secret_ref.as_ref(), source.network_data_secret_ref.as_ref());
    } else if let Some(source) = &volume.cloud_init_config_drive {
        cloud_init(mounts, name, source.secret_ref.as_ref(), source.network_data_secret_ref.as_ref());
    }
    if let Some(disk) = &volume.host_disk {
        host_disk(inputs, mounts, name, disk)?;
    } else if volume.downward_metrics.is_some() {
        let source =
            EmptyDirVolumeSource { medium: Some("Memory".into()), size_limit: Some(Quantity(METRICS_DISK.to_owned())) };
        mounts.directory(name, "/var/run/kubevirt-private/downwardmetric-disk", source);
    }
    // emptyDisk lives in the ephemeral-disks directory, serviceAccount in the token mount: no volume of their own.
    Ok(())
}

fn mount_claim(
    inputs: &Inputs<'_>,
    mounts: &mut Mounts,
    name: &str,
    claim: &str,
    read_only: bool,
) -> Result<(), RenderError> {
    let known = inputs.claims.get(claim).ok_or_else(|| RenderError::ClaimNotFound(claim.to_owned()))?;
    mounts.volumes.push(pod_parts::claim(name, claim, read_only));
    if known.block {
        if virtiofs::is_shared(&inputs.instance.spec, name) {
            return Err(RenderError::Unsupported(format!("file system {name} of a block device")));
        }
        mounts.devices.push(pod_parts::device(name, &format!("/dev/{name}")));
        return Ok(());
    }
    let path = format!("/var/run/kubevirt-private/vmi-disks/{name}");
    if known.access_modes.iter().any(|mode| mode == "ReadWriteMany") {
        mounts.shared_paths.push(path.clone());
    }
    mounts.mount(name, &path, read_only);
    Ok(())
}

/// Mounts the directory of a file of the node. virt-handler creates a missing file through this mount.
fn host_disk(inputs: &Inputs<'_>, mounts: &mut Mounts, name: &str, disk: &HostDisk) -> Result<(), RenderError> {
    if let Some(message) = gate_refusal(inputs, "volumes[].hostDisk.path", FeatureGate::HostDisk) {
        return Err(RenderError::NotPermitted(message.to_owned()));
    }
    let place = disk.place().ok_or_else(|| RenderError::Unsupported(format!("path {:?} of a host disk", disk.path)))?;
    let kind = if disk.type_ == "DiskOrCreate" { "DirectoryOrCreate" } else { "Directory" };
    mounts.volumes.push(pod_parts::host_path(name, place.0, kind));
    let path = format!("/var/run/kubevirt-private/vmi-disks/{name}");
    if disk.shared == Some(true) {
        mounts.shared_paths.push(path.clone());
    }
    mounts.mount(name, &path, false);
    Ok(())
}

/// Mounts one key of a Secret in both of its accepted spellings.
fn cloud_init(
    mounts: &mut Mounts,
    name: &str,
    user: Option<&LocalObjectReference>,
    network: Option<&LocalObjectReference>,
) {
    for (reference, suffix, keys) in
        [(user, "udata", ["userdata", "userData"]), (network, "ndata", ["networkdata", "networkData"])]
    {
        // A reference without a name counts as none.
        let Some(reference) = reference.filter(|reference| !reference.name.is_empty()) else { continue };
        let volume = names::dns_label(name, &format!("-{suffix}"));
        mounts.volumes.push(secret(&volume, Some(reference.name.clone()), None));
        for key in keys {
            let path = format!("/var/run/kubevirt-private/secret/{name}/{key}");
            let whole = pod_parts::mount(&volume, &path, true);
            mounts.mounts.push(VolumeMount { sub_path: Some(key.to_owned()), ..whole });
        }
    }
}

fn credential_secrets(instance: &VirtualMachineInstance) -> BTreeSet<String> {
    instance
        .spec
        .access_credentials
        .iter()
        .filter_map(|credential| {
            let key = credential.ssh_public_key.as_ref().and_then(|key| key.source.secret.as_ref());
            let password = credential.user_password.as_ref().and_then(|password| password.source.secret.as_ref());
            key.or(password).map(|secret| secret.secret_name.clone())
        })
        .collect()
}
