//! When a running machine can be paused, reset, looked at or talked to.
//!
//! Pure checks, in the order and with the words that clients of the API know.

use api::{
    constants::condition, enums::VmiPhase, owner, subresources::FreezeUnfreezeTimeout, vm::spec::VirtualMachine,
    vmi::spec::VirtualMachineInstance,
};

use crate::error::{ApiError, Kind};

/// Place in the life of the machine.
pub fn phase(vmi: &VirtualMachineInstance) -> VmiPhase {
    vmi.status.as_ref().and_then(|status| status.phase.clone()).unwrap_or_default()
}

/// 409 for this machine.
pub fn conflict(vmi: &VirtualMachineInstance, message: impl Into<String>) -> ApiError {
    ApiError::conflict(Kind::VirtualMachineInstance, vmi.metadata.name.as_deref().unwrap_or_default(), message)
}

/// Whether a condition is true.
pub fn has_condition(vmi: &VirtualMachineInstance, name: &str) -> bool {
    let conditions = vmi.status.as_ref().map(|status| status.conditions.as_slice()).unwrap_or_default();
    conditions.iter().any(|condition| condition.type_ == name && condition.is_true())
}

/// The node to ask, for a machine that is in the hands of one.
pub fn node(vmi: &VirtualMachineInstance) -> Result<&str, ApiError> {
    match phase(vmi) {
        VmiPhase::Running | VmiPhase::Scheduled => {}
        other => {
            return Err(ApiError::BadRequest(format!(
                "Unable to connect to VirtualMachineInstance because phase is {other} instead of Running or Scheduled"
            )));
        }
    }
    let node = vmi.status.as_ref().and_then(|status| status.node_name.as_deref()).unwrap_or_default();
    if node.is_empty() {
        return Err(ApiError::BadRequest(format!("No virt-handler on node {node} found")));
    }
    Ok(node)
}

/// Whether the serial console can be opened.
pub fn check_console(vmi: &VirtualMachineInstance) -> Result<(), ApiError> {
    if vmi.spec.domain.devices.autoattach_serial_console == Some(false) {
        return Err(ApiError::BadRequest("No serial consoles are present.".to_owned()));
    }
    match phase(vmi) {
        VmiPhase::Failed => Err(conflict(vmi, "VMI is in failed status")),
        VmiPhase::Running => Ok(()),
        _ => Err(ApiError::BadRequest("VMI is not running".to_owned())),
    }
}

/// Whether the graphical console can be opened, or a picture of it be taken.
pub fn check_vnc(vmi: &VirtualMachineInstance) -> Result<(), ApiError> {
    if vmi.spec.domain.devices.autoattach_graphics_device == Some(false) {
        return Err(ApiError::BadRequest("No graphics devices are present.".to_owned()));
    }
    if phase(vmi) != VmiPhase::Running {
        return Err(ApiError::BadRequest("VMI is not running".to_owned()));
    }
    Ok(())
}

/// Whether the guest can be paused.
pub fn check_pause(vmi: &VirtualMachineInstance) -> Result<(), ApiError> {
    if phase(vmi) != VmiPhase::Running {
        return Err(conflict(vmi, "VM is not running"));
    }
    // A probe into a paused guest would fail, and the pod be restarted for it.
    if vmi.spec.liveness_probe.as_ref().is_some_and(|probe| probe.guest_agent_ping.is_none()) {
        return Err(ApiError::forbidden(
            Kind::VirtualMachineInstance,
            vmi.metadata.name.as_deref().unwrap_or_default(),
            "Pausing VMIs with a non-GuestAgentPing LivenessProbe is not supported",
        ));
    }
    if has_condition(vmi, condition::PAUSED) {
        return Err(conflict(vmi, "VMI is already paused"));
    }
    Ok(())
}

/// Whether the VM that the machine belongs to lets it be unpaused. There may be none.
pub fn check_unpause_of_vm(vm: Option<&VirtualMachine>) -> Result<(), ApiError> {
    match vm {
        Some(vm) if vm.status.as_ref().is_some_and(|status| status.snapshot_in_progress.is_some()) => {
            Err(ApiError::conflict(
                Kind::VirtualMachine,
                vm.metadata.name.as_deref().unwrap_or_default(),
                "VM snapshot is in progress",
            ))
        }
        _ => Ok(()),
    }
}

