//! The controller service: creation, deletion and expansion of volumes, and snapshots.

use std::{
    fs::File,
    path::Path,
    time::{SystemTime, UNIX_EPOCH},
};

use prost_types::Timestamp;
use tonic::{Request, Response, Status, async_trait};

use crate::{
    faults::Operation,
    host,
    proto::csi::v1::{self as csi, controller_server, controller_service_capability::rpc::Type as Rpc},
    record::{Content, Id, Snapshot, Source, Volume},
    requests::{Parameters, check_capability, choose_node, choose_size, fits, invalid, page, require, topology},
    store::{Store, failed},
};

type Answer<T> = Result<Response<T>, Status>;

/// Abilities of the service.
const ABILITIES: [Rpc; 7] = [
    Rpc::CreateDeleteVolume,
    Rpc::ListVolumes,
    Rpc::GetCapacity,
    Rpc::CreateDeleteSnapshot,
    Rpc::ListSnapshots,
    Rpc::CloneVolume,
    Rpc::ExpandVolume,
];

/// The controller service.
pub(crate) struct Controller {
    store: Store,
}

impl Controller {
    pub(crate) fn new(store: Store) -> Self {
        Self { store }
    }

    /// Returns the source that a request names, and its size and content.
    fn source(&self, source: Option<&csi::VolumeContentSource>) -> Result<Option<(Source, u64, Content)>, Status> {
        use csi::volume_content_source::Type;
        match source.map(|source| source.r#type.as_ref()) {
            None => Ok(None),
            Some(None) => Err(invalid("the type of the content source is missing")),
            Some(Some(Type::Snapshot(source))) => {
                let snapshot = self.store.snapshots().get(&source.snapshot_id)?;
                Ok(Some((Source::Snapshot(snapshot.id), snapshot.size, snapshot.content)))
            }
            Some(Some(Type::Volume(source))) => {
                let volume = self.store.volumes().get(&source.volume_id)?;
                check_snapshots(&volume)?;
                Ok(Some((Source::Volume(volume.id), volume.size, volume.content)))
            }
        }
    }

    /// Returns the volume that a request describes.
    fn describe(&self, request: &csi::CreateVolumeRequest) -> Result<Volume, Status> {
        let parameters = Parameters::parse(&request.parameters)?;
        let content = parameters.content(&request.volume_capabilities)?;
        let source = self.source(request.volume_content_source.as_ref())?;
        if source.as_ref().is_some_and(|(_, _, other)| !content.accepts(*other)) {
            return Err(invalid("the content source is a directory and the volume a device, or the reverse"));
        }
        let size = choose_size(request.capacity_range.as_ref(), source.as_ref().map_or(0, |(_, size, _)| *size))?;
        let node = match parameters.one_node {
            true => Some(choose_node(request.accessibility_requirements.as_ref())?),
            false => None,
        };
        Ok(Volume {
            id: Id::of_name(&request.name),
            name: request.name.clone(),
            size,
            content,
            node,
            source: source.map(|(source, _, _)| source),
            snapshots: parameters.snapshots,
            faults: parameters.faults,
        })
    }

    /// Makes the content of a volume and records it.
    async fn create(&self, volume: &Volume) -> Result<(), Status> {
        let draft = self.store.volumes().draft(&volume.id)?;
        match &volume.source {
            None if volume.content == Content::Directory => {
                std::fs::create_dir(&draft).map_err(|error| failed("create", &draft, error))?;
            }
            None => {}
            Some(Source::Snapshot(id)) => {
                let _held = self.store.lock(id).await?;
                host::copy(&self.store.snapshots().content(id), &draft).await?;
            }
            Some(Source::Volume(id)) => {
                let _held = self.store.lock(id).await?;
                self.copy_volume(&self.store.volumes().get(&id.to_string())?, &draft).await?;
            }
        }
        if volume.content != Content::Directory {
            grow(&draft, volume.size)?;
        }
        self.store.volumes().complete(&volume.id, volume)
    }

    /// Copies the content of a volume that may be in use. What its users have not flushed may be missing in the copy.
    async fn copy_volume(&self, volume: &Volume, target: &Path) -> Result<(), Status> {
        let content = self.store.volumes().content(&volume.id);
        if volume.content != Content::Directory
            && let Some(device) = host::device_of(&content).await?
        {
            if volume.content == Content::Ext4 {
                // The file system is mounted in the mount namespaces of nodes only.
                tokio::task::spawn_blocking(rustix::fs::sync)
                    .await
                    .map_err(|error| Status::internal(error.to_string()))?;
            }
            host::flush(&device).map_err(|error| failed("flush", &device, error))?;
        }
        host::copy(&content, target).await
    }
}

