//! Clones of VMs: defaults and rules.

use api::clone::{VirtualMachineClone, VirtualMachineCloneSpec};
use k8s_openapi::api::core::v1::TypedLocalObjectReference;
use serde::de::IgnoredAny;

use crate::{
    context::{Context, Decision, FieldErrors, Generated, Interrupt},
    kinds::snapshot,
    rules::{
        network,
        patches::{self, PatchError},
    },
};

/// API group of clones.
pub(crate) const GROUP: &str = "clone.kubevirt.io";
/// Plural of clones.
pub(crate) const PLURAL: &str = "virtualmachineclones";

/// Characters of generated names: those of Kubernetes, which cannot form words.
const ALPHABET: &[u8; 27] = b"bcdfghjklmnpqrstvwxz2456789";
/// Generated characters at the end of a name.
const SUFFIX: usize = 5;

/// Serves `/vm-clone-mutate-create`.
pub(crate) fn mutate(context: &Context<'_>) -> Result<Decision, Interrupt> {
    context.patched::<VirtualMachineClone>(|clone| {
        set_defaults(&mut clone.spec, context.generated());
        Ok(vec![])
    })
}

/// Serves `/vm-clone-validate-create`, also on changes.
pub(crate) fn validate(context: &Context<'_>) -> Result<Decision, Interrupt> {
    let resource = &context.request.resource;
    for (name, found, expected) in [("group", &resource.group, GROUP), ("resource", &resource.resource, PLURAL)] {
        if found != expected {
            return Err(Interrupt::failed(400, format!("unexpected {name}: {found}. Expected {name}: {expected}")));
        }
    }
    let created = context.is_create();
    if created && !context.config.enabled(snapshot::GATE) {
        return Err(Interrupt::failed(400, "snapshot feature gate is not enabled"));
    }
    let clone: VirtualMachineClone = context.object()?;
    let old: Option<VirtualMachineClone> = context.old_object()?;
    // The end of a clone, and changes of metadata, wait for no repair of a specification that was stored earlier.
    if clone.metadata.deletion_timestamp.is_some() || old.is_some_and(|old| old.spec == clone.spec) {
        return Ok(context.allowed());
    }
    Ok(context.decide(field_errors(&clone.spec), vec![]))
}

/// Generates the name of the target if it has none.
pub(crate) fn set_defaults(spec: &mut VirtualMachineCloneSpec, generated: &Generated) {
    let Some(source) = &spec.source else { return };
    let target = spec.target.get_or_insert_with(|| TypedLocalObjectReference {
        api_group: Some(api::constants::GROUP.to_owned()),
        kind: "VirtualMachine".to_owned(),
        name: String::new(),
    });
    if target.name.is_empty() {
        let end = format!("-{}", suffix(&generated.uuid));
        target.name = api::names::object_name(&format!("clone-{}", source.name), &end);
    }
}

/// Derives name characters from a random UUID.
fn suffix(uuid: &str) -> String {
    let digits = uuid.bytes().filter_map(|byte| char::from(byte).to_digit(16)).collect::<Vec<_>>();
    digits
        .chunks_exact(2)
        .take(SUFFIX)
        .filter_map(|pair| ALPHABET.get((pair[0] * 16 + pair[1]) as usize % ALPHABET.len()))
        .map(|byte| char::from(*byte))
        .collect()
}

