//! Tasks that live as long as the worker.
//!
//! When such a task ends or panics, the worker logs its name and exits as after a panic of its own: virt-launcher-monitor
//! restarts the worker, and the new one adopts the running domain.

use std::panic::AssertUnwindSafe;

use futures::FutureExt;
use thiserror::Error;
use tokio::{sync::mpsc, task::AbortHandle};
use tracing::Instrument;

/// Limit of failures that wait to be read; the first one ends the worker.
const FAILURES: usize = 4;

/// Unexpected end of a task.
#[derive(Clone, Copy, Debug, Error, PartialEq, Eq)]
pub(crate) enum TaskFailure {
    /// The task has ended.
    #[error("task {0} has ended")]
    Ended(&'static str),
    /// The task has panicked.
    #[error("task {0} has panicked")]
    Panicked(&'static str),
}

/// Starts tasks and reports the first that fails. Cheap to clone.
#[derive(Clone, Debug)]
pub(crate) struct Tasks {
    failures: mpsc::Sender<TaskFailure>,
}

/// Receives the failures of tasks.
#[derive(Debug)]
pub(crate) struct TaskFailures {
    failures: mpsc::Receiver<TaskFailure>,
}

impl Tasks {
    /// Creates the starter of tasks and the receiver of their failures.
    pub(crate) fn new() -> (Self, TaskFailures) {
        let (sender, receiver) = mpsc::channel(FAILURES);
        (Self { failures: sender }, TaskFailures { failures: receiver })
    }

    /// Starts a task that must not end. Aborting it through the handle is no failure.
    pub(crate) fn keep(&self, name: &'static str, task: impl Future<Output = ()> + Send + 'static) -> AbortHandle {
        let failures = self.failures.clone();
        let watched = async move {
            let failure = match AssertUnwindSafe(task).catch_unwind().await {
                Ok(()) => TaskFailure::Ended(name),
                Err(_) => TaskFailure::Panicked(name),
            };
            // A full queue means that the worker ends already.
            let _ = failures.try_send(failure);
        };
        tokio::spawn(watched.in_current_span()).abort_handle()
    }
}

impl TaskFailures {
    /// Waits for the first failure; forever if nothing can fail any more.
    pub(crate) async fn first(&mut self) -> TaskFailure {
        match self.failures.recv().await {
            Some(failure) => failure,
            None => std::future::pending().await,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn an_end_and_a_panic_are_failures_and_an_abort_is_not() {
        let (tasks, mut failures) = Tasks::new();
        tasks.keep("aborted", std::future::pending()).abort();
        tokio::task::yield_now().await;
        tasks.keep("short", async {});
        assert_eq!(failures.first().await, TaskFailure::Ended("short"));
        tasks.keep("broken", async { panic!("on purpose") });
        assert_eq!(failures.first().await, TaskFailure::Panicked("broken"));
    }
}
