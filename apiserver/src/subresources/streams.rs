//! Streams: a WebSocket to the client, and one to the node agent or a socket to the guest.

use std::{future::Future, pin::Pin};

use api::VirtualMachineInstance;
use axum::{body::Body, response::Response};
use http::Request;
use hyper::upgrade::Upgraded;
use hyper_util::rt::TokioIo;
use process::shares::Full;
use tokio_tungstenite::{WebSocketStream, tungstenite::protocol::Role};

use super::{Object, Server, handler_error};
use crate::{
    error::ApiError,
    frames::{Content, Frames},
    instance,
    metrics::StreamKind,
    path::{self, PortError, Protocol},
    port_forward::{self, Holds},
    stream::{self, End, Limits},
    tunnel, websocket,
};

type Client = WebSocketStream<Frames<TokioIo<Upgraded>>>;
type Copying = Pin<Box<dyn Future<Output = End> + Send>>;

impl Server {
    pub(super) async fn console(&self, object: &Object, request: Request<Body>) -> Result<Response, ApiError> {
        let vmi = self.vmi(object).await?;
        instance::check_console(&vmi)?;
        let action = if is_set(request.uri().query(), "replay") { "console?replay=true" } else { "console" };
        self.through_agent(object, &vmi, StreamKind::Console, action, request).await
    }

    pub(super) async fn vnc(&self, object: &Object, request: Request<Body>) -> Result<Response, ApiError> {
        let vmi = self.vmi(object).await?;
        instance::check_vnc(&vmi)?;
        let action = format!("vnc?preserveSession={}", is_set(request.uri().query(), "preserveSession"));
        self.through_agent(object, &vmi, StreamKind::Vnc, &action, request).await
    }

    pub(super) async fn usb_redirection(&self, object: &Object, request: Request<Body>) -> Result<Response, ApiError> {
        let vmi = self.vmi(object).await?;
        instance::check_usb_redirection(&vmi)?;
        self.through_agent(object, &vmi, StreamKind::UsbRedir, "usbredir", request).await
    }

    pub(super) async fn vsock(&self, object: &Object, request: Request<Body>) -> Result<Response, ApiError> {
        let vmi = self.vmi(object).await?;
        instance::check_vsock(&vmi)?;
        let action = vsock_action(request.uri().query())?;
        self.through_agent(object, &vmi, StreamKind::Vsock, &action, request).await
    }

    async fn through_agent(
        &self,
        object: &Object,
        vmi: &VirtualMachineInstance,
        kind: StreamKind,
        action: &str,
        request: Request<Body>,
    ) -> Result<Response, ApiError> {
        let node = instance::node(vmi)?;
        let stop = self.stop.clone();
        self.stream(object, kind, Content::Bytes, request, async {
            let handler = self.handler.open(object.on(node), action, &object.holder).await.map_err(handler_error)?;
            Ok(move |client: Client| -> Copying { Box::pin(stream::copy(client, handler, Limits::default(), stop)) })
        })
        .await
    }

    pub(super) async fn port_forward(
        &self,
        object: &Object,
        vmi: VirtualMachineInstance,
        request: Request<Body>,
    ) -> Result<Response, ApiError> {
        let port = path::guest_port(request.uri().path()).map_err(|error| match error {
            PortError::NoSuchPath => ApiError::NoSuchPath,
            other => ApiError::BadRequest(other.to_string()),
        })?;
        port_forward::check(&vmi)?;
        let content = match port.protocol {
            Protocol::Tcp => Content::Bytes,
            Protocol::Udp => Content::Datagrams,
        };
        let half_close = is_set(request.uri().query(), "halfClose");
        let stop = self.stop.clone();
        self.stream(object, StreamKind::PortForward, content, request, async {
            let target = port_forward::target(&vmi, &self.pods(&vmi).await?)?;
            let guest = port_forward::connect(target.address, port).await?;
            // The address may have passed on to another pod between the look at it and the connection.
            let pod = self.pod(object, &target.pod).await?;
            if target.holds(pod.as_ref()) != Holds::Yes {
                return Err(port_forward::not_running(&vmi));
            }
            let interest = self.presence.of(&self.client, &vmi, &target);
            let gone = async move { interest.gone().await };
            Ok(move |client: Client| -> Copying {
                Box::pin(tunnel::copy(client, guest, half_close, Limits::tunnel(), gone, stop))
            })
        })
        .await
    }

