//! Hot-plugged volumes of a VMI: their attachment pods, and the part of their status that this controller owns.
//!
//! ```text
//!                    claim            attachment pod           virt-handler        virt-handler
//!  (no entry) ──> Pending/Bound ──────> AttachedToNode ──────> MountedToPod ──────> Ready
//!                                            removed from the spec │ virt-handler     │
//!  (no entry) <────────────────────── UnMountedFromPod <───────────┴──────────────────┘
//! ```
//! Each volume has a pod of its own: a claim that is missing or cannot be attached delays no other. A claim that its DataVolume fills
//! is attached afterwards; one that waits for its first consumer gets a pod that is that and ends at once. The status names a pod
//! before it runs: virt-handler waits for its socket. An entry goes once virt-handler has taken the volume from the launcher. Its pod
//! is deleted then and ends later; label and owner lead to it, so a pod without an entry is found by every decision about the VMI.
//! The target of a migration gets one pod with all volumes from the migration controller; it is taken over when the guest has moved,
//! and holds its claims until the last of them is unplugged.

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use api::{
    VirtualMachineInstance,
    constants::{event, reason},
    hotplug::{DUMP_FAILED, DUMPED, DUMPING, is_hotpluggable},
    vmi::{
        status::{HotplugVolumeStatus, VolumeStatus},
        volumes::Volume,
    },
};
use jiff::SignedDuration;

use super::Observed;
use crate::{
    attachment_pod::{self, Attached, Inputs},
    data_volumes::{Readiness, described},
    resources::{
        attachments::CachedAttachment,
        claims::{CachedClaim, claim_name, mounted_claim},
        pods::CachedPod,
    },
    runtime::{Decision, Effect, Event, Kind},
};

/// Phases of volumes. virt-handler writes those of volumes in the launcher pod.
mod phase {
    pub(super) const PENDING: &str = "Pending";
    pub(super) const BOUND: &str = "Bound";
    pub(super) const ATTACHED: &str = "AttachedToNode";
    pub(super) const MOUNTED: &str = "MountedToPod";
    pub(super) const READY: &str = "Ready";
}

/// Reason of a volume whose claim is not attached yet.
const CLAIM_NOT_READY: &str = "PVCNotReady";
/// Least age of an attachment pod that failed when it is replaced. The cause may persist.
const REPLACEMENT_AGE: SignedDuration = SignedDuration::from_secs(10);
/// Wait for the age of a pod without a known one.
const LONGEST_WAIT: Duration = Duration::from_secs(10);

/// Reasons that this controller writes, as events need them.
const REASONS: [&str; 3] = [reason::FAILED_PVC_NOT_FOUND, CLAIM_NOT_READY, event::SUCCESSFUL_CREATE];

/// A hot-plugged volume.
#[derive(Clone, Copy)]
struct Plugged<'a> {
    name: &'a str,
    claim: &'a str,
    read_only: bool,
    /// A directory for virt-launcher, and no disk.
    utility: bool,
}

impl Plugged<'_> {
    /// Returns the reason why the volume gets no attachment pod.
    fn refusal(&self, claim: &CachedClaim) -> Option<String> {
        let text = || format!("Utility volume PVC {} must be filesystem mode, not block mode", self.claim);
        (self.utility && claim.block).then(text)
    }
}

/// Returns the hot-plugged volumes of a VMI.
fn hotplugged(instance: &VirtualMachineInstance) -> impl Iterator<Item = Plugged<'_>> {
    let is_plugged = |volume: &&Volume| is_hotpluggable(volume) || volume.memory_dump.is_some();
    let volumes = instance.spec.volumes.iter().filter(is_plugged).filter_map(|volume| {
        let read_only = mounted_claim(volume).is_some_and(|(_, read_only)| read_only);
        Some(Plugged { name: &volume.name, claim: claim_name(volume)?, read_only, utility: false })
    });
    let utilities = instance.spec.utility_volumes.iter().map(|volume| Plugged {
        name: &volume.name,
        claim: &volume.claim_name,
        read_only: volume.read_only.unwrap_or(false),
        utility: true,
    });
    volumes.chain(utilities)
}

