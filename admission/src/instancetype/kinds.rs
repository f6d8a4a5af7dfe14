//! Rules of instance types and preferences themselves.

use api::instancetype::{
    VirtualMachineClusterInstancetype, VirtualMachineClusterPreference, VirtualMachineInstancetype,
    VirtualMachineInstancetypeSpec, VirtualMachinePreference, VirtualMachinePreferenceSpec,
    matcher::MatchedKind,
    topology::{self, Across, Topology},
};

use crate::{
    causes::Causes,
    review::AdmissionReview,
    webhook::{Context, Stop},
};

fn is_cluster_wide(context: &Context<'_>) -> bool {
    MatchedKind::ALL.iter().any(|kind| kind.is_cluster_wide() && kind.plural() == context.request.resource.resource)
}

/// The webhook that checks instance types.
pub(crate) fn validate_instancetype(context: &Context<'_>) -> Result<AdmissionReview, Stop> {
    let spec = if is_cluster_wide(context) {
        context.object::<VirtualMachineClusterInstancetype>()?.spec.0
    } else {
        context.object::<VirtualMachineInstancetype>()?.spec
    };
    Ok(context.verdict(&instancetype_causes(&spec), instancetype_warnings(&spec)))
}

/// The webhook that checks preferences.
pub(crate) fn validate_preference(context: &Context<'_>) -> Result<AdmissionReview, Stop> {
    let spec = if is_cluster_wide(context) {
        context.object::<VirtualMachineClusterPreference>()?.spec.0
    } else {
        context.object::<VirtualMachinePreference>()?.spec
    };
    Ok(context.verdict(&preference_causes(&spec), preference_warnings(&spec)))
}

pub(super) fn instancetype_causes(spec: &VirtualMachineInstancetypeSpec) -> Causes {
    const PERCENT: &str = "spec.memory.overcommitPercent";
    let mut causes = Causes::new();
    let percent = spec.memory.overcommit_percent;
    if !(0..=100).contains(&percent) {
        causes.invalid(PERCENT, format!("{PERCENT} '{percent}': must be in range between 0 and 100."));
    }
    if percent != 0 && spec.memory.hugepages.is_some() {
        causes.invalid(PERCENT, format!("{PERCENT} and spec.memory.hugepages should not be requested together."));
    }
    causes
}

pub(super) fn instancetype_warnings(spec: &VirtualMachineInstancetypeSpec) -> Vec<String> {
    let deprecated = "launchSecurity is deprecated and will be removed in a future release. Use preference instead.";
    spec.launch_security.iter().map(|_| deprecated.to_owned()).collect()
}

fn given_topology(spec: &VirtualMachinePreferenceSpec) -> Option<&str> {
    spec.cpu.as_ref()?.preferred_cpu_topology.as_deref()
}

pub(super) fn preference_causes(spec: &VirtualMachinePreferenceSpec) -> Causes {
    let mut causes = Causes::new();
    if let Some(given) = given_topology(spec)
        && !topology::NAMES.iter().any(|(name, old)| [*name, *old].contains(&given))
    {
        causes.invalid("spec.cpu.preferredCPUTopology", format!("unknown preferredCPUTopology {given}"));
    }
    let Topology::Spread(across, ratio) = topology::preferred(Some(spec)) else { return causes };
    let given = spec.cpu.as_ref().and_then(|cpu| cpu.spread_options.as_ref()?.across.as_deref());
    if let Some(given) = given.filter(|given| Across::from_name(given).is_none()) {
        causes.invalid("spec.cpu.spreadOptions.across", format!("across {given} is not supported"));
    } else if across == Across::CoresThreads && ratio != 2 {
        causes.invalid(
            "spec.cpu.spreadOptions.ratio",
            "only a ratio of 2 (1 core 2 threads) is allowed when spreading vCPUs over cores and threads",
        );
    }
    causes
}

pub(super) fn preference_warnings(spec: &VirtualMachinePreferenceSpec) -> Vec<String> {
    let given = given_topology(spec);
    let old = topology::NAMES.iter().filter(|(_, old)| given == Some(*old));
    old.map(|(name, old)| {
        format!("PreferredCPUTopology {old} is deprecated for removal in a future release, please use {name} instead")
    })
    .collect()
}
