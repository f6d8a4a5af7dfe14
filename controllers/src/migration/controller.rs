//! The migration controller: its watches and observations.

use std::{
    collections::HashSet,
    sync::{Arc, Mutex, OnceLock},
    time::Instant,
};

use api::{
    MigrationPhase, VirtualMachineInstance, VirtualMachineInstanceMigration, VmOperation, constants::event, owner,
    vm::lease,
};
use daemon::{config::ConfigHandle, lock};
use jiff::Timestamp;
use k8s_openapi::{api::core::v1::Toleration, apimachinery::pkg::apis::meta::v1::ObjectMeta};

use super::{
    Observed, SHORTEST_RETRY, admission, creates_pod,
    gate::{Gate, View},
    limits,
};
use crate::{
    cache::Key,
    launcher_pod::{LauncherImages, is_target_of, required_of_target},
    persistent_state::{self, pod_name},
    resources::{
        Caches, Resource,
        migrations::{MigrationIndex, vmi_key},
        needs,
        pods::CachedPod,
        recoveries::CachedRecovery,
        vmis::{claim_names, node_name},
        vms::is_leased,
    },
    runtime::{Attempt, ConfigChange, Controller, Decision, Effect, Metrics, Needs, Wake},
    setup::Setup,
    silence::Signs,
    vm_lease,
    vmi::{definitions, namespace_limits},
};

/// The controller of VirtualMachineInstanceMigrations.
pub(crate) struct Migrations {
    config: ConfigHandle,
    metrics: Metrics,
    launcher_images: LauncherImages,
    gate: Arc<Gate>,
    view: View,
    /// The leader admits migrations by their status.
    by_status: bool,
    /// Wakes migrations whose turn it is.
    wake: OnceLock<Wake>,
    /// UIDs of migrations whose unschedulable target pod has been reported.
    reported: Mutex<HashSet<String>>,
    /// Signs of life of running migrations, by their UIDs.
    signs: Arc<Mutex<Signs>>,
}

impl Migrations {
    /// Creates the controller.
    pub(crate) fn new(setup: &Setup) -> Self {
        let by_status = setup.options.shards > 1;
        Self {
            config: setup.config.clone(),
            metrics: setup.metrics.clone(),
            launcher_images: LauncherImages::new(&setup.options),
            gate: Arc::default(),
            view: View::of(&setup.caches).by_status(by_status),
            by_status,
            wake: OnceLock::new(),
            reported: Mutex::default(),
            signs: Arc::default(),
        }
    }
}

impl Controller for Migrations {
    const NAME: &'static str = "migration";
    const SHARDED: bool = true;
    const WORKERS: usize = 3;
    const NEEDS: Needs = needs(&[
        Resource::Vms,
        Resource::Vmis,
        Resource::Pods,
        Resource::Attachments,
        Resource::Migrations,
        Resource::Claims,
        Resource::StorageClasses,
        Resource::StorageProfiles,
        Resource::Recoveries,
        Resource::Quotas,
        Resource::Namespaces,
        Resource::Nodes,
        Resource::Networks,
        Resource::Policies,
    ]);
    type Caches = Caches;
    type Observed = Observed;

    fn vm(caches: &Caches, key: &Key) -> Key {
        caches.migrations.get(key).and_then(|migration| vmi_key(&migration)).unwrap_or_else(|| key.clone())
    }

