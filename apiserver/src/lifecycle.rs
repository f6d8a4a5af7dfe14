//! What start, stop and restart of a VM change.
//!
//! A VM is started and stopped by its specification where the run strategy says so by itself, and by a request in its
//! status where the strategy leaves it to the user:
//!
//! ```text
//!                 start                                   stop
//! Halted          runStrategy := Always (*)               only with a shorter grace period, for a machine going down
//! Always, Once    refused                                 runStrategy := Halted
//! Manual          request Start                           request Stop
//! RerunOnFailure  request Start, unless it failed         request Stop
//! WaitAsReceiver  nothing                                 nothing
//! (*) with paused: request Start with data paused=true, of which virt-controller makes the rest
//! ```
//!
//! Each change is a JSON patch that tests what it was decided on, so a VM that has changed meanwhile is left alone.
//! The functions here decide; [`crate::subresources`] writes.

use std::collections::BTreeMap;

use api::{
    constants::condition,
    enums::{RunStrategy, StateChangeAction, VmiPhase},
    subresources::{RestartOptions, StartOptions, StopOptions},
    vm::{
        spec::VirtualMachine,
        status::{VirtualMachineStateChangeRequest, VirtualMachineStatus},
    },
    vmi::spec::VirtualMachineInstance,
};
use json_patch::{
    AddOperation, Patch, PatchOperation, RemoveOperation, ReplaceOperation, TestOperation, jsonptr::PointerBuf,
};
use serde_json::{Value, json};

use crate::error::{ApiError, Kind};

const NOT_RUNNING: &str = "VM is not running";
const RECOVERY_REQUIRED: &str = "VM recovery required: Volume migration failed, leaving some volumes pointing to \
                                 non-consistent targets; manual intervention is needed to reassign them to their \
                                 original volumes.";

/// What to write, in this order.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Plan {
    /// A patch of the VMI.
    pub instance: Option<InstancePatch>,
    /// A patch of the VM.
    pub machine: Option<MachinePatch>,
}

/// A patch of the VMI.
#[derive(Clone, Debug, PartialEq)]
pub struct InstancePatch {
    /// The patch.
    pub apply: Patch,
    /// What takes it back if the patch of the VM fails.
    pub undo: Option<Patch>,
}

/// A patch of the VM.
#[derive(Clone, Debug, PartialEq)]
pub enum MachinePatch {
    /// Of the main resource.
    Spec(Patch),
    /// Of the status subresource.
    Status(Patch),
}

/// The VM and the VMI of the same name.
#[derive(Clone, Copy)]
pub struct Observed<'a> {
    /// The VM.
    pub vm: &'a VirtualMachine,
    /// Its machine, if there is one.
    pub vmi: Option<&'a VirtualMachineInstance>,
}

impl Observed<'_> {
    fn conflict(&self, message: impl Into<String>) -> ApiError {
        ApiError::conflict(Kind::VirtualMachine, self.vm.metadata.name.as_deref().unwrap_or_default(), message)
    }

    fn phase(&self) -> VmiPhase {
        self.vmi.and_then(|vmi| vmi.status.as_ref()).and_then(|status| status.phase.clone()).unwrap_or_default()
    }

    /// The machine, while it is not over.
    fn living(&self) -> Option<&VirtualMachineInstance> {
        self.vmi.filter(|_| !self.phase().is_final())
    }

    fn has_condition(&self, name: &str) -> bool {
        let conditions = self.vm.status.as_ref().map(|status| status.conditions.as_slice()).unwrap_or_default();
        conditions.iter().any(|condition| condition.type_ == name && condition.is_true())
    }
}

/// The run strategy that counts.
pub fn run_strategy(vm: &VirtualMachine) -> Result<RunStrategy, ApiError> {
    match (&vm.spec.running, &vm.spec.run_strategy) {
        (Some(_), Some(_)) => Err(ApiError::Internal("running and runstrategy are mutually exclusive".to_owned())),
        (Some(true), None) => Ok(RunStrategy::Always),
        (Some(false) | None, None) => Ok(RunStrategy::Halted),
        (None, Some(strategy)) => Ok(strategy.clone()),
    }
}

