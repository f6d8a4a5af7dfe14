//! Context IDs of VMIs with a VSOCK device: random and unique.
//!
//! The status of a VMI holds its ID before its pod is created. IDs in use are read from the VMIs, and nothing else is stored.
//! When two VMIs draw the same ID, the one whose pod is created later draws again.

use api::vsock::is_guest;
use uuid::Uuid;

/// Context IDs that are drawn at a time. Even a million VMIs use few of four thousand million.
const DRAWS: usize = 64;

/// Returns the context ID of a VMI: the one it has unless it is taken, else the first drawn one that is free.
#[must_use]
pub(super) fn select_cid(
    held: Option<u32>,
    is_taken: impl Fn(u32) -> bool,
    drawn: impl IntoIterator<Item = u32>,
) -> Option<u32> {
    let is_free = |cid: &u32| is_guest(*cid) && !is_taken(*cid);
    held.filter(is_free).or_else(|| drawn.into_iter().take(DRAWS).find(is_free))
}

/// Returns random numbers without end.
pub(super) fn random_cids() -> impl Iterator<Item = u32> {
    // The first field of a random UUID is random throughout.
    std::iter::repeat_with(|| Uuid::new_v4().as_fields().0)
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use api::vsock::LAST_CID;

    use super::*;

    #[test]
    fn context_ids_are_kept_unless_they_are_taken() {
        let taken = HashSet::from([5, 7]);
        for (held, drawn, expected) in [
            (None, vec![9], Some(9)),
            (Some(6), vec![9], Some(6)),
            // Taken and reserved IDs.
            (Some(5), vec![7, 9], Some(9)),
            (Some(2), vec![9], Some(9)),
            (None, vec![0, 1, 2, u32::MAX, 5, 7, LAST_CID], Some(LAST_CID)),
            (None, vec![], None),
            (None, vec![5; DRAWS], None),
        ] {
            assert_eq!(select_cid(held, |cid| taken.contains(&cid), drawn.clone()), expected, "{held:?} {drawn:?}");
        }
        // The draws are limited.
        assert_eq!(select_cid(None, |cid| taken.contains(&cid), std::iter::repeat(5)), None);
    }

    #[test]
    fn draws_differ() {
        let drawn: HashSet<u32> = random_cids().take(100).collect();
        assert!(drawn.len() > 90, "{drawn:?}");
    }
}
