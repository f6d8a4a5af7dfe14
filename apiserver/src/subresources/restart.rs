//! `virtualmachines/restart`: restarts a VM.

use api::{
    enums::{RunStrategy, StateChangeAction},
    subresources::RestartOptions,
    vm::status::VirtualMachineStateChangeRequest,
};
use axum::{body::Body, response::Response};
use http::Request;

use super::common::{
    call::Call,
    schema,
    specification::{Answer, Specification, VMS},
    state_change::{
        self, Observed, Plan, RECOVERY_REQUIRED, VmiPatch, grace_patch, remove_grace_patch, request as request_patch,
        run_strategy, stop_request, unknown_strategy,
    },
    vmi_checks::is_stopped,
};
use crate::requests::error::ApiError;

pub(super) static SPECIFICATION: Specification = Specification {
    options: Some(schema::options::<RestartOptions>),
    dry_run: true,
    operation: "Restart",
    description: "Restart a VirtualMachine",
    ..Specification::put(VMS, "restart", Answer::Accepted, |call, request| Box::pin(serve(call, request)))
};

/// Rejects invalid options.
fn check_options(options: &RestartOptions) -> Result<(), ApiError> {
    match options.grace_period_seconds {
        Some(seconds) if seconds > 0 => {
            Err(ApiError::BadRequest("For force restart, only gracePeriod=0 is supported for now".to_owned()))
        }
        Some(seconds) if seconds < 0 => {
            Err(ApiError::BadRequest("gracePeriod has to be greater or equal to 0".to_owned()))
        }
        _ => Ok(()),
    }
}

/// Returns the patches of a restart.
fn decide(observed: Observed<'_>, options: &RestartOptions) -> Result<Plan, ApiError> {
    check_options(options)?;
    if observed.has_condition("VolumesChange") {
        return Err(observed.conflict(RECOVERY_REQUIRED));
    }
    let strategy = run_strategy(observed.vm)?;
    let can_start = matches!(strategy, RunStrategy::Halted | RunStrategy::Manual | RunStrategy::RerunOnFailure);
    let hint = match &observed.vm.metadata.name {
        Some(name) if can_start && observed.living().is_none() => is_stopped(name),
        _ => String::new(),
    };
    match strategy {
        RunStrategy::Halted | RunStrategy::Once => {
            let message = format!("RunStategy {strategy} does not support manual restart requests{hint}");
            return Err(observed.conflict(message));
        }
        RunStrategy::Other(_) => return Err(unknown_strategy(&strategy)),
        _ => {}
    }
    let vmi = observed.vmi.ok_or_else(|| observed.conflict(format!("VM is not running: Halted{hint}")))?;
    let start = VirtualMachineStateChangeRequest { action: StateChangeAction::Start, ..Default::default() };
    let patch = request_patch(observed.vm, vec![stop_request(vmi), start])?;
    // One second: zero means the default in other components.
    let vmi_patch = options.grace_period_seconds.map(|_| {
        let current = vmi.spec.termination_grace_period_seconds;
        let undo = match current {
            Some(seconds) => grace_patch(Some(1), seconds),
            None => remove_grace_patch(),
        };
        VmiPatch { apply: grace_patch(current, 1), undo: Some(undo) }
    });
    Ok(Plan { vmi: vmi_patch, vm: Some(patch) })
}

async fn serve(call: Call<'_>, request: Request<Body>) -> Result<Response, ApiError> {
    let (options, dry_run): (RestartOptions, bool) = call.options_with_dry_run(request).await?;
    check_options(&options)?;
    let (vm, vmi) = state_change::read(call).await?;
    state_change::write(call, decide(Observed { vm: &vm, vmi: vmi.as_ref() }, &options)?, dry_run).await
}

#[cfg(test)]
mod tests {
    use api::{VirtualMachine, VirtualMachineInstance};
    use serde_json::json;

