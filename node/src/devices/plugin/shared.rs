//! Plugins for devices that any number of pods share: a unit is the permission to have the device node in the container.

use std::{path::Path, sync::Arc, time::Duration};

use daemon::config::ConfigHandle;
use tokio::{sync::watch, time::sleep};
use tokio_stream::{StreamExt, wrappers::WatchStream};
use tokio_util::sync::CancellationToken;

use super::{
    Config, NotAllocated, Offers, Resource, Units, device_permissions, offer,
    offers::update,
    v1beta1::{self, ContainerAllocateResponse, DeviceSpec},
};
use crate::{
    devices::{self, Device, KVM, TUN, USERFAULTFD, VHOST_NET, VHOST_VSOCK, is_present},
    safe_dir::SafeDir,
};

/// Interval of checks for the devices, if inotify reports nothing.
const DEVICE_RECHECK: Duration = Duration::from_secs(30);

/// The resources that every node has.
pub(super) const RESOURCES: [Device; 5] = [KVM, TUN, VHOST_NET, VHOST_VSOCK, USERFAULTFD];

/// The plugin of one device.
struct Shared {
    resource: String,
    device: Device,
    stock: watch::Receiver<Stock>,
}

/// Number of units, which are all healthy or all unhealthy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Stock {
    units: u32,
    healthy: bool,
}

/// Returns all units.
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

/// Returns the number of units: from the cluster configuration, or the default of virt-handler.
fn most(config: &Config, cluster: &ConfigHandle) -> u32 {
    cluster.current().virtual_machine_instances_per_node.unwrap_or(config.max_devices)
}

/// Follows the number of units.
async fn watch_number(config: &Config, mut cluster: ConfigHandle, stock: &watch::Sender<Stock>) {
    loop {
        let now = most(config, &cluster);
        stock.send_if_modified(|stock| std::mem::replace(&mut stock.units, now) != now);
        cluster.changed().await;
    }
}

/// Follows the health of the device.
async fn watch_health(device: Device, config: &Config, stock: &watch::Sender<Stock>, offers: &watch::Sender<Offers>) {
    let resource = device.resource();
    let publish = |now: bool| {
        if stock.send_if_modified(|stock| std::mem::replace(&mut stock.healthy, now) != now) {
            tracing::info!(%resource, healthy = now, "device changed");
        }
        update(offers, &resource, |offer| offer.healthy = Some(now));
    };
    let mut loaded = false;
    loop {
        let Ok(dev) = SafeDir::trusted(&config.dev_dir) else {
            publish(false);
            sleep(DEVICE_RECHECK).await;
            continue;
        };
        let parent = match Path::new(device.node).parent().filter(|parent| !parent.as_os_str().is_empty()) {
            Some(parent) => dev.open_dir(parent).unwrap_or_else(|_| dev.clone()),
            None => dev.clone(),
        };
        let mut changes = parent.changes();
        if let Some(number) = devices::number(&dev, device).filter(|_| device.autoload && !loaded) {
            loaded = true;
            if let Err(error) = dev.touch_device(device.node, number) {
                tracing::info!(device = device.node, %error, "driver cannot be loaded");
            }
        }
        publish(is_present(&dev, device));
        changes.changed(DEVICE_RECHECK).await;
    }
}
