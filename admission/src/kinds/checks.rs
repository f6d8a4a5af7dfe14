//! Parts that the webhooks of several groups share: resource, operation, immutable specs, durations.

use serde::{Serialize, de::DeserializeOwned};

use crate::{
    context::{AdmissionRequest, Context, FieldErrors, Interrupt, Operation, semantic},
    rules::unsupported,
};

/// Fails a request for another resource.
pub(crate) fn expect_resource(request: &AdmissionRequest, group: &str, plural: &str) -> Result<(), Interrupt> {
    let resource = &request.resource;
    if resource.group == group && resource.resource == plural {
        return Ok(());
    }
    Err(Interrupt::failed(
        400,
        format!(
            "unexpected resource {{Group:{} Version:{} Resource:{}}}",
            resource.group, resource.version, resource.resource
        ),
    ))
}

/// Returns the failure of an operation that the webhook is not registered for.
pub(crate) fn unexpected_operation(request: &AdmissionRequest) -> Interrupt {
    let operation = match request.operation {
        Operation::Create => "CREATE",
        Operation::Update => "UPDATE",
        Operation::Delete => "DELETE",
        Operation::Connect => "CONNECT",
    };
    Interrupt::failed(400, format!("unexpected operation {operation}"))
}

/// Returns the errors of a changed object whose spec is immutable. `spec` returns the spec of the object.
pub(crate) fn validate_immutable<K, S>(context: &Context<'_>, spec: fn(&K) -> &S) -> Result<FieldErrors, Interrupt>
where
    K: DeserializeOwned,
    S: Serialize,
{
    let mut errors = FieldErrors::new();
    let object: K = context.object()?;
    if let Some(old) = context.old_object::<K>()?
        && !semantic::equal(spec(&object), spec(&old))
    {
        // The text of the reference, which clients match.
        errors.invalid("spec", "spec in immutable after creation");
    }
    Ok(errors)
}

/// Returns the errors of a new object, or the error that its kind is not supported.
pub(crate) fn or_unsupported(kind: &str, errors: FieldErrors) -> FieldErrors {
    if errors.is_empty() { unsupported::kind(kind) } else { errors }
}

/// Validates a duration; the schema accepts any text.
pub(crate) fn validate_duration(field: &str, text: Option<&String>, errors: &mut FieldErrors) {
    if let Some(text) = text
        && let Err(error) = api::duration::parse(text)
    {
        errors.invalid(field, format!("{field}: {error}"));
    }
}
