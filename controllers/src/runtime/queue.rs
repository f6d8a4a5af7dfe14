//! The queue of keys: each key once, with delays and back-off.
//!
//! Its length is bounded by the number of objects: a key that waits is not queued a second time.

use std::{
    collections::{HashMap, HashSet, VecDeque},
    future::poll_fn,
    hash::Hash,
    sync::Mutex,
    task::{Context, Poll},
    time::Duration,
};

use daemon::{backoff, lock};
use tokio::{sync::Notify, time::Instant};
use tokio_util::time::{DelayQueue, delay_queue};

/// First and longest delay after failures.
const DELAY: (Duration, Duration) = (Duration::from_millis(100), Duration::from_secs(120));
/// Longest delay at all. [`DelayQueue`] panics on delays of more than two years.
const LONGEST_WAIT: Duration = Duration::from_secs(7 * 24 * 3600);

struct State<T> {
    is_open: bool,
    /// Keys that are due, and since when.
    ready: VecDeque<(T, Instant)>,
    queued: HashSet<T>,
    delays: DelayQueue<T>,
    /// Delayed keys with their handles in `delays`.
    delayed: HashMap<T, delay_queue::Key>,
    /// Keys being worked on.
    running: HashMap<T, Work>,
    failures: HashMap<T, u32>,
    adds: u64,
    retries: u64,
}

/// The work on a key.
struct Work {
    since: Instant,
    /// When the key was queued again. It waits for the end of the work.
    queued_again: Option<Instant>,
}

/// A key that a worker took.
pub(super) struct Taken<T> {
    /// The key.
    pub key: T,
    /// Time for which it was due.
    pub waited: Duration,
}

/// Numbers of a queue.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct QueueStats {
    /// Keys that are due.
    pub depth: usize,
    /// Keys queued so far. A key that waits already does not count again.
    pub adds: u64,
    /// Keys queued with a delay so far.
    pub retries: u64,
    /// Time since the start of the work that has lasted longest.
    pub longest: Duration,
    /// Sum of these times of all keys being worked on.
    pub unfinished: Duration,
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
                adds: 0,
                retries: 0,
            }),
            wake: Notify::new(),
        }
    }
}

impl<T: Clone + Eq + Hash> Queue<T> {
    /// Accepts keys from now on.
    pub(crate) fn open(&self) {
        lock(&self.state).is_open = true;
    }

    /// Queues a key.
    pub(crate) fn add(&self, key: T) {
        let mut state = lock(&self.state);
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
        let mut state = lock(&self.state);
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
        state.retries += 1;
        drop(state);
        self.wake.notify_one();
    }

    /// Returns the numbers of the queue.
    #[must_use]
    pub(super) fn stats(&self) -> QueueStats {
        let now = Instant::now();
        let state = lock(&self.state);
        let times = || state.running.values().map(|work| now.saturating_duration_since(work.since));
        QueueStats {
            depth: state.ready.len(),
            adds: state.adds,
            retries: state.retries,
            longest: times().max().unwrap_or_default(),
            unfinished: times().sum(),
        }
    }

    /// Returns the keys being worked on.
    pub(super) fn running(&self) -> Vec<T> {
        lock(&self.state).running.keys().cloned().collect()
    }

    /// Waits for the next key and locks it. [`Queue::done`] releases it.
    pub(super) async fn next(&self) -> Taken<T> {
        loop {
            if let Some(taken) = self.pop() {
                return taken;
            }
            // One worker at a time waits for the next delay to end: [`Queue::pop`] wakes the next one.
            tokio::select! {
                () = self.wake.notified() => {}
                () = poll_fn(|context| self.poll_due(context)) => {}
            }
        }
    }

    /// Returns and locks a key that is due.
    pub(super) fn pop(&self) -> Option<Taken<T>> {
        let now = Instant::now();
        let mut state = lock(&self.state);
        let (key, due) = state.ready.pop_front()?;
        state.queued.remove(&key);
        state.running.insert(key.clone(), Work { since: now, queued_again: None });
        let has_more = !state.ready.is_empty() || !state.delayed.is_empty();
        drop(state);
        if has_more {
            self.wake.notify_one();
        }
        Some(Taken { key, waited: now.saturating_duration_since(due) })
    }

