//! `virtualmachineinstances/unpause`: resumes the vCPUs of a paused VMI.

use api::{
    SavedMemoryPhase as Memory, VirtualMachine, VirtualMachineInstance, VmOperation, constants::condition,
    subresources::PauseOptions, vm::lease::Attempt,
};
use axum::{body::Body, response::Response};
use bytes::Bytes;
use http::{Request, StatusCode};

use super::common::{
    call::Call,
    schema,
    specification::{Answer, Specification, VMIS},
    vmi_checks::{check_not_migrating, check_running, conflict, node},
};
use crate::requests::error::{ApiError, Kind, empty_response};

pub(super) static SPECIFICATION: Specification = Specification {
    options: Some(schema::options::<PauseOptions>),
    dry_run: true,
    operation: "Unpause",
    description: "Let the processors go on",
    ..Specification::put(VMIS, "unpause", Answer::Empty, |call, request| Box::pin(serve(call, request)))
};

/// Rejects a VMI whose VM has an operation in progress that needs it paused. A VMI may have no VM.
fn check_vm(vm: Option<&VirtualMachine>, vmi: Option<&VirtualMachineInstance>) -> Result<(), ApiError> {
    let Some(vm) = vm else { return Ok(()) };
    let Some(lease) = vm.status.as_ref().and_then(|status| status.forbids(Attempt::Unpause)) else { return Ok(()) };
    let memory = vmi.and_then(|vmi| vmi.status.as_ref()?.hibernation.as_ref());
    let is_in = |phases: &[Memory]| memory.is_some_and(|memory| phases.contains(&memory.phase));
    let text = match lease.operation {
        // No paused guest is saved. While the launcher saves one, the VMI does not show its pause, and the launcher refuses. The VM
        // shows a moment later that the memory was restored.
        VmOperation::Hibernation if is_in(&[Memory::Requested, Memory::Saving, Memory::Restored]) => return Ok(()),
        // Clients know this text.
        VmOperation::Snapshot => "VM snapshot is in progress".to_owned(),
        _ => format!("cannot unpause the guest: {}", lease.holder()),
    };
    Err(ApiError::conflict(Kind::VirtualMachine, vm.metadata.name.as_deref().unwrap_or_default(), text))
}

/// Returns the node of a paused VMI.
fn decide(vmi: &VirtualMachineInstance) -> Result<&str, ApiError> {
    check_running(vmi, "VMI is not running")?;
    if !vmi.has_true(condition::PAUSED) {
        return Err(conflict(vmi, "VMI is not paused"));
    }
    check_not_migrating(vmi)?;
    node(vmi)
}

async fn serve(call: Call<'_>, request: Request<Body>) -> Result<Response, ApiError> {
    let (_, dry_run) = call.options_with_dry_run::<PauseOptions>(request).await?;
    let (vm, vmi) = (call.vm_opt().await?, call.vmi().await);
    check_vm(vm.as_ref(), vmi.as_ref().ok())?;
    let vmi = vmi?;
    let node = decide(&vmi)?;
    if dry_run { Ok(empty_response(StatusCode::OK)) } else { call.act(node, "unpause", Bytes::new()).await }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;
    use crate::subresources::common::testing::{self, in_phase, with_conditions};

    #[test]
    fn only_a_paused_guest_is_unpaused() {
        assert_eq!(decide(&with_conditions(&["Paused"])), Ok("node1"));
        assert_eq!(decide(&in_phase("Running")), testing::conflict("VMI is not paused"));
        assert_eq!(decide(&in_phase("Failed")), testing::conflict("VMI is not running"));
        let mut migrating = with_conditions(&["Paused"]);
        let state = json!({"startTimestamp": "2030-01-01T00:00:00Z"});
        migrating.status.as_mut().unwrap().migration_state = serde_json::from_value(state).unwrap();
        assert_eq!(decide(&migrating), testing::conflict("VMI is migrating"));
        assert_eq!(check_vm(None, None), Ok(()));
        let vm = |status: Value| -> VirtualMachine {
            serde_json::from_value(json!({
                "apiVersion": "kubevirt.io/v1", "kind": "VirtualMachine", "metadata": {"name": "vm"},
                "spec": {"template": {}}, "status": status,
            }))
            .unwrap()
        };
        assert_eq!(check_vm(Some(&vm(json!({}))), None), Ok(()));
        for (operation, text) in [
            ("Snapshot", Some("VM snapshot is in progress")),
            ("Hibernation", Some("cannot unpause the guest: hibernation \"o\" in progress")),
            ("MemoryDump", None),
        ] {
            let held = vm(json!({"operation": {"operation": operation, "name": "o", "uid": "u"}}));
            let expected = text.map_or(Ok(()), |text| Err(ApiError::conflict(Kind::VirtualMachine, "vm", text)));
            assert_eq!(check_vm(Some(&held), None), expected, "{operation}");
        }
        // The guest was paused before it could be saved, or its VM has not recorded yet that the memory was restored.
        let resuming = vm(json!({"operation": {"operation": "Hibernation", "name": "o", "uid": "u"}}));
        for (phase, is_permitted) in [("Requested", true), ("Saving", true), ("Restoring", false), ("Restored", true)] {
            let memory = json!({"claimName": "c", "fileName": "f", "phase": phase});
            let vmi = testing::vmi(json!({"domain": {"devices": {}}}), json!({"hibernation": memory}));
            assert_eq!(check_vm(Some(&resuming), Some(&vmi)).is_ok(), is_permitted, "{phase}");
        }
    }
}
