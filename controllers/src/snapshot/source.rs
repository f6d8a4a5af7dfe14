//! The VM of a snapshot: its claims, and the reasons why it cannot be locked now.

use std::{collections::BTreeMap, sync::Arc};

use api::{
    VirtualMachine, VirtualMachineInstance,
    names::label_value,
    persistent_state::{PREFIX, STATUS_VOLUME},
};

use super::Observed;
use crate::{
    cache::Key,
    data_volumes::{Readiness, described},
    resources::{
        Caches,
        claim_facts::ClaimUsers,
        claims::{CachedClaim, ClaimIndex, claim_name},
    },
    runtime::{Decision, Effect},
    snapshot_class, volume_migration,
};

/// A volume of a VM with a claim.
#[derive(Clone, Debug)]
pub(crate) struct SourceVolume {
    /// Name of the volume.
    pub name: String,
    /// Name of the claim.
    pub claim: String,
    /// The claim, if it exists.
    pub known: Option<Arc<CachedClaim>>,
    /// Class of its snapshots, or why none can be chosen.
    pub class: Result<Option<String>, String>,
    /// Pods that can write to it.
    pub users: Option<Arc<ClaimUsers>>,
}

impl SourceVolume {
    fn of(caches: &Caches, namespace: &str, name: String, claim: String) -> Self {
        let key = Key::new(namespace, claim.as_str());
        let known = caches.claims.get(&key);
        let storage_class = known.as_ref().and_then(|claim| claim.storage_class.clone());
        let class = storage_class.map_or(Ok(None), |class| snapshot_class::of(caches, &class));
        Self { name, claim, known, class, users: caches.claim_users.get(&key) }
    }

    /// Returns true if snapshots can be taken of it.
    pub(super) fn is_included(&self) -> bool {
        self.known.as_ref().is_some_and(|claim| claim.phase == "Bound") && matches!(self.class, Ok(Some(_)))
    }
}

/// Returns the volumes of a VM with claims in the order of the template, and last the claim with its state.
pub(crate) fn volumes(caches: &Caches, vm: &VirtualMachine, vmi: Option<&VirtualMachineInstance>) -> Vec<SourceVolume> {
    let namespace = vm.metadata.namespace.as_deref().unwrap_or_default();
    let template = vm.spec.template.spec.iter().flat_map(|spec| &spec.volumes);
    let named = template.filter_map(|volume| Some((volume.name.clone(), claim_name(volume)?.to_owned())));
    let state = state_claim(caches, vm, vmi).map(|claim| (state_volume(vm), claim));
    named.chain(state).map(|(name, claim)| SourceVolume::of(caches, namespace, name, claim)).collect()
}

/// Returns the name under which the claim with the state of a VM is a volume of its snapshots.
pub(crate) fn state_volume(vm: &VirtualMachine) -> String {
    format!("{PREFIX}{}", vm.metadata.name.as_deref().unwrap_or_default())
}

/// Returns the claim with the state of a VM: that of its VMI, else the newest with its label.
pub(crate) fn state_claim(
    caches: &Caches,
    vm: &VirtualMachine,
    vmi: Option<&VirtualMachineInstance>,
) -> Option<String> {
    let entries = vmi.and_then(|vmi| vmi.status.as_ref()).map(|status| status.volume_status.as_slice());
    let mounted = entries.unwrap_or_default().iter().find(|entry| entry.name == STATUS_VOLUME);
    let mounted = mounted.and_then(|entry| entry.persistent_volume_claim_info.as_ref()?.claim_name.clone());
    mounted.or_else(|| {
        let Key { namespace, name } = Key::of(&vm.metadata);
        let claims = caches.claims.by(&ClaimIndex::State(Key::new(namespace, label_value(&name))));
        let present = claims.into_iter().filter(|claim| claim.metadata.deletion_timestamp.is_none());
        let newest = present.max_by_key(|claim| claim.metadata.creation_timestamp.clone());
        newest.and_then(|claim| claim.metadata.name.clone())
    })
}

