//! Freezes the guest's file systems and thaws them automatically.

use std::{
    path::PathBuf,
    sync::{Arc, MutexGuard, PoisonError, Weak},
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use tokio::{
    task::AbortHandle,
    time::{Instant, sleep, timeout_at},
};

use super::{Answer, GuestAgent, GuestAgentError, Inner, Query};
use crate::hypervisor::HypervisorError;

/// Time limit of a freeze: the guest first writes out its dirty pages. kube-apiserver gives up a request after a minute, as Velero
/// does its hook, and the limits of virt-handler (50 s) and virt-api (55 s) lie between: the client gets the guest's reason.
const FREEZE_DEADLINE: Duration = Duration::from_secs(45);
/// Time limit of a thaw.
const THAW_DEADLINE: Duration = Duration::from_secs(20);
/// Pause between attempts of an automatic thaw: the guest agent may be busy or the guest paused.
const THAW_RETRY: Duration = Duration::from_secs(5);
/// The same after [`THAW_LATE`]: the guest is paused for long, or has lost its guest agent.
const THAW_RETRY_LATE: Duration = Duration::from_secs(60);
/// Time after which an automatic thaw is tried less often.
const THAW_LATE: Duration = Duration::from_secs(3600);
/// Time after an automatic thaw is due for which probes of the guest do not count: the guest may be slow.
const PROBES_MARGIN: Duration = Duration::from_secs(60);
/// The same for a freeze without automatic thaw: its end is the user's.
const NO_THAW: Duration = Duration::from_secs(365 * 24 * 3600);
/// Longest time of an automatic thaw that another launcher hands over, in seconds.
const LONGEST_THAW: u32 = 7 * 24 * 3600;

/// The pending automatic thaw, if any.
#[derive(Debug)]
pub(super) struct Thaw {
    file: PathBuf,
    task: Option<AbortHandle>,
    /// The guest is being frozen or is frozen: probes do not count before this time.
    frozen_until: Option<Instant>,
    /// The guest agent gets the call although it reports no frozen file system: a freeze that found none has run its hooks, or the
    /// number is not known.
    without_file_systems: bool,
    /// A freeze was sent, and nothing shows yet what became of it.
    is_open: bool,
}

impl Thaw {
    pub(super) fn new(file: PathBuf) -> Self {
        Self { file, task: None, frozen_until: None, without_file_systems: false, is_open: false }
    }

    /// Returns the time at which a thaw is due, in seconds since 1970.
    fn due(&self) -> Option<u64> {
        std::fs::read_to_string(&self.file).ok()?.trim().parse().ok()
    }

    /// Returns true if no thaw is pending, or one that is due before this time.
    fn ends_before(&self, due: u64) -> bool {
        self.task.is_none() || self.due().is_some_and(|known| known < due)
    }

    #[cfg(test)]
    pub(super) fn frozen_until(&self) -> Option<Instant> {
        self.frozen_until
    }

    #[cfg(test)]
    pub(super) fn is_idle(&self) -> bool {
        self.task.is_none()
    }

    /// Records the state of the file systems. The guest agent answers in turn: a freeze before has ended.
    pub(super) fn learn(&mut self, file_systems: &str) {
        self.is_open = false;
        if file_systems == "thawed" {
            self.frozen_until = None;
        }
    }

    /// Records the end of the guest agent's connection: a guest that was reset has no frozen file system.
    pub(super) fn disconnect(&mut self) {
        if self.task.is_none() && !self.is_open {
            self.frozen_until = None;
        }
    }

    fn disarm(&mut self) {
        self.frozen_until = None;
        self.without_file_systems = false;
        self.is_open = false;
        if let Some(task) = self.task.take() {
            task.abort();
        }
        match std::fs::remove_file(&self.file) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                tracing::warn!(%error, "cannot delete the time of the automatic thaw");
            }
            _ => {}
        }
    }
}

impl Drop for Thaw {
    fn drop(&mut self) {
        if let Some(task) = &self.task {
            task.abort();
        }
    }
}

fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs()
}

impl GuestAgent {
    /// Freezes all file systems, and thaws them after `thaw_after` seconds unless that is 0. If they are frozen, only the
    /// automatic thaw is scheduled, or put off. The work continues if the caller goes away, so that no freeze is left without its thaw.
    pub(crate) async fn freeze(&self, thaw_after: u32) -> Result<(), GuestAgentError> {
        let agent = self.clone();
        tokio::spawn(async move { agent.freeze_now(thaw_after).await }).await.map_err(|_| GuestAgentError::Busy)?
    }

    /// Thaws all file systems. Does nothing if they are thawed.
    pub(crate) async fn unfreeze(&self) -> Result<(), GuestAgentError> {
        let agent = self.clone();
        tokio::spawn(async move { agent.inner.thaw_now().await }).await.map_err(|_| GuestAgentError::Busy)?
    }

