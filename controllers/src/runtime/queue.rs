//! The queue of keys: each key once, with delays and back-off.
//!
//! Its length is bounded by the number of objects: a key that waits is not queued a second time.

use std::{
    collections::{HashMap, HashSet, VecDeque},
    future::poll_fn,
    hash::Hash,
    sync::{Mutex, MutexGuard, PoisonError},
    task::{Context, Poll},
    time::Duration,
};

use tokio::{sync::Notify, time::Instant};
use tokio_util::time::{DelayQueue, delay_queue};

/// First delay after a failure.
const FIRST_DELAY: Duration = Duration::from_millis(100);
/// Longest delay after failures.
const LONGEST_DELAY: Duration = Duration::from_secs(120);
/// Longest delay at all. [`DelayQueue`] panics on delays of more than two years.
const LONGEST_WAIT: Duration = Duration::from_secs(7 * 24 * 3600);

struct State<T> {
    is_open: bool,
    ready: VecDeque<T>,
    queued: HashSet<T>,
    delays: DelayQueue<T>,
    /// Delayed keys with their handles in `delays`.
    delayed: HashMap<T, delay_queue::Key>,
    /// Keys being worked on. True: the key is queued again afterwards.
    running: HashMap<T, bool>,
    failures: HashMap<T, u32>,
}

/// A queue of keys. Closed at first: keys are dropped until it is opened.
pub(crate) struct Queue<T> {
    state: Mutex<State<T>>,
    wake: Notify,
}

impl<T: Clone + Eq + Hash> Default for Queue<T> {
    fn default() -> Self {
        Self {
            state: Mutex::new(State {
                is_open: false,
                ready: VecDeque::new(),
                queued: HashSet::new(),
                delays: DelayQueue::new(),
                delayed: HashMap::new(),
                running: HashMap::new(),
                failures: HashMap::new(),
            }),
            wake: Notify::new(),
        }
    }
}

impl<T: Clone + Eq + Hash> Queue<T> {
    fn lock(&self) -> MutexGuard<'_, State<T>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Accepts keys from now on.
    pub(crate) fn open(&self) {
        self.lock().is_open = true;
    }

    /// Queues a key.
    pub(crate) fn add(&self, key: T) {
        let mut state = self.lock();
        if !state.is_open {
            return;
        }
        state.cancel_delay(&key);
        state.push(key);
        drop(state);
        self.wake.notify_one();
    }

    /// Queues a key after `delay`, unless it is due sooner.
    pub(crate) fn add_after(&self, key: T, delay: Duration) {
        let due = Instant::now() + delay.min(LONGEST_WAIT);
        let mut state = self.lock();
        if !state.is_open || state.queued.contains(&key) {
            return;
        }
        if let Some(known) = state.delayed.get(&key) {
            if state.delays.deadline(known) <= due {
                return;
            }
            state.cancel_delay(&key);
        }
        let handle = state.delays.insert_at(key.clone(), due);
        state.delayed.insert(key, handle);
        drop(state);
        self.wake.notify_one();
    }

    /// Returns the number of keys that are due.
    #[must_use]
    pub(crate) fn depth(&self) -> usize {
        self.lock().ready.len()
    }

    /// Waits for the next key and locks it. [`Queue::done`] releases it.
    pub(crate) async fn next(&self) -> T {
        loop {
            if let Some(key) = self.pop() {
                return key;
            }
            // One worker at a time waits for the next delay to end: [`Queue::pop`] wakes the next one.
            tokio::select! {
                () = self.wake.notified() => {}
                () = poll_fn(|context| self.poll_due(context)) => {}
            }
        }
    }

    /// Returns and locks a key that is due.
    pub(super) fn pop(&self) -> Option<T> {
        let mut state = self.lock();
        let key = state.ready.pop_front()?;
        state.queued.remove(&key);
        state.running.insert(key.clone(), false);
        let has_more = !state.ready.is_empty() || !state.delayed.is_empty();
        drop(state);
        if has_more {
            self.wake.notify_one();
        }
        Some(key)
    }

    /// Moves keys whose delay has ended to the ready ones. Ready when there are any.
    fn poll_due(&self, context: &mut Context<'_>) -> Poll<()> {
        let mut state = self.lock();
        let mut any = false;
        while let Poll::Ready(Some(expired)) = state.delays.poll_expired(context) {
            let key = expired.into_inner();
            state.delayed.remove(&key);
            state.push(key);
            any = true;
        }
        if any { Poll::Ready(()) } else { Poll::Pending }
    }

