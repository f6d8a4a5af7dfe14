//! The VMI controller: its watches and observations.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex},
    time::Instant,
};

use api::{
    SavedMemoryPhase, VirtualMachine, VirtualMachineInstance, VirtualMachineInstanceMigration,
    config::ClusterConfig,
    owner,
    vm::{lease::Attempt::Start, status::OperationLease},
    vsock,
};
use daemon::{config::ConfigHandle, lock};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::core::{Selector, SelectorExt};

use super::{
    Observed,
    cid::{random_cids, select_cid},
};
use crate::{
    cache::Key,
    data_volumes::{self, DataVolumes},
    launcher_pod::{LauncherImages, NamespaceLimits, required_labels},
    persistent_state,
    resources::{
        Caches, Resource,
        attachments::CachedAttachment,
        claims::changed,
        migrations::{MigrationIndex, vmi_key},
        needs,
        networks::{CachedNetwork, EXTERNAL_RESOURCES},
        nodes::CachedNode,
        pods::CachedPod,
        quotas::QuotaIndex,
        vmis::{VmiIndex, claim_names, is_starting, is_unstarted, needs_tsc_frequency, network_names},
    },
    runtime::{Attempt, ConfigChange, Controller, Decision, Metrics, Needs, Wake},
    setup::Setup,
    silence::Signs,
    tsc, vm_lease,
};

/// Label of namespaces: memory limit over request.
const MEMORY_LIMIT_RATIO: &str = "alpha.kubevirt.io/auto-memory-limits-ratio";

/// The controller of VirtualMachineInstances.
pub(crate) struct Vmis {
    config: ConfigHandle,
    metrics: Metrics,
    launcher_images: LauncherImages,
    /// Ended launchers of VMIs that have not ended, by the UIDs of the VMIs.
    ended: Arc<Mutex<Signs>>,
}

impl Vmis {
    /// Creates the controller.
    pub(crate) fn new(setup: &Setup) -> Self {
        Self {
            config: setup.config.clone(),
            metrics: setup.metrics.clone(),
            launcher_images: LauncherImages::new(&setup.options),
            ended: Arc::default(),
        }
    }
}

impl Controller for Vmis {
    const NAME: &'static str = "vmi";
    const SHARDED: bool = true;
    const WORKERS: usize = 10;
    const COUNTS_SYNCS: bool = true;
    const NEEDS: Needs = needs(&[
        Resource::Vms,
        Resource::Vmis,
        Resource::Pods,
        Resource::Attachments,
        Resource::Migrations,
        Resource::Claims,
        Resource::StorageClasses,
        Resource::StorageProfiles,
        Resource::DataVolumes,
        Resource::Quotas,
        Resource::Namespaces,
        Resource::Nodes,
        Resource::Networks,
    ]);
    type Caches = Caches;
    type Observed = Observed;

