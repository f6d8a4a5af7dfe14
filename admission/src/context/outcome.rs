//! The decision about a request: allowed, denied or failed, and the writes that go with it.

use json_patch::Patch;

use super::{Effect, Failure, FieldErrors, LookupError};

/// Form of a denial.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum DenialForm {
    /// Lists the first ten errors and counts the others.
    Abbreviated,
    /// Lists all errors.
    Full,
    /// Lists ten errors, with the first as message and without a status code, as the reference does for plugins.
    FirstMessage,
}

/// Result of a webhook.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Outcome {
    /// The request passes.
    Allowed {
        /// Changes to the object.
        patch: Patch,
        /// Warnings for the user.
        warnings: Vec<String>,
    },
    /// The object has errors.
    Denied {
        /// The errors; at least one.
        errors: FieldErrors,
        /// Warnings for the user.
        warnings: Vec<String>,
        /// Form of the response.
        form: DenialForm,
    },
    /// The request fails as a whole.
    Failed(Failure),
}

/// An outcome with the writes that virt-api carries out before it responds.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Decision {
    pub(crate) outcome: Outcome,
    pub(crate) effects: Vec<Effect>,
}

impl From<Outcome> for Decision {
    fn from(outcome: Outcome) -> Self {
        Self { outcome, effects: vec![] }
    }
}

impl Decision {
    /// Allows the request without changes.
    pub(crate) fn allowed(warnings: Vec<String>) -> Self {
        Outcome::Allowed { patch: Patch::default(), warnings }.into()
    }

    /// Allows the request if there are no errors; denies it otherwise.
    pub(crate) fn from_errors(errors: FieldErrors, warnings: Vec<String>) -> Self {
        Self::from_errors_as(DenialForm::Abbreviated, errors, warnings)
    }

    /// Does the same with the given form of denial.
    pub(crate) fn from_errors_as(form: DenialForm, errors: FieldErrors, warnings: Vec<String>) -> Self {
        if errors.is_empty() { Self::allowed(warnings) } else { Outcome::Denied { errors, warnings, form }.into() }
    }
}

/// Ends the evaluation of a webhook early.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub(crate) enum Interrupt {
    /// The object has errors.
    #[error("the object has errors")]
    Denied(FieldErrors),
    /// The request fails as a whole.
    #[error("{}", .0.message)]
    Failed(Failure),
    /// Other objects are missing or could not be read.
    #[error(transparent)]
    Lookup(#[from] LookupError),
}

impl Interrupt {
    /// Fails the request. The reference uses code 400 for most failures.
    pub(crate) fn failed(code: u16, message: impl Into<String>) -> Self {
        Self::Failed(Failure::new(code, message))
    }
}

impl From<FieldErrors> for Interrupt {
    fn from(errors: FieldErrors) -> Self {
        Self::Denied(errors)
    }
}
