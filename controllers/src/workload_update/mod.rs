//! Workload updates: VMIs whose launcher has another version, as after an upgrade, and VMIs with a change that only another pod can
//! carry out. The strategy of the installation says how: method `LiveMigrate` migrates VMIs that can migrate, method `Evict` evicts
//! the others in batches; the VM of an evicted VMI starts it again with the present launcher. Start with [`decide`];
//! `controller.rs` holds the watches, `need.rs` says which VMIs need an update.
//!
//! ```text
//!                      can migrate, method LiveMigrate      otherwise, method Evict
//!   launcher outdated  migration                            eviction
//!   change pending     migration before all others          nothing: the guest goes on with what it has
//! ```
//! A migration whose reason was taken back is deleted. A VMI whose pod was created for the present launcher or for the change, and
//! lacks it, is left alone and shows condition WorkloadUpdateIneffective.

mod controller;
mod need;
#[cfg(test)]
mod tests;

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use api::{
    KubeVirt, MigrationPhase, VirtualMachineInstance, VirtualMachineInstanceMigration, VmiPhase,
    config::ClusterConfig,
    constants::{annotation, event},
    duration,
    migration::Priority,
};
use jiff::Timestamp;
use sha2::{Digest, Sha256};

pub(crate) use self::controller::WorkloadUpdates;
use self::need::{Need, change_need};
use crate::{
    cache::Key,
    evacuation::is_evacuated,
    kubevirt::Deployment,
    launcher_pod::LauncherImages,
    migration::{Origin, migration_of},
    resources::{
        VmiWithPods,
        migrations::vmi_key,
        pods::CachedPod,
        vmis::{is_outdated, needs_migration},
    },
    runtime::{Decision, Effect, Event, Kind, WriteOptions},
    vmi::{Cause, ineffective},
};

/// The method that migrates.
const LIVE_MIGRATE: &str = "LiveMigrate";
/// The method that evicts.
const EVICT: &str = "Evict";
/// Phase of an installation that is not being changed.
const DEPLOYED: &str = "Deployed";
/// VMIs evicted at once, unless the strategy sets another value.
const USUAL_SIZE: usize = 10;
/// Time between two batches, unless the strategy sets another value.
const USUAL_INTERVAL: Duration = Duration::from_secs(60);
/// Least time between two batches.
const SHORTEST_INTERVAL: Duration = Duration::from_secs(1);
/// Longest time until the next decision.
const LONGEST_WAIT: Duration = Duration::from_secs(24 * 3600);
/// Time until VMIs that got no migration are considered again, unless an event comes first.
const RECHECK: Duration = Duration::from_secs(30);

/// Everything that a decision depends on.
pub(crate) struct Observed {
    /// The configuration object.
    pub kubevirt: Arc<KubeVirt>,
    /// This installation.
    pub deployment: Arc<Deployment>,
    /// Time until a decision may be made.
    pub pause: Option<Duration>,
    /// Number of VMIs whose launcher has another version.
    pub outdated_count: usize,
    /// These VMIs. Not needed before a batch is due or a migration can be created.
    pub outdated: Vec<VmiWithPods>,
    /// VMIs with a change that only a migration can carry out.
    pub changing: Vec<VmiWithPods>,
    /// Configuration in force.
    pub config: Arc<ClusterConfig>,
    /// Migrations that have not ended, with their VMIs.
    pub migrations: Vec<Unfinished>,
    /// Launcher images of this installation.
    pub launcher_images: LauncherImages,
    /// Time of the last batch of evictions.
    pub last_batch: Option<Timestamp>,
    /// The current time.
    pub now: Timestamp,
}

/// A migration that has not ended.
#[derive(Clone, Debug)]
pub(crate) struct Unfinished {
    /// The migration.
    pub migration: Arc<VirtualMachineInstanceMigration>,
    /// Its VMI, if it exists.
    pub vmi: Option<Arc<VirtualMachineInstance>>,
}

/// A decision, and what the next ones must know.
#[derive(Debug, Default, PartialEq)]
struct Plan {
    decision: Decision,
    /// A batch of evictions is due, and it is not empty.
    evicts: bool,
}

/// Returns the time between two batches.
fn interval(kubevirt: &KubeVirt) -> Duration {
    let text = kubevirt.spec.workload_update_strategy.batch_eviction_interval.as_deref();
    let interval = text.and_then(|text| duration::parse(text).ok());
    interval.unwrap_or(USUAL_INTERVAL).max(SHORTEST_INTERVAL)
}

/// Returns the time until the next batch, or `None` if it is due.
fn time_left(kubevirt: &KubeVirt, last_batch: Option<Timestamp>, now: Timestamp) -> Option<Duration> {
    let waited = Duration::try_from(now.duration_since(last_batch?)).unwrap_or_default();
    interval(kubevirt).checked_sub(waited).filter(|left| !left.is_zero())
}

/// Returns true if the strategy has a method.
fn has_method(kubevirt: &KubeVirt, method: &str) -> bool {
    kubevirt.spec.workload_update_strategy.workload_update_methods.iter().any(|known| known == method)
}

