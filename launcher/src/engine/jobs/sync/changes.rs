//! Changes of a running domain, one after the other.
//!
//! A disk or interface that is detached stays until the guest has released it. The Sync does not wait for this: it reports it as
//! an item, an event or the next read shows the release, and a later Sync repeats the request.

use std::collections::VecDeque;

use protocol::{ItemKind, ItemResult};

use crate::{
    domain::diff::{DeviceChange, Item, Step},
    engine::model::{Base, DomainCall, not_released, noun},
    hypervisor::HypervisorError,
};

/// The changes of a Sync.
#[derive(Clone, Debug)]
pub(super) struct Changes {
    /// Steps that remain; the first is in progress.
    pub(super) steps: VecDeque<Step>,
    /// Results of items that are not as wanted.
    pub(super) items: Vec<ItemResult>,
    /// The domain was changed: it is read before the Sync is complete.
    pub(super) changed: bool,
}

/// Result of a change: a failure that fails the Sync. Others become items, since the other devices are not affected.
type Change = Result<(), HypervisorError>;

impl Changes {
    /// Returns the call of the next change.
    pub(super) fn next(&self) -> Option<DomainCall> {
        Some(match self.steps.front()? {
            Step::Resize { target, size, .. } => DomainCall::GrowDisk { target: target.clone(), size: *size },
            Step::Device { change, xml, .. } | Step::Memory { change, xml, .. } => {
                DomainCall::ChangeDevice(*change, xml.clone())
            }
            Step::Vcpus(vcpus) => DomainCall::PlugVcpus(*vcpus),
            Step::Attach(_) | Step::Detach(_) | Step::Update(..) => return None,
        })
    }

    /// Decides on a device that was changed.
    pub(super) fn on_device_changed(&mut self, base: &mut Base, result: Change) -> Change {
        self.changed = true;
        let (change, item) = match self.steps.pop_front() {
            Some(Step::Device { change, item, .. }) => (change, item),
            Some(Step::Memory { size, .. }) => {
                if result.is_ok() {
                    tracing::info!(size, "requested another amount of memory of the guest");
                }
                return self.on_resized(ItemKind::Memory, "cannot change the memory", result);
            }
            _ => return Ok(()),
        };
        match result {
            Ok(()) => {
                tracing::info!(device = item.name, ?change, "changed {} of the running domain", noun(&item));
                if change == DeviceChange::Detach {
                    base.detaching.insert(item);
                }
            }
            Err(error @ HypervisorError::Disconnected(_)) => return Err(error),
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
                self.items.push(item.failed(message));
            }
        }
        Ok(())
    }

    /// Decides on vCPUs that were plugged. Some of them may have been plugged before a failure.
    pub(super) fn on_vcpus_plugged(&mut self, result: Change) -> Change {
        self.changed = true;
        if let (Some(Step::Vcpus(vcpus)), Ok(())) = (self.steps.pop_front(), &result) {
            tracing::info!(vcpus, "plugged vCPUs into the running domain");
        }
        self.on_resized(ItemKind::Cpu, "cannot plug vCPUs", result)
    }

    fn on_resized(&mut self, kind: ItemKind, context: &str, result: Change) -> Change {
        match result {
            Err(error) if !error.is_transient() => {
                tracing::warn!(%error, "{context} of the running domain");
                self.items.push(Item::new(kind, "").failed(format!("{context}: {error}")));
                Ok(())
            }
            result => result,
        }
    }

    /// Decides on a disk's new size. After a failure the guest still has its disk.
    pub(super) fn on_disk_grown(&mut self, result: Result<bool, HypervisorError>) -> Change {
        let Some(Step::Resize { volume, size, .. }) = self.steps.pop_front() else { return Ok(()) };
        match result {
            Ok(true) => tracing::info!(volume, size, "resized the disk to its claim"),
            Ok(false) => {}
            Err(error) if error.is_transient() => return Err(error),
            Err(error) => {
                tracing::warn!(volume, size, %error, "cannot resize the disk to its claim");
                let message = format!("cannot resize the disk to its claim: {error}");
                self.items.push(Item::new(ItemKind::Volume, &volume).failed(message));
            }
        }
        Ok(())
    }
}
