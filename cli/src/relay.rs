//! A local port for one program, connected to a stream: for viewers of displays, and for USB devices.

use bytes::Bytes;
use futures::{SinkExt, StreamExt};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpStream},
};
use tokio_tungstenite::tungstenite::Message;

use crate::{
    Error,
    subresource::{Stream, last_words, lost},
};

/// Largest piece of a stream sent in one message, in bytes.
const CHUNK: usize = 64 * 1024;

/// Takes the connection of the local program; `what` it is, for people.
pub async fn accept(listener: &TcpListener, what: &str) -> Result<TcpStream, Error> {
    let (client, _) = listener.accept().await.map_err(Error::io(format!("cannot accept the connection of {what}")))?;
    // Key presses must not wait for more of them.
    let _ = client.set_nodelay(true);
    Ok(client)
}

/// Copies until one side ends. It is an error when the machine's side does, with `why` for people.
pub async fn copy(stream: Stream, client: TcpStream, why: &str) -> Result<(), Error> {
    let closed = |error: &dyn std::fmt::Display| Error::Stream(format!("{why}: {error}"));
    let (mut to_machine, mut from_machine) = stream.split();
    let (mut read, mut write) = client.into_split();
    let up = async {
        let mut buffer = vec![0_u8; CHUNK];
        loop {
            match read.read(&mut buffer).await {
                // The program was closed: the user is done.
                Ok(0) | Err(_) => return Ok(()),
                Ok(length) => {
                    let message = Message::Binary(Bytes::copy_from_slice(&buffer[..length]));
                    to_machine.send(message).await.map_err(|error| closed(&lost(&error)))?;
                }
            }
        }
    };
    let down = async {
        while let Some(message) = from_machine.next().await {
            match message {
                Ok(Message::Binary(data)) => {
                    if write.write_all(&data).await.is_err() {
                        return Ok(());
                    }
                }
                Ok(Message::Close(frame)) => return Err(closed(&last_words(frame.as_ref()))),
                Ok(_) => {}
                Err(error) => return Err(closed(&lost(&error))),
            }
        }
        Err(closed(&"the connection was lost"))
    };
    tokio::select! {
        done = up => done,
        done = down => done,
    }
}
