//! Answers of the API server: status, headers and body.

use anyhow::Result;
use bytes::Bytes;
use http::{HeaderMap, Response};
use http_body_util::BodyExt;
use kube::client::Body;
use serde_json::Value;

/// An answer of a server, with any status.
pub struct Answer {
    /// HTTP status.
    pub code: u16,
    /// Headers.
    pub headers: HeaderMap,
    /// Body.
    pub body: Bytes,
}

impl Answer {
    /// Reads the body of a response.
    pub(crate) async fn read(response: Response<Body>) -> Result<Self> {
        let (parts, body) = response.into_parts();
        let body = body.collect().await?.to_bytes();
        Ok(Self { code: parts.status.as_u16(), headers: parts.headers, body })
    }

    /// Returns the body as text.
    #[must_use]
    pub fn text(&self) -> String {
        String::from_utf8_lossy(&self.body).into_owned()
    }

    /// Returns the body as JSON, or null.
    #[must_use]
    pub fn json(&self) -> Value {
        serde_json::from_slice(&self.body).unwrap_or_default()
    }

    /// Returns the message of a `Status`, else the body.
    #[must_use]
    pub fn message(&self) -> String {
        self.json()["message"].as_str().map_or_else(|| self.text(), str::to_owned)
    }
}
