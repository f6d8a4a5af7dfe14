//! Feature gates: names, states and evaluation.

use std::fmt;

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

/// Defines the gates with their names, by state.
macro_rules! feature_gates {
    ($($state:ident: $($gate:ident = $name:literal),*;)*) => {
        /// A feature gate of the reference.
        #[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
        pub enum FeatureGate {
            $($(#[doc = concat!("`", $name, "`")] $gate,)*)*
        }

        impl FeatureGate {
            /// All gates.
            pub const ALL: &[Self] = &[$($(Self::$gate,)*)*];

            /// Returns the name in the configuration.
            #[must_use]
            pub const fn name(self) -> &'static str {
                match self {
                    $($(Self::$gate => $name,)*)*
                }
            }

            /// Returns the state of the feature.
            #[must_use]
            pub const fn state(self) -> State {
                match self {
                    $($(Self::$gate => State::$state,)*)*
                }
            }
        }
    };
}

feature_gates! {
    Ga:
        LiveMigration = "LiveMigration",
        SRIOVLiveMigration = "SRIOVLiveMigration",
        NonRoot = "NonRoot",
        Psa = "PSA",
        CPUNodeDiscovery = "CPUNodeDiscovery",
        Numa = "NUMA",
        CommonInstancetypesDeploymentGate = "CommonInstancetypesDeploymentGate",
        Gpu = "GPU",
        HotplugNICs = "HotplugNICs",
        BochsDisplayForEFIGuests = "BochsDisplayForEFIGuests",
        VMLiveUpdateFeatures = "VMLiveUpdateFeatures",
        NetworkBindingPlugins = "NetworkBindingPlugins",
        DynamicPodInterfaceNaming = "DynamicPodInterfaceNaming",
        VolumesUpdateStrategy = "VolumesUpdateStrategy",
        VolumeMigration = "VolumeMigration",
        DisableCustomSELinuxPolicy = "DisableCustomSELinuxPolicy",
        AutoResourceLimitsGate = "AutoResourceLimitsGate",
        ClusterProfiler = "ClusterProfiler",
        VMPersistentState = "VMPersistentState",
        VMExport = "VMExport",
        PersistentReservation = "PersistentReservation",
        InstancetypeReferencePolicy = "InstancetypeReferencePolicy",
        EnableVirtioFsConfigVolumes = "EnableVirtioFsConfigVolumes",
        ExpandDisks = "ExpandDisks",
        PanicDevices = "PanicDevices",
        LiveUpdateNADRef = "LiveUpdateNADRef",
        VideoConfig = "VideoConfig",
        SecureExecution = "SecureExecution",
        MigrationPriorityQueue = "MigrationPriorityQueue",
        VmiMemoryOverheadReport = "VmiMemoryOverheadReport",
        LibvirtHooksServerAndClient = "LibvirtHooksServerAndClient";
    Beta:
        Snapshot = "Snapshot",
        WorkloadEncryptionSEV = "WorkloadEncryptionSEV",
        KubevirtSeccompProfile = "KubevirtSeccompProfile",
        NodeRestriction = "NodeRestriction",
        ImageVolume = "ImageVolume",
        GPUsWithDRA = "GPUsWithDRA",
        HostDevicesWithDRA = "HostDevicesWithDRA",
        DecentralizedLiveMigration = "DecentralizedLiveMigration",
        DeclarativeHotplugVolumes = "DeclarativeHotplugVolumes",
        PasstBinding = "PasstBinding",
        PodSecondaryInterfaceNamingUpgrade = "PodSecondaryInterfaceNamingUpgrade",
        ExternalNetResourceInjection = "ExternalNetResourceInjection",
        RebootPolicy = "RebootPolicy",
        Template = "Template",
        OptOutRoleAggregation = "OptOutRoleAggregation";
    Alpha:
        CPUManager = "CPUManager",
        ExperimentalIgnitionSupport = "ExperimentalIgnitionSupport",
        HypervStrictCheck = "HypervStrictCheck",
        Sidecar = "Sidecar",
        HostDevices = "HostDevices",
        HostDisk = "HostDisk",
        DownwardMetrics = "DownwardMetrics",
        Root = "Root",
        WorkloadEncryptionTDX = "WorkloadEncryptionTDX",
        Vsock = "VSOCK",
        AlignCPUs = "AlignCPUs",
        EnableVirtioFsStorageVolumes = "EnableVirtioFsStorageVolumes",
        PCINUMAAwareTopology = "PCINUMAAwareTopology",
        NetworkDevicesWithDRA = "NetworkDevicesWithDRA",
        ObjectGraph = "ObjectGraph",
        UtilityVolumes = "UtilityVolumes",
        ConfigurableHypervisor = "ConfigurableHypervisor",
        IncrementalBackup = "IncrementalBackup",
        ContainerPathVolumes = "ContainerPathVolumes",
        ReservedOverheadMemlock = "ReservedOverheadMemlock",
        VGPULiveMigration = "VGPULiveMigration",
        VMStatsCollector = "VMStatsCollector",
        OCIExport = "OCIExport",
        Plugins = "Plugins",
        GraceIOVirtualization = "GraceIOVirtualization",
        Iommufd = "IOMMUFD",
        FirmwareAutoSelection = "FirmwareAutoSelection",
        MigrationStallDetection = "MigrationStallDetection",
        MigrationDowntimeTuning = "MigrationDowntimeTuning",
        CrossArchitectureVirtualization = "CrossArchitectureVirtualization",
        PortRangesSpec = "PortRangesSpec";
    Deprecated:
        DockerSELinuxMCSWorkaround = "DockerSELinuxMCSWorkaround",
        MultiArchitecture = "MultiArchitecture",
        DisableMDEVConfiguration = "DisableMDEVConfiguration",
        HotplugVolumes = "HotplugVolumes";
    Discontinued:
        ExperimentalVirtiofsSupport = "ExperimentalVirtiofsSupport",
        Passt = "Passt",
        Macvtap = "Macvtap",
        PasstIPStackMigration = "PasstIPStackMigration";
}

/// Differences between a name and the gate that was meant.
const TYPOS_MAX: usize = 2;

/// Returns the number of letters to insert, delete or replace between two texts.
fn edits(one: &str, other: &str) -> usize {
    let mut row: Vec<usize> = (0..=other.len()).collect();
    for (index, letter) in one.bytes().enumerate() {
        let mut corner = std::mem::replace(&mut row[0], index + 1);
        for (column, known) in other.bytes().enumerate() {
            let replaced = corner + usize::from(letter != known);
            corner = row[column + 1];
            row[column + 1] = replaced.min(corner + 1).min(row[column] + 1);
        }
    }
    row[other.len()]
}

impl fmt::Display for FeatureGate {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(self.name())
    }
}

