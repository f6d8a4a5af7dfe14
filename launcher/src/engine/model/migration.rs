//! The jobs of migrations, the record for a restarted worker, and the disks that are copied. Pure.

use std::{
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use protocol::{MigrateRequest, MigrationMode, MigrationReport, MigrationStep, VolumeDestination};
use serde::{Deserialize, Serialize};
use tokio::time::Instant;

use super::request::{Action, RequestError, RequestId, Wanted};
use crate::{
    domain::{Domain, destination::MovedDisk, parse::DomainConfig},
    hypervisor::Progress,
    paths::Paths,
    storage::{self, Backend},
};

/// Which way the domain moves.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Direction {
    /// To another launcher.
    Out,
    /// To this launcher.
    In,
}

/// The last migration, as a restarted worker finds it.
#[derive(Clone, Debug, Deserialize, PartialEq, Eq, Serialize)]
pub(crate) struct MigrationRecord {
    /// Name of the migration.
    pub(crate) migration: String,
    /// Direction.
    pub(crate) direction: Direction,
    /// Number of the step.
    pub(crate) step: i32,
    /// The user has paused the guest.
    pub(crate) paused: bool,
    /// Error message.
    pub(crate) failure: String,
    /// The failure is the result of an abort.
    pub(crate) aborted: bool,
    /// Times in nanoseconds since 1970.
    pub(crate) begin: u64,
    /// See `begin`.
    pub(crate) end: u64,
    /// The guest has left its memory behind.
    #[serde(default)]
    pub(crate) post_copy: bool,
}

impl MigrationRecord {
    /// Creates the record of a report.
    pub(crate) fn of(report: &MigrationReport, direction: Direction, paused: bool) -> Self {
        Self {
            migration: report.migration.clone(),
            direction,
            step: report.step,
            paused,
            failure: report.failure.clone(),
            aborted: report.aborted,
            begin: report.begin,
            end: report.end,
            post_copy: report.mode() == MigrationMode::PostCopy,
        }
    }

    /// Returns the report of the record.
    pub(crate) fn report(&self) -> MigrationReport {
        let mode = if self.post_copy { MigrationMode::PostCopy } else { MigrationMode::default() };
        MigrationReport {
            migration: self.migration.clone(),
            step: self.step,
            mode: mode.into(),
            failure: self.failure.clone(),
            aborted: self.aborted,
            begin: self.begin,
            end: self.end,
            ..MigrationReport::default()
        }
    }

    /// Returns the step.
    pub(crate) fn step(&self) -> MigrationStep {
        MigrationStep::try_from(self.step).unwrap_or_default()
    }
}

/// A migration to another launcher.
#[derive(Clone, Debug)]
pub(crate) struct MigrationOut {
    /// The request; after a restart of the worker only its name is known.
    pub(crate) request: Arc<MigrateRequest>,
    /// Requests that wait for its begin.
    pub(crate) requests: Vec<RequestId>,
    /// The user has paused the guest.
    pub(crate) was_paused: bool,
    /// Device names of the disks that are copied.
    pub(crate) copied: Vec<String>,
    /// Progress.
    pub(crate) step: OutStep,
    /// Time of the begin.
    pub(crate) began: Instant,
    /// Time of the next read of the progress or of the next attempt.
    pub(crate) next: Instant,
    /// A call of this job is in progress.
    pub(crate) calling: bool,
    /// Bytes that remained at the last progress, and its time.
    pub(crate) progress: (u64, Instant),
    /// Size of the disks that are copied.
    pub(crate) disks: u64,
    /// The longest downtime that was set, in milliseconds.
    pub(crate) downtime: u64,
    /// An abort is in progress.
    pub(crate) aborting: bool,
    /// Reason of an abort.
    pub(crate) abort: Option<String>,
    /// Error of libvirt's call.
    pub(crate) failure: String,
    /// Reason with which the domain has ended here.
    pub(crate) ended: Option<&'static str>,
    /// The domain was to be destroyed: no guest is released at the target.
    pub(crate) killed: bool,
    /// How far post-copy has come.
    pub(crate) post_copy: PostCopy,
    /// Time since which the connection of post-copy is known to be broken.
    pub(crate) broken: Option<Instant>,
    /// Requests to end the guest that follow.
    pub(crate) then: Vec<(RequestId, Action)>,
    /// Time limit of releases of a guest that may not have arrived.
    pub(crate) release_until: Instant,
}

