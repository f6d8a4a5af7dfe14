//! Requests of users for a running VMI, and the rule that admits them.

use tokio::sync::oneshot;

use super::observed::{Link, MIGRATE, Observed};
use crate::launcher::LauncherError;

/// A request of a user for a running VMI.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Request {
    /// Pauses the vCPUs.
    Pause,
    /// Resumes the vCPUs.
    Unpause,
    /// Resets the domain.
    Reset,
    /// Reboots the guest.
    SoftReboot,
}

/// Reason why a request failed.
#[derive(Clone, Debug, thiserror::Error)]
pub(crate) enum Refusal {
    /// No launcher is connected.
    #[error("No command socket found for vmi {0}")]
    NoLauncher(String),
    /// No guest is running.
    #[error("the VMI is not running")]
    NotRunning,
    /// The domain leaves this node.
    #[error("the VMI is migrating")]
    Migrating,
    /// The queue of the VMI is full.
    #[error("too many requests are pending for this VMI")]
    Busy,
    /// The launcher failed.
    #[error(transparent)]
    Launcher(#[from] LauncherError),
}

/// A request with the channel for its answer.
pub(super) struct PendingRequest {
    pub(super) request: Request,
    pub(super) answer: oneshot::Sender<Result<(), Refusal>>,
}

/// Checks that a request can be carried out now.
pub(super) fn admit(observed: &Observed, request: Request) -> Result<(), Refusal> {
    if !matches!(observed.link, Link::Up { greeted: true, .. }) {
        return Err(Refusal::NoLauncher(observed.facts.uid.clone()));
    }
    let possible = match request {
        Request::Pause | Request::Unpause | Request::SoftReboot | Request::Reset => observed.domain().is_alive(),
    };
    // The target's launcher resumes the guest as it was when the migration began.
    let is_moving = observed.copying().is_some() || observed.is_busy(MIGRATE) || observed.called_migration.is_some();
    match request {
        Request::Pause | Request::Unpause if observed.source_migration().is_some() && is_moving => {
            Err(Refusal::Migrating)
        }
        _ if possible => Ok(()),
        _ => Err(Refusal::NotRunning),
    }
}
