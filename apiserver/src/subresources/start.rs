//! `virtualmachines/start`: starts a VM.

use std::collections::BTreeMap;

use api::{
    HibernationPhase, VirtualMachine,
    constants::condition,
    enums::{RunStrategy, StateChangeAction, VmiPhase},
    subresources::StartOptions,
    vm::status::VirtualMachineStateChangeRequest,
};
use axum::{body::Body, response::Response};
use http::Request;

use super::common::{
    call::Call,
    schema,
    specification::{Answer, Specification, VMS},
    state_change::{
        self, Observed, Plan, RECOVERY_REQUIRED, request as request_patch, run_strategy, stop_request, strategy_patch,
        unknown_strategy,
    },
};
use crate::requests::error::ApiError;

pub(super) static SPECIFICATION: Specification = Specification {
    options: Some(schema::options::<StartOptions>),
    dry_run: true,
    operation: "Start",
    description: "Start a VirtualMachine",
    ..Specification::put(VMS, "start", Answer::Accepted, |call, request| Box::pin(serve(call, request)))
};

/// Rejects a VM that cannot be started, independent of the options.
fn check(observed: Observed<'_>) -> Result<(), ApiError> {
    let phase = observed.phase();
    let over = matches!(phase, VmiPhase::Failed | VmiPhase::Succeeded | VmiPhase::Unknown | VmiPhase::Unset);
    if observed.vmi.is_some() && !over {
        return Err(observed.conflict("VM is already running"));
    }
    if observed.has_condition(condition::MANUAL_RECOVERY_REQUIRED) {
        return Err(observed.conflict(RECOVERY_REQUIRED));
    }
    Ok(())
}

fn is_hibernated(vm: &VirtualMachine) -> bool {
    let hibernation = vm.status.as_ref().and_then(|status| status.hibernation.as_ref());
    hibernation.is_some_and(|known| known.phase == HibernationPhase::Hibernated)
}

/// Returns the patches of a start.
fn decide(observed: Observed<'_>, options: &StartOptions) -> Result<Plan, ApiError> {
    check(observed)?;
    let phase = observed.phase();
    let paused = options.paused == Some(true);
    let data = if paused { BTreeMap::from([("paused".to_owned(), "true".to_owned())]) } else { BTreeMap::new() };
    let start = VirtualMachineStateChangeRequest { action: StateChangeAction::Start, data, ..Default::default() };
    let strategy = run_strategy(observed.vm)?;
    let patch = match strategy {
        RunStrategy::Halted if paused => request_patch(observed.vm, vec![start])?,
        RunStrategy::Halted => strategy_patch(observed.vm, &RunStrategy::Always),
        RunStrategy::RerunOnFailure if phase == VmiPhase::Failed => {
            return Err(observed.conflict("RerunOnFailure does not support starting VM from failed state"));
        }
        RunStrategy::Manual | RunStrategy::RerunOnFailure => match observed.vmi.filter(|_| phase.is_final()) {
            // The VMI that has ended is removed first.
            Some(vmi) => request_patch(observed.vm, vec![stop_request(vmi), start])?,
            None => request_patch(observed.vm, vec![start])?,
        },
        // No run strategy starts a hibernated VM, so that each permits a request.
        RunStrategy::Always | RunStrategy::Once if is_hibernated(observed.vm) => {
            request_patch(observed.vm, vec![start])?
        }
        RunStrategy::Always | RunStrategy::Once => {
            return Err(observed.conflict(format!("{strategy} does not support manual start requests")));
        }
        RunStrategy::WaitAsReceiver => return Ok(Plan::default()),
        RunStrategy::Other(_) => return Err(unknown_strategy(&strategy)),
    };
    Ok(Plan { vmi: None, vm: Some(patch) })
}

async fn serve(call: Call<'_>, request: Request<Body>) -> Result<Response, ApiError> {
    let (vm, vmi) = state_change::read(call).await?;
    let observed = Observed { vm: &vm, vmi: vmi.as_ref() };
    check(observed)?;
    let (options, dry_run): (StartOptions, bool) = call.options_with_dry_run(request).await?;
    state_change::write(call, decide(observed, &options)?, dry_run).await
}

#[cfg(test)]
mod tests {
    use api::VirtualMachineInstance;
    use serde_json::json;

    use super::*;
    use crate::subresources::common::testing::{
        conflict_of_vm as conflict, spec_patch as spec, state_requests, status_patch as status, vm_with, vmi_in,
        with_strategy,
    };

    fn started(vm: &VirtualMachine, vmi: Option<&VirtualMachineInstance>, paused: bool) -> Result<Plan, ApiError> {
        decide(Observed { vm, vmi }, &StartOptions { paused: paused.then_some(true), dry_run: None })
    }

    #[test]
    fn halted_vm_is_started_by_its_run_strategy() {
        assert_eq!(
            spec(started(&with_strategy("Halted"), None, false)),
            json!([
                {"op": "test", "path": "/spec/runStrategy", "value": "Halted"},
                {"op": "replace", "path": "/spec/runStrategy", "value": "Always"},
            ])
        );
    }

