//! `virtualmachines/hibernate`: saves the guest's memory to a claim and stops the VM, or discards saved memory. It is Ferrovirt's own, and
//! discovery does not list it. virt-controller carries the request in the VM's status out.

use api::{
    Condition, HibernationPhase as Phase, VirtualMachine, VirtualMachineInstance,
    constants::condition,
    hibernation::{claim_size, guest_memory, obstacle},
    subresources::HibernateOptions,
    vm::{lease::Attempt, status::VirtualMachineHibernation as Hibernation},
};
use axum::{body::Body, response::Response};
use http::Request;
use json_patch::Patch;
use k8s_openapi::{api::core::v1::PersistentVolumeClaim, apimachinery::pkg::apis::meta::v1::Time, jiff::Timestamp};
use serde_json::json;

use super::{
    common::{
        call::Call,
        memory_dump::{self, conflict},
        schema,
        specification::{Answer, Specification, VMS},
        state_change::{NOT_RUNNING, Plan, VmPatch, add_or_replace, test, write},
        vmi_checks::check_running,
    },
    memorydump::check_volume,
};
use crate::requests::error::ApiError;

pub(super) static SPECIFICATION: Specification = Specification {
    options: Some(schema::options::<HibernateOptions>),
    dry_run: true,
    listed: false,
    operation: "Hibernate",
    description: "Save the guest's memory to a claim and stop the VirtualMachine",
    ..Specification::put(VMS, "hibernate", Answer::Accepted, |call, request| Box::pin(serve(call, request)))
};

fn hibernation(vm: &VirtualMachine) -> Option<&Hibernation> {
    vm.status.as_ref()?.hibernation.as_deref()
}

/// Rejects a VM that is hibernated, or whose data another operation needs to hold still.
fn check_vm(vm: &VirtualMachine) -> Result<(), ApiError> {
    let why = match hibernation(vm).map(|known| &known.phase) {
        None | Some(Phase::Failed) => {
            let lease = vm.status.as_ref().and_then(|status| status.forbids(Attempt::Operation));
            return lease
                .map_or(Ok(()), |lease| Err(conflict(vm, format!("can't hibernate the VM: {}", lease.holder()))));
        }
        Some(Phase::Hibernated) => "VM is hibernated already",
        Some(Phase::Removing) => "the saved memory of the VM is being removed",
        Some(_) => "a hibernation of the VM is in progress",
    };
    Err(conflict(vm, why))
}

/// Rejects a VMI whose guest cannot be saved.
fn check_vmi(vm: &VirtualMachine, vmi: &VirtualMachineInstance) -> Result<(), ApiError> {
    check_running(vmi, NOT_RUNNING)?;
    if vmi.condition(condition::PAUSED).is_some_and(Condition::is_true) {
        return Err(conflict(vm, "can't hibernate a VM whose VMI is paused"));
    }
    let status = vmi.status.as_ref();
    if status.and_then(|status| status.fs_freeze_status.as_deref()) == Some("frozen") {
        return Err(conflict(vm, "can't hibernate a VM whose guest has frozen file systems"));
    }
    let migration = status.and_then(|status| status.migration_state.as_ref());
    if migration.is_some_and(|migration| migration.end_timestamp.is_none()) {
        return Err(conflict(vm, "can't hibernate a VM whose VMI is migrating"));
    }
    match obstacle(vmi) {
        Some(obstacle) => Err(conflict(vm, format!("can't hibernate a VM with {obstacle}"))),
        None => Ok(()),
    }
}

/// Rejects a claim without room for the memory.
fn check_claim(vmi: &VirtualMachineInstance, claim: &PersistentVolumeClaim) -> Result<(), ApiError> {
    let least = claim_size(guest_memory(vmi).unwrap_or_default());
    if memory_dump::claim_size(claim)? < least {
        let least = api::quantity::bytes(least).0;
        return Err(memory_dump::claim_conflict(claim, format!("pvc must have {least} for the memory of the VM")));
    }
    Ok(())
}

/// Returns the patch of the status that discards saved memory.
fn discard(vm: &VirtualMachine) -> Result<Patch, ApiError> {
    let path = ["status", "hibernation", "phase"];
    let can_be_discarded = |phase: &Phase| match phase {
        Phase::Requested | Phase::Hibernated | Phase::Failed => true,
        // The VMI of the resume is refused: there is nothing to stop.
        Phase::Resuming => vm.status.as_ref().is_none_or(|status| !status.created),
        _ => false,
    };
    match hibernation(vm).map(|known| &known.phase) {
        Some(known) if can_be_discarded(known) => {
            Ok(Patch(vec![test(path, json!(known)), add_or_replace(path, true, json!(Phase::Removing))]))
        }
        Some(Phase::Removing) => Err(conflict(vm, "the saved memory of the VM is being removed")),
        Some(_) => Err(conflict(vm, "a hibernation of the VM is in progress: stop the VM first")),
        None => Err(conflict(vm, "VM is not hibernated")),
    }
}

/// Returns the patch of the status that requests to save the memory.
fn request(vm: &VirtualMachine, claim_name: String, since: Time) -> Patch {
    let path = ["status", "hibernation"];
    let former = hibernation(vm);
    let request = Hibernation { claim_name, since: Some(since), ..Hibernation::default() };
    Patch(vec![test(path, json!(former)), add_or_replace(path, former.is_some(), json!(request))])
}

