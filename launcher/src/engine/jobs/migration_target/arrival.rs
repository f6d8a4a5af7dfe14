//! The arrival of a domain, and its release.

use std::time::Duration;

use protocol::{Lifecycle, MigrationMode, MigrationStep};
use tokio::time::Instant;

use super::{MigrationTarget, Step};
use crate::{
    engine::{
        jobs::{ABORTED, INTERVAL, Steps},
        model::{
            Base, ChannelMode, DomainCall, Effect, MigrationEnd, MigrationRecord, RequestError, RequestId, Stage, Work,
            disconnected, is_apart,
        },
    },
    hypervisor::HypervisorError,
};

/// Time for the source to release a guest in post-copy that is whole, or to report one that is lost.
const SOURCE_LIMIT: Duration = Duration::from_secs(60);
/// Time for the domain to come again with post-copy.
const RETURN_LIMIT: Duration = Duration::from_secs(120);
/// Failure of a guest whose memory was at two places.
const LOST: &str = "the guest was lost in post-copy";

/// A domain that arrives.
#[derive(Clone, Debug, Default)]
pub(super) struct Arrival {
    /// The domain was seen.
    pub(super) seen: bool,
    /// Number of the domain that was seen first.
    pub(super) first: Option<u32>,
    /// A domain was here and has gone for one that can switch to post-copy.
    pub(super) returns: bool,
    /// Aborted on request.
    pub(super) aborted: bool,
    /// The source has ended, and the user has paused the guest: it stays paused.
    pub(super) paused: bool,
    /// Releases on which the next read decides.
    pub(super) asked: Vec<RequestId>,
    /// Time at which this launcher decides without the source, which can have ended.
    pub(super) until: Option<Instant>,
}

/// A guest that is released.
#[derive(Clone, Debug)]
pub(super) struct Release {
    /// The domain was seen.
    pub(super) seen: bool,
    /// The user has paused the guest: it stays paused.
    pub(super) paused: bool,
    /// Releases that wait for the guest.
    pub(super) releases: Vec<RequestId>,
    /// Time of the next attempt to run the guest.
    pub(super) next: Instant,
    /// An attempt is in progress.
    pub(super) calling: bool,
    /// The guest was resumed: the next read decides.
    pub(super) resumed: bool,
}

impl MigrationTarget {
    /// Learns that the domain exists here.
    pub(super) fn on_seen(mut self, base: &mut Base, id: Option<u32>) -> Self {
        note_post_copy(base);
        let (lifecycle, reason) = (base.published.lifecycle(), base.published.reason.as_str());
        let has_left = base.migration_mode() == MigrationMode::PostCopy;
        let was_seen = match &mut self.step {
            Step::Waiting(arrival) => {
                // The source has nothing more to do, except to say so.
                let is_whole = has_left && lifecycle == Lifecycle::Running && !is_apart(reason);
                let is_done = reason == "postcopyFailed" || is_whole;
                arrival.until = is_done.then(|| arrival.until.unwrap_or(base.now + SOURCE_LIMIT));
                arrival.first = arrival.first.or(id);
                // Nothing may have been read between the end of the first domain and its return.
                arrival.returns |= (id.is_some() && arrival.first != id) || is_apart(reason);
                std::mem::replace(&mut arrival.seen, true)
            }
            Step::Releasing(release) => {
                if !release.seen {
                    release.next = base.now;
                }
                std::mem::replace(&mut release.seen, true)
            }
            Step::Preparing | Step::Connecting { .. } | Step::Serving | Step::Opening => return self,
        };
        if !was_seen {
            tracing::info!("the domain of the other launcher arrives");
            // Its addresses are known from now on, and no guest reads the image yet.
            if let Some(wanted) = self.wanted.clone().filter(|wanted| wanted.has_tagged_devices()) {
                base.work_for(Self::NAME, Work::TagTarget(wanted));
            }
        }
        if let Some(report) =
            base.published.migration.as_mut().filter(|report| report.step() == MigrationStep::Prepared)
        {
            report.set_step(MigrationStep::Copying);
        }
        self
    }

