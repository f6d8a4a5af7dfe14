//! One stream: a WebSocket on one side, the machine on the other.
//!
//! Bytes are passed on as they come, in both directions, at the pace of the slower side: nothing is read that cannot
//! be passed on. Either side's end ends both; what a client sent before it closed still reaches the machine. The client
//! is told why its stream ended.

use std::time::Duration;

use axum::extract::ws::{CloseFrame, Message, WebSocket, close_code};
use bytes::Bytes;
use futures::{
    SinkExt, StreamExt,
    stream::{SplitSink, SplitStream},
};
use process::shares::Share;
use protocol::MAX_CHUNK;

use super::sessions::{Ending, Session};
use crate::metrics::{Direction, StreamKind, StreamMetrics};

/// A client is asked for a sign of life this often ...
const PING: Duration = Duration::from_secs(30);
/// ... and has gone when nothing was heard of it for this long.
const SILENCE: Duration = Duration::from_secs(100);
/// Time for the last words to a client.
const GOODBYE: Duration = Duration::from_secs(2);

/// Longest reason in a close frame, in bytes: a control frame holds 125, two of them are the code.
const REASON: usize = 123;

/// Why a stream ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum End {
    /// The client closed it, in order.
    Closed,
    /// The client's connection broke.
    Broken,
    /// Nothing was heard of the client.
    Silence,
    /// The machine closed it.
    Machine,
    /// The far end says why it does not go on.
    Refused(String),
    /// The connection to the launcher broke.
    Lost,
    /// This agent ended it.
    Ended(Ending),
}

impl End {
    /// For the metrics.
    fn by(&self) -> &'static str {
        match self {
            Self::Closed | Self::Broken => "client",
            Self::Silence => "silence",
            Self::Machine | Self::Refused(_) | Self::Lost => "launcher",
            Self::Ended(Ending::Replaced) => "replaced",
            Self::Ended(Ending::MachineGone) => "machine",
            Self::Ended(Ending::AgentStops) => "agent",
        }
    }

    /// The last words to the client. An end that it did not ask for is none with code 1000: clients take that for their
    /// own wish and leave without a word, whereas any other code makes them print code and reason.
    fn goodbye(&self) -> CloseFrame {
        let (code, reason) = match self {
            Self::Closed | Self::Broken => (close_code::NORMAL, ""),
            Self::Silence => (close_code::POLICY, "nothing was heard of the client"),
            Self::Machine => (close_code::AWAY, "the machine has closed the stream"),
            Self::Refused(message) => (close_code::ERROR, message.as_str()),
            Self::Lost => (close_code::AWAY, "the connection to the machine's launcher was lost"),
            // Programs look for this word in what their client's library makes of a stream that was taken from them.
            Self::Ended(Ending::Replaced) => (close_code::AWAY, "EOF: another client has taken the stream"),
            Self::Ended(Ending::MachineGone) => (close_code::AWAY, "the machine has gone"),
            Self::Ended(Ending::AgentStops) => (close_code::AWAY, "virt-handler is stopping"),
        };
        let end = (0..=REASON.min(reason.len())).rev().find(|at| reason.is_char_boundary(*at)).unwrap_or_default();
        CloseFrame { code, reason: reason.get(..end).unwrap_or_default().into() }
    }
}

/// The way to the machine.
pub(super) trait Input: Send {
    /// Passes bytes on, [`MAX_CHUNK`] at most; false if no more are taken.
    fn send(&mut self, data: Bytes) -> impl Future<Output = bool> + Send;

    /// Nothing more will come. What was passed on still arrives.
    fn finish(self) -> impl Future<Output = ()> + Send;
}

/// The way back.
pub(super) trait Output: Send {
    /// The next bytes, or why there are none any more. Nothing is lost if it is dropped before it is done.
    fn next(&mut self) -> impl Future<Output = Result<Bytes, End>> + Send;
}

/// What a stream holds while it lasts.
pub(super) struct Bridge {
    pub(super) share: Share,
    pub(super) session: Session,
    pub(super) metrics: StreamMetrics,
    pub(super) kind: StreamKind,
}

