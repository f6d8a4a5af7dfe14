//! Granted rights that the stories do not use, with the reason. A right that stories use, or that is not granted, must be
//! removed from the list.

use ferrovirt_e2e_cluster::audit::Justified;

/// A right that the stories never use.
const fn unused(account: &'static str, right: &'static str, reason: &'static str) -> Justified {
    Justified { account, right, sometimes: false, reason }
}

/// A right that the stories use in some runs.
const fn sometimes(account: &'static str, right: &'static str, reason: &'static str) -> Justified {
    Justified { account, right, sometimes: true, reason }
}

const API: &str = "kubevirt-apiserver";
const CONTROLLER: &str = "kubevirt-controller";
const HANDLER: &str = "kubevirt-handler";
const DEFINITIONS: &str = "ferrovirt-definitions";
const UNINSTALL: &str = "ferrovirt-uninstall";
const CLEAN_UP: &str = "ferrovirt-clean-up";

const OWNERS: &str = "the admission plugin OwnerReferencesPermissionEnforcement asks for it where it is enabled";
const SIGNER: &str = "the admission plugins for certificates ask for it, in no call of its own";
const ROTATION: &str = "certificates are renewed at 80 % of their lives, and the stories do not last so long";
const ABSENT: &str = "no story has objects of this kind, which admission reads where a VM or a volume names one";
const EVERYBODY: &str = "a role for all users gives it as well, which administrators may take away; RBAC names either";
const REMOVED: &str =
    "asked for when the KubeVirt object is deleted, which the stories do only in a cluster without other VMs";
const MOVES: &str =
    "migrations need a second node, and most stories leave the evacuation of nodes and ended migrations alone";
const COMMON: &str = "the common instance types are created by an installation, replaced by an upgrade and deleted when they are switched off";
const INSTALLED: &str = "Helm installs the definitions, and the hook finds them up to date";
const BLOCKED: &str = "asked for if the uninstall strategy is set, and no story uninstalls the chart with it";
const LATER: &str = "the hook runs after this test; `cluster run` fails when it fails";

/// The list.
pub(crate) const RIGHTS: &[Justified] = &[
    unused(API, "get *.cdi.kubevirt.io", ABSENT),
    unused(API, "get volumesnapshots.snapshot.storage.k8s.io", ABSENT),
    unused(API, "list virtualmachinebackups.backup.kubevirt.io", ABSENT),
    sometimes(API, "list kubevirts.kubevirt.io", EVERYBODY),
    sometimes(API, "get virtualmachinecluster*.instancetype.kubevirt.io", EVERYBODY),
    sometimes(API, "list virtualmachines.kubevirt.io", REMOVED),
    sometimes(API, "list virtualmachineinstancereplicasets.kubevirt.io", REMOVED),
    sometimes(CONTROLLER, "delete virtualmachines.kubevirt.io", REMOVED),
    sometimes(CONTROLLER, "delete virtualmachineinstancereplicasets.kubevirt.io", REMOVED),
    sometimes(CONTROLLER, "delete virtualmachinepools.pool.kubevirt.io", REMOVED),
    sometimes(
        CONTROLLER,
        "patch virtualmachinepools.pool.kubevirt.io",
        "only the finalizer of a pool that KubeVirt made is removed, which `make moving-test` has",
    ),
    sometimes(CONTROLLER, "list events", "only the events of launcher pods that do not start are read"),
    sometimes(CONTROLLER, "list kubevirts.kubevirt.io", EVERYBODY),
    sometimes(CONTROLLER, "list virtualmachinecluster*.instancetype.kubevirt.io", EVERYBODY),
    sometimes(CONTROLLER, "watch virtualmachinecluster*.instancetype.kubevirt.io", EVERYBODY),
    sometimes(CONTROLLER, "create virtualmachinecluster*.instancetype.kubevirt.io", COMMON),
    sometimes(CONTROLLER, "patch virtualmachinecluster*.instancetype.kubevirt.io", COMMON),
    sometimes(CONTROLLER, "delete virtualmachinecluster*.instancetype.kubevirt.io", COMMON),
    unused(
        CONTROLLER,
        "* network-attachment-definitions.k8s.cni.cncf.io",
        "read where the gate ExternalNetResourceInjection is off, which no story does",
    ),
    sometimes(CONTROLLER, "* storageprofiles.cdi.kubevirt.io", "only clusters with CDI have objects of this kind"),
    sometimes(
        CONTROLLER,
        "delete poddisruptionbudgets.policy",
        "only those of VMIs are deleted, which few stories have",
    ),
    sometimes(
        CONTROLLER,
        "get volumesnapshotcontents.snapshot.storage.k8s.io",
        "read only while a guest is frozen and its VolumeSnapshots do not show yet that they are taken, and before a restore deletes a claim",
    ),
    unused(CONTROLLER, "update *.kubevirt.io/finalizers", OWNERS),
    sometimes(API, "create virtualmachineinstancemigrations.kubevirt.io", MOVES),
    sometimes(API, "list virtualmachineinstancemigrations.kubevirt.io", MOVES),
    sometimes(CONTROLLER, "create virtualmachineinstancemigrations.kubevirt.io", MOVES),
    sometimes(CONTROLLER, "patch virtualmachineinstancemigrations.kubevirt.io", MOVES),
    sometimes(CONTROLLER, "patch virtualmachineinstancemigrations.kubevirt.io/status", MOVES),
    sometimes(CONTROLLER, "delete virtualmachineinstancemigrations.kubevirt.io", MOVES),
    unused(CONTROLLER, "approve signers.certificates.k8s.io kubevirt.io/virt-handler", SIGNER),
    unused(CONTROLLER, "sign signers.certificates.k8s.io kubevirt.io/virt-handler", SIGNER),
    unused(CONTROLLER, "patch secrets *", ROTATION),
    unused(CONTROLLER, "patch configmaps kubevirt-ca", ROTATION),
    unused(
        CONTROLLER,
        "escalate clusterroles.rbac.authorization.k8s.io *",
        "the API server asks for it when a role is patched, in no call of its own",
    ),
    unused(
        CONTROLLER,
        "* leases.coordination.k8s.io virt-controller-*",
        "former replicas hold their leases until they end, whatever their number of shards; the stories have four",
    ),
    sometimes(HANDLER, "list kubevirts.kubevirt.io", EVERYBODY),
    sometimes(
        HANDLER,
        "watch certificatesigningrequests.certificates.k8s.io",
        "only a request that is not answered yet when it is first read is watched",
    ),
    unused(DEFINITIONS, "create customresourcedefinitions.apiextensions.k8s.io", INSTALLED),
    unused(DEFINITIONS, "patch customresourcedefinitions.apiextensions.k8s.io *", INSTALLED),
    unused(UNINSTALL, "list virtualmachines.kubevirt.io", BLOCKED),
    unused(UNINSTALL, "list virtualmachineinstancereplicasets.kubevirt.io", BLOCKED),
    unused(UNINSTALL, "delete kubevirts.kubevirt.io kubevirt", LATER),
    unused(CLEAN_UP, "* *", LATER),
    unused(CLEAN_UP, "* * *", LATER),
];
