//! The claims that are made for the state of VMIs.

use std::collections::BTreeMap;

use api::{
    VirtualMachine, VirtualMachineInstance, VirtualMachineInstanceMigration, names, owner,
    persistent_state::{self, LABEL, MIGRATION_LABEL, PREFIX},
    quantity,
};
use k8s_openapi::{
    api::core::v1::{PersistentVolumeClaim, PersistentVolumeClaimSpec, VolumeResourceRequirements},
    apimachinery::pkg::{
        api::resource::Quantity,
        apis::meta::v1::{ObjectMeta, OwnerReference},
    },
};

use super::Choice;
use crate::{
    resources::claims::{CachedClaim, SHARED},
    runtime::Kind,
};

/// Access mode of claims that one node can mount.
pub(crate) const SINGLE: &str = "ReadWriteOnce";
/// Size of a claim. State of a TPM and UEFI variables take less than 1 MiB.
const SIZE: i64 = 10 << 20;
/// Label by which CDI raises the size to the least one of the storage class.
const APPLY_PROFILE: (&str, &str) = ("cdi.kubevirt.io/applyStorageProfile", "true");

/// The owner of the claims of a VMI: its VM, or else the VMI.
pub(crate) struct Owner(OwnerReference);

impl Owner {
    /// Returns the owner of the claims of a VMI.
    pub(crate) fn of(vmi: &VirtualMachineInstance) -> Self {
        let vm = owner::controller_of_kind::<VirtualMachine>(&vmi.metadata).cloned();
        Self(vm.unwrap_or_else(|| Kind::Instance.owner_reference(&vmi.metadata)))
    }

    /// Returns true if the claim goes with this owner.
    pub(crate) fn owns(&self, claim: &CachedClaim) -> bool {
        let mut owners = claim.metadata.owner_references.iter().flatten();
        !self.0.uid.is_empty() && owners.any(|known| known.uid == self.0.uid)
    }

    /// Returns true if the claim goes with another VM or VMI, which may be gone.
    pub(super) fn is_foreign(&self, claim: &CachedClaim) -> bool {
        !self.owns(claim) && belongs(claim)
    }

    /// Renders the claim for a VMI.
    pub(crate) fn claim_of_vmi(self, vmi: &VirtualMachineInstance, choice: &Choice) -> PersistentVolumeClaim {
        let label = label_of(vmi.metadata.name.as_deref().unwrap_or_default());
        self.claim(name_for_vmi(vmi), (LABEL, label), vmi, choice)
    }

    /// Renders the claim for the target of a migration. It gets the label of the VMI when the guest runs there.
    pub(crate) fn claim_of_migration(
        self,
        vmi: &VirtualMachineInstance,
        migration: &VirtualMachineInstanceMigration,
        choice: &Choice,
    ) -> PersistentVolumeClaim {
        self.claim(name_for_migration(vmi, migration), (MIGRATION_LABEL, migration_label(migration)), vmi, choice)
    }

    fn claim(
        self,
        name: String,
        label: (&str, String),
        vmi: &VirtualMachineInstance,
        choice: &Choice,
    ) -> PersistentVolumeClaim {
        let labels = [label, (APPLY_PROFILE.0, APPLY_PROFILE.1.to_owned())];
        let mode = if choice.shared { SHARED } else { SINGLE };
        render(name, labels, size_for(vmi), self.0, mode, choice.class.metadata.name.clone())
    }
}

/// Returns true if the claim goes with a VM or a VMI: it was made for one.
pub(crate) fn belongs(claim: &CachedClaim) -> bool {
    let of = &claim.metadata;
    owner::controller_of_kind::<VirtualMachine>(of)
        .or(owner::controller_of_kind::<VirtualMachineInstance>(of))
        .is_some()
}

/// Returns the value of the label with the VMI.
pub(crate) fn label_of(vmi: &str) -> String {
    names::label_value(vmi)
}

/// Returns the value of the label with the migration.
pub(crate) fn migration_label(migration: &VirtualMachineInstanceMigration) -> String {
    names::label_value(migration.metadata.name.as_deref().unwrap_or_default())
}

/// Returns the name of the first claim of a VM, or of a VMI without VM. The same attempt gives the same name, so that a creation
/// whose answer was lost makes no second claim.
pub(crate) fn name_for_vmi(vmi: &VirtualMachineInstance) -> String {
    named(vmi, &Owner::of(vmi).0.uid)
}

/// Returns the name of the claim to which a migration moves the state of a VMI.
pub(crate) fn name_for_migration(vmi: &VirtualMachineInstance, migration: &VirtualMachineInstanceMigration) -> String {
    named(vmi, migration.metadata.uid.as_deref().unwrap_or_default())
}

fn named(vmi: &VirtualMachineInstance, uid: &str) -> String {
    let name = vmi.metadata.name.as_deref().unwrap_or_default();
    names::object_name(&format!("{PREFIX}{name}"), &format!("-{}", names::hash(uid)))
}

/// Returns the size of a claim for a VMI.
fn size_for(vmi: &VirtualMachineInstance) -> Quantity {
    let has_flash = vmi.spec.is_arm64() && persistent_state::keeps_variables(&vmi.spec);
    quantity::bytes(SIZE + if has_flash { persistent_state::ARM64_VARIABLES } else { 0 })
}

/// Renders a claim with a file system that goes with its owner. `class`: `None` for the default.
pub(crate) fn render<'a>(
    name: String,
    labels: impl IntoIterator<Item = (&'a str, String)>,
    size: Quantity,
    owner: OwnerReference,
    mode: &str,
    class: Option<String>,
) -> PersistentVolumeClaim {
    PersistentVolumeClaim {
        metadata: ObjectMeta {
            name: Some(name),
            labels: Some(labels.into_iter().map(|(key, value)| (key.to_owned(), value)).collect()),
            owner_references: Some(vec![owner]),
            ..ObjectMeta::default()
        },
        spec: Some(PersistentVolumeClaimSpec {
            access_modes: Some(vec![mode.to_owned()]),
            resources: Some(VolumeResourceRequirements {
                requests: Some(BTreeMap::from([("storage".to_owned(), size)])),
                limits: None,
            }),
            storage_class_name: class,
            volume_mode: Some("Filesystem".to_owned()),
            ..PersistentVolumeClaimSpec::default()
        }),
        status: None,
    }
}
