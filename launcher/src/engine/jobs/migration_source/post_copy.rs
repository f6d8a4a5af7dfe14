//! The part of a migration that switches to post-copy: the guest runs at the target and fetches the rest of its memory from here.
//!
//! ```text
//!   Copying ──(time limit)──> first job is aborted ──> Copying again, post-copy is started ──> switched
//!                                                                                                │
//!              (the guest is whole at the target)  QEMU ends here, Releasing <──┐                │ its job ends,
//!                                                                            Asking <── Settling │ the domain is here
//!              (it is not)              QEMU ends here, the guest is lost <─────┘          ^─────┘
//! ```
//! The first job arrives paused and can end without post-copy. A second one is needed since libvirt does not resume a paused
//! arrival before its last page has come. From the switch on, the guest never runs here again. A broken connection is not
//! repaired: libvirtd 11.3 ends by SIGSEGV at the target of a migration with POSTCOPY_RESUME.

use std::time::Duration;

use protocol::{Lifecycle, MigrationMode};
use tokio::time::Instant;

use super::{INTERVAL, MigrationSource, Step};
use crate::{
    engine::model::{Base, DomainCall, is_apart},
    hypervisor::{HypervisorError, MigrateWay},
};

/// Pause between attempts to start post-copy: libvirt's job begins only after its disks were copied.
const START_INTERVAL: Duration = Duration::from_millis(100);
/// Time for libvirt's call to return after the connection of post-copy is broken.
const RETURN_LIMIT: Duration = Duration::from_secs(10);
/// Time for the target to answer whether the guest is whole.
const ASK_LIMIT: Duration = Duration::from_secs(30);

/// How far a migration has come to post-copy.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum PostCopy {
    /// Nowhere.
    #[default]
    None,
    /// The job is aborted for one that can switch.
    Wanted,
    /// The job can switch.
    Ready,
    /// The guest has left, and never runs here again.
    Switched {
        /// Time since which the connection is known to be broken.
        broken: Option<Instant>,
    },
}

impl MigrationSource {
    /// Aborts the first job, which a second one follows.
    pub(super) fn prefer_post_copy(&mut self, base: &mut Base) {
        tracing::warn!("the migration takes too long, switching to post-copy");
        self.post_copy = PostCopy::Wanted;
        self.call_abort(base);
    }

    /// Begins the second job if it is due. Returns false if it is not.
    pub(super) fn begin_post_copy(&mut self, base: &mut Base) -> bool {
        let is_due = self.post_copy == PostCopy::Wanted && self.abort.is_none() && self.then.is_empty();
        if is_due {
            self.post_copy = PostCopy::Ready;
            self.abort_again = false;
            (self.step, self.calling, self.next) = (Step::Copying, false, base.now + START_INTERVAL);
            self.progress = (u64::MAX, base.now);
            self.failure.clear();
            self.call_migrate(base, MigrateWay::PostCopy);
        }
        is_due
    }

    /// Decides on an attempt to start post-copy. It is repeated until the domain shows the switch.
    pub(super) fn on_post_copy_started(mut self, base: &mut Base, result: Result<(), HypervisorError>) -> Self {
        (self.calling, self.next) = (false, base.now + START_INTERVAL);
        self.check_limits(base);
        if let Err(error) = result {
            tracing::debug!(%error, "post-copy cannot start yet");
            // libvirt copies the disks first, which is progress.
            if !self.aborting {
                base.call_for(Self::NAME, DomainCall::ReadProgress);
                self.calling = true;
            }
        }
        self
    }

    /// Learns from the domain that the guest has left.
    pub(super) fn on_seen(mut self, base: &mut Base) -> Self {
        let published = &base.published;
        if published.lifecycle() != Lifecycle::Paused || !is_apart(&published.reason) {
            return self;
        }
        let is_broken = published.reason == "postcopyFailed";
        if let PostCopy::Switched { broken } = &mut self.post_copy {
            *broken = if is_broken { broken.or(Some(base.now)) } else { None };
            return self;
        }
        tracing::info!("the guest runs at the target and fetches the rest of its memory");
        self.progress = (u64::MAX, base.now);
        (self.post_copy, self.next) = (PostCopy::Switched { broken: None }, base.now);
        base.publish_mode(MigrationMode::PostCopy);
        self
    }

    /// Returns true if the connection of post-copy is broken and libvirt does not end the job: it keeps one that it has lost, and
    /// its call waits for the target's daemon.
    pub(super) fn has_broken_job(&self, now: Instant) -> bool {
        let PostCopy::Switched { broken: Some(since) } = self.post_copy else { return false };
        match self.step {
            Step::Watching => true,
            Step::Copying => now.duration_since(since) >= RETURN_LIMIT,
            _ => false,
        }
    }

    /// Decides on a domain that is still here after a job in post-copy.
    pub(super) fn hold(mut self, base: &mut Base) -> Option<Self> {
        if base.published.reason == "postcopy" {
            // libvirt has lost the job, QEMU goes on.
            (self.step, self.next) = (Step::Watching, base.now + INTERVAL);
            return Some(self);
        }
        tracing::warn!(failure = self.failure, "the connection of post-copy is broken");
        self.step = Step::Asking { until: base.now + ASK_LIMIT };
        self.advance_now(base)
    }

    /// Decides on the target's answer about a guest in post-copy whose connection is broken.
    pub(super) fn on_asked(mut self, base: &mut Base, until: Instant, result: Result<bool, String>) -> Self {
        self.calling = false;
        match result {
            // libvirt has lost the end of the job. What is here does not run, and is not needed.
            Ok(true) => base.kill(Vec::new()),
            Ok(false) => self.give_up(base, "the guest was lost in post-copy: the target has no domain"),
            Err(error) if base.now >= until => {
                tracing::warn!(error, "the target does not have all of the guest");
                self.give_up(base, "the guest was lost in post-copy: its connection is broken");
            }
            Err(error) => tracing::info!(error, "the target does not have all of the guest yet"),
        }
        self
    }

    /// Ends a guest that runs nowhere any more.
    fn give_up(&mut self, base: &mut Base, failure: &str) {
        tracing::error!(failure, "the guest is lost");
        (self.killed, self.failure) = (true, failure.to_owned());
        base.kill(Vec::new());
    }
}
