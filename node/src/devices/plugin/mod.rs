//! kubelet device plugins for the devices of launcher pods.
//!
//! One plugin per resource: for the devices that every launcher opens ([`shared`]), and for those that the cluster
//! configuration permits ([`permitted`]).
//!
//! ```text
//!             kubelet.sock appears               kubelet answers
//!   waiting ------------------------> serving ------------------------> registered
//!      ^                                 | refused, no answer                |
//!      |                                 v                                   | kubelet.sock or the plugin's own
//!      +------------------------ pause (1, 2, 5, 10 s) <---------------------+ socket is another one or gone
//! ```

pub(crate) mod offers;
mod permitted;
mod server;
mod shared;

use std::{
    path::{Path, PathBuf},
    pin::Pin,
    sync::Arc,
    time::Duration,
};

use daemon::{backoff, config::ConfigHandle, errors};
use futures::Stream;
use hyper_util::rt::TokioIo;
use tokio::{
    sync::watch,
    task::{JoinError, JoinSet},
    time::sleep,
};
use tokio_stream::wrappers::UnixListenerStream;
use tokio_util::sync::CancellationToken;
use tonic::transport::{Endpoint, Server};

pub(crate) use self::offers::{Offers, Registration, all_known, changed};
use self::{
    offers::update,
    server::Plugin,
    v1beta1::{
        ContainerAllocateResponse, DevicePluginOptions, RegisterRequest, device_plugin_server::DevicePluginServer,
        registration_client::RegistrationClient,
    },
};
use crate::{
    devices::USERFAULTFD,
    safe_dir::{Error as PathError, SafeDir, Stat},
};

/// kubelet's device plugin API.
#[allow(
    missing_docs,
    unreachable_pub,
    clippy::all,
    reason = "generated from the proto file, which holds the documentation"
)]
mod v1beta1 {
    tonic::include_proto!("v1beta1");
}

const API_VERSION: &str = "v1beta1";
const KUBELET_SOCKET: &str = "kubelet.sock";
/// Limit of the registration with kubelet.
const REGISTER_TIMEOUT: Duration = Duration::from_secs(5);
/// First and longest pause after failures.
const BACKOFF: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(10));
/// Interval of checks for a new kubelet socket, if inotify reports nothing.
const SOCKET_RECHECK: Duration = Duration::from_secs(5);

/// Directories, and the number of units.
#[derive(Clone, Debug)]
pub(crate) struct Config {
    /// kubelet's directory for device plugins.
    pub plugins_dir: PathBuf,
    /// The node's `/dev`.
    pub dev_dir: PathBuf,
    /// The node's `/sys`.
    pub sys_dir: PathBuf,
    /// Units of each shared resource, if the cluster configuration contains no number.
    pub max_devices: u32,
}

/// The current units, then those after each change.
type Units = Pin<Box<dyn Stream<Item = Vec<v1beta1::Device>> + Send>>;

/// A resource that is offered to kubelet.
trait Resource: Send + Sync + 'static {
    /// Returns the name of the resource that pods request.
    fn resource(&self) -> &str;

    /// Returns the name of the plugin's socket.
    fn socket(&self) -> String;

    /// Streams the units.
    fn units(&self) -> Units;

    /// Returns the devices of a container to which kubelet allocated these units.
    fn allocate(&self, units: &[String]) -> Result<ContainerAllocateResponse, NotAllocated>;
}

/// A unit that kubelet allocates does not exist or cannot be used.
#[derive(Debug, thiserror::Error)]
#[error("unit {0} cannot be used")]
struct NotAllocated(String);

