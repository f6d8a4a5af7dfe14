//! Caches of the cluster, one a resource: trimmed objects with named indices.
//!
//! Start with [`Caches`], the list of all resources. Each has a file with its [`Declaration`], types and indices. `sources.rs`
//! watches what is declared, `answers.rs` stores the answers to writes.

#[macro_use]
mod macros;

mod answers;
pub(crate) mod attachments;
pub(crate) mod budgets;
pub(crate) mod bundle_carriers;
mod cdis;
pub(crate) mod certificate_requests;
pub(crate) mod claim_facts;
pub(crate) mod claims;
pub(crate) mod clones;
pub(crate) mod config_maps;
pub(crate) mod csi_drivers;
pub(crate) mod data_sources;
pub(crate) mod data_volumes;
mod declaration;
pub(crate) mod import_pods;
pub(crate) mod instancetype_revisions;
pub(crate) mod instancetypes;
mod kubevirts;
mod metadata;
pub(crate) mod migrations;
pub(crate) mod namespaces;
pub(crate) mod networks;
pub(crate) mod nodes;
pub(crate) mod pod_warnings;
pub(crate) mod pods;
pub(crate) mod policies;
pub(crate) mod pool_revisions;
pub(crate) mod pools;
pub(crate) mod quotas;
pub(crate) mod recoveries;
pub(crate) mod replica_sets;
#[cfg(test)]
mod rights;
pub(crate) mod roles;
mod secrets;
pub(crate) mod sharing;
#[cfg(test)]
mod sizes;
pub(crate) mod snapshot_classes;
pub(crate) mod snapshots;
mod sources;
pub(crate) mod start_revisions;
pub(crate) mod storage_classes;
pub(crate) mod storage_profiles;
pub(crate) mod vm_snapshots;
pub(crate) mod vmis;
pub(crate) mod vms;
pub(crate) mod volumes;
mod watched_pod;
pub(crate) mod workloads;

use std::{collections::BTreeMap, sync::Arc};

use api::{
    KubeVirt, VirtualMachine, VirtualMachineInstance, VirtualMachineInstanceMigration,
    VirtualMachineInstanceReplicaSet, VirtualMachinePool,
    cdi::{DataSource, DataVolume},
    clone::VirtualMachineClone,
    instancetype::MatchedKind,
    owner,
    snapshot::{VirtualMachineSnapshot, content::VirtualMachineSnapshotContent, restore::VirtualMachineRestore},
};
use k8s_openapi::api::{
    certificates::v1::CertificateSigningRequest,
    core::v1::{ConfigMap, Secret},
};

pub(crate) use self::sources::{Sources, sources};
use self::{
    attachments::{AttachmentIndex, CachedAttachment},
    budgets::CachedBudget,
    cdis::CachedCdi,
    claim_facts::{ClaimUsers, ClaimWarning},
    claims::CachedClaim,
    csi_drivers::CachedCsiDriver,
    declaration::Declaration,
    import_pods::{CachedImportPod, ImportProgress},
    instancetype_revisions::InstancetypeRevision,
    instancetypes::CachedInstancetype,
    namespaces::CachedNamespace,
    networks::CachedNetwork,
    nodes::{CachedNode, Offers},
    pod_warnings::PodWarning,
    pods::{CachedPod, PodIndex},
    policies::CachedPolicy,
    pool_revisions::PoolRevision,
    quotas::CachedQuota,
    recoveries::CachedRecovery,
    roles::CachedRole,
    snapshot_classes::CachedSnapshotClass,
    snapshots::CachedSnapshot,
    start_revisions::StartRevision,
    storage_classes::CachedStorageClass,
    storage_profiles::CachedStorageProfile,
    volumes::CachedVolume,
};
use crate::{
    cache::{Cache, Key},
    runtime::Needs,
};

