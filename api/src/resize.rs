//! vCPUs and memory of a running VMI: the changes that are in progress, and the size that its domain may have now.
//!
//! The spec of a VMI holds the wanted size, `status.currentCPUTopology` and `status.memory.guestRequested` the size of its
//! domain. virt-controller resizes the launcher pod first when a guest grows, and shows by the reason [`POD_RESIZED`] that
//! virt-handler may let the domain follow. A guest that shrinks goes first, and its pod follows.

use std::borrow::Cow;

use crate::{
    Condition, VirtualMachineInstance, VmiPhase,
    constants::condition::{HOT_MEMORY_CHANGE, HOT_VCPU_CHANGE},
    quantity,
    vmi::cpu::CpuTopology,
};

/// The pod has the resources: the domain may follow.
pub const POD_RESIZED: &str = "PodResized";
/// The node has no room for the pod now.
pub const POD_RESIZE_DEFERRED: &str = "PodResizeDeferred";
/// The node can never have room for the pod.
pub const POD_RESIZE_INFEASIBLE: &str = "PodResizeInfeasible";
/// The API server refuses the resize of the pod: by quota, limits or quality of service class.
pub const POD_RESIZE_REFUSED: &str = "PodResizeRefused";
/// Reason of a memory change that the hypervisor refused, as in the reference.
pub const MEMORY_FAILED: &str = "Memory Hotplug Failed";
/// Message of [`MEMORY_FAILED`].
pub const MEMORY_FAILED_MESSAGE: &str = "memory hotplug failed, the VM configuration is not supported";
/// Reason of vCPUs that the hypervisor refused.
pub const CPU_FAILED: &str = "CPUHotplugFailed";

/// A size in the spec that differs from that of the domain.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Change {
    /// Size of the domain: vCPUs or bytes.
    pub present: i64,
    /// Size in the spec.
    pub wanted: i64,
}

impl Change {
    /// Returns true if the domain grows.
    #[must_use]
    pub fn is_growth(self) -> bool {
        self.wanted > self.present
    }
}

/// Returns the number of vCPUs of a topology.
#[must_use]
pub fn vcpus(topology: &CpuTopology) -> u32 {
    let part = |value: Option<u32>| value.unwrap_or(1).max(1);
    part(topology.sockets).saturating_mul(part(topology.cores)).saturating_mul(part(topology.threads))
}

/// Returns the change of vCPUs that the VMI waits for.
#[must_use]
pub fn cpu_change(vmi: &VirtualMachineInstance) -> Option<Change> {
    let cpu = vmi.spec.domain.cpu.as_ref().filter(|cpu| cpu.max_sockets.is_some_and(|most| most != 0))?;
    let present = i64::from(vcpus(vmi.status.as_ref()?.current_cpu_topology.as_ref()?));
    let wanted = i64::from(cpu.vcpus());
    (present != wanted).then_some(Change { present, wanted })
}

/// Returns the change of memory that the VMI waits for.
#[must_use]
pub fn memory_change(vmi: &VirtualMachineInstance) -> Option<Change> {
    let memory = vmi.spec.domain.memory.as_ref().filter(|memory| memory.max_guest.is_some())?;
    let wanted = quantity::units(memory.guest.as_ref()?).ok()?;
    let present = quantity::units(vmi.status.as_ref()?.memory.as_ref()?.guest_requested.as_ref()?).ok()?;
    (present != wanted).then_some(Change { present, wanted })
}

/// Returns true while the domain is left alone: the pod has not got the resources and may never get them.
#[must_use]
pub fn is_held(condition: &Condition) -> bool {
    let reasons = [POD_RESIZE_DEFERRED, POD_RESIZE_INFEASIBLE, POD_RESIZE_REFUSED];
    condition.is_true() && condition.reason.as_deref().is_some_and(|reason| reasons.contains(&reason))
}

/// Text of a refusal by a quota. A second pod would need even more of it.
const QUOTA: &str = "exceeded quota";

/// Returns true if only another pod can have the resources of the change: a migration brings the guest to it.
#[must_use]
pub fn needs_another_pod(condition: &Condition) -> bool {
    let is_by_quota = condition.message.as_deref().is_some_and(|message| message.contains(QUOTA));
    is_held(condition) && !is_by_quota
}

/// Returns true if the node may still get room for the pod.
#[must_use]
pub fn is_deferred(condition: &Condition) -> bool {
    condition.is_true() && condition.reason.as_deref() == Some(POD_RESIZE_DEFERRED)
}

/// Returns true if virt-controller lets the domain follow.
fn is_permitted(vmi: &VirtualMachineInstance, type_: &str) -> bool {
    let condition = vmi.condition(type_).filter(|condition| condition.is_true());
    condition.is_some_and(|condition| condition.reason.as_deref() == Some(POD_RESIZED))
}

/// Returns true if the domain may get the vCPUs of the spec now.
#[must_use]
pub fn may_change_cpu(vmi: &VirtualMachineInstance) -> bool {
    is_permitted(vmi, HOT_VCPU_CHANGE)
}

/// Returns true if the domain may get the memory of the spec now.
#[must_use]
pub fn may_change_memory(vmi: &VirtualMachineInstance, change: Change) -> bool {
    let condition = vmi.condition(HOT_MEMORY_CHANGE).filter(|condition| condition.is_true());
    if change.is_growth() { is_permitted(vmi, HOT_MEMORY_CHANGE) } else { condition.is_some() }
}