fn unknown_strategy(strategy: &RunStrategy) -> ApiError {
    ApiError::Internal(format!("unknown run strategy {strategy}"))
}

/// Refuses to start what cannot be started, whatever the options are.
pub fn check_start(observed: Observed<'_>) -> Result<(), ApiError> {
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

/// What `start` changes.
pub fn start(observed: Observed<'_>, options: &StartOptions) -> Result<Plan, ApiError> {
    check_start(observed)?;
    let phase = observed.phase();
    let paused = options.paused == Some(true);
    let data = if paused { BTreeMap::from([("paused".to_owned(), "true".to_owned())]) } else { BTreeMap::new() };
    let start = VirtualMachineStateChangeRequest { action: StateChangeAction::Start, data, ..Default::default() };
    let strategy = run_strategy(observed.vm)?;
    let machine = match strategy {
        RunStrategy::Halted if paused => request(observed.vm, vec![start])?,
        RunStrategy::Halted => strategy_patch(observed.vm, &RunStrategy::Always),
        RunStrategy::RerunOnFailure if phase == VmiPhase::Failed => {
            return Err(observed.conflict("RerunOnFailure does not support starting VM from failed state"));
        }
        RunStrategy::Manual | RunStrategy::RerunOnFailure => match observed.vmi.filter(|_| phase.is_final()) {
            // The machine that is over has to go first.
            Some(vmi) => request(observed.vm, vec![stop_request(vmi), start])?,
            None => request(observed.vm, vec![start])?,
        },
        RunStrategy::Always | RunStrategy::Once => {
            return Err(observed.conflict(format!("{strategy} does not support manual start requests")));
        }
        RunStrategy::WaitAsReceiver => return Ok(Plan::default()),
        RunStrategy::Other(_) => return Err(unknown_strategy(&strategy)),
    };
    Ok(Plan { instance: None, machine: Some(machine) })
}

/// What `stop` changes.
pub fn stop(observed: Observed<'_>, options: &StopOptions) -> Result<Plan, ApiError> {
    let strategy = run_strategy(observed.vm)?;
    let machine = match strategy {
        RunStrategy::Halted => {
            let vmi = observed.living().ok_or_else(|| observed.conflict(NOT_RUNNING))?;
            let shorter = match (options.grace_period, vmi.spec.termination_grace_period_seconds) {
                (None, _) => false,
                (Some(_), None) => true,
                (Some(asked), Some(current)) => asked < current,
            };
            if !shorter {
                return Err(observed.conflict("Halted only supports manual stop requests with a shorter graceperiod"));
            }
            Some(request(observed.vm, vec![stop_request(vmi)])?)
        }
        RunStrategy::Manual | RunStrategy::RerunOnFailure => {
            let vmi = observed.living().ok_or_else(|| observed.conflict(NOT_RUNNING))?;
            Some(request(observed.vm, vec![stop_request(vmi)])?)
        }
        RunStrategy::Always | RunStrategy::Once => Some(strategy_patch(observed.vm, &RunStrategy::Halted)),
        RunStrategy::WaitAsReceiver => None,
        RunStrategy::Other(_) => return Err(unknown_strategy(&strategy)),
    };
    let instance = match (observed.living(), options.grace_period) {
        (Some(vmi), Some(seconds)) => {
            Some(InstancePatch { apply: grace_patch(vmi.spec.termination_grace_period_seconds, seconds), undo: None })
        }
        _ => None,
    };
    Ok(Plan { instance, machine })
}

/// Refuses options of `restart` that nothing can satisfy, before anything is fetched.
pub fn check_restart_options(options: &RestartOptions) -> Result<(), ApiError> {
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

/// What `restart` changes.
pub fn restart(observed: Observed<'_>, options: &RestartOptions) -> Result<Plan, ApiError> {
    check_restart_options(options)?;
    if observed.has_condition("VolumesChange") {
        return Err(observed.conflict(RECOVERY_REQUIRED));
    }
    let strategy = run_strategy(observed.vm)?;
    match strategy {
        RunStrategy::Halted | RunStrategy::Once => {
            return Err(observed.conflict(format!("RunStategy {strategy} does not support manual restart requests")));
        }
        RunStrategy::Other(_) => return Err(unknown_strategy(&strategy)),
        _ => {}
    }
    let vmi = observed.vmi.ok_or_else(|| observed.conflict("VM is not running: Halted"))?;
    let start = VirtualMachineStateChangeRequest { action: StateChangeAction::Start, ..Default::default() };
    let machine = request(observed.vm, vec![stop_request(vmi), start])?;
    // A second rather than none: none means "take the default" in more than one place below.
    let instance = options.grace_period_seconds.map(|_| {
        let current = vmi.spec.termination_grace_period_seconds;
        let undo = match current {
            Some(seconds) => grace_patch(Some(1), seconds),
            None => Patch(vec![test(GRACE_PATH, json!(1)), remove(GRACE_PATH)]),
        };
        InstancePatch { apply: grace_patch(current, 1), undo: Some(undo) }
    });
    Ok(Plan { instance, machine: Some(machine) })
}

const GRACE_PATH: [&str; 2] = ["spec", "terminationGracePeriodSeconds"];

fn grace_patch(current: Option<i64>, seconds: i64) -> Patch {
    Patch(vec![test(GRACE_PATH, json!(current)), add_or_replace(GRACE_PATH, current.is_some(), json!(seconds))])
}

fn stop_request(vmi: &VirtualMachineInstance) -> VirtualMachineStateChangeRequest {
    VirtualMachineStateChangeRequest {
        action: StateChangeAction::Stop,
        uid: vmi.metadata.uid.clone(),
        ..Default::default()
    }
}

/// A patch of the specification that sets the run strategy, in the form that the VM uses.
fn strategy_patch(vm: &VirtualMachine, strategy: &RunStrategy) -> MachinePatch {
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
    MachinePatch::Spec(Patch(operations))
}

/// A patch of the status that asks for changes of state.
fn request(vm: &VirtualMachine, requests: Vec<VirtualMachineStateChangeRequest>) -> Result<MachinePatch, ApiError> {
    let path = ["status", "stateChangeRequests"];
    let empty = VirtualMachineStatus::default();
    let status = vm.status.as_ref().unwrap_or(&empty);
    if *status == empty {
        let value = json!({"stateChangeRequests": requests});
        return Ok(MachinePatch::Status(Patch(vec![add(["status"], value)])));
    }
    let pending = &status.state_change_requests;
    let current = if pending.is_empty() { Value::Null } else { json!(pending) };
    let mut operations = vec![test(path, current)];
    let only_stop = matches!(requests.as_slice(), [one] if one.action == StateChangeAction::Stop);
    if pending.is_empty() {
        operations.push(add(path, json!(requests)));
    } else if only_stop {
        // A stop overrides whatever was asked for before.
        operations.push(replace(path, json!(requests)));
    } else {
        return Err(ApiError::Internal("unable to complete request: stop/start already underway".to_owned()));
    }
    if status.start_failure.is_some() {
        operations.push(remove(["status", "startFailure"]));
    }
    Ok(MachinePatch::Status(Patch(operations)))
}

fn test<const N: usize>(path: [&str; N], value: Value) -> PatchOperation {
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

/// A value that is not there cannot be replaced.
fn add_or_replace<const N: usize>(path: [&str; N], exists: bool, value: Value) -> PatchOperation {
    if exists { replace(path, value) } else { add(path, value) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn vm(spec: Value, status: Value) -> VirtualMachine {
        let mut spec = spec;
        spec["template"] = json!({"spec": {"domain": {"devices": {}}}});
        serde_json::from_value(json!({
            "apiVersion": "kubevirt.io/v1",
            "kind": "VirtualMachine",
            "metadata": {"name": "vm", "namespace": "ns"},
            "spec": spec,
            "status": status,
        }))
        .unwrap()
    }

    fn with(strategy: &str) -> VirtualMachine {
        vm(json!({"runStrategy": strategy}), json!({"printableStatus": "x"}))
    }

    fn vmi(phase: &str) -> VirtualMachineInstance {
        serde_json::from_value(json!({
            "apiVersion": "kubevirt.io/v1",
            "kind": "VirtualMachineInstance",
            "metadata": {"name": "vm", "namespace": "ns", "uid": "u1"},
            "spec": {"domain": {"devices": {}}, "terminationGracePeriodSeconds": 30},
            "status": {"phase": phase},
        }))
        .unwrap()
    }

    fn spec(plan: Result<Plan, ApiError>) -> Value {
        match plan.unwrap().machine {
            Some(MachinePatch::Spec(patch)) => json!(patch),
            other => panic!("no patch of the spec: {other:?}"),
        }
    }

    fn status(plan: Result<Plan, ApiError>) -> Value {
        match plan.unwrap().machine {
            Some(MachinePatch::Status(patch)) => json!(patch),
            other => panic!("no patch of the status: {other:?}"),
        }
    }

    fn conflict<T>(result: Result<T, ApiError>) -> String {
        match result {
            Err(ApiError::Conflict { kind: Kind::VirtualMachine, name, message }) if name == "vm" => message,
            Err(other) => panic!("no conflict: {other:?}"),
            Ok(_) => panic!("accepted"),
        }
    }

    fn started(vm: &VirtualMachine, vmi: Option<&VirtualMachineInstance>, paused: bool) -> Result<Plan, ApiError> {
        start(Observed { vm, vmi }, &StartOptions { paused: paused.then_some(true), dry_run: None })
    }

    fn stopped(
        vm: &VirtualMachine,
        vmi: Option<&VirtualMachineInstance>,
        grace: Option<i64>,
    ) -> Result<Plan, ApiError> {
        stop(Observed { vm, vmi }, &StopOptions { grace_period: grace, dry_run: None })
    }

    fn restarted(
        vm: &VirtualMachine,
        vmi: Option<&VirtualMachineInstance>,
        grace: Option<i64>,
    ) -> Result<Plan, ApiError> {
        restart(Observed { vm, vmi }, &RestartOptions { grace_period_seconds: grace, dry_run: None })
    }

    fn requests(requests: Value) -> Value {
        json!([
            {"op": "test", "path": "/status/stateChangeRequests", "value": null},
            {"op": "add", "path": "/status/stateChangeRequests", "value": requests},
        ])
    }

    #[test]
    fn halted_vm_is_started_by_its_run_strategy() {
        assert_eq!(
            spec(started(&with("Halted"), None, false)),
            json!([
                {"op": "test", "path": "/spec/runStrategy", "value": "Halted"},
                {"op": "replace", "path": "/spec/runStrategy", "value": "Always"},
            ])
        );
    }

    #[test]
    fn vm_of_the_old_form_is_started_and_stopped_by_running() {
        assert_eq!(
            spec(started(&vm(json!({"running": false}), json!({})), None, false)),
            json!([
                {"op": "test", "path": "/spec/running", "value": false},
                {"op": "replace", "path": "/spec/running", "value": true},
            ])
        );
        assert_eq!(
            spec(stopped(&vm(json!({"running": true}), json!({})), None, None)),
            json!([
                {"op": "test", "path": "/spec/running", "value": true},
                {"op": "replace", "path": "/spec/running", "value": false},
            ])
        );
        assert_eq!(
            spec(started(&vm(json!({}), json!({})), None, false)),
            json!([
                {"op": "test", "path": "/spec/running", "value": null},
                {"op": "add", "path": "/spec/running", "value": true},
            ])
        );
    }

    #[test]
    fn halted_vm_is_started_paused_by_a_request() {
        let expected = requests(json!([{"action": "Start", "data": {"paused": "true"}}]));
        assert_eq!(status(started(&with("Halted"), None, true)), expected);
    }

    #[test]
    fn first_request_makes_the_status() {
        assert_eq!(
            status(started(&vm(json!({"runStrategy": "Manual"}), json!({})), None, false)),
            json!([{"op": "add", "path": "/status", "value": {"stateChangeRequests": [{"action": "Start"}]}}])
        );
    }

    #[test]
    fn manual_vm_is_started_by_a_request_that_removes_a_finished_machine_first() {
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
            let vmi = phase.map(vmi);
            assert_eq!(
                status(started(&with(strategy), vmi.as_ref(), false)),
                requests(expected),
                "{strategy} {phase:?}"
            );
        }
    }

    #[test]
    fn start_is_refused() {
        let recovery = vm(
            json!({"runStrategy": "Halted"}),
            json!({"conditions": [{"type": "ManualRecoveryRequired", "status": "True"}]}),
        );
        let cases = [
            (with("Halted"), Some("Running"), "VM is already running"),
            (with("Manual"), Some("Pending"), "VM is already running"),
            (with("Manual"), Some("Scheduling"), "VM is already running"),
            (with("Always"), Some("Scheduled"), "VM is already running"),
            (with("Always"), None, "Always does not support manual start requests"),
            (with("Once"), Some("Succeeded"), "Once does not support manual start requests"),
            (with("RerunOnFailure"), Some("Failed"), "RerunOnFailure does not support starting VM from failed state"),
            (recovery, None, RECOVERY_REQUIRED),
        ];
        for (vm, phase, expected) in cases {
            let vmi = phase.map(vmi);
            assert_eq!(conflict(started(&vm, vmi.as_ref(), false)), expected);
        }
    }

    #[test]
    fn receiver_is_neither_started_nor_stopped() {
        assert_eq!(started(&with("WaitAsReceiver"), None, false), Ok(Plan::default()));
        assert_eq!(stopped(&with("WaitAsReceiver"), None, None), Ok(Plan::default()));
    }

    #[test]
    fn both_forms_of_the_strategy_are_an_error() {
        let both = vm(json!({"running": true, "runStrategy": "Always"}), json!({}));
        let expected = ApiError::Internal("running and runstrategy are mutually exclusive".into());
        assert_eq!(started(&both, None, false), Err(expected.clone()));
        assert_eq!(stopped(&both, None, None), Err(expected.clone()));
        assert_eq!(restarted(&both, Some(&vmi("Running")), None), Err(expected));
    }

    #[test]
    fn pending_request_is_overridden_by_a_stop_only() {
        let pending = json!([{"action": "Stop", "uid": "u0"}, {"action": "Start"}]);
        let busy = vm(json!({"runStrategy": "Manual"}), json!({"stateChangeRequests": pending}));
        assert_eq!(
            status(stopped(&busy, Some(&vmi("Running")), None)),
            json!([
                {"op": "test", "path": "/status/stateChangeRequests", "value": pending},
                {"op": "replace", "path": "/status/stateChangeRequests", "value": [{"action": "Stop", "uid": "u1"}]},
            ])
        );
        let expected = ApiError::Internal("unable to complete request: stop/start already underway".into());
        assert_eq!(started(&busy, None, false), Err(expected.clone()));
        assert_eq!(restarted(&busy, Some(&vmi("Running")), None), Err(expected));
    }

    #[test]
    fn request_clears_the_memory_of_failed_starts() {
        let failed = vm(json!({"runStrategy": "Manual"}), json!({"startFailure": {"consecutiveFailCount": 3}}));
        let operations = status(started(&failed, None, false));
        assert_eq!(operations[2], json!({"op": "remove", "path": "/status/startFailure"}));
    }

    #[test]
    fn always_running_vm_is_stopped_by_its_run_strategy() {
        for strategy in ["Always", "Once"] {
            assert_eq!(
                spec(stopped(&with(strategy), None, None)),
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
            let expected = requests(json!([{"action": "Stop", "uid": "u1"}]));
            assert_eq!(status(stopped(&with(strategy), Some(&vmi("Running")), None)), expected);
            for gone in [None, Some(vmi("Succeeded")), Some(vmi("Failed"))] {
                assert_eq!(conflict(stopped(&with(strategy), gone.as_ref(), None)), "VM is not running");
            }
        }
    }

    #[test]
    fn halted_vm_can_only_be_hurried() {
        let running = vmi("Running");
        let longer = "Halted only supports manual stop requests with a shorter graceperiod";
        assert_eq!(conflict(stopped(&with("Halted"), None, Some(0))), "VM is not running");
        assert_eq!(conflict(stopped(&with("Halted"), Some(&running), None)), longer);
        assert_eq!(conflict(stopped(&with("Halted"), Some(&running), Some(30))), longer);
        let plan = stopped(&with("Halted"), Some(&running), Some(0)).unwrap();
        assert_eq!(
            json!(plan.instance.clone().unwrap().apply),
            json!([
                {"op": "test", "path": "/spec/terminationGracePeriodSeconds", "value": 30},
                {"op": "replace", "path": "/spec/terminationGracePeriodSeconds", "value": 0},
            ])
        );
        assert_eq!(status(Ok(plan)), requests(json!([{"action": "Stop", "uid": "u1"}])));
    }

    #[test]
    fn grace_period_of_a_stop_is_put_on_a_living_machine_only() {
        assert!(stopped(&with("Always"), Some(&vmi("Running")), Some(5)).unwrap().instance.is_some());
        assert!(stopped(&with("Always"), Some(&vmi("Succeeded")), Some(5)).unwrap().instance.is_none());
        assert!(stopped(&with("Always"), Some(&vmi("Running")), None).unwrap().instance.is_none());
        let mut without = vmi("Running");
        without.spec.termination_grace_period_seconds = None;
        assert_eq!(
            json!(stopped(&with("Always"), Some(&without), Some(5)).unwrap().instance.unwrap().apply),
            json!([
                {"op": "test", "path": "/spec/terminationGracePeriodSeconds", "value": null},
                {"op": "add", "path": "/spec/terminationGracePeriodSeconds", "value": 5},
            ])
        );
    }

    #[test]
    fn restart_asks_for_stop_and_start() {
        let expected = requests(json!([{"action": "Stop", "uid": "u1"}, {"action": "Start"}]));
        for strategy in ["Always", "Manual", "RerunOnFailure"] {
            let plan = restarted(&with(strategy), Some(&vmi("Running")), None);
            assert!(plan.as_ref().unwrap().instance.is_none());
            assert_eq!(status(plan), expected);
        }
    }

    #[test]
    fn forced_restart_shortens_the_grace_period_and_can_be_taken_back() {
        let plan = restarted(&with("Always"), Some(&vmi("Running")), Some(0)).unwrap();
        let instance = plan.instance.unwrap();
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
            restarted(&with("Always"), None, Some(5)),
            Err(ApiError::BadRequest("For force restart, only gracePeriod=0 is supported for now".into()))
        );
        assert_eq!(
            restarted(&with("Always"), None, Some(-1)),
            Err(ApiError::BadRequest("gracePeriod has to be greater or equal to 0".into()))
        );
        assert_eq!(conflict(restarted(&with("Always"), None, None)), "VM is not running: Halted");
        for strategy in ["Halted", "Once"] {
            assert_eq!(
                conflict(restarted(&with(strategy), Some(&vmi("Running")), None)),
                format!("RunStategy {strategy} does not support manual restart requests")
            );
        }
        let changing =
            vm(json!({"runStrategy": "Always"}), json!({"conditions": [{"type": "VolumesChange", "status": "True"}]}));
        assert_eq!(conflict(restarted(&changing, Some(&vmi("Running")), None)), RECOVERY_REQUIRED);
    }
}
