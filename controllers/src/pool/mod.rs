//! Pools: as many VMs as wanted from one template, with names, claims and disks of their own.
//!
//! Start with [`decide`]; `controller.rs` holds the watches, `changes.rs` the writes in their order, `held.rs` a controller for VMs
//! whose pool is gone. A VM of a pool:
//!
//! ```text
//!           create             template changed          update                 VMI restarted
//!  missing ───────> current ───────────────────> outdated ─────> VMI outdated ───────────────> current
//!     ^                │                            │                 │ or, if templates of
//!     │                │ scale-in, healing, user    │                 │ DataVolumes differ
//!     │                v                            v                 v
//!     └───────────── leaving <─────────────────────────────────────────
//!       disks detached
//!       if preserved
//! ```
//!
//! Everything follows from objects: the number of a VM from its name, its template from the label with the name of a
//! ControllerRevision. A VM has one possible name, so that no observation results in two of it.

mod changes;
mod controller;
mod healing;
mod held;
mod manifest;
mod preservation;
mod selection;
mod status;
#[cfg(test)]
mod tests;
mod update;

use std::{collections::BTreeMap, sync::Arc};

use api::{
    VirtualMachine, VirtualMachineInstance, VirtualMachinePool, VmiPhase,
    cdi::DataVolume,
    constants::{condition, finalizer, label},
    pool::VirtualMachinePoolSpec,
};
use jiff::Timestamp;
use kube::core::{Selector, SelectorExt};
use serde_json::json;

use self::changes::Changes;
pub(crate) use self::{controller::Pools, held::HeldVms};
use crate::{
    resources::{claims::CachedClaim, pool_revisions::PoolRevision},
    runtime::{Decision, Effect, Failure, Kind},
};

/// VMs that are created, deleted or changed in one reconcile at most.
const BURST: usize = 250;

/// A VM of a pool.
#[derive(Clone, Debug)]
pub(crate) struct Member {
    /// The VM.
    pub vm: Arc<VirtualMachine>,
    /// Its VMI.
    pub vmi: Option<Arc<VirtualMachineInstance>>,
}

impl Member {
    fn is_deleting(&self) -> bool {
        self.vm.metadata.deletion_timestamp.is_some()
    }

    fn is_ready(&self) -> bool {
        self.vm.condition(condition::READY).is_some_and(api::Condition::is_true)
    }

    /// Returns the VMI unless it is deleted or has ended.
    fn live(&self) -> Option<&VirtualMachineInstance> {
        self.vmi.as_deref().filter(|vmi| !vmi.is_deleting() && !vmi.is_final())
    }

    /// Returns true if the guest runs, is ready and is about to stay so.
    fn is_available(&self) -> bool {
        let is_up = |vmi: &VirtualMachineInstance| *vmi.phase() == VmiPhase::Running && vmi.has_true(condition::READY);
        let is_requested = self.vm.status.as_ref().is_some_and(|status| !status.state_change_requests.is_empty());
        !self.is_deleting() && !is_requested && self.live().is_some_and(is_up)
    }

    /// Returns the name of the revision that the VM has.
    fn revision(&self) -> Option<&str> {
        self.vm.metadata.labels.as_ref()?.get(label::POOL_REVISION).map(String::as_str)
    }

    /// Returns the name of the revision that the VMI was started with.
    fn vmi_revision(&self) -> Option<&str> {
        self.vmi.as_ref()?.metadata.labels.as_ref()?.get(label::POOL_REVISION).map(String::as_str)
    }

    /// Returns namespace and name for events.
    fn path(&self) -> String {
        let metadata = &self.vm.metadata;
        let text = |part: &Option<String>| part.clone().unwrap_or_default();
        format!("{}/{}", text(&metadata.namespace), text(&metadata.name))
    }
}

