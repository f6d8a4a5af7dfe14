//! What the webhooks of the younger groups have in common: which resource and operation they are for, in the words
//! their clients know, and specs that never change.

use serde::{Serialize, de::DeserializeOwned};

use crate::{
    causes::Causes,
    review::{Operation, Request},
    semantic, unsupported,
    webhook::{Context, Stop},
};

/// Refuses a review of another resource.
pub(crate) fn expect(request: &Request, group: &str, plural: &str) -> Result<(), Stop> {
    let resource = &request.resource;
    if resource.group == group && resource.resource == plural {
        return Ok(());
    }
    Err(Stop::refused(
        400,
        format!(
            "unexpected resource {{Group:{} Version:{} Resource:{}}}",
            resource.group, resource.version, resource.resource
        ),
    ))
}

/// Refuses a review of an operation the webhook is not registered for.
pub(crate) fn unexpected_operation(request: &Request) -> Stop {
    let operation = match request.operation {
        Operation::Create => "CREATE",
        Operation::Update => "UPDATE",
        Operation::Delete => "DELETE",
        Operation::Connect => "CONNECT",
    };
    Stop::refused(400, format!("unexpected operation {operation}"))
}

/// What is wrong with a changed object whose spec is to stay as it is. `spec` takes the spec out of the object.
pub(crate) fn immutable<K, S>(context: &Context<'_>, spec: fn(&K) -> &S) -> Result<Causes, Stop>
where
    K: DeserializeOwned,
    S: Serialize,
{
    let mut causes = Causes::new();
    let object: K = context.object()?;
    if let Some(old) = context.old_object::<K>()?
        && !semantic::equal(spec(&object), spec(&old))
    {
        // Clients know the sentence as it is.
        causes.invalid("spec", "spec in immutable after creation");
    }
    Ok(causes)
}

/// What is wrong with a new object; when nothing is, that nothing works on its kind yet.
pub(crate) fn or_unsupported(kind: &str, causes: Causes) -> Causes {
    if causes.is_empty() { unsupported::kind(kind) } else { causes }
}

/// Checks a duration: the API server takes any text for one.
pub(crate) fn duration(field: &str, text: Option<&String>, causes: &mut Causes) {
    if let Some(text) = text
        && let Err(error) = api::duration::parse(text)
    {
        causes.invalid(field, format!("{field}: {error}"));
    }
}
