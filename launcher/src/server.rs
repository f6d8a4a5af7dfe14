//! The launcher's end of the protocol: a gRPC server on a unix socket, called by the node agent alone.

use std::{path::Path, pin::Pin, time::Duration};

use api::VirtualMachineInstance;
use bytes::Bytes;
use futures::{Stream, StreamExt};
use protocol::{
    Chunk, ConsoleInput, Done, FinishRequest, HelloReply, HelloRequest, KillRequest, MAX_CHUNK, MAX_MESSAGE_SIZE,
    MachineState, PauseRequest, ResetRequest, ScreenshotReply, ScreenshotRequest, ShutdownRequest, SoftRebootRequest,
    SyncReply, SyncRequest, UnpauseRequest, WatchRequest,
    launcher_server::{Launcher, LauncherServer},
};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{UnixListener, UnixStream},
    sync::{Semaphore, mpsc},
};
use tokio_stream::wrappers::{ReceiverStream, WatchStream};
use tonic::{Request, Response, Status, Streaming};

use crate::{
    display,
    libvirt::Error,
    machine::{MachineHandle, RequestError, queue::Action},
};

/// VNC connections at a time.
const VNC_CONNECTIONS: usize = 8;
/// Chunks of a stream that may wait for a client.
const STREAM_QUEUE: usize = 4;
/// How long a console's first message may take; after it, no kept output is sent.
const FIRST_INPUT: Duration = Duration::from_secs(5);

type BoxStream<T> = Pin<Box<dyn Stream<Item = Result<T, Status>> + Send>>;

/// Opens the socket. It appears under its name when it listens: a client never meets one that refuses.
///
/// # Errors
/// When the socket cannot be made.
pub fn listen(path: &Path) -> std::io::Result<UnixListener> {
    let staging = path.with_file_name("launcher-init-sock");
    match std::fs::remove_file(&staging) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    let listener = UnixListener::bind(&staging)?;
    std::fs::rename(&staging, path)?;
    Ok(listener)
}

/// Serves the protocol until `end` is done.
///
/// # Errors
/// When the server fails.
pub async fn serve(
    listener: UnixListener,
    machine: MachineHandle,
    end: impl Future<Output = ()>,
) -> Result<(), tonic::transport::Error> {
    let own = rustix::process::getuid().as_raw();
    let incoming = tokio_stream::wrappers::UnixListenerStream::new(listener).filter(move |stream| {
        // The agent runs as root; nothing else of this pod has business here.
        let accepted = match stream {
            Ok(stream) => stream.peer_cred().is_ok_and(|peer| peer.uid() == 0 || peer.uid() == own),
            Err(_) => true,
        };
        std::future::ready(accepted)
    });
    let service = LauncherServer::new(Service { machine, vnc: Semaphore::new(VNC_CONNECTIONS).into() })
        .max_decoding_message_size(MAX_MESSAGE_SIZE)
        .max_encoding_message_size(MAX_MESSAGE_SIZE);
    tonic::transport::Server::builder()
        .max_concurrent_streams(64)
        .add_service(service)
        .serve_with_incoming_shutdown(incoming, end)
        .await
}

struct Service {
    machine: MachineHandle,
    vnc: std::sync::Arc<Semaphore>,
}

impl From<RequestError> for Status {
    fn from(error: RequestError) -> Self {
        let message = error.to_string();
        match error {
            RequestError::NoDomain | RequestError::Libvirt(Error::NoDomain) => Self::not_found(message),
            RequestError::Ended
            | RequestError::Ending
            | RequestError::NotEnded
            | RequestError::NoHello
            | RequestError::NoWayToReboot
            | RequestError::Start { lasting: true, .. } => Self::failed_precondition(message),
            RequestError::OtherMachine(_) => Self::invalid_argument(message),
            RequestError::Busy => Self::resource_exhausted(message),
            RequestError::Gone => Self::unavailable(message),
            RequestError::Libvirt(error) if error.is_transient() => Self::unavailable(message),
            RequestError::Libvirt(_) | RequestError::Start { .. } => Self::internal(message),
        }
    }
}

impl Service {
    async fn act(&self, action: Action) -> Result<Response<Done>, Status> {
        self.machine.act(action).await?;
        Ok(Response::new(Done {}))
    }
}

#[tonic::async_trait]
impl Launcher for Service {
    type WatchStream = BoxStream<MachineState>;
    type ConsoleStream = BoxStream<Chunk>;
    type VncStream = BoxStream<Chunk>;

    async fn hello(&self, request: Request<HelloRequest>) -> Result<Response<HelloReply>, Status> {
        let request = request.into_inner();
        if request.uid != self.machine.args().uid {
            return Err(Status::invalid_argument("this launcher runs another machine"));
        }
        self.machine.hello(request.capabilities_cache, request.allow_emulation).await?;
        Ok(Response::new(HelloReply { launcher_version: env!("CARGO_PKG_VERSION").into() }))
    }

