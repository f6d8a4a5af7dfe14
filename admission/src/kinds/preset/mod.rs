//! Presets: rules, and their application to new VMIs.

use api::{
    VirtualMachineInstance, VirtualMachineInstancePreset, VirtualMachineInstanceSpec,
    constants::{self, annotation},
    preset::VirtualMachineInstancePresetSpec,
    vmi::{clock::Clock, domain::DomainSpec},
};
use serde::Serialize;
use serde_json::{Value, json};

use crate::{
    context::{Context, Decision, FieldErrors, Interrupt, LookupError, ObjectQuery, decode, semantic},
    rules::{
        self,
        label_selector::{self, SelectorError},
        unsupported,
    },
};

/// Warning for a VMI with presets.
const DEPRECATED: &str = "kubevirt.io/v1 VirtualMachineInstancePresets is now deprecated and will be removed in v2.";
/// Part of the annotation keys that record applied presets.
const APPLIED_KEY_PART: &str = "virtualmachinepreset";

/// Presets that cannot be applied.
#[derive(Debug, Eq, PartialEq, thiserror::Error)]
pub(crate) enum PresetError {
    /// The selector of a preset is invalid.
    #[error("cannot read the selector of preset '{0}': {1}")]
    Selector(String, SelectorError),
    /// Presets set a field to different values.
    #[error("VirtualMachinePresets cannot be applied due to conflicts: {0}")]
    Conflicts(String),
}

/// Serves `/vmipreset-validate`.
pub(crate) fn validate(context: &Context<'_>) -> Result<Decision, Interrupt> {
    let preset: VirtualMachineInstancePreset = context.object()?;
    Ok(context.decide(field_errors(&preset.spec), vec![]))
}

/// Returns the errors of a preset.
pub(crate) fn field_errors(preset: &VirtualMachineInstancePresetSpec) -> FieldErrors {
    let mut errors = FieldErrors::new();
    let Some(domain) = &preset.domain else {
        errors.required("spec.domain", "missing domain.");
        return errors;
    };
    let vmi = VirtualMachineInstanceSpec { domain: domain.clone(), ..Default::default() };
    rules::disks::validate("spec", &vmi, &mut errors);
    if let Some(firmware) = &domain.firmware {
        rules::firmware::validate_boot("spec.domain.firmware", firmware, &mut errors);
    }
    // Fields that are not applied cannot be unsupported.
    let applied = VirtualMachineInstanceSpec { domain: applied_fields(domain), ..Default::default() };
    errors.or_else(|errors| unsupported::by_table("spec", &applied, errors))
}

/// Returns the part of a preset's domain that is applied to VMIs.
fn applied_fields(domain: &DomainSpec) -> DomainSpec {
    let mut applied = DomainSpec::default();
    for group in GROUPS {
        (group.copy)(domain, &mut applied);
    }
    applied
}

/// Fields that are applied together.
struct Group {
    /// Path in conflict messages.
    path: &'static str,
    /// Returns their value; `None` if they are not set.
    get: fn(&DomainSpec) -> Option<Value>,
    /// Copies them from a preset unless the VMI has them.
    copy: fn(&DomainSpec, &mut DomainSpec),
}

fn value<T: Serialize>(field: Option<&T>) -> Option<Value> {
    field.and_then(|field| serde_json::to_value(field).ok())
}

fn fill<T: Clone>(from: &Option<T>, to: &mut Option<T>) {
    if to.is_none() {
        to.clone_from(from);
    }
}

/// The fields that presets apply.
const GROUPS: &[Group] = &[
    Group {
        path: "spec.resources.requests",
        get: |domain| {
            let requests = &domain.resources.requests;
            (!requests.is_empty()).then(|| json!({"requests": requests}))
        },
        copy: |preset, domain| {
            if domain.resources.requests.is_empty() {
                domain.resources.requests.clone_from(&preset.resources.requests);
            }
        },
    },
    Group {
        path: "spec.cpu",
        get: |domain| value(domain.cpu.as_ref()),
        copy: |preset, domain| fill(&preset.cpu, &mut domain.cpu),
    },
    Group {
        path: "spec.firmware",
        get: |domain| value(domain.firmware.as_ref()),
        copy: |preset, domain| fill(&preset.firmware, &mut domain.firmware),
    },
    Group {
        path: "spec.clock.clockoffset",
        get: |domain| {
            let clock = domain.clock.as_ref()?;
            let set = clock.utc.is_some() || clock.timezone.is_some();
            set.then(|| json!({"utc": clock.utc, "timezone": clock.timezone}))
        },
        copy: |preset, domain| {
            if let (Some(clock), None) = (&preset.clock, &domain.clock) {
                domain.clock = Some(Box::new(Clock { timer: None, ..Clock::clone(clock) }));
            }
        },
    },
    Group {
        path: "spec.clock.timer",
        get: |domain| value(domain.clock.as_ref()?.timer.as_ref()),
        copy: |preset, domain| {
            if let Some(timer) = preset.clock.as_ref().and_then(|clock| clock.timer.as_ref()) {
                domain.clock.get_or_insert_default().timer.get_or_insert_with(|| timer.clone());
            }
        },
    },
    Group {
        path: "spec.features",
        get: |domain| value(domain.features.as_ref()),
        copy: |preset, domain| fill(&preset.features, &mut domain.features),
    },
    Group {
        path: "spec.devices.watchdog",
        get: |domain| value(domain.devices.watchdog.as_ref()),
        copy: |preset, domain| fill(&preset.devices.watchdog, &mut domain.devices.watchdog),
    },
    Group {
        path: "spec.ioThreadsPolicy",
        get: |domain| value(domain.io_threads_policy.as_ref()),
        copy: |preset, domain| fill(&preset.io_threads_policy, &mut domain.io_threads_policy),
    },
];

