//! Console, display and USB redirection: a WebSocket on one side, a stream of the launcher on the other.
//!
//! Bytes are passed on as they come, in both directions, at the pace of the slower side: nothing is read that cannot
//! be passed on. Either side's end ends both; what a client sent before it closed still reaches the machine. The client
//! is told why its stream ended.

use std::time::Duration;

use axum::{
    extract::{
        Path, RawQuery, State,
        ws::{CloseFrame, Message, WebSocket, WebSocketUpgrade, close_code},
    },
    http::{HeaderMap, StatusCode},
    response::Response,
};
use bytes::Bytes;
use futures::{
    SinkExt, StreamExt,
    stream::{SplitSink, SplitStream},
};
use process::shares::Share;
use protocol::{Chunk, ConsoleInput, MAX_CHUNK, UsbInput};
use tokio::sync::mpsc;
use tonic::{Code, Status, Streaming};
use tracing::Instrument;

use super::{
    Failure, Served,
    sessions::{Ending, Session},
};
use crate::{
    launcher::LauncherError,
    machine::Refusal,
    metrics::{Direction, StreamKind, StreamMetrics},
};

/// The subprotocol that clients offer: raw bytes in binary messages.
const SUBPROTOCOL: &str = "plain.kubevirt.io";
/// Largest message. The only client is virt-api, which cuts what its own clients send into pieces of half of that.
const MAX_MESSAGE: usize = 128 * 1024;
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

/// Longest reason in a close frame, in bytes: a control frame holds 125, two of them are the code.
const REASON: usize = 123;

/// Why a stream ended.
#[derive(Clone, Debug, PartialEq, Eq)]
enum End {
    /// The client closed it, in order.
    Closed,
    /// The client's connection broke.
    Broken,
    /// Nothing was heard of the client.
    Silence,
    /// The machine closed it.
    Machine,
    /// The launcher says why it does not go on.
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
            Self::Ended(Ending::Replaced) => (close_code::AWAY, "another client has taken the stream"),
            Self::Ended(Ending::MachineGone) => (close_code::AWAY, "the machine has gone"),
            Self::Ended(Ending::AgentStops) => (close_code::AWAY, "virt-handler is stopping"),
        };
        let end = (0..=REASON.min(reason.len())).rev().find(|at| reason.is_char_boundary(*at)).unwrap_or_default();
        CloseFrame { code, reason: reason.get(..end).unwrap_or_default().into() }
    }
}

pub(super) async fn console(
    State(served): State<Served>,
    Path((namespace, name)): Path<(String, String)>,
    RawQuery(query): RawQuery,
    headers: HeaderMap,
    upgrade: WebSocketUpgrade,
) -> Result<Response, Failure> {
    let machine = served.machine(&namespace, &name)?;
    let launcher = machine.launcher()?;
    let share = served.claim(StreamKind::Console, &headers)?;
    // Output of before only for who asks: programs that talk to guests would take it for an answer.
    let replay = is_set(query.as_deref().unwrap_or_default(), "replay");
    let Some(session) = machine.sessions.console.claim(false) else {
        return Err(Failure(StatusCode::SERVICE_UNAVAILABLE, "the console is taken".into()));
    };
    // The far end first: what fails before the upgrade can still be said in words.
    let (input, output) = launcher.console(replay).await.map_err(Refusal::from)?;
    let span = tracing::info_span!("console", %namespace, %name);
    let bridge = Bridge { share, session, output, metrics: served.metrics, kind: StreamKind::Console };
    let wrap = |data: Bytes| ConsoleInput { data: data.into(), replay: false };
    Ok(prepared(upgrade)
        .on_upgrade(move |socket| served.streams.track_future(bridge.run(socket, input, wrap).instrument(span))))
}

pub(super) async fn vnc(
    State(served): State<Served>,
    Path((namespace, name)): Path<(String, String)>,
    RawQuery(query): RawQuery,
    headers: HeaderMap,
    upgrade: WebSocketUpgrade,
) -> Result<Response, Failure> {
    let machine = served.machine(&namespace, &name)?;
    let launcher = machine.launcher()?;
    let share = served.claim(StreamKind::Vnc, &headers)?;
    let preserve = is_set(query.as_deref().unwrap_or_default(), "preserveSession");
    let Some(session) = machine.sessions.vnc.claim(preserve) else {
        return Err(Failure(StatusCode::SERVICE_UNAVAILABLE, "Active VNC connection. Request denied.".into()));
    };
    let (input, output) = launcher.vnc().await.map_err(Refusal::from)?;
    let span = tracing::info_span!("vnc", %namespace, %name);
    let bridge = Bridge { share, session, output, metrics: served.metrics, kind: StreamKind::Vnc };
    let wrap = |data: Bytes| Chunk { data: data.into() };
    Ok(prepared(upgrade)
        .on_upgrade(move |socket| served.streams.track_future(bridge.run(socket, input, wrap).instrument(span))))
}

