//! What the controllers observe: caches of the cluster, reduced to what is read, and who is told of changes.

use std::{collections::BTreeMap, sync::Arc};

use api::{
    KubeVirt, VirtualMachine, VirtualMachineInstance, VirtualMachineInstanceReplicaSet,
    constants::{annotation, component, label},
    instancetype::{
        MatchedKind, VirtualMachineClusterInstancetype, VirtualMachineClusterPreference, VirtualMachineInstancetype,
        VirtualMachinePreference, revision,
    },
    owner, tls, webhook_path,
};
use k8s_openapi::{
    api::{
        admissionregistration::v1::{MutatingWebhookConfiguration, ValidatingWebhookConfiguration},
        apps::v1::{ControllerRevision, DaemonSet, Deployment},
        certificates::v1::CertificateSigningRequest,
        core::v1::{ConfigMap, Namespace, Node, PersistentVolumeClaim, Pod, ResourceQuota, Secret},
        rbac::v1::ClusterRole,
    },
    apimachinery::pkg::apis::meta::v1::ObjectMeta,
    kube_aggregator::pkg::apis::apiregistration::v1::APIService,
};
use kube::{
    Api, Client,
    api::{ApiResource, DynamicObject, GroupVersionKind},
    runtime::watcher,
};
use serde_json::Value;

use crate::{
    kubevirt,
    runtime::{Cache, Cached, Key, Kind, cache::trim_meta, executor::Answers},
    views::{
        CaBundleView, ClaimView, DefinitionView, MatchedView, NamespaceView, NodeView, PodView, QuotaView,
        RevisionView, RoleView, StartView, WorkloadView,
    },
    vm,
    watched_pod::WatchedPod,
};

impl Cached for VirtualMachine {
    fn meta(&self) -> &ObjectMeta {
        &self.metadata
    }
    fn trim(&mut self) {
        trim_meta(&mut self.metadata);
    }
}

impl Cached for VirtualMachineInstance {
    fn meta(&self) -> &ObjectMeta {
        &self.metadata
    }
    fn trim(&mut self) {
        trim_meta(&mut self.metadata);
    }
}

impl Cached for VirtualMachineInstanceReplicaSet {
    fn meta(&self) -> &ObjectMeta {
        &self.metadata
    }
    fn trim(&mut self) {
        trim_meta(&mut self.metadata);
    }
}

impl Cached for KubeVirt {
    fn meta(&self) -> &ObjectMeta {
        &self.metadata
    }
    fn trim(&mut self) {
        trim_meta(&mut self.metadata);
    }
}

impl Cached for Secret {
    fn meta(&self) -> &ObjectMeta {
        &self.metadata
    }
    fn trim(&mut self) {
        trim_meta(&mut self.metadata);
    }
}

impl Cached for ConfigMap {
    fn meta(&self) -> &ObjectMeta {
        &self.metadata
    }
    fn trim(&mut self) {
        trim_meta(&mut self.metadata);
    }
}

impl Cached for CertificateSigningRequest {
    fn meta(&self) -> &ObjectMeta {
        &self.metadata
    }
    fn trim(&mut self) {
        trim_meta(&mut self.metadata);
    }
}

