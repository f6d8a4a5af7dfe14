//! What is wrong with an object, in the form `kubectl` prints.

use std::fmt;

use serde::Serialize;

/// The path of a field in a rule: a text that is put together only when something is wrong with the field.
pub(crate) type Path<'a> = fmt::Arguments<'a>;

/// Kind of a cause, one of Kubernetes' status cause types.
#[derive(Clone, Copy, Debug, Eq, PartialEq, Serialize)]
pub enum CauseType {
    /// The value breaks a rule.
    FieldValueInvalid,
    /// The value is missing.
    FieldValueRequired,
    /// The value is none that is carried out.
    FieldValueNotSupported,
    /// The value is there twice.
    FieldValueDuplicate,
    /// What the value names does not exist.
    FieldValueNotFound,
    /// The value may not be set.
    FieldValueForbidden,
    /// Something that came from the API server could not be used.
    UnexpectedServerResponse,
}

/// One thing wrong.
#[derive(Clone, Debug, Eq, PartialEq, Serialize)]
pub struct Cause {
    /// Kind of cause; none for a violation of the schema.
    #[serde(rename = "reason", skip_serializing_if = "Option::is_none")]
    pub type_: Option<CauseType>,
    /// Sentence for people.
    pub message: String,
    /// Path of the field; empty where no single field is at fault.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub field: String,
}

/// Things wrong, in the order found.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub struct Causes(Vec<Cause>);

impl Causes {
    /// No cause yet.
    pub fn new() -> Self {
        Self::default()
    }

    fn add(&mut self, type_: CauseType, field: String, message: String) {
        self.0.push(Cause { type_: Some(type_), message, field });
    }

    /// The value of `field` breaks a rule.
    pub fn invalid(&mut self, field: impl fmt::Display, message: impl Into<String>) {
        self.add(CauseType::FieldValueInvalid, field.to_string(), message.into());
    }

    /// `field` is missing.
    pub fn required(&mut self, field: impl fmt::Display, message: impl Into<String>) {
        self.add(CauseType::FieldValueRequired, field.to_string(), message.into());
    }

    /// The value of `field` is none that is carried out.
    pub fn not_supported(&mut self, field: impl fmt::Display, message: impl Into<String>) {
        self.add(CauseType::FieldValueNotSupported, field.to_string(), message.into());
    }

    /// The value of `field` is there twice.
    pub fn duplicate(&mut self, field: impl fmt::Display, message: impl Into<String>) {
        self.add(CauseType::FieldValueDuplicate, field.to_string(), message.into());
    }

    /// What `field` names does not exist.
    pub fn not_found(&mut self, field: impl fmt::Display, message: impl Into<String>) {
        self.add(CauseType::FieldValueNotFound, field.to_string(), message.into());
    }

    /// `field` may not be set.
    pub fn forbidden(&mut self, field: impl fmt::Display, message: impl Into<String>) {
        self.add(CauseType::FieldValueForbidden, field.to_string(), message.into());
    }

    /// What came from the API server cannot be used.
    pub fn unexpected(&mut self, message: impl Into<String>) {
        self.add(CauseType::UnexpectedServerResponse, String::new(), message.into());
    }

    /// The object does not have the shape of its kind.
    pub fn shape(&mut self, message: impl Into<String>) {
        self.0.push(Cause { type_: None, message: message.into(), field: String::new() });
    }

    /// Takes over the causes of another list.
    pub fn extend(&mut self, other: Self) {
        self.0.extend(other.0);
    }

    /// These, or what `more` finds where there are none: rules before what is not carried out yet, so that who breaks
    /// a rule is told of that alone.
    #[must_use]
    pub fn or_else(mut self, more: impl FnOnce(&mut Self)) -> Self {
        if self.is_empty() {
            more(&mut self);
        }
        self
    }

    /// Whether nothing is wrong.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The causes.
    pub fn as_slice(&self) -> &[Cause] {
        &self.0
    }
}
