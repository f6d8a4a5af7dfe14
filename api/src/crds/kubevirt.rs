//! CRDs of kubevirt.io: VMs, VMIs, replica sets, and the installation.

use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use kube::CustomResourceExt;
use serde_json::{Value, json};

use super::{CONDITION, CrdError, Definition, OLD, Rule, V1ALPHA3_WARNING, embedded_metadata, migration};
use crate::{KubeVirt, VirtualMachine, VirtualMachineInstance, VirtualMachineInstanceReplicaSet};

/// Default of an optional name in a reference, as in Kubernetes' own types. Admission reports a missing name.
const EMPTY: fn() -> Value = || json!({"default": ""});

/// Rules below a VMI spec.
pub(super) const VMI_SPEC: &[Rule] = &[
    ("accessCredentials", || json!({"maxItems": 256})),
    ("networks", || json!({"maxItems": 256})),
    ("volumes", || json!({"maxItems": 256})),
    (
        "utilityVolumes",
        || json!({"maxItems": 256, "x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["name"]}),
    ),
    ("resourceClaims", || json!({"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["name"]})),
    (
        "topologySpreadConstraints",
        || json!({"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["topologyKey", "whenUnsatisfiable"]}),
    ),
    (
        "accessCredentials[].sshPublicKey.propagationMethod.qemuGuestAgent.users",
        || json!({"x-kubernetes-list-type": "set"}),
    ),
    ("domain.devices.disks", || json!({"maxItems": 256})),
    ("domain.devices.interfaces", || json!({"maxItems": 256})),
    ("domain.memory.reservedOverhead.memLock", || json!({"enum": ["NotRequired", "Required"]})),
    ("domain.rebootPolicy", || json!({"enum": ["Reboot", "Terminate"]})),
    ("domain.clock", || json!({"x-kubernetes-preserve-unknown-fields": true})),
    ("volumes[].cloudInitConfigDrive.networkDataSecretRef.name", EMPTY),
    ("volumes[].cloudInitConfigDrive.secretRef.name", EMPTY),
    ("volumes[].cloudInitNoCloud.networkDataSecretRef.name", EMPTY),
    ("volumes[].cloudInitNoCloud.secretRef.name", EMPTY),
    ("volumes[].configMap.name", EMPTY),
    ("volumes[].sysprep.configMap.name", EMPTY),
    ("volumes[].sysprep.secret.name", EMPTY),
    ("volumes[].containerPath.path", || {
        json!({
            "maxLength": 4096,
            "x-kubernetes-validations": [
                {"rule": "self.startsWith('/')", "message": "path must be absolute (start with '/')"},
                {"rule": "!self.contains('..')", "message": "path must not contain '..'"},
            ],
        })
    }),
    ("volumes[].containerPath.readOnly", || {
        json!({
            "default": true,
            "x-kubernetes-validations": [
                {"rule": "self == true", "message": "readOnly must be true, write access is not supported"},
            ],
        })
    }),
];

/// Pattern of a file system overhead.
pub(super) const CLAIM_OVERHEAD: fn() -> Value = || json!({"pattern": r"^(0(?:\.\d{1,3})?|1)$"});

/// Bounds of an unsigned 32-bit number.
const WORD: fn() -> Value = || json!({"minimum": 0, "maximum": u32::MAX});

const VMI_STATUS: &[Rule] = &[
    ("VSOCKCID", WORD),
    ("kernelBootStatus.initrdInfo.checksum", WORD),
    ("kernelBootStatus.kernelInfo.checksum", WORD),
    ("volumeStatus[].containerDiskVolume.checksum", WORD),
    ("migratedVolumes[].sourcePVCInfo.filesystemOverhead", CLAIM_OVERHEAD),
    ("migratedVolumes[].destinationPVCInfo.filesystemOverhead", CLAIM_OVERHEAD),
    ("volumeStatus[].persistentVolumeClaimInfo.filesystemOverhead", CLAIM_OVERHEAD),
];

/// Rules below a VM spec, except those of its template's spec.
pub(super) const VM_SPEC: &[Rule] = &[
    ("template.metadata", embedded_metadata),
    ("dataVolumeTemplates[]", || json!({"nullable": true})),
    ("dataVolumeTemplates[].metadata", embedded_metadata),
    ("dataVolumeTemplates[].status", || json!({"nullable": true})),
    ("dataVolumeTemplates[].spec.contentType", || json!({"enum": ["kubevirt", "archive"]})),
];

pub(super) const VM_STATUS: &[Rule] = &[
    ("printableStatus", || json!({"default": "Stopped"})),
    ("volumeUpdateState.volumeMigrationState.migratedVolumes[].sourcePVCInfo.filesystemOverhead", CLAIM_OVERHEAD),
    ("volumeUpdateState.volumeMigrationState.migratedVolumes[].destinationPVCInfo.filesystemOverhead", CLAIM_OVERHEAD),
];

const REPLICA_SET_SPEC: &[Rule] = &[("template.metadata", embedded_metadata)];

const KUBEVIRT_SPEC: &[Rule] = &[
    ("configuration.developerConfiguration.memoryOvercommit", || json!({"minimum": 10})),
    ("configuration.hypervisors", || json!({"maxItems": 1})),
    ("configuration.hypervisors[].name", || json!({"enum": ["kvm", "hyperv-direct"]})),
    ("configuration.instancetype.referencePolicy", || json!({"enum": ["reference", "expand", "expandAll"]})),
    ("configuration.roleAggregationStrategy", || json!({"enum": ["AggregateToDefault", "Manual"]})),
    (
        "configuration.tlsConfiguration.minTLSVersion",
        || json!({"enum": ["VersionTLS10", "VersionTLS11", "VersionTLS12", "VersionTLS13"]}),
    ),
    ("configuration.tlsConfiguration.ciphers", || json!({"x-kubernetes-list-type": "set"})),
    ("configuration.vmRolloutStrategy", || json!({"enum": ["Stage", "LiveUpdate"]})),
    ("configuration.migrations.maxDowntimeMs", || json!({"minimum": 1, "maximum": 2_000_000})),
    (
        "configuration.supportContainerResources",
        || json!({"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["type"]}),
    ),
    ("configuration.confidentialCompute.tdx.attestation.enforced", || json!({"default": false})),
    (
        "configuration.confidentialCompute.tdx.attestation.qgsSocketPath",
        || json!({"default": "/var/run/tdx-qgs/qgs.socket"}),
    ),
    ("imagePullSecrets[].name", EMPTY),
    ("customizeComponents.patches[].resourceName", || json!({"minLength": 1})),
    ("customizeComponents.patches[].resourceType", || json!({"minLength": 1})),
];

/// Returns the CRDs of the group.
pub(super) fn definitions() -> Result<Vec<CustomResourceDefinition>, CrdError> {
    Ok(vec![
        Definition::new(&VirtualMachine::crd())?
            .rules("spec", VM_SPEC)?
            .rules("spec.template.spec", VMI_SPEC)?
            .rules("status", CONDITION)?
            .rules("status", VM_STATUS)?
            .deprecated_version(OLD, V1ALPHA3_WARNING)
            .finish()?,
        Definition::new(&VirtualMachineInstance::crd())?
            .rules("spec", VMI_SPEC)?
            .rules("status", CONDITION)?
            .rules("status", VMI_STATUS)?
            .rules("status.migrationState.migrationConfiguration", migration::OPTIONS)?
            .without_status_subresource()
            .deprecated_version(OLD, V1ALPHA3_WARNING)
            .finish()?,
        Definition::new(&VirtualMachineInstanceReplicaSet::crd())?
            .rules("spec", REPLICA_SET_SPEC)?
            .rules("spec.template.spec", VMI_SPEC)?
            .rules("status", CONDITION)?
            .rules("", &[("status", || json!({"nullable": true}))])?
            .undescribed("spec.template.spec")?
            .deprecated_version(OLD, V1ALPHA3_WARNING)
            .finish()?,
        Definition::new(&KubeVirt::crd())?
            .rules("spec", KUBEVIRT_SPEC)?
            .rules("status", CONDITION)?
            .label("operator.kubevirt.io")
            .deprecated_version(OLD, V1ALPHA3_WARNING)
            .finish()?,
    ])
}
