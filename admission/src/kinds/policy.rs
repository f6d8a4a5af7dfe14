//! Migration policies: rules.

use api::{
    FeatureGate, MigrationPolicy,
    config::ClusterConfig,
    policy::{GROUP, MigrationPolicySpec},
    quantity::{self, QuantityError},
    vmi::migration::{ExperimentalMigrationOptions, StallDetectorOptions},
};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;

use super::checks;
use crate::{
    context::{Context, Decision, FieldErrors, Interrupt, semantic},
    rules::unsupported::migrations,
};

const PLURAL: &str = "migrationpolicies";
const STALL_DETECTION: FeatureGate = FeatureGate::MigrationStallDetection;
/// Gate of the schedule of growing downtimes.
const DOWNTIME_TUNING: FeatureGate = FeatureGate::MigrationDowntimeTuning;

/// Serves `/migration-policy-validate-create`, also on changes.
pub(crate) fn validate(context: &Context<'_>) -> Result<Decision, Interrupt> {
    checks::expect_resource(context.request, GROUP, PLURAL)?;
    let policy: MigrationPolicy = context.object()?;
    let old: Option<MigrationPolicy> = context.old_object()?;
    let mut errors = field_errors(&policy.spec, old.as_ref().map(|old| &old.spec), context.config);
    // A stored policy with unsupported fields can still be labelled.
    if errors.is_empty() && old.is_none_or(|old| old.spec != policy.spec) {
        errors = migrations::policy(&policy.spec);
    }
    Ok(context.decide(errors, vec![]))
}

/// Returns the errors of a new or changed policy.
pub(crate) fn field_errors(
    policy: &MigrationPolicySpec,
    old: Option<&MigrationPolicySpec>,
    config: &ClusterConfig,
) -> FieldErrors {
    let mut errors = FieldErrors::new();
    if policy.completion_timeout_per_gib.is_some_and(|seconds| seconds < 0) {
        errors.invalid("spec.completionTimeoutPerGiB", "must not be negative");
    }
    let (stall, downtime) = (config.enabled(STALL_DETECTION), config.enabled(DOWNTIME_TUNING));
    let changed = policy.max_downtime_ms.is_some() && policy.max_downtime_ms != old.and_then(|old| old.max_downtime_ms);
    if changed && !stall && !downtime {
        errors.invalid("spec.maxDowntimeMs", downtime_without_gate());
    }
    if let Some(experimental) = &policy.experimental {
        let none = ExperimentalMigrationOptions::default();
        let old = old.and_then(|old| old.experimental.as_ref()).unwrap_or(&none);
        let tuning = &experimental.downtime_tuning;
        if tuning.is_some() && *tuning != old.downtime_tuning && !downtime {
            let message = without_gate("experimental.downtimeTuning", DOWNTIME_TUNING.name());
            errors.invalid("spec.experimental.downtimeTuning", message);
        }
        let detector = &experimental.stall_detector;
        if detector.is_some() && tuning.is_some() {
            errors.invalid(
                "spec.experimental",
                "experimental.stallDetector and experimental.downtimeTuning are mutually exclusive; the stall detection path manages its own downtime schedule",
            );
        }
        if detector.is_some() && !semantic::equal(detector, &old.stall_detector) && !stall {
            let message = without_gate("experimental.stallDetector", STALL_DETECTION.name());
            errors.invalid("spec.experimental.stallDetector", message);
        }
        if let Some(detector) = detector {
            validate_factors(detector, &mut errors);
        }
    }
    if policy.bandwidth_per_migration.as_ref().is_some_and(is_negative) {
        errors.invalid("spec.bandwidthPerMigration", "must not be negative");
    }
    errors
}

/// Returns the message for a field that needs a feature gate.
fn without_gate(field: &str, gates: &str) -> String {
    format!("{field} cannot be modified without enabling the {gates} feature gate")
}

/// Returns the message for the maximum downtime while neither feature gate is on.
pub(crate) fn downtime_without_gate() -> String {
    without_gate("maxDowntimeMs", &format!("{STALL_DETECTION} or {DOWNTIME_TUNING}"))
}

/// Returns true for a negative amount, even if it is out of range.
pub(crate) fn is_negative(quantity: &Quantity) -> bool {
    quantity::units(quantity).map_or(quantity.0.starts_with('-'), |units| units < 0)
}