/// Whether the guest can be unpaused.
pub fn check_unpause(vmi: &VirtualMachineInstance) -> Result<(), ApiError> {
    if phase(vmi) != VmiPhase::Running {
        return Err(conflict(vmi, "VMI is not running"));
    }
    if !has_condition(vmi, condition::PAUSED) {
        return Err(conflict(vmi, "VMI is not paused"));
    }
    Ok(())
}

/// Whether the guest can be asked to reboot.
pub fn check_soft_reboot(vmi: &VirtualMachineInstance) -> Result<(), ApiError> {
    if phase(vmi) != VmiPhase::Running {
        return Err(conflict(vmi, "VM is not running"));
    }
    if has_condition(vmi, condition::PAUSED) {
        return Err(conflict(vmi, "VMI is paused"));
    }
    let acpi = vmi.spec.domain.features.as_ref().and_then(|features| features.acpi.enabled) != Some(false);
    if !has_condition(vmi, condition::AGENT_CONNECTED) && !acpi {
        return Err(conflict(vmi, "VMI neither have the agent connected nor the ACPI feature enabled"));
    }
    Ok(())
}

/// Whether the guest's file systems can be frozen.
pub fn check_freeze(vmi: &VirtualMachineInstance) -> Result<(), ApiError> {
    if phase(vmi) == VmiPhase::Running { Ok(()) } else { Err(conflict(vmi, "VM is not running")) }
}

/// Whether a request to freeze file systems says when they are to be thawed.
pub fn check_unfreeze_timeout(options: &FreezeUnfreezeTimeout) -> Result<(), ApiError> {
    let Some(timeout) = &options.unfreeze_timeout else {
        return Err(ApiError::BadRequest("Unfreeze timeout in freeze request is not set".to_owned()));
    };
    api::duration::parse(timeout)
        .map_err(|error| ApiError::BadRequest(format!("Unfreeze timeout in freeze request is not valid: {error}")))?;
    Ok(())
}

/// Whether the guest's file systems can be thawed.
pub fn check_unfreeze(vmi: &VirtualMachineInstance) -> Result<(), ApiError> {
    if phase(vmi) == VmiPhase::Running { Ok(()) } else { Err(conflict(vmi, "VMI is not running")) }
}

/// Whether the guest agent can be asked.
pub fn check_agent(vmi: &VirtualMachineInstance) -> Result<(), ApiError> {
    if phase(vmi) != VmiPhase::Running {
        return Err(conflict(vmi, "VMI is not running"));
    }
    if !has_condition(vmi, condition::AGENT_CONNECTED) {
        return Err(conflict(vmi, "VMI does not have guest agent connected"));
    }
    Ok(())
}

/// Whether a USB device of the client can be attached.
pub fn check_usb_redirection(vmi: &VirtualMachineInstance) -> Result<(), ApiError> {
    if vmi.spec.architecture.as_deref() == Some("s390x") {
        return Err(conflict(vmi, "No USB support on s390x"));
    }
    if vmi.spec.domain.devices.client_passthrough.is_none() {
        return Err(conflict(vmi, "Not configured with USB Redirection"));
    }
    if phase(vmi) != VmiPhase::Running {
        return Err(ApiError::BadRequest("VMI is not running".to_owned()));
    }
    Ok(())
}

/// Whether VSOCK ports can be connected to.
pub fn check_vsock(vmi: &VirtualMachineInstance) -> Result<(), ApiError> {
    if api::vsock::is_attached(vmi) { Ok(()) } else { Err(ApiError::BadRequest("VSOCK is not attached.".to_owned())) }
}

/// Whether the machine can be backed up.
pub fn check_backup(vmi: &VirtualMachineInstance) -> Result<(), ApiError> {
    if phase(vmi) == VmiPhase::Running { Ok(()) } else { Err(conflict(vmi, "VM is not running")) }
}

