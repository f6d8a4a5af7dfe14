//! A connection with one request at a time.

use std::{convert::Infallible, time::Duration};

use anyhow::{Context, Result};
use bytes::Bytes;
use futures::{StreamExt, stream};
use http::{Method, Request, header};
use http_body_util::{BodyExt, Full, StreamBody, combinators::BoxBody};
use hyper::{body::Frame, client::conn::http1::SendRequest};
use kube::api::AttachedProcess;

/// Time limit for a connection or an answer on a busy host; kube-apiserver waits five seconds for an answer.
pub(super) const TIMEOUT: Duration = Duration::from_secs(30);
/// Largest answer that is read.
const MAX_ANSWER: usize = 16 << 20;

/// An answer.
#[derive(Clone, Debug, PartialEq)]
pub struct Answer {
    /// HTTP status.
    pub status: u16,
    /// Body.
    pub body: Bytes,
}

/// A connection to a server, with one request at a time.
pub struct Connection {
    sender: SendRequest<BoxBody<Bytes, Infallible>>,
    host: String,
    prefix: String,
    /// Ends with the connection.
    _tunnel: Option<AttachedProcess>,
}

impl Connection {
    pub(super) fn new(sender: SendRequest<BoxBody<Bytes, Infallible>>, host: String, prefix: String) -> Self {
        Self { sender, host, prefix, _tunnel: None }
    }

    /// Keeps the process whose streams carry the connection.
    pub(super) fn with_tunnel(self, process: AttachedProcess) -> Self {
        Self { _tunnel: Some(process), ..self }
    }

    /// Posts a review as kube-apiserver does.
    ///
    /// # Errors
    /// Fails without a complete answer.
    pub async fn review(&mut self, path: &str, body: impl Into<Bytes>) -> Result<Answer> {
        self.request(Method::POST, path, &[("content-type", "application/json")], body.into()).await
    }

    /// Sends only the `start` of a review of `length` bytes and returns the status of the answer.
    ///
    /// # Errors
    /// Fails if the server closes the connection without an answer.
    pub async fn stall(&mut self, path: &str, length: usize, start: &'static [u8]) -> Result<u16> {
        let start = stream::once(async { Ok(Frame::data(Bytes::from_static(start))) });
        let body = BodyExt::boxed(StreamBody::new(Box::pin(start.chain(stream::pending()))));
        let request = Request::post(format!("{}{path}", self.prefix))
            .header(header::HOST, &self.host)
            .header(header::CONTENT_TYPE, "application/json")
            .header(header::CONTENT_LENGTH, length)
            .body(body)?;
        self.sender.ready().await?;
        Ok(self.sender.send_request(request).await?.status().as_u16())
    }

    /// Sends a request.
    ///
    /// # Errors
    /// Fails without a complete answer.
    pub async fn request(
        &mut self,
        method: Method,
        path: &str,
        headers: &[(&str, &str)],
        body: Bytes,
    ) -> Result<Answer> {
        let exchange = async {
            let mut request = Request::builder()
                .method(method)
                .uri(format!("{}{path}", self.prefix))
                .header(header::HOST, &self.host);
            for (name, value) in headers {
                request = request.header(*name, *value);
            }
            self.sender.ready().await?;
            let response = self.sender.send_request(request.body(Full::new(body).boxed())?).await?;
            let status = response.status().as_u16();
            let body = http_body_util::Limited::new(response.into_body(), MAX_ANSWER).collect().await;
            let body = body.map_err(|error| anyhow::anyhow!("the answer is incomplete: {error}"))?.to_bytes();
            Ok(Answer { status, body })
        };
        tokio::time::timeout(TIMEOUT, exchange).await.context("no answer in time")?
    }
}