    fn watch(&self, caches: &Arc<Caches>, wake: &Wake) {
        wake.objects_of(&caches.vmis);
        let (metrics, ended) = (self.metrics.clone(), self.ended.clone());
        caches.vmis.listen(move |(former, present)| {
            // Another replica may hold its shard by now.
            lock(&ended).forget_gone(former.map(|vmi| &vmi.metadata), present.map(|vmi| &vmi.metadata));
            if let (Some(former), Some(present)) = (former, present) {
                metrics.phase_changed(former, present);
            }
        });
        let pods = caches.pods.clone();
        wake.on(&caches.warnings, move |_, present| pods.get(&Key::of(&present?.metadata))?.vmi());
        let warnings = caches.warnings.clone();
        wake.on(&caches.pods, move |former, present| {
            let pod = present.or(former)?;
            if present.is_none_or(|pod| !pod.is_starting()) && former.is_some_and(CachedPod::is_starting) {
                warnings.observe_deleted(&Key::of(&pod.metadata), pod.metadata.uid.as_deref());
            }
            pod.vmi()
        });
        // The pods of a migration are no longer needed when it has ended.
        wake.on(&caches.migrations, |former, present| {
            let has_ended = present.is_none_or(VirtualMachineInstanceMigration::is_final);
            present.or(former).filter(|_| has_ended).and_then(vmi_key)
        });
        wake.on_object(&caches.attachments, CachedAttachment::vmi);
        // A VMI that waits for the end of an operation on the data of its VM.
        wake.on(&caches.vms, |former, present| {
            let is_held = |vm: &VirtualMachine| vm_lease::forbids(vm, Start).is_some();
            let freed = former.filter(|vm| is_held(vm) && !present.is_some_and(is_held));
            freed.map(|vm| Key::of(&vm.metadata))
        });
        // VMIs that wait for a claim, and those whose guest must see its growth.
        let vmis = caches.vmis.clone();
        wake.on(&caches.claims, move |former, present| {
            let claim = changed(former, present);
            let mut keys =
                claim.map(|claim| vmis.keys_by(&VmiIndex::Claim(Key::of(&claim.metadata)))).unwrap_or_default();
            // The label can have been removed.
            let labelled = [former, present].into_iter().flatten().filter(|_| claim.is_some());
            keys.extend(labelled.flat_map(|claim| {
                let namespace = claim.metadata.namespace.clone().unwrap_or_default();
                let label = claim.state_of.as_ref().map(|label| VmiIndex::State(Key::new(namespace, label.as_str())));
                label.map(|label| vmis.keys_by(&label)).unwrap_or_default()
            }));
            keys
        });
        // VMIs for whose claims there was no class.
        let vmis = caches.vmis.clone();
        wake.on(&caches.storage_classes, move |_, _| vmis.keys_by(&VmiIndex::Unstarted));
        // A claim has the name of its DataVolume.
        let (woken, vmis) = (wake.clone(), caches.vmis.clone());
        caches.data_volumes.listen(move |(former, present)| {
            if matches!((former, present), (Some(former), Some(present)) if data_volumes::is_equivalent(former, present)) {
                return;
            }
            woken.keys(vmis.keys_by(&match present.or(former) {
                Some(changed) => VmiIndex::Claim(Key::of(&changed.metadata)),
                // The kind has appeared or is gone.
                None => VmiIndex::Unstarted,
            }));
        });
        let vmis = caches.vmis.clone();
        wake.on(&caches.networks, move |_, present| {
            let network = present.map(|network| VmiIndex::Network(Key::of(&network.metadata)));
            network.map(|network| vmis.keys_by(&network)).into_iter().flatten()
        });
        let (woken, vmis, offers) = (wake.clone(), caches.vmis.clone(), caches.offers.clone());
        caches.nodes.listen(move |(former, present)| {
            offers.follow((former, present));
            let offer = |node: &CachedNode| node.tsc().map(|tsc| (tsc, node.is_schedulable()));
            if former.and_then(offer) != present.and_then(offer) {
                woken.keys(vmis.keys_by(&VmiIndex::NeedsTscFrequency));
            }
        });
    }

    fn config_changed(&self, caches: &Caches, change: &ConfigChange, wake: &Wake) {
        // Annotations for backups are kept up to date on existing pods.
        if change.former.skip_backup_hooks == change.present.skip_backup_hooks {
            wake.keys(caches.vmis.keys_by(&VmiIndex::Unstarted));
        } else {
            wake.keys(caches.vmis.keys());
        }
    }

    fn observe(&self, caches: &Caches, attempt: &Attempt<'_>) -> Option<Observed> {
        let key = attempt.key;
        let vmi = caches.vmis.get(key)?;
        let config = self.config.current();
        let (temporary, pods): (Vec<_>, Vec<_>) = caches.all_pods_of(&vmi).into_iter().partition(|pod| pod.temporary);
        let names = claim_names(&vmi);
        let claims = caches.claims_named(&key.namespace, names.clone());
        let ended = pods.iter().filter(|pod| pod.compute_ended.is_some() && !vmi.is_final());
        let mut ended: Vec<&str> = ended.filter_map(|pod| pod.metadata.uid.as_deref()).collect();
        ended.sort_unstable();
        let sign = (!ended.is_empty()).then(|| ended.join(" "));
        let uid = vmi.metadata.uid.as_deref().unwrap_or_default();
        let ended_for = lock(&self.ended).note(uid, sign.as_deref(), Instant::now());
        Some(Observed {
            attachments: caches.attachments_of(&pods),
            warnings: caches.warnings_of(&pods),
            unoffered: if pods.iter().chain(&temporary).any(|pod| pod.is_unschedulable()) {
                required_labels(&vmi, &config).filter(|key| !caches.offers.has(key)).collect()
            } else {
                Vec::new()
            },
            temporary,
            missing: caches.missing_pods(&vmi),
            migrations: caches.migrations.by(&MigrationIndex::UnfinishedOfVmi(key.clone())),
            data_volumes: DataVolumes::of(caches, &key.namespace, &claims, names),
            claims,
            state: persistent_state::of_vmi(caches, &config, &vmi, &pods),
            limits: namespace_limits(caches, &config, &key.namespace),
            // After the VMI was read.
            held: held(caches, &vmi),
            frequency: needs_tsc_frequency(&vmi).then(|| tsc::frequency(caches, &config)).flatten(),
            cid: (is_unstarted(&vmi) && vsock::is_attached(&vmi)).then(|| cid(caches, &vmi)).flatten(),
            definitions: definitions(caches, &config, &vmi),
            launcher_images: self.launcher_images.clone(),
            config,
            ended_for,
            failures: attempt.failures.clone(),
            now: attempt.now,
            instance: vmi,
            pods,
        })
    }