/// Returns the VMI with the size that its domain may have now.
#[must_use]
pub fn admitted(vmi: &VirtualMachineInstance) -> Cow<'_, VirtualMachineInstance> {
    if *vmi.phase() != VmiPhase::Running {
        return Cow::Borrowed(vmi);
    }
    let (cpu, memory) = (
        cpu_change(vmi).filter(|_| !may_change_cpu(vmi)),
        memory_change(vmi).filter(|change| !may_change_memory(vmi, *change)),
    );
    if cpu.is_none() && memory.is_none() {
        return Cow::Borrowed(vmi);
    }
    let mut admitted = vmi.clone();
    let status = vmi.status.as_ref();
    if let (Some(_), Some(spec), Some(present)) =
        (cpu, admitted.spec.domain.cpu.as_mut(), status.and_then(|status| status.current_cpu_topology.as_ref()))
    {
        spec.sockets = present.sockets;
    }
    if let (Some(_), Some(spec), Some(present)) = (
        memory,
        admitted.spec.domain.memory.as_mut(),
        status.and_then(|status| status.memory.as_ref()?.guest_requested.as_ref()),
    ) {
        spec.guest = Some(present.clone());
    }
    Cow::Owned(admitted)
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn vmi(sockets: u32, guest: &str, conditions: &Value) -> VirtualMachineInstance {
        serde_json::from_value(json!({
            "apiVersion": "kubevirt.io/v1", "kind": "VirtualMachineInstance", "metadata": {},
            "spec": {"domain": {
                "cpu": {"sockets": sockets, "cores": 2, "threads": 1, "maxSockets": 4},
                "memory": {"guest": guest, "maxGuest": "4Gi"}, "devices": {},
            }},
            "status": {
                "phase": "Running", "conditions": conditions,
                "currentCPUTopology": {"sockets": 2, "cores": 2, "threads": 1},
                "memory": {"guestRequested": "2Gi", "guestCurrent": "2Gi", "guestAtBoot": "1Gi"},
            },
        }))
        .unwrap()
    }

    #[test]
    fn domain_grows_after_its_pod_and_shrinks_before_it() {
        let set =
            |type_: &str, status: &str, reason: Value| json!([{"type": type_, "status": status, "reason": reason}]);
        let (cpu, memory) = ("HotVCPUChange", "HotMemoryChange");
        // Sockets and memory of the spec, conditions; sockets and memory that the domain may have.
        for (sockets, guest, conditions, expected) in [
            (2, "2Gi", json!([]), (2, "2Gi")),
            (3, "2Gi", json!([]), (2, "2Gi")),
            (3, "2Gi", set(cpu, "True", Value::Null), (2, "2Gi")),
            (3, "2Gi", set(cpu, "True", json!("PodResizeDeferred")), (2, "2Gi")),
            (3, "2Gi", set(cpu, "False", json!("PodResized")), (2, "2Gi")),
            (3, "2Gi", set(cpu, "True", json!("PodResized")), (3, "2Gi")),
            (3, "3Gi", set(cpu, "True", json!("PodResized")), (3, "2Gi")),
            (2, "3Gi", set(memory, "True", Value::Null), (2, "2Gi")),
            (2, "3Gi", set(memory, "True", json!("PodResized")), (2, "3Gi")),
            (2, "1Gi", json!([]), (2, "2Gi")),
            (2, "1Gi", set(memory, "True", Value::Null), (2, "1Gi")),
            (2, "1Gi", set(memory, "False", json!("Memory Hotplug Failed")), (2, "2Gi")),
            // The same size.
            (2, "2048Mi", json!([]), (2, "2048Mi")),
        ] {
            let vmi = vmi(sockets, guest, &conditions);
            let admitted = admitted(&vmi);
            let domain = &admitted.spec.domain;
            let found = (
                domain.cpu.as_ref().unwrap().sockets.unwrap(),
                domain.memory.as_ref().unwrap().guest.as_ref().unwrap().0.as_str(),
            );
            assert_eq!(found, expected, "{sockets} {guest} {conditions}");
        }
    }

    #[test]
    fn change_that_its_pod_cannot_follow_needs_another_pod() {
        // Status, reason, message; another pod is needed, the present one may still follow.
        for (status, reason, message, expected) in [
            ("True", Value::Null, "", (false, false)),
            ("True", json!("PodResized"), "", (false, false)),
            ("True", json!("PodResizeDeferred"), "no room", (true, true)),
            ("True", json!("PodResizeInfeasible"), "never", (true, false)),
            ("True", json!("PodResizeRefused"), "Pod QOS Class may not change", (true, false)),
            ("True", json!("PodResizeRefused"), "pods \"p\" is forbidden: exceeded quota: q", (false, false)),
            ("False", json!("CPUHotplugFailed"), "", (false, false)),
        ] {
            let condition = json!({"type": "HotVCPUChange", "status": status, "reason": reason, "message": message});
            let condition: Condition = serde_json::from_value(condition).unwrap();
            assert_eq!((needs_another_pod(&condition), is_deferred(&condition)), expected, "{reason} {message}");
        }
    }

    #[test]
    fn vmi_without_headroom_waits_for_nothing() {
        let mut vmi = vmi(3, "3Gi", &json!([]));
        assert_eq!(cpu_change(&vmi), Some(Change { present: 4, wanted: 6 }));
        assert_eq!(memory_change(&vmi), Some(Change { present: 2 << 30, wanted: 3 << 30 }));
        vmi.spec.domain.cpu.as_mut().unwrap().max_sockets = None;
        vmi.spec.domain.memory.as_mut().unwrap().max_guest = None;
        assert_eq!((cpu_change(&vmi), memory_change(&vmi)), (None, None));
    }
}
