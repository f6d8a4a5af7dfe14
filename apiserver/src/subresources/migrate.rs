//! `virtualmachines/migrate`: creates the migration that moves a running VM to another node.

use api::{
    VirtualMachineInstance, VirtualMachineInstanceMigration, enums::VmiPhase,
    migration::VirtualMachineInstanceMigrationSpec, subresources::MigrateOptions,
};
use axum::{body::Body, response::Response};
use http::{Request, StatusCode};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::api::PostParams;

use super::common::{
    call::Call,
    schema,
    specification::{Answer, Specification, VMS},
    vmi_checks::phase,
};
use crate::{
    clients::objects::refusal,
    requests::error::{ApiError, Kind, empty_response},
};

/// Prefix of the names of migrations that users request.
const GENERATE_NAME: &str = "kubevirt-migrate-vm-";

pub(super) static SPECIFICATION: Specification = Specification {
    options: Some(schema::options::<MigrateOptions>),
    dry_run: true,
    operation: "Migrate",
    description: "Move a running VirtualMachine to another node",
    ..Specification::put(VMS, "migrate", Answer::Accepted, |call, request| Box::pin(serve(call, request)))
};

/// Returns the migration of a running VM. Its other conditions are rules of admission.
fn decide(
    vm: &str,
    vmi: &VirtualMachineInstance,
    options: MigrateOptions,
) -> Result<VirtualMachineInstanceMigration, ApiError> {
    if phase(vmi) != VmiPhase::Running {
        return Err(ApiError::conflict(Kind::VirtualMachine, vm, "VM is not running"));
    }
    Ok(VirtualMachineInstanceMigration {
        metadata: ObjectMeta { generate_name: Some(GENERATE_NAME.to_owned()), ..ObjectMeta::default() },
        spec: VirtualMachineInstanceMigrationSpec {
            vmi_name: Some(vm.to_owned()),
            added_node_selector: options.added_node_selector,
            ..VirtualMachineInstanceMigrationSpec::default()
        },
        status: None,
    })
}

async fn serve(call: Call<'_>, request: Request<Body>) -> Result<Response, ApiError> {
    let (options, dry_run): (MigrateOptions, bool) = call.options_with_dry_run(request).await?;
    call.vm().await?;
    let migration = decide(&call.object.name, &call.vmi().await?, options)?;
    let params = PostParams { dry_run, ..PostParams::default() };
    let migrations = call.context.objects.migrations(&call.object.namespace);
    migrations.create(&params, &migration).await.map_err(|error| refusal(&error))?;
    Ok(empty_response(StatusCode::ACCEPTED))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::subresources::common::testing::in_phase;

    #[test]
    fn only_a_running_vm_is_migrated() {
        for phase in ["Pending", "Scheduling", "Scheduled", "Succeeded", "Failed"] {
            assert_eq!(
                decide("vm", &in_phase(phase), MigrateOptions::default()),
                Err(ApiError::conflict(Kind::VirtualMachine, "vm", "VM is not running")),
                "{phase}"
            );
        }
    }

    #[test]
    fn migration_has_the_node_selector_of_the_options() {
        let selector = [("zone".to_owned(), "a".to_owned())];
        for (options, spec) in [
            (MigrateOptions::default(), json!({"vmiName": "vm"})),
            (
                MigrateOptions { added_node_selector: selector.into(), dry_run: None },
                json!({"vmiName": "vm", "addedNodeSelector": {"zone": "a"}}),
            ),
        ] {
            let migration = json!(decide("vm", &in_phase("Running"), options).unwrap());
            assert_eq!(migration["metadata"], json!({"generateName": "kubevirt-migrate-vm-"}));
            assert_eq!(migration["spec"], spec);
        }
    }
}