async fn serve(call: Call<'_>, body: Request<Body>) -> Result<Response, ApiError> {
    let (options, dry_run): (HibernateOptions, bool) = call.options_with_dry_run(body).await?;
    let vm = call.vm().await?;
    let patch = if options.discard {
        discard(&vm)?
    } else {
        check_vm(&vm)?;
        let vmi = call.vmi().await?;
        check_vmi(&vm, &vmi)?;
        if !options.claim_name.is_empty() {
            check_volume(&vm, &vmi, &options.claim_name)?;
            check_claim(&vmi, &memory_dump::claim(call, &options.claim_name).await?)?;
        }
        request(&vm, options.claim_name, Time(Timestamp::now()))
    };
    write(call, Plan { vm: Some(VmPatch::Status(patch)), ..Plan::default() }, dry_run).await
}

#[cfg(test)]
mod tests {
    use serde_json::Value;

    use super::*;
    use crate::subresources::common::testing::vm_with;

    fn in_phase(phase: &str) -> VirtualMachine {
        vm_with(json!({"runStrategy": "Always"}), json!({"hibernation": {"phase": phase}}))
    }

    fn vmi(status: Value, spec: Value) -> VirtualMachineInstance {
        let mut object = json!({
            "metadata": {"name": "vm"},
            "spec": {"domain": {"devices": {}, "memory": {"guest": "1Gi"}}}, "status": {"phase": "Running"},
        });
        json_patch::merge(&mut object, &json!({"status": status, "spec": spec}));
        serde_json::from_value(object).unwrap()
    }

    fn refusal<T: std::fmt::Debug>(result: Result<T, ApiError>) -> String {
        result.err().map(|error| error.to_string()).unwrap_or_default()
    }

    #[test]
    fn a_vm_is_hibernated_once_and_alone() {
        for (phase, expected) in [
            ("Failed", ""),
            ("Requested", "in progress"),
            ("Saving", "in progress"),
            ("Hibernated", "hibernated already"),
            ("Resuming", "in progress"),
            ("Removing", "is being removed"),
        ] {
            let found = refusal(check_vm(&in_phase(phase)));
            assert!(found.contains(expected) && found.is_empty() == expected.is_empty(), "{phase}: {found}");
        }
        let held = json!({"operation": {"operation": "Snapshot", "name": "s", "uid": "u"}});
        let held = vm_with(json!({"runStrategy": "Always"}), held);
        assert!(refusal(check_vm(&held)).contains("snapshot \"s\" in progress"));
    }

    #[test]
    fn guests_that_cannot_be_saved_are_refused_by_name() {
        let vm = vm_with(json!({"runStrategy": "Always"}), json!({}));
        for (status, spec, expected) in [
            (json!({}), json!({}), ""),
            (json!({"phase": "Scheduled"}), json!({}), NOT_RUNNING),
            (json!({"conditions": [{"type": "Paused", "status": "True"}]}), json!({}), "is paused"),
            (json!({"migrationState": {"migrationUid": "m"}}), json!({}), "is migrating"),
            (json!({"fsFreezeStatus": "frozen"}), json!({}), "frozen file systems"),
            (json!({"fsFreezeStatus": "thawed"}), json!({}), ""),
            (
                json!({}),
                json!({"domain": {"devices": {"gpus": [{"name": "g", "deviceName": "x/y"}]}}}),
                "can't hibernate a VM with GPU g",
            ),
        ] {
            let found = refusal(check_vmi(&vm, &vmi(status, spec)));
            assert!(found.contains(expected) && found.is_empty() == expected.is_empty(), "{expected}: {found}");
        }
    }

    #[test]
    fn claim_must_have_room() {
        let vmi = vmi(json!({}), json!({}));
        for (spec, expected) in [
            (json!({"resources": {"requests": {"storage": "2Gi"}}}), ""),
            (json!({"resources": {"requests": {"storage": "1Gi"}}}), "pvc must have 1355Mi"),
            (json!({"volumeMode": "Block"}), "filesystem"),
            (json!({"accessModes": ["ReadOnlyMany"]}), "read only"),
        ] {
            let claim = serde_json::from_value(json!({"metadata": {"name": "c"}, "spec": spec})).unwrap();
            let found = refusal(check_claim(&vmi, &claim));
            assert!(found.contains(expected) && found.is_empty() == expected.is_empty(), "{expected}: {found}");
        }
    }

    #[test]
    fn memory_that_is_in_use_is_not_discarded() {
        for (phase, created, discarded) in [
            ("Requested", true, true),
            ("Saving", true, false),
            ("Hibernated", false, true),
            ("Resuming", true, false),
            ("Resuming", false, true),
            ("Removing", false, false),
            ("Failed", true, true),
        ] {
            let mut vm = in_phase(phase);
            vm.status.as_mut().unwrap().created = created;
            assert_eq!(discard(&vm).is_ok(), discarded, "{phase} {created}");
        }
        assert!(discard(&vm_with(json!({}), json!({}))).is_err());
        assert_eq!(
            json!(discard(&in_phase("Hibernated")).unwrap()),
            json!([
                {"op": "test", "path": "/status/hibernation/phase", "value": "Hibernated"},
                {"op": "replace", "path": "/status/hibernation/phase", "value": "Removing"},
            ])
        );
    }

    #[test]
    fn request_names_claim_and_time() {
        let since = Time("2030-01-01T00:00:00Z".parse().unwrap());
        let patch = json!(request(&vm_with(json!({}), json!({})), "c".into(), since));
        let expected = json!({"claimName": "c", "phase": "Requested", "since": "2030-01-01T00:00:00Z"});
        assert_eq!((&patch[1]["op"], &patch[1]["value"]), (&json!("add"), &expected));
    }
}
