//! Plugins for the devices that the cluster configuration permits: one per resource of which the node has devices.
//!
//! A device that is plugged in, or added to the configuration, is offered at once. A resource that is removed from the
//! configuration ends with an empty list, so that the scheduler does not use it; VMIs with such devices keep them.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
    time::Duration,
};

use daemon::config::ConfigHandle;
use sha2::{Digest, Sha256};
use tokio::{sync::watch, task::JoinSet, time::sleep};
use tokio_stream::{StreamExt, wrappers::WatchStream};
use tokio_util::sync::CancellationToken;

use super::{
    Config, NotAllocated, Offers, Resource, Units, device_permissions, offer, rethrow,
    v1beta1::{self, ContainerAllocateResponse, DeviceSpec, NumaNode, TopologyInfo},
};
use crate::{
    devices::inventory::{Inventory, Kind, Unit},
    safe_dir::Changes,
};

/// Interval of checks for devices, if inotify reports nothing: a change of the driver causes no event.
const RECHECK: Duration = Duration::from_secs(30);
/// Duration of a burst of changes.
const SETTLE: Duration = Duration::from_millis(500);
/// Time for kubelet to receive the empty list of a removed resource.
const LAST_WORD: Duration = Duration::from_secs(1);
/// Characters of the resource name in the name of its socket: the path of a socket has at most 107.
const SHOWN: usize = 32;

/// A running plugin.
struct Running {
    units: watch::Sender<Vec<Unit>>,
    stop: CancellationToken,
}

/// Offers the permitted devices until `stop`.
pub(super) async fn run(config: Config, mut cluster: ConfigHandle, stop: CancellationToken) {
    let inventory = Arc::new(Inventory::new(config.sys_dir.clone(), config.dev_dir.clone()));
    let mut plugins = JoinSet::new();
    let mut running: BTreeMap<(Kind, String), Running> = BTreeMap::new();
    loop {
        inventory.permit(&cluster.current().permitted_host_devices.clone().unwrap_or_default());
        // Subscribed before the look, so that no change is missed.
        let mut changes: Vec<Changes> = inventory.directories().iter().map(|directory| directory.changes()).collect();
        let found = inventory.units();
        running.retain(|key, plugin| {
            let stays = found.contains_key(key);
            if !stays {
                tracing::info!(resource = key.1, "devices are not permitted any more");
                plugin.units.send_replace(Vec::new());
                let stop = plugin.stop.clone();
                plugins.spawn(async move {
                    sleep(LAST_WORD).await;
                    stop.cancel();
                });
            }
            stays
        });
        for (key, units) in found {
            match running.get(&key) {
                Some(plugin) => {
                    plugin.units.send_if_modified(|known| {
                        let changed = *known != units;
                        *known = units;
                        changed
                    });
                }
                // A resource without devices is not offered, so that the node does not list it.
                None if units.is_empty() => {}
                None => {
                    tracing::info!(resource = key.1, units = units.len(), "devices found");
                    let (sender, receiver) = watch::channel(units);
                    let plugin = Running { units: sender, stop: stop.child_token() };
                    let permitted = Permitted {
                        kind: key.0,
                        resource: key.1.clone(),
                        inventory: inventory.clone(),
                        units: receiver,
                    };
                    let (directory, ended) = (config.plugins_dir.clone(), plugin.stop.clone());
                    plugins.spawn(async move {
                        // Nothing waits for the registration of these.
                        let (offers, _) = watch::channel(Offers::new());
                        offer(Arc::new(permitted), &directory, &offers, ended).await;
                    });
                    running.insert(key, plugin);
                }
            }
        }
        while let Some(ended) = plugins.try_join_next() {
            rethrow(ended);
        }
        let idle = inventory.is_idle();
        tokio::select! {
            () = stop.cancelled() => break,
            () = cluster.changed() => {}
            () = any(&mut changes), if !idle => sleep(SETTLE).await,
        }
    }
    while let Some(ended) = plugins.join_next().await {
        rethrow(ended);
    }
}

/// Returns after a change in one of the directories, and at intervals.
async fn any(changes: &mut [Changes]) {
    if changes.is_empty() {
        sleep(RECHECK).await;
        return;
    }
    let changed = changes.iter_mut().map(|changes| Box::pin(changes.changed(RECHECK)));
    futures::future::select_all(changed).await;
}

/// The plugin of one resource.
struct Permitted {
    kind: Kind,
    resource: String,
    inventory: Arc<Inventory>,
    units: watch::Receiver<Vec<Unit>>,
}

fn listed(unit: &Unit) -> v1beta1::Device {
    v1beta1::Device {
        id: unit.id.clone(),
        health: if unit.healthy { "Healthy" } else { "Unhealthy" }.to_owned(),
        topology: unit.numa.map(|id| TopologyInfo { nodes: vec![NumaNode { id }] }),
    }
}

