//! vCPUs and memory of a running VMI: what the launcher is sent, and what its report means for the status. Pure.

use std::borrow::Cow;

use api::{
    Condition, VirtualMachineInstance, VirtualMachineInstanceStatus, condition,
    constants::{
        condition::{GUEST_MEMORY_PLUGGED, GUEST_VCPUS_ONLINE, HOT_MEMORY_CHANGE, HOT_VCPU_CHANGE},
        reason::OFFERED_NOT_TAKEN,
    },
    quantity,
    resize::{
        self, CPU_FAILED, MEMORY_FAILED, MEMORY_FAILED_MESSAGE, cpu_change, may_change_cpu, may_change_memory,
        memory_change,
    },
    vmi::{cpu::CpuTopology, memory::MemoryStatus},
};
use k8s_openapi::apimachinery::pkg::{api::resource::Quantity, apis::meta::v1::Time};
use protocol::{ItemKind, LauncherState, features::Feature};

use super::{
    event::Event,
    observed::{Link, Observed},
};
use crate::launcher::bounded;

/// Returns the VMI as the launcher may carry it out now.
pub(super) fn for_launcher<'a>(vmi: &'a VirtualMachineInstance, link: &Link) -> Cow<'a, VirtualMachineInstance> {
    let mut sent = resize::admitted(vmi);
    if lacks_resize(link) {
        // A launcher of an older release refuses a domain that can grow.
        let domain = &mut sent.to_mut().spec.domain;
        if let Some(cpu) = &mut domain.cpu {
            cpu.max_sockets = None;
        }
        if let Some(memory) = &mut domain.memory {
            memory.max_guest = None;
        }
    }
    sent
}

fn lacks_resize(link: &Link) -> bool {
    matches!(link, Link::Up { greeted: true, features, .. } if !features.contains(&Feature::LiveResize))
}

/// Result of a change that the domain was permitted.
enum Outcome {
    Done,
    Failed(String),
    Unknown,
}

fn outcome(observed: &Observed, report: &LauncherState, kind: ItemKind, present: i64, wanted: i64) -> Outcome {
    let Link::Up { synced, results_from, .. } = &observed.link else { return Outcome::Unknown };
    if lacks_resize(&observed.link) {
        return Outcome::Failed(format!("virt-launcher does not support {}", Feature::LiveResize.name()));
    }
    // The domain has it, whoever has asked for it.
    if present == wanted {
        return Outcome::Done;
    }
    if *synced != Some(observed.facts.fingerprint) || report.sequence < *results_from {
        return Outcome::Unknown;
    }
    match report.items.iter().find(|item| item.kind() == kind) {
        Some(item) => Outcome::Failed(bounded(&item.message)),
        None => Outcome::Unknown,
    }
}

/// Writes what has become of a change into the status.
pub(super) fn apply(next: &mut VirtualMachineInstanceStatus, observed: &Observed, report: &LauncherState, time: &Time) {
    let vmi = &observed.vmi;
    if let Some(change) = cpu_change(vmi).filter(|_| may_change_cpu(vmi)) {
        match outcome(observed, report, ItemKind::Cpu, i64::from(report.vcpus), change.wanted) {
            Outcome::Done => {
                next.current_cpu_topology = vmi.spec.domain.cpu.as_ref().map(|cpu| CpuTopology {
                    sockets: cpu.sockets,
                    cores: cpu.cores,
                    threads: cpu.threads,
                });
                condition::remove(&mut next.conditions, HOT_VCPU_CHANGE);
            }
            Outcome::Failed(message) => {
                condition::set(
                    &mut next.conditions,
                    Condition::new(HOT_VCPU_CHANGE, false, CPU_FAILED, &message, time),
                );
            }
            Outcome::Unknown => {}
        }
    }
    let Some(change) = memory_change(vmi).filter(|change| may_change_memory(vmi, *change)) else { return };
    let requested = i64::try_from(report.memory_requested).unwrap_or(i64::MAX);
    match outcome(observed, report, ItemKind::Memory, requested, change.wanted) {
        Outcome::Done => {
            let guest = vmi.spec.domain.memory.as_ref().and_then(|memory| memory.guest.clone());
            next.memory.get_or_insert_with(MemoryStatus::default).guest_requested = guest;
            // The pod of a guest that gives memory back follows: virt-controller removes the condition then.
            let gives_back = i64::try_from(report.memory_current).unwrap_or(i64::MAX) > change.wanted;
            if change.is_growth() && !gives_back {
                condition::remove(&mut next.conditions, HOT_MEMORY_CHANGE);
            }
        }
        Outcome::Failed(message) => {
            tracing::warn!(error = message, "cannot change the memory of the guest");
            let failed = Condition::new(HOT_MEMORY_CHANGE, false, MEMORY_FAILED, MEMORY_FAILED_MESSAGE, time);
            condition::set(&mut next.conditions, failed);
        }
        Outcome::Unknown => {}
    }
}