/// Step of a migration to another launcher.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum OutStep {
    /// Writes the record and opens the channels.
    Opening,
    /// libvirt's call is in progress.
    Copying,
    /// The call has ended without result, or a former worker made it: libvirt's job may go on.
    Watching,
    /// The job has ended: reads the domain.
    Settling,
    /// Lets the guest run again.
    Restoring,
    /// Asks the target for a guest in post-copy whose connection is broken.
    Asking,
    /// The domain has ended here: the target may run the guest.
    Releasing,
}

impl OutStep {
    /// Returns true if the domain is here and can be destroyed.
    pub(crate) fn has_domain(self) -> bool {
        matches!(self, Self::Copying | Self::Watching | Self::Restoring | Self::Asking)
    }
}

/// How far a migration has come to post-copy.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum PostCopy {
    /// Nowhere.
    #[default]
    None,
    /// The job is aborted for one that can switch.
    Wanted,
    /// The job can switch.
    Ready,
    /// The guest has left, and never runs here again.
    Switched,
}

impl MigrationOut {
    /// Creates the job of a request.
    pub(crate) fn new(request: Arc<MigrateRequest>, requests: Vec<RequestId>, now: Instant) -> Self {
        Self {
            request,
            requests,
            was_paused: false,
            copied: Vec::new(),
            step: OutStep::Opening,
            began: now,
            next: now,
            calling: false,
            progress: (u64::MAX, now),
            disks: 0,
            downtime: 0,
            aborting: false,
            abort: None,
            failure: String::new(),
            ended: None,
            killed: false,
            post_copy: PostCopy::None,
            broken: None,
            then: Vec::new(),
            release_until: now,
        }
    }

    /// Returns the job of a record.
    pub(crate) fn adopted(record: &MigrationRecord, now: Instant) -> Self {
        let request = MigrateRequest { migration: record.migration.clone(), ..MigrateRequest::default() };
        let step = OutStep::Watching;
        // The former worker has limited the downtime.
        Self { was_paused: record.paused, step, downtime: u64::MAX, ..Self::new(Arc::new(request), Vec::new(), now) }
    }

    /// Returns the time of the next wake-up.
    pub(crate) fn wake(&self) -> Option<Instant> {
        (!self.calling && self.step != OutStep::Opening).then_some(self.next)
    }

    /// Returns what the time limits demand, with the time since the begin.
    pub(crate) fn limit(&self, memory: u64, mode: MigrationMode, now: Instant) -> Option<Limit> {
        let request = &self.request;
        if matches!(self.post_copy, PostCopy::Wanted | PostCopy::Switched) {
            return None;
        }
        let stuck = now.duration_since(self.progress.1);
        if request.progress_timeout > 0 && stuck >= Duration::from_secs(request.progress_timeout) {
            return Some(Limit::Stuck(request.progress_timeout));
        }
        let is_first = mode == MigrationMode::PreCopy && self.post_copy == PostCopy::None;
        let passes = if is_first { 1 } else { 2 };
        let size = memory.saturating_add(self.disks).div_ceil(GIGABYTE);
        let seconds = request.completion_timeout_per_gb.saturating_mul(size).saturating_mul(passes);
        if seconds == 0 || now.duration_since(self.began) < Duration::from_secs(seconds) {
            return None;
        }
        Some(match request.allow_workload_disruption && is_first {
            // The memory of a paused guest does not change.
            true if request.post_copy && !self.was_paused => Limit::PostCopy,
            true => Limit::Pause,
            false => Limit::TooLong(seconds),
        })
    }

    /// Returns the longest downtime to set before this iteration, in milliseconds; `None` if it is set.
    pub(crate) fn next_downtime(&mut self, iteration: u64) -> Option<u64> {
        let longest = match self.request.max_downtime_ms {
            0 => DEFAULT_DOWNTIME,
            milliseconds => milliseconds,
        };
        let step = DOWNTIMES.iter().find(|(until, _)| iteration <= *until);
        let wanted = step.map_or(longest, |(_, milliseconds)| longest.min(*milliseconds)).max(self.downtime);
        (wanted != self.downtime).then(|| {
            self.downtime = wanted;
            wanted
        })
    }

