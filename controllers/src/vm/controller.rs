//! The VM controller: its watches and observations.

use std::{collections::BTreeMap, sync::Arc};

use api::{
    VirtualMachine,
    cdi::data_volume::{DataVolumeImportSource, DataVolumeTemplateSpec},
    instancetype::{MatchedKind, matcher::Role},
    owner,
};
use daemon::config::ConfigHandle;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;

use super::{Observed, data_volumes::Source, lookup::look_up};
use crate::{
    cache::Key,
    clone_source::concrete,
    resources::{
        Caches, Resource,
        claims::{CachedClaim, changed},
        migrations::{MigrationIndex, ends, vmi_key},
        needs,
        start_revisions::StartRevisionIndex,
        storage_profiles::CachedStorageProfile,
        vm_snapshots::RestoreIndex,
        vmis::disk_claims,
        vms::{VmIndex, claim_names, data_volume_names, hibernation_claim, instancetype_key, saved_claims},
    },
    runtime::{Attempt, ConfigChange, Controller, Decision, Needs, Wake},
    setup::Setup,
    snapshot::state_claim,
    snapshot_class, volume_migration,
};

/// The controller of VirtualMachines.
pub(crate) struct Vms {
    config: ConfigHandle,
}

impl Vms {
    /// Creates the controller.
    pub(crate) fn new(setup: &Setup) -> Self {
        Self { config: setup.config.clone() }
    }
}

impl Controller for Vms {
    const NAME: &'static str = "vm";
    const SHARDED: bool = true;
    const WORKERS: usize = 3;
    const NEEDS: Needs = needs(&[
        Resource::Vms,
        Resource::Vmis,
        Resource::Migrations,
        Resource::Claims,
        Resource::DataVolumes,
        Resource::DataSources,
        Resource::Namespaces,
        Resource::Instancetypes,
        Resource::ClusterInstancetypes,
        Resource::Preferences,
        Resource::ClusterPreferences,
        Resource::Revisions,
        Resource::Starts,
        Resource::SnapshotClasses,
        Resource::StorageClasses,
        Resource::StorageProfiles,
        Resource::VmRestores,
    ]);
    type Caches = Caches;
    type Observed = Observed;

    fn watch(&self, caches: &Arc<Caches>, wake: &Wake) {
        wake.objects_of(&caches.vms);
        wake.on_object(&caches.vmis, |vmi| [Key::of(&vmi.metadata)]);
        // A VMI whose volumes are to move waits for the end of another migration.
        wake.on(&caches.migrations, |former, present| former.filter(|_| ends(former, present)).and_then(vmi_key));
        let vms = caches.vms.clone();
        wake.on(&caches.claims, move |former, present| {
            let claim = changed(former, present).map(|claim| VmIndex::Claim(Key::of(&claim.metadata)));
            claim.map(|claim| vms.keys_by(&claim)).into_iter().flatten()
        });
        watch_data_volumes(caches, wake);
        watch_classes(caches, wake);
        for kind in MatchedKind::ALL {
            let vms = caches.vms.clone();
            wake.on(caches.instancetypes(kind), move |_, present| {
                let index = present.map(|object| VmIndex::Instancetype(kind, Key::of(&object.metadata)));
                index.map(|index| vms.keys_by(&index)).into_iter().flatten()
            });
        }
        // The record of a start that was missing.
        wake.on(&caches.starts, |_, present| {
            let metadata = &present?.metadata;
            let vm = owner::controller_of_kind::<VirtualMachine>(metadata)?;
            Some(Key::beside(metadata, vm.name.clone()))
        });
        let (woken, vms) = (wake.clone(), caches.vms.clone());
        caches.revisions.listen(move |(former, present)| {
            // One that is gone may be made again.
            let Some(revision) = present.or(former) else { return };
            // Most copies belong to one VM. Any VM can name a copy that a user created.
            match owner::controller_of_kind::<VirtualMachine>(&revision.metadata) {
                Some(owner) => {
                    woken.key(Key::beside(&revision.metadata, owner.name.clone()));
                }
                None => woken.keys(vms.keys_by(&VmIndex::Revision(Key::of(&revision.metadata)))),
            }
        });
    }

