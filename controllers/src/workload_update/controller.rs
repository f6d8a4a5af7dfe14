//! The workload update controller: its watches and observations.

use std::{
    sync::{Arc, Mutex},
    time::Duration,
};

use api::{VirtualMachineInstance, config::ClusterConfig, constants::condition::WORKLOAD_UPDATE_INEFFECTIVE};
use daemon::{config::ConfigHandle, lock};
use jiff::Timestamp;

use super::{EVICT, LIVE_MIGRATE, Observed, Unfinished, free_slots, has_method, needs_update, time_left};
use crate::{
    cache::Key,
    kubevirt::Deployment,
    launcher_pod::LauncherImages,
    resources::{
        Caches, Resource, VmiWithPods,
        migrations::{MigrationIndex, ends, vmi_key},
        needs,
        vmis::VmiIndex,
    },
    runtime::{Attempt, ConfigChange, Controller, Decision, Needs, Wake},
    setup::Setup,
};

/// Least time between two decisions, each of which can visit all outdated VMIs.
const PAUSE: Duration = Duration::from_secs(1);

/// The controller of VMIs whose launcher has another version, or whose change needs another pod.
pub(crate) struct WorkloadUpdates {
    key: Key,
    deployment: Arc<Deployment>,
    config: ConfigHandle,
    launcher_images: LauncherImages,
    memory: Mutex<Memory>,
}

/// The memory of the leader.
#[derive(Debug, Default)]
struct Memory {
    /// Time of the last decision.
    last_decision: Option<Timestamp>,
    /// Time of the last batch of evictions. A new leader starts with a batch.
    last_batch: Option<Timestamp>,
}

impl WorkloadUpdates {
    /// Creates the controller.
    pub(crate) fn new(setup: &Setup) -> Self {
        Self {
            key: Key::new(setup.options.namespace.clone(), ""),
            deployment: Deployment::new(&setup.options).into(),
            config: setup.config.clone(),
            launcher_images: LauncherImages::new(&setup.options),
            memory: Mutex::default(),
        }
    }
}

/// The facts of a VMI whose change can lead to another decision.
fn facts(vmi: Option<&VirtualMachineInstance>, config: &ClusterConfig) -> Option<[bool; 4]> {
    let vmi = vmi.filter(|vmi| needs_update(vmi))?;
    let changes = super::need::change_need(vmi, &[], Timestamp::MAX).is_some();
    let is_ineffective = vmi.has_true(WORKLOAD_UPDATE_INEFFECTIVE);
    Some([changes, vmi.is_live_migratable(), super::is_free(vmi, config), is_ineffective])
}

impl Controller for WorkloadUpdates {
    const NAME: &'static str = "workload-update";
    const NEEDS: Needs = needs(&[Resource::KubeVirts, Resource::Vmis, Resource::Migrations, Resource::Pods]);
    type Caches = Caches;
    type Observed = Observed;

    fn watch(&self, caches: &Arc<Caches>, wake: &Wake) {
        wake.key_on(&caches.kubevirts, &self.key);
        let key = self.key.clone();
        wake.at_start(move || vec![key.clone()]);
        let config = self.config.clone();
        wake.key_on_change(&caches.vmis, &self.key, move |vmi| facts(vmi, &config.current()));
        // A migration that ends makes room for the next.
        let key = self.key.clone();
        wake.on(&caches.migrations, move |former, present| ends(former, present).then(|| key.clone()));
    }

    fn config_changed(&self, _caches: &Caches, change: &ConfigChange, wake: &Wake) {
        // VMIs that an evacuation was to move may be free now.
        if change.former.eviction_strategy != change.present.eviction_strategy {
            wake.key(self.key.clone());
        }
    }

    fn observe(&self, caches: &Caches, attempt: &Attempt<'_>) -> Option<Observed> {
        let kubevirt = caches.kubevirt()?;
        let now = attempt.now;
        let (last_decision, last_batch) = {
            let memory = lock(&self.memory);
            (memory.last_decision, memory.last_batch)
        };
        let passed = last_decision.and_then(|last| Duration::try_from(now.duration_since(last)).ok());
        let pause = passed.and_then(|passed| PAUSE.checked_sub(passed)).filter(|left| !left.is_zero());
        let mut observed = Observed {
            pause,
            deployment: self.deployment.clone(),
            launcher_images: self.launcher_images.clone(),
            last_batch,
            now,
            config: self.config.current(),
            outdated_count: caches.vmis.count_by(&VmiIndex::Outdated),
            outdated: Vec::new(),
            changing: Vec::new(),
            migrations: Vec::new(),
            kubevirt,
        };
        if pause.is_some() {
            return Some(observed);
        }
        let unfinished = caches.migrations.by(&MigrationIndex::Unfinished).into_iter();
        let unfinished = unfinished
            .map(|migration| Unfinished { vmi: vmi_key(&migration).and_then(|key| caches.vmis.get(&key)), migration });
        observed.migrations = unfinished.collect();
        let with_pods = |index: VmiIndex| -> Vec<VmiWithPods> {
            caches.vmis.by(&index).into_iter().map(|vmi| caches.with_pods(vmi)).collect()
        };
        let kubevirt = &observed.kubevirt;
        let migrates = has_method(kubevirt, LIVE_MIGRATE) && free_slots(&observed.config, &observed.migrations) > 0;
        let evicts = has_method(kubevirt, EVICT) && time_left(kubevirt, last_batch, now).is_none();
        if migrates {
            observed.changing = with_pods(VmiIndex::NeedsMigration);
        }
        if migrates || evicts {
            observed.outdated = with_pods(VmiIndex::Outdated);
        }
        Some(observed)
    }

    fn decide(&self, observed: &Observed) -> Result<Decision, serde_json::Error> {
        if let Some(pause) = observed.pause {
            let mut decision = Decision::settled();
            decision.wake(pause);
            return Ok(decision);
        }
        let mut memory = lock(&self.memory);
        memory.last_decision = Some(observed.now);
        let plan = super::decide(observed)?;
        if plan.evicts {
            memory.last_batch = Some(observed.now);
        }
        Ok(plan.decision)
    }
}
