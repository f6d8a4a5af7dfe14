//! The target of a migration: what the launcher is prepared with, and what the status shows, up to the write that passes
//! ownership.

use std::{borrow::Cow, time::Duration};

use api::{
    VirtualMachineInstance, VirtualMachineInstanceStatus, VmiPhase, condition,
    constants::{
        annotation::{EVICTION_SOURCE, MIGRATION_PROGRESS},
        condition::MIGRATION_REQUIRED,
        label::{MIGRATION_TARGET_NODE_NAME, NODE_NAME, OUTDATED_LAUNCHER_IMAGE},
    },
    dedicated,
    vmi::{
        memory::MemoryStatus,
        migration::VirtualMachineInstanceMigrationState,
        status::{PersistentVolumeClaimInfo, StorageMigratedVolumeInfo},
    },
};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use protocol::{MigrationMode, MigrationReport, MigrationStep, features::Feature};

use super::{TRANSPORT, fail, time_of};
use crate::{
    launcher::{Candidates, bounded},
    vmi::{
        desired::{self, Desired, Metadata},
        event::Event,
        migration_facts::{Migration, Side},
        nics,
        observed::{Link, NETWORK, Now, ObjectState, Observed},
        role::Role,
        volumes,
    },
};

/// Time for the source to report the end of a migration whose target is ready.
const SOURCE_LIMIT: Duration = Duration::from_secs(60);
/// `status.reason` of a VMI whose guest was lost.
const LOST: &str = "LostInPostCopy";
/// Consecutive failures of the preparation after which the migration fails: about half a minute.
const ATTEMPTS: u32 = 6;