pub(super) async fn usb_redirection(
    State(served): State<Served>,
    Path((namespace, name)): Path<(String, String)>,
    headers: HeaderMap,
    upgrade: WebSocketUpgrade,
) -> Result<Response, Failure> {
    let machine = served.machine(&namespace, &name)?;
    let launcher = machine.launcher()?;
    let share = served.claim(StreamKind::UsbRedirection, &headers)?;
    let Some((channel, session)) = machine.sessions.claim_usb() else {
        return Err(Failure(StatusCode::SERVICE_UNAVAILABLE, "all channels for USB redirection are in use".into()));
    };
    let (input, output) = launcher.usb_redirection(channel).await.map_err(Refusal::from)?;
    let span = tracing::info_span!("usbredir", %namespace, %name, channel);
    let bridge = Bridge { share, session, output, metrics: served.metrics, kind: StreamKind::UsbRedirection };
    let wrap = |data: Bytes| UsbInput { data: data.into(), channel: 0 };
    Ok(prepared(upgrade)
        .on_upgrade(move |socket| served.streams.track_future(bridge.run(socket, input, wrap).instrument(span))))
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
    share: Share,
    session: Session,
    output: Streaming<Chunk>,
    metrics: StreamMetrics,
    kind: StreamKind,
}

impl Bridge {
    async fn run<T: Send>(self, socket: WebSocket, input: mpsc::Sender<T>, wrap: impl Fn(Bytes) -> T + Send) {
        let Self { share, session, mut output, metrics, kind } = self;
        let open = metrics.open(kind);
        tracing::info!("stream opened");
        let (mut to_client, mut from_client) = socket.split();
        let end = tokio::select! {
            end = pass_input(&mut from_client, &input, wrap, &metrics, kind) => end,
            end = pass_output(&mut output, &mut to_client, &metrics, kind) => end,
            why = session.ended() => End::Ended(why),
        };
        tracing::info!(by = end.by(), "stream ended");
        // The launcher sees the end before the place is free again; what a client sent before it closed reaches it first.
        drop(input);
        if matches!(end, End::Closed | End::Broken) {
            let rest = async { while let Ok(Some(_)) = output.message().await {} };
            let _ = tokio::time::timeout(GOODBYE, rest).await;
        }
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

/// From the client to the launcher. Anything a client sends shows that it is there.
async fn pass_input<T>(
    from_client: &mut SplitStream<WebSocket>,
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
                    if input.send(wrap(chunk)).await.is_err() {
                        // The launcher takes no more; the other direction learns why, unless the client does not read.
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

/// From the launcher to the client, with a ping now and then.
async fn pass_output(
    output: &mut Streaming<Chunk>,
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
                Ok(None) => return End::Machine,
                Err(status) => {
                    tracing::debug!(%status, "the launcher ended the stream");
                    return ended_by(&status);
                }
            },
            _ = ping.tick() => Message::Ping(Bytes::new()),
        };
        if to_client.send(message).await.is_err() {
            return End::Broken;
        }
    }
}

/// What the end of a launcher's stream means.
fn ended_by(status: &Status) -> End {
    match (LauncherError::from_status("a stream", status), status.code()) {
        (LauncherError::Lost(_) | LauncherError::Connect(_), _) => End::Lost,
        // The machine has one console, whichever way a client came.
        (_, Code::Aborted) => End::Ended(Ending::Replaced),
        (error, _) => End::Refused(error.to_string()),
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

    #[test]
    fn the_end_of_a_launchers_stream_is_understood() {
        let broken = Status::from_error(Box::new(std::io::Error::from(std::io::ErrorKind::BrokenPipe)));
        for (status, expected) in [
            (broken, End::Lost),
            (Status::aborted("another client has taken the console"), End::Ended(Ending::Replaced)),
            (Status::resource_exhausted("too slow"), End::Refused("too slow".into())),
        ] {
            assert_eq!(ended_by(&status), expected);
        }
    }

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
