//! `port-forward`: forwards local ports to a guest.
//!
//! Each local connection has its own stream. A message without bytes reports that one side has closed its half of the
//! connection; the other half stays open. The client requests these messages when it opens the stream. A server that does
//! not support them closes the stream instead.

use std::{
    collections::HashMap,
    net::{IpAddr, SocketAddr},
    sync::Arc,
    time::Duration,
};

use bytes::{Bytes, BytesMut};
use clap::{ArgAction, Args};
use futures::{SinkExt, StreamExt};
use tokio::{
    io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt},
    net::{TcpListener, TcpStream, UdpSocket},
    sync::{Semaphore, mpsc},
    task::JoinSet,
};
use tokio_tungstenite::{
    WebSocketStream,
    tungstenite::{Message, protocol::frame::coding::CloseCode},
};

use crate::{
    Connection, Error, Kind,
    option_value::local_address,
    subresource::{Stream, lost},
    target::Target,
    terminal::input,
};

/// Largest message of a stream, in bytes.
const CHUNK: usize = 64 * 1024;
/// Limits concurrent local connections.
const MAX_CONNECTIONS: usize = 128;
/// Limits queued datagrams. Further datagrams are dropped.
const MAX_DATAGRAMS: usize = 64;
/// Time limit for sending the close frame.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(1);
/// Largest port of a VSOCK that can be connected to. The next number means any port.
const MAX_VSOCK_PORT: u32 = u32::MAX - 1;
/// Idle time after which a local sender of datagrams is forgotten.
const DATAGRAM_IDLE: Duration = Duration::from_secs(60);

/// Causes of errors about a guest that boots or has no program on the port.
const UNANSWERED: [&str; 3] = ["No route to host", "Connection refused", "timed out"];

/// Options of `port-forward`.
#[derive(Args)]
pub(crate) struct ForwardOptions {
    /// Target: TYPE/NAME[/NAMESPACE], where TYPE is vm or vmi
    #[arg(value_name = "TARGET")]
    target: String,
    /// Ports: [PROTOCOL/]LOCAL[:TARGET], where PROTOCOL is tcp (default) or udp; local port 0 chooses a free one
    #[arg(value_name = "PORT", required = true)]
    ports: Vec<String>,
    /// Forward standard input and output instead of a local port; takes a single port
    #[arg(long)]
    stdio: bool,
    /// Local address to listen on
    #[arg(long, default_value = "127.0.0.1", value_parser = local_address)]
    address: IpAddr,
    /// Connect to VSOCK ports of the VMI, which need no network; TCP only
    #[arg(long)]
    vsock: bool,
    /// Require TLS of the program on the VSOCK port
    #[arg(long, action = ArgAction::Set, num_args = 0..=1, require_equals = true, default_value_t = true, default_missing_value = "true")]
    vsock_tls: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Protocol {
    Tcp,
    Udp,
    /// A byte stream as TCP. Its end in one direction ends both.
    Vsock,
}

impl Protocol {
    fn word(self) -> &'static str {
        match self {
            Self::Tcp => "tcp",
            Self::Udp => "udp",
            Self::Vsock => "vsock",
        }
    }
}

/// A forwarded port.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Port {
    protocol: Protocol,
    /// `None`: the port of the guest, which is no number of a local port.
    local: Option<u16>,
    remote: u32,
}

impl Port {
    fn parse(argument: &str, vsock: bool) -> Result<Self, Error> {
        let wrong = || Error::Usage(format!("{argument:?} is not of the form [PROTOCOL/]LOCAL[:TARGET]"));
        let (protocol, ports) = match argument.split_once('/') {
            None => (Protocol::Tcp, argument),
            Some((protocol, ports)) => match protocol.to_ascii_lowercase().as_str() {
                "tcp" => (Protocol::Tcp, ports),
                "udp" => (Protocol::Udp, ports),
                _ => return Err(Error::Usage(format!("unknown protocol {protocol:?}: use tcp or udp"))),
            },
        };
        let protocol = match (protocol, vsock) {
            (Protocol::Udp, true) => return Err(Error::Usage("only tcp is supported over VSOCK".into())),
            (_, true) => Protocol::Vsock,
            (protocol, false) => protocol,
        };
        let largest = if vsock { MAX_VSOCK_PORT } else { u32::from(u16::MAX) };
        let (local, remote) = match ports.split_once(':') {
            None => (None, ports),
            Some((local, remote)) => (Some(local.parse::<u16>().map_err(|_| wrong())?), remote),
        };
        let remote = remote.parse::<u32>().ok().filter(|port| (1..=largest).contains(port)).ok_or_else(wrong)?;
        let local = local.or_else(|| u16::try_from(remote).ok());
        Ok(Self { protocol, local, remote })
    }

