//! Blocking system calls on what a pod controls, on threads that may hang.
//!
//! Whoever serves a file system that is mounted in a pod decides how long a call on it takes, and no signal short of the end
//! of the process takes such a call back. These calls must therefore never be made on a thread of the runtime. Here each has
//! a thread of its own and a time limit after which its caller goes on without it. A thread that hangs keeps the place of its
//! pod until the call returns, so that a pod costs one thread and makes only its own VMI wait, and the places of all pods are
//! limited and shared between namespaces.

use std::{
    collections::HashMap,
    io,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use process::shares::{Full, Share, Shares};
use tokio::sync::oneshot;

/// Longest wait for a call. On file systems of the node it takes less than a millisecond.
const LIMIT: Duration = Duration::from_secs(5);
/// Calls at a time. kubelet runs 110 pods on a node unless it is told otherwise, and each has one call at most.
const MOST: usize = 128;
/// Stack of a thread.
const STACK: usize = 256 << 10;
/// How often it is logged that no place is free.
const REMINDER: Duration = Duration::from_secs(30);

/// Why a call has no result.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// It has not returned in time.
    #[error("cannot {what}: not done within {} s, a file system in the pod does not answer", limit.as_secs())]
    Hangs {
        /// The action that was attempted.
        what: &'static str,
        /// How long it was waited for.
        limit: Duration,
    },
    /// An earlier call for the same pod has not returned yet.
    #[error("cannot {what}: an earlier call has not returned ({earlier}), a file system in the pod does not answer")]
    Busy {
        /// The action that was attempted.
        what: &'static str,
        /// The action that is still under way.
        earlier: &'static str,
    },
    /// The calls of others have taken all places.
    #[error("cannot {what}: too many calls into pods of this node have not returned")]
    Full {
        /// The action that was attempted.
        what: &'static str,
    },
    /// There is no thread for it.
    #[error("cannot {what}: no thread")]
    Thread {
        /// The action that was attempted.
        what: &'static str,
        /// Why not.
        source: io::Error,
    },
    /// It panicked.
    #[error("cannot {what}: the call was aborted")]
    Aborted {
        /// The action that was attempted.
        what: &'static str,
    },
}

/// The calls under way. Clones share them.
#[derive(Clone, Debug)]
pub struct PodCalls {
    under_way: Arc<Mutex<UnderWay>>,
    shares: Shares,
    limit: Duration,
}

#[derive(Debug, Default)]
struct UnderWay {
    /// By the UID of the VMI: what is done, and since when.
    calls: HashMap<String, (&'static str, Instant)>,
    /// When it was last logged that no place is free.
    reminded: Option<Instant>,
}

/// The place of a call, which its thread holds until the call has returned.
struct Place {
    under_way: Arc<Mutex<UnderWay>>,
    vmi: String,
    limit: Duration,
    _share: Share,
}

impl Drop for Place {
    fn drop(&mut self) {
        let ended = lock(&self.under_way).calls.remove(&self.vmi);
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
        Self { under_way: Arc::default(), shares: Shares::of(most), limit }
    }

