//! Name and abilities of the driver, and its registration with kubelet.

use std::path::Path;

use tonic::{Request, Response, Status, async_trait};

use crate::proto::{
    csi::v1::{
        GetPluginCapabilitiesRequest, GetPluginCapabilitiesResponse, GetPluginInfoRequest, GetPluginInfoResponse,
        PluginCapability, ProbeRequest, ProbeResponse, identity_server,
        plugin_capability::{
            Service, Type, VolumeExpansion, service::Type as ServiceType, volume_expansion::Type as ExpansionType,
        },
    },
    pluginregistration::{
        InfoRequest, PluginInfo, RegistrationStatus, RegistrationStatusResponse, registration_server,
    },
};

/// Name of the driver, the provisioner of its storage classes.
pub(crate) const DRIVER: &str = "csi.test.ferrovirt.io";

/// The identity service.
pub(crate) struct Identity;

#[async_trait]
impl identity_server::Identity for Identity {
    async fn get_plugin_info(
        &self,
        _: Request<GetPluginInfoRequest>,
    ) -> Result<Response<GetPluginInfoResponse>, Status> {
        Ok(Response::new(GetPluginInfoResponse {
            name: DRIVER.to_owned(),
            vendor_version: env!("CARGO_PKG_VERSION").to_owned(),
            ..Default::default()
        }))
    }

    async fn get_plugin_capabilities(
        &self,
        _: Request<GetPluginCapabilitiesRequest>,
    ) -> Result<Response<GetPluginCapabilitiesResponse>, Status> {
        let services = [ServiceType::ControllerService, ServiceType::VolumeAccessibilityConstraints];
        let mut capabilities: Vec<_> = services
            .into_iter()
            .map(|service| PluginCapability { r#type: Some(Type::Service(Service { r#type: service.into() })) })
            .collect();
        let expansion = VolumeExpansion { r#type: ExpansionType::Online.into() };
        capabilities.push(PluginCapability { r#type: Some(Type::VolumeExpansion(expansion)) });
        Ok(Response::new(GetPluginCapabilitiesResponse { capabilities }))
    }

    async fn probe(&self, _: Request<ProbeRequest>) -> Result<Response<ProbeResponse>, Status> {
        Ok(Response::new(ProbeResponse { ready: Some(true) }))
    }
}

/// The answers to kubelet when it registers the driver.
pub(crate) struct Registration {
    endpoint: String,
}

impl Registration {
    /// Registers the driver that serves on this socket.
    pub(crate) fn new(endpoint: &Path) -> Self {
        Self { endpoint: endpoint.to_string_lossy().into_owned() }
    }
}

#[async_trait]
impl registration_server::Registration for Registration {
    async fn get_info(&self, _: Request<InfoRequest>) -> Result<Response<PluginInfo>, Status> {
        Ok(Response::new(PluginInfo {
            r#type: "CSIPlugin".to_owned(),
            name: DRIVER.to_owned(),
            endpoint: self.endpoint.clone(),
            supported_versions: vec!["1.0.0".to_owned()],
        }))
    }

    async fn notify_registration_status(
        &self,
        request: Request<RegistrationStatus>,
    ) -> Result<Response<RegistrationStatusResponse>, Status> {
        let status = request.into_inner();
        match status.plugin_registered {
            true => println!("kubelet registered the driver"),
            false => eprintln!("kubelet did not register the driver: {}", status.error),
        }
        Ok(Response::new(RegistrationStatusResponse {}))
    }
}
