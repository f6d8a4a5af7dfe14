//! A request to a subresource, and the services that it is served with.

use api::{VirtualMachine, VirtualMachineInstance};
use axum::{body::Body, response::Response};
use bytes::Bytes;
use daemon::{CancellationToken, config::ConfigHandle, quota::StreamQuota};
use http::{Request, StatusCode};
use serde::de::DeserializeOwned;
use tokio_util::task::TaskTracker;

use super::vmi_checks;
use crate::{
    clients::{
        ComponentError,
        handler::{HandlerClient, VmiOnNode},
        objects::{Objects, Stored},
    },
    metrics::Metrics,
    requests::{
        body::BodyReader,
        error::{ApiError, empty_response, json_response},
        options::{self, DryRunOptions, MAX_BODY},
    },
    streaming::vmi_watch::VmiWatches,
};

/// Most concurrent streams. Each takes two connections and, while it is blocked, buffers of a few small messages.
pub(crate) const MAX_STREAMS: usize = 256;

/// Services that subresources share.
pub(crate) struct Context {
    /// Objects of the API server.
    pub objects: Objects,
    /// The cluster configuration.
    pub config: ConfigHandle,
    /// Calls to virt-handler.
    pub handler: HandlerClient,
    /// Counters.
    pub metrics: Metrics,
    /// Bodies within the memory budget.
    pub bodies: BodyReader,
    /// Quota of streams.
    pub stream_quota: StreamQuota,
    /// Open streams.
    pub streams: TaskTracker,
    /// Watches of VMIs whose ports are forwarded.
    pub vmi_watches: VmiWatches,
    /// Cancelled when the process stops.
    pub stop: CancellationToken,
}

/// The object of an authorized request.
pub(crate) struct Object {
    /// Namespace.
    pub namespace: String,
    /// Name of the VM or VMI.
    pub name: String,
    /// The user for whom streams count.
    pub holder: String,
    /// The user is virt-controller.
    pub is_controller: bool,
}

/// A request to a subresource, without its body.
#[derive(Clone, Copy)]
pub(crate) struct Call<'a> {
    /// Shared services.
    pub context: &'a Context,
    /// The object.
    pub object: &'a Object,
}

impl<'a> Call<'a> {
    /// Parses the options in a body; an empty one means the defaults.
    pub(crate) async fn options<T>(self, request: Request<Body>) -> Result<T, ApiError>
    where
        T: DeserializeOwned + Default,
    {
        options::parse(&self.context.bodies.read(request.into_body(), MAX_BODY).await?.bytes)
    }

    /// Parses the options in a body. The second value is true for a dry run, which body or query may request.
    pub(crate) async fn options_with_dry_run<T>(self, request: Request<Body>) -> Result<(T, bool), ApiError>
    where
        T: DeserializeOwned + Default + DryRunOptions,
    {
        let mut values = options::dry_run_in_query(request.uri());
        let options: T = self.options(request).await?;
        values.extend_from_slice(options.dry_run());
        Ok((options, options::is_dry_run(&values)?))
    }

    /// Reads the VM.
    pub(crate) async fn vm(self) -> Result<VirtualMachine, ApiError> {
        self.context.objects.vm(&self.object.namespace, &self.object.name).await
    }

    /// Reads the VM if there is one.
    pub(crate) async fn vm_opt(self) -> Result<Option<VirtualMachine>, ApiError> {
        self.context.objects.vm_opt(&self.object.namespace, &self.object.name).await
    }

    /// Reads the VMI. An error names the state of the VM.
    pub(crate) async fn vmi(self) -> Result<VirtualMachineInstance, ApiError> {
        match self.vmi_opt().await? {
            Some(vmi) => Ok(vmi),
            None => Err(self.missing_vmi().await),
        }
    }

    /// Reads the VM with its JSON.
    pub(crate) async fn stored_vm(self) -> Result<Stored<VirtualMachine>, ApiError> {
        self.context.objects.stored_vm(&self.object.namespace, &self.object.name).await
    }