    fn watch(&self, caches: &Arc<Caches>, wake: &Wake) {
        let _ = self.wake.set(wake.clone());
        let follow = self.gate.clone().follow(self.view.clone(), self.config.clone(), wake.clone());
        // Before the key itself is queued, so that it is decided about with its own standing.
        let (followed, woken, all) = (follow.clone(), wake.clone(), caches.migrations.clone());
        let (metrics, signs) = (self.metrics.clone(), self.signs.clone());
        caches.migrations.listen(move |(former, present)| {
            // Another replica may hold its shard by now.
            lock(&signs)
                .forget_gone(former.map(|migration| &migration.metadata), present.map(|migration| &migration.metadata));
            let Some(migration) = present.or(former) else { return };
            followed(vec![Key::of(&migration.metadata)]);
            if let (Some(former), Some(present)) = (former, present) {
                metrics.migration_phase_changed(former, present);
            }
            // One that has ended makes way for another of the VMI, and may make older ones superfluous.
            if present.is_none_or(VirtualMachineInstanceMigration::is_final)
                && let Some(vmi) = vmi_key(migration)
            {
                woken.keys(all.keys_by(&MigrationIndex::Vmi(vmi)));
            }
        });
        wake.objects_of(&caches.migrations);
        let of_vmi = {
            let migrations = caches.migrations.clone();
            move |vmi: Option<Key>| {
                let Some(vmi) = vmi else { return Vec::new() };
                let keys = migrations.keys_by(&MigrationIndex::Vmi(vmi.clone()));
                if !keys.is_empty() {
                    follow(migrations.keys_by(&MigrationIndex::UnfinishedOfVmi(vmi)));
                }
                keys
            }
        };
        let keys = of_vmi.clone();
        wake.on_object(&caches.vmis, move |vmi| keys(Some(Key::of(&vmi.metadata))));
        let (keys, pods) = (of_vmi.clone(), caches.pods.clone());
        wake.on(&caches.warnings, move |_, present| {
            keys(present.and_then(|warning| pods.get(&Key::of(&warning.metadata))?.vmi()))
        });
        let keys = of_vmi.clone();
        wake.on_object(&caches.pods, move |pod| keys(pod.vmi()));
        let keys = of_vmi.clone();
        wake.on_object(&caches.attachments, move |pod| keys(pod.vmi()));
        wake.on(&caches.vms, move |former, present| {
            let released = former.filter(|vm| is_leased(vm)).and(present).filter(|vm| !is_leased(vm));
            of_vmi(released.map(|vm| Key::of(&vm.metadata)))
        });
        wake.on_object(&caches.recoveries, CachedRecovery::migration);
        wake.on(&caches.claims, |former, present| {
            // The label is removed when the state is handed over.
            let labelled = [present, former].into_iter().flatten().find(|claim| claim.moved_by.is_some());
            labelled.and_then(|claim| Some(Key::new(claim.metadata.namespace.clone()?, claim.moved_by.clone()?)))
        });
        let (woken, migrations, gate) = (wake.clone(), caches.migrations.clone(), self.gate.clone());
        caches.quotas.listen(move |(former, present)| {
            let namespace = present.or(former).and_then(|quota| quota.metadata.namespace.clone()).unwrap_or_default();
            for key in migrations.keys_by(&MigrationIndex::RejectedByQuota(namespace)) {
                gate.forgive(&key);
                woken.retry(key);
            }
        });
    }

    fn config_changed(&self, caches: &Caches, change: &ConfigChange, wake: &Wake) {
        if change.former.migrations != change.present.migrations {
            wake.keys(caches.migrations.keys_by(&MigrationIndex::Phase(MigrationPhase::Pending)));
        }
    }

