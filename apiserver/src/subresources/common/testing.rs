//! Objects and errors for tests of subresources.

use api::{VirtualMachine, VirtualMachineInstance};
use serde_json::{Value, json};

use super::state_change::{Plan, VmPatch};
use crate::requests::error::{ApiError, Kind};

/// Returns the VMI `ns/vmi` on `node1`, unless the status contains another node.
pub(crate) fn vmi(spec: Value, mut status: Value) -> VirtualMachineInstance {
    if status["nodeName"].is_null() {
        status["nodeName"] = json!("node1");
    }
    serde_json::from_value(json!({
        "apiVersion": "kubevirt.io/v1",
        "kind": "VirtualMachineInstance",
        "metadata": {"name": "vmi", "namespace": "ns", "uid": "u1"},
        "spec": spec,
        "status": status,
    }))
    .unwrap()
}

/// Returns a VMI in a phase.
pub(crate) fn in_phase(phase: &str) -> VirtualMachineInstance {
    vmi(json!({"domain": {"devices": {}}}), json!({"phase": phase}))
}

/// Returns a running VMI with conditions.
pub(crate) fn with_conditions(names: &[&str]) -> VirtualMachineInstance {
    let conditions = names.iter().map(|name| json!({"type": name, "status": "True"})).collect::<Vec<_>>();
    vmi(json!({"domain": {"devices": {}}}), json!({"phase": "Running", "conditions": conditions}))
}

/// Returns a running VMI with devices.
pub(crate) fn with_devices(devices: Value, phase: &str) -> VirtualMachineInstance {
    vmi(json!({"domain": {"devices": devices}}), json!({"phase": phase}))
}

/// Returns 400.
pub(crate) fn bad<T: std::fmt::Debug>(message: &str) -> Result<T, ApiError> {
    Err(ApiError::BadRequest(message.into()))
}

/// Returns 409 for the VMI.
pub(crate) fn conflict<T: std::fmt::Debug>(message: &str) -> Result<T, ApiError> {
    Err(ApiError::conflict(Kind::VirtualMachineInstance, "vmi", message))
}

/// Returns the VM `ns/vm`.
pub(crate) fn vm_with(mut spec: Value, status: Value) -> VirtualMachine {
    spec["template"] = json!({"spec": {"domain": {"devices": {}}}});
    serde_json::from_value(json!({
        "apiVersion": "kubevirt.io/v1",
        "kind": "VirtualMachine",
        "metadata": {"name": "vm", "namespace": "ns"},
        "spec": spec,
        "status": status,
    }))
    .unwrap()
}

/// Returns a VM with a run strategy.
pub(crate) fn with_strategy(strategy: &str) -> VirtualMachine {
    vm_with(json!({"runStrategy": strategy}), json!({"printableStatus": "x"}))
}

/// Returns the VMI of the VM, with a grace period of 30 seconds.
pub(crate) fn vmi_in(phase: &str) -> VirtualMachineInstance {
    serde_json::from_value(json!({
        "apiVersion": "kubevirt.io/v1",
        "kind": "VirtualMachineInstance",
        "metadata": {"name": "vm", "namespace": "ns", "uid": "u1"},
        "spec": {"domain": {"devices": {}}, "terminationGracePeriodSeconds": 30},
        "status": {"phase": phase},
    }))
    .unwrap()
}

/// Returns the patch of the VM's spec.
pub(crate) fn spec_patch(plan: Result<Plan, ApiError>) -> Value {
    match plan.unwrap().vm {
        Some(VmPatch::Spec(patch)) => json!(patch),
        other => panic!("no patch of the spec: {other:?}"),
    }
}

/// Returns the patch of the VM's status.
pub(crate) fn status_patch(plan: Result<Plan, ApiError>) -> Value {
    match plan.unwrap().vm {
        Some(VmPatch::Status(patch)) => json!(patch),
        other => panic!("no patch of the status: {other:?}"),
    }
}

/// Returns the message of a 409 for the VM.
pub(crate) fn conflict_of_vm<T>(result: Result<T, ApiError>) -> String {
    match result {
        Err(ApiError::Conflict { kind: Kind::VirtualMachine, name, message }) if name == "vm" => message,
        Err(other) => panic!("no conflict: {other:?}"),
        Ok(_) => panic!("accepted"),
    }
}

/// Returns the patch that adds the first requests.
pub(crate) fn state_requests(requests: Value) -> Value {
    json!([
        {"op": "test", "path": "/status/stateChangeRequests", "value": null},
        {"op": "add", "path": "/status/stateChangeRequests", "value": requests},
    ])
}
