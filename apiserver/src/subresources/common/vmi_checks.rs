//! The state of a VMI. Clients match the messages.

use api::{
    VirtualMachine, VirtualMachineInstance,
    enums::{PrintableStatus, VmiPhase},
    owner,
};

use crate::requests::error::{ApiError, Kind};

/// Longest name that the end of a message repeats. virtctl parses the first KiB of the answer to a stream that is refused, and the
/// answer contains the name twice already.
const MAX_REPEATED_NAME: usize = 100;

/// Returns the phase.
pub(crate) fn phase(vmi: &VirtualMachineInstance) -> VmiPhase {
    vmi.status.as_ref().and_then(|status| status.phase.clone()).unwrap_or_default()
}

/// Returns 409 for a VMI.
pub(crate) fn conflict(vmi: &VirtualMachineInstance, message: impl Into<String>) -> ApiError {
    ApiError::conflict(Kind::VirtualMachineInstance, vmi.metadata.name.as_deref().unwrap_or_default(), message)
}

/// Rejects a VMI that is not running with 409 and a message.
pub(crate) fn check_running(vmi: &VirtualMachineInstance, message: &str) -> Result<(), ApiError> {
    if phase(vmi) == VmiPhase::Running { Ok(()) } else { Err(conflict(vmi, message)) }
}

/// Rejects a VMI whose guest moves to another node: it goes on there as it was when its migration began.
pub(crate) fn check_not_migrating(vmi: &VirtualMachineInstance) -> Result<(), ApiError> {
    if vmi.is_migrating() { Err(conflict(vmi, "VMI is migrating")) } else { Ok(()) }
}

/// Returns the node of a scheduled or running VMI.
pub(crate) fn node(vmi: &VirtualMachineInstance) -> Result<&str, ApiError> {
    match phase(vmi) {
        VmiPhase::Running | VmiPhase::Scheduled => {}
        other => {
            return Err(ApiError::BadRequest(format!(
                "Unable to connect to VirtualMachineInstance because phase is {other} instead of Running or Scheduled"
            )));
        }
    }
    let node = vmi.status.as_ref().and_then(|status| status.node_name.as_deref()).unwrap_or_default();
    if node.is_empty() {
        return Err(ApiError::BadRequest(format!("No virt-handler on node {node} found")));
    }
    Ok(node)
}

/// Rejects a VMI that the VM of its name does not own.
pub(crate) fn check_owner(vm: &VirtualMachine, vmi: &VirtualMachineInstance) -> Result<(), ApiError> {
    if owner::is_controlled_by(&vmi.metadata, vm) {
        return Ok(());
    }
    let name = vm.metadata.name.as_deref().unwrap_or_default();
    Err(ApiError::Internal(format!("VMI {name} is not owned by the VM of its name")))
}

/// Rejects a VM without a VMI.
pub(crate) fn check_created(vm: &VirtualMachine) -> Result<(), ApiError> {
    if vm.status.as_ref().is_some_and(|status| status.created) {
        return Ok(());
    }
    let name = vm.metadata.name.as_deref().unwrap_or_default();
    Err(ApiError::conflict(Kind::VirtualMachine, name, format!("VMI is not started{}", state_of(vm))))
}

/// Returns 404 for a VMI. `vm` is the VM of its name.
pub(crate) fn missing(name: &str, vm: Option<&VirtualMachine>) -> ApiError {
    let hint = vm.map(state_of).unwrap_or_default();
    ApiError::NotFound { kind: Kind::VirtualMachineInstance, name: name.to_owned(), hint }
}

/// Returns the end of a message about a stopped VM: the command that starts it.
pub(crate) fn is_stopped(name: &str) -> String {
    if name.len() > MAX_REPEATED_NAME {
        return ": the VM is stopped; start it with: kubectl virt start".to_owned();
    }
    format!(": VM {name} is stopped; start it with: kubectl virt start {name}")
}

