//! `virtualmachineinstances/softreboot`: requests a reboot from the guest.

use api::{VirtualMachineInstance, constants::condition};
use axum::response::Response;
use bytes::Bytes;

use super::common::{
    call::Call,
    specification::{Answer, Specification, VMIS},
    vmi_checks::{check_running, conflict, node},
};
use crate::requests::error::ApiError;

pub(super) static SPECIFICATION: Specification = Specification {
    operation: "SoftReboot",
    description: "Ask the guest to reboot",
    ..Specification::put(VMIS, "softreboot", Answer::Empty, |call, _| Box::pin(serve(call)))
};

/// Returns the node of a VMI whose guest agent or ACPI can reboot it.
fn decide(vmi: &VirtualMachineInstance) -> Result<&str, ApiError> {
    check_running(vmi, "VM is not running")?;
    if vmi.has_true(condition::PAUSED) {
        return Err(conflict(vmi, "VMI is paused"));
    }
    let acpi = vmi.spec.domain.features.as_ref().and_then(|features| features.acpi.enabled) != Some(false);
    if !vmi.has_true(condition::AGENT_CONNECTED) && !acpi {
        return Err(conflict(vmi, "VMI neither have the agent connected nor the ACPI feature enabled"));
    }
    node(vmi)
}

async fn serve(call: Call<'_>) -> Result<Response, ApiError> {
    let vmi = call.vmi().await?;
    call.act(decide(&vmi)?, "softreboot", Bytes::new()).await
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;
    use crate::subresources::common::testing::{self, in_phase, vmi, with_conditions};

    #[test]
    fn soft_reboot_needs_a_guest_agent_or_acpi() {
        assert_eq!(decide(&in_phase("Running")), Ok("node1"));
        assert_eq!(decide(&in_phase("Pending")), testing::conflict("VM is not running"));
        assert_eq!(decide(&with_conditions(&["Paused"])), testing::conflict("VMI is paused"));
        let without_acpi = |conditions: Value| {
            vmi(
                json!({"domain": {"devices": {}, "features": {"acpi": {"enabled": false}}}}),
                json!({"phase": "Running", "conditions": conditions}),
            )
        };
        assert_eq!(
            decide(&without_acpi(json!([]))),
            testing::conflict("VMI neither have the agent connected nor the ACPI feature enabled")
        );
        assert_eq!(decide(&without_acpi(json!([{"type": "AgentConnected", "status": "True"}]))), Ok("node1"));
    }
}
