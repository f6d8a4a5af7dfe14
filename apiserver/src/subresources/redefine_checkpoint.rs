//! `virtualmachineinstances/redefine-checkpoint`: defines a checkpoint in libvirt.

use api::{VirtualMachineInstance, subresources::BackupCheckpoint};
use axum::{body::Body, response::Response};
use http::Request;

use super::common::{
    call::Call,
    schema,
    specification::{Answer, Specification, VMIS},
    vmi_checks::{conflict, node},
};
use crate::requests::error::ApiError;

pub(super) static SPECIFICATION: Specification = Specification {
    options: Some(schema::options::<BackupCheckpoint>),
    operation: "RedefineCheckpoint",
    description: "Make a checkpoint known again",
    ..Specification::put(VMIS, "redefine-checkpoint", Answer::Empty, |call, request| Box::pin(serve(call, request)))
};

/// Returns the node of a VMI with changed block tracking.
fn decide(vmi: &VirtualMachineInstance) -> Result<&str, ApiError> {
    let tracking = vmi.status.as_ref().and_then(|status| status.changed_block_tracking.as_ref());
    if tracking.is_none_or(|tracking| tracking.state != "Enabled") {
        return Err(conflict(vmi, "ChangedBlockTracking is not enabled"));
    }
    node(vmi)
}

async fn serve(call: Call<'_>, request: Request<Body>) -> Result<Response, ApiError> {
    let vmi = call.vmi().await?;
    decide(&vmi)?;
    let _: BackupCheckpoint = call.options(request).await?;
    Err(ApiError::NotAvailable("backup of running VMIs"))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::subresources::common::testing::{self, in_phase, vmi};

    #[test]
    fn checkpoint_needs_changed_block_tracking() {
        assert_eq!(decide(&in_phase("Running")), testing::conflict("ChangedBlockTracking is not enabled"));
        let tracked = vmi(
            json!({"domain": {"devices": {}}}),
            json!({"phase": "Running", "changedBlockTracking": {"state": "Enabled"}}),
        );
        assert_eq!(decide(&tracked), Ok("node1"));
    }
}
