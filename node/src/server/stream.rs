//! Console and display: a WebSocket on one side, a stream of the launcher on the other.
//!
//! Bytes are passed on as they come, in both directions, at the pace of the slower side: nothing is read that cannot
//! be passed on. Either side's end ends both.

use std::time::Duration;

use axum::{
    extract::{
        Path, RawQuery, State,
        ws::{CloseFrame, Message, WebSocket, WebSocketUpgrade, close_code},
    },
    http::StatusCode,
    response::Response,
};
use bytes::Bytes;
use futures::{
    SinkExt, StreamExt,
    stream::{SplitSink, SplitStream},
};
use protocol::{Chunk, ConsoleInput, MAX_CHUNK};
use tokio::sync::mpsc;
use tonic::Streaming;
use tracing::Instrument;

use super::{Failure, Served, sessions::Session};
use crate::{
    machine::Refusal,
    metrics::{Direction, StreamKind, StreamMetrics},
};

/// The subprotocol that clients offer: raw bytes in binary messages.
const SUBPROTOCOL: &str = "plain.kubevirt.io";
/// Largest message of a client.
const MAX_MESSAGE: usize = 1024 * 1024;
/// Read buffer of a connection. Keystrokes are small, and there may be many connections.
const READ_BUFFER: usize = 16 * 1024;
/// Bytes that may wait to be sent to a client before the launcher is held back.
const WRITE_LIMIT: usize = 4 * MAX_CHUNK;
/// A client is asked for a sign of life this often ...
const PING: Duration = Duration::from_secs(30);
/// ... and has gone when nothing was heard of it for this long.
const SILENCE: Duration = Duration::from_secs(100);
/// Time for the last words to a client.
const GOODBYE: Duration = Duration::from_secs(2);

/// Why a stream ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum End {
    Client,
    Launcher,
    Replaced,
    Silence,
}

impl End {
    fn word(self) -> &'static str {
        match self {
            Self::Client => "client",
            Self::Launcher => "launcher",
            Self::Replaced => "replaced",
            Self::Silence => "silence",
        }
    }
}

pub(super) async fn console(
    State(served): State<Served>,
    Path((namespace, name)): Path<(String, String)>,
    RawQuery(query): RawQuery,
    upgrade: WebSocketUpgrade,
) -> Result<Response, Failure> {
    let machine = served.machines.get(&namespace, &name).ok_or_else(|| Failure::unknown(&namespace, &name))?;
    let launcher = machine.launcher()?;
    // Output of before only for who asks: programs that talk to guests would take it for an answer.
    let replay = is_set(query.as_deref().unwrap_or_default(), "replay");
    let Some(session) = machine.sessions.console.claim(false) else {
        return Err(Failure(StatusCode::SERVICE_UNAVAILABLE, "the console is taken".into()));
    };
    // The far end first: what fails before the upgrade can still be said in words.
    let (input, output) = launcher.console(replay).await.map_err(Refusal::from)?;
    let span = tracing::info_span!("console", %namespace, %name);
    let bridge = Bridge { session, output, metrics: served.metrics, kind: StreamKind::Console };
    let wrap = |data: Bytes| ConsoleInput { data: data.into(), replay: false };
    Ok(prepared(upgrade).on_upgrade(move |socket| bridge.run(socket, input, wrap).instrument(span)))
}

pub(super) async fn vnc(
    State(served): State<Served>,
    Path((namespace, name)): Path<(String, String)>,
    RawQuery(query): RawQuery,
    upgrade: WebSocketUpgrade,
) -> Result<Response, Failure> {
    let machine = served.machines.get(&namespace, &name).ok_or_else(|| Failure::unknown(&namespace, &name))?;
    let launcher = machine.launcher()?;
    let preserve = is_set(query.as_deref().unwrap_or_default(), "preserveSession");
    let Some(session) = machine.sessions.vnc.claim(preserve) else {
        return Err(Failure(StatusCode::SERVICE_UNAVAILABLE, "Active VNC connection. Request denied.".into()));
    };
    let (input, output) = launcher.vnc().await.map_err(Refusal::from)?;
    let span = tracing::info_span!("vnc", %namespace, %name);
    let bridge = Bridge { session, output, metrics: served.metrics, kind: StreamKind::Vnc };
    let wrap = |data: Bytes| Chunk { data: data.into() };
    Ok(prepared(upgrade).on_upgrade(move |socket| bridge.run(socket, input, wrap).instrument(span)))
}

