//! The steps of the attestation of a guest with AMD SEV.
//!
//! The guest's owner fetches the node's certificates, sets up a session, reads the launch measurement and, if it is correct,
//! injects a secret.

use api::{VirtualMachineInstance, config::ClusterConfig, constants::condition, vmi::security::Sev};

use super::vmi_checks::{check_running, conflict};
use crate::requests::error::ApiError;

/// The error of all requests that pass the checks.
pub(crate) const NOT_AVAILABLE: ApiError = ApiError::NotAvailable("attestation");

/// Rejects all requests while the feature gate is off.
pub(crate) fn check_gate(config: &ClusterConfig) -> Result<(), ApiError> {
    if config.enabled(api::FeatureGate::WorkloadEncryptionSEV) {
        Ok(())
    } else {
        Err(ApiError::BadRequest("'WorkloadEncryptionSEV' feature gate is not enabled".to_owned()))
    }
}

/// Returns the SEV settings of a VMI.
pub(crate) fn sev(vmi: &VirtualMachineInstance) -> Option<&Sev> {
    vmi.spec.domain.launch_security.as_ref()?.sev.as_ref()
}

/// Rejects a VMI without attestation.
pub(crate) fn check_attestation(vmi: &VirtualMachineInstance) -> Result<(), ApiError> {
    if sev(vmi).is_some_and(|sev| sev.attestation.is_some()) {
        Ok(())
    } else {
        Err(conflict(vmi, "Attestation not requested for VMI"))
    }
}

fn check_paused(vmi: &VirtualMachineInstance) -> Result<(), ApiError> {
    if vmi.has_true(condition::PAUSED) { Ok(()) } else { Err(conflict(vmi, "VMI is not paused")) }
}

/// Rejects a guest that is not paused at its first instruction.
pub(crate) fn check_launched(vmi: &VirtualMachineInstance) -> Result<(), ApiError> {
    check_running(vmi, "VMI is not running")?;
    check_attestation(vmi)?;
    check_paused(vmi)
}

#[cfg(test)]
pub(crate) mod tests {
    use serde_json::{Value, json};

    use super::*;
    use crate::subresources::common::testing;

    /// Returns a VMI with SEV.
    pub(crate) fn vmi(phase: &str, sev: Value, paused: bool) -> VirtualMachineInstance {
        let conditions = if paused { json!([{"type": "Paused", "status": "True"}]) } else { json!([]) };
        testing::vmi(
            json!({"domain": {"devices": {}, "launchSecurity": {"sev": sev}}}),
            json!({"phase": phase, "conditions": conditions}),
        )
    }

    #[test]
    fn launched_guest_is_paused() {
        let attested = json!({"attestation": {}});
        assert_eq!(check_launched(&vmi("Running", attested.clone(), true)), Ok(()));
        assert_eq!(check_launched(&vmi("Running", attested.clone(), false)), testing::conflict("VMI is not paused"));
        assert_eq!(check_launched(&vmi("Scheduled", attested, true)), testing::conflict("VMI is not running"));
    }

    #[test]
    fn gate_is_on_unless_turned_off() {
        assert_eq!(check_gate(&ClusterConfig::default()), Ok(()));
        let off = ClusterConfig { disabled_feature_gates: vec!["WorkloadEncryptionSEV".into()], ..Default::default() };
        assert!(check_gate(&off).is_err());
    }
}
