//! `virtualmachineinstances/unfreeze`: thaws the guest's file systems.

use api::VirtualMachineInstance;
use axum::response::Response;
use bytes::Bytes;

use super::common::{
    call::Call,
    specification::{Answer, Specification, VMIS},
    vmi_checks::{check_running, node},
};
use crate::requests::error::ApiError;

pub(super) static SPECIFICATION: Specification = Specification {
    operation: "Unfreeze",
    description: "Thaw the guest's file systems",
    ..Specification::put(VMIS, "unfreeze", Answer::Empty, |call, _| Box::pin(serve(call)))
};

/// Returns the node of a running VMI.
fn decide(vmi: &VirtualMachineInstance) -> Result<&str, ApiError> {
    check_running(vmi, "VMI is not running")?;
    node(vmi)
}

async fn serve(call: Call<'_>) -> Result<Response, ApiError> {
    let vmi = call.vmi().await?;
    call.act(decide(&vmi)?, "unfreeze", Bytes::new()).await
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::subresources::common::testing::{self, in_phase};

    #[test]
    fn only_a_running_guest_is_thawed() {
        assert_eq!(decide(&in_phase("Running")), Ok("node1"));
        assert_eq!(decide(&in_phase("Failed")), testing::conflict("VMI is not running"));
    }
}
