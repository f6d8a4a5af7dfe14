//! Presets: their rules, and what they give to new machines.

use api::{
    VirtualMachineInstance, VirtualMachineInstancePreset, VirtualMachineInstanceSpec,
    constants::{self, annotation},
    preset::VirtualMachineInstancePresetSpec,
    vmi::{clock::Clock, domain::DomainSpec},
};
use serde::Serialize;
use serde_json::{Value, json};

use crate::{
    causes::Causes,
    neighbours::{Needs, Wanted},
    read,
    review::AdmissionReview,
    rules, semantic, unsupported,
    webhook::{Context, Stop},
};

/// What whoever makes a machine with presets is told.
const DEPRECATED: &str = "kubevirt.io/v1 VirtualMachineInstancePresets is now deprecated and will be removed in v2.";
/// Part of the keys of annotations that say which presets a machine was made with.
const APPLIED_KEY_PART: &str = "virtualmachinepreset";

/// The webhook that checks.
pub(crate) fn validate(context: &Context<'_>) -> Result<AdmissionReview, Stop> {
    let preset: VirtualMachineInstancePreset = context.object()?;
    Ok(context.verdict(&causes(&preset.spec), vec![]))
}

/// What is wrong with a preset.
pub fn causes(preset: &VirtualMachineInstancePresetSpec) -> Causes {
    let mut causes = Causes::new();
    let Some(domain) = &preset.domain else {
        causes.required("spec.domain", "missing domain.");
        return causes;
    };
    let machine = VirtualMachineInstanceSpec { domain: domain.clone(), ..Default::default() };
    rules::disks::causes("spec", &machine, &mut causes);
    if let Some(firmware) = &domain.firmware {
        rules::firmware::boot("spec.domain.firmware", firmware, &mut causes);
    }
    // Only what machines would get: the rest of the domain never reaches one.
    let given = VirtualMachineInstanceSpec { domain: given(domain), ..Default::default() };
    causes.or_else(|causes| unsupported::spec("spec", &given, causes))
}

/// The part of a preset's domain that machines get.
fn given(domain: &DomainSpec) -> DomainSpec {
    let mut given = DomainSpec::default();
    for group in GROUPS {
        (group.copy)(domain, &mut given);
    }
    given
}

/// Fields that are taken over together.
struct Group {
    /// Where they stand, as conflicts name them.
    path: &'static str,
    /// Their value; none when they are not set.
    get: fn(&DomainSpec) -> Option<Value>,
    /// Takes them over from a preset, if the machine has none.
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

/// All that presets give.
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
                domain.clock = Some(Clock { timer: None, ..clock.clone() });
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

/// Presets of the namespace of a machine that is being made; none are read for a machine that wants none.
pub(crate) fn of(
    context: &Context<'_>,
    machine: &VirtualMachineInstance,
) -> Result<Vec<VirtualMachineInstancePreset>, Needs> {
    if is_excluded(machine) {
        return Ok(vec![]);
    }
    let namespace = context.request.namespace.as_deref().or(machine.metadata.namespace.as_deref());
    let presets = Wanted::list(constants::GROUP, constants::VERSION, "virtualmachineinstancepresets", namespace, "");
    // The definition lets a preset come without a spec; such a one gives nothing.
    let found = context.neighbours.list(&presets)?.iter().filter(|preset| preset.get("spec").is_some());
    found
        .map(|preset| {
            read::stored::<VirtualMachineInstancePreset>(preset)
                .map_err(|error| Needs::Failed(format!("cannot read a VirtualMachineInstancePreset: {error}")))
        })
        .collect()
}

fn is_excluded(machine: &VirtualMachineInstance) -> bool {
    let annotations = machine.metadata.annotations.as_ref();
    annotations.and_then(|all| all.get(annotation::EXCLUDE_PRESETS)).is_some_and(|value| value == "true")
}

/// Gives a machine what the presets of its namespace that match its labels hold, where it says nothing of its own, and
/// notes on it which of them agree with it now. Answers with warnings; an error says which presets contradict each
/// other.
pub fn apply(
    machine: &mut VirtualMachineInstance,
    presets: &[VirtualMachineInstancePreset],
) -> Result<Vec<String>, String> {
    if !is_excluded(machine) {
        let labels = machine.metadata.labels.clone().unwrap_or_default();
        let mut matching = vec![];
        for preset in presets {
            let Some(domain) = &preset.spec.domain else { continue };
            let name = preset.metadata.name.as_deref().unwrap_or_default();
            let matches = rules::scheduling::selector_matches(&preset.spec.selector, &labels)
                .map_err(|error| format!("cannot read the selector of preset '{name}': {error}"))?;
            if matches {
                matching.push((name, domain));
            }
        }
        // Lists come in no order to rely on.
        matching.sort_by_key(|(name, _)| *name);
        contradictions(&matching)?;
        for (name, domain) in matching {
            if merge(domain, &mut machine.spec.domain) {
                let annotations = machine.metadata.annotations.get_or_insert_default();
                annotations.insert(format!("{APPLIED_KEY_PART}.kubevirt.io/{name}"), constants::API_VERSION.to_owned());
            }
        }
    }
    let applied = machine.metadata.annotations.iter().flatten().any(|(key, _)| key.contains(APPLIED_KEY_PART));
    Ok(if applied { vec![DEPRECATED.to_owned()] } else { vec![] })
}

/// Takes over what the machine does not have; true when the machine agrees with the preset on something.
fn merge(preset: &DomainSpec, domain: &mut DomainSpec) -> bool {
    let mut agrees = false;
    for group in GROUPS {
        let Some(wanted) = (group.get)(preset) else { continue };
        (group.copy)(preset, domain);
        agrees |= (group.get)(domain).is_some_and(|found| semantic::equal(&found, &wanted));
    }
    agrees
}

/// An error names all pairs of presets that set something to different values.
fn contradictions(presets: &[(&str, &DomainSpec)]) -> Result<(), String> {
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
    Err(format!("VirtualMachinePresets cannot be applied due to conflicts: {}", joined(&pairs)))
}

fn differing(group: &Group, one: &DomainSpec, two: &DomainSpec) -> Option<Vec<String>> {
    let (one, two) = ((group.get)(one)?, (group.get)(two)?);
    // Of requests only those that both name can differ.
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

/// Several errors in brackets, one as it is.
fn joined(texts: &[String]) -> String {
    match texts {
        [one] => one.clone(),
        many => format!("[{}]", many.join(", ")),
    }
}

#[cfg(test)]
mod tests;
