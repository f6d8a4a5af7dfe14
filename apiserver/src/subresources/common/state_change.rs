//! Changes of a VM's state by `start`, `stop` and `restart`.
//!
//! The specification contains the state for some run strategies, the status a request for the others:
//!
//! ```text
//!                 start                                   stop
//! Halted          runStrategy := Always (*)               a shorter grace period for a VMI that is stopping
//! Always, Once    rejected                                runStrategy := Halted
//! Manual          request Start                           request Stop
//! RerunOnFailure  request Start, unless it failed         request Stop
//! WaitAsReceiver  nothing                                 nothing
//! (*) with paused: request Start with data paused=true; virt-controller sets the run strategy
//! A hibernated VM is started by a request with each strategy but Halted and WaitAsReceiver.
//! ```
//!
//! Each change is a JSON patch that tests the values it was decided on, so a VM that has changed since then is not changed.

use api::{
    Condition,
    enums::{RunStrategy, StateChangeAction, VmiPhase},
    vm::{
        spec::VirtualMachine,
        status::{VirtualMachineStateChangeRequest, VirtualMachineStatus},
    },
    vmi::spec::VirtualMachineInstance,
};
use axum::response::Response;
use http::StatusCode;
use json_patch::{
    AddOperation, Patch, PatchOperation, RemoveOperation, ReplaceOperation, TestOperation, jsonptr::PointerBuf,
};
use kube::api::PatchParams;
use serde_json::{Value, json};

use super::call::Call;
use crate::{
    clients::{
        objects::{message, refusal},
        patches,
    },
    requests::error::{ApiError, Kind, empty_response},
};

/// Message of kube-apiserver, with status 422, for a JSON patch whose tests fail. It does not name the reason.
const TEST_FAILED: &str = "the server rejected our request due to an error in our request";
/// Message for that case.
const MODIFIED: &str = "the object has been modified by another request; try again";
/// Message for a VM without a running VMI.
pub(crate) const NOT_RUNNING: &str = "VM is not running";
/// Message for a VM after a failed volume migration.
pub(crate) const RECOVERY_REQUIRED: &str = "VM recovery required: Volume migration failed, leaving some volumes pointing to \
                                 non-consistent targets; manual intervention is needed to reassign them to their \
                                 original volumes.";

/// Patches in the order of their writes.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Plan {
    /// A patch of the VMI.
    pub vmi: Option<VmiPatch>,
    /// A patch of the VM.
    pub vm: Option<VmPatch>,
}

/// A patch of the VMI.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct VmiPatch {
    /// The patch.
    pub apply: Patch,
    /// The patch that restores the VMI if the patch of the VM fails.
    pub undo: Option<Patch>,
}

/// A patch of the VM.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum VmPatch {
    /// Of the main resource.
    Spec(Patch),
    /// Of the status subresource.
    Status(Patch),
}

/// The VM and the VMI of the same name.
#[derive(Clone, Copy)]
pub(crate) struct Observed<'a> {
    /// The VM.
    pub vm: &'a VirtualMachine,
    /// Its VMI, if there is one.
    pub vmi: Option<&'a VirtualMachineInstance>,
}

impl Observed<'_> {
    /// Returns 409 for the VM.
    pub(crate) fn conflict(&self, message: impl Into<String>) -> ApiError {
        ApiError::conflict(Kind::VirtualMachine, self.vm.metadata.name.as_deref().unwrap_or_default(), message)
    }

    /// Returns the phase of the VMI.
    pub(crate) fn phase(&self) -> VmiPhase {
        self.vmi.and_then(|vmi| vmi.status.as_ref()).and_then(|status| status.phase.clone()).unwrap_or_default()
    }

    /// Returns the VMI unless it has ended.
    pub(crate) fn living(&self) -> Option<&VirtualMachineInstance> {
        self.vmi.filter(|_| !self.phase().is_final())
    }

    /// Returns true if a condition of the VM is true.
    pub(crate) fn has_condition(&self, name: &str) -> bool {
        self.vm.condition(name).is_some_and(Condition::is_true)
    }
}

