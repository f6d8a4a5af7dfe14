//! A local port for one program, connected to a stream: for viewers of displays, and for USB devices.

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
    subresource::{last_words, lost},
};

/// Largest piece of a stream sent in one message, in bytes.
const CHUNK: usize = 64 * 1024;

/// Most that a machine may say before the local program has come. What speaks first here says some hundred bytes.
const MAX_EARLY: usize = 64 * 1024;

/// The connection of the local program, and what the machine said before it came.
pub struct Client {
    connection: TcpStream,
    early: Vec<u8>,
}

/// Takes the connection of the local program (`what` it is, for people), however long it takes to come. Meanwhile the
/// stream is read: so that pings are answered, and that its end is told (`why`) when it happens.
pub async fn accept<S>(
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
    // Key presses must not wait for more of them.
    let _ = connection.set_nodelay(true);
    Ok(Client { connection, early })
}

/// The bytes that a message carries: none where it only keeps the stream alive.
fn bytes(message: Option<Result<Message, tungstenite::Error>>, why: &str) -> Result<Bytes, Error> {
    let ended = match message {
        Some(Ok(Message::Binary(data))) => return Ok(data),
        Some(Ok(Message::Close(frame))) => last_words(frame.as_ref()),
        Some(Ok(_)) => return Ok(Bytes::new()),
        Some(Err(error)) => lost(&error),
        None => "the connection was lost".to_owned(),
    };
    Err(Error::Stream(format!("{why}: {ended}")))
}

/// Copies until one side ends. It is an error when the machine's side does, with `why` for people.
pub async fn copy<S>(stream: WebSocketStream<S>, client: Client, why: &str) -> Result<(), Error>
where
    S: AsyncRead + AsyncWrite + Unpin,
{
    let (mut to_machine, mut from_machine) = stream.split();
    let Client { connection, early } = client;
    let (mut read, mut write) = connection.into_split();
    let up = async {
        let mut buffer = vec![0_u8; CHUNK];
        loop {
            match read.read(&mut buffer).await {
                // The program was closed: the user is done.
                Ok(0) | Err(_) => return Ok(()),
                Ok(length) => {
                    let message = Message::Binary(Bytes::copy_from_slice(&buffer[..length]));
                    let sent = to_machine.send(message).await;
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
            data = bytes(from_machine.next().await, why)?;
        }
    };
    tokio::select! {
        done = up => done,
        done = down => done,
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::{DuplexStream, duplex};
    use tokio_tungstenite::tungstenite::protocol::{CloseFrame, Role, frame::coding::CloseCode};

    use super::*;

    /// A port, a stream, and the machine's end of the stream.
    async fn ends() -> (TcpListener, WebSocketStream<DuplexStream>, WebSocketStream<DuplexStream>) {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let (near, far) = duplex(64 << 10);
        let stream = WebSocketStream::from_raw_socket(near, Role::Client, None).await;
        (listener, stream, WebSocketStream::from_raw_socket(far, Role::Server, None).await)
    }

    #[tokio::test]
    async fn while_a_program_is_waited_for_pings_are_answered_and_nothing_is_lost() {
        let (listener, mut stream, mut machine) = ends().await;
        let address = listener.local_addr().unwrap();
        let relayed = tokio::spawn(async move {
            let client = accept(&listener, &mut stream, "a viewer", "closed").await?;
            copy(stream, client, "closed").await
        });
        machine.send(Message::Binary(Bytes::from_static(b"RFB 003.008\n"))).await.unwrap();
        machine.send(Message::Ping(Bytes::new())).await.unwrap();
        assert!(machine.next().await.unwrap().unwrap().is_pong());
        let mut viewer = TcpStream::connect(address).await.unwrap();
        let mut greeting = [0; 12];
        viewer.read_exact(&mut greeting).await.unwrap();
        assert_eq!(&greeting, b"RFB 003.008\n");
        viewer.write_all(b"key").await.unwrap();
        assert_eq!(machine.next().await.unwrap().unwrap(), Message::Binary(Bytes::from_static(b"key")));
        drop(viewer);
        assert!(relayed.await.unwrap().is_ok());
    }

    #[tokio::test]
    async fn end_of_the_stream_is_told_before_a_program_has_come() {
        let (listener, mut stream, mut machine) = ends().await;
        machine.close(Some(CloseFrame { code: CloseCode::Away, reason: "taken".into() })).await.unwrap();
        let error = accept(&listener, &mut stream, "a viewer", "the display was closed").await.err().unwrap();
        assert_eq!(error.to_string(), "the display was closed: taken");
    }
}
