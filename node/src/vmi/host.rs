//! The node, as the tasks of VMIs use it.

use std::{
    any::Any,
    net::IpAddr,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use api::VirtualMachineInstance;
use daemon::{CancellationToken, config::ConfigHandle, errors};
use protocol::{CacheFile, SmBios, VmiOptions};
use tokio::net::UnixStream;
use tonic::async_trait;

use super::migration_facts::Route;
use crate::{
    devices::grant,
    host_disks,
    launcher::capabilities,
    migration::{Channels, Migration, PodSocket, Target},
    network::{self, PodNetwork},
    safe_dir::{
        self, Peer, SafeDir,
        pod_calls::{self, PodCalls},
    },
    volumes::{Desk, Published, Volumes, Work},
};

/// The user QEMU runs as in a launcher pod.
const RUNTIME_USER: u32 = 107;

/// Context of a node without SELinux.
const NO_SELINUX: &str = "none";

/// Reason why a launcher is not connected.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum ConnectError {
    /// The pod has no socket yet.
    #[error("the launcher has no socket yet")]
    NoSocket,
    /// The pod has no directory on this node.
    #[error("the pod is not on this node")]
    NoPod,
    /// The socket exists, but does not answer or is not trusted.
    #[error("{0}")]
    Refused(String),
}

/// Reason why the pod's network was not set up.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub(crate) struct NetworkFailure {
    /// The error.
    pub message: String,
    /// No attempt can succeed.
    pub permanent: bool,
}

/// Reason why work in a pod failed.
#[derive(Debug, thiserror::Error)]
pub(crate) enum PodError {
    /// The work did not return, or was not started.
    #[error(transparent)]
    Call(#[from] pod_calls::Error),
    /// The work failed.
    #[error(transparent)]
    Path(#[from] safe_dir::Error),
    /// The file of a host disk was not created.
    #[error(transparent)]
    HostDisk(#[from] host_disks::Error),
}

/// Settings of the cluster configuration for all VMIs.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Settings {
    /// Options for launchers, without network devices.
    pub options: VmiOptions,
    /// Software emulation may be used.
    pub allow_emulation: bool,
}

/// Relays the connections of a migration until it is dropped.
pub(crate) type Relay = Box<dyn Any + Send>;

/// The node. Every call is bounded in time.
#[async_trait]
pub(crate) trait Host: Send + Sync + 'static {
    /// Returns the name of the node.
    fn name(&self) -> &str;

    /// Returns the current settings.
    fn settings(&self) -> Settings;

    /// Waits up to `within` for the launcher's socket of a pod, connects, and checks the peer.
    async fn connect(&self, pod: &str, within: Duration) -> Result<(UnixStream, Arc<Peer>), ConnectError>;

    /// Returns the SELinux label of the container of a checked launcher; `none` without SELinux, `None` if it cannot be read.
    async fn security_context(&self, launcher: &Arc<Peer>, vmi: &VirtualMachineInstance) -> Option<String>;

    /// Grants a checked launcher its devices, and returns the capabilities cache that fits it.
    async fn equip(&self, launcher: &Arc<Peer>, vmi: &VirtualMachineInstance) -> Result<Vec<CacheFile>, PodError>;

    /// Hands hot-plugged volumes to a checked launcher in this pod, and takes them back. Idempotent.
    async fn hand_volumes(
        &self,
        launcher: &Arc<Peer>,
        pod: &str,
        vmi: &VirtualMachineInstance,
        work: Work,
    ) -> Result<Volumes, PodError>;

    /// Creates the files of host disks that are missing in the pod of a checked launcher. Returns a message for each that is
    /// smaller than wanted. Idempotent.
    async fn create_host_disks(
        &self,
        launcher: &Arc<Peer>,
        vmi: &VirtualMachineInstance,
    ) -> Result<Vec<String>, PodError>;

    /// Returns the address and port under which this node accepts migrations.
    fn migration_endpoint(&self) -> Option<(IpAddr, u16)>;

    /// Returns the token that is cancelled once this virt-handler is about to stop and begins no further migration.
    fn draining(&self) -> CancellationToken;

    /// Relays the connections of a migration of this VMI until the result is dropped.
    fn relay(&self, vmi: &str, route: Route) -> Relay;

    /// Sets up the network in the launcher's pod, and gives the links of the interfaces `release` back. Idempotent.
    async fn set_up_network(
        &self,
        launcher: &Arc<Peer>,
        vmi: &Arc<VirtualMachineInstance>,
        release: &[String],
    ) -> Result<PodNetwork, NetworkFailure>;
}

/// The node this process runs on.
pub(crate) struct NodeHost {
    name: String,
    address: IpAddr,
    pods: SafeDir,
    published: Arc<Published>,
    cache: capabilities::Cache,
    devices: PathBuf,
    config: ConfigHandle,
    pod_calls: PodCalls,
    channels: Option<Channels>,
}

impl NodeHost {
    /// Returns the node `name` with virt-handler's own address, kubelet's directory, the directory of the capabilities cache
    /// and the node's `/dev`.
    pub(crate) fn new(
        name: String,
        address: IpAddr,
        kubelet_root: &Path,
        capabilities_dir: &Path,
        device_dir: &Path,
        config: ConfigHandle,
    ) -> Result<Self, safe_dir::Error> {
        Ok(Self {
            name,
            address,
            // Launcher sockets lie in plain directories of kubelet's own file system. Other volumes are mounts that pods choose;
            // none of them is entered, so nothing here can hang.
            pods: SafeDir::trusted(&kubelet_root.join("pods"))?.on_one_mount(),
            published: Arc::new(Published::new(kubelet_root, device_dir)?),
            cache: capabilities::Cache::new(capabilities_dir.to_owned()),
            devices: device_dir.to_owned(),
            config,
            pod_calls: PodCalls::default(),
            channels: None,
        })
    }

