//! Runs one controller: takes keys from its queue, decides, has the effects carried out.

use std::{
    collections::HashMap,
    fmt,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use tracing::Instrument;

use super::{
    Decision,
    executor::{Executor, Outcome},
    queue::Queue,
};

/// Namespace and name of an object; the namespace is empty for cluster-wide ones.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Key {
    /// Namespace, or empty.
    pub namespace: String,
    /// Name.
    pub name: String,
}

impl Key {
    /// A key.
    pub fn new(namespace: impl Into<String>, name: impl Into<String>) -> Self {
        Self { namespace: namespace.into(), name: name.into() }
    }

    /// The key of the object with this metadata.
    #[must_use]
    pub fn of(meta: &ObjectMeta) -> Self {
        Self::new(meta.namespace.clone().unwrap_or_default(), meta.name.clone().unwrap_or_default())
    }
}

impl fmt::Display for Key {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.namespace.is_empty() {
            formatter.write_str(&self.name)
        } else {
            write!(formatter, "{}/{}", self.namespace, self.name)
        }
    }
}

/// A write of a key that was refused. It is handed to the next reconciles of the key until a write of the same reason
/// succeeds or there is nothing left to do. A decision that waits for it says when to look again.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Failure {
    /// Reason given by the effect.
    pub reason: &'static str,
    /// What the API server said.
    pub message: String,
    /// Not to be tried again before.
    pub retry_at: Timestamp,
    /// Refusals in a row.
    pub attempts: u32,
}

impl Failure {
    /// True while the write must not be tried again.
    #[must_use]
    pub fn blocks(&self, now: Timestamp) -> bool {
        now < self.retry_at
    }

    /// Time until the write may be tried again.
    #[must_use]
    pub fn remaining(&self, now: Timestamp) -> Duration {
        Duration::try_from(self.retry_at.duration_since(now)).unwrap_or(Duration::ZERO)
    }
}

/// What a controller decides for a key. Looks at caches only; does no input or output. An error means that an object
/// could not be put into JSON, which is a defect.
pub type Reconcile = dyn Fn(&Key, Option<&Failure>, Timestamp) -> Result<Decision, serde_json::Error> + Send + Sync;

/// First wait before a refused write is tried again.
const FIRST_RETRY: Duration = Duration::from_secs(1);
/// Longest wait before a refused write is tried again.
const LONGEST_RETRY: Duration = Duration::from_secs(60);
/// A decision that takes longer is worth a warning: everything runs on one thread.
const SLOW_DECISION: Duration = Duration::from_millis(200);

/// One controller with its queue.
pub struct Driver {
    name: &'static str,
    queue: Arc<Queue<Key>>,
    executor: Arc<Executor>,
    reconcile: Box<Reconcile>,
    failures: Mutex<HashMap<Key, Failure>>,
}

impl Driver {
    /// A controller.
    pub fn new(
        name: &'static str,
        queue: Arc<Queue<Key>>,
        executor: Arc<Executor>,
        reconcile: impl Fn(&Key, Option<&Failure>, Timestamp) -> Result<Decision, serde_json::Error> + Send + Sync + 'static,
    ) -> Arc<Self> {
        Arc::new(Self { name, queue, executor, reconcile: Box::new(reconcile), failures: Mutex::default() })
    }

    /// Starts `workers` tasks that work for ever.
    pub fn start(self: &Arc<Self>, workers: usize) {
        for _ in 0..workers {
            let driver = self.clone();
            tokio::spawn(async move {
                loop {
                    let key = driver.queue.next().await;
                    let failed = driver.work(&key).await;
                    driver.queue.done(&key, failed);
                    driver.executor.metrics().queue_depth(driver.name, driver.queue.depth());
                }
            });
        }
    }

