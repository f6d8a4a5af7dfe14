//! The virtio channel through which a guest asks for metrics.
//!
//! QEMU listens on the socket; its guest writes `GET /metrics/XML` and an empty line, and reads the document.

use std::{path::PathBuf, time::Duration};

use tokio::{
    io::{AsyncBufReadExt, AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, BufReader},
    net::UnixStream,
    time::{Instant, sleep, sleep_until},
};

use super::Collector;

/// Pause between attempts to connect.
const RETRY: Duration = Duration::from_secs(1);
/// Least interval of answers to a guest.
const PACE: Duration = Duration::from_secs(1);
/// Longest line of a request.
const MAX_LINE: u64 = 256;
const REQUEST: &str = "GET /metrics/XML";
const INVALID: &str = "INVALID REQUEST\n\n";

/// Answers the guest of each QEMU that listens on the socket.
pub(super) async fn serve(socket: PathBuf, collector: Collector) {
    loop {
        if let Ok(stream) = UnixStream::connect(&socket).await {
            let (reader, writer) = stream.into_split();
            let document = || async { collector.collect().await.document() };
            if let Err(error) = answer(BufReader::new(reader), writer, document).await {
                tracing::debug!(%error, "the channel for metrics has ended");
            }
        }
        sleep(RETRY).await;
    }
}

/// Answers requests until QEMU closes the connection.
async fn answer<F: Future<Output = String>>(
    mut reader: BufReader<impl AsyncRead + Unpin>,
    mut writer: impl AsyncWrite + Unpin,
    document: impl Fn() -> F,
) -> std::io::Result<()> {
    let mut next = Instant::now();
    while let Some(line) = line(&mut reader).await? {
        sleep_until(next).await;
        next = Instant::now() + PACE;
        let is_complete = line == REQUEST && self::line(&mut reader).await?.is_some_and(|rest| rest.is_empty());
        let answer = if is_complete {
            format!("{}\n\n", document().await)
        } else {
            // The rest of what the guest has sent is no request of its own.
            let sent = reader.buffer().len();
            reader.consume(sent);
            INVALID.to_owned()
        };
        writer.write_all(answer.as_bytes()).await?;
    }
    Ok(())
}

/// Reads a line without its end; a part of it if it is too long. `None` at the end.
async fn line(reader: &mut BufReader<impl AsyncRead + Unpin>) -> std::io::Result<Option<String>> {
    let mut line = Vec::new();
    if reader.take(MAX_LINE).read_until(b'\n', &mut line).await? == 0 {
        return Ok(None);
    }
    let text = String::from_utf8_lossy(&line);
    Ok(Some(text.trim_end_matches('\n').trim_end_matches('\r').to_owned()))
}

#[cfg(test)]
mod tests {
    use super::*;

    async fn answers(request: &str) -> String {
        let (near, far) = tokio::io::duplex(1 << 16);
        let (reader, writer) = tokio::io::split(far);
        let served = tokio::spawn(async move {
            answer(BufReader::new(reader), writer, || async { "<metrics/>\n".to_owned() }).await
        });
        let (mut reader, mut writer) = tokio::io::split(near);
        writer.write_all(request.as_bytes()).await.unwrap();
        writer.shutdown().await.unwrap();
        served.await.unwrap().unwrap();
        drop(writer);
        let mut text = String::new();
        reader.read_to_string(&mut text).await.unwrap();
        text
    }

    #[tokio::test(start_paused = true)]
    async fn a_request_gets_the_document_and_anything_else_an_error() {
        let document = "<metrics/>\n\n\n";
        for (request, answer) in [
            ("GET /metrics/XML\n\n", document.to_owned()),
            ("GET /metrics/XML\r\n\r\n", document.to_owned()),
            ("GET /metrics/XML\n\nGET /metrics/XML\n\n", document.repeat(2)),
            ("GET /metrics/XML\nmore\n\n", INVALID.to_owned()),
            ("GET /metrics/JSON\n\n", INVALID.to_owned()),
            ("get /metrics/XML\n\nGET /metrics/XML\n\n", INVALID.to_owned()),
            ("\u{0}\n", INVALID.to_owned()),
            ("", String::new()),
        ] {
            assert_eq!(answers(request).await, answer, "{request:?}");
        }
        // Bounded: a guest that sends no line end.
        assert!(answers(&"x".repeat(5000)).await.starts_with(INVALID));
    }

    #[tokio::test(start_paused = true)]
    async fn a_guest_gets_one_answer_a_second() {
        let begun = Instant::now();
        assert_eq!(answers(&"GET /metrics/XML\n\n".repeat(4)).await.matches("<metrics/>").count(), 4);
        assert_eq!(begun.elapsed().as_secs(), 3);
    }
}
