//! Runs blocking system calls on files of a pod, on threads that can hang.
//!
//! The server of a file system that is mounted in a pod decides how long a call on it takes, and only the end of the process
//! interrupts such a call. These calls must therefore not run on threads of the runtime. Each gets a thread of its own, and
//! a time limit for its caller. A hanging thread keeps the slot of its pod, so that a pod costs one thread and delays only
//! its own VMI. The slots of all pods are limited and divided among namespaces.

use std::{
    collections::HashMap,
    io,
    sync::{Arc, Mutex},
    time::{Duration, Instant},
};

use daemon::lock;
use daemon::quota::{Exceeded, Quota, Slot};
use tokio::sync::oneshot;

/// Limit of a call. On file systems of the node it takes less than a millisecond.
const LIMIT: Duration = Duration::from_secs(5);
/// Most calls at a time. By default kubelet runs 110 pods on a node, and each has at most one call.
const MOST: usize = 128;
/// Stack size of a thread.
const STACK: usize = 256 << 10;
/// Interval of log messages about exhausted slots.
const REMINDER: Duration = Duration::from_secs(30);

/// Reason why a call has no result.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Error {
    /// The call did not return in time.
    #[error("cannot {what}: not done within {} s, a file system in the pod does not answer", limit.as_secs())]
    Hangs {
        /// The attempted action.
        what: &'static str,
        limit: Duration,
    },
    /// An earlier call for the same pod has not returned.
    #[error("cannot {what}: an earlier call has not returned ({earlier}), a file system in the pod does not answer")]
    Busy {
        /// The attempted action.
        what: &'static str,
        /// The earlier action.
        earlier: &'static str,
    },
    /// No slot is free.
    #[error("cannot {what}: too many calls into pods of this node have not returned")]
    Full {
        /// The attempted action.
        what: &'static str,
    },
    /// No thread can be started.
    #[error("cannot {what}: no thread")]
    Thread {
        /// The attempted action.
        what: &'static str,
        source: io::Error,
    },
    /// The call panicked.
    #[error("cannot {what}: the call was aborted")]
    Aborted {
        /// The attempted action.
        what: &'static str,
    },
}

/// Calls in progress. Clones share them.
#[derive(Clone, Debug)]
pub(crate) struct PodCalls {
    in_progress: Arc<Mutex<InProgress>>,
    quota: Quota,
    limit: Duration,
}

#[derive(Debug, Default)]
struct InProgress {
    /// Action and start time by UID of the VMI.
    calls: HashMap<String, (&'static str, Instant)>,
    /// Time of the last log message about exhausted slots.
    reminded: Option<Instant>,
}

/// Slot of a call, held by its thread until the call returns.
struct CallSlot {
    in_progress: Arc<Mutex<InProgress>>,
    vmi: String,
    limit: Duration,
    _slot: Slot,
}

impl Drop for CallSlot {
    fn drop(&mut self) {
        let ended = lock(&self.in_progress).calls.remove(&self.vmi);
        if let Some((what, since)) = ended
            && since.elapsed() > self.limit
        {
            tracing::info!(
                vmi = self.vmi,
                what,
                seconds = since.elapsed().as_secs(),
                "call into a pod has returned late"
            );
        }
    }
}

impl Default for PodCalls {
    fn default() -> Self {
        Self::new(MOST, LIMIT)
    }
}

impl PodCalls {
    fn new(most: usize, limit: Duration) -> Self {
        Self { in_progress: Arc::default(), quota: Quota::new(most), limit }
    }