/// Returns why the VM cannot be locked: all reasons in one text, which clients know; an empty one until it is known. Reads the pods that
/// use the claims of a VM that does not run.
pub(super) fn refusal(observed: &Observed, vm: &VirtualMachine, decision: &mut Decision) -> Option<String> {
    let mut text = String::new();
    let path = format!(
        "{}/{}",
        vm.metadata.namespace.as_deref().unwrap_or_default(),
        vm.metadata.name.as_deref().unwrap_or_default()
    );
    // It cannot get the finalizer any more.
    if vm.metadata.deletion_timestamp.is_some() {
        return Some(format!(" source {path} is being deleted"));
    }
    let volumes = || vm.spec.template.spec.iter().flat_map(|spec| &spec.volumes);
    let is_known = |name: &str| name == state_volume(vm) || volumes().any(|volume| volume.name == name);
    for name in observed.snapshot.excluded_volumes().filter(|name| !is_known(name)) {
        text.push_str(&format!(" source {path} has no volume {name} that could be excluded"));
    }
    for (told, of) in [
        ("volume doesnt exist", &(|volume: &SourceVolume| volume.known.is_none()) as &dyn Fn(&SourceVolume) -> bool),
        ("volume is being deleted", &|volume| is_deleting(volume)),
        ("volume not bound", &|volume| volume.known.as_ref().is_some_and(|claim| claim.phase != "Bound")),
        ("volume not populated", &|volume| is_unpopulated(observed, volume)),
    ] {
        let claims: Vec<&str> =
            observed.volumes.iter().filter(|volume| of(volume)).map(|volume| volume.claim.as_str()).collect();
        if !claims.is_empty() {
            text.push_str(&format!(" source {path} {told}: {}", claims.join(", ")));
        }
    }
    for volume in &observed.volumes {
        if let Err(several) = &volume.class {
            text.push_str(&format!(" source {path} volume {}: {several}", volume.name));
        }
    }
    match observed.live() {
        Some(_) => text.extend(movement(observed, vm)),
        // The claims that the template names may lack what the former ones have.
        None if volume_migration::needs_recovery(vm, observed.vmi.as_deref()) => {
            text.push_str(&format!(" source {path} has volumes that an interrupted migration did not move"));
        }
        None => text.push_str(&used(observed, vm, text.is_empty(), decision)),
    }
    // Without the blank of a read that is under way, with which each read would change the status twice.
    (!text.is_empty()).then(|| text.trim_end().to_owned())
}

/// Returns the text about a guest that moves, or whose move virt-handler can begin at any time.
pub(super) fn movement(observed: &Observed, vm: &VirtualMachine) -> Option<String> {
    let vmi = observed.live()?;
    let moves_volumes = vmi.status.as_ref().is_some_and(|status| !status.migrated_volumes.is_empty());
    let text = if moves_volumes {
        "moves its volumes"
    } else if vmi.is_migrating() || vmi.is_handed_off() {
        "is migrating"
    } else {
        return None;
    };
    Some(format!(" source {} {text}", Key::of(&vm.metadata)))
}

fn is_deleting(volume: &SourceVolume) -> bool {
    volume.known.as_ref().is_some_and(|claim| claim.metadata.deletion_timestamp.is_some())
}

fn is_unpopulated(observed: &Observed, volume: &SourceVolume) -> bool {
    let Some(claim) = volume.known.as_deref().filter(|claim| claim.phase == "Bound") else { return false };
    match observed.data_volumes.readiness(claim) {
        Readiness::Ready => claim.populating,
        Readiness::AwaitsConsumer(waiting) | Readiness::Waits(waiting) | Readiness::Failed(waiting) => {
            tracing::debug!(claim = volume.claim, "{}", described(waiting));
            true
        }
        Readiness::Orphaned(_) => true,
    }
}

/// Returns the text about pods that can write to the claims of a VM that does not run. `is_last`: nothing else is in the way.
fn used(observed: &Observed, vm: &VirtualMachine, is_last: bool, decision: &mut Decision) -> String {
    // The pod for which an unbound claim waited may write to it afterwards.
    let requested = observed.snapshot.metadata.creation_timestamp.as_ref().filter(|_| is_last);
    let mut pods = Vec::new();
    let mut claims = Vec::new();
    let mut unread = BTreeMap::new();
    for volume in &observed.volumes {
        let Some(claim) = &volume.known else { continue };
        let known = volume.users.as_ref().filter(|users| users.metadata.uid == claim.metadata.uid);
        if known.is_none_or(|users| !users.counts(requested, observed.now)) {
            unread.insert(volume.claim.clone(), claim.metadata.uid.clone().unwrap_or_default());
        }
        if let Some(users) = known.filter(|users| !users.users.is_empty()) {
            pods.extend(users.users.iter().map(|user| user.pod.clone()));
            claims.push(volume.claim.as_str());
        }
    }
    let is_unknown = !unread.is_empty();
    if is_unknown {
        let namespace = vm.metadata.namespace.clone().unwrap_or_default();
        decision.push(Effect::ReadUsers { namespace, claims: unread });
    }
    pods.sort();
    pods.dedup();
    if !pods.is_empty() {
        return format!(
            " source is offline but {} pods using PVCs [{}]: {}",
            pods.len(),
            claims.join(" "),
            pods.join(", ")
        );
    }
    // Not shown: the read takes a moment.
    if is_unknown { " ".to_owned() } else { String::new() }
}
