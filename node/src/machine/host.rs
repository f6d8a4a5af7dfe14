//! What a machine's task needs of the node it runs on.

use std::{
    net::IpAddr,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use api::VirtualMachineInstance;
use async_trait::async_trait;
use process::config::ConfigHandle;
use protocol::{CacheFile, MachineOptions, SmBios};
use tokio::net::UnixStream;

use crate::{
    capabilities, device_access,
    host_devices::access,
    launcher::with_causes,
    network::{self, PodNetwork},
    pod_calls::PodCalls,
    safe_dir::{self, Peer, SafeDir},
};

/// The user QEMU runs as in a launcher pod.
const RUNTIME_USER: u32 = 107;

/// What stands for a context where there is none.
const NO_SELINUX: &str = "none";

/// Why there is no connection to a launcher.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ConnectError {
    /// The pod has no socket yet.
    #[error("the launcher has no socket yet")]
    NoSocket,
    /// The pod has no directory on this node.
    #[error("the pod is not on this node")]
    NoPod,
    /// There is something, but it does not answer or is not to be trusted.
    #[error("{0}")]
    Refused(String),
}

/// Why the pod's network was not set up.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct NetworkFailure {
    /// What went wrong.
    pub message: String,
    /// Trying again cannot help.
    pub permanent: bool,
}

/// What the cluster configuration says about all machines.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Settings {
    /// What launchers are told; the network devices of a machine are still missing.
    pub options: MachineOptions,
    /// Software emulation may be used.
    pub allow_emulation: bool,
}

/// The node as a task sees it. Everything here is bounded in time.
#[async_trait]
pub trait Host: Send + Sync + 'static {
    /// The node's name.
    fn name(&self) -> &str;

    /// What the cluster configuration says now.
    fn settings(&self) -> Settings;

    /// Waits up to `within` for the launcher's socket of a pod, connects, and checks who answers.
    async fn connect(&self, pod: &str, within: Duration) -> Result<(UnixStream, Arc<Peer>), ConnectError>;

    /// SELinux label of the container of a VMI's checked launcher; `none` where there is no SELinux. Nothing if it cannot
    /// be told.
    async fn security_context(&self, launcher: &Arc<Peer>, vmi: &VirtualMachineInstance) -> Option<String>;

    /// Gives a checked launcher the devices it may use, and picks the capabilities cache that fits it.
    async fn equip(&self, launcher: &Arc<Peer>, vmi: &VirtualMachineInstance) -> Result<Vec<CacheFile>, String>;

    /// Sets up the network in the launcher's pod. Idempotent.
    async fn set_up_network(
        &self,
        launcher: &Arc<Peer>,
        vmi: &Arc<VirtualMachineInstance>,
    ) -> Result<PodNetwork, NetworkFailure>;
}

/// The node this process runs on.
pub struct NodeHost {
    name: String,
    address: IpAddr,
    pods: SafeDir,
    cache: capabilities::Cache,
    devices: PathBuf,
    config: ConfigHandle,
    pod_calls: PodCalls,
}

impl NodeHost {
    /// The node `name`, with the agent's own address there, kubelet's directory, the directory of the capabilities cache
    /// and the node's `/dev`.
    pub fn new(
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
            // Sockets of launchers are in volumes that are plain directories of kubelet's own file system. Other volumes are
            // mounts, which pods choose, and none of them is entered; so nothing here can hang.
            pods: SafeDir::trusted(&kubelet_root.join("pods"))?.on_one_mount(),
            cache: capabilities::Cache::new(capabilities_dir.to_owned()),
            devices: device_dir.to_owned(),
            config,
            pod_calls: PodCalls::default(),
        })
    }

    /// Runs what may hang in the pod of a VMI.
    async fn in_pod<T, W>(&self, vmi: &VirtualMachineInstance, what: &'static str, work: W) -> Result<T, String>
    where
        T: Send + 'static,
        W: FnOnce() -> Result<T, safe_dir::Error> + Send + 'static,
    {
        let namespace = vmi.metadata.namespace.as_deref().unwrap_or_default();
        let uid = vmi.metadata.uid.as_deref().unwrap_or_default();
        match self.pod_calls.run(namespace, uid, what, work).await {
            Ok(done) => done.map_err(|error| with_causes(&error)),
            Err(error) => Err(with_causes(&error)),
        }
    }
}

