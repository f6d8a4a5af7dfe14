//! Requests of virt-api that this release does not support.

use axum::{
    Json,
    http::{StatusCode, Uri},
    response::{IntoResponse, Response},
};
use serde_json::json;

/// Answers requests that are not implemented.
pub(super) async fn not_yet(uri: Uri) -> Response {
    status(StatusCode::NOT_IMPLEMENTED, "NotImplemented", format!("{} is not available yet", uri.path()))
}

/// Answers unknown paths.
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
