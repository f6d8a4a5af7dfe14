//! One plugin as kubelet calls it.

use std::pin::Pin;

use futures::Stream;
use tokio::sync::watch;
use tokio_stream::{StreamExt, wrappers::WatchStream};
use tonic::{Request, Response, Status};

use super::{Device, v1beta1};
use v1beta1::{
    AllocateRequest, AllocateResponse, ContainerAllocateResponse, DevicePluginOptions, DeviceSpec, Empty,
    ListAndWatchResponse, PreStartContainerRequest, PreStartContainerResponse, PreferredAllocationRequest,
    PreferredAllocationResponse, device_plugin_server::DevicePlugin,
};

/// Most containers of one request: a pod has few, and kubelet asks for one at a time.
const MAX_CONTAINERS: usize = 64;

/// A plugin for one resource.
pub(super) struct Plugin {
    device: Device,
    units: u32,
    permissions: &'static str,
    healthy: watch::Receiver<bool>,
}

impl Plugin {
    pub(super) fn new(device: Device, units: u32, permissions: &'static str, healthy: watch::Receiver<bool>) -> Self {
        Self { device, units, permissions, healthy }
    }
}

/// All units, which are healthy or not together.
fn units(device: Device, count: u32, healthy: bool) -> ListAndWatchResponse {
    let health = if healthy { "Healthy" } else { "Unhealthy" };
    let devices = (0..count)
        .map(|number| v1beta1::Device {
            id: format!("{}{number}", device.name),
            health: health.to_owned(),
            topology: None,
        })
        .collect();
    ListAndWatchResponse { devices }
}

#[tonic::async_trait]
impl DevicePlugin for Plugin {
    async fn get_device_plugin_options(&self, _: Request<Empty>) -> Result<Response<DevicePluginOptions>, Status> {
        Ok(Response::new(DevicePluginOptions::default()))
    }

    type ListAndWatchStream = Pin<Box<dyn Stream<Item = Result<ListAndWatchResponse, Status>> + Send>>;

    async fn list_and_watch(&self, _: Request<Empty>) -> Result<Response<Self::ListAndWatchStream>, Status> {
        let (device, count) = (self.device, self.units);
        let changes = WatchStream::new(self.healthy.clone());
        Ok(Response::new(Box::pin(changes.map(move |healthy| Ok(units(device, count, healthy))))))
    }

    async fn get_preferred_allocation(
        &self,
        _: Request<PreferredAllocationRequest>,
    ) -> Result<Response<PreferredAllocationResponse>, Status> {
        // Not announced in the options.
        Err(Status::unimplemented("all units are alike"))
    }

    async fn allocate(&self, request: Request<AllocateRequest>) -> Result<Response<AllocateResponse>, Status> {
        let containers = request.into_inner().container_requests.len();
        if containers > MAX_CONTAINERS {
            return Err(Status::invalid_argument(format!("more than {MAX_CONTAINERS} containers")));
        }
        let path = format!("/dev/{}", self.device.node);
        let response = ContainerAllocateResponse {
            devices: vec![DeviceSpec {
                container_path: path.clone(),
                host_path: path,
                permissions: self.permissions.to_owned(),
            }],
            ..ContainerAllocateResponse::default()
        };
        Ok(Response::new(AllocateResponse { container_responses: vec![response; containers] }))
    }

    async fn pre_start_container(
        &self,
        _: Request<PreStartContainerRequest>,
    ) -> Result<Response<PreStartContainerResponse>, Status> {
        Ok(Response::new(PreStartContainerResponse {}))
    }
}
