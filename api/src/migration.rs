//! VirtualMachineInstanceMigration: one move of a running machine to another node.

use std::collections::BTreeMap;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use kube::CustomResource;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::{Condition, enums::MigrationPhase, vmi::migration::VirtualMachineInstanceMigrationState};

/// One move of a running machine.
#[derive(Clone, CustomResource, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[kube(
    group = "kubevirt.io",
    version = "v1",
    kind = "VirtualMachineInstanceMigration",
    plural = "virtualmachineinstancemigrations",
    singular = "virtualmachineinstancemigration",
    shortname = "vmim",
    shortname = "vmims",
    category = "all",
    namespaced,
    derive = "Default",
    derive = "PartialEq",
    doc = "One move of a running machine to another node.",
    status = "VirtualMachineInstanceMigrationStatus",
    printcolumn = r#"{"name":"Phase","type":"string","jsonPath":".status.phase"}"#,
    printcolumn = r#"{"name":"VMI","type":"string","jsonPath":".spec.vmiName"}"#
)]
#[serde(rename_all = "camelCase")]
pub struct VirtualMachineInstanceMigrationSpec {
    /// Node labels asked for besides those of the machine. Where both name a label, the machine's value holds, so this
    /// narrows the choice of nodes and never widens it.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub added_node_selector: BTreeMap<String, String>,
    /// Place in the queue: `system-critical`, `user-triggered` or `system-maintenance`. Set by virt-controller alone.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub priority: Option<String>,
    /// Makes this the receiving half of a move between clusters or namespaces.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub receive: Option<VirtualMachineInstanceMigrationTarget>,
    /// Makes this the sending half of a move between clusters or namespaces.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub send_to: Option<VirtualMachineInstanceMigrationSource>,
    /// Machine to move, in the namespace of this object. Required by admission.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub vmi_name: Option<String>,
}

/// The sending half of a move.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct VirtualMachineInstanceMigrationSource {
    /// Address and port of the receiving side's synchronization service.
    #[serde(rename = "connectURL")]
    pub connect_url: String,
    /// Name both halves share.
    #[serde(rename = "migrationID")]
    pub migration_id: String,
}

/// The receiving half of a move.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct VirtualMachineInstanceMigrationTarget {
    /// Name both halves share.
    #[serde(rename = "migrationID")]
    pub migration_id: String,
}

/// What is observed of a move.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct VirtualMachineInstanceMigrationStatus {
    /// Conditions, one entry a type.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub conditions: Vec<Condition>,
    /// State of the copying, as on the machine.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub migration_state: Option<VirtualMachineInstanceMigrationState>,
    /// How far it is.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub phase: Option<MigrationPhase>,
    /// When each phase began.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub phase_transition_timestamps: Vec<VirtualMachineInstanceMigrationPhaseTransitionTimestamp>,
    /// Addresses with ports where the other half reaches the synchronization service; the first is the preferred.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub synchronization_addresses: Vec<String>,
}

/// When a phase began.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct VirtualMachineInstanceMigrationPhaseTransitionTimestamp {
    /// The phase.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub phase: Option<MigrationPhase>,
    /// When it began.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub phase_transition_timestamp: Option<Time>,
}

impl VirtualMachineInstanceMigration {
    /// Whether the move is over, well or not.
    pub fn is_final(&self) -> bool {
        let phase = self.status.as_ref().and_then(|status| status.phase.as_ref());
        phase.is_some_and(MigrationPhase::is_final)
    }
}
