//! The body of a download: resumed after a cut, and read as a stream by another thread.

use std::{
    io::{self, Read},
    sync::Arc,
    time::Duration,
};

use bytes::{Buf, Bytes};
use http::{
    HeaderValue, Response, StatusCode,
    header::{CONTENT_LENGTH, CONTENT_RANGE, ETAG, LAST_MODIFIED},
};
use http_body_util::BodyExt;
use hyper::body::Incoming;
use tokio::{
    sync::mpsc,
    time::{sleep, timeout},
};

use super::{Client, SourceError, chain};
use crate::meter::Meter;

/// Chunks between the connection and the reader.
const CHUNKS: usize = 8;
/// Failures in a row, without a byte in between.
const FAILURES: u32 = 6;
/// Requests for one file.
const REQUESTS: u32 = 200;

/// A download. Its end without an error means that all bytes were read.
pub(crate) struct Body {
    /// Length of the file.
    pub(crate) length: Option<u64>,
    chunks: mpsc::Receiver<Result<Bytes, SourceError>>,
    current: Bytes,
}

impl Read for Body {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        while self.current.is_empty() {
            match self.chunks.blocking_recv() {
                Some(Ok(chunk)) => self.current = chunk,
                Some(Err(error)) => return Err(error.into()),
                None => return Ok(0),
            }
        }
        let count = self.current.len().min(buffer.len());
        self.current.copy_to_slice(&mut buffer[..count]);
        Ok(count)
    }
}

/// Begins a download. Its chunks are received by a task of their own.
pub(crate) async fn download(client: Arc<Client>, meter: Arc<Meter>) -> Result<Body, SourceError> {
    let mut transfer = Transfer { client, meter, offset: 0, facts: Facts::default(), failures: 0, requests: 0 };
    let answer = transfer.connect().await?;
    let length = transfer.facts.length;
    transfer.meter.expect(length.unwrap_or(0));
    let (sender, chunks) = mpsc::channel(CHUNKS);
    tokio::spawn(async move {
        if let Err(error) = transfer.run(answer, &sender).await {
            // Nobody reads on.
            let _ = sender.send(Err(error)).await;
        }
    });
    Ok(Body { length, chunks, current: Bytes::new() })
}

/// Facts by which a file is recognized.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Facts {
    length: Option<u64>,
    tag: Option<HeaderValue>,
    modified: Option<HeaderValue>,
}

impl Facts {
    fn of(answer: &Response<Incoming>) -> Self {
        let header = |name| answer.headers().get(name).cloned();
        let length = header(CONTENT_LENGTH).and_then(|length| length.to_str().ok()?.parse().ok());
        Self { length, tag: header(ETAG), modified: header(LAST_MODIFIED) }
    }

    /// Returns the value for `If-Range`. A weak tag may stay the same when the bytes change.
    fn validator(&self) -> Option<&HeaderValue> {
        let strong = self.tag.as_ref().filter(|tag| !tag.as_bytes().starts_with(b"W/"));
        strong.or(self.modified.as_ref())
    }
}

struct Transfer {
    client: Arc<Client>,
    meter: Arc<Meter>,
    /// Bytes that the reader has.
    offset: u64,
    facts: Facts,
    failures: u32,
    requests: u32,
}

impl Transfer {
    /// Requests the file, or the rest of it. Repeats what may succeed later.
    async fn connect(&mut self) -> Result<Response<Incoming>, SourceError> {
        loop {
            let answer = match self.client.get(self.offset, self.facts.validator()).await {
                Ok(answer) if self.requests == 0 => {
                    self.facts = Facts::of(&answer);
                    Ok(answer)
                }
                Ok(answer) => self.accept(answer).map(Ok)?,
                Err(error) => Err(error),
            };
            match answer {
                Ok(answer) => {
                    self.requests += 1;
                    return Ok(answer);
                }
                Err(error) => self.pause(error).await?,
            }
        }
    }

    /// Waits before another request, or returns the error.
    async fn pause(&mut self, error: SourceError) -> Result<(), SourceError> {
        self.failures += 1;
        if !error.is_transient() || self.failures >= FAILURES || self.requests >= REQUESTS {
            return Err(error);
        }
        eprintln!("{error}; trying again");
        // Attempts are progress: they end by their own limits.
        self.meter.moved();
        sleep(pause(self.failures)).await;
        Ok(())
    }

