//! The answer to a review, and its outcome for metrics, logs and traces.

use admission::AdmissionReview;
use axum::{body::Body, response::Response};
use http::{HeaderValue, StatusCode, header};

/// Outcome of a review.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Outcome {
    /// The request passes.
    Allowed,
    /// The request is refused because of its content.
    Denied,
    /// The request is refused because it could not be decided on.
    Failed,
}

impl Outcome {
    /// Returns the label in metrics.
    pub(super) const fn label(self) -> &'static str {
        match self {
            Self::Allowed => "allowed",
            Self::Denied => "denied",
            Self::Failed => "failed",
        }
    }
}

/// The answer to a review.
#[derive(Debug)]
pub(super) struct Answered {
    /// HTTP status.
    pub(super) status: StatusCode,
    /// Outcome.
    pub(super) outcome: Outcome,
    review: AdmissionReview,
}

impl Answered {
    /// Returns the answer with a decision. A status from 500 on is a failure of this process or of what it depends on.
    pub(super) fn decided(review: AdmissionReview) -> Self {
        let code = review.response.status.as_ref().map_or(0, |status| status.code);
        let outcome = match review.response.allowed {
            true => Outcome::Allowed,
            false if code >= 500 => Outcome::Failed,
            false => Outcome::Denied,
        };
        Self { status: StatusCode::OK, outcome, review }
    }

    /// Returns the answer to a review that cannot be decided on.
    pub(super) fn failed(status: StatusCode, review: AdmissionReview) -> Self {
        Self { status, outcome: Outcome::Failed, review }
    }

    /// Returns the answer to a request that is no review.
    pub(super) fn refusal(status: StatusCode, message: &str) -> Self {
        Self::failed(status, AdmissionReview::failed("", status.as_u16(), message))
    }

    /// Returns the message of a refusal.
    pub(super) fn message(&self) -> &str {
        self.review.response.status.as_ref().map(|status| status.message.as_str()).unwrap_or_default()
    }

    /// Logs a failure. This is the only place that does.
    pub(super) fn log(&self) {
        match self.outcome {
            Outcome::Allowed => {}
            Outcome::Denied => tracing::debug!(reason = self.message(), "denied"),
            Outcome::Failed => {
                tracing::error!(error = self.message(), status = self.status.as_u16(), "admission review failed");
            }
        }
    }

    /// Returns the response.
    pub(super) fn into_response(self) -> Response {
        let (status, body) = match serde_json::to_vec(&self.review) {
            Ok(body) => (self.status, body),
            Err(_) => (StatusCode::INTERNAL_SERVER_ERROR, vec![]),
        };
        let mut response = Response::new(Body::from(body));
        *response.status_mut() = status;
        response.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
        response
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn denials_and_failures_differ() {
        let mut allowed = AdmissionReview::failed("u", 200, "");
        allowed.response.allowed = true;
        for (answered, expected) in [
            (Answered::decided(allowed), "allowed"),
            (Answered::decided(AdmissionReview::failed("u", 0, "the first error of a plugin")), "denied"),
            (Answered::decided(AdmissionReview::failed("u", 400, "slirp is not enabled")), "denied"),
            (Answered::decided(AdmissionReview::failed("u", 422, "spec.x is missing")), "denied"),
            (Answered::decided(AdmissionReview::failed("u", 500, "no answer in time")), "failed"),
            (Answered::failed(StatusCode::OK, AdmissionReview::failed("u", 400, "unknown operation")), "failed"),
            (Answered::refusal(StatusCode::REQUEST_TIMEOUT, "not sent in time"), "failed"),
        ] {
            assert_eq!(answered.outcome.label(), expected, "{}", answered.message());
        }
    }
}
