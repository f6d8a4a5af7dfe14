//! States of a VM that `start`, `stop` and `restart` wait for.

use api::constants::condition;
use serde_json::Value;

use crate::{
    Connection, Error,
    guest::text,
    state::{find, strategy},
    wait::{self, Progress},
};

/// Conditions of a VMI that say why its guest does not run yet.
const OBSTACLES: [&str; 3] = [condition::POD_SCHEDULED, condition::DATA_VOLUMES_READY, condition::SYNCHRONIZED];
/// States of a VM without a VMI that say nothing about the next start.
const FORMER: [&str; 7] = ["", "Stopped", "Stopping", "Starting", "Running", "Paused", "Migrating"];

/// The state that a command waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Goal {
    /// A new VMI runs.
    Running,
    /// The VMI is gone.
    Stopped,
}

/// Returns the UID of the VMI of a VM, if it exists.
pub(crate) async fn uid(connection: &Connection, vm: &str) -> Result<Option<String>, Error> {
    let vmi = connection.find(&connection.object_path("virtualmachineinstances", vm)).await?;
    Ok(vmi.and_then(|vmi| vmi["metadata"]["uid"].as_str().map(str::to_owned)))
}

/// Waits for the goal. `before` is the UID of the VMI before the request.
pub(crate) async fn reach(
    connection: &Connection,
    name: &str,
    goal: Goal,
    before: Option<&str>,
    timeout: u64,
) -> Result<(), Error> {
    let vm_path = connection.object_path("virtualmachines", name);
    let vmi_path = connection.object_path("virtualmachineinstances", name);
    let missed = match goal {
        Goal::Running => "is not ready",
        Goal::Stopped => "has not stopped",
    };
    let late = |shown: &str| {
        let shown = shown.trim_end_matches('.');
        format!("VM {name} {missed} within {timeout} s: {shown}; see: kubectl describe vm {name}")
    };
    wait::follow(timeout, late, async || {
        let vm = connection.find(&vm_path).await?;
        let vmi = connection.find(&vmi_path).await?;
        Ok(match goal {
            Goal::Running => started(name, vm.as_ref(), vmi.as_ref(), before),
            Goal::Stopped => stopped(name, vmi.as_ref(), before),
        })
    })
    .await
}

/// Returns true if the VMI is the one before the request.
fn is_former(vmi: &Value, before: Option<&str>) -> bool {
    before.is_some() && vmi["metadata"]["uid"].as_str() == before
}

/// Returns true if the object has the condition with status True.
pub(crate) fn is_true(object: &Value, type_: &str) -> bool {
    find(object, type_).is_some_and(|condition| condition["status"] == "True")
}

/// Returns the message of a condition, else its reason.
fn message(condition: &Value) -> Option<String> {
    let fields = [&condition["message"], &condition["reason"]];
    fields.into_iter().find(|field| field.as_str().is_some_and(|set| !set.is_empty())).map(text)
}

/// Returns the reason why the last start of a VM failed.
pub(crate) fn failure(vm: &Value) -> Option<String> {
    find(vm, condition::FAILURE).filter(|failure| failure["status"] == "True").and_then(message)
}

/// Returns the reason why the guest of a VMI does not run yet.
pub(crate) fn obstacle(vmi: &Value) -> Option<String> {
    let unmet = OBSTACLES.iter().filter_map(|type_| find(vmi, type_)).filter(|one| one["status"] == "False");
    unmet.filter_map(message).next()
}

/// Decides how far a start is.
pub(crate) fn started(name: &str, vm: Option<&Value>, vmi: Option<&Value>, before: Option<&str>) -> Progress {
    let Some(vm) = vm else { return Progress::Failed(format!("VM {name} was deleted")) };
    let strategy = strategy(vm);
    let Some(vmi) = vmi else {
        let is_requested = vm["status"]["stateChangeRequests"].as_array().is_some_and(|all| !all.is_empty());
        if strategy == "Halted" && !is_requested {
            return Progress::Failed(format!("VM {name} was stopped"));
        }
        let state = vm["status"]["printableStatus"].as_str().filter(|state| !FORMER.contains(state));
        let state = state.map(|state| format!("the state of VM {name} is {state}"));
        let waiting = || "the VM's controller is about to create the VMI".to_owned();
        return Progress::Waiting(failure(vm).or(state).unwrap_or_else(waiting));
    };
    if is_former(vmi, before) {
        return Progress::Waiting(ending(vmi));
    }
    match vmi["status"]["phase"].as_str().unwrap_or_default() {
        "Running" => running(name, vmi),
        phase @ ("Succeeded" | "Failed") => {
            let is_repeated = strategy == "Always" || (strategy == "RerunOnFailure" && phase == "Failed");
            match is_repeated {
                true => Progress::Waiting(format!("the guest has ended ({phase}) and is started again")),
                false => Progress::Failed(format!("the guest of VM {name} has ended ({phase})")),
            }
        }
        phase => {
            let phase = if phase.is_empty() { "Pending" } else { phase };
            let reason = obstacle(vmi).or_else(|| failure(vm));
            Progress::Waiting(reason.map_or_else(|| phase.to_owned(), |reason| format!("{phase}: {reason}")))
        }
    }
}