    /// Runs `work` for the pod of the VMI with the UID `vmi` in `namespace`. `what` completes "cannot ...".
    ///
    /// # Errors
    /// When `work` does not return in time, or cannot be started. It may still be carried out.
    pub(crate) async fn run<T, W>(&self, namespace: &str, vmi: &str, what: &'static str, work: W) -> Result<T, Error>
    where
        T: Send + 'static,
        W: FnOnce() -> T + Send + 'static,
    {
        let slot = self.acquire(namespace, vmi, what)?;
        let (answer, outcome) = oneshot::channel();
        let run = move || {
            let result = work();
            drop(slot);
            // The caller may be gone.
            drop(answer.send(result));
        };
        let thread = std::thread::Builder::new().name("pod-call".to_owned()).stack_size(STACK);
        thread.spawn(run).map_err(|source| Error::Thread { what, source })?;
        match tokio::time::timeout(self.limit, outcome).await {
            Ok(result) => result.map_err(|_| Error::Aborted { what }),
            Err(_) => Err(Error::Hangs { what, limit: self.limit }),
        }
    }

    fn acquire(&self, namespace: &str, vmi: &str, what: &'static str) -> Result<CallSlot, Error> {
        let mut in_progress = lock(&self.in_progress);
        if let Some(&(earlier, _)) = in_progress.calls.get(vmi) {
            return Err(Error::Busy { what, earlier });
        }
        let slot = self.quota.acquire(namespace.to_owned()).map_err(|exceeded| {
            let used = self.quota.used();
            if in_progress.reminded.is_none_or(|last| last.elapsed() > REMINDER) {
                in_progress.reminded = Some(Instant::now());
                let scope = match exceeded {
                    Exceeded::Total => "all namespaces",
                    Exceeded::Holder => "this namespace",
                };
                tracing::error!(
                    used,
                    namespace,
                    "calls into pods of {scope} have used all slots and do not return: file systems in pods hang"
                );
            }
            Error::Full { what }
        })?;
        in_progress.calls.insert(vmi.to_owned(), (what, Instant::now()));
        let vmi = vmi.to_owned();
        Ok(CallSlot { in_progress: self.in_progress.clone(), vmi, limit: self.limit, _slot: slot })
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;

    const SHORT: Duration = Duration::from_millis(50);

    async fn until_free(calls: &PodCalls, used: usize) {
        while calls.quota.used() > used {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }

    #[tokio::test]
    async fn a_call_returns_its_result() {
        let calls = PodCalls::default();
        assert_eq!(calls.run("ns", "u1", "look", || 7).await.unwrap(), 7);
        let aborted = calls.run::<(), _>("ns", "u1", "look", || panic!("wrong")).await.unwrap_err();
        assert!(matches!(aborted, Error::Aborted { .. }), "{aborted}");
        until_free(&calls, 0).await;
        assert_eq!(calls.run("ns", "u1", "look", || 8).await.unwrap(), 8);
    }

    #[tokio::test]
    async fn a_hanging_pod_keeps_one_thread_and_delays_no_other() {
        let calls = PodCalls::new(8, SHORT);
        let (go_on, hang) = mpsc::channel::<()>();
        let hangs = calls.run("ns", "u1", "open", move || hang.recv().is_ok()).await.unwrap_err();
        assert_eq!(hangs.to_string(), "cannot open: not done within 0 s, a file system in the pod does not answer");
        // No second thread for the same pod.
        for _ in 0..3 {
            let busy = calls.run("ns", "u1", "look", || ()).await.unwrap_err();
            assert!(matches!(busy, Error::Busy { earlier: "open", .. }), "{busy}");
        }
        assert_eq!(calls.quota.used(), 1);
        assert!(calls.run("ns", "u2", "look", || ()).await.is_ok());
        go_on.send(()).unwrap();
        until_free(&calls, 0).await;
        assert!(calls.run("ns", "u1", "look", || ()).await.is_ok());
    }

    #[tokio::test]
    async fn slots_are_limited_and_one_namespace_does_not_get_all() {
        let calls = PodCalls::new(16, Duration::from_millis(1));
        let mut hung = Vec::new();
        for number in 0..32 {
            let (go_on, hang) = mpsc::channel::<()>();
            hung.push(go_on);
            let _ = calls.run("evil", &format!("e{number}"), "open", move || hang.recv().is_ok()).await;
        }
        assert!(calls.quota.used() < 16, "one namespace got all slots");
        let full = calls.run("evil", "another", "open", || ()).await.unwrap_err();
        assert!(matches!(full, Error::Full { .. }), "{full}");
        let roomy = PodCalls { limit: LIMIT, ..calls.clone() };
        assert!(roomy.run("good", "g1", "open", || ()).await.is_ok());
        drop(hung);
        until_free(&calls, 0).await;
    }
}