/// A VMI with the launcher pods that it controls.
#[derive(Clone, Debug)]
pub(crate) struct VmiWithPods {
    /// The VMI.
    pub vmi: Arc<VirtualMachineInstance>,
    /// Its pods.
    pub pods: Vec<Arc<CachedPod>>,
}

/// Lists the resources: the field of the cache, the declaration, the name of the resource.
macro_rules! resources {
    ($($(#[$doc:meta])+ $cache:ident: $declaration:ty as $resource:ident,)+) => {
        /// A resource of which objects are cached.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub(crate) enum Resource {
            $($(#[$doc])+ $resource,)+
        }

        /// All caches.
        #[derive(Default)]
        pub(crate) struct Caches {
            $($(#[$doc])+ pub $cache: Arc<Cache<<$declaration as Declaration>::Kept>>,)+
            /// Warnings about launcher pods that do not start. Filled on demand.
            pub warnings: Arc<Cache<PodWarning>>,
            /// Pods that can write to claims. Filled on demand.
            pub claim_users: Arc<Cache<ClaimUsers>>,
            /// Warnings about claims that are not bound. Filled on demand.
            pub claim_warnings: Arc<Cache<ClaimWarning>>,
            /// Progress of import pods that run. Filled while they do.
            pub import_progress: Arc<Cache<ImportProgress>>,
            /// Labels that the nodes offer to VMIs.
            pub offers: Arc<Offers>,
        }

        impl Caches {
            fn each(&self, visitor: &mut impl declaration::Visitor) {
                $(visitor.visit::<$declaration>(Resource::$resource, &self.$cache);)+
            }
        }
    };
}

resources! {
    /// VirtualMachines.
    vms: VirtualMachine as Vms,
    /// VirtualMachineInstances.
    vmis: VirtualMachineInstance as Vmis,
    /// VirtualMachineInstanceMigrations.
    migrations: VirtualMachineInstanceMigration as Migrations,
    /// MigrationPolicies.
    policies: CachedPolicy as Policies,
    /// VirtualMachineInstanceReplicaSets.
    replica_sets: VirtualMachineInstanceReplicaSet as ReplicaSets,
    /// VirtualMachinePools.
    pools: VirtualMachinePool as Pools,
    /// Instance types.
    instancetypes: instancetypes::Instancetypes as Instancetypes,
    /// Instance types of the cluster.
    cluster_instancetypes: instancetypes::ClusterInstancetypes as ClusterInstancetypes,
    /// Preferences.
    preferences: instancetypes::Preferences as Preferences,
    /// Preferences of the cluster.
    cluster_preferences: instancetypes::ClusterPreferences as ClusterPreferences,
    /// Records of the starts of VMs.
    starts: StartRevision as Starts,
    /// Records of the specs of pools.
    pool_revisions: PoolRevision as PoolRevisions,
    /// Copies of instance types and preferences.
    revisions: InstancetypeRevision as Revisions,
    /// Launcher pods.
    pods: CachedPod as Pods,
    /// Pods that attach the claims of hot-plugged volumes.
    attachments: CachedAttachment as Attachments,
    /// Pods of virt-handler.
    handlers: pods::Handlers as Handlers,
    /// PodDisruptionBudgets of VMIs.
    budgets: CachedBudget as Budgets,
    /// Nodes.
    nodes: CachedNode as Nodes,
    /// Persistent volume claims.
    claims: CachedClaim as Claims,
    /// DataVolumes.
    data_volumes: DataVolume as DataVolumes,
    /// DataSources.
    data_sources: DataSource as DataSources,
    /// Persistent volumes that are handed over.
    volumes: CachedVolume as Volumes,
    /// Snapshots of volumes.
    snapshots: CachedSnapshot as Snapshots,
    /// Classes of volume snapshots.
    snapshot_classes: CachedSnapshotClass as SnapshotClasses,
    /// Snapshots of VMs.
    vm_snapshots: VirtualMachineSnapshot as VmSnapshots,
    /// Contents of snapshots of VMs.
    vm_snapshot_contents: VirtualMachineSnapshotContent as VmSnapshotContents,
    /// Restores of VMs.
    vm_restores: VirtualMachineRestore as VmRestores,
    /// Clones of VMs.
    vm_clones: VirtualMachineClone as VmClones,
    /// CSI drivers.
    csi_drivers: CachedCsiDriver as CsiDrivers,
    /// Pods that fill the claims of DataVolumes.
    import_pods: CachedImportPod as ImportPods,
    /// Storage classes.
    storage_classes: CachedStorageClass as StorageClasses,
    /// Storage profiles of CDI.
    storage_profiles: CachedStorageProfile as StorageProfiles,
    /// Pods that read which claim has the state of a VMI.
    recoveries: CachedRecovery as Recoveries,
    /// Installations of CDI.
    cdis: CachedCdi as Cdis,
    /// Resource quotas.
    quotas: CachedQuota as Quotas,
    /// NetworkAttachmentDefinitions.
    networks: CachedNetwork as Networks,
    /// Namespaces.
    namespaces: CachedNamespace as Namespaces,
    /// Deployments of the install namespace.
    deployments: workloads::Deployments as Deployments,
    /// DaemonSets of the install namespace.
    daemon_sets: workloads::DaemonSets as DaemonSets,
    /// The configuration object.
    kubevirts: KubeVirt as KubeVirts,
    /// Secrets that this process makes.
    secrets: Secret as Secrets,
    /// The CA bundle, and the filter of the metric with the labels of VMs.
    config_maps: ConfigMap as ConfigMaps,
    /// Requests of virt-handlers for certificates.
    requests: CertificateSigningRequest as Requests,
    /// API services with the CA bundle.
    api_services: bundle_carriers::ApiServices as ApiServices,
    /// Mutating webhook configurations with the CA bundle and the path segment.
    mutating_webhooks: bundle_carriers::MutatingWebhooks as MutatingWebhooks,
    /// Validating webhook configurations with the CA bundle and the path segment.
    validating_webhooks: bundle_carriers::ValidatingWebhooks as ValidatingWebhooks,
    /// Cluster roles that the default roles of a cluster can include.
    roles: CachedRole as Roles,
}

/// The resources that certificates depend on.
pub(crate) const CERTIFICATES: Needs =
    needs(&[Resource::Secrets, Resource::ConfigMaps, Resource::KubeVirts, Resource::Requests]);

/// Returns a set of resources.
pub(crate) const fn needs(mut resources: &[Resource]) -> Needs {
    let mut needs = Needs::NONE;
    while let [resource, rest @ ..] = resources {
        needs = needs.with(*resource as u32);
        resources = rest;
    }
    needs
}

impl Caches {
    /// Returns the cache of a kind of instance types or preferences.
    #[must_use]
    pub(crate) fn instancetypes(&self, kind: MatchedKind) -> &Arc<Cache<CachedInstancetype>> {
        match kind {
            MatchedKind::Instancetype => &self.instancetypes,
            MatchedKind::ClusterInstancetype => &self.cluster_instancetypes,
            MatchedKind::Preference => &self.preferences,
            MatchedKind::ClusterPreference => &self.cluster_preferences,
        }
    }

    /// Returns the launcher pods that a VMI controls.
    #[must_use]
    pub(crate) fn pods_of(&self, vmi: &VirtualMachineInstance) -> Vec<Arc<CachedPod>> {
        let mut pods = self.all_pods_of(vmi);
        pods.retain(|pod| !pod.temporary);
        pods
    }

    /// Returns the launcher pods that a VMI controls, with those that only bind claims. A UID alone proves nothing: the creator of a
    /// pod writes its owners.
    #[must_use]
    pub(crate) fn all_pods_of(&self, vmi: &VirtualMachineInstance) -> Vec<Arc<CachedPod>> {
        let uid = vmi.metadata.uid.clone().unwrap_or_default();
        let mut pods = self.pods.by(&PodIndex::Controller(uid));
        pods.retain(|pod| owner::is_controlled_by(&pod.metadata, vmi));
        pods
    }

    /// Returns the warnings about pods that do not start.
    #[must_use]
    pub(crate) fn warnings_of(&self, pods: &[Arc<CachedPod>]) -> Vec<Arc<PodWarning>> {
        let waiting = pods.iter().filter(|pod| pod.is_starting());
        let of = |pod: &Arc<CachedPod>| {
            let warning = self.warnings.get(&Key::of(&pod.metadata))?;
            (warning.metadata.uid == pod.metadata.uid).then_some(warning)
        };
        waiting.filter_map(of).collect()
    }

    /// Returns the attachment pods of launcher pods.
    #[must_use]
    pub(crate) fn attachments_of(&self, launchers: &[Arc<CachedPod>]) -> Vec<Arc<CachedAttachment>> {
        let of = |launcher: &Arc<CachedPod>| {
            let uid = launcher.metadata.uid.clone().unwrap_or_default();
            let mut pods = self.attachments.by(&AttachmentIndex::Launcher(uid));
            pods.retain(|pod| pod.is_of(launcher));
            pods
        };
        launchers.iter().flat_map(of).collect()
    }

    /// Returns a VMI with its launcher pods.
    #[must_use]
    pub(crate) fn with_pods(&self, vmi: Arc<VirtualMachineInstance>) -> VmiWithPods {
        let pods = self.pods_of(&vmi);
        VmiWithPods { vmi, pods }
    }

    /// Returns the UIDs of the pods in the status of a VMI without a known pod, except those whose end was seen. No watch
    /// shows a pod whose label was removed, so such a pod may still run.
    #[must_use]
    pub(crate) fn missing_pods(&self, vmi: &VirtualMachineInstance) -> Vec<String> {
        let Some(status) = vmi.status.as_ref().filter(|status| !status.active_pods.is_empty()) else {
            return Vec::new();
        };
        let pods = self.pods_of(vmi);
        let is_known = |uid: &&String| pods.iter().any(|pod| pod.metadata.uid.as_ref() == Some(uid));
        status.active_pods.keys().filter(|uid| !is_known(uid) && !self.pods.is_gone(uid)).cloned().collect()
    }

    /// Returns those of the named claims of a namespace that exist.
    #[must_use]
    pub(crate) fn claims_named(
        &self,
        namespace: &str,
        names: impl IntoIterator<Item = String>,
    ) -> BTreeMap<String, Arc<CachedClaim>> {
        let known = |name: String| Some((name.clone(), self.claims.get(&Key::new(namespace, name))?));
        names.into_iter().filter_map(known).collect()
    }

    /// Returns the resources whose caches were read since the last call.
    #[cfg(test)]
    pub(crate) fn take_read(&self) -> Vec<Resource> {
        struct Read(Vec<Resource>);
        impl declaration::Visitor for Read {
            fn visit<D: Declaration>(&mut self, resource: Resource, cache: &Arc<Cache<D::Kept>>) {
                self.0.extend(cache.take_read().then_some(resource));
            }
        }
        let mut read = Read(Vec::new());
        self.each(&mut read);
        read.0
    }

    /// Returns the number of objects that lookups visited so far.
    #[cfg(test)]
    pub(crate) fn visited(&self) -> usize {
        /// Adds the numbers of all caches.
        struct Visited(usize);

        impl declaration::Visitor for Visited {
            fn visit<D: Declaration>(&mut self, _resource: Resource, cache: &Arc<Cache<D::Kept>>) {
                self.0 += cache.visited();
            }
        }

        let mut visited = Visited(self.warnings.visited());
        self.each(&mut visited);
        visited.0
    }
}
