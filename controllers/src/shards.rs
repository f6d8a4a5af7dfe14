//! The assignment of VMs to shards, and of shards to replicas. Pure functions.
//!
//! Shards are assigned by rendezvous hashing: each replica has a weight for each shard, and the live one with the greatest weight should
//! hold it. So the end of a replica moves no shards but its own.

use std::{collections::BTreeSet, time::Duration};

use sha2::{Digest, Sha256};

use crate::cache::Key;

/// The shard of the leader. Its lease is that of the controllers with facts of the whole cluster.
pub(crate) const LEADER: u32 = 0;

/// Head start of each replica before the next one in the order of weights, when a lease is free or has expired.
const HEAD_START: Duration = Duration::from_secs(2);
/// Least time for which a replica holds a shard before it hands it over. A frozen replica, whose lease has expired, is not ready any more
/// by then.
const LEAST_HELD: Duration = Duration::from_secs(30);

/// Returns the shard of a VM. All controllers that decide about it run in the process that holds this shard.
#[must_use]
pub(crate) fn shard_of(vm: &Key, count: u32) -> u32 {
    let rest = hash(&[&vm.namespace, &vm.name]).checked_rem(u64::from(count));
    rest.and_then(|rest| u32::try_from(rest).ok()).unwrap_or(LEADER)
}

/// Returns true if a replica may take the lease of a shard, which was `former`'s and has been free, or expired, for the time `over`.
#[must_use]
pub(crate) fn may_take(shard: u32, replicas: &BTreeSet<String>, own: &str, former: &str, over: Duration) -> bool {
    let mut order = order(shard, replicas).into_iter().filter(|replica| *replica != former);
    let place = order.position(|replica| replica == own).and_then(|place| u32::try_from(place).ok());
    place.is_some_and(|place| over >= HEAD_START.saturating_mul(place))
}

/// Returns true if a replica that has held a shard for this time hands it over to another one.
#[must_use]
pub(crate) fn hands_over(shard: u32, replicas: &BTreeSet<String>, own: &str, held: Duration) -> bool {
    held >= LEAST_HELD && order(shard, replicas).first().is_some_and(|first| *first != own)
}

/// Returns the replicas by descending weight for a shard.
fn order(shard: u32, replicas: &BTreeSet<String>) -> Vec<&str> {
    let shard = shard.to_string();
    let mut weights: Vec<(u64, &str)> =
        replicas.iter().map(|replica| (hash(&[&shard, replica]), replica.as_str())).collect();
    weights.sort_by(|left, right| right.cmp(left));
    weights.into_iter().map(|(_, replica)| replica).collect()
}

/// Returns the same hash in all replicas, also in those of another release.
fn hash(parts: &[&str]) -> u64 {
    let mut hasher = Sha256::new();
    for part in parts {
        hasher.update(part.as_bytes());
        // No part contains it.
        hasher.update([0]);
    }
    hasher.finalize().first_chunk::<8>().map_or(0, |first| u64::from_be_bytes(*first))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn replicas(names: &[&str]) -> BTreeSet<String> {
        names.iter().map(|name| (*name).to_owned()).collect()
    }

    /// Names as pods of a Deployment have them.
    fn many(count: u32) -> BTreeSet<String> {
        (0..count).map(|number| format!("virt-controller-5c9d7-{number:05}")).collect()
    }

    #[test]
    fn vms_are_spread_over_all_shards_and_stay_in_theirs() {
        for count in [1, 2, 4, 7, 16] {
            let mut sizes = vec![0_u32; usize::try_from(count).unwrap()];
            for number in 0..4000 {
                let vm = Key::new("storm", format!("vm-{number}"));
                let shard = shard_of(&vm, count);
                assert_eq!(shard, shard_of(&vm, count));
                sizes[usize::try_from(shard).unwrap()] += 1;
            }
            let mean = 4000 / count;
            assert!(sizes.iter().all(|size| (mean * 3 / 4..=mean * 5 / 4).contains(size)), "{count}: {sizes:?}");
        }
        // The separator counts.
        assert_ne!(hash(&["a", "bc"]), hash(&["ab", "c"]));
    }

    #[test]
    fn without_shards_everything_is_the_leaders() {
        for count in [0, 1] {
            assert_eq!(shard_of(&Key::new("n", "a"), count), LEADER);
        }
    }

    #[test]
    fn end_of_a_replica_moves_its_shards_only() {
        for count in 2..9 {
            let all = many(count);
            for gone in &all {
                let mut others = all.clone();
                others.remove(gone);
                for shard in 0..16 {
                    let (before, after) = (order(shard, &all), order(shard, &others));
                    let expected: Vec<&str> = before.into_iter().filter(|replica| replica != gone).collect();
                    assert_eq!(after, expected, "shard {shard} without {gone}");
                }
            }
        }
    }

    #[test]
    fn every_replica_has_shards_when_there_are_many_more() {
        let all = many(3);
        let holders: BTreeSet<&str> = (0..64).filter_map(|shard| order(shard, &all).into_iter().next()).collect();
        assert_eq!(holders.len(), 3);
    }

    #[test]
    fn free_shard_is_taken_in_the_order_of_weights() {
        let all = replicas(&["a", "b", "c"]);
        for shard in 0..8 {
            let order: Vec<String> = order(shard, &all).into_iter().map(str::to_owned).collect();
            let may = |place: usize, former: &str, seconds: u64| {
                may_take(shard, &all, &order[place], former, Duration::from_secs(seconds))
            };
            // Place, former holder, seconds for which the lease is free or expired.
            for (place, former, seconds, expected) in [
                (0, "", 0, true),
                (1, "", 1, false),
                (1, "", 2, true),
                (2, "", 3, false),
                (2, "", 4, true),
                // A replica that has let its lease expire is passed over.
                (1, order[0].as_str(), 0, true),
                (2, order[0].as_str(), 1, false),
                (2, order[0].as_str(), 2, true),
                // One that has gone has no place.
                (0, "gone", 0, true),
            ] {
                assert_eq!(may(place, former, seconds), expected, "{place} after {former:?} in {seconds} s");
            }
        }
        assert!(!may_take(1, &all, "unknown", "", Duration::from_secs(60)));
    }

    #[test]
    fn exactly_one_replica_takes_a_free_shard_at_once_and_the_same_keeps_it() {
        for count in 1..7 {
            let all = many(count);
            for shard in 1..16 {
                let takes = |own: &&String| may_take(shard, &all, own, "", Duration::ZERO);
                let keeps = |own: &&String| !hands_over(shard, &all, own, LEAST_HELD);
                let taking: Vec<&String> = all.iter().filter(takes).collect();
                assert_eq!(taking.len(), 1);
                assert_eq!(taking, all.iter().filter(keeps).collect::<Vec<_>>());
            }
        }
    }

    #[test]
    fn shard_is_not_handed_over_soon_after_it_was_taken() {
        let all = replicas(&["a", "b"]);
        for shard in 0..8 {
            let order = order(shard, &all);
            let [first, second] = [order[0], order[1]];
            let second_ms = |milliseconds: u64| hands_over(shard, &all, second, Duration::from_millis(milliseconds));
            assert!(!second_ms(29_999));
            assert!(second_ms(30_000));
            assert!(!hands_over(shard, &all, first, Duration::from_secs(3600)));
            assert!(!hands_over(shard, &replicas(&[second]), second, Duration::from_secs(3600)));
        }
    }
}
