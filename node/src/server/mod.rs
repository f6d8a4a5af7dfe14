//! The console and lifecycle server: virt-api's way to the machines of this node.
//!
//! Only virt-api gets in: each connection needs a client certificate of the cluster's CA with virt-api's own common
//! name. What a user may do was decided there; here it is decided whether the machine can do it.

mod bridge;
mod guest;
mod lifecycle;
mod sessions;
mod stream;
#[cfg(test)]
mod tests;
mod unavailable;
mod vsock;

use std::sync::Arc;

use axum::{
    Router,
    extract::DefaultBodyLimit,
    http::{HeaderMap, StatusCode, header},
    response::{IntoResponse, Response},
    routing::{any, get, put},
};
use process::shares::{Full, HOLDER_HEADER, Share, Shares};
use tokio_util::task::TaskTracker;

pub use sessions::{Ending, Sessions, Slot};

use crate::{
    machine::{Handle, Machines, Refusal},
    metrics::{StreamKind, StreamMetrics},
    vsock::Guests,
};

/// Path of one machine.
const MACHINE: &str = "/v1/namespaces/{namespace}/virtualmachineinstances/{name}";
/// Longest body; the only one that is read holds a duration.
const MAX_BODY: usize = 64 * 1024;

/// Most streams at a time. Where nobody reads, each holds a few hundred KiB.
pub const MAX_STREAMS: usize = 256;
/// Most pictures of displays at a time. Each is 8 MiB at worst, which are held until its client has taken them.
const PICTURES: usize = 8;
/// Most calls that wait for launchers at a time. virt-api has more connections than that: a launcher that does not answer,
/// and who asks it again and again, keeps nobody from other machines.
const CALLS: usize = 48;
/// Longest name of a holder of streams; virt-api sends 64 digits.
const MAX_HOLDER: usize = 64;

/// What the handlers work with.
#[derive(Clone)]
struct Served {
    machines: Machines,
    metrics: StreamMetrics,
    shares: Shares,
    guests: Guests,
    streams: TaskTracker,
    /// Places for pictures, by namespace.
    pictures: Shares,
    /// Places for other calls to launchers, by namespace.
    calls: Shares,
}

impl Served {
    fn machine(&self, namespace: &str, name: &str) -> Result<Arc<Handle>, Failure> {
        self.machines.get(namespace, name).ok_or_else(|| Failure::unknown(namespace, name))
    }

    /// A place for a call to the launcher of a machine in this namespace.
    fn place(&self, namespace: &str) -> Result<Share, Failure> {
        self.calls.claim(namespace.to_owned()).map_err(|_| {
            let message = "too many calls wait for machines of the node, try again later";
            Failure(StatusCode::TOO_MANY_REQUESTS, message.to_owned())
        })
    }

    /// A place for a stream of the user that virt-api asks for.
    fn claim(&self, kind: StreamKind, headers: &HeaderMap) -> Result<Share, Failure> {
        self.shares.claim(holder(headers).to_owned()).map_err(|full| {
            self.metrics.refuse(kind, full);
            let whose = match full {
                Full::All => "the node",
                Full::Share => "this user on the node",
            };
            Failure(StatusCode::TOO_MANY_REQUESTS, format!("there are too many streams of {whose}, try again later"))
        })
    }
}

/// Whom a stream counts for. Requests that do not say so count for one and the same.
fn holder(headers: &HeaderMap) -> &str {
    let named = headers.get(HOLDER_HEADER).and_then(|name| name.to_str().ok());
    named.filter(|name| name.len() <= MAX_HOLDER).unwrap_or_default()
}

/// The routes of the server. `streams` has a task for each open stream, of which there are as many as `shares` has places.
pub fn router(
    machines: Machines,
    metrics: StreamMetrics,
    shares: Shares,
    guests: Guests,
    streams: TaskTracker,
) -> Router {
    let path = |rest: &str| format!("{MACHINE}/{rest}");
    let (pictures, calls) = (Shares::of(PICTURES), Shares::of(CALLS));
    Router::new()
        .route(&path("console"), get(stream::console))
        .route(&path("vnc"), get(stream::vnc))
        .route(&path("vnc/screenshot"), get(lifecycle::screenshot))
        .route(&path("pause"), put(lifecycle::pause))
        .route(&path("unpause"), put(lifecycle::unpause))
        .route(&path("reset"), put(lifecycle::reset))
        .route(&path("softreboot"), put(lifecycle::soft_reboot))
        .route(&path("usbredir"), get(stream::usb_redirection))
        .route(&path("vsock"), get(vsock::connect))
        .route(&path("guestosinfo"), get(guest::os_info))
        .route(&path("userlist"), get(guest::users))
        .route(&path("filesystemlist"), get(guest::file_systems))
        .route(&path("freeze"), put(guest::freeze))
        .route(&path("unfreeze"), put(guest::unfreeze))
        .route(&path("backup"), any(unavailable::not_yet))
        .route(&path("redefine-checkpoint"), any(unavailable::not_yet))
        .route(&path("sev/{call}"), any(unavailable::not_yet))
        .fallback(unavailable::unknown)
        .layer(DefaultBodyLimit::max(MAX_BODY))
        .with_state(Served { machines, metrics, shares, guests, streams, pictures, calls })
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
