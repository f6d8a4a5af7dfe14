//! Console, display and USB redirection: streams of the launcher.

use axum::{
    extract::{Path, RawQuery, State, ws::WebSocketUpgrade},
    http::{HeaderMap, StatusCode},
    response::Response,
};
use bytes::Bytes;
use protocol::{Chunk, ConsoleInput, MAX_CHUNK, UsbInput};
use tokio::sync::mpsc;
use tonic::{Code, Status, Streaming};
use tracing::Instrument;

use super::{
    Failure, Served,
    bridge::{Bridge, End, Input, Output},
};
use crate::{
    launcher::LauncherError,
    metrics::StreamKind,
    vmi::{Ending, Refusal},
};

/// Subprotocol of clients: raw bytes in binary messages.
const SUBPROTOCOL: &str = "plain.kubevirt.io";
/// Largest message. virt-api, the only client, forwards pieces of half this size.
const MAX_MESSAGE: usize = 128 * 1024;
/// Read buffer of a connection, allocated as long as the connection exists. Keystrokes are small, and there can be many connections.
const READ_BUFFER: usize = 4 * 1024;
/// Bytes that may wait for a client before the launcher is delayed.
const WRITE_LIMIT: usize = 4 * MAX_CHUNK;

pub(super) async fn console(
    State(served): State<Served>,
    Path((namespace, name)): Path<(String, String)>,
    RawQuery(query): RawQuery,
    headers: HeaderMap,
    upgrade: WebSocketUpgrade,
) -> Result<Response, Failure> {
    let handle = served.handle(&namespace, &name)?;
    let launcher = handle.launcher()?;
    let slot = served.claim(StreamKind::Console, &headers)?;
    // Former output only on request: programs that talk to guests would take it for an answer.
    let replay = is_set(query.as_deref().unwrap_or_default(), "replay");
    let Some(session) = handle.sessions.console.claim(false) else {
        return Err(Failure(StatusCode::SERVICE_UNAVAILABLE, "the console is in use".into()));
    };
    // The launcher is connected first: errors before the upgrade are plain HTTP.
    let (sender, output) = launcher.console(replay).await.map_err(Refusal::from)?;
    let span = tracing::info_span!("console", %namespace, %name);
    let bridge = Bridge { slot, session, metrics: served.metrics, kind: StreamKind::Console };
    let wrap = |data: Bytes| ConsoleInput { data: data.into(), replay: false };
    let input = ToLauncher { sender, wrap };
    Ok(prepared(upgrade)
        .on_upgrade(move |socket| served.streams.track_future(bridge.run(socket, input, output).instrument(span))))
}

pub(super) async fn vnc(
    State(served): State<Served>,
    Path((namespace, name)): Path<(String, String)>,
    RawQuery(query): RawQuery,
    headers: HeaderMap,
    upgrade: WebSocketUpgrade,
) -> Result<Response, Failure> {
    let handle = served.handle(&namespace, &name)?;
    let launcher = handle.launcher()?;
    let slot = served.claim(StreamKind::Vnc, &headers)?;
    let preserve = is_set(query.as_deref().unwrap_or_default(), "preserveSession");
    let Some(session) = handle.sessions.vnc.claim(preserve) else {
        return Err(Failure(StatusCode::SERVICE_UNAVAILABLE, "Active VNC connection. Request denied.".into()));
    };
    let (sender, output) = launcher.vnc().await.map_err(Refusal::from)?;
    let span = tracing::info_span!("vnc", %namespace, %name);
    let bridge = Bridge { slot, session, metrics: served.metrics, kind: StreamKind::Vnc };
    let wrap = |data: Bytes| Chunk { data: data.into() };
    let input = ToLauncher { sender, wrap };
    Ok(prepared(upgrade)
        .on_upgrade(move |socket| served.streams.track_future(bridge.run(socket, input, output).instrument(span))))
}

pub(super) async fn usb_redirection(
    State(served): State<Served>,
    Path((namespace, name)): Path<(String, String)>,
    headers: HeaderMap,
    upgrade: WebSocketUpgrade,
) -> Result<Response, Failure> {
    let handle = served.handle(&namespace, &name)?;
    let launcher = handle.launcher()?;
    let slot = served.claim(StreamKind::UsbRedirection, &headers)?;
    let Some((channel, session)) = handle.sessions.claim_usb() else {
        return Err(Failure(StatusCode::SERVICE_UNAVAILABLE, "all channels for USB redirection are in use".into()));
    };
    let (sender, output) = launcher.usb_redirection(channel).await.map_err(Refusal::from)?;
    let span = tracing::info_span!("usbredir", %namespace, %name, channel);
    let bridge = Bridge { slot, session, metrics: served.metrics, kind: StreamKind::UsbRedirection };
    let wrap = |data: Bytes| UsbInput { data: data.into(), channel: 0 };
    let input = ToLauncher { sender, wrap };
    Ok(prepared(upgrade)
        .on_upgrade(move |socket| served.streams.track_future(bridge.run(socket, input, output).instrument(span))))
}

/// Returns true if the flag is set. Invalid values count as false.
fn is_set(query: &str, flag: &str) -> bool {
    query.split('&').filter_map(|pair| pair.split_once('=')).any(|(key, value)| key == flag && api::is_true(value))
}

/// Sets the limits of a stream and its subprotocol.
pub(super) fn prepared(upgrade: WebSocketUpgrade) -> WebSocketUpgrade {
    upgrade
        .protocols([SUBPROTOCOL])
        .max_message_size(MAX_MESSAGE)
        .max_frame_size(MAX_MESSAGE)
        .read_buffer_size(READ_BUFFER)
        .write_buffer_size(0)
        .max_write_buffer_size(WRITE_LIMIT)
}

/// Input of a launcher, in messages of its type.
struct ToLauncher<T, W> {
    sender: mpsc::Sender<T>,
    wrap: W,
}

impl<T: Send, W: Fn(Bytes) -> T + Send> Input for ToLauncher<T, W> {
    async fn send(&mut self, data: Bytes) -> bool {
        let message = (self.wrap)(data);
        self.sender.send(message).await.is_ok()
    }

    // Dropping the sender ends the stream after the queued messages.
    async fn finish(self) {}
}

impl Output for Streaming<Chunk> {
    async fn next(&mut self) -> Result<Bytes, End> {
        match self.message().await {
            Ok(Some(chunk)) => Ok(chunk.data.into()),
            Ok(None) => Err(End::Vmi),
            Err(status) => {
                tracing::debug!(%status, "the launcher ended the stream");
                Err(ended_by(&status))
            }
        }
    }
}

/// Converts the end of a launcher's stream.
fn ended_by(status: &Status) -> End {
    match (LauncherError::from_status("a stream", status), status.code()) {
        (LauncherError::Lost(_) | LauncherError::Connect(_), _) => End::Lost,
        // A client of another connection opened the console.
        (_, Code::Aborted) => End::Ended(Ending::Replaced),
        (error, _) => End::Refused(error.to_string()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ends_of_launcher_streams_are_converted() {
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
    fn preserve_session_is_off_by_default() {
        for (query, expected) in [
            ("", false),
            ("preserveSession", false),
            ("preserveSession=false", false),
            ("preserveSession=yes", false),
            ("preserveSession=true", true),
            ("a=b&preserveSession=1", true),
        ] {
            assert_eq!(is_set(query, "preserveSession"), expected, "{query}");
        }
    }
}
