//! Watches of all resources.

use std::sync::Arc;

use api::{
    KubeVirt, MigrationPolicy, VirtualMachineInstance,
    constants::{component, label},
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
    kube_aggregator::pkg::apis::apiregistration::v1::APIService,
};
use kube::{
    Api, Client,
    api::{ApiResource, DynamicObject, GroupVersionKind},
};
use serde::{Serialize, de::DeserializeOwned};

use super::{
    Caches,
    attachments::{CachedAttachment, is_of_pod},
    claims::CachedClaim,
    installation::{AGGREGATED_ROLES, BundleCarrier, CachedRole, VM_LABELS_FILTER},
    instancetypes::{CachedInstancetype, InstancetypeRevision},
    migrations::CachedPolicy,
    namespaces::{CachedNamespace, CachedQuota},
    networks::CachedNetwork,
    nodes::CachedNode,
    pods::{CachedPod, PodIndex},
    start_revisions::{self, StartRevision},
    watched_pod::WatchedPod,
    workloads::CachedWorkload,
};
use crate::cache::{Cache, Cached, Key, Source, Watch};

/// Secrets that this process makes.
const SECRETS: [&str; 5] =
    [tls::CA_SECRET, tls::API_SERVER_SECRET, tls::API_CLIENT_SECRET, tls::CONTROLLER_SECRET, webhook_path::SECRET];

/// Watches by the controllers that depend on them.
pub(crate) struct Sources {
    /// Required by the controllers of certificates, which start first.
    pub certificates: Vec<Arc<dyn Source>>,
    /// Required by all other controllers.
    pub workloads: Vec<Arc<dyn Source>>,
    /// Also required by the controller of VMs.
    pub virtual_machines: Vec<Arc<dyn Source>>,
    /// Also required by the controller of replica sets.
    pub replica_sets: Vec<Arc<dyn Source>>,
    /// Required by none: decisions about these objects wait for each object.
    pub others: Vec<Arc<dyn Source>>,
}

impl Sources {
    /// Returns all of them.
    pub(crate) fn all(&self) -> impl Iterator<Item = Arc<dyn Source>> {
        let groups = [&self.certificates, &self.workloads, &self.virtual_machines, &self.replica_sets, &self.others];
        groups.into_iter().flatten().cloned()
    }
}

fn all<W, K>(
    cache: &Arc<Cache<K>>,
    client: &Client,
    convert: impl Fn(W) -> K + Send + Sync + 'static,
) -> Arc<dyn Source>
where
    K: Cached,
    W: kube::Resource<DynamicType = ()> + Clone + DeserializeOwned + std::fmt::Debug + Send + Sync + 'static,
{
    Arc::new(Watch::new(cache, Api::<W>::all(client.clone()), convert))
}

/// Returns the watches of all resources. Each object that RBAC names is watched by its name.
pub(crate) fn sources(caches: &Caches, client: &Client, namespace: &str) -> Sources {
    Sources {
        certificates: certificates(caches, client, namespace),
        workloads: [installation(caches, client, namespace), launcher_pods(caches, client), cluster(caches, client)]
            .into_iter()
            .flatten()
            .collect(),
        virtual_machines: virtual_machines(caches, client),
        replica_sets: vec![all(&caches.replica_sets, client, |object| object)],
        others: others(caches, client, namespace),
    }
}

fn others(caches: &Caches, client: &Client, namespace: &str) -> Vec<Arc<dyn Source>> {
    let mut sources: Vec<Arc<dyn Source>> = Vec::new();
    for name in AGGREGATED_ROLES {
        let api = Api::<ClusterRole>::all(client.clone());
        sources.push(Arc::new(Watch::new(&caches.roles, api, CachedRole::from).named(name)));
    }
    let api = Api::<ConfigMap>::namespaced(client.clone(), namespace);
    sources.push(Arc::new(Watch::new(&caches.config_maps, api, |object| object).named(VM_LABELS_FILTER)));
    sources
}

fn certificates(caches: &Caches, client: &Client, namespace: &str) -> Vec<Arc<dyn Source>> {
    let mut sources: Vec<Arc<dyn Source>> = Vec::new();
    for name in SECRETS {
        let api = Api::<Secret>::namespaced(client.clone(), namespace);
        sources.push(Arc::new(Watch::new(&caches.secrets, api, |object| object).named(name)));
    }
    let api = Api::<ConfigMap>::namespaced(client.clone(), namespace);
    sources.push(Arc::new(Watch::new(&caches.config_maps, api, |object| object).named(tls::CA_CONFIG_MAP)));
    let api = Api::<KubeVirt>::namespaced(client.clone(), namespace);
    sources.push(Arc::new(Watch::new(&caches.kubevirts, api, |object| object)));
    let api = Api::<CertificateSigningRequest>::all(client.clone());
    let signer = format!("spec.signerName={}", tls::HANDLER_SIGNER);
    sources.push(Arc::new(Watch::new(&caches.requests, api, |object| object).fields(&signer)));
    sources
}

