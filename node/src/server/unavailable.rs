//! Requests of the protocol between virt-api and this agent that no machine here can fulfil.

use axum::{
    Json,
    extract::{Path, RawQuery, State},
    http::{StatusCode, Uri},
    response::{IntoResponse, Response},
};
use serde_json::json;

use super::{Failure, Served};

/// A connection to a VSOCK port of the guest. No machine has VSOCK so far: the field is refused at admission.
pub(super) async fn vsock(
    State(served): State<Served>,
    Path((namespace, name)): Path<(String, String)>,
    RawQuery(query): RawQuery,
) -> Failure {
    let machine = match served.machine(&namespace, &name) {
        Ok(machine) => machine,
        Err(failure) => return failure,
    };
    let vmi = machine.vmi();
    if vmi.as_ref().and_then(|vmi| vmi.spec.domain.devices.autoattach_vsock) != Some(true) {
        return Failure(StatusCode::BAD_REQUEST, "VM doesn't have VSOCK enabled".into());
    }
    if let Err(message) = vsock_target(query.as_deref().unwrap_or_default()) {
        return Failure(StatusCode::BAD_REQUEST, message);
    }
    if vmi.and_then(|vmi| vmi.status.as_ref()?.vsock_cid).is_none() {
        return Failure(StatusCode::INTERNAL_SERVER_ERROR, "VSOCK CID is nil".into());
    }
    Failure(StatusCode::NOT_IMPLEMENTED, "VSOCK connections are not available on this node".into())
}

/// Port and whether TLS is to be spoken.
fn vsock_target(query: &str) -> Result<(u32, bool), String> {
    let value = |wanted: &str| {
        query.split('&').filter_map(|pair| pair.split_once('=')).find(|(key, _)| *key == wanted).map(|(_, value)| value)
    };
    let port = value("port").unwrap_or_default();
    let port = port.parse().map_err(|_| format!("port {port:?} is not a number between 0 and {}", u32::MAX))?;
    let tls = match value("tls") {
        None | Some("" | "false" | "False" | "FALSE" | "f" | "F" | "0") => false,
        Some("true" | "True" | "TRUE" | "t" | "T" | "1") => true,
        Some(other) => return Err(format!("tls={other:?} is not a truth value")),
    };
    Ok((port, tls))
}

/// What this agent cannot do for any machine yet.
pub(super) async fn not_yet(uri: Uri) -> Response {
    status(StatusCode::NOT_IMPLEMENTED, "NotImplemented", format!("{} is not available yet", uri.path()))
}

/// A path that this agent does not know.
pub(super) async fn unknown(uri: Uri) -> Response {
    status(StatusCode::NOT_FOUND, "NotFound", format!("there is nothing at {}", uri.path()))
}

fn status(code: StatusCode, reason: &str, message: String) -> Response {
    let message: String = message.chars().filter(|c| !c.is_control()).take(1024).collect();
    let body = json!({
        "kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure",
        "reason": reason, "message": message, "code": code.as_u16(),
    });
    (code, Json(body)).into_response()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_vsock_port_is_a_number_and_tls_a_truth_value() {
        assert_eq!(vsock_target("port=22"), Ok((22, false)));
        assert_eq!(vsock_target("tls=true&port=4294967295"), Ok((u32::MAX, true)));
        for query in ["", "port=", "port=-1", "port=4294967296", "port=ssh", "port=22&tls=maybe"] {
            assert!(vsock_target(query).is_err(), "{query}");
        }
    }
}
