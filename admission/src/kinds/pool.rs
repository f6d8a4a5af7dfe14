//! Pools of VMs: rules.

use api::{
    VirtualMachineInstanceSpec, VirtualMachinePool, VirtualMachineSpec,
    config::ClusterConfig,
    duration,
    pool::{GROUP, VirtualMachinePoolSelectionPolicy, VirtualMachinePoolSpec},
};
use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;
use serde_json::Value;

use super::{host_disk, vm};
use crate::{
    context::{Context, Decision, FieldErrors, Interrupt, decode, semantic},
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
    // The schema check of the reference looks no deeper, and comes before the rules.
    decode::member_errors(decode::members(&context.request.object)?).into_result()?;
    require_templates(&context.request.object)?;
    let pool: VirtualMachinePool = context.object()?;
    let old = old_pool(context)?.map(|old| old.spec);
    // The end of a pool, and changes of metadata, wait for no repair of a template that was stored earlier.
    let is_same = old.as_ref().is_some_and(|old| semantic::equal(&pool.spec, old));
    if pool.metadata.deletion_timestamp.is_some() || is_same {
        return Ok(context.allowed());
    }
    let mut errors = FieldErrors::new();
    if old.is_none() {
        errors = rules::metadata::validate_namespace(&pool.metadata, context.namespace(), context.trusted.namespace());
    }
    let is_component = context.is_component();
    errors.extend(field_errors(&pool.spec, old.as_ref(), context.namespace(), context.config, is_component));
    if let Some(vm) = &pool.spec.virtual_machine_template.spec {
        let former = old.as_ref().and_then(|old| old.virtual_machine_template.spec.as_ref()).map(|vm| &vm.template);
        host_disk::validate_right(context, &format!("{ROOT}.template"), &vm.template, former, &mut errors)?;
    }
    Ok(context.decide(errors, if is_component { vec![] } else { warnings(&pool.spec, old.as_ref()) }))
}

/// Returns warnings about a new template that no guest can use, and about settings that have less effect than their name.
fn warnings(pool: &VirtualMachinePoolSpec, old: Option<&VirtualMachinePoolSpec>) -> Vec<String> {
    let mut warnings = Vec::new();
    let template = pool.virtual_machine_template.spec.as_ref();
    if let Some(vm) = template.filter(|_| old.is_none_or(|old| changes_template(pool, old)))
        && let Some(spec) = &vm.template.spec
    {
        let root = format!("{ROOT}.template.spec");
        if vm.instancetype.is_none() {
            warnings.extend(rules::resources::memory_warning(&root, spec));
        }
        warnings.extend(rules::cloud_init::warnings(&root, spec));
        warnings.extend(rules::data_volumes::warnings(ROOT, vm));
    }
    if let Some(strategy) = &pool.scale_in_strategy {
        let proactive = strategy.proactive.as_ref().and_then(|one| one.state_preservation.as_deref());
        let opportunistic = strategy.opportunistic.as_ref().and_then(|one| one.state_preservation.as_deref());
        for (name, state) in [("proactive", proactive), ("opportunistic", opportunistic)] {
            if state == Some("Online") {
                warnings.push(format!(
                    "spec.scaleInStrategy.{name}.statePreservation: Online keeps the same as Offline, the claims: memory is not saved"
                ));
            }
        }
        let preserves = proactive.or(opportunistic).is_some_and(|state| state != "Disabled");
        if preserves && old.is_some_and(|old| changes_disks(pool, old)) {
            warnings.push(format!(
                "{ROOT}.dataVolumeTemplates: VMs that exist keep their disks, because scaleInStrategy preserves their \
                 state: give a template and its volumes another name to get new disks"
            ));
        }
    }
    warnings
}

/// Returns true if a template of DataVolumes differs from the former one of its name.
fn changes_disks(pool: &VirtualMachinePoolSpec, old: &VirtualMachinePoolSpec) -> bool {
    let (present, former) = (&pool.virtual_machine_template.spec, &old.virtual_machine_template.spec);
    present.iter().flat_map(|vm| &vm.data_volume_templates).any(|template| {
        let mut former = former.iter().flat_map(|vm| &vm.data_volume_templates);
        former.any(|former| former.metadata.name == template.metadata.name && !semantic::equal(former, template))
    })
}

fn old_pool(context: &Context<'_>) -> Result<Option<VirtualMachinePool>, Interrupt> {
    context.old_object().map_err(|_| {
        let mut errors = FieldErrors::new();
        errors.unexpected("Could not fetch old vmpool");
        errors.into()
    })
}

/// Rejects a pool without templates. Their messages differ from those of the decoder, so they come first.
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