    /// Runs `work` for the pod of the VMI with the UID `vmi` in `namespace`. `what` completes "cannot ...".
    ///
    /// # Errors
    /// When `work` does not return in time, or cannot be started. It may still be carried out.
    pub async fn run<T, W>(&self, namespace: &str, vmi: &str, what: &'static str, work: W) -> Result<T, Error>
    where
        T: Send + 'static,
        W: FnOnce() -> T + Send + 'static,
    {
        let place = self.claim(namespace, vmi, what)?;
        let (answer, outcome) = oneshot::channel();
        let run = move || {
            let result = work();
            drop(place);
            // Nobody may wait for it any more.
            drop(answer.send(result));
        };
        let thread = std::thread::Builder::new().name("pod-call".to_owned()).stack_size(STACK);
        thread.spawn(run).map_err(|source| Error::Thread { what, source })?;
        match tokio::time::timeout(self.limit, outcome).await {
            Ok(result) => result.map_err(|_| Error::Aborted { what }),
            Err(_) => Err(Error::Hangs { what, limit: self.limit }),
        }
    }

    fn claim(&self, namespace: &str, vmi: &str, what: &'static str) -> Result<Place, Error> {
        let mut under_way = lock(&self.under_way);
        if let Some(&(earlier, _)) = under_way.calls.get(vmi) {
            return Err(Error::Busy { what, earlier });
        }
        let share = self.shares.claim(namespace.to_owned()).map_err(|full| {
            let taken = self.shares.taken();
            if under_way.reminded.is_none_or(|last| last.elapsed() > REMINDER) {
                under_way.reminded = Some(Instant::now());
                let whose = match full {
                    Full::All => "all namespaces",
                    Full::Share => "this namespace",
                };
                tracing::error!(
                    taken,
                    namespace,
                    "calls into pods of {whose} have taken all their places and do not return: file systems in pods hang"
                );
            }
            Error::Full { what }
        })?;
        under_way.calls.insert(vmi.to_owned(), (what, Instant::now()));
        let vmi = vmi.to_owned();
        Ok(Place { under_way: self.under_way.clone(), vmi, limit: self.limit, _share: share })
    }
}

fn lock(under_way: &Mutex<UnderWay>) -> MutexGuard<'_, UnderWay> {
    under_way.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;

    const SHORT: Duration = Duration::from_millis(50);

    async fn until_free(calls: &PodCalls, taken: usize) {
        while calls.shares.taken() > taken {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }

    #[tokio::test]
    async fn a_call_returns_what_it_found() {
        let calls = PodCalls::default();
        assert_eq!(calls.run("ns", "u1", "look", || 7).await.unwrap(), 7);
        let aborted = calls.run::<(), _>("ns", "u1", "look", || panic!("wrong")).await.unwrap_err();
        assert!(matches!(aborted, Error::Aborted { .. }), "{aborted}");
        until_free(&calls, 0).await;
        assert_eq!(calls.run("ns", "u1", "look", || 8).await.unwrap(), 8);
    }

    #[tokio::test]
    async fn a_pod_that_hangs_keeps_one_thread_and_makes_nobody_else_wait() {
        let calls = PodCalls::new(8, SHORT);
        let (go_on, hang) = mpsc::channel::<()>();
        let hangs = calls.run("ns", "u1", "open", move || hang.recv().is_ok()).await.unwrap_err();
        assert_eq!(hangs.to_string(), "cannot open: not done within 0 s, a file system in the pod does not answer");
        // Not a second thread for the same pod, however often it is tried.
        for _ in 0..3 {
            let busy = calls.run("ns", "u1", "look", || ()).await.unwrap_err();
            assert!(matches!(busy, Error::Busy { earlier: "open", .. }), "{busy}");
        }
        assert_eq!(calls.shares.taken(), 1);
        assert!(calls.run("ns", "u2", "look", || ()).await.is_ok());
        go_on.send(()).unwrap();
        until_free(&calls, 0).await;
        assert!(calls.run("ns", "u1", "look", || ()).await.is_ok());
    }

    #[tokio::test]
    async fn places_are_limited_and_one_namespace_does_not_take_them_all() {
        let calls = PodCalls::new(16, Duration::from_millis(1));
        let mut hung = Vec::new();
        for number in 0..32 {
            let (go_on, hang) = mpsc::channel::<()>();
            hung.push(go_on);
            let _ = calls.run("evil", &format!("e{number}"), "open", move || hang.recv().is_ok()).await;
        }
        assert!(calls.shares.taken() < 16, "one namespace has taken all places");
        let full = calls.run("evil", "another", "open", || ()).await.unwrap_err();
        assert!(matches!(full, Error::Full { .. }), "{full}");
        let roomy = PodCalls { limit: LIMIT, ..calls.clone() };
        assert!(roomy.run("good", "g1", "open", || ()).await.is_ok());
        drop(hung);
        until_free(&calls, 0).await;
    }
}
