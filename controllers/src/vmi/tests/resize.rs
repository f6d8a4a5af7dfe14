//! Changes of vCPUs and memory of a running VMI.

use super::*;

/// A running VMI of 1 socket and 1 GiB that can grow to 4 sockets and 4 GiB.
fn running(change: &Value) -> VirtualMachineInstance {
    let mut vmi = serde_json::to_value(in_phase("Running")).unwrap();
    json_patch::merge(
        &mut vmi,
        &json!({
            "spec": {"architecture": "amd64", "domain": {
                "cpu": {"sockets": 1, "cores": 1, "threads": 1, "maxSockets": 4},
                "memory": {"guest": "1Gi", "maxGuest": "4Gi"},
            }},
            "status": {
                "currentCPUTopology": {"sockets": 1, "cores": 1, "threads": 1},
                "memory": {"guestAtBoot": "1Gi", "guestRequested": "1Gi", "guestCurrent": "1Gi"},
            },
        }),
    );
    json_patch::merge(&mut vmi, change);
    serde_json::from_value(vmi).unwrap()
}

fn with_condition(mut change: Value, type_: &str, status: &str, reason: Value) -> VirtualMachineInstance {
    let known = json!({"type": type_, "status": status, "reason": reason});
    json_patch::merge(&mut change, &json!({"status": {"conditions": [known]}}));
    running(&change)
}

fn amounts(cpu: &str, memory: &str) -> Value {
    json!({"requests": {"cpu": cpu, "memory": memory}})
}

/// The launcher pod: resources of its specification and of its container, and a condition.
fn launcher(wanted: &Value, granted: &Value, condition: Value) -> CachedPod {
    let mut pod = json!({
        "metadata": {
            "name": "virt-launcher-m-x", "namespace": "d", "uid": "p", "creationTimestamp": "2030-01-01T00:00:00Z",
            "labels": {"kubevirt.io/nodeName": "n"},
            "annotations": {"pre.hook.backup.velero.io/container": "compute"},
        },
        "spec": {"nodeName": "n", "containers": [{"name": "compute", "image": "launcher:1", "resources": wanted}]},
        "status": {
            "phase": "Running", "qosClass": "Burstable",
            "conditions": [
                {"type": "PodScheduled", "status": "True"}, {"type": "kubevirt.io/virtual-machine-unpaused", "status": "True"},
            ],
            "containerStatuses": [{"name": "compute", "ready": true, "restartCount": 0, "image": "", "imageID": "",
                "state": {"running": {}}, "resources": granted}],
        },
    });
    if !condition.is_null() {
        pod["status"]["conditions"].as_array_mut().unwrap().push(condition);
    }
    CachedPod::from(serde_json::from_value::<Pod>(pod).unwrap())
}

fn pending(reason: &str) -> Value {
    json!({"type": "PodResizePending", "status": "True", "reason": reason, "message": "no room"})
}

fn refusal() -> Failure {
    Failure {
        reason: "PodResizeRefused",
        message: "exceeded quota".to_owned(),
        retry_at: "2030-01-01T00:01:10Z".parse().unwrap(),
        attempts: 1,
    }
}

/// Returns the resize of the pod, and reason or status of a condition after the decision.
fn outcome(
    vmi: &VirtualMachineInstance,
    pod: CachedPod,
    failure: Option<&Failure>,
    type_: &str,
) -> (Value, Option<String>) {
    let decision = decided_after(vmi, &[pod], failure);
    let resize = decision.effects.iter().find_map(|effect| match effect {
        Effect::Patch { kind: Kind::Pod, subresource: Some("resize"), patch, .. } => {
            Some(patch["spec"]["containers"][0]["resources"].clone())
        }
        _ => None,
    });
    let mut next = serde_json::to_value(vmi).unwrap();
    if let Some(patch) = patch_of(&decision, Kind::Instance) {
        json_patch::merge(&mut next, &patch);
    }
    let shown = condition_in(&next["status"], type_);
    let text = |name: &str| shown[name].as_str().map(str::to_owned);
    let reason = if shown["status"] == "False" { text("status") } else { text("reason").or(text("status")) };
    (resize.unwrap_or_default(), reason)
}

// Overhead of 1 vCPU: 120 MiB; each further vCPU takes 8 MiB.
const ONE: (&str, &str) = ("100m", "1144Mi");
const TWO: (&str, &str) = ("200m", "1152Mi");

#[test]
fn guest_in_huge_pages_grows_in_another_pod() {
    let pages = |amount: &str| json!({"requests": {"memory": "120Mi", "cpu": "100m", "hugepages-2Mi": amount}, "limits": {"hugepages-2Mi": amount}});
    let wants = |guest: &str| {
        running(&json!({"spec": {"domain": {"memory": {"guest": guest, "hugepages": {"pageSize": "2Mi"}}}}}))
    };
    for (guest, of_pod, shown) in [
        ("1Gi", "1Gi", None),
        ("2Gi", "1Gi", Some("PodResizeInfeasible")),
        ("2Gi", "2Gi", Some("PodResized")),
        ("2Gi", "3Gi", Some("PodResized")),
    ] {
        let pod = launcher(&pages(of_pod), &pages(of_pod), Value::Null);
        let found = outcome(&wants(guest), pod, None, "HotMemoryChange");
        assert_eq!(found, (Value::Null, shown.map(str::to_owned)), "{guest} in {of_pod}");
    }
}