/// Returns the end of a message about a VM without a VMI: its state, if virt-controller has reported one.
fn state_of(vm: &VirtualMachine) -> String {
    let name = vm.metadata.name.as_deref().unwrap_or_default();
    match vm.status.as_ref().and_then(|status| status.printable_status.as_ref()) {
        None => String::new(),
        Some(PrintableStatus::Stopped) => is_stopped(name),
        Some(state) if name.len() > MAX_REPEATED_NAME => format!(": the VM has no VMI, its state is {state}"),
        Some(state) => format!(": VM {name} has no VMI, its state is {state}"),
    }
}

#[cfg(test)]
mod tests {
    use axum::{body::HttpBody, response::IntoResponse};
    use serde_json::json;

    use super::{
        super::testing::{bad, in_phase, vm_with, vmi},
        *,
    };

    #[test]
    fn node_is_known_from_scheduled_to_running() {
        assert_eq!(node(&in_phase("Running")), Ok("node1"));
        assert_eq!(node(&in_phase("Scheduled")), Ok("node1"));
        for phase in ["Pending", "Scheduling", "Succeeded", "Failed"] {
            let message = format!(
                "Unable to connect to VirtualMachineInstance because phase is {phase} instead of Running or Scheduled"
            );
            assert_eq!(node(&in_phase(phase)), bad(&message));
        }
        let lost = vmi(json!({"domain": {"devices": {}}}), json!({"phase": "Running", "nodeName": ""}));
        assert_eq!(node(&lost), bad("No virt-handler on node  found"));
    }

    #[test]
    fn missing_vmi_is_explained_by_its_vm() {
        let vm = |state| vm_with(json!({"runStrategy": "Manual"}), json!({"printableStatus": state}));
        let text = "virtualmachineinstance.kubevirt.io \"vm\" not found";
        let stopped = ": VM vm is stopped; start it with: kubectl virt start vm";
        for (vm, hint) in [
            (None, ""),
            (Some(vm(json!(null))), ""),
            (Some(vm(json!("Stopped"))), stopped),
            (Some(vm(json!("Starting"))), ": VM vm has no VMI, its state is Starting"),
        ] {
            let error = missing("vm", vm.as_ref());
            assert_eq!((error.status().as_u16(), error.to_string()), (404, format!("{text}{hint}")));
        }
        let refused = check_created(&vm(json!("Stopped"))).unwrap_err().to_string();
        assert!(refused.ends_with(&format!("VMI is not started{stopped}")), "{refused}");
    }

    #[test]
    fn answer_about_a_long_name_fits_into_the_kibibyte_that_virtctl_reads() {
        for length in [MAX_REPEATED_NAME, 253] {
            let name = "a".repeat(length);
            for state in PrintableStatus::KNOWN {
                let mut vm = vm_with(json!({"runStrategy": "Manual"}), json!({"printableStatus": state}));
                vm.metadata.name = Some(name.clone());
                for error in [missing(&name, Some(&vm)), check_created(&vm).unwrap_err()] {
                    let message = error.to_string();
                    assert!(message.contains(&name), "{message}");
                    let size = error.into_response().body().size_hint().exact();
                    assert!(size.is_some_and(|size| size <= 1024), "{state} {size:?}: {message}");
                }
            }
        }
    }

    #[test]
    fn vmi_of_a_vm_is_owned_by_it() {
        let vm: VirtualMachine = serde_json::from_value(json!({
            "apiVersion": "kubevirt.io/v1", "kind": "VirtualMachine",
            "metadata": {"name": "vmi", "namespace": "ns", "uid": "v1"},
            "spec": {"template": {}}, "status": {"created": true},
        }))
        .unwrap();
        let mut owned = in_phase("Running");
        assert!(check_owner(&vm, &owned).is_err());
        owned.metadata.owner_references = serde_json::from_value(json!([
            {"apiVersion": "kubevirt.io/v1", "kind": "VirtualMachine", "name": "vmi", "uid": "v1", "controller": true}
        ]))
        .unwrap();
        assert_eq!(check_owner(&vm, &owned), Ok(()));
        assert_eq!(check_created(&vm), Ok(()));
        let halted = VirtualMachine { status: None, ..vm };
        assert_eq!(check_created(&halted), Err(ApiError::conflict(Kind::VirtualMachine, "vmi", "VMI is not started")));
    }
}
