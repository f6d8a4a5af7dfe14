//! The source of a migration: the options of the launcher, and what the status shows of its progress.

use api::{
    VirtualMachineInstance, VirtualMachineInstanceStatus,
    constants::annotation::FORCE_MIGRATION_FAILURE,
    dedicated, quantity,
    vmi::{migration::MigrationConfigurationOptions, status::StorageMigratedVolumeInfo},
};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use protocol::{MigrateRequest, MigrationMode, MigrationReport, MigrationStep, VolumeDestination, features::Feature};

use super::{ABORT_FAILED, ABORTED, FORCED, fail, is_annotated, time_of};
use crate::{
    launcher::bounded,
    vmi::{
        desired::Metadata,
        event::Event,
        migration_facts::Migration,
        observed::{Link, MIGRATE, Now, Observed},
    },
};

/// Seconds per GB until a migration is aborted, and seconds without progress, if the status has none.
const TIME_LIMIT: u64 = 150;
/// Refusals of the launcher after which the migration fails: about half a minute. Another job may be in progress at first.
const ATTEMPTS: u32 = 6;
/// Most connections for the memory of a guest. virt-handler has two threads for them.
const CONNECTIONS: u32 = 4;
/// Bandwidth limit, in bytes a second, for each connection. QEMU counts what a connection sends late: with a limit of 6 MiB/s, eight of
/// them sent 45 MiB/s.
const SHARE: u64 = 256 << 20;

/// State of a migration whose domain leaves this node.
#[derive(Clone, Debug, PartialEq)]
pub(in crate::vmi) enum Progress<'a> {
    /// It has not begun.
    Waiting,
    /// The domain is copied.
    Copying(&'a MigrationReport),
    /// The domain has ended here; the target runs it or is about to.
    Gone(&'a MigrationReport),
    /// It failed, and the guest runs on here.
    Failed {
        reason: String,
        /// The failure is the result of an abort.
        aborted: bool,
        /// Time of the end in nanoseconds since 1970; 0: now.
        end: u64,
    },
}

/// Returns the state of the migration whose domain leaves this node.
pub(in crate::vmi) fn progress<'a>(observed: &'a Observed, migration: &Migration) -> Progress<'a> {
    let failed = |reason: &str| Progress::Failed { reason: reason.to_owned(), aborted: false, end: 0 };
    if let Some(report) = observed.migration_report(&migration.uid) {
        return match report.step() {
            MigrationStep::Copying => Progress::Copying(report),
            MigrationStep::Releasing | MigrationStep::Moved => Progress::Gone(report),
            MigrationStep::NotMoved if report.aborted => {
                Progress::Failed { reason: ABORTED.into(), aborted: true, end: report.end }
            }
            MigrationStep::NotMoved => {
                let reason = if report.failure.is_empty() { "unknown" } else { &report.failure };
                Progress::Failed { reason: bounded(reason), aborted: false, end: report.end }
            }
            MigrationStep::Prepared | MigrationStep::Unspecified => Progress::Waiting,
        };
    }
    let refused = observed.refused_migration.as_ref().filter(|refused| refused.migration == migration.uid);
    if let Some(refused) = refused.filter(|refused| refused.permanent || refused.count >= ATTEMPTS) {
        return failed(&bounded(&refused.message));
    }
    let is_called = observed.is_busy(MIGRATE) || observed.called_migration.as_deref() == Some(migration.uid.as_str());
    if (migration.abort_requested || observed.is_leaving()) && !is_called && !migration.started {
        return Progress::Failed { reason: ABORTED.into(), aborted: migration.abort_requested, end: 0 };
    }
    if let Some(address) = migration.refused_address.filter(|_| !is_called && !migration.started) {
        return failed(&format!("the migration target names the address {address}, which no other node can have"));
    }
    // A launcher that has not reported yet may have begun.
    let may_fail = observed.reported && migration.endpoint.is_some() && !is_called && !migration.started;
    if may_fail && is_annotated(&observed.vmi, FORCE_MIGRATION_FAILURE) {
        return failed(FORCED);
    }
    let Link::Up { greeted: true, features, .. } = &observed.link else { return Progress::Waiting };
    if !features.contains(&Feature::LiveMigration) {
        return failed(&format!("virt-launcher does not support {}", Feature::LiveMigration.name()));
    }
    // A restarted launcher knows no migration. The domain runs here, and the target does not without its word.
    if migration.started && observed.reported && observed.domain().is_alive() {
        return failed("virt-launcher has restarted");
    }
    Progress::Waiting
}