    fn config_changed(&self, caches: &Caches, change: &ConfigChange, wake: &Wake) {
        let (former, present) = (&change.former, &change.present);
        // The policy applies to existing VMs, too.
        if former.reference_policy != present.reference_policy {
            wake.keys(caches.vms.keys_by(&VmIndex::HasInstancetype));
        }
        // With another rollout strategy other VMs need a restart.
        if former.vm_rollout_strategy != present.vm_rollout_strategy {
            wake.keys(caches.vms.keys());
        } else {
            wake.keys(caches.vms.keys_by(&VmIndex::Failing));
        }
    }

    fn observe(&self, caches: &Caches, attempt: &Attempt<'_>) -> Option<Observed> {
        let key = attempt.key;
        let vm = caches.vms.get(key)?;
        let look_up = |role: Role| {
            let revision = |name: &str| caches.revisions.get(&Key::new(key.namespace.clone(), name));
            let object = |kind: MatchedKind, name: &str| {
                caches.instancetypes(kind).get(&instancetype_key(kind, &key.namespace, name))
            };
            look_up(&vm, role, revision, object)
        };
        let data_volume =
            |name: &str| Some((name.to_owned(), caches.data_volumes.get(&Key::new(key.namespace.clone(), name))?));
        let data_volumes: BTreeMap<_, _> = data_volume_names(&vm).filter_map(data_volume).collect();
        let starts = vm.metadata.uid.clone().map(|uid| caches.starts.by(&StartRevisionIndex::Vm(uid)));
        // After the VM: a restore that was completed for a VM not yet deleted is seen with its owner, or as not complete.
        let deleted = vm.metadata.deletion_timestamp.as_ref();
        let restores = deleted.map(|_| caches.vm_restores.by(&RestoreIndex::Vm(key.clone())));
        let instance = caches.vmis.get(key);
        let named_start = instance.as_ref().and_then(|vmi| vmi.status.as_ref()?.virtual_machine_revision_name.clone());
        let named_start = named_start.and_then(|name| caches.starts.get(&Key::new(key.namespace.clone(), name)));
        let of_guest = instance.as_deref().into_iter().flat_map(disk_claims).map(str::to_owned);
        let names = claim_names(&vm).into_iter().chain(saved_claims(&vm).cloned()).chain(of_guest);
        let claims = caches.claims_named(&key.namespace, names);
        let state_claim = state_claim(caches, &vm, instance.as_deref());
        let state_claim = state_claim.and_then(|name| caches.claims.get(&Key::new(key.namespace.clone(), name)));
        Some(Observed {
            snapshot_classes: snapshot_classes(caches, claims.values().chain(&state_claim)),
            state_claim,
            hibernation_claim: hibernation_claim(&vm)
                .and_then(|name| caches.claims.get(&Key::new(key.namespace.clone(), name))),
            instance,
            is_migrated: caches.migrations.count_by(&MigrationIndex::UnfinishedOfVmi(key.clone())) > 0,
            claims,
            sources: sources(caches, &vm),
            data_volumes,
            serves_data_volumes: !caches.data_volumes.is_absent(),
            instancetype: look_up(Role::Instancetype),
            preference: look_up(Role::Preference),
            starts: starts.unwrap_or_default(),
            named_start,
            restores: restores.unwrap_or_default(),
            destinations: volume_migration::destinations(caches, &vm),
            config: self.config.current(),
            failures: attempt.failures.clone(),
            now: attempt.now,
            vm,
        })
    }

