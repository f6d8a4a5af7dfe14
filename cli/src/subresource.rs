//! Requests to `subresources.kubevirt.io` through the API server, with the user's credentials.

use bytes::Bytes;
use http::{Method, Request, Response, StatusCode, header};
use http_body_util::{BodyExt, Limited};
use hyper_util::rt::TokioIo;
use kube::client::Body;
use tokio_tungstenite::{
    WebSocketStream,
    tungstenite::{
        self,
        handshake::client::generate_key,
        protocol::{CloseFrame, Role},
    },
};

use crate::{Connection, Error};

/// API group and version of the subresources.
const API: &str = "/apis/subresources.kubevirt.io/v1";
/// Subprotocol of all streams.
const SUBPROTOCOL: &str = "plain.kubevirt.io";
/// Largest answer. A screenshot of a large display takes a few MiB.
const MAX_ANSWER: usize = 64 * 1024 * 1024;

/// Verbosity that logs requests, as in kubectl.
const VERBOSITY_REQUESTS: u8 = 6;

/// A websocket with a raw byte stream in binary frames.
pub(crate) type Stream = WebSocketStream<TokioIo<hyper::upgrade::Upgraded>>;

impl Connection {
    /// Returns the path of a subresource in the connection's namespace. `resource` is `virtualmachines` or
    /// `virtualmachineinstances`.
    pub(crate) fn path(&self, resource: &str, name: &str, subresource: &str) -> String {
        format!("{API}/namespaces/{}/{resource}/{name}/{subresource}", self.namespace)
    }

    /// Returns the path of an object of the group `kubevirt.io` in the connection's namespace.
    pub(crate) fn object_path(&self, resource: &str, name: &str) -> String {
        format!("/apis/kubevirt.io/v1/namespaces/{}/{resource}/{name}", self.namespace)
    }

    /// Reads an object; `None` if it does not exist.
    pub(crate) async fn find(&self, path: &str) -> Result<Option<serde_json::Value>, Error> {
        match self.call(Method::GET, path, Vec::new()).await {
            Ok(answer) => crate::guest::read(&answer).map(Some),
            Err(Error::Refused { code: 404, .. }) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Returns the path of another resource in the connection's namespace.
    pub(crate) fn namespaced(&self, resource: &str) -> String {
        format!("{API}/namespaces/{}/{resource}", self.namespace)
    }

    /// Sends `body`, which may be empty, and returns the body of the answer.
    pub(crate) async fn call(&self, method: Method, path: &str, body: Vec<u8>) -> Result<Bytes, Error> {
        self.call_with(method, path, "application/json", body).await
    }

    /// Sends a merge patch of an object and returns the object.
    pub(crate) async fn patch(&self, path: &str, body: Vec<u8>) -> Result<Bytes, Error> {
        self.call_with(Method::PATCH, path, "application/merge-patch+json", body).await
    }

    async fn call_with(
        &self,
        method: Method,
        path: &str,
        content_type: &'static str,
        body: Vec<u8>,
    ) -> Result<Bytes, Error> {
        let request = Request::builder()
            .method(method.clone())
            .uri(path)
            .header(header::CONTENT_TYPE, content_type)
            .body(Body::from(body))
            .map_err(|e| transport(&e))?;
        let answered = async {
            let response = self.client.send(request).await.map_err(|e| transport(&e))?;
            let status = response.status();
            self.log_request(&method, path, status);
            let answer = read(response).await?;
            if status.is_success() { Ok(answer) } else { Err(refusal(status, &answer)) }
        };
        if self.request_timeout.is_zero() {
            return answered.await;
        }
        match tokio::time::timeout(self.request_timeout, answered).await {
            Ok(answer) => answer,
            Err(_) => Err(Error::Transport(format!("no answer within {:?}", self.request_timeout))),
        }
    }

    /// Logs a request and its status at the verbosity for requests.
    fn log_request(&self, method: &Method, path: &str, status: StatusCode) {
        if self.verbosity >= VERBOSITY_REQUESTS {
            eprintln!("{method} {path} {status}");
        }
    }

    /// Opens a stream.
    pub(crate) async fn stream(&self, path: &str) -> Result<Stream, Error> {
        let request = Request::builder()
            .uri(path)
            .header(header::CONNECTION, "Upgrade")
            .header(header::UPGRADE, "websocket")
            .header(header::SEC_WEBSOCKET_VERSION, "13")
            .header(header::SEC_WEBSOCKET_KEY, generate_key())
            .header(header::SEC_WEBSOCKET_PROTOCOL, SUBPROTOCOL)
            .body(Body::empty())
            .map_err(|e| transport(&e))?;
        let response = self.client.send(request).await.map_err(|e| transport(&e))?;
        let status = response.status();
        self.log_request(&Method::GET, path, status);
        if status != StatusCode::SWITCHING_PROTOCOLS {
            let answer = read(response).await?;
            return Err(refusal(status, &answer));
        }
        let upgraded = hyper::upgrade::on(response).await.map_err(|e| transport(&e))?;
        Ok(WebSocketStream::from_raw_socket(TokioIo::new(upgraded), Role::Client, None).await)
    }
}

/// Describes a broken stream.
pub(crate) fn lost(error: &tungstenite::Error) -> String {
    format!("the connection was lost: {error}")
}

/// Returns the reason that the server gave for closing the stream.
pub(crate) fn close_reason(frame: Option<&CloseFrame>) -> String {
    match frame.map(|frame| frame.reason.as_str()) {
        None | Some("") => {
            "the server closed it; the guest may have stopped, or another user may have opened it".into()
        }
        Some(reason) => reason.into(),
    }
}

async fn read(response: Response<Body>) -> Result<Bytes, Error> {
    let body = Limited::new(response.into_body(), MAX_ANSWER).collect().await;
    Ok(body.map_err(|e| Error::Transport(e.to_string()))?.to_bytes())
}

/// Joins the causes of an error, since the outermost one of a failed connection lacks detail.
fn transport(error: &(dyn std::error::Error + 'static)) -> Error {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        let cause_text = cause.to_string();
        if !text.contains(&cause_text) {
            text.push_str(": ");
            text.push_str(&cause_text);
        }
        source = cause.source();
    }
    Error::Transport(text)
}

/// Returns the message of a Kubernetes `Status`, else the body as text, else the status code.
fn refusal(status: StatusCode, body: &[u8]) -> Error {
    #[derive(serde::Deserialize)]
    struct Status {
        message: Option<String>,
    }
    let message = serde_json::from_slice::<Status>(body)
        .ok()
        .and_then(|s| s.message)
        .filter(|m| !m.is_empty())
        .or_else(|| std::str::from_utf8(body).ok().map(|t| t.trim().to_owned()).filter(|t| !t.is_empty()))
        .unwrap_or_else(|| format!("the server answered {status}"));
    Error::Refused { code: status.as_u16(), message }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_carry_the_message_of_the_server() {
        for (body, expected) in [
            (r#"{"kind":"Status","message":"VMI is not running"}"#, "VMI is not running"),
            ("no such thing\n", "no such thing"),
            ("", "the server answered 409 Conflict"),
            ("{}", "{}"),
        ] {
            assert_eq!(refusal(StatusCode::CONFLICT, body.as_bytes()).to_string(), expected);
        }
    }
}