/// State of a launcher that is to receive the domain.
#[derive(Clone, Debug, PartialEq)]
pub(in crate::vmi) enum Progress<'a> {
    /// Hello is not answered.
    Connecting,
    /// Network, volumes and launcher are prepared.
    Preparing,
    /// The launcher waits for the domain.
    Ready(&'a MigrationReport),
    /// The domain arrives.
    Copying(&'a MigrationReport),
    /// The guest runs here.
    Moved(&'a MigrationReport),
    /// Nothing of the domain is left here.
    NotMoved(&'a MigrationReport),
}

/// Returns the state of the launcher that is to receive the domain.
pub(in crate::vmi) fn progress<'a>(observed: &'a Observed, migration: &Migration) -> Progress<'a> {
    if !matches!(observed.link, Link::Up { greeted: true, .. }) {
        return Progress::Connecting;
    }
    let Some(report) = observed.migration_report(&migration.uid) else { return Progress::Preparing };
    match report.step() {
        MigrationStep::Unspecified | MigrationStep::Releasing => Progress::Preparing,
        MigrationStep::Prepared => Progress::Ready(report),
        MigrationStep::Copying => Progress::Copying(report),
        MigrationStep::Moved => Progress::Moved(report),
        MigrationStep::NotMoved => Progress::NotMoved(report),
    }
}

/// Returns the reason for which this launcher cannot receive the domain.
pub(in crate::vmi) fn failure(observed: &Observed, migration: &Migration) -> Option<String> {
    if let Link::Up { greeted: true, features, .. } = &observed.link
        && !features.contains(&Feature::LiveMigration)
    {
        return Some(format!("virt-launcher does not support {}", Feature::LiveMigration.name()));
    }
    if let Progress::NotMoved(report) = progress(observed, migration) {
        let reason = if report.failure.is_empty() { "unknown" } else { &report.failure };
        return Some(bounded(reason));
    }
    let failure = observed.failure.as_ref().filter(|failure| failure.permanent || failure.count >= ATTEMPTS)?;
    Some(format!("failed to prepare the migration target: {}", failure.message))
}

/// Returns the time from which on this node decides about the migration because the source does not: the domain has not come, or the
/// pod of the source is gone before it has released the guest. The launcher itself decides about a guest in post-copy.
pub(in crate::vmi) fn decides_at(observed: &Observed, migration: &Migration) -> Option<Duration> {
    migration.endpoint?;
    let since = match progress(observed, migration) {
        Progress::NotMoved(_) => observed.not_moved_since,
        Progress::Ready(_) => observed.source_gone_since,
        Progress::Copying(report) if report.mode() != MigrationMode::PostCopy => observed.source_gone_since,
        _ => None,
    }?;
    Some(since + SOURCE_LIMIT)
}

/// Returns true if network and volumes of the launcher are ready for the domain.
pub(in crate::vmi) fn is_equipped(observed: &Observed) -> bool {
    let networked = nics::network_work(observed).is_none() && !observed.is_busy(NETWORK);
    networked && matches!(observed.link, Link::Up { networked: true, .. }) && volumes::has_moved_volumes(observed)
}

/// Returns true if the launcher is prepared and its address published by the next virt-handler of this node: the present one is about
/// to stop, and refuses the channels of a migration that has not begun.
pub(in crate::vmi) fn is_held(observed: &Observed, migration: &Migration) -> bool {
    observed.draining && migration.endpoint.is_none()
}

/// Returns the desired status and metadata of a VMI whose domain comes to this node; `None` if the object is up to date.
pub(in crate::vmi) fn desired(observed: &Observed, now: Now) -> Option<Desired> {
    let vmi = &observed.vmi;
    let current = vmi.status.clone().unwrap_or_default();
    let mut next = current.clone();
    let (mut metadata, mut events) = (Metadata::default(), Vec::new());
    match observed.target_migration().filter(|_| !observed.facts.is_final()) {
        Some(migration) => advance(&mut next, &mut metadata, &mut events, observed, migration, now),
        // The label ends this node's part.
        None if observed.role == Role::MigrationTarget => metadata.remove_label(vmi, MIGRATION_TARGET_NODE_NAME),
        None => {}
    }
    let is_changed = next != current || !metadata.is_empty();
    is_changed.then_some(Desired { status: next, metadata, events, may_wait: false })
}

fn advance(
    next: &mut VirtualMachineInstanceStatus,
    metadata: &mut Metadata,
    events: &mut Vec<Event>,
    observed: &Observed,
    migration: &Migration,
    now: Now,
) {
    let vmi = &observed.vmi;
    let progress = progress(observed, migration);
    // Once the address is published, the source reports the failure, and knows it better, unless it is silent.
    let decides = decides_at(observed, migration).is_some_and(|at| now.since_start >= at);
    if (migration.endpoint.is_none() || decides)
        && let Some(reason) = failure(observed, migration)
    {
        events.push(fail(next, metadata, vmi, &reason, false, Time(now.wall)));
        // The source never runs a guest again that has left it.
        if matches!(progress, Progress::NotMoved(report) if report.mode() == MigrationMode::PostCopy) {
            desired::enter(next, VmiPhase::Failed, None, now.wall);
            next.reason = Some(LOST.into());
            events.push(Event::warning("Stopped", "The VirtualMachineInstance crashed."));
        }
        return;
    }
    if let Progress::Moved(report) = progress {
        return take_over(next, metadata, events, observed, report, now);
    }
    let state = next.migration_state.get_or_insert_default();
    let is_present = matches!(progress, Progress::Copying(_));
    state.target_node_domain_detected |= is_present;
    let has_launcher = matches!(observed.facts.pods, Candidates::One(_));
    let is_ready = has_launcher && matches!(progress, Progress::Ready(_) | Progress::Copying(_));
    let is_open = is_ready && !is_held(observed, migration);
    if let Some((address, port)) = observed.endpoint.filter(|_| is_open)
        && migration.endpoint != Some((address, port))
    {
        state.target_node_address = Some(address.to_string());
        state.target_direct_migration_node_ports = [(port.to_string(), 0)].into();
        if let Progress::Ready(report) | Progress::Copying(report) = progress {
            report_cpus(state, vmi, report);
        }
        events.push(Event::normal(
            "PreparingTarget",
            format!("Migration Target is listening at {address}, on ports: {port}"),
        ));
    }
}

/// Shows the source the CPUs of the launcher's pod, from which it chooses those of the threads.
fn report_cpus(
    state: &mut VirtualMachineInstanceMigrationState,
    vmi: &VirtualMachineInstance,
    report: &MigrationReport,
) {
    // `launcher::watch` drops those that are too long for the status.
    if dedicated::is_dedicated(&vmi.spec.domain) && !report.topology.is_empty() {
        state.target_cpu_set = report.cpus.iter().filter_map(|cpu| i32::try_from(*cpu).ok()).collect();
        state.target_node_topology = Some(report.topology.clone());
    }
}

/// Passes ownership to this node.
fn take_over(
    next: &mut VirtualMachineInstanceStatus,
    metadata: &mut Metadata,
    events: &mut Vec<Event>,
    observed: &Observed,
    report: &MigrationReport,
    now: Now,
) {
    let (vmi, node) = (&observed.vmi, observed.node.clone());
    let state = next.migration_state.get_or_insert_default();
    let end = time_of(report.end, now.wall);
    state.start_timestamp.get_or_insert_with(|| time_of(report.begin, end.0));
    if state.mode.is_none() {
        let mode = if report.mode() == MigrationMode::PostCopy { "PostCopy" } else { "PreCopy" };
        state.mode = Some(mode.into());
    }
    state.target_node_domain_detected = true;
    state.target_node_domain_ready_timestamp = Some(Time(now.wall));
    state.end_timestamp = Some(end);
    if let Some(overhead) = state.target_memory_overhead.clone() {
        next.memory.get_or_insert_with(MemoryStatus::default).memory_overhead = Some(overhead);
    }
    next.node_name = Some(node.clone());
    next.evacuation_node_name = None;
    next.launcher_container_image_version = None;
    next.migration_transport = Some(TRANSPORT.into());
    condition::remove(&mut next.conditions, MIGRATION_REQUIRED);
    metadata.labels.insert(NODE_NAME, Some(node.clone()));
    metadata.remove_label(vmi, OUTDATED_LAUNCHER_IMAGE);
    metadata.remove_annotation(vmi, EVICTION_SOURCE);
    metadata.remove_annotation(vmi, MIGRATION_PROGRESS);
    events.push(Event::normal("Migrated", format!("The VirtualMachineInstance migrated to node {node}.")));
}

/// Returns the VMI for the preparation of the launcher: with the claims that volumes move to.
pub(in crate::vmi) fn for_launcher(vmi: &VirtualMachineInstance) -> VirtualMachineInstance {
    with_claims(vmi, |moved| moved.destination_pvc_info.as_ref())
}

/// Returns the VMI for the launcher that has the domain: with the claims in its pod. The spec and the entries of the volumes name the
/// new claims as soon as they are to be used, and a disk must not grow to the size of a claim that it is not in.
pub(in crate::vmi) fn for_owner(observed: &Observed) -> Cow<'_, VirtualMachineInstance> {
    let vmi = &*observed.vmi;
    let moves = vmi.status.as_ref().is_some_and(|status| !status.migrated_volumes.is_empty());
    if moves && has_arrived(observed).is_none() {
        return Cow::Owned(with_claims(vmi, |moved| moved.source_pvc_info.as_ref()));
    }
    Cow::Borrowed(vmi)
}