/// All caches.
#[derive(Default)]
pub struct World {
    /// VirtualMachines.
    pub vms: Arc<Cache<VirtualMachine>>,
    /// Machines.
    pub instances: Arc<Cache<VirtualMachineInstance>>,
    /// Replica sets of machines.
    pub replica_sets: Arc<Cache<VirtualMachineInstanceReplicaSet>>,
    /// Instance types and preferences, a cache a kind, in the order of [`MatchedKind::ALL`].
    pub matched: [Arc<Cache<MatchedView>>; 4],
    /// Copies of instance types and preferences.
    pub revisions: Arc<Cache<RevisionView>>,
    /// What is kept of the starts of VMs.
    pub starts: Arc<Cache<StartView>>,
    /// Launcher pods, found by the UID of their machine.
    pub pods: Arc<Cache<PodView>>,
    /// Pods of the node agents.
    pub handlers: Arc<Cache<PodView>>,
    /// Nodes.
    pub nodes: Arc<Cache<NodeView>>,
    /// Persistent volume claims.
    pub claims: Arc<Cache<ClaimView>>,
    /// Resource quotas.
    pub quotas: Arc<Cache<QuotaView>>,
    /// Definitions of networks; empty as long as nobody asks for them, see [`World::follow_definitions`].
    pub definitions: Arc<Cache<DefinitionView>>,
    /// Namespaces.
    pub namespaces: Arc<Cache<NamespaceView>>,
    /// Deployments of the install namespace.
    pub deployments: Arc<Cache<WorkloadView>>,
    /// DaemonSets of the install namespace.
    pub daemon_sets: Arc<Cache<WorkloadView>>,
    /// The configuration object.
    pub kubevirts: Arc<Cache<KubeVirt>>,
    /// Secrets that this process makes.
    pub secrets: Arc<Cache<Secret>>,
    /// The CA bundle.
    pub config_maps: Arc<Cache<ConfigMap>>,
    /// Requests for certificates of node agents.
    pub requests: Arc<Cache<CertificateSigningRequest>>,
    /// API services that carry the CA bundle.
    pub api_services: Arc<Cache<CaBundleView>>,
    /// Mutating webhooks that carry the CA bundle and the path segment.
    pub mutating_webhooks: Arc<Cache<CaBundleView>>,
    /// Validating webhooks that carry the CA bundle and the path segment.
    pub validating_webhooks: Arc<Cache<CaBundleView>>,
    /// Cluster roles that may be part of those that each cluster has.
    pub roles: Arc<Cache<RoleView>>,
}

/// Secrets that are followed.
const SECRETS: [&str; 5] =
    [tls::CA_SECRET, tls::API_SERVER_SECRET, tls::API_CLIENT_SECRET, tls::CONTROLLER_SECRET, webhook_path::SECRET];

/// Objects on a page of a list. An object can have 1.5 MiB, and a page is held as a whole, beside those of other watches.
const PAGE: u32 = 50;

/// The way all kinds are listed and watched.
fn paged() -> watcher::Config {
    watcher::Config::default().page_size(PAGE)
}

