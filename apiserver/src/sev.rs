//! When a guest with AMD SEV can be attested.
//!
//! The owner of the guest fetches the node's certificates, hands in a session, measures what was loaded and, if it is what
//! it should be, hands in a secret. Here is checked whether the machine is at the right step.

use api::{
    config::ClusterConfig,
    constants::condition,
    enums::VmiPhase,
    subresources::SevSessionOptions,
    vmi::{security::Sev, spec::VirtualMachineInstance},
};

use crate::{
    error::ApiError,
    instance::{conflict, has_condition, phase},
};

/// Whether the cluster offers SEV at all.
pub fn check_gate(config: &ClusterConfig) -> Result<(), ApiError> {
    if config.enabled("WorkloadEncryptionSEV") {
        Ok(())
    } else {
        Err(ApiError::BadRequest("'WorkloadEncryptionSEV' feature gate is not enabled".to_owned()))
    }
}

fn sev(vmi: &VirtualMachineInstance) -> Option<&Sev> {
    vmi.spec.domain.launch_security.as_ref()?.sev.as_ref()
}

fn check_attestation(vmi: &VirtualMachineInstance) -> Result<(), ApiError> {
    if sev(vmi).is_some_and(|sev| sev.attestation.is_some()) {
        Ok(())
    } else {
        Err(conflict(vmi, "Attestation not requested for VMI"))
    }
}

fn check_paused(vmi: &VirtualMachineInstance) -> Result<(), ApiError> {
    if has_condition(vmi, condition::PAUSED) { Ok(()) } else { Err(conflict(vmi, "VMI is not paused")) }
}

/// Whether the certificate chain can be fetched: the machine has a node.
pub fn check_cert_chain(vmi: &VirtualMachineInstance) -> Result<(), ApiError> {
    if !matches!(phase(vmi), VmiPhase::Scheduled | VmiPhase::Running) {
        return Err(conflict(vmi, "VMI is not assigned to a node yet"));
    }
    check_attestation(vmi)
}

/// Whether the launch can be measured, or a secret be handed in: the guest waits at its first instruction.
pub fn check_launched(vmi: &VirtualMachineInstance) -> Result<(), ApiError> {
    if phase(vmi) != VmiPhase::Running {
        return Err(conflict(vmi, "VMI is not running"));
    }
    check_attestation(vmi)?;
    check_paused(vmi)
}

/// Whether a session can be handed in: the machine has a node and no session.
pub fn check_session(vmi: &VirtualMachineInstance, options: &SevSessionOptions) -> Result<(), ApiError> {
    if options.session.is_empty() {
        return Err(ApiError::BadRequest("Session blob is required".to_owned()));
    }
    if options.dh_cert.is_empty() {
        return Err(ApiError::BadRequest("DH cert is required".to_owned()));
    }
    if phase(vmi) != VmiPhase::Scheduled {
        return Err(conflict(vmi, "VMI is not in Scheduled phase"));
    }
    check_attestation(vmi)?;
    let set = |text: Option<&String>| text.is_some_and(|text| !text.is_empty());
    if sev(vmi).is_some_and(|sev| set(sev.session.as_ref()) || set(sev.dh_cert.as_ref())) {
        return Err(conflict(vmi, "Session already defined"));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;
    use crate::error::Kind;

    fn vmi(phase: &str, sev: Value, paused: bool) -> VirtualMachineInstance {
        let conditions = if paused { json!([{"type": "Paused", "status": "True"}]) } else { json!([]) };
        serde_json::from_value(json!({
            "apiVersion": "kubevirt.io/v1", "kind": "VirtualMachineInstance", "metadata": {"name": "vmi"},
            "spec": {"domain": {"devices": {}, "launchSecurity": {"sev": sev}}},
            "status": {"phase": phase, "conditions": conditions},
        }))
        .unwrap()
    }

    fn clash(message: &str) -> Result<(), ApiError> {
        Err(ApiError::conflict(Kind::VirtualMachineInstance, "vmi", message))
    }

    #[test]
    fn each_step_has_its_time() {
        let attested = json!({"attestation": {}});
        assert_eq!(check_cert_chain(&vmi("Scheduled", attested.clone(), false)), Ok(()));
        assert_eq!(
            check_cert_chain(&vmi("Pending", attested.clone(), false)),
            clash("VMI is not assigned to a node yet")
        );
        assert_eq!(check_cert_chain(&vmi("Running", json!({}), false)), clash("Attestation not requested for VMI"));
        assert_eq!(check_launched(&vmi("Running", attested.clone(), true)), Ok(()));
        assert_eq!(check_launched(&vmi("Running", attested.clone(), false)), clash("VMI is not paused"));
        assert_eq!(check_launched(&vmi("Scheduled", attested, true)), clash("VMI is not running"));
    }

    #[test]
    fn session_is_handed_in_once() {
        let options = SevSessionOptions { session: "a".into(), dh_cert: "b".into() };
        let attested = json!({"attestation": {}});
        assert_eq!(check_session(&vmi("Scheduled", attested.clone(), false), &options), Ok(()));
        assert_eq!(
            check_session(&vmi("Running", attested.clone(), false), &options),
            clash("VMI is not in Scheduled phase")
        );
        let defined = json!({"attestation": {}, "session": "x"});
        assert_eq!(check_session(&vmi("Scheduled", defined, false), &options), clash("Session already defined"));
        for (options, message) in [
            (SevSessionOptions::default(), "Session blob is required"),
            (SevSessionOptions { session: "a".into(), ..Default::default() }, "DH cert is required"),
        ] {
            let found = check_session(&vmi("Scheduled", attested.clone(), false), &options);
            assert_eq!(found, Err(ApiError::BadRequest(message.into())));
        }
    }

    #[test]
    fn gate_is_on_unless_turned_off() {
        assert_eq!(check_gate(&ClusterConfig::default()), Ok(()));
        let off = ClusterConfig { disabled_feature_gates: vec!["WorkloadEncryptionSEV".into()], ..Default::default() };
        assert!(check_gate(&off).is_err());
    }
}
