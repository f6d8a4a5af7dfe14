//! The kinds of objects that controllers write.

use api::instancetype::{self, MatchedKind};
use k8s_openapi::{
    api::core::v1::ObjectReference,
    apimachinery::pkg::apis::meta::v1::{ObjectMeta, OwnerReference},
};

/// `apiVersion` of snapshots of VMs and their restores.
const VM_SNAPSHOTS: &str = "snapshot.kubevirt.io/v1beta1";

/// Kinds of objects that controllers write.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) enum Kind {
    /// `v1` Pod.
    Pod,
    /// `v1` Secret.
    Secret,
    /// `v1` ConfigMap.
    ConfigMap,
    /// `v1` PersistentVolumeClaim.
    Claim,
    /// `v1` PersistentVolume.
    Volume,
    /// `v1` Node.
    Node,
    /// `policy/v1` PodDisruptionBudget.
    DisruptionBudget,
    /// `kubevirt.io/v1` VirtualMachine.
    VirtualMachine,
    /// `kubevirt.io/v1` VirtualMachineInstance.
    Instance,
    /// `kubevirt.io/v1` VirtualMachineInstanceReplicaSet.
    ReplicaSet,
    /// `pool.kubevirt.io/v1beta1` VirtualMachinePool.
    Pool,
    /// `kubevirt.io/v1` VirtualMachineInstanceMigration.
    Migration,
    /// `kubevirt.io/v1` KubeVirt.
    KubeVirt,
    /// `apps/v1` ControllerRevision.
    ControllerRevision,
    /// `certificates.k8s.io/v1` CertificateSigningRequest.
    CertificateSigningRequest,
    /// `apiregistration.k8s.io/v1` APIService.
    ApiService,
    /// `admissionregistration.k8s.io/v1` MutatingWebhookConfiguration.
    MutatingWebhooks,
    /// `admissionregistration.k8s.io/v1` ValidatingWebhookConfiguration.
    ValidatingWebhooks,
    /// `rbac.authorization.k8s.io/v1` ClusterRole.
    ClusterRole,
    /// `snapshot.kubevirt.io/v1beta1` VirtualMachineSnapshot.
    VmSnapshot,
    /// `snapshot.kubevirt.io/v1beta1` VirtualMachineSnapshotContent.
    VmSnapshotContent,
    /// `snapshot.kubevirt.io/v1beta1` VirtualMachineRestore.
    VmRestore,
    /// `clone.kubevirt.io/v1beta1` VirtualMachineClone.
    VmClone,
    /// `snapshot.storage.k8s.io/v1` VolumeSnapshot.
    VolumeSnapshot,
    /// `cdi.kubevirt.io/v1beta1` DataVolume.
    DataVolume,
    /// `cdi.kubevirt.io/v1beta1` DataSource.
    DataSource,
    /// `instancetype.kubevirt.io/v1beta1` VirtualMachineClusterInstancetype.
    ClusterInstancetype,
    /// `instancetype.kubevirt.io/v1beta1` VirtualMachineClusterPreference.
    ClusterPreference,
}