impl World {
    /// Starts all watches. Each object that must be named in RBAC is watched by its name.
    pub fn follow(&self, client: &Client, namespace: &str) {
        let all = paged();
        let named = |name: &str| paged().fields(&format!("metadata.name={name}"));
        let labelled = |value: &str| paged().labels(&format!("{}={value}", label::APP));

        tokio::spawn(self.vms.clone().follow(Api::all(client.clone()), all.clone(), |object| object));
        tokio::spawn(self.instances.clone().follow(Api::all(client.clone()), all.clone(), |object| object));
        tokio::spawn(self.replica_sets.clone().follow(Api::all(client.clone()), all.clone(), |object| object));
        let kind = MatchedKind::Instancetype;
        let api = Api::<VirtualMachineInstancetype>::all(client.clone());
        let view = move |object| MatchedView::new(kind, object);
        tokio::spawn(self.matched(kind).clone().follow(api, all.clone(), view));
        let kind = MatchedKind::ClusterInstancetype;
        let api = Api::<VirtualMachineClusterInstancetype>::all(client.clone());
        let view = move |object| MatchedView::new(kind, object);
        tokio::spawn(self.matched(kind).clone().follow(api, all.clone(), view));
        let kind = MatchedKind::Preference;
        let api = Api::<VirtualMachinePreference>::all(client.clone());
        let view = move |object| MatchedView::new(kind, object);
        tokio::spawn(self.matched(kind).clone().follow(api, all.clone(), view));
        let kind = MatchedKind::ClusterPreference;
        let api = Api::<VirtualMachineClusterPreference>::all(client.clone());
        let view = move |object| MatchedView::new(kind, object);
        tokio::spawn(self.matched(kind).clone().follow(api, all.clone(), view));
        tokio::spawn(self.revisions.clone().follow(
            Api::<ControllerRevision>::all(client.clone()),
            paged().labels(revision::OBJECT_KIND),
            RevisionView::from,
        ));
        tokio::spawn(self.starts.clone().follow(
            Api::<ControllerRevision>::all(client.clone()),
            paged().labels(vm::revision::LABEL),
            StartView::from,
        ));
        let instances = self.instances.clone();
        tokio::spawn(self.pods.clone().follow_some(
            Api::<WatchedPod>::all(client.clone()),
            labelled(component::VIRT_LAUNCHER),
            WatchedPod::into_view,
            move |pod| Self::is_of_vmi(&instances, pod),
        ));
        let pods = self.pods.clone();
        self.instances.listen(move |(former, present)| {
            // Nobody asks any more for a pod that its watch does not show.
            let Some(former) = former.and_then(|former| former.metadata.uid.as_deref()) else { return };
            if present.and_then(|present| present.metadata.uid.as_deref()) != Some(former) {
                pods.forget_unseen(former);
            }
        });
        tokio::spawn(self.handlers.clone().follow(
            Api::<Pod>::namespaced(client.clone(), namespace),
            labelled(component::VIRT_HANDLER),
            PodView::from,
        ));
        tokio::spawn(self.nodes.clone().follow(Api::<Node>::all(client.clone()), all.clone(), NodeView::from));
        tokio::spawn(self.claims.clone().follow(
            Api::<PersistentVolumeClaim>::all(client.clone()),
            all.clone(),
            ClaimView::from,
        ));
        tokio::spawn(self.quotas.clone().follow(
            Api::<ResourceQuota>::all(client.clone()),
            all.clone(),
            QuotaView::from,
        ));
        tokio::spawn(self.namespaces.clone().follow(
            Api::<Namespace>::all(client.clone()),
            all.clone(),
            NamespaceView::from,
        ));
        tokio::spawn(self.deployments.clone().follow(
            Api::<Deployment>::namespaced(client.clone(), namespace),
            all.clone(),
            WorkloadView::from,
        ));
        tokio::spawn(self.daemon_sets.clone().follow(
            Api::<DaemonSet>::namespaced(client.clone(), namespace),
            all.clone(),
            WorkloadView::from,
        ));
        tokio::spawn(self.kubevirts.clone().follow(
            Api::<KubeVirt>::namespaced(client.clone(), namespace),
            all.clone(),
            |object| object,
        ));
        let signer = paged().fields(&format!("spec.signerName={}", tls::HANDLER_SIGNER));
        tokio::spawn(self.requests.clone().follow(
            Api::<CertificateSigningRequest>::all(client.clone()),
            signer,
            |object| object,
        ));
        for name in SECRETS {
            let api = Api::<Secret>::namespaced(client.clone(), namespace);
            tokio::spawn(self.secrets.clone().follow_one(api, named(name), name, |object| object));
        }
        let api = Api::<ConfigMap>::namespaced(client.clone(), namespace);
        tokio::spawn(self.config_maps.clone().follow_one(
            api,
            named(tls::CA_CONFIG_MAP),
            tls::CA_CONFIG_MAP,
            |object| object,
        ));
        for name in tls::API_SERVICES {
            let api = Api::<APIService>::all(client.clone());
            tokio::spawn(self.api_services.clone().follow_one(api, named(name), name, CaBundleView::from));
        }
        let api = Api::<MutatingWebhookConfiguration>::all(client.clone());
        let name = tls::MUTATING_WEBHOOKS;
        tokio::spawn(self.mutating_webhooks.clone().follow_one(api, named(name), name, CaBundleView::from));
        for name in tls::VALIDATING_WEBHOOKS {
            let api = Api::<ValidatingWebhookConfiguration>::all(client.clone());
            tokio::spawn(self.validating_webhooks.clone().follow_one(api, named(name), name, CaBundleView::from));
        }
        for name in kubevirt::AGGREGATED_ROLES {
            let api = Api::<ClusterRole>::all(client.clone());
            tokio::spawn(self.roles.clone().follow_one(api, named(name), name, RoleView::from));
        }
    }

