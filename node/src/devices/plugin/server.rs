//! The device plugin API for one resource.

use std::{pin::Pin, sync::Arc};

use futures::Stream;
use tokio_stream::StreamExt;
use tonic::{Request, Response, Status};

use super::{NotAllocated, Resource, v1beta1};
use v1beta1::{
    AllocateRequest, AllocateResponse, DevicePluginOptions, Empty, ListAndWatchResponse, PreStartContainerRequest,
    PreStartContainerResponse, PreferredAllocationRequest, PreferredAllocationResponse,
    device_plugin_server::DevicePlugin,
};

/// Most containers of one request. A pod has few, and kubelet requests one at a time.
const MAX_CONTAINERS: usize = 64;

/// A plugin for one resource.
pub(super) struct Plugin {
    offer: Arc<dyn Resource>,
}

impl Plugin {
    pub(super) fn new(offer: Arc<dyn Resource>) -> Self {
        Self { offer }
    }
}

#[tonic::async_trait]
impl DevicePlugin for Plugin {
    async fn get_device_plugin_options(&self, _: Request<Empty>) -> Result<Response<DevicePluginOptions>, Status> {
        Ok(Response::new(DevicePluginOptions::default()))
    }

    type ListAndWatchStream = Pin<Box<dyn Stream<Item = Result<ListAndWatchResponse, Status>> + Send>>;

    async fn list_and_watch(&self, _: Request<Empty>) -> Result<Response<Self::ListAndWatchStream>, Status> {
        let lists = self.offer.units().map(|devices| Ok(ListAndWatchResponse { devices }));
        Ok(Response::new(Box::pin(lists)))
    }

    async fn get_preferred_allocation(
        &self,
        _: Request<PreferredAllocationRequest>,
    ) -> Result<Response<PreferredAllocationResponse>, Status> {
        // Not announced in the options.
        Err(Status::unimplemented("all units are alike"))
    }

    async fn allocate(&self, request: Request<AllocateRequest>) -> Result<Response<AllocateResponse>, Status> {
        let containers = request.into_inner().container_requests;
        if containers.len() > MAX_CONTAINERS {
            return Err(Status::invalid_argument(format!("more than {MAX_CONTAINERS} containers")));
        }
        let responses = containers.iter().map(|container| self.offer.allocate(&container.devices_ids));
        let container_responses = responses
            .collect::<Result<Vec<_>, NotAllocated>>()
            .map_err(|error| Status::failed_precondition(error.to_string()))?;
        Ok(Response::new(AllocateResponse { container_responses }))
    }

    async fn pre_start_container(
        &self,
        _: Request<PreStartContainerRequest>,
    ) -> Result<Response<PreStartContainerResponse>, Status> {
        Ok(Response::new(PreStartContainerResponse {}))
    }
}
