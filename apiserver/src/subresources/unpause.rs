//! `virtualmachineinstances/unpause`: resumes the vCPUs of a paused VMI.

use api::{VirtualMachine, VirtualMachineInstance, constants::condition, subresources::PauseOptions};
use axum::{body::Body, response::Response};
use bytes::Bytes;
use http::{Request, StatusCode};

use super::common::{
    call::Call,
    schema,
    specification::{Answer, Specification, VMIS},
    vmi_checks::{check_running, conflict, node},
};
use crate::requests::error::{ApiError, Kind, empty_response};

pub(super) static SPECIFICATION: Specification = Specification {
    options: Some(schema::options::<PauseOptions>),
    dry_run: true,
    operation: "Unpause",
    description: "Let the processors go on",
    ..Specification::put(VMIS, "unpause", Answer::Empty, |call, request| Box::pin(serve(call, request)))
};

/// Rejects a VMI whose VM has a snapshot in progress. A VMI may have no VM.
fn check_vm(vm: Option<&VirtualMachine>) -> Result<(), ApiError> {
    match vm {
        Some(vm) if vm.status.as_ref().is_some_and(|status| status.snapshot_in_progress.is_some()) => {
            Err(ApiError::conflict(
                Kind::VirtualMachine,
                vm.metadata.name.as_deref().unwrap_or_default(),
                "VM snapshot is in progress",
            ))
        }
        _ => Ok(()),
    }
}

/// Returns the node of a paused VMI.
fn decide(vmi: &VirtualMachineInstance) -> Result<&str, ApiError> {
    check_running(vmi, "VMI is not running")?;
    if !vmi.has_true(condition::PAUSED) {
        return Err(conflict(vmi, "VMI is not paused"));
    }
    node(vmi)
}

async fn serve(call: Call<'_>, request: Request<Body>) -> Result<Response, ApiError> {
    let (_, dry_run) = call.options_with_dry_run::<PauseOptions>(request).await?;
    check_vm(call.vm_opt().await?.as_ref())?;
    let vmi = call.vmi().await?;
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
        assert_eq!(check_vm(None), Ok(()));
        let vm = |status: Value| -> VirtualMachine {
            serde_json::from_value(json!({
                "apiVersion": "kubevirt.io/v1", "kind": "VirtualMachine", "metadata": {"name": "vm"},
                "spec": {"template": {}}, "status": status,
            }))
            .unwrap()
        };
        assert_eq!(check_vm(Some(&vm(json!({})))), Ok(()));
        assert_eq!(
            check_vm(Some(&vm(json!({"snapshotInProgress": "s"})))),
            Err(ApiError::conflict(Kind::VirtualMachine, "vm", "VM snapshot is in progress"))
        );
    }
}