    async fn sync(&self, request: Request<SyncRequest>) -> Result<Response<SyncReply>, Status> {
        let request = request.into_inner();
        let vmi: VirtualMachineInstance = serde_json::from_slice(&request.vmi)
            .map_err(|error| Status::invalid_argument(format!("the machine cannot be read: {error}")))?;
        let started = self.machine.sync(vmi, request.options.unwrap_or_default()).await?;
        Ok(Response::new(SyncReply { started }))
    }

    async fn watch(&self, _: Request<WatchRequest>) -> Result<Response<Self::WatchStream>, Status> {
        Ok(Response::new(WatchStream::new(self.machine.watch()).map(Ok).boxed()))
    }

    async fn shutdown(&self, request: Request<ShutdownRequest>) -> Result<Response<Done>, Status> {
        self.act(Action::Shutdown { grace: request.into_inner().grace_period_seconds }).await
    }

    async fn kill(&self, _: Request<KillRequest>) -> Result<Response<Done>, Status> {
        self.act(Action::Kill).await
    }

    async fn pause(&self, _: Request<PauseRequest>) -> Result<Response<Done>, Status> {
        self.act(Action::Pause).await
    }

    async fn unpause(&self, _: Request<UnpauseRequest>) -> Result<Response<Done>, Status> {
        self.act(Action::Unpause).await
    }

    async fn reset(&self, _: Request<ResetRequest>) -> Result<Response<Done>, Status> {
        self.act(Action::Reset).await
    }

    async fn soft_reboot(&self, _: Request<SoftRebootRequest>) -> Result<Response<Done>, Status> {
        self.act(Action::SoftReboot).await
    }

    async fn finish(&self, _: Request<FinishRequest>) -> Result<Response<Done>, Status> {
        self.act(Action::Finish).await
    }

    async fn console(
        &self,
        request: Request<Streaming<ConsoleInput>>,
    ) -> Result<Response<Self::ConsoleStream>, Status> {
        let console =
            self.machine.console().ok_or_else(|| Status::failed_precondition("the machine has no serial console"))?;
        let mut input = request.into_inner();
        // Answers at once: the client may wait for the stream before it sends.
        let (sender, receiver) = mpsc::channel(STREAM_QUEUE);
        tokio::spawn(async move {
            let first = match tokio::time::timeout(FIRST_INPUT, input.message()).await {
                Ok(Ok(Some(first))) => first,
                Ok(_) => return,
                Err(_) => ConsoleInput::default(),
            };
            let Some(mut attachment) = console.attach(first.replay).await else { return };
            if !first.data.is_empty() && attachment.input.send(Bytes::from(first.data)).await.is_err() {
                return;
            }
            loop {
                tokio::select! {
                    chunk = attachment.output.recv() => match chunk {
                        Some(chunk) => {
                            if sender.send(Ok(Chunk { data: chunk.to_vec() })).await.is_err() {
                                return;
                            }
                        }
                        None => {
                            let _ = sender.send(Err(Status::aborted("another console was opened"))).await;
                            return;
                        }
                    },
                    message = input.message() => match message {
                        Ok(Some(message)) if message.data.len() <= MAX_CHUNK => {
                            if attachment.input.send(Bytes::from(message.data)).await.is_err() {
                                return;
                            }
                        }
                        _ => return,
                    },
                }
            }
        });
        Ok(Response::new(ReceiverStream::new(receiver).boxed()))
    }

    async fn vnc(&self, request: Request<Streaming<Chunk>>) -> Result<Response<Self::VncStream>, Status> {
        let permit =
            self.vnc.clone().try_acquire_owned().map_err(|_| Status::resource_exhausted("too many VNC connections"))?;
        let path = self.machine.paths().vnc(&self.machine.args().uid);
        let display = UnixStream::connect(&path)
            .await
            .map_err(|error| Status::failed_precondition(format!("the machine has no display: {error}")))?;
        let (mut reader, mut writer) = display.into_split();
        let mut input = request.into_inner();
        let (sender, receiver) = mpsc::channel(STREAM_QUEUE);
        tokio::spawn(async move {
            let to_display = async {
                while let Ok(Some(chunk)) = input.message().await {
                    if chunk.data.len() > MAX_CHUNK || writer.write_all(&chunk.data).await.is_err() {
                        return;
                    }
                }
            };
            let from_display = async {
                let mut buffer = vec![0; MAX_CHUNK / 2];
                while let Ok(n) = reader.read(&mut buffer).await {
                    let data = buffer.get(..n).unwrap_or_default().to_vec();
                    if n == 0 || sender.send(Ok(Chunk { data })).await.is_err() {
                        return;
                    }
                }
            };
            tokio::select! {
                () = to_display => {}
                () = from_display => {}
            }
            drop(permit);
        });
        Ok(Response::new(ReceiverStream::new(receiver).boxed()))
    }

    async fn screenshot(&self, _: Request<ScreenshotRequest>) -> Result<Response<ScreenshotReply>, Status> {
        let (_, picture) = self.machine.screenshot().await?;
        let png = tokio::task::spawn_blocking(move || display::to_png(picture))
            .await
            .map_err(|error| Status::internal(error.to_string()))?
            .map_err(|error| Status::internal(error.to_string()))?;
        Ok(Response::new(ScreenshotReply { png }))
    }
}