/// Returns the devices of a container for the allocated units among the existing ones.
fn allocation(
    variable: String,
    there: &[Unit],
    allocated: &[String],
    permissions: &str,
) -> Result<ContainerAllocateResponse, NotAllocated> {
    let mut nodes = BTreeSet::new();
    let mut addresses = Vec::new();
    for id in allocated {
        let unit = there.iter().find(|unit| unit.id == *id && unit.healthy).ok_or_else(|| NotAllocated(id.clone()))?;
        nodes.extend(unit.nodes.iter().map(|node| format!("/dev/{node}")));
        addresses.extend(unit.addresses.iter().map(String::as_str));
    }
    let device = |path: String| DeviceSpec {
        container_path: path.clone(),
        host_path: path,
        permissions: permissions.to_owned(),
    };
    Ok(ContainerAllocateResponse {
        envs: [(variable, addresses.join(","))].into(),
        devices: nodes.into_iter().map(device).collect(),
        ..ContainerAllocateResponse::default()
    })
}

impl Resource for Permitted {
    fn resource(&self) -> &str {
        &self.resource
    }

    /// Contains the end of the resource name and a digest of all of it, because names can be longer than socket paths.
    fn socket(&self) -> String {
        let name: String = self.resource.rsplit('/').next().unwrap_or_default().chars().take(SHOWN).collect();
        let digest: String = Sha256::digest(&self.resource).iter().take(4).map(|byte| format!("{byte:02x}")).collect();
        format!("kubevirt-{name}-{digest}.sock")
    }

    fn units(&self) -> Units {
        Box::pin(WatchStream::new(self.units.clone()).map(|units| units.iter().map(listed).collect()))
    }

    fn allocate(&self, allocated: &[String]) -> Result<ContainerAllocateResponse, NotAllocated> {
        // The current units: a device that was plugged in again has another number.
        let there = self.inventory.units().remove(&(self.kind, self.resource.clone())).unwrap_or_default();
        let variable = api::host_devices::variable(self.kind.variable(), &self.resource);
        allocation(variable, &there, allocated, device_permissions())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn unit(id: &str, numa: Option<i64>) -> Unit {
        Unit {
            id: id.into(),
            healthy: id != "9",
            numa,
            nodes: vec!["vfio/vfio".into(), format!("vfio/{id}")],
            addresses: vec![format!("0000:0{id}:00.0")],
        }
    }

    #[test]
    fn a_container_gets_the_nodes_and_addresses_of_its_units() {
        let there = [unit("1", None), unit("2", Some(0)), unit("9", None)];
        let allocate = |ids: &[&str]| {
            let ids: Vec<String> = ids.iter().map(|id| (*id).to_owned()).collect();
            allocation("PCI_RESOURCE_V_ORG_X".into(), &there, &ids, "rw")
        };
        let both = allocate(&["2", "1"]).unwrap();
        assert_eq!(both.envs["PCI_RESOURCE_V_ORG_X"], "0000:02:00.0,0000:01:00.0");
        let paths: Vec<&str> = both.devices.iter().map(|device| device.host_path.as_str()).collect();
        assert_eq!(paths, ["/dev/vfio/1", "/dev/vfio/2", "/dev/vfio/vfio"]);
        assert!(both.devices.iter().all(|device| device.container_path == device.host_path));
        assert!(both.mounts.is_empty() && both.cdi_devices.is_empty());
        for gone in ["3", "9", "", "../1"] {
            assert_eq!(allocate(&["1", gone]).unwrap_err().0, gone);
        }
    }

    #[test]
    fn units_contain_health_and_numa_node() {
        let near = listed(&unit("2", Some(1)));
        assert_eq!((near.id.as_str(), near.health.as_str()), ("2", "Healthy"));
        assert_eq!(near.topology.unwrap().nodes[0].id, 1);
        let broken = listed(&unit("9", None));
        assert_eq!((broken.health.as_str(), broken.topology), ("Unhealthy", None));
    }

    #[test]
    fn sockets_are_short_and_differ() {
        let socket = |resource: &str| {
            let (_, units) = watch::channel(Vec::new());
            let inventory = Arc::new(Inventory::new("/sys".into(), "/dev".into()));
            Permitted { kind: Kind::Pci, resource: resource.into(), inventory, units }.socket()
        };
        assert!(socket("nvidia.com/TU104GL_Tesla_T4").starts_with("kubevirt-TU104GL_Tesla_T4-"));
        assert_ne!(socket("a.org/x"), socket("b.org/x"));
        let long = socket(&format!("{}/{}", "a".repeat(200), "b".repeat(63)));
        assert!("/var/lib/kubelet/device-plugins/".len() + long.len() < 108, "{long}");
    }
}