/// Whether a checkpoint can be made known again.
pub fn check_checkpoint(vmi: &VirtualMachineInstance) -> Result<(), ApiError> {
    let tracking = vmi.status.as_ref().and_then(|status| status.changed_block_tracking.as_ref());
    if tracking.is_some_and(|tracking| tracking.state == "Enabled") {
        Ok(())
    } else {
        Err(conflict(vmi, "ChangedBlockTracking is not enabled"))
    }
}

/// Whether a VM can be moved: it runs.
pub fn check_migrate(vm: &str, vmi: &VirtualMachineInstance) -> Result<(), ApiError> {
    if phase(vmi) == VmiPhase::Running {
        Ok(())
    } else {
        Err(ApiError::conflict(Kind::VirtualMachine, vm, "VM is not running"))
    }
}

/// Whether a VM's machine is of the VM and not a stranger of the same name.
pub fn check_owner(vm: &VirtualMachine, vmi: &VirtualMachineInstance) -> Result<(), ApiError> {
    if owner::is_controlled_by(&vmi.metadata, vm) {
        return Ok(());
    }
    let name = vm.metadata.name.as_deref().unwrap_or_default();
    Err(ApiError::Internal(format!("VMI {name} is not owned by the VM of its name")))
}

/// Whether a VM has a machine.
pub fn check_created(vm: &VirtualMachine) -> Result<(), ApiError> {
    if vm.status.as_ref().is_some_and(|status| status.created) {
        return Ok(());
    }
    let name = vm.metadata.name.as_deref().unwrap_or_default();
    Err(ApiError::conflict(Kind::VirtualMachine, name, "VMI is not started"))
}

