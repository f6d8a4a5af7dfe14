//! The part of a migration before anything is copied: the images over which disks are overlays must be those of the target.
//!
//! The guest runs on meanwhile, and neither libvirt nor the engine waits. A launcher that is restarted ends the migration.

use protocol::MigrationStep;

use super::{MigrationSource, Step};
use crate::engine::model::{Base, ChannelMode, Effect, MigrationEnd, MigrationLimits, MigrationRecord, Work};

impl MigrationSource {
    /// Compares the images beneath the disks that are copied.
    pub(super) fn compare(self, base: &mut Base) -> Self {
        let (migration, images) = (self.request.migration.clone(), self.images.clone());
        let memory = base.active.memory_requested().unwrap_or(0).max(1);
        if let Some(report) = &mut base.published.migration {
            // virt-handler shows a sign of life for a migration with something to copy: large images take longer than a silent one may.
            (report.total, report.remaining) = (memory, memory);
        }
        base.work_for(Self::NAME, Work::CompareImages { migration, images });
        Self { step: Step::Comparing, ..self }
    }

    /// Records the begin of the copy, from which a restarted worker counts the limits.
    pub(super) fn record_copy(&self, base: &mut Base) {
        let Some(report) = &base.published.migration else { return };
        let record = MigrationRecord {
            begin: base.nanoseconds(),
            limits: Some(MigrationLimits::of(&self.request)),
            ..MigrationRecord::of(report, MigrationEnd::Source, self.was_paused)
        };
        base.effects.push(Effect::SaveMigration(Box::new(record), ChannelMode::Source));
    }

    /// Publishes the end of a migration whose domain has ended before it was copied.
    pub(super) fn end_comparing(&self, base: &mut Base) {
        if self.step == Step::Comparing {
            base.publish_failure("the domain has ended before it was copied".to_owned(), false);
            base.publish_step(MigrationStep::NotMoved, MigrationEnd::Source, self.was_paused, ChannelMode::Closed);
        }
    }
}