/// Returns the errors of a clone.
pub(crate) fn field_errors(spec: &VirtualMachineCloneSpec) -> FieldErrors {
    let mut errors = FieldErrors::new();
    for (path, list) in [
        ("spec.annotations", &spec.annotation_filters),
        ("spec.labels", &spec.label_filters),
        ("spec.template.annotations", &spec.template.annotation_filters),
        ("spec.template.labels", &spec.template.label_filters),
    ] {
        for text in list {
            validate_filter(path, text, &mut errors);
        }
    }
    validate_source_and_target(spec, &mut errors);
    for (name, mac) in &spec.new_mac_addresses {
        // An interface without an address gets a generated one. Addresses of other types of networks are longer.
        if !mac.is_empty() && network::mac_bytes(mac) != Some(6) {
            let message = format!("interface {name} has malformed MAC address ({mac}).");
            errors.invalid(format!("spec.newMacAddresses.{name}"), message);
        }
    }
    for (index, patch) in spec.patches.iter().enumerate() {
        let path = format!("spec.patches[{index}]");
        if serde_json::from_str::<IgnoredAny>(patch).is_err() {
            errors.invalid(path, format!("patch is not valid JSON ({patch})"));
        } else if let Err(error @ PatchError::Path(_)) = patches::parse(patch) {
            // The restore of the clone would be refused.
            errors.invalid(path, error.to_string());
        }
    }
    errors
}

/// Validates a filter: a key, optionally with `*` at its end as wildcard and `!` at its start as negation.
fn validate_filter(path: &str, text: &str, errors: &mut FieldErrors) {
    let mut rest = text.chars();
    match rest.next() {
        None => return errors.invalid(path, format!("{path} filter is invalid: cannot be empty")),
        Some('!') if text.len() == 1 => {
            return errors.invalid(path, "a negation character is not a valid filter");
        }
        Some(_) => {}
    }
    let mut misplaced = |name: &str, character: &str, rule: &str| {
        let message = format!("{path} filter {text} is invalid: cannot contain a {name} character ({character})");
        errors.invalid(path, format!("{message}; FilterRules: {rule}"));
    };
    if rest.as_str().contains('!') {
        misplaced("negation", "!", "NegationChar can be only used at the beginning of the filter");
    }
    let mut rest = text.chars();
    rest.next_back();
    if rest.as_str().contains('*') {
        misplaced("wildcard", "*", "WildcardChar can be only at the end of the filter");
    }
}

/// Validates source and target.
fn validate_source_and_target(spec: &VirtualMachineCloneSpec, errors: &mut FieldErrors) {
    let is_vm = |reference: &TypedLocalObjectReference| reference.kind == "VirtualMachine";
    if let Some(source) = &spec.source
        && !is_vm(source)
        && source.kind != "VirtualMachineSnapshot"
    {
        errors.invalid("spec.Source.Kind", "Source kind is not supported");
    }
    if spec.target.as_ref().is_some_and(|target| !is_vm(target)) {
        errors.invalid("spec.Target.Kind", "Target kind is not supported");
    }
    let Some(source) = &spec.source else {
        return errors.invalid("spec.Source", "Source cannot be nil");
    };
    if source.api_group.as_deref().is_none_or(str::is_empty) {
        errors.invalid("spec.Source.APIGroup", "Source's APIGroup cannot be empty");
    }
    if source.kind.is_empty() {
        errors.invalid("spec.Source", "Source's Kind cannot be empty");
    }
    if source.name.is_empty() {
        errors.invalid("spec.Source.Name", "Source's name cannot be empty");
    }
    if let Some(target) = &spec.target
        && is_vm(source)
        && is_vm(target)
        && source.name == target.name
    {
        errors.invalid("spec.target.name", "Target name cannot be equal to source name when both are VirtualMachines");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn generated_name_of_the_new_vm_is_one_of_an_object() {
        for (source, length) in [("web", 15), ("w".repeat(253).as_str(), 253)] {
            let mut spec = VirtualMachineCloneSpec {
                source: Some(TypedLocalObjectReference { name: source.to_owned(), ..Default::default() }),
                ..Default::default()
            };
            let generated = Generated {
                now: k8s_openapi::apimachinery::pkg::apis::meta::v1::Time(k8s_openapi::jiff::Timestamp::UNIX_EPOCH),
                uuid: "0123456789".to_owned(),
                serial: String::new(),
            };
            set_defaults(&mut spec, &generated);
            let name = spec.target.unwrap().name;
            assert_eq!((name.starts_with("clone-w"), name.len()), (true, length), "{name}");
        }
    }
}
