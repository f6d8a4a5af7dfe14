//! The node controller: its watches and observations.

use std::{
    collections::BTreeSet,
    sync::{Arc, Mutex},
    time::Instant,
};

use api::{
    VirtualMachineInstance,
    constants::{annotation, component},
    tsc::frequency as used_frequency,
};
use daemon::{config::ConfigHandle, lock};

use super::{Observed, is_silent};
use crate::{
    cache::Key,
    resources::{
        Caches, Resource, needs,
        nodes::{CachedNode, NodeIndex},
        pods::PodIndex,
        vmis::{VmiIndex, node_name},
    },
    runtime::{Attempt, Controller, Decision, Needs, Wake},
    setup::Setup,
    silence::Signs,
    tsc,
};

/// The controller of nodes.
pub(crate) struct Nodes {
    config: ConfigHandle,
    namespace: String,
    heartbeats: Mutex<Signs>,
}

impl Nodes {
    /// Creates the controller.
    pub(crate) fn new(setup: &Setup) -> Self {
        Self { config: setup.config.clone(), namespace: setup.options.namespace.clone(), heartbeats: Mutex::default() }
    }
}

impl Controller for Nodes {
    const NAME: &'static str = "node";
    const NEEDS: Needs =
        needs(&[Resource::Nodes, Resource::Vmis, Resource::Pods, Resource::Handlers, Resource::DaemonSets]);
    type Caches = Caches;
    type Observed = Observed;

    fn watch(&self, caches: &Arc<Caches>, wake: &Wake) {
        wake.objects_of(&caches.nodes);
        wake.on_object(&caches.handlers, |pod| pod.node_name.clone().map(Key::cluster_wide));
        wake.on_object(&caches.vmis, |vmi| node_name(vmi).map(Key::cluster_wide));
        // Nodes that are gone may have VMIs.
        let vmis = caches.vmis.clone();
        wake.at_start(move || {
            let range = VmiIndex::Node(String::new())..=VmiIndex::Claim(Key::cluster_wide(""));
            let nodes = vmis.entries(range).into_iter().filter_map(|index| match index {
                VmiIndex::Node(name) => Some(Key::cluster_wide(name)),
                _ => None,
            });
            nodes.collect()
        });
        self.watch_frequencies(caches, wake);
    }

    fn observe(&self, caches: &Caches, attempt: &Attempt<'_>) -> Option<Observed> {
        let key = attempt.key;
        let node = caches.nodes.get(key);
        let has_tsc = node.as_ref().is_some_and(|node| node.has_tsc_labels());
        let annotations = node.as_ref().and_then(|node| node.metadata.annotations.as_ref());
        let heartbeat = annotations.and_then(|all| all.get(annotation::HEARTBEAT));
        let silence = lock(&self.heartbeats).note(&key.name, heartbeat.map(String::as_str), Instant::now());
        // Only the VMIs of silent nodes matter.
        let vmis = if is_silent(node.as_deref(), silence) {
            caches.vmis.by(&VmiIndex::Node(key.name.clone()))
        } else {
            Vec::new()
        };
        // A VMI fails only if it has no pod, which is not known yet of one with missing pods.
        let vmis = vmis.into_iter().filter(|vmi| caches.missing_pods(vmi).is_empty());
        let handlers = caches.handlers.by(&PodIndex::Node(key.name.clone()));
        Some(Observed {
            key: key.clone(),
            vmis: vmis.map(|vmi| caches.with_pods(vmi)).collect(),
            has_handler: handlers.iter().any(|pod| !pod.is_down()),
            daemon_set: caches.daemon_sets.get(&Key::new(self.namespace.clone(), component::VIRT_HANDLER)),
            frequencies: if has_tsc { tsc::needed(caches, &self.config.current()) } else { BTreeSet::new() },
            node,
            silence,
        })
    }

    fn decide(&self, observed: &Observed) -> Result<Decision, serde_json::Error> {
        super::decide(observed)
    }
}

impl Nodes {
    /// Wakes all nodes with a TSC when the set of needed frequencies changes.
    fn watch_frequencies(&self, caches: &Arc<Caches>, wake: &Wake) {
        let last: Mutex<BTreeSet<u64>> = Mutex::default();
        let (woken, config, all) = (wake.clone(), self.config.clone(), Arc::downgrade(caches));
        let compare = Arc::new(move || {
            let Some(caches) = all.upgrade() else { return };
            let needed = tsc::needed(&caches, &config.current());
            let mut last = lock(&last);
            if *last != needed {
                *last = needed;
                woken.keys(caches.nodes.keys_by(&NodeIndex::HasTscLabels));
            }
        });
        let compare_nodes = compare.clone();
        caches.nodes.listen(move |(former, present)| {
            let offer = |node: &CachedNode| node.tsc().map(|tsc| (tsc, node.is_schedulable()));
            if former.and_then(offer) != present.and_then(offer) {
                compare_nodes();
            }
        });
        caches.vmis.listen(move |(former, present)| {
            let used =
                |vmi: Option<&VirtualMachineInstance>| vmi.filter(|vmi| !vmi.is_final()).and_then(used_frequency);
            if used(former) != used(present) {
                compare();
            }
        });
    }
}