/// Whether the guest can be reset: the node to ask, as [`node`], with words of its own.
pub fn check_reset(vmi: &VirtualMachineInstance) -> Result<&str, ApiError> {
    let phase = phase(vmi);
    node(vmi).map_err(|error| match error {
        ApiError::BadRequest(message) if phase != VmiPhase::Running => {
            ApiError::BadRequest(format!("Failed to reset non-running VMI with phase {phase}: {message}"))
        }
        other => other,
    })
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn vmi(spec: Value, status: Value) -> VirtualMachineInstance {
        serde_json::from_value(json!({
            "apiVersion": "kubevirt.io/v1",
            "kind": "VirtualMachineInstance",
            "metadata": {"name": "vmi", "namespace": "ns", "uid": "u1"},
            "spec": spec,
            "status": status,
        }))
        .unwrap()
    }

    fn plain(phase: &str) -> VirtualMachineInstance {
        vmi(json!({"domain": {"devices": {}}}), json!({"phase": phase, "nodeName": "node1"}))
    }

    fn with_conditions(names: &[&str]) -> VirtualMachineInstance {
        let conditions = names.iter().map(|name| json!({"type": name, "status": "True"})).collect::<Vec<_>>();
        vmi(json!({"domain": {"devices": {}}}), json!({"phase": "Running", "conditions": conditions}))
    }

    fn bad<T: std::fmt::Debug>(message: &str) -> Result<T, ApiError> {
        Err(ApiError::BadRequest(message.into()))
    }

    fn clash<T: std::fmt::Debug>(message: &str) -> Result<T, ApiError> {
        Err(ApiError::conflict(Kind::VirtualMachineInstance, "vmi", message))
    }

    #[test]
    fn node_is_asked_from_scheduled_to_running() {
        assert_eq!(node(&plain("Running")), Ok("node1"));
        assert_eq!(node(&plain("Scheduled")), Ok("node1"));
        for phase in ["Pending", "Scheduling", "Succeeded", "Failed"] {
            let message = format!(
                "Unable to connect to VirtualMachineInstance because phase is {phase} instead of Running or Scheduled"
            );
            assert_eq!(node(&plain(phase)), bad(&message));
        }
        let lost = vmi(json!({"domain": {"devices": {}}}), json!({"phase": "Running"}));
        assert_eq!(node(&lost), bad("No virt-handler on node  found"));
    }

    #[test]
    fn console_needs_a_running_guest_with_a_serial_port() {
        assert_eq!(check_console(&plain("Running")), Ok(()));
        assert_eq!(check_console(&plain("Scheduled")), bad("VMI is not running"));
        assert_eq!(check_console(&plain("Failed")), clash("VMI is in failed status"));
        let without =
            vmi(json!({"domain": {"devices": {"autoattachSerialConsole": false}}}), json!({"phase": "Running"}));
        assert_eq!(check_console(&without), bad("No serial consoles are present."));
    }

    #[test]
    fn vnc_needs_a_running_guest_with_graphics() {
        assert_eq!(check_vnc(&plain("Running")), Ok(()));
        assert_eq!(check_vnc(&plain("Failed")), bad("VMI is not running"));
        let without =
            vmi(json!({"domain": {"devices": {"autoattachGraphicsDevice": false}}}), json!({"phase": "Running"}));
        assert_eq!(check_vnc(&without), bad("No graphics devices are present."));
    }

    #[test]
    fn guest_is_paused_once_and_only_without_a_probe_into_it() {
        assert_eq!(check_pause(&plain("Running")), Ok(()));
        assert_eq!(check_pause(&plain("Scheduled")), clash("VM is not running"));
        assert_eq!(check_pause(&with_conditions(&["Paused"])), clash("VMI is already paused"));
        let probed =
            |probe: Value| vmi(json!({"domain": {"devices": {}}, "livenessProbe": probe}), json!({"phase": "Running"}));
        assert_eq!(check_pause(&probed(json!({"guestAgentPing": {}}))), Ok(()));
        assert_eq!(
            check_pause(&probed(json!({"tcpSocket": {"port": 80}}))),
            Err(ApiError::forbidden(
                Kind::VirtualMachineInstance,
                "vmi",
                "Pausing VMIs with a non-GuestAgentPing LivenessProbe is not supported"
            ))
        );
    }

    #[test]
    fn only_a_paused_guest_is_unpaused() {
        assert_eq!(check_unpause(&with_conditions(&["Paused"])), Ok(()));
        assert_eq!(check_unpause(&plain("Running")), clash("VMI is not paused"));
        assert_eq!(check_unpause(&plain("Failed")), clash("VMI is not running"));
        assert_eq!(check_unpause_of_vm(None), Ok(()));
        let vm = |status: Value| -> VirtualMachine {
            serde_json::from_value(json!({
                "apiVersion": "kubevirt.io/v1", "kind": "VirtualMachine", "metadata": {"name": "vm"},
                "spec": {"template": {}}, "status": status,
            }))
            .unwrap()
        };
        assert_eq!(check_unpause_of_vm(Some(&vm(json!({})))), Ok(()));
        assert_eq!(
            check_unpause_of_vm(Some(&vm(json!({"snapshotInProgress": "s"})))),
            Err(ApiError::conflict(Kind::VirtualMachine, "vm", "VM snapshot is in progress"))
        );
    }

    #[test]
    fn soft_reboot_needs_somebody_to_ask() {
        assert_eq!(check_soft_reboot(&plain("Running")), Ok(()));
        assert_eq!(check_soft_reboot(&plain("Pending")), clash("VM is not running"));
        assert_eq!(check_soft_reboot(&with_conditions(&["Paused"])), clash("VMI is paused"));
        let deaf = |conditions: Value| {
            vmi(
                json!({"domain": {"devices": {}, "features": {"acpi": {"enabled": false}}}}),
                json!({"phase": "Running", "conditions": conditions}),
            )
        };
        assert_eq!(
            check_soft_reboot(&deaf(json!([]))),
            clash("VMI neither have the agent connected nor the ACPI feature enabled")
        );
        assert_eq!(check_soft_reboot(&deaf(json!([{"type": "AgentConnected", "status": "True"}]))), Ok(()));
    }

    #[test]
    fn reset_says_what_phase_stood_in_the_way() {
        assert_eq!(check_reset(&plain("Running")), Ok("node1"));
        let Err(ApiError::BadRequest(message)) = check_reset(&plain("Pending")) else { panic!("accepted") };
        assert!(
            message.starts_with("Failed to reset non-running VMI with phase Pending: Unable to connect"),
            "{message}"
        );
    }

    #[test]
    fn agent_is_asked_while_it_is_connected() {
        assert_eq!(check_agent(&with_conditions(&["AgentConnected"])), Ok(()));
        assert_eq!(check_agent(&plain("Running")), clash("VMI does not have guest agent connected"));
        assert_eq!(check_agent(&plain("Scheduled")), clash("VMI is not running"));
    }

    #[test]
    fn freeze_needs_a_time_limit() {
        let asked = |timeout: &str| FreezeUnfreezeTimeout { unfreeze_timeout: Some(timeout.into()) };
        assert_eq!(check_unfreeze_timeout(&asked("5m0s")), Ok(()));
        assert_eq!(check_unfreeze_timeout(&asked("0s")), Ok(()));
        assert_eq!(
            check_unfreeze_timeout(&FreezeUnfreezeTimeout::default()),
            bad("Unfreeze timeout in freeze request is not set")
        );
        assert!(check_unfreeze_timeout(&asked("soon")).is_err());
        assert_eq!(check_freeze(&plain("Running")), Ok(()));
        assert_eq!(check_freeze(&plain("Scheduled")), clash("VM is not running"));
        assert_eq!(check_unfreeze(&plain("Running")), Ok(()));
        assert_eq!(check_unfreeze(&plain("Failed")), clash("VMI is not running"));
    }

    #[test]
    fn usb_and_vsock_need_their_devices() {
        let with = |devices: Value, phase: &str| vmi(json!({"domain": {"devices": devices}}), json!({"phase": phase}));
        let usb = json!({"clientPassthrough": {}});
        assert_eq!(check_usb_redirection(&with(usb.clone(), "Running")), Ok(()));
        assert_eq!(check_usb_redirection(&with(usb, "Scheduled")), bad("VMI is not running"));
        assert_eq!(check_usb_redirection(&plain("Running")), clash("Not configured with USB Redirection"));
        let s390x = vmi(json!({"architecture": "s390x", "domain": {"devices": {}}}), json!({}));
        assert_eq!(check_usb_redirection(&s390x), clash("No USB support on s390x"));
        assert_eq!(check_vsock(&with(json!({"autoattachVSOCK": true}), "Running")), Ok(()));
        assert_eq!(check_vsock(&plain("Running")), bad("VSOCK is not attached."));
    }

    #[test]
    fn machine_of_a_vm_is_told_from_a_stranger() {
        let vm: VirtualMachine = serde_json::from_value(json!({
            "apiVersion": "kubevirt.io/v1", "kind": "VirtualMachine",
            "metadata": {"name": "vmi", "namespace": "ns", "uid": "v1"},
            "spec": {"template": {}}, "status": {"created": true},
        }))
        .unwrap();
        let mut owned = plain("Running");
        assert!(check_owner(&vm, &owned).is_err());
        owned.metadata.owner_references = serde_json::from_value(json!([
            {"apiVersion": "kubevirt.io/v1", "kind": "VirtualMachine", "name": "vmi", "uid": "v1", "controller": true}
        ]))
        .unwrap();
        assert_eq!(check_owner(&vm, &owned), Ok(()));
        assert_eq!(check_created(&vm), Ok(()));
        let halted = VirtualMachine { status: None, ..vm };
        assert_eq!(check_created(&halted), Err(ApiError::conflict(Kind::VirtualMachine, "vmi", "VMI is not started")));
    }

    #[test]
    fn backups_and_moves_need_a_running_guest() {
        assert_eq!(check_backup(&plain("Scheduled")), clash("VM is not running"));
        assert_eq!(check_checkpoint(&plain("Running")), clash("ChangedBlockTracking is not enabled"));
        let tracked = vmi(json!({"domain": {"devices": {}}}), json!({"changedBlockTracking": {"state": "Enabled"}}));
        assert_eq!(check_checkpoint(&tracked), Ok(()));
        assert_eq!(
            check_migrate("vm", &plain("Scheduled")),
            Err(ApiError::conflict(Kind::VirtualMachine, "vm", "VM is not running"))
        );
    }
}
