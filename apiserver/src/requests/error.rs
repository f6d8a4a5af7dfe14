//! Failures as Kubernetes `Status` objects, and helpers for other answers.
//!
//! Codes, reasons and message forms are those that clients of the KubeVirt API already match on.

use axum::{
    body::Body,
    response::{IntoResponse, Response},
};
use http::{HeaderValue, StatusCode, header};
use serde::Serialize;
use serde_json::{Value, json};

/// Group of every object named in an error.
const GROUP: &str = "kubevirt.io";
/// Seconds after which a client may retry a request that exceeded a limit.
const RETRY_AFTER: u16 = 1;

/// The kind of object that an error is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// `virtualmachine`
    VirtualMachine,
    /// `virtualmachineinstance`
    VirtualMachineInstance,
    /// `persistentvolumeclaim`
    PersistentVolumeClaim,
}

impl Kind {
    /// Returns the singular resource name, the value of `details.kind`.
    #[must_use]
    pub(crate) const fn singular(self) -> &'static str {
        match self {
            Self::VirtualMachine => "virtualmachine",
            Self::VirtualMachineInstance => "virtualmachineinstance",
            Self::PersistentVolumeClaim => "persistentvolumeclaim",
        }
    }
}

/// A request that failed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum ApiError {
    /// 404: the object does not exist.
    #[error("{}.{GROUP} \"{name}\" not found{hint}", kind.singular())]
    NotFound {
        /// Kind of the object.
        kind: Kind,
        /// Its name.
        name: String,
        /// Reason and remedy, after the text that clients match.
        hint: String,
    },
    /// 409: the state of the object does not allow the operation.
    #[error("Operation cannot be fulfilled on {}.{GROUP} \"{name}\": {message}", kind.singular())]
    Conflict {
        /// Kind of the object.
        kind: Kind,
        /// Its name.
        name: String,
        /// Reason.
        message: String,
    },
    /// 403: the object's specification does not allow the operation.
    #[error("{}.{GROUP} \"{name}\" is forbidden: {message}", kind.singular())]
    Forbidden {
        /// Kind of the object.
        kind: Kind,
        /// Its name.
        name: String,
        /// Reason.
        message: String,
    },
    /// 400: the request is invalid.
    #[error("{0}")]
    BadRequest(String),
    /// 400: the object in the body is invalid.
    #[error("{message}")]
    Invalid {
        /// Summary.
        message: String,
        /// One message for each violation.
        causes: Vec<String>,
    },
    /// 422: the API server refused the change of an object. Clients match on its message.
    #[error("{message}")]
    Unprocessable {
        /// Message of the API server.
        message: String,
        /// Its details.
        details: Value,
    },
    /// 404: unknown path.
    #[error("the server could not find the requested resource")]
    NoSuchPath,
    /// 405: the path is served with this other method.
    #[error("the server does not allow this method on the requested resource")]
    WrongMethod(&'static str),
    /// 406: the client does not accept JSON.
    #[error("only the following media types are accepted: application/json")]
    NotAcceptable,
    /// 415: the body is not JSON.
    #[error("the body of the request was in an unknown format - accepted media types include: application/json")]
    UnsupportedMediaType,
    /// 501: a valid request for a function that is not implemented.
    #[error("{0} is not available yet")]
    NotAvailable(&'static str),
    /// 429: a limit is reached.
    #[error("{0}")]
    TooManyRequests(String),
    /// 503: a process behind virt-api ended during the request.
    #[error("{0}")]
    Unavailable(String),
    /// 500: a process or service behind virt-api failed.
    #[error("Internal error occurred: {0}")]
    Internal(String),
    /// 500: virt-handler failed to answer a read; the message is its own.
    #[error("{0}")]
    Handler(String),
}

impl ApiError {
    /// Returns 404 for an object.
    pub(crate) fn not_found(kind: Kind, name: &str) -> Self {
        Self::NotFound { kind, name: name.to_owned(), hint: String::new() }
    }

    /// Returns 409 for an object.
    pub(crate) fn conflict(kind: Kind, name: &str, message: impl Into<String>) -> Self {
        Self::Conflict { kind, name: name.to_owned(), message: message.into() }
    }

    /// Returns 403 for an object.
    pub(crate) fn forbidden(kind: Kind, name: &str, message: impl Into<String>) -> Self {
        Self::Forbidden { kind, name: name.to_owned(), message: message.into() }
    }

    /// Returns the HTTP status.
    #[must_use]
    pub(crate) const fn status(&self) -> StatusCode {
        match self {
            Self::NotFound { .. } => StatusCode::NOT_FOUND,
            Self::Conflict { .. } => StatusCode::CONFLICT,
            Self::Forbidden { .. } => StatusCode::FORBIDDEN,
            Self::BadRequest(_) | Self::Invalid { .. } => StatusCode::BAD_REQUEST,
            Self::Unprocessable { .. } => StatusCode::UNPROCESSABLE_ENTITY,
            Self::NoSuchPath => StatusCode::NOT_FOUND,
            Self::WrongMethod(_) => StatusCode::METHOD_NOT_ALLOWED,
            Self::NotAcceptable => StatusCode::NOT_ACCEPTABLE,
            Self::UnsupportedMediaType => StatusCode::UNSUPPORTED_MEDIA_TYPE,
            Self::NotAvailable(_) => StatusCode::NOT_IMPLEMENTED,
            Self::TooManyRequests(_) => StatusCode::TOO_MANY_REQUESTS,
            Self::Unavailable(_) => StatusCode::SERVICE_UNAVAILABLE,
            Self::Internal(_) | Self::Handler(_) => StatusCode::INTERNAL_SERVER_ERROR,
        }
    }

    /// Returns the `reason` of the Status object.
    #[must_use]
    pub(crate) const fn reason(&self) -> &'static str {
        match self {
            Self::NotFound { .. } | Self::NoSuchPath => "NotFound",
            Self::Conflict { .. } => "Conflict",
            Self::Forbidden { .. } => "Forbidden",
            Self::BadRequest(_) | Self::Invalid { .. } => "BadRequest",
            Self::Unprocessable { .. } => "Invalid",
            Self::WrongMethod(_) => "MethodNotAllowed",
            Self::NotAcceptable => "NotAcceptable",
            Self::UnsupportedMediaType => "UnsupportedMediaType",
            Self::NotAvailable(_) => "NotImplemented",
            Self::TooManyRequests(_) => "TooManyRequests",
            Self::Unavailable(_) => "ServiceUnavailable",
            Self::Internal(_) | Self::Handler(_) => "InternalError",
        }
    }

    /// Returns the Status object.
    #[must_use]
    pub(crate) fn body(&self) -> Value {
        let mut body = json!({
            "kind": "Status",
            "apiVersion": "v1",
            "metadata": {},
            "status": "Failure",
            "message": self.to_string(),
            "reason": self.reason(),
            "code": self.status().as_u16(),
        });
        let details = match self {
            Self::NotFound { kind, name, .. }
            | Self::Conflict { kind, name, .. }
            | Self::Forbidden { kind, name, .. } => {
                Some(json!({"name": name, "group": GROUP, "kind": kind.singular()}))
            }
            Self::Internal(message) | Self::Handler(message) => Some(json!({"causes": [{"message": message}]})),
            Self::Invalid { causes, .. } => {
                let causes = causes.iter().map(|message| json!({"message": message})).collect::<Vec<_>>();
                Some(json!({"causes": causes}))
            }
            Self::Unprocessable { details, .. } => (!details.is_null()).then(|| details.clone()),
            Self::TooManyRequests(_) => Some(json!({"retryAfterSeconds": RETRY_AFTER})),
            Self::BadRequest(_)
            | Self::NoSuchPath
            | Self::WrongMethod(_)
            | Self::NotAcceptable
            | Self::UnsupportedMediaType
            | Self::NotAvailable(_)
            | Self::Unavailable(_) => None,
        };
        if let (Some(details), Some(body)) = (details, body.as_object_mut()) {
            body.insert("details".to_owned(), details);
        }
        body
    }
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        let mut response = json_response(self.status(), &self.body());
        match self {
            Self::WrongMethod(right) => {
                response.headers_mut().insert(header::ALLOW, HeaderValue::from_static(right));
            }
            Self::TooManyRequests(_) => {
                response.headers_mut().insert(header::RETRY_AFTER, HeaderValue::from(RETRY_AFTER));
            }
            _ => {}
        }
        response
    }
}