    /// Records progress. A decrease of what remains counts as progress.
    pub(crate) fn advance(&mut self, progress: &Progress, now: Instant) {
        self.disks = progress.disks;
        if progress.remaining < self.progress.0 || progress.total == 0 {
            self.progress.1 = now;
        }
        self.progress.0 = progress.remaining;
    }
}

/// QEMU's longest downtime if the request has none, in milliseconds.
const DEFAULT_DOWNTIME: u64 = 300;
/// Iterations over the guest's memory up to which a shorter downtime is tried, in milliseconds. QEMU stops the guest as soon as it
/// can copy the rest within the longest downtime, even if another short iteration would leave much less of a calm guest.
const DOWNTIMES: [(u64, u64); 2] = [(3, 50), (6, 200)];

/// Limits count in decimal gigabytes.
const GIGABYTE: u64 = 1_000_000_000;

/// A time limit that has passed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Limit {
    /// The guest is paused, so that the rest can be copied.
    Pause,
    /// The guest leaves before its memory is copied.
    PostCopy,
    /// Aborted: no progress for these seconds.
    Stuck(u64),
    /// Aborted after these seconds.
    TooLong(u64),
}

/// A migration to this launcher.
#[derive(Clone, Debug)]
pub(crate) struct MigrationIn {
    /// Name of the migration.
    pub(crate) migration: String,
    /// The VMI; `None` after a restart of the worker, until virt-handler repeats its request.
    pub(crate) wanted: Option<Arc<Wanted>>,
    /// Requests that wait for the preparation.
    pub(crate) requests: Vec<RequestId>,
    /// Progress.
    pub(crate) step: InStep,
    /// The domain was seen.
    pub(crate) seen: bool,
    /// Number of the domain that was seen first.
    pub(crate) first: Option<u32>,
    /// A domain was here and has gone for one that can switch to post-copy.
    pub(crate) returns: bool,
    /// Aborted on request.
    pub(crate) aborted: bool,
    /// The source has ended, and the user has paused the guest: it stays paused.
    pub(crate) paused: bool,
    /// Releases that wait for the guest.
    pub(crate) releases: Vec<RequestId>,
    /// Time of the next attempt to run the guest.
    pub(crate) next: Instant,
    /// An attempt is in progress.
    pub(crate) calling: bool,
    /// Time at which this launcher decides without the source, which can have ended.
    pub(crate) until: Option<Instant>,
}

/// Step of a migration to this launcher.
#[derive(Clone, Debug)]
pub(crate) enum InStep {
    /// Prepares the disks.
    Preparing,
    /// Waits for the connection.
    Connecting {
        /// The rendered domain.
        domain: Box<Domain>,
        /// Time limit.
        until: Instant,
    },
    /// Starts DHCP, console and credentials.
    Serving,
    /// Writes the record and opens the channels.
    Opening,
    /// Waits for the domain and for the release.
    Waiting,
    /// Lets the guest run.
    Releasing,
}

impl MigrationIn {
    /// Creates the job of a request.
    pub(crate) fn new(migration: String, wanted: Arc<Wanted>, requests: Vec<RequestId>, now: Instant) -> Self {
        Self {
            migration,
            wanted: Some(wanted),
            requests,
            step: InStep::Preparing,
            seen: false,
            first: None,
            returns: false,
            aborted: false,
            paused: false,
            releases: Vec::new(),
            next: now,
            calling: false,
            until: None,
        }
    }

    /// Returns the job of a record. A released guest must run.
    pub(crate) fn adopted(record: &MigrationRecord, now: Instant) -> Self {
        let released = record.step() == MigrationStep::Releasing;
        Self {
            migration: record.migration.clone(),
            wanted: None,
            requests: Vec::new(),
            step: if released { InStep::Releasing } else { InStep::Waiting },
            seen: false,
            first: None,
            returns: false,
            aborted: false,
            paused: record.paused,
            releases: Vec::new(),
            next: now,
            calling: false,
            until: None,
        }
    }

    /// Returns true if a domain that has gone may come again.
    pub(crate) fn may_return(&self) -> bool {
        let status = self.wanted.as_ref().and_then(|wanted| wanted.vmi.status.as_ref());
        let state = status.and_then(|status| status.migration_state.as_ref());
        let options = state.and_then(|state| state.migration_configuration.as_ref());
        !self.returns && !self.aborted && options.is_some_and(|options| options.switches_to_post_copy())
    }

