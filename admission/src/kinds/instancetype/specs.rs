//! Rules of instance types and preferences.

use api::instancetype::{
    VirtualMachineClusterInstancetype, VirtualMachineClusterPreference, VirtualMachineInstancetype,
    VirtualMachineInstancetypeSpec, VirtualMachinePreference, VirtualMachinePreferenceSpec,
    matcher::MatchedKind,
    topology::{self, Across, Topology},
};

use crate::context::{Context, Decision, FieldErrors, Interrupt, accepted};

fn is_cluster_wide(context: &Context<'_>) -> bool {
    MatchedKind::ALL.iter().any(|kind| kind.is_cluster_wide() && kind.plural() == context.request.resource.resource)
}

/// Serves the webhooks of instance types.
pub(crate) fn validate_instancetype(context: &Context<'_>) -> Result<Decision, Interrupt> {
    let spec = if is_cluster_wide(context) {
        context.object::<VirtualMachineClusterInstancetype>()?.spec.0
    } else {
        context.object::<VirtualMachineInstancetype>()?.spec
    };
    Ok(context.decide(instancetype_errors(&spec), instancetype_warnings(&spec)))
}

/// Serves the webhooks of preferences.
pub(crate) fn validate_preference(context: &Context<'_>) -> Result<Decision, Interrupt> {
    let spec = if is_cluster_wide(context) {
        context.object::<VirtualMachineClusterPreference>()?.spec.0
    } else {
        context.object::<VirtualMachinePreference>()?.spec
    };
    Ok(context.decide(preference_errors(&spec), preference_warnings(&spec)))
}

pub(super) fn instancetype_errors(spec: &VirtualMachineInstancetypeSpec) -> FieldErrors {
    const PERCENT: &str = "spec.memory.overcommitPercent";
    let mut errors = FieldErrors::new();
    let percent = spec.memory.overcommit_percent;
    if !(0..=100).contains(&percent) {
        errors.invalid(PERCENT, format!("{PERCENT} '{percent}': must be in range between 0 and 100."));
    }
    if percent != 0 && spec.memory.hugepages.is_some() {
        errors.invalid(PERCENT, format!("{PERCENT} and spec.memory.hugepages should not be requested together."));
    }
    errors
}

pub(super) fn instancetype_warnings(spec: &VirtualMachineInstancetypeSpec) -> Vec<String> {
    let deprecated = "launchSecurity is deprecated and will be removed in a future release. Use preference instead.";
    spec.launch_security.iter().map(|_| deprecated.to_owned()).collect()
}

fn topology_name(spec: &VirtualMachinePreferenceSpec) -> Option<&str> {
    spec.cpu.as_ref()?.preferred_cpu_topology.as_deref()
}

pub(super) fn preference_errors(spec: &VirtualMachinePreferenceSpec) -> FieldErrors {
    let mut errors = FieldErrors::new();
    if let Some(value) = topology_name(spec)
        && !topology::NAMES.iter().any(|(name, old)| [*name, *old].contains(&value))
    {
        let names = topology::NAMES.map(|(name, _)| name);
        let message = format!("unknown preferredCPUTopology {value}, {}", accepted(&names));
        errors.invalid("spec.cpu.preferredCPUTopology", message);
    }
    let Topology::Spread(across, ratio) = topology::preferred(Some(spec)) else { return errors };
    let value = spec.cpu.as_ref().and_then(|cpu| cpu.spread_options.as_ref()?.across.as_deref());
    if let Some(value) = value.filter(|value| Across::from_name(value).is_none()) {
        errors.invalid("spec.cpu.spreadOptions.across", format!("across {value} is not supported"));
    } else if across == Across::CoresThreads && ratio != 2 {
        errors.invalid(
            "spec.cpu.spreadOptions.ratio",
            "only a ratio of 2 (1 core 2 threads) is allowed when spreading vCPUs over cores and threads",
        );
    }
    errors
}

pub(super) fn preference_warnings(spec: &VirtualMachinePreferenceSpec) -> Vec<String> {
    let value = topology_name(spec);
    let old = topology::NAMES.iter().filter(|(_, old)| value == Some(*old));
    old.map(|(name, old)| {
        format!("PreferredCPUTopology {old} is deprecated for removal in a future release, please use {name} instead")
    })
    .collect()
}
