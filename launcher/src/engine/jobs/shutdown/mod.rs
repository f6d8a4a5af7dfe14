//! The shutdown job.

use std::time::Duration;

use protocol::Lifecycle;
use tokio::time::Instant;

use super::Steps;
use crate::{
    engine::model::{Action, Base, DomainCall, JobInput, Link},
    hypervisor::HypervisorError,
};

/// Interval of shutdown requests to the guest.
const REPEAT: Duration = Duration::from_secs(5);
/// Longest grace period.
const LONGEST_GRACE: Duration = Duration::from_secs(365 * 24 * 3600);

/// Shutdown of the guest, until the domain has ended.
#[derive(Clone, Debug)]
pub(crate) struct Shutdown {
    /// Time at which the domain is destroyed.
    force_at: Instant,
    /// Time of the next request to the guest.
    signal_at: Instant,
    /// A request to the guest is in progress.
    signalling: bool,
}

impl Shutdown {
    /// Begins the shutdown of the guest.
    pub(crate) fn begin(base: &mut Base, grace: u64) -> Self {
        Self { force_at: force_at(base, grace), signal_at: base.now, signalling: false }.advance(base)
    }

    /// Shortens the grace period.
    pub(crate) fn shorten(self, base: &mut Base, grace: u64) -> Self {
        Self { force_at: self.force_at.min(force_at(base, grace)), ..self }.advance(base)
    }

    /// Requests the shutdown again, or destroys the domain when the grace period is over.
    fn advance(mut self, base: &mut Base) -> Self {
        if base.now >= self.force_at {
            tracing::warn!("the grace period is over, destroying the domain");
            self.force_at = base.now + REPEAT;
            self.signal_at = self.force_at;
            base.kill(Vec::new());
        } else if base.now >= self.signal_at {
            self.signal_at = (base.now + REPEAT).min(self.force_at);
            let ready = base.link == Link::Up && base.published.lifecycle() != Lifecycle::ShuttingDown;
            if ready && !self.signalling {
                self.signalling = true;
                base.call_for(Self::NAME, DomainCall::Shutdown);
            }
        }
        self
    }
}

fn force_at(base: &Base, grace: u64) -> Instant {
    base.now + Duration::from_secs(grace).min(LONGEST_GRACE)
}

impl Steps for Shutdown {
    fn take(mut self, base: &mut Base, input: JobInput) -> Option<Self> {
        match input {
            JobInput::Timer => return Some(self.advance(base)),
            JobInput::ShutdownRequested(result) => {
                self.signalling = false;
                match result {
                    Ok(()) => {}
                    Err(HypervisorError::NoDomain) => base.read(),
                    Err(error) => tracing::warn!(%error, "cannot request a shutdown of the guest"),
                }
            }
            JobInput::Connected
            | JobInput::Read
            | JobInput::Seen(_)
            | JobInput::Gone(_)
            | JobInput::Abort(_)
            | results_of!(start sync dump save source prepared served opened resumed paused) => {}
        }
        Some(self)
    }

    fn progress(&self) -> &'static str {
        "waiting for the guest"
    }

    fn wake(&self) -> Option<Instant> {
        Some(self.signal_at.min(self.force_at))
    }

    /// A reboot would undo the shutdown.
    fn conflicts(&self, action: Action) -> bool {
        matches!(action, Action::Reset | Action::SoftReboot)
    }

    fn end(self, _: &mut Base) -> Option<Self> {
        None
    }
}
