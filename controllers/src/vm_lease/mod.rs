//! The lease on the data of a VM, as effects. `controller.rs` releases those whose holders have ended or are gone.
//!
//! ```text
//!        take: status, then finalizer         release: finalizer, then status
//!  free ──────────────────────────────> held ───────────────────────────────> free
//! ```
//! The finalizer keeps a deleted VM until its snapshot is taken. A snapshot holds the lease once the VM has both.
//!
//! A start in the instant in which the lease is taken: the launcher pod is what touches the data, and the VMI controller makes none while
//! the lease forbids the start. It reads the VMI before the lease. A holder reads the lease before the VMI, from the same caches, so that
//! one of both sees the other.

mod controller;

use api::{
    VirtualMachine, VirtualMachineStatus, VmOperation,
    constants::finalizer,
    vm::{lease::Attempt, status::OperationLease},
};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, Time};
use serde_json::{Value, json};

pub(crate) use self::controller::VmLeases;
use crate::runtime::{self, Effect, Kind};

/// Reason of a change that waits for the end of an operation on the VM's data.
pub(crate) const OPERATION: &str = "OperationInProgress";

/// Returns the text about a VM that does not start yet.
pub(crate) fn awaited(lease: &OperationLease) -> String {
    format!("the VM starts after the end of an operation: {}", lease.holder())
}

/// Returns the lease that forbids a change of a VM.
pub(crate) fn forbids(vm: &VirtualMachine, attempt: Attempt) -> Option<&OperationLease> {
    vm.status.as_ref()?.forbids(attempt)
}

/// Returns true if the object with this metadata holds the lease.
pub(crate) fn is_held_by(vm: &VirtualMachine, object: &ObjectMeta) -> bool {
    let is_held = vm.status.as_ref().is_some_and(|status| status.is_held_by(object));
    is_held && (!is_of_snapshot(vm.status.as_ref()) || has_finalizer(vm))
}

/// Returns the writes by which an object takes the lease; none if it holds the lease.
///
/// # Errors
/// Returns the lease of another object.
pub(crate) fn take(
    vm: &VirtualMachine,
    operation: VmOperation,
    object: &ObjectMeta,
    now: &Time,
) -> Result<Vec<Effect>, OperationLease> {
    let kept = if operation == VmOperation::Snapshot { finalizer_of(vm, true) } else { None };
    let mut status = vm.status.clone().unwrap_or_default();
    status.take(operation, object, now)?;
    Ok(change(vm, &status).into_iter().chain(kept).collect())
}

/// Returns the writes by which the holder with this UID releases the lease. A finalizer without a snapshot goes as well.
pub(crate) fn release(vm: &VirtualMachine, uid: &str) -> Vec<Effect> {
    let mut status = vm.status.clone().unwrap_or_default();
    status.release(uid);
    let freed = if is_of_snapshot(Some(&status)) { None } else { finalizer_of(vm, false) };
    // A VM that is being deleted may be gone with its last finalizer.
    freed.into_iter().chain(change(vm, &status)).collect()
}

fn is_of_snapshot(status: Option<&VirtualMachineStatus>) -> bool {
    let lease = status.and_then(|status| status.operation.as_ref());
    lease.is_some_and(|lease| lease.operation == VmOperation::Snapshot)
}

fn has_finalizer(vm: &VirtualMachine) -> bool {
    runtime::has_finalizer(&vm.metadata, finalizer::SNAPSHOT_SOURCE)
}

fn finalizer_of(vm: &VirtualMachine, present: bool) -> Option<Effect> {
    Effect::finalizer(Kind::VirtualMachine, &vm.metadata, finalizer::SNAPSHOT_SOURCE, present)
}

/// Returns the write of the lease, if it changes.
fn change(vm: &VirtualMachine, status: &VirtualMachineStatus) -> Option<Effect> {
    let fields = |status: &VirtualMachineStatus| -> Value {
        json!({
            "operation": status.operation,
            "snapshotInProgress": status.snapshot_in_progress,
            "restoreInProgress": status.restore_in_progress,
        })
    };
    let present = vm.status.as_ref().map(fields).unwrap_or_else(|| fields(&VirtualMachineStatus::default()));
    let wanted = fields(status);
    let patch = json!({"status": wanted});
    (present != wanted).then(|| Effect::merge(Kind::VirtualMachine, &vm.metadata, patch).of_subresource("status"))
}
