//! Compares the images over which disks are overlays with those of the target, before the overlays are copied there. Both pods name the
//! same container disks, but each node resolves a tag on its own.
//!
//! The bytes pass through the channel of the release. The source sends [`COMPARE`], and the target answers with the same byte; one of an
//! older release closes the connection. The source sends its list of images. The target sends [`READING`] now and then, and then
//! [`RESULT`] with its list of fingerprints. A list is its length and JSON.

use std::{
    io::{Error, ErrorKind, Result},
    time::Duration,
};

use protocol::channels::Channel;
use serde::{Serialize, de::DeserializeOwned};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::UnixStream,
    time::{sleep, timeout},
};

use super::{
    ChannelMode, Channels,
    fingerprint::{BaseImage, Found, compare as compare_found},
};

pub(super) const COMPARE: u8 = b'i';
const READING: u8 = b'.';
const RESULT: u8 = b'=';

/// Limit of a list, in bytes.
const LIST_LIMIT: u32 = 256 << 10;
/// Attempts to reach the target, and the pause between them. A virt-handler that restarts closes connections, too.
const ATTEMPTS: u32 = 4;
const RETRY: Duration = Duration::from_millis(if cfg!(test) { 1 } else { 5000 });
/// Time limit of the target's first byte. The virt-handlers connect meanwhile.
const ANSWER_LIMIT: Duration = Duration::from_secs(45);
/// Interval of the bytes of a target that reads, and the longest time without one.
const INTERVAL: Duration = Duration::from_secs(5);
const SILENCE: Duration = Duration::from_secs(30);
/// Time limit of all: large images on slow disks take long, a target that never answers must not hold the migration for ever.
const LIMIT: Duration = Duration::from_secs(2 * 3600);
/// Most bytes of a target that reads: more than it sends within the time limit.
const MOST_READING: u64 = 2 * LIMIT.as_secs() / INTERVAL.as_secs();

/// Fails if one of these images is not that of the target.
pub(super) async fn compare(channels: &Channels, images: &[BaseImage]) -> std::result::Result<(), String> {
    let fingerprints = &channels.inner.fingerprints;
    channels.read_images(images);
    let compared = async {
        let Some(found) = ask(channels, images).await? else {
            tracing::warn!("the target is of a release that does not compare images, copying without");
            return Ok(());
        };
        compare_found(&fingerprints.all(images).await, &found)
    };
    let late = |_| Err("comparing the images with those on the target node took too long".to_owned());
    timeout(LIMIT, compared).await.unwrap_or_else(late)
}

/// Returns the fingerprints at the target. `None` if it has closed each connection without an answer.
async fn ask(channels: &Channels, images: &[BaseImage]) -> std::result::Result<Option<Found>, String> {
    let mut failure = None;
    for attempt in 0..ATTEMPTS {
        if attempt > 0 {
            sleep(RETRY).await;
        }
        match exchange(channels, images).await {
            Ok(Some(found)) => return Ok(Some(found)),
            Ok(None) => tracing::info!("the target has not answered which images it has"),
            Err(error) => {
                tracing::warn!(%error, "cannot compare the images with those of the target");
                failure = Some(error);
            }
        }
    }
    match failure {
        Some(error) => Err(format!("cannot compare the images with those on the target node: {error}")),
        None => Ok(None),
    }
}

async fn exchange(channels: &Channels, images: &[BaseImage]) -> Result<Option<Found>> {
    let unknown = || Error::new(ErrorKind::InvalidData, "the target's answer is unknown");
    let (mut stream, _permit) = channels.inner.waiting.take(Channel::Release).await?;
    let first = async {
        stream.write_u8(COMPARE).await?;
        stream.read_u8().await
    };
    let first = timeout(ANSWER_LIMIT, first).await?;
    match first {
        Ok(COMPARE) => {}
        Ok(_) => return Err(unknown()),
        Err(error) if is_closed(&error) => return Ok(None),
        Err(error) => return Err(error),
    }
    send(&mut stream, images).await?;
    for _ in 0..MOST_READING {
        match timeout(SILENCE, stream.read_u8()).await?? {
            READING => {}
            RESULT => return timeout(SILENCE, receive(&mut stream)).await?.map(Some),
            _ => return Err(unknown()),
        }
    }
    Err(unknown())
}

fn is_closed(error: &Error) -> bool {
    matches!(error.kind(), ErrorKind::UnexpectedEof | ErrorKind::ConnectionReset | ErrorKind::BrokenPipe)
}

/// Answers a source that compares, whose first byte is read.
pub(super) async fn answer(mut stream: UnixStream, channels: &Channels) -> Result<()> {
    stream.write_u8(COMPARE).await?;
    let images: Vec<BaseImage> = timeout(SILENCE, receive(&mut stream)).await??;
    let mut reading = std::pin::pin!(channels.inner.fingerprints.all(&images));
    let found = loop {
        tokio::select! {
            found = &mut reading => break found,
            () = sleep(INTERVAL) => stream.write_u8(READING).await?,
            () = channels.closed(ChannelMode::Target) => return Ok(()),
        }
    };
    stream.write_u8(RESULT).await?;
    send(&mut stream, &found).await
}

fn too_long() -> Error {
    Error::new(ErrorKind::InvalidData, "the list of images is too long")
}

async fn send<T: Serialize + ?Sized>(stream: &mut UnixStream, list: &T) -> Result<()> {
    let text = serde_json::to_vec(list)?;
    let length = u32::try_from(text.len()).ok().filter(|length| *length <= LIST_LIMIT).ok_or_else(too_long)?;
    stream.write_u32(length).await?;
    stream.write_all(&text).await
}

async fn receive<T: DeserializeOwned>(stream: &mut UnixStream) -> Result<T> {
    let length = stream.read_u32().await?;
    if length > LIST_LIMIT {
        return Err(too_long());
    }
    let mut text = vec![0; length as usize];
    stream.read_exact(&mut text).await?;
    Ok(serde_json::from_slice(&text)?)
}