/// Returns the number of migrations that can be created now. Those of this controller that wait in the queue count, too, so that
/// it does not grow with each decision.
fn free_slots(config: &ClusterConfig, migrations: &[Unfinished]) -> usize {
    let is_taken = |unfinished: &&Unfinished| {
        let waits = matches!(unfinished.migration.phase(), MigrationPhase::Unset | MigrationPhase::Pending);
        !waits || is_update(&unfinished.migration)
    };
    let limit = config.migrations.parallel_per_cluster;
    usize::try_from(limit).unwrap_or(usize::MAX).saturating_sub(migrations.iter().filter(is_taken).count())
}

/// Returns true for a migration that this controller created.
fn is_update(migration: &VirtualMachineInstanceMigration) -> bool {
    let annotations = migration.metadata.annotations.as_ref();
    annotations.is_some_and(|all| all.contains_key(annotation::WORKLOAD_UPDATE_MIGRATION))
}

/// Decides which VMIs are migrated and evicted, and which migrations are aborted.
fn decide(observed: &Observed) -> Result<Plan, serde_json::Error> {
    let mut plan = Plan::default();
    if !is_deployed(observed) {
        return Ok(plan);
    }
    abort(observed, &mut plan.decision);
    if has_method(&observed.kubevirt, LIVE_MIGRATE) {
        migrate(observed, &mut plan)?;
    }
    if has_method(&observed.kubevirt, EVICT) && observed.outdated_count > 0 {
        evict_batch(observed, &mut plan);
    }
    Ok(plan)
}

/// Returns true when all processes have the version of this installation.
fn is_deployed(observed: &Observed) -> bool {
    observed.kubevirt.status.as_ref().is_some_and(|status| {
        let is_this = |id: &Option<String>| id.as_deref() == Some(observed.deployment.id());
        status.phase.as_deref() == Some(DEPLOYED)
            && is_this(&status.observed_deployment_id)
            && is_this(&status.target_deployment_id)
    })
}

/// Deletes migrations whose reason was taken back.
fn abort(observed: &Observed, decision: &mut Decision) {
    for Unfinished { migration, vmi } in &observed.migrations {
        let Some(vmi) = vmi.as_deref().filter(|vmi| !needs_update(vmi) && !has_arrived(vmi, migration)) else {
            continue;
        };
        if !is_update(migration) || migration.metadata.deletion_timestamp.is_some() {
            continue;
        }
        let regarding = || Kind::Instance.reference(&vmi.metadata);
        let name = vmi.metadata.name.as_deref().unwrap_or_default();
        let done = Event::normal(regarding(), "SuccessfulChangeAbortion", format!("Aborted change for vmi: {name}"));
        let failed = format!("Failed to abort change for vmi: {name}: {{error}}");
        let failed = Event::normal(regarding(), "FailedChangeAbortion", failed);
        let effect = Effect::delete(Kind::Migration, &migration.metadata);
        decision.push(effect.on_success(done).on_failure(failed).independent());
    }
}

/// Returns true if an update of the VMI has a reason, whether or not it can be carried out now.
fn needs_update(vmi: &VirtualMachineInstance) -> bool {
    is_outdated(vmi) || needs_migration(vmi)
}

/// Returns true once the guest runs at the target of a migration. The conditions of the VMI are removed then.
fn has_arrived(vmi: &VirtualMachineInstance, migration: &VirtualMachineInstanceMigration) -> bool {
    let state = vmi.status.as_ref().and_then(|status| status.migration_state.as_ref());
    state.filter(|state| state.migration_uid == migration.metadata.uid).is_some_and(|state| {
        state.target_node_domain_ready_timestamp.is_some() || state.end_timestamp.is_some() || state.completed
    })
}

/// Migrates VMIs: first those that a user waits for.
fn migrate(observed: &Observed, plan: &mut Plan) -> Result<(), serde_json::Error> {
    let mut slots = free_slots(&observed.config, &observed.migrations);
    let busy: Vec<Key> = observed.migrations.iter().filter_map(|known| vmi_key(&known.migration)).collect();
    let mut waiting: BTreeMap<(bool, Vec<u8>), (&VmiWithPods, Need)> = BTreeMap::new();
    for candidate in observed.changing.iter().chain(&observed.outdated) {
        let vmi = &candidate.vmi;
        let ineffective = ineffective_for(observed, candidate);
        let need = change_need(vmi, &ineffective, observed.now);
        if let Some(Need::Later(time)) = need {
            plan.decision.wake(time);
        }
        let outdated = is_outdated(vmi) && !ineffective.contains(&Cause::Version);
        let need = need.filter(|need| !matches!(need, Need::Later(_))).or(outdated.then_some(Need::Version));
        let Some(need) = need.filter(|_| can_migrate(vmi, &observed.config, &busy)) else { continue };
        if !is_alone(candidate) {
            // The pod of a migration that failed ends later. Changes of pods do not wake this controller.
            plan.decision.wake(RECHECK);
            continue;
        }
        waiting.insert((need == Need::Version, rank(vmi, observed.now)), (candidate, need));
    }
    if !waiting.is_empty() {
        plan.decision.wake(RECHECK);
    }
    for (candidate, need) in waiting.into_values() {
        if slots == 0 {
            break;
        }
        slots -= 1;
        plan.decision.push(migration(&candidate.vmi, need)?);
    }
    Ok(())
}