/// Devices of the node that a VMI needs.
struct Needs {
    volumes: Vec<String>,
    /// Devices of the host beside those that every launcher opens, and the memory to be locked for them.
    host_devices: bool,
    locked_memory: Option<u64>,
}

/// Gives a launcher its devices; says whether it has `/dev/kvm`. The container can hang this.
fn equip(launcher: &Peer, needs: &Needs, node_devices: &Path) -> Result<bool, safe_dir::Error> {
    let dev = launcher.dev()?;
    let granted = device_access::grant(&dev, &needs.volumes, RUNTIME_USER)?;
    tracing::debug!(devices = ?granted, "devices handed to the launcher");
    if needs.host_devices {
        let granted = access::grant(&dev, &SafeDir::trusted(node_devices)?, RUNTIME_USER)?;
        tracing::info!(devices = ?granted, "devices of the host handed to the launcher");
        if let Some(bytes) = needs.locked_memory {
            launcher.allow_locked_memory(bytes)?;
        }
    }
    Ok(device_access::has_kvm(&dev))
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
            Err(error) => Err(ConnectError::Refused(with_causes(&error))),
        }
    }

    async fn security_context(&self, launcher: &Arc<Peer>, vmi: &VirtualMachineInstance) -> Option<String> {
        let peer = launcher.clone();
        let label = self.in_pod(vmi, "read the label of the container", move || peer.root()?.security_label()).await;
        match label {
            Ok(label) => Some(label.unwrap_or_else(|| NO_SELINUX.to_owned())),
            Err(error) => {
                tracing::warn!(error, "the label of the launcher's container cannot be read");
                None
            }
        }
    }

    async fn equip(&self, launcher: &Arc<Peer>, vmi: &VirtualMachineInstance) -> Result<Vec<CacheFile>, String> {
        let needs = Needs {
            volumes: device_access::claim_volumes(vmi),
            host_devices: access::uses_any(vmi),
            locked_memory: access::locked_memory(vmi, self.config.current().permitted_host_devices.as_ref()),
        };
        let (peer, devices) = (launcher.clone(), self.devices.clone());
        let has_kvm = self.in_pod(vmi, "give the launcher its devices", move || equip(&peer, &needs, &devices)).await?;
        Ok(self.cache.files(has_kvm))
    }

    async fn set_up_network(
        &self,
        launcher: &Arc<Peer>,
        vmi: &Arc<VirtualMachineInstance>,
    ) -> Result<PodNetwork, NetworkFailure> {
        match network::setup(launcher, vmi).await {
            Ok(mut ready) => {
                ready.interfaces.iter_mut().for_each(|interface| sort_like(&mut interface.ips, self.address));
                Ok(ready)
            }
            Err(error) => Err(NetworkFailure { permanent: error.is_permanent(), message: with_causes(&error) }),
        }
    }
}

/// Puts the family first that comes first in the cluster, as the agent's own address shows.
fn sort_like(addresses: &mut [IpAddr], own: IpAddr) {
    addresses.sort_by_key(|address| address.is_ipv4() != own.is_ipv4());
}

fn settings(config: &api::config::ClusterConfig) -> Settings {
    let smbios = &config.smbios;
    Settings {
        options: MachineOptions {
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
    fn the_clusters_first_family_of_addresses_comes_first() {
        let (v4, v6): (IpAddr, IpAddr) = ("10.244.0.7".parse().unwrap(), "fd00:10:244::7".parse().unwrap());
        for (own, expected) in [("10.244.0.2", [v4, v6]), ("0.0.0.0", [v4, v6]), ("fd00:10:244::2", [v6, v4])] {
            let mut addresses = [v4, v6];
            sort_like(&mut addresses, own.parse().unwrap());
            assert_eq!(addresses, expected, "{own}");
        }
    }

    #[test]
    fn launchers_are_told_what_the_cluster_says() {
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
        let told = settings(&changed).options;
        assert_eq!((told.tolerated_lack_percent, told.reserved_bytes), (20, 7));
        assert!(told.free_page_reporting_disabled && told.vga_for_efi);
    }
}