    /// Moves keys whose delay has ended to the ready ones. Ready when there are any.
    fn poll_due(&self, context: &mut Context<'_>) -> Poll<()> {
        let mut state = lock(&self.state);
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
        let mut state = lock(&self.state);
        let queued_again = state.running.remove(key).and_then(|work| work.queued_again);
        let delay = if has_failed {
            let count = state.failures.entry(key.clone()).or_insert(0);
            *count = count.saturating_add(1);
            Some(backoff::pause(DELAY, *count))
        } else {
            state.failures.remove(key);
            None
        };
        if let Some(since) = queued_again
            && state.queued.insert(key.clone())
        {
            state.ready.push_back((key.clone(), since));
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
        lock(&self.state).failures.get(key).copied().unwrap_or(0)
    }
}

impl<T: Clone + Eq + Hash> State<T> {
    fn push(&mut self, key: T) {
        let now = Instant::now();
        if let Some(work) = self.running.get_mut(&key) {
            if work.queued_again.is_none() {
                work.queued_again = Some(now);
                self.adds += 1;
            }
        } else if self.queued.insert(key.clone()) {
            self.ready.push_back((key, now));
            self.adds += 1;
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
        assert_eq!(queue.next().await.key, "a");
        assert_eq!(queue.stats().depth, 0);
        queue.add("a");
        assert_eq!(queue.stats().depth, 0);
        queue.done(&"a", false);
        assert_eq!(queue.stats().depth, 1);
    }

    #[tokio::test(start_paused = true)]
    async fn keys_and_times_are_counted() {
        let queue = queue();
        for key in ["a", "a", "b", "c"] {
            queue.add(key);
        }
        queue.add_after("late", Duration::from_secs(60));
        // A later time does not replace an earlier one.
        queue.add_after("late", Duration::from_secs(90));
        let expected = QueueStats { depth: 3, adds: 3, retries: 1, ..QueueStats::default() };
        assert_eq!(queue.stats(), expected);
        tokio::time::advance(Duration::from_secs(2)).await;
        let taken = queue.next().await;
        assert_eq!((taken.key, taken.waited), ("a", Duration::from_secs(2)));
        tokio::time::advance(Duration::from_secs(3)).await;
        assert_eq!(queue.next().await.waited, Duration::from_secs(5));
        queue.add("a");
        queue.add("a");
        tokio::time::advance(Duration::from_secs(4)).await;
        let (longest, unfinished) = (Duration::from_secs(7), Duration::from_secs(11));
        assert_eq!(queue.stats(), QueueStats { depth: 1, adds: 4, retries: 1, longest, unfinished });
        assert_eq!(queue.done(&"a", true), Some(DELAY.0));
        queue.done(&"b", false);
        // The key that was queued during the work is due since then; its failure is no later attempt.
        let expected = QueueStats { depth: 2, adds: 4, retries: 1, ..QueueStats::default() };
        assert_eq!(queue.stats(), expected);
        assert_eq!(queue.next().await.key, "c");
        let taken = queue.next().await;
        assert_eq!((taken.key, taken.waited), ("a", Duration::from_secs(4)));
        queue.done(&"a", true);
        assert_eq!(queue.stats().retries, 2);
    }

    #[tokio::test(start_paused = true)]
    async fn closed_queue_keeps_nothing() {
        let queue = Queue::default();
        queue.add("a");
        queue.add_after("b", Duration::from_secs(1));
        queue.open();
        queue.add("c");
        assert_eq!(queue.next().await.key, "c");
        assert!(tokio::time::timeout(Duration::from_secs(10), queue.next()).await.is_err());
    }

    #[tokio::test(start_paused = true)]
    async fn failures_delay_a_key_longer_and_longer_up_to_a_limit() {
        let queue = queue();
        let mut delays = Vec::new();
        queue.add("a");
        for _ in 0..14 {
            let key = queue.next().await.key;
            delays.extend(queue.done(&key, true));
        }
        assert_eq!(delays[0], DELAY.0);
        assert_eq!(delays[1], DELAY.0 * 2);
        assert_eq!(delays[13], DELAY.1);
        assert_eq!(queue.next().await.key, "a");
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
        assert_eq!(queue.next().await.key, "a");
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
                    let key = queue.next().await.key;
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
