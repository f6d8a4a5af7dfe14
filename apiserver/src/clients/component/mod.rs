//! Requests to the other components over mutual TLS.
//!
//! Each connection is verified for the exact identity of its component: role and, for virt-handler, node. Calls share
//! pooled connections; streams and large answers get a connection of their own.

use std::{net::SocketAddr, sync::Arc};

use axum::body::Body;
use bytes::Bytes;
use http::{HeaderValue, Request, StatusCode, header, response::Parts};
use http_body_util::{BodyExt, Limited};
use hyper::body::Incoming;
use rustls::ClientConfig;
use rustls_pki_types::ServerName;
use tokio::time::Instant;
use tokio_rustls::TlsConnector;

use super::{
    dial::dial,
    error::ComponentError,
    pool::{Connection, Identity, Pool},
};

/// Longest error text of a component.
const MAX_ERROR: usize = 4096;

/// A component that requests are sent to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Component {
    /// Name for errors: `virt-handler on node n1`.
    pub name: String,
    /// Address of its pod and port of its server.
    pub address: SocketAddr,
    /// TLS server name that its certificate must have.
    pub server_name: String,
}

impl Component {
    fn identity(&self) -> Identity {
        (self.address, self.server_name.clone())
    }

    fn http_error(&self, source: hyper::Error) -> ComponentError {
        ComponentError::Http { component: self.name.clone(), source }
    }

    fn interrupted(&self, source: hyper::Error) -> ComponentError {
        ComponentError::Interrupted { component: self.name.clone(), source }
    }
}

/// Sends requests to components.
pub(crate) struct ComponentClient {
    tls: TlsConnector,
    pool: Pool,
}

impl ComponentClient {
    /// Returns a client that connects with `tls`.
    #[must_use]
    pub(crate) fn new(tls: Arc<ClientConfig>) -> Self {
        Self { tls: TlsConnector::from(tls), pool: Pool::default() }
    }

    /// Sends a request and returns a successful answer of at most `limit` bytes.
    ///
    /// # Errors
    /// [`ComponentError::Refused`] for any other status.
    pub(crate) async fn call(
        &self,
        component: &Component,
        request: Request<Body>,
        limit: usize,
    ) -> Result<Bytes, ComponentError> {
        let (connection, parts, body) = self.send(component, request).await?;
        if !parts.status.is_success() {
            let (message, complete) = error_text(body).await;
            if complete {
                self.pool.put(component.identity(), connection);
            }
            return Err(ComponentError::Refused { status: parts.status, message });
        }
        let body = Limited::new(body, limit).collect().await;
        let body = body.map_err(|source| ComponentError::Body { component: component.name.clone(), source })?;
        self.pool.put(component.identity(), connection);
        Ok(body.to_bytes())
    }

    /// Sends a request on a connection of its own and returns the body of a successful answer as it arrives.
    ///
    /// # Errors
    /// [`ComponentError::Refused`] for any other status.
    pub(crate) async fn fetch(
        &self,
        component: &Component,
        mut request: Request<Body>,
    ) -> Result<Incoming, ComponentError> {
        request.headers_mut().insert(header::CONNECTION, HeaderValue::from_static("close"));
        let answer = self.open(component, request).await?;
        let status = answer.status();
        if status.is_success() {
            return Ok(answer.into_body());
        }
        Err(ComponentError::Refused { status, message: error_text(answer.into_body()).await.0 })
    }

    /// Sends a request on a connection of its own, which may be upgraded to a stream.
    pub(crate) async fn open(
        &self,
        component: &Component,
        mut request: Request<Body>,
    ) -> Result<hyper::Response<Incoming>, ComponentError> {
        insert_host(component, &mut request)?;
        let mut connection = self.connect(component).await?;
        connection.sender.send_request(request).await.map_err(|error| component.http_error(error))
    }

    /// Sends a request on a pooled connection or a new one. A pooled connection may end at any time: a request that was not sent,
    /// or changes nothing, is repeated on a new one. No other is, since a second one may do more than the first, such as a
    /// second reset (RFC 9110, section 9.2.2).
    async fn send(
        &self,
        component: &Component,
        mut request: Request<Body>,
    ) -> Result<(Connection, Parts, Incoming), ComponentError> {
        insert_host(component, &mut request)?;
        if let Some(mut connection) = self.pool.take(&component.identity()) {
            let repeatable = repeatable(&request);
            match connection.sender.try_send_request(request).await {
                Ok(answer) => {
                    let (parts, body) = answer.into_parts();
                    return Ok((connection, parts, body));
                }
                Err(mut error) => match error.take_message().or(repeatable) {
                    Some(again) => request = again,
                    None => return Err(component.interrupted(error.into_error())),
                },
            }
        }
        let mut connection = self.connect(component).await?;
        let answer = connection.sender.send_request(request).await.map_err(|error| component.interrupted(error))?;
        let (parts, body) = answer.into_parts();
        Ok((connection, parts, body))
    }

    async fn connect(&self, component: &Component) -> Result<Connection, ComponentError> {
        let name = ServerName::try_from(component.server_name.clone())
            .map_err(|_| ComponentError::ServerName(component.name.clone()))?;
        let sender = dial(&self.tls, component.address, name)
            .await
            .map_err(|source| ComponentError::Connect { component: component.name.clone(), source })?;
        Ok(Connection { sender, since: Instant::now() })
    }
}

/// Returns a copy of a request that changes nothing. Such requests have no body.
fn repeatable(request: &Request<Body>) -> Option<Request<Body>> {
    if !request.method().is_safe() {
        return None;
    }
    let mut copy = Request::new(Body::empty());
    *copy.method_mut() = request.method().clone();
    *copy.uri_mut() = request.uri().clone();
    *copy.headers_mut() = request.headers().clone();
    Some(copy)
}

fn insert_host(component: &Component, request: &mut Request<Body>) -> Result<(), ComponentError> {
    let host = HeaderValue::from_str(&component.server_name).map_err(http::Error::from)?;
    request.headers_mut().insert(header::HOST, host);
    Ok(())
}

/// Reads the text of a refusal. The second value is true if the body was read to its end.
pub(super) async fn error_text(body: Incoming) -> (String, bool) {
    let Ok(body) = Limited::new(body, MAX_ERROR).collect().await else { return (String::new(), false) };
    (String::from_utf8_lossy(&body.to_bytes()).trim().to_owned(), true)
}

/// Returns the error of a stream that a component refused.
pub(super) async fn refused_stream(status: StatusCode, body: Incoming) -> ComponentError {
    ComponentError::Handshake { status, message: error_text(body).await.0 }
}

#[cfg(test)]
mod tests;
