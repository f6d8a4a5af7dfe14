//! The client side of a WebSocket's opening handshake (RFC 6455), and the bounds of all WebSockets.
//!
//! Compression is never negotiated. The subprotocol is `plain.kubevirt.io`: binary messages hold the bytes of a stream, and
//! their boundaries mean nothing.

use axum::body::Body;
use http::{HeaderMap, Method, Request, StatusCode, header};
use tokio_tungstenite::tungstenite::{
    handshake::{client::generate_key, derive_accept_key},
    protocol::WebSocketConfig,
};

use crate::requests::negotiation::has_token;

/// The subprotocol of all streams.
pub(crate) const SUBPROTOCOL: &str = "plain.kubevirt.io";

/// Size of the pieces into which messages of clients are cut: a multiple of the length of a mask, so that each part of a frame
/// starts with the first byte of the mask.
pub(crate) const PIECE: usize = 64 << 10;
/// Largest message. A blocked stream holds one or two of them, and all streams together have to fit into the pod's memory.
/// virt-handler sends smaller ones; larger ones of clients are cut into pieces. Datagrams are not cut, and none is larger.
pub(crate) const MAX_MESSAGE: usize = 2 * PIECE;
/// Size of a connection's read buffer, which is allocated as long as the connection exists. Each stream has two connections.
const READ_BUFFER: usize = 4 << 10;
/// Most bytes that wait for a slow reader before the writer has to wait.
const MAX_WRITE_BUFFER: usize = 2 * MAX_MESSAGE;

/// Returns the bounds of each WebSocket.
#[must_use]
pub(crate) fn config() -> WebSocketConfig {
    WebSocketConfig::default()
        .read_buffer_size(READ_BUFFER)
        .write_buffer_size(0)
        .max_write_buffer_size(MAX_WRITE_BUFFER)
        .max_message_size(Some(MAX_MESSAGE))
        .max_frame_size(Some(MAX_MESSAGE))
}

/// Returns a request that opens a WebSocket, and the `Sec-WebSocket-Accept` of a valid answer.
pub(crate) fn request(host: &str, path_and_query: &str) -> Result<(Request<Body>, String), http::Error> {
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

/// Returns true if the server accepted the handshake.
#[must_use]
pub(crate) fn is_accepted(status: StatusCode, headers: &HeaderMap, accept: &str) -> bool {
    status == StatusCode::SWITCHING_PROTOCOLS
        && has_token(headers, header::UPGRADE, "websocket")
        && has_token(headers, header::CONNECTION, "upgrade")
        && headers.get(header::SEC_WEBSOCKET_ACCEPT).is_some_and(|value| value.as_bytes() == accept.as_bytes())
}

#[cfg(test)]
mod tests {
    use std::{
        io,
        pin::Pin,
        sync::{
            Arc,
            atomic::{AtomicUsize, Ordering::Relaxed},
        },
        task::{Context, Poll},
    };

    use futures::StreamExt;
    use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
    use tokio_tungstenite::{WebSocketStream, tungstenite::protocol::Role};

    use super::*;

    /// A connection on which nothing arrives. It records the length of the buffer into which bytes would be read.
    struct Idle(Arc<AtomicUsize>);

    impl AsyncRead for Idle {
        fn poll_read(self: Pin<&mut Self>, _: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
            self.0.fetch_max(buffer.remaining(), Relaxed);
            Poll::Pending
        }
    }

    impl AsyncWrite for Idle {
        fn poll_write(self: Pin<&mut Self>, _: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
            Poll::Ready(Ok(bytes.len()))
        }

        fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
            Poll::Ready(Ok(()))
        }

        fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
            Poll::Ready(Ok(()))
        }
    }

    #[tokio::test]
    async fn idle_connection_has_a_small_buffer() {
        for role in [Role::Server, Role::Client] {
            let length = Arc::new(AtomicUsize::new(0));
            let mut stream = WebSocketStream::from_raw_socket(Idle(length.clone()), role, Some(config())).await;
            assert!(futures::poll!(stream.next()).is_pending());
            assert_eq!(length.load(Relaxed), 4096, "{role:?}");
        }
    }
}
