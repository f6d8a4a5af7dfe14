//! Memory dumps of a VM: the request in its status, which virt-controller carries out.

use api::vm::{spec::VirtualMachine, status::VirtualMachineMemoryDumpRequest};
use axum::response::Response;
use json_patch::Patch;
use serde_json::json;

use super::{
    call::Call,
    state_change::{Plan, VmPatch, add_or_replace, test, write},
};
use crate::requests::error::{ApiError, Kind};

/// Returns 409 for a VM.
pub(crate) fn conflict(vm: &VirtualMachine, message: impl Into<String>) -> ApiError {
    ApiError::conflict(Kind::VirtualMachine, vm.metadata.name.as_deref().unwrap_or_default(), message)
}

/// Returns the request under way.
pub(crate) fn request(vm: &VirtualMachine) -> Option<&VirtualMachineMemoryDumpRequest> {
    vm.status.as_ref()?.memory_dump_request.as_ref()
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