    /// Lets VMIs migrate through these channels.
    pub(crate) fn with_channels(self, channels: Channels) -> Self {
        Self { channels: Some(channels), ..self }
    }

    /// Runs work that can hang in the pod of a VMI.
    async fn in_pod<T, E, W>(&self, vmi: &VirtualMachineInstance, what: &'static str, work: W) -> Result<T, PodError>
    where
        T: Send + 'static,
        E: Into<PodError> + Send + 'static,
        W: FnOnce() -> Result<T, E> + Send + 'static,
    {
        let namespace = vmi.metadata.namespace.as_deref().unwrap_or_default();
        let uid = vmi.metadata.uid.as_deref().unwrap_or_default();
        self.pod_calls.run(namespace, uid, what, work).await?.map_err(Into::into)
    }
}

/// Devices that a VMI needs.
struct Needs {
    volumes: Vec<String>,
    host_devices: bool,
    /// Bytes that may be locked.
    locked_memory: Option<u64>,
    real_time: bool,
}

/// Grants a launcher its devices and returns true if it has `/dev/kvm`. The container can hang this call.
fn equip(launcher: &Peer, needs: &Needs, node_devices: &Path) -> Result<bool, safe_dir::Error> {
    let dev = launcher.dev()?;
    let node = SafeDir::trusted(node_devices)?;
    let granted = grant::grant(&dev, &node, &needs.volumes, RUNTIME_USER)?;
    tracing::debug!(devices = ?granted, "devices granted to virt-launcher");
    if needs.host_devices {
        let granted = grant::host::grant(&dev, &node, RUNTIME_USER)?;
        tracing::info!(devices = ?granted, "host devices granted to virt-launcher");
    }
    if let Some(bytes) = needs.locked_memory {
        launcher.allow_locked_memory(bytes)?;
    }
    if needs.real_time {
        launcher.allow_real_time()?;
    }
    Ok(grant::has_kvm(&dev))
}

#[async_trait]
impl Host for NodeHost {
    fn name(&self) -> &str {
        &self.name
    }

    fn settings(&self) -> Settings {
        settings(&self.config.current())
    }

    async fn connect(&self, pod: &str, within: Duration) -> Result<(UnixStream, Arc<Peer>), ConnectError> {
        match safe_dir::connect_launcher(&self.pods, pod, within).await {
            Ok((stream, peer)) => Ok((stream, Arc::new(peer))),
            Err(error) if error.is_not_found() || error.is_timeout() => match self.pods.exists(Path::new(pod)) {
                Ok(false) => Err(ConnectError::NoPod),
                _ => Err(ConnectError::NoSocket),
            },
            Err(error) => Err(ConnectError::Refused(errors::chain(&error))),
        }
    }

    async fn security_context(&self, launcher: &Arc<Peer>, vmi: &VirtualMachineInstance) -> Option<String> {
        let peer = launcher.clone();
        let label = self.in_pod(vmi, "read the label of the container", move || peer.root()?.security_label()).await;
        match label {
            Ok(label) => Some(label.unwrap_or_else(|| NO_SELINUX.to_owned())),
            Err(error) => {
                tracing::warn!(
                    error = errors::chain(&error),
                    "cannot read the SELinux label of the launcher's container"
                );
                None
            }
        }
    }

    async fn equip(&self, launcher: &Arc<Peer>, vmi: &VirtualMachineInstance) -> Result<Vec<CacheFile>, PodError> {
        let needs = Needs {
            volumes: grant::claim_volumes(vmi),
            host_devices: grant::host::uses_any(vmi),
            locked_memory: grant::host::locked_memory(vmi, self.config.current().permitted_host_devices.as_ref()),
            real_time: vmi.spec.domain.cpu.as_ref().is_some_and(|cpu| cpu.realtime.is_some()),
        };
        let (peer, devices) = (launcher.clone(), self.devices.clone());
        let has_kvm =
            self.in_pod(vmi, "grant the launcher its devices", move || equip(&peer, &needs, &devices)).await?;
        Ok(self.cache.files(has_kvm))
    }

