//! Hot-plug of volumes and memory dumps: checked to the end, not carried out yet.

use api::subresources::{AddVolumeRequest, MemoryDumpOptions, RemoveVolumeRequest};
use axum::{body::Body, response::Response};
use http::Request;
use k8s_openapi::api::core::v1::PersistentVolumeClaim;
use kube::{
    Api,
    api::{ApiResource, DynamicObject},
};
use serde_json::Value;

use super::{Object, Server, message};
use crate::{
    error::{ApiError, Kind},
    memory_dump,
    volumes::{self, Change},
};

const HOTPLUG: ApiError = ApiError::NotAvailable("hot-plug of volumes");
const MEMORY_DUMP: ApiError = ApiError::NotAvailable("memory dump");

impl Server {
    pub(super) async fn add_volume(&self, object: &Object, request: Request<Body>) -> Result<Response, ApiError> {
        let config = self.config.current();
        volumes::check_gates(&config)?;
        let (request, _): (AddVolumeRequest, bool) = self.trial(request).await?;
        volumes::check_request(Change::Add(&request))?;
        volumes::check_instance(&self.vmi(object).await?, Change::Add(&request), &config)?;
        Err(HOTPLUG)
    }

    pub(super) async fn remove_volume(&self, object: &Object, request: Request<Body>) -> Result<Response, ApiError> {
        let config = self.config.current();
        volumes::check_gates(&config)?;
        let (request, _): (RemoveVolumeRequest, bool) = self.trial(request).await?;
        volumes::check_request(Change::Remove(&request))?;
        volumes::check_instance(&self.vmi(object).await?, Change::Remove(&request), &config)?;
        Err(HOTPLUG)
    }

    pub(super) async fn add_volume_to_vm(&self, object: &Object, request: Request<Body>) -> Result<Response, ApiError> {
        volumes::check_gates(&self.config.current())?;
        let (request, _): (AddVolumeRequest, bool) = self.trial(request).await?;
        volumes::check_request(Change::Add(&request))?;
        volumes::check_machine(&self.vm(object).await?, Change::Add(&request))?;
        Err(HOTPLUG)
    }

    pub(super) async fn remove_volume_from_vm(
        &self,
        object: &Object,
        request: Request<Body>,
    ) -> Result<Response, ApiError> {
        volumes::check_gates(&self.config.current())?;
        let (request, _): (RemoveVolumeRequest, bool) = self.trial(request).await?;
        volumes::check_request(Change::Remove(&request))?;
        volumes::check_machine(&self.vm(object).await?, Change::Remove(&request))?;
        Err(HOTPLUG)
    }

    pub(super) async fn dump_memory(&self, object: &Object, request: Request<Body>) -> Result<Response, ApiError> {
        volumes::check_gates(&self.config.current())?;
        let options: MemoryDumpOptions = self.options(request).await?;
        let vm = self.vm(object).await?;
        let name = memory_dump::claim(&vm, &options)?;
        let vmi = self.vmi(object).await?;
        memory_dump::check_instance(&vmi)?;
        let claim = Api::<PersistentVolumeClaim>::namespaced(self.client.clone(), &object.namespace)
            .get_opt(&name)
            .await
            .map_err(|error| ApiError::Internal(format!("unable to retrieve pvc [{name}]: {}", message(&error))))?
            .ok_or_else(|| ApiError::not_found(Kind::PersistentVolumeClaim, &name))?;
        memory_dump::check_claim(&vmi, &claim, self.cdi().await?.as_ref())?;
        memory_dump::check_request(&vm)?;
        Err(MEMORY_DUMP)
    }

    pub(super) async fn remove_memory_dump(&self, object: &Object) -> Result<Response, ApiError> {
        memory_dump::check_removal(&self.vm(object).await?)?;
        Err(MEMORY_DUMP)
    }

    /// The configuration of the data importer, where it is installed.
    async fn cdi(&self) -> Result<Option<Value>, ApiError> {
        let resource = ApiResource {
            group: "cdi.kubevirt.io".to_owned(),
            version: "v1beta1".to_owned(),
            api_version: "cdi.kubevirt.io/v1beta1".to_owned(),
            kind: "CDIConfig".to_owned(),
            plural: "cdiconfigs".to_owned(),
        };
        let object = Api::<DynamicObject>::all_with(self.client.clone(), &resource)
            .get_opt("config")
            .await
            .map_err(|error| ApiError::Internal(format!("unable to retrieve CDIConfig: {}", message(&error))))?;
        Ok(object.map(|object| object.data))
    }
}