    /// Returns the time of the next wake-up.
    pub(crate) fn wake(&self) -> Option<Instant> {
        match &self.step {
            InStep::Connecting { until, .. } => Some(*until),
            InStep::Waiting => self.until,
            InStep::Releasing if !self.calling => Some(self.next),
            _ => None,
        }
    }
}

/// Returns the device names of the disks that are copied: those that live in the launcher pod and to which the guest can write,
/// and those of these volumes. Images that the guest only reads are created at the target.
///
/// # Errors
/// When the domain has no disk of a volume.
pub(crate) fn copied_disks(
    active: &DomainConfig,
    own_images: &[PathBuf],
    volumes: &[String],
) -> Result<Vec<String>, RequestError> {
    let is_active = |volume: &&String| active.disks.iter().any(|disk| disk.name == **volume && disk.source.is_some());
    if let Some(missing) = volumes.iter().find(|volume| !is_active(volume)) {
        return Err(RequestError::NoVolume(missing.clone()));
    }
    let is_own = |path: &Path| own_images.iter().any(|directory| path.starts_with(directory));
    let copied = active.disks.iter().filter(|disk| {
        let lives_here = disk
            .source
            .as_ref()
            .is_some_and(|source| matches!(&source.backend, Backend::File { path, .. } if is_own(path)));
        let writable = disk.device == "disk" && !disk.readonly;
        (lives_here && writable) || volumes.contains(&disk.name)
    });
    Ok(copied.map(|disk| disk.target.clone()).collect())
}

