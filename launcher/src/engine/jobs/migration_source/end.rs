//! The end of a migration to another launcher: where the guest runs then.

use std::time::Duration;

use protocol::{Lifecycle, MigrationStep};
use tokio::time::Instant;

use super::{MigrationSource, Step, post_copy::PostCopy};
use crate::{
    engine::{
        jobs::{ABORTED, INTERVAL},
        model::{Base, ChannelMode, Effect, MigrationEnd},
    },
    hypervisor::HypervisorError,
};

/// Time for which a guest is released that may not have arrived, since its domain has not ended by the migration.
const UNCERTAIN: Duration = Duration::from_secs(30);
/// The reason of a domain that has ended by a migration.
const MIGRATED: &str = "migrated";

impl MigrationSource {
    /// Decides on the images beneath the disks of the migration with this name, of which nothing is copied yet.
    pub(super) fn on_compared(mut self, base: &mut Base, migration: &str, result: Result<(), String>) -> Option<Self> {
        if migration != self.migration() {
            return Some(self);
        }
        match result {
            Ok(()) => {
                self.record_copy(base);
                Some(self.copy(base))
            }
            Err(failure) => {
                self.failure = failure;
                self.stay(base)
            }
        }
    }

    /// Ends a migration on a request, of which nothing is copied yet.
    pub(super) fn stop_comparing(mut self, base: &mut Base) -> Option<Self> {
        self.abort = Some(ABORTED.to_owned());
        self.stay(base)
    }

    /// Decides on the end of a domain whose guest may have moved.
    pub(super) fn on_gone(mut self, base: &mut Base, reason: &'static str) -> Self {
        match self.step {
            Step::Opening { .. } | Step::Comparing | Step::Releasing { .. } => return self,
            Step::Copying | Step::Settling => {}
            // libvirt's job has ended with the domain.
            Step::Watching | Step::Restoring | Step::Asking { .. } => {
                (self.step, self.calling, self.next) = (Step::Settling, false, base.now);
            }
        }
        if self.ended.replace(reason).is_none() && reason == "crashed" {
            base.effects.push(Effect::LogLastLines);
        }
        self
    }

    /// Decides on the domain after the end of libvirt's job, when it was read.
    pub(super) fn on_settled(mut self, base: &mut Base) -> Option<Self> {
        self.calling = false;
        let published = &base.published;
        let stands = published.lifecycle() == Lifecycle::Paused && published.reason != "ioError";
        if !base.reading.is_fresh {
            self.next = base.now + INTERVAL;
            Some(self)
        } else if let Some(ended) = self.ended {
            if !self.killed {
                return self.release(base, ended);
            }
            let is_lost = matches!(self.post_copy, PostCopy::Switched { .. }) && !self.failure.is_empty();
            let failure = if is_lost { self.failure.clone() } else { "the domain was destroyed".to_owned() };
            self.lose(base, &failure)
        } else if matches!(self.post_copy, PostCopy::Switched { .. }) {
            self.hold(base)
        } else if stands && !self.was_paused {
            self.step = Step::Restoring;
            self.advance_now(base)
        } else {
            self.stay(base)
        }
    }

    /// Decides on a QEMU that was ended since libvirt has decided that the guest has left. libvirt itself reports it later.
    pub(super) fn on_departed(mut self, base: &mut Base, result: Result<(), String>) -> Option<Self> {
        match result {
            Ok(()) => {
                self.ended = Some(MIGRATED);
                self.release(base, MIGRATED)
            }
            Err(error) => {
                tracing::warn!(error, "cannot end QEMU after the migration, waiting for libvirt");
                Some(self)
            }
        }
    }

    /// Lets the target run the guest, whose QEMU has ended here.
    fn release(mut self, base: &mut Base, reason: &str) -> Option<Self> {
        (self.step, self.calling) = (Step::Releasing { until: base.now + UNCERTAIN }, false);
        tracing::info!(reason, "the domain has ended here, releasing it at the target");
        base.published.set_lifecycle(Lifecycle::Paused);
        base.published.reason = "migration".into();
        base.publish_step(MigrationStep::Releasing, MigrationEnd::Source, self.was_paused, ChannelMode::Source);
        self.advance_now(base)
    }

    /// Decides on the guest that was resumed after a migration that has failed.
    pub(super) fn on_restored(mut self, base: &mut Base, result: Result<(), HypervisorError>) -> Option<Self> {
        self.calling = false;
        self.step = Step::Settling;
        match result {
            Ok(()) => self.advance_now(base),
            Err(error) => {
                tracing::warn!(%error, "cannot resume the guest after the migration yet");
                self.next = base.now + INTERVAL;
                Some(self)
            }
        }
    }

    /// Decides on the target's answer to the release.
    pub(super) fn on_released(mut self, base: &mut Base, until: Instant, result: Result<bool, String>) -> Option<Self> {
        self.calling = false;
        match result {
            Ok(true) => self.leave(base),
            Ok(false) => self.lose(base, "the domain has ended before it had arrived at the target"),
            Err(error) => {
                tracing::info!(error, "the target has not confirmed the release yet");
                let is_uncertain = self.ended != Some(MIGRATED);
                if is_uncertain && base.now >= until {
                    return self.lose(base, "the domain has ended during the migration");
                }
                Some(self)
            }
        }
    }

    /// Ends a migration after which the guest runs on here.
    fn stay(mut self, base: &mut Base) -> Option<Self> {
        if self.begin_post_copy(base) {
            return Some(self);
        }
        let aborted = self.abort.is_some();
        let mut failure = self.abort.take().unwrap_or_else(|| std::mem::take(&mut self.failure));
        if failure.is_empty() {
            "the migration was interrupted".clone_into(&mut failure);
        }
        tracing::warn!(failure, "the domain has not moved");
        base.publish_failure(failure, aborted);
        self.publish_end(base, MigrationStep::NotMoved);
        base.act_later(self.then);
        None
    }

    /// Ends a migration after which the guest runs at the target.
    fn leave(self, base: &mut Base) -> Option<Self> {
        tracing::info!("the guest runs at the target");
        self.publish_end(base, MigrationStep::Moved);
        base.end_as(Lifecycle::Shutoff, MIGRATED);
        base.act_later(self.then);
        None
    }

    /// Ends a migration after which the guest runs nowhere.
    pub(super) fn lose(self, base: &mut Base, failure: &str) -> Option<Self> {
        base.publish_failure(failure.to_owned(), false);
        self.publish_end(base, MigrationStep::NotMoved);
        base.end_as(Lifecycle::Shutoff, self.ended.filter(|reason| *reason != MIGRATED).unwrap_or("failed"));
        base.act_later(self.then);
        None
    }

    fn publish_end(&self, base: &mut Base, step: MigrationStep) {
        base.publish_step(step, MigrationEnd::Source, self.was_paused, ChannelMode::Closed);
    }
}
