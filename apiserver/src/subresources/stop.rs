//! `virtualmachines/stop`: stops a VM.

use api::{enums::RunStrategy, subresources::StopOptions};
use axum::{body::Body, response::Response};
use http::Request;

use super::common::{
    call::Call,
    schema,
    specification::{Answer, Specification, VMS},
    state_change::{
        self, NOT_RUNNING, Observed, Plan, VmiPatch, grace_patch, request as request_patch, run_strategy, stop_request,
        strategy_patch, unknown_strategy,
    },
};
use crate::requests::error::ApiError;

pub(super) static SPECIFICATION: Specification = Specification {
    options: Some(schema::options::<StopOptions>),
    dry_run: true,
    operation: "Stop",
    description: "Stop a VirtualMachine",
    ..Specification::put(VMS, "stop", Answer::Accepted, |call, request| Box::pin(serve(call, request)))
};

/// Returns the patches of a stop.
fn decide(observed: Observed<'_>, options: &StopOptions) -> Result<Plan, ApiError> {
    let strategy = run_strategy(observed.vm)?;
    let patch = match strategy {
        RunStrategy::Halted => {
            let vmi = observed.living().ok_or_else(|| observed.conflict(NOT_RUNNING))?;
            let shorter = match (options.grace_period, vmi.spec.termination_grace_period_seconds) {
                (None, _) => false,
                (Some(_), None) => true,
                (Some(seconds), Some(current)) => seconds < current,
            };
            if !shorter {
                return Err(observed.conflict("Halted only supports manual stop requests with a shorter graceperiod"));
            }
            Some(request_patch(observed.vm, vec![stop_request(vmi)])?)
        }
        RunStrategy::Manual | RunStrategy::RerunOnFailure => {
            let vmi = observed.living().ok_or_else(|| observed.conflict(NOT_RUNNING))?;
            Some(request_patch(observed.vm, vec![stop_request(vmi)])?)
        }
        RunStrategy::Always | RunStrategy::Once => Some(strategy_patch(observed.vm, &RunStrategy::Halted)),
        RunStrategy::WaitAsReceiver => None,
        RunStrategy::Other(_) => return Err(unknown_strategy(&strategy)),
    };
    let vmi_patch = match (observed.living(), options.grace_period) {
        (Some(vmi), Some(seconds)) => {
            Some(VmiPatch { apply: grace_patch(vmi.spec.termination_grace_period_seconds, seconds), undo: None })
        }
        _ => None,
    };
    Ok(Plan { vmi: vmi_patch, vm: patch })
}

async fn serve(call: Call<'_>, request: Request<Body>) -> Result<Response, ApiError> {
    let (options, dry_run): (StopOptions, bool) = call.options_with_dry_run(request).await?;
    let (vm, vmi) = state_change::read(call).await?;
    state_change::write(call, decide(Observed { vm: &vm, vmi: vmi.as_ref() }, &options)?, dry_run).await
}

#[cfg(test)]
mod tests {
    use api::{VirtualMachine, VirtualMachineInstance};
    use serde_json::json;

    use super::*;
    use crate::subresources::common::testing::{
        conflict_of_vm as conflict, spec_patch as spec, state_requests, status_patch as status, vm_with, vmi_in,
        with_strategy,
    };

    fn stopped(
        vm: &VirtualMachine,
        vmi: Option<&VirtualMachineInstance>,
        grace: Option<i64>,
    ) -> Result<Plan, ApiError> {
        decide(Observed { vm, vmi }, &StopOptions { grace_period: grace, dry_run: None })
    }

    #[test]
    fn always_running_vm_is_stopped_by_its_run_strategy() {
        for strategy in ["Always", "Once"] {
            assert_eq!(
                spec(stopped(&with_strategy(strategy), None, None)),
                json!([
                    {"op": "test", "path": "/spec/runStrategy", "value": strategy},
                    {"op": "replace", "path": "/spec/runStrategy", "value": "Halted"},
                ])
            );
        }
    }

