//! The controller that admits migrations at the leader, if the VMs are divided among the replicas.

use std::sync::Arc;

use api::{MigrationPhase, VirtualMachineInstanceMigration};
use daemon::config::ConfigHandle;
use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;

use super::{
    admission::{admit, deferred_until, is_admitted},
    backoff,
    gate::{Gate, View, awaits_operation},
};
use crate::{
    cache::Key,
    resources::{
        Caches, Resource,
        migrations::{MigrationIndex, vmi_key},
        needs,
    },
    runtime::{Attempt, ConfigChange, Controller, Decision, Effect, Kind, Needs, Wake},
    setup::Setup,
};

/// The controller that admits migrations.
pub(crate) struct Admissions {
    config: ConfigHandle,
    gate: Arc<Gate>,
    view: View,
}

impl Admissions {
    /// Creates the controller.
    pub(crate) fn new(setup: &Setup) -> Self {
        Self { config: setup.config.clone(), gate: Arc::default(), view: View::of(&setup.caches).by_status(true) }
    }
}

/// A migration that waits for its turn.
pub(crate) struct Waiting {
    migration: Arc<VirtualMachineInstanceMigration>,
    is_turn: bool,
    /// Time until which it leaves its turn to others.
    until: Option<Timestamp>,
    now: Timestamp,
}

impl Controller for Admissions {
    const NAME: &'static str = "migration-admission";
    const NEEDS: Needs = needs(&[Resource::Vms, Resource::Vmis, Resource::Pods, Resource::Migrations]);
    type Caches = Caches;
    type Observed = Waiting;

    fn watch(&self, caches: &Arc<Caches>, wake: &Wake) {
        let follow = self.gate.clone().follow(self.view.clone(), self.config.clone(), wake.clone());
        // Before the key itself is queued, so that it is decided about with its own standing.
        let (followed, woken, all) = (follow.clone(), wake.clone(), caches.migrations.clone());
        caches.migrations.listen(move |(former, present)| {
            let Some(migration) = present.or(former) else { return };
            followed(vec![Key::of(&migration.metadata)]);
            // One that has ended makes way for another of the VMI.
            if present.is_none_or(VirtualMachineInstanceMigration::is_final)
                && let Some(vmi) = vmi_key(migration)
            {
                woken.keys(all.keys_by(&MigrationIndex::UnfinishedOfVmi(vmi)));
            }
        });
        wake.objects_of(&caches.migrations);
        let migrations = caches.migrations.clone();
        let of_vmi = move |vmi: Option<Key>| {
            let keys = vmi.map(|vmi| migrations.keys_by(&MigrationIndex::UnfinishedOfVmi(vmi))).unwrap_or_default();
            follow(keys.clone());
            keys
        };
        let keys = of_vmi.clone();
        wake.on_object(&caches.vmis, move |vmi| keys(Some(Key::of(&vmi.metadata))));
        let keys = of_vmi.clone();
        wake.on_object(&caches.pods, move |pod| keys(pod.vmi()));
        // A migration that waits for the end of an operation leaves its turn to others.
        wake.on(&caches.vms, move |former, present| {
            let has_changed = former.is_some_and(awaits_operation) != present.is_some_and(awaits_operation);
            of_vmi(present.or(former).filter(|_| has_changed).map(|vm| Key::of(&vm.metadata)))
        });
    }

    fn config_changed(&self, caches: &Caches, change: &ConfigChange, wake: &Wake) {
        if change.former.migrations != change.present.migrations {
            wake.keys(caches.migrations.keys_by(&MigrationIndex::Phase(MigrationPhase::Pending)));
        }
    }

    fn observe(&self, caches: &Caches, attempt: &Attempt<'_>) -> Option<Waiting> {
        let migration = caches.migrations.get(attempt.key)?;
        if *migration.phase() != MigrationPhase::Pending || is_admitted(&migration) {
            return None;
        }
        let vmi = vmi_key(&migration)?;
        let all = caches.migrations.by(&MigrationIndex::Vmi(vmi));
        let until = deferred_until(&migration).max(backoff::until(&migration, &all));
        let until = until.filter(|until| *until > attempt.now);
        let config = self.config.current();
        let is_turn = until.is_none() && self.gate.admit(&self.view, attempt.key, &config.migrations, attempt.now);
        Some(Waiting { migration, is_turn, until, now: attempt.now })
    }

    fn subject<'a>(&self, observed: &'a Waiting) -> Option<&'a ObjectMeta> {
        Some(&observed.migration.metadata)
    }

    fn decide(&self, observed: &Waiting) -> Result<Decision, serde_json::Error> {
        let mut decision = Decision::settled();
        if let Some(until) = observed.until {
            decision.wake(until.duration_since(observed.now).unsigned_abs());
        } else if observed.is_turn {
            let mut wanted = (*observed.migration).clone();
            admit(wanted.status.get_or_insert_default(), observed.now);
            decision.effects.extend(Effect::change(Kind::Migration, &*observed.migration, &wanted, Some("status"))?);
        }
        Ok(decision)
    }
}
