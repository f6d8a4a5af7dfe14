//! Condition WorkloadUpdateIneffective: the present pod was created for a change, or for the present launcher, and yet lacks it. A
//! pod that another migration or eviction brought would lack it, too, so that none follows.
//!
//! The facts are those of the pod: they outlast the leader of virt-controller, and hold for a VMI that was evicted and started
//! again. Another change by the user, another launcher and another pod begin anew.

use std::cell::LazyCell;

use api::{
    Condition, VirtualMachineInstance, VmiPhase,
    condition::set_or_remove,
    constants::condition::{
        HOT_MEMORY_CHANGE, HOT_VCPU_CHANGE, MIGRATION_REQUIRED, VOLUMES_CHANGE, WORKLOAD_UPDATE_INEFFECTIVE,
    },
    resize,
};
use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;

use super::Observed;
use crate::{
    launcher_pod::created_for,
    resources::{pods::CachedPod, vmis::is_outdated},
    runtime::{Effect, Event, Kind},
};

/// A reason for another pod.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Cause {
    /// The launcher has another version.
    Version,
    /// The pod needs other networks.
    Networks,
    /// The pod needs resources for other vCPUs.
    Cpu,
    /// The pod needs resources for more memory.
    Memory,
    /// Volumes move to other claims.
    Volumes,
}

impl Cause {
    /// All causes.
    pub(crate) const ALL: [Self; 5] = [Self::Version, Self::Networks, Self::Cpu, Self::Memory, Self::Volumes];

    fn reason(self) -> &'static str {
        match self {
            Self::Version => "LauncherImageReplaced",
            Self::Networks => "PodNetworksDiffer",
            Self::Cpu | Self::Memory => "PodResourcesDiffer",
            Self::Volumes => "VolumesNotMoved",
        }
    }

    fn message(self, pod: &CachedPod) -> String {
        let created_for = pod.created_for.as_deref().cloned().unwrap_or_default();
        match self {
            Self::Version => format!(
                "the launcher pod was created with image {} and has {}: the image of the next pod would be replaced, too",
                created_for.launcher,
                pod.image.as_deref().unwrap_or_default()
            ),
            Self::Networks => {
                "the launcher pod was created for the networks of the VMI and does not have them".to_owned()
            }
            Self::Cpu => {
                format!("the launcher pod was created for {} vCPUs and does not have the resources", created_for.vcpus)
            }
            Self::Memory => {
                let bytes = created_for.memory.unwrap_or_default();
                format!("the launcher pod was created for a guest with {bytes} bytes of memory and does not have them")
            }
            Self::Volumes => "a migration has succeeded and left the volumes in their former claims".to_owned(),
        }
    }
}

/// Returns the causes that hold for a VMI although its pod was created for the present desired state.
pub(crate) fn ineffective(vmi: &VirtualMachineInstance, pod: &CachedPod, launcher_image: &str) -> Vec<Cause> {
    let present = pod.created_for.as_deref();
    let wanted = LazyCell::new(|| created_for(vmi, launcher_image));
    let since = |condition: &Condition| condition.last_transition_time.as_ref().map_or(Timestamp::MIN, |time| time.0);
    // A pod that was created before the change could have been resized meanwhile.
    let is_older = |condition: &Condition| {
        pod.metadata.creation_timestamp.as_ref().is_some_and(|created| since(condition) <= created.0)
    };
    let is_held = |type_: &str| {
        vmi.condition(type_).is_some_and(|condition| resize::needs_another_pod(condition) && is_older(condition))
    };
    let holds = |cause: &Cause| match cause {
        Cause::Version => {
            is_outdated(vmi)
                && pod.image.as_deref() != Some(launcher_image)
                && present.is_some_and(|present| present.launcher == wanted.launcher)
        }
        Cause::Networks => {
            vmi.has_true(MIGRATION_REQUIRED) && present.is_some_and(|present| present.networks == wanted.networks)
        }
        Cause::Cpu => is_held(HOT_VCPU_CHANGE) && present.is_some_and(|present| present.vcpus == wanted.vcpus),
        Cause::Memory => is_held(HOT_MEMORY_CHANGE) && present.is_some_and(|present| present.memory == wanted.memory),
        Cause::Volumes => {
            let change = vmi.condition(VOLUMES_CHANGE).filter(|condition| condition.is_true());
            // The end is a time of the target's clock, which can be slow.
            change.zip(last_success(vmi)).is_some_and(|(change, ended)| ended > since(change) || is_older(change))
        }
    };
    Cause::ALL.into_iter().filter(holds).collect()
}

/// Returns the end of the last migration, if it has succeeded.
fn last_success(vmi: &VirtualMachineInstance) -> Option<Timestamp> {
    let state = vmi.status.as_ref()?.migration_state.as_ref()?;
    state.end_timestamp.as_ref().filter(|_| state.completed && !state.failed).map(|time| time.0)
}

/// Updates the condition.
pub(super) fn update(observed: &Observed, pod: Option<&CachedPod>, wanted: &mut VirtualMachineInstance) {
    // The pod changes with the migration.
    if wanted.is_migrating() || wanted.status.is_none() {
        return;
    }
    let runs = *wanted.phase() == VmiPhase::Running && !wanted.is_deleting();
    let pod = pod.filter(|pod| runs && !pod.is_going_down());
    let found = pod.and_then(|pod| {
        let causes = ineffective(wanted, pod, observed.launcher_images.of(&wanted.spec));
        let messages: Vec<String> = causes.iter().map(|cause| cause.message(pod)).collect();
        Some((causes.first()?.reason(), messages.join("; ")))
    });
    let conditions = &mut wanted.status.get_or_insert_default().conditions;
    let now = Time(observed.now);
    let found =
        found.map(|(reason, message)| Condition::new(WORKLOAD_UPDATE_INEFFECTIVE, true, reason, &message, &now));
    set_or_remove(conditions, WORKLOAD_UPDATE_INEFFECTIVE, found);
}

/// Returns the event of a condition that is new or says something else.
pub(super) fn event(former: &VirtualMachineInstance, wanted: &VirtualMachineInstance) -> Option<Effect> {
    let shown = wanted.condition(WORKLOAD_UPDATE_INEFFECTIVE)?;
    if former.condition(WORKLOAD_UPDATE_INEFFECTIVE).is_some_and(|former| former.says_same(shown)) {
        return None;
    }
    let regarding = Kind::Instance.reference(&former.metadata);
    Some(Effect::Event(Event::warning(regarding, WORKLOAD_UPDATE_INEFFECTIVE, shown.message.clone()?)))
}
