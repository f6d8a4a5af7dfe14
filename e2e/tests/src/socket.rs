//! WebSockets through the API server, as any user.

use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use futures::{SinkExt, StreamExt};
use http::{Request, StatusCode, header};
use hyper::upgrade::Upgraded;
use hyper_util::rt::TokioIo;
use kube::{Client, client::Body};
use tokio::time::{Instant, timeout, timeout_at};
use tokio_tungstenite::{
    WebSocketStream,
    tungstenite::{Bytes, Message, handshake::client::generate_key, protocol::Role},
};

use crate::answer::Answer;

/// Time limit for opening.
const TIMEOUT: Duration = Duration::from_secs(60);
/// Payload of pings, which differs from that of the servers.
const PING: &[u8] = b"are you there";
/// Limit of kept output in bytes.
const OUTPUT_LIMIT: usize = 256 * 1024;

/// An open stream. Dropping it closes the connection without a close message.
pub struct Socket(WebSocketStream<TokioIo<Upgraded>>);

impl Socket {
    /// Opens the stream at `path`, as `user` if one is given. The inner error is a refusal of the server; a client with
    /// retries hides it (see [`crate::connect_without_retries`]).
    ///
    /// # Errors
    /// Fails without an answer.
    pub async fn open(client: &Client, path: &str, user: Option<&str>) -> Result<Result<Self, Box<Answer>>> {
        let mut request = Request::builder()
            .uri(path)
            .header(header::CONNECTION, "Upgrade")
            .header(header::UPGRADE, "websocket")
            .header(header::SEC_WEBSOCKET_VERSION, "13")
            .header(header::SEC_WEBSOCKET_KEY, generate_key())
            .header(header::SEC_WEBSOCKET_PROTOCOL, "plain.kubevirt.io");
        if let Some(user) = user {
            // A user without groups is not authenticated.
            request = request.header("Impersonate-User", user).header("Impersonate-Group", "system:authenticated");
        }
        let request = request.body(Body::empty())?;
        let exchange = async {
            let response = client.send(request).await?;
            if response.status() != StatusCode::SWITCHING_PROTOCOLS {
                return anyhow::Ok(Err(Box::new(Answer::read(response).await?)));
            }
            let upgraded = TokioIo::new(hyper::upgrade::on(response).await?);
            Ok(Ok(Self(WebSocketStream::from_raw_socket(upgraded, Role::Client, None).await)))
        };
        let answered = timeout(TIMEOUT, exchange).await.with_context(|| format!("{path}: no answer in time"))?;
        answered.with_context(|| path.to_owned())
    }

    /// Sends a ping and waits for the pong. Other messages are skipped.
    ///
    /// # Errors
    /// Fails if the stream has ended, or without a pong in time.
    pub async fn ping(&mut self, within: Duration) -> Result<()> {
        let pong = async {
            self.0.send(Message::Ping(Bytes::from_static(PING))).await.context("the stream has ended")?;
            while !matches!(self.next().await?, Message::Pong(payload) if payload == PING) {}
            Ok(())
        };
        timeout(within, pong).await.context("no answer to a ping")?
    }

    /// Sends pings and texts without reading. Returns the number of messages that were sent within the time limit.
    pub async fn flood(&mut self, count: usize, within: Duration) -> usize {
        let mut sent = 0;
        // The server may stop reading or close the stream.
        let _ = timeout(within, async {
            while sent < count {
                let text = Message::Text("x".into());
                for message in [Message::Ping(Bytes::from_static(PING)), text] {
                    self.0.send(message).await?;
                    sent += 1;
                }
            }
            anyhow::Ok(())
        })
        .await;
        sent
    }

    /// Reads until `text`.
    ///
    /// # Errors
    /// Fails if the stream ends before, or after the time limit, with the output.
    pub async fn expect(&mut self, text: &str, within: Duration) -> Result<()> {
        let deadline = Instant::now() + within;
        let mut seen = Vec::<u8>::new();
        while !seen.windows(text.len()).any(|part| part == text.as_bytes()) {
            let shown = || String::from_utf8_lossy(&seen).into_owned();
            let Ok(message) = timeout_at(deadline, self.next()).await else {
                bail!("{text:?} did not come within {within:?}, but {:?}", shown());
            };
            let message = message.with_context(|| format!("before {text:?}, after {:?}", shown()))?;
            if let Message::Binary(data) = message {
                seen.extend_from_slice(&data);
                seen.drain(..seen.len().saturating_sub(OUTPUT_LIMIT));
            }
        }
        Ok(())
    }

    async fn next(&mut self) -> Result<Message> {
        let message = self.0.next().await.context("the connection was lost")??;
        ensure!(!message.is_close(), "the server closed the stream: {message:?}");
        Ok(message)
    }
}
