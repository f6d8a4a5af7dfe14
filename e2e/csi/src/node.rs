//! The node service: kubelet's part of volumes.
//!
//! ```text
//! directory   content ──bind──▶ staging path ──bind──▶ target path
//! ext4        content ─▶ loop device ──mount──▶ staging path ──bind──▶ target path
//! block       content ─▶ loop device ───────────────────────bind──▶ target path
//! ```

use std::{
    collections::BTreeMap,
    fs::{self, File},
    io::{ErrorKind, Seek, SeekFrom},
    os::unix::fs::FileTypeExt,
    path::Path,
    sync::{Mutex, PoisonError},
};

use tonic::{Request, Response, Status, async_trait};

use crate::{
    faults::Operation,
    host,
    mounts::{bind, is_mounted, mount_ext4, unmount},
    proto::csi::v1::{self as csi, node_server, node_service_capability::rpc::Type as Rpc, volume_usage::Unit},
    record::{Content, Id, Volume},
    requests::{check_capability, require, topology},
    store::{Store, failed},
};

type Answer<T> = Result<Response<T>, Status>;

/// Abilities of the service.
const ABILITIES: [Rpc; 3] = [Rpc::StageUnstageVolume, Rpc::GetVolumeStats, Rpc::ExpandVolume];

/// The node service.
pub(crate) struct Node {
    store: Store,
    name: String,
    /// Block devices of staged volumes. Being open keeps the kernel from detaching them before their first use.
    devices: Mutex<BTreeMap<Id, File>>,
}

impl Node {
    pub(crate) fn new(store: Store, name: String) -> Self {
        Self { store, name, devices: Mutex::default() }
    }

    fn devices(&self) -> std::sync::MutexGuard<'_, BTreeMap<Id, File>> {
        self.devices.lock().unwrap_or_else(PoisonError::into_inner)
    }

    async fn stage(&self, volume: &Volume, staging: &Path) -> Result<(), Status> {
        let content = self.store.volumes().content(&volume.id);
        match volume.content {
            Content::Block => {
                if self.devices().contains_key(&volume.id) {
                    return Ok(());
                }
                let device = host::attach(&content).await?;
                let file = File::open(&device).map_err(|error| failed("open", &device, error))?;
                self.devices().insert(volume.id.clone(), file);
                host::release_with_user(&device).await
            }
            _ if is_mounted(staging)? => Ok(()),
            Content::Directory => {
                create_directory(staging)?;
                bind(&content, staging, false)
            }
            Content::Ext4 => {
                create_directory(staging)?;
                let is_in_use = host::device_of(&content).await?.is_some();
                let device = host::attach(&content).await?;
                let mounted = mount_device(&device, staging, volume.size, is_in_use).await;
                // Also without a mount, or the device would stay.
                host::release_with_user(&device).await?;
                mounted
            }
        }
    }

    async fn publish(&self, volume: &Volume, request: &csi::NodePublishVolumeRequest) -> Result<(), Status> {
        let (staging, target) = (Path::new(&request.staging_target_path), Path::new(&request.target_path));
        if is_mounted(target)? {
            return Ok(());
        }
        if volume.content == Content::Block {
            let content = self.store.volumes().content(&volume.id);
            let device = host::device_of(&content).await?;
            let device =
                device.ok_or_else(|| Status::failed_precondition(format!("volume {} is not staged", volume.id)))?;
            if let Some(folder) = target.parent() {
                create_directory(folder)?;
            }
            File::create(target).map_err(|error| failed("create", target, error))?;
            return bind(&device, target, request.readonly);
        }
        if !is_mounted(staging)? {
            return Err(Status::failed_precondition(format!("volume {} is not staged", volume.id)));
        }
        create_directory(target)?;
        bind(staging, target, request.readonly)
    }
}

/// Mounts a device, with a file system of its whole size. `is_in_use` if another node has it mounted.
async fn mount_device(device: &Path, target: &Path, size: u64, is_in_use: bool) -> Result<(), Status> {
    if !is_in_use {
        match host::ext4_size(device)? {
            None => host::format(device).await?,
            Some(present) if present < size => host::grow_unmounted(device).await?,
            Some(_) => {}
        }
    }
    mount_ext4(device, target)
}

fn create_directory(path: &Path) -> Result<(), Status> {
    fs::create_dir_all(path).map_err(|error| failed("create", path, error))
}

/// Returns the space of a file system, or the size of a device.
fn usage(path: &Path) -> Result<Vec<csi::VolumeUsage>, Status> {
    let signed = |value: u64| i64::try_from(value).unwrap_or(i64::MAX);
    let usage = |unit: Unit, total: u64, available: u64| csi::VolumeUsage {
        unit: unit.into(),
        total: signed(total),
        available: signed(available),
        used: signed(total.saturating_sub(available)),
    };
    let metadata = fs::metadata(path).map_err(|error| failed("examine", path, error))?;
    if metadata.file_type().is_block_device() {
        let size = File::open(path).and_then(|mut file| file.seek(SeekFrom::End(0)));
        let size = size.map_err(|error| failed("measure", path, error))?;
        return Ok(vec![csi::VolumeUsage { total: signed(size), unit: Unit::Bytes.into(), ..Default::default() }]);
    }
    let space = rustix::fs::statvfs(path).map_err(|error| failed("measure", path, error.into()))?;
    Ok(vec![
        usage(Unit::Bytes, space.f_blocks * space.f_frsize, space.f_bavail * space.f_frsize),
        usage(Unit::Inodes, space.f_files, space.f_favail),
    ])
}

