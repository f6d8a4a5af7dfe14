//! Copies between the WebSockets of a client and of virt-handler.
//!
//! ```text
//!              message            ┌────────┐ peer closed: forward the close      ┌─────────┐
//!            ┌──────────────────▶ │  open  │ ──────────────────────────────────▶ │ closing │ both have closed or are lost,
//!            └─────────────────── │        │ ──────────────────────────────────▶ │         │ or Limits::close passed
//!                                 └────────┘ lost, silent or blocked, or the     └─────────┘ ──▶ both sockets dropped
//!                                            process stops: close with a reason
//! ```
//!
//! A direction reads a message only after the other side has accepted the one before, so a slow reader slows the writer and no
//! queue forms. Both directions belong to the future of [`copy`]: when it ends, or is dropped, no task remains.

use std::time::Duration;

use futures::{
    Sink, SinkExt, Stream, StreamExt,
    future::{Either, join, select},
};
use tokio::{
    io::{AsyncRead, AsyncWrite},
    time::{Instant, MissedTickBehavior, interval_at, timeout, timeout_at},
};
use tokio_tungstenite::{
    WebSocketStream,
    tungstenite::{Bytes, Error, Message, protocol::frame::coding::CloseCode},
};
use tokio_util::sync::CancellationToken;

use super::websocket::close_and_drain;

/// Time limits of a copy.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Limits {
    /// Time between pings to each side. They keep connections of proxies open, and each pong shows that the side is alive.
    pub ping: Duration,
    /// Longest time without a message. A suspended client survives a short pause.
    pub silence: Duration,
    /// The client may be silent before its first bytes: `virtctl` reads nothing, and so answers no ping, while it waits for a
    /// viewer. Its stream counts in the limits of streams.
    pub waits_for_viewer: bool,
    /// Longest time for one message to be accepted.
    pub write: Duration,
    /// Longest time for the closing handshake.
    pub close: Duration,
}

impl Limits {
    /// Returns the limits of streams to a viewer on the host of the client.
    #[must_use]
    pub(crate) fn viewer() -> Self {
        Self { waits_for_viewer: true, ..Self::default() }
    }

    /// Returns the limits of forwarded ports, whose clients answer pings without delay.
    #[must_use]
    pub(crate) fn tunnel() -> Self {
        Self { ping: Duration::from_secs(10), ..Self::default() }
    }
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            ping: Duration::from_secs(30),
            silence: Duration::from_secs(300),
            waits_for_viewer: false,
            write: Duration::from_secs(300),
            close: Duration::from_secs(5),
        }
    }
}

/// The end of a copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum End {
    /// The client closed.
    ClientClosed,
    /// virt-handler closed.
    HandlerClosed,
    /// The client's connection failed or was silent for too long.
    ClientLost,
    /// virt-handler's connection failed or was silent for too long.
    HandlerLost,
    /// The guest closed a forwarded connection.
    GuestClosed,
    /// A forwarded connection to the guest failed.
    GuestLost,
    /// The VMI of a forwarded connection has stopped.
    VmiGone,
    /// This process stops.
    Stopped,
}

impl End {
    /// Returns the label for metrics and logs.
    #[must_use]
    pub(crate) const fn label(self) -> &'static str {
        match self {
            Self::ClientClosed => "client_closed",
            Self::HandlerClosed => "handler_closed",
            Self::ClientLost => "client_lost",
            Self::HandlerLost => "handler_lost",
            Self::GuestClosed => "guest_closed",
            Self::GuestLost => "guest_lost",
            Self::VmiGone => "vmi_gone",
            Self::Stopped => "stopped",
        }
    }
}

/// The end of one direction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Ended {
    /// The source closed; the close has been forwarded.
    Closed,
    /// The source failed or was silent for too long.
    SourceLost,
    /// The sink failed or took too long.
    SinkLost,
}

