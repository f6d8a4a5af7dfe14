//! Calls of the API by path.

use anyhow::{Context, Result, ensure};
use http::{Method, Request};
use kube::client::Body;
use serde_json::Value;

use super::Story;
use crate::answer::Answer;

/// Group of the aggregated API.
const GROUP: &str = "subresources.kubevirt.io";

impl Story {
    /// Calls a path of the API server.
    ///
    /// # Errors
    /// Fails without an answer.
    pub async fn call(&self, method: &Method, path: &str, body: &Value) -> Result<Answer> {
        let request = Request::builder().method(method).uri(path).header("Content-Type", "application/json");
        let body = if body.is_null() { Vec::new() } else { serde_json::to_vec(body)? };
        self.send(request.body(Body::from(body))?).await
    }

    /// Sends a request to the API server.
    ///
    /// # Errors
    /// Fails without an answer.
    pub async fn send(&self, request: Request<Body>) -> Result<Answer> {
        let what = format!("{} {}", request.method(), request.uri());
        let response = self.client.send(request).await.with_context(|| what.clone())?;
        Answer::read(response).await.context(what)
    }

    /// Returns the path of a subresource of an object of the story, such as `virtualmachines/a`.
    #[must_use]
    pub fn subresource(&self, version: &str, object: &str, subresource: &str) -> String {
        format!("/apis/{GROUP}/{version}/namespaces/{}/{object}/{subresource}", self.namespace)
    }

    /// Calls a subresource of an object such as `virtualmachines/a`. Returns status and message.
    ///
    /// # Errors
    /// Fails without an answer.
    pub async fn call_subresource(
        &self,
        method: &Method,
        object: &str,
        subresource: &str,
        body: &Value,
    ) -> Result<(u16, String)> {
        let answer = self.call(method, &self.subresource("v1", object, subresource), body).await?;
        Ok((answer.code, answer.message()))
    }

    /// Calls a subresource with PUT.
    ///
    /// # Errors
    /// Fails if it is refused, with the server's message.
    pub async fn put(&self, object: &str, subresource: &str, body: &Value) -> Result<String> {
        let (code, text) = self.call_subresource(&Method::PUT, object, subresource, body).await?;
        ensure!(code < 300, "{object}/{subresource}: {code} {text}");
        Ok(text)
    }
}