fn installation(caches: &Caches, client: &Client, namespace: &str) -> Vec<Arc<dyn Source>> {
    let mut sources: Vec<Arc<dyn Source>> = Vec::new();
    for name in tls::API_SERVICES {
        let api = Api::<APIService>::all(client.clone());
        sources.push(Arc::new(Watch::new(&caches.api_services, api, BundleCarrier::from).named(name)));
    }
    let api = Api::<MutatingWebhookConfiguration>::all(client.clone());
    let watch = Watch::new(&caches.mutating_webhooks, api, BundleCarrier::from);
    sources.push(Arc::new(watch.named(tls::MUTATING_WEBHOOKS)));
    for name in tls::VALIDATING_WEBHOOKS {
        let api = Api::<ValidatingWebhookConfiguration>::all(client.clone());
        sources.push(Arc::new(Watch::new(&caches.validating_webhooks, api, BundleCarrier::from).named(name)));
    }
    let api = Api::<Deployment>::namespaced(client.clone(), namespace);
    sources.push(Arc::new(Watch::new(&caches.deployments, api, CachedWorkload::from)));
    let api = Api::<DaemonSet>::namespaced(client.clone(), namespace);
    sources.push(Arc::new(Watch::new(&caches.daemon_sets, api, CachedWorkload::from)));
    let api = Api::<Pod>::namespaced(client.clone(), namespace);
    let handlers = format!("{}={}", label::APP, component::VIRT_HANDLER);
    sources.push(Arc::new(Watch::new(&caches.handlers, api, CachedPod::from).labels(&handlers)));
    sources
}

fn virtual_machines(caches: &Caches, client: &Client) -> Vec<Arc<dyn Source>> {
    fn of_kind<W>(caches: &Caches, client: &Client, kind: MatchedKind) -> Arc<dyn Source>
    where
        W: kube::Resource<DynamicType = ()>
            + Clone
            + DeserializeOwned
            + Serialize
            + std::fmt::Debug
            + Send
            + Sync
            + 'static,
    {
        all::<W, _>(caches.instancetypes(kind), client, move |object| CachedInstancetype::new(kind, object))
    }
    let revisions = || Api::<ControllerRevision>::all(client.clone());
    vec![
        all(&caches.vms, client, |object| object),
        of_kind::<VirtualMachineInstancetype>(caches, client, MatchedKind::Instancetype),
        of_kind::<VirtualMachineClusterInstancetype>(caches, client, MatchedKind::ClusterInstancetype),
        of_kind::<VirtualMachinePreference>(caches, client, MatchedKind::Preference),
        of_kind::<VirtualMachineClusterPreference>(caches, client, MatchedKind::ClusterPreference),
        Arc::new(Watch::new(&caches.revisions, revisions(), InstancetypeRevision::from).labels(revision::OBJECT_KIND)),
        Arc::new(Watch::new(&caches.starts, revisions(), StartRevision::from).labels(start_revisions::LABEL)),
    ]
}

fn launcher_pods(caches: &Caches, client: &Client) -> Vec<Arc<dyn Source>> {
    let vmis = caches.vmis.clone();
    let is_of_vmi = move |pod: &CachedPod| {
        let Some(owner) = owner::controller_of_kind::<VirtualMachineInstance>(&pod.metadata) else { return false };
        let key = Key::new(pod.metadata.namespace.clone().unwrap_or_default(), owner.name.clone());
        vmis.get(&key).is_some_and(|vmi| owner::is_controlled_by(&pod.metadata, &*vmi))
    };
    let pods = caches.pods.clone();
    caches.vmis.listen(move |(former, present)| {
        // Pods that no watch shows are kept for their VMI only.
        let Some(former) = former.and_then(|former| former.metadata.uid.as_deref()) else { return };
        if present.and_then(|present| present.metadata.uid.as_deref()) != Some(former) {
            pods.forget_unseen(&PodIndex::Controller(former.to_owned()));
        }
    });
    let is_controlled = |metadata: &_| owner::controller_of_kind::<VirtualMachineInstance>(metadata).is_some();
    let api = Api::<WatchedPod>::all(client.clone());
    let watch = Watch::filtered(&caches.pods, api, is_controlled, WatchedPod::into_pod)
        .labels(&format!("{}={}", label::APP, component::VIRT_LAUNCHER))
        .keeping_unseen(is_of_vmi);
    let api = Api::<Pod>::all(client.clone());
    let attaching = format!("{}={}", label::APP, component::HOTPLUG_DISK);
    let attachments = Watch::filtered(&caches.attachments, api, is_of_pod, CachedAttachment::of).labels(&attaching);
    vec![Arc::new(watch), Arc::new(attachments)]
}

fn cluster(caches: &Caches, client: &Client) -> Vec<Arc<dyn Source>> {
    vec![
        all(&caches.vmis, client, |object| object),
        all(&caches.migrations, client, |object| object),
        all::<MigrationPolicy, _>(&caches.policies, client, CachedPolicy::from),
        all::<Node, _>(&caches.nodes, client, CachedNode::from),
        all::<PersistentVolumeClaim, _>(&caches.claims, client, CachedClaim::from),
        all::<ResourceQuota, _>(&caches.quotas, client, CachedQuota::from),
        all::<Namespace, _>(&caches.namespaces, client, CachedNamespace::from),
    ]
}

/// Returns the watch of NetworkAttachmentDefinitions, which exist only where Multus is installed.
pub(crate) fn network_definitions(caches: &Caches, client: &Client) -> Arc<dyn Source> {
    let kind = GroupVersionKind::gvk("k8s.cni.cncf.io", "v1", "NetworkAttachmentDefinition");
    let resource = ApiResource::from_gvk_with_plural(&kind, "network-attachment-definitions");
    let api = Api::<DynamicObject>::all_with(client.clone(), &resource);
    Arc::new(Watch::new(&caches.networks, api, CachedNetwork::from))
}
