//! VirtualMachines.

use api::{
    VirtualMachine,
    constants::{condition, finalizer},
    instancetype::{
        MatchedKind,
        matcher::{Role, Source, source},
    },
};

use super::{claims::claim_name, pools::controlling_pool};
use crate::cache::{Cached, Key};

/// Indices of VMs.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum VmIndex {
    /// Claim that the template names.
    Claim(Key),
    /// Instance type or preference that the VM names.
    Instancetype(MatchedKind, Key),
    /// Copy of an instance type or preference that the VM names.
    Revision(Key),
    /// VMs with an instance type or a preference.
    HasInstancetype,
    /// VMs with condition Failure.
    Failing,
    /// VMs with DataVolumes in templates or volumes.
    HasDataVolumes,
    /// UID of the pool that controls it.
    Pool(String),
    /// VMs with the finalizer of pools.
    HeldByPool,
    /// VMs with a lease on their data, or with the finalizer of snapshots.
    Leased,
    /// DataSource that a template of the VM names, while the VM has condition Failure.
    WaitsFor(Key),
}

impl Cached for VirtualMachine {
    type Index = VmIndex;
    whole!();

    fn indices(&self) -> Vec<VmIndex> {
        let namespace = self.metadata.namespace.as_deref().unwrap_or_default();
        let claims = claim_names(self)
            .into_iter()
            .chain(hibernation_claim(self).map(str::to_owned))
            .chain(saved_claims(self).cloned())
            .map(|name| VmIndex::Claim(Key::new(namespace, name)));
        let sources = Role::ALL.into_iter().filter_map(|role| source(self, role)?.ok());
        let sources = sources.map(|source| match source {
            Source::Revision(name) => VmIndex::Revision(Key::new(namespace, name)),
            Source::Object(kind, name) => VmIndex::Instancetype(kind, instancetype_key(kind, namespace, name)),
        });
        let mut indices: Vec<VmIndex> = claims.chain(sources).collect();
        if self.spec.instancetype.is_some() || self.spec.preference.is_some() {
            indices.push(VmIndex::HasInstancetype);
        }
        if self.condition(condition::FAILURE).is_some() {
            indices.push(VmIndex::Failing);
            indices.extend(data_sources(self).map(VmIndex::WaitsFor));
        }
        if data_volume_names(self).next().is_some() {
            indices.push(VmIndex::HasDataVolumes);
        }
        indices.extend(controlling_pool(&self.metadata).map(|pool| VmIndex::Pool(pool.uid.clone())));
        if is_held_by_pool(self) {
            indices.push(VmIndex::HeldByPool);
        }
        if is_leased(self) {
            indices.push(VmIndex::Leased);
        }
        indices
    }
}

/// Returns true for a VM with the finalizer of pools.
pub(crate) fn is_held_by_pool(vm: &VirtualMachine) -> bool {
    vm.metadata.finalizers.iter().flatten().any(|name| name == finalizer::POOL)
}

/// Returns true for a VM with a lease on its data, or with the finalizer of snapshots.
pub(crate) fn is_leased(vm: &VirtualMachine) -> bool {
    let is_held = vm.status.as_ref().is_some_and(|status| status.operation.is_some());
    is_held || vm.metadata.finalizers.iter().flatten().any(|name| name == finalizer::SNAPSHOT_SOURCE)
}

kept!(whole VirtualMachine written as VirtualMachine);

/// Returns the key of an instance type or preference that an object in `namespace` names.
pub(crate) fn instancetype_key(kind: MatchedKind, namespace: &str, name: impl Into<String>) -> Key {
    if kind.is_cluster_wide() { Key::cluster_wide(name) } else { Key::new(namespace, name) }
}

/// Returns the names of the claims behind the template's volumes and those of the VM's DataVolumes.
pub(crate) fn claim_names(vm: &VirtualMachine) -> Vec<String> {
    let volumes = vm.spec.template.spec.iter().flat_map(|spec| &spec.volumes);
    volumes.filter_map(claim_name).chain(templated(vm)).map(str::to_owned).collect()
}

/// Returns the name of the claim with the memory of a hibernated VM.
pub(crate) fn hibernation_claim(vm: &VirtualMachine) -> Option<&str> {
    let hibernation = vm.status.as_ref()?.hibernation.as_ref()?;
    Some(hibernation.claim_name.as_str()).filter(|name| !name.is_empty())
}

/// Returns the names of the claims of a hibernated guest.
pub(crate) fn saved_claims(vm: &VirtualMachine) -> impl Iterator<Item = &String> {
    let hibernation = vm.status.as_ref().and_then(|status| status.hibernation.as_ref());
    hibernation.and_then(|known| known.instance.as_ref()).into_iter().flat_map(|saved| saved.claims.keys())
}

/// Returns the names of the DataVolumes of a VM's templates.
pub(crate) fn templated(vm: &VirtualMachine) -> impl Iterator<Item = &str> {
    vm.spec.data_volume_templates.iter().filter_map(|template| template.metadata.name.as_deref())
}

/// Returns the names of the DataVolumes of a VM's templates and volumes. Some occur twice.
pub(crate) fn data_volume_names(vm: &VirtualMachine) -> impl Iterator<Item = &str> {
    let volumes = vm.spec.template.spec.iter().flat_map(|spec| &spec.volumes);
    templated(vm).chain(volumes.filter_map(|volume| Some(volume.data_volume.as_ref()?.name.as_str())))
}

/// Returns the DataSources that the templates of a VM name.
fn data_sources(vm: &VirtualMachine) -> impl Iterator<Item = Key> {
    let own = vm.metadata.namespace.as_deref().unwrap_or_default();
    let references = vm.spec.data_volume_templates.iter().filter_map(|template| template.spec.source_ref.as_ref());
    references.map(move |reference| {
        let namespace = reference.namespace.as_deref().filter(|name| !name.is_empty()).unwrap_or(own);
        Key::new(namespace, reference.name.as_str())
    })
}
