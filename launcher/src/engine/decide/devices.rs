//! Changes of devices of a running domain.
//!
//! A disk or interface that is detached stays until the guest has released it. The Sync does not wait for this: it reports it as
//! an item, an event or the next read shows the release, and a later Sync repeats the request.

use std::collections::BTreeSet;

use protocol::{ItemKind, ItemResult};

use super::Turn;
use crate::{
    domain::{
        diff::{DeviceChange, Item, Step},
        parse::DomainConfig,
    },
    engine::model::{AfterRead, LiveStep, LiveSync},
    hypervisor::HypervisorError,
};

/// Begin of the error of a device that the guest has not released.
const NOT_RELEASED: &str = "the guest has not released";
/// Error of a volume that cannot be opened.
const NOT_READABLE: &str = "the volume cannot be opened in the pod of virt-launcher yet";

impl Turn {
    /// Decides on a device that was changed.
    pub(super) fn device_changed(&mut self, result: Result<(), HypervisorError>) {
        let Some(LiveSync { step: LiveStep::Changing(steps), items, changed, .. }) = &mut self.state.sync else {
            return;
        };
        *changed = true;
        let (change, item) = match steps.pop_front() {
            Some(Step::Device { change, item, .. }) => (change, item),
            Some(Step::Memory { size, .. }) => return self.memory_changed(size, result),
            _ => return,
        };
        match result {
            Ok(()) => {
                tracing::info!(device = item.name, ?change, "changed {} of the running domain", noun(&item));
                if change == DeviceChange::Detach {
                    self.state.detaching.insert(item);
                }
            }
            Err(error @ HypervisorError::Disconnected(_)) => return self.fail_live_sync(error.into()),
            // The other devices are not affected.
            Err(error) => {
                let noun = noun(&item);
                tracing::warn!(device = item.name, ?change, %error, "cannot change {noun} of the running domain");
                let message = match change {
                    DeviceChange::Attach => format!("cannot attach {noun}: {error}"),
                    DeviceChange::Detach => format!("{}: {error}", not_released(&item)),
                    DeviceChange::Update if item.kind == ItemKind::Volume => {
                        format!("cannot change the medium: {error}")
                    }
                    DeviceChange::Update => format!("cannot change the state of the link: {error}"),
                };
                items.push(item.failed(message));
            }
        }
        self.next_step();
    }

    /// Decides on vCPUs that were plugged.
    pub(super) fn vcpus_plugged(&mut self, result: Result<(), HypervisorError>) {
        let Some(LiveSync { step: LiveStep::Changing(steps), changed, .. }) = &mut self.state.sync else { return };
        let Some(Step::Vcpus(vcpus)) = steps.pop_front() else { return };
        // Some of them may have been plugged before a failure.
        *changed = true;
        if result.is_ok() {
            tracing::info!(vcpus, "plugged vCPUs into the running domain");
        }
        self.resized(ItemKind::Cpu, "cannot plug vCPUs", result);
    }

    /// Decides on the memory that was requested of the guest.
    fn memory_changed(&mut self, size: u64, result: Result<(), HypervisorError>) {
        if result.is_ok() {
            tracing::info!(size, "requested another amount of memory of the guest");
        }
        self.resized(ItemKind::Memory, "cannot change the memory", result);
    }

    fn resized(&mut self, kind: ItemKind, context: &str, result: Result<(), HypervisorError>) {
        match result {
            Ok(()) => {}
            Err(error) if error.is_transient() => return self.fail_live_sync(error.into()),
            Err(error) => {
                tracing::warn!(%error, "{context} of the running domain");
                if let Some(sync) = &mut self.state.sync {
                    sync.items.push(Item::new(kind, "").failed(format!("{context}: {error}")));
                }
            }
        }
        self.next_step();
    }

    /// Reads the domain if devices were changed. Returns false if there is nothing to read.
    pub(super) fn read_changed(&mut self) -> bool {
        let Some(sync) = self.state.sync.as_mut().filter(|sync| sync.changed) else { return false };
        sync.changed = false;
        sync.step = LiveStep::Reading;
        self.read_then(Some(AfterRead::Synced));
        true
    }

    /// Returns the items of devices that the guest has not released.
    pub(super) fn unreleased(&self) -> Vec<ItemResult> {
        self.state.detaching.iter().map(|item| item.failed(not_released(item))).collect()
    }

    /// Forgets the devices that the guest has released, and their items.
    pub(super) fn forget_released(&mut self) {
        let active: BTreeSet<Item> = pluggable(&self.state.active).collect();
        let released: Vec<Item> = self.state.detaching.difference(&active).cloned().collect();
        for item in released {
            let noun = noun(&item);
            tracing::info!(device = item.name, "the guest has released {noun}");
            self.state.detaching.remove(&item);
            let is_of_device = |result: &ItemResult| {
                result.kind() == item.kind && result.name == item.name && result.message.starts_with(NOT_RELEASED)
            };
            self.state.published.items.retain(|result| !is_of_device(result));
            // Wanted again meanwhile: the item makes virt-handler repeat the Sync.
            if self.state.wanted_devices.contains(&item) {
                let message = format!("the guest has released {noun}, which will be attached again");
                self.state.published.items.push(item.failed(message));
            }
        }
    }
}

/// Returns the disks and interfaces of a domain.
pub(super) fn pluggable(config: &DomainConfig) -> impl Iterator<Item = Item> {
    let disks = config.disks.iter().map(|disk| Item::new(ItemKind::Volume, &disk.name));
    disks.chain(config.interfaces.iter().map(|interface| Item::new(ItemKind::Interface, &interface.name)))
}

fn noun(item: &Item) -> &'static str {
    if item.kind == ItemKind::Volume { "the disk" } else { "the interface" }
}

fn not_released(item: &Item) -> String {
    format!("{NOT_RELEASED} {} yet", noun(item))
}

/// Returns the items of hot-plugged volumes that cannot be opened.
pub(super) fn unreadable(volumes: &[String]) -> impl Iterator<Item = ItemResult> {
    volumes.iter().map(|name| Item::new(ItemKind::Volume, name).failed(NOT_READABLE.to_owned()))
}
