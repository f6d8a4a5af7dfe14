//! Evacuation: VMIs leave their node by a migration, because an eviction of their pod was requested or their node is drained.
//! Start with [`decide`]; `controller.rs` holds the watches.
//!
//! ```text
//!   eviction of the pod ──> webhook sets status.evacuationNodeName ──┐
//!                                                                    ├──> a migration, until the VMI has left the node
//!   taint nodeDrainTaintKey:NoSchedule of the node ──────────────────┘
//! ```
//! The queue of migrations limits how many run at a time and delays those that follow a failure. virt-handler of the target
//! removes the mark. A VMI with strategy External is marked, but another program moves it.

mod controller;
#[cfg(test)]
mod tests;

use std::{sync::Arc, time::Duration};

use api::{EvictionStrategy, VirtualMachineInstance, config::ClusterConfig, constants::event};
use jiff::Timestamp;

pub(crate) use self::controller::Evacuations;
use crate::{
    migration::{Origin, migration_of},
    resources::vmis::node_name,
    runtime::{Decision, Effect, Failures, Kind},
};

/// Wait for the end of a pod that a former migration left behind, which changes the VMI in general.
const POD_ENDS: Duration = Duration::from_secs(10);

/// Everything that a decision about a VMI depends on.
pub(crate) struct Observed {
    /// The VMI.
    pub vmi: Arc<VirtualMachineInstance>,
    /// Its node is being drained.
    pub is_drained: bool,
    /// A migration of it has not ended.
    pub is_migrated: bool,
    /// Number of its launcher pods that have not ended.
    pub active_pods: usize,
    /// Configuration in force.
    pub config: Arc<ClusterConfig>,
    /// The writes for it that were refused.
    pub failures: Failures,
    /// The current time.
    pub now: Timestamp,
}

/// Returns the node that an eviction requires the VMI to leave. A mark of another node is of the past.
pub(crate) fn marked_node(vmi: &VirtualMachineInstance) -> Option<&str> {
    let marked = vmi.status.as_ref()?.evacuation_node_name.as_deref();
    node_name(vmi).filter(|node| marked == Some(*node))
}

/// Returns true if the VMI leaves its node by a migration.
fn migrates_on_eviction(vmi: &VirtualMachineInstance, config: &ClusterConfig) -> bool {
    match vmi.spec.eviction_strategy.as_ref().unwrap_or(&config.eviction_strategy) {
        EvictionStrategy::LiveMigrate | EvictionStrategy::LiveMigrateIfPossible => vmi.is_live_migratable(),
        EvictionStrategy::None | EvictionStrategy::External | EvictionStrategy::Other(_) => false,
    }
}

/// Returns true if an eviction was requested and the VMI leaves its node by a migration of this controller.
pub(crate) fn is_evacuated(vmi: &VirtualMachineInstance, config: &ClusterConfig) -> bool {
    marked_node(vmi).is_some() && migrates_on_eviction(vmi, config)
}

/// Decides whether the VMI gets a migration now.
fn decide(observed: &Observed) -> Result<Decision, serde_json::Error> {
    let vmi = &*observed.vmi;
    let mut decision = Decision::settled();
    let Some(node) = node_name(vmi).filter(|_| observed.is_drained || marked_node(vmi).is_some()) else {
        return Ok(decision);
    };
    let leaves = !vmi.is_final() && !vmi.is_deleting() && migrates_on_eviction(vmi, &observed.config);
    if !leaves || observed.is_migrated || vmi.is_migrating() {
        return Ok(decision);
    }
    if observed.active_pods > 1 {
        decision.wake(POD_ENDS);
        return Ok(decision);
    }
    if decision.must_wait(&observed.failures, event::FAILED_CREATE, observed.now) {
        return Ok(decision);
    }
    let migration = migration_of(vmi, Origin::Evacuation { node });
    let effect = Effect::create(Kind::Migration, vmi.metadata.namespace.as_deref(), &migration)?;
    decision.push(effect.reported(
        Kind::Instance.reference(&vmi.metadata),
        (event::SUCCESSFUL_CREATE, "Created Migration {name}"),
        (event::FAILED_CREATE, "Error creating a Migration: {error}"),
    ));
    Ok(decision)
}