/// Test for forbidden factors in thousandths, and the message for them.
type Bound = (fn(i64) -> bool, &'static str);

const ABOVE_ZERO: Bound = (|milli| milli <= 0, "must be greater than 0");
const AT_LEAST_ONE: Bound = (|milli| milli < 1000, "must be greater than or equal to 1");
const AT_MOST_ONE: Bound = (|milli| milli > 1000, "must be less than or equal to 1");

fn validate_factors(detector: &StallDetectorOptions, errors: &mut FieldErrors) {
    for (name, factor, bounds) in [
        ("ewmaAlpha", &detector.ewma_alpha, &[ABOVE_ZERO, AT_MOST_ONE][..]),
        ("precopyPossibleFactor", &detector.precopy_possible_factor, &[AT_LEAST_ONE]),
        ("completionTimeoutFactor", &detector.completion_timeout_factor, &[AT_LEAST_ONE]),
        ("patienceWindowDecayFactor", &detector.patience_window_decay_factor, &[AT_MOST_ONE]),
    ] {
        let Some(factor) = factor else { continue };
        let field = format!("spec.experimental.stallDetector.{name}");
        match thousandths(factor) {
            Err(error) => errors.invalid(field, format!("invalid scalar \"{}\": {error}", factor.0)),
            Ok(milli) => {
                if let Some((_, message)) = bounds.iter().find(|(breaks, _)| breaks(milli)) {
                    errors.invalid(field, *message);
                }
            }
        }
    }
}

/// A factor that cannot be used.
#[derive(Debug, thiserror::Error)]
enum FactorError {
    #[error(transparent)]
    Quantity(#[from] QuantityError),
    #[error("must not be negative")]
    Negative,
    #[error("must have at most 3 decimal places")]
    TooPrecise,
}

/// Returns a factor in thousandths.
fn thousandths(factor: &Quantity) -> Result<i64, FactorError> {
    let milli = quantity::milli(factor)?;
    if factor.0.starts_with('-') && milli != 0 {
        return Err(FactorError::Negative);
    }
    if !quantity::has_whole_milli(factor) {
        return Err(FactorError::TooPrecise);
    }
    Ok(milli)
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn spec(change: Value) -> MigrationPolicySpec {
        let mut spec = json!({"selectors": {}});
        spec.as_object_mut().unwrap().extend(change.as_object().unwrap().clone());
        serde_json::from_value(spec).unwrap()
    }

    fn config(gates: &[FeatureGate]) -> ClusterConfig {
        ClusterConfig { feature_gates: gates.iter().map(|gate| gate.name().to_owned()).collect(), ..Default::default() }
    }

    fn check(new: Value, old: Option<Value>, gates: &[FeatureGate]) -> Vec<(String, String)> {
        let errors = field_errors(&spec(new), old.map(spec).as_ref(), &config(gates));
        errors.as_slice().iter().map(|error| (error.field.clone(), error.message.clone())).collect()
    }

    fn detector(factor: &str, value: &str) -> Value {
        json!({"experimental": {"stallDetector": {factor: value}}})
    }

    #[test]
    fn amounts_are_not_negative() {
        assert!(check(json!({"completionTimeoutPerGiB": 0, "bandwidthPerMigration": "64Mi"}), None, &[]).is_empty());
        for (change, field) in [
            (json!({"completionTimeoutPerGiB": -1}), "spec.completionTimeoutPerGiB"),
            (json!({"bandwidthPerMigration": "-1"}), "spec.bandwidthPerMigration"),
            (json!({"bandwidthPerMigration": "-99999999999999999999"}), "spec.bandwidthPerMigration"),
        ] {
            assert_eq!(check(change, None, &[]), [(field.to_owned(), "must not be negative".to_owned())]);
        }
    }

    #[test]
    fn gated_settings_change_only_with_their_gate() {
        let tuning = json!({"experimental": {"downtimeTuning": {"steps": 3}}});
        for (change, gates, field, message) in [
            (
                json!({"maxDowntimeMs": 500}),
                &[STALL_DETECTION, DOWNTIME_TUNING][..],
                "spec.maxDowntimeMs",
                "maxDowntimeMs cannot be modified without enabling the MigrationStallDetection or MigrationDowntimeTuning feature gate",
            ),
            (
                tuning,
                &[DOWNTIME_TUNING],
                "spec.experimental.downtimeTuning",
                "experimental.downtimeTuning cannot be modified without enabling the MigrationDowntimeTuning feature gate",
            ),
            (
                detector("ewmaAlpha", "1"),
                &[STALL_DETECTION],
                "spec.experimental.stallDetector",
                "experimental.stallDetector cannot be modified without enabling the MigrationStallDetection feature gate",
            ),
        ] {
            assert_eq!(check(change.clone(), None, &[]), [(field.to_owned(), message.to_owned())]);
            assert!(check(change.clone(), Some(change.clone()), &[]).is_empty(), "{change}");
            for gate in gates {
                assert!(check(change.clone(), None, &[*gate]).is_empty(), "{change} {gate}");
            }
        }
    }

    #[test]
    fn stall_detection_and_downtime_tuning_exclude_each_other() {
        let both = json!({"experimental": {"stallDetector": {}, "downtimeTuning": {}}});
        let found = check(both, None, &[STALL_DETECTION, DOWNTIME_TUNING]);
        assert_eq!(found.len(), 1);
        assert_eq!(found[0].0, "spec.experimental");
        assert!(found[0].1.contains("mutually exclusive"));
    }

    #[test]
    fn factors_are_in_their_range() {
        for (factor, value) in [
            ("ewmaAlpha", "0.001"),
            ("ewmaAlpha", "1"),
            ("precopyPossibleFactor", "1"),
            ("completionTimeoutFactor", "2500m"),
            ("patienceWindowDecayFactor", "0"),
            ("patienceWindowDecayFactor", "1"),
        ] {
            assert!(check(detector(factor, value), None, &[STALL_DETECTION]).is_empty(), "{factor} {value}");
        }
        for (factor, value, message) in [
            ("ewmaAlpha", "0", "must be greater than 0"),
            ("ewmaAlpha", "1.001", "must be less than or equal to 1"),
            ("precopyPossibleFactor", "0.999", "must be greater than or equal to 1"),
            ("completionTimeoutFactor", "0", "must be greater than or equal to 1"),
            ("patienceWindowDecayFactor", "2", "must be less than or equal to 1"),
            ("patienceWindowDecayFactor", "-1", "invalid scalar \"-1\": must not be negative"),
            ("ewmaAlpha", "0.1234", "invalid scalar \"0.1234\": must have at most 3 decimal places"),
            ("ewmaAlpha", "123u", "invalid scalar \"123u\": must have at most 3 decimal places"),
        ] {
            let field = format!("spec.experimental.stallDetector.{factor}");
            let found = check(detector(factor, value), None, &[STALL_DETECTION]);
            assert_eq!(found, [(field, message.to_owned())], "{factor} {value}");
        }
    }
}