/// What does not parse counts as false.
fn is_set(query: &str, flag: &str) -> bool {
    query
        .split('&')
        .filter_map(|pair| pair.split_once('='))
        .any(|(key, value)| key == flag && matches!(value, "true" | "True" | "TRUE" | "t" | "T" | "1"))
}

fn prepared(upgrade: WebSocketUpgrade) -> WebSocketUpgrade {
    upgrade
        .protocols([SUBPROTOCOL])
        .max_message_size(MAX_MESSAGE)
        .max_frame_size(MAX_MESSAGE)
        .read_buffer_size(READ_BUFFER)
        .write_buffer_size(0)
        .max_write_buffer_size(WRITE_LIMIT)
}

/// One stream between a client and a launcher.
struct Bridge {
    session: Session,
    output: Streaming<Chunk>,
    metrics: StreamMetrics,
    kind: StreamKind,
}

impl Bridge {
    async fn run<T: Send>(self, socket: WebSocket, input: mpsc::Sender<T>, wrap: impl Fn(Bytes) -> T + Send) {
        let Self { session, output, metrics, kind } = self;
        let open = metrics.open(kind);
        tracing::info!("stream opened");
        let (mut to_client, from_client) = socket.split();
        let end = tokio::select! {
            end = pass_input(from_client, &input, wrap, &metrics, kind) => end,
            end = pass_output(output, &mut to_client, &metrics, kind) => end,
            () = session.ended() => End::Replaced,
        };
        tracing::info!(by = end.word(), "stream ended");
        open.end(end.word());
        // Both ends see the end before the place is free again.
        drop(input);
        let _ = tokio::time::timeout(GOODBYE, to_client.send(goodbye(end))).await;
        drop(session);
    }
}

fn goodbye(end: End) -> Message {
    let reason = match end {
        End::Replaced => "another client has taken the stream",
        _ => "",
    };
    Message::Close(Some(CloseFrame { code: close_code::NORMAL, reason: reason.into() }))
}

/// From the client to the launcher. Anything a client sends shows that it is there.
async fn pass_input<T>(
    mut from_client: SplitStream<WebSocket>,
    input: &mpsc::Sender<T>,
    wrap: impl Fn(Bytes) -> T,
    metrics: &StreamMetrics,
    kind: StreamKind,
) -> End {
    loop {
        let message = match tokio::time::timeout(SILENCE, from_client.next()).await {
            Ok(Some(Ok(message))) => message,
            Ok(Some(Err(error))) => {
                tracing::debug!(%error, "the client's connection broke");
                return End::Client;
            }
            Ok(None) => return End::Client,
            Err(_) => return End::Silence,
        };
        match message {
            Message::Binary(mut data) => {
                metrics.count(kind, Direction::Input, data.len());
                while !data.is_empty() {
                    let chunk = data.split_to(data.len().min(MAX_CHUNK));
                    if input.send(wrap(chunk)).await.is_err() {
                        return End::Launcher;
                    }
                }
            }
            Message::Close(_) => return End::Client,
            // Text has no meaning here; pings are answered by the library.
            Message::Text(_) | Message::Ping(_) | Message::Pong(_) => {}
        }
    }
}

/// From the launcher to the client, with a ping now and then.
async fn pass_output(
    mut output: Streaming<Chunk>,
    to_client: &mut SplitSink<WebSocket, Message>,
    metrics: &StreamMetrics,
    kind: StreamKind,
) -> End {
    let mut ping = tokio::time::interval(PING);
    ping.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    ping.reset();
    loop {
        let message = tokio::select! {
            chunk = output.message() => match chunk {
                Ok(Some(chunk)) => {
                    metrics.count(kind, Direction::Output, chunk.data.len());
                    Message::Binary(chunk.data.into())
                }
                Ok(None) => return End::Launcher,
                Err(status) => {
                    tracing::debug!(%status, "the launcher ended the stream");
                    return End::Launcher;
                }
            },
            _ = ping.tick() => Message::Ping(Bytes::new()),
        };
        if to_client.send(message).await.is_err() {
            return End::Client;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn preserve_session_is_off_unless_it_is_clearly_on() {
        for (query, wanted) in [
            ("", false),
            ("preserveSession", false),
            ("preserveSession=false", false),
            ("preserveSession=yes", false),
            ("preserveSession=true", true),
            ("a=b&preserveSession=1", true),
        ] {
            assert_eq!(is_set(query, "preserveSession"), wanted, "{query}");
        }
    }
}
