//! The list of controllers. Each has a folder of its own with all its code; a new one is one line here.

#[cfg(test)]
mod tests;

use std::sync::Arc;

use crate::{
    budgets::DisruptionBudgets,
    certificates::{Certificates, Requests},
    clone::Clones,
    common_instancetypes::CommonInstancetypes,
    evacuation::Evacuations,
    importer::{DataSources, Importer},
    kubevirt::Installation,
    migration::{Admissions, Migrations},
    node::Nodes,
    pool::{HeldVms, Pools},
    replicaset::ReplicaSets,
    resources::Caches,
    restore::Restores,
    runtime::{Controller, Run, Runner},
    setup::Setup,
    snapshot::{SnapshotContents, Snapshots},
    uninstall::Uninstall,
    vm::Vms,
    vm_lease::VmLeases,
    vmi::Vmis,
    webhook_path::WebhookPaths,
    workload_update::WorkloadUpdates,
};

/// Creates all controllers.
pub(crate) fn controllers(setup: &Setup) -> Vec<Arc<dyn Run>> {
    let all = vec![
        runner(setup, Certificates::new(setup)),
        runner(setup, Requests::new(setup)),
        runner(setup, WebhookPaths::new(setup)),
        runner(setup, Installation::new(setup)),
        runner(setup, CommonInstancetypes::new(setup)),
        runner(setup, Uninstall::new(setup)),
        runner(setup, WorkloadUpdates::new(setup)),
        runner(setup, Vms::new(setup)),
        runner(setup, VmLeases),
        runner(setup, Snapshots),
        runner(setup, SnapshotContents),
        runner(setup, Vmis::new(setup)),
        runner(setup, Migrations::new(setup)),
        runner(setup, ReplicaSets::new()),
        runner(setup, Pools::default()),
        runner(setup, HeldVms),
        runner(setup, Restores),
        runner(setup, Clones::default()),
        runner(setup, Evacuations::new(setup)),
        runner(setup, DisruptionBudgets),
        runner(setup, Importer::new(setup)),
        runner(setup, DataSources::new(setup)),
        runner(setup, Nodes::new(setup)),
    ];
    // Without shards the controller of migrations admits them.
    let admissions = (setup.options.shards > 1).then(|| runner(setup, Admissions::new(setup)));
    all.into_iter().chain(admissions).collect()
}

fn runner(setup: &Setup, controller: impl Controller<Caches = Caches>) -> Arc<dyn Run> {
    Arc::new(Runner::new(controller, setup.caches.clone()).divided(setup.options.shards))
}