    /// Watches the definitions of networks, for ever. They exist only where Multus is installed.
    pub async fn follow_definitions(&self, client: Client) {
        let kind = GroupVersionKind::gvk("k8s.cni.cncf.io", "v1", "NetworkAttachmentDefinition");
        let resource = ApiResource::from_gvk_with_plural(&kind, "network-attachment-definitions");
        let api = Api::<DynamicObject>::all_with(client, &resource);
        self.definitions.clone().follow(api, paged(), DefinitionView::from).await;
    }

    /// Waits until everything that certificates depend on has been read.
    pub async fn certificates_synced(&self) {
        self.secrets.synced_all(SECRETS.len()).await;
        self.config_maps.synced().await;
        self.kubevirts.synced().await;
        self.requests.synced().await;
    }

    /// Waits until everything has been read, but for the roles: what is done about them can wait for each.
    pub async fn synced(&self) {
        self.certificates_synced().await;
        self.vms.synced().await;
        self.instances.synced().await;
        self.replica_sets.synced().await;
        for cache in &self.matched {
            cache.synced().await;
        }
        self.revisions.synced().await;
        self.starts.synced().await;
        self.pods.synced().await;
        self.handlers.synced().await;
        self.nodes.synced().await;
        self.claims.synced().await;
        self.quotas.synced().await;
        self.namespaces.synced().await;
        self.deployments.synced().await;
        self.daemon_sets.synced().await;
        self.api_services.synced_all(tls::API_SERVICES.len()).await;
        self.mutating_webhooks.synced().await;
        self.validating_webhooks.synced_all(tls::VALIDATING_WEBHOOKS.len()).await;
    }

    /// Objects of a kind that VMs name.
    #[must_use]
    pub fn matched(&self, kind: MatchedKind) -> &Arc<Cache<MatchedView>> {
        let [instancetypes, cluster_instancetypes, preferences, cluster_preferences] = &self.matched;
        match kind {
            MatchedKind::Instancetype => instancetypes,
            MatchedKind::ClusterInstancetype => cluster_instancetypes,
            MatchedKind::Preference => preferences,
            MatchedKind::ClusterPreference => cluster_preferences,
        }
    }

    /// Launcher pods controlled by a machine. A UID alone is not enough: whoever makes a pod writes its owners.
    #[must_use]
    pub fn pods_of(&self, instance: &VirtualMachineInstance) -> Vec<Arc<PodView>> {
        let mut pods = self.pods.owned_by(instance.metadata.uid.as_deref().unwrap_or_default());
        pods.retain(|pod| owner::is_controlled_by(&pod.metadata, instance));
        pods
    }

    /// UIDs of the pods in the status of a VMI without a known pod, as far as the end of the pod was not seen. No watch shows a pod
    /// whose label was removed, so such a pod may still run.
    #[must_use]
    pub fn missing_pods(&self, instance: &VirtualMachineInstance) -> Vec<String> {
        let Some(status) = instance.status.as_ref().filter(|status| !status.active_pods.is_empty()) else {
            return Vec::new();
        };
        if !self.pods_of(instance).is_empty() {
            return Vec::new();
        }
        status.active_pods.keys().filter(|uid| !self.pods.is_gone(uid)).cloned().collect()
    }

    /// True for a pod of a VMI that exists.
    fn is_of_vmi(instances: &Cache<VirtualMachineInstance>, pod: &PodView) -> bool {
        let Some(owner) = owner::controller_of_kind::<VirtualMachineInstance>(&pod.metadata) else { return false };
        let key = Key::new(pod.metadata.namespace.clone().unwrap_or_default(), owner.name.clone());
        instances.get(&key).is_some_and(|instance| owner::is_controlled_by(&pod.metadata, &*instance))
    }
}

fn typed<T: serde::de::DeserializeOwned>(kind: Kind, object: Value) -> Option<T> {
    match serde_json::from_value(object) {
        Ok(object) => Some(object),
        Err(error) => {
            // The watch brings the object anyway.
            tracing::warn!(resource = kind.plural(), %error, "answer of the API server cannot be read");
            None
        }
    }
}

