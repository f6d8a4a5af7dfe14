//! The VM controller: its watches and observations.

use std::{collections::BTreeMap, sync::Arc};

use api::{
    VirtualMachine, VirtualMachineInstance, VirtualMachineInstanceMigration,
    config::ClusterConfig,
    instancetype::{MatchedKind, matcher::Role},
    owner,
};
use daemon::config::ConfigHandle;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;

use super::{
    Observed,
    lookup::{Lookup, look_up},
};
use crate::{
    cache::Key,
    resources::{
        Caches, Resource,
        claims::CachedClaim,
        migrations::{MigrationIndex, vmi_key},
        needs,
        start_revisions::{StartRevision, StartRevisionIndex},
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

/// Everything in the caches that a decision about a VM depends on.
pub(crate) struct Snapshot {
    vm: Arc<VirtualMachine>,
    vmi: Option<Arc<VirtualMachineInstance>>,
    is_migrated: bool,
    claims: BTreeMap<String, Arc<CachedClaim>>,
    instancetype: Lookup,
    preference: Lookup,
    starts: Vec<Arc<StartRevision>>,
    config: Arc<ClusterConfig>,
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
    type Snapshot = Snapshot;

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

    fn observe(&self, caches: &Caches, key: &Key) -> Option<Snapshot> {
        let vm = caches.vms.get(key)?;
        let look_up = |role: Role| {
            let revision = |name: &str| caches.revisions.get(&Key::new(key.namespace.clone(), name));
            let object = |kind: MatchedKind, name: &str| {
                caches.instancetypes(kind).get(&instancetype_key(kind, &key.namespace, name))
            };
            look_up(&vm, role, revision, object)
        };
        let starts = vm.metadata.uid.clone().map(|uid| caches.starts.by(&StartRevisionIndex::Vm(uid)));
        Some(Snapshot {
            vmi: caches.vmis.get(key),
            is_migrated: caches.migrations.count_by(&MigrationIndex::UnfinishedOfVmi(key.clone())) > 0,
            claims: caches.claims_named(&key.namespace, claim_names(&vm)),
            instancetype: look_up(Role::Instancetype),
            preference: look_up(Role::Preference),
            starts: starts.unwrap_or_default(),
            config: self.config.current(),
            vm,
        })
    }

    fn subject<'a>(&self, snapshot: &'a Snapshot) -> Option<&'a ObjectMeta> {
        Some(&snapshot.vm.metadata)
    }

    fn is_starting(&self, snapshot: &Snapshot) -> bool {
        snapshot.vmi.is_none()
    }

    fn decide(&self, snapshot: &Snapshot, attempt: &Attempt<'_>) -> Result<Decision, serde_json::Error> {
        super::decide(&Observed {
            vm: &snapshot.vm,
            instance: snapshot.vmi.as_deref(),
            claims: &snapshot.claims,
            instancetype: snapshot.instancetype.clone(),
            preference: snapshot.preference.clone(),
            starts: &snapshot.starts,
            is_migrated: snapshot.is_migrated,
            config: &snapshot.config,
            failure: attempt.failure,
            now: attempt.now,
        })
    }
}
