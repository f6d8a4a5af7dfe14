//! Pools of VMs: rules.

use api::{
    VirtualMachineInstanceSpec, VirtualMachinePool,
    config::ClusterConfig,
    duration,
    pool::{GROUP, VirtualMachinePoolSpec},
};
use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;
use serde_json::Value;

use crate::{
    causes::Causes,
    review::AdmissionReview,
    rules, semantic, unsupported, vm,
    webhook::{Context, Stop},
};

const PLURAL: &str = "virtualmachinepools";
const VERSION: &str = "v1beta1";
/// Where the spec of the VMs stands.
const ROOT: &str = "spec.virtualMachineTemplate.spec";

/// The webhook that checks.
pub(crate) fn validate(context: &Context<'_>) -> Result<AdmissionReview, Stop> {
    let resource = &context.request.resource;
    for (what, got, want) in [
        ("resource", &resource.resource, PLURAL),
        ("resource group", &resource.group, GROUP),
        ("resource version", &resource.version, VERSION),
    ] {
        if got != want {
            return Err(Stop::refused(400, format!("expect {what} [{got}], but got [{want}]")));
        }
    }
    has_template(&context.request.object)?;
    let pool: VirtualMachinePool = context.object()?;
    let is_component = context.is_component();
    let mut causes = causes(&pool.spec, context.config, is_component, context.is_create());
    if let Some(old) = old_pool(context)?
        && !semantic::equal(&pool.spec.selector, &old.spec.selector)
    {
        causes.invalid("spec.selector", "selector is immutable after creation.");
    }
    if causes.is_empty() && context.is_create() {
        causes = unsupported::kind("VirtualMachinePool");
    }
    Ok(context.verdict(&causes, vec![]))
}

fn old_pool(context: &Context<'_>) -> Result<Option<VirtualMachinePool>, Stop> {
    context.old_object().map_err(|_| {
        let mut causes = Causes::new();
        causes.unexpected("Could not fetch old vmpool");
        causes.into()
    })
}

/// The templates are asked for in words of their own, before the rest of the shape is looked at.
fn has_template(object: &Value) -> Result<(), Causes> {
    let missing = |path: &str| object.pointer(path).is_none_or(Value::is_null);
    let mut causes = Causes::new();
    if object.get("spec").is_some() {
        if missing("/spec/virtualMachineTemplate") {
            causes.required("spec.template", "missing virtual machine template.");
        } else if missing("/spec/virtualMachineTemplate/spec/template") {
            causes.required(format!("{ROOT}.template"), "missing virtual machine template.");
        }
    }
    if causes.is_empty() { Ok(()) } else { Err(causes) }
}

/// What is wrong with a pool. Its template is checked as it is, without defaults.
pub fn causes(pool: &VirtualMachinePoolSpec, config: &ClusterConfig, is_component: bool, created: bool) -> Causes {
    let mut causes = Causes::new();
    let template = &pool.virtual_machine_template;
    let machine = template.spec.as_ref().and_then(|vm| Some((vm, vm.template.spec.as_ref()?)));
    let Some((vm, machine)): Option<(_, &VirtualMachineInstanceSpec)> = machine else {
        causes.required(format!("{ROOT}.template"), "missing virtual machine template.");
        return causes;
    };
    causes.extend(vm::spec_causes(ROOT, vm, machine, config, is_component));
    let labels = template.metadata.labels.clone().unwrap_or_default();
    match rules::scheduling::selector_matches(&pool.selector, &labels) {
        Ok(true) => {}
        Ok(false) => causes.invalid("spec.selector", "selector does not match labels."),
        Err(message) => causes.invalid("spec.selector", message),
    }
    if let Some(Err(message)) = pool.max_unavailable.as_ref().map(max_unavailable) {
        causes.invalid("spec.maxUnavailable", message);
    }
    if let Some(strategy) = &pool.update_strategy {
        let set = [strategy.unmanaged.is_some(), strategy.opportunistic.is_some(), strategy.proactive.is_some()];
        one_strategy("spec.updateStrategy", set, &mut causes);
    }
    if let Some(strategy) = &pool.scale_in_strategy {
        let set = [strategy.unmanaged.is_some(), strategy.opportunistic.is_some(), strategy.proactive.is_some()];
        one_strategy("spec.scaleInStrategy", set, &mut causes);
    }
    let limit = pool.autohealing.as_ref().and_then(|healing| healing.min_failing_to_start_duration.as_deref());
    if let Some(Err(error)) = limit.map(duration::parse) {
        causes.invalid("spec.autohealing.minFailingToStartDuration", error.to_string());
    }
    if created {
        causes.extend(rules::discontinued_gates(machine, config));
    }
    causes
}

