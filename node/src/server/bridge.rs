//! One stream: a WebSocket on one side, the VMI on the other.
//!
//! Bytes are forwarded in both directions at the pace of the slower side. The end of either side ends both; input that a
//! client sent before it closed still reaches the VMI. The close frame contains the reason of the end.

use std::time::Duration;

use axum::extract::ws::{CloseFrame, Message, WebSocket, close_code};
use bytes::Bytes;
use daemon::quota::Slot;
use futures::{
    SinkExt, StreamExt,
    stream::{SplitSink, SplitStream},
};
use protocol::MAX_CHUNK;

use crate::{
    metrics::{Direction, StreamKind, StreamMetrics},
    vmi::{Ending, Session},
};

/// Interval of pings to the client.
const PING: Duration = Duration::from_secs(30);
/// Time without any message of the client after which it counts as gone.
const SILENCE: Duration = Duration::from_secs(100);
/// Limit of the close handshake.
const CLOSE_LIMIT: Duration = Duration::from_secs(2);

/// Longest message with output of a console. virt-handler, virt-api and its client keep buffers of the size of the longest message while
/// the console is idle.
const CONSOLE_MESSAGE: usize = 4 * 1024;
/// Longest reason of a close frame in bytes: a control frame holds 125, two of them for the code.
const REASON: usize = 123;

/// Reason of the end of a stream.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum End {
    /// The client closed it.
    Closed,
    /// The connection of the client broke.
    Broken,
    /// The client did not respond.
    Silence,
    /// The VMI closed it.
    Vmi,
    /// The other side failed with this message.
    Refused(String),
    /// The connection to the launcher broke.
    Lost,
    /// virt-handler ended it.
    Ended(Ending),
}

impl End {
    /// Returns the label of the metrics.
    fn by(&self) -> &'static str {
        match self {
            Self::Closed | Self::Broken => "client",
            Self::Silence => "silence",
            Self::Vmi | Self::Refused(_) | Self::Lost => "launcher",
            Self::Ended(Ending::Replaced) => "replaced",
            Self::Ended(Ending::VmiGone) => "vmi",
            Self::Ended(Ending::HandlerStops) => "virt-handler",
        }
    }

    /// Returns the close frame. Code 1000 is used only if the client closed the stream: with this code clients exit
    /// silently, with any other they print code and reason.
    fn close_frame(&self) -> CloseFrame {
        let (code, reason) = match self {
            Self::Closed | Self::Broken => (close_code::NORMAL, ""),
            Self::Silence => (close_code::POLICY, "the client does not respond"),
            Self::Vmi => (close_code::AWAY, "the VMI closed the stream"),
            Self::Refused(message) => (close_code::ERROR, message.as_str()),
            Self::Lost => (close_code::AWAY, "the connection to virt-launcher was lost"),
            // Programs search this word in the error of their client library.
            Self::Ended(Ending::Replaced) => (close_code::AWAY, "EOF: another client has taken the stream"),
            Self::Ended(Ending::VmiGone) => (close_code::AWAY, "the VMI is gone"),
            Self::Ended(Ending::HandlerStops) => (close_code::AWAY, "virt-handler is stopping"),
        };
        let end = (0..=REASON.min(reason.len())).rev().find(|at| reason.is_char_boundary(*at)).unwrap_or_default();
        CloseFrame { code, reason: reason.get(..end).unwrap_or_default().into() }
    }
}

/// Input of a VMI.
pub(super) trait Input: Send {
    /// Sends bytes, [`MAX_CHUNK`] at most. Returns false if no more are accepted.
    fn send(&mut self, data: Bytes) -> impl Future<Output = bool> + Send;

    /// Ends the input. Bytes that were sent still arrive.
    fn finish(self) -> impl Future<Output = ()> + Send;
}

/// Output of a VMI.
pub(super) trait Output: Send {
    /// Returns the next bytes, or the reason of the end. Cancel safe.
    fn next(&mut self) -> impl Future<Output = Result<Bytes, End>> + Send;
}

/// Resources of an open stream.
pub(super) struct Bridge {
    pub(super) slot: Slot,
    pub(super) session: Session,
    pub(super) metrics: StreamMetrics,
    pub(super) kind: StreamKind,
}

