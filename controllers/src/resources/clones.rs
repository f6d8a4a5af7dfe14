//! VirtualMachineClones.

use api::clone::VirtualMachineClone;

use crate::cache::{Cached, Key};

/// Indices of clones.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum CloneIndex {
    /// VM that is cloned.
    Source(Key),
    /// Snapshot that is cloned.
    Snapshot(Key),
    /// VM that is made.
    Target(Key),
    /// Restore that makes it.
    Restore(Key),
}

impl Cached for VirtualMachineClone {
    type Index = CloneIndex;
    whole!();

    fn indices(&self) -> Vec<CloneIndex> {
        let key = |name: &str| Key::beside(&self.metadata, name);
        let source = self.spec.source.as_ref().map(|source| match source.kind.as_str() {
            "VirtualMachine" => CloneIndex::Source(key(&source.name)),
            _ => CloneIndex::Snapshot(key(&source.name)),
        });
        let status = self.status.as_ref();
        let target = status.and_then(|status| status.target_name.as_deref());
        let target = target.or(self.spec.target.as_ref().map(|target| target.name.as_str()));
        let restore = status.and_then(|status| status.restore_name.as_deref());
        let target = target.map(|name| CloneIndex::Target(key(name)));
        source.into_iter().chain(target).chain(restore.map(|name| CloneIndex::Restore(key(name)))).collect()
    }
}

kept!(whole VirtualMachineClone written as VmClone);
