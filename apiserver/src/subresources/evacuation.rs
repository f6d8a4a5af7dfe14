//! Giving up evacuations.

use api::{VirtualMachineInstance, subresources::EvacuateCancelOptions};
use axum::{body::Body, response::Response};
use http::{Request, StatusCode};
use k8s_openapi::api::core::v1::Node;
use kube::{
    Api,
    api::{Patch, PatchParams},
};

use super::{Object, Server, message};
use crate::{
    error::{ApiError, empty_response},
    evacuation,
};

impl Server {
    pub(super) async fn cancel_evacuation(
        &self,
        object: &Object,
        vmi: VirtualMachineInstance,
        request: Request<Body>,
    ) -> Result<Response, ApiError> {
        let failed = |error: &kube::Error| ApiError::Internal(message(error));
        let drain_key = self.config.current().node_drain_taint_key.clone();
        if !drain_key.is_empty()
            && let Some(name) = evacuation::node(&vmi)
        {
            let node = Api::<Node>::all(self.client.clone()).get(name).await.map_err(|error| failed(&error))?;
            evacuation::check_node(&node, &drain_key)?;
        }
        if evacuation::is_under_way(&vmi) {
            let (options, dry_run): (EvacuateCancelOptions, bool) = self.trial(request).await?;
            let params = PatchParams { dry_run, ..PatchParams::default() };
            let patch = Patch::Json::<()>(evacuation::patch(&vmi, &options));
            self.vmis(object).patch(&object.name, &params, &patch).await.map_err(|error| failed(&error))?;
        }
        Ok(empty_response(StatusCode::OK))
    }
}