/// Returns the run strategy in effect.
pub(crate) fn run_strategy(vm: &VirtualMachine) -> Result<RunStrategy, ApiError> {
    match (&vm.spec.running, &vm.spec.run_strategy) {
        (Some(_), Some(_)) => Err(ApiError::Internal("running and runstrategy are mutually exclusive".to_owned())),
        (Some(true), None) => Ok(RunStrategy::Always),
        (Some(false) | None, None) => Ok(RunStrategy::Halted),
        (None, Some(strategy)) => Ok(strategy.clone()),
    }
}

/// Returns the error of an unknown run strategy.
pub(crate) fn unknown_strategy(strategy: &RunStrategy) -> ApiError {
    ApiError::Internal(format!("unknown run strategy {strategy}"))
}

/// Path of the grace period.
const GRACE_PATH: [&str; 2] = ["spec", "terminationGracePeriodSeconds"];

/// Returns a patch of the grace period.
pub(crate) fn grace_patch(current: Option<i64>, seconds: i64) -> Patch {
    Patch(vec![test(GRACE_PATH, json!(current)), add_or_replace(GRACE_PATH, current.is_some(), json!(seconds))])
}

/// Returns a request to stop a VMI.
pub(crate) fn stop_request(vmi: &VirtualMachineInstance) -> VirtualMachineStateChangeRequest {
    VirtualMachineStateChangeRequest {
        action: StateChangeAction::Stop,
        uid: vmi.metadata.uid.clone(),
        ..Default::default()
    }
}

/// Returns a patch of the run strategy, in the form that the VM uses.
pub(crate) fn strategy_patch(vm: &VirtualMachine, strategy: &RunStrategy) -> VmPatch {
    let operations = match &vm.spec.run_strategy {
        Some(current) => {
            let path = ["spec", "runStrategy"];
            vec![test(path, json!(current)), replace(path, json!(strategy))]
        }
        None => {
            let path = ["spec", "running"];
            let running = *strategy == RunStrategy::Always;
            vec![test(path, json!(vm.spec.running)), add_or_replace(path, vm.spec.running.is_some(), json!(running))]
        }
    };
    VmPatch::Spec(Patch(operations))
}

/// Returns a patch of the status that requests changes of the state.
pub(crate) fn request(
    vm: &VirtualMachine,
    requests: Vec<VirtualMachineStateChangeRequest>,
) -> Result<VmPatch, ApiError> {
    let path = ["status", "stateChangeRequests"];
    let empty = VirtualMachineStatus::default();
    let status = vm.status.as_ref().unwrap_or(&empty);
    if *status == empty {
        let value = json!({"stateChangeRequests": requests});
        return Ok(VmPatch::Status(Patch(vec![add(["status"], value)])));
    }
    let pending = &status.state_change_requests;
    let current = if pending.is_empty() { Value::Null } else { json!(pending) };
    let mut operations = vec![test(path, current)];
    let only_stop = matches!(requests.as_slice(), [one] if one.action == StateChangeAction::Stop);
    if pending.is_empty() {
        operations.push(add(path, json!(requests)));
    } else if only_stop {
        // A stop replaces earlier requests.
        operations.push(replace(path, json!(requests)));
    } else {
        return Err(ApiError::Internal("unable to complete request: stop/start already underway".to_owned()));
    }
    if status.start_failure.is_some() {
        operations.push(remove(["status", "startFailure"]));
    }
    Ok(VmPatch::Status(Patch(operations)))
}

pub(crate) fn test<const N: usize>(path: [&str; N], value: Value) -> PatchOperation {
    PatchOperation::Test(TestOperation { path: PointerBuf::from_tokens(path), value })
}

fn add<const N: usize>(path: [&str; N], value: Value) -> PatchOperation {
    PatchOperation::Add(AddOperation { path: PointerBuf::from_tokens(path), value })
}