/// Returns a JSON answer, indented by one space.
pub(crate) fn json_response<T: Serialize>(status: StatusCode, value: &T) -> Response {
    let mut text = Vec::new();
    let formatter = serde_json::ser::PrettyFormatter::with_indent(b" ");
    let mut serializer = serde_json::Serializer::with_formatter(&mut text, formatter);
    if let Err(error) = value.serialize(&mut serializer) {
        return text_response(StatusCode::INTERNAL_SERVER_ERROR, error.to_string());
    }
    let mut response = Response::new(Body::from(text));
    *response.status_mut() = status;
    response.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
    response
}

/// Returns a plain-text answer.
pub(crate) fn text_response(status: StatusCode, text: impl Into<String>) -> Response {
    let mut response = Response::new(Body::from(text.into()));
    *response.status_mut() = status;
    response.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static("text/plain; charset=utf-8"));
    response
}

/// Returns an answer without a body.
pub(crate) fn empty_response(status: StatusCode) -> Response {
    let mut response = Response::new(Body::empty());
    *response.status_mut() = status;
    response
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_have_the_wire_form_of_kubernetes() {
        let cases = [
            (ApiError::not_found(Kind::VirtualMachine, "a"), 404, r#"virtualmachine.kubevirt.io "a" not found"#),
            (
                ApiError::conflict(Kind::VirtualMachineInstance, "a", "VM is not running"),
                409,
                r#"Operation cannot be fulfilled on virtualmachineinstance.kubevirt.io "a": VM is not running"#,
            ),
            (
                ApiError::forbidden(Kind::VirtualMachineInstance, "a", "no"),
                403,
                r#"virtualmachineinstance.kubevirt.io "a" is forbidden: no"#,
            ),
            (ApiError::BadRequest("VMI is not running".into()), 400, "VMI is not running"),
            (ApiError::Internal("boom".into()), 500, "Internal error occurred: boom"),
            (ApiError::Handler("unexpected return code 500".into()), 500, "unexpected return code 500"),
            (ApiError::Unavailable("closed".into()), 503, "closed"),
            (ApiError::NotAvailable("attestation"), 501, "attestation is not available yet"),
            (ApiError::NoSuchPath, 404, "the server could not find the requested resource"),
            (
                ApiError::not_found(Kind::PersistentVolumeClaim, "a"),
                404,
                r#"persistentvolumeclaim.kubevirt.io "a" not found"#,
            ),
        ];
        for (error, code, message) in cases {
            let body = error.body();
            assert_eq!(body["code"], code);
            assert_eq!(body["message"], message);
            assert_eq!(body["kind"], "Status");
            assert_eq!(body["status"], "Failure");
        }
        let details = ApiError::not_found(Kind::VirtualMachine, "a").body()["details"].clone();
        assert_eq!(details, json!({"name": "a", "group": "kubevirt.io", "kind": "virtualmachine"}));
        let details = ApiError::Internal("boom".into()).body()["details"].clone();
        assert_eq!(details, json!({"causes": [{"message": "boom"}]}));
        let invalid = ApiError::Invalid { message: "no".into(), causes: vec!["a".into(), "b".into()] };
        assert_eq!(invalid.body()["details"], json!({"causes": [{"message": "a"}, {"message": "b"}]}));
        let wrong = ApiError::WrongMethod("PUT").into_response();
        assert_eq!(
            (wrong.status(), &wrong.headers()[header::ALLOW]),
            (StatusCode::METHOD_NOT_ALLOWED, &HeaderValue::from_static("PUT"))
        );
    }
}
