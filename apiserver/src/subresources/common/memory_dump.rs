//! Memory dumps of a VM: the claim of the dump, and requests under way.

use api::vm::{spec::VirtualMachine, status::VirtualMachineMemoryDumpRequest};

use crate::requests::error::{ApiError, Kind};

/// The error of all requests that pass the checks.
pub(crate) const NOT_AVAILABLE: ApiError = ApiError::NotAvailable("memory dump");

/// Returns 409 for a VM.
pub(crate) fn conflict(vm: &VirtualMachine, message: impl Into<String>) -> ApiError {
    ApiError::conflict(Kind::VirtualMachine, vm.metadata.name.as_deref().unwrap_or_default(), message)
}

/// Returns the request under way.
pub(crate) fn request(vm: &VirtualMachine) -> Option<&VirtualMachineMemoryDumpRequest> {
    vm.status.as_ref()?.memory_dump_request.as_ref()
}
