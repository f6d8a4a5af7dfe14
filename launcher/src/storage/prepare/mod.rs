//! Prepares a VMI's volumes: creates missing images and grows existing ones. `disk_images` holds the disks, `config_images` the
//! images made of configuration and of cloud-init's data.

mod config_images;
mod disk_images;
#[cfg(test)]
mod tests;

use std::{
    collections::BTreeMap,
    io::Write,
    os::unix::fs::OpenOptionsExt,
    path::{Path, PathBuf},
};

use api::{
    SavedMemoryPhase, VirtualMachineInstance,
    constants::annotation,
    hotplug,
    vmi::{disks::Disk, features::FeatureState, volumes::Volume},
};

pub(crate) use self::{config_images::write_tags, disk_images::claim_backend};
use self::{
    config_images::{cloud_init_volume, config_files, make_cloud_init, make_iso},
    disk_images::{check_destination, claim_source, container_disk, file_source, filesystem_disk, layer, make_parent},
};
use super::{
    Access, Backend, DiskError, DiskSource, check_access,
    claims::{capacity, device_size, disk_size, least_size},
    hotplug::hotplugged_source,
    image::{self, BlockSizes, ImageFormat},
    metrics_disk,
};
use crate::{files::UntrustedDir, paths::Paths};

/// Sources of a VMI's disks and boot.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Prepared {
    /// Sources by volume.
    pub(crate) sources: BTreeMap<String, DiskSource>,
    /// Device names by disk, of the running domain.
    pub(crate) targets: BTreeMap<String, String>,
    /// Block sizes by volume, for disks that match their volume's.
    pub(crate) block_sizes: BTreeMap<String, BlockSizes>,
    /// Hot-plugged volumes without which the domain starts, and why they cannot be opened.
    pub(crate) left_out: Vec<(String, String)>,
    /// Kernel for direct kernel boot.
    pub(crate) kernel: Option<PathBuf>,
    /// Initial RAM disk for direct kernel boot.
    pub(crate) initrd: Option<PathBuf>,
    /// File with the guest's Ignition configuration.
    pub(crate) ignition: Option<PathBuf>,
}

/// The cluster's limits for images created in file systems.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Tolerance {
    /// Percent of the size that may be missing.
    pub(crate) lack_percent: u64,
    /// Bytes to leave free.
    pub(crate) reserve: u64,
}

impl Tolerance {
    /// Reads the limits from virt-handler's options.
    pub(crate) fn of(options: &protocol::VmiOptions) -> Self {
        Self { lack_percent: u64::from(options.tolerated_lack_percent.min(100)), reserve: options.reserved_bytes }
    }
}

/// What the images are for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Purpose {
    /// A domain starts.
    Start,
    /// A running domain arrives from another launcher, which uses the claims meanwhile: they are left as they are.
    MigrationTarget,
}