    async fn freeze_now(&self, thaw_after: u32) -> Result<(), GuestAgentError> {
        const COMMAND: &str = "guest-fsfreeze-freeze";
        let limit = Instant::now() + FREEZE_DEADLINE;
        let _turn = timeout_at(limit, self.inner.turn.lock()).await.map_err(|_| GuestAgentError::Busy)?;
        let is_told = self.thaw().without_file_systems;
        if self.inner.is_frozen(limit).await? || is_told {
            // By a freeze without a limit, by another program, or by a freeze whose answer was lost: its client counts from this one.
            let due = now() + u64::from(thaw_after);
            if thaw_after > 0 && self.thaw().ends_before(due) {
                self.arm(due);
                self.thaw().without_file_systems = is_told;
            }
            return Ok(());
        }
        if self.inner.lacks(COMMAND) {
            // A failure of a freeze by another program no longer counts.
            self.inner.forget(Query::Agent);
            self.inner.ask_in_turn(Query::Agent, limit).await?;
        }
        if self.inner.lacks(COMMAND) {
            return Err(GuestAgentError::Unsupported(COMMAND));
        }
        // Schedule the thaw first: if the answer to the freeze is lost, the guest must not stay frozen.
        if thaw_after > 0 {
            self.arm(now() + u64::from(thaw_after));
        } else {
            self.thaw().frozen_until = Some(limit);
        }
        self.thaw().is_open = true;
        match self.inner.command(COMMAND, limit).await {
            Ok(answer) => {
                let frozen = frozen_file_systems(&answer);
                let mut thaw = self.thaw();
                if thaw_after == 0 {
                    thaw.frozen_until = Some(Instant::now() + NO_THAW);
                }
                thaw.without_file_systems = frozen == Some(0);
                drop(thaw);
                self.inner.learn(Query::Freeze, Answer::Freeze("frozen".into()));
                tracing::info!(thaw_after, frozen, "the guest's file systems are frozen");
                Ok(())
            }
            Err(error) => {
                // Only an answer proves that nothing was frozen.
                if matches!(error, GuestAgentError::Hypervisor(HypervisorError::GuestAgentRefused(_))) {
                    self.thaw().disarm();
                }
                Err(error)
            }
        }
    }

    /// Schedules a thaw at that time.
    fn arm(&self, due: u64) {
        let mut thaw = self.thaw();
        thaw.disarm();
        if let Err(error) = std::fs::write(&thaw.file, due.to_string()) {
            tracing::warn!(%error, "cannot store the time of the automatic thaw, it will not survive a restart");
        }
        let wait = Duration::from_secs(due.saturating_sub(now()));
        thaw.frozen_until = Instant::now().checked_add(wait + PROBES_MARGIN);
        thaw.task = Some(tokio::spawn(thaw_later(Arc::downgrade(&self.inner), wait)).abort_handle());
    }

    /// Returns true while the guest is being frozen or is frozen by a request of this launcher, or of the one that it came from. It
    /// can be slow to answer then, and runs no programs.
    pub(crate) fn may_be_frozen(&self) -> bool {
        self.thaw().frozen_until.is_some_and(|until| Instant::now() < until)
    }

    /// Returns true while a freeze may have reached the guest that the facts do not show.
    pub(crate) fn is_freezing(&self) -> bool {
        self.thaw().is_open
    }

    /// Returns the seconds until the automatic thaw, if the guest may be frozen.
    pub(crate) fn thaw_after(&self) -> Option<u32> {
        let left = self.thaw().due()?.saturating_sub(now()).max(1);
        Some(u32::try_from(left).unwrap_or(u32::MAX))
    }

    /// Schedules the automatic thaw of a guest that has come from another launcher.
    pub(crate) fn take_thaw(&self, seconds: u32) {
        tracing::info!(seconds, "file systems may be frozen, continuing the automatic thaw");
        self.arm(now() + u64::from(seconds.min(LONGEST_THAW)));
        self.thaw().without_file_systems = true;
    }

    /// Resumes the pending thaw of a former worker.
    pub(super) fn resume_thaw(&self) {
        let thaw = self.thaw();
        let due = if thaw.task.is_none() { thaw.due() } else { None };
        drop(thaw);
        if let Some(due) = due {
            tracing::info!("file systems may be frozen, resuming the automatic thaw");
            self.arm(due);
            self.thaw().without_file_systems = true;
        }
    }

    fn thaw(&self) -> MutexGuard<'_, Thaw> {
        self.inner.thaw.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Inner {
    async fn is_frozen(&self, limit: Instant) -> Result<bool, GuestAgentError> {
        Ok(self.ask_in_turn(Query::Freeze, limit).await? == Answer::Freeze("frozen".into()))
    }

    async fn thaw_now(&self) -> Result<(), GuestAgentError> {
        let limit = Instant::now() + THAW_DEADLINE;
        let _turn = timeout_at(limit, self.turn.lock()).await.map_err(|_| GuestAgentError::Busy)?;
        let is_told = self.thaw.lock().unwrap_or_else(PoisonError::into_inner).without_file_systems;
        if self.is_frozen(limit).await? || is_told {
            self.command("guest-fsfreeze-thaw", limit).await?;
            self.learn(Query::Freeze, Answer::Freeze("thawed".into()));
            tracing::info!("the guest's file systems are thawed");
        }
        // Before the turn ends: a freeze that follows schedules its own thaw.
        self.thaw.lock().unwrap_or_else(PoisonError::into_inner).disarm();
        Ok(())
    }
}

/// Returns the number of file systems in the answer to a freeze.
fn frozen_file_systems(answer: &str) -> Option<u64> {
    serde_json::from_str::<serde_json::Value>(answer).ok()?["return"].as_u64()
}

async fn thaw_later(agent: Weak<Inner>, wait: Duration) {
    sleep(wait).await;
    let late = Instant::now() + THAW_LATE;
    loop {
        let Some(inner) = agent.upgrade() else { return };
        match inner.thaw_now().await {
            Ok(()) => return,
            Err(error) => tracing::warn!(%error, "cannot thaw the file systems"),
        }
        drop(inner);
        sleep(if Instant::now() < late { THAW_RETRY } else { THAW_RETRY_LATE }).await;
    }
}
