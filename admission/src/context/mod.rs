//! The ground floor of the crate: everything that a rule reads and returns. Imports no other folder of the crate.
//!
//! Input: [`AdmissionRequest`], decoded objects ([`decode`]), [`Lookups`] of other objects, configuration, user, clock
//! ([`Generated`]). Output: [`FieldErrors`], [`Outcome`], [`Effect`]. Start at [`Context`].

pub(crate) mod addresses;
pub mod decode;
pub(crate) mod effect;
pub(crate) mod failure;
pub(crate) mod field_errors;
pub(crate) mod field_path;
pub(crate) mod generated;
pub mod lookups;
pub(crate) mod names;
pub(crate) mod outcome;
pub mod patch;
pub(crate) mod request;
mod resource_path;
pub(crate) mod response;
pub(crate) mod semantic;
pub(crate) mod trace;
mod users;

use std::sync::OnceLock;

use api::{config::ClusterConfig, constants::component, traceparent::TraceParent};
use serde::{Serialize, de::DeserializeOwned};
use serde_json::Value;

pub use self::{
    effect::Effect,
    failure::Failure,
    field_errors::{ErrorType, FieldError, FieldErrors},
    generated::Generated,
    lookups::{LookupError, LookupResult, Lookups, ObjectQuery, Selection},
    request::{AdmissionRequest, Operation},
    response::{AdmissionResponse, AdmissionReview},
    trace::ReviewTrace,
    users::TrustedUsers,
};
pub(crate) use self::{
    field_errors::{PathText, accepted, supported},
    field_path::FieldPath,
    outcome::{Decision, DenialForm, Interrupt, Outcome},
};

/// Everything that the decision about a request depends on.
#[derive(Clone, Copy)]
pub(crate) struct Context<'a> {
    /// The request.
    pub(crate) request: &'a AdmissionRequest,
    /// The cluster's configuration.
    pub(crate) config: &'a ClusterConfig,
    /// Service accounts of the components.
    pub(crate) trusted: &'a TrustedUsers,
    /// Generated values; created on first use.
    pub(crate) generated: &'a OnceLock<Generated>,
    /// Other objects of the cluster.
    pub(crate) lookups: &'a Lookups,
    /// Trace context for a new VM or VMI.
    pub(crate) trace: Option<TraceParent>,
}

impl<'a> Context<'a> {
    /// Returns the UUIDs and the time generated for this request.
    pub(crate) fn generated(&self) -> &'a Generated {
        self.generated.get_or_init(|| Generated::for_request(self.request))
    }

    /// Returns true if the request creates an object.
    pub(crate) fn is_create(&self) -> bool {
        self.request.operation == Operation::Create
    }

    /// Returns true if the user is a component.
    pub(crate) fn is_component(&self) -> bool {
        self.trusted.contains(&self.request.user_info)
    }

    /// Returns true if the user is virt-controller.
    pub(crate) fn is_controller(&self) -> bool {
        self.trusted.is(&self.request.user_info, component::CONTROLLER_SERVICE_ACCOUNT)
    }

    /// Returns the namespace of the object.
    pub(crate) fn namespace(&self) -> &'a str {
        self.request.namespace.as_deref().unwrap_or_default()
    }

    /// Decodes the object.
    pub(crate) fn object<T: DeserializeOwned>(&self) -> Result<T, Interrupt> {
        Ok(decode::object(&self.request.object)?)
    }

    /// Decodes the stored object; `None` on creation. It passed admission before, so unknown fields of other versions
    /// are accepted.
    pub(crate) fn old_object<T: DeserializeOwned>(&self) -> Result<Option<T>, Interrupt> {
        if self.request.operation == Operation::Create {
            return Ok(None);
        }
        decode::stored(&self.request.old_object).map(Some).map_err(|error| {
            let mut errors = FieldErrors::new();
            errors.schema(format!("cannot read the stored object: {error}"));
            Interrupt::Denied(errors)
        })
    }

    /// Allows the request without changes.
    pub(crate) fn allowed(&self) -> Decision {
        Decision::allowed(vec![])
    }

    /// Allows the request if there are no errors; denies it otherwise.
    pub(crate) fn decide(&self, errors: FieldErrors, warnings: Vec<String>) -> Decision {
        Decision::from_errors(errors, warnings)
    }

    /// Applies a change to the decoded object and allows the request with the difference as its patch.
    pub(crate) fn patched<T: DeserializeOwned + Serialize>(
        &self,
        change: impl FnOnce(&mut T) -> Result<Vec<String>, Interrupt>,
    ) -> Result<Decision, Interrupt> {
        let mut object: T = self.object()?;
        // Serialized before the change, so that no copy of the object is needed.
        let before = to_value(&object)?;
        let warnings = change(&mut object)?;
        let patch = patch::between(&self.request.object, &before, &to_value(&object)?);
        Ok(Outcome::Allowed { patch, warnings }.into())
    }
}

fn to_value<T: Serialize>(object: &T) -> Result<Value, Interrupt> {
    serde_json::to_value(object).map_err(|_| Interrupt::failed(500, "the object cannot be written"))
}
