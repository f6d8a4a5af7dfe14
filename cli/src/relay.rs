//! Connects one local program, such as a VNC viewer or usbredirect, to a stream through a local port, and a page of a browser
//! through a WebSocket.

use std::time::Duration;

use bytes::Bytes;
use futures::{SinkExt, StreamExt};
use tokio::{
    io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt},
    net::{TcpListener, TcpStream},
};
use tokio_tungstenite::{
    WebSocketStream,
    tungstenite::{self, Message},
};

use crate::{
    Error,
    subresource::{close_reason, lost},
};

/// Largest message of a stream, in bytes.
const CHUNK: usize = 64 * 1024;

/// Time limit for sending the close frame.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(1);

/// Limits bytes buffered before the local program connects. VNC and usbredir servers send some hundred bytes first.
const MAX_EARLY: usize = 64 * 1024;

/// Connection of the local program, and the bytes received before it connected.
pub(crate) struct Client {
    connection: TcpStream,
    early: Vec<u8>,
}

/// Waits for the local program to connect, without a time limit. Reads the stream meanwhile, which answers pings and
/// detects its end. `what` and `why` become part of error messages.
pub(crate) async fn accept<S>(
    listener: &TcpListener,
    stream: &mut WebSocketStream<S>,
    what: &str,
    why: &str,
) -> Result<Client, Error>
where
    S: AsyncRead + AsyncWrite + Unpin,
{
    let mut early = Vec::new();
    let connection = loop {
        tokio::select! {
            accepted = listener.accept() => {
                let failed = Error::io(format!("cannot accept the connection of {what}"));
                break accepted.map_err(failed)?.0;
            }
            message = stream.next(), if early.len() < MAX_EARLY => early.extend_from_slice(&bytes(message, why)?),
        }
    };
    // Key presses must be sent without delay.
    let _ = connection.set_nodelay(true);
    Ok(Client { connection, early })
}

/// Returns the bytes of a message; control messages carry none.
fn bytes(message: Option<Result<Message, tungstenite::Error>>, why: &str) -> Result<Bytes, Error> {
    let ended = match message {
        Some(Ok(Message::Binary(data))) => return Ok(data),
        Some(Ok(Message::Close(frame))) => close_reason(frame.as_ref()),
        Some(Ok(_)) => return Ok(Bytes::new()),
        Some(Err(error)) => lost(&error),
        None => "the connection was lost".to_owned(),
    };
    Err(Error::Stream(format!("{why}: {ended}")))
}

/// Copies until one side ends. Fails with `why` if the server ends the stream.
pub(crate) async fn copy<S>(stream: WebSocketStream<S>, client: Client, why: &str) -> Result<(), Error>
where
    S: AsyncRead + AsyncWrite + Unpin,
{
    let (mut to_server, mut from_server) = stream.split();
    let Client { connection, early } = client;
    let (mut read, mut write) = connection.into_split();
    let up = async {
        let mut buffer = vec![0_u8; CHUNK];
        loop {
            match read.read(&mut buffer).await {
                // The user has closed the program.
                Ok(0) | Err(_) => return Ok(()),
                Ok(length) => {
                    let message = Message::Binary(Bytes::copy_from_slice(&buffer[..length]));
                    let sent = to_server.send(message).await;
                    sent.map_err(|error| Error::Stream(format!("{why}: {}", lost(&error))))?;
                }
            }
        }
    };
    let down = async {
        let mut data = Bytes::from(early);
        loop {
            if write.write_all(&data).await.is_err() {
                return Ok(());
            }
            data = bytes(from_server.next().await, why)?;
        }
    };
    tokio::select! {
        done = up => done,
        done = down => done,
    }
}

