//! A device plugin of kubelet, whose devices have neither nodes nor addresses.

use std::{fs::File, os::fd::AsRawFd, path::PathBuf, pin::Pin};

use anyhow::{Context, Result};
use ferrovirt_e2e_cluster::plan::Node;
use futures::{Stream, StreamExt};
use tokio::{net::UnixListener, task::AbortHandle};
use tokio_stream::wrappers::UnixListenerStream;
use tonic::{
    Request, Response, Status,
    transport::{Endpoint, Server},
};

use self::v1beta1::{
    AllocateRequest, AllocateResponse, ContainerAllocateResponse, Device, DevicePluginOptions, Empty,
    ListAndWatchResponse, PreStartContainerRequest, PreStartContainerResponse, PreferredAllocationRequest,
    PreferredAllocationResponse, RegisterRequest,
    device_plugin_server::{DevicePlugin as Service, DevicePluginServer},
    registration_client::RegistrationClient,
};

/// kubelet's device plugin API.
#[allow(
    missing_docs,
    unreachable_pub,
    clippy::all,
    reason = "generated from the proto file, which holds the documentation"
)]
mod v1beta1 {
    tonic::include_proto!("v1beta1");
}

/// Directory of the sockets below kubelet's own, and the plugin's socket.
const DIRECTORY: &str = "device-plugins";
const SOCKET: &str = "story.sock";

/// A plugin that runs until it is dropped.
pub struct DevicePlugin {
    socket: PathBuf,
    server: AbortHandle,
}

/// The IDs of the devices.
struct Devices(Vec<String>);

impl DevicePlugin {
    /// Offers devices with these IDs as a resource of a node of the test cluster.
    ///
    /// # Errors
    /// Fails if kubelet does not register the plugin.
    pub async fn offer(node: &Node, resource: &str, devices: &[&str]) -> Result<Self> {
        let (kubelet, _) = node.own_folders().into_iter().next().context("a node without directories")?;
        let directory = kubelet.join(DIRECTORY);
        let opened = File::open(&directory).with_context(|| format!("cannot open {}", directory.display()))?;
        // Addresses of sockets are short, paths of working trees may not be.
        let at = |name: &str| format!("/proc/self/fd/{}/{name}", opened.as_raw_fd());
        let socket = directory.join(SOCKET);
        let _ = std::fs::remove_file(&socket);
        let listener = UnixListener::bind(at(SOCKET)).context("cannot listen for kubelet")?;
        let service = Devices(devices.iter().map(|id| (*id).to_owned()).collect());
        let server = Server::builder().add_service(DevicePluginServer::new(service));
        let server = tokio::spawn(async move {
            if let Err(error) = server.serve_with_incoming(UnixListenerStream::new(listener)).await {
                eprintln!("the device plugin ended: {error}");
            }
        });
        let plugin = Self { socket, server: server.abort_handle() };
        let kubelet = Endpoint::from_shared(format!("unix:{}", at("kubelet.sock")))?;
        let channel = kubelet.connect().await.context("cannot connect to kubelet")?;
        let request = RegisterRequest {
            version: "v1beta1".to_owned(),
            endpoint: SOCKET.to_owned(),
            resource_name: resource.to_owned(),
            options: Some(DevicePluginOptions::default()),
        };
        RegistrationClient::new(channel).register(request).await.context("kubelet refuses the device plugin")?;
        Ok(plugin)
    }
}

impl Drop for DevicePlugin {
    fn drop(&mut self) {
        self.server.abort();
        let _ = std::fs::remove_file(&self.socket);
    }
}

#[tonic::async_trait]
impl Service for Devices {
    async fn get_device_plugin_options(&self, _: Request<Empty>) -> Result<Response<DevicePluginOptions>, Status> {
        Ok(Response::new(DevicePluginOptions::default()))
    }

    type ListAndWatchStream = Pin<Box<dyn Stream<Item = Result<ListAndWatchResponse, Status>> + Send>>;

    async fn list_and_watch(&self, _: Request<Empty>) -> Result<Response<Self::ListAndWatchStream>, Status> {
        let device = |id: &String| Device { id: id.clone(), health: "Healthy".to_owned(), topology: None };
        let list = ListAndWatchResponse { devices: self.0.iter().map(device).collect() };
        // The end of the stream would be the end of the devices.
        let lists = futures::stream::once(std::future::ready(Ok(list))).chain(futures::stream::pending());
        Ok(Response::new(Box::pin(lists)))
    }

    async fn get_preferred_allocation(
        &self,
        _: Request<PreferredAllocationRequest>,
    ) -> Result<Response<PreferredAllocationResponse>, Status> {
        Err(Status::unimplemented("all devices are alike"))
    }

    async fn allocate(&self, request: Request<AllocateRequest>) -> Result<Response<AllocateResponse>, Status> {
        let containers = request.into_inner().container_requests;
        let container_responses = containers.iter().map(|_| ContainerAllocateResponse::default()).collect();
        Ok(Response::new(AllocateResponse { container_responses }))
    }

    async fn pre_start_container(
        &self,
        _: Request<PreStartContainerRequest>,
    ) -> Result<Response<PreStartContainerResponse>, Status> {
        Ok(Response::new(PreStartContainerResponse {}))
    }
}
