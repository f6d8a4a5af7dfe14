//! Feature gates: names, states and evaluation.

/// State of a feature.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum State {
    /// Always on.
    Ga,
    /// On unless disabled.
    Beta,
    /// Off unless enabled.
    Alpha,
    /// Off unless enabled, to be removed.
    Deprecated,
    /// Removed; the name is kept for its message.
    Discontinued,
}

const GA: &[&str] = &[
    "LiveMigration",
    "SRIOVLiveMigration",
    "NonRoot",
    "PSA",
    "CPUNodeDiscovery",
    "NUMA",
    "CommonInstancetypesDeploymentGate",
    "GPU",
    "HotplugNICs",
    "BochsDisplayForEFIGuests",
    "VMLiveUpdateFeatures",
    "NetworkBindingPlugins",
    "DynamicPodInterfaceNaming",
    "VolumesUpdateStrategy",
    "VolumeMigration",
    "DisableCustomSELinuxPolicy",
    "AutoResourceLimitsGate",
    "ClusterProfiler",
    "VMPersistentState",
    "VMExport",
    PERSISTENT_RESERVATION,
    "InstancetypeReferencePolicy",
    "EnableVirtioFsConfigVolumes",
    "ExpandDisks",
    "PanicDevices",
    "LiveUpdateNADRef",
    "VideoConfig",
    "SecureExecution",
    "MigrationPriorityQueue",
];

const BETA: &[&str] = &[
    "Snapshot",
    "WorkloadEncryptionSEV",
    "KubevirtSeccompProfile",
    "NodeRestriction",
    "ImageVolume",
    "LibvirtHooksServerAndClient",
    "GPUsWithDRA",
    "HostDevicesWithDRA",
    "DeclarativeHotplugVolumes",
    "PasstBinding",
    "PodSecondaryInterfaceNamingUpgrade",
    "ExternalNetResourceInjection",
    REBOOT_POLICY,
    "Template",
    "VmiMemoryOverheadReport",
    "OptOutRoleAggregation",
];

const ALPHA: &[&str] = &[
    "CPUManager",
    "ExperimentalIgnitionSupport",
    HYPERV_STRICT_CHECK,
    "Sidecar",
    "HostDevices",
    "HostDisk",
    "DownwardMetrics",
    ROOT,
    "WorkloadEncryptionTDX",
    VSOCK,
    "AlignCPUs",
    "EnableVirtioFsStorageVolumes",
    "PCINUMAAwareTopology",
    "NetworkDevicesWithDRA",
    "DecentralizedLiveMigration",
    "ObjectGraph",
    "UtilityVolumes",
    "ConfigurableHypervisor",
    "IncrementalBackup",
    "ContainerPathVolumes",
    "ReservedOverheadMemlock",
    "VGPULiveMigration",
    "VMStatsCollector",
    "OCIExport",
    "Plugins",
    "GraceIOVirtualization",
    "IOMMUFD",
    "FirmwareAutoSelection",
    "MigrationStallDetection",
    "MigrationDowntimeTuning",
    "CrossArchitectureVirtualization",
    "PortRangesSpec",
];

const DEPRECATED: &[(&str, &str)] = &[
    ("DockerSELinuxMCSWorkaround", "DockerSELinuxMCSWorkaround has been deprecated since v1.4."),
    ("MultiArchitecture", "MultiArchitecture has been deprecated since v1.8.0"),
    (DISABLE_MDEV_CONFIGURATION, "DisableMDEVConfiguration has been deprecated since v1.8.0"),
    (
        "HotplugVolumes",
        "HotplugVolumes has been deprecated since v1.9.0 and has been replaced by DeclarativeHotplugVolumes",
    ),
];

const DISCONTINUED: &[(&str, &str)] = &[
    (
        "ExperimentalVirtiofsSupport",
        "Virtiofs ExperimentalVirtiofsSupport feature gate is discontinued since v1.7. Please use EnableVirtioFsConfigVolumes or EnableVirtioFsPVC feature gates instead",
    ),
    (PASST, "Passt network binding is discontinued since v1.3. Please refer to Kubevirt user guide for alternatives."),
    (
        MACVTAP,
        "Macvtap network binding is discontinued since v1.3. Please refer to Kubevirt user guide for alternatives.",
    ),
    (
        "PasstIPStackMigration",
        "Seamless migration with passt network binding plugin is no longer supported since KubeVirt v1.8. Please use the passt core binding instead.",
    ),
];

