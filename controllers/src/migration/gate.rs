//! The gate: admits waiting migrations by priority and age, within the limits of the cluster and of each node.
//!
//! Its state follows from the caches: each change of a migration, its VMI or its target pod updates the standing of that
//! migration alone. An admitted migration holds its place until its pod is seen or its attempt has failed.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    sync::{Arc, Mutex},
};

use api::{
    MigrationPhase, VirtualMachine, VirtualMachineInstance, VirtualMachineInstanceMigration, VmiPhase,
    config::Migrations, migration::Priority, owner, vm::lease::Attempt,
};
use daemon::{config::ConfigHandle, lock};
use jiff::Timestamp;

use super::{admission, backoff};
use crate::{
    cache::{Cache, Key},
    launcher_pod::is_target_of,
    resources::{
        Caches,
        migrations::{MigrationIndex, vmi_key},
        pods::{CachedPod, PodIndex},
        vmis::node_name,
    },
    runtime::Wake,
    vm_lease,
};

/// The place of a waiting migration in the queue: the smallest is first.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Rank {
    /// Its last attempt was refused a short time ago, so that others go first.
    deferred: bool,
    priority: Priority,
    created: Option<Timestamp>,
    key: Key,
}

/// The relation of a migration to the limits.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Standing {
    /// It counts: it has a target pod, or is about to have one.
    Running { node: String },
    /// It waits for its turn.
    Waiting { node: String, rank: Rank },
}

#[derive(Default)]
struct State {
    standings: HashMap<Key, Standing>,
    /// Admitted migrations whose pod was not seen yet.
    admitted: BTreeSet<Key>,
    /// Refused attempts, with the time until which others go first.
    deferred: HashMap<Key, Timestamp>,
    running: usize,
    /// Running migrations away from each node.
    outbound: HashMap<String, usize>,
    /// Waiting migrations by node.
    waiting: BTreeMap<String, BTreeSet<Rank>>,
}

impl State {
    fn place(&mut self, key: &Key, standing: Option<Standing>) -> bool {
        let former = self.standings.get(key).cloned();
        if former == standing {
            return false;
        }
        match former {
            Some(Standing::Running { node }) => {
                self.running = self.running.saturating_sub(1);
                if let Some(count) = self.outbound.get_mut(&node) {
                    *count = count.saturating_sub(1);
                    if *count == 0 {
                        self.outbound.remove(&node);
                    }
                }
            }
            Some(Standing::Waiting { node, rank }) => {
                if let Some(ranks) = self.waiting.get_mut(&node) {
                    ranks.remove(&rank);
                    if ranks.is_empty() {
                        self.waiting.remove(&node);
                    }
                }
            }
            None => {}
        }
        match &standing {
            Some(Standing::Running { node }) => {
                self.running += 1;
                *self.outbound.entry(node.clone()).or_default() += 1;
            }
            Some(Standing::Waiting { node, rank }) => {
                self.waiting.entry(node.clone()).or_default().insert(rank.clone());
            }
            None => {}
        }
        match standing {
            Some(standing) => self.standings.insert(key.clone(), standing),
            None => self.standings.remove(key),
        };
        true
    }

    /// Returns the migrations whose turn it is, in order. Visits no more than the free places of each node.
    fn next(&self, limits: &Migrations) -> Vec<Rank> {
        let count = |limit: u32| usize::try_from(limit).unwrap_or(usize::MAX);
        let free = count(limits.parallel_per_cluster).saturating_sub(self.running);
        if free == 0 {
            return Vec::new();
        }
        let of_node = |(node, ranks): (&String, &'_ BTreeSet<Rank>)| {
            let busy = self.outbound.get(node).copied().unwrap_or(0);
            let free = count(limits.parallel_outbound_per_node).saturating_sub(busy).min(free);
            ranks.iter().take(free).cloned().collect::<Vec<Rank>>()
        };
        let mut ranks: Vec<Rank> = self.waiting.iter().flat_map(of_node).collect();
        ranks.sort();
        ranks.truncate(free);
        ranks
    }
}

/// A limit that is reached.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Full {
    /// The number of migrations at a time.
    Cluster,
    /// The number of migrations away from this node.
    Node(String),
}

/// The gate.
#[derive(Default)]
pub(super) struct Gate {
    state: Mutex<State>,
}

/// Returns true if migrations of a VM wait for the end of an operation on its data.
pub(super) fn awaits_operation(vm: &VirtualMachine) -> bool {
    vm_lease::forbids(vm, Attempt::Migration).is_some()
}

/// The caches that the gate follows.
#[derive(Clone)]
pub(super) struct View {
    migrations: Arc<Cache<VirtualMachineInstanceMigration>>,
    vms: Arc<Cache<VirtualMachine>>,
    vmis: Arc<Cache<VirtualMachineInstance>>,
    pods: Arc<Cache<CachedPod>>,
    by_status: bool,
}

impl View {
    pub(super) fn of(caches: &Caches) -> Self {
        let (migrations, vms) = (caches.migrations.clone(), caches.vms.clone());
        Self { migrations, vms, vmis: caches.vmis.clone(), pods: caches.pods.clone(), by_status: false }
    }

    /// Sets whether the status of a migration says if it is admitted.
    pub(super) fn by_status(self, by_status: bool) -> Self {
        Self { by_status, ..self }
    }