    #[test]
    fn manual_vm_is_stopped_by_a_request() {
        for strategy in ["Manual", "RerunOnFailure"] {
            let expected = state_requests(json!([{"action": "Stop", "uid": "u1"}]));
            assert_eq!(status(stopped(&with_strategy(strategy), Some(&vmi_in("Running")), None)), expected);
            for gone in [None, Some(vmi_in("Succeeded")), Some(vmi_in("Failed"))] {
                assert_eq!(conflict(stopped(&with_strategy(strategy), gone.as_ref(), None)), "VM is not running");
            }
        }
    }

    #[test]
    fn halted_vm_accepts_only_a_shorter_grace_period() {
        let running = vmi_in("Running");
        let longer = "Halted only supports manual stop requests with a shorter graceperiod";
        assert_eq!(conflict(stopped(&with_strategy("Halted"), None, Some(0))), "VM is not running");
        assert_eq!(conflict(stopped(&with_strategy("Halted"), Some(&running), None)), longer);
        assert_eq!(conflict(stopped(&with_strategy("Halted"), Some(&running), Some(30))), longer);
        let plan = stopped(&with_strategy("Halted"), Some(&running), Some(0)).unwrap();
        assert_eq!(
            json!(plan.vmi.clone().unwrap().apply),
            json!([
                {"op": "test", "path": "/spec/terminationGracePeriodSeconds", "value": 30},
                {"op": "replace", "path": "/spec/terminationGracePeriodSeconds", "value": 0},
            ])
        );
        assert_eq!(status(Ok(plan)), state_requests(json!([{"action": "Stop", "uid": "u1"}])));
    }

    #[test]
    fn grace_period_is_set_on_a_running_vmi_only() {
        assert!(stopped(&with_strategy("Always"), Some(&vmi_in("Running")), Some(5)).unwrap().vmi.is_some());
        assert!(stopped(&with_strategy("Always"), Some(&vmi_in("Succeeded")), Some(5)).unwrap().vmi.is_none());
        assert!(stopped(&with_strategy("Always"), Some(&vmi_in("Running")), None).unwrap().vmi.is_none());
        let mut without = vmi_in("Running");
        without.spec.termination_grace_period_seconds = None;
        assert_eq!(
            json!(stopped(&with_strategy("Always"), Some(&without), Some(5)).unwrap().vmi.unwrap().apply),
            json!([
                {"op": "test", "path": "/spec/terminationGracePeriodSeconds", "value": null},
                {"op": "add", "path": "/spec/terminationGracePeriodSeconds", "value": 5},
            ])
        );
    }

    #[test]
    fn vm_without_a_run_strategy_is_stopped_by_running() {
        assert_eq!(
            spec(stopped(&vm_with(json!({"running": true}), json!({})), None, None)),
            json!([
                {"op": "test", "path": "/spec/running", "value": true},
                {"op": "replace", "path": "/spec/running", "value": false},
            ])
        );
    }

    #[test]
    fn receiver_is_not_stopped() {
        assert_eq!(stopped(&with_strategy("WaitAsReceiver"), None, None), Ok(Plan::default()));
    }

    #[test]
    fn both_forms_of_the_strategy_are_an_error() {
        let both = vm_with(json!({"running": true, "runStrategy": "Always"}), json!({}));
        let expected = ApiError::Internal("running and runstrategy are mutually exclusive".into());
        assert_eq!(stopped(&both, None, None), Err(expected));
    }

    #[test]
    fn stop_replaces_pending_requests() {
        let pending = json!([{"action": "Stop", "uid": "u0"}, {"action": "Start"}]);
        let busy = vm_with(json!({"runStrategy": "Manual"}), json!({"stateChangeRequests": pending}));
        assert_eq!(
            status(stopped(&busy, Some(&vmi_in("Running")), None)),
            json!([
                {"op": "test", "path": "/status/stateChangeRequests", "value": pending},
                {"op": "replace", "path": "/status/stateChangeRequests", "value": [{"action": "Stop", "uid": "u1"}]},
            ])
        );
    }
}
