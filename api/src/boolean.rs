//! Booleans as text, and on the wire.

/// Returns true for the spellings of true in annotations and query parameters.
#[must_use]
pub fn is_true(text: &str) -> bool {
    matches!(text, "1" | "t" | "T" | "true" | "TRUE" | "True")
}

/// Omits false on the wire, for `skip_serializing_if`.
#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde passes a reference")]
pub(crate) fn is_false(value: &bool) -> bool {
    !*value
}