impl Bridge {
    /// Forwards bytes until one side ends.
    pub(super) async fn run(self, socket: WebSocket, mut input: impl Input, mut output: impl Output) {
        let Self { slot, session, metrics, kind } = self;
        let open = metrics.open(kind);
        tracing::info!("stream opened");
        let (mut to_client, mut from_client) = socket.split();
        let end = tokio::select! {
            end = pass_input(&mut from_client, &mut input, &metrics, kind) => end,
            end = pass_output(&mut output, &mut to_client, &metrics, kind) => end,
            why = session.ended() => End::Ended(why),
        };
        tracing::info!(by = end.by(), "stream ended");
        // The VMI sees the end before the slot is free; input that a client sent before it closed arrives first.
        let rest = async {
            input.finish().await;
            if matches!(end, End::Closed | End::Broken) {
                while output.next().await.is_ok() {}
            }
        };
        let _ = tokio::time::timeout(CLOSE_LIMIT, rest).await;
        drop(output);
        drop(session);
        let closing = async {
            // A client that closed the stream only gets an answer.
            let _ = to_client.send(Message::Close(Some(end.close_frame()))).await;
            if to_client.close().await.is_ok() {
                // Waits for the client's answer, or its end. Closing a socket with unread data resets it, and the close
                // frame could be lost.
                while let Some(Ok(_)) = from_client.next().await {}
            }
        };
        let _ = tokio::time::timeout(CLOSE_LIMIT, closing).await;
        open.end(end.by());
        drop(slot);
    }
}

/// Forwards from the client to the VMI. Every message shows that the client is alive.
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
                        // The VMI accepts no more input; the other direction returns the reason, unless the client does not
                        // read.
                        tokio::time::sleep(SILENCE).await;
                        return End::Silence;
                    }
                }
            }
            Message::Close(_) => return End::Closed,
            // Text is ignored; the library answers pings.
            Message::Text(_) | Message::Ping(_) | Message::Pong(_) => {}
        }
    }
}

/// Forwards from the VMI to the client, with pings at intervals.
async fn pass_output(
    output: &mut impl Output,
    to_client: &mut SplitSink<WebSocket, Message>,
    metrics: &StreamMetrics,
    kind: StreamKind,
) -> End {
    let mut ping = tokio::time::interval(PING);
    ping.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    ping.reset();
    let longest = if kind == StreamKind::Console { CONSOLE_MESSAGE } else { usize::MAX };
    loop {
        let sent = tokio::select! {
            data = output.next() => match data {
                Ok(data) => {
                    metrics.count(kind, Direction::Output, data.len());
                    let messages = pieces(data, longest).map(|piece| Ok(Message::Binary(piece)));
                    to_client.send_all(&mut futures::stream::iter(messages)).await
                }
                Err(end) => return end,
            },
            _ = ping.tick() => to_client.send(Message::Ping(Bytes::new())).await,
        };
        if sent.is_err() {
            return End::Broken;
        }
    }
}

/// Cuts bytes into pieces of at most this length.
fn pieces(mut data: Bytes, longest: usize) -> impl Iterator<Item = Bytes> {
    std::iter::from_fn(move || (!data.is_empty()).then(|| data.split_to(data.len().min(longest))))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reasons_fit_a_close_frame() {
        let frame = End::Refused("\u{e9}".repeat(500)).close_frame();
        assert!(frame.reason.len() <= REASON && frame.reason.chars().all(|c| c == '\u{e9}'));
        assert_eq!(frame.code, close_code::ERROR);
    }

    #[test]
    fn bytes_are_cut_into_short_pieces() {
        let lengths = |length: usize, longest| {
            let data = Bytes::from((0..length).map(|at| at as u8).collect::<Vec<_>>());
            let pieces: Vec<Bytes> = pieces(data.clone(), longest).collect();
            assert_eq!(pieces.concat(), data);
            pieces.iter().map(Bytes::len).collect::<Vec<_>>()
        };
        assert_eq!(lengths(10, 4), [4, 4, 2]);
        assert_eq!(lengths(8, 4), [4, 4]);
        assert_eq!(lengths(3, 4), [3]);
        assert_eq!(lengths(3, usize::MAX), [3]);
        assert_eq!(lengths(0, 4), [0_usize; 0]);
    }

    #[test]
    fn only_a_client_that_closes_gets_code_1000() {
        for (end, code) in [
            (End::Closed, close_code::NORMAL),
            (End::Vmi, close_code::AWAY),
            (End::Lost, close_code::AWAY),
            (End::Silence, close_code::POLICY),
            (End::Refused("too slow".into()), close_code::ERROR),
            (End::Ended(Ending::Replaced), close_code::AWAY),
            (End::Ended(Ending::VmiGone), close_code::AWAY),
            (End::Ended(Ending::HandlerStops), close_code::AWAY),
        ] {
            let frame = end.close_frame();
            assert_eq!(frame.code, code, "{end:?}");
            assert_eq!(frame.reason.is_empty(), code == close_code::NORMAL, "{end:?}");
        }
    }
}
