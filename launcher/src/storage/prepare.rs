//! Prepares a VMI's volumes: creates missing images and grows existing ones.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs::DirBuilder,
    os::unix::fs::{DirBuilderExt, OpenOptionsExt},
    path::{Path, PathBuf},
};

use api::{
    VirtualMachineInstance, quantity,
    vmi::{disks::Disk, features::FeatureState, status::PersistentVolumeClaimInfo, volumes::Volume},
};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;

use super::{
    Backend, DiskError, DiskSource,
    cloud_init::{self, CloudInitData, CloudInitVolume, DataSource, TaggedInterface},
    grow,
    image::{self, BlockSizes, ImageFormat},
    iso::{self, Files},
};
use crate::{
    files::{FileError, UntrustedDir},
    paths::Paths,
};

/// Unit of the sizes of created disks.
const MEBIBYTE: u64 = 1024 * 1024;
/// Limit of a configuration volume's file; a ConfigMap or Secret holds at most 1 MiB.
const CONFIG_FILE_LIMIT: u64 = 4 * 1024 * 1024;
/// File name of the disk image in a claim with a file system.
pub(super) const CLAIM_IMAGE: &str = "disk.img";
/// Limit of a configuration volume's depth.
const CONFIG_DEPTH: usize = 4;

/// Sources of a VMI's disks and boot.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Prepared {
    /// Sources by volume.
    pub(crate) sources: BTreeMap<String, DiskSource>,
    /// Block sizes by volume, for disks that match their volume's.
    pub(crate) block_sizes: BTreeMap<String, BlockSizes>,
    /// Kernel for direct kernel boot.
    pub(crate) kernel: Option<PathBuf>,
    /// Initial RAM disk for direct kernel boot.
    pub(crate) initrd: Option<PathBuf>,
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
    pub(crate) fn of(options: &protocol::MachineOptions) -> Self {
        Self { lack_percent: u64::from(options.tolerated_lack_percent.min(100)), reserve: options.reserved_bytes }
    }
}