/// A hot-plugged volume in the launcher pod.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct PluggedVolume<'a> {
    /// Its name.
    pub name: &'a str,
    /// Name of its claim.
    pub claim: &'a str,
    /// Its claim is mounted read-only.
    pub read_only: bool,
}

/// Returns the hot-plugged volumes that the launcher pod has and that move with the guest: neither claims for memory dumps, which the
/// guest does not see, nor utility volumes, which prevent a migration. `attachments`: the attachment pods of the VMI.
pub(crate) fn plugged_volumes<'a>(
    instance: &'a VirtualMachineInstance,
    attachments: &[Arc<CachedAttachment>],
) -> Vec<PluggedVolume<'a>> {
    // A claim that cannot be mounted delays no migration: virt-handler takes a volume only from a pod that runs.
    let is_served = |entry: &VolumeStatus| {
        let uid = entry.hotplug_volume.as_ref().and_then(|attachment| attachment.attach_pod_uid.as_deref());
        is_handed_over(entry) || attachments.iter().any(|pod| pod.ready && pod.metadata.uid.as_deref() == uid)
    };
    let moves = |name: &str| {
        let of_dump = instance.spec.volumes.iter().any(|volume| volume.name == name && volume.memory_dump.is_some());
        let is_plugged = |entry: &VolumeStatus| entry.hotplug_volume.is_some() && is_in_use(entry) && is_served(entry);
        !of_dump && entry_of(instance, name).is_some_and(is_plugged)
    };
    hotplugged(instance)
        .filter(|volume| !volume.utility && moves(volume.name))
        .map(|volume| PluggedVolume { name: volume.name, claim: volume.claim, read_only: volume.read_only })
        .collect()
}

/// Returns a volume that has left the spec while the guest has its disk. No target of a migration gets it.
pub(crate) fn leaving_volume(instance: &VirtualMachineInstance) -> Option<&str> {
    let entries = instance.status.iter().flat_map(|status| &status.volume_status);
    let mut disks = entries.filter(|entry| entry.hotplug_volume.is_some() && !entry.target.is_empty());
    disks.find(|entry| hotplugged(instance).all(|volume| volume.name != entry.name)).map(|entry| entry.name.as_str())
}

/// Returns true if the launcher pod has the volume of a status entry. virt-handler owns its phase.
fn is_handed_over(entry: &VolumeStatus) -> bool {
    matches!(entry.phase.as_deref(), Some(phase::READY | phase::MOUNTED | DUMPING | DUMPED | DUMP_FAILED))
}

/// Returns true if virt-handler has, or may have, the volume of a status entry in the launcher pod.
fn is_in_use(entry: &VolumeStatus) -> bool {
    match entry.phase.as_deref() {
        _ if is_handed_over(entry) => true,
        Some(phase::ATTACHED) => {
            entry.hotplug_volume.as_ref().is_some_and(|attachment| attachment.attach_pod_uid.is_some())
        }
        _ => false,
    }
}

fn entry_of<'a>(instance: &'a VirtualMachineInstance, volume: &str) -> Option<&'a VolumeStatus> {
    let mut entries = instance.status.iter().flat_map(|status| &status.volume_status);
    entries.find(|entry| entry.name == volume)
}

/// Returns the pod that attaches each hot-plugged volume: the one in the status, else one that is ready, else the oldest.
fn serving<'a>(observed: &'a Observed, launcher: Option<&CachedPod>) -> BTreeMap<&'a str, &'a CachedAttachment> {
    let Some(launcher) = launcher else { return BTreeMap::new() };
    let pods = || observed.attachments.iter().map(Arc::as_ref);
    let usable =
        |pod: &&CachedAttachment| !pod.is_deleting() && !pod.is_down() && !pod.temporary && pod.is_of(launcher);
    hotplugged(&observed.instance)
        .filter_map(|volume| {
            let known = entry_of(&observed.instance, volume.name)
                .and_then(|entry| entry.hotplug_volume.as_ref()?.attach_pod_name.as_deref());
            // virt-handler takes no volume from a pod of a release whose pods answer no question. What it took before stays.
            let is_handed_over = entry_of(&observed.instance, volume.name).is_some_and(is_handed_over);
            let of_volume = pods()
                .filter(|pod| usable(pod) && (pod.answers || is_handed_over))
                .filter(|pod| pod.claims.get(volume.name).is_some_and(|claim| claim == volume.claim));
            let chosen = of_volume.min_by_key(|pod| {
                let name = pod.metadata.name.as_deref();
                let created = pod.metadata.creation_timestamp.as_ref().map(|at| at.0);
                (name != known, !pod.ready, created, name)
            });
            Some((volume.name, chosen?))
        })
        .collect()
}

