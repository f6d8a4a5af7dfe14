//! `virtualmachineinstances/backup`: backs up the disks of a running VMI.

use api::{VirtualMachineInstance, subresources::BackupOptions};
use axum::{body::Body, response::Response};
use http::Request;

use super::common::{
    call::Call,
    schema,
    specification::{Answer, Specification, VMIS},
    vmi_checks::{check_running, node},
};
use crate::requests::error::ApiError;

pub(super) static SPECIFICATION: Specification = Specification {
    options: Some(schema::options::<BackupOptions>),
    operation: "Backup",
    description: "Back up the disks of a running VMI",
    ..Specification::put(VMIS, "backup", Answer::Empty, |call, request| Box::pin(serve(call, request)))
};

/// Returns the node of a running VMI.
fn decide(vmi: &VirtualMachineInstance) -> Result<&str, ApiError> {
    check_running(vmi, "VM is not running")?;
    node(vmi)
}

async fn serve(call: Call<'_>, request: Request<Body>) -> Result<Response, ApiError> {
    let vmi = call.vmi().await?;
    decide(&vmi)?;
    let _: BackupOptions = call.options(request).await?;
    Err(ApiError::NotAvailable("backup of running VMIs"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::subresources::common::testing::{self, in_phase};

    #[test]
    fn only_a_running_guest_is_backed_up() {
        assert_eq!(decide(&in_phase("Running")), Ok("node1"));
        assert_eq!(decide(&in_phase("Scheduled")), testing::conflict("VM is not running"));
    }
}
