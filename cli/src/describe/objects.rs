//! The objects from which the report is made.

use std::collections::BTreeSet;

use k8s_openapi::jiff::Timestamp;
use serde_json::Value;

/// The objects of a VM.
#[derive(Debug, Default)]
pub(super) struct Objects {
    /// Name of VM and VMI.
    pub name: String,
    /// Their namespace.
    pub namespace: String,
    /// The VM.
    pub vm: Option<Value>,
    /// The VMI.
    pub vmi: Option<Value>,
    /// DataVolumes of the volumes.
    pub data_volumes: Vec<Value>,
    /// Claims of the volumes.
    pub claims: Vec<Value>,
    /// Claims with its TPM and UEFI variables.
    pub state_claims: Vec<Value>,
    /// Snapshots, restores and clones of the VM.
    pub copies: Vec<(CopyKind, Value)>,
    /// Migrations of the VMI.
    pub migrations: Vec<Value>,
    /// Events about VM, VMI, pods, DataVolumes and claims.
    pub events: Vec<Value>,
    /// Kinds that could not be read, with the reason.
    pub unreadable: BTreeSet<String>,
    /// Time of the report.
    pub now: Timestamp,
}

impl Objects {
    /// Returns the spec in effect: that of the VMI, else the template.
    pub(super) fn spec(&self) -> &Value {
        match (&self.vmi, &self.vm) {
            (Some(vmi), _) => &vmi["spec"],
            (None, Some(vm)) => &vm["spec"]["template"]["spec"],
            (None, None) => &Value::Null,
        }
    }

    pub(super) fn vmi_status(&self) -> &Value {
        self.vmi.as_ref().map_or(&Value::Null, |vmi| &vmi["status"])
    }
}

/// A kind of objects that hold, restore or copy the data of VMs.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum CopyKind {
    Snapshot,
    Restore,
    Clone,
}

impl CopyKind {
    /// All kinds.
    pub(super) const ALL: [Self; 3] = [Self::Snapshot, Self::Restore, Self::Clone];

    /// Returns group with version, and plural.
    pub(super) const fn resource(self) -> (&'static str, &'static str) {
        match self {
            Self::Snapshot => ("snapshot.kubevirt.io/v1beta1", "virtualmachinesnapshots"),
            Self::Restore => ("snapshot.kubevirt.io/v1beta1", "virtualmachinerestores"),
            Self::Clone => ("clone.kubevirt.io/v1beta1", "virtualmachineclones"),
        }
    }

    /// Returns the kind.
    pub(super) const fn kind(self) -> &'static str {
        match self {
            Self::Snapshot => "VirtualMachineSnapshot",
            Self::Restore => "VirtualMachineRestore",
            Self::Clone => "VirtualMachineClone",
        }
    }

    /// Returns true if the object is about the VM of this name.
    pub(super) fn is_about(self, object: &Value, vm: &str) -> bool {
        let is_vm = |reference: &Value| reference["kind"] == "VirtualMachine" && reference["name"] == vm;
        match self {
            Self::Snapshot => is_vm(&object["spec"]["source"]),
            Self::Restore => is_vm(&object["spec"]["target"]),
            Self::Clone => is_vm(&object["spec"]["source"]) || made(object) == vm,
        }
    }
}

/// Returns the name of the VM that a clone makes.
pub(super) fn made(clone: &Value) -> &Value {
    let named = &clone["spec"]["target"]["name"];
    if named.is_string() { named } else { &clone["status"]["targetName"] }
}

/// Returns the items of a list; none if there is no list.
pub(super) fn array(value: &Value) -> &[Value] {
    value.as_array().map(Vec::as_slice).unwrap_or_default()
}

/// Returns the time since then, in the largest unit.
pub(super) fn age(then: Option<&str>, now: Timestamp) -> Option<String> {
    let then = then?.parse::<Timestamp>().ok()?;
    let seconds = now.duration_since(then).as_secs().max(0);
    Some(match seconds {
        0..120 => format!("{seconds}s"),
        120..7200 => format!("{}m", seconds / 60),
        7200..172_800 => format!("{}h", seconds / 3600),
        _ => format!("{}d", seconds / 86_400),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ages_have_one_unit() {
        let now = "2026-11-29T06:00:00Z".parse().unwrap();
        for (then, expected) in [
            ("2026-11-29T05:59:01Z", Some("59s")),
            ("2026-11-29T05:50:00.123456Z", Some("9m")),
            ("2026-11-29T01:00:00Z", Some("5h")),
            ("2026-11-20T06:00:00Z", Some("9d")),
            ("2026-11-29T07:00:00Z", Some("0s")),
            ("soon", None),
        ] {
            assert_eq!(age(Some(then), now).as_deref(), expected, "{then}");
        }
    }
}
