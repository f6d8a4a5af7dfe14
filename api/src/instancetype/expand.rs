//! Expands a VM: writes its instance type and preference into its template.

use thiserror::Error;

use super::{apply, prefer, preference::VirtualMachinePreferenceSpec, spec::VirtualMachineInstancetypeSpec};
use crate::{VirtualMachine, vmi::spec::VirtualMachineInstanceSpec};

/// Path of the VMI spec in a VM.
pub const TEMPLATE: &str = "spec.template.spec";

/// Reasons why a VM cannot be expanded.
#[derive(Clone, Debug, Eq, Error, PartialEq)]
pub enum ExpandError<E> {
    /// The VM sets fields of its instance type.
    #[error("VM field(s) {0} conflicts with selected instance type")]
    Conflicts(apply::Conflicts),
    /// The defaults of the cluster cannot be applied.
    #[error("{0}")]
    Defaults(E),
}

/// A function that applies defaults to a VMI spec.
pub type SetDefaults<'a, E> = &'a dyn Fn(&mut VirtualMachineInstanceSpec) -> Result<(), E>;

/// Returns the VM with its instance type and preference written into its template and without references to them. A VM
/// without references is returned unchanged.
///
/// `attach` adds default disks and the default network, so that preferences apply to them. `complete` applies the other
/// defaults afterwards.
pub fn expand<E>(
    vm: &VirtualMachine,
    instancetype: Option<&VirtualMachineInstancetypeSpec>,
    preference: Option<&VirtualMachinePreferenceSpec>,
    attach: SetDefaults<'_, E>,
    complete: SetDefaults<'_, E>,
) -> Result<VirtualMachine, ExpandError<E>> {
    let mut expanded = vm.clone();
    if vm.spec.instancetype.is_none() && vm.spec.preference.is_none() {
        return Ok(expanded);
    }
    let template = &mut expanded.spec.template;
    let spec = template.spec.get_or_insert_default();
    prepare(preference, spec);
    attach(spec).map_err(ExpandError::Defaults)?;
    apply::apply(TEMPLATE, instancetype, preference, spec, &mut template.metadata).map_err(ExpandError::Conflicts)?;
    complete(spec).map_err(ExpandError::Defaults)?;
    expanded.spec.instancetype = None;
    expanded.spec.preference = None;
    if let Some(status) = &mut expanded.status {
        status.instancetype_ref = None;
        status.preference_ref = None;
    }
    Ok(expanded)
}

/// Decides on automatically attached devices, which must be known before they are added.
pub fn prepare(preference: Option<&VirtualMachinePreferenceSpec>, spec: &mut VirtualMachineInstanceSpec) {
    if let Some(preference) = preference {
        prefer::apply_autoattach(preference, &mut spec.domain.devices);
    }
}

#[cfg(test)]
mod tests {
    use std::fmt;

    use serde_json::{Value, json};

    use super::*;
    use crate::vmi::{disks::Disk, memory::Memory};

    fn vm(spec: Value) -> VirtualMachine {
        serde_json::from_value(json!({
            "apiVersion": "kubevirt.io/v1", "kind": "VirtualMachine", "metadata": {"name": "v"}, "spec": spec,
            "status": {"instancetypeRef": {"name": "c"}, "preferenceRef": {"name": "p"}, "printableStatus": "Stopped"},
        }))
        .unwrap()
    }

    fn attach(spec: &mut VirtualMachineInstanceSpec) -> Result<(), fmt::Error> {
        spec.domain.devices.disks.push(Disk { name: "root".to_owned(), ..Disk::default() });
        Ok(())
    }

    fn complete(spec: &mut VirtualMachineInstanceSpec) -> Result<(), fmt::Error> {
        spec.domain.memory.get_or_insert_with(Memory::default);
        spec.architecture.get_or_insert_with(|| "amd64".to_owned());
        Ok(())
    }

    #[test]
    fn expanded_vm_contains_all_fields_and_no_references() {
        let class = serde_json::from_value(json!({"cpu": {"guest": 2}, "memory": {"guest": "1Gi"}})).unwrap();
        let preference = serde_json::from_value(json!({
            "annotations": {"a": "b"},
            "devices": {"preferredDiskBus": "sata", "preferredAutoattachMemBalloon": false},
        }))
        .unwrap();
        let vm = vm(json!({
            "instancetype": {"name": "c"}, "preference": {"name": "p"}, "runStrategy": "Always",
            "template": {"spec": {"domain": {"devices": {}}}},
        }));
        let expanded = expand(&vm, Some(&class), Some(&preference), &attach, &complete).unwrap();
        let expanded = serde_json::to_value(&expanded).unwrap();
        assert_eq!(
            expanded["spec"],
            json!({
                "runStrategy": "Always",
                "template": {
                    "metadata": {"annotations": {"a": "b"}},
                    "spec": {
                        "architecture": "amd64",
                        "domain": {
                            "cpu": {"sockets": 2, "cores": 1, "threads": 1},
                            "devices": {"autoattachMemBalloon": false, "disks": [{"name": "root", "disk": {"bus": "sata"}}]},
                            "memory": {"guest": "1Gi"}, "resources": {},
                        },
                    },
                },
            })
        );
        assert_eq!(expanded["status"], json!({"printableStatus": "Stopped"}));
    }

    #[test]
    fn vm_without_references_is_unchanged_and_conflicts_are_reported() {
        let plain = vm(json!({"template": {"spec": {"domain": {"devices": {}}}}}));
        assert_eq!(expand(&plain, None, None, &attach, &complete), Ok(plain.clone()));
        let class = serde_json::from_value(json!({"cpu": {"guest": 2}, "memory": {"guest": "1Gi"}})).unwrap();
        let vm = vm(json!({
            "instancetype": {"name": "c"},
            "template": {"spec": {"domain": {"cpu": {"cores": 2}, "memory": {"guest": "1Gi"}, "devices": {}}}},
        }));
        let error = expand(&vm, Some(&class), None, &attach, &complete).unwrap_err();
        assert_eq!(
            error.to_string(),
            "VM field(s) spec.template.spec.domain.cpu.cores, spec.template.spec.domain.memory.guest conflicts with selected instance type"
        );
    }
}
