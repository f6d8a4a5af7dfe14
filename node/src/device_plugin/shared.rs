//! Devices that any number of pods use at the same time: a unit stands for the right to have the node in the container.

use std::{path::Path, sync::Arc, time::Duration};

use process::config::ConfigHandle;
use tokio::{sync::watch, time::sleep};
use tokio_stream::{StreamExt, wrappers::WatchStream};
use tokio_util::sync::CancellationToken;

use super::{
    Config, NotAllocated, Offers, Resource, Units, device_permissions, offer,
    offers::note,
    v1beta1::{self, ContainerAllocateResponse, DeviceSpec},
};
use crate::{device_access::is_there, safe_dir::SafeDir};

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
    /// The node exists before its driver is loaded, which the agent does by opening it.
    pub autoload: bool,
}

/// Hardware virtualization.
pub const KVM: Device = Device { name: "kvm", node: "kvm", number: (10, 232), autoload: false };
/// Tap devices.
pub const TUN: Device = Device { name: "tun", node: "net/tun", number: (10, 200), autoload: true };
/// Network devices served by the kernel.
pub const VHOST_NET: Device = Device { name: "vhost-net", node: "vhost-net", number: (10, 238), autoload: true };
/// Connections between a host and its guests, served by the kernel. Its driver is left to the first machine that opens it:
/// most nodes have none.
pub const VHOST_VSOCK: Device = Device { name: "vhost-vsock", node: "vhost-vsock", number: (10, 241), autoload: false };
/// The resources that every node has.
pub(super) const RESOURCES: [Device; 4] = [KVM, TUN, VHOST_NET, VHOST_VSOCK];

impl Device {
    /// Name of the resource that pods ask for.
    #[must_use]
    pub fn resource(&self) -> String {
        format!("devices.kubevirt.io/{}", self.name)
    }
}

/// The plugin of one device.
struct Shared {
    resource: String,
    device: Device,
    stock: watch::Receiver<Stock>,
}

/// How many units there are, which are healthy or not together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Stock {
    units: u32,
    healthy: bool,
}

/// All units.
fn units(device: Device, stock: Stock) -> Vec<v1beta1::Device> {
    let health = if stock.healthy { "Healthy" } else { "Unhealthy" };
    (0..stock.units)
        .map(|number| v1beta1::Device {
            id: format!("{}{number}", device.name),
            health: health.to_owned(),
            topology: None,
        })
        .collect()
}

impl Resource for Shared {
    fn resource(&self) -> &str {
        &self.resource
    }

    fn socket(&self) -> String {
        format!("kubevirt-{}.sock", self.device.name)
    }

    fn units(&self) -> Units {
        let device = self.device;
        Box::pin(WatchStream::new(self.stock.clone()).map(move |stock| units(device, stock)))
    }

    fn allocate(&self, _: &[String]) -> Result<ContainerAllocateResponse, NotAllocated> {
        let path = format!("/dev/{}", self.device.node);
        Ok(ContainerAllocateResponse {
            devices: vec![DeviceSpec {
                container_path: path.clone(),
                host_path: path,
                permissions: device_permissions().to_owned(),
            }],
            ..ContainerAllocateResponse::default()
        })
    }
}

/// Offers a device until `stop`.
pub(super) async fn run(
    device: Device,
    config: Config,
    cluster: ConfigHandle,
    offers: watch::Sender<Offers>,
    stop: CancellationToken,
) {
    let (sender, stock) = watch::channel(Stock { units: most(&config, &cluster), healthy: false });
    let shared = Shared { resource: device.resource(), device, stock };
    tokio::select! {
        () = offer(Arc::new(shared), &config.plugins_dir, &offers, stop) => {}
        () = watch_health(device, &config, &sender, &offers) => {}
        () = watch_number(&config, cluster, &sender) => {}
    }
}

/// Most machines of the node: what the cluster's configuration says, or else the agent's own.
fn most(config: &Config, cluster: &ConfigHandle) -> u32 {
    cluster.current().virtual_machine_instances_per_node.unwrap_or(config.max_devices)
}

/// Follows how many machines the node may have.
async fn watch_number(config: &Config, mut cluster: ConfigHandle, stock: &watch::Sender<Stock>) {
    loop {
        let now = most(config, &cluster);
        stock.send_if_modified(|stock| std::mem::replace(&mut stock.units, now) != now);
        cluster.changed().await;
    }
}

/// Follows whether the device is there.
async fn watch_health(device: Device, config: &Config, stock: &watch::Sender<Stock>, offers: &watch::Sender<Offers>) {
    let resource = device.resource();
    let tell = |now: bool| {
        if stock.send_if_modified(|stock| std::mem::replace(&mut stock.healthy, now) != now) {
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
        let parent = match Path::new(device.node).parent().filter(|parent| !parent.as_os_str().is_empty()) {
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
