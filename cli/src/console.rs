//! `console`: connects the user's terminal to the serial port of a VMI.

use std::time::Duration;

use bytes::Bytes;
use clap::Args;
use futures::{SinkExt, StreamExt};
use tokio::{
    io::AsyncWriteExt,
    signal::unix::{SignalKind, signal},
};
use tokio_tungstenite::tungstenite::Message;

use crate::{
    Connection, Error, object_name,
    subresource::{Stream, close_reason, lost},
    terminal::{RawMode, input},
};

/// Control-] leaves the console, as in telnet and virsh. Control-5 sends the same byte.
const ESCAPE: u8 = 0x1d;

/// Options of `console`.
#[derive(Args)]
pub(crate) struct ConsoleOptions {
    /// Name of the VirtualMachineInstance
    #[arg(value_name = "VMI")]
    vmi: String,
    /// Minutes to wait until the VMI runs
    #[arg(long, default_value_t = 5, value_name = "MINUTES")]
    timeout: u64,
    /// Print the most recent output of the guest first (default)
    #[arg(long, conflicts_with = "no_replay")]
    replay: bool,
    /// Print only what the guest prints from now on
    #[arg(long)]
    no_replay: bool,
}

/// Reason why a console session ended.
#[derive(Debug, PartialEq, Eq)]
enum End {
    Escape,
    InputEnded,
    Closed(String),
}

pub(crate) async fn run(connection: &Connection, options: &ConsoleOptions) -> Result<(), Error> {
    let name = object_name(&options.vmi)?;
    let subresource = if options.no_replay { "console?replay=false" } else { "console?replay=true" };
    let path = connection.path("virtualmachineinstances", name, subresource);
    let timeout = Duration::from_secs(options.timeout.saturating_mul(60));
    let stream = match open(connection, name, &path, timeout).await {
        Err(error) => return Err(connection.explain(name, false, error).await),
        Ok(stream) => stream,
    };
    eprintln!("Successfully connected to {name} console. Press Ctrl+] or Ctrl+5 to exit console.");
    let raw = RawMode::enter()?;
    let end = copy(stream).await;
    drop(raw);
    match end? {
        End::Escape => {
            eprintln!();
            Ok(())
        }
        End::InputEnded => Ok(()),
        End::Closed(reason) => {
            eprintln!();
            Err(Error::Stream(format!("the console of {name} was closed: {reason}")))
        }
    }
}

/// Opens the stream. Retries until the VMI runs or `timeout` has passed.
async fn open(connection: &Connection, name: &str, path: &str, timeout: Duration) -> Result<Stream, Error> {
    let deadline = tokio::time::Instant::now().checked_add(timeout);
    let mut reported = false;
    loop {
        match connection.stream(path).await {
            // Reported for a VMI that is starting; all other errors are final.
            Err(Error::Refused { code: 400, message })
                if message.contains("not running") || message.contains("instead of Running") =>
            {
                if deadline.is_some_and(|deadline| tokio::time::Instant::now() >= deadline) {
                    return Err(Error::Refused { code: 400, message });
                }
                if !reported {
                    eprintln!("Waiting until {name} runs: {message}");
                    reported = true;
                }
                tokio::time::sleep(Duration::from_secs(1)).await;
            }
            result => return result,
        }
    }
}

async fn copy(mut stream: Stream) -> Result<End, Error> {
    let stopped = |what| Error::io(what);
    let mut terminate = signal(SignalKind::terminate()).map_err(stopped("cannot watch for SIGTERM"))?;
    let mut hang_up = signal(SignalKind::hangup()).map_err(stopped("cannot watch for SIGHUP"))?;
    let mut keys = input();
    let mut output = tokio::io::stdout();
    let end = loop {
        tokio::select! {
            chunk = keys.recv() => match chunk.map(until_escape) {
                None => break End::InputEnded,
                Some((typed, left)) => {
                    if !typed.is_empty() && let Err(error) = stream.send(Message::Binary(Bytes::from(typed))).await {
                        break End::Closed(lost(&error));
                    }
                    if left {
                        break End::Escape;
                    }
                }
            },
            message = stream.next() => match message {
                None => break End::Closed("the connection was lost".into()),
                Some(Err(error)) => break End::Closed(lost(&error)),
                Some(Ok(Message::Binary(data))) => {
                    output.write_all(&data).await.map_err(Error::io("cannot write to the terminal"))?;
                    output.flush().await.map_err(Error::io("cannot write to the terminal"))?;
                }
                Some(Ok(Message::Close(frame))) => {
                    break End::Closed(close_reason(frame.as_ref()));
                }
                Some(Ok(_)) => {}
            },
            _ = terminate.recv() => break End::InputEnded,
            _ = hang_up.recv() => break End::InputEnded,
        }
    };
    // Sends a close frame if the connection still works.
    let _ = tokio::time::timeout(Duration::from_secs(1), stream.close(None)).await;
    Ok(end)
}

/// Splits off the bytes typed before the escape character and returns true if it was typed.
fn until_escape(mut typed: Vec<u8>) -> (Vec<u8>, bool) {
    match typed.iter().position(|byte| *byte == ESCAPE) {
        Some(at) => {
            typed.truncate(at);
            (typed, true)
        }
        None => (typed, false),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn input_before_the_escape_is_still_sent() {
        for (typed, sent, left) in
            [(&b"ls\n"[..], &b"ls\n"[..], false), (b"ls\x1dmore", b"ls", true), (b"\x1d", b"", true), (b"", b"", false)]
        {
            assert_eq!(until_escape(typed.to_vec()), (sent.to_vec(), left));
        }
    }
}
