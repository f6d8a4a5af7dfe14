//! Names of events.

use k8s_openapi::jiff::Timestamp;

/// Longest name of an object.
const LONGEST_NAME: usize = 253;

/// Returns the name of an event about an object by the scheme of client-go's recorder: the object's name, a dot, nanoseconds
/// in hexadecimal. A long object name is cut, so that the API server accepts the event.
#[must_use]
pub(super) fn name(object: &str, now: Timestamp) -> String {
    let unique = format!("{:x}", u128::try_from(now.as_nanosecond()).unwrap_or_default());
    let room = LONGEST_NAME.saturating_sub(unique.len() + 1);
    let object = object.get(..room).unwrap_or(object).trim_end_matches(['.', '-']);
    format!("{object}.{unique}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_unique_and_never_too_long() {
        let now = Timestamp::from_second(1).unwrap();
        assert_eq!(name("vm", now), "vm.3b9aca00");
        let long = format!("{}.{}", "a".repeat(242), "b".repeat(10));
        assert_eq!(long.len(), 253);
        assert_eq!(name(&long, now), format!("{}.b.3b9aca00", "a".repeat(242)));
        let dotted = format!("{}.{}", "a".repeat(243), "b".repeat(9));
        assert_eq!(name(&dotted, now), format!("{}.3b9aca00", "a".repeat(243)));
    }
}
