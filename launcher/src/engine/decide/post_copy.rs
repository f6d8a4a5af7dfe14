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

use super::{Turn, migration_out::INTERVAL};
use crate::{
    engine::model::{Effect, OutStep, PostCopy},
    hypervisor::{HypervisorError, MigrateWay},
};

/// Pause between attempts to start post-copy: libvirt's job begins only after its disks were copied.
const START_INTERVAL: Duration = Duration::from_millis(100);
/// Time for libvirt's call to return after the connection of post-copy is broken.
const RETURN_LIMIT: Duration = Duration::from_secs(10);
/// Time for the target to answer whether the guest is whole.
const ASK_LIMIT: Duration = Duration::from_secs(30);

/// Returns true for the reason of a domain whose memory is not at one place.
pub(super) fn is_apart(reason: &str) -> bool {
    matches!(reason, "postcopy" | "postcopyFailed")
}

impl Turn {
    /// Aborts the first job, which a second one follows.
    pub(super) fn prefer_post_copy(&mut self) {
        tracing::warn!("the migration takes too long, switching to post-copy");
        let Some(out) = self.outgoing() else { return };
        out.post_copy = PostCopy::Wanted;
        out.aborting = true;
        self.effects.push(Effect::AbortMigration);
    }

    /// Begins the second job if it is due. Returns false if it is not.
    pub(super) fn begin_post_copy(&mut self) -> bool {
        let now = self.now;
        let Some(out) = self.outgoing() else { return false };
        let is_due = out.post_copy == PostCopy::Wanted && out.abort.is_none() && out.then.is_empty();
        if !is_due {
            return false;
        }
        out.post_copy = PostCopy::Ready;
        (out.step, out.calling, out.next) = (OutStep::Copying, false, now + START_INTERVAL);
        out.progress = (u64::MAX, now);
        out.failure.clear();
        let (request, copied) = (out.request.clone(), out.copied.clone());
        self.effects.push(Effect::Migrate { request, copied, way: MigrateWay::PostCopy });
        true
    }

    /// Decides on an attempt to start post-copy. It is repeated until the domain shows the switch.
    pub(super) fn post_copy_started(&mut self, result: Result<(), HypervisorError>) {
        let now = self.now;
        let Some(out) = self.outgoing().filter(|out| out.step == OutStep::Copying) else { return };
        (out.calling, out.next) = (false, now + START_INTERVAL);
        if let Err(error) = result {
            tracing::debug!(%error, "post-copy cannot start yet");
        }
        self.check_limits();
    }

    /// Learns from the domain that the guest has left.
    pub(super) fn look_for_switch(&mut self) {
        let now = self.now;
        let published = &self.state.published;
        if published.lifecycle() != Lifecycle::Paused || !is_apart(&published.reason) {
            return;
        }
        let is_broken = published.reason == "postcopyFailed";
        let Some(out) = self.outgoing() else { return };
        if out.post_copy == PostCopy::Switched {
            out.broken = if is_broken { out.broken.or(Some(now)) } else { None };
            return;
        }
        out.progress = (u64::MAX, now);
        tracing::info!("the guest runs at the target and fetches the rest of its memory");
        (out.post_copy, out.next) = (PostCopy::Switched, now);
        if let Some(report) = &mut self.state.published.migration {
            report.set_mode(MigrationMode::PostCopy);
        }
    }

    /// Returns true if the connection of post-copy is broken and libvirt does not end the job: it keeps one that it has lost, and
    /// its call waits for the target's daemon.
    pub(super) fn has_broken_job(&mut self) -> bool {
        let now = self.now;
        let Some(out) = self.outgoing() else { return false };
        match (out.step, out.broken) {
            (OutStep::Watching, Some(_)) => true,
            (OutStep::Copying, Some(since)) => now.duration_since(since) >= RETURN_LIMIT,
            _ => false,
        }
    }

    /// Decides on a domain that is still here after a job in post-copy.
    pub(super) fn hold(&mut self) {
        let now = self.now;
        let is_carried = self.state.published.reason == "postcopy";
        let Some(out) = self.outgoing() else { return };
        if is_carried {
            // libvirt has lost the job, QEMU goes on.
            (out.step, out.next) = (OutStep::Watching, now + INTERVAL);
            return;
        }
        tracing::warn!(failure = out.failure, "the connection of post-copy is broken");
        (out.step, out.next, out.release_until) = (OutStep::Asking, now, now + ASK_LIMIT);
        self.continue_outgoing();
    }

    /// Decides on the target's answer about a guest in post-copy whose connection is broken.
    pub(super) fn asked(&mut self, result: Result<bool, String>) {
        let now = self.now;
        let Some(out) = self.outgoing() else { return };
        match result {
            // libvirt has lost the end of the job. What is here does not run, and is not needed.
            Ok(true) => self.kill(Vec::new()),
            Ok(false) => self.give_up("the guest was lost in post-copy: the target has no domain"),
            Err(error) if now >= out.release_until => {
                tracing::warn!(error, "the target does not have all of the guest");
                self.give_up("the guest was lost in post-copy: its connection is broken");
            }
            Err(error) => tracing::info!(error, "the target does not have all of the guest yet"),
        }
    }

    /// Ends a guest that runs nowhere any more.
    fn give_up(&mut self, failure: &str) {
        tracing::error!(failure, "the guest is lost");
        let Some(out) = self.outgoing() else { return };
        (out.killed, out.failure) = (true, failure.to_owned());
        self.kill(Vec::new());
    }
}
