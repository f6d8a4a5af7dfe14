//! The queue of keys to look at: each key once, with delays and per-key back-off.
//!
//! Its length is bounded by the number of objects: a key that waits is not queued a second time.

use std::{
    collections::{HashMap, HashSet, VecDeque},
    hash::Hash,
    sync::{Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use tokio::{sync::Notify, time::Instant};

/// First delay after a failure.
const FIRST_DELAY: Duration = Duration::from_millis(100);
/// Longest delay after failures.
const LONGEST_DELAY: Duration = Duration::from_secs(120);

struct State<T> {
    ready: VecDeque<T>,
    queued: HashSet<T>,
    delayed: HashMap<T, Instant>,
    /// Keys being worked on; true: to be queued again afterwards.
    running: HashMap<T, bool>,
    failures: HashMap<T, u32>,
}

/// A queue of keys.
pub struct Queue<T> {
    state: Mutex<State<T>>,
    wake: Notify,
}

impl<T: Clone + Eq + Hash> Default for Queue<T> {
    fn default() -> Self {
        Self {
            state: Mutex::new(State {
                ready: VecDeque::new(),
                queued: HashSet::new(),
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

    /// Queues a key now.
    pub fn add(&self, key: T) {
        let mut state = self.lock();
        state.delayed.remove(&key);
        push(&mut state, key);
        drop(state);
        self.wake.notify_one();
    }

    /// Queues keys now.
    pub fn extend(&self, keys: impl IntoIterator<Item = T>) {
        keys.into_iter().for_each(|key| self.add(key));
    }

    /// Queues a key after `delay`, unless it is due sooner already.
    pub fn add_after(&self, key: T, delay: Duration) {
        let due = Instant::now() + delay;
        let mut state = self.lock();
        if state.queued.contains(&key) {
            return;
        }
        state.delayed.entry(key).and_modify(|known| *known = (*known).min(due)).or_insert(due);
        drop(state);
        self.wake.notify_one();
    }

    /// Keys that are due or being worked on.
    #[must_use]
    pub fn depth(&self) -> usize {
        self.lock().ready.len()
    }

    /// Waits for the next key. [`Queue::done`] has to be called with it.
    pub async fn next(&self) -> T {
        loop {
            let wait = {
                let mut state = self.lock();
                promote(&mut state);
                if let Some(key) = state.ready.pop_front() {
                    state.queued.remove(&key);
                    state.running.insert(key.clone(), false);
                    if !state.ready.is_empty() {
                        self.wake.notify_one();
                    }
                    return key;
                }
                state.delayed.values().min().copied()
            };
            match wait {
                Some(due) => {
                    let _ = tokio::time::timeout_at(due, self.wake.notified()).await;
                }
                None => self.wake.notified().await,
            }
        }
    }

    /// Ends the work on a key. `failed` puts it back with a growing delay, returned; success forgets failures.
    pub fn done(&self, key: &T, failed: bool) -> Option<Duration> {
        let mut state = self.lock();
        let again = state.running.remove(key).unwrap_or(false);
        let delay = if failed {
            let count = state.failures.entry(key.clone()).or_insert(0);
            let delay = FIRST_DELAY.saturating_mul(1 << (*count).min(16)).min(LONGEST_DELAY);
            *count = count.saturating_add(1);
            Some(delay)
        } else {
            state.failures.remove(key);
            None
        };
        if again {
            push(&mut state, key.clone());
        }
        drop(state);
        if let Some(delay) = delay {
            self.add_after(key.clone(), delay);
        }
        self.wake.notify_one();
        delay
    }

    /// Failures in a row of a key.
    #[must_use]
    pub fn failures(&self, key: &T) -> u32 {
        self.lock().failures.get(key).copied().unwrap_or(0)
    }
}

fn push<T: Clone + Eq + Hash>(state: &mut State<T>, key: T) {
    if let Some(again) = state.running.get_mut(&key) {
        *again = true;
    } else if state.queued.insert(key.clone()) {
        state.ready.push_back(key);
    }
}

fn promote<T: Clone + Eq + Hash>(state: &mut State<T>) {
    let now = Instant::now();
    let due: Vec<T> = state.delayed.iter().filter(|(_, at)| **at <= now).map(|(key, _)| key.clone()).collect();
    for key in due {
        state.delayed.remove(&key);
        push(state, key);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn key_is_queued_once_and_again_when_it_changes_during_work() {
        let queue = Queue::default();
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
    async fn failures_delay_a_key_longer_and_longer_up_to_a_limit() {
        let queue = Queue::default();
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
        let queue = Queue::default();
        let start = Instant::now();
        queue.add_after("a", Duration::from_secs(10));
        queue.add_after("a", Duration::from_secs(3));
        queue.add_after("a", Duration::from_secs(20));
        assert_eq!(queue.next().await, "a");
        assert_eq!(start.elapsed(), Duration::from_secs(3));
    }
}