/// Returns the causes for which another pod would change nothing.
fn ineffective_for(observed: &Observed, candidate: &VmiWithPods) -> Vec<Cause> {
    let image = observed.launcher_images.of(&candidate.vmi.spec);
    active_pod(candidate).map(|pod| ineffective(&candidate.vmi, pod, image)).unwrap_or_default()
}

fn active_pod(candidate: &VmiWithPods) -> Option<&CachedPod> {
    candidate.pods.iter().map(Arc::as_ref).find(|pod| !pod.is_going_down())
}

/// Returns true for a running VMI that no other controller moves. One with strategy External may stay marked for a long time.
fn is_free(vmi: &VirtualMachineInstance, config: &ClusterConfig) -> bool {
    *vmi.phase() == VmiPhase::Running && !vmi.is_deleting() && !is_evacuated(vmi, config) && !vmi.is_migrating()
}

fn can_migrate(vmi: &VirtualMachineInstance, config: &ClusterConfig, busy: &[Key]) -> bool {
    is_free(vmi, config) && vmi.is_live_migratable() && !busy.contains(&Key::of(&vmi.metadata))
}

/// Returns true if no pod of a former migration is left.
fn is_alone(candidate: &VmiWithPods) -> bool {
    candidate.pods.iter().filter(|pod| !pod.is_down()).count() <= 1
}

fn migration(vmi: &VirtualMachineInstance, need: Need) -> Result<Effect, serde_json::Error> {
    let priority = if need == Need::Version { Priority::SystemCritical } else { Priority::UserTriggered };
    let migration = migration_of(vmi, Origin::WorkloadUpdate { priority, volumes: need == Need::Volumes });
    let effect = Effect::create(Kind::Migration, vmi.metadata.namespace.as_deref(), &migration)?.reported(
        Kind::Instance.reference(&vmi.metadata),
        (event::SUCCESSFUL_CREATE, "Created Migration {name} for automated workload update"),
        (event::FAILED_CREATE, "Error creating a Migration for automated workload update: {error}"),
    );
    Ok(effect.independent())
}

/// Evicts the next batch of VMIs with an outdated launcher that are not migrated.
fn evict_batch(observed: &Observed, plan: &mut Plan) {
    let left = time_left(&observed.kubevirt, observed.last_batch, observed.now);
    plan.decision.wake(left.unwrap_or_else(|| interval(&observed.kubevirt)).min(LONGEST_WAIT));
    if left.is_some() {
        return;
    }
    let strategy = &observed.kubevirt.spec.workload_update_strategy;
    let size = strategy.batch_eviction_size.map_or(USUAL_SIZE, |size| usize::try_from(size).unwrap_or(0));
    let migrates = has_method(&observed.kubevirt, LIVE_MIGRATE);
    let busy: Vec<Key> = observed.migrations.iter().filter_map(|known| vmi_key(&known.migration)).collect();
    let is_candidate = |outdated: &&VmiWithPods| {
        let vmi: &VirtualMachineInstance = &outdated.vmi;
        let is_left = busy.contains(&Key::of(&vmi.metadata)) || (migrates && vmi.is_live_migratable());
        is_free(vmi, &observed.config) && !is_left && !ineffective_for(observed, outdated).contains(&Cause::Version)
    };
    let candidates = observed.outdated.iter().filter(is_candidate);
    let mut candidates: Vec<(&VirtualMachineInstance, &CachedPod)> =
        candidates.filter_map(|outdated| Some((&*outdated.vmi, active_pod(outdated)?))).collect();
    // In another order each time, so that VMIs that must not be evicted do not hold up others.
    candidates.sort_by_cached_key(|(vmi, _)| rank(vmi, observed.now));
    for (vmi, pod) in candidates.into_iter().take(size) {
        plan.evicts = true;
        plan.decision.push(evict(vmi, pod));
    }
}

fn rank(vmi: &VirtualMachineInstance, now: Timestamp) -> Vec<u8> {
    let uid = vmi.metadata.uid.as_deref().unwrap_or_default();
    Sha256::digest(format!("{uid} {}", now.as_second())).to_vec()
}

fn evict(vmi: &VirtualMachineInstance, pod: &CachedPod) -> Effect {
    // The reference prints its error value even if there is none.
    let evicted = "Initiated eviction of VMI as part of automated workload update: <nil>";
    let failed = "Error deleting VMI during automated workload update: {error}";
    let effect = Effect::Evict {
        namespace: pod.metadata.namespace.clone(),
        name: pod.metadata.name.clone().unwrap_or_default(),
        uid: pod.metadata.uid.clone(),
        options: WriteOptions::default(),
    };
    let regarding = Kind::Instance.reference(&vmi.metadata);
    effect.reported(regarding, (event::SUCCESSFUL_EVICT, evicted), (event::FAILED_EVICT, failed))
}