/// Writes the progress of the migration whose domain leaves this node. `ends`: the VMI has ended.
pub(in crate::vmi) fn apply(
    next: &mut VirtualMachineInstanceStatus,
    metadata: &mut Metadata,
    observed: &Observed,
    ends: bool,
    now: Now,
) -> Option<Event> {
    let migration = observed.source_migration()?;
    let vmi = &observed.vmi;
    let state = next.migration_state.get_or_insert_default();
    let show = |report: &MigrationReport, state: &mut api::vmi::migration::VirtualMachineInstanceMigrationState| {
        if state.start_timestamp.is_none() {
            state.start_timestamp = Some(time_of(report.begin, now.wall));
        }
        state.mode = Some(
            match report.mode() {
                MigrationMode::PreCopy => "PreCopy",
                MigrationMode::PausedCopy => "Paused",
                MigrationMode::PostCopy => "PostCopy",
            }
            .into(),
        );
        if state.abort_requested && !report.abort_failure.is_empty() {
            state.abort_status = Some(ABORT_FAILED.into());
        }
    };
    match progress(observed, migration) {
        Progress::Failed { reason, aborted, end } => {
            if let Some(report) = observed.migration_report(&migration.uid) {
                show(report, state);
            }
            let end = time_of(end, now.wall);
            // A migration that has ended has begun, as clients expect.
            state.start_timestamp.get_or_insert_with(|| end.clone());
            return Some(fail(next, metadata, vmi, &reason, aborted, end));
        }
        Progress::Copying(report) => show(report, state),
        Progress::Gone(report) => {
            show(report, state);
            if state.abort_requested {
                state.abort_status = Some(ABORT_FAILED.into());
            }
        }
        Progress::Waiting => {}
    }
    ends.then(|| {
        let reason = "the VMI ended during the migration";
        fail(next, metadata, vmi, reason, false, Time(now.wall))
    })
}

/// Returns the options for the launcher.
pub(in crate::vmi) fn request(vmi: &VirtualMachineInstance, migration: &str) -> MigrateRequest {
    let status = vmi.status.as_ref();
    let state = status.and_then(|status| status.migration_state.as_ref());
    let fallback = MigrationConfigurationOptions::default();
    let options = state.and_then(|state| state.migration_configuration.as_ref()).unwrap_or(&fallback);
    let positive = |value: Option<i64>, default: u64| value.map_or(default, |value| u64::try_from(value).unwrap_or(0));
    let bandwidth = options.bandwidth_per_migration.as_ref().and_then(|limit| quantity::units(limit).ok());
    let bandwidth = positive(bandwidth, 0);
    let volumes = || status.into_iter().flat_map(|status| &status.migrated_volumes);
    MigrateRequest {
        migration: migration.to_owned(),
        bandwidth,
        completion_timeout_per_gb: positive(options.completion_timeout_per_gib, TIME_LIMIT),
        progress_timeout: positive(options.progress_timeout, TIME_LIMIT),
        max_downtime_ms: options.max_downtime_ms.unwrap_or(0),
        auto_converge: options.allow_auto_converge.unwrap_or(false),
        allow_unsafe: options.unsafe_migration_override.unwrap_or(false),
        allow_workload_disruption: options.allow_workload_disruption.or(options.allow_post_copy).unwrap_or(false),
        memory_connections: connections(vmi, bandwidth),
        post_copy: options.switches_to_post_copy(),
        copied_volumes: volumes().map(|volume| volume.volume_name.clone()).collect(),
        destinations: volumes().filter_map(destination).collect(),
        vmi: if dedicated::is_dedicated(&vmi.spec.domain) {
            serde_json::to_vec(vmi).unwrap_or_default()
        } else {
            Vec::new()
        },
    }
}

/// Returns the kind of the claim to which a volume moves.
fn destination(moved: &StorageMigratedVolumeInfo) -> Option<VolumeDestination> {
    let mode = moved.destination_pvc_info.as_ref()?.volume_mode.as_deref();
    Some(VolumeDestination { volume: moved.volume_name.clone(), block: mode == Some("Block") })
}

/// Returns the number of connections for the memory. `bandwidth`: the limit in bytes a second; 0: none.
fn connections(vmi: &VirtualMachineInstance, bandwidth: u64) -> u32 {
    match (has_cpu_limit(vmi), bandwidth) {
        (true, _) => 1,
        (false, 0) => CONNECTIONS,
        (false, limit) => u32::try_from(limit / SHARE).unwrap_or(CONNECTIONS).clamp(1, CONNECTIONS),
    }
}

/// Returns true if the threads of a migration would take CPU time from the guest.
fn has_cpu_limit(vmi: &VirtualMachineInstance) -> bool {
    let domain = &vmi.spec.domain;
    let limit = domain.resources.limits.get("cpu").and_then(|limit| quantity::milli(limit).ok());
    dedicated::is_dedicated(domain) || limit.is_some_and(|limit| limit != 0)
}
