//! The evacuation controller: its watches and observations. Its keys are VMIs, so that none delays another.

use std::sync::Arc;

use api::{VirtualMachineInstance, config::ClusterConfig};
use daemon::config::ConfigHandle;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;

use super::{Observed, marked_node};
use crate::{
    cache::Key,
    resources::{
        Caches, Resource,
        migrations::{MigrationIndex, ends, vmi_key},
        needs,
        nodes::CachedNode,
        vmis::{VmiIndex, node_name},
    },
    runtime::{Attempt, ConfigChange, Controller, Decision, Needs, Wake},
    setup::Setup,
};

/// The controller of VMIs that must leave their nodes.
pub(crate) struct Evacuations {
    config: ConfigHandle,
}

impl Evacuations {
    /// Creates the controller.
    pub(crate) fn new(setup: &Setup) -> Self {
        Self { config: setup.config.clone() }
    }
}

fn is_drained(caches: &Caches, vmi: &VirtualMachineInstance, config: &ClusterConfig) -> bool {
    let node = node_name(vmi).and_then(|name| caches.nodes.get(&Key::cluster_wide(name)));
    node.is_some_and(|node| node.is_tainted(&config.node_drain_taint_key))
}

impl Controller for Evacuations {
    const NAME: &'static str = "evacuation";
    const SHARDED: bool = true;
    const WORKERS: usize = 3;
    const NEEDS: Needs = needs(&[Resource::Vmis, Resource::Migrations, Resource::Nodes, Resource::Pods]);
    type Caches = Caches;
    type Observed = Observed;

    fn watch(&self, caches: &Arc<Caches>, wake: &Wake) {
        wake.objects_of(&caches.vmis);
        wake.on(&caches.migrations, |former, present| former.filter(|_| ends(former, present)).and_then(vmi_key));
        let (vmis, config) = (caches.vmis.clone(), self.config.clone());
        wake.on(&caches.nodes, move |former, present| {
            let key = &config.current().node_drain_taint_key;
            let is_tainted = |node: &CachedNode| node.is_tainted(key);
            let node = present.filter(|node| is_tainted(node) && !former.is_some_and(is_tainted));
            let name = node.map(|node| node.metadata.name.clone().unwrap_or_default());
            name.into_iter().flat_map(|name| vmis.keys_by(&VmiIndex::Node(name))).collect::<Vec<_>>()
        });
    }

    fn config_changed(&self, caches: &Caches, change: &ConfigChange, wake: &Wake) {
        let (former, present) = (&change.former, &change.present);
        if former.node_drain_taint_key != present.node_drain_taint_key
            || former.eviction_strategy != present.eviction_strategy
        {
            wake.keys(caches.vmis.keys());
        }
    }

    fn observe(&self, caches: &Caches, attempt: &Attempt<'_>) -> Option<Observed> {
        let vmi = caches.vmis.get(attempt.key)?;
        let config = self.config.current();
        let is_drained = is_drained(caches, &vmi, &config);
        if !is_drained && marked_node(&vmi).is_none() {
            return None;
        }
        Some(Observed {
            is_drained,
            is_migrated: caches.migrations.count_by(&MigrationIndex::UnfinishedOfVmi(attempt.key.clone())) > 0,
            active_pods: caches.pods_of(&vmi).iter().filter(|pod| !pod.is_down()).count(),
            config,
            failures: attempt.failures.clone(),
            now: attempt.now,
            vmi,
        })
    }

    fn subject<'a>(&self, observed: &'a Observed) -> Option<&'a ObjectMeta> {
        Some(&observed.vmi.metadata)
    }

    fn decide(&self, observed: &Observed) -> Result<Decision, serde_json::Error> {
        super::decide(observed)
    }
}
