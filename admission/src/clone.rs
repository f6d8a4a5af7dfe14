//! Clones of VMs: defaults and rules.

use api::clone::{VirtualMachineClone, VirtualMachineCloneSpec};
use k8s_openapi::api::core::v1::TypedLocalObjectReference;
use serde::de::IgnoredAny;

use crate::{
    causes::Causes,
    defaults::Fresh,
    resource,
    review::AdmissionReview,
    rules::network,
    snapshot,
    webhook::{Context, Stop},
};

/// API group of clones.
pub(crate) const GROUP: &str = "clone.kubevirt.io";
/// Plural of clones.
pub(crate) const PLURAL: &str = "virtualmachineclones";

/// Letters and digits of random names: those Kubernetes uses, which spell no words.
const ALPHABET: &[u8; 27] = b"bcdfghjklmnpqrstvwxz2456789";
/// Random characters at the end of a name.
const SUFFIX: usize = 5;

/// Answers `/vm-clone-mutate-create`.
pub fn mutate(context: &Context<'_>) -> Result<AdmissionReview, Stop> {
    context.patched::<VirtualMachineClone>(|clone| {
        set_defaults(&mut clone.spec, context.fresh());
        Ok(vec![])
    })
}

/// Answers `/vm-clone-validate-create`, on creation and change.
pub fn validate(context: &Context<'_>) -> Result<AdmissionReview, Stop> {
    let resource = &context.request.resource;
    for (what, got, want) in [("group", &resource.group, GROUP), ("resource", &resource.resource, PLURAL)] {
        if got != want {
            return Err(Stop::refused(400, format!("unexpected {what}: {got}. Expected {what}: {want}")));
        }
    }
    let created = context.is_create();
    if created && !context.config.enabled(snapshot::GATE) {
        return Err(Stop::refused(400, "snapshot feature gate is not enabled"));
    }
    let clone: VirtualMachineClone = context.object()?;
    let causes = causes(&clone.spec);
    let causes = if created { resource::or_unsupported("VirtualMachineClone", causes) } else { causes };
    Ok(context.verdict(&causes, vec![]))
}

/// Names the target where the user did not.
pub fn set_defaults(spec: &mut VirtualMachineCloneSpec, fresh: &Fresh) {
    let Some(source) = &spec.source else { return };
    let target = spec.target.get_or_insert_with(|| TypedLocalObjectReference {
        api_group: Some(api::constants::GROUP.to_owned()),
        kind: "VirtualMachine".to_owned(),
        name: String::new(),
    });
    if target.name.is_empty() {
        target.name = format!("clone-{}-{}", source.name, suffix(&fresh.uuid));
    }
}

/// Random characters made of a random UUID.
fn suffix(uuid: &str) -> String {
    let digits = uuid.bytes().filter_map(|byte| char::from(byte).to_digit(16)).collect::<Vec<_>>();
    digits
        .chunks_exact(2)
        .take(SUFFIX)
        .filter_map(|pair| ALPHABET.get((pair[0] * 16 + pair[1]) as usize % ALPHABET.len()))
        .map(|byte| char::from(*byte))
        .collect()
}

/// What is wrong with a clone.
pub fn causes(spec: &VirtualMachineCloneSpec) -> Causes {
    let mut causes = Causes::new();
    for (path, list) in [
        ("spec.annotations", &spec.annotation_filters),
        ("spec.labels", &spec.label_filters),
        ("spec.template.annotations", &spec.template.annotation_filters),
        ("spec.template.labels", &spec.template.label_filters),
    ] {
        for text in list {
            filter(path, text, &mut causes);
        }
    }
    ends(spec, &mut causes);
    for (name, mac) in &spec.new_mac_addresses {
        if network::mac_bytes(mac).is_none() {
            let message = format!("interface {name} has malformed MAC address ({mac}).");
            causes.invalid(format!("spec.newMacAddresses.{name}"), message);
        }
    }
    for (index, patch) in spec.patches.iter().enumerate() {
        if serde_json::from_str::<IgnoredAny>(patch).is_err() {
            causes.invalid(format!("spec.patches[{index}]"), format!("patch is not valid JSON ({patch})"));
        }
    }
    causes
}

/// A filter is a key, with `*` at its end for all that begin so, with `!` at its beginning to leave out.
fn filter(path: &str, text: &str, causes: &mut Causes) {
    let mut rest = text.chars();
    match rest.next() {
        None => return causes.invalid(path, format!("{path} filter is invalid: cannot be empty")),
        Some('!') if text.len() == 1 => {
            return causes.invalid(path, "a negation character is not a valid filter");
        }
        Some(_) => {}
    }
    let mut misplaced = |what: &str, sign: &str, rule: &str| {
        let message = format!("{path} filter {text} is invalid: cannot contain a {what} character ({sign})");
        causes.invalid(path, format!("{message}; FilterRules: {rule}"));
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

/// Source and target.
fn ends(spec: &VirtualMachineCloneSpec, causes: &mut Causes) {
    let is_vm = |reference: &TypedLocalObjectReference| reference.kind == "VirtualMachine";
    if let Some(source) = &spec.source
        && !is_vm(source)
        && source.kind != "VirtualMachineSnapshot"
    {
        causes.invalid("spec.Source.Kind", "Source kind is not supported");
    }
    if spec.target.as_ref().is_some_and(|target| !is_vm(target)) {
        causes.invalid("spec.Target.Kind", "Target kind is not supported");
    }
    let Some(source) = &spec.source else {
        return causes.invalid("spec.Source", "Source cannot be nil");
    };
    if source.api_group.as_deref().is_none_or(str::is_empty) {
        causes.invalid("spec.Source.APIGroup", "Source's APIGroup cannot be empty");
    }
    if source.kind.is_empty() {
        causes.invalid("spec.Source", "Source's Kind cannot be empty");
    }
    if source.name.is_empty() {
        causes.invalid("spec.Source.Name", "Source's name cannot be empty");
    }
    if let Some(target) = &spec.target
        && is_vm(source)
        && is_vm(target)
        && source.name == target.name
    {
        causes.invalid("spec.target.name", "Target name cannot be equal to source name when both are VirtualMachines");
    }
}