fn replace<const N: usize>(path: [&str; N], value: Value) -> PatchOperation {
    PatchOperation::Replace(ReplaceOperation { path: PointerBuf::from_tokens(path), value })
}

fn remove<const N: usize>(path: [&str; N]) -> PatchOperation {
    PatchOperation::Remove(RemoveOperation { path: PointerBuf::from_tokens(path) })
}

/// A missing value is added, since it cannot be replaced.
pub(crate) fn add_or_replace<const N: usize>(path: [&str; N], exists: bool, value: Value) -> PatchOperation {
    if exists { replace(path, value) } else { add(path, value) }
}

/// Returns the patch that removes a grace period of one second.
pub(crate) fn remove_grace_patch() -> Patch {
    Patch(vec![test(GRACE_PATH, json!(1)), remove(GRACE_PATH)])
}

/// Reads a VM and its VMI.
pub(crate) async fn read(call: Call<'_>) -> Result<(VirtualMachine, Option<VirtualMachineInstance>), ApiError> {
    Ok((call.vm().await?, call.vmi_opt().await?))
}

/// Writes the patches. Restores the VMI if the patch of the VM fails.
pub(crate) async fn write(call: Call<'_>, plan: Plan, dry_run: bool) -> Result<Response, ApiError> {
    let params = PatchParams { dry_run, ..PatchParams::default() };
    let (objects, namespace, name) = (&call.context.objects, call.object.namespace.as_str(), call.object.name.as_str());
    let mut undo = None;
    if let Some(patch) = plan.vmi {
        patches::send(objects.vmis(namespace), None, name, &params, patch.apply)
            .await
            .map_err(|error| refused(Kind::VirtualMachineInstance, name, &error))?;
        undo = patch.undo;
    }
    let vms = objects.vms(namespace);
    let result = match plan.vm {
        None => Ok(()),
        Some(VmPatch::Spec(patch)) => patches::send(vms, None, name, &params, patch).await,
        Some(VmPatch::Status(patch)) => patches::send(vms, Some("status"), name, &params, patch).await,
    };
    let Err(error) = result else { return Ok(empty_response(StatusCode::ACCEPTED)) };
    if let Some(undo) = undo {
        let restored = patches::send(objects.vmis(namespace), None, name, &params, undo).await;
        if let Err(error) = restored {
            tracing::warn!(namespace, name, error = message(&error), "grace period was not restored");
        }
    }
    if matches!(&error, kube::Error::Api(status) if status.code == 404) {
        Err(ApiError::not_found(Kind::VirtualMachine, name))
    } else {
        Err(refused(Kind::VirtualMachine, name, &error))
    }
}

/// Returns the answer for a patch that the API server refused: 409 if another client has changed the object since it was read.
fn refused(kind: Kind, name: &str, error: &kube::Error) -> ApiError {
    match error {
        kube::Error::Api(status) if status.code == 422 && status.message == TEST_FAILED => {
            ApiError::conflict(kind, name, MODIFIED)
        }
        error => refusal(error),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn failed_test_of_a_patch_is_a_conflict() {
        let answer = |code, text: &str| {
            let status = kube::core::Status::failure(text, "Invalid").with_code(code);
            refused(Kind::VirtualMachine, "a", &kube::Error::Api(status.boxed()))
        };
        assert_eq!(answer(422, TEST_FAILED), ApiError::conflict(Kind::VirtualMachine, "a", MODIFIED));
        let invalid = "VirtualMachine.kubevirt.io \"a\" is invalid: spec.runStrategy: Unsupported value";
        assert_eq!(answer(422, invalid), ApiError::Internal(invalid.to_owned()));
        let denied = "admission webhook \"a.kubevirt.io\" denied the request: no";
        assert_eq!(answer(422, denied), ApiError::BadRequest("no".to_owned()));
        assert_eq!(answer(500, TEST_FAILED), ApiError::Internal(TEST_FAILED.to_owned()));
    }
}
