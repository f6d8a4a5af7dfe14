//! Pools of VMs: rules.

use api::{
    VirtualMachineInstanceSpec, VirtualMachinePool,
    config::ClusterConfig,
    duration,
    pool::{GROUP, VirtualMachinePoolSpec},
};
use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;
use serde_json::Value;

use super::vm;
use crate::{
    context::{Context, Decision, FieldErrors, Interrupt, semantic},
    rules::{self, unsupported},
};

const PLURAL: &str = "virtualmachinepools";
const VERSION: &str = "v1beta1";
/// Path of the VM spec.
const ROOT: &str = "spec.virtualMachineTemplate.spec";

/// Serves `/virtualmachinepool-validate`.
pub(crate) fn validate(context: &Context<'_>) -> Result<Decision, Interrupt> {
    let resource = &context.request.resource;
    for (name, found, expected) in [
        ("resource", &resource.resource, PLURAL),
        ("resource group", &resource.group, GROUP),
        ("resource version", &resource.version, VERSION),
    ] {
        if found != expected {
            // The reference has the two values in this order.
            return Err(Interrupt::failed(400, format!("expect {name} [{found}], but got [{expected}]")));
        }
    }
    require_templates(&context.request.object)?;
    let pool: VirtualMachinePool = context.object()?;
    let is_component = context.is_component();
    let mut errors = field_errors(&pool.spec, context.config, is_component, context.is_create());
    if let Some(old) = old_pool(context)?
        && !semantic::equal(&pool.spec.selector, &old.spec.selector)
    {
        errors.invalid("spec.selector", "selector is immutable after creation.");
    }
    if errors.is_empty() && context.is_create() {
        errors = unsupported::kind("VirtualMachinePool");
    }
    let template = pool.spec.virtual_machine_template.spec.as_ref().and_then(|vm| vm.template.spec.as_ref());
    let warnings = template.map(|spec| rules::cloud_init::warnings(&format!("{ROOT}.template.spec"), spec));
    Ok(context.decide(errors, warnings.filter(|_| !is_component).unwrap_or_default()))
}

fn old_pool(context: &Context<'_>) -> Result<Option<VirtualMachinePool>, Interrupt> {
    context.old_object().map_err(|_| {
        let mut errors = FieldErrors::new();
        errors.unexpected("Could not fetch old vmpool");
        errors.into()
    })
}

/// Rejects a pool without templates. Their messages differ from those of the schema check, so they come first.
fn require_templates(object: &Value) -> Result<(), FieldErrors> {
    let missing = |path: &str| object.pointer(path).is_none_or(Value::is_null);
    let mut errors = FieldErrors::new();
    if object.get("spec").is_some() {
        if missing("/spec/virtualMachineTemplate") {
            errors.required("spec.template", "missing virtual machine template.");
        } else if missing("/spec/virtualMachineTemplate/spec/template") {
            errors.required(format!("{ROOT}.template"), "missing virtual machine template.");
        }
    }
    if errors.is_empty() { Ok(()) } else { Err(errors) }
}