    #[test]
    fn halted_vm_is_started_paused_by_a_request() {
        let expected = state_requests(json!([{"action": "Start", "data": {"paused": "true"}}]));
        assert_eq!(status(started(&with_strategy("Halted"), None, true)), expected);
    }

    #[test]
    fn first_request_creates_the_status() {
        assert_eq!(
            status(started(&vm_with(json!({"runStrategy": "Manual"}), json!({})), None, false)),
            json!([{"op": "add", "path": "/status", "value": {"stateChangeRequests": [{"action": "Start"}]}}])
        );
    }

    #[test]
    fn manual_vm_is_started_by_a_request_that_removes_an_ended_vmi_first() {
        let cases = [
            ("Manual", None, json!([{"action": "Start"}])),
            ("Manual", Some("Unknown"), json!([{"action": "Start"}])),
            ("Manual", Some(""), json!([{"action": "Start"}])),
            ("Manual", Some("Failed"), json!([{"action": "Stop", "uid": "u1"}, {"action": "Start"}])),
            ("Manual", Some("Succeeded"), json!([{"action": "Stop", "uid": "u1"}, {"action": "Start"}])),
            ("RerunOnFailure", None, json!([{"action": "Start"}])),
            ("RerunOnFailure", Some("Succeeded"), json!([{"action": "Stop", "uid": "u1"}, {"action": "Start"}])),
        ];
        for (strategy, phase, expected) in cases {
            let vmi = phase.map(vmi_in);
            assert_eq!(
                status(started(&with_strategy(strategy), vmi.as_ref(), false)),
                state_requests(expected),
                "{strategy} {phase:?}"
            );
        }
    }

    #[test]
    fn start_is_refused() {
        let recovery = vm_with(
            json!({"runStrategy": "Halted"}),
            json!({"conditions": [{"type": "ManualRecoveryRequired", "status": "True"}]}),
        );
        let cases = [
            (with_strategy("Halted"), Some("Running"), "VM is already running"),
            (with_strategy("Manual"), Some("Pending"), "VM is already running"),
            (with_strategy("Manual"), Some("Scheduling"), "VM is already running"),
            (with_strategy("Always"), Some("Scheduled"), "VM is already running"),
            (with_strategy("Always"), None, "Always does not support manual start requests"),
            (with_strategy("Once"), Some("Succeeded"), "Once does not support manual start requests"),
            (
                with_strategy("RerunOnFailure"),
                Some("Failed"),
                "RerunOnFailure does not support starting VM from failed state",
            ),
            (recovery, None, RECOVERY_REQUIRED),
        ];
        for (vm, phase, expected) in cases {
            let vmi = phase.map(vmi_in);
            assert_eq!(conflict(started(&vm, vmi.as_ref(), false)), expected);
        }
    }

    #[test]
    fn hibernated_vm_is_started_with_any_strategy() {
        for (strategy, phase, starts) in [
            ("Always", "Hibernated", true),
            ("Once", "Hibernated", true),
            ("RerunOnFailure", "Hibernated", true),
            ("Always", "Saving", false),
            ("Always", "Failed", false),
        ] {
            let vm = vm_with(json!({"runStrategy": strategy}), json!({"hibernation": {"phase": phase}}));
            assert_eq!(started(&vm, None, false).is_ok(), starts, "{strategy} {phase}");
        }
    }

    #[test]
    fn request_clears_failed_starts() {
        let failed = vm_with(json!({"runStrategy": "Manual"}), json!({"startFailure": {"consecutiveFailCount": 3}}));
        let operations = status(started(&failed, None, false));
        assert_eq!(operations[2], json!({"op": "remove", "path": "/status/startFailure"}));
    }

    #[test]
    fn vm_without_a_run_strategy_is_started_by_running() {
        assert_eq!(
            spec(started(&vm_with(json!({"running": false}), json!({})), None, false)),
            json!([
                {"op": "test", "path": "/spec/running", "value": false},
                {"op": "replace", "path": "/spec/running", "value": true},
            ])
        );
        assert_eq!(
            spec(started(&vm_with(json!({}), json!({})), None, false)),
            json!([
                {"op": "test", "path": "/spec/running", "value": null},
                {"op": "add", "path": "/spec/running", "value": true},
            ])
        );
    }

    #[test]
    fn receiver_is_not_started() {
        assert_eq!(started(&with_strategy("WaitAsReceiver"), None, false), Ok(Plan::default()));
    }

    #[test]
    fn both_forms_of_the_strategy_are_an_error() {
        let both = vm_with(json!({"running": true, "runStrategy": "Always"}), json!({}));
        let expected = ApiError::Internal("running and runstrategy are mutually exclusive".into());
        assert_eq!(started(&both, None, false), Err(expected));
    }

    #[test]
    fn pending_request_prevents_a_start() {
        let pending = json!([{"action": "Stop", "uid": "u0"}, {"action": "Start"}]);
        let busy = vm_with(json!({"runStrategy": "Manual"}), json!({"stateChangeRequests": pending}));
        let expected = ApiError::Internal("unable to complete request: stop/start already underway".into());
        assert_eq!(started(&busy, None, false), Err(expected));
    }
}
