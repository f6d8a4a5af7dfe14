//! Plugins: rules.
//!
//! The reference spreads these over a webhook and policies that stand while the gate is on; here they are in one place, the
//! rules of the webhook first. Plugins that break none of them are not let in before something runs them.

mod expressions;
mod types;

use api::plugin::{DomainHook, NodeHook, Plugin, PluginSpec};

use self::expressions::Purpose;
use crate::{
    causes::Causes,
    resource,
    review::AdmissionReview,
    webhook::{Context, Stop},
};

const GROUP: &str = "plugin.kubevirt.io";
const PLURAL: &str = "plugins";

/// Longest path of a socket, as the kernel has it.
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

/// Answers `/plugin-validate`.
pub fn validate(context: &Context<'_>) -> Result<AdmissionReview, Stop> {
    let resource = &context.request.resource;
    for (what, got, want) in [("group", &resource.group, GROUP), ("resource", &resource.resource, PLURAL)] {
        if got != want {
            return Err(Stop::refused(400, format!("unexpected {what}: {got}, expected: {want}")));
        }
    }
    if context.is_create() && !context.config.enabled("Plugins") {
        return Err(Stop::refused(400, "Plugins feature gate is not enabled"));
    }
    let plugin: Plugin = context.object()?;
    let mut causes = causes(plugin.metadata.name.as_deref().unwrap_or_default(), &plugin.spec);
    if context.is_create() {
        causes = resource::or_unsupported("Plugin", causes);
    }
    let uid = &context.request.uid;
    if causes.is_empty() {
        Ok(AdmissionReview::allowed(uid, warnings(&plugin.spec)))
    } else {
        Ok(AdmissionReview::invalid_plugin(uid, &causes))
    }
}

/// Sentences shown to whoever writes the plugin.
pub fn warnings(spec: &PluginSpec) -> Vec<String> {
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

/// What is wrong with a plugin of that name.
pub fn causes(name: &str, spec: &PluginSpec) -> Causes {
    let mut causes = Causes::new();
    compiled(spec, &mut causes);
    for (index, hook) in spec.domain_hooks.iter().enumerate() {
        if hook.sidecar.as_ref().is_some_and(|sidecar| !is_clean(&sidecar.socket_path)) {
            causes.invalid(
                format!("spec.domainHooks[{index}].sidecar.socketPath"),
                "socketPath must be a clean path (no '..' segments or redundant separators)",
            );
        }
    }
    strategy("spec.failureStrategy", spec.failure_strategy.as_ref(), &mut causes);
    for (index, hook) in spec.domain_hooks.iter().enumerate() {
        domain_hook(&format!("spec.domainHooks[{index}]"), name, hook, &mut causes);
    }
    for (index, hook) in spec.node_hooks.iter().enumerate() {
        node_hook(&format!("spec.nodeHooks[{index}]"), hook, &mut causes);
    }
    causes
}

/// Checks that expressions compile.
fn compiled(spec: &PluginSpec, causes: &mut Causes) {
    let mut given = vec![("spec.condition".to_owned(), Purpose::OfMachine, spec.condition.as_deref())];
    for (index, hook) in spec.domain_hooks.iter().enumerate() {
        let path = format!("spec.domainHooks[{index}]");
        let mutation = hook.cel.as_ref().map(|cel| cel.expression.as_str());
        given.push((format!("{path}.cel.expression"), Purpose::Mutation, mutation));
        given.push((format!("{path}.condition"), Purpose::OfDomain, hook.condition.as_deref()));
    }
    for (index, hook) in spec.node_hooks.iter().enumerate() {
        given.push((format!("spec.nodeHooks[{index}].condition"), Purpose::OfMachine, hook.condition.as_deref()));
    }
    given.retain(|(_, _, text)| text.is_some_and(|text| !text.is_empty()));
    let texts: Vec<_> = given.iter().map(|(_, purpose, text)| (*purpose, text.unwrap_or_default())).collect();
    for ((field, purpose, _), problem) in given.into_iter().zip(expressions::problems(&texts)) {
        if let Some(problem) = problem {
            let what = if purpose == Purpose::Mutation { "mutation" } else { "condition" };
            causes.invalid(field, format!("invalid CEL {what} expression: {problem}"));
        }
    }
}

fn domain_hook(path: &str, name: &str, hook: &DomainHook, causes: &mut Causes) {
    if hook.cel.is_some() == hook.sidecar.is_some() {
        causes.invalid(path, "exactly one of cel or sidecar must be specified for each domain hook");
    }
    strategy(&format!("{path}.failureStrategy"), hook.failure_strategy.as_ref(), causes);
    resource::duration(&format!("{path}.timeout"), hook.timeout.as_ref(), causes);
    if let Some(sidecar) = &hook.sidecar {
        socket(&format!("{path}.sidecar.socketPath"), name, &sidecar.socket_path, causes);
    }
}

fn node_hook(path: &str, hook: &NodeHook, causes: &mut Causes) {
    strategy(&format!("{path}.failureStrategy"), hook.failure_strategy.as_ref(), causes);
    resource::duration(&format!("{path}.timeout"), hook.timeout.as_ref(), causes);
    if hook.permitted_hooks.iter().any(|point| !HOOK_POINTS.contains(&point.as_str())) {
        let field = format!("{path}.permittedHooks");
        causes.invalid(field, "permittedHooks must only contain valid node hook points");
    }
}

fn strategy(path: &str, word: Option<&String>, causes: &mut Causes) {
    if word.is_some_and(|word| !STRATEGIES.contains(&word.as_str())) {
        causes.invalid(path, "failureStrategy must be either 'Fail' or 'Ignore'");
    }
}

fn socket(path: &str, name: &str, socket: &str, causes: &mut Causes) {
    if !socket.ends_with(".sock") {
        causes.invalid(path, "sidecar socketPath must end with .sock");
    }
    if socket.len() > SOCKET_PATH_MAX {
        causes.invalid(path, "sidecar socketPath must not exceed 108 characters (Unix socket limit)");
    }
    if !socket.starts_with(&format!("/var/run/kubevirt-plugin/{name}/")) {
        causes.invalid(path, "sidecar socketPath must start with /var/run/kubevirt-plugin/<plugin-name>/");
    }
}

/// Whether a path says where it leads without detours.
fn is_clean(path: &str) -> bool {
    let path = path.strip_prefix('/').unwrap_or(path);
    path.split('/').all(|part| !["", ".", ".."].contains(&part))
}
