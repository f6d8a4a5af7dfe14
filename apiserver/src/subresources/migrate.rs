//! `virtualmachines/migrate`: moves a running VM to another node.

use api::{VirtualMachineInstance, enums::VmiPhase, subresources::MigrateOptions};
use axum::{body::Body, response::Response};
use http::Request;

use super::common::{
    call::Call,
    schema,
    specification::{Answer, Specification, VMS},
    vmi_checks::phase,
};
use crate::requests::error::{ApiError, Kind};

pub(super) static SPECIFICATION: Specification = Specification {
    options: Some(schema::options::<MigrateOptions>),
    dry_run: true,
    operation: "Migrate",
    description: "Move a running VirtualMachine to another node",
    ..Specification::put(VMS, "migrate", Answer::Accepted, |call, request| Box::pin(serve(call, request)))
};

/// Rejects a VM that is not running.
fn decide(vm: &str, vmi: &VirtualMachineInstance) -> Result<(), ApiError> {
    if phase(vmi) == VmiPhase::Running {
        Ok(())
    } else {
        Err(ApiError::conflict(Kind::VirtualMachine, vm, "VM is not running"))
    }
}

async fn serve(call: Call<'_>, request: Request<Body>) -> Result<Response, ApiError> {
    let _: (MigrateOptions, bool) = call.options_with_dry_run(request).await?;
    call.vm().await?;
    decide(&call.object.name, &call.vmi().await?)?;
    Err(ApiError::NotAvailable("live migration"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::subresources::common::testing::in_phase;

    #[test]
    fn only_a_running_vm_is_migrated() {
        assert_eq!(decide("vm", &in_phase("Running")), Ok(()));
        assert_eq!(
            decide("vm", &in_phase("Scheduled")),
            Err(ApiError::conflict(Kind::VirtualMachine, "vm", "VM is not running"))
        );
    }
}
