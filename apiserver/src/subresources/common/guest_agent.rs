//! Documents of the guest agent, read through virt-handler.

use api::{VirtualMachineInstance, constants::condition};
use axum::response::Response;

use super::{
    call::Call,
    vmi_checks::{check_running, conflict, node},
};
use crate::requests::error::ApiError;

/// Returns the node of a running VMI with a connected guest agent.
fn decide(vmi: &VirtualMachineInstance) -> Result<&str, ApiError> {
    check_running(vmi, "VMI is not running")?;
    if !vmi.has_true(condition::AGENT_CONNECTED) {
        return Err(conflict(vmi, "VMI does not have guest agent connected"));
    }
    node(vmi)
}

/// Serves a document of the guest agent.
pub(crate) async fn serve(call: Call<'_>, action: &'static str) -> Result<Response, ApiError> {
    let vmi = call.vmi().await?;
    call.document(decide(&vmi)?, action).await
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::subresources::common::testing::{self, in_phase, with_conditions};

    #[test]
    fn guest_agent_answers_while_it_is_connected() {
        assert_eq!(decide(&with_conditions(&["AgentConnected"])), Ok("node1"));
        assert_eq!(decide(&in_phase("Running")), testing::conflict("VMI does not have guest agent connected"));
        assert_eq!(decide(&in_phase("Scheduled")), testing::conflict("VMI is not running"));
    }
}
