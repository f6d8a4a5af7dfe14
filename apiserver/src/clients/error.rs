//! Errors of calls to components.

use std::time::Duration;

use http::StatusCode;

/// Errors of a call to a component.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ComponentError {
    /// The pods of the component cannot be listed.
    #[error("cannot list {component} pods: {source}")]
    List {
        /// Name of the component.
        component: &'static str,
        /// Error of the API server.
        source: kube::Error,
    },
    /// No virt-handler on the node.
    #[error("No virt-handler on node {0} found")]
    NoPod(String),
    /// More than one virt-handler on the node.
    #[error("Expected to find one Pod, found {0} Pods")]
    ManyPods(usize),
    /// The pod has no address that can be a pod's.
    #[error("{component} has no usable address ({address})")]
    Address {
        /// The component.
        component: String,
        /// Address in the pod's status.
        address: String,
    },
    /// The component's identity is not a DNS name.
    #[error("{0} has no TLS server name")]
    ServerName(String),
    /// TCP or TLS failed.
    #[error("cannot connect to {component}: {source}")]
    Connect {
        /// The component.
        component: String,
        /// Error of the network or of TLS.
        source: std::io::Error,
    },
    /// HTTP failed.
    #[error("request to {component} failed: {source}")]
    Http {
        /// The component.
        component: String,
        /// Error of HTTP.
        source: hyper::Error,
    },
    /// The connection ended between the request and its answer, so that the request may have been carried out.
    #[error("{component} closed the connection before it answered, the request may have been carried out: {source}")]
    Interrupted {
        /// The component.
        component: String,
        /// Error of HTTP.
        source: hyper::Error,
    },
    /// The request is invalid.
    #[error("request is not valid: {0}")]
    Request(#[from] http::Error),
    /// The answer is incomplete or too long.
    #[error("answer of {component} cannot be read: {source}")]
    Body {
        /// The component.
        component: String,
        /// Error of HTTP, or of the limit.
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// The answer is not JSON.
    #[error("answer of {component} is no JSON: {source}")]
    Document {
        /// The component.
        component: String,
        /// Error of the parser.
        source: serde_json::Error,
    },
    /// No answer within the time limit.
    #[error("{component} did not answer {call} within {} s", limit.as_secs())]
    Timeout {
        /// The component.
        component: String,
        /// The request.
        call: String,
        /// The limit.
        limit: Duration,
    },
    /// The component refused a call.
    #[error("unexpected return code {} ({}), message: {message}", status.as_u16(), status)]
    Refused {
        /// Status of the answer.
        status: StatusCode,
        /// Text of the answer.
        message: String,
    },
    /// The component refused a stream.
    #[error("Can't connect to websocket ({}): websocket: bad handshake{}", status.as_u16(), application_info(message))]
    Handshake {
        /// Status of the answer.
        status: StatusCode,
        /// Text of the answer.
        message: String,
    },
}

fn application_info(message: &str) -> String {
    if message.is_empty() { String::new() } else { format!(": application info: {message}") }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn refusals_contain_the_message_of_virt_handler() {
        let refused =
            ComponentError::Refused { status: StatusCode::NOT_FOUND, message: "VMI a/b does not exist".into() };
        assert_eq!(refused.to_string(), "unexpected return code 404 (404 Not Found), message: VMI a/b does not exist");
        let busy = ComponentError::Handshake {
            status: StatusCode::SERVICE_UNAVAILABLE,
            message: "Active VNC connection. Request denied.".into(),
        };
        assert_eq!(
            busy.to_string(),
            "Can't connect to websocket (503): websocket: bad handshake: application info: Active VNC connection. Request denied."
        );
    }
}