/// Returns the disks of volumes that move to other claims, with their files or devices at the target. Its paths are those of this pod.
pub(crate) fn moved_disks(active: &DomainConfig, destinations: &[VolumeDestination], paths: &Paths) -> Vec<MovedDisk> {
    let moved = destinations.iter().filter(|moved| Paths::is_single_component(&moved.volume)).filter_map(|moved| {
        let disk = active.disks.iter().find(|disk| disk.name == moved.volume && disk.source.is_some())?;
        let backend = storage::claim_backend(&moved.volume, moved.block, paths);
        Some(MovedDisk { target: disk.target.clone(), backend })
    });
    moved.collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{domain::parse::parse, storage::ImageFormat};

    #[test]
    fn writable_images_of_the_pod_and_named_volumes_are_copied() {
        let disk = |name: &str, device: &str, target: &str, file: &str, readonly: &str| {
            format!(
                "<disk type='file' device='{device}'><source file='{file}'/><target dev='{target}' bus='virtio'/>{readonly}<alias name='ua-{name}'/></disk>"
            )
        };
        let disks = [
            disk("root", "disk", "vda", "/eph/disk-data/root/disk.qcow2", ""),
            disk("ci", "cdrom", "sda", "/eph/cloud-init-data/ci.iso", "<readonly/>"),
            disk("ci2", "disk", "vdb", "/eph/cloud-init-data/ci2.iso", ""),
            disk("cfg", "disk", "vdc", "/private/config-disks/cfg.iso", "<readonly/>"),
            disk("data", "disk", "vdd", "/private/vmi-disks/data/disk.img", ""),
            disk("near", "disk", "vde", "/eph/disk-data2/x", ""),
            "<disk type='block' device='disk'><source dev='/dev/blk'/><target dev='vdf' bus='virtio'/><alias name='ua-blk'/></disk>".into(),
            "<disk type='file' device='cdrom'><target dev='sdb' bus='sata'/><alias name='ua-empty'/></disk>".into(),
        ];
        let active = parse(&format!("<domain><devices>{}</devices></domain>", disks.concat()));
        let own = ["/eph/disk-data".into(), "/eph/cloud-init-data".into(), "/private/config-disks".into()];
        assert_eq!(copied_disks(&active, &own, &[]).unwrap(), ["vda", "vdb"]);
        assert_eq!(copied_disks(&active, &own, &["blk".into(), "data".into()]).unwrap(), ["vda", "vdb", "vdd", "vdf"]);
        for volume in ["other", "empty"] {
            let missing = copied_disks(&active, &own, &[volume.into()]);
            assert_eq!(missing, Err(RequestError::NoVolume(volume.into())));
        }
    }

    #[test]
    fn moved_disks_have_the_paths_that_the_target_renders() {
        let disk = |name: &str, target: &str, source: &str| {
            format!("<disk>{source}<target dev='{target}' bus='virtio'/><alias name='ua-{name}'/></disk>")
        };
        let disks = [
            disk("root", "vda", "<source file='/private/vmi-disks/root/disk.img'/>"),
            disk("data", "vdb", "<source dev='/dev/data'/>"),
            disk("empty", "sda", ""),
        ];
        let active = parse(&format!("<domain><devices>{}</devices></domain>", disks.concat()));
        let paths = Paths { private: "/private".into(), ..Paths::default() };
        let file = |path: &str| Backend::File { path: path.into(), format: ImageFormat::Raw };
        let block = |path: &str| Backend::Block { path: path.into() };
        for (volume, to_block, expected) in [
            ("root", true, Some(("vda", block("/dev/root")))),
            ("root", false, Some(("vda", file("/private/vmi-disks/root/disk.img")))),
            ("data", true, Some(("vdb", block("/dev/data")))),
            ("data", false, Some(("vdb", file("/private/vmi-disks/data/disk.img")))),
            ("empty", true, None),
            ("other", true, None),
            ("../root", true, None),
        ] {
            let destination = VolumeDestination { volume: volume.into(), block: to_block };
            let expected = expected.map(|(target, backend)| MovedDisk { target: target.into(), backend });
            assert_eq!(moved_disks(&active, &[destination], &paths), Vec::from_iter(expected), "{volume} {to_block}");
        }
    }

    #[test]
    fn limits_count_in_decimal_gigabytes_and_pause_or_abort() {
        let now = Instant::now();
        let out = |request| MigrationOut::new(Arc::new(request), Vec::new(), now);
        let request =
            MigrateRequest { completion_timeout_per_gb: 150, progress_timeout: 100, ..MigrateRequest::default() };
        let gentle = MigrateRequest { allow_workload_disruption: true, ..request.clone() };
        let unlimited = MigrateRequest::default();
        let switching = MigrateRequest { post_copy: true, ..gentle.clone() };
        let (pre, paused) = (MigrationMode::PreCopy, MigrationMode::PausedCopy);
        // Progress is made all the time, or for the first 10 s.
        for (request, memory, disks, mode, seconds, advances, expected) in [
            (&request, 512 << 20, 0, pre, 149, true, None),
            (&request, 512 << 20, 0, pre, 150, true, Some(Limit::TooLong(150))),
            (&request, 1 << 30, 0, pre, 150, true, None),
            (&request, 512 << 20, 600_000_000, pre, 299, true, None),
            (&request, 512 << 20, 600_000_000, pre, 300, true, Some(Limit::TooLong(300))),
            (&gentle, 512 << 20, 0, pre, 150, true, Some(Limit::Pause)),
            (&gentle, 512 << 20, 0, paused, 299, true, None),
            (&gentle, 512 << 20, 0, paused, 300, true, Some(Limit::TooLong(300))),
            (&request, 512 << 20, 0, pre, 109, false, None),
            (&request, 512 << 20, 0, pre, 110, false, Some(Limit::Stuck(100))),
            (&switching, 512 << 20, 0, pre, 150, true, Some(Limit::PostCopy)),
            (&unlimited, 512 << 20, 0, pre, 1_000_000, false, None),
        ] {
            let mut job = out(request.clone());
            let at = |seconds| now + Duration::from_secs(seconds);
            let progress = |remaining| Progress { total: 1 << 30, disks, remaining, ..Progress::default() };
            job.advance(&progress(100), at(10));
            job.advance(&progress(if advances { 50 } else { 100 }), at(seconds));
            assert_eq!(job.limit(memory, mode, at(seconds)), expected, "{request:?} {seconds}");
        }
    }

    #[test]
    fn a_record_keeps_the_report() {
        let report = MigrationReport {
            migration: "m".into(),
            step: MigrationStep::NotMoved.into(),
            failure: "f".into(),
            aborted: true,
            begin: 1,
            end: 2,
            ..MigrationReport::default()
        };
        let record = MigrationRecord::of(&report, Direction::Out, true);
        let text = serde_json::to_string(&record).unwrap();
        let read: MigrationRecord = serde_json::from_str(&text).unwrap();
        assert_eq!((read.report(), read.step(), read.paused), (report, MigrationStep::NotMoved, true));
    }
}