/// Creates all images of a VMI. Existing images are kept; an image in a claim grows to the claim's capacity. Hot-plugged
/// volumes that the pod does not have yet are left out. A start also leaves out those that cannot be opened: a Sync attaches
/// them once they can be.
pub(crate) fn prepare(
    vmi: &VirtualMachineInstance,
    paths: &Paths,
    tolerance: &Tolerance,
    purpose: Purpose,
) -> Result<Prepared, DiskError> {
    let mut prepared = Prepared::default();
    // A guest that continues from saved memory has the disks that it had.
    let saved = vmi.status.as_ref().and_then(|status| status.hibernation.as_ref());
    let continues = saved.is_some_and(|memory| memory.phase == SavedMemoryPhase::Restoring);
    let may_lack = purpose == Purpose::Start && !continues;
    let disks: BTreeMap<&str, Access> = vmi
        .spec
        .domain
        .devices
        .disks
        .iter()
        .map(|disk| (disk.name.as_str(), Access::of(disk.is_read_only())))
        .collect();
    for volume in &vmi.spec.volumes {
        if !Paths::is_single_component(&volume.name) {
            return Err(DiskError::Name(volume.name.clone()));
        }
        let Some(&access) = disks.get(volume.name.as_str()) else { continue };
        if hotplug::is_hotplugged(vmi, volume) {
            let source = hotplug::status_of(vmi, &volume.name)
                .filter(|status| hotplug::is_handed_over(status))
                .and_then(|_| hotplugged_source(&volume.name, paths));
            if let Some(source) = source {
                match check_access(&source.backend, access) {
                    Ok(()) => {
                        prepared.sources.insert(volume.name.clone(), source);
                    }
                    Err(refusal) if may_lack => prepared.left_out.push((volume.name.clone(), refusal.to_string())),
                    Err(source) => return Err(DiskError::Refused { volume: volume.name.clone(), source }),
                }
            }
            continue;
        }
        if let Some(cloud_init) = cloud_init_volume(volume) {
            prepared.sources.insert(volume.name.clone(), make_cloud_init(&cloud_init, vmi, paths, Vec::new())?);
            continue;
        }
        let source = make(volume, vmi, paths, (tolerance, purpose), access)?;
        prepared.sources.insert(volume.name.clone(), source);
    }
    for disk in vmi.spec.domain.devices.disks.iter().filter(|disk| matches_volume(disk)) {
        let Some(source) = prepared.sources.get(&disk.name) else { continue };
        let volume = vmi.spec.volumes.iter().find(|volume| volume.name == disk.name);
        let is_plugged = volume.is_some_and(|volume| hotplug::is_hotplugged(vmi, volume));
        match image::block_sizes(&source.backend) {
            Ok(sizes) => {
                prepared.block_sizes.insert(disk.name.clone(), sizes);
            }
            Err(error) if may_lack && is_plugged => {
                prepared.sources.remove(&disk.name);
                prepared.left_out.push((disk.name.clone(), format!("cannot read its block sizes: {error}")));
            }
            Err(source) => return Err(DiskError::BlockSizes { volume: disk.name.clone(), source }),
        }
    }
    if !prepared.left_out.is_empty() {
        tracing::warn!(left_out = ?prepared.left_out, "starting without hot-plugged volumes");
    }
    if let Some(container) = vmi
        .spec
        .domain
        .firmware
        .as_ref()
        .and_then(|firmware| firmware.kernel_boot.as_ref())
        .and_then(|boot| boot.container.as_ref())
    {
        let failed = |source| DiskError::File { volume: "kernel-boot-volume".into(), source };
        let image = UntrustedDir::open(&paths.kernel_boot).map_err(failed)?;
        let file = |path: &Option<String>| {
            path.as_ref().filter(|p| !p.is_empty()).map(|p| image.regular_file(Path::new(p))).transpose()
        };
        prepared.kernel = file(&container.kernel_path).map_err(failed)?;
        prepared.initrd = file(&container.initrd_path).map_err(failed)?;
    }
    prepared.ignition = write_ignition(vmi, paths)?;
    Ok(prepared)
}

/// Writes the Ignition configuration of an annotation to a file. The target of a migration has the same file: QEMU opens it
/// there, too.
fn write_ignition(vmi: &VirtualMachineInstance, paths: &Paths) -> Result<Option<PathBuf>, DiskError> {
    let data = vmi.metadata.annotations.as_ref().and_then(|all| all.get(annotation::IGNITION_DATA));
    let Some(data) = data.filter(|data| !data.is_empty()) else { return Ok(None) };
    let path = paths.ignition();
    make_parent(&path)?;
    let open = std::fs::OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(&path);
    match open.and_then(|mut file| file.write_all(data.as_bytes())) {
        Ok(()) => Ok(Some(path)),
        Err(source) => Err(DiskError::Write { path, source }),
    }
}

/// Reports a volume whose content is copied to another claim.
fn is_migrated(volume: &str, vmi: &VirtualMachineInstance) -> bool {
    let migrated = vmi.status.iter().flat_map(|status| &status.migrated_volumes);
    migrated.into_iter().any(|migrated| migrated.volume_name == volume)
}

/// Gives the images that are copied from another launcher the size that they have there, and returns them with it. An image that is
/// made of files may differ from the one that was made of them at the start.
pub(crate) fn match_sizes(vmi: &VirtualMachineInstance, paths: &Paths) -> Result<Vec<(String, u64)>, DiskError> {
    let status = vmi.status.iter().flat_map(|status| &status.volume_status);
    let recorded = status.filter_map(|status| Some((status.name.as_str(), u64::try_from(status.size?).ok()?)));
    let mut matched = Vec::new();
    for (name, size) in recorded.filter(|(name, size)| *size > 0 && Paths::is_single_component(name)) {
        if !vmi.spec.domain.devices.disks.iter().any(|disk| disk.name == name && is_copied(disk)) {
            continue;
        }
        for path in [paths.cloud_init(name), paths.config_disk(name)] {
            let resized = match std::fs::OpenOptions::new().write(true).open(&path) {
                Ok(file) => file.set_len(size).map(|()| matched.push((name.to_owned(), size))),
                Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(()),
                Err(error) => Err(error),
            };
            resized.map_err(|source| DiskError::Write { path, source })?;
        }
    }
    Ok(matched)
}