#[test]
fn pod_grows_before_its_guest() {
    let (one, two) = (amounts(ONE.0, ONE.1), amounts(TWO.0, TWO.1));
    let grown = || json!({"spec": {"domain": {"cpu": {"sockets": 2}}}});
    let type_ = "HotVCPUChange";
    let set = |reason: &str| with_condition(grown(), type_, "True", json!(reason));
    let first = || with_condition(grown(), type_, "True", Value::Null);
    let none = || Value::Null;
    // VMI, specification and resources of the pod, its condition, a refusal; the resize, the reason.
    for (vmi, wanted, granted, condition, refused, resize, shown) in [
        (running(&json!({})), &one, &one, none(), false, none(), None),
        // A pod as another version made it.
        (running(&json!({})), &two, &two, none(), false, none(), None),
        (running(&grown()), &one, &one, none(), false, two.clone(), Some("True")),
        (first(), &two, &one, none(), false, none(), Some("True")),
        (first(), &two, &two, none(), false, none(), Some("PodResized")),
        (first(), &two, &one, pending("Deferred"), false, none(), Some("PodResizeDeferred")),
        (first(), &two, &one, pending("Infeasible"), false, none(), Some("PodResizeInfeasible")),
        (first(), &one, &one, none(), true, none(), Some("PodResizeRefused")),
        (set("PodResizeDeferred"), &two, &two, none(), false, none(), Some("PodResized")),
        // virt-handler may be plugging.
        (set("PodResized"), &two, &one, pending("Deferred"), false, none(), Some("PodResized")),
        // Taken back.
        (
            with_condition(json!({}), type_, "True", json!("PodResizeInfeasible")),
            &two,
            &one,
            pending("Infeasible"),
            false,
            one.clone(),
            Some("PodResizeInfeasible"),
        ),
        (
            with_condition(json!({}), type_, "True", json!("PodResizeInfeasible")),
            &one,
            &one,
            none(),
            false,
            none(),
            None,
        ),
        (with_condition(json!({}), type_, "True", json!("PodResizeRefused")), &one, &one, none(), true, none(), None),
        // Failed in the hypervisor.
        (with_condition(grown(), type_, "False", Value::Null), &two, &two, none(), false, none(), Some("False")),
    ] {
        let refusal = refused.then(refusal);
        let found = outcome(&vmi, launcher(wanted, granted, condition.clone()), refusal.as_ref(), type_);
        assert_eq!(found, (resize, shown.map(str::to_owned)), "{:?} {wanted} {granted} {condition}", vmi.status);
    }
}

#[test]
fn guest_shrinks_before_its_pod() {
    let (one, three) = (amounts(ONE.0, ONE.1), amounts(ONE.0, "3230Mi"));
    let type_ = "HotMemoryChange";
    let memory = |requested: &str, current: &str| json!({"status": {"memory": {"guestRequested": requested, "guestCurrent": current}}});
    let set = |change: Value| with_condition(change, type_, "True", Value::Null);
    // VMI, resources of the pod; the resize, the reason.
    for (vmi, resources, resize, shown) in [
        (running(&memory("3Gi", "3Gi")), &three, Value::Null, Some("True")),
        (set(memory("3Gi", "3Gi")), &three, Value::Null, Some("True")),
        (set(memory("1Gi", "2Gi")), &three, Value::Null, Some("True")),
        (set(memory("1Gi", "1Gi")), &three, one.clone(), Some("True")),
        (set(memory("1Gi", "1Gi")), &one, Value::Null, None),
    ] {
        let found = outcome(&vmi, launcher(resources, resources, Value::Null), None, type_);
        assert_eq!(found, (resize, shown.map(str::to_owned)), "{:?} {resources}", vmi.status);
    }
}

#[test]
fn resize_that_does_not_fit_has_an_event() {
    let (one, two) = (amounts(ONE.0, ONE.1), amounts(TWO.0, TWO.1));
    let grown = json!({"spec": {"domain": {"cpu": {"sockets": 2}}}});
    let vmi = with_condition(grown, "HotVCPUChange", "True", Value::Null);
    let decision = decided(&vmi, &[launcher(&two, &one, pending("Infeasible"))]);
    let event = decision.effects.iter().find_map(|effect| match effect {
        Effect::Event(event) => Some((event.reason, event.message.clone())),
        _ => None,
    });
    assert_eq!(event, Some(("PodResizeInfeasible", "the node cannot resize the launcher pod: no room".to_owned())));
}

#[test]
fn limits_of_the_pod_grow_with_its_requests() {
    let limited = |cpu: &str, memory: &str, limit: &str| json!({"requests": {"cpu": cpu, "memory": memory}, "limits": {"memory": limit, "devices.kubevirt.io/kvm": "1"}});
    let vmi = running(&json!({"spec": {"domain": {
        "cpu": {"sockets": 2}, "resources": {"requests": {"memory": "1Gi"}, "limits": {"memory": "2Gi"}},
    }}}));
    // 2 MiB of page tables.
    let pod = limited("100m", "1146Mi", "2170Mi");
    let expected = json!({"requests": {"cpu": "200m", "memory": "1154Mi"}, "limits": {"memory": "2178Mi"}});
    assert_eq!(outcome(&vmi, launcher(&pod, &pod, Value::Null), None, "HotVCPUChange").0, expected);
}

#[test]
fn memory_limit_of_a_former_version_stays_below_the_guest() {
    let vmi =
        running(&json!({"spec": {"domain": {"cpu": {"sockets": 2}, "resources": {"requests": {"memory": "256Mi"}}}}}));
    for (limit, stays) in [("752Mi", true), ("1200Mi", false)] {
        let pod = json!({"requests": {"cpu": "100m", "memory": "376Mi"}, "limits": {"memory": limit}});
        let (resize, _) = outcome(&vmi, launcher(&pod, &pod, Value::Null), None, "HotVCPUChange");
        let amount = serde_json::from_value(resize["limits"]["memory"].clone()).unwrap();
        assert_eq!(api::quantity::units(&amount).unwrap() < 1 << 30, stays, "{resize}");
    }
}