    /// Reads the VMI with its JSON. An error names the state of the VM.
    pub(crate) async fn stored_vmi(self) -> Result<Stored<VirtualMachineInstance>, ApiError> {
        match self.context.objects.stored_vmi_opt(&self.object.namespace, &self.object.name).await? {
            Some(vmi) => Ok(vmi),
            None => Err(self.missing_vmi().await),
        }
    }

    async fn missing_vmi(self) -> ApiError {
        vmi_checks::missing(&self.object.name, self.vm_opt().await.ok().flatten().as_ref())
    }

    /// Reads the VMI if there is one.
    pub(crate) async fn vmi_opt(self) -> Result<Option<VirtualMachineInstance>, ApiError> {
        self.context.objects.vmi_opt(&self.object.namespace, &self.object.name).await
    }

    /// Reads the VMI of a started VM.
    pub(crate) async fn vmi_of_vm(self) -> Result<VirtualMachineInstance, ApiError> {
        let vm = self.vm().await?;
        vmi_checks::check_created(&vm)?;
        let vmi = self.vmi().await?;
        vmi_checks::check_owner(&vm, &vmi)?;
        Ok(vmi)
    }

    /// Returns the VMI for requests to virt-handler of `node`.
    pub(crate) fn on<'b>(self, node: &'b str) -> VmiOnNode<'b>
    where
        'a: 'b,
    {
        VmiOnNode { node, namespace: &self.object.namespace, name: &self.object.name }
    }

    /// Sends an action to virt-handler of `node`.
    pub(crate) async fn act(self, node: &str, action: &str, options: Bytes) -> Result<Response, ApiError> {
        self.context.handler.call(self.on(node), action, options).await.map_err(handler_error)?;
        Ok(empty_response(StatusCode::OK))
    }

    /// Reads a document from virt-handler of `node`.
    pub(crate) async fn document(self, node: &str, action: &str) -> Result<Response, ApiError> {
        let document = self.context.handler.document(self.on(node), action).await.map_err(read_error)?;
        Ok(json_response(StatusCode::OK, &document))
    }
}

/// Returns the answer for a failed action or stream of virt-handler.
pub(super) fn handler_error(error: ComponentError) -> ApiError {
    match error {
        ComponentError::NoPod(_) => ApiError::BadRequest(error.to_string()),
        ComponentError::Handshake { status: StatusCode::TOO_MANY_REQUESTS, message }
        | ComponentError::Refused { status: StatusCode::TOO_MANY_REQUESTS, message } => {
            ApiError::TooManyRequests(message)
        }
        // Without Retry-After, with which clients would repeat the request by themselves.
        ComponentError::Interrupted { .. } => ApiError::Unavailable(error.to_string()),
        _ => ApiError::Internal(error.to_string()),
    }
}

/// Returns the answer for a failed read through virt-handler: its message as plain text.
pub(crate) fn read_error(error: ComponentError) -> ApiError {
    match error {
        ComponentError::Refused { status: StatusCode::TOO_MANY_REQUESTS, message } => {
            ApiError::TooManyRequests(message)
        }
        error => ApiError::Handler(error.to_string()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn missing_virt_handler_is_a_bad_request_and_other_failures_are_internal() {
        assert_eq!(
            handler_error(ComponentError::NoPod("node1".into())),
            ApiError::BadRequest("No virt-handler on node node1 found".into())
        );
        assert_eq!(handler_error(ComponentError::ManyPods(2)).status(), StatusCode::INTERNAL_SERVER_ERROR);
        let (status, message) = (StatusCode::TOO_MANY_REQUESTS, || "too many".to_owned());
        for full in [
            ComponentError::Handshake { status, message: message() },
            ComponentError::Refused { status, message: message() },
        ] {
            assert_eq!(handler_error(full), ApiError::TooManyRequests(message()));
        }
    }

    #[test]
    fn limit_of_virt_handler_reaches_the_client() {
        let refused = |status| read_error(ComponentError::Refused { status, message: "too many".into() });
        assert_eq!(refused(StatusCode::TOO_MANY_REQUESTS), ApiError::TooManyRequests("too many".into()));
        assert!(matches!(refused(StatusCode::INTERNAL_SERVER_ERROR), ApiError::Handler(_)));
    }
}
