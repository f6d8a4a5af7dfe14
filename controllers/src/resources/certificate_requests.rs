//! Requests of virt-handlers for certificates.

use api::tls;
use k8s_openapi::api::certificates::v1::CertificateSigningRequest;

use super::declaration::{Declaration, Selection};
use crate::{cache::Cached, runtime::Kind};

/// Indices of requests for certificates.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum RequestIndex {
    /// Requests without an answer.
    Unanswered,
}

impl Cached for CertificateSigningRequest {
    type Index = RequestIndex;
    whole!();

    fn indices(&self) -> Vec<RequestIndex> {
        let status = self.status.as_ref();
        let is_answered = status.is_some_and(|status| {
            status.certificate.is_some()
                || status.conditions.iter().flatten().any(|known| ["Denied", "Failed"].contains(&known.type_.as_str()))
        });
        if is_answered { Vec::new() } else { vec![RequestIndex::Unanswered] }
    }
}

impl Declaration for CertificateSigningRequest {
    type Wire = Self;
    type Kept = Self;
    const SELECTION: Selection = Selection::Field("spec.signerName", tls::HANDLER_SIGNER);
    const WRITTEN: Option<Kind> = Some(Kind::CertificateSigningRequest);
}