/// Lets launchers run as root.
pub const ROOT: &str = "Root";
/// Permits `rebootPolicy`.
pub const REBOOT_POLICY: &str = "RebootPolicy";
/// SCSI persistent reservations; the configuration field takes precedence.
pub const PERSISTENT_RESERVATION: &str = "PersistentReservation";
/// Disables the creation of mediated devices on nodes; the configuration field takes precedence.
pub const DISABLE_MDEV_CONFIGURATION: &str = "DisableMDEVConfiguration";
/// Requires nodes to support the requested Hyper-V features.
pub const HYPERV_STRICT_CHECK: &str = "HypervStrictCheck";
/// Permits VSOCK devices.
pub const VSOCK: &str = "VSOCK";
/// The removed passt plugin.
pub const PASST: &str = "Passt";
/// The removed macvtap binding.
pub const MACVTAP: &str = "Macvtap";

/// Returns the state of a feature gate, or `None` for an unknown name.
pub fn state(gate: &str) -> Option<State> {
    if GA.contains(&gate) {
        Some(State::Ga)
    } else if BETA.contains(&gate) {
        Some(State::Beta)
    } else if ALPHA.contains(&gate) {
        Some(State::Alpha)
    } else if DEPRECATED.iter().any(|(name, _)| *name == gate) {
        Some(State::Deprecated)
    } else if DISCONTINUED.iter().any(|(name, _)| *name == gate) {
        Some(State::Discontinued)
    } else {
        None
    }
}

/// Returns the message for users of a deprecated or discontinued gate.
pub fn message(gate: &str) -> Option<&'static str> {
    DEPRECATED.iter().chain(DISCONTINUED).find(|(name, _)| *name == gate).map(|(_, message)| *message)
}

/// Returns the warning for a gate listed in the configuration: its message, or that it has no effect. The warning is empty
/// for a gate that has an effect. Returns `None` for an unknown name.
pub fn warning(gate: &str) -> Option<String> {
    let text = match state(gate)? {
        State::Alpha | State::Beta => String::new(),
        State::Ga => format!(
            "feature gate {gate} is deprecated (feature state is \"General Availability\"), therefore it can be safely removed and is redundant. For more info, please look at: https://github.com/kubevirt/kubevirt/blob/main/docs/deprecation.md"
        ),
        State::Deprecated | State::Discontinued => message(gate).unwrap_or_default().to_owned(),
    };
    Some(text)
}

/// Returns true if a gate is enabled by these lists of the configuration.
pub fn enabled(gate: &str, listed: &[String], disabled: &[String]) -> bool {
    match state(gate) {
        None => false,
        Some(State::Ga) => true,
        Some(_) if listed.iter().any(|name| name == gate) => true,
        Some(_) if disabled.iter().any(|name| name == gate) => false,
        Some(state) => state == State::Beta,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gates_follow_state_then_lists() {
        let gates = |names: &[&str]| names.iter().map(|n| (*n).to_owned()).collect::<Vec<_>>();
        let none: Vec<String> = vec![];
        assert!(!enabled("NoSuchGate", &gates(&["NoSuchGate"]), &none));
        assert!(enabled("LiveMigration", &none, &gates(&["LiveMigration"])));
        assert!(enabled("Snapshot", &none, &none));
        assert!(!enabled("Snapshot", &none, &gates(&["Snapshot"])));
        assert!(enabled("Snapshot", &gates(&["Snapshot"]), &gates(&["Snapshot"])));
        assert!(!enabled("HostDisk", &none, &none));
        assert!(enabled("HostDisk", &gates(&["HostDisk"]), &none));
        assert!(enabled("Macvtap", &gates(&["Macvtap"]), &none));
        assert!(!enabled("Macvtap", &none, &none));
    }

    #[test]
    fn listed_gates_without_effect_give_a_warning() {
        assert_eq!(warning("NoSuchGate"), None);
        assert_eq!(warning("Snapshot").as_deref(), Some(""));
        assert!(warning("GPU").is_some_and(|text| text.contains("\"General Availability\"")));
        assert!(warning("Passt").is_some_and(|text| text.contains("discontinued since v1.3")));
    }

    #[test]
    fn no_gate_is_listed_twice() {
        let mut all: Vec<&str> = GA.iter().chain(BETA).chain(ALPHA).copied().collect();
        all.extend(DEPRECATED.iter().chain(DISCONTINUED).map(|(name, _)| *name));
        let count = all.len();
        all.sort_unstable();
        all.dedup();
        assert_eq!(all.len(), count);
    }
}
