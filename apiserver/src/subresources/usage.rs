//! `virtualmachineinstances/usage`: counters of the domain, for `kubectl virt top`. It is Ferrovirt's own, and discovery does not
//! list it.

use api::{VirtualMachineInstance, subresources::DomainUsage};
use axum::response::Response;

use super::common::{
    call::Call,
    schema,
    specification::{Answer, Content, Specification, VMIS},
    vmi_checks::{check_running, node},
};
use crate::requests::error::ApiError;

pub(super) static SPECIFICATION: Specification = Specification {
    content: Content::JsonOrUnlabelled,
    plain_errors: true,
    listed: false,
    operation: "Usage",
    description: "Get counters of CPU time, memory, disks and interfaces",
    ..Specification::get(VMIS, "usage", Answer::Document(schema::of::<DomainUsage>), |call, _| Box::pin(serve(call)))
};

/// Returns the node of a running VMI.
fn decide(vmi: &VirtualMachineInstance) -> Result<&str, ApiError> {
    check_running(vmi, "VMI is not running")?;
    node(vmi)
}

async fn serve(call: Call<'_>) -> Result<Response, ApiError> {
    let vmi = call.vmi().await?;
    call.document(decide(&vmi)?, "usage").await
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::subresources::common::testing::{self, in_phase};

    #[test]
    fn running_vmis_have_counters() {
        assert_eq!(decide(&in_phase("Running")), Ok("node1"));
        assert_eq!(decide(&in_phase("Scheduled")), testing::conflict("VMI is not running"));
    }
}