impl Answers for World {
    fn written(&self, kind: Kind, object: Value) {
        match kind {
            Kind::VirtualMachine => typed(kind, object).into_iter().for_each(|object| self.vms.observe(object)),
            Kind::Instance => typed(kind, object).into_iter().for_each(|object| self.instances.observe(object)),
            Kind::ReplicaSet => typed(kind, object).into_iter().for_each(|object| self.replica_sets.observe(object)),
            Kind::Pod => {
                typed::<WatchedPod>(kind, object)
                    .and_then(WatchedPod::into_view)
                    .into_iter()
                    .for_each(|view| self.pods.observe(view));
            }
            Kind::ControllerRevision => typed::<ControllerRevision>(kind, object).into_iter().for_each(|object| {
                if object.metadata.labels.as_ref().is_some_and(|labels| labels.contains_key(vm::revision::LABEL)) {
                    self.starts.observe(object.into());
                } else {
                    self.revisions.observe(object.into());
                }
            }),
            Kind::Secret => typed(kind, object).into_iter().for_each(|object| self.secrets.observe(object)),
            Kind::ConfigMap => typed(kind, object).into_iter().for_each(|object| self.config_maps.observe(object)),
            Kind::Node => typed::<Node>(kind, object).into_iter().for_each(|object| self.nodes.observe(object.into())),
            Kind::KubeVirt => typed(kind, object).into_iter().for_each(|object| self.kubevirts.observe(object)),
            Kind::CertificateSigningRequest => {
                typed(kind, object).into_iter().for_each(|object| self.requests.observe(object));
            }
            Kind::ApiService => typed::<APIService>(kind, object)
                .into_iter()
                .for_each(|object| self.api_services.observe(object.into())),
            Kind::MutatingWebhooks => typed::<MutatingWebhookConfiguration>(kind, object)
                .into_iter()
                .for_each(|object| self.mutating_webhooks.observe(object.into())),
            Kind::ValidatingWebhooks => typed::<ValidatingWebhookConfiguration>(kind, object)
                .into_iter()
                .for_each(|object| self.validating_webhooks.observe(object.into())),
            Kind::ClusterRole => {
                typed::<ClusterRole>(kind, object).into_iter().for_each(|object| self.roles.observe(object.into()));
            }
        }
    }

    fn deleted(&self, kind: Kind, namespace: Option<&str>, name: &str, uid: Option<&str>) {
        let key = Key::new(namespace.unwrap_or_default(), name);
        match kind {
            Kind::VirtualMachine => self.vms.observe_deleted(&key, uid),
            Kind::Instance => self.instances.observe_deleted(&key, uid),
            Kind::ReplicaSet => self.replica_sets.observe_deleted(&key, uid),
            Kind::Pod => self.pods.observe_deleted(&key, uid),
            Kind::ControllerRevision => {
                self.revisions.observe_deleted(&key, uid);
                self.starts.observe_deleted(&key, uid);
            }
            Kind::CertificateSigningRequest => self.requests.observe_deleted(&key, uid),
            // Nothing else is deleted by us.
            _ => {}
        }
    }
}

/// Annotations of pods that are read.
pub const POD_ANNOTATIONS: &[&str] = &[
    annotation::MEMORY_OVERHEAD_BYTES,
    annotation::MIGRATION_TRANSPORT_UNIX,
    annotation::BACKUP_PRE_CONTAINER,
    annotation::DESCHEDULER_EVICT,
    annotation::DESCHEDULER_PREFER_NO_EVICTION,
    annotation::DESCHEDULER_EVICTION_IN_PROGRESS,
];

/// Copies the entries of a map whose keys are wanted.
#[must_use]
pub fn keep(map: Option<&BTreeMap<String, String>>, wanted: &[&str]) -> Option<BTreeMap<String, String>> {
    let kept: BTreeMap<String, String> = map?
        .iter()
        .filter(|(key, _)| wanted.contains(&key.as_str()))
        .map(|(key, value)| (key.clone(), value.clone()))
        .collect();
    (!kept.is_empty()).then_some(kept)
}