/// Returns the presets in the namespace of a new VMI; none if the VMI excludes presets.
pub(crate) fn in_namespace(
    context: &Context<'_>,
    vmi: &VirtualMachineInstance,
) -> Result<Vec<VirtualMachineInstancePreset>, LookupError> {
    if is_excluded(vmi) {
        return Ok(vec![]);
    }
    let namespace = context.request.namespace.as_deref().or(vmi.metadata.namespace.as_deref());
    let presets =
        ObjectQuery::list(constants::GROUP, constants::VERSION, "virtualmachineinstancepresets", namespace, "");
    // The CRD allows a preset without a spec, which has no effect.
    let found = context.lookups.list(&presets)?.iter().filter(|preset| preset.get("spec").is_some());
    found
        .map(|preset| {
            decode::stored::<VirtualMachineInstancePreset>(preset)
                .map_err(|error| LookupError::Failed(format!("cannot read a VirtualMachineInstancePreset: {error}")))
        })
        .collect()
}

fn is_excluded(vmi: &VirtualMachineInstance) -> bool {
    let annotations = vmi.metadata.annotations.as_ref();
    annotations.and_then(|all| all.get(annotation::EXCLUDE_PRESETS)).is_some_and(|value| value == "true")
}

/// Applies the presets that match the VMI's labels to fields that the VMI does not set, and records in annotations which
/// presets agree with the VMI afterwards. Returns warnings. Fails if presets conflict.
pub(crate) fn apply(
    vmi: &mut VirtualMachineInstance,
    presets: &[VirtualMachineInstancePreset],
) -> Result<Vec<String>, PresetError> {
    if !is_excluded(vmi) {
        let labels = vmi.metadata.labels.clone().unwrap_or_default();
        let mut matching = vec![];
        for preset in presets {
            let Some(domain) = &preset.spec.domain else { continue };
            let name = preset.metadata.name.as_deref().unwrap_or_default();
            let matches = label_selector::matches(&preset.spec.selector, &labels)
                .map_err(|error| PresetError::Selector(name.to_owned(), error))?;
            if matches {
                matching.push((name, domain));
            }
        }
        // Lists have no defined order.
        matching.sort_by_key(|(name, _)| *name);
        check_conflicts(&matching)?;
        for (name, domain) in matching {
            if merge(domain, &mut vmi.spec.domain) {
                let annotations = vmi.metadata.annotations.get_or_insert_default();
                annotations.insert(format!("{APPLIED_KEY_PART}.kubevirt.io/{name}"), constants::API_VERSION.to_owned());
            }
        }
    }
    let applied = vmi.metadata.annotations.iter().flatten().any(|(key, _)| key.contains(APPLIED_KEY_PART));
    Ok(if applied { vec![DEPRECATED.to_owned()] } else { vec![] })
}

/// Copies fields that the VMI does not set. Returns true if VMI and preset agree on any field.
fn merge(preset: &DomainSpec, domain: &mut DomainSpec) -> bool {
    let mut agrees = false;
    for group in GROUPS {
        let Some(value) = (group.get)(preset) else { continue };
        (group.copy)(preset, domain);
        agrees |= (group.get)(domain).is_some_and(|found| semantic::equal(&found, &value));
    }
    agrees
}

/// Fails with all pairs of presets that set a field to different values.
fn check_conflicts(presets: &[(&str, &DomainSpec)]) -> Result<(), PresetError> {
    let mut pairs = vec![];
    for (index, (name, domain)) in presets.iter().enumerate() {
        for (other, earlier) in &presets[..index] {
            let differing: Vec<String> =
                GROUPS.iter().filter_map(|group| differing(group, domain, earlier)).flatten().collect();
            if !differing.is_empty() {
                pairs.push(format!("presets '{name}' and '{other}' conflict: {}", joined(&differing)));
            }
        }
    }
    if pairs.is_empty() {
        return Ok(());
    }
    Err(PresetError::Conflicts(joined(&pairs)))
}

fn differing(group: &Group, one: &DomainSpec, two: &DomainSpec) -> Option<Vec<String>> {
    let (one, two) = ((group.get)(one)?, (group.get)(two)?);
    // Requests conflict only if both presets have them.
    if let (Some(one), Some(two)) = (one["requests"].as_object(), two["requests"].as_object()) {
        let both = one.iter().filter_map(|(key, one)| Some((key, one, two.get(key)?)));
        return Some(
            both.filter(|(_, one, two)| !semantic::equal(&json!({"requests": one}), &json!({"requests": two})))
                .map(|(key, one, two)| format!("{}[{key}]: {} != {}", group.path, plain(one), plain(two)))
                .collect(),
        );
    }
    (!semantic::equal(&one, &two)).then(|| vec![format!("{}: {} != {}", group.path, plain(&one), plain(&two))])
}

fn plain(value: &Value) -> String {
    value.as_str().map_or_else(|| value.to_string(), str::to_owned)
}

/// Formats one text as it is, several in brackets, as Go's aggregated errors.
fn joined(texts: &[String]) -> String {
    match texts {
        [one] => one.clone(),
        many => format!("[{}]", many.join(", ")),
    }
}

#[cfg(test)]
mod tests;