/// Updates the entries of hot-plugged volumes in the status.
pub(super) fn update_status(observed: &Observed, launcher: Option<&CachedPod>, entries: &mut Vec<VolumeStatus>) {
    let serving = serving(observed, launcher);
    for volume in hotplugged(&observed.instance) {
        let index = entries.iter().position(|entry| entry.name == volume.name).unwrap_or_else(|| {
            entries.push(VolumeStatus { name: volume.name.to_owned(), ..VolumeStatus::default() });
            entries.len().saturating_sub(1)
        });
        let Some(entry) = entries.get_mut(index) else { continue };
        let claim = observed.claims.get(volume.claim).map(Arc::as_ref);
        let unready = claim.and_then(|claim| unready(observed, claim));
        update_entry(entry, serving.get(volume.name).copied(), volume, claim, unready);
    }
    let is_wanted = |name: &str| hotplugged(&observed.instance).any(|volume| volume.name == name);
    entries.retain(|entry| entry.hotplug_volume.is_none() || is_wanted(&entry.name) || is_in_use(entry));
    api::persistent_state::sort_volumes(entries);
}

/// Returns the words for a claim that is not filled yet.
fn unready(observed: &Observed, claim: &CachedClaim) -> Option<String> {
    match observed.data_volumes.readiness(claim) {
        Readiness::Ready => None,
        Readiness::AwaitsConsumer(volume) | Readiness::Waits(volume) | Readiness::Failed(volume) => {
            Some(described(volume))
        }
        Readiness::Orphaned(name) => Some(format!("DataVolume {name} not found")),
    }
}

/// Updates the entry of a volume in the spec.
fn update_entry(
    entry: &mut VolumeStatus,
    pod: Option<&CachedAttachment>,
    volume: Plugged<'_>,
    claim: Option<&CachedClaim>,
    unready: Option<String>,
) {
    // A pod cannot start before its claim is bound. kubelet reports a container that runs up to a second late.
    let is_bound = claim.is_some_and(|claim| claim.phase == "Bound");
    entry.hotplug_volume = Some(HotplugVolumeStatus {
        attach_pod_name: pod.and_then(|pod| pod.metadata.name.clone()),
        attach_pod_uid: pod.filter(|pod| is_bound || pod.ready).and_then(|pod| pod.metadata.uid.clone()),
    });
    // A volume in the launcher stays there when its pod is replaced.
    if is_handed_over(entry) {
        return;
    }
    let refusal = claim.and_then(|claim| volume.refusal(claim));
    let (phase, reason, message) = match (claim, pod.and_then(|pod| pod.metadata.name.as_deref())) {
        (None, _) => (phase::PENDING, reason::FAILED_PVC_NOT_FOUND, format!("PVC {} not found", volume.claim)),
        (Some(_), _) if let Some(refusal) = refusal => (phase::PENDING, CLAIM_NOT_READY, refusal),
        (Some(claim), Some(pod)) if claim.phase == "Bound" => {
            let message = format!("Created hotplug attachment pod {pod}, for volume {}", entry.name);
            (phase::ATTACHED, event::SUCCESSFUL_CREATE, message)
        }
        (Some(claim), _) => {
            let (phase, message) = match claim.phase.as_str() {
                "Bound" => (phase::BOUND, "PVC is in phase Bound"),
                "Lost" => (phase::PENDING, "PVC is in phase Lost"),
                _ => (phase::PENDING, "PVC is in phase ClaimPending"),
            };
            (phase, CLAIM_NOT_READY, unready.unwrap_or_else(|| message.to_owned()))
        }
    };
    entry.phase = Some(phase.to_owned());
    entry.reason = Some(reason.to_owned());
    entry.message = Some(message);
}

