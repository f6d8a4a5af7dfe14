//! Tasks that live as long as their process.
//!
//! Start with [`Tasks`]: it owns the tasks and reports the first one that ends or panics, so that the process can exit
//! and its supervisor can restart it. [`panics`] turns a panic of a future into an error.

pub mod panics;

use std::time::Duration;

use tokio::sync::mpsc;
use tokio_util::{
    sync::{CancellationToken, DropGuard},
    task::TaskTracker,
};

use panics::Panic;

/// Ends of tasks that are kept until they are read. The first one ends the process; later ones are only logged.
const KEPT_ENDS: usize = 1;

/// The error with which a process exits: a task ended that should have lived on.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TaskEnded {
    /// The task returned.
    #[error("task {name} ended")]
    Returned {
        /// Name of the task.
        name: &'static str,
    },
    /// The task panicked.
    #[error("task {name} panicked")]
    Panicked {
        /// Name of the task.
        name: &'static str,
        /// Message of the panic.
        #[source]
        panic: Panic,
    },
}

impl TaskEnded {
    /// Returns the name of the task.
    #[must_use]
    pub const fn name(&self) -> &'static str {
        match self {
            Self::Returned { name } | Self::Panicked { name, .. } => name,
        }
    }
}

/// Owner of long-lived tasks. Dropping it ends them all.
#[derive(Debug)]
pub struct Tasks {
    spawner: Spawner,
    ends: mpsc::Receiver<TaskEnded>,
    _abort: DropGuard,
}

/// Starts tasks for a [`Tasks`]. Cheap to clone.
#[derive(Clone, Debug)]
pub struct Spawner {
    tracker: TaskTracker,
    ends: mpsc::Sender<TaskEnded>,
    stop: CancellationToken,
    abort: CancellationToken,
}

impl Tasks {
    /// Creates an owner without tasks. Every end of a task is reported.
    #[must_use]
    pub fn new() -> Self {
        Self::stopped_by(CancellationToken::new())
    }

    /// Creates an owner without tasks. Tasks that end after `stop` was cancelled are not reported.
    #[must_use]
    pub fn stopped_by(stop: CancellationToken) -> Self {
        let (sender, ends) = mpsc::channel(KEPT_ENDS);
        let abort = CancellationToken::new();
        let spawner = Spawner { tracker: TaskTracker::new(), ends: sender, stop, abort: abort.clone() };
        Self { spawner, ends, _abort: abort.drop_guard() }
    }

    /// Starts a task. `name` appears in logs and in [`TaskEnded`].
    pub fn spawn(&self, name: &'static str, task: impl Future<Output = ()> + Send + 'static) {
        self.spawner.spawn(name, task);
    }

    /// Returns a handle that starts tasks for this owner.
    #[must_use]
    pub fn spawner(&self) -> Spawner {
        self.spawner.clone()
    }

    /// Waits until a task ends or panics before the stop. Pends forever after the stop.
    ///
    /// Cancel safe: an end is reported once, to the next call that completes.
    pub async fn ended(&mut self) -> TaskEnded {
        // The spawner keeps the channel open.
        match self.ends.recv().await {
            Some(ended) => ended,
            None => std::future::pending().await,
        }
    }

    /// Waits until all tasks have ended, then aborts the remaining ones after `limit`. Returns true when none was aborted.
    pub async fn finish(self, limit: Duration) -> bool {
        self.spawner.tracker.close();
        tokio::time::timeout(limit, self.spawner.tracker.wait()).await.is_ok()
    }
}

impl Default for Tasks {
    fn default() -> Self {
        Self::new()
    }
}

impl Spawner {
    /// Starts a task. `name` appears in logs and in [`TaskEnded`].
    pub fn spawn(&self, name: &'static str, task: impl Future<Output = ()> + Send + 'static) {
        let Self { ends, stop, abort, .. } = self.clone();
        self.tracker.spawn(async move {
            let outcome = tokio::select! {
                biased;
                () = abort.cancelled() => return,
                outcome = panics::catch(task) => outcome,
            };
            let ended = match outcome {
                Ok(()) if stop.is_cancelled() => return,
                Ok(()) => TaskEnded::Returned { name },
                Err(panic) => TaskEnded::Panicked { name, panic },
            };
            tracing::error!(task = name, error = %ended, "long-lived task ended");
            if !stop.is_cancelled() {
                let _ = ends.try_send(ended);
            }
        });
    }

    /// Starts a task that may return, for work at the start of the process. Only its panic is reported.
    pub fn spawn_once(&self, name: &'static str, task: impl Future<Output = ()> + Send + 'static) {
        let stop = self.stop.clone();
        self.spawn(name, async move {
            task.await;
            stop.cancelled().await;
        });
    }
}

#[cfg(test)]
mod tests {
    use std::{future::pending, sync::Arc};

    use super::*;

    const SOON: Duration = Duration::from_secs(1);

    #[tokio::test]
    async fn task_that_returns_is_named() {
        let mut tasks = Tasks::new();
        tasks.spawn("endless", pending());
        tasks.spawn("short", async {});
        let ended = tasks.ended().await;
        assert_eq!(ended, TaskEnded::Returned { name: "short" });
        assert_eq!((ended.name(), ended.to_string().as_str()), ("short", "task short ended"));
    }

    #[tokio::test]
    async fn task_that_panics_is_named_with_its_message() {
        let mut tasks = Tasks::new();
        tasks.spawn("broken", async { panic!("no {}", "luck") });
        let ended = tasks.ended().await;
        assert_eq!(ended.to_string(), "task broken panicked");
        assert_eq!(std::error::Error::source(&ended).unwrap().to_string(), "no luck");
    }

    #[tokio::test(start_paused = true)]
    async fn tasks_that_end_after_the_stop_are_not_reported() {
        let stop = CancellationToken::new();
        let mut tasks = Tasks::stopped_by(stop.clone());
        let stopped = stop.clone();
        tasks.spawn("follower", async move { stopped.cancelled().await });
        stop.cancel();
        assert!(tokio::time::timeout(SOON, tasks.ended()).await.is_err());
        assert!(tasks.finish(SOON).await);
    }

    #[tokio::test(start_paused = true)]
    async fn work_at_the_start_may_end() {
        let mut tasks = Tasks::new();
        tasks.spawner().spawn_once("first", async {});
        assert!(tokio::time::timeout(SOON, tasks.ended()).await.is_err());
        tasks.spawner().spawn_once("second", async { panic!("broken") });
        assert_eq!(tasks.ended().await.name(), "second");
    }

    #[tokio::test(start_paused = true)]
    async fn dropped_owner_ends_its_tasks_while_spawners_live_on() {
        let alive = Arc::new(());
        let tasks = Tasks::new();
        let spawner = tasks.spawner();
        for _ in 0..3 {
            let (alive, inner) = (alive.clone(), spawner.clone());
            spawner.spawn("endless", async move {
                let _kept = (alive, inner);
                pending::<()>().await;
            });
        }
        tokio::task::yield_now().await;
        assert!(!tasks.finish(SOON).await);
        while Arc::strong_count(&alive) > 1 {
            tokio::task::yield_now().await;
        }
    }
}
