//! Claims with the state of VMIs: TPM and UEFI variables, which outlive the launcher pods.
//!
//! A VMI that keeps state has one claim, found by its label. A VM owns the claim, so that it goes with the VM; that of a VMI without
//! VM goes with the VMI. `claim.rs` is the one rule for the claims that are made, also for saved memory: class, access mode, size, owner, name.
//! `recovery.rs` is the pod that finds out which of two claims has the state after a migration whose end nobody recorded.
//! `vmi/state.rs` provides the claim of a VMI, `migration/state_claim/` that of a migration's target.

pub(crate) mod claim;
mod recovery;
#[cfg(test)]
mod tests;

use std::{collections::BTreeMap, sync::Arc};

use api::{
    VirtualMachineInstance, VirtualMachineInstanceMigration,
    config::ClusterConfig,
    constants::reason,
    persistent_state::{self, PREFIX, changes_claim},
};

pub(crate) use self::{
    claim::{Owner, belongs, label_of, migration_label, name_for_migration, name_for_vmi},
    recovery::{Verdict, pod_name, render as render_recovery, verdict},
};
use crate::{
    cache::Key,
    launcher_pod::StateMount,
    resources::{
        Caches,
        claims::{CachedClaim, ClaimIndex, SHARED},
        migrations::MigrationIndex,
        pods::CachedPod,
        storage_classes::{CachedStorageClass, StorageClassIndex, newest},
        vmis::is_unstarted,
    },
};

/// Class and access mode of a new claim.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Choice {
    /// The class.
    pub class: Arc<CachedStorageClass>,
    /// Several nodes can mount the claim.
    pub shared: bool,
}

/// The known claims with the state of a VMI.
#[derive(Clone, Debug, Default)]
pub(crate) struct State {
    /// Claims by name: those with its label, and those with the names that pods and migrations of the VMI mount or are to get.
    pub known: BTreeMap<String, Arc<CachedClaim>>,
    /// Storage classes of these claims by name.
    pub classes: BTreeMap<String, Arc<CachedStorageClass>>,
    /// Class and access mode of a new claim, or why there is none. `None`: the VMI needs no new claim.
    pub choice: Option<Result<Choice, String>>,
    /// Migration of the VMI after which it is open which of two claims has the state.
    pub undecided: Option<String>,
}

/// Returns what is known for a VMI. Nothing is read for one that has started and keeps no state.
pub(crate) fn of_vmi(
    caches: &Caches,
    config: &ClusterConfig,
    vmi: &VirtualMachineInstance,
    pods: &[Arc<CachedPod>],
) -> State {
    let (is_kept, is_unstarted) = (persistent_state::is_kept(&vmi.spec), is_unstarted(vmi));
    if !is_kept && !is_unstarted {
        return State::default();
    }
    let mut names: Vec<String> = pods.iter().filter_map(|pod| pod.state_claim.clone()).collect();
    if is_unstarted {
        names.push(format!("{PREFIX}{}", vmi.metadata.name.as_deref().unwrap_or_default()));
        names.extend(is_kept.then(|| name_for_vmi(vmi)));
    }
    let key = Key::of(&vmi.metadata);
    let index = ClaimIndex::State(Key::new(key.namespace.clone(), label_of(&key.name)));
    let labelled = if is_unstarted { caches.claims.by(&index) } else { Vec::new() };
    let wants_claim = is_kept && is_unstarted;
    State {
        choice: wants_claim.then(|| choose(caches, config)),
        undecided: wants_claim.then(|| undecided(caches, &key, None)).flatten(),
        ..known(caches, &key.namespace, names, labelled)
    }
}

/// Returns what is known for a migration. `chooses`: the target may need a claim of its own.
pub(crate) fn of_migration(
    caches: &Caches,
    config: &ClusterConfig,
    migration: &VirtualMachineInstanceMigration,
    vmi: Option<(&VirtualMachineInstance, &[Arc<CachedPod>])>,
    chooses: bool,
) -> State {
    let namespace = migration.metadata.namespace.as_deref().unwrap_or_default();
    let recorded = migration.status.as_ref().and_then(|status| status.migration_state.as_ref());
    let mut names: Vec<String> = recorded
        .into_iter()
        .flat_map(|state| [&state.source_persistent_state_pvc_name, &state.target_persistent_state_pvc_name])
        .flatten()
        .cloned()
        .collect();
    names.extend(vmi.into_iter().flat_map(|(_, pods)| pods).filter_map(|pod| pod.state_claim.clone()));
    let kept = vmi.map(|(vmi, _)| vmi).filter(|vmi| chooses && persistent_state::is_kept(&vmi.spec));
    State {
        choice: kept.map(|_| choose(caches, config)),
        undecided: kept.and_then(|vmi| undecided(caches, &Key::of(&vmi.metadata), Some(migration))),
        ..known(caches, namespace, names, Vec::new())
    }
}

fn known(caches: &Caches, namespace: &str, names: Vec<String>, labelled: Vec<Arc<CachedClaim>>) -> State {
    let mut known = caches.claims_named(namespace, names);
    known.extend(labelled.into_iter().map(|claim| (claim.metadata.name.clone().unwrap_or_default(), claim)));
    let classes = known.values().filter_map(|claim| {
        let name = claim.storage_class.clone()?;
        Some((name.clone(), caches.storage_classes.get(&Key::cluster_wide(name))?))
    });
    State { classes: classes.collect(), known, choice: None, undecided: None }
}

