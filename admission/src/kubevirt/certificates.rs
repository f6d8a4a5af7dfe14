//! Lives of certificates: each is an amount of time, and they go together.

use std::time::Duration;

use api::{
    duration,
    kubevirt::spec::{CertConfig, KubeVirtCertificateRotateStrategy},
};

use crate::causes::Causes;

const DAY: Duration = Duration::from_secs(24 * 3600);
const WEEK: Duration = Duration::from_secs(7 * 24 * 3600);

/// Lives of certificates are amounts of time: virt-controller would take the usual one in place of anything else.
pub(super) fn lives(strategy: &KubeVirtCertificateRotateStrategy, causes: &mut Causes) {
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
            Ok(life) if life.is_zero() => causes.invalid(&field, format!("{field}: must be more than 0")),
            Ok(_) => {}
            Err(error) => causes.invalid(&field, format!("{field}: {error}")),
        }
    }
}

/// What is wrong between the lives.
pub(super) fn relations(strategy: &KubeVirtCertificateRotateStrategy, causes: &mut Causes) {
    let Some(own) = &strategy.self_signed else { return };
    let intervals = [&own.ca_rotate_interval, &own.cert_rotate_interval, &own.ca_overlap_interval];
    if intervals.into_iter().any(Option::is_some) && (own.ca.is_some() || own.server.is_some()) {
        causes.not_supported(
            "",
            "caRotateInterval, certRotateInterval and caOverlapInterval are deprecated and conflict with CertConfig defined rotation parameters",
        );
    }
    let read = |text: Option<&String>| text.and_then(|text| duration::parse(text).ok());
    // The old names count as the new ones do, which are refused beside them.
    let times = |config: Option<&CertConfig>, life: Option<&String>, overlap: Option<&String>, default: Duration| {
        let whole = read(config.and_then(|config| config.duration.as_ref()).or(life)).unwrap_or(default);
        let renew = read(config.and_then(|config| config.renew_before.as_ref()).or(overlap)).unwrap_or(whole / 5);
        (whole, renew)
    };
    let (ca, ca_renew) =
        times(own.ca.as_ref(), own.ca_rotate_interval.as_ref(), own.ca_overlap_interval.as_ref(), WEEK);
    let (server, server_renew) = times(own.server.as_ref(), own.cert_rotate_interval.as_ref(), None, DAY);
    let field = |which: &str, what: &str| format!("spec.certificateRotationStrategy.selfSigned.{which}.{what}");
    let mut refuse = |bad: bool, sentence: &str, relation: String| {
        if bad {
            causes.invalid("", format!("{sentence} ({relation})"));
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
    fn lives_of_certificates_are_amounts_of_time() {
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
            let mut causes = Causes::new();
            lives(&serde_json::from_value(json!({"selfSigned": own})).unwrap(), &mut causes);
            let fields: Vec<&str> = causes.as_slice().iter().map(|cause| cause.field.as_str()).collect();
            let refused: Vec<String> =
                refused.iter().map(|path| format!("spec.certificateRotateStrategy.selfSigned.{path}")).collect();
            assert_eq!(fields, refused);
        }
    }
}
