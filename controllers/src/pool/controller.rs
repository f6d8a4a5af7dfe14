//! The pool controller: its watches and observations.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex},
};

use api::{
    Condition, VirtualMachine, VirtualMachineInstance, VirtualMachinePool,
    constants::{condition, label},
    owner,
};
use daemon::lock;
use jiff::{SignedDuration, Timestamp};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;

use super::{BURST, Member, Observed, changes::revision_name, manifest, preservation::preserves, wanted_replicas};
use crate::{
    cache::Key,
    resources::{
        Caches, Resource, needs,
        pool_revisions::PoolRevisionIndex,
        pools::{controlling_pool, controls},
        vms::{VmIndex, claim_names, data_volume_names, is_held_by_pool},
    },
    runtime::{Attempt, Controller, Decision, Effect, Kind, Needs, Wake},
};

/// Time in which a missing record is not tried again. Its name may be that of one without our label, which no watch shows.
const RECORD_PAUSE: SignedDuration = SignedDuration::from_secs(60);

/// The controller of VirtualMachinePools.
#[derive(Default)]
pub(crate) struct Pools {
    /// Name and time of the last record that was to be created, by UID of the pool.
    tried: Mutex<BTreeMap<String, (String, Timestamp)>>,
}

impl Pools {
    /// Returns true if the record of the present template was to be created a short time ago.
    pub(super) fn has_tried(&self, pool: &VirtualMachinePool, now: Timestamp) -> bool {
        let tried = lock(&self.tried);
        let known = tried.get(pool.metadata.uid.as_deref().unwrap_or_default());
        known.is_some_and(|(name, time)| *name == revision_name(pool) && now.duration_since(*time) < RECORD_PAUSE)
    }

    fn remember(&self, pool: &VirtualMachinePool, now: Timestamp) {
        let mut tried = lock(&self.tried);
        tried.retain(|_, (_, time)| now.duration_since(*time) < RECORD_PAUSE);
        tried.insert(pool.metadata.uid.clone().unwrap_or_default(), (revision_name(pool), now));
    }
}

/// Returns the key of the pool that controls an object.
fn pool_of(metadata: &ObjectMeta) -> Option<Key> {
    let pool = controlling_pool(metadata)?;
    Some(Key::beside(metadata, pool.name.clone()))
}

/// Returns true for an object of a former pool of this name: it is about to go.
fn is_left(pool: &VirtualMachinePool, metadata: &ObjectMeta) -> bool {
    let former = controlling_pool(metadata);
    former.is_some_and(|former| {
        pool.metadata.name.as_ref() == Some(&former.name) && pool.metadata.uid.as_ref() != Some(&former.uid)
    })
}

/// Returns true if two versions of a VM are the same to its pool.
fn is_same_vm(former: &VirtualMachine, present: &VirtualMachine) -> bool {
    let facts = |vm: &VirtualMachine| {
        let metadata = &vm.metadata;
        let status = vm.status.clone().unwrap_or_default();
        let is_true = |type_| vm.condition(type_).map(|known: &Condition| known.status.clone());
        (
            (metadata.uid.clone(), metadata.deletion_timestamp.is_some(), metadata.generation, metadata.labels.clone()),
            (metadata.finalizers.clone(), metadata.owner_references.clone(), status.state_change_requests.len()),
            (status.printable_status, status.start_failure.and_then(|failure| failure.consecutive_fail_count)),
            (status.desired_generation, is_true(condition::READY), is_true(condition::RESTART_REQUIRED)),
        )
    };
    facts(former) == facts(present)
}

/// Returns true if two versions of a VMI are the same to the pool of its VM.
fn is_same_vmi(former: &VirtualMachineInstance, present: &VirtualMachineInstance) -> bool {
    let facts = |vmi: &VirtualMachineInstance| {
        let metadata = &vmi.metadata;
        let revision = metadata.labels.as_ref().and_then(|labels| labels.get(label::POOL_REVISION)).cloned();
        (metadata.uid.clone(), vmi.is_deleting(), vmi.phase().clone(), vmi.has_true(condition::READY), revision)
    };
    facts(former) == facts(present)
}

