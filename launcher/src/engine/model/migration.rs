//! The record of a migration for a restarted worker, and the disks that are copied. Pure.

use std::path::{Path, PathBuf};

use protocol::{MigrateRequest, MigrationMode, MigrationReport, MigrationStep, VolumeDestination};
use serde::{Deserialize, Serialize};

use super::request::RequestError;
use crate::{
    domain::{destination::MovedDisk, parse::DomainConfig},
    migration::BaseImage,
    paths::Paths,
    storage::{self, Backend},
};

/// The end of a migration at which this launcher is.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum MigrationEnd {
    /// To another launcher.
    #[serde(rename = "out")]
    Source,
    /// To this launcher.
    #[serde(rename = "in")]
    Target,
}

/// The limits of a migration to another launcher, as its request has them.
#[derive(Clone, Copy, Debug, Default, Deserialize, PartialEq, Eq, Serialize)]
#[serde(default)]
pub(crate) struct MigrationLimits {
    pub(crate) progress_timeout: u64,
    pub(crate) completion_timeout_per_gb: u64,
    pub(crate) allow_workload_disruption: bool,
    pub(crate) post_copy: bool,
    pub(crate) max_downtime_ms: u64,
}

impl MigrationLimits {
    /// Returns the limits of a request.
    pub(crate) fn of(request: &MigrateRequest) -> Self {
        Self {
            progress_timeout: request.progress_timeout,
            completion_timeout_per_gb: request.completion_timeout_per_gb,
            allow_workload_disruption: request.allow_workload_disruption,
            post_copy: request.post_copy,
            max_downtime_ms: request.max_downtime_ms,
        }
    }
}

/// The last migration, as a restarted worker finds it.
#[derive(Clone, Debug, Deserialize, PartialEq, Eq, Serialize)]
pub(crate) struct MigrationRecord {
    /// Name of the migration.
    pub(crate) migration: String,
    pub(crate) direction: MigrationEnd,
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
    /// Limits of a migration to another launcher that has begun.
    #[serde(default)]
    pub(crate) limits: Option<MigrationLimits>,
}

impl MigrationRecord {
    /// Creates the record of a report.
    pub(crate) fn of(report: &MigrationReport, direction: MigrationEnd, paused: bool) -> Self {
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
            limits: None,
        }
    }

    /// Reports a guest that runs here, after it has come.
    pub(crate) fn has_arrived(&self) -> bool {
        self.direction == MigrationEnd::Target && self.step() == MigrationStep::Moved
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

/// Returns the device names of the disks that are copied: those that live in the launcher pod and to which the guest can write,
/// and those of these volumes. Images that the guest only reads are created at the target.
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

/// Returns the images over which these disks are overlays, of which only the overlays are copied. `directory` has the container disks.
pub(crate) fn base_images(active: &DomainConfig, targets: &[String], directory: &Path) -> Vec<BaseImage> {
    let disks = active.disks.iter().filter(|disk| targets.contains(&disk.target));
    let backing = disks.filter_map(|disk| disk.source.as_ref()?.backing.as_ref());
    backing.filter_map(|(path, _)| BaseImage::beneath(directory, path)).collect()
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
    fn images_of_container_disks_are_compared() {
        let disk = |target: &str, backing: &str| {
            format!(
                "<disk type='file' device='disk'><source file='/eph/disk-data/x'/><backingStore type='file'><format type='raw'/><source file='{backing}'/></backingStore><target dev='{target}' bus='virtio'/><alias name='ua-{target}'/></disk>"
            )
        };
        let disks = [
            disk("vda", "/run/disks/root/disk/a.img"),
            disk("vdb", "/private/vmi-disks/data/disk.img"),
            disk("vdc", "/run/disks/other/disk/b.img"),
        ];
        let active = parse(&format!("<domain><devices>{}</devices></domain>", disks.concat()));
        let copied = ["vda".to_owned(), "vdb".to_owned()];
        let root = BaseImage { volume: "root".into(), path: "disk/a.img".into() };
        assert_eq!(base_images(&active, &copied, Path::new("/run/disks")), [root]);
        assert!(base_images(&active, &[], Path::new("/run/disks")).is_empty());
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
        let limits = MigrationLimits { progress_timeout: 150, ..MigrationLimits::default() };
        let record =
            MigrationRecord { limits: Some(limits), ..MigrationRecord::of(&report, MigrationEnd::Source, true) };
        let mut json = serde_json::to_value(&record).unwrap();
        let read: MigrationRecord = serde_json::from_value(json.clone()).unwrap();
        assert_eq!(read, record);
        assert_eq!((read.report(), read.step(), read.paused), (report, MigrationStep::NotMoved, true));
        // The record of a former release.
        json.as_object_mut().unwrap().remove("limits");
        let read: MigrationRecord = serde_json::from_value(json).unwrap();
        assert_eq!(read, MigrationRecord { limits: None, ..record });
    }
}
