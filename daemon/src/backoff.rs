//! Pauses after failures in a row.

use std::time::Duration;

/// Returns the pause after this many failures in a row: the first one, doubled by each further failure up to the longest.
#[must_use]
pub fn pause((first, longest): (Duration, Duration), failures: u32) -> Duration {
    first.saturating_mul(1 << failures.saturating_sub(1).min(31)).min(longest)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_double_up_to_the_longest() {
        let limits = (Duration::from_millis(500), Duration::from_secs(3));
        for (failures, milliseconds) in
            [(0, 500), (1, 500), (2, 1000), (3, 2000), (4, 3000), (33, 3000), (u32::MAX, 3000)]
        {
            assert_eq!(pause(limits, failures), Duration::from_millis(milliseconds), "{failures}");
        }
        assert_eq!(pause((Duration::MAX, Duration::MAX), 9), Duration::MAX);
    }
}
