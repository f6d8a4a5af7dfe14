//! Calls of the API as they are: status, headers and body.

use anyhow::{Context, Result, ensure};
use bytes::Bytes;
use http::{HeaderMap, Method, Request, Response};
use http_body_util::BodyExt;
use kube::client::Body;
use serde_json::Value;

use crate::Story;

/// Group of the aggregated API.
const GROUP: &str = "subresources.kubevirt.io";

/// What a server answered, whatever it was.
pub struct Answer {
    /// HTTP status.
    pub code: u16,
    /// Headers.
    pub headers: HeaderMap,
    /// Body.
    pub body: Bytes,
}

impl Answer {
    /// Reads the rest of an answer.
    pub(crate) async fn read(response: Response<Body>) -> Result<Self> {
        let (parts, body) = response.into_parts();
        let body = body.collect().await?.to_bytes();
        Ok(Self { code: parts.status.as_u16(), headers: parts.headers, body })
    }

    /// The body as text.
    #[must_use]
    pub fn text(&self) -> String {
        String::from_utf8_lossy(&self.body).into_owned()
    }

    /// The body as JSON; null where it is none.
    #[must_use]
    pub fn json(&self) -> Value {
        serde_json::from_slice(&self.body).unwrap_or_default()
    }

    /// What a failure says: the message of a `Status`, else the body.
    #[must_use]
    pub fn said(&self) -> String {
        self.json()["message"].as_str().map_or_else(|| self.text(), str::to_owned)
    }
}

impl Story {
    /// Calls a path of the API server.
    ///
    /// # Errors
    /// When there is no answer.
    pub async fn call(&self, method: &Method, path: &str, body: &Value) -> Result<Answer> {
        let request = Request::builder().method(method).uri(path).header("Content-Type", "application/json");
        let body = if body.is_null() { Vec::new() } else { serde_json::to_vec(body)? };
        self.send(request.body(Body::from(body))?).await
    }

    /// Sends a request to the API server.
    ///
    /// # Errors
    /// When there is no answer.
    pub async fn send(&self, request: Request<Body>) -> Result<Answer> {
        let what = format!("{} {}", request.method(), request.uri());
        let response = self.client.send(request).await.with_context(|| what.clone())?;
        Answer::read(response).await.context(what)
    }

    /// Path of a subresource of an object of the story, such as `virtualmachines/a`.
    #[must_use]
    pub fn subresource(&self, version: &str, object: &str, subresource: &str) -> String {
        format!("/apis/{GROUP}/{version}/namespaces/{}/{object}/{subresource}", self.namespace)
    }

    /// Status and text of a call of a subresource of an object such as `virtualmachines/a`.
    ///
    /// # Errors
    /// When there is no answer.
    pub async fn ask(&self, method: &Method, object: &str, subresource: &str, body: &Value) -> Result<(u16, String)> {
        let answer = self.call(method, &self.subresource("v1", object, subresource), body).await?;
        Ok((answer.code, answer.said()))
    }

    /// Puts to a subresource.
    ///
    /// # Errors
    /// When it is refused, with the server's words.
    pub async fn put(&self, object: &str, subresource: &str, body: &Value) -> Result<String> {
        let (code, text) = self.ask(&Method::PUT, object, subresource, body).await?;
        ensure!(code < 300, "{object}/{subresource}: {code} {text}");
        Ok(text)
    }
}
