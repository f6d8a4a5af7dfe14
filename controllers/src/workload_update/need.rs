//! Changes of a VMI that wait for a migration.

use std::time::Duration;

use api::{
    Condition, VirtualMachineInstance,
    constants::condition::{HOT_MEMORY_CHANGE, HOT_VCPU_CHANGE, MIGRATION_REQUIRED, VOLUMES_CHANGE},
    resize,
};
use jiff::{SignedDuration, Timestamp};

/// Time in which a node can get room for a pod that it has no room for now.
const ROOM: SignedDuration = SignedDuration::from_secs(60);
/// Wait after a migration that has succeeded without carrying the change out.
const AFTER_FAILURE: SignedDuration = SignedDuration::from_mins(5);

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

/// Returns the reason for a migration that lies in changes of the VMI.
pub(super) fn change_need(vmi: &VirtualMachineInstance, now: Timestamp) -> Option<Need> {
    let since = |condition: &Condition| condition.last_transition_time.as_ref().map_or(Timestamp::MIN, |time| time.0);
    let required = [(VOLUMES_CHANGE, Need::Volumes), (MIGRATION_REQUIRED, Need::Pod)].map(|(type_, need)| {
        let condition = vmi.condition(type_).filter(|condition| condition.is_true())?;
        Some((need, since(condition), SignedDuration::ZERO))
    });
    let larger = [HOT_VCPU_CHANGE, HOT_MEMORY_CHANGE].map(|type_| {
        let condition = vmi.condition(type_).filter(|condition| resize::needs_another_pod(condition))?;
        let wait = if resize::is_deferred(condition) { ROOM } else { SignedDuration::ZERO };
        Some((Need::Pod, since(condition), wait))
    });
    let waits = |(need, since, wait): (Need, Timestamp, SignedDuration)| {
        let mut from = since.saturating_add(wait).unwrap_or(since);
        // It was there before the last migration, which has not carried it out.
        if let Some(ended) = last_success(vmi).filter(|ended| *ended > since) {
            from = from.max(ended.saturating_add(AFTER_FAILURE).unwrap_or(ended));
        }
        let left = Duration::try_from(from.duration_since(now)).ok().filter(|left| !left.is_zero());
        left.map_or(need, Need::Later)
    };
    let needs: Vec<Need> = required.into_iter().chain(larger).flatten().map(waits).collect();
    let is_later = |need: &Need| matches!(need, Need::Later(_));
    let left = |need: &Need| if let Need::Later(left) = need { *left } else { Duration::ZERO };
    needs.iter().find(|need| !is_later(need)).or_else(|| needs.iter().min_by_key(|need| left(need))).copied()
}

/// Returns the end of the last migration, if it has succeeded.
fn last_success(vmi: &VirtualMachineInstance) -> Option<Timestamp> {
    let state = vmi.status.as_ref()?.migration_state.as_ref()?;
    state.end_timestamp.as_ref().filter(|_| state.completed && !state.failed).map(|time| time.0)
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    #[test]
    fn change_waits_for_a_migration_unless_its_pod_can_follow() {
        let now: Timestamp = "2030-01-01T00:10:00Z".parse().unwrap();
        let at = |time: &str| format!("2030-01-01T00:{time}Z");
        let shown = |type_: &str, status: &str, reason: &str, time: &str| json!({"type": type_, "status": status, "reason": reason, "lastTransitionTime": at(time)});
        let ended = |time: &str, failed: bool| json!({"endTimestamp": at(time), "completed": true, "failed": failed});
        let later = |seconds: u64| Some(Need::Later(Duration::from_secs(seconds)));
        let (cpu, memory, required, volumes) =
            ("HotVCPUChange", "HotMemoryChange", "MigrationRequired", "VolumesChange");
        // Conditions, state of the last migration; need.
        for (conditions, state, expected) in [
            (json!([]), Value::Null, None),
            (json!([shown(volumes, "True", "", "09:59")]), Value::Null, Some(Need::Volumes)),
            (json!([shown(volumes, "False", "", "09:59")]), Value::Null, None),
            (json!([shown(required, "True", "", "09:59")]), Value::Null, Some(Need::Pod)),
            (json!([shown(required, "False", "AutoMigrationPending", "09:59")]), Value::Null, None),
            // The pod is being resized.
            (json!([shown(cpu, "True", "", "09:59")]), Value::Null, None),
            (json!([shown(cpu, "True", "PodResized", "09:59")]), Value::Null, None),
            (json!([shown(cpu, "True", "PodResizeInfeasible", "09:59")]), Value::Null, Some(Need::Pod)),
            (json!([shown(memory, "True", "PodResizeRefused", "09:59")]), Value::Null, Some(Need::Pod)),
            (json!([shown(memory, "True", "PodResizeDeferred", "09:50")]), Value::Null, later(50)),
            (json!([shown(memory, "True", "PodResizeDeferred", "09:00")]), Value::Null, Some(Need::Pod)),
            (json!([shown(memory, "False", "Memory Hotplug Failed", "09:00")]), Value::Null, None),
            (
                json!([
                    shown(memory, "True", "PodResizeDeferred", "09:50"),
                    shown(cpu, "True", "PodResizeDeferred", "09:40"),
                ]),
                Value::Null,
                later(40),
            ),
            // A migration has not helped.
            (json!([shown(required, "True", "", "08:00")]), ended("09:00", false), later(240)),
            (json!([shown(required, "True", "", "08:00")]), ended("09:00", true), Some(Need::Pod)),
            (json!([shown(required, "True", "", "09:30")]), ended("09:00", false), Some(Need::Pod)),
            (json!([shown(required, "True", "", "01:00")]), ended("05:00", false), Some(Need::Pod)),
        ] {
            let vmi = json!({
                "metadata": {}, "spec": {"domain": {"devices": {}}},
                "status": {"conditions": conditions, "migrationState": state},
            });
            let vmi: VirtualMachineInstance = serde_json::from_value(vmi).unwrap();
            assert_eq!(change_need(&vmi, now), expected, "{conditions} {state}");
        }
    }
}