/// Returns the VMI with one of the claims of each volume that moves.
fn with_claims(
    vmi: &VirtualMachineInstance,
    claim: fn(&StorageMigratedVolumeInfo) -> Option<&PersistentVolumeClaimInfo>,
) -> VirtualMachineInstance {
    let mut vmi = vmi.clone();
    let Some(status) = &mut vmi.status else { return vmi };
    for moved in &status.migrated_volumes {
        let entry = status.volume_status.iter_mut().find(|entry| entry.name == moved.volume_name);
        if let (Some(entry), Some(claim)) = (entry, claim(moved)) {
            entry.persistent_volume_claim_info = Some(claim.clone());
        }
    }
    vmi
}

/// Returns true if a launcher of this node was to receive the domain, and does not any more.
pub(in crate::vmi) fn is_given_up(observed: &Observed) -> bool {
    let is_gone = matches!(observed.object, ObjectState::Deleted(_)) || observed.facts.is_final();
    observed.was_target && (is_gone || observed.target_migration().is_none())
}

/// Returns true if the domain came to this node by the migration, which is not completed.
pub(super) fn has_arrived(observed: &Observed) -> Option<&Migration> {
    let known = observed.facts.migration.as_ref()?;
    (observed.role == Role::Owner && known.side == Side::Target && known.ended && !known.over).then_some(known)
}
