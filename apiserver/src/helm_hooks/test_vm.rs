//! `test-vm`: `helm test` boots a VMI.

use std::time::Duration;

use api::{
    VirtualMachineInstance,
    constants::{HELM_TEST_VMI as NAME, condition},
    enums::VmiPhase,
};
use kube::{
    Api, ResourceExt,
    api::{DeleteParams, PostParams, Preconditions},
};
use serde_json::json;
use tokio::time::{Instant, sleep};

use super::{HookError, call};

/// Label of the VMI of `helm test`. The hook deletes no VMI without it.
const LABEL: &str = "ferrovirt.io/helm-test";
/// Time between two reads.
const PERIOD: Duration = Duration::from_millis(500);
/// Longest wait for the end of a deleted VMI.
const GONE_TIMEOUT: Duration = Duration::from_secs(60);

/// Boots a VMI in a namespace, waits until it runs, and deletes it.
pub async fn test_vm(namespace: &str, timeout: Duration) -> Result<(), HookError> {
    let api = Api::<VirtualMachineInstance>::namespaced(daemon::client::connect().await?, namespace);
    let name = format!("{namespace}/{NAME}");
    if let Some(former) = read(&api, &name).await? {
        if !former.labels().contains_key(LABEL) {
            return Err(HookError::ForeignVmi(name));
        }
        println!("VMI {name} of a former test is deleted");
        delete(&api, &name, &former).await?;
    }
    let vmi = vmi().map_err(HookError::TestVmi)?;
    let started = Instant::now();
    let created = api.create(&PostParams::default(), &vmi).await.map_err(call(format!("cannot create VMI {name}")))?;
    println!("VMI {name} is created");
    let booted = wait_until_running(&api, &name, started, timeout).await;
    if booted.is_ok() {
        println!("VMI {name} runs after {:.1} s", started.elapsed().as_secs_f32());
    }
    let deleted = delete(&api, &name, &created).await;
    booted.and(deleted)?;
    println!("VMI {name} is deleted");
    Ok(())
}

/// Returns a VMI without disks, whose guest is the firmware. It needs no image beside those of the installation. The firmware
/// does not answer a request to shut down.
fn vmi() -> Result<VirtualMachineInstance, serde_json::Error> {
    serde_json::from_value(json!({
        "apiVersion": "kubevirt.io/v1",
        "kind": "VirtualMachineInstance",
        "metadata": {"name": NAME, "labels": {LABEL: ""}},
        "spec": {
            "terminationGracePeriodSeconds": 0,
            "domain": {"memory": {"guest": "64Mi"}, "devices": {}},
        },
    }))
}

async fn read(api: &Api<VirtualMachineInstance>, name: &str) -> Result<Option<VirtualMachineInstance>, HookError> {
    api.get_opt(NAME).await.map_err(call(format!("cannot read VMI {name}")))
}

async fn wait_until_running(
    api: &Api<VirtualMachineInstance>,
    name: &str,
    started: Instant,
    timeout: Duration,
) -> Result<(), HookError> {
    let mut shown = String::new();
    loop {
        let state = match read(api, name).await? {
            Some(vmi) => decide(&vmi),
            None => State::Failed("it was deleted".into()),
        };
        let now = match state {
            State::Running => return Ok(()),
            State::Failed(reason) => return Err(HookError::NotBooted { name: name.to_owned(), reason }),
            State::Waiting(now) => now,
        };
        if started.elapsed() > timeout {
            let reason = format!("after {} s: {now}", timeout.as_secs());
            return Err(HookError::NotBooted { name: name.to_owned(), reason });
        }
        if now != shown {
            println!("{now}");
            shown = now;
        }
        sleep(PERIOD).await;
    }
}

/// State of a start.
#[derive(Debug, PartialEq, Eq)]
enum State {
    /// The guest runs and its pod is ready.
    Running,
    /// It has not started yet, with the reason.
    Waiting(String),
    /// It will not start, with the reason.
    Failed(String),
}

