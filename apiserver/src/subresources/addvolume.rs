//! `virtualmachines/addvolume` and `virtualmachineinstances/addvolume`: plugs a volume.

use api::{VirtualMachine, VirtualMachineInstance, config::ClusterConfig, subresources::AddVolumeRequest};
use axum::{body::Body, response::Response};
use http::Request;

use super::common::{
    call::Call,
    schema,
    specification::{Answer, Specification, VMIS, VMS},
    volumes::{Change, NOT_AVAILABLE, check_gates, check_request, check_vm, check_vmi},
};
use crate::requests::error::ApiError;

pub(super) static OF_VM: Specification = Specification {
    options: Some(schema::options::<AddVolumeRequest>),
    dry_run: true,
    listed: false,
    operation: "vm-addvolume",
    description: "Add a volume to a VirtualMachine",
    ..Specification::put(VMS, "addvolume", Answer::Accepted, |call, request| Box::pin(serve_of_vm(call, request)))
};

pub(super) static OF_VMI: Specification = Specification {
    options: Some(schema::options::<AddVolumeRequest>),
    dry_run: true,
    operation: "vmi-addvolume",
    description: "Add a volume to a running VM or VMI",
    ..Specification::put(VMIS, "addvolume", Answer::Accepted, |call, request| Box::pin(serve_of_vmi(call, request)))
};

/// Rejects a change that conflicts with the VM.
fn decide_of_vm(vm: &VirtualMachine, request: &AddVolumeRequest) -> Result<(), ApiError> {
    check_vm(vm, Change::Add(request))
}

/// Rejects a change that conflicts with the VMI.
fn decide_of_vmi(
    vmi: &VirtualMachineInstance,
    request: &AddVolumeRequest,
    config: &ClusterConfig,
) -> Result<(), ApiError> {
    check_vmi(vmi, Change::Add(request), config)
}

async fn serve_of_vm(call: Call<'_>, request: Request<Body>) -> Result<Response, ApiError> {
    check_gates(&call.context.config.current())?;
    let (request, _): (AddVolumeRequest, bool) = call.options_with_dry_run(request).await?;
    check_request(Change::Add(&request))?;
    decide_of_vm(&call.vm().await?, &request)?;
    Err(NOT_AVAILABLE)
}

async fn serve_of_vmi(call: Call<'_>, request: Request<Body>) -> Result<Response, ApiError> {
    let config = call.context.config.current();
    check_gates(&config)?;
    let (request, _): (AddVolumeRequest, bool) = call.options_with_dry_run(request).await?;
    check_request(Change::Add(&request))?;
    decide_of_vmi(&call.vmi().await?, &request, &config)?;
    Err(NOT_AVAILABLE)
}
