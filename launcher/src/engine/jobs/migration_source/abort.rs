//! The abort of libvirt's job: on request, at a time limit, or for a job that can switch to post-copy.

use super::{ABORTED, Link, MigrationSource, Step, post_copy::PostCopy};
use crate::{
    engine::{
        jobs::{OPERATION_INVALID, is_repeated},
        model::{Base, DomainCall, RequestError, RequestId},
    },
    hypervisor::HypervisorError,
};

impl MigrationSource {
    /// Aborts the migration.
    pub(super) fn abort(&mut self, base: &mut Base, reason: String) {
        self.abort = Some(reason);
        self.call_abort(base);
    }

    /// Aborts libvirt's job.
    pub(super) fn call_abort(&mut self, base: &mut Base) {
        self.abort_again = false;
        if !std::mem::replace(&mut self.aborting, true) {
            base.call_for(Self::NAME, DomainCall::AbortMigration);
        }
    }

    /// Repeats an abort that libvirt could not carry out yet.
    pub(super) fn repeat_abort(&mut self, base: &mut Base) {
        if self.abort_again && self.has_job() && base.link == Link::Up {
            self.call_abort(base);
        }
    }

    /// Decides on a request to abort the migration.
    pub(super) fn on_abort(mut self, base: &mut Base, id: RequestId) -> Self {
        let result = match self.step {
            Step::Copying | Step::Watching => {
                if let Some(report) = &mut base.published.migration {
                    report.abort_failure.clear();
                }
                self.abort(base, ABORTED.to_owned());
                Ok(())
            }
            // The second job does not begin.
            Step::Settling | Step::Restoring if self.post_copy == PostCopy::Wanted => {
                self.abort = Some(ABORTED.to_owned());
                Ok(())
            }
            Step::Opening { .. } => Err(HypervisorError::Busy.into()),
            _ => Err(RequestError::MigrationEnded(self.request.migration.clone())),
        };
        base.answer_abort(id, result);
        self
    }

    /// Decides on the result of an abort.
    pub(super) fn on_aborted(mut self, base: &mut Base, result: Result<(), HypervisorError>) -> Self {
        self.aborting = false;
        let Err(error) = result else { return self };
        tracing::warn!(%error, "cannot abort the migration");
        let is_wanted = self.abort.is_some() || self.post_copy == PostCopy::Wanted;
        let has_left = matches!(self.post_copy, PostCopy::Switched { .. });
        // libvirt's call reads the domain before its job begins.
        let is_early = matches!(&error, HypervisorError::Libvirt { code, .. } if *code == OPERATION_INVALID);
        // A job that has ended needs no abort.
        let may_succeed = !self.has_job() || is_early || is_repeated(&error) || error.is_transient();
        if may_succeed && !has_left {
            self.abort_again = is_wanted;
            return self;
        }
        if self.post_copy == PostCopy::Wanted {
            self.post_copy = PostCopy::None;
        }
        // The migration goes on and may succeed.
        if let (Some(_), Some(report)) = (self.abort.take(), &mut base.published.migration) {
            report.abort_failure = format!("cannot abort the migration: {error}");
        }
        self
    }

    /// Returns true if libvirt's job is, or may be, in progress.
    fn has_job(&self) -> bool {
        matches!(self.step, Step::Copying | Step::Watching)
    }
}
