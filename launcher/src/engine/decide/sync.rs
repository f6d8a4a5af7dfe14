//! Requests to start the domain, or to bring it in line with the VMI.

use std::sync::Arc;

use super::State;
use crate::engine::{
    jobs::{
        Job, WAITING,
        start::{Start, is_restored},
        sync::Sync,
    },
    model::{RequestError, RequestId, Stage, Wanted},
};

/// Syncs that follow the one in progress; all get the result of the newest VMI.
#[derive(Clone, Debug)]
pub(super) struct NextSync {
    pub(super) requests: Vec<RequestId>,
    /// The newest VMI.
    pub(super) wanted: Arc<Wanted>,
}

impl State {
    /// Decides on the wanted VMI.
    pub(super) fn sync(&mut self, requests: Vec<RequestId>, wanted: Arc<Wanted>) {
        if let Err(error) = self.check_sync(&wanted) {
            return self.base.answer_all(requests, &Err(error));
        }
        if self.is_syncing() {
            return self.wait_for_sync(requests, wanted);
        }
        // A domain that may be running is adopted and served first.
        let may_run = self.base.adopting || self.base.stage == Stage::Live;
        let supported = if may_run { Ok(()) } else { wanted.check_supported() };
        match supported {
            Err(error) => self.base.fail_sync(requests, error),
            Ok(()) if !self.base.cache_written => self.base.answer_all(requests, &Err(RequestError::NoHello)),
            Ok(()) if self.base.stage == Stage::Live && self.job.is_none() && is_restored(&self.base, &wanted) => {
                self.job = Some(Start::continued(&mut self.base, requests, wanted).into());
            }
            Ok(()) if self.base.stage == Stage::Live => self.begin_sync(requests, wanted),
            Ok(()) => self.job = Some(Start::begin(&mut self.base, requests, wanted).into()),
        }
    }

    fn check_sync(&self, wanted: &Wanted) -> Result<(), RequestError> {
        if self.base.stage == Stage::Ended {
            return Err(RequestError::Ended);
        }
        self.base.check_vmi(wanted)?;
        self.job.as_ref().map_or(Ok(()), |job| job.check_sync())
    }

    /// Begins to bring the running domain in line with the VMI.
    pub(super) fn begin_sync(&mut self, requests: Vec<RequestId>, wanted: Arc<Wanted>) {
        self.beside.push(Sync::begin(&mut self.base, requests, wanted).into());
    }

    /// Reports that a start or a Sync is in progress.
    pub(super) fn is_syncing(&self) -> bool {
        self.job.iter().chain(&self.beside).any(|job| matches!(job, Job::Start(_) | Job::Sync(_)))
    }

    /// Keeps the newest VMI for when the present Sync is done: it has the same time limit.
    fn wait_for_sync(&mut self, requests: Vec<RequestId>, wanted: Arc<Wanted>) {
        let next = self.next_sync.get_or_insert_with(|| NextSync { requests: Vec::new(), wanted: wanted.clone() });
        if next.requests.len() >= WAITING {
            return self.base.answer_all(requests, &Err(RequestError::Busy));
        }
        next.requests.extend(requests);
        next.wanted = wanted;
    }

    /// Returns the Sync that has waited, when its turn has come.
    pub(super) fn take_next_sync(&mut self) -> Option<NextSync> {
        if self.is_syncing() { None } else { self.next_sync.take() }
    }
}
