//! The lease on the data of a VM: at most one operation at a time that needs it to hold still.
//!
//! ```text
//!        take (one write of the status, on the version that was read)
//!  free ──────────────────────────────────────────────────────────────> held by one object
//!    ^                                                                       │
//!    └── release: the operation is final, its object is gone or another one ─┘
//! ```
//!
//! The lease belongs to a UID: an object that was made again under its name does not hold it. `snapshotInProgress` and
//! `restoreInProgress`, which clients read, follow from it.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, Time};

use super::status::{OperationLease, VirtualMachineStatus};
use crate::enums::VmOperation;

/// A change of a VM that may have to wait for an operation.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Attempt {
    /// The creation of the VMI.
    Start,
    /// A live migration.
    Migration,
    /// Another operation.
    Operation,
    /// Added, removed or moved volumes.
    VolumeChange,
    /// A stopped guest that continues.
    Unpause,
    /// Another freeze of the guest's file systems.
    Freeze,
}

impl OperationLease {
    /// Returns true if a change can be made while the operation runs.
    pub fn permits(&self, attempt: Attempt) -> bool {
        use Attempt::{Freeze, Migration, Operation, Start, Unpause, VolumeChange};
        use VmOperation as Held;
        match (&self.operation, attempt) {
            (_, Operation | VolumeChange) => false,
            // Its disks would be written between two volume snapshots, or replaced beneath the guest.
            (Held::Snapshot | Held::Restore | Held::Hibernation, Start) => false,
            (_, Start) => true,
            // A volume migration is a migration. An exporter only reads.
            (Held::VolumeMigration | Held::Export, Migration) => true,
            (_, Migration) => false,
            (Held::Snapshot | Held::Hibernation, Unpause) => false,
            (_, Unpause) => true,
            // The end of one frozen window would end the other.
            (Held::Snapshot | Held::Backup | Held::Hibernation, Freeze) => false,
            (_, Freeze) => true,
        }
    }

    /// Returns the text that names the holder, such as `snapshot "s" in progress`.
    pub fn holder(&self) -> String {
        let operation = match &self.operation {
            VmOperation::Snapshot => "snapshot",
            VmOperation::Restore => "restore",
            VmOperation::MemoryDump => "memory dump",
            VmOperation::VolumeMigration => "volume migration",
            VmOperation::Backup => "backup",
            VmOperation::Export => "export",
            VmOperation::Hibernation => "hibernation",
            VmOperation::Other(name) => name,
        };
        format!("{operation} {:?} in progress", self.name)
    }
}

impl VirtualMachineStatus {
    /// Returns the lease that forbids a change.
    pub fn forbids(&self, attempt: Attempt) -> Option<&OperationLease> {
        self.operation.as_ref().filter(|lease| !lease.permits(attempt))
    }

    /// Returns true if the object with this metadata holds the lease.
    pub fn is_held_by(&self, object: &ObjectMeta) -> bool {
        self.operation.as_ref().is_some_and(|lease| object.uid.as_deref() == Some(lease.uid.as_str()))
    }

    /// Takes the lease for an operation that an object requests. Its holder keeps it.
    ///
    /// # Errors
    /// Returns the lease of another holder.
    pub fn take(&mut self, operation: VmOperation, object: &ObjectMeta, now: &Time) -> Result<(), OperationLease> {
        let is_held =
            self.is_held_by(object) && self.operation.as_ref().is_some_and(|lease| lease.operation == operation);
        if !is_held {
            if let Some(lease) = &self.operation {
                return Err(lease.clone());
            }
            self.operation = Some(OperationLease {
                name: object.name.clone().unwrap_or_default(),
                operation,
                since: Some(now.clone()),
                uid: object.uid.clone().unwrap_or_default(),
            });
        }
        self.show_operation();
        Ok(())
    }

    /// Holds the lease for an operation that `object` stands for, or releases it. The lease of another operation stays.
    pub fn hold(&mut self, operation: VmOperation, object: Option<&ObjectMeta>, now: &Time) {
        let is_own = |lease: &mut OperationLease| lease.operation == operation;
        if object.is_none() {
            self.operation.take_if(is_own);
        }
        if let Some(object) = object.filter(|_| self.operation.is_none()) {
            let _ = self.take(operation, object, now);
        }
        self.show_operation();
    }

    /// Releases the lease if the object with this UID holds it.
    pub fn release(&mut self, uid: &str) {
        self.operation.take_if(|lease| lease.uid == uid);
        self.show_operation();
    }

    /// Sets the fields that follow from the lease.
    pub fn show_operation(&mut self) {
        let held = |operation: VmOperation| {
            let lease = self.operation.as_ref().filter(|lease| lease.operation == operation)?;
            Some(lease.name.clone())
        };
        (self.snapshot_in_progress, self.restore_in_progress) =
            (held(VmOperation::Snapshot), held(VmOperation::Restore));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn object(uid: &str) -> ObjectMeta {
        ObjectMeta { name: Some("o".into()), uid: Some(uid.into()), ..ObjectMeta::default() }
    }

    #[test]
    fn operations_exclude_each_other_and_changes_of_the_data() {
        use Attempt::{Freeze, Migration, Operation, Start, Unpause, VolumeChange};
        for (operation, permitted) in [
            (VmOperation::Snapshot, &[][..]),
            (VmOperation::Restore, &[Unpause, Freeze]),
            (VmOperation::MemoryDump, &[Start, Unpause, Freeze]),
            (VmOperation::VolumeMigration, &[Start, Migration, Unpause, Freeze]),
            (VmOperation::Backup, &[Start, Unpause]),
            (VmOperation::Export, &[Start, Migration, Unpause, Freeze]),
            (VmOperation::Hibernation, &[]),
        ] {
            let lease = OperationLease { operation, ..OperationLease::default() };
            for attempt in [Start, Migration, Operation, VolumeChange, Unpause, Freeze] {
                assert_eq!(lease.permits(attempt), permitted.contains(&attempt), "{lease:?} {attempt:?}");
            }
        }
    }

    #[test]
    fn lease_has_one_holder_and_shows_in_the_fields_of_clients() {
        let now = Time(jiff::Timestamp::UNIX_EPOCH);
        let mut status = VirtualMachineStatus::default();
        status.take(VmOperation::Snapshot, &object("a"), &now).unwrap();
        status.take(VmOperation::Snapshot, &object("a"), &now).unwrap();
        assert_eq!(status.snapshot_in_progress.as_deref(), Some("o"));
        // An object of the same name is another one.
        let held = status.take(VmOperation::Restore, &object("b"), &now).unwrap_err();
        assert_eq!(held.holder(), "snapshot \"o\" in progress");
        status.release("b");
        assert!(status.is_held_by(&object("a")));
        status.release("a");
        status.take(VmOperation::Restore, &object("b"), &now).unwrap();
        assert_eq!((status.snapshot_in_progress, status.restore_in_progress.as_deref()), (None, Some("o")));
    }
}
