//! `virtualmachineinstances/freeze`: freezes the guest's file systems, with a time limit.

use api::{VirtualMachine, VirtualMachineInstance, subresources::FreezeUnfreezeTimeout, vm::lease::Attempt};
use axum::{body::Body, response::Response};
use bytes::Bytes;
use http::Request;
use serde_json::json;

use super::common::{
    call::Call,
    schema,
    specification::{Answer, Specification, VMIS},
    vmi_checks::{check_running, node},
};
use crate::requests::error::{ApiError, Kind};

pub(super) static SPECIFICATION: Specification = Specification {
    options: Some(schema::options::<FreezeUnfreezeTimeout>),
    operation: "Freeze",
    description: "Freeze the guest's file systems",
    ..Specification::put(VMIS, "freeze", Answer::Empty, |call, request| Box::pin(serve(call, request)))
};

/// Returns the node of a running VMI.
fn decide(vmi: &VirtualMachineInstance) -> Result<&str, ApiError> {
    check_running(vmi, "VM is not running")?;
    node(vmi)
}

/// Rejects options without a valid time limit.
fn check_options(options: &FreezeUnfreezeTimeout) -> Result<(), ApiError> {
    let Some(timeout) = &options.unfreeze_timeout else {
        return Err(ApiError::BadRequest("Unfreeze timeout in freeze request is not set".to_owned()));
    };
    api::duration::parse(timeout)
        .map_err(|error| ApiError::BadRequest(format!("Unfreeze timeout in freeze request is not valid: {error}")))?;
    Ok(())
}

/// Rejects a VM whose guest another operation freezes.
fn check_lease(vm: Option<&VirtualMachine>) -> Result<(), ApiError> {
    let Some(vm) = vm else { return Ok(()) };
    match vm.status.as_ref().and_then(|status| status.forbids(Attempt::Freeze)) {
        Some(lease) => Err(ApiError::conflict(
            Kind::VirtualMachine,
            vm.metadata.name.as_deref().unwrap_or_default(),
            format!("cannot freeze the guest: {}", lease.holder()),
        )),
        None => Ok(()),
    }
}

async fn serve(call: Call<'_>, request: Request<Body>) -> Result<Response, ApiError> {
    let vmi = call.vmi().await?;
    let node = decide(&vmi)?;
    let options: FreezeUnfreezeTimeout = call.options(request).await?;
    check_options(&options)?;
    // virt-controller freezes the guest for the holder of the lease.
    if !call.object.is_controller {
        check_lease(call.vm_opt().await?.as_ref())?;
    }
    call.act(node, "freeze", Bytes::from(json!(options).to_string())).await
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::subresources::common::testing::{self, bad, in_phase};

    #[test]
    fn freeze_needs_a_time_limit() {
        let limited = |timeout: &str| FreezeUnfreezeTimeout { unfreeze_timeout: Some(timeout.into()) };
        assert_eq!(check_options(&limited("5m0s")), Ok(()));
        assert_eq!(check_options(&limited("0s")), Ok(()));
        assert_eq!(
            check_options(&FreezeUnfreezeTimeout::default()),
            bad("Unfreeze timeout in freeze request is not set")
        );
        assert!(check_options(&limited("soon")).is_err());
        let vm = json!({
            "metadata": {"name": "v"}, "spec": {"template": {}},
            "status": {"operation": {"operation": "Snapshot", "name": "s", "uid": "u"}},
        });
        let vm: VirtualMachine = serde_json::from_value(vm).unwrap();
        assert!(check_lease(Some(&vm)).is_err() && check_lease(None).is_ok());
        assert_eq!(decide(&in_phase("Running")), Ok("node1"));
        assert_eq!(decide(&in_phase("Scheduled")), testing::conflict("VM is not running"));
    }
}
