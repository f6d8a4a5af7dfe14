//! Devices of the node that launcher pods ask for as resources, by kubelet's device plugin API.
//!
//! One plugin a resource. The devices may be shared by any number of pods, so each resource has as many units as
//! machines may run; a unit stands for the right to have the node in the container.
//!
//! ```text
//!             kubelet.sock appears               kubelet answers
//!   waiting ------------------------> serving ------------------------> registered
//!      ^                                 | refused, no answer                |
//!      |                                 v                                   | kubelet.sock or the plugin's own
//!      +------------------------ pause (1, 2, 5, 10 s) <---------------------+ socket is another one or gone
//! ```

mod offers;
mod server;

use std::{path::PathBuf, time::Duration};

use hyper_util::rt::TokioIo;
use tokio::{sync::watch, task::JoinSet, time::sleep};
use tokio_stream::wrappers::UnixListenerStream;
use tokio_util::sync::CancellationToken;
use tonic::transport::{Endpoint, Server};

use self::{
    offers::note,
    server::Plugin,
    v1beta1::{
        DevicePluginOptions, RegisterRequest, device_plugin_server::DevicePluginServer,
        registration_client::RegistrationClient,
    },
};
use crate::{
    device_access::is_there,
    safe_dir::{Error as PathError, SafeDir, Stat},
};

pub use self::offers::{Offer, Offers, Registration, all_known, changed};

/// kubelet's device plugin API.
#[allow(missing_docs, clippy::all, reason = "generated from the proto file, which holds the documentation")]
mod v1beta1 {
    tonic::include_proto!("v1beta1");
}

/// Version of the API.
const API_VERSION: &str = "v1beta1";
/// kubelet's socket.
const KUBELET_SOCKET: &str = "kubelet.sock";
/// Longest wait for kubelet to take a connection and to answer.
const REGISTER_TIMEOUT: Duration = Duration::from_secs(5);
/// Pauses after failures, the last one repeated.
const BACKOFF: [Duration; 4] =
    [Duration::from_secs(1), Duration::from_secs(2), Duration::from_secs(5), Duration::from_secs(10)];
/// How often to look for a new socket of kubelet, should inotify have kept silent.
const SOCKET_RECHECK: Duration = Duration::from_secs(5);
/// How often to look for the devices, should inotify have kept silent.
const DEVICE_RECHECK: Duration = Duration::from_secs(30);

/// A character device that launchers use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Device {
    /// Name of the resource after `devices.kubevirt.io/`.
    pub name: &'static str,
    /// Node beneath `/dev`.
    pub node: &'static str,
    /// Major and minor number.
    pub number: (u32, u32),
    /// The node exists before its driver is loaded; opening it loads the driver.
    pub autoload: bool,
}

/// Hardware virtualization.
pub const KVM: Device = Device { name: "kvm", node: "kvm", number: (10, 232), autoload: false };
/// Tap devices.
pub const TUN: Device = Device { name: "tun", node: "net/tun", number: (10, 200), autoload: true };
/// Network devices served by the kernel.
pub const VHOST_NET: Device = Device { name: "vhost-net", node: "vhost-net", number: (10, 238), autoload: true };
/// The resources that every node has.
const RESOURCES: [Device; 3] = [KVM, TUN, VHOST_NET];

impl Device {
    /// Name of the resource that pods ask for.
    #[must_use]
    pub fn resource(&self) -> String {
        format!("devices.kubevirt.io/{}", self.name)
    }

    /// Name of the plugin's socket.
    fn socket(&self) -> String {
        format!("kubevirt-{}.sock", self.name)
    }
}

/// Where kubelet and devices are, and how many units there are.
#[derive(Clone, Debug)]
pub struct Config {
    /// kubelet's directory for device plugins.
    pub plugins_dir: PathBuf,
    /// The node's `/dev`.
    pub dev_dir: PathBuf,
    /// Units of each resource.
    pub max_devices: u32,
}

/// Why a plugin could not be offered to kubelet.
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

/// Offers the resources to kubelet until `stop`. `offers` says how each stands at present.
pub async fn run(config: Config, offers: watch::Sender<Offers>, stop: CancellationToken) {
    let mut plugins = JoinSet::new();
    for device in RESOURCES {
        // All are known of before the first is taken.
        note(&offers, &device.resource(), |_| {});
    }
    for device in RESOURCES {
        plugins.spawn(offer(device, config.clone(), offers.clone(), stop.clone()));
    }
    while plugins.join_next().await.is_some() {}
}