/// Returns class and access mode of new claims: the configured class, else a default one. Its profile says if several nodes can mount
/// a file system of it, and without a profile a bound claim proves it. A claim for one node fits every class: its state moves with
/// the guest.
fn choose(caches: &Caches, config: &ClusterConfig) -> Result<Choice, String> {
    let default = |index| newest(caches.storage_classes.by(&index));
    let class = match &config.vm_state_storage_class {
        Some(name) => caches
            .storage_classes
            .get(&Key::cluster_wide(name.as_str()))
            .ok_or_else(|| format!("storage class {name} not found"))?,
        None => default(StorageClassIndex::VirtDefault)
            .or_else(|| default(StorageClassIndex::Default))
            .ok_or("no default storage class found")?,
    };
    let name = class.metadata.name.clone().unwrap_or_default();
    let profile = caches.storage_profiles.get(&Key::cluster_wide(name.as_str()));
    let modes = profile.iter().flat_map(|profile| profile.file_system_modes());
    let known: Vec<&String> = modes.filter(|mode| [SHARED, claim::SINGLE].contains(&mode.as_str())).collect();
    let shared = if known.is_empty() {
        caches.claims.count_by(&ClaimIndex::SharedFileSystem(name)) > 0
    } else {
        known.iter().any(|mode| *mode == SHARED)
    };
    Ok(Choice { class, shared })
}

/// Returns the migration of a VMI whose two claims both exist, so that it is open which of them has the state. `except`: another
/// migration than this one.
fn undecided(caches: &Caches, vmi: &Key, except: Option<&VirtualMachineInstanceMigration>) -> Option<String> {
    let migrations = caches.migrations.by(&MigrationIndex::Vmi(vmi.clone()));
    let uid = except.and_then(|migration| migration.metadata.uid.as_ref());
    let open = migrations.iter().filter(|migration| uid.is_none() || migration.metadata.uid.as_ref() != uid).find(
        |migration| {
            let state = migration.status.as_ref().and_then(|status| status.migration_state.as_ref());
            let target = state
                .filter(|state| changes_claim(state))
                .and_then(|state| state.target_persistent_state_pvc_name.clone());
            let claim = target.and_then(|name| caches.claims.get(&Key::new(vmi.namespace.clone(), name)));
            claim.is_some_and(|claim| is_moving_to(&claim, migration))
        },
    );
    open.and_then(|migration| migration.metadata.name.clone())
}

/// Returns true for the claim to which a migration moves the state, as long as it is open if it has.
pub(crate) fn is_moving_to(claim: &CachedClaim, migration: &VirtualMachineInstanceMigration) -> bool {
    claim.metadata.deletion_timestamp.is_none() && claim.moved_by.as_deref() == Some(&migration_label(migration))
}

impl State {
    /// Returns the claim with the state of a VMI that has not started: of those with its label the newest, since a migration makes
    /// the new claim after the old one. A claim that belongs to another VM or VMI of the name is none of it.
    pub(crate) fn present(&self, vmi: &VirtualMachineInstance) -> Option<&Arc<CachedClaim>> {
        let owner = Owner::of(vmi);
        let label = label_of(vmi.metadata.name.as_deref().unwrap_or_default());
        let labelled = self.known.values().filter(|claim| claim.state_of.as_deref() == Some(&label));
        let usable = labelled.filter(|claim| claim.metadata.deletion_timestamp.is_none() && !owner.is_foreign(claim));
        usable
            .max_by_key(|claim| {
                (
                    owner.owns(claim),
                    claim.metadata.creation_timestamp.as_ref().map(|at| at.0),
                    claim.metadata.name.clone(),
                )
            })
            .or_else(|| self.legacy(vmi))
    }

    /// Returns the claim of an old release, which has no label.
    fn legacy(&self, vmi: &VirtualMachineInstance) -> Option<&Arc<CachedClaim>> {
        let claim = self.known.get(&format!("{PREFIX}{}", vmi.metadata.name.as_deref().unwrap_or_default()))?;
        let is_usable =
            claim.metadata.deletion_timestamp.is_none() && claim.state_of.is_none() && claim.moved_by.is_none();
        (is_usable && Owner::of(vmi).owns(claim)).then_some(claim)
    }

    /// Returns why a claim is not ready, as reason and message. A claim that waits for its first consumer is ready.
    pub(crate) fn obstacle(&self, claim: &CachedClaim) -> Option<(&'static str, String)> {
        let probe = |message: String| Some((reason::FAILED_BACKEND_STORAGE_PROBE, message));
        match (claim.phase.as_str(), claim.storage_class.as_deref().filter(|name| !name.is_empty())) {
            ("Bound", _) => None,
            ("Lost", _) => probe("backend storage PVC lost".to_owned()),
            (_, None) => probe("no storage class name".to_owned()),
            (_, Some(name)) => match self.classes.get(name) {
                None => probe(format!("storage class {name} not found")),
                Some(class) if class.is_late => None,
                Some(_) => Some((reason::BACKEND_STORAGE_NOT_READY, "PVC pending".to_owned())),
            },
        }
    }
}

/// Returns a claim as a launcher pod mounts it.
pub(crate) fn mount(claim: &CachedClaim) -> StateMount {
    StateMount { claim: claim.metadata.name.clone().unwrap_or_default(), shared: is_shared(claim) }
}

/// Returns true if several nodes can mount a claim.
pub(crate) fn is_shared(claim: &CachedClaim) -> bool {
    claim.access_modes.iter().any(|mode| mode == SHARED)
}
