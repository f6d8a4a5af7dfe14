//! Conditions of fields and annotations on feature gates, with the messages of the reference.

use super::Gated;
use crate::{FeatureGate, constants::annotation};

const fn of(gate: FeatureGate, message: &'static str) -> Gated {
    Gated { gate, uses: "", message }
}

/// Annotations that need a feature gate. `{field}` stands for the path with the key.
pub const GATED_ANNOTATIONS: &[(&str, Gated)] = &[
    (
        annotation::IGNITION_DATA,
        of(
            FeatureGate::ExperimentalIgnitionSupport,
            "ExperimentalIgnitionSupport feature gate is not enabled in kubevirt-config, invalid entry {field}",
        ),
    ),
    (
        annotation::HOOK_SIDECARS,
        of(FeatureGate::Sidecar, "sidecar feature gate is not enabled in kubevirt-config, invalid entry {field}"),
    ),
];
/// The reference makes a pod without the gate, which no node of amd64 takes.
pub(super) const ARCHITECTURE: &[Gated] = &[Gated {
    uses: "`arm64`",
    ..of(
        FeatureGate::CrossArchitectureVirtualization,
        "{field} is not supported yet: arm64 on nodes of amd64 without feature gate CrossArchitectureVirtualization",
    )
}];
pub(super) const CONTAINER_PATH: &[Gated] =
    &[of(FeatureGate::ContainerPathVolumes, "ContainerPathVolumes feature gate is not enabled")];
pub(super) const EMPTY_CDROM: &[Gated] = &[Gated {
    uses: "a CD-ROM drive without a volume",
    ..of(
        FeatureGate::DeclarativeHotplugVolumes,
        "DeclarativeHotplugVolumes feature gate not enabled, cannot define an empty CD-ROM disk",
    )
}];
pub(super) const FILE_SYSTEM: &[Gated] = &[Gated {
    uses: "a file system of a claim",
    ..of(
        FeatureGate::EnableVirtioFsStorageVolumes,
        "virtiofs is not allowed: virtiofs feature gate is not enabled for PVC",
    )
}];
pub(super) const GPU_CLAIM: &[Gated] = &[of(
    FeatureGate::GPUsWithDRA,
    "vmi.spec.domain.devices.gpus contains DRA enabled GPUs but feature gate is not enabled",
)];
pub(super) const HOST_DEVICE: &[Gated] =
    &[of(FeatureGate::HostDevices, "Host Devices feature gate is not enabled in kubevirt-config")];
pub(super) const HOST_DEVICE_CLAIM: &[Gated] = &[of(
    FeatureGate::HostDevicesWithDRA,
    "vmi.spec.domain.devices.hostDevices contains DRA enabled HostDevices but feature gate is not enabled",
)];
pub(super) const HOST_DISK: &[Gated] = &[of(FeatureGate::HostDisk, "HostDisk feature gate is not enabled")];
pub(super) const LAUNCH_SECURITY: &[Gated] = &[
    Gated {
        uses: "`sev` and `snp`",
        ..of(FeatureGate::WorkloadEncryptionSEV, "WorkloadEncryptionSEV feature gate is not enabled in kubevirt-config")
    },
    Gated {
        uses: "`tdx`",
        ..of(FeatureGate::WorkloadEncryptionTDX, "WorkloadEncryptionTDX feature gate is not enabled in kubevirt-config")
    },
];
pub(super) const METRICS_DEVICE: &[Gated] = &[of(
    FeatureGate::DownwardMetrics,
    "downwardMetrics virtio serial is not allowed: DownwardMetrics feature gate is not enabled",
)];
pub(super) const METRICS_DISK: &[Gated] = &[of(
    FeatureGate::DownwardMetrics,
    "downwardMetrics disks are not allowed: DownwardMetrics feature gate is not enabled.",
)];
pub(super) const NETWORK_CLAIM: &[Gated] = &[of(
    FeatureGate::NetworkDevicesWithDRA,
    "vmi.spec.networks contains DRA networks but NetworkDevicesWithDRA feature gate is not enabled",
)];
pub(super) const NUMA: &[Gated] = &[Gated {
    uses: "`guestMappingPassthrough`",
    ..of(FeatureGate::Numa, "NUMA feature gate is not enabled in kubevirt-config, invalid entry {field}")
}];
pub(super) const PASST: &[Gated] = &[of(FeatureGate::PasstBinding, "PasstBinding feature gate is not enabled")];
pub(super) const PORT_RANGES: &[Gated] = &[of(
    FeatureGate::PortRangesSpec,
    "portRanges is specified on interface but the PortRangesSpec feature gate is not enabled",
)];
pub(super) const REBOOT_POLICY: &[Gated] =
    &[of(FeatureGate::RebootPolicy, "RebootPolicy is specified but the RebootPolicy feature gate is not enabled")];
pub(super) const RESERVED_OVERHEAD: &[Gated] = &[of(
    FeatureGate::ReservedOverheadMemlock,
    "Reserved overhead memlock feature gate is not enabled in kubevirt-config",
)];
pub(super) const UTILITY_VOLUMES: &[Gated] =
    &[of(FeatureGate::UtilityVolumes, "UtilityVolumes feature gate is not enabled")];
pub(super) const VSOCK: &[Gated] = &[of(FeatureGate::Vsock, "VSOCK feature gate is not enabled in kubevirt-config")];
