//! The opening handshake of a WebSocket (RFC 6455), both sides, over hyper, and its end.
//!
//! Compression is never negotiated. The subprotocol is `plain.kubevirt.io`: binary messages carry the bytes of a
//! stream, their boundaries mean nothing. It is picked where it is offered; a client that offers none is served alike.

use axum::{body::Body, response::Response};
use futures::{Sink, SinkExt, Stream, StreamExt};
use http::{HeaderMap, HeaderValue, Method, Request, StatusCode, Version, header};
use tokio_tungstenite::tungstenite::{
    Error, Message,
    handshake::{client::generate_key, derive_accept_key},
    protocol::{CloseFrame, WebSocketConfig, frame::coding::CloseCode},
};

use crate::frames::PIECE;

/// The subprotocol of all streams.
pub const SUBPROTOCOL: &str = "plain.kubevirt.io";

/// Largest message passed on. A stream that is stuck holds one or two of them, and all streams together have to fit into
/// the pod's memory. Agents send less at a time; what clients send is cut before it comes here, see [`crate::frames`],
/// but for datagrams, none of which is larger.
pub const MAX_MESSAGE: usize = 2 * PIECE;
/// Size of a connection's read buffer.
const READ_BUFFER: usize = 16 << 10;
/// Most bytes that wait for a slow reader before the writer has to wait, too.
const MAX_WRITE_BUFFER: usize = 2 * MAX_MESSAGE;

/// Bounds of each WebSocket.
#[must_use]
pub fn config() -> WebSocketConfig {
    WebSocketConfig::default()
        .read_buffer_size(READ_BUFFER)
        .write_buffer_size(0)
        .max_write_buffer_size(MAX_WRITE_BUFFER)
        .max_message_size(Some(MAX_MESSAGE))
        .max_frame_size(Some(MAX_MESSAGE))
}

/// Why a request cannot become a WebSocket.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum HandshakeError {
    /// Not a GET by HTTP/1.1.
    #[error("websocket: the client is not using the websocket protocol: request method is not GET")]
    Method,
    /// No `Connection: Upgrade`.
    #[error(
        "websocket: the client is not using the websocket protocol: 'upgrade' token not found in 'Connection' header"
    )]
    Connection,
    /// No `Upgrade: websocket`.
    #[error(
        "websocket: the client is not using the websocket protocol: 'websocket' token not found in 'Upgrade' header"
    )]
    Upgrade,
    /// Another version than 13.
    #[error("websocket: unsupported version: 13 not found in 'Sec-WebSocket-Version' header")]
    Version,
    /// No key, or one that cannot be.
    #[error("websocket: not a websocket handshake: 'Sec-WebSocket-Key' header is missing or blank")]
    Key,
}

