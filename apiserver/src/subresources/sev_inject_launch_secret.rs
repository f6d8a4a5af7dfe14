//! `virtualmachineinstances/sev/injectlaunchsecret`: injects the SEV launch secret into a guest.

use api::{VirtualMachineInstance, subresources::SevSecretOptions};
use axum::{body::Body, response::Response};
use http::Request;

use super::common::{
    call::Call,
    schema, sev,
    specification::{Answer, Specification, VMIS},
    vmi_checks::node,
};
use crate::requests::error::ApiError;

pub(super) static SPECIFICATION: Specification = Specification {
    options: Some(schema::options::<SevSecretOptions>),
    check_config: sev::check_gate,
    operation: "SEVInjectLaunchSecret",
    description: "Hand the SEV launch secret to the guest",
    ..Specification::put(VMIS, "sev/injectlaunchsecret", Answer::Empty, |call, request| Box::pin(serve(call, request)))
};

/// Returns the node of a launched guest.
fn decide(vmi: &VirtualMachineInstance) -> Result<&str, ApiError> {
    sev::check_launched(vmi)?;
    node(vmi)
}

async fn serve(call: Call<'_>, request: Request<Body>) -> Result<Response, ApiError> {
    let vmi = call.vmi().await?;
    decide(&vmi)?;
    let _: SevSecretOptions = call.options(request).await?;
    Err(sev::NOT_AVAILABLE)
}