    /// Rejects an answer that does not continue the file.
    fn accept(&self, answer: Response<Incoming>) -> Result<Response<Incoming>, SourceError> {
        let changed =
            |reason| Err(SourceError::Changed { url: self.client.url().to_owned(), bytes: self.offset, reason });
        if self.offset == 0 || answer.status() != StatusCode::PARTIAL_CONTENT {
            let now = Facts::of(&answer);
            return match () {
                () if self.offset == 0 && now == self.facts => Ok(answer),
                () if self.facts.validator().is_none() => changed("the server sends neither ETag nor Last-Modified"),
                () if now != self.facts => changed("the file has changed"),
                () => Ok(answer),
            };
        }
        // Not every server heeds If-Range.
        let now = Facts::of(&answer);
        let tags = now.tag.as_ref().zip(self.facts.tag.as_ref());
        let times = now.modified.as_ref().zip(self.facts.modified.as_ref());
        if [tags, times].into_iter().flatten().any(|(now, former)| now != former) {
            return changed("the file has changed");
        }
        let range = answer.headers().get(CONTENT_RANGE).and_then(|range| range.to_str().ok()).and_then(parse_range);
        match range {
            Some((from, length)) if from == self.offset && (length.is_none() || length == self.facts.length) => {
                Ok(answer)
            }
            _ => changed("the server sent another range"),
        }
    }

    async fn run(
        &mut self,
        mut answer: Response<Incoming>,
        sender: &mpsc::Sender<Result<Bytes, SourceError>>,
    ) -> Result<(), SourceError> {
        loop {
            match self.receive(answer, sender).await {
                Ok(()) => return Ok(()),
                Err(error) if self.facts.validator().is_some() || self.offset == 0 => self.pause(error).await?,
                Err(error) => return Err(error),
            }
            answer = self.connect().await?;
        }
    }

    /// Receives one body. Bytes that the reader has are left out: not all servers send ranges.
    async fn receive(
        &mut self,
        answer: Response<Incoming>,
        sender: &mpsc::Sender<Result<Bytes, SourceError>>,
    ) -> Result<(), SourceError> {
        let mut skip = if answer.status() == StatusCode::PARTIAL_CONTENT { 0 } else { self.offset };
        let mut body = answer.into_body();
        loop {
            let frame = match timeout(self.client.silence, body.frame()).await {
                Ok(Some(Ok(frame))) => frame,
                Ok(Some(Err(error))) => return Err(self.cut(chain(&error))),
                Ok(None) if skip == 0 && self.facts.length.is_none_or(|length| length == self.offset) => return Ok(()),
                Ok(None) => return Err(self.cut("the server closed the connection".to_owned())),
                Err(_) => {
                    return Err(SourceError::Silent { url: self.client.url().to_owned(), after: self.client.silence });
                }
            };
            let Ok(mut chunk) = frame.into_data() else { continue };
            let skipped = skip.min(chunk.len() as u64);
            chunk.advance(usize::try_from(skipped).unwrap_or(chunk.len()));
            skip -= skipped;
            self.meter.moved();
            if chunk.is_empty() {
                continue;
            }
            self.failures = 0;
            self.offset += chunk.len() as u64;
            self.meter.add(chunk.len() as u64);
            if sender.send(Ok(chunk)).await.is_err() {
                // The reader has failed.
                return Ok(());
            }
        }
    }

    fn cut(&self, reason: String) -> SourceError {
        SourceError::Cut { url: self.client.url().to_owned(), bytes: self.offset, reason }
    }
}

/// Returns the pause after failures in a row.
fn pause(failures: u32) -> Duration {
    Duration::from_millis(500) * 2_u32.pow(failures.clamp(1, 7) - 1)
}

/// Parses `bytes FROM-TO/LENGTH` into the first byte and the length of the file.
fn parse_range(text: &str) -> Option<(u64, Option<u64>)> {
    let (range, length) = text.strip_prefix("bytes ")?.split_once('/')?;
    let (from, _) = range.split_once('-')?;
    let length = if length == "*" { None } else { Some(length.parse().ok()?) };
    Some((from.parse().ok()?, length))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_are_parsed() {
        assert_eq!(parse_range("bytes 5-9/10"), Some((5, Some(10))));
        assert_eq!(parse_range("bytes 5-9/*"), Some((5, None)));
        for text in ["", "bytes 5-9", "bytes */10", "lines 5-9/10", "bytes 5-9/x"] {
            assert_eq!(parse_range(text), None, "{text}");
        }
    }

    #[test]
    fn pauses_grow_and_weak_tags_do_not_validate() {
        assert_eq!([1, 2, 5].map(|failures| pause(failures).as_millis()), [500, 1000, 8000]);
        let value = |text| Some(HeaderValue::from_static(text));
        let facts = Facts { length: None, tag: value("W/\"1\""), modified: value("yesterday") };
        assert_eq!(facts.validator(), facts.modified.as_ref());
        assert_eq!(Facts { tag: value("\"1\""), ..facts.clone() }.validator(), value("\"1\"").as_ref());
        assert_eq!(Facts { modified: None, ..facts }.validator(), None);
    }
}
