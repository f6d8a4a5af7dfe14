//! Migration policies: rules.

use api::{
    MigrationPolicy,
    config::ClusterConfig,
    policy::{GROUP, MigrationPolicySpec},
    quantity,
    vmi::migration::{ExperimentalMigrationOptions, StallDetectorOptions},
};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;

use crate::{
    causes::Causes,
    review::AdmissionReview,
    semantic, unsupported,
    webhook::{Context, Stop},
};

const PLURAL: &str = "migrationpolicies";
/// Gate of the detection of migrations that stall.
pub(crate) const STALL_DETECTION: &str = "MigrationStallDetection";
/// Gate of the schedule by which a migration may stop the guest for longer and longer.
pub(crate) const DOWNTIME_TUNING: &str = "MigrationDowntimeTuning";

/// The webhook that checks.
pub(crate) fn validate(context: &Context<'_>) -> Result<AdmissionReview, Stop> {
    let resource = &context.request.resource;
    if resource.group != GROUP || resource.resource != PLURAL {
        let message = format!(
            "unexpected resource {{Group:{} Version:{} Resource:{}}}",
            resource.group, resource.version, resource.resource
        );
        return Err(Stop::refused(400, message));
    }
    let policy: MigrationPolicy = context.object()?;
    let old: Option<MigrationPolicy> = context.old_object()?;
    let mut causes = causes(&policy.spec, old.as_ref().map(|old| &old.spec), context.config);
    if causes.is_empty() && context.is_create() {
        causes = unsupported::kind("MigrationPolicy");
    }
    Ok(context.verdict(&causes, vec![]))
}

/// What is wrong with a policy; `old` is there when it is changed.
pub fn causes(policy: &MigrationPolicySpec, old: Option<&MigrationPolicySpec>, config: &ClusterConfig) -> Causes {
    let mut causes = Causes::new();
    if policy.completion_timeout_per_gib.is_some_and(|seconds| seconds < 0) {
        causes.invalid("spec.completionTimeoutPerGiB", "must not be negative");
    }
    let (stall, downtime) = (config.enabled(STALL_DETECTION), config.enabled(DOWNTIME_TUNING));
    let changed = policy.max_downtime_ms.is_some() && policy.max_downtime_ms != old.and_then(|old| old.max_downtime_ms);
    if changed && !stall && !downtime {
        causes.invalid("spec.maxDowntimeMs", downtime_without_gate());
    }
    if let Some(experimental) = &policy.experimental {
        let none = ExperimentalMigrationOptions::default();
        let old = old.and_then(|old| old.experimental.as_ref()).unwrap_or(&none);
        let tuning = &experimental.downtime_tuning;
        if tuning.is_some() && *tuning != old.downtime_tuning && !downtime {
            let message = without("experimental.downtimeTuning", DOWNTIME_TUNING);
            causes.invalid("spec.experimental.downtimeTuning", message);
        }
        let detector = &experimental.stall_detector;
        if detector.is_some() && tuning.is_some() {
            causes.invalid(
                "spec.experimental",
                "experimental.stallDetector and experimental.downtimeTuning are mutually exclusive; the stall detection path manages its own downtime schedule",
            );
        }
        if detector.is_some() && !semantic::equal(detector, &old.stall_detector) && !stall {
            let message = without("experimental.stallDetector", STALL_DETECTION);
            causes.invalid("spec.experimental.stallDetector", message);
        }
        if let Some(detector) = detector {
            factors(detector, &mut causes);
        }
    }
    if policy.bandwidth_per_migration.as_ref().is_some_and(is_negative) {
        causes.invalid("spec.bandwidthPerMigration", "must not be negative");
    }
    causes
}

/// What is said of a field that takes a gate.
fn without(field: &str, gates: &str) -> String {
    format!("{field} cannot be modified without enabling the {gates} feature gate")
}

/// What is said of the longest stop of a guest while neither gate is on.
pub(crate) fn downtime_without_gate() -> String {
    without("maxDowntimeMs", &format!("{STALL_DETECTION} or {DOWNTIME_TUNING}"))
}

fn is_negative(quantity: &Quantity) -> bool {
    quantity::units(quantity).map_or(quantity.0.starts_with('-'), |units| units < 0)
}

/// Thousandths a factor must not have, and what is said of them.
type Bound = (fn(i64) -> bool, &'static str);

const ABOVE_ZERO: Bound = (|milli| milli <= 0, "must be greater than 0");
const AT_LEAST_ONE: Bound = (|milli| milli < 1000, "must be greater than or equal to 1");
const AT_MOST_ONE: Bound = (|milli| milli > 1000, "must be less than or equal to 1");

fn factors(detector: &StallDetectorOptions, causes: &mut Causes) {
    for (name, factor, bounds) in [
        ("ewmaAlpha", &detector.ewma_alpha, &[ABOVE_ZERO, AT_MOST_ONE][..]),
        ("precopyPossibleFactor", &detector.precopy_possible_factor, &[AT_LEAST_ONE]),
        ("completionTimeoutFactor", &detector.completion_timeout_factor, &[AT_LEAST_ONE]),
        ("patienceWindowDecayFactor", &detector.patience_window_decay_factor, &[AT_MOST_ONE]),
    ] {
        let Some(factor) = factor else { continue };
        let field = format!("spec.experimental.stallDetector.{name}");
        match thousandths(factor) {
            Err(problem) => causes.invalid(field, format!("invalid scalar \"{}\": {problem}", factor.0)),
            Ok(milli) => {
                if let Some((_, problem)) = bounds.iter().find(|(breaks, _)| breaks(milli)) {
                    causes.invalid(field, *problem);
                }
            }
        }
    }
}

/// A factor in thousandths.
fn thousandths(factor: &Quantity) -> Result<i64, String> {
    let milli = quantity::milli(factor).map_err(|error| error.to_string())?;
    if factor.0.starts_with('-') && milli != 0 {
        return Err("must not be negative".to_owned());
    }
    if !quantity::has_whole_milli(factor) {
        return Err("must have at most 3 decimal places".to_owned());
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

    fn config(gates: &[&str]) -> ClusterConfig {
        ClusterConfig { feature_gates: gates.iter().map(|gate| (*gate).to_owned()).collect(), ..Default::default() }
    }

    fn check(new: Value, old: Option<Value>, gates: &[&str]) -> Vec<(String, String)> {
        let causes = causes(&spec(new), old.map(spec).as_ref(), &config(gates));
        causes.as_slice().iter().map(|cause| (cause.field.clone(), cause.message.clone())).collect()
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
                assert!(check(change.clone(), None, &[gate]).is_empty(), "{change} {gate}");
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
