//! Images made of configMap, secret and downwardAPI volumes and of cloud-init's data.

use std::path::{Path, PathBuf};

use api::{VirtualMachineInstance, vmi::volumes::Volume};

use super::{
    Purpose,
    disk_images::{file_source, make_parent},
    is_copied,
};
use crate::{
    files::{FileError, UntrustedDir},
    paths::Paths,
    storage::{
        DiskError, DiskSource,
        cloud_init::{self, CloudInitData, CloudInitVolume, DataSource, TaggedDevice},
        image::ImageFormat,
        iso::{self, Files},
    },
};

/// Limit of a configuration volume's file; a ConfigMap or Secret holds at most 1 MiB.
const CONFIG_FILE_LIMIT: u64 = 4 * 1024 * 1024;
/// Limit of a configuration volume's depth.
const CONFIG_DEPTH: usize = 4;

pub(super) fn cloud_init_volume(volume: &Volume) -> Option<CloudInitVolume<'_>> {
    macro_rules! common {
        ($kind:expr, $from:expr) => {
            CloudInitVolume {
                source: $kind,
                name: &volume.name,
                user_data: $from.user_data.as_deref(),
                user_data_base64: $from.user_data_base64.as_deref(),
                network_data: $from.network_data.as_deref(),
                network_data_base64: $from.network_data_base64.as_deref(),
                user_data_secret: $from.secret_ref.as_ref().is_some_and(|secret| !secret.name.is_empty()),
                network_data_secret: $from
                    .network_data_secret_ref
                    .as_ref()
                    .is_some_and(|secret| !secret.name.is_empty()),
            }
        };
    }
    if let Some(source) = &volume.cloud_init_no_cloud {
        return Some(common!(DataSource::NoCloud, source));
    }
    volume.cloud_init_config_drive.as_ref().map(|source| common!(DataSource::ConfigDrive, source))
}

/// Creates the cloud-init image again with the tagged devices, whose addresses are known only after the domain is
/// defined. Returns its volume and size; `None` if the data source cannot hold tags, or if the image comes from the source of a
/// migration.
pub(crate) fn write_tags(
    vmi: &VirtualMachineInstance,
    paths: &Paths,
    devices: Vec<TaggedDevice>,
    purpose: Purpose,
) -> Result<Option<(String, u64)>, DiskError> {
    let disks = &vmi.spec.domain.devices.disks;
    let mut volumes = vmi.spec.volumes.iter().filter(|volume| disks.iter().any(|disk| disk.name == volume.name));
    let volume = match volumes.find_map(cloud_init_volume) {
        Some(volume) if volume.source == DataSource::ConfigDrive => volume,
        _ => return Ok(None),
    };
    let name = volume.name.to_owned();
    match purpose {
        Purpose::Start => {
            let source = make_cloud_init(&volume, vmi, paths, devices)?;
            Ok(Some((name, source.made_size)))
        }
        Purpose::MigrationTarget if disks.iter().any(|disk| disk.name == name && is_copied(disk)) => Ok(None),
        // QEMU has opened the image. The guest's disk keeps its size: the files end far before the padding does.
        Purpose::MigrationTarget => {
            let files = cloud_init_files(&volume, vmi, paths, devices)?;
            match iso::overwrite(&paths.cloud_init(&name), volume.source.label(), &files) {
                Ok(size) => Ok(Some((name, size))),
                Err(source) => Err(DiskError::Iso { volume: name, source }),
            }
        }
    }
}

pub(super) fn make_cloud_init(
    volume: &CloudInitVolume<'_>,
    vmi: &VirtualMachineInstance,
    paths: &Paths,
    devices: Vec<TaggedDevice>,
) -> Result<DiskSource, DiskError> {
    let files = cloud_init_files(volume, vmi, paths, devices)?;
    make_iso(volume.name, paths.cloud_init(volume.name), volume.source.label(), &files)
}

fn cloud_init_files(
    volume: &CloudInitVolume<'_>,
    vmi: &VirtualMachineInstance,
    paths: &Paths,
    devices: Vec<TaggedDevice>,
) -> Result<Files, DiskError> {
    let data = CloudInitData { devices, ..cloud_init::collect(volume, vmi, paths)? };
    Ok(cloud_init::files(volume.source, vmi, data))
}

pub(super) fn make_iso(volume: &str, path: PathBuf, label: &str, files: &Files) -> Result<DiskSource, DiskError> {
    make_parent(&path)?;
    let size =
        iso::write(&path, label, files).map_err(|source| DiskError::Iso { volume: volume.to_owned(), source })?;
    let mut source = file_source(path, ImageFormat::Raw);
    source.made_size = size;
    Ok(source)
}

/// Reads the files of a mounted configMap, secret or downwardAPI volume.
pub(super) fn config_files(directory: &Path) -> Result<Files, FileError> {
    let dir = UntrustedDir::open(directory)?;
    let mut files = Files::new();
    let mut queue = vec![(PathBuf::from("."), 0)];
    while let Some((relative, depth)) = queue.pop() {
        for name in dir.keys(&relative)? {
            let path = if depth == 0 { PathBuf::from(&name) } else { relative.join(&name) };
            match dir.read(&path, CONFIG_FILE_LIMIT) {
                Ok(content) => {
                    files.insert(path.to_string_lossy().into_owned(), content);
                }
                Err(FileError::NotRegular(_)) if depth < CONFIG_DEPTH => queue.push((path, depth + 1)),
                Err(error) => return Err(error),
            }
        }
    }
    Ok(files)
}
