//! Limits how many tests use a cluster at once.
//!
//! Of the tests that wait, the longest one is next: a long one that began last would run while most places are free. A test that
//! disturbs the whole cluster runs alone, after those that arrived before it and those that wait. Tests that run alone are
//! thereby the last ones: emptying the cluster for each of them in between would take longer.

use std::sync::{Condvar, Mutex, PoisonError};

/// Places of a cluster.
#[derive(Debug)]
pub struct Places {
    total: usize,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    taken: usize,
    alone: bool,
    next: u64,
    /// Ticket and expected duration of each test that waits, in the order of arrival.
    waiting: Vec<(u64, f64)>,
}

impl State {
    /// Returns true if the test with this ticket may take `count` places now.
    fn is_next(&self, ticket: u64, count: usize, total: usize) -> bool {
        let longest = self.waiting.iter().max_by(|(one, a), (other, b)| a.total_cmp(b).then(other.cmp(one)));
        !self.alone && longest.is_some_and(|&(longest, _)| longest == ticket) && self.taken + count <= total
    }

    /// Returns true if a test may run alone now.
    fn is_free(&self) -> bool {
        !self.alone && self.taken == 0 && self.waiting.is_empty()
    }
}

/// Places that are returned on drop.
#[derive(Debug)]
pub struct Taken<'a> {
    places: &'a Places,
    /// `None` for all.
    count: Option<usize>,
}

impl Places {
    /// Returns a cluster with this number of places.
    #[must_use]
    pub const fn new(total: usize) -> Self {
        let state = State { taken: 0, alone: false, next: 0, waiting: Vec::new() };
        Self { total, state: Mutex::new(state), changed: Condvar::new() }
    }

    /// Waits for `count` places, or for all if there are fewer. `part`: the expected part of the duration of a run, see
    /// [`Taken::part`].
    pub fn take(&self, count: usize, part: f64) -> Taken<'_> {
        let count = count.min(self.total);
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let ticket = state.next;
        state.next += 1;
        state.waiting.push((ticket, part / count as f64));
        let blocked = |state: &mut State| !state.is_next(ticket, count, self.total);
        let mut state = self.changed.wait_while(state, blocked).unwrap_or_else(PoisonError::into_inner);
        state.waiting.retain(|&(waiting, _)| waiting != ticket);
        state.taken += count;
        // The next one may fit beside this one.
        self.changed.notify_all();
        Taken { places: self, count: Some(count) }
    }

    /// Waits until no other test runs or waits for a place.
    pub fn take_all(&self) -> Taken<'_> {
        let state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let blocked = |state: &mut State| !state.is_free();
        let mut state = self.changed.wait_while(state, blocked).unwrap_or_else(PoisonError::into_inner);
        state.alone = true;
        Taken { places: self, count: None }
    }
}

impl Taken<'_> {
    /// Returns the part of all places that these are.
    #[must_use]
    pub fn part(&self) -> f64 {
        self.count.map_or(1.0, |count| count as f64 / self.places.total as f64)
    }
}

impl Drop for Taken<'_> {
    fn drop(&mut self) {
        let mut state = self.places.state.lock().unwrap_or_else(PoisonError::into_inner);
        match self.count {
            Some(count) => state.taken = state.taken.saturating_sub(count),
            None => state.alone = false,
        }
        self.places.changed.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use std::{
        sync::atomic::{AtomicUsize, Ordering},
        thread,
        time::Duration,
    };

    use super::*;

    #[test]
    fn longest_one_takes_free_places_and_one_runs_alone_when_all_are_free() {
        let state = |taken, alone, waiting: &[(u64, f64)]| State { taken, alone, next: 9, waiting: waiting.to_vec() };
        for (state, next, free) in [
            (state(0, false, &[(7, 1.0)]), true, false),
            (state(2, false, &[(7, 1.0), (8, 1.0)]), true, false),
            (state(3, false, &[(7, 1.0)]), false, false),
            (state(0, false, &[(6, 1.0), (7, 1.0)]), false, false),
            (state(0, false, &[(6, 1.0), (7, 2.0), (8, 1.0)]), true, false),
            (state(0, false, &[(6, f64::INFINITY), (7, 2.0)]), false, false),
            (state(0, true, &[(7, 1.0)]), false, false),
            (state(0, false, &[]), false, true),
            (state(1, false, &[]), false, false),
            (state(0, true, &[]), false, false),
        ] {
            assert_eq!((state.is_next(7, 2, 4), state.is_free()), (next, free), "{state:?}");
        }
    }

    #[test]
    fn places_are_a_part_of_all() {
        let places = Places::new(4);
        assert_eq!([1, 2, 9].map(|count| places.take(count, 1.0).part()), [0.25, 0.5, 1.0]);
        assert_eq!(places.take_all().part(), 1.0);
    }

    #[test]
    fn places_are_never_exceeded_and_all_tests_run() {
        let (places, running, done) = (Places::new(4), AtomicUsize::new(0), AtomicUsize::new(0));
        thread::scope(|scope| {
            for number in 0..40 {
                let (places, running, done) = (&places, &running, &done);
                scope.spawn(move || {
                    let weight = match number % 5 {
                        0 => 4,
                        1 => 2,
                        2 => 9,
                        _ => 1,
                    };
                    let _taken = if weight == 4 { places.take_all() } else { places.take(weight, weight as f64) };
                    let used = weight.min(4);
                    assert!(running.fetch_add(used, Ordering::SeqCst) + used <= 4);
                    thread::sleep(Duration::from_millis(1));
                    running.fetch_sub(used, Ordering::SeqCst);
                    done.fetch_add(1, Ordering::SeqCst);
                });
            }
        });
        assert_eq!(done.into_inner(), 40);
    }
}
