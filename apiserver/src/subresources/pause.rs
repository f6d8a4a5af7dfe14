//! `virtualmachineinstances/pause`: pauses the vCPUs of a running VMI.

use api::{VirtualMachineInstance, constants::condition, subresources::PauseOptions};
use axum::{body::Body, response::Response};
use bytes::Bytes;
use http::{Request, StatusCode};

use super::common::{
    call::Call,
    schema,
    specification::{Answer, Specification, VMIS},
    vmi_checks::{check_not_migrating, check_running, conflict, node},
};
use crate::requests::error::{ApiError, Kind, empty_response};

pub(super) static SPECIFICATION: Specification = Specification {
    options: Some(schema::options::<PauseOptions>),
    dry_run: true,
    operation: "Pause",
    description: "Stop the processors",
    ..Specification::put(VMIS, "pause", Answer::Empty, |call, request| Box::pin(serve(call, request)))
};

/// Returns the node of a VMI that can be paused.
fn decide(vmi: &VirtualMachineInstance) -> Result<&str, ApiError> {
    check_running(vmi, "VM is not running")?;
    // A probe of a paused guest would fail, and kubelet would restart the pod.
    if vmi.spec.liveness_probe.as_ref().is_some_and(|probe| probe.guest_agent_ping.is_none()) {
        return Err(ApiError::forbidden(
            Kind::VirtualMachineInstance,
            vmi.metadata.name.as_deref().unwrap_or_default(),
            "Pausing VMIs with a non-GuestAgentPing LivenessProbe is not supported",
        ));
    }
    if vmi.has_true(condition::PAUSED) {
        return Err(conflict(vmi, "VMI is already paused"));
    }
    check_not_migrating(vmi)?;
    node(vmi)
}

async fn serve(call: Call<'_>, request: Request<Body>) -> Result<Response, ApiError> {
    let (_, dry_run) = call.options_with_dry_run::<PauseOptions>(request).await?;
    let vmi = call.vmi().await?;
    let node = decide(&vmi)?;
    if dry_run { Ok(empty_response(StatusCode::OK)) } else { call.act(node, "pause", Bytes::new()).await }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;
    use crate::subresources::common::testing::{self, in_phase, vmi, with_conditions};

    #[test]
    fn guest_is_paused_once_and_only_without_a_probe_of_it() {
        assert_eq!(decide(&in_phase("Running")), Ok("node1"));
        assert_eq!(decide(&in_phase("Scheduled")), testing::conflict("VM is not running"));
        assert_eq!(decide(&with_conditions(&["Paused"])), testing::conflict("VMI is already paused"));
        for (state, expected) in [
            (json!({"startTimestamp": "2030-01-01T00:00:00Z"}), testing::conflict("VMI is migrating")),
            (json!({"startTimestamp": "2030-01-01T00:00:00Z", "endTimestamp": "2030-01-01T00:01:00Z"}), Ok("node1")),
            (json!({"migrationUid": "m"}), Ok("node1")),
        ] {
            let vmi = vmi(json!({"domain": {"devices": {}}}), json!({"phase": "Running", "migrationState": state}));
            assert_eq!(decide(&vmi), expected, "{state}");
        }
        let probed =
            |probe: Value| vmi(json!({"domain": {"devices": {}}, "livenessProbe": probe}), json!({"phase": "Running"}));
        assert_eq!(decide(&probed(json!({"guestAgentPing": {}}))), Ok("node1"));
        assert_eq!(
            decide(&probed(json!({"tcpSocket": {"port": 80}}))),
            Err(ApiError::forbidden(
                Kind::VirtualMachineInstance,
                "vmi",
                "Pausing VMIs with a non-GuestAgentPing LivenessProbe is not supported"
            ))
        );
    }
}
