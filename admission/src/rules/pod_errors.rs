//! Errors in the format of Kubernetes' validation of pods.

use crate::context::FieldErrors;

pub(super) fn invalid(path: &str, value: &str, detail: &str, errors: &mut FieldErrors) {
    errors.invalid(path, format!("{path}: Invalid value: {value:?}: {detail}"));
}

pub(super) fn required(path: &str, detail: &str, errors: &mut FieldErrors) {
    errors.invalid(path, format!("{path}: Required value: {detail}"));
}

pub(super) fn forbidden(path: &str, detail: &str, errors: &mut FieldErrors) {
    errors.invalid(path, format!("{path}: Forbidden: {detail}"));
}

pub(super) fn unsupported(path: &str, value: &str, known: &str, errors: &mut FieldErrors) {
    errors.not_supported(path, format!("{path}: Unsupported value: \"{value}\": supported values: {known}"));
}
