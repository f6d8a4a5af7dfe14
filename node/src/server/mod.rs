//! The console and lifecycle server: virt-api's way to the machines of this node.
//!
//! Only virt-api gets in: each connection needs a client certificate of the cluster's CA with virt-api's own common
//! name. What a user may do was decided there; here it is decided whether the machine can do it.

mod lifecycle;
mod sessions;
mod stream;
#[cfg(test)]
mod tests;

use axum::{
    Router,
    extract::DefaultBodyLimit,
    http::{StatusCode, header},
    response::{IntoResponse, Response},
    routing::{get, put},
};

pub use sessions::{Sessions, Slot};

use crate::{
    machine::{Machines, Refusal},
    metrics::StreamMetrics,
};

/// Path of one machine.
const MACHINE: &str = "/v1/namespaces/{namespace}/virtualmachineinstances/{name}";
/// Requests carry no body that is read.
const MAX_BODY: usize = 64 * 1024;

/// What the handlers work with.
#[derive(Clone)]
struct Served {
    machines: Machines,
    metrics: StreamMetrics,
}

/// The routes of the server.
pub fn router(machines: Machines, metrics: StreamMetrics) -> Router {
    let path = |rest: &str| format!("{MACHINE}/{rest}");
    Router::new()
        .route(&path("console"), get(stream::console))
        .route(&path("vnc"), get(stream::vnc))
        .route(&path("vnc/screenshot"), get(lifecycle::screenshot))
        .route(&path("pause"), put(lifecycle::pause))
        .route(&path("unpause"), put(lifecycle::unpause))
        .route(&path("reset"), put(lifecycle::reset))
        .route(&path("softreboot"), put(lifecycle::soft_reboot))
        .layer(DefaultBodyLimit::max(MAX_BODY))
        .with_state(Served { machines, metrics })
}

/// A refusal as virt-api passes it on: a code and plain text.
struct Failure(StatusCode, String);

impl Failure {
    fn unknown(namespace: &str, name: &str) -> Self {
        Self(StatusCode::NOT_FOUND, format!("VMI {namespace}/{name} does not exist"))
    }
}

impl From<Refusal> for Failure {
    fn from(refusal: Refusal) -> Self {
        Self(StatusCode::INTERNAL_SERVER_ERROR, refusal.to_string())
    }
}

impl IntoResponse for Failure {
    fn into_response(self) -> Response {
        (self.0, [(header::CONTENT_TYPE, "text/plain; charset=utf-8")], self.1).into_response()
    }
}
