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

/// Offers a device until `stop`, while it is permitted.
pub(super) async fn run(
    device: Device,
    config: Config,
    cluster: ConfigHandle,
    permitted: watch::Receiver<bool>,
    offers: watch::Sender<Offers>,
    stop: CancellationToken,
) {
    let (sender, stock) = watch::channel(Stock { units: most(&config, &cluster), healthy: false });
    let shared = Shared { resource: device.resource(), device, stock };
    tokio::select! {
        () = offer(Arc::new(shared), &config.plugins_dir, &offers, stop) => {}
        () = watch_health(device, &config, permitted, &sender, &offers) => {}
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

/// Follows the health of the device. kubelet allocates no unhealthy unit, and containers that have one keep it.
async fn watch_health(
    device: Device,
    config: &Config,
    mut permitted: watch::Receiver<bool>,
    stock: &watch::Sender<Stock>,
    offers: &watch::Sender<Offers>,
) {
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
        let is_permitted = *permitted.borrow_and_update();
        publish(is_permitted && is_present(&dev, device));
        tokio::select! {
            () = changes.changed(DEVICE_RECHECK) => {}
            Ok(()) = permitted.changed() => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    #[allow(clippy::disallowed_methods, reason = "the test creates the device that virt-handler finds")]
    async fn a_device_is_offered_only_while_it_is_permitted() {
        use rustix::fs::{CWD, FileType, Mode, makedev, mknodat};
        let dev_dir = std::env::temp_dir().join(format!("ferrovirt-userfaultfd-{}", std::process::id()));
        let _ = std::fs::remove_dir_all(&dev_dir);
        std::fs::create_dir_all(&dev_dir).unwrap();
        let node = dev_dir.join(USERFAULTFD.node);
        if mknodat(CWD, node, FileType::CharacterDevice, Mode::from_raw_mode(0o600), makedev(10, 126)).is_err() {
            skips::skip("permission to make device nodes: root");
            return;
        }
        let (permit, permitted) = watch::channel(false);
        let (stock, mut known) = watch::channel(Stock { units: 1, healthy: false });
        let (offers, mut shown) = watch::channel(Offers::new());
        let config =
            Config { plugins_dir: dev_dir.clone(), dev_dir: dev_dir.clone(), sys_dir: dev_dir.clone(), max_devices: 1 };
        let resource = USERFAULTFD.resource();
        let checked = async {
            let looked = |offers: &Offers| offers.get(&resource).is_some_and(|offer| offer.healthy == Some(false));
            drop(shown.wait_for(looked).await.unwrap());
            for now in [true, false, true] {
                permit.send_replace(now);
                drop(known.wait_for(|stock| stock.healthy == now).await.unwrap());
            }
        };
        tokio::select! {
            () = watch_health(USERFAULTFD, &config, permitted, &stock, &offers) => {}
            ended = tokio::time::timeout(Duration::from_secs(5), checked) => ended.unwrap(),
        }
        std::fs::remove_dir_all(dev_dir).unwrap();
    }
}