/// Copies until one side closes, breaks, or `stop` is cancelled.
pub(crate) async fn copy<C, H>(
    client: WebSocketStream<C>,
    handler: WebSocketStream<H>,
    limits: Limits,
    stop: CancellationToken,
) -> End
where
    C: AsyncRead + AsyncWrite + Unpin,
    H: AsyncRead + AsyncWrite + Unpin,
{
    let (mut client_sink, mut client_source) = client.split();
    let (mut handler_sink, mut handler_source) = handler.split();
    let ((end, client_done, handler_done), deadline) = {
        let of_handler = Limits { waits_for_viewer: false, ..limits };
        let upward = std::pin::pin!(forward(&mut client_source, &mut handler_sink, limits));
        let downward = std::pin::pin!(forward(&mut handler_source, &mut client_sink, of_handler));
        let both = select(upward, downward);
        tokio::select! {
            first = both => {
                let deadline = Instant::now() + limits.close;
                // The last messages of the other side, and its answer to the close, may follow.
                let (from_client, ended, answered) = match first {
                    Either::Left((ended, downward)) => {
                        (true, ended, ended == Ended::Closed && closes(downward, deadline).await)
                    }
                    Either::Right((ended, upward)) => {
                        (false, ended, ended == Ended::Closed && closes(upward, deadline).await)
                    }
                };
                (outcome(from_client, ended, answered), deadline)
            }
            () = stop.cancelled() => ((End::Stopped, false, false), Instant::now() + limits.close),
        }
    };
    let close = match end {
        End::ClientClosed | End::HandlerClosed | End::GuestClosed | End::VmiGone => None,
        End::ClientLost => Some((CloseCode::Away, "client is gone")),
        End::HandlerLost | End::GuestLost => Some((CloseCode::Error, "connection to virt-handler was lost")),
        End::Stopped => Some((CloseCode::Restart, "virt-api is stopping")),
    };
    // A lost side cannot receive the close; the other side does not wait for it.
    let closing = join(
        close_and_drain(&mut client_sink, &mut client_source, close, client_done),
        close_and_drain(&mut handler_sink, &mut handler_source, close, handler_done),
    );
    let _ = timeout_at(deadline, closing).await;
    end
}

/// Returns true if a direction ends with a close in time.
async fn closes(direction: impl Future<Output = Ended>, deadline: Instant) -> bool {
    matches!(timeout_at(deadline, direction).await, Ok(Ended::Closed))
}

/// Returns the end of the copy after that of one direction; and for client and virt-handler, true if the side has closed or is
/// lost. `answered`: the other side has closed, too.
const fn outcome(from_client: bool, ended: Ended, answered: bool) -> (End, bool, bool) {
    match (from_client, ended) {
        (true, Ended::Closed) => (End::ClientClosed, true, answered),
        (false, Ended::Closed) => (End::HandlerClosed, answered, true),
        (true, Ended::SourceLost) | (false, Ended::SinkLost) => (End::ClientLost, true, false),
        (false, Ended::SourceLost) | (true, Ended::SinkLost) => (End::HandlerLost, false, true),
    }
}