fn max_unavailable(limit: &IntOrString) -> Result<(), String> {
    match limit {
        IntOrString::Int(number) if *number <= 0 => Err("maxUnavailable must be greater than 0".to_owned()),
        IntOrString::Int(_) => Ok(()),
        IntOrString::String(text) => {
            let Some(number) = text.strip_suffix('%') else {
                return Err("maxUnavailable percentage must end with %".to_owned());
            };
            let percent = whole(number).map_err(|problem| {
                format!(
                    "maxUnavailable percentage value \"{number}\" is invalid: strconv.Atoi: parsing \"{number}\": {problem}"
                )
            })?;
            if !(1..=100).contains(&percent) {
                return Err(format!("maxUnavailable percentage value {percent} must be between 1 and 100"));
            }
            Ok(())
        }
    }
}

/// Reads a whole number, with the sentences tools know about those that are none.
fn whole(text: &str) -> Result<i64, &'static str> {
    let digits = text.strip_prefix(['+', '-']).unwrap_or(text);
    if digits.is_empty() || !digits.bytes().all(|byte| byte.is_ascii_digit()) {
        return Err("invalid syntax");
    }
    text.parse().map_err(|_| "value out of range")
}

fn one_strategy(field: &str, set: [bool; 3], causes: &mut Causes) {
    let names: Vec<_> = ["unmanaged", "opportunistic", "proactive"]
        .into_iter()
        .zip(set)
        .filter(|(_, set)| *set)
        .map(|(name, _)| name)
        .collect();
    if names.len() > 1 {
        let message =
            format!("only one strategy can be configured at a time: but found {} strategies", names.join(", "));
        causes.invalid(field, message);
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::rules::testing::machine;

    fn pool(change: Value) -> VirtualMachinePoolSpec {
        let mut spec = json!({
            "selector": {"matchLabels": {"app": "web"}},
            "virtualMachineTemplate": {
                "metadata": {"labels": {"app": "web"}},
                "spec": {"runStrategy": "Always", "template": {"spec": machine(json!({}))}},
            },
        });
        json_patch::merge(&mut spec, &change);
        serde_json::from_value(spec).unwrap()
    }

    fn found(change: Value) -> Vec<(String, String)> {
        let causes = causes(&pool(change), &ClusterConfig::default(), false, true);
        causes.as_slice().iter().map(|cause| (cause.field.clone(), cause.message.clone())).collect()
    }

    fn refuses(change: Value, field: &str, message: &str) {
        assert_eq!(found(change.clone()), [(field.to_owned(), message.to_owned())], "{change}");
    }

    #[test]
    fn sound_pools_pass() {
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
    fn most_away_is_a_number_or_a_percentage() {
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
    fn duration_is_one() {
        refuses(
            json!({"autohealing": {"minFailingToStartDuration": "soon"}}),
            "spec.autohealing.minFailingToStartDuration",
            "\"soon\" is not a duration",
        );
    }

    #[test]
    fn the_template_is_checked_as_a_vm_at_its_place() {
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
    fn templates_are_asked_for_first() {
        for (object, field) in [
            (json!({"spec": {}}), "spec.template"),
            (json!({"spec": {"virtualMachineTemplate": {}}}), "spec.virtualMachineTemplate.spec.template"),
        ] {
            assert_eq!(has_template(&object).unwrap_err().as_slice()[0].field, field);
        }
        assert!(has_template(&json!({})).is_ok());
    }
}
