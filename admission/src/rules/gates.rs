//! Fields that depend on a feature gate. The rows of [`api::fields`] hold the gates and the messages.

use std::fmt::Display;

use api::{FeatureGate, config::ClusterConfig, fields};

use crate::context::FieldErrors;

/// Returns true if the feature gates of a field are on, and else adds the error. `path` is that of the row, `field` the one that
/// the error names.
pub(super) fn are_on(path: &str, field: impl Display, config: &ClusterConfig, errors: &mut FieldErrors) -> bool {
    let gates = fields::row(path).0.map_or(&[][..], |row| row.gates);
    gates.iter().all(|gated| is_on(path, gated.gate, &field, config, errors))
}

/// Does the same for a use of the field that depends on one of its gates.
pub(super) fn is_on(
    path: &str,
    gate: FeatureGate,
    field: impl Display,
    config: &ClusterConfig,
    errors: &mut FieldErrors,
) -> bool {
    let Some(gated) = fields::gated(path, gate).filter(|_| !config.enabled(gate)) else { return true };
    let field = field.to_string();
    let message = gated.message.replace("{field}", &field);
    errors.invalid(field, message);
    false
}