/// Shows which part of its size the guest does not use. A guest that uses all of it shows that after a change only, so that a
/// start has no write for it.
pub(super) fn show_guest(
    next: &mut VirtualMachineInstanceStatus,
    observed: &Observed,
    report: &LauncherState,
    time: &Time,
) {
    let has_changed = observed.vmi.status.as_ref().is_some_and(|known| {
        known.current_cpu_topology.is_some() && known.current_cpu_topology != next.current_cpu_topology
    });
    let LauncherState { online_vcpus: online, vcpus, .. } = *report;
    let not_taken = |type_: &str, message: &str| Condition::new(type_, false, OFFERED_NOT_TAKEN, message, time);
    if (1..vcpus).contains(&online) {
        let message = format!("the guest uses {online} of {vcpus} vCPUs");
        condition::set(&mut next.conditions, not_taken(GUEST_VCPUS_ONLINE, &message));
    } else if online == 0 {
        condition::remove(&mut next.conditions, GUEST_VCPUS_ONLINE);
    } else if has_changed || next.condition(GUEST_VCPUS_ONLINE).is_some() {
        condition::set(&mut next.conditions, Condition::new(GUEST_VCPUS_ONLINE, true, "", "", time));
    }
    let memory = next.memory.clone().unwrap_or_default();
    let bytes = |size: &Option<Quantity>| size.as_ref().and_then(|size| quantity::units(size).ok());
    // Memory at boot is the guest's from the start; a balloon may hold some of it.
    let is_grown = bytes(&memory.guest_requested) > bytes(&memory.guest_at_boot);
    let unused = memory.guest_requested.filter(|_| is_grown && report.memory_current < report.memory_requested);
    let unused = unused.map(|requested| {
        let message = format!("the guest does not use all of the {} that it is offered", requested.0);
        not_taken(GUEST_MEMORY_PLUGGED, &message)
    });
    condition::set_or_remove(&mut next.conditions, GUEST_MEMORY_PLUGGED, unused);
}

/// Returns an event for each change that has failed.
pub(super) fn events(current: &VirtualMachineInstanceStatus, next: &VirtualMachineInstanceStatus) -> Vec<Event> {
    let failed = |type_: &str, context: &str| {
        let failed = next.condition(type_).filter(|failed| failed.is_false())?;
        if current.condition(type_).is_some_and(|known| known.says_same(failed)) {
            return None;
        }
        let message = failed.message.as_deref().unwrap_or_default();
        Some(Event::warning("HotplugFailed", format!("{context}: {message}")))
    };
    let cpu = failed(HOT_VCPU_CHANGE, "failed to change vCPUs");
    cpu.into_iter().chain(failed(HOT_MEMORY_CHANGE, "failed to update guest memory")).collect()
}

#[cfg(test)]
mod tests {
    use std::{collections::BTreeSet, sync::Arc};

    use protocol::ItemResult;
    use serde_json::{Value, json};

    use super::*;

    const GIB: u64 = 1 << 30;

    fn observed(sockets: u32, guest: &str, condition: &Value, features: BTreeSet<Feature>) -> Observed {
        let vmi: VirtualMachineInstance = serde_json::from_value(json!({
            "apiVersion": "kubevirt.io/v1", "kind": "VirtualMachineInstance",
            "metadata": {"name": "m", "uid": "u", "labels": {"kubevirt.io/nodeName": "n"}},
            "spec": {"domain": {
                "cpu": {"sockets": sockets, "cores": 1, "threads": 1, "maxSockets": 4},
                "memory": {"guest": guest, "maxGuest": "4Gi"}, "devices": {},
            }},
            "status": {
                "phase": "Running", "nodeName": "n", "conditions": [condition],
                "currentCPUTopology": {"sockets": 1, "cores": 1, "threads": 1},
                "memory": {"guestAtBoot": "1Gi", "guestRequested": "2Gi", "guestCurrent": "2Gi"},
            },
        }))
        .unwrap();
        let mut observed = Observed::new(Arc::new(vmi), "n");
        observed.link = Link::Up {
            connection: 1,
            greeted: true,
            features,
            networked: true,
            synced: Some(observed.facts.fingerprint),
            results_from: 2,
        };
        observed
    }

    fn report(vcpus: u32, memory_requested: u64, failed: Option<ItemKind>) -> LauncherState {
        let item = |kind: ItemKind| ItemResult { kind: kind.into(), message: "no".into(), ..ItemResult::default() };
        let items = failed.into_iter().map(item).collect();
        LauncherState { sequence: 2, vcpus, memory_requested, items, ..LauncherState::default() }
    }

