//! Devices that any number of pods use at the same time: a unit stands for the right to have the node in the container.

use std::{path::Path, sync::Arc, time::Duration};

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
pub(super) const RESOURCES: [Device; 3] = [KVM, TUN, VHOST_NET];

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
    units: u32,
    healthy: watch::Receiver<bool>,
}

/// All units, which are healthy or not together.
fn units(device: Device, count: u32, healthy: bool) -> Vec<v1beta1::Device> {
    let health = if healthy { "Healthy" } else { "Unhealthy" };
    (0..count)
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
        let (device, count) = (self.device, self.units);
        Box::pin(WatchStream::new(self.healthy.clone()).map(move |healthy| units(device, count, healthy)))
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
pub(super) async fn run(device: Device, config: Config, offers: watch::Sender<Offers>, stop: CancellationToken) {
    let (health, healthy) = watch::channel(false);
    let shared = Shared { resource: device.resource(), device, units: config.max_devices, healthy };
    tokio::select! {
        () = offer(Arc::new(shared), &config.plugins_dir, &offers, stop) => {}
        () = watch_health(device, &config, &health, &offers) => {}
    }
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
