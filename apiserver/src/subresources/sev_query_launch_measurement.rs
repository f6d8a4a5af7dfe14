//! `virtualmachineinstances/sev/querylaunchmeasurement`: the SEV launch measurement of a guest.

use api::{VirtualMachineInstance, subresources::SevMeasurementInfo};
use axum::response::Response;

use super::common::{
    call::Call,
    schema, sev,
    specification::{Answer, Content, Specification, VMIS},
    vmi_checks::node,
};
use crate::requests::error::ApiError;

pub(super) static SPECIFICATION: Specification = Specification {
    content: Content::JsonOrUnlabelled,
    plain_errors: true,
    check_config: sev::check_gate,
    operation: "SEVQueryLaunchMeasurement",
    description: "Get the SEV launch measurement",
    ..Specification::get(
        VMIS,
        "sev/querylaunchmeasurement",
        Answer::Document(schema::of::<SevMeasurementInfo>),
        |call, _| Box::pin(serve(call)),
    )
};

/// Returns the node of a launched guest.
fn decide(vmi: &VirtualMachineInstance) -> Result<&str, ApiError> {
    sev::check_launched(vmi)?;
    node(vmi)
}

async fn serve(call: Call<'_>) -> Result<Response, ApiError> {
    let vmi = call.vmi().await?;
    decide(&vmi)?;
    Err(sev::NOT_AVAILABLE)
}