impl FeatureGate {
    /// Returns the gate of this name, or `None` for an unknown name.
    #[must_use]
    pub fn parse(name: &str) -> Option<Self> {
        Self::ALL.iter().copied().find(|gate| gate.name() == name)
    }

    /// Returns the gate that an unknown name was likely meant to be.
    #[must_use]
    pub fn nearest(name: &str) -> Option<Self> {
        let distance = |gate: &Self| edits(&name.to_ascii_lowercase(), &gate.name().to_ascii_lowercase());
        Self::ALL.iter().copied().min_by_key(distance).filter(|gate| distance(gate) <= TYPOS_MAX)
    }

    /// Returns true for a gate that is on without an entry in the configuration.
    #[must_use]
    pub const fn default_on(self) -> bool {
        matches!(self.state(), State::Ga | State::Beta)
    }

    /// Returns true for a gate whose feature still exists.
    #[must_use]
    pub const fn is_supported(self) -> bool {
        !matches!(self.state(), State::Discontinued)
    }

    /// Returns true if these lists of the configuration enable the gate.
    #[must_use]
    pub fn enabled(self, listed: &[String], disabled: &[String]) -> bool {
        match self.state() {
            State::Ga => true,
            _ if self.is_in(listed) => true,
            _ if self.is_in(disabled) => false,
            _ => self.default_on(),
        }
    }

    /// Returns true if a list of names contains the gate.
    #[must_use]
    pub fn is_in(self, names: &[String]) -> bool {
        names.iter().any(|name| name == self.name())
    }

