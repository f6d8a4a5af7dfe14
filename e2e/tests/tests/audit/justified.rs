//! Rights that are granted although the stories do not use them, with the reason. A right that the stories come to use, or
//! that is granted no more, has to go from here.

use ferrovirt_e2e_cluster::audit::Justified;

/// A right that the stories never use.
const fn unused(account: &'static str, right: &'static str, reason: &'static str) -> Justified {
    Justified { account, right, sometimes: false, reason }
}

/// A right that the stories use in some runs only.
const fn sometimes(account: &'static str, right: &'static str, reason: &'static str) -> Justified {
    Justified { account, right, sometimes: true, reason }
}

const CONTROLLER: &str = "kubevirt-controller";
const CLEAN_UP: &str = "ferrovirt-clean-up";

const OWNERS: &str = "the admission plugin OwnerReferencesPermissionEnforcement asks for it where it is enabled";
const SIGNER: &str = "the admission plugins for certificates ask for it, in no call of its own";
const LATER: &str = "the hook runs after this test; `cluster run` fails when it fails";

/// The list.
pub(crate) const RIGHTS: &[Justified] = &[
    unused(CONTROLLER, "update virtualmachines.kubevirt.io/finalizers", OWNERS),
    unused(CONTROLLER, "update virtualmachineinstances.kubevirt.io/finalizers", OWNERS),
    unused(CONTROLLER, "update virtualmachineinstancereplicasets.kubevirt.io/finalizers", OWNERS),
    unused(CONTROLLER, "approve signers.certificates.k8s.io kubevirt.io/virt-handler", SIGNER),
    unused(CONTROLLER, "sign signers.certificates.k8s.io kubevirt.io/virt-handler", SIGNER),
    unused(
        CONTROLLER,
        "escalate clusterroles.rbac.authorization.k8s.io *",
        "the API server asks for it when a role is patched, in no call of its own",
    ),
    unused(CLEAN_UP, "* *", LATER),
    unused(CLEAN_UP, "* * *", LATER),
];