/// Offers one resource until `stop`.
async fn offer(device: Device, config: Config, offers: watch::Sender<Offers>, stop: CancellationToken) {
    let (health, healthy) = watch::channel(false);
    let resource = device.resource();
    let serve = async {
        let mut failures = 0;
        loop {
            match session(device, &config, &healthy, &offers).await {
                Ok(()) => {
                    failures = 0;
                    note(&offers, &resource, |offer| offer.registration = Registration::Awaited);
                    tracing::info!(%resource, "kubelet restarted, the plugin is offered again");
                }
                Err(error) => {
                    let pause = BACKOFF[failures.min(BACKOFF.len() - 1)];
                    failures += 1;
                    let source = std::error::Error::source(&error).map(ToString::to_string);
                    let why = match &source {
                        Some(source) => format!("{error}: {source}"),
                        None => error.to_string(),
                    };
                    note(&offers, &resource, |offer| offer.registration = Registration::Failed(why));
                    tracing::warn!(%resource, %error, source, ?pause, "device plugin is not registered");
                    sleep(pause).await;
                }
            }
        }
    };
    tokio::select! {
        () = stop.cancelled() => {}
        () = serve => {}
        () = watch_health(device, &config, &health, &offers) => {}
    }
    // kubelet keeps the units of a plugin that went away for a while: long enough for the next agent to take over.
    if let Ok(directory) = SafeDir::trusted(&config.plugins_dir) {
        let _ = directory.remove_file(device.socket());
    }
}

/// Serves the plugin and registers it, until kubelet starts anew.
async fn session(
    device: Device,
    config: &Config,
    healthy: &watch::Receiver<bool>,
    offers: &watch::Sender<Offers>,
) -> Result<(), Error> {
    let directory = SafeDir::trusted(&config.plugins_dir)?;
    directory.wait_for(KUBELET_SOCKET, Duration::MAX).await?;
    // Subscribed before the first look, so that no change is missed.
    let mut changes = directory.changes();
    let listener = directory.listen(device.socket(), 0o600)?;
    let before = sockets(&directory, device);
    let plugin = Plugin::new(device, config.max_devices, device_permissions(), healthy.clone());
    let server = Server::builder()
        .add_service(DevicePluginServer::new(plugin))
        .serve_with_incoming(UnixListenerStream::new(listener));
    let registration = async {
        register(&directory, device).await?;
        tracing::info!(resource = %device.resource(), "device plugin is registered");
        note(offers, &device.resource(), |offer| offer.registration = Registration::Done);
        while sockets(&directory, device) == before {
            changes.changed(SOCKET_RECHECK).await;
        }
        Ok(())
    };
    // kubelet calls back while it registers the plugin: both have to run.
    tokio::select! {
        ended = server => { ended?; Err(Error::Server) }
        done = registration => done,
    }
}

/// What tells kubelet's socket and the plugin's own from later ones of the same name. A starting kubelet removes both.
fn sockets(directory: &SafeDir, device: Device) -> [Option<(u64, (i64, u64))>; 2] {
    let identity = |stat: Stat| (stat.inode, stat.modified);
    [directory.stat(KUBELET_SOCKET).ok().map(identity), directory.stat(device.socket()).ok().map(identity)]
}

async fn register(directory: &SafeDir, device: Device) -> Result<(), Error> {
    let directory = directory.clone();
    // The address is not used: the connection goes to the socket.
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
        endpoint: device.socket(),
        resource_name: device.resource(),
        options: Some(DevicePluginOptions::default()),
    };
    RegistrationClient::new(channel).register(request).await.map_err(|status| Error::Refused(Box::new(status)))?;
    Ok(())
}

/// Follows whether the device is there.
async fn watch_health(device: Device, config: &Config, health: &watch::Sender<bool>, offers: &watch::Sender<Offers>) {
    let resource = device.resource();
    let tell = |now: bool| {
        if health.send_if_modified(|value| std::mem::replace(value, now) != now) {
            tracing::info!(%resource, healthy = now, "device changed");
        }
        note(offers, &resource, |offer| offer.healthy = Some(now));
    };
    let mut loaded = false;
    loop {
        let Ok(dev) = SafeDir::trusted(&config.dev_dir) else {
            tell(false);
            sleep(DEVICE_RECHECK).await;
            continue;
        };
        let parent = match std::path::Path::new(device.node).parent().filter(|parent| !parent.as_os_str().is_empty()) {
            Some(parent) => dev.open_dir(parent).unwrap_or_else(|_| dev.clone()),
            None => dev.clone(),
        };
        let mut changes = parent.changes();
        if device.autoload && !loaded && is_there(&dev, device) {
            loaded = true;
            if let Err(error) = dev.touch_device(device.node, device.number) {
                tracing::info!(device = device.node, %error, "driver cannot be loaded");
            }
        }
        tell(is_there(&dev, device));
        changes.changed(DEVICE_RECHECK).await;
    }
}

/// What the device control group allows: with cgroup v1 to read and write, with v2 to make the node as well (runtimes
/// make nodes after the rules are in force there).
fn device_permissions() -> &'static str {
    let unified = SafeDir::trusted(std::path::Path::new("/sys/fs/cgroup"))
        .and_then(|root| root.exists("cgroup.controllers"))
        .unwrap_or(false);
    if unified { "rwm" } else { "rw" }
}

#[cfg(test)]
mod tests;