    async fn hand_volumes(
        &self,
        launcher: &Arc<Peer>,
        pod: &str,
        vmi: &VirtualMachineInstance,
        work: Work,
    ) -> Result<Volumes, PodError> {
        let (pods, published) = (&self.pods, &self.published);
        let desk = Desk { pods, published, calls: &self.pod_calls, launcher, pod, vmi };
        Ok(desk.work(work).await?)
    }

    async fn create_host_disks(
        &self,
        launcher: &Arc<Peer>,
        vmi: &VirtualMachineInstance,
    ) -> Result<Vec<String>, PodError> {
        let config = self.config.current();
        let tolerance = host_disks::Tolerance {
            lack_percent: u64::from(config.pvc_tolerate_less_space_up_to_percent.min(100)),
            reserve: config.minimum_reserve_pvc_bytes,
        };
        let (peer, disks) = (launcher.clone(), host_disks::wanted(vmi));
        let create = move || host_disks::create(&peer, &disks, tolerance);
        self.in_pod(vmi, "create host disks", create).await
    }

    fn migration_endpoint(&self) -> Option<(IpAddr, u16)> {
        let endpoint = self.channels.as_ref()?.endpoint();
        (endpoint.port() != 0).then(|| (endpoint.ip(), endpoint.port()))
    }

    fn draining(&self) -> CancellationToken {
        self.channels.as_ref().map_or_else(CancellationToken::new, Channels::draining)
    }

    fn relay(&self, vmi: &str, route: Route) -> Relay {
        let Some(channels) = &self.channels else { return Box::new(()) };
        let of = |migration| Migration { vmi: vmi.to_owned(), migration };
        let socket = |pod| Arc::new(PodSocket::new(self.pods.clone(), pod));
        match route {
            Route::Target { migration, source_node, pod } => {
                Box::new(channels.receive(of(migration), source_node, socket(pod)))
            }
            Route::Source { migration, node, address, port, pod } => {
                Box::new(channels.send(of(migration), Target { node, address, port }, socket(pod)))
            }
        }
    }

    async fn set_up_network(
        &self,
        launcher: &Arc<Peer>,
        vmi: &Arc<VirtualMachineInstance>,
        release: &[String],
    ) -> Result<PodNetwork, NetworkFailure> {
        match network::setup(launcher, vmi, release).await {
            Ok(mut ready) => {
                ready.interfaces.iter_mut().for_each(|interface| sort_like(&mut interface.ips, self.address));
                Ok(ready)
            }
            Err(error) => Err(NetworkFailure { permanent: error.is_permanent(), message: errors::chain(&error) }),
        }
    }
}

/// Sorts addresses: the cluster's primary family, which is that of virt-handler's own address, comes first.
fn sort_like(addresses: &mut [IpAddr], own: IpAddr) {
    addresses.sort_by_key(|address| address.is_ipv4() != own.is_ipv4());
}

fn settings(config: &api::config::ClusterConfig) -> Settings {
    let smbios = &config.smbios;
    Settings {
        options: VmiOptions {
            smbios: Some(SmBios {
                manufacturer: smbios.manufacturer.clone(),
                product: smbios.product.clone(),
                version: smbios.version.clone(),
                sku: smbios.sku.clone(),
                family: smbios.family.clone(),
            }),
            balloon_stats_period: config.mem_balloon_stats_period,
            nics: Vec::new(),
            serial_console_log_disabled: !config.log_serial_console,
            free_page_reporting_disabled: !config.free_page_reporting,
            vga_for_efi: config.vga_display_for_efi,
            tolerated_lack_percent: config.pvc_tolerate_less_space_up_to_percent,
            reserved_bytes: config.minimum_reserve_pvc_bytes,
        },
        allow_emulation: config.use_emulation,
    }
}

#[cfg(test)]
mod tests {
    use api::config::ClusterConfig;

    use super::*;

    #[test]
    fn addresses_of_the_primary_family_come_first() {
        let (v4, v6): (IpAddr, IpAddr) = ("10.244.0.7".parse().unwrap(), "fd00:10:244::7".parse().unwrap());
        for (own, expected) in [("10.244.0.2", [v4, v6]), ("0.0.0.0", [v4, v6]), ("fd00:10:244::2", [v6, v4])] {
            let mut addresses = [v4, v6];
            sort_like(&mut addresses, own.parse().unwrap());
            assert_eq!(addresses, expected, "{own}");
        }
    }

    #[test]
    fn options_follow_the_cluster_configuration() {
        let defaults = settings(&ClusterConfig::default()).options;
        assert_eq!((defaults.tolerated_lack_percent, defaults.reserved_bytes), (10, 131_072));
        assert!(!defaults.free_page_reporting_disabled && !defaults.vga_for_efi);
        let changed = ClusterConfig {
            free_page_reporting: false,
            vga_display_for_efi: true,
            pvc_tolerate_less_space_up_to_percent: 20,
            minimum_reserve_pvc_bytes: 7,
            ..ClusterConfig::default()
        };
        let options = settings(&changed).options;
        assert_eq!((options.tolerated_lack_percent, options.reserved_bytes), (20, 7));
        assert!(options.free_page_reporting_disabled && options.vga_for_efi);
    }
}