/// Decides whether a guest that runs is of use.
fn running(name: &str, vmi: &Value) -> Progress {
    let node = text(&vmi["status"]["nodeName"]);
    if is_true(vmi, condition::PAUSED) {
        return Progress::Done(format!("VM {name} is paused on node {node}"));
    }
    if is_true(vmi, condition::READY) {
        let address = vmi["status"]["interfaces"][0]["ipAddress"].as_str().filter(|address| !address.is_empty());
        let address = address.map(|address| format!(" with address {address}")).unwrap_or_default();
        return Progress::Done(format!("VM {name} runs on node {node}{address}"));
    }
    let reason = find(vmi, condition::READY).and_then(message);
    let reason = reason.map(|reason| format!(": {reason}")).unwrap_or_default();
    Progress::Waiting(format!("Running on node {node}, not ready{reason}"))
}

/// Decides how far a stop is.
fn stopped(name: &str, vmi: Option<&Value>, before: Option<&str>) -> Progress {
    match vmi {
        None => Progress::Done(format!("VM {name} is stopped")),
        Some(vmi) if !is_former(vmi, before) => Progress::Failed(format!("VM {name} was started again")),
        Some(vmi) => Progress::Waiting(ending(vmi)),
    }
}

/// Describes a VMI that is about to end.
fn ending(vmi: &Value) -> String {
    let grace = vmi["spec"]["terminationGracePeriodSeconds"].as_i64().filter(|seconds| *seconds > 0);
    match (vmi["status"]["phase"].as_str(), grace) {
        (Some("Succeeded" | "Failed"), _) => "the guest has ended, its VMI is being removed".to_owned(),
        (Some("Running"), Some(seconds)) => {
            format!("the guest shuts down; it is stopped by force after {seconds} s")
        }
        _ => "the VMI is being removed".to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn vm(strategy: &str, status: Value) -> Value {
        json!({"spec": {"runStrategy": strategy}, "status": status})
    }

    fn vmi(uid: &str, phase: &str, conditions: Value) -> Value {
        json!({
            "metadata": {"uid": uid}, "spec": {"terminationGracePeriodSeconds": 30},
            "status": {
                "phase": phase, "nodeName": "n1", "interfaces": [{"ipAddress": "192.0.2.7"}], "conditions": conditions,
            },
        })
    }

    fn waiting(text: &str) -> Progress {
        Progress::Waiting(text.to_owned())
    }

    fn failed(text: &str) -> Progress {
        Progress::Failed(text.to_owned())
    }

    fn done(text: &str) -> Progress {
        Progress::Done(text.to_owned())
    }

    #[test]
    fn start_is_complete_when_a_new_vmi_is_ready() {
        let is =
            |type_: &str, status: &str, message: &str| json!([{"type": type_, "status": status, "message": message}]);
        let always = || vm("Always", json!({"printableStatus": "Running"}));
        let none = || json!([]);
        for (vm, vmi, expected) in [
            (always(), None, waiting("the VM's controller is about to create the VMI")),
            (
                vm("Always", json!({"printableStatus": "CrashLoopBackOff"})),
                None,
                waiting("the state of VM m is CrashLoopBackOff"),
            ),
            (
                vm("Always", json!({"conditions": [{"type": "Failure", "status": "True", "reason": "FailedCreate"}]})),
                None,
                waiting("FailedCreate"),
            ),
            (vm("Halted", json!({})), None, failed("VM m was stopped")),
            (
                vm("Halted", json!({"stateChangeRequests": [{"action": "Start"}]})),
                None,
                waiting("the VM's controller is about to create the VMI"),
            ),
            (
                always(),
                Some(vmi("old", "Running", is("Ready", "True", ""))),
                waiting("the guest shuts down; it is stopped by force after 30 s"),
            ),
            (always(), Some(vmi("old", "Succeeded", none())), waiting("the guest has ended, its VMI is being removed")),
            (always(), Some(vmi("new", "", none())), waiting("Pending")),
            (
                always(),
                Some(vmi("new", "Scheduling", is("PodScheduled", "False", "Insufficient memory"))),
                waiting("Scheduling: Insufficient memory"),
            ),
            (
                always(),
                Some(vmi("new", "Running", is("Ready", "False", "probe failed"))),
                waiting("Running on node n1, not ready: probe failed"),
            ),
            (
                always(),
                Some(vmi("new", "Running", is("Ready", "True", ""))),
                done("VM m runs on node n1 with address 192.0.2.7"),
            ),
            (always(), Some(vmi("new", "Running", is("Paused", "True", ""))), done("VM m is paused on node n1")),
            (
                always(),
                Some(vmi("new", "Failed", none())),
                waiting("the guest has ended (Failed) and is started again"),
            ),
            (
                vm("RerunOnFailure", json!({})),
                Some(vmi("new", "Succeeded", none())),
                failed("the guest of VM m has ended (Succeeded)"),
            ),
        ] {
            assert_eq!(started("m", Some(&vm), vmi.as_ref(), Some("old")), expected, "{vm} {vmi:?}");
        }
        assert_eq!(started("m", None, None, None), failed("VM m was deleted"));
    }

    #[test]
    fn stop_is_complete_when_the_vmi_is_gone() {
        for (vmi, expected) in [
            (None, done("VM m is stopped")),
            (
                Some(vmi("old", "Running", json!([]))),
                waiting("the guest shuts down; it is stopped by force after 30 s"),
            ),
            (Some(vmi("old", "Scheduling", json!([]))), waiting("the VMI is being removed")),
            (Some(vmi("old", "Failed", json!([]))), waiting("the guest has ended, its VMI is being removed")),
            (Some(json!({"metadata": {"uid": "old"}})), waiting("the VMI is being removed")),
            (Some(vmi("new", "Running", json!([]))), failed("VM m was started again")),
        ] {
            assert_eq!(stopped("m", vmi.as_ref(), Some("old")), expected, "{vmi:?}");
        }
    }
}