/// Makes a file as long as this, without writing to it.
fn grow(path: &Path, size: u64) -> Result<(), Status> {
    let file = File::options().write(true).create(true).truncate(false).open(path);
    file.and_then(|file| if file.metadata()?.len() < size { file.set_len(size) } else { Ok(()) })
        .map_err(|error| failed("grow", path, error))
}

fn check_snapshots(volume: &Volume) -> Result<(), Status> {
    match volume.snapshots {
        true => Ok(()),
        false => Err(Status::failed_precondition(format!(
            "volume {} cannot be copied: its storage class has snapshots=false",
            volume.id
        ))),
    }
}

fn bytes(size: u64) -> i64 {
    i64::try_from(size).unwrap_or(i64::MAX)
}

fn volume_answer(volume: &Volume) -> csi::Volume {
    use csi::volume_content_source::{SnapshotSource, Type, VolumeSource};
    let source = volume.source.as_ref().map(|source| match source {
        Source::Snapshot(id) => Type::Snapshot(SnapshotSource { snapshot_id: id.to_string() }),
        Source::Volume(id) => Type::Volume(VolumeSource { volume_id: id.to_string() }),
    });
    csi::Volume {
        capacity_bytes: bytes(volume.size),
        volume_id: volume.id.to_string(),
        content_source: source.map(|source| csi::VolumeContentSource { r#type: Some(source) }),
        accessible_topology: volume.node.iter().map(|node| topology(node)).collect(),
        ..Default::default()
    }
}

fn snapshot_answer(snapshot: &Snapshot) -> csi::Snapshot {
    csi::Snapshot {
        size_bytes: bytes(snapshot.size),
        snapshot_id: snapshot.id.to_string(),
        source_volume_id: snapshot.source.to_string(),
        creation_time: Some(Timestamp { seconds: snapshot.created, nanos: 0 }),
        ready_to_use: true,
        ..Default::default()
    }
}

fn now() -> i64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    i64::try_from(since.as_secs()).unwrap_or(i64::MAX)
}

/// Returns true if an existing volume is what a request for the same name describes. The node was chosen before.
fn is_same(existing: &Volume, wanted: &Volume, range: Option<&csi::CapacityRange>) -> bool {
    let wanted = Volume { size: existing.size, node: existing.node.clone(), ..wanted.clone() };
    *existing == wanted && fits(existing.size, range)
}

#[async_trait]
impl controller_server::Controller for Controller {
    async fn create_volume(&self, request: Request<csi::CreateVolumeRequest>) -> Answer<csi::CreateVolumeResponse> {
        let request = request.into_inner();
        require("name", &request.name)?;
        let volume = self.describe(&request)?;
        volume.faults.inject(Operation::Create).await?;
        let _held = self.store.lock(&volume.id).await?;
        let volume = match self.store.volumes().find(&volume.id)? {
            Some(existing) if is_same(&existing, &volume, request.capacity_range.as_ref()) => existing,
            Some(_) => return Err(Status::already_exists(format!("volume {} exists and differs", volume.name))),
            None => {
                self.create(&volume).await?;
                volume
            }
        };
        Ok(Response::new(csi::CreateVolumeResponse { volume: Some(volume_answer(&volume)) }))
    }

    async fn delete_volume(&self, request: Request<csi::DeleteVolumeRequest>) -> Answer<csi::DeleteVolumeResponse> {
        let id = request.into_inner().volume_id;
        require("volume_id", &id)?;
        let answer = Ok(Response::new(csi::DeleteVolumeResponse {}));
        let Some(id) = Id::parse(&id) else { return answer };
        let _held = self.store.lock(&id).await?;
        let Some(volume) = self.store.volumes().find(&id)? else { return answer };
        volume.faults.inject(Operation::Delete).await?;
        let content = self.store.volumes().content(&id);
        if volume.content != Content::Directory && host::device_of(&content).await?.is_some() {
            return Err(Status::failed_precondition(format!("volume {id} is in use on a node")));
        }
        self.store.volumes().remove(&id)?;
        answer
    }

    async fn validate_volume_capabilities(
        &self,
        request: Request<csi::ValidateVolumeCapabilitiesRequest>,
    ) -> Answer<csi::ValidateVolumeCapabilitiesResponse> {
        use csi::validate_volume_capabilities_response::Confirmed;
        let request = request.into_inner();
        require("volume_id", &request.volume_id)?;
        if request.volume_capabilities.is_empty() {
            return Err(invalid("volume capabilities are missing"));
        }
        let volume = self.store.volumes().get(&request.volume_id)?;
        let checked: Result<Vec<()>, Status> =
            request.volume_capabilities.iter().map(|capability| check_capability(&volume, Some(capability))).collect();
        Ok(Response::new(match checked {
            Ok(_) => csi::ValidateVolumeCapabilitiesResponse {
                confirmed: Some(Confirmed {
                    volume_context: request.volume_context,
                    volume_capabilities: request.volume_capabilities,
                    parameters: request.parameters,
                    ..Default::default()
                }),
                message: String::new(),
            },
            Err(status) => {
                csi::ValidateVolumeCapabilitiesResponse { confirmed: None, message: status.message().to_owned() }
            }
        }))
    }

    async fn list_volumes(&self, request: Request<csi::ListVolumesRequest>) -> Answer<csi::ListVolumesResponse> {
        use csi::list_volumes_response::Entry;
        let request = request.into_inner();
        let (volumes, next_token) = page(self.store.volumes().list()?, &request.starting_token, request.max_entries)?;
        let entries =
            volumes.iter().map(|volume| Entry { volume: Some(volume_answer(volume)), status: None }).collect();
        Ok(Response::new(csi::ListVolumesResponse { entries, next_token }))
    }

    async fn get_capacity(&self, _: Request<csi::GetCapacityRequest>) -> Answer<csi::GetCapacityResponse> {
        Ok(Response::new(csi::GetCapacityResponse {
            available_capacity: bytes(self.store.free()?),
            ..Default::default()
        }))
    }

    async fn controller_get_capabilities(
        &self,
        _: Request<csi::ControllerGetCapabilitiesRequest>,
    ) -> Answer<csi::ControllerGetCapabilitiesResponse> {
        use csi::controller_service_capability::{Rpc, Type};
        let capabilities = ABILITIES.map(|ability| csi::ControllerServiceCapability {
            r#type: Some(Type::Rpc(Rpc { r#type: ability.into() })),
        });
        Ok(Response::new(csi::ControllerGetCapabilitiesResponse { capabilities: capabilities.into() }))
    }

    async fn create_snapshot(
        &self,
        request: Request<csi::CreateSnapshotRequest>,
    ) -> Answer<csi::CreateSnapshotResponse> {
        let request = request.into_inner();
        require("name", &request.name)?;
        require("source_volume_id", &request.source_volume_id)?;
        let volume = self.store.volumes().get(&request.source_volume_id)?;
        check_snapshots(&volume)?;
        volume.faults.inject(Operation::Snapshot).await?;
        let id = Id::of_name(&request.name);
        let _held = self.store.lock(&id).await?;
        let snapshot = match self.store.snapshots().find(&id)? {
            Some(existing) if existing.source == volume.id => existing,
            Some(_) => {
                return Err(Status::already_exists(format!("snapshot {} of another volume exists", request.name)));
            }
            None => {
                let _held = self.store.lock(&volume.id).await?;
                let draft = self.store.snapshots().draft(&id)?;
                self.copy_volume(&volume, &draft).await?;
                let (source, size, content) = (volume.id, volume.size, volume.content);
                let snapshot = Snapshot { id, name: request.name, source, size, content, created: now() };
                self.store.snapshots().complete(&snapshot.id, &snapshot)?;
                snapshot
            }
        };
        Ok(Response::new(csi::CreateSnapshotResponse { snapshot: Some(snapshot_answer(&snapshot)) }))
    }

    async fn delete_snapshot(
        &self,
        request: Request<csi::DeleteSnapshotRequest>,
    ) -> Answer<csi::DeleteSnapshotResponse> {
        let id = request.into_inner().snapshot_id;
        require("snapshot_id", &id)?;
        if let Some(id) = Id::parse(&id) {
            let _held = self.store.lock(&id).await?;
            self.store.snapshots().remove(&id)?;
        }
        Ok(Response::new(csi::DeleteSnapshotResponse {}))
    }

    async fn list_snapshots(&self, request: Request<csi::ListSnapshotsRequest>) -> Answer<csi::ListSnapshotsResponse> {
        use csi::list_snapshots_response::Entry;
        let request = request.into_inner();
        let matches = |wanted: &str, id: &Id| wanted.is_empty() || id.to_string() == wanted;
        let mut snapshots = self.store.snapshots().list()?;
        snapshots.retain(|snapshot| {
            matches(&request.snapshot_id, &snapshot.id) && matches(&request.source_volume_id, &snapshot.source)
        });
        let (snapshots, next_token) = page(snapshots, &request.starting_token, request.max_entries)?;
        let entries = snapshots.iter().map(|snapshot| Entry { snapshot: Some(snapshot_answer(snapshot)) }).collect();
        Ok(Response::new(csi::ListSnapshotsResponse { entries, next_token }))
    }

    async fn controller_expand_volume(
        &self,
        request: Request<csi::ControllerExpandVolumeRequest>,
    ) -> Answer<csi::ControllerExpandVolumeResponse> {
        let request = request.into_inner();
        require("volume_id", &request.volume_id)?;
        let range = request.capacity_range.as_ref().ok_or_else(|| invalid("capacity range is missing"))?;
        let mut volume = self.store.volumes().get(&request.volume_id)?;
        volume.faults.inject(Operation::Expand).await?;
        let _held = self.store.lock(&volume.id).await?;
        volume = self.store.volumes().get(&request.volume_id)?;
        let size = choose_size(Some(range), 0)?;
        if size > volume.size {
            if volume.content != Content::Directory {
                grow(&self.store.volumes().content(&volume.id), size)?;
            }
            volume.size = size;
            self.store.volumes().replace(&volume.id, &volume)?;
        } else if range.limit_bytes != 0 && volume.size > size {
            return Err(Status::out_of_range(format!("volume {} has {} bytes already", volume.id, volume.size)));
        }
        Ok(Response::new(csi::ControllerExpandVolumeResponse {
            capacity_bytes: bytes(volume.size),
            node_expansion_required: volume.content != Content::Directory,
        }))
    }

    async fn controller_publish_volume(
        &self,
        _: Request<csi::ControllerPublishVolumeRequest>,
    ) -> Answer<csi::ControllerPublishVolumeResponse> {
        Err(Status::unimplemented("volumes are not attached to nodes"))
    }

    async fn controller_unpublish_volume(
        &self,
        _: Request<csi::ControllerUnpublishVolumeRequest>,
    ) -> Answer<csi::ControllerUnpublishVolumeResponse> {
        Err(Status::unimplemented("volumes are not attached to nodes"))
    }

    async fn controller_get_volume(
        &self,
        _: Request<csi::ControllerGetVolumeRequest>,
    ) -> Answer<csi::ControllerGetVolumeResponse> {
        Err(Status::unimplemented("the state of single volumes is not offered"))
    }

    async fn controller_modify_volume(
        &self,
        _: Request<csi::ControllerModifyVolumeRequest>,
    ) -> Answer<csi::ControllerModifyVolumeResponse> {
        Err(Status::unimplemented("volumes cannot be modified"))
    }

    async fn get_snapshot(&self, _: Request<csi::GetSnapshotRequest>) -> Answer<csi::GetSnapshotResponse> {
        Err(Status::unimplemented("the state of single snapshots is not offered"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn repeated_request_for_the_same_volume_is_answered_with_it() {
        let volume = Volume {
            id: Id::of_name("a"),
            name: "a".to_owned(),
            size: 2 << 20,
            content: Content::Block,
            node: Some("node-1".to_owned()),
            source: None,
            snapshots: true,
            faults: "".parse().unwrap(),
        };
        let range = |required_bytes| Some(csi::CapacityRange { required_bytes, limit_bytes: 0 });
        // The scheduler may prefer another node the second time; the volume may have been expanded in between.
        let other = Volume { node: Some("node-2".to_owned()), size: 1 << 20, ..volume.clone() };
        assert!(is_same(&volume, &other, range(1 << 20).as_ref()));
        assert!(!is_same(&volume, &other, range(3 << 20).as_ref()));
        assert!(!is_same(&volume, &Volume { content: Content::Ext4, ..other.clone() }, None));
        assert!(!is_same(&volume, &Volume { source: Some(Source::Volume(Id::of_name("b"))), ..other }, None));
    }
}
