//! `virtualmachineinstances/vnc`: a WebSocket to the display.

use api::{VirtualMachineInstance, enums::VmiPhase};
use axum::{body::Body, response::Response};
use http::Request;

use super::common::{
    call::Call,
    specification::{Answer, Specification, VMIS},
    stream,
    vmi_checks::phase,
};
use crate::{
    metrics::StreamKind,
    requests::{error::ApiError, options::is_set},
    streaming::relay::Limits,
};

pub(super) static SPECIFICATION: Specification = Specification {
    query_parameters: &[("preserveSession", "boolean")],
    operation: "VNC",
    description: "Open a websocket to the display",
    ..Specification::get(VMIS, "vnc", Answer::Stream(&STREAM), |call, request| Box::pin(serve(call, request)))
};

static STREAM: StreamKind =
    StreamKind { label: "vnc", gauge: "kubevirt_vnc_active_connections", help: "VNC connections open now" };

/// Rejects a VMI without a display, or one that is not running.
pub(super) fn decide(vmi: &VirtualMachineInstance) -> Result<(), ApiError> {
    if vmi.spec.domain.devices.autoattach_graphics_device == Some(false) {
        return Err(ApiError::BadRequest("No graphics devices are present.".to_owned()));
    }
    if phase(vmi) != VmiPhase::Running {
        return Err(ApiError::BadRequest("VMI is not running".to_owned()));
    }
    Ok(())
}

async fn serve(call: Call<'_>, request: Request<Body>) -> Result<Response, ApiError> {
    let vmi = call.vmi().await?;
    decide(&vmi)?;
    let action = format!("vnc?preserveSession={}", is_set(request.uri().query(), "preserveSession"));
    stream::through_handler(call, &vmi, &STREAM, &action, Limits::viewer(), request).await
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::subresources::common::testing::{bad, in_phase, with_devices};

    #[test]
    fn vnc_needs_a_running_guest_with_graphics() {
        assert_eq!(decide(&in_phase("Running")), Ok(()));
        assert_eq!(decide(&in_phase("Failed")), bad("VMI is not running"));
        let without = with_devices(json!({"autoattachGraphicsDevice": false}), "Running");
        assert_eq!(decide(&without), bad("No graphics devices are present."));
    }
}