/// Returns the events of changed entries.
pub(super) fn events(former: &VirtualMachineInstance, wanted: &VirtualMachineInstance) -> Vec<Effect> {
    let regarding = || Kind::Instance.reference(&former.metadata);
    let entries = wanted.status.iter().flat_map(|status| &status.volume_status);
    entries
        .filter(|entry| entry.hotplug_volume.is_some())
        .filter_map(|entry| {
            let known = entry_of(former, &entry.name).map(|known| (&known.reason, &known.message));
            if known == Some((&entry.reason, &entry.message)) {
                return None;
            }
            let reason = REASONS.into_iter().find(|reason| entry.reason.as_deref() == Some(*reason))?;
            Some(Effect::Event(Event::normal(regarding(), reason, entry.message.clone()?)))
        })
        .collect()
}

/// Returns the launcher pod to which volumes are attached.
fn target<'a>(
    observed: &Observed,
    launcher: Option<&'a CachedPod>,
    wanted: &VirtualMachineInstance,
) -> Option<(&'a CachedPod, &'a str)> {
    let launcher = launcher.filter(|pod| !pod.is_going_down() && !pod.unseen)?;
    let node = launcher.node_name.as_deref()?;
    (!wanted.is_final() && !observed.instance.is_deleting()).then_some((launcher, node))
}

/// Creates the missing attachment pods.
pub(super) fn create_pods(
    observed: &Observed,
    launcher: Option<&CachedPod>,
    wanted: &VirtualMachineInstance,
    decision: &mut Decision,
) -> Result<(), serde_json::Error> {
    let instance = &*observed.instance;
    let Some((launcher, node)) = target(observed, launcher, wanted) else { return Ok(()) };
    let serving = serving(observed, Some(launcher));
    for volume in hotplugged(instance).filter(|volume| !serving.contains_key(volume.name)) {
        let is_usable = |claim: &&Arc<CachedClaim>| claim.phase != "Lost" && volume.refusal(claim).is_none();
        let Some(claim) = observed.claims.get(volume.claim).filter(is_usable) else { continue };
        let triggers = match observed.data_volumes.readiness(claim) {
            Readiness::Ready if !claim.populating => false,
            Readiness::AwaitsConsumer(_) if !has_trigger(observed, launcher, volume.name) => true,
            _ => continue,
        };
        if let Some(left) = replacement_wait(observed, volume.name) {
            decision.wake(left);
            continue;
        }
        if decision.must_wait(&observed.failures, event::FAILED_CREATE, observed.now) {
            return Ok(());
        }
        let render = if triggers { attachment_pod::render_trigger } else { attachment_pod::render };
        let pod = render(&Inputs {
            instance,
            launcher,
            migration: None,
            node,
            config: &observed.config,
            image: observed.launcher_images.plain(),
            volumes: &[Attached { name: volume.name, read_only: volume.read_only, claim }],
        });
        let (done, failed) = if triggers {
            let of = format!("hotplug population trigger pod for volume {}", volume.name);
            (
                format!("Created hotplug trigger pod for volume {}", volume.name),
                format!("Error creating {of}: {{error}}"),
            )
        } else {
            ("Created attachment pod {name}".to_owned(), "Error creating attachment pod: {error}".to_owned())
        };
        decision.push(Effect::create(Kind::Pod, instance.metadata.namespace.as_deref(), &pod)?.reported(
            Kind::Instance.reference(&instance.metadata),
            (event::SUCCESSFUL_CREATE, done),
            (event::FAILED_CREATE, failed),
        ));
    }
    Ok(())
}

/// Returns true if a pod is, or was, the first consumer of the claim of a volume.
fn has_trigger(observed: &Observed, launcher: &CachedPod, volume: &str) -> bool {
    let mut triggers = observed.attachments.iter().filter(|pod| pod.temporary && pod.is_of(launcher));
    triggers.any(|pod| pod.claims.contains_key(volume) && !pod.is_deleting() && pod.phase != "Failed")
}

/// Returns the time until a failed attachment pod of a volume is replaced.
fn replacement_wait(observed: &Observed, volume: &str) -> Option<Duration> {
    let has_failed = |pod: &CachedAttachment| pod.is_down() && !(pod.temporary && pod.phase == "Succeeded");
    let failed = observed.attachments.iter().filter(|pod| has_failed(pod) && pod.claims.contains_key(volume));
    failed.filter_map(|pod| replacement_age_left(observed, pod)).max()
}

