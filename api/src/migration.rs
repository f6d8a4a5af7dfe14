//! VirtualMachineInstanceMigration: a live migration of a VMI to another node.

use std::collections::BTreeMap;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use kube::CustomResource;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::{Condition, enums::MigrationPhase, vmi::migration::VirtualMachineInstanceMigrationState};

/// A live migration of a VMI.
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
    doc = "A live migration of a VMI to another node.",
    status = "VirtualMachineInstanceMigrationStatus",
    printcolumn = r#"{"name":"Phase","type":"string","jsonPath":".status.phase"}"#,
    printcolumn = r#"{"name":"VMI","type":"string","jsonPath":".spec.vmiName"}"#
)]
#[serde(rename_all = "camelCase")]
pub struct VirtualMachineInstanceMigrationSpec {
    /// Node labels required in addition to the node selector of the VMI. The VMI's value takes precedence for a label
    /// in both, so this restricts the choice of nodes and never extends it.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub added_node_selector: BTreeMap<String, String>,
    /// Queue priority: `system-critical`, `user-triggered` or `system-maintenance`. Only virt-controller may set it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub priority: Option<String>,
    /// Makes this object the receiving side of a migration between clusters or namespaces.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub receive: Option<VirtualMachineInstanceMigrationTarget>,
    /// Makes this object the sending side of a migration between clusters or namespaces.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub send_to: Option<VirtualMachineInstanceMigrationSource>,
    /// VMI to migrate, in the namespace of this object. Required by admission.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub vmi_name: Option<String>,
}

/// The sending side of a migration.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct VirtualMachineInstanceMigrationSource {
    /// Address and port of the receiving side's synchronization service.
    #[serde(rename = "connectURL")]
    pub connect_url: String,
    /// Name shared by both sides.
    #[serde(rename = "migrationID")]
    pub migration_id: String,
}

/// The receiving side of a migration.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct VirtualMachineInstanceMigrationTarget {
    /// Name shared by both sides.
    #[serde(rename = "migrationID")]
    pub migration_id: String,
}

/// Priority of a migration in the queue. The order of the variants is the order of the queue.
#[derive(Clone, Copy, Debug, Default, Eq, Ord, PartialEq, PartialOrd)]
pub enum Priority {
    /// The migration must not wait: its node is drained, or its launcher is outdated.
    SystemCritical,
    /// A user waits for the migration.
    UserTriggered,
    /// The migration improves the distribution of VMIs.
    SystemMaintenance,
    /// No priority is set.
    #[default]
    Unset,
}

impl Priority {
    /// Returns the priority on the wire.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::SystemCritical => "system-critical",
            Self::UserTriggered => "user-triggered",
            Self::SystemMaintenance => "system-maintenance",
            Self::Unset => "",
        }
    }
}

/// Observed state of a migration.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct VirtualMachineInstanceMigrationStatus {
    /// Conditions, one per type.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub conditions: Vec<Condition>,
    /// State of the migration, as in the status of the VMI.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub migration_state: Option<VirtualMachineInstanceMigrationState>,
    /// Phase of the migration.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub phase: Option<MigrationPhase>,
    /// Start time of each phase.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub phase_transition_timestamps: Vec<VirtualMachineInstanceMigrationPhaseTransitionTimestamp>,
    /// Addresses with ports of the synchronization service for the other side, in order of preference.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub synchronization_addresses: Vec<String>,
}

/// Start time of a phase.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct VirtualMachineInstanceMigrationPhaseTransitionTimestamp {
    /// The phase.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub phase: Option<MigrationPhase>,
    /// Start time.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub phase_transition_timestamp: Option<Time>,
}

impl VirtualMachineInstanceMigration {
    /// Returns true if the migration has ended.
    pub fn is_final(&self) -> bool {
        self.phase().is_final()
    }

    /// Returns the phase.
    pub fn phase(&self) -> &MigrationPhase {
        const UNSET: &MigrationPhase = &MigrationPhase::Unset;
        self.status.as_ref().and_then(|status| status.phase.as_ref()).unwrap_or(UNSET)
    }

    /// Returns the priority. Unknown ones count as unset.
    pub fn priority(&self) -> Priority {
        let known = [Priority::SystemCritical, Priority::UserTriggered, Priority::SystemMaintenance];
        let word = self.spec.priority.as_deref().unwrap_or_default();
        known.into_iter().find(|priority| priority.as_str() == word).unwrap_or_default()
    }

    /// Returns true if the condition of this type has the status `True`.
    pub fn has_condition(&self, kind: &str) -> bool {
        let conditions = self.status.iter().flat_map(|status| &status.conditions);
        conditions.into_iter().any(|condition| condition.type_ == kind && condition.is_true())
    }
}
