//! Quotas: a fixed number of slots, of which one holder gets at most seven eighths. The last ones are only for holders without
//! any.
//!
//! A holder is a user, a namespace or a guest. The cap keeps one holder from taking every slot, the last slots keep a few
//! holders from it; the slots are not divided evenly. An idle server lets one holder use almost all of it.

use std::{
    collections::HashMap,
    hash::Hash,
    sync::{Arc, Mutex},
};

use crate::lock;

/// Header of requests from virt-api to virt-handler with the name of the user that a stream counts for.
pub const HOLDER_HEADER: &str = "x-ferrovirt-holder";

/// One of so many slots is out of reach for a single holder: enough for other users to open consoles, and small enough that
/// the only user of a server hardly meets the cap.
const RESERVED_FRACTION: usize = 8;
/// One of so many slots is only for holders without any.
const FIRST_FRACTION: usize = 32;

/// A quota of streams by user name.
pub type StreamQuota = Quota<String>;

/// The reason why no slot is granted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Exceeded {
    /// All slots are in use.
    #[error("all slots are in use")]
    Total,
    /// The holder uses as many slots as one holder may, or the free ones are for holders without any.
    #[error("the holder uses as many slots as one holder may")]
    Holder,
}

impl Exceeded {
    /// Returns the label for metrics.
    #[must_use]
    pub const fn label(self) -> &'static str {
        match self {
            Self::Total => "all",
            Self::Holder => "share",
        }
    }
}

/// Slots by holder. Clones share them.
#[derive(Clone, Debug)]
pub struct Quota<K = String> {
    total: usize,
    used: Arc<Mutex<Used<K>>>,
}

#[derive(Debug)]
struct Used<K> {
    total: usize,
    /// Slots of each holder that has any.
    by_holder: HashMap<K, usize>,
}

/// A slot in use. Dropping it frees the slot.
#[derive(Debug)]
pub struct Slot<K: Clone + Eq + Hash = String> {
    used: Arc<Mutex<Used<K>>>,
    holder: K,
}

impl<K: Clone + Eq + Hash> Quota<K> {
    /// Creates a quota of `total` slots.
    #[must_use]
    pub fn new(total: usize) -> Self {
        Self { total, used: Arc::new(Mutex::new(Used { total: 0, by_holder: HashMap::new() })) }
    }

    /// Takes a slot for `holder`.
    ///
    /// # Errors
    /// When all slots are in use, or the holder has reached its cap.
    pub fn acquire(&self, holder: K) -> Result<Slot<K>, Exceeded> {
        let mut used = lock(&self.used);
        let held = used.by_holder.get(&holder).copied().unwrap_or_default();
        check(self.total, used.total, held)?;
        used.total += 1;
        used.by_holder.insert(holder.clone(), held + 1);
        drop(used);
        Ok(Slot { used: self.used.clone(), holder })
    }

    /// Returns the number of slots in use.
    #[must_use]
    pub fn used(&self) -> usize {
        lock(&self.used).total
    }
}

/// Returns the number of slots that one holder may use.
const fn cap(total: usize) -> usize {
    total - total / RESERVED_FRACTION
}

/// Decides on one more slot for a holder that uses `held`.
fn check(total: usize, used: usize, held: usize) -> Result<(), Exceeded> {
    let free = total.saturating_sub(used);
    match (free, held) {
        (0, _) => Err(Exceeded::Total),
        (_, 0) => Ok(()),
        _ if free > total / FIRST_FRACTION && held < cap(total) => Ok(()),
        _ => Err(Exceeded::Holder),
    }
}

impl<K: Clone + Eq + Hash> Drop for Slot<K> {
    fn drop(&mut self) {
        let mut used = lock(&self.used);
        used.total = used.total.saturating_sub(1);
        let left = used.by_holder.get(&self.holder).map_or(0, |held| held.saturating_sub(1));
        if left == 0 {
            used.by_holder.remove(&self.holder);
        } else {
            used.by_holder.insert(self.holder.clone(), left);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_holder_gets_seven_eighths() {
        for (total, used, held, expected) in [
            (256, 0, 0, Ok(())),
            (256, 223, 223, Ok(())),
            (256, 224, 224, Err(Exceeded::Holder)),
            (256, 255, 0, Ok(())),
            (256, 256, 0, Err(Exceeded::Total)),
            (256, 256, 224, Err(Exceeded::Total)),
            // A second holder.
            (256, 247, 23, Ok(())),
            (256, 248, 24, Err(Exceeded::Holder)),
            (256, 248, 0, Ok(())),
            (48, 47, 1, Err(Exceeded::Holder)),
            (48, 47, 0, Ok(())),
            (8, 7, 7, Err(Exceeded::Holder)),
            (1, 0, 0, Ok(())),
            (1, 1, 1, Err(Exceeded::Total)),
            (0, 0, 0, Err(Exceeded::Total)),
        ] {
            assert_eq!(check(total, used, held), expected, "{held} of {used} used, {total} in all");
        }
    }

    #[test]
    fn one_holder_leaves_slots_to_others_and_all_are_freed() {
        let quota = StreamQuota::new(256);
        let greedy: Vec<_> = std::iter::from_fn(|| quota.acquire("first".to_owned()).ok()).collect();
        assert_eq!(greedy.len(), 224);
        let others: Vec<_> = (0..32).map(|number| quota.acquire(format!("other {number}")).unwrap()).collect();
        assert_eq!(quota.acquire("last".to_owned()).err(), Some(Exceeded::Total));
        drop((greedy, others));
        assert_eq!(quota.used(), 0);
        assert!(lock(&quota.used).by_holder.is_empty());
    }

    #[test]
    fn few_holders_cannot_fill_a_quota() {
        let quota = StreamQuota::new(256);
        let fill = |holder: &str| std::iter::from_fn(|| quota.acquire(holder.to_owned()).ok()).collect::<Vec<_>>();
        let mut held: Vec<_> = (0..8).map(|number| fill(&format!("greedy {number}"))).collect();
        let counts: Vec<_> = held.iter().map(Vec::len).collect();
        assert_eq!(counts, [224, 24, 1, 1, 1, 1, 1, 1]);
        held.push(vec![quota.acquire("other".to_owned()).unwrap()]);
        drop(held);
        assert_eq!(fill("alone").len(), 224);
    }

    #[test]
    fn holders_that_grow_together_share_almost_evenly() {
        let quota = StreamQuota::new(256);
        let (mut first, mut second) = (Vec::new(), Vec::new());
        while let (Ok(one), Ok(other)) = (quota.acquire("first".to_owned()), quota.acquire("second".to_owned())) {
            first.push(one);
            second.push(other);
        }
        assert!((112..128).contains(&first.len()), "{}", first.len());
        assert!(quota.acquire("third".to_owned()).is_ok());
    }

    #[test]
    fn freed_slot_is_open_to_every_holder() {
        let quota = Quota::new(2);
        let (mine, yours) = (quota.acquire("me").unwrap(), quota.acquire("you").unwrap());
        assert_eq!(quota.acquire("me").err(), Some(Exceeded::Total));
        drop(yours);
        assert_eq!(quota.used(), 1);
        let second = quota.clone().acquire("me").unwrap();
        drop((mine, second));
        assert_eq!(quota.used(), 0);
    }
}
