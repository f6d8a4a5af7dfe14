//! `virtualmachineinstances/reset`: resets the guest without its participation.

use api::{VirtualMachineInstance, enums::VmiPhase};
use axum::response::Response;
use bytes::Bytes;

use super::common::{
    call::Call,
    specification::{Answer, Specification, VMIS},
    vmi_checks::{node, phase},
};
use crate::requests::error::ApiError;

pub(super) static SPECIFICATION: Specification = Specification {
    operation: "Reset",
    description: "Reset the guest without asking it",
    ..Specification::put(VMIS, "reset", Answer::Empty, |call, _| Box::pin(serve(call)))
};

/// Returns the node of a scheduled or running VMI. The error has a message of its own.
fn decide(vmi: &VirtualMachineInstance) -> Result<&str, ApiError> {
    let phase = phase(vmi);
    node(vmi).map_err(|error| match error {
        ApiError::BadRequest(message) if phase != VmiPhase::Running => {
            ApiError::BadRequest(format!("Failed to reset non-running VMI with phase {phase}: {message}"))
        }
        other => other,
    })
}

async fn serve(call: Call<'_>) -> Result<Response, ApiError> {
    let vmi = call.vmi().await?;
    call.act(decide(&vmi)?, "reset", Bytes::new()).await
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::subresources::common::testing::in_phase;

    #[test]
    fn refused_reset_contains_the_phase() {
        assert_eq!(decide(&in_phase("Running")), Ok("node1"));
        let Err(ApiError::BadRequest(message)) = decide(&in_phase("Pending")) else { panic!("accepted") };
        assert!(
            message.starts_with("Failed to reset non-running VMI with phase Pending: Unable to connect"),
            "{message}"
        );
    }
}
