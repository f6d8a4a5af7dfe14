//! `virtualmachineinstances/usbredir`: a WebSocket that connects a USB device of the client.

use api::{VirtualMachineInstance, enums::VmiPhase};
use axum::{body::Body, response::Response};
use http::Request;

use super::common::{
    call::Call,
    specification::{Answer, Specification, VMIS},
    stream,
    vmi_checks::{conflict, phase},
};
use crate::{metrics::StreamKind, requests::error::ApiError, streaming::relay::Limits};

pub(super) static SPECIFICATION: Specification = Specification {
    listed: false,
    operation: "usbredir",
    description: "Open a websocket that connects a USB device",
    ..Specification::get(VMIS, "usbredir", Answer::Stream(&STREAM), |call, request| Box::pin(serve(call, request)))
};

static STREAM: StreamKind =
    StreamKind { label: "usbredir", gauge: "kubevirt_usbredir_active_connections", help: "USB redirections open now" };

/// Rejects a VMI without USB redirection, or one that is not running.
fn decide(vmi: &VirtualMachineInstance) -> Result<(), ApiError> {
    if vmi.spec.architecture.as_deref() == Some("s390x") {
        return Err(conflict(vmi, "No USB support on s390x"));
    }
    if vmi.spec.domain.devices.client_passthrough.is_none() {
        return Err(conflict(vmi, "Not configured with USB Redirection"));
    }
    if phase(vmi) != VmiPhase::Running {
        return Err(ApiError::BadRequest("VMI is not running".to_owned()));
    }
    Ok(())
}

async fn serve(call: Call<'_>, request: Request<Body>) -> Result<Response, ApiError> {
    let vmi = call.vmi().await?;
    decide(&vmi)?;
    stream::through_handler(call, &vmi, &STREAM, "usbredir", Limits::viewer(), request).await
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::subresources::common::testing::{self, bad, in_phase, vmi, with_devices};

    #[test]
    fn usb_redirection_needs_its_device() {
        let usb = json!({"clientPassthrough": {}});
        assert_eq!(decide(&with_devices(usb.clone(), "Running")), Ok(()));
        assert_eq!(decide(&with_devices(usb, "Scheduled")), bad("VMI is not running"));
        assert_eq!(decide(&in_phase("Running")), testing::conflict("Not configured with USB Redirection"));
        let s390x = vmi(json!({"architecture": "s390x", "domain": {"devices": {}}}), json!({}));
        assert_eq!(decide(&s390x), testing::conflict("No USB support on s390x"));
    }
}