/// Returns the errors of a pool. Its template is validated without defaults.
pub(crate) fn field_errors(
    pool: &VirtualMachinePoolSpec,
    config: &ClusterConfig,
    is_component: bool,
    created: bool,
) -> FieldErrors {
    let mut errors = FieldErrors::new();
    let template = &pool.virtual_machine_template;
    let specs = template.spec.as_ref().and_then(|vm| Some((vm, vm.template.spec.as_ref()?)));
    let Some((vm, vmi)): Option<(_, &VirtualMachineInstanceSpec)> = specs else {
        errors.required(format!("{ROOT}.template"), "missing virtual machine template.");
        return errors;
    };
    errors.extend(vm::spec_errors(ROOT, vm, vmi, config, is_component));
    let labels = template.metadata.labels.clone().unwrap_or_default();
    match rules::label_selector::matches(&pool.selector, &labels) {
        Ok(true) => {}
        Ok(false) => errors.invalid("spec.selector", "selector does not match labels."),
        Err(error) => errors.invalid("spec.selector", error.to_string()),
    }
    if let Some(Err(error)) = pool.max_unavailable.as_ref().map(max_unavailable) {
        errors.invalid("spec.maxUnavailable", error.to_string());
    }
    if let Some(strategy) = &pool.update_strategy {
        let set = [strategy.unmanaged.is_some(), strategy.opportunistic.is_some(), strategy.proactive.is_some()];
        one_strategy("spec.updateStrategy", set, &mut errors);
    }
    if let Some(strategy) = &pool.scale_in_strategy {
        let set = [strategy.unmanaged.is_some(), strategy.opportunistic.is_some(), strategy.proactive.is_some()];
        one_strategy("spec.scaleInStrategy", set, &mut errors);
    }
    let limit = pool.autohealing.as_ref().and_then(|healing| healing.min_failing_to_start_duration.as_deref());
    if let Some(Err(error)) = limit.map(duration::parse) {
        errors.invalid("spec.autohealing.minFailingToStartDuration", error.to_string());
    }
    if created {
        errors.extend(rules::discontinued_gates(vmi, config));
    }
    errors
}

/// An invalid `maxUnavailable`.
#[derive(Debug, Eq, PartialEq, thiserror::Error)]
enum MaxUnavailableError {
    #[error("maxUnavailable must be greater than 0")]
    NotPositive,
    #[error("maxUnavailable percentage must end with %")]
    NoPercentSign,
    #[error("maxUnavailable percentage value \"{0}\" is invalid: strconv.Atoi: parsing \"{0}\": {1}")]
    NotANumber(String, &'static str),
    #[error("maxUnavailable percentage value {0} must be between 1 and 100")]
    OutOfRange(i64),
}

fn max_unavailable(limit: &IntOrString) -> Result<(), MaxUnavailableError> {
    match limit {
        IntOrString::Int(number) if *number <= 0 => Err(MaxUnavailableError::NotPositive),
        IntOrString::Int(_) => Ok(()),
        IntOrString::String(text) => {
            let number = text.strip_suffix('%').ok_or(MaxUnavailableError::NoPercentSign)?;
            let percent =
                parse_integer(number).map_err(|reason| MaxUnavailableError::NotANumber(number.to_owned(), reason))?;
            if (1..=100).contains(&percent) { Ok(()) } else { Err(MaxUnavailableError::OutOfRange(percent)) }
        }
    }
}

/// Parses an integer; fails with the message of Go's `strconv`.
fn parse_integer(text: &str) -> Result<i64, &'static str> {
    let digits = text.strip_prefix(['+', '-']).unwrap_or(text);
    if digits.is_empty() || !digits.bytes().all(|byte| byte.is_ascii_digit()) {
        return Err("invalid syntax");
    }
    text.parse().map_err(|_| "value out of range")
}

