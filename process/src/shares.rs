//! Places that many want at a time, shared so that nobody takes them all: what one may have depends on what is free.
//!
//! A holder gets one more place while it has fewer than seven times as many as are free. The last ones are kept for those
//! who have none yet. One that is alone may so have more than four fifths of all, two at once
//! somewhat less than half each, and who comes last still gets one. Nobody has to be known beforehand, and nobody loses a
//! place that it has.

use std::{
    collections::HashMap,
    hash::Hash,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

/// Header of a request of virt-api to virt-handler with the name of the holder that a stream counts for.
pub const HOLDER_HEADER: &str = "x-ferrovirt-holder";

/// How many places a holder may have for each one that is free.
const PER_FREE: usize = 7;
/// Of so many places one is kept for who has none.
const PER_KEPT: usize = 32;

/// Why there is no place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Full {
    /// All places are taken.
    All,
    /// The holder has its share.
    Share,
}

impl Full {
    /// A label for metrics.
    #[must_use]
    pub const fn label(self) -> &'static str {
        match self {
            Self::All => "all",
            Self::Share => "share",
        }
    }
}

/// Places, and who has them. Clones share them.
#[derive(Clone, Debug)]
pub struct Shares<K = String> {
    total: usize,
    taken: Arc<Mutex<Taken<K>>>,
}

#[derive(Debug)]
struct Taken<K> {
    count: usize,
    /// Those who have a place, and how many.
    holders: HashMap<K, usize>,
}

/// A place; free again when dropped.
#[derive(Debug)]
pub struct Share<K: Clone + Eq + Hash = String> {
    taken: Arc<Mutex<Taken<K>>>,
    holder: K,
}

impl<K: Clone + Eq + Hash> Shares<K> {
    /// So many places for all holders, of which none gets all.
    #[must_use]
    pub fn of(total: usize) -> Self {
        Self { total, taken: Arc::new(Mutex::new(Taken { count: 0, holders: HashMap::new() })) }
    }

    /// A place for `holder`.
    ///
    /// # Errors
    /// When there is none, or none for this holder.
    pub fn claim(&self, holder: K) -> Result<Share<K>, Full> {
        let mut taken = lock(&self.taken);
        let held = taken.holders.get(&holder).copied().unwrap_or_default();
        check(held, self.total.saturating_sub(taken.count), self.total / PER_KEPT)?;
        taken.count += 1;
        taken.holders.insert(holder.clone(), held + 1);
        drop(taken);
        Ok(Share { taken: self.taken.clone(), holder })
    }

    /// Places that are taken.
    #[must_use]
    pub fn taken(&self) -> usize {
        lock(&self.taken).count
    }
}

/// Whether a holder of `held` places gets one of those that are free, when the last `kept` are for who has none.
fn check(held: usize, free: usize, kept: usize) -> Result<(), Full> {
    if free == 0 {
        Err(Full::All)
    } else if held > 0 && held >= free.saturating_sub(kept).saturating_mul(PER_FREE) {
        Err(Full::Share)
    } else {
        Ok(())
    }
}

fn lock<K>(taken: &Mutex<Taken<K>>) -> MutexGuard<'_, Taken<K>> {
    taken.lock().unwrap_or_else(PoisonError::into_inner)
}

impl<K: Clone + Eq + Hash> Drop for Share<K> {
    fn drop(&mut self) {
        let mut taken = lock(&self.taken);
        taken.count = taken.count.saturating_sub(1);
        let left = taken.holders.get(&self.holder).map_or(0, |held| held.saturating_sub(1));
        if left == 0 {
            taken.holders.remove(&self.holder);
        } else {
            taken.holders.insert(self.holder.clone(), left);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_holder_may_have_seven_times_what_is_free_and_not_kept() {
        for (held, free, expected) in [
            (0, 9, Ok(())),
            (6, 9, Ok(())),
            (7, 9, Err(Full::Share)),
            (216, 40, Ok(())),
            (217, 39, Err(Full::Share)),
            (0, 1, Ok(())),
            (1, 8, Err(Full::Share)),
            (0, 0, Err(Full::All)),
            (100, 0, Err(Full::All)),
            (usize::MAX, usize::MAX, Err(Full::Share)),
        ] {
            assert_eq!(check(held, free, 8), expected, "{held} held, {free} free");
        }
        assert_eq!(check(1, 1, 0), Ok(()));
    }

    /// All places that a holder gets.
    fn greedy(shares: &Shares, holder: &str) -> Vec<Share> {
        std::iter::from_fn(|| shares.claim(holder.to_owned()).ok()).collect()
    }

    #[test]
    fn nobody_takes_all_places_and_who_comes_new_gets_one() {
        let shares = Shares::of(256);
        let first = greedy(&shares, "first");
        assert_eq!(first.len(), 217);
        let mut others = Vec::new();
        for number in 0..10 {
            let taken = greedy(&shares, &format!("other {number}"));
            assert!(!taken.is_empty(), "nothing is left for number {number}");
            others.push(taken);
            assert!(shares.claim("first".to_owned()).is_err());
        }
        drop((first, others));
        assert_eq!(shares.taken(), 0);
        assert!(lock(&shares.taken).holders.is_empty());
    }

    #[test]
    fn a_place_that_is_given_up_is_free_for_all() {
        let shares = Shares::of(2);
        let (mine, yours) = (shares.claim("me").unwrap(), shares.claim("you").unwrap());
        assert_eq!(shares.claim("me").err(), Some(Full::All));
        drop(yours);
        assert_eq!(shares.taken(), 1);
        let again = shares.clone().claim("me").unwrap();
        drop((mine, again));
        assert_eq!(shares.taken(), 0);
    }
}