/// Reports a disk whose image in the pod is copied to the target of a migration: the guest can write to it.
fn is_copied(disk: &Disk) -> bool {
    disk.lun.is_none() && !disk.is_read_only()
}

/// Reports a disk with the block sizes of its volume.
pub(crate) fn matches_volume(disk: &Disk) -> bool {
    let matching = disk.block_size.as_ref().and_then(|size| size.match_volume.as_ref());
    matching.is_some_and(FeatureState::is_enabled)
}

fn make(
    volume: &Volume,
    vmi: &VirtualMachineInstance,
    paths: &Paths,
    (tolerance, purpose): (&Tolerance, Purpose),
    access: Access,
) -> Result<DiskSource, DiskError> {
    let name = volume.name.as_str();
    if let Some(disk) = &volume.container_disk {
        let file = container_disk(name, &paths.container_disk(name), disk)?;
        let info = image::inspect(&file).map_err(|source| DiskError::Image { volume: name.to_owned(), source })?;
        return layer(name, file, info.format, info.virtual_size, paths);
    }
    if let Some(empty) = &volume.empty_disk {
        let size = disk_size(name, &empty.capacity)?;
        let path = paths.empty_disk(name);
        make_parent(&path)?;
        image::create_qcow2(&path, size, None)
            .map_err(|source| DiskError::Image { volume: name.to_owned(), source })?;
        return Ok(file_source(path, ImageFormat::Qcow2));
    }
    if volume.ephemeral.as_ref().is_some_and(|ephemeral| ephemeral.persistent_volume_claim.is_some()) {
        let (Backend::File { path, .. } | Backend::Block { path }) =
            claim_source(name, vmi, paths, None, Access::Read)?.backend;
        // Raw, whatever its first bytes are: the disk belongs to the guest, which may have encrypted it.
        let size = device_size(&path).map_err(|source| DiskError::Write { path: path.clone(), source })?;
        return layer(name, path, ImageFormat::Raw, size, paths);
    }
    if volume.persistent_volume_claim.is_some() || volume.data_volume.is_some() {
        if purpose == Purpose::MigrationTarget && is_migrated(name, vmi) {
            let least = least_size(name, vmi)?;
            // Before an image is created in it.
            if let Some(size) = capacity(name, vmi)?.filter(|size| *size < least) {
                return Err(DiskError::Destination { volume: name.to_owned(), size, least });
            }
            let source = claim_source(name, vmi, paths, Some((tolerance, least)), access)?;
            check_destination(name, &source, paths, least)?;
            return Ok(source);
        }
        return claim_source(name, vmi, paths, (purpose == Purpose::Start).then_some((tolerance, 0)), access);
    }
    if let Some(host) = &volume.host_disk {
        let file = Path::new(&host.path).file_name().and_then(|f| f.to_str()).unwrap_or_default();
        // virt-handler has created a missing file: the directory is not the launcher's.
        return filesystem_disk(name, &paths.filesystem_volume(name), file, None, access);
    }
    if volume.downward_metrics.is_some() {
        let path = paths.metrics_disk();
        make_parent(&path)?;
        metrics_disk::create(&path).map_err(|source| DiskError::Write { path: path.clone(), source })?;
        return Ok(file_source(path, ImageFormat::Raw));
    }
    let (directory, label) = if let Some(v) = &volume.config_map {
        (paths.config_map(name), v.volume_label.as_deref())
    } else if let Some(v) = &volume.secret {
        (paths.secret(name), v.volume_label.as_deref())
    } else if let Some(v) = &volume.downward_api {
        (paths.downward_api(name), v.volume_label.as_deref())
    } else if volume.service_account.is_some() {
        (paths.service_account(), None)
    } else if volume.sysprep.is_some() {
        (paths.private.join("sysprep").join(name), Some("unattendCD"))
    } else {
        return Err(DiskError::Unsupported(name.to_owned()));
    };
    let files = config_files(&directory).map_err(|source| DiskError::File { volume: name.to_owned(), source })?;
    if volume.sysprep.is_some()
        && !files.keys().any(|f| ["autounattend.xml", "unattend.xml"].contains(&f.to_ascii_lowercase().as_str()))
    {
        return Err(DiskError::Content {
            volume: name.to_owned(),
            message: "Sysprep drive should contain autounattend.xml or unattend.xml but neither were found.".into(),
        });
    }
    make_iso(name, paths.config_disk(name), label.filter(|l| !l.is_empty()).unwrap_or("cfgdata"), &files)
}
