//! Caches of the cluster, one a resource: trimmed objects with named indices.
//!
//! Start with [`Caches`]. `sources.rs` lists the watches that fill them, `answers.rs` stores the answers to writes; each
//! other file holds the types and indices of some resources.

mod answers;
pub(crate) mod attachments;
pub(crate) mod claims;
pub(crate) mod installation;
pub(crate) mod instancetypes;
mod metadata;
pub(crate) mod migrations;
pub(crate) mod namespaces;
pub(crate) mod networks;
pub(crate) mod nodes;
pub(crate) mod pod_warnings;
pub(crate) mod pods;
mod sources;
pub(crate) mod start_revisions;
pub(crate) mod vmis;
pub(crate) mod vms;
mod watched_pod;
pub(crate) mod workloads;

use std::{collections::BTreeMap, sync::Arc};

use api::{
    KubeVirt, VirtualMachine, VirtualMachineInstance, VirtualMachineInstanceMigration,
    VirtualMachineInstanceReplicaSet, instancetype::MatchedKind, owner,
};
use k8s_openapi::api::{
    certificates::v1::CertificateSigningRequest,
    core::v1::{ConfigMap, Secret},
};

pub(crate) use self::sources::{Sources, network_definitions, sources};
use self::{
    attachments::{AttachmentIndex, CachedAttachment},
    claims::CachedClaim,
    installation::{BundleCarrier, CachedRole},
    instancetypes::{CachedInstancetype, InstancetypeRevision},
    migrations::CachedPolicy,
    namespaces::{CachedNamespace, CachedQuota},
    networks::CachedNetwork,
    nodes::{CachedNode, Offers},
    pod_warnings::PodWarning,
    pods::{CachedPod, PodIndex},
    start_revisions::StartRevision,
    workloads::CachedWorkload,
};
use crate::cache::{Cache, Key};

/// A VMI with the launcher pods that it controls.
#[derive(Clone, Debug)]
pub(crate) struct VmiWithPods {
    /// The VMI.
    pub vmi: Arc<VirtualMachineInstance>,
    /// Its pods.
    pub pods: Vec<Arc<CachedPod>>,
}

/// All caches.
#[derive(Default)]
pub(crate) struct Caches {
    /// VirtualMachines.
    pub vms: Arc<Cache<VirtualMachine>>,
    /// VirtualMachineInstances.
    pub vmis: Arc<Cache<VirtualMachineInstance>>,
    /// VirtualMachineInstanceMigrations.
    pub migrations: Arc<Cache<VirtualMachineInstanceMigration>>,
    /// MigrationPolicies.
    pub policies: Arc<Cache<CachedPolicy>>,
    /// VirtualMachineInstanceReplicaSets.
    pub replica_sets: Arc<Cache<VirtualMachineInstanceReplicaSet>>,
    /// Instance types and preferences, in the order of [`MatchedKind::ALL`].
    instancetypes: [Arc<Cache<CachedInstancetype>>; 4],
    /// Copies of instance types and preferences.
    pub revisions: Arc<Cache<InstancetypeRevision>>,
    /// Records of the starts of VMs.
    pub starts: Arc<Cache<StartRevision>>,
    /// Launcher pods.
    pub pods: Arc<Cache<CachedPod>>,
    /// Warnings about launcher pods that do not start. Filled on demand.
    pub warnings: Arc<Cache<PodWarning>>,
    /// Pods that attach the claims of hot-plugged volumes.
    pub attachments: Arc<Cache<CachedAttachment>>,
    /// Pods of virt-handler.
    pub handlers: Arc<Cache<CachedPod>>,
    /// Nodes.
    pub nodes: Arc<Cache<CachedNode>>,
    /// Labels that the nodes offer to VMIs.
    pub offers: Arc<Offers>,
    /// Persistent volume claims.
    pub claims: Arc<Cache<CachedClaim>>,
    /// Resource quotas.
    pub quotas: Arc<Cache<CachedQuota>>,
    /// NetworkAttachmentDefinitions. Empty until they are watched, see [`network_definitions`].
    pub networks: Arc<Cache<CachedNetwork>>,
    /// Namespaces.
    pub namespaces: Arc<Cache<CachedNamespace>>,
    /// Deployments of the install namespace.
    pub deployments: Arc<Cache<CachedWorkload>>,
    /// DaemonSets of the install namespace.
    pub daemon_sets: Arc<Cache<CachedWorkload>>,
    /// The configuration object.
    pub kubevirts: Arc<Cache<KubeVirt>>,
    /// Secrets that this process makes.
    pub secrets: Arc<Cache<Secret>>,
    /// The CA bundle, and the filter of the metric with the labels of VMs.
    pub config_maps: Arc<Cache<ConfigMap>>,
    /// Requests of virt-handlers for certificates.
    pub requests: Arc<Cache<CertificateSigningRequest>>,
    /// API services with the CA bundle.
    pub api_services: Arc<Cache<BundleCarrier>>,
    /// Mutating webhook configurations with the CA bundle and the path segment.
    pub mutating_webhooks: Arc<Cache<BundleCarrier>>,
    /// Validating webhook configurations with the CA bundle and the path segment.
    pub validating_webhooks: Arc<Cache<BundleCarrier>>,
    /// Cluster roles that the default roles of a cluster can include.
    pub roles: Arc<Cache<CachedRole>>,
}

impl Caches {
    /// Returns the cache of a kind of instance types or preferences.
    #[must_use]
    pub(crate) fn instancetypes(&self, kind: MatchedKind) -> &Arc<Cache<CachedInstancetype>> {
        let [instancetypes, cluster_instancetypes, preferences, cluster_preferences] = &self.instancetypes;
        match kind {
            MatchedKind::Instancetype => instancetypes,
            MatchedKind::ClusterInstancetype => cluster_instancetypes,
            MatchedKind::Preference => preferences,
            MatchedKind::ClusterPreference => cluster_preferences,
        }
    }

    /// Returns the launcher pods that a VMI controls. A UID alone proves nothing: the creator of a pod writes its owners.
    #[must_use]
    pub(crate) fn pods_of(&self, vmi: &VirtualMachineInstance) -> Vec<Arc<CachedPod>> {
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

    /// Returns the configuration object, unless it is being deleted.
    #[must_use]
    pub(crate) fn kubevirt(&self) -> Option<Arc<KubeVirt>> {
        self.kubevirts.all().into_iter().find(|object| object.metadata.deletion_timestamp.is_none())
    }

    /// Returns the number of objects that lookups visited so far.
    #[cfg(test)]
    pub(crate) fn visited(&self) -> usize {
        let small = [&self.api_services, &self.mutating_webhooks, &self.validating_webhooks];
        self.vms.visited()
            + self.vmis.visited()
            + self.migrations.visited()
            + self.policies.visited()
            + self.replica_sets.visited()
            + self.instancetypes.iter().map(|cache| cache.visited()).sum::<usize>()
            + self.revisions.visited()
            + self.starts.visited()
            + self.pods.visited()
            + self.warnings.visited()
            + self.attachments.visited()
            + self.handlers.visited()
            + self.nodes.visited()
            + self.claims.visited()
            + self.quotas.visited()
            + self.networks.visited()
            + self.namespaces.visited()
            + self.deployments.visited()
            + self.daemon_sets.visited()
            + self.kubevirts.visited()
            + self.secrets.visited()
            + self.config_maps.visited()
            + self.requests.visited()
            + small.into_iter().map(|cache| cache.visited()).sum::<usize>()
            + self.roles.visited()
    }
}
