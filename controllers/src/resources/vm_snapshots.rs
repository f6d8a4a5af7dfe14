//! Snapshots of VMs, their contents, and restores.

use api::snapshot::{VirtualMachineSnapshot, content::VirtualMachineSnapshotContent, restore::VirtualMachineRestore};
use k8s_openapi::api::core::v1::TypedLocalObjectReference;

use crate::cache::{Cached, Key};

/// Indices of snapshots.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum SnapshotIndex {
    /// VM that it is a snapshot of.
    Vm(Key),
}

/// Indices of contents.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum ContentIndex {
    /// Snapshot that it belongs to.
    Snapshot(Key),
    /// Volume snapshot that it names.
    VolumeSnapshot(Key),
}

/// Indices of restores.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum RestoreIndex {
    /// VM that it restores.
    Vm(Key),
    /// Snapshot that it restores from.
    Snapshot(Key),
}

/// Returns the key of the VM that an object of a namespace names.
pub(crate) fn vm_key(namespace: Option<&String>, reference: &TypedLocalObjectReference) -> Option<Key> {
    let is_vm = reference.kind == "VirtualMachine" && reference.api_group.as_deref() == Some(api::constants::GROUP);
    is_vm.then(|| Key::new(namespace.cloned().unwrap_or_default(), reference.name.as_str()))
}

impl Cached for VirtualMachineSnapshot {
    type Index = SnapshotIndex;
    whole!();

    fn indices(&self) -> Vec<SnapshotIndex> {
        vm_key(self.metadata.namespace.as_ref(), &self.spec.source).map(SnapshotIndex::Vm).into_iter().collect()
    }
}

impl Cached for VirtualMachineSnapshotContent {
    type Index = ContentIndex;
    whole!();

    fn indices(&self) -> Vec<ContentIndex> {
        let namespace = self.metadata.namespace.as_deref().unwrap_or_default();
        let key = |name: &String| Key::new(namespace, name.as_str());
        let snapshot = self.spec.virtual_machine_snapshot_name.as_ref().map(|name| ContentIndex::Snapshot(key(name)));
        let backups = self.spec.volume_backups.iter().filter_map(|backup| backup.volume_snapshot_name.as_ref());
        snapshot.into_iter().chain(backups.map(|name| ContentIndex::VolumeSnapshot(key(name)))).collect()
    }
}

impl Cached for VirtualMachineRestore {
    type Index = RestoreIndex;
    whole!();

    fn indices(&self) -> Vec<RestoreIndex> {
        let namespace = self.metadata.namespace.as_ref();
        let snapshot = self.spec.virtual_machine_snapshot_name.as_str();
        let snapshot = Key::new(namespace.cloned().unwrap_or_default(), snapshot);
        let vm = vm_key(namespace, &self.spec.target).map(RestoreIndex::Vm);
        vm.into_iter().chain([RestoreIndex::Snapshot(snapshot)]).collect()
    }
}

kept!(whole VirtualMachineSnapshot written as VmSnapshot);
kept!(whole VirtualMachineSnapshotContent written as VmSnapshotContent);
kept!(whole VirtualMachineRestore written as VmRestore);