    fn subject<'a>(&self, observed: &'a Observed) -> Option<&'a ObjectMeta> {
        Some(&observed.instance.metadata)
    }

    fn is_starting(&self, observed: &Observed) -> bool {
        is_starting(&observed.instance)
    }

    fn decide(&self, observed: &Observed) -> Result<Decision, serde_json::Error> {
        super::decide(observed)
    }
}

/// Returns the operation on the data of a VM that keeps its VMI from starting. The end of a hibernation is a start.
fn held(caches: &Caches, vmi: &VirtualMachineInstance) -> Option<OperationLease> {
    let hibernation = vmi.status.as_ref().and_then(|status| status.hibernation.as_ref());
    if hibernation.is_some_and(|memory| memory.phase == SavedMemoryPhase::Restoring) {
        return None;
    }
    let vm = owner::controller_of_kind::<VirtualMachine>(&vmi.metadata)?;
    let key = Key::beside(&vmi.metadata, vm.name.as_str());
    vm_lease::forbids(&*caches.vms.get(&key)?, Start).cloned()
}

/// Returns the context ID that a VMI keeps or gets.
fn cid(caches: &Caches, vmi: &VirtualMachineInstance) -> Option<u32> {
    let is_taken = |cid: u32| {
        let others = caches.vmis.by(&VmiIndex::Cid(cid));
        others.iter().any(|other| other.metadata.uid != vmi.metadata.uid)
    };
    select_cid(vsock::cid(vmi), is_taken, random_cids())
}

/// Returns the definitions of the networks of a VMI, if its launcher pod requests the resources that they need.
pub(crate) fn definitions(
    caches: &Caches,
    config: &ClusterConfig,
    vmi: &VirtualMachineInstance,
) -> Option<BTreeMap<String, Arc<CachedNetwork>>> {
    let known = |(namespace, name): (&str, &str)| {
        Some((format!("{namespace}/{name}"), caches.networks.get(&Key::new(namespace, name))?))
    };
    (!config.enabled(EXTERNAL_RESOURCES)).then(|| network_names(vmi).filter_map(known).collect())
}

/// Returns the limits that a namespace makes necessary for launcher pods.
pub(crate) fn namespace_limits(caches: &Caches, config: &ClusterConfig, namespace: &str) -> NamespaceLimits {
    let quotas = caches.quotas.by(&QuotaIndex::Namespace(namespace.to_owned()));
    let known = caches.namespaces.get(&Key::cluster_wide(namespace));
    let labels = known.as_ref().map(|namespace| &namespace.labels);
    let selected = config.auto_cpu_limit_namespaces.clone().and_then(|selector| Selector::try_from(selector).ok());
    NamespaceLimits {
        memory: quotas.iter().any(|quota| quota.memory_limits),
        cpu: quotas.iter().any(|quota| quota.cpu_limits)
            || selected.zip(labels).is_some_and(|(selector, labels)| selector.matches(labels)),
        memory_ratio: labels
            .and_then(|labels| labels.get(MEMORY_LIMIT_RATIO)?.parse::<f64>().ok())
            .filter(|ratio| ratio.is_finite()),
        below_guest: false,
    }
}
