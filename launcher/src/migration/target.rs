//! The target: channels of the other launcher are connected to libvirt's daemon and to the engine.

use std::{
    io::{Error, ErrorKind, Result},
    path::Path,
    time::Duration,
};

use protocol::channels::{CONNECTED, Channel};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::UnixStream,
    time::{Instant, sleep, timeout},
};

use super::{
    ChannelMode, Channels, Engine, images,
    source::{NO_DOMAIN, RELEASED, RUN, STAY_PAUSED},
};

/// Longest wait for the daemon, which may be restarting.
const SOCKET_LIMIT: Duration = Duration::from_secs(20);
/// Pause between attempts to connect to it.
const SOCKET_RETRY: Duration = Duration::from_millis(50);
/// Time limit of the byte of a release.
const RELEASE_BYTE: Duration = Duration::from_secs(10);

/// Connects the control channel to libvirt's daemon and relays it.
pub(super) async fn connect(channels: &Channels, mut handler: UnixStream) -> Result<()> {
    // The name that the daemon has in each launcher pod.
    let path = channels.inner.paths.libvirt_socket();
    let socket = tokio::select! {
        socket = when_it_listens(&path) => socket?,
        () = channels.closed(ChannelMode::Target) => return Ok(()),
    };
    handler.write_u8(CONNECTED).await?;
    channels.relay(ChannelMode::Target, Channel::Control, handler, socket).await;
    Ok(())
}

/// Connects to a socket as soon as it listens.
async fn when_it_listens(path: &Path) -> Result<UnixStream> {
    let limit = Instant::now() + SOCKET_LIMIT;
    loop {
        match UnixStream::connect(path).await {
            Err(error)
                if matches!(
                    error.kind(),
                    ErrorKind::NotFound | ErrorKind::ConnectionRefused | ErrorKind::WouldBlock
                ) && Instant::now() < limit =>
            {
                sleep(SOCKET_RETRY).await;
            }
            result => return result,
        }
    }
}

/// Takes the release of the other launcher and answers it once the guest runs here. Before the migration, it asks for images.
pub(super) async fn release(mut handler: UnixStream, engine: &impl Engine) -> Result<()> {
    handler.write_u8(CONNECTED).await?;
    let paused = match timeout(RELEASE_BYTE, handler.read_u8()).await?? {
        RUN => false,
        STAY_PAUSED => true,
        images::COMPARE => return images::answer(handler, engine.channels()).await,
        _ => return Err(Error::new(ErrorKind::InvalidData, "the release is unknown")),
    };
    let has_domain = engine.release(paused).await?;
    handler.write_u8(if has_domain { RELEASED } else { NO_DOMAIN }).await?;
    // The connection ends without it if the guest is not frozen.
    if has_domain && let Ok(Ok(seconds)) = timeout(RELEASE_BYTE, handler.read_u32()).await {
        engine.thaw_after(seconds);
    }
    Ok(())
}
