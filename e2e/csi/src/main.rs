//! `csi-driver`: the storage driver of the test cluster.
//!
//! Each process serves all services of the CSI on a socket. The one beside the API server gets the calls of provisioner,
//! resizer and snapshotter, the one of a node those of its kubelet. All use one folder, which each node of the test cluster
//! sees.
//!
//! ```text
//! DATA/volumes/ID/    record.json, content (a directory, or the file behind a loop device)
//! DATA/snapshots/ID/  record.json, content
//! DATA/locks/ID       locked while a process changes the volume or snapshot
//! ```

mod controller;
mod faults;
mod host;
mod identity;
mod mounts;
mod node;
mod record;
mod requests;
mod store;

use std::{
    fs,
    io::ErrorKind,
    path::{Path, PathBuf},
};

use anyhow::Context;
use clap::Parser;
use tokio::net::UnixListener;
use tokio_stream::wrappers::UnixListenerStream;
use tonic::transport::Server;

use self::{
    controller::Controller,
    identity::{Identity, Registration},
    node::Node,
    proto::{
        csi::v1::{controller_server::ControllerServer, identity_server::IdentityServer, node_server::NodeServer},
        pluginregistration::registration_server::RegistrationServer,
    },
    store::Store,
};

/// The generated messages and services.
#[allow(
    missing_docs,
    unreachable_pub,
    clippy::all,
    clippy::panic,
    clippy::unwrap_used,
    reason = "generated from the proto files, which hold the documentation"
)]
mod proto {
    pub mod csi {
        pub mod v1 {
            tonic::include_proto!("csi.v1");
        }
    }
    pub mod pluginregistration {
        tonic::include_proto!("pluginregistration");
    }
}

/// The storage driver of the test cluster.
#[derive(Parser)]
#[command(version)]
struct Arguments {
    /// Folder of volumes and snapshots
    #[arg(long)]
    data: PathBuf,
    /// Socket for the services of the CSI
    #[arg(long)]
    endpoint: PathBuf,
    /// Name of the node
    #[arg(long)]
    node: String,
    /// Socket for kubelet's registration of plugins
    #[arg(long)]
    registration: Option<PathBuf>,
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> anyhow::Result<()> {
    let arguments = Arguments::parse();
    let store = Store::open(&arguments.data).with_context(|| format!("opening {}", arguments.data.display()))?;
    let listener = listen(&arguments.endpoint)?;
    let services = Server::builder()
        .add_service(IdentityServer::new(Identity))
        .add_service(ControllerServer::new(Controller::new(store.clone())))
        .add_service(NodeServer::new(Node::new(store, arguments.node)))
        .serve_with_incoming(listener);
    let Some(socket) = arguments.registration else { return services.await.context("serving the CSI") };
    let registration = Server::builder()
        .add_service(RegistrationServer::new(Registration::new(&arguments.endpoint)))
        .serve_with_incoming(listen(&socket)?);
    tokio::try_join!(services, registration).map(drop).context("serving the CSI and the registration")
}

/// Listens on a socket, in place of one that a former process left.
fn listen(socket: &Path) -> anyhow::Result<UnixListenerStream> {
    if let Some(folder) = socket.parent() {
        fs::create_dir_all(folder).with_context(|| format!("creating {}", folder.display()))?;
    }
    match fs::remove_file(socket) {
        Err(error) if error.kind() != ErrorKind::NotFound => {
            return Err(error).with_context(|| format!("removing {}", socket.display()));
        }
        _ => {}
    }
    let listener = UnixListener::bind(socket).with_context(|| format!("listening on {}", socket.display()))?;
    Ok(UnixListenerStream::new(listener))
}