impl Kind {
    /// Returns `apiVersion`, `kind` and plural name.
    fn names(self) -> (&'static str, &'static str, &'static str) {
        let named = |kind: MatchedKind| (instancetype::API_VERSION, kind.kind(), kind.plural());
        match self {
            Self::Pod => ("v1", "Pod", "pods"),
            Self::Secret => ("v1", "Secret", "secrets"),
            Self::ConfigMap => ("v1", "ConfigMap", "configmaps"),
            Self::Claim => ("v1", "PersistentVolumeClaim", "persistentvolumeclaims"),
            Self::Volume => ("v1", "PersistentVolume", "persistentvolumes"),
            Self::Node => ("v1", "Node", "nodes"),
            Self::DisruptionBudget => ("policy/v1", "PodDisruptionBudget", "poddisruptionbudgets"),
            Self::VirtualMachine => ("kubevirt.io/v1", "VirtualMachine", "virtualmachines"),
            Self::Instance => ("kubevirt.io/v1", "VirtualMachineInstance", "virtualmachineinstances"),
            Self::ReplicaSet => {
                ("kubevirt.io/v1", "VirtualMachineInstanceReplicaSet", "virtualmachineinstancereplicasets")
            }
            Self::Pool => ("pool.kubevirt.io/v1beta1", "VirtualMachinePool", "virtualmachinepools"),
            Self::Migration => {
                ("kubevirt.io/v1", "VirtualMachineInstanceMigration", "virtualmachineinstancemigrations")
            }
            Self::KubeVirt => ("kubevirt.io/v1", "KubeVirt", "kubevirts"),
            Self::ControllerRevision => ("apps/v1", "ControllerRevision", "controllerrevisions"),
            Self::CertificateSigningRequest => {
                ("certificates.k8s.io/v1", "CertificateSigningRequest", "certificatesigningrequests")
            }
            Self::ApiService => ("apiregistration.k8s.io/v1", "APIService", "apiservices"),
            Self::MutatingWebhooks => {
                ("admissionregistration.k8s.io/v1", "MutatingWebhookConfiguration", "mutatingwebhookconfigurations")
            }
            Self::ValidatingWebhooks => {
                ("admissionregistration.k8s.io/v1", "ValidatingWebhookConfiguration", "validatingwebhookconfigurations")
            }
            Self::ClusterRole => ("rbac.authorization.k8s.io/v1", "ClusterRole", "clusterroles"),
            Self::VmSnapshot => (VM_SNAPSHOTS, "VirtualMachineSnapshot", "virtualmachinesnapshots"),
            Self::VmSnapshotContent => {
                (VM_SNAPSHOTS, "VirtualMachineSnapshotContent", "virtualmachinesnapshotcontents")
            }
            Self::VmClone => ("clone.kubevirt.io/v1beta1", "VirtualMachineClone", "virtualmachineclones"),
            Self::VmRestore => (VM_SNAPSHOTS, "VirtualMachineRestore", "virtualmachinerestores"),
            Self::VolumeSnapshot => ("snapshot.storage.k8s.io/v1", "VolumeSnapshot", "volumesnapshots"),
            Self::DataVolume => ("cdi.kubevirt.io/v1beta1", "DataVolume", "datavolumes"),
            Self::DataSource => ("cdi.kubevirt.io/v1beta1", "DataSource", "datasources"),
            Self::ClusterInstancetype => named(MatchedKind::ClusterInstancetype),
            Self::ClusterPreference => named(MatchedKind::ClusterPreference),
        }
    }

    /// Returns the `apiVersion`.
    #[must_use]
    pub(crate) fn api_version(self) -> &'static str {
        self.names().0
    }

    /// Returns the `kind`.
    #[must_use]
    pub(crate) fn kind(self) -> &'static str {
        self.names().1
    }

    /// Returns the path of the collection, in a namespace or cluster-wide.
    #[must_use]
    pub(crate) fn path(self, namespace: Option<&str>) -> String {
        let (api_version, _, plural) = self.names();
        let prefix = if api_version.contains('/') { "/apis" } else { "/api" };
        match namespace {
            Some(namespace) => format!("{prefix}/{api_version}/namespaces/{namespace}/{plural}"),
            None => format!("{prefix}/{api_version}/{plural}"),
        }
    }

    /// Returns the plural name, which metrics use.
    #[must_use]
    pub(crate) fn plural(self) -> &'static str {
        self.names().2
    }

    /// Returns a controller reference to an object of this kind.
    #[must_use]
    pub(crate) fn owner_reference(self, meta: &ObjectMeta) -> OwnerReference {
        OwnerReference {
            api_version: self.api_version().to_owned(),
            kind: self.kind().to_owned(),
            name: meta.name.clone().unwrap_or_default(),
            uid: meta.uid.clone().unwrap_or_default(),
            controller: Some(true),
            block_owner_deletion: Some(true),
        }
    }

    /// Returns the reference of an event about an object of this kind.
    #[must_use]
    pub(crate) fn reference(self, meta: &ObjectMeta) -> ObjectReference {
        ObjectReference {
            api_version: Some(self.api_version().to_owned()),
            kind: Some(self.kind().to_owned()),
            name: meta.name.clone(),
            namespace: meta.namespace.clone(),
            uid: meta.uid.clone(),
            resource_version: meta.resource_version.clone(),
            field_path: None,
        }
    }
}