/// Creates all images of a VMI. Existing images are kept; an image in a claim grows to the claim's capacity.
///
/// # Errors
/// When a volume's content is invalid or an image cannot be created.
pub(crate) fn prepare(
    vmi: &VirtualMachineInstance,
    paths: &Paths,
    tolerance: &Tolerance,
) -> Result<Prepared, DiskError> {
    let mut prepared = Prepared::default();
    let disks: BTreeSet<&str> = vmi.spec.domain.devices.disks.iter().map(|disk| disk.name.as_str()).collect();
    for (index, volume) in vmi.spec.volumes.iter().enumerate() {
        if !Paths::is_single_component(&volume.name) {
            return Err(DiskError::Name(volume.name.clone()));
        }
        if !disks.contains(volume.name.as_str()) {
            continue;
        }
        if let Some(cloud_init) = cloud_init_volume(volume) {
            prepared.sources.insert(volume.name.clone(), make_cloud_init(&cloud_init, vmi, paths, Vec::new())?);
            continue;
        }
        let source = make(volume, index, vmi, paths, tolerance)?;
        prepared.sources.insert(volume.name.clone(), source);
    }
    for disk in vmi.spec.domain.devices.disks.iter().filter(|disk| matches_volume(disk)) {
        let Some(source) = prepared.sources.get(&disk.name) else { continue };
        let sizes = image::block_sizes(&source.backend)
            .map_err(|source| DiskError::BlockSizes { volume: disk.name.clone(), source })?;
        prepared.block_sizes.insert(disk.name.clone(), sizes);
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
    Ok(prepared)
}

/// Reports a disk with the block sizes of its volume.
fn matches_volume(disk: &Disk) -> bool {
    let matching = disk.block_size.as_ref().and_then(|size| size.match_volume.as_ref());
    matching.is_some_and(FeatureState::is_enabled)
}

fn make(
    volume: &Volume,
    index: usize,
    vmi: &VirtualMachineInstance,
    paths: &Paths,
    tolerance: &Tolerance,
) -> Result<DiskSource, DiskError> {
    let name = volume.name.as_str();
    if let Some(disk) = &volume.container_disk {
        let file = container_disk(name, &paths.container_disk(index), disk.path.as_deref())?;
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
        let (Backend::File { path, .. } | Backend::Block { path }) = claim_source(name, vmi, paths, None)?.backend;
        // Raw, whatever its first bytes are: the disk belongs to the guest, which may have encrypted it.
        let size = device_size(&path).map_err(|source| DiskError::Write { path: path.clone(), source })?;
        return layer(name, path, ImageFormat::Raw, size, paths);
    }
    if volume.persistent_volume_claim.is_some() || volume.data_volume.is_some() {
        return claim_source(name, vmi, paths, Some(tolerance));
    }
    if let Some(host) = &volume.host_disk {
        let file = Path::new(&host.path).file_name().and_then(|f| f.to_str()).unwrap_or_default();
        let create = (host.type_ == "DiskOrCreate").then_some(host.capacity.as_ref()).flatten();
        let size = create.map(|capacity| disk_size(name, capacity)).transpose()?;
        return filesystem_disk(name, &paths.filesystem_volume(name), file, size.map(|size| (size, tolerance)));
    }
    let (directory, label) = if let Some(v) = &volume.config_map {
        (paths.config_map(name), v.volume_label.as_deref())
    } else if let Some(v) = &volume.secret {
        (paths.secret(name), v.volume_label.as_deref())
    } else if let Some(v) = &volume.downward_api {
        (paths.downward_api(name), v.volume_label.as_deref())
    } else if volume.service_account.is_some() {
        (PathBuf::from("/var/run/secrets/kubernetes.io/serviceaccount"), None)
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

/// Finds the image file of a container disk: the spec's path, else the only file in `/disk`.
fn container_disk(volume: &str, directory: &Path, path: Option<&str>) -> Result<PathBuf, DiskError> {
    let failed = |source| DiskError::File { volume: volume.to_owned(), source };
    let image = UntrustedDir::open(directory).map_err(failed)?;
    if let Some(path) = path.filter(|p| !p.is_empty()) {
        return image.regular_file(Path::new(path)).map_err(failed);
    }
    let entries = image.entries(Path::new("disk")).map_err(failed)?;
    let [only] = entries.as_slice() else {
        return Err(DiskError::NotOneFile { volume: volume.to_owned(), count: entries.len() });
    };
    image.regular_file(&Path::new("disk").join(only)).map_err(failed)
}

/// Creates a writable overlay over an image.
fn layer(
    volume: &str,
    backing: PathBuf,
    format: ImageFormat,
    size: u64,
    paths: &Paths,
) -> Result<DiskSource, DiskError> {
    let path = paths.overlay(volume);
    make_parent(&path)?;
    // A disk has whole sectors; a raw file may not.
    let size = size.next_multiple_of(512);
    image::create_qcow2(&path, size, Some((&backing, format)))
        .map_err(|source| DiskError::Image { volume: volume.to_owned(), source })?;
    let direct_io = image::supports_direct_io(&path) && image::supports_direct_io(&backing);
    Ok(DiskSource {
        backend: Backend::File { path, format: ImageFormat::Qcow2 },
        backing: Some((backing, format)),
        direct_io,
        preallocated: false,
        made_size: 0,
    })
}

/// Returns the source of a claim: a block device, or the image file in its file system. With a tolerance the image
/// belongs to the VMI: it is created if missing and grows to the claim's capacity.
fn claim_source(
    volume: &str,
    vmi: &VirtualMachineInstance,
    paths: &Paths,
    own: Option<&Tolerance>,
) -> Result<DiskSource, DiskError> {
    let device = paths.block_volume(volume);
    if image::is_block_device(&device) {
        let direct_io = image::supports_direct_io(&device);
        return Ok(DiskSource {
            backend: Backend::Block { path: device },
            backing: None,
            direct_io,
            preallocated: false,
            made_size: 0,
        });
    }
    let info = claim_info(volume, vmi);
    let own = match (own, info) {
        (Some(tolerance), Some(info)) => claim_size(volume, info)?.map(|size| (size, tolerance)),
        _ => None,
    };
    let source = filesystem_disk(volume, &paths.filesystem_volume(volume), CLAIM_IMAGE, own)?;
    // The image of a CD-ROM has its final size, and other VMIs may use it.
    let in_drive = vmi.spec.domain.devices.disks.iter().any(|disk| disk.name == volume && disk.cdrom.is_some());
    if !in_drive
        && let (Backend::File { path, .. }, Some((size, _))) = (&source.backend, own)
        && let Err(error) =
            grow::grow(path, size, info.and_then(|info| info.filesystem_overhead.as_deref()), source.preallocated)
    {
        // For example a read-only claim. The guest still has its disk.
        tracing::warn!(volume, %error, "cannot resize the image to its claim");
    }
    Ok(source)
}

pub(super) fn claim_info<'a>(volume: &str, vmi: &'a VirtualMachineInstance) -> Option<&'a PersistentVolumeClaimInfo> {
    vmi.status
        .iter()
        .flat_map(|status| &status.volume_status)
        .find(|status| status.name == volume)
        .and_then(|status| status.persistent_volume_claim_info.as_ref())
}

/// Returns the size of a new image in a claim: the request, or the capacity if that is less.
pub(super) fn claim_size(volume: &str, info: &PersistentVolumeClaimInfo) -> Result<Option<u64>, DiskError> {
    let read = |quantity: Option<&Quantity>| quantity.map(|q| disk_size(volume, q)).transpose();
    let capacity = read(info.capacity.get("storage"))?;
    let request = read(info.requests.get("storage"))?;
    Ok(match (capacity, request) {
        (Some(capacity), Some(request)) => Some(capacity.min(request)),
        (one, other) => one.or(other),
    })
}

fn disk_size(volume: &str, quantity: &Quantity) -> Result<u64, DiskError> {
    let bytes = quantity::units(quantity).map_err(|_| DiskError::Quantity(volume.to_owned()))?;
    let size = u64::try_from(bytes).unwrap_or_default() / MEBIBYTE * MEBIBYTE;
    if size == 0 { Err(DiskError::TooSmall(volume.to_owned())) } else { Ok(size) }
}

fn filesystem_disk(
    volume: &str,
    directory: &Path,
    file: &str,
    create: Option<(u64, &Tolerance)>,
) -> Result<DiskSource, DiskError> {
    let failed = |source| DiskError::File { volume: volume.to_owned(), source };
    let dir = UntrustedDir::open(directory).map_err(failed)?;
    if !Paths::is_single_component(file) {
        return Err(DiskError::Name(file.to_owned()));
    }
    let path = match (dir.regular_file(Path::new(file)), create) {
        (Err(FileError::Open { source: rustix::io::Errno::NOENT, .. }), Some((size, tolerance))) => {
            make_raw(&directory.join(file), directory, size, tolerance)?;
            dir.regular_file(Path::new(file)).map_err(failed)?
        }
        (result, _) => result.map_err(failed)?,
    };
    let mut source = file_source(path.clone(), ImageFormat::Raw);
    source.preallocated = image::is_preallocated(&path);
    Ok(source)
}

/// Creates a raw image as a sparse file.
fn make_raw(path: &Path, directory: &Path, size: u64, tolerance: &Tolerance) -> Result<(), DiskError> {
    let failed = |source| DiskError::Write { path: path.to_owned(), source };
    let stat = rustix::fs::statvfs(directory).map_err(|e| failed(e.into()))?;
    let free = stat.f_bavail.saturating_mul(stat.f_frsize).saturating_sub(tolerance.reserve);
    let mut granted = size;
    if size > free {
        let lack = tolerance.lack_percent;
        if size / 100 * 100_u64.saturating_sub(lack) > free {
            return Err(DiskError::NoSpace { path: path.to_owned(), wanted: size, free, lack });
        }
        granted = free / MEBIBYTE * MEBIBYTE;
        tracing::warn!(
            path = %path.display(),
            "PV size too small: expected {size} B, found {free} B. Using it anyway, it is within {lack} % toleration"
        );
    }
    // Exclusive: never replace a file or follow a link that appears meanwhile.
    let file = std::fs::OpenOptions::new().write(true).create_new(true).mode(0o660).open(path).map_err(failed)?;
    file.set_len(granted).map_err(failed)
}

pub(super) fn device_size(path: &Path) -> std::io::Result<u64> {
    use std::io::{Seek, SeekFrom};
    std::fs::File::open(path)?.seek(SeekFrom::End(0))
}

fn file_source(path: PathBuf, format: ImageFormat) -> DiskSource {
    let direct_io = image::supports_direct_io(&path);
    DiskSource { backend: Backend::File { path, format }, backing: None, direct_io, preallocated: false, made_size: 0 }
}

fn cloud_init_volume(volume: &Volume) -> Option<CloudInitVolume<'_>> {
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

/// Creates the cloud-init image again with the tagged interfaces, whose addresses are known only after the domain is
/// defined. Returns its volume and size; `None` if the data source cannot hold tags.
///
/// # Errors
/// When the image cannot be created.
pub(crate) fn write_interface_tags(
    vmi: &VirtualMachineInstance,
    paths: &Paths,
    interfaces: Vec<TaggedInterface>,
) -> Result<Option<(String, u64)>, DiskError> {
    let disks = &vmi.spec.domain.devices.disks;
    let mut volumes = vmi.spec.volumes.iter().filter(|volume| disks.iter().any(|disk| disk.name == volume.name));
    match volumes.find_map(cloud_init_volume) {
        Some(volume) if volume.source == DataSource::ConfigDrive => {
            let source = make_cloud_init(&volume, vmi, paths, interfaces)?;
            Ok(Some((volume.name.to_owned(), source.made_size)))
        }
        _ => Ok(None),
    }
}

fn make_cloud_init(
    volume: &CloudInitVolume<'_>,
    vmi: &VirtualMachineInstance,
    paths: &Paths,
    interfaces: Vec<TaggedInterface>,
) -> Result<DiskSource, DiskError> {
    let data = CloudInitData { interfaces, ..cloud_init::collect(volume, vmi, paths)? };
    let files = cloud_init::files(volume.source, vmi, data);
    make_iso(volume.name, paths.cloud_init(volume.name), volume.source.label(), &files)
}

fn make_iso(volume: &str, path: PathBuf, label: &str, files: &Files) -> Result<DiskSource, DiskError> {
    make_parent(&path)?;
    let size =
        iso::write(&path, label, files).map_err(|source| DiskError::Iso { volume: volume.to_owned(), source })?;
    let mut source = file_source(path, ImageFormat::Raw);
    source.made_size = size;
    Ok(source)
}

/// Reads the files of a mounted configMap, secret or downwardAPI volume.
fn config_files(directory: &Path) -> Result<Files, FileError> {
    let dir = UntrustedDir::open(directory)?;
    let mut files = Files::new();
    let mut queue = vec![(PathBuf::from("."), 0)];
    while let Some((relative, depth)) = queue.pop() {
        for name in dir.entries(&relative)? {
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

fn make_parent(path: &Path) -> Result<(), DiskError> {
    let parent = path.parent().unwrap_or(path);
    DirBuilder::new()
        .recursive(true)
        .mode(0o750)
        .create(parent)
        .map_err(|source| DiskError::Write { path: parent.to_owned(), source })
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    /// Default settings of a cluster.
    const DEFAULT: Tolerance = Tolerance { lack_percent: 10, reserve: 131_072 };

    struct Scratch(Paths, PathBuf);

    impl Scratch {
        fn new(name: &str) -> Self {
            let root = std::env::temp_dir().join(format!("launcher-prepare-{name}-{}", std::process::id()));
            let _ = std::fs::remove_dir_all(&root);
            let paths = Paths {
                private: root.join("private"),
                sockets: root.join("sockets"),
                runtime: root.join("run"),
                ephemeral: root.join("ephemeral"),
                container_disks: root.join("images"),
                kernel_boot: root.join("kernel"),
                dev: root.join("dev"),
            };
            for dir in ["private/vmi-disks/data", "private/config-map/cm", "images/disk_0/disk", "kernel/boot"] {
                std::fs::create_dir_all(root.join(dir)).unwrap();
            }
            Self(paths, root)
        }
    }

    impl Drop for Scratch {
        fn drop(&mut self) {
            let _ = std::fs::remove_dir_all(&self.1);
        }
    }

    fn vmi(volume: serde_json::Value) -> VirtualMachineInstance {
        let name = volume["name"].clone();
        serde_json::from_value(json!({
            "apiVersion": "kubevirt.io/v1", "kind": "VirtualMachineInstance",
            "metadata": {"name": "vm", "namespace": "ns", "uid": "u"},
            "spec": {"domain": {"devices": {"disks": [{"name": name, "disk": {"bus": "virtio"}}]}}, "volumes": [volume]},
        }))
        .unwrap()
    }

    #[test]
    fn a_container_disk_gets_a_layer_of_its_size() {
        let scratch = Scratch::new("layer");
        std::fs::write(scratch.1.join("images/disk_0/disk/any.img"), vec![1; 1000]).unwrap();
        let vmi = vmi(json!({"name": "root", "containerDisk": {"image": "x"}}));
        let source = prepare(&vmi, &scratch.0, &DEFAULT).unwrap().sources.remove("root").unwrap();
        assert_eq!(source.backend, Backend::File { path: scratch.0.overlay("root"), format: ImageFormat::Qcow2 });
        assert_eq!(source.backing.unwrap().1, ImageFormat::Raw);
        assert_eq!(&std::fs::read(scratch.0.overlay("root")).unwrap()[24..32], &1024_u64.to_be_bytes());
    }

    #[test]
    fn an_overlay_over_a_claim_ignores_the_content_of_the_disk() {
        let scratch = Scratch::new("ephemeral");
        let image = scratch.1.join("private/vmi-disks/data/disk.img");
        let vmi = vmi(json!({"name": "data", "ephemeral": {"persistentVolumeClaim": {"claimName": "c"}}}));
        for start in [b"LUKS\xba\xbe\0\x01", b"QFI\xfb\0\0\0\x03"] {
            let mut content = start.to_vec();
            content.resize(2048, 0);
            std::fs::write(&image, content).unwrap();
            let source = prepare(&vmi, &scratch.0, &DEFAULT).unwrap().sources.remove("data").unwrap();
            assert_eq!(source.backing.unwrap().1, ImageFormat::Raw);
            assert_eq!(&std::fs::read(scratch.0.overlay("data")).unwrap()[24..32], &2048_u64.to_be_bytes());
            std::fs::remove_file(scratch.0.overlay("data")).unwrap();
        }
    }

    #[test]
    fn an_image_with_two_files_or_none_is_refused() {
        let scratch = Scratch::new("count");
        let vmi = vmi(json!({"name": "root", "containerDisk": {"image": "x"}}));
        assert!(matches!(prepare(&vmi, &scratch.0, &DEFAULT), Err(DiskError::NotOneFile { count: 0, .. })));
        for name in ["a", "b"] {
            std::fs::write(scratch.1.join("images/disk_0/disk").join(name), "x").unwrap();
        }
        assert!(matches!(prepare(&vmi, &scratch.0, &DEFAULT), Err(DiskError::NotOneFile { count: 2, .. })));
    }

    #[test]
    fn cve_2022_1798_the_path_of_a_container_disk_stays_in_the_image() {
        let scratch = Scratch::new("cve-2022-1798");
        std::fs::write(scratch.1.join("secret"), "x").unwrap();
        for path in ["../../secret", "/disk/../../../secret"] {
            let vmi = vmi(json!({"name": "root", "containerDisk": {"image": "x", "path": path}}));
            assert!(matches!(prepare(&vmi, &scratch.0, &DEFAULT), Err(DiskError::File { .. })), "{path}");
        }
    }

    #[test]
    fn a_claim_without_an_image_gets_one_of_the_smaller_of_request_and_capacity() {
        let scratch = Scratch::new("claim");
        let mut vmi = vmi(json!({"name": "data", "persistentVolumeClaim": {"claimName": "c"}}));
        assert!(prepare(&vmi, &scratch.0, &DEFAULT).is_err());
        vmi.status = Some(
            serde_json::from_value(json!({"volumeStatus": [{"name": "data", "target": "", "persistentVolumeClaimInfo":
                {"capacity": {"storage": "5Mi"}, "requests": {"storage": "3500Ki"}}}]}))
            .unwrap(),
        );
        prepare(&vmi, &scratch.0, &DEFAULT).unwrap();
        let path = scratch.1.join("private/vmi-disks/data/disk.img");
        assert_eq!(std::fs::metadata(&path).unwrap().len(), 3 * MEBIBYTE);
        std::fs::write(&path, "kept").unwrap();
        prepare(&vmi, &scratch.0, &DEFAULT).unwrap();
        let image = std::fs::read(&path).unwrap();
        assert!(image.starts_with(b"kept") && image.len() as u64 == 2 * MEBIBYTE, "grown to what is left of it");
    }

    #[test]
    fn an_image_in_a_drive_stays_as_it_is() {
        let scratch = Scratch::new("drive");
        let path = scratch.1.join("private/vmi-disks/data/disk.img");
        let mut vmi = vmi(json!({"name": "data", "persistentVolumeClaim": {"claimName": "c"}}));
        vmi.status = Some(
            serde_json::from_value(json!({"volumeStatus": [{"name": "data", "target": "", "persistentVolumeClaimInfo":
                {"capacity": {"storage": "5Mi"}, "requests": {"storage": "5Mi"}}}]}))
            .unwrap(),
        );
        for (disk, length) in [
            (json!({"name": "data", "cdrom": {"bus": "sata"}}), 2048),
            (json!({"name": "data", "disk": {"bus": "sata"}}), 4 * MEBIBYTE),
        ] {
            std::fs::write(&path, [7_u8; 2048]).unwrap();
            vmi.spec.domain.devices.disks[0] = serde_json::from_value(disk.clone()).unwrap();
            prepare(&vmi, &scratch.0, &DEFAULT).unwrap();
            assert_eq!(std::fs::metadata(&path).unwrap().len(), length, "{disk}");
        }
    }

    #[test]
    fn the_cluster_limits_the_lack_of_a_claim() {
        let scratch = Scratch::new("tolerance");
        let directory = scratch.1.join("private/vmi-disks/data");
        let stat = rustix::fs::statvfs(&directory).unwrap();
        let free = stat.f_bavail.saturating_mul(stat.f_frsize);
        // Free space changes during the test, so the rows stay far from the limits.
        for (wanted, lack_percent, reserve, made) in [
            (free / 4, 0, 0, true),
            (free / 4, 0, free, false),
            (free * 2, 10, 0, false),
            (free * 2, 75, 0, true),
            (free * 2, 100, free, true),
        ] {
            let path = directory.join("made.img");
            let _ = std::fs::remove_file(&path);
            let result = make_raw(&path, &directory, wanted, &Tolerance { lack_percent, reserve });
            assert_eq!(result.is_ok(), made, "{lack_percent} {result:?}");
        }
    }

    #[test]
    fn cve_2025_64433_a_link_in_a_claim_is_not_followed_out_of_it() {
        let scratch = Scratch::new("cve-2025-64433");
        std::fs::write(scratch.1.join("secret"), "x").unwrap();
        std::os::unix::fs::symlink("../../../secret", scratch.1.join("private/vmi-disks/data/disk.img")).unwrap();
        let vmi = vmi(json!({"name": "data", "persistentVolumeClaim": {"claimName": "c"}}));
        assert!(matches!(prepare(&vmi, &scratch.0, &DEFAULT), Err(DiskError::File { .. })));
    }

    #[test]
    fn a_config_map_becomes_an_image_of_its_keys() {
        let scratch = Scratch::new("config");
        let dir = scratch.1.join("private/config-map/cm");
        std::fs::create_dir_all(dir.join("..2026")).unwrap();
        std::fs::write(dir.join("..2026/key"), "value").unwrap();
        std::os::unix::fs::symlink("..2026", dir.join("..data")).unwrap();
        std::os::unix::fs::symlink("..data/key", dir.join("key")).unwrap();
        assert_eq!(config_files(&dir).unwrap(), Files::from([("key".to_owned(), b"value".to_vec())]));
        let vmi = vmi(json!({"name": "cm", "configMap": {"name": "c"}}));
        assert!(prepare(&vmi, &scratch.0, &DEFAULT).unwrap().sources["cm"].made_size > 0);
    }

    #[test]
    fn block_sizes_are_looked_up_where_the_disk_matches_those_of_the_volume() {
        let scratch = Scratch::new("blocks");
        let mut vmi = vmi(json!({"name": "e", "emptyDisk": {"capacity": "2Mi"}}));
        assert!(prepare(&vmi, &scratch.0, &DEFAULT).unwrap().block_sizes.is_empty());
        let disk = &mut vmi.spec.domain.devices.disks[0];
        disk.block_size = serde_json::from_value(json!({"matchVolume": {}})).unwrap();
        assert!(prepare(&vmi, &scratch.0, &DEFAULT).unwrap().block_sizes["e"].logical >= 512);
    }

    #[test]
    fn tags_of_interfaces_are_written_to_a_config_drive_only() {
        let scratch = Scratch::new("roles");
        let interface = TaggedInterface { address: "0000:01:00.0".into(), mac: "02::1".into(), tag: "backup".into() };
        for (kind, tagged) in [("cloudInitConfigDrive", true), ("cloudInitNoCloud", false)] {
            let vmi = vmi(json!({"name": "ci", kind: {"userData": "x"}}));
            let before = prepare(&vmi, &scratch.0, &DEFAULT).unwrap().sources["ci"].made_size;
            let after = write_interface_tags(&vmi, &scratch.0, vec![interface.clone()]).unwrap();
            assert_eq!(after.is_some_and(|(volume, size)| volume == "ci" && size >= before), tagged, "{kind}");
            let image = std::fs::read(scratch.0.cloud_init("ci")).unwrap();
            let has_tag = image.windows(8).any(|text| text == b"\"backup\"");
            assert_eq!(has_tag, tagged, "{kind}");
        }
    }

    #[test]
    fn an_empty_disk_below_one_mebibyte_is_refused() {
        let scratch = Scratch::new("empty");
        let vmi = vmi(json!({"name": "e", "emptyDisk": {"capacity": "1000Ki"}}));
        assert!(matches!(prepare(&vmi, &scratch.0, &DEFAULT), Err(DiskError::TooSmall(_))));
    }

    #[test]
    fn cve_2025_64324_a_host_disk_is_made_only_where_nothing_is() {
        let scratch = Scratch::new("cve-2025-64324");
        std::fs::write(scratch.1.join("secret"), "kept").unwrap();
        let directory = scratch.1.join("private/vmi-disks/data");
        let source = json!({"path": "/data/disk.img", "type": "DiskOrCreate", "capacity": "4Mi"});
        let vmi = vmi(json!({"name": "data", "hostDisk": source}));
        // A link out of the directory to a file, to nothing, and a link to nothing within.
        for target in ["../../../secret", "../../../absent", "gone"] {
            std::os::unix::fs::symlink(target, directory.join("disk.img")).unwrap();
            let made = prepare(&vmi, &scratch.0, &DEFAULT);
            assert!(matches!(made, Err(DiskError::File { .. } | DiskError::Write { .. })), "{target}: {made:?}");
            std::fs::remove_file(directory.join("disk.img")).unwrap();
        }
        assert_eq!(std::fs::read(scratch.1.join("secret")).unwrap(), b"kept");
        assert!(!scratch.1.join("absent").exists() && !directory.join("gone").exists());
    }
}
