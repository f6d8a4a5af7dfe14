//! Context ids of machines with a VSOCK device: random, and no two alike.
//!
//! A machine gets its own in its status before its pod is made. Those that are taken are read off the machines, and
//! nothing else is kept: whoever leads next knows them as well. Machines that drew the same one before either was seen
//! are told apart when the pod of the later one is about to be made.

use std::collections::HashSet;

use api::vsock::is_guest;
use uuid::Uuid;

/// Context ids that are drawn at a time. Of four thousand million, even a million machines take few.
const DRAWS: usize = 64;

/// The context id of a machine: the one it has, unless it is another machine's too, else the first drawn that is free.
#[must_use]
pub fn chosen(held: Option<u32>, taken: &HashSet<u32>, drawn: impl IntoIterator<Item = u32>) -> Option<u32> {
    let free = |cid: &u32| is_guest(*cid) && !taken.contains(cid);
    held.filter(free).or_else(|| drawn.into_iter().take(DRAWS).find(free))
}

/// Random numbers without end.
pub fn draws() -> impl Iterator<Item = u32> {
    // The first field of a random UUID is random throughout.
    std::iter::repeat_with(|| Uuid::new_v4().as_fields().0)
}

#[cfg(test)]
mod tests {
    use api::vsock::LAST_CID;

    use super::*;

    #[test]
    fn context_ids_are_kept_while_nobody_else_has_them() {
        let taken = HashSet::from([5, 7]);
        for (held, drawn, expected) in [
            (None, vec![9], Some(9)),
            (Some(6), vec![9], Some(6)),
            // Another machine's, and reserved ones.
            (Some(5), vec![7, 9], Some(9)),
            (Some(2), vec![9], Some(9)),
            (None, vec![0, 1, 2, u32::MAX, 5, 7, LAST_CID], Some(LAST_CID)),
            (None, vec![], None),
            (None, vec![5; DRAWS], None),
        ] {
            assert_eq!(chosen(held, &taken, drawn.clone()), expected, "{held:?} {drawn:?}");
        }
        // Not drawn for ever.
        assert_eq!(chosen(None, &taken, std::iter::repeat(5)), None);
    }

    #[test]
    fn draws_differ() {
        let drawn: HashSet<u32> = draws().take(100).collect();
        assert!(drawn.len() > 90, "{drawn:?}");
    }
}
