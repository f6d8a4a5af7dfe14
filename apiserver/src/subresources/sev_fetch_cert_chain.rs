//! `virtualmachineinstances/sev/fetchcertchain`: the SEV certificate chain of the VMI's node.

use api::{VirtualMachineInstance, enums::VmiPhase, subresources::SevPlatformInfo};
use axum::response::Response;

use super::common::{
    call::Call,
    schema, sev,
    specification::{Answer, Content, Specification, VMIS},
    vmi_checks::{conflict, node, phase},
};
use crate::requests::error::ApiError;

pub(super) static SPECIFICATION: Specification = Specification {
    content: Content::JsonOrUnlabelled,
    plain_errors: true,
    check_config: sev::check_gate,
    operation: "SEVFetchCertChain",
    description: "Get the SEV certificate chain of the VMI's node",
    ..Specification::get(VMIS, "sev/fetchcertchain", Answer::Document(schema::of::<SevPlatformInfo>), |call, _| {
        Box::pin(serve(call))
    })
};

/// Returns the node of a VMI with attestation.
fn decide(vmi: &VirtualMachineInstance) -> Result<&str, ApiError> {
    if !matches!(phase(vmi), VmiPhase::Scheduled | VmiPhase::Running) {
        return Err(conflict(vmi, "VMI is not assigned to a node yet"));
    }
    sev::check_attestation(vmi)?;
    node(vmi)
}

async fn serve(call: Call<'_>) -> Result<Response, ApiError> {
    let vmi = call.vmi().await?;
    decide(&vmi)?;
    Err(sev::NOT_AVAILABLE)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::subresources::common::{sev::tests::vmi, testing};

    #[test]
    fn certificate_chain_needs_a_node_and_attestation() {
        let attested = json!({"attestation": {}});
        assert_eq!(decide(&vmi("Scheduled", attested.clone(), false)), Ok("node1"));
        assert_eq!(decide(&vmi("Pending", attested, false)), testing::conflict("VMI is not assigned to a node yet"));
        assert_eq!(decide(&vmi("Running", json!({}), false)), testing::conflict("Attestation not requested for VMI"));
    }
}