    /// Returns the local port.
    fn local(&self) -> Result<u16, Error> {
        self.local.ok_or_else(|| {
            let remote = self.remote;
            Error::Usage(format!("port {remote} is no local port: choose one with LOCAL:{remote}, or use --stdio"))
        })
    }

    /// Returns the subresource for connections.
    fn subresource(&self, tls: bool) -> String {
        match self.protocol {
            Protocol::Vsock => format!("vsock?port={}&tls={tls}", self.remote),
            Protocol::Tcp | Protocol::Udp => format!("portforward/{}/{}", self.remote, self.protocol.word()),
        }
    }
}

/// Port of a guest.
#[derive(Clone)]
struct Remote {
    connection: Arc<Connection>,
    target: Target,
    port: u32,
    protocol: Protocol,
    path: String,
}

impl Remote {
    async fn open(&self) -> Result<Stream, Error> {
        self.stream(&self.path).await
    }

    /// Opens a stream for a connection, with half-close if it exists.
    async fn open_connection(&self) -> Result<Stream, Error> {
        match self.protocol {
            Protocol::Vsock => self.open().await,
            Protocol::Tcp | Protocol::Udp => self.stream(&format!("{}?halfClose=true", self.path)).await,
        }
    }

    async fn stream(&self, path: &str) -> Result<Stream, Error> {
        self.connection.stream_of(&self.target.name, self.target.kind == Kind::Vm, path).await
    }
}

/// Adds the likely cause to the error of a guest that does not answer.
fn with_hint(error: Error, port: u32) -> Error {
    let hinted = |message: String| {
        if !UNANSWERED.iter().any(|cause| message.contains(cause)) {
            return message;
        }
        format!(
            "{message}\nhint: the guest may still boot, or no program listens on its port {port}; for SSH, sshd must be \
             installed and run in the guest"
        )
    };
    match error {
        Error::Refused { code, message } => Error::Refused { code, message: hinted(message) },
        Error::Stream(message) => Error::Stream(hinted(message)),
        // The same causes in other errors are about the API server or a local program.
        other => other,
    }
}

pub(crate) async fn run(connection: Connection, options: &ForwardOptions) -> Result<(), Error> {
    let mut target = Target::parse(&options.target)?;
    if options.vsock {
        // The subresource exists of VMIs only.
        target.kind = Kind::Vmi;
    }
    let ports = options.ports.iter().map(|port| Port::parse(port, options.vsock)).collect::<Result<Vec<_>, _>>()?;
    let connection = Arc::new(connection.within(target.namespace.as_deref()));
    let remote = |port: &Port| Remote {
        connection: connection.clone(),
        target: target.clone(),
        port: port.remote,
        protocol: port.protocol,
        path: connection.path(target.resource(), &target.name, &port.subresource(options.vsock_tls)),
    };
    if options.stdio {
        let [port] = ports.as_slice() else {
            return Err(Error::Usage("only one port supported when forwarding to stdout".into()));
        };
        let ended = async { stdio(remote(port).open().await?, port.protocol).await }.await;
        return ended.map_err(|error| with_hint(error, port.remote));
    }
    connection.ensure_vmi(&target).await?;
    let mut forwards = JoinSet::new();
    for port in &ports {
        let wanted = SocketAddr::new(options.address, port.local()?);
        let failed = || Error::io(format!("cannot listen on {wanted}"));
        let remote = remote(port);
        let bound = match port.protocol {
            Protocol::Tcp | Protocol::Vsock => {
                let listener = TcpListener::bind(wanted).await.map_err(failed())?;
                let bound = listener.local_addr().map_err(failed())?;
                forwards.spawn(serve_tcp(listener, remote));
                bound
            }
            Protocol::Udp => {
                let socket = UdpSocket::bind(wanted).await.map_err(failed())?;
                let bound = socket.local_addr().map_err(failed())?;
                forwards.spawn(serve_udp(socket, remote));
                bound
            }
        };
        say!("Forwarding from {bound} -> {} ({})", port.remote, port.protocol.word())?;
    }
    tokio::select! {
        ended = forwards.join_next() => match ended {
            Some(Ok(Err(error))) => Err(error),
            Some(Err(error)) => Err(Error::Stream(format!("forwarding ended: {error}"))),
            Some(Ok(Ok(()))) | None => Ok(()),
        },
        _ = tokio::signal::ctrl_c() => Ok(()),
    }
}