/// Returns the errors of a new or changed pool in a namespace. Its template is validated without defaults.
pub(crate) fn field_errors(
    pool: &VirtualMachinePoolSpec,
    old: Option<&VirtualMachinePoolSpec>,
    namespace: &str,
    config: &ClusterConfig,
    is_component: bool,
) -> FieldErrors {
    let mut errors = FieldErrors::new();
    let template = &pool.virtual_machine_template;
    let specs = template.spec.as_ref().and_then(|vm| Some((vm, vm.template.spec.as_ref()?)));
    let Some((vm, vmi)): Option<(_, &VirtualMachineInstanceSpec)> = specs else {
        errors.required(format!("{ROOT}.template"), "missing virtual machine template.");
        return errors;
    };
    errors.extend(vm::spec_errors(ROOT, vm, vmi, config, is_component));
    rules::label_selector::validate_match(&pool.selector, template.metadata.labels.as_ref(), &mut errors);
    validate_strategies(pool, &mut errors);
    if let Some(old) = old
        && !semantic::equal(&pool.selector, &old.selector)
    {
        errors.invalid("spec.selector", "selector is immutable after creation.");
    }
    if old.is_none() {
        let (labels, expressions) = (&pool.selector.match_labels, &pool.selector.match_expressions);
        if labels.iter().flatten().next().is_none() && expressions.iter().flatten().next().is_none() {
            errors.invalid("spec.selector", "an empty selector selects every VM: name labels of the template");
        }
        errors.extend(rules::discontinued_gates(vmi, config));
    }
    // A pool whose VMs cannot be created any more can still be paused and scaled in.
    if errors.is_empty() && old.is_none_or(|old| changes_template(pool, old) || replicas(pool) > replicas(old)) {
        errors.extend(errors_of_vms(vm, vmi, namespace, config));
    }
    errors
}

/// Returns the errors that each VM of the template would have, in addition to those of pools of the reference.
fn errors_of_vms(
    vm: &VirtualMachineSpec,
    vmi: &VirtualMachineInstanceSpec,
    namespace: &str,
    config: &ClusterConfig,
) -> FieldErrors {
    let root = format!("{ROOT}.template.spec");
    let mut errors = rules::devices::validate_permitted(&root, vmi, config);
    errors.extend(rules::data_volumes::validate_namespaces(ROOT, vm, namespace));
    unsupported::spec(&root, vmi, config, &mut errors);
    errors.extend(unsupported::vm(ROOT, vm));
    rules::metadata::validate_supported(&format!("{ROOT}.template.metadata"), &vm.template.metadata, &mut errors);
    errors
}

fn changes_template(pool: &VirtualMachinePoolSpec, old: &VirtualMachinePoolSpec) -> bool {
    !semantic::equal(&pool.virtual_machine_template, &old.virtual_machine_template)
}

fn replicas(pool: &VirtualMachinePoolSpec) -> i32 {
    pool.replicas.unwrap_or(1)
}

fn validate_strategies(pool: &VirtualMachinePoolSpec, errors: &mut FieldErrors) {
    if let Some(Err(error)) = pool.max_unavailable.as_ref().map(max_unavailable) {
        errors.invalid("spec.maxUnavailable", error.to_string());
    }
    if let Some(strategy) = &pool.update_strategy {
        let set = [strategy.unmanaged.is_some(), strategy.opportunistic.is_some(), strategy.proactive.is_some()];
        one_strategy("spec.updateStrategy", set, errors);
        let policy = strategy.proactive.as_ref().and_then(|one| one.selection_policy.as_ref());
        validate_selectors("spec.updateStrategy", policy, errors);
    }
    if let Some(strategy) = &pool.scale_in_strategy {
        let set = [strategy.unmanaged.is_some(), strategy.opportunistic.is_some(), strategy.proactive.is_some()];
        one_strategy("spec.scaleInStrategy", set, errors);
        let policy = strategy.proactive.as_ref().and_then(|one| one.selection_policy.as_ref());
        validate_selectors("spec.scaleInStrategy", policy, errors);
    }
    let limit = pool.autohealing.as_ref().and_then(|healing| healing.min_failing_to_start_duration.as_deref());
    if let Some(Err(error)) = limit.map(duration::parse) {
        errors.invalid("spec.autohealing.minFailingToStartDuration", error.to_string());
    }
}

