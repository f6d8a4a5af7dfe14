//! Changes of devices of a running domain.
//!
//! A disk that is detached stays until the guest has released it. The Sync does not wait for this: it reports the disk as an
//! item, an event or the next read shows the release, and a later Sync repeats the request.

use protocol::{ItemKind, ItemResult};

use super::Turn;
use crate::{
    domain::diff::{DeviceChange, Item, Step},
    engine::model::{AfterRead, LiveStep, LiveSync},
    hypervisor::HypervisorError,
};

/// Error of a disk that the guest has not released.
const NOT_RELEASED: &str = "the guest has not released the disk yet";
/// Error of a disk that was removed and added before the guest had released it.
const ATTACHED_SOON: &str = "the guest has released the disk, which will be attached again";
/// Error of a volume that cannot be opened.
const NOT_READABLE: &str = "the volume cannot be opened in the pod of virt-launcher yet";

impl Turn {
    /// Decides on a device that was changed.
    pub(super) fn device_changed(&mut self, result: Result<(), HypervisorError>) {
        let Some(LiveSync { step: LiveStep::Changing(steps), items, changed, .. }) = &mut self.state.sync else {
            return;
        };
        *changed = true;
        let (change, name) = match steps.pop_front() {
            Some(Step::Disk { change, name, .. }) => (change, name),
            Some(Step::Memory { size, .. }) => return self.memory_changed(size, result),
            _ => return,
        };
        match result {
            Ok(()) => {
                tracing::info!(disk = name, ?change, "changed a disk of the running domain");
                if change == DeviceChange::Detach {
                    self.state.detaching.insert(name);
                }
            }
            Err(error @ HypervisorError::Disconnected(_)) => return self.fail_live_sync(error.into()),
            // The other disks are not affected.
            Err(error) => {
                tracing::warn!(disk = name, ?change, %error, "cannot change a disk of the running domain");
                let message = match change {
                    DeviceChange::Attach => format!("cannot attach the disk: {error}"),
                    DeviceChange::Detach => format!("{NOT_RELEASED}: {error}"),
                    DeviceChange::Update => format!("cannot change the medium: {error}"),
                };
                items.push(Item::new(ItemKind::Volume, &name).failed(message));
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

    /// Returns the items of disks that the guest has not released.
    pub(super) fn unreleased(&self) -> Vec<ItemResult> {
        let name = |name: &String| Item::new(ItemKind::Volume, name).failed(NOT_RELEASED.to_owned());
        self.state.detaching.iter().map(name).collect()
    }

    /// Forgets the disks that the guest has released, and their items.
    pub(super) fn forget_released(&mut self) {
        let active = self.state.active.clone();
        let is_active = |name: &str| active.disks.iter().any(|disk| disk.name == name);
        let released: Vec<String> = self.state.detaching.iter().filter(|name| !is_active(name)).cloned().collect();
        for name in released {
            tracing::info!(disk = name, "the guest has released the disk");
            self.state.detaching.remove(&name);
            let is_of_disk = |item: &ItemResult| {
                item.kind() == ItemKind::Volume && item.name == name && item.message.starts_with(NOT_RELEASED)
            };
            self.state.published.items.retain(|item| !is_of_disk(item));
            // Wanted again meanwhile: the item makes virt-handler repeat the Sync.
            if self.state.wanted_disks.contains(&name) {
                self.state.published.items.push(Item::new(ItemKind::Volume, &name).failed(ATTACHED_SOON.to_owned()));
            }
        }
    }
}

/// Returns the items of hot-plugged volumes that cannot be opened.
pub(super) fn unreadable(volumes: &[String]) -> impl Iterator<Item = ItemResult> {
    volumes.iter().map(|name| Item::new(ItemKind::Volume, name).failed(NOT_READABLE.to_owned()))
}
