//! `virtualmachines/removevolume` and `virtualmachineinstances/removevolume`: unplugs a volume.

use api::subresources::RemoveVolumeRequest;
use axum::{body::Body, response::Response};
use http::Request;

use super::common::{
    call::Call,
    schema,
    specification::{Answer, Specification, VMIS, VMS},
    volumes::{Change, change_vm, change_vmi, check_gates, check_request},
};
use crate::requests::error::ApiError;

pub(super) static OF_VM: Specification = Specification {
    options: Some(schema::options::<RemoveVolumeRequest>),
    dry_run: true,
    listed: false,
    operation: "vm-removevolume",
    description: "Remove a volume from a VirtualMachine",
    ..Specification::put(VMS, "removevolume", Answer::Accepted, |call, request| Box::pin(serve_of_vm(call, request)))
};

pub(super) static OF_VMI: Specification = Specification {
    options: Some(schema::options::<RemoveVolumeRequest>),
    dry_run: true,
    operation: "vmi-removevolume",
    description: "Remove a volume from a running VM or VMI",
    ..Specification::put(VMIS, "removevolume", Answer::Accepted, |call, request| Box::pin(serve_of_vmi(call, request)))
};

async fn serve_of_vm(call: Call<'_>, request: Request<Body>) -> Result<Response, ApiError> {
    check_gates(&call.context.config.current())?;
    let (request, dry_run): (RemoveVolumeRequest, bool) = call.options_with_dry_run(request).await?;
    check_request(Change::Remove(&request))?;
    change_vm(call, &call.stored_vm().await?, Change::Remove(&request), dry_run).await
}

async fn serve_of_vmi(call: Call<'_>, request: Request<Body>) -> Result<Response, ApiError> {
    check_gates(&call.context.config.current())?;
    let (request, dry_run): (RemoveVolumeRequest, bool) = call.options_with_dry_run(request).await?;
    check_request(Change::Remove(&request))?;
    change_vmi(call, &call.stored_vmi().await?, Change::Remove(&request), dry_run).await
}
