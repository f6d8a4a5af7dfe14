//! Errors of an object, in the form that `kubectl` prints.

use std::fmt;

/// Path of a field in a rule. The text is formatted only if the field has an error.
pub(crate) type PathText<'a> = fmt::Arguments<'a>;

/// Returns the end of a message about a value that is none of these.
pub(crate) fn accepted(values: &[&str]) -> String {
    format!("accepted values: {}", values.join(", "))
}

/// Returns the sentence after a message about a value that is none of these.
pub(crate) fn supported(values: &[&str]) -> String {
    format!("Supported are {}.", values.join(", "))
}

/// Type of an error: the cause types of a Kubernetes status.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum ErrorType {
    /// The value breaks a rule.
    FieldValueInvalid,
    /// The value is missing.
    FieldValueRequired,
    /// The value is not supported.
    FieldValueNotSupported,
    /// The value is a duplicate.
    FieldValueDuplicate,
    /// The value names an object that does not exist.
    FieldValueNotFound,
    /// The value may not be set.
    FieldValueForbidden,
    /// Data of the API server cannot be used.
    UnexpectedServerResponse,
}

impl ErrorType {
    pub(super) fn as_str(self) -> &'static str {
        match self {
            Self::FieldValueInvalid => "FieldValueInvalid",
            Self::FieldValueRequired => "FieldValueRequired",
            Self::FieldValueNotSupported => "FieldValueNotSupported",
            Self::FieldValueDuplicate => "FieldValueDuplicate",
            Self::FieldValueNotFound => "FieldValueNotFound",
            Self::FieldValueForbidden => "FieldValueForbidden",
            Self::UnexpectedServerResponse => "UnexpectedServerResponse",
        }
    }
}

/// One error.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct FieldError {
    /// Type; `None` for a violation of the schema.
    pub type_: Option<ErrorType>,
    /// Message for the user.
    pub message: String,
    /// Path of the field; empty if the error concerns no single field.
    pub field: String,
}

/// Errors of an object, in the order of the rules.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub struct FieldErrors(Vec<FieldError>);

impl FieldErrors {
    /// Returns an empty list.
    pub fn new() -> Self {
        Self::default()
    }

    fn add(&mut self, type_: ErrorType, field: String, message: String) {
        self.0.push(FieldError { type_: Some(type_), message, field });
    }

    /// Adds an invalid value.
    pub(crate) fn invalid(&mut self, field: impl fmt::Display, message: impl Into<String>) {
        self.add(ErrorType::FieldValueInvalid, field.to_string(), message.into());
    }

    /// Adds a missing value.
    pub(crate) fn required(&mut self, field: impl fmt::Display, message: impl Into<String>) {
        self.add(ErrorType::FieldValueRequired, field.to_string(), message.into());
    }

    /// Adds an unsupported value.
    pub(crate) fn not_supported(&mut self, field: impl fmt::Display, message: impl Into<String>) {
        self.add(ErrorType::FieldValueNotSupported, field.to_string(), message.into());
    }

    /// Adds a duplicate value.
    pub(crate) fn duplicate(&mut self, field: impl fmt::Display, message: impl Into<String>) {
        self.add(ErrorType::FieldValueDuplicate, field.to_string(), message.into());
    }

    /// Adds a reference to an object that does not exist.
    pub(crate) fn not_found(&mut self, field: impl fmt::Display, message: impl Into<String>) {
        self.add(ErrorType::FieldValueNotFound, field.to_string(), message.into());
    }

    /// Adds a value that may not be set.
    pub(crate) fn forbidden(&mut self, field: impl fmt::Display, message: impl Into<String>) {
        self.add(ErrorType::FieldValueForbidden, field.to_string(), message.into());
    }

    /// Adds data of the API server that cannot be used.
    pub(crate) fn unexpected(&mut self, message: impl Into<String>) {
        self.add(ErrorType::UnexpectedServerResponse, String::new(), message.into());
    }

    /// Adds a violation of the schema of the kind, with the field that the message begins with.
    pub(crate) fn schema(&mut self, message: impl Into<String>) {
        let message = message.into();
        let field = message.split_once(" in body ").map_or("", |(path, _)| path.trim_start_matches('.')).to_owned();
        self.0.push(FieldError { type_: None, message, field });
    }

    /// Appends another list.
    pub(crate) fn extend(&mut self, other: Self) {
        self.0.extend(other.0);
    }

    /// Adds more errors if there are none yet. Unsupported fields are reported this way: clients count the errors of a
    /// broken rule.
    #[must_use]
    pub(crate) fn or_else(mut self, more: impl FnOnce(&mut Self)) -> Self {
        if self.is_empty() {
            more(&mut self);
        }
        self
    }

    /// Returns `Err` if there are errors.
    pub(crate) fn into_result(self) -> Result<(), Self> {
        if self.is_empty() { Ok(()) } else { Err(self) }
    }

    /// Returns true if there are no errors.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Returns the errors.
    pub fn as_slice(&self) -> &[FieldError] {
        &self.0
    }
}