    /// Releases a key. `has_failed` queues it with a growing delay, which is returned; success forgets failures.
    pub(crate) fn done(&self, key: &T, has_failed: bool) -> Option<Duration> {
        let mut state = self.lock();
        let is_changed = state.running.remove(key).unwrap_or(false);
        let delay = if has_failed {
            let count = state.failures.entry(key.clone()).or_insert(0);
            let delay = FIRST_DELAY.saturating_mul(1 << (*count).min(16)).min(LONGEST_DELAY);
            *count = count.saturating_add(1);
            Some(delay)
        } else {
            state.failures.remove(key);
            None
        };
        if is_changed {
            state.push(key.clone());
        }
        drop(state);
        if let Some(delay) = delay {
            self.add_after(key.clone(), delay);
        }
        self.wake.notify_one();
        delay
    }

    /// Returns the failures in a row of a key.
    #[cfg(test)]
    #[must_use]
    pub(crate) fn failures(&self, key: &T) -> u32 {
        self.lock().failures.get(key).copied().unwrap_or(0)
    }
}

impl<T: Clone + Eq + Hash> State<T> {
    fn push(&mut self, key: T) {
        if let Some(is_changed) = self.running.get_mut(&key) {
            *is_changed = true;
        } else if self.queued.insert(key.clone()) {
            self.ready.push_back(key);
        }
    }

    fn cancel_delay(&mut self, key: &T) {
        if let Some(handle) = self.delayed.remove(key) {
            self.delays.remove(&handle);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;

    fn queue() -> Queue<&'static str> {
        let queue = Queue::default();
        queue.open();
        queue
    }

    #[tokio::test(start_paused = true)]
    async fn key_is_queued_once_and_again_when_it_changes_during_work() {
        let queue = queue();
        queue.add("a");
        queue.add("a");
        assert_eq!(queue.next().await, "a");
        assert_eq!(queue.depth(), 0);
        queue.add("a");
        assert_eq!(queue.depth(), 0);
        queue.done(&"a", false);
        assert_eq!(queue.depth(), 1);
    }

    #[tokio::test(start_paused = true)]
    async fn closed_queue_keeps_nothing() {
        let queue = Queue::default();
        queue.add("a");
        queue.add_after("b", Duration::from_secs(1));
        queue.open();
        queue.add("c");
        assert_eq!(queue.next().await, "c");
        assert!(tokio::time::timeout(Duration::from_secs(10), queue.next()).await.is_err());
    }

    #[tokio::test(start_paused = true)]
    async fn failures_delay_a_key_longer_and_longer_up_to_a_limit() {
        let queue = queue();
        let mut delays = Vec::new();
        queue.add("a");
        for _ in 0..14 {
            let key = queue.next().await;
            delays.extend(queue.done(&key, true));
        }
        assert_eq!(delays[0], FIRST_DELAY);
        assert_eq!(delays[1], FIRST_DELAY * 2);
        assert_eq!(delays[13], LONGEST_DELAY);
        assert_eq!(queue.next().await, "a");
        queue.done(&"a", false);
        assert_eq!(queue.failures(&"a"), 0);
    }

    #[tokio::test(start_paused = true)]
    async fn delayed_key_comes_when_due_and_the_earliest_time_counts() {
        let queue = queue();
        let start = Instant::now();
        queue.add_after("a", Duration::from_secs(10));
        queue.add_after("a", Duration::from_secs(3));
        queue.add_after("a", Duration::from_secs(20));
        assert_eq!(queue.next().await, "a");
        assert_eq!(start.elapsed().as_secs(), 3);
        queue.add_after("b", Duration::MAX);
        assert!(tokio::time::timeout(Duration::from_secs(60), queue.next()).await.is_err());
    }

    #[tokio::test(start_paused = true)]
    async fn delay_ends_while_the_worker_that_waited_for_it_is_busy() {
        let queue = Arc::new(queue());
        queue.add_after("late", Duration::from_secs(5));
        let (sender, mut taken) = tokio::sync::mpsc::unbounded_channel();
        for _ in 0..2 {
            let (queue, sender) = (queue.clone(), sender.clone());
            tokio::spawn(async move {
                loop {
                    let key = queue.next().await;
                    sender.send(key).unwrap();
                    if key == "slow" {
                        tokio::time::sleep(Duration::from_secs(60)).await;
                    }
                    queue.done(&key, false);
                }
            });
        }
        tokio::time::sleep(Duration::from_secs(1)).await;
        queue.add("slow");
        assert_eq!(taken.recv().await, Some("slow"));
        let late = tokio::time::timeout(Duration::from_secs(6), taken.recv()).await;
        assert_eq!(late, Ok(Some("late")));
    }
}
