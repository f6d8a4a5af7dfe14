//! Runs one controller: takes keys from its queue, observes, decides, carries the decision out.

use std::{
    collections::BTreeMap,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use api::traceparent::TraceParent;
use daemon::{
    backoff, lock,
    tasks::{Spawner, panics},
};
use jiff::Timestamp;
use tracing::{Instrument, field::Empty};

use super::{
    Effect, Failure,
    controller::{Attempt, ConfigChange, Controller, Needs, Wake},
    executor::{Executor, Outcome},
};
use crate::{cache::Key, shards::shard_of};

/// First and longest wait before a refused write is repeated.
const RETRY: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(60));
/// Time of a decision above which a warning is logged: all controllers run on one thread.
const SLOW_DECISION: Duration = Duration::from_millis(200);

/// A controller of any kind.
pub(crate) trait Run: Send + Sync {
    /// Returns the resources whose caches must be filled before the start.
    fn needs(&self) -> Needs;
    /// Registers the changes that wake keys.
    fn watch(&self);
    /// Returns true if its keys are divided among the replicas.
    fn is_sharded(&self) -> bool;
    /// Queues all objects of a shard, for which `executor` writes, and starts the workers.
    fn start(self: Arc<Self>, shard: u32, executor: &Arc<Executor>, tasks: &Spawner);
    /// Begins no further work on the keys of a shard.
    fn stop(&self, shard: u32);
    /// Returns true if no key of a shard is being worked on.
    fn is_idle(&self, shard: u32) -> bool;
    /// Wakes the keys that a change of the configuration concerns.
    fn config_changed(&self, change: &ConfigChange);
    /// Opens the queue without the keys of the start.
    #[cfg(test)]
    fn open_empty(&self);
    /// Queues the keys of the start.
    #[cfg(test)]
    fn open(&self) -> &'static str;
    /// Observes the queued keys. Returns their number.
    #[cfg(test)]
    fn observe_queued(&self) -> usize;
}

/// One controller with its queue.
pub(crate) struct Runner<C: Controller> {
    controller: C,
    caches: Arc<C::Caches>,
    wake: Wake,
    /// The shards that this process holds, with their executors: each writes as long as it has the lease of its shard.
    executors: Mutex<BTreeMap<u32, Arc<Executor>>>,
    has_workers: AtomicBool,
}

impl<C: Controller> Runner<C> {
    /// Creates a runner. Its queue is closed until the start.
    pub(crate) fn new(controller: C, caches: Arc<C::Caches>) -> Self {
        Self {
            controller,
            caches,
            wake: Wake::default(),
            executors: Mutex::default(),
            has_workers: AtomicBool::default(),
        }
    }

    /// Divides the keys of a sharded controller.
    pub(crate) fn divided(mut self, shards: u32) -> Self {
        if C::SHARDED && shards > 1 {
            let caches = self.caches.clone();
            self.wake = Wake::placed(move |key| shard_of(&C::vm(&caches, key), shards));
        }
        self
    }

    /// Works for ever.
    async fn work(self: Arc<Self>) {
        loop {
            let taken = self.wake.queue.next().await;
            let shard = self.wake.shard(&taken.key);
            let executor = lock(&self.executors).get(&shard).cloned();
            // The shard was released since the key was queued.
            let Some(executor) = executor else {
                self.wake.queue.done(&taken.key, false);
                continue;
            };
            executor.metrics().waited(C::NAME, taken.waited);
            let started = std::time::Instant::now();
            self.work_on(&taken.key, &executor).await;
            executor.metrics().worked(C::NAME, started.elapsed());
        }
    }

    /// Reconciles a key and releases it, also after a panic.
    async fn work_on(&self, key: &Key, executor: &Executor) {
        let span = tracing::info_span!("reconcile", controller = C::NAME, namespace = %key.namespace, name = %key.name, uid = Empty);
        let is_repeated = match panics::catch(self.reconcile(key, executor).instrument(span.clone())).await {
            Ok(is_repeated) => is_repeated,
            Err(panic) => {
                executor.metrics().panicked(C::NAME);
                span.in_scope(|| tracing::error!(error = %panic, "reconcile panicked"));
                true
            }
        };
        self.wake.queue.done(key, is_repeated);
    }

