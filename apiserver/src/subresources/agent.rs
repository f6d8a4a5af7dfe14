//! What the node agent does or says about a running machine.

use api::subresources::{
    BackupCheckpoint, BackupOptions, FreezeUnfreezeTimeout, PauseOptions, SevSecretOptions, SevSessionOptions,
};
use axum::{
    body::{Body, Bytes},
    response::Response,
};
use http::{Request, StatusCode};
use serde_json::json;

use super::{Object, Server, handler_error};
use crate::{
    error::{ApiError, empty_response, json_response},
    handler::HandlerError,
    instance, sev,
};

/// What is read from the agent fails with a plain text: that of the agent.
fn unanswered(error: HandlerError) -> ApiError {
    match error {
        HandlerError::Refused { status: StatusCode::TOO_MANY_REQUESTS, message } => ApiError::TooManyRequests(message),
        error => ApiError::Agent(error.to_string()),
    }
}

impl Server {
    pub(super) async fn pause(&self, object: &Object, request: Request<Body>) -> Result<Response, ApiError> {
        let (_, dry_run): (PauseOptions, bool) = self.trial(request).await?;
        let vmi = self.vmi(object).await?;
        instance::check_pause(&vmi)?;
        let node = instance::node(&vmi)?;
        if dry_run { Ok(empty_response(StatusCode::OK)) } else { self.tell(object, node, "pause").await }
    }

    pub(super) async fn unpause(&self, object: &Object, request: Request<Body>) -> Result<Response, ApiError> {
        let (_, dry_run): (PauseOptions, bool) = self.trial(request).await?;
        instance::check_unpause_of_vm(self.vm_opt(object).await?.as_ref())?;
        let vmi = self.vmi(object).await?;
        instance::check_unpause(&vmi)?;
        let node = instance::node(&vmi)?;
        if dry_run { Ok(empty_response(StatusCode::OK)) } else { self.tell(object, node, "unpause").await }
    }

    pub(super) async fn soft_reboot(&self, object: &Object) -> Result<Response, ApiError> {
        let vmi = self.vmi(object).await?;
        instance::check_soft_reboot(&vmi)?;
        self.tell(object, instance::node(&vmi)?, "softreboot").await
    }

    pub(super) async fn reset(&self, object: &Object) -> Result<Response, ApiError> {
        let vmi = self.vmi(object).await?;
        self.tell(object, instance::check_reset(&vmi)?, "reset").await
    }

    pub(super) async fn freeze(&self, object: &Object, request: Request<Body>) -> Result<Response, ApiError> {
        let vmi = self.vmi(object).await?;
        instance::check_freeze(&vmi)?;
        let node = instance::node(&vmi)?;
        let options: FreezeUnfreezeTimeout = self.options(request).await?;
        instance::check_unfreeze_timeout(&options)?;
        let body = Bytes::from(json!(options).to_string());
        self.handler.call(object.on(node), "freeze", body).await.map_err(handler_error)?;
        Ok(empty_response(StatusCode::OK))
    }

    pub(super) async fn unfreeze(&self, object: &Object) -> Result<Response, ApiError> {
        let vmi = self.vmi(object).await?;
        instance::check_unfreeze(&vmi)?;
        self.tell(object, instance::node(&vmi)?, "unfreeze").await
    }

    /// Has the agent do something that takes no options.
    async fn tell(&self, object: &Object, node: &str, action: &str) -> Result<Response, ApiError> {
        self.handler.call(object.on(node), action, Bytes::new()).await.map_err(handler_error)?;
        Ok(empty_response(StatusCode::OK))
    }

    /// Asks the guest agent.
    pub(super) async fn ask_agent(&self, object: &Object, action: &str) -> Result<Response, ApiError> {
        let vmi = self.vmi(object).await?;
        instance::check_agent(&vmi)?;
        let node = instance::node(&vmi)?;
        let answer = self.handler.fetch(object.on(node), action).await.map_err(unanswered)?;
        Ok(json_response(StatusCode::OK, &answer))
    }

    pub(super) async fn screenshot(&self, object: &Object) -> Result<Response, ApiError> {
        let vmi = self.vmi(object).await?;
        instance::check_vnc(&vmi)?;
        let node = instance::node(&vmi)?;
        self.handler.picture(object.on(node), "vnc/screenshot").await.map_err(unanswered)
    }

    pub(super) async fn backup(&self, object: &Object, request: Request<Body>) -> Result<Response, ApiError> {
        let vmi = self.vmi(object).await?;
        instance::check_backup(&vmi)?;
        instance::node(&vmi)?;
        let _: BackupOptions = self.options(request).await?;
        Err(ApiError::NotAvailable("backup of running machines"))
    }

    pub(super) async fn redefine_checkpoint(
        &self,
        object: &Object,
        request: Request<Body>,
    ) -> Result<Response, ApiError> {
        let vmi = self.vmi(object).await?;
        instance::check_checkpoint(&vmi)?;
        instance::node(&vmi)?;
        let _: BackupCheckpoint = self.options(request).await?;
        Err(ApiError::NotAvailable("backup of running machines"))
    }

    pub(super) async fn fetch_cert_chain(&self, object: &Object) -> Result<Response, ApiError> {
        let vmi = self.vmi(object).await?;
        sev::check_cert_chain(&vmi)?;
        instance::node(&vmi)?;
        Err(ApiError::NotAvailable("attestation"))
    }

    pub(super) async fn query_launch_measurement(&self, object: &Object) -> Result<Response, ApiError> {
        let vmi = self.vmi(object).await?;
        sev::check_launched(&vmi)?;
        instance::node(&vmi)?;
        Err(ApiError::NotAvailable("attestation"))
    }

    pub(super) async fn set_up_session(&self, object: &Object, request: Request<Body>) -> Result<Response, ApiError> {
        let options: SevSessionOptions = self.options(request).await?;
        sev::check_session(&self.vmi(object).await?, &options)?;
        Err(ApiError::NotAvailable("attestation"))
    }

    pub(super) async fn inject_launch_secret(
        &self,
        object: &Object,
        request: Request<Body>,
    ) -> Result<Response, ApiError> {
        let vmi = self.vmi(object).await?;
        sev::check_launched(&vmi)?;
        instance::node(&vmi)?;
        let _: SevSecretOptions = self.options(request).await?;
        Err(ApiError::NotAvailable("attestation"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_agent_without_a_place_is_to_be_asked_again_later() {
        let refused = |status| unanswered(HandlerError::Refused { status, message: "too many".into() });
        assert_eq!(refused(StatusCode::TOO_MANY_REQUESTS), ApiError::TooManyRequests("too many".into()));
        assert!(matches!(refused(StatusCode::INTERNAL_SERVER_ERROR), ApiError::Agent(_)));
    }
}