    use super::*;
    use crate::subresources::common::testing::{
        conflict_of_vm as conflict, state_requests, status_patch as status, vm_with, vmi_in, with_strategy,
    };

    fn restarted(
        vm: &VirtualMachine,
        vmi: Option<&VirtualMachineInstance>,
        grace: Option<i64>,
    ) -> Result<Plan, ApiError> {
        decide(Observed { vm, vmi }, &RestartOptions { grace_period_seconds: grace, dry_run: None })
    }

    #[test]
    fn restart_requests_stop_and_start() {
        let expected = state_requests(json!([{"action": "Stop", "uid": "u1"}, {"action": "Start"}]));
        for strategy in ["Always", "Manual", "RerunOnFailure"] {
            let plan = restarted(&with_strategy(strategy), Some(&vmi_in("Running")), None);
            assert!(plan.as_ref().unwrap().vmi.is_none());
            assert_eq!(status(plan), expected);
        }
    }

    #[test]
    fn forced_restart_shortens_the_grace_period_and_can_be_undone() {
        let plan = restarted(&with_strategy("Always"), Some(&vmi_in("Running")), Some(0)).unwrap();
        let instance = plan.vmi.unwrap();
        let patch = |from: i64, to: i64| {
            json!([
                {"op": "test", "path": "/spec/terminationGracePeriodSeconds", "value": from},
                {"op": "replace", "path": "/spec/terminationGracePeriodSeconds", "value": to},
            ])
        };
        assert_eq!(json!(instance.apply), patch(30, 1));
        assert_eq!(json!(instance.undo.unwrap()), patch(1, 30));
    }

    #[test]
    fn restart_is_refused() {
        assert_eq!(
            restarted(&with_strategy("Always"), None, Some(5)),
            Err(ApiError::BadRequest("For force restart, only gracePeriod=0 is supported for now".into()))
        );
        assert_eq!(
            restarted(&with_strategy("Always"), None, Some(-1)),
            Err(ApiError::BadRequest("gracePeriod has to be greater or equal to 0".into()))
        );
        assert_eq!(conflict(restarted(&with_strategy("Always"), None, None)), "VM is not running: Halted");
        for strategy in ["Halted", "Once"] {
            assert_eq!(
                conflict(restarted(&with_strategy(strategy), Some(&vmi_in("Running")), None)),
                format!("RunStategy {strategy} does not support manual restart requests")
            );
        }
        let stopped = ": VM vm is stopped; start it with: kubectl virt start vm";
        assert_eq!(
            conflict(restarted(&with_strategy("Halted"), None, None)),
            format!("RunStategy Halted does not support manual restart requests{stopped}")
        );
        assert_eq!(
            conflict(restarted(&with_strategy("Manual"), None, None)),
            format!("VM is not running: Halted{stopped}")
        );
        let changing = vm_with(
            json!({"runStrategy": "Always"}),
            json!({"conditions": [{"type": "VolumesChange", "status": "True"}]}),
        );
        assert_eq!(conflict(restarted(&changing, Some(&vmi_in("Running")), None)), RECOVERY_REQUIRED);
    }

    #[test]
    fn both_forms_of_the_strategy_are_an_error() {
        let both = vm_with(json!({"running": true, "runStrategy": "Always"}), json!({}));
        let expected = ApiError::Internal("running and runstrategy are mutually exclusive".into());
        assert_eq!(restarted(&both, Some(&vmi_in("Running")), None), Err(expected));
    }

    #[test]
    fn pending_request_prevents_a_restart() {
        let pending = json!([{"action": "Stop", "uid": "u0"}, {"action": "Start"}]);
        let busy = vm_with(json!({"runStrategy": "Manual"}), json!({"stateChangeRequests": pending}));
        let expected = ApiError::Internal("unable to complete request: stop/start already underway".into());
        assert_eq!(restarted(&busy, Some(&vmi_in("Running")), None), Err(expected));
    }
}