    /// Returns true when the key must be reconciled again soon.
    async fn reconcile(&self, key: &Key, executor: &Executor) -> bool {
        let failures = self.wake.failures_of(key);
        let started = std::time::Instant::now();
        let attempt = Attempt { key, failures: &failures, now: Timestamp::now() };
        let Some(observed) = self.controller.observe(&self.caches, &attempt) else {
            self.wake.forget(key);
            if C::COUNTS_SYNCS {
                executor.metrics().forget_syncs(key);
            }
            return false;
        };
        if C::COUNTS_SYNCS {
            executor.metrics().synced(key);
        }
        let subject = self.controller.subject(&observed);
        if let Some(uid) = subject.and_then(|metadata| metadata.uid.as_deref()) {
            tracing::Span::current().record("uid", uid);
        }
        let trace = subject.filter(|_| executor.traces().is_on() && self.controller.is_starting(&observed));
        let trace = trace.and_then(|metadata| TraceParent::of_start(metadata, attempt.now));
        let decision = self.controller.decide(&observed);
        drop(observed);
        let took = started.elapsed();
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
        // The refused write is not wanted any more.
        if decision.is_settled() {
            self.wake.forget(key);
        }
        // A reconcile without a write is of no interest to a trace.
        let trace = trace.filter(|_| decision.effects.iter().any(Effect::is_write));
        let span = trace.and_then(|parent| executor.traces().child("reconcile", &parent)).map(|span| {
            span.began(started).with("controller", C::NAME).with("namespace", &key.namespace).with("name", &key.name)
        });
        let outcome = executor.carry_out(C::NAME, decision.effects, span.as_ref()).await;
        drop(span);
        if let Some(wake_after) = decision.wake_after {
            self.wake.queue.add_after(key.clone(), wake_after);
        }
        self.record(key, &outcome)
    }

    /// Records the outcome of the writes. Returns true when the key must be reconciled again soon.
    fn record(&self, key: &Key, outcome: &Outcome) -> bool {
        let mut failures = self.wake.failures();
        match outcome {
            Outcome::Done { succeeded } => {
                // Only the success of the refused write proves that its cause is gone.
                let Some(known) = failures.get_mut(key) else { return false };
                if known.remove(succeeded) {
                    self.wake.queue.add(key.clone());
                }
                if known.is_empty() {
                    failures.remove(key);
                }
                false
            }
            Outcome::Refused { reason: Some(reason), message, succeeded } => {
                let known = failures.entry(key.clone()).or_default();
                let attempts = known.of(reason).map_or(0, |failure| failure.attempts).saturating_add(1);
                let wait = backoff::pause(RETRY, attempts);
                let failure = Failure {
                    reason,
                    message: message.clone(),
                    retry_at: Timestamp::now().checked_add(wait).unwrap_or(Timestamp::MAX),
                    attempts,
                };
                known.remove(succeeded);
                known.add(failure);
                // At once, so that the refusal shows in the status. The decision delays the write itself.
                self.wake.queue.add(key.clone());
                false
            }
            Outcome::Refused { reason: None, succeeded, .. } => {
                if let Some(known) = failures.get_mut(key) {
                    known.remove(succeeded);
                }
                true
            }
            // Leadership that was renewed late continues, and so do the writes that were held back.
            Outcome::Stale | Outcome::Unreachable | Outcome::NotLeading => true,
        }
    }
}

impl<C: Controller> Run for Runner<C> {
    fn needs(&self) -> Needs {
        C::NEEDS
    }

    fn watch(&self) {
        self.controller.watch(&self.caches, &self.wake);
    }

    fn is_sharded(&self) -> bool {
        C::SHARDED
    }

    fn start(self: Arc<Self>, shard: u32, executor: &Arc<Executor>, tasks: &Spawner) {
        lock(&self.executors).insert(shard, executor.clone());
        let has_workers = self.has_workers.swap(true, Ordering::Relaxed);
        if !has_workers {
            executor.metrics().add_queue(C::NAME, &self.wake.queue);
        }
        self.wake.open(shard);
        if !has_workers {
            for _ in 0..C::WORKERS {
                tasks.spawn(C::NAME, self.clone().work());
            }
        }
    }

    fn stop(&self, shard: u32) {
        self.wake.close(shard);
        let executor = lock(&self.executors).remove(&shard);
        if let Some(executor) = executor.filter(|_| C::COUNTS_SYNCS) {
            executor.metrics().retain_syncs(|key| self.wake.shard(key) != shard);
        }
    }

    fn is_idle(&self, shard: u32) -> bool {
        self.wake.queue.running().iter().all(|key| self.wake.shard(key) != shard)
    }

    fn config_changed(&self, change: &ConfigChange) {
        self.controller.config_changed(&self.caches, change, &self.wake);
    }

    #[cfg(test)]
    fn open_empty(&self) {
        self.wake.queue.open();
    }

    #[cfg(test)]
    fn open(&self) -> &'static str {
        self.wake.open(crate::shards::LEADER);
        C::NAME
    }

    #[cfg(test)]
    fn observe_queued(&self) -> usize {
        let mut count = 0;
        while let Some(taken) = self.wake.queue.pop() {
            let attempt = Attempt { key: &taken.key, failures: &Default::default(), now: Timestamp::now() };
            let _ = self.controller.observe(&self.caches, &attempt);
            self.wake.queue.done(&taken.key, false);
            count += 1;
        }
        count
    }
}
