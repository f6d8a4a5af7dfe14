//! `vnc`: the machine's display, through a local port to any VNC viewer, or as a picture in a file.

use std::{
    net::{IpAddr, SocketAddr},
    path::{Path, PathBuf},
    process::Stdio,
};

use bytes::Bytes;
use clap::{Args, Subcommand};
use futures::{SinkExt, StreamExt};
use http::Method;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpStream},
};
use tokio_tungstenite::tungstenite::Message;

use crate::{
    Connection, Error, machine_name,
    subresource::{Stream, last_words, lost},
};

/// Viewers looked for in PATH, and whether they take a `vnc://` address.
const VIEWERS: [(&str, bool); 5] =
    [("remote-viewer", true), ("vncviewer", false), ("xtigervncviewer", false), ("vinagre", true), ("krdc", true)];
/// Largest piece of the stream sent in one frame, in bytes.
const CHUNK: usize = 32 * 1024;

/// Options of `vnc`.
#[derive(Args)]
#[command(args_conflicts_with_subcommands = true, subcommand_negates_reqs = true)]
pub struct VncOptions {
    #[command(subcommand)]
    command: Option<VncCommand>,
    /// Name of the machine
    #[arg(value_name = "VMI", required = true)]
    vmi: Option<String>,
    /// Only open the local port and print it; start no viewer
    #[arg(long)]
    proxy_only: bool,
    /// Local port; 0 chooses a free one
    #[arg(long, default_value_t = 0)]
    port: u16,
    /// Local address to listen on
    #[arg(long, default_value = "127.0.0.1")]
    address: IpAddr,
    /// The viewer to start; default: the first of remote-viewer, vncviewer, xtigervncviewer, vinagre, krdc
    #[arg(long, value_name = "PROGRAM")]
    vnc_path: Option<PathBuf>,
    /// Save a picture of the display as PNG into this file ("-": standard output) instead
    #[arg(long, value_name = "FILE", conflicts_with_all = ["proxy_only", "vnc_path"])]
    screenshot: Option<PathBuf>,
}

#[derive(Subcommand)]
enum VncCommand {
    /// Save a picture of the display
    Screenshot {
        /// Name of the machine
        #[arg(value_name = "VMI")]
        vmi: String,
        /// File for the picture, as PNG ("-": standard output)
        #[arg(long, short)]
        file: PathBuf,
        /// Move the cursor first, to wake up the screen
        #[arg(long, short)]
        move_cursor: bool,
    },
}

pub async fn run(connection: &Connection, options: &VncOptions) -> Result<(), Error> {
    if let Some(VncCommand::Screenshot { vmi, file, move_cursor }) = &options.command {
        return screenshot(connection, machine_name(vmi)?, file, *move_cursor).await;
    }
    let name = machine_name(options.vmi.as_deref().unwrap_or_default())?;
    if let Some(file) = &options.screenshot {
        return screenshot(connection, name, file, false).await;
    }
    let path = connection.path("virtualmachineinstances", name, "vnc");
    // Opened before the port, so that a machine without display is told at once.
    let stream = connection.stream(&path).await?;
    let listener = TcpListener::bind(SocketAddr::new(options.address, options.port))
        .await
        .map_err(Error::io(format!("cannot listen on {}:{}", options.address, options.port)))?;
    let address = listener.local_addr().map_err(Error::io("cannot tell the local port"))?;
    if options.proxy_only {
        println!("{}", serde_json::json!({"port": address.port()}));
        let client = accept(&listener).await?;
        return copy(stream, client).await;
    }
    let mut viewer = start_viewer(options.vnc_path.as_deref(), address)?;
    let client = tokio::select! {
        client = accept(&listener) => client?,
        status = viewer.wait() => {
            let status = status.map_err(Error::io("cannot wait for the viewer"))?;
            return Err(Error::Stream(format!("the viewer ended before it connected ({status})")));
        }
    };
    drop(listener);
    let copied = copy(stream, client).await;
    let _ = viewer.kill().await;
    copied
}

async fn accept(listener: &TcpListener) -> Result<TcpStream, Error> {
    let (client, _) = listener.accept().await.map_err(Error::io("cannot accept a viewer's connection"))?;
    // Key presses must not wait for more of them.
    let _ = client.set_nodelay(true);
    Ok(client)
}

fn start_viewer(chosen: Option<&Path>, address: SocketAddr) -> Result<tokio::process::Child, Error> {
    let found = match chosen {
        Some(program) => {
            let url = program.file_name().is_some_and(|n| VIEWERS.iter().any(|(v, url)| *url && n == *v));
            Some((program.to_owned(), url))
        }
        None => VIEWERS.iter().find_map(|(viewer, url)| in_path(viewer).map(|program| (program, *url))),
    };
    let Some((program, url)) = found else {
        let names: Vec<&str> = VIEWERS.iter().map(|(viewer, _)| *viewer).collect();
        return Err(Error::Usage(format!(
            "no VNC viewer found in PATH ({}): install one, name one with --vnc-path, or use --proxy-only",
            names.join(", ")
        )));
    };
    // vncviewer takes a single colon for a display number, two for a port.
    let argument = if url { format!("vnc://{address}") } else { format!("{}::{}", address.ip(), address.port()) };
    tokio::process::Command::new(&program)
        .arg(argument)
        .stdin(Stdio::null())
        .kill_on_drop(true)
        .spawn()
        .map_err(Error::io(format!("cannot start the viewer {}", program.display())))
}

fn in_path(program: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH")?;
    std::env::split_paths(&path).map(|dir| dir.join(program)).find(|candidate| candidate.is_file())
}

async fn copy(stream: Stream, client: TcpStream) -> Result<(), Error> {
    let (mut to_machine, mut from_machine) = stream.split();
    let (mut read, mut write) = client.into_split();
    let up = async {
        let mut buffer = vec![0_u8; CHUNK];
        loop {
            match read.read(&mut buffer).await {
                // The viewer was closed: the user is done.
                Ok(0) | Err(_) => return Ok(()),
                Ok(length) => {
                    let message = Message::Binary(Bytes::copy_from_slice(&buffer[..length]));
                    to_machine
                        .send(message)
                        .await
                        .map_err(|e| Error::Stream(format!("the display was closed: {}", lost(&e))))?;
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
                Ok(Message::Close(frame)) => {
                    return Err(Error::Stream(format!("the display was closed: {}", last_words(frame.as_ref()))));
                }
                Ok(_) => {}
                Err(error) => return Err(Error::Stream(format!("the display was closed: {}", lost(&error)))),
            }
        }
        Err(Error::Stream("the display was closed: the connection was lost".into()))
    };
    tokio::select! {
        done = up => done,
        done = down => done,
    }
}

async fn screenshot(connection: &Connection, name: &str, file: &Path, move_cursor: bool) -> Result<(), Error> {
    let path = connection.path("virtualmachineinstances", name, "vnc/screenshot");
    let picture = connection.call(Method::GET, &format!("{path}?moveCursor={move_cursor}"), Vec::new()).await?;
    if file == Path::new("-") {
        use std::io::Write;
        return std::io::stdout().write_all(&picture).map_err(Error::io("cannot write to standard output"));
    }
    tokio::fs::write(file, &picture).await.map_err(Error::io(format!("cannot write {}", file.display())))
}
