//! `virtualmachineinstances/sev/setupsession`: sets up the SEV session of a guest.

use api::{VirtualMachineInstance, enums::VmiPhase, subresources::SevSessionOptions};
use axum::{body::Body, response::Response};
use http::Request;

use super::common::{
    call::Call,
    schema, sev,
    specification::{Answer, Specification, VMIS},
    vmi_checks::{conflict, phase},
};
use crate::requests::error::ApiError;

pub(super) static SPECIFICATION: Specification = Specification {
    options: Some(schema::options::<SevSessionOptions>),
    check_config: sev::check_gate,
    operation: "SEVSetupSession",
    description: "Set the SEV session parameters",
    ..Specification::put(VMIS, "sev/setupsession", Answer::Accepted, |call, request| Box::pin(serve(call, request)))
};

/// Rejects a VMI that is not scheduled or has a session.
fn decide(vmi: &VirtualMachineInstance, options: &SevSessionOptions) -> Result<(), ApiError> {
    if options.session.is_empty() {
        return Err(ApiError::BadRequest("Session blob is required".to_owned()));
    }
    if options.dh_cert.is_empty() {
        return Err(ApiError::BadRequest("DH cert is required".to_owned()));
    }
    if phase(vmi) != VmiPhase::Scheduled {
        return Err(conflict(vmi, "VMI is not in Scheduled phase"));
    }
    sev::check_attestation(vmi)?;
    let set = |text: Option<&String>| text.is_some_and(|text| !text.is_empty());
    if sev::sev(vmi).is_some_and(|sev| set(sev.session.as_ref()) || set(sev.dh_cert.as_ref())) {
        return Err(conflict(vmi, "Session already defined"));
    }
    Ok(())
}

async fn serve(call: Call<'_>, request: Request<Body>) -> Result<Response, ApiError> {
    let options: SevSessionOptions = call.options(request).await?;
    decide(&call.vmi().await?, &options)?;
    Err(sev::NOT_AVAILABLE)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::subresources::common::{sev::tests::vmi, testing};

    #[test]
    fn session_is_set_up_once() {
        let options = SevSessionOptions { session: "a".into(), dh_cert: "b".into() };
        let attested = json!({"attestation": {}});
        assert_eq!(decide(&vmi("Scheduled", attested.clone(), false), &options), Ok(()));
        assert_eq!(
            decide(&vmi("Running", attested.clone(), false), &options),
            testing::conflict("VMI is not in Scheduled phase")
        );
        let defined = json!({"attestation": {}, "session": "x"});
        assert_eq!(decide(&vmi("Scheduled", defined, false), &options), testing::conflict("Session already defined"));
        for (options, message) in [
            (SevSessionOptions::default(), "Session blob is required"),
            (SevSessionOptions { session: "a".into(), ..Default::default() }, "DH cert is required"),
        ] {
            let found = decide(&vmi("Scheduled", attested.clone(), false), &options);
            assert_eq!(found, Err(ApiError::BadRequest(message.into())));
        }
    }
}