    #[test]
    fn report_completes_a_change_or_fails_it() {
        let all = || Feature::ALL.into_iter().collect::<BTreeSet<_>>();
        let old = || [Feature::ItemResults].into();
        let condition = |type_: &str, reason: Value| json!({"type": type_, "status": "True", "reason": reason});
        let (cpu, memory) = ("HotVCPUChange", "HotMemoryChange");
        let permitted = |type_: &str| condition(type_, json!("PodResized"));
        // Sockets and memory of the spec, condition, features, report; sockets and memory of the status, state of the condition.
        for (sockets, guest, condition, features, report, expected) in [
            (2, "2Gi", permitted(cpu), all(), report(2, 2 * GIB, None), (2, "2Gi", None)),
            (2, "2Gi", permitted(cpu), all(), report(1, 2 * GIB, None), (1, "2Gi", Some("True"))),
            (2, "2Gi", permitted(cpu), all(), report(1, 2 * GIB, Some(ItemKind::Cpu)), (1, "2Gi", Some("False"))),
            (2, "2Gi", permitted(cpu), old(), report(1, 2 * GIB, None), (1, "2Gi", Some("False"))),
            // Not permitted: nothing is concluded from the report.
            (2, "2Gi", condition(cpu, Value::Null), all(), report(2, 2 * GIB, None), (1, "2Gi", Some("True"))),
            (1, "3Gi", permitted(memory), all(), report(1, 3 * GIB, None), (1, "3Gi", None)),
            (1, "3Gi", permitted(memory), all(), report(1, 2 * GIB, Some(ItemKind::Memory)), (1, "2Gi", Some("False"))),
            (1, "1Gi", condition(memory, Value::Null), all(), report(1, GIB, None), (1, "1Gi", Some("True"))),
        ] {
            let observed = observed(sockets, guest, &condition, features);
            let mut next = observed.vmi.status.clone().unwrap();
            apply(&mut next, &observed, &report, &Time(jiff::Timestamp::UNIX_EPOCH));
            let type_ = condition["type"].as_str().unwrap();
            let found = (
                next.current_cpu_topology.as_ref().unwrap().sockets.unwrap(),
                next.memory.as_ref().unwrap().guest_requested.as_ref().unwrap().0.as_str(),
                next.condition(type_).map(|condition| condition.status.as_str()),
            );
            assert_eq!(found, expected, "{sockets} {guest} {condition}");
            let failed = expected.2 == Some("False");
            assert_eq!(events(observed.vmi.status.as_ref().unwrap(), &next).len(), usize::from(failed));
        }
    }

    #[test]
    fn size_that_the_guest_does_not_use_is_shown() {
        let (cpu, memory) = ("GuestVCPUsOnline", "GuestMemoryPlugged");
        let known = |type_: &str, status: &str| json!({"type": type_, "status": status});
        // Former condition, vCPUs before and now, those in use, memory in use; states of both conditions.
        for (condition, before, vcpus, online_vcpus, memory_current, expected) in [
            (known("Ready", "True"), 1, 1, 1, 2 * GIB, (None, None)),
            (known("Ready", "True"), 1, 2, 0, 2 * GIB, (None, None)),
            (known("Ready", "True"), 1, 2, 1, 2 * GIB, (Some("False"), None)),
            (known("Ready", "True"), 1, 2, 2, 2 * GIB, (Some("True"), None)),
            (known("Ready", "True"), 2, 2, 2, 2 * GIB, (None, None)),
            (known(cpu, "False"), 2, 2, 2, 2 * GIB, (Some("True"), None)),
            (known(cpu, "True"), 2, 2, 1, 2 * GIB, (Some("False"), None)),
            (known(cpu, "True"), 2, 2, 0, 2 * GIB, (None, None)),
            (known("Ready", "True"), 1, 1, 1, GIB, (None, Some("False"))),
            (known(memory, "False"), 1, 1, 1, 2 * GIB, (None, None)),
        ] {
            let mut observed = observed(vcpus, "2Gi", &condition, BTreeSet::new());
            let mut status = observed.vmi.status.clone().unwrap();
            status.current_cpu_topology.as_mut().unwrap().sockets = Some(before);
            let mut next = status.clone();
            next.current_cpu_topology.as_mut().unwrap().sockets = Some(vcpus);
            Arc::make_mut(&mut observed.vmi).status = Some(status);
            let report = LauncherState { online_vcpus, memory_current, ..report(vcpus, 2 * GIB, None) };
            show_guest(&mut next, &observed, &report, &Time(jiff::Timestamp::UNIX_EPOCH));
            let state = |type_: &str| next.condition(type_).map(|condition| condition.status.as_str());
            assert_eq!((state(cpu), state(memory)), expected, "{condition} {before} {vcpus} {online_vcpus}");
        }
    }

    #[test]
    fn launcher_of_an_older_release_gets_a_domain_that_cannot_grow() {
        let condition = json!({"type": "HotVCPUChange", "status": "True", "reason": "PodResized"});
        for (features, most) in [(Feature::ALL.into_iter().collect(), Some(4)), ([Feature::ItemResults].into(), None)] {
            let observed = observed(2, "2Gi", &condition, features);
            let sent = for_launcher(&observed.vmi, &observed.link);
            let domain = &sent.spec.domain;
            assert_eq!(domain.cpu.as_ref().unwrap().max_sockets, most);
            assert_eq!(domain.memory.as_ref().unwrap().max_guest.is_some(), most.is_some());
        }
    }
}