/// Copies between a stream and a page until one side ends. Fails with `why` if the server ends the stream.
pub(crate) async fn join<S, P>(
    stream: WebSocketStream<S>,
    page: &mut WebSocketStream<P>,
    why: &str,
) -> Result<(), Error>
where
    S: AsyncRead + AsyncWrite + Unpin,
    P: AsyncRead + AsyncWrite + Unpin,
{
    let (mut to_server, mut from_server) = stream.split();
    let (mut to_page, mut from_page) = page.split();
    let up = async {
        while let Some(Ok(message)) = from_page.next().await {
            let Message::Binary(mut data) = message else { continue };
            while !data.is_empty() {
                let piece = Message::Binary(data.split_to(data.len().min(CHUNK)));
                let sent = to_server.send(piece).await;
                sent.map_err(|error| Error::Stream(format!("{why}: {}", lost(&error))))?;
            }
        }
        Ok(())
    };
    let down = async {
        loop {
            let data = bytes(from_server.next().await, why)?;
            if !data.is_empty() && to_page.send(Message::Binary(data)).await.is_err() {
                return Ok(());
            }
        }
    };
    let done = tokio::select! {
        done = up => done,
        done = down => done,
    };
    // Sends a close frame if the connection still works.
    let _ = tokio::time::timeout(CLOSE_TIMEOUT, to_server.close()).await;
    done
}

#[cfg(test)]
mod tests {
    use tokio::io::{DuplexStream, duplex};
    use tokio_tungstenite::tungstenite::protocol::{CloseFrame, Role, frame::coding::CloseCode};

    use super::*;

    /// Returns a local listener, a stream and the server's end of the stream.
    async fn ends() -> (TcpListener, WebSocketStream<DuplexStream>, WebSocketStream<DuplexStream>) {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let (near, far) = duplex(64 << 10);
        let stream = WebSocketStream::from_raw_socket(near, Role::Client, None).await;
        (listener, stream, WebSocketStream::from_raw_socket(far, Role::Server, None).await)
    }

    #[tokio::test]
    async fn pings_are_answered_and_nothing_is_lost_before_the_program_connects() {
        let (listener, mut stream, mut server) = ends().await;
        let address = listener.local_addr().unwrap();
        let relayed = tokio::spawn(async move {
            let client = accept(&listener, &mut stream, "a viewer", "closed").await?;
            copy(stream, client, "closed").await
        });
        server.send(Message::Binary(Bytes::from_static(b"RFB 003.008\n"))).await.unwrap();
        server.send(Message::Ping(Bytes::new())).await.unwrap();
        assert!(server.next().await.unwrap().unwrap().is_pong());
        let mut viewer = TcpStream::connect(address).await.unwrap();
        let mut greeting = [0; 12];
        viewer.read_exact(&mut greeting).await.unwrap();
        assert_eq!(&greeting, b"RFB 003.008\n");
        viewer.write_all(b"key").await.unwrap();
        assert_eq!(server.next().await.unwrap().unwrap(), Message::Binary(Bytes::from_static(b"key")));
        drop(viewer);
        assert!(relayed.await.unwrap().is_ok());
    }

    #[tokio::test]
    async fn end_of_the_stream_is_reported_before_the_program_connects() {
        let (listener, mut stream, mut server) = ends().await;
        server.close(Some(CloseFrame { code: CloseCode::Away, reason: "taken".into() })).await.unwrap();
        let error = accept(&listener, &mut stream, "a viewer", "the display was closed").await.err().unwrap();
        assert_eq!(error.to_string(), "the display was closed: taken");
    }

    #[tokio::test]
    async fn pages_send_long_messages_in_pieces_and_learn_why_a_stream_ends() {
        let (_, stream, mut server) = ends().await;
        let (near, far) = duplex(1 << 20);
        let mut page = WebSocketStream::from_raw_socket(near, Role::Client, None).await;
        let mut local = WebSocketStream::from_raw_socket(far, Role::Server, None).await;
        let joined = tokio::spawn(async move { join(stream, &mut local, "closed").await });
        page.send(Message::Binary(Bytes::from(vec![7; CHUNK + 1]))).await.unwrap();
        for length in [CHUNK, 1] {
            assert_eq!(server.next().await.unwrap().unwrap().len(), length);
        }
        server.send(Message::Binary(Bytes::from_static(b"login:"))).await.unwrap();
        assert_eq!(page.next().await.unwrap().unwrap(), Message::Binary(Bytes::from_static(b"login:")));
        server.close(Some(CloseFrame { code: CloseCode::Away, reason: "taken".into() })).await.unwrap();
        assert_eq!(joined.await.unwrap().unwrap_err().to_string(), "closed: taken");
    }
}
