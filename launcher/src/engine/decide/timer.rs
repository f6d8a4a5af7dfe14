//! Times that have come.

use super::Turn;
use crate::{
    engine::model::{Effect, Link, LiveStep, LiveSync, RequestError, Stage},
    hypervisor::HypervisorError,
};

impl Turn {
    /// Decides on all times that have come.
    pub(super) fn timer(&mut self) {
        let now = self.now;
        if matches!(self.state.link, Link::Down { retry_at } if retry_at <= now) && self.state.may_connect() {
            self.state.link = Link::Connecting;
            self.effects.push(Effect::Connect);
        }
        let reads = self.state.link == Link::Up && self.state.stage != Stage::Ended;
        if reads && self.state.refresh_at <= now && !self.state.reading.in_progress {
            self.read_then(None);
        }
        self.continue_shutdown();
        self.continue_outgoing();
        self.continue_incoming();
        if self.state.looking.as_ref().is_some_and(|looking| looking.until <= now) {
            self.looked();
        }
        if self.start_limit().is_some_and(|until| until <= now) {
            self.fail_start(daemon_is_late());
        }
        let sync_limit = match &self.state.sync {
            Some(LiveSync { step: LiveStep::Connecting { until }, .. }) => Some(*until),
            _ => None,
        };
        if sync_limit.is_some_and(|until| until <= now) {
            self.fail_live_sync(daemon_is_late());
        }
        if self.state.finish_at.is_some_and(|at| at <= now) && !self.state.finished {
            tracing::warn!("virt-handler did not record the domain's end in time");
            self.state.finished = true;
        }
    }
}

fn daemon_is_late() -> RequestError {
    HypervisorError::Disconnected("libvirt's daemon did not start in time".into()).into()
}