/// Returns the time until a failed pod is old enough to be replaced.
fn replacement_age_left(observed: &Observed, pod: &CachedAttachment) -> Option<Duration> {
    let created = pod.metadata.creation_timestamp.as_ref()?.0;
    let left = REPLACEMENT_AGE.checked_sub(observed.now.duration_since(created))?;
    let left = Duration::try_from(left).ok()?.min(LONGEST_WAIT);
    (!left.is_zero()).then_some(left)
}

/// Deletes the attachment pods that no volume needs.
pub(super) fn delete_pods(
    observed: &Observed,
    launcher: Option<&CachedPod>,
    wanted: &VirtualMachineInstance,
    decision: &mut Decision,
) {
    let is_over = wanted.is_final() || launcher.is_some_and(CachedPod::is_down);
    let serving = serving(observed, launcher);
    for pod in observed.attachments.iter().filter(|pod| !pod.is_deleting()) {
        let is_needed = if is_over {
            false
        } else if let Some(other) = launcher_of(observed, pod).filter(|other| !is_same(other, launcher)) {
            // The target of a migration, or the pod that the guest has left.
            !other.is_down()
        } else if pod.temporary && pod.phase != "Failed" {
            pod.claims.keys().any(|volume| awaits_consumer(observed, volume))
        } else if pod.is_down() {
            replacement_age_left(observed, pod).is_some()
        } else {
            // Without a known launcher nothing is known about the volumes.
            launcher.is_none() || pod.claims.keys().any(|volume| needs(observed, &serving, volume, pod))
        };
        if is_needed {
            continue;
        }
        if decision.must_wait(&observed.failures, event::FAILED_DELETE, observed.now) {
            return;
        }
        let name = pod.metadata.name.as_deref().unwrap_or_default();
        decision.push(Effect::delete(Kind::Pod, &pod.metadata).reported(
            Kind::Instance.reference(&observed.instance.metadata),
            (event::SUCCESSFUL_DELETE, format!("Deleted attachment pod {name}")),
            (event::FAILED_DELETE, format!("Failed to delete attachment pod {name}")),
        ));
    }
}

/// Returns true if the claim of a volume waits for its first consumer.
fn awaits_consumer(observed: &Observed, volume: &str) -> bool {
    let claim = hotplugged(&observed.instance).find(|wanted| wanted.name == volume);
    let claim = claim.and_then(|wanted| observed.claims.get(wanted.claim));
    claim.is_some_and(|claim| matches!(observed.data_volumes.readiness(claim), Readiness::AwaitsConsumer(_)))
}

/// Returns the launcher pod of an attachment pod.
fn launcher_of<'a>(observed: &'a Observed, pod: &CachedAttachment) -> Option<&'a CachedPod> {
    observed.pods.iter().map(Arc::as_ref).find(|launcher| pod.is_of(launcher))
}

fn is_same(pod: &CachedPod, launcher: Option<&CachedPod>) -> bool {
    launcher.is_some_and(|launcher| launcher.metadata.uid == pod.metadata.uid)
}

/// Returns true if the volume needs this pod: it attaches the volume, or the launcher still has the volume from it.
fn needs(
    observed: &Observed,
    serving: &BTreeMap<&str, &CachedAttachment>,
    volume: &str,
    pod: &CachedAttachment,
) -> bool {
    if hotplugged(&observed.instance).any(|wanted| wanted.name == volume) {
        return serving.get(volume).is_some_and(|serving| serving.metadata.uid == pod.metadata.uid);
    }
    // A volume that leaves keeps the name of its pod, which a migration can have replaced by one of another launcher.
    let is_of_launcher = |name: &str| {
        let mut others = observed.attachments.iter();
        others.any(|other| {
            other.metadata.name.as_deref() == Some(name)
                && other.metadata.owner_references == pod.metadata.owner_references
        })
    };
    entry_of(&observed.instance, volume).is_some_and(|entry| {
        let attachment = entry.hotplug_volume.as_ref();
        let from = attachment.and_then(|attachment| attachment.attach_pod_name.as_deref());
        let is_from = |from: &str| pod.metadata.name.as_deref() == Some(from) || !is_of_launcher(from);
        is_in_use(entry) && from.is_none_or(is_from)
    })
}