    /// Decides without the source.
    pub(super) fn decide_alone(self, base: &mut Base) -> Option<Self> {
        if !self.is_seen() {
            return self.fail_arrival(base, "the domain has not come again for post-copy");
        }
        if is_apart(&base.published.reason) {
            tracing::error!("the connection of post-copy is broken, the guest is lost");
            base.kill(Vec::new());
            return Some(self);
        }
        tracing::warn!("the source is silent, and all of the guest is here");
        self.release(base)
    }

    /// Decides on a domain that has ended or is gone.
    pub(super) fn on_gone(mut self, base: &mut Base) -> Option<Self> {
        let may_return = self.may_return();
        match &mut self.step {
            Step::Waiting(arrival) if arrival.seen && may_return => {
                (arrival.seen, arrival.returns, arrival.until) = (false, true, Some(base.now + RETURN_LIMIT));
                tracing::info!("the domain has not arrived, waiting for its return with post-copy");
                base.stage = Stage::Waiting;
                base.published.set_lifecycle(Lifecycle::NoDomain);
                base.published.reason.clear();
                if let Some(report) = &mut base.published.migration {
                    report.set_step(MigrationStep::Prepared);
                }
                Some(self)
            }
            Step::Waiting(arrival) if arrival.seen => {
                let is_lost = base.migration_mode() == MigrationMode::PostCopy;
                self.fail_arrival(base, if is_lost { LOST } else { "the domain has not arrived" })
            }
            // It was here, and its guest was released: its end is that of the VMI.
            Step::Releasing(_) => {
                base.stage = Stage::Live;
                self.end(base)
            }
            _ => Some(self),
        }
    }

    /// Returns true if a domain that has gone may come again.
    fn may_return(&self) -> bool {
        let Step::Waiting(arrival) = &self.step else { return false };
        let status = self.wanted.as_ref().and_then(|wanted| wanted.vmi.status.as_ref());
        let state = status.and_then(|status| status.migration_state.as_ref());
        let options = state.and_then(|state| state.migration_configuration.as_ref());
        !arrival.returns && !arrival.aborted && options.is_some_and(|options| options.switches_to_post_copy())
    }

    pub(super) fn is_seen(&self) -> bool {
        match &self.step {
            Step::Waiting(arrival) => arrival.seen,
            Step::Releasing(release) => release.seen,
            _ => false,
        }
    }

    /// Ends a migration after which nothing of the domain is left here.
    pub(super) fn fail_arrival(self, base: &mut Base, failure: &str) -> Option<Self> {
        tracing::warn!(failure, "the domain has not moved here");
        base.publish_failure(failure.to_owned(), matches!(&self.step, Step::Waiting(arrival) if arrival.aborted));
        base.publish_step(MigrationStep::NotMoved, MigrationEnd::Target, false, ChannelMode::Settled);
        base.answer_all(self.step.releases(), &Ok(false));
        base.answer_all(self.requests, &Err(RequestError::Ending));
        base.end_as(Lifecycle::NoDomain, "");
        None
    }

    /// Decides on the releases, when the domain was read.
    pub(super) fn on_read(mut self, base: &mut Base) -> Option<Self> {
        let Step::Waiting(arrival) = &mut self.step else { return Some(self) };
        let reason = base.published.reason.as_str();
        let answer = match base.published.lifecycle() {
            _ if !base.reading.is_fresh => Err(disconnected()),
            _ if !arrival.seen => Ok(false),
            // Some of its memory is still at the source.
            _ if is_apart(reason) => Err(RequestError::Arriving),
            // libvirt has completed the arrival. Before that the reason is `migration`.
            Lifecycle::Running if !arrival.asked.is_empty() => return self.release(base),
            Lifecycle::Paused if reason == "user" && !arrival.asked.is_empty() => return self.release(base),
            _ => Err(RequestError::Arriving),
        };
        base.answer_all(std::mem::take(&mut arrival.asked), &answer);
        Some(self)
    }