    /// Returns the message for users of a deprecated or discontinued gate.
    #[must_use]
    pub const fn message(self) -> Option<&'static str> {
        Some(match self {
            Self::DockerSELinuxMCSWorkaround => "DockerSELinuxMCSWorkaround has been deprecated since v1.4.",
            Self::MultiArchitecture => "MultiArchitecture has been deprecated since v1.8.0",
            Self::DisableMDEVConfiguration => "DisableMDEVConfiguration has been deprecated since v1.8.0",
            Self::HotplugVolumes => {
                "HotplugVolumes has been deprecated since v1.9.0 and has been replaced by DeclarativeHotplugVolumes"
            }
            Self::ExperimentalVirtiofsSupport => {
                "Virtiofs ExperimentalVirtiofsSupport feature gate is discontinued since v1.7. Please use EnableVirtioFsConfigVolumes or EnableVirtioFsPVC feature gates instead"
            }
            Self::Passt => {
                "Passt network binding is discontinued since v1.3. Please refer to Kubevirt user guide for alternatives."
            }
            Self::Macvtap => {
                "Macvtap network binding is discontinued since v1.3. Please refer to Kubevirt user guide for alternatives."
            }
            Self::PasstIPStackMigration => {
                "Seamless migration with passt network binding plugin is no longer supported since KubeVirt v1.8. Please use the passt core binding instead."
            }
            _ => return None,
        })
    }

    /// Returns the warning for a gate that the configuration lists without effect.
    #[must_use]
    pub fn warning(self) -> Option<String> {
        match self.state() {
            State::Alpha | State::Beta => None,
            State::Ga => Some(format!(
                "feature gate {self} is deprecated (feature state is \"General Availability\"), therefore it can be safely removed and is redundant. For more info, please look at: https://github.com/kubevirt/kubevirt/blob/main/docs/deprecation.md"
            )),
            State::Deprecated | State::Discontinued => self.message().map(str::to_owned),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gates_follow_state_then_lists() {
        for (gate, listed, disabled, expected) in [
            (FeatureGate::LiveMigration, false, true, true),
            (FeatureGate::Snapshot, false, false, true),
            (FeatureGate::Snapshot, false, true, false),
            (FeatureGate::Snapshot, true, true, true),
            (FeatureGate::HostDisk, false, false, false),
            (FeatureGate::HostDisk, true, false, true),
            (FeatureGate::Macvtap, true, false, true),
            (FeatureGate::Macvtap, false, false, false),
        ] {
            let list = |is_in: bool| if is_in { vec![gate.name().to_owned()] } else { Vec::new() };
            assert_eq!(gate.enabled(&list(listed), &list(disabled)), expected, "{gate} {listed} {disabled}");
        }
    }

    #[test]
    fn listed_gates_without_effect_give_a_warning() {
        assert_eq!(FeatureGate::Snapshot.warning(), None);
        assert!(FeatureGate::Gpu.warning().is_some_and(|text| text.contains("gate GPU is deprecated (feature state is \"General Availability\")")));
        assert!(FeatureGate::Passt.warning().is_some_and(|text| text.contains("discontinued since v1.3")));
        assert!(!FeatureGate::Passt.is_supported());
        for gate in FeatureGate::ALL {
            let has_message = matches!(gate.state(), State::Deprecated | State::Discontinued);
            assert_eq!(gate.message().is_some(), has_message, "{gate}");
        }
    }

    #[test]
    fn names_are_unique_and_parsed() {
        for gate in FeatureGate::ALL {
            assert_eq!(FeatureGate::parse(gate.name()), Some(*gate));
        }
        assert_eq!(FeatureGate::parse("NoSuchGate"), None);
        for (name, expected) in [
            ("Snapshots", Some(FeatureGate::Snapshot)),
            ("hostdisk", Some(FeatureGate::HostDisk)),
            ("HostDevice", Some(FeatureGate::HostDevices)),
            ("Vsocks", Some(FeatureGate::Vsock)),
            ("NoSuchGate", None),
            ("", None),
        ] {
            assert_eq!(FeatureGate::nearest(name), expected, "{name}");
        }
        assert_eq!(FeatureGate::parse("VSOCK"), Some(FeatureGate::Vsock));
    }
}