    /// One reconcile; true when it is to be repeated soon.
    async fn work(&self, key: &Key) -> bool {
        let span =
            tracing::info_span!("reconcile", controller = self.name, namespace = %key.namespace, object = %key.name);
        async {
            let failure = self.failures.lock().unwrap_or_else(PoisonError::into_inner).get(key).cloned();
            let started = std::time::Instant::now();
            let decision = (self.reconcile)(key, failure.as_ref(), Timestamp::now());
            let took = started.elapsed();
            self.executor.metrics().reconciled(self.name, took);
            if took > SLOW_DECISION {
                tracing::warn!(milliseconds = took.as_millis() as u64, "decision took long");
            }
            let decision = match decision {
                Ok(decision) => decision,
                Err(error) => {
                    tracing::error!(%error, "object cannot be written as JSON");
                    return true;
                }
            };
            // Nobody wants any more what was refused, or its object is gone: another start is another attempt.
            if decision.is_settled() {
                self.forget(key);
            }
            let outcome = self.executor.carry_out(self.name, decision.effects).await;
            if let Some(wake_after) = decision.wake_after {
                self.queue.add_after(key.clone(), wake_after);
            }
            self.remember(key, &outcome)
        }
        .instrument(span)
        .await
    }

    fn remember(&self, key: &Key, outcome: &Outcome) -> bool {
        let mut failures = self.failures.lock().unwrap_or_else(PoisonError::into_inner);
        match outcome {
            Outcome::Done { succeeded } => {
                // Only the write that was refused tells, by succeeding, that the cause is gone.
                if failures.get(key).is_some_and(|failure| succeeded.contains(&failure.reason)) {
                    failures.remove(key);
                    self.queue.add(key.clone());
                }
                false
            }
            Outcome::Refused { reason: Some(reason), message } => {
                let attempts = failures.get(key).map_or(0, |failure| failure.attempts).saturating_add(1);
                let wait = FIRST_RETRY.saturating_mul(1 << attempts.saturating_sub(1).min(10)).min(LONGEST_RETRY);
                let wait = jiff::SignedDuration::try_from(wait).unwrap_or(jiff::SignedDuration::from_secs(60));
                let failure = Failure {
                    reason,
                    message: message.clone(),
                    retry_at: Timestamp::now().checked_add(wait).unwrap_or(Timestamp::MAX),
                    attempts,
                };
                failures.insert(key.clone(), failure);
                // At once, so that the refusal shows in the status; the decision waits with the write itself.
                self.queue.add(key.clone());
                false
            }
            other => is_repeated(other),
        }
    }

    /// Forgets what is known of a key whose object is gone.
    pub fn forget(&self, key: &Key) {
        self.failures.lock().unwrap_or_else(PoisonError::into_inner).remove(key);
    }
}

/// Whether a key is to be looked at again soon though nothing has changed: what was wanted has not been done.
fn is_repeated(outcome: &Outcome) -> bool {
    match outcome {
        Outcome::Done { .. } | Outcome::Refused { reason: Some(_), .. } => false,
        // Leadership that was renewed late goes on, and what was held back meanwhile with it.
        Outcome::Refused { reason: None, .. } | Outcome::Stale | Outcome::Unreachable | Outcome::NotLeading => true,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_not_done_is_tried_again() {
        let refused = |reason| Outcome::Refused { reason, message: "no".to_owned() };
        for (outcome, repeated) in [
            (Outcome::Done { succeeded: Vec::new() }, false),
            // The decision itself waits and tells.
            (refused(Some("FailedCreate")), false),
            (refused(None), true),
            (Outcome::Stale, true),
            (Outcome::Unreachable, true),
            (Outcome::NotLeading, true),
        ] {
            assert_eq!(is_repeated(&outcome), repeated, "{outcome:?}");
        }
    }

    #[test]
    fn refusal_is_remembered_while_a_decision_waits() {
        let mut decision = Decision::settled();
        assert!(decision.is_settled());
        decision.wake(FIRST_RETRY);
        assert!(!decision.is_settled());
    }
}