fn decide(vmi: &VirtualMachineInstance) -> State {
    let phase = vmi.status.as_ref().and_then(|status| status.phase.as_ref());
    if phase == Some(&VmiPhase::Running) && vmi.has_true(condition::READY) {
        return State::Running;
    }
    let mut text = format!("phase {}", phase.map_or("unset", VmiPhase::as_str));
    // Synchronized reports why a start does not progress, PodScheduled why no node takes the pod.
    for type_ in [condition::READY, condition::POD_SCHEDULED, condition::SYNCHRONIZED] {
        let Some(found) = vmi.condition(type_).filter(|found| !found.is_true()) else { continue };
        let reason = found.reason.as_deref().filter(|reason| !reason.is_empty()).unwrap_or("no reason");
        text.push_str(&format!("; {type_} is {} ({reason})", found.status));
        if let Some(message) = found.message.as_deref().filter(|message| !message.is_empty()) {
            text.push_str(&format!(": {message}"));
        }
    }
    if phase.is_some_and(VmiPhase::is_final) { State::Failed(text) } else { State::Waiting(text) }
}

/// Deletes a VMI and waits until it is gone.
async fn delete(api: &Api<VirtualMachineInstance>, name: &str, vmi: &VirtualMachineInstance) -> Result<(), HookError> {
    let same = Preconditions { uid: vmi.uid(), ..Preconditions::default() };
    let params = DeleteParams { preconditions: Some(same), ..DeleteParams::default() };
    match api.delete(NAME, &params).await {
        Ok(_) => {}
        // Gone, or another VMI of this name.
        Err(kube::Error::Api(status)) if matches!(status.code, 404 | 409) => {}
        Err(error) => return Err(call(format!("cannot delete VMI {name}"))(error)),
    }
    let until = Instant::now() + GONE_TIMEOUT;
    while read(api, name).await?.is_some_and(|found| found.uid() == vmi.uid()) {
        if Instant::now() > until {
            return Err(HookError::NotGone(format!("VMI {name}")));
        }
        sleep(PERIOD).await;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use serde_json::Value;

    use super::*;

    #[test]
    fn vmi_of_the_test_has_only_supported_fields_and_needs_no_image() {
        let vmi = vmi().unwrap();
        assert_eq!(vmi.name_any(), NAME);
        assert!(vmi.labels().contains_key(LABEL));
        assert!(vmi.spec.volumes.is_empty());
    }

    #[test]
    fn state_of_a_start_is_decided_by_phase_and_conditions() {
        let condition = |type_: &str, status: &str, reason: &str, message: &str| json!({"type": type_, "status": status, "reason": reason, "message": message});
        let ready = || condition("Ready", "True", "", "");
        let waiting = |text: &str| State::Waiting(text.into());
        let failed = |text: &str| State::Failed(text.into());
        for (phase, conditions, state) in [
            (None, vec![], waiting("phase unset")),
            (Some("Pending"), vec![], waiting("phase Pending")),
            (
                Some("Scheduling"),
                vec![
                    condition("Ready", "False", "GuestNotRunning", "Guest VM is not reported as running"),
                    condition("PodScheduled", "False", "Unschedulable", "0/1 nodes are available"),
                ],
                waiting(
                    "phase Scheduling; Ready is False (GuestNotRunning): Guest VM is not reported as running; \
                     PodScheduled is False (Unschedulable): 0/1 nodes are available",
                ),
            ),
            (Some("Running"), vec![], waiting("phase Running")),
            (
                Some("Running"),
                vec![condition("Ready", "False", "", "")],
                waiting("phase Running; Ready is False (no reason)"),
            ),
            (Some("Scheduled"), vec![ready()], waiting("phase Scheduled")),
            (Some("Running"), vec![ready()], State::Running),
            (Some("Failed"), vec![ready()], failed("phase Failed")),
            (
                Some("Failed"),
                vec![condition("Synchronized", "False", "Failed", "no /dev/kvm")],
                failed("phase Failed; Synchronized is False (Failed): no /dev/kvm"),
            ),
            (Some("Succeeded"), vec![], failed("phase Succeeded")),
        ] {
            let status: Value = phase
                .map_or(json!({"conditions": conditions}), |phase| json!({"phase": phase, "conditions": conditions}));
            let vmi: VirtualMachineInstance = serde_json::from_value(json!({
                "apiVersion": "kubevirt.io/v1", "kind": "VirtualMachineInstance", "metadata": {"name": "a"},
                "spec": {"domain": {"devices": {}}}, "status": status,
            }))
            .unwrap();
            assert_eq!(decide(&vmi), state, "{phase:?}");
        }
    }
}