/// Validates the selectors of a proactive strategy. The reference reports them only in its log, and does nothing.
fn validate_selectors(strategy: &str, policy: Option<&VirtualMachinePoolSelectionPolicy>, errors: &mut FieldErrors) {
    let Some(selectors) = policy.and_then(|policy| policy.selectors.as_ref()) else { return };
    let root = format!("{strategy}.proactive.selectionPolicy.selectors");
    if let Some(selector) = &selectors.label_selector {
        rules::label_selector::validate(&format!("{root}.labelSelector"), selector, errors);
    }
    for (index, requirement) in selectors.node_selector_requirement_matcher.iter().enumerate() {
        let path = format!("{root}.nodeSelectorRequirementMatcher[{index}]");
        rules::scheduling::validate_node_requirement(&path, requirement, errors);
    }
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
        let errors = field_errors(&pool(change), None, "n", &ClusterConfig::default(), false);
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
            json!({"scaleInStrategy": {"proactive": {"selectionPolicy": {"sortPolicy": "Oldest", "selectors": {
                "labelSelector": {"matchLabels": {"tier": "low"}},
                "nodeSelectorRequirementMatcher": [{"key": "zone", "operator": "In", "values": ["a"]}],
            }}}}}),
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
        refuses(
            json!({"selector": {"matchLabels": null}}),
            "spec.selector",
            "an empty selector selects every VM: name labels of the template",
        );
        let odd =
            found(json!({"selector": {"matchLabels": null, "matchExpressions": [{"key": "app", "operator": "Near"}]}}));
        assert_eq!(odd.len(), 1);
        assert_eq!(odd[0].0, "spec.selector");
    }

    #[test]
    fn selectors_of_strategies_are_readable() {
        for field in ["updateStrategy", "scaleInStrategy"] {
            let of = |selectors: Value| json!({field: {"proactive": {"selectionPolicy": {"selectors": selectors}}}});
            for (selectors, at) in [
                (
                    json!({"labelSelector": {"matchExpressions": [{"key": "a", "operator": "Near"}]}}),
                    "labelSelector.matchExpressions[0].operator",
                ),
                (
                    json!({"nodeSelectorRequirementMatcher": [{"key": "a", "operator": "In"}]}),
                    "nodeSelectorRequirementMatcher[0].values",
                ),
            ] {
                let found = found(of(selectors));
                assert_eq!(found.len(), 1, "{found:?}");
                assert_eq!(found[0].0, format!("spec.{field}.proactive.selectionPolicy.selectors.{at}"));
            }
        }
    }

    #[test]
    fn stored_pool_whose_vms_cannot_be_created_is_scaled_in_and_paused() {
        let display = |more: Value| {
            let gpu = json!({"name": "g", "deviceName": "v/g", "virtualGPUOptions": {"display": {}}});
            let devices = json!({"template": {"spec": {"domain": {"devices": {"gpus": [gpu]}}}}});
            let mut change = json!({"replicas": 3, "virtualMachineTemplate": {"spec": devices}});
            json_patch::merge(&mut change, &more);
            pool(change)
        };
        let old = display(json!({}));
        let refused = |pool: &VirtualMachinePoolSpec, old: Option<&VirtualMachinePoolSpec>| {
            let errors = field_errors(pool, old, "n", &ClusterConfig::default(), false);
            errors.as_slice().iter().map(|error| error.field.clone()).collect::<Vec<_>>()
        };
        let field = format!("{ROOT}.template.spec.domain.devices.gpus[0].virtualGPUOptions.display");
        assert_eq!(refused(&old, None), std::slice::from_ref(&field));
        for change in [json!({"replicas": 1}), json!({"paused": true}), json!({"updateStrategy": {"unmanaged": {}}})] {
            assert_eq!(refused(&display(change), Some(&old)), Vec::<String>::new());
        }
        assert_eq!(refused(&display(json!({"replicas": 4})), Some(&old)), std::slice::from_ref(&field));
        let labelled = json!({"virtualMachineTemplate": {"metadata": {"labels": {"tier": "low"}}}});
        assert_eq!(refused(&display(labelled), Some(&old)), [field]);
    }

    #[test]
    fn warnings_name_settings_with_less_effect() {
        assert_eq!(warnings(&pool(json!({})), None), Vec::<String>::new());
        for (strategy, state, number) in
            [("proactive", "Online", 1), ("opportunistic", "Online", 1), ("proactive", "Offline", 0)]
        {
            let pool = pool(json!({"scaleInStrategy": {strategy: {"statePreservation": state}}}));
            assert_eq!(warnings(&pool, None).len(), number, "{strategy} {state}");
        }
    }

    #[test]
    fn warning_says_that_preserved_disks_stay() {
        let of = |state: &str, name: &str, size: &str| {
            let storage = json!({"resources": {"requests": {"storage": size}}});
            let template = json!({"metadata": {"name": name}, "spec": {"source": {"blank": {}}, "storage": storage}});
            pool(json!({
                "scaleInStrategy": {"proactive": {"statePreservation": state}},
                "virtualMachineTemplate": {"spec": {"dataVolumeTemplates": [template]}},
            }))
        };
        let old = of("Offline", "disk", "1Gi");
        for (state, name, size, is_warned) in [
            ("Offline", "disk", "2Gi", true),
            ("Offline", "disk", "1Gi", false),
            ("Offline", "other", "2Gi", false),
            ("Disabled", "disk", "2Gi", false),
        ] {
            let found = warnings(&of(state, name, size), Some(&old));
            let is_found = found.iter().any(|warning| warning.contains("VMs that exist keep their disks"));
            assert_eq!(is_found, is_warned, "{state} {name} {size} {found:?}");
        }
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
