//! Memory dumps of a VM: the request in its status, which virt-controller carries out, and claims for the memory of a guest.

use api::vm::{spec::VirtualMachine, status::VirtualMachineMemoryDumpRequest};
use axum::response::Response;
use json_patch::Patch;
use k8s_openapi::{api::core::v1::PersistentVolumeClaim, apimachinery::pkg::api::resource::Quantity};
use kube::Api;
use serde_json::json;

use super::{
    call::Call,
    state_change::{Plan, VmPatch, add_or_replace, test, write},
};
use crate::{
    clients::objects::message,
    requests::error::{ApiError, Kind},
};

/// Returns 409 for a VM.
pub(crate) fn conflict(vm: &VirtualMachine, message: impl Into<String>) -> ApiError {
    ApiError::conflict(Kind::VirtualMachine, vm.metadata.name.as_deref().unwrap_or_default(), message)
}

/// Returns the request under way.
pub(crate) fn request(vm: &VirtualMachine) -> Option<&VirtualMachineMemoryDumpRequest> {
    vm.status.as_ref()?.memory_dump_request.as_deref()
}

/// Returns the patch of the status that replaces the request.
fn patch(vm: &VirtualMachine, request: &VirtualMachineMemoryDumpRequest) -> Patch {
    let path = ["status", "memoryDumpRequest"];
    let former = self::request(vm);
    Patch(vec![test(path, json!(former)), add_or_replace(path, former.is_some(), json!(request))])
}

/// Writes a new request.
pub(crate) async fn submit(
    call: Call<'_>,
    vm: &VirtualMachine,
    request: &VirtualMachineMemoryDumpRequest,
) -> Result<Response, ApiError> {
    let plan = Plan { vm: Some(VmPatch::Status(patch(vm, request))), ..Plan::default() };
    write(call, plan, false).await
}

/// Reads a claim that a request names.
pub(crate) async fn claim(call: Call<'_>, name: &str) -> Result<PersistentVolumeClaim, ApiError> {
    let claims = Api::<PersistentVolumeClaim>::namespaced(call.context.objects.client.clone(), &call.object.namespace);
    let found = claims.get_opt(name).await;
    found
        .map_err(|error| ApiError::Internal(format!("unable to retrieve pvc [{name}]: {}", message(&error))))?
        .ok_or_else(|| ApiError::not_found(Kind::PersistentVolumeClaim, name))
}

/// Returns 409 for a claim.
pub(crate) fn claim_conflict(claim: &PersistentVolumeClaim, message: impl Into<String>) -> ApiError {
    ApiError::conflict(Kind::PersistentVolumeClaim, claim.metadata.name.as_deref().unwrap_or_default(), message)
}

/// Returns a size in bytes that is requested for a claim.
pub(crate) fn claim_bytes(claim: &PersistentVolumeClaim, quantity: Option<&Quantity>) -> Result<i64, ApiError> {
    let name = claim.metadata.name.as_deref().unwrap_or_default();
    let bytes = quantity.map(api::quantity::units).transpose();
    bytes.map(Option::unwrap_or_default).map_err(|error| ApiError::Internal(format!("size of pvc {name}: {error}")))
}

/// Returns the size of a claim. Rejects one without a file system that can be written.
pub(crate) fn claim_size(claim: &PersistentVolumeClaim) -> Result<i64, ApiError> {
    let Some(spec) = &claim.spec else { return Ok(0) };
    if spec.volume_mode.as_deref() == Some("Block") {
        return Err(claim_conflict(claim, "pvc should be filesystem pvc"));
    }
    let mut modes = spec.access_modes.iter().flatten().peekable();
    if modes.peek().is_some() && modes.all(|mode| mode == "ReadOnlyMany") {
        return Err(claim_conflict(claim, "pvc access mode can't be read only"));
    }
    let requests = spec.resources.as_ref().and_then(|resources| resources.requests.as_ref());
    claim_bytes(claim, requests.and_then(|requests| requests.get("storage")))
}

#[cfg(test)]
mod tests {
    use serde_json::Value;

    use super::*;

    #[test]
    fn the_request_is_written_only_if_it_is_still_the_known_one() {
        let vm = |request: Value| -> VirtualMachine {
            serde_json::from_value(json!({
                "apiVersion": "kubevirt.io/v1", "kind": "VirtualMachine", "metadata": {"name": "vm"},
                "spec": {"template": {}}, "status": {"memoryDumpRequest": request},
            }))
            .unwrap()
        };
        let next = VirtualMachineMemoryDumpRequest {
            claim_name: "c".into(),
            phase: "Associating".into(),
            ..VirtualMachineMemoryDumpRequest::default()
        };
        let (value, path) = (json!({"claimName": "c", "phase": "Associating"}), "/status/memoryDumpRequest");
        assert_eq!(
            json!(patch(&vm(Value::Null), &next)),
            json!([{"op": "test", "path": path, "value": null}, {"op": "add", "path": path, "value": value}])
        );
        let former = json!({"claimName": "c", "phase": "Completed", "fileName": "f"});
        assert_eq!(
            json!(patch(&vm(former.clone()), &next)),
            json!([{"op": "test", "path": path, "value": former}, {"op": "replace", "path": path, "value": value}])
        );
    }
}
