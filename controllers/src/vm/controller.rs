//! The VM controller: its watches and observations.

use std::sync::Arc;

use api::{
    VirtualMachine, VirtualMachineInstanceMigration,
    instancetype::{MatchedKind, matcher::Role},
    owner,
};
use daemon::config::ConfigHandle;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;

use super::{Observed, lookup::look_up};
use crate::{
    cache::Key,
    resources::{
        Caches, Resource,
        migrations::{MigrationIndex, vmi_key},
        needs,
        start_revisions::StartRevisionIndex,
        vms::{VmIndex, claim_names, instancetype_key},
    },
    runtime::{Attempt, ConfigChange, Controller, Decision, Needs, Wake},
    setup::Setup,
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
    const WORKERS: usize = 3;
    const NEEDS: Needs = needs(&[
        Resource::Vms,
        Resource::Vmis,
        Resource::Migrations,
        Resource::Claims,
        Resource::Namespaces,
        Resource::Instancetypes,
        Resource::ClusterInstancetypes,
        Resource::Preferences,
        Resource::ClusterPreferences,
        Resource::Revisions,
        Resource::Starts,
    ]);
    type Caches = Caches;
    type Observed = Observed;

    fn watch(&self, caches: &Arc<Caches>, wake: &Wake) {
        wake.objects_of(&caches.vms);
        let woken = wake.clone();
        caches.vmis.listen(move |(former, present)| {
            woken.keys(present.or(former).map(|vmi| Key::of(&vmi.metadata)));
        });
        // A VMI whose volumes are to move waits for the end of another migration.
        let woken = wake.clone();
        caches.migrations.listen(move |(former, present)| {
            let has_ended = |migration: &VirtualMachineInstanceMigration| migration.is_final();
            if present.is_none_or(has_ended) && former.is_some_and(|former| !has_ended(former)) {
                woken.keys(former.and_then(vmi_key));
            }
        });
        let (woken, vms) = (wake.clone(), caches.vms.clone());
        caches.claims.listen(move |(former, present)| {
            if matches!((former, present), (Some(former), Some(present)) if former.is_equivalent(present)) {
                return;
            }
            woken.keys(
                present.or(former).into_iter().flat_map(|claim| vms.keys_by(&VmIndex::Claim(Key::of(&claim.metadata)))),
            );
        });
        for kind in MatchedKind::ALL {
            let (woken, vms) = (wake.clone(), caches.vms.clone());
            caches.instancetypes(kind).listen(move |(_, present)| {
                woken.keys(
                    present
                        .into_iter()
                        .flat_map(|object| vms.keys_by(&VmIndex::Instancetype(kind, Key::of(&object.metadata)))),
                );
            });
        }
        let (woken, vms) = (wake.clone(), caches.vms.clone());
        caches.revisions.listen(move |(_, present)| {
            let Some(revision) = present else { return };
            // Most copies belong to one VM. Any VM can name a copy that a user created.
            match owner::controller_of_kind::<VirtualMachine>(&revision.metadata) {
                Some(owner) => {
                    woken.key(Key::new(revision.metadata.namespace.clone().unwrap_or_default(), owner.name.clone()));
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
        let starts = vm.metadata.uid.clone().map(|uid| caches.starts.by(&StartRevisionIndex::Vm(uid)));
        Some(Observed {
            instance: caches.vmis.get(key),
            is_migrated: caches.migrations.count_by(&MigrationIndex::UnfinishedOfVmi(key.clone())) > 0,
            claims: caches.claims_named(&key.namespace, claim_names(&vm)),
            instancetype: look_up(Role::Instancetype),
            preference: look_up(Role::Preference),
            starts: starts.unwrap_or_default(),
            config: self.config.current(),
            failure: attempt.failure.cloned(),
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