impl Controller for Pools {
    const NAME: &'static str = "pool";
    const WORKERS: usize = 3;
    const NEEDS: Needs = needs(&[
        Resource::Pools,
        Resource::PoolRevisions,
        Resource::Vms,
        Resource::Vmis,
        Resource::DataVolumes,
        Resource::Claims,
        Resource::Namespaces,
    ]);
    type Caches = Caches;
    type Observed = Observed;

    fn watch(&self, caches: &Arc<Caches>, wake: &Wake) {
        wake.objects_of(&caches.pools);
        let woken = wake.clone();
        caches.vms.listen(move |(former, present)| {
            if former.zip(present).is_some_and(|(former, present)| is_same_vm(former, present)) {
                return;
            }
            woken.keys([former, present].into_iter().flatten().filter_map(|vm| pool_of(&vm.metadata)));
        });
        let (woken, vms) = (wake.clone(), caches.vms.clone());
        caches.vmis.listen(move |(former, present)| {
            if former.zip(present).is_some_and(|(former, present)| is_same_vmi(former, present)) {
                return;
            }
            let vm = present.or(former).and_then(|vmi| vms.get(&Key::of(&vmi.metadata)));
            woken.keys(vm.and_then(|vm| pool_of(&vm.metadata)));
        });
    }

    fn observe(&self, caches: &Caches, attempt: &Attempt<'_>) -> Option<Observed> {
        let key = attempt.key;
        let pool = caches.pools.get(key)?;
        let uid = pool.metadata.uid.clone().unwrap_or_default();
        let vms = caches.vms.by(&VmIndex::Pool(uid.clone())).into_iter().filter(|vm| controls(&pool, &vm.metadata));
        let of_vm = |vm: &VirtualMachine| {
            caches.vmis.get(&Key::of(&vm.metadata)).filter(|vmi| owner::is_controlled_by(&vmi.metadata, vm))
        };
        let members: Vec<Member> = vms.map(|vm| Member { vmi: of_vm(&vm), vm }).collect();
        let leaving: Vec<&VirtualMachine> = members
            .iter()
            .map(|member| &*member.vm)
            .filter(|vm| preserves(&pool.spec) && vm.metadata.deletion_timestamp.is_some() && is_held_by_pool(vm))
            .collect();
        let named = |name: &str| Key::new(key.namespace.clone(), name);
        let data_volumes = leaving.iter().flat_map(|vm| data_volume_names(vm));
        let data_volumes = data_volumes.filter_map(|name| caches.data_volumes.get(&named(name))).collect();
        let claims = leaving.iter().flat_map(|vm| claim_names(vm));
        let claims = claims.filter_map(|name| caches.claims.get(&named(&name))).collect();
        let revisions = caches.pool_revisions.by(&PoolRevisionIndex::Pool(uid));
        let left = caches.pool_revisions.get(&named(&revision_name(&pool)));
        Some(Observed {
            free: free(caches, &pool, wanted_replicas(&pool.spec).saturating_sub(members.len())),
            revisions: revisions.into_iter().filter(|known| owner::is_controlled_by(&known.metadata, &*pool)).collect(),
            left: left.filter(|known| is_left(&pool, &known.metadata)),
            is_tried: self.has_tried(&pool, attempt.now),
            members,
            data_volumes,
            claims,
            failure: attempt.failures.newest().cloned(),
            now: attempt.now,
            pool,
        })
    }

    fn decide(&self, observed: &Observed) -> Result<Decision, serde_json::Error> {
        let decision = super::decide(observed)?;
        let records = |effect: &Effect| matches!(effect, Effect::Create { kind: Kind::ControllerRevision, .. });
        // One that waits for that of a former pool is tried again soon.
        if observed.left.is_none() && decision.effects.iter().any(records) {
            self.remember(&observed.pool, observed.now);
        }
        Ok(decision)
    }
}

/// Returns the lowest numbers whose names no VM has, also none of others.
fn free(caches: &Caches, pool: &VirtualMachinePool, count: usize) -> Vec<u32> {
    let namespace = pool.metadata.namespace.clone().unwrap_or_default();
    let is_free = |index: &u32| caches.vms.get(&Key::new(namespace.clone(), manifest::name(pool, *index))).is_none();
    (0..u32::MAX).filter(is_free).take(count.min(BURST)).collect()
}
