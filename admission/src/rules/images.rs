//! Container images as sources of files: pull policy, and paths inside them.

use crate::context::{FieldErrors, PathText};

const PULL_POLICIES: [&str; 4] = ["", "Always", "IfNotPresent", "Never"];

/// Validates a pull policy: one of Kubernetes.
pub(super) fn validate_pull_policy(path: PathText<'_>, policy: Option<&str>, errors: &mut FieldErrors) {
    let policy = policy.unwrap_or_default();
    if !PULL_POLICIES.contains(&policy) {
        errors.not_supported(
            format!("{path}.imagePullPolicy"),
            format!("{path}.imagePullPolicy: Unsupported value: \"{policy}\": supported values: \"Always\", \"IfNotPresent\", \"Never\""),
        );
    }
}

/// Validates a path inside an image: it is absolute and has no `.` or `..`.
pub(super) fn validate_path(field: &str, label: &str, path: &str, errors: &mut FieldErrors) {
    if path == "/" {
        errors.invalid(field, format!("{label} must not point to root"));
        return;
    }
    let clean = path.strip_suffix('/').unwrap_or(path);
    let parts = clean.strip_prefix('/');
    let valid = parts.is_some_and(|parts| parts.split('/').all(|part| !["", ".", ".."].contains(&part)))
        && !path.contains('\0');
    if !valid {
        errors.invalid(field, format!("{label} must be an absolute path to a file without relative components"));
    }
}
