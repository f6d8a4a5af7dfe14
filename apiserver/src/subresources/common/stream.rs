//! Streams: a WebSocket to the client, and one to virt-handler or a socket to the guest.

use std::{future::Future, pin::Pin};

use api::VirtualMachineInstance;
use axum::{body::Body, response::Response};
use daemon::quota::Exceeded;
use http::Request;
use hyper::upgrade::Upgraded;
use hyper_util::rt::TokioIo;
use tokio_tungstenite::{WebSocketStream, tungstenite::protocol::Role};

use super::{
    call::{Call, handler_error},
    vmi_checks,
};
use crate::{
    clients::websocket::config,
    metrics::StreamKind,
    requests::error::ApiError,
    streaming::{
        frames::{Content, Frames},
        relay::{self, End, Limits},
        websocket,
    },
};

/// The WebSocket of a client.
pub(crate) type Client = WebSocketStream<Frames<TokioIo<Upgraded>>>;
/// Copies between both ends of a stream.
pub(crate) type Copying = Pin<Box<dyn Future<Output = End> + Send>>;

/// Connects the client to a stream of virt-handler.
pub(crate) async fn through_handler(
    call: Call<'_>,
    vmi: &VirtualMachineInstance,
    kind: &'static StreamKind,
    action: &str,
    limits: Limits,
    request: Request<Body>,
) -> Result<Response, ApiError> {
    let node = vmi_checks::node(vmi)?;
    let stop = call.context.stop.clone();
    serve(call, kind, Content::Bytes, request, async {
        let handler = &call.context.handler;
        let stream = handler.open(call.on(node), action, &call.object.holder).await.map_err(handler_error)?;
        Ok(move |client: Client| -> Copying { Box::pin(relay::copy(client, stream, limits, stop)) })
    })
    .await
}

/// Connects the far end, then the client, and copies until one of them ends.
///
/// In this order a failure of the far end is an answer that the client can read, not a stream that ends at once. `far` makes
/// the future that copies between the far end and the client.
pub(crate) async fn serve<C>(
    call: Call<'_>,
    kind: &'static StreamKind,
    content: Content,
    mut request: Request<Body>,
    far: impl Future<Output = Result<C, ApiError>>,
) -> Result<Response, ApiError>
where
    C: FnOnce(Client) -> Copying + Send + 'static,
{
    let response = websocket::accept(request.method(), request.version(), request.headers())
        .map_err(|error| ApiError::BadRequest(error.to_string()))?;
    let context = call.context;
    let slot = context.stream_quota.acquire(call.object.holder.clone()).map_err(|exceeded| {
        context.metrics.refused(kind, exceeded);
        let holder = match exceeded {
            Exceeded::Total => "",
            Exceeded::Holder => " of this user",
        };
        ApiError::TooManyRequests(format!("virt-api relays too many streams{holder} already, try again later"))
    })?;
    let copy = far.await?;
    let upgrade = hyper::upgrade::on(&mut request);
    let (metrics, stop) = (context.metrics.clone(), context.stop.clone());
    let (namespace, name) = (call.object.namespace.clone(), call.object.name.clone());
    context.streams.spawn(async move {
        let _slot = slot;
        let client = tokio::select! {
            upgraded = upgrade => upgraded,
            () = stop.cancelled() => return,
        };
        let client = match client {
            Ok(client) => client,
            Err(error) => {
                tracing::debug!(namespace, name, kind = kind.label, %error, "client did not open the stream");
                return;
            }
        };
        let client = Frames::new(TokioIo::new(client), content);
        let client = WebSocketStream::from_raw_socket(client, Role::Server, Some(config())).await;
        let open = metrics.opened(kind, &namespace, &name);
        let end = copy(client).await;
        open.ended(end.label());
        tracing::info!(namespace, name, kind = kind.label, end = end.label(), "stream ended");
    });
    Ok(response)
}