/// Copies standard input and output. Neither can be half-closed, so the program ends when the guest closes its half. Datagrams
/// have no end, and an empty message is one of them.
async fn stdio(stream: Stream, protocol: Protocol) -> Result<(), Error> {
    let (mut to_guest, mut from_guest) = stream.split();
    let mut typed = input();
    let up = async {
        while let Some(chunk) = typed.recv().await {
            if to_guest.send(Message::Binary(Bytes::from(chunk))).await.is_err() {
                break;
            }
        }
        if protocol == Protocol::Vsock {
            return;
        }
        if protocol == Protocol::Tcp {
            let _ = to_guest.send(Message::Binary(Bytes::new())).await;
        }
        std::future::pending::<()>().await;
    };
    let mut output = tokio::io::stdout();
    let down = async {
        loop {
            match next(&mut from_guest).await? {
                Received::Bytes(data) => {
                    output.write_all(&data).await.map_err(Error::io("cannot write to standard output"))?;
                    output.flush().await.map_err(Error::io("cannot write to standard output"))?;
                }
                Received::HalfClosed if protocol == Protocol::Udp => {}
                Received::HalfClosed | Received::Closed => return Ok(()),
            }
        }
    };
    tokio::select! {
        () = up => Ok(()),
        done = down => done,
    }
}

/// Message from the guest's side of the stream.
enum Received {
    Bytes(Bytes),
    /// The guest has closed its half and still reads.
    HalfClosed,
    /// Both halves are closed.
    Closed,
}

async fn next<S>(from_guest: &mut S) -> Result<Received, Error>
where
    S: futures::Stream<Item = Result<Message, tokio_tungstenite::tungstenite::Error>> + Unpin,
{
    while let Some(message) = from_guest.next().await {
        match message.map_err(broken)? {
            Message::Binary(data) if data.is_empty() => return Ok(Received::HalfClosed),
            Message::Binary(data) => return Ok(Received::Bytes(data)),
            Message::Close(Some(frame)) if frame.code != CloseCode::Normal => {
                return Err(Error::Stream(format!("the connection was closed: {}", frame.reason)));
            }
            Message::Close(_) => return Ok(Received::Closed),
            _ => {}
        }
    }
    Ok(Received::Closed)
}

fn broken(error: tokio_tungstenite::tungstenite::Error) -> Error {
    Error::Stream(lost(&error))
}

async fn serve_tcp(listener: TcpListener, remote: Remote) -> Result<(), Error> {
    let slots = Arc::new(Semaphore::new(MAX_CONNECTIONS));
    loop {
        let Ok(slot) = slots.clone().acquire_owned().await else { return Ok(()) };
        let (local, peer) = listener.accept().await.map_err(Error::io("cannot accept a connection"))?;
        let remote = remote.clone();
        tokio::spawn(async move {
            let _slot = slot;
            let _ = local.set_nodelay(true);
            let done = match remote.open_connection().await {
                Ok(stream) => copy(stream, local, remote.protocol).await,
                Err(error) => Err(error),
            };
            if let Err(error) = done {
                eprintln!("connection of {peer}: {}", with_hint(error, remote.port));
            }
        });
    }
}

/// Copies until both halves are closed or either side fails.
async fn copy<C>(stream: WebSocketStream<C>, local: TcpStream, protocol: Protocol) -> Result<(), Error>
where
    C: AsyncRead + AsyncWrite + Unpin,
{
    let (mut to_guest, mut from_guest) = stream.split();
    let (mut read, mut write) = local.into_split();
    let done = {
        let up = send_all(&mut read, &mut to_guest, protocol);
        let down = receive_all(&mut from_guest, &mut write);
        tokio::select! {
            done = up => done,
            done = down => done,
        }
    };
    // Sends a close frame if the connection still works.
    let _ = tokio::time::timeout(CLOSE_TIMEOUT, to_guest.close()).await;
    done
}