#[async_trait]
impl node_server::Node for Node {
    async fn node_stage_volume(
        &self,
        request: Request<csi::NodeStageVolumeRequest>,
    ) -> Answer<csi::NodeStageVolumeResponse> {
        let request = request.into_inner();
        require("volume_id", &request.volume_id)?;
        require("staging_target_path", &request.staging_target_path)?;
        request.volume_capability.as_ref().ok_or_else(|| Status::invalid_argument("volume capability is missing"))?;
        let volume = self.store.volumes().get(&request.volume_id)?;
        check_capability(&volume, request.volume_capability.as_ref())?;
        if volume.node.as_ref().is_some_and(|node| *node != self.name) {
            return Err(Status::failed_precondition(format!("volume {} is on another node", volume.id)));
        }
        volume.faults.inject(Operation::Stage).await?;
        let _held = self.store.lock(&volume.id).await?;
        let volume = self.store.volumes().get(&request.volume_id)?;
        self.stage(&volume, Path::new(&request.staging_target_path)).await?;
        Ok(Response::new(csi::NodeStageVolumeResponse {}))
    }

    async fn node_unstage_volume(
        &self,
        request: Request<csi::NodeUnstageVolumeRequest>,
    ) -> Answer<csi::NodeUnstageVolumeResponse> {
        let request = request.into_inner();
        require("volume_id", &request.volume_id)?;
        require("staging_target_path", &request.staging_target_path)?;
        if let Some(id) = Id::parse(&request.volume_id) {
            let _held = self.store.lock(&id).await?;
            unmount(Path::new(&request.staging_target_path))?;
            self.devices().remove(&id);
        }
        Ok(Response::new(csi::NodeUnstageVolumeResponse {}))
    }

    async fn node_publish_volume(
        &self,
        request: Request<csi::NodePublishVolumeRequest>,
    ) -> Answer<csi::NodePublishVolumeResponse> {
        let request = request.into_inner();
        require("volume_id", &request.volume_id)?;
        require("target_path", &request.target_path)?;
        require("staging_target_path", &request.staging_target_path)?;
        request.volume_capability.as_ref().ok_or_else(|| Status::invalid_argument("volume capability is missing"))?;
        let volume = self.store.volumes().get(&request.volume_id)?;
        check_capability(&volume, request.volume_capability.as_ref())?;
        let _held = self.store.lock(&volume.id).await?;
        self.publish(&volume, &request).await?;
        Ok(Response::new(csi::NodePublishVolumeResponse {}))
    }

    async fn node_unpublish_volume(
        &self,
        request: Request<csi::NodeUnpublishVolumeRequest>,
    ) -> Answer<csi::NodeUnpublishVolumeResponse> {
        let request = request.into_inner();
        require("volume_id", &request.volume_id)?;
        require("target_path", &request.target_path)?;
        let target = Path::new(&request.target_path);
        unmount(target)?;
        let removed = match fs::symlink_metadata(target) {
            Ok(found) if found.is_dir() => fs::remove_dir(target),
            Ok(_) => fs::remove_file(target),
            Err(error) => Err(error),
        };
        match removed {
            Err(error) if error.kind() != ErrorKind::NotFound => Err(failed("remove", target, error)),
            _ => Ok(Response::new(csi::NodeUnpublishVolumeResponse {})),
        }
    }

    async fn node_get_volume_stats(
        &self,
        request: Request<csi::NodeGetVolumeStatsRequest>,
    ) -> Answer<csi::NodeGetVolumeStatsResponse> {
        let request = request.into_inner();
        require("volume_id", &request.volume_id)?;
        require("volume_path", &request.volume_path)?;
        self.store.volumes().get(&request.volume_id)?;
        let usage = usage(Path::new(&request.volume_path))?;
        Ok(Response::new(csi::NodeGetVolumeStatsResponse { usage, ..Default::default() }))
    }

    async fn node_expand_volume(
        &self,
        request: Request<csi::NodeExpandVolumeRequest>,
    ) -> Answer<csi::NodeExpandVolumeResponse> {
        let request = request.into_inner();
        require("volume_id", &request.volume_id)?;
        require("volume_path", &request.volume_path)?;
        let volume = self.store.volumes().get(&request.volume_id)?;
        let _held = self.store.lock(&volume.id).await?;
        let volume = self.store.volumes().get(&request.volume_id)?;
        let content = self.store.volumes().content(&volume.id);
        if volume.content != Content::Directory
            && let Some(device) = host::device_of(&content).await?
        {
            host::refresh_size(&device).await?;
            if volume.content == Content::Ext4 && host::ext4_size(&device)?.is_some_and(|size| size < volume.size) {
                host::grow_mounted(&device).await?;
            }
        }
        Ok(Response::new(csi::NodeExpandVolumeResponse {
            capacity_bytes: i64::try_from(volume.size).unwrap_or(i64::MAX),
        }))
    }

    async fn node_get_capabilities(
        &self,
        _: Request<csi::NodeGetCapabilitiesRequest>,
    ) -> Answer<csi::NodeGetCapabilitiesResponse> {
        use csi::node_service_capability::{Rpc, Type};
        let capabilities = ABILITIES
            .map(|ability| csi::NodeServiceCapability { r#type: Some(Type::Rpc(Rpc { r#type: ability.into() })) });
        Ok(Response::new(csi::NodeGetCapabilitiesResponse { capabilities: capabilities.into() }))
    }

    async fn node_get_info(&self, _: Request<csi::NodeGetInfoRequest>) -> Answer<csi::NodeGetInfoResponse> {
        Ok(Response::new(csi::NodeGetInfoResponse {
            node_id: self.name.clone(),
            accessible_topology: Some(topology(&self.name)),
            ..Default::default()
        }))
    }
}
