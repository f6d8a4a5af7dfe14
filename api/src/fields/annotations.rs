//! Annotations of a VMI that change the domain of the reference and that no component carries out.

use crate::constants::annotation;

/// Returns true for a value that is refused.
type IsRefused = fn(&str) -> bool;

/// Keys, each with the test for the values that are refused.
pub const ANNOTATIONS: &[(&str, IsRefused)] = &[(annotation::HOOK_SIDECARS, |value| !value.is_empty())];

/// Returns the keys of the refused annotations. `value` returns the value of an annotation.
pub fn refused_annotations<'a>(value: impl Fn(&str) -> Option<&'a str>) -> impl Iterator<Item = &'static str> {
    ANNOTATIONS.iter().filter(move |(key, is_refused)| value(key).is_some_and(is_refused)).map(|(key, _)| *key)
}
