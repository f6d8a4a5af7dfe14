//! Freezing of the guest's file systems, with a thaw that comes by itself.

use std::{
    path::PathBuf,
    sync::{Arc, MutexGuard, PoisonError, Weak},
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use tokio::{
    task::AbortHandle,
    time::{Instant, sleep, timeout_at},
};

use super::{AgentError, Answer, GuestAgent, Inner, Question};
use crate::libvirt;

/// How long a freeze may take: the guest writes out what it has in memory first.
const FREEZE_DEADLINE: Duration = Duration::from_secs(60);
/// How long a thaw may take.
const THAW_DEADLINE: Duration = Duration::from_secs(20);
/// Pause between attempts of an automatic thaw, and their number: the agent may be busy, the guest paused.
const THAW_RETRY: Duration = Duration::from_secs(5);
const THAW_ATTEMPTS: u32 = 720;

/// The automatic thaw that waits, if one does.
#[derive(Debug)]
pub(super) struct Thaw {
    file: PathBuf,
    task: Option<AbortHandle>,
}

impl Thaw {
    pub(super) fn new(file: PathBuf) -> Self {
        Self { file, task: None }
    }

    /// Seconds since 1970 at which a thaw is due.
    fn due(&self) -> Option<u64> {
        std::fs::read_to_string(&self.file).ok()?.trim().parse().ok()
    }

    #[cfg(test)]
    pub(super) fn is_idle(&self) -> bool {
        self.task.is_none()
    }

    fn disarm(&mut self) {
        if let Some(task) = self.task.take() {
            task.abort();
        }
        match std::fs::remove_file(&self.file) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                tracing::warn!(%error, "cannot forget the time of the automatic thaw");
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
    /// Freezes all file systems; after `thaw_after` seconds they are thawed, unless that is 0. What is frozen already is
    /// left as it is. The work goes on when the caller goes away, so that no freeze is without its thaw.
    ///
    /// # Errors
    /// When the agent does not do it.
    pub async fn freeze(&self, thaw_after: u32) -> Result<(), AgentError> {
        let agent = self.clone();
        tokio::spawn(async move { agent.freeze_now(thaw_after).await }).await.map_err(|_| AgentError::Busy)?
    }

    /// Thaws all file systems. What is thawed already is left as it is.
    ///
    /// # Errors
    /// When the agent does not do it.
    pub async fn unfreeze(&self) -> Result<(), AgentError> {
        let agent = self.clone();
        tokio::spawn(async move {
            agent.inner.thaw_now().await?;
            agent.thaw().disarm();
            Ok(())
        })
        .await
        .map_err(|_| AgentError::Busy)?
    }

    async fn freeze_now(&self, thaw_after: u32) -> Result<(), AgentError> {
        const COMMAND: &str = "guest-fsfreeze-freeze";
        let limit = Instant::now() + FREEZE_DEADLINE;
        let _turn = timeout_at(limit, self.inner.turn.lock()).await.map_err(|_| AgentError::Busy)?;
        if self.inner.is_frozen(limit).await? {
            return Ok(());
        }
        if self.inner.lacks(COMMAND) {
            // What it said with file systems that somebody else had frozen no longer holds.
            self.inner.forget(Question::Agent);
            self.inner.ask_in_turn(Question::Agent, limit).await?;
        }
        if self.inner.lacks(COMMAND) {
            return Err(AgentError::Unsupported(COMMAND));
        }
        // Before the freeze: if its answer is lost, the guest must not stay frozen.
        if thaw_after > 0 {
            self.arm(now() + u64::from(thaw_after));
        }
        match self.inner.command(COMMAND, limit).await {
            Ok(_) => {
                self.inner.learn(Question::Freeze, Answer::Freeze("frozen".into()));
                tracing::info!(thaw_after, "the guest's file systems are frozen");
                Ok(())
            }
            Err(error) => {
                // Only an agent that answered is known to have frozen nothing.
                if matches!(error, AgentError::Libvirt(libvirt::Error::AgentRefused(_))) {
                    self.thaw().disarm();
                }
                Err(error)
            }
        }
    }

    /// Has the file systems thawed at that time.
    fn arm(&self, due: u64) {
        let mut thaw = self.thaw();
        thaw.disarm();
        if let Err(error) = std::fs::write(&thaw.file, due.to_string()) {
            tracing::warn!(%error, "the automatic thaw will not outlive this process");
        }
        let wait = Duration::from_secs(due.saturating_sub(now()));
        thaw.task = Some(tokio::spawn(thaw_later(Arc::downgrade(&self.inner), wait)).abort_handle());
    }

    /// Takes over the thaw that a former worker left.
    pub(super) fn resume_thaw(&self) {
        let thaw = self.thaw();
        let due = if thaw.task.is_none() { thaw.due() } else { None };
        drop(thaw);
        if let Some(due) = due {
            tracing::info!("file systems may be frozen, they will be thawed");
            self.arm(due);
        }
    }

    fn thaw(&self) -> MutexGuard<'_, Thaw> {
        self.inner.thaw.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Inner {
    async fn is_frozen(&self, limit: Instant) -> Result<bool, AgentError> {
        Ok(self.ask_in_turn(Question::Freeze, limit).await? == Answer::Freeze("frozen".into()))
    }

    async fn thaw_now(&self) -> Result<(), AgentError> {
        let limit = Instant::now() + THAW_DEADLINE;
        let _turn = timeout_at(limit, self.turn.lock()).await.map_err(|_| AgentError::Busy)?;
        if !self.is_frozen(limit).await? {
            return Ok(());
        }
        self.command("guest-fsfreeze-thaw", limit).await?;
        self.learn(Question::Freeze, Answer::Freeze("thawed".into()));
        tracing::info!("the guest's file systems are thawed");
        Ok(())
    }
}

async fn thaw_later(agent: Weak<Inner>, wait: Duration) {
    sleep(wait).await;
    for _ in 0..THAW_ATTEMPTS {
        let Some(inner) = agent.upgrade() else { return };
        match inner.thaw_now().await {
            Ok(()) => {
                // By itself: this task must not end before the file is gone.
                let mut thaw = inner.thaw.lock().unwrap_or_else(PoisonError::into_inner);
                thaw.task = None;
                thaw.disarm();
                return;
            }
            Err(error) => tracing::warn!(%error, "the file systems were not thawed"),
        }
        drop(inner);
        sleep(THAW_RETRY).await;
    }
}
