//! Failures of commands.

/// Failure of a command. The user reads its message.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The kubeconfig is unreadable or lacks the context.
    #[error("cannot load the kubeconfig: {0}")]
    Kubeconfig(String),
    /// The connection failed, or the response is not valid HTTP.
    #[error("cannot reach the API server: {0}")]
    Transport(String),
    /// The API server or virt-api answered with an error and this message.
    #[error("{message}")]
    Refused {
        /// HTTP status code.
        code: u16,
        /// Message of the answer's `Status`, or its body.
        message: String,
    },
    /// The arguments are invalid.
    #[error("{0}")]
    Usage(String),
    /// A local file, socket, terminal or program failed.
    #[error("{what}: {source}")]
    Io {
        /// The failed operation.
        what: String,
        /// The cause.
        source: std::io::Error,
    },
    /// A stream ended unexpectedly.
    #[error("{0}")]
    Stream(String),
}

impl Error {
    pub(crate) fn io(what: impl Into<String>) -> impl FnOnce(std::io::Error) -> Self {
        let what = what.into();
        move |source| Self::Io { what, source }
    }
}

/// Returns true if the API server does not know the object.
pub(crate) fn is_not_found(error: &Error) -> bool {
    matches!(error, Error::Refused { code: 404, .. })
}

/// Adds the failed operation to the message of a refusal.
pub(crate) fn failed_while(what: &str) -> impl Fn(Error) -> Error {
    move |error| match error {
        Error::Refused { code, message } => Error::Refused { code, message: format!("error {what}, {message}") },
        other => other,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn error_names_the_failed_operation() {
        let refused = Error::Refused { code: 501, message: "this volume is not available yet".into() };
        let said = failed_while("adding volume")(refused).to_string();
        assert_eq!(said, "error adding volume, this volume is not available yet");
    }
}
