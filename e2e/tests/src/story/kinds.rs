//! API resources of the kinds that stories use.

use kube::api::{ApiResource, GroupVersionKind};

/// Returns the resource of a kind, by its name or kubectl's short name. Unknown kinds are of the core group.
pub(super) fn resource(kind: &str) -> ApiResource {
    let (group, version, kind, plural) = match kind {
        "vm" | "VirtualMachine" => ("kubevirt.io", "v1", "VirtualMachine", "virtualmachines"),
        "vmi" | "VirtualMachineInstance" => ("kubevirt.io", "v1", "VirtualMachineInstance", "virtualmachineinstances"),
        "vmirs" | "VirtualMachineInstanceReplicaSet" => {
            ("kubevirt.io", "v1", "VirtualMachineInstanceReplicaSet", "virtualmachineinstancereplicasets")
        }
        "VirtualMachineInstancePreset" => {
            ("kubevirt.io", "v1", "VirtualMachineInstancePreset", "virtualmachineinstancepresets")
        }
        "KubeVirt" => ("kubevirt.io", "v1", "KubeVirt", "kubevirts"),
        "VirtualMachineInstancetype" => {
            ("instancetype.kubevirt.io", "v1beta1", "VirtualMachineInstancetype", "virtualmachineinstancetypes")
        }
        "VirtualMachineClusterInstancetype" => (
            "instancetype.kubevirt.io",
            "v1beta1",
            "VirtualMachineClusterInstancetype",
            "virtualmachineclusterinstancetypes",
        ),
        "VirtualMachineClusterPreference" => (
            "instancetype.kubevirt.io",
            "v1beta1",
            "VirtualMachineClusterPreference",
            "virtualmachineclusterpreferences",
        ),
        "VirtualMachinePreference" => {
            ("instancetype.kubevirt.io", "v1beta1", "VirtualMachinePreference", "virtualmachinepreferences")
        }
        "MigrationPolicy" => ("migrations.kubevirt.io", "v1alpha1", "MigrationPolicy", "migrationpolicies"),
        "vmim" | "VirtualMachineInstanceMigration" => {
            ("kubevirt.io", "v1", "VirtualMachineInstanceMigration", "virtualmachineinstancemigrations")
        }
        "vmpool" | "VirtualMachinePool" => ("pool.kubevirt.io", "v1beta1", "VirtualMachinePool", "virtualmachinepools"),
        "VirtualMachineClone" => ("clone.kubevirt.io", "v1beta1", "VirtualMachineClone", "virtualmachineclones"),
        "VirtualMachineSnapshot" => {
            ("snapshot.kubevirt.io", "v1beta1", "VirtualMachineSnapshot", "virtualmachinesnapshots")
        }
        "VirtualMachineSnapshotContent" => {
            ("snapshot.kubevirt.io", "v1beta1", "VirtualMachineSnapshotContent", "virtualmachinesnapshotcontents")
        }
        "VirtualMachineRestore" => {
            ("snapshot.kubevirt.io", "v1beta1", "VirtualMachineRestore", "virtualmachinerestores")
        }
        "VirtualMachineExport" => ("export.kubevirt.io", "v1", "VirtualMachineExport", "virtualmachineexports"),
        "VolumeSnapshot" => ("snapshot.storage.k8s.io", "v1", "VolumeSnapshot", "volumesnapshots"),
        "VolumeSnapshotContent" => ("snapshot.storage.k8s.io", "v1", "VolumeSnapshotContent", "volumesnapshotcontents"),
        "DataVolume" => ("cdi.kubevirt.io", "v1beta1", "DataVolume", "datavolumes"),
        "DataSource" => ("cdi.kubevirt.io", "v1beta1", "DataSource", "datasources"),
        "StorageClass" => ("storage.k8s.io", "v1", "StorageClass", "storageclasses"),
        "PodDisruptionBudget" => ("policy", "v1", "PodDisruptionBudget", "poddisruptionbudgets"),
        "PriorityClass" => ("scheduling.k8s.io", "v1", "PriorityClass", "priorityclasses"),
        "CustomResourceDefinition" => {
            ("apiextensions.k8s.io", "v1", "CustomResourceDefinition", "customresourcedefinitions")
        }
        "NetworkAttachmentDefinition" => {
            ("k8s.cni.cncf.io", "v1", "NetworkAttachmentDefinition", "network-attachment-definitions")
        }
        "Deployment" => ("apps", "v1", "Deployment", "deployments"),
        "DaemonSet" => ("apps", "v1", "DaemonSet", "daemonsets"),
        "MutatingWebhookConfiguration" => {
            ("admissionregistration.k8s.io", "v1", "MutatingWebhookConfiguration", "mutatingwebhookconfigurations")
        }
        "ValidatingWebhookConfiguration" => {
            ("admissionregistration.k8s.io", "v1", "ValidatingWebhookConfiguration", "validatingwebhookconfigurations")
        }
        "MutatingAdmissionPolicy" => {
            ("admissionregistration.k8s.io", "v1", "MutatingAdmissionPolicy", "mutatingadmissionpolicies")
        }
        "MutatingAdmissionPolicyBinding" => {
            ("admissionregistration.k8s.io", "v1", "MutatingAdmissionPolicyBinding", "mutatingadmissionpolicybindings")
        }
        "APIService" => ("apiregistration.k8s.io", "v1", "APIService", "apiservices"),
        "EndpointSlice" => ("discovery.k8s.io", "v1", "EndpointSlice", "endpointslices"),
        "HorizontalPodAutoscaler" => ("autoscaling", "v2", "HorizontalPodAutoscaler", "horizontalpodautoscalers"),
        "Job" => ("batch", "v1", "Job", "jobs"),
        "ControllerRevision" => ("apps", "v1", "ControllerRevision", "controllerrevisions"),
        "Role" => ("rbac.authorization.k8s.io", "v1", "Role", "roles"),
        "RoleBinding" => ("rbac.authorization.k8s.io", "v1", "RoleBinding", "rolebindings"),
        "ClusterRole" => ("rbac.authorization.k8s.io", "v1", "ClusterRole", "clusterroles"),
        "Event" => ("", "v1", "Event", "events"),
        core => return ApiResource::from_gvk(&GroupVersionKind::gvk("", "v1", core)),
    };
    ApiResource::from_gvk_with_plural(&GroupVersionKind::gvk(group, version, kind), plural)
}
