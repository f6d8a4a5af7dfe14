//! Failure of a request as a whole.

/// A request that fails for another reason than errors in its object.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Failure {
    /// HTTP status.
    pub code: u16,
    /// Message for the user.
    pub message: String,
}

impl Failure {
    pub(crate) fn new(code: u16, message: impl Into<String>) -> Self {
        Self { code, message: message.into() }
    }
}
