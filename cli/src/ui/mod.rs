//! `ui`: serves a page on a local port that lists VMs, and opens their consoles and displays in the browser.
//!
//! The pages act with the rights of the user of the kubeconfig. [`guard`] keeps other pages and other users of the host from
//! them, the pages load nothing from other servers, and texts of the cluster become text nodes only.

mod files;
mod guard;
mod launch;
mod route;
mod rows;
mod server;
mod watch;

use std::{convert::Infallible, net::Ipv4Addr, sync::Arc, time::Duration};

use clap::Args;
use hyper::{server::conn::http1, service::service_fn};
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::{
    net::{TcpListener, TcpStream},
    signal::unix::{SignalKind, signal},
    sync::{OwnedSemaphorePermit, Semaphore},
};

use crate::{Connection, Error};
use files::Files;
use guard::Guard;
use server::Server;

/// Limits concurrent connections of browsers. A page loads from at most six at a time; each stream has one.
const MAX_CONNECTIONS: usize = 64;
/// Limits the head of a request.
const MAX_HEAD: usize = 16 * 1024;
/// Time limit for the head of a request, and for a connection without one.
const HEAD_TIMEOUT: Duration = Duration::from_secs(30);

/// Options of `ui`.
#[derive(Args)]
pub(crate) struct UiOptions {
    /// List the VMs of all namespaces
    #[arg(long, short = 'A')]
    all_namespaces: bool,
    /// Local port; 0 chooses a free one
    #[arg(long, default_value_t = 0)]
    port: u16,
    /// Only print the URL, without opening it in the browser
    #[arg(long)]
    no_open: bool,
}

/// Serves the pages until the user interrupts the command.
pub(crate) async fn run(connection: Connection, options: &UiOptions) -> Result<(), Error> {
    let failed = || Error::io(format!("cannot listen on {}:{}", Ipv4Addr::LOCALHOST, options.port));
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, options.port)).await.map_err(failed())?;
    let port = listener.local_addr().map_err(failed())?.port();
    let namespace = (!options.all_namespaces).then(|| connection.namespace.clone());
    let server = Server { guard: Guard::new(port)?, files: Files::load()?, connection, namespace };
    let url = server.guard.url();
    say!("The web console is at {url}")?;
    eprintln!("Everybody who knows this URL on this host has your rights in the cluster. Press Ctrl+C to end.");
    let bookmark = if options.no_open { None } else { Some(launch::browser(&url)) };
    if let Some(Err(error)) = &bookmark {
        eprintln!("open the URL in a browser: {error}");
    }
    let mut terminate = signal(SignalKind::terminate()).map_err(Error::io("cannot watch for SIGTERM"))?;
    tokio::select! {
        ended = accept(&listener, Arc::new(server)) => ended,
        _ = tokio::signal::ctrl_c() => Ok(()),
        _ = terminate.recv() => Ok(()),
    }
}

async fn accept(listener: &TcpListener, server: Arc<Server>) -> Result<(), Error> {
    let slots = Arc::new(Semaphore::new(MAX_CONNECTIONS));
    loop {
        let Ok(permit) = slots.clone().acquire_owned().await else { return Ok(()) };
        let (client, _) = listener.accept().await.map_err(Error::io("cannot accept a connection"))?;
        tokio::spawn(serve(client, server.clone(), Arc::new(permit)));
    }
}

/// Serves a connection of a browser.
async fn serve(client: TcpStream, server: Arc<Server>, permit: Arc<OwnedSemaphorePermit>) {
    // Key presses must be sent without delay.
    let _ = client.set_nodelay(true);
    let service = service_fn(move |request| {
        let answer = server.clone().answer(request, permit.clone());
        async move { Ok::<_, Infallible>(answer.await) }
    });
    let mut connection = http1::Builder::new();
    connection.timer(TokioTimer::new()).header_read_timeout(HEAD_TIMEOUT).max_buf_size(MAX_HEAD);
    // Browsers end connections as they like.
    let _ = connection.serve_connection(TokioIo::new(client), service).with_upgrades().await;
}

#[cfg(test)]
mod tests;