    fn standing(&self, key: &Key, deferred: Option<Timestamp>, now: Timestamp) -> Option<Standing> {
        let migration = self.migrations.get(key).filter(|migration| !migration.is_final())?;
        let vmi_key = vmi_key(&migration)?;
        let vmi = self.vmis.get(&vmi_key)?;
        let uid = vmi.metadata.uid.clone().unwrap_or_default();
        let mut pods = self.pods.by(&PodIndex::Controller(uid));
        pods.retain(|pod| owner::is_controlled_by(&pod.metadata, &*vmi));
        let state = vmi.status.as_ref().and_then(|status| status.migration_state.as_ref());
        let own = state.filter(|state| state.migration_uid == migration.metadata.uid);
        let source = own.and_then(|state| state.source_node.clone());
        let node = source.or_else(|| node_name(&vmi).map(str::to_owned)).unwrap_or_default();
        let waits = matches!(migration.phase(), MigrationPhase::Unset | MigrationPhase::Pending);
        let is_admitted = self.by_status && admission::is_admitted(&migration);
        if !waits || is_admitted || pods.iter().any(|pod| is_target_of(pod, &migration, &vmi)) {
            return Some(Standing::Running { node });
        }
        // It would give its place back at once. Without shards it does, and others go first then.
        let is_held = || self.vms.get(&vmi_key).is_some_and(|vm| awaits_operation(&vm));
        let is_ready = *migration.phase() == MigrationPhase::Pending
            && migration.metadata.deletion_timestamp.is_none()
            && *vmi.phase() == VmiPhase::Running
            && !vmi.is_deleting()
            && vmi.spec.utility_volumes.is_empty()
            // Another migration, which may have no object any more, is under way or has left a pod.
            && !vmi.is_handed_off()
            && pods.iter().filter(|pod| !pod.is_down()).count() <= 1
            && !(self.by_status && is_held());
        if !is_ready {
            return None;
        }
        let others = self.migrations.by(&MigrationIndex::Vmi(vmi_key));
        if backoff::until(&migration, &others).is_some_and(|until| until > now) {
            return None;
        }
        let created = migration.metadata.creation_timestamp.as_ref().map(|at| at.0);
        let deferred = deferred.or_else(|| admission::deferred_until(&migration)).is_some_and(|until| until > now);
        Some(Standing::Waiting {
            node,
            rank: Rank { deferred, priority: migration.priority(), created, key: key.clone() },
        })
    }
}

impl Gate {
    /// Returns a function that updates the standing of migrations in the queue and wakes those whose turn it is.
    pub(super) fn follow(
        self: Arc<Self>,
        view: View,
        config: ConfigHandle,
        wake: Wake,
    ) -> impl Fn(Vec<Key>) + Clone + Send + Sync + 'static {
        move |keys| {
            let now = Timestamp::now();
            let mut has_changed = false;
            for key in keys {
                has_changed |= self.refresh(&view, &key, now);
            }
            if has_changed {
                wake.keys(self.next_fresh(&config.current().migrations));
            }
        }
    }

    /// Updates the standing of a migration. Returns true if it changed.
    pub(super) fn refresh(&self, view: &View, key: &Key, now: Timestamp) -> bool {
        let mut state = lock(&self.state);
        Self::update(&mut state, view, key, now)
    }

    fn update(state: &mut State, view: &View, key: &Key, now: Timestamp) -> bool {
        let deferred = state.deferred.get(key).copied();
        let mut standing = view.standing(key, deferred, now);
        match standing {
            Some(Standing::Waiting { ref node, .. }) if state.admitted.contains(key) => {
                standing = Some(Standing::Running { node: node.clone() });
            }
            Some(Standing::Waiting { .. }) => {}
            _ => {
                state.admitted.remove(key);
                state.deferred.remove(key);
            }
        }
        state.place(key, standing)
    }

    /// Returns the migrations whose turn it is, except those whose last attempt was refused a short time ago.
    pub(super) fn next_fresh(&self, limits: &Migrations) -> Vec<Key> {
        lock(&self.state).next(limits).into_iter().filter(|rank| !rank.deferred).map(|rank| rank.key).collect()
    }

    /// Admits a migration if it is its turn. It holds its place from now on.
    pub(super) fn admit(&self, view: &View, key: &Key, limits: &Migrations, now: Timestamp) -> bool {
        let mut state = lock(&self.state);
        Self::update(&mut state, view, key, now);
        if state.admitted.contains(key) {
            return true;
        }
        if !state.next(limits).iter().any(|rank| rank.key == *key) {
            return false;
        }
        state.admitted.insert(key.clone());
        Self::update(&mut state, view, key, now);
        true
    }

    /// Gives the place of a migration back whose pod was not created. Until `deferred` others go first.
    pub(super) fn give_back(&self, view: &View, key: &Key, deferred: Timestamp, now: Timestamp) {
        let mut state = lock(&self.state);
        if state.admitted.remove(key) {
            state.deferred.insert(key.clone(), deferred);
            Self::update(&mut state, view, key, now);
        }
    }

    /// Returns the limit for which a migration waits.
    pub(super) fn full(&self, key: &Key, limits: &Migrations) -> Option<Full> {
        let state = lock(&self.state);
        let Some(Standing::Waiting { node, .. }) = state.standings.get(key) else { return None };
        let reaches = |count: usize, limit: u32| u32::try_from(count).is_ok_and(|count| count >= limit);
        let leaving = state.outbound.get(node).copied().unwrap_or(0);
        if reaches(state.running, limits.parallel_per_cluster) {
            Some(Full::Cluster)
        } else {
            reaches(leaving, limits.parallel_outbound_per_node).then(|| Full::Node(node.clone()))
        }
    }

    /// Lets a migration attempt again at its turn.
    pub(super) fn forgive(&self, key: &Key) {
        lock(&self.state).deferred.remove(key);
    }
}
