//! Streams as other programs open them: a WebSocket of one's own through the API server, in the name of any user.

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

use crate::Answer;

/// Longest that the answer to an opening may take.
const PATIENCE: Duration = Duration::from_secs(60);
/// What pings carry, unlike those of the servers.
const PING: &[u8] = b"are you there";
/// Output kept for looking at, in bytes; older output is dropped.
const KEPT: usize = 256 * 1024;

/// A stream that is open. It ends without a word when it is dropped.
pub struct Socket(WebSocketStream<TokioIo<Upgraded>>);

impl Socket {
    /// Asks for the stream at `path`, in the name of `user` where one is named. What the server says instead of opening
    /// one is an answer as well; a client that asks again by itself (see [`crate::connect_without_retries`]) hides it.
    ///
    /// # Errors
    /// When there is no answer.
    pub async fn open(client: &Client, path: &str, user: Option<&str>) -> Result<Result<Self, Box<Answer>>> {
        let mut request = Request::builder()
            .uri(path)
            .header(header::CONNECTION, "Upgrade")
            .header(header::UPGRADE, "websocket")
            .header(header::SEC_WEBSOCKET_VERSION, "13")
            .header(header::SEC_WEBSOCKET_KEY, generate_key())
            .header(header::SEC_WEBSOCKET_PROTOCOL, "plain.kubevirt.io");
        if let Some(user) = user {
            // Without groups nobody is authenticated.
            request = request.header("Impersonate-User", user).header("Impersonate-Group", "system:authenticated");
        }
        let request = request.body(Body::empty())?;
        let asked = async {
            let response = client.send(request).await?;
            if response.status() != StatusCode::SWITCHING_PROTOCOLS {
                return anyhow::Ok(Err(Box::new(Answer::read(response).await?)));
            }
            let upgraded = TokioIo::new(hyper::upgrade::on(response).await?);
            Ok(Ok(Self(WebSocketStream::from_raw_socket(upgraded, Role::Client, None).await)))
        };
        let answered = timeout(PATIENCE, asked).await.with_context(|| format!("{path}: no answer in time"))?;
        answered.with_context(|| path.to_owned())
    }

    /// Asks for a sign of life. What the stream carries until it comes is passed over.
    ///
    /// # Errors
    /// When the stream has ended, or no sign comes in time.
    pub async fn ping(&mut self, within: Duration) -> Result<()> {
        let sign = async {
            self.0.send(Message::Ping(Bytes::from_static(PING))).await.context("the stream has ended")?;
            while !matches!(self.next().await?, Message::Pong(sign) if sign == PING) {}
            Ok(())
        };
        timeout(within, sign).await.context("no answer to a ping")?
    }

    /// Sends pings and texts, which nobody waits for, and reads nothing of what comes back. Returns how many were taken
    /// within the time.
    pub async fn flood(&mut self, count: usize, within: Duration) -> usize {
        let mut taken = 0;
        // A server that takes no more, or ends the stream, ends the flood.
        let _ = timeout(within, async {
            while taken < count {
                let text = Message::Text("x".into());
                for message in [Message::Ping(Bytes::from_static(PING)), text] {
                    self.0.send(message).await?;
                    taken += 1;
                }
            }
            anyhow::Ok(())
        })
        .await;
        taken
    }

    /// Reads until `text` has come.
    ///
    /// # Errors
    /// When the stream ends before that, or the time is over, with what came instead.
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
                seen.drain(..seen.len().saturating_sub(KEPT));
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