/// Everything that a decision about a pool depends on.
pub(crate) struct Observed {
    /// The pool.
    pub pool: Arc<VirtualMachinePool>,
    /// VMs that it controls, in the order of their names.
    pub members: Vec<Member>,
    /// Lowest numbers whose names no VM has, as many as VMs are missing.
    pub free: Vec<u32>,
    /// Records of its specs.
    pub revisions: Vec<Arc<PoolRevision>>,
    /// Record of a former pool of this name that has the name of the next one.
    pub left: Option<Arc<PoolRevision>>,
    /// The next record was to be created a short time ago.
    pub is_tried: bool,
    /// DataVolumes of VMs that wait for their disks to be detached.
    pub data_volumes: Vec<Arc<DataVolume>>,
    /// Claims of these VMs.
    pub claims: Vec<Arc<CachedClaim>>,
    /// The last write for this pool that was refused.
    pub failure: Option<Failure>,
    /// The current time.
    pub now: Timestamp,
}

/// Decides what to do about a pool.
pub(crate) fn decide(observed: &Observed) -> Result<Decision, serde_json::Error> {
    let pool = &*observed.pool;
    let mut decision = Decision::settled();
    let selector = selector(&pool.spec);
    let is_selected = |member: &&Member| {
        let labels = member.vm.metadata.labels.as_ref();
        selector.as_ref().is_none_or(|selector| selector.matches(labels.unwrap_or(&BTreeMap::new())))
    };
    let (owned, others): (Vec<&Member>, Vec<&Member>) = observed.members.iter().partition(is_selected);
    let is_deleted = pool.metadata.deletion_timestamp.is_some();
    // A deleted pool releases nothing: its finalizer leaves all VMs.
    let held: Vec<&Member> = observed.members.iter().filter(|member| is_deleted || is_selected(member)).collect();
    preservation::keep(observed, &held, &mut decision);
    let Some(selector) = selector else {
        // Admission rejects these.
        tracing::warn!("selector is empty or does not match the template's labels");
        return Ok(decision);
    };
    let released: Vec<Effect> = others.iter().filter(|_| !is_deleted).map(|member| release(pool, member)).collect();
    // Release changes the counts. Scaling follows in the reconcile that it causes.
    let changes = if is_deleted || pool.spec.paused || !released.is_empty() {
        Changes::default()
    } else {
        Changes::of(observed, &owned)
    };
    decision.effects.extend(released);
    // The refusal of a write that is not needed any more is no failure.
    let failure = observed.failure.as_ref().filter(|failure| changes.want(failure.reason));
    changes.carry_out(observed, failure, &mut decision)?;
    status::report(observed, &selector, &owned, failure, &mut decision)?;
    Ok(decision)
}

/// Returns the selector, unless it is invalid, selects everything, or not what the template makes.
fn selector(pool: &VirtualMachinePoolSpec) -> Option<Selector> {
    let selector = Selector::try_from(pool.selector.clone()).ok()?;
    let labels = pool.virtual_machine_template.metadata.labels.as_ref()?;
    (!selector.selects_all() && selector.matches(labels)).then_some(selector)
}

/// Returns the wanted number of VMs.
fn wanted_replicas(pool: &VirtualMachinePoolSpec) -> usize {
    usize::try_from(pool.replicas.unwrap_or(1)).unwrap_or(0)
}

/// Makes a VM whose labels do not match any more a VM of its own.
fn release(pool: &VirtualMachinePool, member: &Member) -> Effect {
    let metadata = &member.vm.metadata;
    let is_other = |owner: &&k8s_openapi::apimachinery::pkg::apis::meta::v1::OwnerReference| {
        Some(owner.uid.as_str()) != pool.metadata.uid.as_deref()
    };
    let owners: Vec<_> = metadata.owner_references.iter().flatten().filter(is_other).collect();
    let finalizers: Vec<_> = metadata.finalizers.iter().flatten().filter(|name| *name != finalizer::POOL).collect();
    let patch = json!({"metadata": {"ownerReferences": owners, "finalizers": finalizers}});
    Effect::merge(Kind::VirtualMachine, metadata, patch)
}
