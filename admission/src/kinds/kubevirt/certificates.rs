//! Lifetimes of certificates.

use std::time::Duration;

use api::{
    duration,
    kubevirt::spec::{CertConfig, KubeVirtCertificateRotateStrategy},
};

use crate::context::FieldErrors;

const DAY: Duration = Duration::from_secs(24 * 3600);
const WEEK: Duration = Duration::from_secs(7 * 24 * 3600);

/// Validates lifetimes. virt-controller would replace a malformed one by its default.
pub(super) fn validate_lifetimes(strategy: &KubeVirtCertificateRotateStrategy, errors: &mut FieldErrors) {
    let Some(own) = &strategy.self_signed else { return };
    let (ca, server) = (own.ca.as_ref(), own.server.as_ref());
    for (path, text) in [
        ("ca.duration", ca.and_then(|config| config.duration.as_ref())),
        ("ca.renewBefore", ca.and_then(|config| config.renew_before.as_ref())),
        ("caOverlapInterval", own.ca_overlap_interval.as_ref()),
        ("caRotateInterval", own.ca_rotate_interval.as_ref()),
        ("certRotateInterval", own.cert_rotate_interval.as_ref()),
        ("server.duration", server.and_then(|config| config.duration.as_ref())),
        ("server.renewBefore", server.and_then(|config| config.renew_before.as_ref())),
    ] {
        let Some(text) = text else { continue };
        let field = format!("spec.certificateRotateStrategy.selfSigned.{path}");
        match duration::parse(text) {
            Ok(lifetime) if lifetime.is_zero() => errors.invalid(&field, format!("{field}: must be more than 0")),
            Ok(_) => {}
            Err(error) => errors.invalid(&field, format!("{field}: {error}")),
        }
    }
}

/// Validates the relations between lifetimes.
pub(super) fn validate_relations(strategy: &KubeVirtCertificateRotateStrategy, errors: &mut FieldErrors) {
    let Some(own) = &strategy.self_signed else { return };
    let intervals = [&own.ca_rotate_interval, &own.cert_rotate_interval, &own.ca_overlap_interval];
    if intervals.into_iter().any(Option::is_some) && (own.ca.is_some() || own.server.is_some()) {
        errors.not_supported(
            "",
            "caRotateInterval, certRotateInterval and caOverlapInterval are deprecated and conflict with CertConfig defined rotation parameters",
        );
    }
    let read = |text: Option<&String>| text.and_then(|text| duration::parse(text).ok());
    // Deprecated fields count as the new ones; both together are rejected.
    let times =
        |config: Option<&CertConfig>, lifetime: Option<&String>, overlap: Option<&String>, default: Duration| {
            let whole = read(config.and_then(|config| config.duration.as_ref()).or(lifetime)).unwrap_or(default);
            let renew = read(config.and_then(|config| config.renew_before.as_ref()).or(overlap)).unwrap_or(whole / 5);
            (whole, renew)
        };
    let (ca, ca_renew) =
        times(own.ca.as_ref(), own.ca_rotate_interval.as_ref(), own.ca_overlap_interval.as_ref(), WEEK);
    let (server, server_renew) = times(own.server.as_ref(), own.cert_rotate_interval.as_ref(), None, DAY);
    let field =
        |certificate: &str, name: &str| format!("spec.certificateRotationStrategy.selfSigned.{certificate}.{name}");
    let mut refuse = |bad: bool, sentence: &str, relation: String| {
        if bad {
            errors.invalid("", format!("{sentence} ({relation})"));
        }
    };
    refuse(
        ca < ca_renew,
        "CA RenewBefore cannot exceed Duration",
        format!("{} < {}", field("ca", "duration"), field("ca", "renewBefore")),
    );
    refuse(
        server < server_renew,
        "Cert RenewBefore cannot exceed Duration",
        format!("{} < {}", field("server", "duration"), field("server", "renewBefore")),
    );
    refuse(
        server > ca,
        "Certificate duration cannot exceed CA",
        format!("{} > {}", field("server", "duration"), field("ca", "duration")),
    );
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn lifetimes_of_certificates_are_durations() {
        for (own, refused) in [
            (json!({}), vec![]),
            (json!({"ca": {"duration": "48h", "renewBefore": "90m"}, "server": {"duration": "24h0m0s"}}), vec![]),
            (json!({"caRotateInterval": "48h", "certRotateInterval": "1h30m", "caOverlapInterval": "1h"}), vec![]),
            (
                json!({"ca": {"duration": "a week", "renewBefore": "0s"}, "server": {"duration": "-1h"}}),
                vec!["ca.duration", "ca.renewBefore", "server.duration"],
            ),
            (
                json!({"caOverlapInterval": "", "caRotateInterval": "7d", "certRotateInterval": "0"}),
                vec!["caOverlapInterval", "caRotateInterval", "certRotateInterval"],
            ),
        ] {
            let mut errors = FieldErrors::new();
            validate_lifetimes(&serde_json::from_value(json!({"selfSigned": own})).unwrap(), &mut errors);
            let fields: Vec<&str> = errors.as_slice().iter().map(|error| error.field.as_str()).collect();
            let refused: Vec<String> =
                refused.iter().map(|path| format!("spec.certificateRotateStrategy.selfSigned.{path}")).collect();
            assert_eq!(fields, refused);
        }
    }
}
