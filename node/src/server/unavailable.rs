//! Requests of the protocol between virt-api and this agent that no machine here can fulfil.

use axum::{
    Json,
    http::{StatusCode, Uri},
    response::{IntoResponse, Response},
};
use serde_json::json;

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