/// Ends a connection: says the last word, if there is one, and hears the other side out until it has closed, too, unless
/// it is `done`: has closed already, or is lost.
///
/// A socket that is closed over bytes that nobody has read is reset. Whoever is in between then takes the connection for
/// broken, and what is still under way to the other side is lost, the last word with it. One late pong is enough.
pub async fn part<K, S>(sink: &mut K, source: &mut S, last_word: Option<(CloseCode, &'static str)>, done: bool)
where
    K: Sink<Message, Error = Error> + Unpin,
    S: Stream<Item = Result<Message, Error>> + Unpin,
{
    if let Some((code, reason)) = last_word {
        // A side that has closed at the same moment has no need of it.
        let _ = sink.send(Message::Close(Some(CloseFrame { code, reason: reason.into() }))).await;
    }
    if sink.close().await.is_err() || done {
        return;
    }
    while let Some(Ok(message)) = source.next().await {
        if message.is_close() {
            return;
        }
    }
}

/// Checks a client's handshake and makes the answer to it.
pub fn accept(method: &Method, version: Version, headers: &HeaderMap) -> Result<Response, HandshakeError> {
    if method != Method::GET || version != Version::HTTP_11 {
        return Err(HandshakeError::Method);
    }
    if !has_token(headers, header::CONNECTION, "upgrade") {
        return Err(HandshakeError::Connection);
    }
    if !has_token(headers, header::UPGRADE, "websocket") {
        return Err(HandshakeError::Upgrade);
    }
    if !has_token(headers, header::SEC_WEBSOCKET_VERSION, "13") {
        return Err(HandshakeError::Version);
    }
    // 16 bytes in base64.
    let key = headers.get(header::SEC_WEBSOCKET_KEY).filter(|key| key.len() == 24).ok_or(HandshakeError::Key)?;
    let accept = HeaderValue::from_str(&derive_accept_key(key.as_bytes())).map_err(|_| HandshakeError::Key)?;
    let mut response = Response::new(Body::empty());
    *response.status_mut() = StatusCode::SWITCHING_PROTOCOLS;
    let answer = response.headers_mut();
    answer.insert(header::CONNECTION, HeaderValue::from_static("Upgrade"));
    answer.insert(header::UPGRADE, HeaderValue::from_static("websocket"));
    answer.insert(header::SEC_WEBSOCKET_ACCEPT, accept);
    if has_token(headers, header::SEC_WEBSOCKET_PROTOCOL, SUBPROTOCOL) {
        answer.insert(header::SEC_WEBSOCKET_PROTOCOL, HeaderValue::from_static(SUBPROTOCOL));
    }
    Ok(response)
}

/// A request that opens a WebSocket, and the `Sec-WebSocket-Accept` that its answer has to carry.
pub fn request(host: &str, path_and_query: &str) -> Result<(Request<Body>, String), http::Error> {
    let key = generate_key();
    let accept = derive_accept_key(key.as_bytes());
    let request = Request::builder()
        .method(Method::GET)
        .uri(path_and_query)
        .header(header::HOST, host)
        .header(header::CONNECTION, "Upgrade")
        .header(header::UPGRADE, "websocket")
        .header(header::SEC_WEBSOCKET_VERSION, "13")
        .header(header::SEC_WEBSOCKET_PROTOCOL, SUBPROTOCOL)
        .header(header::SEC_WEBSOCKET_KEY, key)
        .body(Body::empty())?;
    Ok((request, accept))
}

/// Whether a server agreed to our handshake.
#[must_use]
pub fn is_accepted(status: StatusCode, headers: &HeaderMap, accept: &str) -> bool {
    status == StatusCode::SWITCHING_PROTOCOLS
        && has_token(headers, header::UPGRADE, "websocket")
        && has_token(headers, header::CONNECTION, "upgrade")
        && headers.get(header::SEC_WEBSOCKET_ACCEPT).is_some_and(|value| value.as_bytes() == accept.as_bytes())
}

/// Whether one of the comma-separated values of a header is `token`.
fn has_token(headers: &HeaderMap, name: header::HeaderName, token: &str) -> bool {
    headers
        .get_all(name)
        .iter()
        .filter_map(|value| value.to_str().ok())
        .flat_map(|value| value.split(','))
        .any(|value| value.trim().eq_ignore_ascii_case(token))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn opening() -> HeaderMap {
        request("host", "/").unwrap().0.headers().clone()
    }

    #[test]
    fn our_own_handshake_is_accepted() {
        let (request, expected) = request("host", "/a?b=c").unwrap();
        let answer = accept(request.method(), Version::HTTP_11, request.headers()).unwrap();
        assert!(is_accepted(answer.status(), answer.headers(), &expected));
        assert_eq!(answer.headers()[header::SEC_WEBSOCKET_PROTOCOL], SUBPROTOCOL);
        assert!(!is_accepted(StatusCode::OK, answer.headers(), &expected));
        assert!(!is_accepted(answer.status(), answer.headers(), "another key"));
    }

    #[test]
    fn key_of_the_standard_gets_the_answer_of_the_standard() {
        let mut headers = opening();
        headers.insert(header::SEC_WEBSOCKET_KEY, HeaderValue::from_static("dGhlIHNhbXBsZSBub25jZQ=="));
        let answer = accept(&Method::GET, Version::HTTP_11, &headers).unwrap();
        assert_eq!(answer.headers()[header::SEC_WEBSOCKET_ACCEPT], "s3pPLMBiTxaQ9kYGzzhZRbK+xOo=");
    }

    #[test]
    fn subprotocol_is_picked_from_any_place_in_the_offer_and_only_from_there() {
        let cases: [(&[&str], bool); 4] = [
            (&["base64url.bearer.authorization.k8s.io.abc, plain.kubevirt.io"], true),
            (&["other", "plain.kubevirt.io"], true),
            (&["other"], false),
            (&[], false),
        ];
        for (offers, picked) in cases {
            let mut headers = opening();
            headers.remove(header::SEC_WEBSOCKET_PROTOCOL);
            for offer in offers {
                headers.append(header::SEC_WEBSOCKET_PROTOCOL, HeaderValue::from_static(offer));
            }
            let answer = accept(&Method::GET, Version::HTTP_11, &headers).unwrap();
            assert_eq!(answer.headers().contains_key(header::SEC_WEBSOCKET_PROTOCOL), picked, "{offers:?}");
        }
    }

    #[test]
    fn what_is_no_handshake_is_refused() {
        let cases = [
            (header::CONNECTION, Some("keep-alive"), HandshakeError::Connection),
            (header::UPGRADE, Some("SPDY/3.1"), HandshakeError::Upgrade),
            (header::UPGRADE, None, HandshakeError::Upgrade),
            (header::SEC_WEBSOCKET_VERSION, Some("8"), HandshakeError::Version),
            (header::SEC_WEBSOCKET_KEY, Some("short"), HandshakeError::Key),
            (header::SEC_WEBSOCKET_KEY, None, HandshakeError::Key),
        ];
        for (name, value, expected) in cases {
            let mut headers = opening();
            headers.remove(&name);
            if let Some(value) = value {
                headers.insert(name, HeaderValue::from_static(value));
            }
            assert_eq!(accept(&Method::GET, Version::HTTP_11, &headers).err(), Some(expected));
        }
        assert_eq!(accept(&Method::PUT, Version::HTTP_11, &opening()).err(), Some(HandshakeError::Method));
        assert_eq!(accept(&Method::GET, Version::HTTP_2, &opening()).err(), Some(HandshakeError::Method));
    }
}
