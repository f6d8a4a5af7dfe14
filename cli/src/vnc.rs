//! `vnc`: opens the display of a VMI in a VNC viewer through a local port, or saves a screenshot.

use std::{
    net::{IpAddr, SocketAddr},
    path::{Path, PathBuf},
    process::Stdio,
};

use clap::{Args, Subcommand};
use http::Method;
use tokio::net::TcpListener;

use crate::{
    Connection, Error,
    cluster::{VERBOSITY_COMMAND_OUTPUT, VERBOSITY_COMMANDS},
    object_name,
    option_value::local_address,
    relay,
};

/// Viewers searched in PATH, each with true if it accepts a `vnc://` address.
const VIEWERS: [(&str, bool); 5] =
    [(REMOTE_VIEWER, true), ("vncviewer", false), ("xtigervncviewer", false), ("vinagre", true), ("krdc", true)];
const REMOTE_VIEWER: &str = "remote-viewer";
const CLOSED: &str = "the display was closed";

/// Options of `vnc`.
#[derive(Args)]
#[command(args_conflicts_with_subcommands = true, subcommand_negates_reqs = true)]
pub(crate) struct VncOptions {
    #[command(subcommand)]
    command: Option<VncCommand>,
    /// Name of the VirtualMachineInstance
    #[arg(value_name = "VMI", required = true)]
    vmi: Option<String>,
    /// Only open the local port and print it, without starting a viewer
    #[arg(long)]
    proxy_only: bool,
    /// Local port; 0 chooses a free one
    #[arg(long, default_value_t = 0)]
    port: u16,
    /// Local address to listen on
    #[arg(long, default_value = "127.0.0.1", value_parser = local_address)]
    address: IpAddr,
    /// Keep an existing session: fail if another user has the display open
    #[arg(long)]
    preserve_session: bool,
    /// The viewer to start; default: the first of remote-viewer, vncviewer, xtigervncviewer, vinagre, krdc
    #[arg(long, value_name = "PROGRAM")]
    vnc_path: Option<PathBuf>,
    /// Save a screenshot as PNG to this file ("-": standard output) instead
    #[arg(long, value_name = "FILE", conflicts_with_all = ["proxy_only", "vnc_path"])]
    screenshot: Option<PathBuf>,
}

#[derive(Subcommand)]
enum VncCommand {
    /// Save a screenshot of the display
    Screenshot {
        /// Name of the VirtualMachineInstance
        #[arg(value_name = "VMI")]
        vmi: String,
        /// File for the screenshot as PNG ("-": standard output)
        #[arg(long, short)]
        file: PathBuf,
        /// Has no effect: the screenshot shows the screen as it is
        #[arg(long, short)]
        move_cursor: bool,
    },
}

pub(crate) async fn run(connection: &Connection, options: &VncOptions) -> Result<(), Error> {
    if let Some(VncCommand::Screenshot { vmi, file, move_cursor }) = &options.command {
        if *move_cursor {
            eprintln!("--move-cursor has no effect: the screenshot shows the screen as it is");
        }
        return screenshot(connection, object_name(vmi)?, file).await;
    }
    let name = object_name(options.vmi.as_deref().unwrap_or_default())?;
    if let Some(file) = &options.screenshot {
        return screenshot(connection, name, file).await;
    }
    let subresource = if options.preserve_session { "vnc?preserveSession=true" } else { "vnc" };
    let path = connection.path("virtualmachineinstances", name, subresource);
    // The stream is opened before the port so that a VMI without display fails at once.
    let mut stream = connection.stream_of(name, false, &path).await?;
    let listener = TcpListener::bind(SocketAddr::new(options.address, options.port))
        .await
        .map_err(Error::io(format!("cannot listen on {}:{}", options.address, options.port)))?;
    let address = listener.local_addr().map_err(Error::io("cannot determine the local port"))?;
    if options.proxy_only {
        say!("{}", serde_json::json!({"port": address.port()}))?;
        let client = relay::accept(&listener, &mut stream, "a viewer", CLOSED).await?;
        return relay::copy(stream, client, CLOSED).await;
    }
    let mut viewer = start_viewer(options.vnc_path.as_deref(), address, connection.verbosity)?;
    let client = tokio::select! {
        client = relay::accept(&listener, &mut stream, "a viewer", CLOSED) => client?,
        status = viewer.wait() => {
            let status = status.map_err(Error::io("cannot wait for the viewer"))?;
            return Err(Error::Stream(format!("the viewer ended before it connected ({status})")));
        }
    };
    drop(listener);
    let copied = relay::copy(stream, client, CLOSED).await;
    let _ = viewer.kill().await;
    copied
}

fn start_viewer(chosen: Option<&Path>, address: SocketAddr, verbosity: u8) -> Result<tokio::process::Child, Error> {
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
            "no VNC viewer found in PATH ({}): install one, set --vnc-path, or use --proxy-only",
            names.join(", ")
        )));
    };
    // vncviewer reads one colon as display number and two as port.
    let argument = if url { format!("vnc://{address}") } else { format!("{}::{}", address.ip(), address.port()) };
    let mut command = tokio::process::Command::new(&program);
    command.arg(argument).stdin(Stdio::null()).kill_on_drop(true);
    if verbosity >= VERBOSITY_COMMAND_OUTPUT && program.file_name().is_some_and(|name| name == REMOTE_VIEWER) {
        command.arg("--debug");
    }
    if verbosity >= VERBOSITY_COMMANDS {
        eprintln!("running: {:?}", command.as_std());
    }
    command.spawn().map_err(Error::io(format!("cannot start the viewer {}", program.display())))
}

fn in_path(program: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH")?;
    std::env::split_paths(&path).map(|dir| dir.join(program)).find(|candidate| candidate.is_file())
}

async fn screenshot(connection: &Connection, name: &str, file: &Path) -> Result<(), Error> {
    let path = connection.path("virtualmachineinstances", name, "vnc/screenshot");
    let picture = match connection.call(Method::GET, &path, Vec::new()).await {
        Err(error) => return Err(connection.explain(name, false, error).await),
        Ok(picture) => picture,
    };
    if file == Path::new("-") {
        use std::io::Write;
        return std::io::stdout().write_all(&picture).map_err(Error::io("cannot write to standard output"));
    }
    tokio::fs::write(file, &picture).await.map_err(Error::io(format!("cannot write {}", file.display())))
}