    /// Connects the far end, then the client, and copies until one of them ends.
    ///
    /// In this order a failure behind us is an answer that the client can read, not a stream that ends at once. `far`
    /// makes the future that copies between the far end and the client.
    async fn stream<C>(
        &self,
        object: &Object,
        kind: StreamKind,
        content: Content,
        mut request: Request<Body>,
        far: impl Future<Output = Result<C, ApiError>>,
    ) -> Result<Response, ApiError>
    where
        C: FnOnce(Client) -> Copying + Send + 'static,
    {
        let response = websocket::accept(request.method(), request.version(), request.headers())
            .map_err(|error| ApiError::BadRequest(error.to_string()))?;
        let share = self.shares.claim(object.holder.clone()).map_err(|full| {
            self.metrics.refused(kind, full);
            let whose = match full {
                Full::All => "",
                Full::Share => " of this user",
            };
            ApiError::TooManyRequests(format!("virt-api carries too many streams{whose} already, try again later"))
        })?;
        let copy = far.await?;
        let upgrade = hyper::upgrade::on(&mut request);
        let (metrics, stop) = (self.metrics.clone(), self.stop.clone());
        let (namespace, name) = (object.namespace.clone(), object.name.clone());
        self.streams.spawn(async move {
            let _share = share;
            let client = tokio::select! {
                upgraded = upgrade => upgraded,
                () = stop.cancelled() => return,
            };
            let client = match client {
                Ok(client) => client,
                Err(error) => {
                    tracing::debug!(namespace, name, kind = kind.label(), %error, "client did not take the stream");
                    return;
                }
            };
            let config = Some(websocket::config());
            let client = Frames::new(TokioIo::new(client), content);
            let client = WebSocketStream::from_raw_socket(client, Role::Server, config).await;
            let open = metrics.opened(kind, &namespace, &name);
            let end = copy(client).await;
            open.ended(end.label());
            tracing::info!(namespace, name, kind = kind.label(), end = end.label(), "stream ended");
        });
        Ok(response)
    }
}

/// The first value of a parameter.
fn parameter<'a>(query: Option<&'a str>, name: &str) -> Option<&'a str> {
    query.unwrap_or_default().split('&').find_map(|pair| match pair.split_once('=') {
        Some((key, value)) => (key == name).then_some(value),
        None => None,
    })
}

fn is_false(value: &str) -> bool {
    matches!(value, "0" | "f" | "F" | "false" | "FALSE" | "False")
}

fn is_set(query: Option<&str>, name: &str) -> bool {
    parameter(query, name).is_some_and(api::is_true)
}

/// Path and query of the agent's VSOCK stream. TLS is on unless it is turned off.
fn vsock_action(query: Option<&str>) -> Result<String, ApiError> {
    let port = parameter(query, "port").unwrap_or_default();
    // The largest number stands for any port.
    let number =
        port.parse::<u32>().ok().filter(|number| port.bytes().all(|b| b.is_ascii_digit()) && *number != u32::MAX);
    let number = number.ok_or_else(|| ApiError::BadRequest("port must be the number of a VSOCK port".to_owned()))?;
    let tls = match parameter(query, "tls").filter(|value| !value.is_empty()) {
        None => true,
        Some(value) if api::is_true(value) => true,
        Some(value) if is_false(value) => false,
        Some(_) => return Err(ApiError::BadRequest("tls must be true or false".to_owned())),
    };
    Ok(format!("vsock?port={number}&tls={tls}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn switches_are_on_when_said_in_so_many_words() {
        assert!(is_set(Some("a=b&preserveSession=true"), "preserveSession"));
        assert!(is_set(Some("preserveSession=1"), "preserveSession"));
        for query in
            [None, Some(""), Some("preserveSession=false"), Some("preserveSession=yes"), Some("preserveSession")]
        {
            assert!(!is_set(query, "preserveSession"), "{query:?}");
        }
    }

    #[test]
    fn vsock_takes_a_port_and_tls_by_default() {
        assert_eq!(vsock_action(Some("port=22")), Ok("vsock?port=22&tls=true".into()));
        assert_eq!(vsock_action(Some("tls=false&port=22")), Ok("vsock?port=22&tls=false".into()));
        for query in [None, Some("port="), Some("port=ssh"), Some("port=4294967295"), Some("port=22&tls=maybe")] {
            assert!(vsock_action(query).is_err(), "{query:?}");
        }
    }
}
