//! Changes of a VMI that wait for a migration.

use std::time::Duration;

use api::{
    VirtualMachineInstance,
    constants::condition::{HOT_MEMORY_CHANGE, HOT_VCPU_CHANGE, MIGRATION_REQUIRED, VOLUMES_CHANGE},
    resize,
};
use jiff::{SignedDuration, Timestamp};

use crate::vmi::Cause;

/// Time in which a node can get room for a pod that it has no room for now.
const ROOM: SignedDuration = SignedDuration::from_secs(60);

/// The reason for an update.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Need {
    /// Volumes move to other claims.
    Volumes,
    /// The pod needs other networks or resources.
    Pod,
    /// The launcher has another version.
    Version,
    /// None before this time has passed.
    Later(Duration),
}

/// Returns the reason for a migration that lies in changes of the VMI. `ineffective`: causes that another pod would not change.
pub(super) fn change_need(vmi: &VirtualMachineInstance, ineffective: &[Cause], now: Timestamp) -> Option<Need> {
    let required = [(VOLUMES_CHANGE, Cause::Volumes, Need::Volumes), (MIGRATION_REQUIRED, Cause::Networks, Need::Pod)];
    let required = required.map(|(type_, cause, need)| vmi.has_true(type_).then_some((cause, need)));
    let larger = [(HOT_VCPU_CHANGE, Cause::Cpu), (HOT_MEMORY_CHANGE, Cause::Memory)].map(|(type_, cause)| {
        let condition = vmi.condition(type_).filter(|condition| resize::needs_another_pod(condition))?;
        let since = condition.last_transition_time.as_ref().filter(|_| resize::is_deferred(condition));
        let waited = since.map_or(ROOM, |since| now.duration_since(since.0));
        let left = Duration::try_from(ROOM.saturating_sub(waited)).ok().filter(|left| !left.is_zero());
        Some((cause, left.map_or(Need::Pod, Need::Later)))
    });
    let needs = required.into_iter().chain(larger).flatten();
    let needs: Vec<Need> = needs.filter(|(cause, _)| !ineffective.contains(cause)).map(|(_, need)| need).collect();
    let is_later = |need: &Need| matches!(need, Need::Later(_));
    let left = |need: &Need| if let Need::Later(left) = need { *left } else { Duration::ZERO };
    needs.iter().find(|need| !is_later(need)).or_else(|| needs.iter().min_by_key(|need| left(need))).copied()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn change_waits_for_a_migration_unless_its_pod_can_follow() {
        let now: Timestamp = "2030-01-01T00:10:00Z".parse().unwrap();
        let at = |time: &str| format!("2030-01-01T00:{time}Z");
        let shown = |type_: &str, status: &str, reason: &str, time: &str| json!({"type": type_, "status": status, "reason": reason, "lastTransitionTime": at(time)});
        let later = |seconds: u64| Some(Need::Later(Duration::from_secs(seconds)));
        let (cpu, memory, required, volumes) =
            ("HotVCPUChange", "HotMemoryChange", "MigrationRequired", "VolumesChange");
        // Conditions, causes without effect; need.
        for (conditions, ineffective, expected) in [
            (json!([]), &[][..], None),
            (json!([shown(volumes, "True", "", "09:59")]), &[][..], Some(Need::Volumes)),
            (json!([shown(volumes, "False", "", "09:59")]), &[][..], None),
            (json!([shown(required, "True", "", "09:59")]), &[][..], Some(Need::Pod)),
            (json!([shown(required, "False", "AutoMigrationPending", "09:59")]), &[][..], None),
            // The pod is being resized.
            (json!([shown(cpu, "True", "", "09:59")]), &[][..], None),
            (json!([shown(cpu, "True", "PodResized", "09:59")]), &[][..], None),
            (json!([shown(cpu, "True", "PodResizeInfeasible", "09:59")]), &[][..], Some(Need::Pod)),
            (json!([shown(memory, "True", "PodResizeRefused", "09:59")]), &[][..], Some(Need::Pod)),
            (json!([shown(memory, "True", "PodResizeDeferred", "09:50")]), &[][..], later(50)),
            (json!([shown(memory, "True", "PodResizeDeferred", "09:00")]), &[][..], Some(Need::Pod)),
            (json!([shown(memory, "False", "Memory Hotplug Failed", "09:00")]), &[][..], None),
            (
                json!([
                    shown(memory, "True", "PodResizeDeferred", "09:50"),
                    shown(cpu, "True", "PodResizeDeferred", "09:40"),
                ]),
                &[][..],
                later(40),
            ),
            // Another pod would not help.
            (json!([shown(required, "True", "", "08:00")]), &[Cause::Networks], None),
            (json!([shown(volumes, "True", "", "08:00")]), &[Cause::Volumes], None),
            (json!([shown(cpu, "True", "PodResizeInfeasible", "08:00")]), &[Cause::Cpu], None),
            (json!([shown(cpu, "True", "PodResizeInfeasible", "08:00")]), &[Cause::Networks], Some(Need::Pod)),
            (
                json!([shown(memory, "True", "PodResizeDeferred", "09:50"), shown(required, "True", "", "08:00")]),
                &[Cause::Networks],
                later(50),
            ),
        ] {
            let vmi = json!({
                "metadata": {}, "spec": {"domain": {"devices": {}}},
                "status": {"conditions": conditions},
            });
            let vmi: VirtualMachineInstance = serde_json::from_value(vmi).unwrap();
            assert_eq!(change_need(&vmi, ineffective, now), expected, "{conditions} {ineffective:?}");
        }
    }
}
