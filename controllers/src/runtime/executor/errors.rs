//! Errors of writes.

use super::{Effect, WriteOptions};

/// The error of a write.
#[derive(Debug)]
pub(super) enum WriteError {
    /// The API server refused the write with this message.
    Refused(String),
    /// The object has changed.
    Stale,
    /// The object does not exist, or its namespace is being deleted.
    Gone,
    /// The API server did not answer or is overloaded.
    Unreachable(String),
    /// Leadership was lost between the requests of the write.
    NotLeading,
}

/// Length of the suffix that the API server appends to `generateName`.
const GENERATED_SUFFIX: usize = 5;

/// Removes the generated name from a refusal. With it, each attempt would look like a new problem.
pub(super) fn without_generated_name(message: String, effect: &Effect) -> String {
    let Effect::Create { object, .. } = effect else { return message };
    let Some(prefix) = object["metadata"]["generateName"].as_str().filter(|prefix| !prefix.is_empty()) else {
        return message;
    };
    let mut parts = message.split(prefix);
    let mut text = parts.next().unwrap_or_default().to_owned();
    for part in parts {
        let suffix = part.bytes().take(GENERATED_SUFFIX).take_while(u8::is_ascii_alphanumeric).count();
        text.push_str(prefix);
        text.push_str(if suffix == GENERATED_SUFFIX { &part[GENERATED_SUFFIX..] } else { part });
    }
    text
}

/// Returns true if a creation was refused because the object exists. A conflict can have other causes, such as a quota.
pub(super) fn exists(error: &kube::Error) -> bool {
    matches!(error, kube::Error::Api(status) if status.code == 409 && status.reason == "AlreadyExists")
}

pub(super) fn not_created(error: &kube::Error, options: &WriteOptions) -> WriteError {
    match &options.existing_refuses {
        Some(refusal) if exists(error) => WriteError::Refused(refusal.clone()),
        _ => classify(error, true),
    }
}

/// Cause of a refused creation in a namespace that is being deleted.
const TERMINATING: &str = "NamespaceTerminating";

/// Sorts errors into those that users see and those after which the write is repeated.
pub(super) fn classify(error: &kube::Error, create: bool) -> WriteError {
    let kube::Error::Api(status) = error else { return WriteError::Unreachable(error.to_string()) };
    let mut causes = status.details.iter().flat_map(|details| &details.causes);
    match status.code {
        403 if causes.any(|cause| cause.reason == TERMINATING) => WriteError::Gone,
        404 if !create => WriteError::Gone,
        // Creation with a fixed name: the object exists, and the watch delivers it.
        409 => WriteError::Stale,
        // An unreachable webhook results in 500. Errors of the API server itself are no refusal.
        429 | 502 | 503 | 504 => WriteError::Unreachable(status.message.clone()),
        _ => WriteError::Refused(status.message.clone()),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::{super::Kind, *};

    #[test]
    fn refusals_of_generated_names_read_the_same_each_time() {
        let object = json!({"metadata": {"generateName": "virt-launcher-m-"}});
        let effect = Effect::Create { kind: Kind::Pod, namespace: None, object, options: WriteOptions::default() };
        let shown = |message: &str| without_generated_name(message.to_owned(), &effect);
        assert_eq!(shown("pods \"virt-launcher-m-5v42t\" is forbidden"), "pods \"virt-launcher-m-\" is forbidden");
        assert_eq!(shown("no name in it"), "no name in it");
        assert_eq!(shown("virt-launcher-m-\u{fc}"), "virt-launcher-m-\u{fc}");
    }

    #[test]
    fn errors_are_shown_repeated_or_ignored_by_their_kind() {
        let error = |code: u16| {
            let status = json!({"status": "Failure", "message": "m", "reason": "r", "code": code});
            kube::Error::Api(Box::new(serde_json::from_value(status).unwrap()))
        };
        assert!(matches!(classify(&error(403), true), WriteError::Refused(_)));
        let terminating = json!({"status": "Failure", "message": "m", "reason": "Forbidden", "code": 403, "details": {
            "name": "a", "kind": "virtualmachineinstances",
            "causes": [{"reason": "NamespaceTerminating", "message": "namespace n is being terminated", "field": "metadata.namespace"}],
        }});
        let terminating = kube::Error::Api(Box::new(serde_json::from_value(terminating).unwrap()));
        assert!(matches!(classify(&terminating, true), WriteError::Gone));
        assert!(matches!(classify(&error(422), false), WriteError::Refused(_)));
        assert!(matches!(classify(&error(409), false), WriteError::Stale));
        assert!(!exists(&error(409)));
        assert!(matches!(classify(&error(404), false), WriteError::Gone));
        assert!(matches!(classify(&error(404), true), WriteError::Refused(_)));
        assert!(matches!(classify(&error(503), true), WriteError::Unreachable(_)));
    }

    #[test]
    fn taken_name_is_a_refusal_if_the_effect_requires_it() {
        let error = |reason: &str| {
            let status = json!({"status": "Failure", "message": "m", "reason": reason, "code": 409});
            kube::Error::Api(Box::new(serde_json::from_value(status).unwrap()))
        };
        let options = WriteOptions { existing_refuses: Some("taken".to_owned()), ..WriteOptions::default() };
        let refused = not_created(&error("AlreadyExists"), &options);
        assert!(matches!(refused, WriteError::Refused(message) if message == "taken"));
        assert!(matches!(not_created(&error("Conflict"), &options), WriteError::Stale));
        assert!(matches!(not_created(&error("AlreadyExists"), &WriteOptions::default()), WriteError::Stale));
    }
}