/// Forwards messages in one direction, and pings the side that it writes to.
async fn forward<R, W>(source: &mut R, sink: &mut W, limits: Limits) -> Ended
where
    R: Stream<Item = Result<Message, Error>> + Unpin,
    W: Sink<Message, Error = Error> + Unpin,
{
    let mut pings = interval_at(Instant::now() + limits.ping, limits.ping);
    pings.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut last_message = Instant::now();
    let mut is_waiting = limits.waits_for_viewer;
    loop {
        let next = async {
            if is_waiting {
                Ok(source.next().await)
            } else {
                timeout_at(last_message + limits.silence, source.next()).await
            }
        };
        let event = tokio::select! {
            event = next => event,
            _ = pings.tick() => {
                if !matches!(timeout(limits.write, sink.send(Message::Ping(Bytes::new()))).await, Ok(Ok(()))) {
                    return Ended::SinkLost;
                }
                continue;
            }
        };
        let message = match event {
            Ok(Some(Ok(message))) => message,
            // Silent, ended without a close, or failed.
            Err(_) | Ok(None | Some(Err(_))) => return Ended::SourceLost,
        };
        match message {
            Message::Binary(_) => {
                is_waiting = false;
                if !matches!(timeout(limits.write, sink.send(message)).await, Ok(Ok(()))) {
                    return Ended::SinkLost;
                }
            }
            Message::Close(frame) => {
                // Not every code that can be received may be sent.
                let frame = frame.filter(|frame| frame.code.is_allowed());
                return match timeout(limits.close, sink.send(Message::Close(frame))).await {
                    // A side that closed at the same moment does not need this close.
                    Ok(Ok(()) | Err(Error::ConnectionClosed | Error::AlreadyClosed | Error::Protocol(_))) => {
                        Ended::Closed
                    }
                    _ => Ended::SinkLost,
                };
            }
            // The library answers pings; text has no meaning in this protocol.
            Message::Ping(_) | Message::Pong(_) | Message::Text(_) | Message::Frame(_) => {}
        }
        // Counted from here: a slow sink delays the read from the source.
        last_message = Instant::now();
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::{DuplexStream, duplex};
    use tokio_tungstenite::tungstenite::protocol::{CloseFrame, Role};

    use super::*;
    use crate::clients::websocket;

    struct Ends {
        client: WebSocketStream<DuplexStream>,
        handler: WebSocketStream<DuplexStream>,
        copy: tokio::task::JoinHandle<End>,
        stop: CancellationToken,
    }

    /// Returns a copy between two in-memory connections and their far ends.
    async fn ends(limits: Limits, capacity: usize) -> Ends {
        let (client_far, client_near) = duplex(capacity);
        let (handler_near, handler_far) = duplex(capacity);
        let config = Some(websocket::config());
        let client = WebSocketStream::from_raw_socket(client_far, Role::Client, config).await;
        let from_client = WebSocketStream::from_raw_socket(client_near, Role::Server, config).await;
        let to_handler = WebSocketStream::from_raw_socket(handler_near, Role::Client, config).await;
        let handler = WebSocketStream::from_raw_socket(handler_far, Role::Server, config).await;
        let stop = CancellationToken::new();
        let copy = tokio::spawn(copy(from_client, to_handler, limits, stop.clone()));
        Ends { client, handler, copy, stop }
    }

    fn binary(text: &'static str) -> Message {
        Message::Binary(Bytes::from_static(text.as_bytes()))
    }

    fn close(code: CloseCode) -> Message {
        Message::Close(Some(CloseFrame { code, reason: "bye".into() }))
    }

    fn close_code(message: Option<Result<Message, Error>>) -> Option<CloseCode> {
        match message {
            Some(Ok(Message::Close(Some(frame)))) => Some(frame.code),
            other => panic!("no close: {other:?}"),
        }
    }

    #[tokio::test]
    async fn bytes_flow_both_ways_and_text_is_ignored() {
        let mut ends = ends(Limits::default(), 1024).await;
        ends.client.send(Message::Text("ignored".into())).await.unwrap();
        ends.client.send(binary("hello")).await.unwrap();
        assert_eq!(ends.handler.next().await.unwrap().unwrap(), binary("hello"));
        ends.handler.send(binary("login: ")).await.unwrap();
        assert_eq!(ends.client.next().await.unwrap().unwrap(), binary("login: "));
    }

    #[tokio::test]
    async fn close_of_the_handler_reaches_the_client_after_the_last_byte() {
        let mut ends = ends(Limits::default(), 1024).await;
        ends.handler.send(binary("last")).await.unwrap();
        ends.handler.send(close(CloseCode::Normal)).await.unwrap();
        assert_eq!(ends.client.next().await.unwrap().unwrap(), binary("last"));
        assert_eq!(close_code(ends.client.next().await), Some(CloseCode::Normal));
        assert!(ends.client.next().await.is_none());
        // The client's answer is forwarded, too.
        assert_eq!(close_code(ends.handler.next().await), Some(CloseCode::Normal));
        assert_eq!(ends.copy.await.unwrap(), End::HandlerClosed);
    }

    #[tokio::test]
    async fn close_of_the_client_reaches_the_handler() {
        let mut ends = ends(Limits::default(), 1024).await;
        ends.client.send(close(CloseCode::Away)).await.unwrap();
        assert_eq!(close_code(ends.handler.next().await), Some(CloseCode::Away));
        assert!(ends.handler.next().await.is_none());
        assert_eq!(ends.copy.await.unwrap(), End::ClientClosed);
    }

    #[tokio::test]
    async fn lost_handler_closes_the_client_with_an_error() {
        let mut ends = ends(Limits::default(), 1024).await;
        drop(ends.handler);
        assert_eq!(close_code(ends.client.next().await), Some(CloseCode::Error));
        assert!(ends.client.next().await.is_none());
        assert_eq!(ends.copy.await.unwrap(), End::HandlerLost);
    }

    #[tokio::test]
    async fn lost_client_closes_the_handler() {
        let mut ends = ends(Limits::default(), 1024).await;
        drop(ends.client);
        assert_eq!(close_code(ends.handler.next().await), Some(CloseCode::Away));
        assert!(ends.handler.next().await.is_none());
        assert_eq!(ends.copy.await.unwrap(), End::ClientLost);
    }

    #[tokio::test]
    async fn stopping_process_closes_both() {
        let mut ends = ends(Limits::default(), 1024).await;
        ends.stop.cancel();
        assert_eq!(close_code(ends.client.next().await), Some(CloseCode::Restart));
        assert_eq!(close_code(ends.handler.next().await), Some(CloseCode::Restart));
        assert!(ends.handler.next().await.is_none());
        // Its answer goes out as it looks for more; the socket stays until both have answered.
        assert!(ends.client.next().await.is_none());
        assert_eq!(ends.copy.await.unwrap(), End::Stopped);
    }

    #[tokio::test(start_paused = true)]
    async fn both_sides_are_pinged_and_silence_ends_the_copy() {
        let limits = Limits { ping: Duration::from_secs(1), silence: Duration::from_secs(3), ..Limits::default() };
        let mut ends = ends(limits, 1024).await;
        // The handler reads, and so answers pings; the client does not.
        let handler = tokio::spawn(async move {
            let mut pings = 0;
            while let Some(Ok(message)) = ends.handler.next().await {
                pings += usize::from(message.is_ping());
            }
            pings
        });
        assert_eq!(ends.copy.await.unwrap(), End::ClientLost);
        assert!(handler.await.unwrap() >= 2);
        assert!(ends.client.next().await.unwrap().unwrap().is_ping());
    }

    #[tokio::test(start_paused = true)]
    async fn client_is_silent_until_its_viewer_connects() {
        let limits = Limits { ping: Duration::from_secs(1), silence: Duration::from_secs(3), ..Limits::viewer() };
        let Ends { mut client, mut handler, copy, stop: _ } = ends(limits, 1024).await;
        let received = tokio::spawn(async move {
            let mut bytes = 0;
            while let Some(Ok(message)) = handler.next().await {
                bytes += if message.is_binary() { message.len() } else { 0 };
            }
            bytes
        });
        tokio::time::sleep(Duration::from_secs(60)).await;
        assert!(!copy.is_finished());
        client.send(binary("RFB")).await.unwrap();
        assert_eq!(copy.await.unwrap(), End::ClientLost);
        assert_eq!(received.await.unwrap(), 3);
        // The limit of virt-handler stays.
        let ends = ends(limits, 1024).await;
        assert_eq!(ends.copy.await.unwrap(), End::HandlerLost);
    }

    #[tokio::test(start_paused = true)]
    async fn slow_reader_slows_the_writer() {
        let mut ends = ends(Limits::default(), 256).await;
        let chunk = Bytes::from(vec![7_u8; 64 << 10]);
        let mut taken = 0;
        // Nobody reads at the handler's end: a bounded amount is taken, then the writer waits.
        while timeout(Duration::from_secs(1), ends.client.send(Message::Binary(chunk.clone()))).await.is_ok() {
            taken += 1;
            assert!(taken < 100, "unbounded");
        }
        assert!(!ends.copy.is_finished());
    }

    #[tokio::test]
    async fn two_hundred_concurrent_streams_are_served_and_end() {
        let mut streams = Vec::new();
        for _ in 0..200 {
            streams.push(ends(Limits::default(), 1024).await);
        }
        for (number, stream) in streams.iter_mut().enumerate() {
            let word = Message::Binary(Bytes::from(format!("console {number}")));
            stream.client.send(word.clone()).await.unwrap();
            assert_eq!(stream.handler.next().await.unwrap().unwrap(), word);
            stream.handler.send(word.clone()).await.unwrap();
            assert_eq!(stream.client.next().await.unwrap().unwrap(), word);
        }
        for (number, stream) in streams.into_iter().enumerate() {
            let Ends { client, handler, copy, .. } = stream;
            let expected = if number % 2 == 0 { End::ClientLost } else { End::HandlerLost };
            let mut stays = if number % 2 == 0 {
                drop(client);
                handler
            } else {
                drop(handler);
                client
            };
            let code = if number % 2 == 0 { CloseCode::Away } else { CloseCode::Error };
            assert_eq!(close_code(stays.next().await), Some(code));
            assert!(stays.next().await.is_none());
            assert_eq!(timeout(Duration::from_secs(20), copy).await.unwrap().unwrap(), expected);
        }
    }

    #[test]
    fn side_is_done_after_its_close_or_loss() {
        for (from_client, ended, answered, expected) in [
            (true, Ended::Closed, false, (End::ClientClosed, true, false)),
            (true, Ended::Closed, true, (End::ClientClosed, true, true)),
            (true, Ended::SourceLost, false, (End::ClientLost, true, false)),
            (true, Ended::SinkLost, false, (End::HandlerLost, false, true)),
            (false, Ended::Closed, false, (End::HandlerClosed, false, true)),
            (false, Ended::Closed, true, (End::HandlerClosed, true, true)),
            (false, Ended::SourceLost, false, (End::HandlerLost, false, true)),
            (false, Ended::SinkLost, false, (End::ClientLost, true, false)),
        ] {
            assert_eq!(outcome(from_client, ended, answered), expected, "{from_client} {ended:?} {answered}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn wait_for_the_answer_to_a_close_is_bounded() {
        let mut ends = ends(Limits::default(), 1024).await;
        let began = Instant::now();
        ends.handler.send(close(CloseCode::Away)).await.unwrap();
        assert_eq!(ends.copy.await.unwrap(), End::HandlerClosed);
        assert_eq!(began.elapsed().as_secs(), Limits::default().close.as_secs());
        assert_eq!(close_code(ends.client.next().await), Some(CloseCode::Away));
    }

    #[tokio::test]
    async fn oversized_message_ends_the_copy() {
        let mut ends = ends(Limits::default(), 4 << 20).await;
        ends.client.send(Message::Binary(Bytes::from(vec![0; websocket::MAX_MESSAGE + 1]))).await.unwrap();
        assert_eq!(close_code(ends.handler.next().await), Some(CloseCode::Away));
        assert!(ends.handler.next().await.is_none());
        assert_eq!(ends.copy.await.unwrap(), End::ClientLost);
    }
}