/// Sends what the local program writes. The end of a half is no end of the copy: the program may still wait for an answer.
async fn send_all<R, S>(read: &mut R, to_guest: &mut S, protocol: Protocol) -> Result<(), Error>
where
    R: AsyncRead + Unpin,
    S: futures::Sink<Message, Error = tokio_tungstenite::tungstenite::Error> + Unpin,
{
    let mut buffer = BytesMut::new();
    loop {
        buffer.reserve(CHUNK);
        let data = match read.read_buf(&mut buffer).await {
            Ok(_) => buffer.split().freeze(),
            Err(error) => return Err(Error::io("the local program's connection was lost")(error)),
        };
        let last = data.is_empty();
        if last && protocol == Protocol::Vsock {
            return Ok(());
        }
        to_guest.send(Message::Binary(data)).await.map_err(broken)?;
        if last {
            return std::future::pending().await;
        }
    }
}

async fn receive_all<S, W>(from_guest: &mut S, write: &mut W) -> Result<(), Error>
where
    S: futures::Stream<Item = Result<Message, tokio_tungstenite::tungstenite::Error>> + Unpin,
    W: AsyncWrite + Unpin,
{
    loop {
        let written = match next(from_guest).await? {
            Received::Bytes(data) => write.write_all(&data).await,
            Received::HalfClosed => write.shutdown().await,
            Received::Closed => {
                let _ = write.shutdown().await;
                return Ok(());
            }
        };
        if written.is_err() {
            // The local program has closed its side for reading.
            return Ok(());
        }
    }
}

async fn serve_udp(socket: UdpSocket, remote: Remote) -> Result<(), Error> {
    let socket = Arc::new(socket);
    let mut senders: HashMap<SocketAddr, mpsc::Sender<Bytes>> = HashMap::new();
    let mut buffer = vec![0; CHUNK];
    loop {
        let (length, peer) = socket.recv_from(&mut buffer).await.map_err(Error::io("cannot receive a datagram"))?;
        let datagram = Bytes::copy_from_slice(&buffer[..length]);
        senders.retain(|_, sender| !sender.is_closed());
        let sender = match senders.get(&peer) {
            Some(sender) => sender.clone(),
            None if senders.len() >= MAX_CONNECTIONS => continue,
            None => {
                let (sender, receiver) = mpsc::channel(MAX_DATAGRAMS);
                let (socket, remote) = (socket.clone(), remote.clone());
                tokio::spawn(async move {
                    let done = match remote.open().await {
                        Ok(stream) => datagrams(receiver, &socket, peer, stream).await,
                        Err(error) => Err(error),
                    };
                    if let Err(error) = done {
                        eprintln!("datagrams of {peer}: {error}");
                    }
                });
                senders.insert(peer, sender.clone());
                sender
            }
        };
        // A full queue drops datagrams, as networks do.
        let _ = sender.try_send(datagram);
    }
}

/// Copies datagrams between one local sender and the guest until both are idle.
async fn datagrams<C>(
    mut receiver: mpsc::Receiver<Bytes>,
    socket: &UdpSocket,
    peer: SocketAddr,
    mut stream: WebSocketStream<C>,
) -> Result<(), Error>
where
    C: AsyncRead + AsyncWrite + Unpin,
{
    loop {
        let silence = tokio::time::sleep(DATAGRAM_IDLE);
        tokio::pin!(silence);
        // Pings keep the stream open and carry no datagram.
        let message = loop {
            tokio::select! {
                datagram = receiver.recv() => match datagram {
                    Some(datagram) => break Message::Binary(datagram),
                    None => return Ok(()),
                },
                message = stream.next() => match message {
                    Some(Ok(Message::Binary(data))) => {
                        let _ = socket.send_to(&data, peer).await;
                        silence.as_mut().reset(tokio::time::Instant::now() + DATAGRAM_IDLE);
                    }
                    Some(Ok(Message::Close(_))) | None => return Ok(()),
                    Some(Ok(_)) => {}
                    Some(Err(error)) => return Err(broken(error)),
                },
                () = &mut silence => return Ok(()),
            }
        };
        stream.send(message).await.map_err(broken)?;
    }
}

#[cfg(test)]
mod tests;
