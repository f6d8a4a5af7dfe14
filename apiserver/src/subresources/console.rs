//! `virtualmachineinstances/console`: a WebSocket to the serial console.

use api::{VirtualMachineInstance, enums::VmiPhase};
use axum::{body::Body, response::Response};
use http::Request;

use super::common::{
    call::Call,
    specification::{Answer, Specification, VMIS},
    stream,
    vmi_checks::{conflict, phase},
};
use crate::{
    metrics::StreamKind,
    requests::{error::ApiError, options::query_value},
    streaming::relay::Limits,
};

pub(super) static SPECIFICATION: Specification = Specification {
    query_parameters: &[("replay", "boolean")],
    operation: "Console",
    description: "Open a websocket to the serial console",
    ..Specification::get(VMIS, "console", Answer::Stream(&STREAM), |call, request| Box::pin(serve(call, request)))
};

static STREAM: StreamKind =
    StreamKind { label: "console", gauge: "kubevirt_console_active_connections", help: "Console connections open now" };

/// Rejects a VMI without a serial console, or one that is not running.
fn decide(vmi: &VirtualMachineInstance) -> Result<(), ApiError> {
    if vmi.spec.domain.devices.autoattach_serial_console == Some(false) {
        return Err(ApiError::BadRequest("No serial consoles are present.".to_owned()));
    }
    match phase(vmi) {
        VmiPhase::Failed => Err(conflict(vmi, "VMI is in failed status")),
        VmiPhase::Running => Ok(()),
        _ => Err(ApiError::BadRequest("VMI is not running".to_owned())),
    }
}

async fn serve(call: Call<'_>, request: Request<Body>) -> Result<Response, ApiError> {
    let vmi = call.vmi().await?;
    decide(&vmi)?;
    stream::through_handler(call, &vmi, &STREAM, action(request.uri().query()), Limits::default(), request).await
}

/// Returns the request to virt-handler. Earlier output comes first unless the client refuses it: clients of the reference do not
/// know the parameter, and their users see a prompt.
fn action(query: Option<&str>) -> &'static str {
    let replays = query_value(query, "replay").is_none_or(|value| api::is_true(&value));
    if replays { "console?replay=true" } else { "console" }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::subresources::common::testing::{self, bad, in_phase, with_devices};

    #[test]
    fn earlier_output_comes_first_unless_the_client_refuses_it() {
        for (query, replays) in [
            (None, true),
            (Some("other=false"), true),
            (Some("replay=true"), true),
            (Some("replay=false"), false),
            (Some("a=b&replay=0"), false),
            (Some("replay=yes"), false),
        ] {
            assert_eq!(action(query).contains("replay=true"), replays, "{query:?}");
        }
    }

    #[test]
    fn console_needs_a_running_guest_with_a_serial_port() {
        assert_eq!(decide(&in_phase("Running")), Ok(()));
        assert_eq!(decide(&in_phase("Scheduled")), bad("VMI is not running"));
        assert_eq!(decide(&in_phase("Failed")), testing::conflict("VMI is in failed status"));
        let without = with_devices(json!({"autoattachSerialConsole": false}), "Running");
        assert_eq!(decide(&without), bad("No serial consoles are present."));
    }
}
