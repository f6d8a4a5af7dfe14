//! The server for consoles and lifecycle requests of virt-api.
//!
//! Each connection needs a client certificate of the cluster's CA with virt-api's own common name. virt-api authorizes
//! users; this server checks that the VMI can carry out the request.

mod bridge;
mod guest;
mod lifecycle;
mod stream;
#[cfg(test)]
mod tests;
mod unavailable;
mod usage;
mod vsock;

use std::sync::Arc;

use axum::{
    Router,
    extract::DefaultBodyLimit,
    http::{HeaderMap, StatusCode, header},
    response::{IntoResponse, Response},
    routing::{any, get, put},
};
use daemon::quota::{Exceeded, HOLDER_HEADER, Slot, StreamQuota};
use tokio_util::task::TaskTracker;

use crate::{
    launcher::LauncherError,
    metrics::{StreamKind, StreamMetrics},
    vmi::{Handle, Refusal, Request, Vmis},
    vsock::Guests,
};

/// Path of a VMI.
const VMI_PATH: &str = "/v1/namespaces/{namespace}/virtualmachineinstances/{name}";
/// Longest body; the only one that is read contains a duration.
const MAX_BODY: usize = 64 * 1024;

/// Most streams at a time. A stream scope client does not read holds some hundred KiB.
pub(crate) const MAX_STREAMS: usize = 256;
/// Most screenshots at a time. Each holds up to 8 MiB until its client has read it.
const SCREENSHOTS: usize = 8;
/// Most calls to launchers at a time. virt-api has more connections: a launcher that does not answer must not block the
/// calls for other VMIs.
const CALLS: usize = 48;
/// Longest holder of streams; virt-api sends 64 digits.
const MAX_HOLDER: usize = 64;

/// State of the handlers.
#[derive(Clone)]
struct Served {
    vmis: Vmis,
    metrics: StreamMetrics,
    quota: StreamQuota,
    guests: Guests,
    streams: TaskTracker,
    /// Quota of screenshots by namespace.
    screenshots: StreamQuota,
    /// Quota of other calls to launchers by namespace.
    calls: StreamQuota,
}

impl Served {
    fn handle(&self, namespace: &str, name: &str) -> Result<Arc<Handle>, Failure> {
        self.vmis.get(namespace, name).ok_or_else(|| Failure::unknown(namespace, name))
    }

    /// Acquires a slot for a call to the launcher of a VMI in this namespace.
    fn call_slot(&self, namespace: &str) -> Result<Slot, Failure> {
        self.calls.acquire(namespace.to_owned()).map_err(|_| {
            let message = "too many calls to VMIs of the node are in progress, try again later";
            Failure(StatusCode::TOO_MANY_REQUESTS, message.to_owned())
        })
    }

    /// Acquires a slot for a stream of virt-api's user.
    fn claim(&self, kind: StreamKind, headers: &HeaderMap) -> Result<Slot, Failure> {
        self.quota.acquire(holder(headers).to_owned()).map_err(|exceeded| {
            self.metrics.refuse(kind, exceeded);
            let scope = match exceeded {
                Exceeded::Total => "the node",
                Exceeded::Holder => "this user on the node",
            };
            Failure(StatusCode::TOO_MANY_REQUESTS, format!("there are too many streams of {scope}, try again later"))
        })
    }
}

/// Returns the holder of a stream. Requests without a holder share one.
fn holder(headers: &HeaderMap) -> &str {
    let named = headers.get(HOLDER_HEADER).and_then(|name| name.to_str().ok());
    named.filter(|name| name.len() <= MAX_HOLDER).unwrap_or_default()
}

/// Returns the routes. `streams` tracks the tasks of open streams, at most as many as `quota` has slots.
pub(crate) fn router(
    vmis: Vmis,
    metrics: StreamMetrics,
    quota: StreamQuota,
    guests: Guests,
    streams: TaskTracker,
) -> Router {
    let path = |rest: &str| format!("{VMI_PATH}/{rest}");
    let ask = |request| put(move |served, vmi| lifecycle::ask(served, vmi, request));
    let (screenshots, calls) = (StreamQuota::new(SCREENSHOTS), StreamQuota::new(CALLS));
    Router::new()
        .route(&path("console"), get(stream::console))
        .route(&path("vnc"), get(stream::vnc))
        .route(&path("vnc/screenshot"), get(lifecycle::screenshot))
        .route(&path("pause"), ask(Request::Pause))
        .route(&path("unpause"), ask(Request::Unpause))
        .route(&path("reset"), ask(Request::Reset))
        .route(&path("softreboot"), ask(Request::SoftReboot))
        .route(&path("usbredir"), get(stream::usb_redirection))
        .route(&path("vsock"), get(vsock::connect))
        .route(&path("guestosinfo"), get(guest::os_info))
        .route(&path("userlist"), get(guest::users))
        .route(&path("filesystemlist"), get(guest::file_systems))
        .route(&path("usage"), get(usage::serve))
        .route(&path("freeze"), put(guest::freeze))
        .route(&path("unfreeze"), put(guest::unfreeze))
        .route(&path("backup"), any(unavailable::not_yet))
        .route(&path("redefine-checkpoint"), any(unavailable::not_yet))
        .route(&path("sev/{call}"), any(unavailable::not_yet))
        .fallback(unavailable::unknown)
        .layer(DefaultBodyLimit::max(MAX_BODY))
        .with_state(Served { vmis, metrics, quota, guests, streams, screenshots, calls })
}

/// An error for virt-api: a status code and plain text.
struct Failure(StatusCode, String);

impl Failure {
    fn unknown(namespace: &str, name: &str) -> Self {
        Self(StatusCode::NOT_FOUND, format!("VMI {namespace}/{name} does not exist"))
    }
}

impl From<Refusal> for Failure {
    fn from(refusal: Refusal) -> Self {
        let text = match &refusal {
            Refusal::Launcher(error) => failed_call(error),
            other => other.to_string(),
        };
        Self(StatusCode::INTERNAL_SERVER_ERROR, text)
    }
}

/// Returns the text of a failed call. Clients match the form that KubeVirt's virt-handler gives to refusals of a launcher, with
/// the names of its commands; it has no calls for streams.
fn failed_call(error: &LauncherError) -> String {
    let LauncherError::Refused { call, message, .. } = error else { return error.to_string() };
    let command = match *call {
        "Pause" | "Unpause" | "Reset" | "SoftReboot" | "Freeze" | "Unfreeze" => call,
        "GuestReport" => "GetGuestInfo",
        "Users" => "GetUsers",
        "FileSystems" => "GetFilesystems",
        "Screenshot" => "GetScreenshot",
        _ => return error.to_string(),
    };
    format!("server error. command {command} failed: {message:?}")
}

impl IntoResponse for Failure {
    fn into_response(self) -> Response {
        (self.0, [(header::CONTENT_TYPE, "text/plain; charset=utf-8")], self.1).into_response()
    }
}