impl Bridge {
    /// Passes on what comes, until one side ends.
    pub(super) async fn run(self, socket: WebSocket, mut input: impl Input, mut output: impl Output) {
        let Self { share, session, metrics, kind } = self;
        let open = metrics.open(kind);
        tracing::info!("stream opened");
        let (mut to_client, mut from_client) = socket.split();
        let end = tokio::select! {
            end = pass_input(&mut from_client, &mut input, &metrics, kind) => end,
            end = pass_output(&mut output, &mut to_client, &metrics, kind) => end,
            why = session.ended() => End::Ended(why),
        };
        tracing::info!(by = end.by(), "stream ended");
        // The machine sees the end before the place is free again; what a client sent before it closed reaches it first.
        let rest = async {
            input.finish().await;
            if matches!(end, End::Closed | End::Broken) {
                while output.next().await.is_ok() {}
            }
        };
        let _ = tokio::time::timeout(GOODBYE, rest).await;
        drop(output);
        drop(session);
        let goodbye = async {
            // One that has closed itself is only answered.
            let _ = to_client.send(Message::Close(Some(end.goodbye()))).await;
            if to_client.close().await.is_ok() {
                // Its answer, or its end. A socket that is closed over what it has not read is reset, and the last words
                // may be lost on their way.
                while let Some(Ok(_)) = from_client.next().await {}
            }
        };
        let _ = tokio::time::timeout(GOODBYE, goodbye).await;
        open.end(end.by());
        drop(share);
    }
}

/// From the client to the machine. Anything a client sends shows that it is there.
async fn pass_input(
    from_client: &mut SplitStream<WebSocket>,
    input: &mut impl Input,
    metrics: &StreamMetrics,
    kind: StreamKind,
) -> End {
    loop {
        let message = match tokio::time::timeout(SILENCE, from_client.next()).await {
            Ok(Some(Ok(message))) => message,
            Ok(Some(Err(error))) => {
                tracing::debug!(%error, "the client's connection broke");
                return End::Broken;
            }
            Ok(None) => return End::Broken,
            Err(_) => return End::Silence,
        };
        match message {
            Message::Binary(mut data) => {
                metrics.count(kind, Direction::Input, data.len());
                while !data.is_empty() {
                    let chunk = data.split_to(data.len().min(MAX_CHUNK));
                    if !input.send(chunk).await {
                        // The machine takes no more; the other direction learns why, unless the client does not read.
                        tokio::time::sleep(SILENCE).await;
                        return End::Silence;
                    }
                }
            }
            Message::Close(_) => return End::Closed,
            // Text has no meaning here; pings are answered by the library.
            Message::Text(_) | Message::Ping(_) | Message::Pong(_) => {}
        }
    }
}

/// From the machine to the client, with a ping now and then.
async fn pass_output(
    output: &mut impl Output,
    to_client: &mut SplitSink<WebSocket, Message>,
    metrics: &StreamMetrics,
    kind: StreamKind,
) -> End {
    let mut ping = tokio::time::interval(PING);
    ping.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    ping.reset();
    loop {
        let message = tokio::select! {
            data = output.next() => match data {
                Ok(data) => {
                    metrics.count(kind, Direction::Output, data.len());
                    Message::Binary(data)
                }
                Err(end) => return end,
            },
            _ = ping.tick() => Message::Ping(Bytes::new()),
        };
        if to_client.send(message).await.is_err() {
            return End::Broken;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn last_words_fit_a_close_frame() {
        let frame = End::Refused("\u{e9}".repeat(500)).goodbye();
        assert!(frame.reason.len() <= REASON && frame.reason.chars().all(|c| c == '\u{e9}'));
        assert_eq!(frame.code, close_code::ERROR);
    }

    #[test]
    fn only_a_client_that_closes_is_told_that_all_is_well() {
        for (end, code) in [
            (End::Closed, close_code::NORMAL),
            (End::Machine, close_code::AWAY),
            (End::Lost, close_code::AWAY),
            (End::Silence, close_code::POLICY),
            (End::Refused("too slow".into()), close_code::ERROR),
            (End::Ended(Ending::Replaced), close_code::AWAY),
            (End::Ended(Ending::MachineGone), close_code::AWAY),
            (End::Ended(Ending::AgentStops), close_code::AWAY),
        ] {
            let frame = end.goodbye();
            assert_eq!(frame.code, code, "{end:?}");
            assert_eq!(frame.reason.is_empty(), code == close_code::NORMAL, "{end:?}");
        }
    }
}
