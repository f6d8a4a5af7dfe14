//! Plugins: rules.
//!
//! The reference has these rules in a webhook and in policies that exist while the feature gate is on; the rules of the
//! webhook come first. CEL expressions are not compiled: nothing runs plugins yet, so every new plugin is refused.

use api::{
    FeatureGate,
    plugin::{DomainHook, NodeHook, Plugin, PluginSpec},
};

use super::checks;
use crate::context::{Context, Decision, DenialForm, FieldErrors, Interrupt};

const GROUP: &str = "plugin.kubevirt.io";
const PLURAL: &str = "plugins";

/// Longest path of a Unix socket in Linux.
const SOCKET_PATH_MAX: usize = 108;

const STRATEGIES: [&str; 2] = ["Fail", "Ignore"];

const HOOK_POINTS: [&str; 8] = [
    "PreVMStart",
    "PostVMStart",
    "PreVMStop",
    "PostVMStop",
    "PreMigrationSource",
    "PostMigrationSource",
    "PreMigrationTarget",
    "PostMigrationTarget",
];

/// Serves `/plugin-validate`.
pub(crate) fn validate(context: &Context<'_>) -> Result<Decision, Interrupt> {
    let resource = &context.request.resource;
    for (name, found, expected) in [("group", &resource.group, GROUP), ("resource", &resource.resource, PLURAL)] {
        if found != expected {
            return Err(Interrupt::failed(400, format!("unexpected {name}: {found}, expected: {expected}")));
        }
    }
    if context.is_create() && !context.config.enabled(FeatureGate::Plugins) {
        return Err(Interrupt::failed(400, "Plugins feature gate is not enabled"));
    }
    let plugin: Plugin = context.object()?;
    let mut errors = field_errors(plugin.metadata.name.as_deref().unwrap_or_default(), &plugin.spec);
    if context.is_create() {
        errors = checks::or_unsupported("Plugin", errors);
    }
    let warnings = if errors.is_empty() { warnings(&plugin.spec) } else { vec![] };
    Ok(Decision::from_errors_as(DenialForm::FirstMessage, errors, warnings))
}

/// Returns a warning for a plugin that has no effect.
fn warnings(spec: &PluginSpec) -> Vec<String> {
    let references = [
        &spec.mutating_admission_policies,
        &spec.mutating_admission_webhooks,
        &spec.validating_admission_policies,
        &spec.validating_admission_webhooks,
    ];
    if spec.domain_hooks.is_empty() && spec.node_hooks.is_empty() && references.iter().all(|list| list.is_empty()) {
        vec!["no hooks or admission references are defined; this plugin will have no effect".to_owned()]
    } else {
        vec![]
    }
}

/// Returns the errors of the plugin with this name.
fn field_errors(name: &str, spec: &PluginSpec) -> FieldErrors {
    let mut errors = FieldErrors::new();
    for (index, hook) in spec.domain_hooks.iter().enumerate() {
        if hook.sidecar.as_ref().is_some_and(|sidecar| !is_clean(&sidecar.socket_path)) {
            errors.invalid(
                format!("spec.domainHooks[{index}].sidecar.socketPath"),
                "socketPath must be a clean path (no '..' segments or redundant separators)",
            );
        }
    }
    validate_strategy("spec.failureStrategy", spec.failure_strategy.as_ref(), &mut errors);
    for (index, hook) in spec.domain_hooks.iter().enumerate() {
        validate_domain_hook(&format!("spec.domainHooks[{index}]"), name, hook, &mut errors);
    }
    for (index, hook) in spec.node_hooks.iter().enumerate() {
        validate_node_hook(&format!("spec.nodeHooks[{index}]"), hook, &mut errors);
    }
    errors
}

fn validate_domain_hook(path: &str, name: &str, hook: &DomainHook, errors: &mut FieldErrors) {
    if hook.cel.is_some() == hook.sidecar.is_some() {
        errors.invalid(path, "exactly one of cel or sidecar must be specified for each domain hook");
    }
    validate_strategy(&format!("{path}.failureStrategy"), hook.failure_strategy.as_ref(), errors);
    checks::validate_duration(&format!("{path}.timeout"), hook.timeout.as_ref(), errors);
    if let Some(sidecar) = &hook.sidecar {
        validate_socket(&format!("{path}.sidecar.socketPath"), name, &sidecar.socket_path, errors);
    }
}

fn validate_node_hook(path: &str, hook: &NodeHook, errors: &mut FieldErrors) {
    validate_strategy(&format!("{path}.failureStrategy"), hook.failure_strategy.as_ref(), errors);
    checks::validate_duration(&format!("{path}.timeout"), hook.timeout.as_ref(), errors);
    if hook.permitted_hooks.iter().any(|point| !HOOK_POINTS.contains(&point.as_str())) {
        let field = format!("{path}.permittedHooks");
        errors.invalid(field, "permittedHooks must only contain valid node hook points");
    }
}

fn validate_strategy(path: &str, strategy: Option<&String>, errors: &mut FieldErrors) {
    if strategy.is_some_and(|strategy| !STRATEGIES.contains(&strategy.as_str())) {
        errors.invalid(path, "failureStrategy must be either 'Fail' or 'Ignore'");
    }
}

fn validate_socket(path: &str, name: &str, socket: &str, errors: &mut FieldErrors) {
    if !socket.ends_with(".sock") {
        errors.invalid(path, "sidecar socketPath must end with .sock");
    }
    if socket.len() > SOCKET_PATH_MAX {
        errors.invalid(path, "sidecar socketPath must not exceed 108 characters (Unix socket limit)");
    }
    if !socket.starts_with(&format!("/var/run/kubevirt-plugin/{name}/")) {
        errors.invalid(path, "sidecar socketPath must start with /var/run/kubevirt-plugin/<plugin-name>/");
    }
}

/// Returns true if a path has no `.`, `..` or empty segments.
fn is_clean(path: &str) -> bool {
    let path = path.strip_prefix('/').unwrap_or(path);
    path.split('/').all(|part| !["", ".", ".."].contains(&part))
}
