//! The server side of a WebSocket's opening handshake (RFC 6455) over hyper, and the end of a connection.
//!
//! The subprotocol is selected if the client offers it; other clients are served alike.

use axum::{body::Body, response::Response};
use futures::{Sink, SinkExt, Stream, StreamExt};
use http::{HeaderMap, HeaderValue, Method, StatusCode, Version, header};
use tokio_tungstenite::tungstenite::{
    Error, Message,
    handshake::derive_accept_key,
    protocol::{CloseFrame, frame::coding::CloseCode},
};

use crate::{clients::websocket::SUBPROTOCOL, requests::negotiation::has_token};

/// Errors of a handshake.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum HandshakeError {
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

/// Closes a connection: sends the close frame, if there is one, and reads until the other side has closed, too. `done`: it
/// has closed already, or is lost.
///
/// A socket that is closed with unread bytes is reset. A proxy then treats the connection as broken, and bytes under way to
/// the other side are lost, the close frame among them. One late pong is enough.
pub(crate) async fn close_and_drain<K, S>(
    sink: &mut K,
    source: &mut S,
    close: Option<(CloseCode, &'static str)>,
    done: bool,
) where
    K: Sink<Message, Error = Error> + Unpin,
    S: Stream<Item = Result<Message, Error>> + Unpin,
{
    if let Some((code, reason)) = close {
        // A side that has closed at the same moment does not need the frame.
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

/// Checks a client's handshake and returns the answer to it.
pub(crate) fn accept(method: &Method, version: Version, headers: &HeaderMap) -> Result<Response, HandshakeError> {
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::clients::websocket::{is_accepted, request};

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
    fn subprotocol_is_selected_if_offered() {
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
    fn invalid_handshakes_are_refused() {
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