fn one_strategy(field: &str, set: [bool; 3], errors: &mut FieldErrors) {
    let names: Vec<_> = ["unmanaged", "opportunistic", "proactive"]
        .into_iter()
        .zip(set)
        .filter(|(_, set)| *set)
        .map(|(name, _)| name)
        .collect();
    if names.len() > 1 {
        let message =
            format!("only one strategy can be configured at a time: but found {} strategies", names.join(", "));
        errors.invalid(field, message);
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::rules::testing::vmi_spec;

    fn pool(change: Value) -> VirtualMachinePoolSpec {
        let mut spec = json!({
            "selector": {"matchLabels": {"app": "web"}},
            "virtualMachineTemplate": {
                "metadata": {"labels": {"app": "web"}},
                "spec": {"runStrategy": "Always", "template": {"spec": vmi_spec(json!({}))}},
            },
        });
        json_patch::merge(&mut spec, &change);
        serde_json::from_value(spec).unwrap()
    }

    fn found(change: Value) -> Vec<(String, String)> {
        let errors = field_errors(&pool(change), &ClusterConfig::default(), false, true);
        errors.as_slice().iter().map(|error| (error.field.clone(), error.message.clone())).collect()
    }

    fn refuses(change: Value, field: &str, message: &str) {
        assert_eq!(found(change.clone()), [(field.to_owned(), message.to_owned())], "{change}");
    }

    #[test]
    fn valid_pools_pass() {
        for change in [
            json!({}),
            json!({"maxUnavailable": "25%", "updateStrategy": {"opportunistic": {}}, "scaleInStrategy": {"unmanaged": {}}}),
            json!({"maxUnavailable": 2, "autohealing": {"minFailingToStartDuration": "10m"}}),
            json!({"selector": {"matchExpressions": [{"key": "app", "operator": "Exists"}]}}),
        ] {
            assert_eq!(found(change.clone()), [], "{change}");
        }
    }

    #[test]
    fn max_unavailable_is_a_number_or_a_percentage() {
        for (value, message) in [
            (json!("5"), "maxUnavailable percentage must end with %"),
            (
                json!("ab%"),
                "maxUnavailable percentage value \"ab\" is invalid: strconv.Atoi: parsing \"ab\": invalid syntax",
            ),
            (
                json!("99999999999999999999%"),
                "maxUnavailable percentage value \"99999999999999999999\" is invalid: strconv.Atoi: parsing \"99999999999999999999\": value out of range",
            ),
            (json!("0%"), "maxUnavailable percentage value 0 must be between 1 and 100"),
            (json!("101%"), "maxUnavailable percentage value 101 must be between 1 and 100"),
            (json!("-1%"), "maxUnavailable percentage value -1 must be between 1 and 100"),
            (json!(0), "maxUnavailable must be greater than 0"),
        ] {
            refuses(json!({"maxUnavailable": value}), "spec.maxUnavailable", message);
        }
    }

    #[test]
    fn strategies_exclude_each_other() {
        for field in ["updateStrategy", "scaleInStrategy"] {
            refuses(
                json!({field: {"proactive": {}, "unmanaged": {}}}),
                &format!("spec.{field}"),
                "only one strategy can be configured at a time: but found unmanaged, proactive strategies",
            );
        }
    }

    #[test]
    fn selector_matches_the_template() {
        refuses(
            json!({"selector": {"matchLabels": {"app": "db"}}}),
            "spec.selector",
            "selector does not match labels.",
        );
        let odd =
            found(json!({"selector": {"matchLabels": null, "matchExpressions": [{"key": "app", "operator": "Near"}]}}));
        assert_eq!(odd.len(), 1);
        assert_eq!(odd[0].0, "spec.selector");
    }

    #[test]
    fn duration_is_well_formed() {
        refuses(
            json!({"autohealing": {"minFailingToStartDuration": "soon"}}),
            "spec.autohealing.minFailingToStartDuration",
            "\"soon\" is not a duration",
        );
    }

    #[test]
    fn template_is_validated_as_a_vm_with_its_path() {
        let template = |change: Value| json!({"virtualMachineTemplate": {"spec": change}});
        for (change, field) in [
            (json!({"runStrategy": "Sometimes"}), "runStrategy"),
            (json!({"running": true}), "running"),
            (json!({"template": {"spec": {"hostname": "Web"}}}), "template.spec.hostname"),
            (json!({"template": {"metadata": {"labels": {"kubevirt.io/nodeName": "n"}}}}), "template.metadata.labels"),
        ] {
            let found = found(template(change.clone()));
            assert!(found.iter().any(|(at, _)| *at == format!("{ROOT}.{field}")), "{change}: {found:?}");
        }
        refuses(
            json!({"virtualMachineTemplate": {"spec": {"template": {"spec": null}}}}),
            &format!("{ROOT}.template"),
            "missing virtual machine template.",
        );
    }

    #[test]
    fn templates_are_required_first() {
        for (object, field) in [
            (json!({"spec": {}}), "spec.template"),
            (json!({"spec": {"virtualMachineTemplate": {}}}), "spec.virtualMachineTemplate.spec.template"),
        ] {
            assert_eq!(require_templates(&object).unwrap_err().as_slice()[0].field, field);
        }
        assert!(require_templates(&json!({})).is_ok());
    }
}