    /// Releases the guest.
    fn release(self, base: &mut Base) -> Option<Self> {
        let Step::Waiting(Arrival { seen, paused, asked: releases, .. }) = self.step else { return Some(self) };
        if let Some(report) = &base.published.migration {
            let record = MigrationRecord::of(report, MigrationEnd::Target, paused);
            let record = MigrationRecord { step: MigrationStep::Releasing.into(), ..record };
            base.effects.push(Effect::SaveMigration(Box::new(record), ChannelMode::Target));
        }
        let release = Release { seen, paused, releases, next: base.now, calling: false, resumed: false };
        Self { step: Step::Releasing(release), ..self }.run(base)
    }

    /// Lets the guest run that has arrived, or ends the migration if it runs or stays paused.
    pub(super) fn run(mut self, base: &mut Base) -> Option<Self> {
        let Step::Releasing(release) = &mut self.step else { return Some(self) };
        release.next = base.now + INTERVAL;
        if !base.has_read() || !release.seen {
            return Some(self);
        }
        let (lifecycle, paused) = (base.published.lifecycle(), release.paused);
        if lifecycle == Lifecycle::Running || (paused && lifecycle == Lifecycle::Paused) {
            return self.settle(base, paused);
        }
        release.calling = true;
        base.call_for(Self::NAME, DomainCall::Resume);
        Some(self)
    }

    /// Decides on the guest that was resumed.
    pub(super) fn on_resumed(mut self, base: &mut Base, result: Result<(), HypervisorError>) -> Self {
        match (&mut self.step, result) {
            (Step::Releasing(release), Ok(())) => {
                release.resumed = true;
                base.read_for(Self::NAME);
            }
            (Step::Releasing(release), Err(error)) => {
                release.calling = false;
                tracing::warn!(%error, "cannot resume the guest that has arrived yet");
            }
            _ => {}
        }
        self
    }

    /// Ends a migration after which the domain is this launcher's.
    fn settle(self, base: &mut Base, paused: bool) -> Option<Self> {
        tracing::info!(paused, "the domain has moved here");
        base.adopting = false;
        base.published.items.clear();
        base.publish_step(MigrationStep::Moved, MigrationEnd::Target, paused, ChannelMode::Settled);
        base.clock_is_late = !paused;
        base.set_late_clock();
        base.answer_all(self.requests, &Ok(false));
        base.answer_all(self.step.releases(), &Ok(true));
        None
    }

    /// Decides on a request to abort the migration: ends what has arrived.
    pub(super) fn on_abort(mut self, base: &mut Base, id: RequestId) -> Option<Self> {
        let is_seen = self.is_seen();
        let (job, result) = match &mut self.step {
            Step::Releasing(_) => {
                let error = RequestError::MigrationEnded(self.migration.clone());
                (Some(self), Err(error))
            }
            Step::Waiting(arrival) if is_seen => {
                arrival.aborted = true;
                base.kill(Vec::new());
                (Some(self), Ok(()))
            }
            _ => {
                self.step = Step::Waiting(Arrival { aborted: true, asked: self.step.releases(), ..Arrival::default() });
                (self.fail_arrival(base, ABORTED), Ok(()))
            }
        };
        base.answer_abort(id, result);
        job
    }
}

/// Records that the guest runs here before its memory has come.
fn note_post_copy(base: &mut Base) {
    if is_apart(&base.published.reason) && base.migration_mode() != MigrationMode::PostCopy {
        base.publish_mode(MigrationMode::PostCopy);
        base.publish_step(MigrationStep::Copying, MigrationEnd::Target, false, ChannelMode::Target);
    }
}
