//! `virtualmachineinstances/vsock`: a WebSocket to a VSOCK port of the guest.

use api::VirtualMachineInstance;
use axum::{body::Body, response::Response};
use http::Request;

use super::common::{
    call::Call,
    specification::{Answer, Specification, VMIS},
    stream,
};
use crate::{
    metrics::StreamKind,
    requests::{error::ApiError, options::query_value},
    streaming::relay::Limits,
};

pub(super) static SPECIFICATION: Specification = Specification {
    query_parameters: &[("port", "integer"), ("tls", "boolean")],
    listed: false,
    operation: "VSOCK",
    description: "Open a websocket to a VSOCK port of the guest",
    ..Specification::get(VMIS, "vsock", Answer::Stream(&STREAM), |call, request| Box::pin(serve(call, request)))
};

static STREAM: StreamKind =
    StreamKind { label: "vsock", gauge: "kubevirt_vsock_active_connections", help: "VSOCK connections open now" };

/// Returns path and query of virt-handler's stream. TLS is on by default.
fn decide(vmi: &VirtualMachineInstance, query: Option<&str>) -> Result<String, ApiError> {
    if !api::vsock::is_attached(vmi) {
        return Err(ApiError::BadRequest("VSOCK is not attached.".to_owned()));
    }
    let port = query_value(query, "port").unwrap_or_default();
    // The largest number means any port.
    let number =
        port.parse::<u32>().ok().filter(|number| port.bytes().all(|b| b.is_ascii_digit()) && *number != u32::MAX);
    let number = number.ok_or_else(|| ApiError::BadRequest("port must be the number of a VSOCK port".to_owned()))?;
    let tls = match query_value(query, "tls").as_deref() {
        None | Some("") => true,
        Some(value) if api::is_true(value) => true,
        Some("0" | "f" | "F" | "false" | "FALSE" | "False") => false,
        Some(_) => return Err(ApiError::BadRequest("tls must be true or false".to_owned())),
    };
    Ok(format!("vsock?port={number}&tls={tls}"))
}

async fn serve(call: Call<'_>, request: Request<Body>) -> Result<Response, ApiError> {
    let vmi = call.vmi().await?;
    let action = decide(&vmi, request.uri().query())?;
    stream::through_handler(call, &vmi, &STREAM, &action, Limits::default(), request).await
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::subresources::common::testing::{bad, in_phase, with_devices};

    #[test]
    fn vsock_needs_its_device() {
        assert_eq!(decide(&in_phase("Running"), Some("port=22")), bad("VSOCK is not attached."));
    }

    #[test]
    fn vsock_takes_a_port_and_tls_by_default() {
        let attached = with_devices(json!({"autoattachVSOCK": true}), "Running");
        assert_eq!(decide(&attached, Some("port=22")), Ok("vsock?port=22&tls=true".into()));
        assert_eq!(decide(&attached, Some("tls=false&port=22")), Ok("vsock?port=22&tls=false".into()));
        for query in [None, Some("port="), Some("port=ssh"), Some("port=4294967295"), Some("port=22&tls=maybe")] {
            assert!(decide(&attached, query).is_err(), "{query:?}");
        }
    }
}