    fn subject<'a>(&self, observed: &'a Observed) -> Option<&'a ObjectMeta> {
        Some(&observed.vm.metadata)
    }

    fn is_starting(&self, observed: &Observed) -> bool {
        observed.instance.is_none()
    }

    fn decide(&self, observed: &Observed) -> Result<Decision, serde_json::Error> {
        super::decide(observed)
    }
}

/// Wakes all VMs when the classes of volume snapshots change. Administrators change them seldom.
fn watch_classes(caches: &Arc<Caches>, wake: &Wake) {
    let (woken, vms) = (wake.clone(), caches.vms.clone());
    caches.snapshot_classes.listen(move |(former, present)| {
        if former.map(|class| (&class.driver, class.is_default))
            != present.map(|class| (&class.driver, class.is_default))
        {
            woken.keys(vms.keys());
        }
    });
    let (woken, vms) = (wake.clone(), caches.vms.clone());
    caches.storage_profiles.listen(move |(former, present)| {
        let class = |profile: Option<&CachedStorageProfile>| profile.and_then(|profile| profile.snapshot_class.clone());
        if class(former) != class(present) {
            woken.keys(vms.keys());
        }
    });
}

/// Returns the classes of volume snapshots by storage class of some claims.
fn snapshot_classes<'a>(
    caches: &Caches,
    claims: impl Iterator<Item = &'a Arc<CachedClaim>>,
) -> BTreeMap<String, Result<Option<String>, String>> {
    let classes = claims.filter_map(|claim| claim.storage_class.clone());
    classes.map(|class| (class.clone(), snapshot_class::of(caches, &class))).collect()
}

/// Wakes VMs when their DataVolumes change, when the DataSource that one waits for does, and when the kinds appear or go.
fn watch_data_volumes(caches: &Arc<Caches>, wake: &Wake) {
    let (woken, vms) = (wake.clone(), caches.vms.clone());
    caches.data_volumes.listen(move |(former, present)| match present.or(former) {
        Some(changed) => woken.keys(vms.keys_by(&VmIndex::Claim(Key::of(&changed.metadata)))),
        None => vms.keys_by(&VmIndex::HasDataVolumes).into_iter().for_each(|key| woken.retry(key)),
    });
    let (woken, vms) = (wake.clone(), caches.vms.clone());
    caches.data_sources.listen(move |(former, present)| {
        let waiting = present.or(former).map(|changed| vms.keys_by(&VmIndex::WaitsFor(Key::of(&changed.metadata))));
        waiting.into_iter().flatten().for_each(|key| woken.retry(key));
    });
}

/// Returns the source of the DataVolume of a template.
fn source(caches: &Caches, own: &str, template: &DataVolumeTemplateSpec) -> Option<DataVolumeImportSource> {
    let Some(reference) = &template.spec.source_ref else { return template.spec.source.clone() };
    let namespace = reference.namespace.as_deref().filter(|name| !name.is_empty()).unwrap_or(own);
    concrete(&*caches.data_sources.get(&Key::new(namespace, reference.name.as_str()))?)
}

/// Returns the sources of the DataVolumes of a VM's templates.
fn sources(caches: &Caches, vm: &VirtualMachine) -> BTreeMap<String, Source> {
    let own = vm.metadata.namespace.as_deref().unwrap_or_default();
    let of = |template: &DataVolumeTemplateSpec| {
        let source = source(caches, own, template)?;
        let absent_claim = source.pvc.as_ref().filter(|claim| {
            let namespace = Some(claim.namespace.as_str()).filter(|name| !name.is_empty()).unwrap_or(own);
            caches.claims.get(&Key::new(namespace, claim.name.as_str())).is_none()
        });
        let absent_claim = absent_claim.map(|claim| claim.name.clone());
        let is_referenced = template.spec.source_ref.is_some();
        Some((template.metadata.name.clone()?, Source { source, absent_claim, is_referenced }))
    };
    vm.spec.data_volume_templates.iter().filter_map(of).collect()
}