/// Reason why a plugin is not registered.
#[derive(Debug, thiserror::Error)]
enum Error {
    #[error(transparent)]
    Path(#[from] PathError),
    #[error("kubelet cannot be reached")]
    Transport(#[from] tonic::transport::Error),
    #[error("kubelet refused the plugin: {}", .0.message())]
    Refused(#[source] Box<tonic::Status>),
    #[error("the plugin's server ended")]
    Server,
}

/// Offers the resources to kubelet until `stop`, that of post-copy only while it is permitted. `offers` contains the state of the shared resources only: a node whose
/// permitted devices are not known yet has none of them for the scheduler.
pub(crate) async fn run(
    config: Config,
    cluster: ConfigHandle,
    post_copy: watch::Receiver<bool>,
    offers: watch::Sender<Offers>,
    stop: CancellationToken,
) {
    let mut plugins = JoinSet::new();
    for device in shared::RESOURCES {
        // All resources are known before the first one is registered.
        update(&offers, &device.resource(), |_| {});
    }
    for device in shared::RESOURCES {
        // Without its sender a receiver keeps the value.
        let permitted = if device == USERFAULTFD { post_copy.clone() } else { watch::channel(true).1 };
        let (config, cluster, offers, stop) = (config.clone(), cluster.clone(), offers.clone(), stop.clone());
        plugins.spawn(shared::run(device, config, cluster, permitted, offers, stop));
    }
    plugins.spawn(permitted::run(config, cluster, stop));
    while let Some(ended) = plugins.join_next().await {
        rethrow(ended);
    }
}

/// Passes on the panic of a plugin, so that the process exits.
fn rethrow(ended: Result<(), JoinError>) {
    if let Err(error) = ended
        && let Ok(panic) = error.try_into_panic()
    {
        std::panic::resume_unwind(panic);
    }
}

/// Offers one resource until `stop`.
async fn offer(what: Arc<dyn Resource>, plugins_dir: &Path, offers: &watch::Sender<Offers>, stop: CancellationToken) {
    let serve = async {
        let resource = what.resource();
        let mut failures = 0_u32;
        loop {
            match session(&what, plugins_dir, offers).await {
                Ok(()) => {
                    failures = 0;
                    update(offers, resource, |offer| offer.registration = Registration::Awaited);
                    tracing::info!(resource, "kubelet restarted, the plugin registers again");
                }
                Err(error) => {
                    failures = failures.saturating_add(1);
                    let pause = backoff::pause(BACKOFF, failures);
                    let error = errors::chain(&error);
                    tracing::warn!(resource, error, ?pause, "device plugin is not registered");
                    update(offers, resource, |offer| offer.registration = Registration::Failed(error));
                    sleep(pause).await;
                }
            }
        }
    };
    tokio::select! {
        () = stop.cancelled() => {}
        () = serve => {}
    }
    // kubelet keeps the units of an ended plugin for a while: long enough for the next virt-handler.
    if let Ok(directory) = SafeDir::trusted(plugins_dir) {
        let _ = directory.remove_file(what.socket());
    }
}

/// Serves the plugin and registers it. Returns when kubelet restarts.
async fn session(what: &Arc<dyn Resource>, plugins_dir: &Path, offers: &watch::Sender<Offers>) -> Result<(), Error> {
    let directory = SafeDir::trusted(plugins_dir)?;
    directory.wait_for(KUBELET_SOCKET, Duration::MAX).await?;
    // Subscribed before the first look, so that no change is missed.
    let mut changes = directory.changes();
    let listener = directory.listen(what.socket(), 0o600)?;
    let before = sockets(&directory, &what.socket());
    let server = Server::builder()
        .add_service(DevicePluginServer::new(Plugin::new(what.clone())))
        .serve_with_incoming(UnixListenerStream::new(listener));
    let registration = async {
        register(&directory, &**what).await?;
        tracing::info!(resource = what.resource(), "device plugin is registered");
        update(offers, what.resource(), |offer| offer.registration = Registration::Done);
        while sockets(&directory, &what.socket()) == before {
            changes.changed(SOCKET_RECHECK).await;
        }
        Ok(())
    };
    // kubelet connects to the plugin during the registration: both have to run.
    tokio::select! {
        ended = server => { ended?; Err(Error::Server) }
        done = registration => done,
    }
}

/// Identifies kubelet's socket and the plugin's own. A starting kubelet removes both.
fn sockets(directory: &SafeDir, own: &str) -> [Option<(u64, (i64, u64))>; 2] {
    let identity = |stat: Stat| (stat.inode, stat.modified);
    [directory.stat(KUBELET_SOCKET).ok().map(identity), directory.stat(own).ok().map(identity)]
}

async fn register(directory: &SafeDir, what: &dyn Resource) -> Result<(), Error> {
    let directory = directory.clone();
    // The address is not used: the connector opens the socket.
    let channel = Endpoint::from_static("http://kubelet")
        .connect_timeout(REGISTER_TIMEOUT)
        .timeout(REGISTER_TIMEOUT)
        .connect_with_connector(tower::service_fn(move |_| {
            let directory = directory.clone();
            async move { directory.connect(KUBELET_SOCKET, REGISTER_TIMEOUT).await.map(TokioIo::new) }
        }))
        .await?;
    let request = RegisterRequest {
        version: API_VERSION.to_owned(),
        endpoint: what.socket(),
        resource_name: what.resource().to_owned(),
        options: Some(DevicePluginOptions::default()),
    };
    RegistrationClient::new(channel).register(request).await.map_err(|status| Error::Refused(Box::new(status)))?;
    Ok(())
}

/// Returns the permissions of the device control group: read and write with cgroup v1; also mknod with v2, where runtimes
/// create the nodes after the rules are active.
fn device_permissions() -> &'static str {
    let unified = SafeDir::trusted(Path::new("/sys/fs/cgroup"))
        .and_then(|root| root.exists("cgroup.controllers"))
        .unwrap_or(false);
    if unified { "rwm" } else { "rw" }
}

#[cfg(test)]
mod tests;