    fn observe(&self, caches: &Caches, attempt: &Attempt<'_>) -> Option<Observed> {
        let key = attempt.key;
        let migration = caches.migrations.get(key)?;
        let config = self.config.current();
        let vmi_key = vmi_key(&migration);
        let vmi = vmi_key.as_ref().and_then(|key| caches.vmis.get(key));
        let pods = vmi.as_ref().map(|vmi| caches.pods_of(vmi)).unwrap_or_default();
        let phase = migration.phase().clone();
        let is_pending = phase == MigrationPhase::Pending;
        let is_early = matches!(phase, MigrationPhase::Unset | MigrationPhase::Pending | MigrationPhase::Scheduling);
        let is_scheduled = matches!(phase, MigrationPhase::Scheduling | MigrationPhase::Scheduled);
        // Most VMs have no lease, and a VMI without VM never.
        let vm = vmi_key.as_ref().filter(|_| is_pending || is_scheduled).and_then(|key| caches.vms.get(key));
        let held = vm.as_deref().and_then(|vm| vm_lease::forbids(vm, lease::Attempt::Migration));
        // A migration with a target pod waits for snapshots only: what others wait for may be its end.
        let held = held.filter(|held| is_pending || held.operation == VmOperation::Snapshot);
        let spec = vmi.as_ref().filter(|_| is_early || is_scheduled);
        let node = vmi.as_ref().and_then(|vmi| node_name(vmi)).map(Key::cluster_wide);
        let is_drained = |pod: &Arc<CachedPod>| {
            let node = pod.node_name.clone().and_then(|name| caches.nodes.get(&Key::cluster_wide(name)));
            node.is_some_and(|node| node.is_tainted(&config.node_drain_taint_key))
        };
        let is_target = |pod: &&Arc<CachedPod>| vmi.as_ref().is_some_and(|vmi| is_target_of(pod, &migration, vmi));
        let targets: Vec<&Arc<CachedPod>> = pods.iter().filter(is_target).collect();
        let is_admitted = is_pending
            && if self.by_status {
                targets.is_empty() && admission::is_admitted(&migration)
            } else {
                self.gate.admit(&self.view, key, &config.migrations, attempt.now)
            };
        let is_target_drained = (is_early || is_scheduled) && targets.iter().copied().any(is_drained);
        let unschedulable = targets.iter().find(|pod| is_early && pod.is_unschedulable()).zip(vmi.as_ref());
        let unoffered = unschedulable.map(|(pod, vmi)| {
            // The pod keeps away from the node of the source, which has them.
            let source = node.as_ref().and_then(|node| caches.nodes.get(node));
            let required = required_of_target(vmi, &config, &pod.cpu_selector).into_iter();
            required.filter(|key| !caches.offers.has_apart_from(key, source.as_deref())).collect()
        });
        let namespace = caches.namespaces.get(&Key::cluster_wide(key.namespace.clone()));
        let mut observed = Observed {
            all: vmi_key.map(|key| caches.migrations.by(&MigrationIndex::Vmi(key))).unwrap_or_default(),
            warnings: caches.warnings_of(&pods),
            unoffered: unoffered.unwrap_or_default(),
            attachments: caches.attachments_of(&pods),
            full: (is_pending && !is_admitted).then(|| self.gate.full(key, &config.migrations)).flatten(),
            is_admitted,
            by_status: self.by_status,
            held: held.map(|held| held.holder()),
            held_since: held.and_then(|held| held.since.as_ref()).map(|since| since.0),
            is_reported: lock(&self.reported).contains(migration.metadata.uid.as_deref().unwrap_or_default()),
            is_target_drained,
            source_node: node.filter(|_| is_pending).and_then(|node| caches.nodes.get(&node)),
            // Few objects, which administrators write.
            policies: if is_early || is_scheduled { caches.policies.all() } else { Vec::new() },
            namespace: namespace.map(|namespace| namespace.labels.clone()).unwrap_or_default(),
            claims: spec.map(|vmi| caches.claims_named(&key.namespace, claim_names(vmi))).unwrap_or_default(),
            tolerations: tolerations(caches, vmi.as_deref(), &migration),
            recovery: caches
                .recoveries
                .get(&Key::new(key.namespace.clone(), pod_name(&key.name)))
                .filter(|pod| owner::is_controlled_by(&pod.metadata, &*migration)),
            claims_of_state: persistent_state::of_migration(
                caches,
                &config,
                &migration,
                vmi.as_deref().map(|vmi| (vmi, pods.as_slice())),
                is_early,
            ),
            limits: namespace_limits(caches, &config, &key.namespace),
            definitions: spec.and_then(|vmi| definitions(caches, &config, vmi)),
            pods,
            launcher_images: self.launcher_images.clone(),
            config,
            failures: attempt.failures.clone(),
            silence: None,
            now: attempt.now,
            vmi,
            migration,
        };
        let uid = observed.migration.metadata.uid.as_deref().unwrap_or_default();
        observed.silence = lock(&self.signs).note(uid, limits::sign(&observed), Instant::now());
        Some(observed)
    }

    fn subject<'a>(&self, observed: &'a Observed) -> Option<&'a ObjectMeta> {
        Some(&observed.migration.metadata)
    }

    fn decide(&self, observed: &Observed) -> Result<Decision, serde_json::Error> {
        let uid = observed.migration.metadata.uid.clone().unwrap_or_default();
        let mut decision = super::decide(observed)?;
        let reports = |effect: &Effect| matches!(effect, Effect::Event(event) if event.reason == event::MIGRATION_TARGET_POD_UNSCHEDULABLE);
        if decision.effects.iter().any(reports) {
            lock(&self.reported).insert(uid);
        } else if observed.migration.is_final() {
            lock(&self.reported).remove(&uid);
        }
        if observed.is_admitted && !observed.by_status && !creates_pod(&decision) {
            // It attempts again at its wake-up, and others go first until then.
            let retry = decision.wake_after.unwrap_or_default().max(SHORTEST_RETRY);
            decision.wake(retry);
            let deferred = observed.now.checked_add(retry).unwrap_or(Timestamp::MAX);
            self.gate.give_back(&self.view, &Key::of(&observed.migration.metadata), deferred, observed.now);
            if let Some(wake) = self.wake.get() {
                wake.keys(self.gate.next_fresh(&observed.config.migrations));
            }
        }
        Ok(decision)
    }
}

/// Returns the tolerations of a pod that mounts claims of the VMI of a migration, from its VM if the VMI is gone.
fn tolerations(
    caches: &Caches,
    vmi: Option<&VirtualMachineInstance>,
    migration: &VirtualMachineInstanceMigration,
) -> Vec<Toleration> {
    if !migration.is_final() {
        return Vec::new();
    }
    match vmi {
        Some(vmi) => vmi.spec.tolerations.clone(),
        None => {
            let vm = vmi_key(migration).and_then(|key| caches.vms.get(&key));
            vm.and_then(|vm| vm.spec.template.spec.as_ref().map(|spec| spec.tolerations.clone())).unwrap_or_default()
        }
    }
}
