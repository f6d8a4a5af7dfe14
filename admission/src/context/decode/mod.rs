//! Decodes objects, with the messages of the API server's schema check for objects that do not match their schema.

mod tracked;

use serde::de::DeserializeOwned;
use serde_json::{Map, Value};

use self::tracked::Tracked;
use super::{FieldErrors, FieldPath};

/// Unknown fields named in a denial.
const UNKNOWN_SHOWN: usize = 10;

/// Returns the members of an object, or the error that it is none.
pub fn members(raw: &Value) -> Result<&Map<String, Value>, FieldErrors> {
    raw.as_object().ok_or_else(|| {
        let mut errors = FieldErrors::new();
        errors.schema("the request carries no object");
        errors
    })
}

/// Returns the errors of the members of an object without regard to their values: unknown ones, and a missing spec.
pub(crate) fn member_errors(fields: &Map<String, Value>) -> FieldErrors {
    let mut errors = FieldErrors::new();
    for key in fields.keys() {
        if !["apiVersion", "kind", "metadata", "spec", "status"].contains(&key.as_str()) {
            errors.schema(format!(".{key} in body is a forbidden property"));
        }
    }
    if !fields.contains_key("spec") {
        errors.schema("spec in body is required");
    }
    errors
}

/// Decodes an object and rejects unknown fields of its spec.
pub fn object<T: DeserializeOwned>(raw: &Value) -> Result<T, FieldErrors> {
    let fields = members(raw)?;
    let mut errors = member_errors(fields);
    if !fields.contains_key("spec") {
        return Err(errors);
    }

    let mut problems = Problems::default();
    let read = T::deserialize(Tracked::new(raw, &mut problems));
    for path in problems.unknown {
        errors.schema(format!("{path} in body is a forbidden property"));
    }
    match read {
        Ok(object) if errors.is_empty() => Ok(object),
        Ok(_) => Err(errors),
        Err(error) => {
            errors.schema(explain(&problems.failed.unwrap_or_default(), &error.to_string()));
            Err(errors)
        }
    }
}

/// Decodes an object of which only the status is written. The rest passed admission before, so unknown fields are
/// accepted.
pub fn with_status<T: DeserializeOwned>(raw: &Value) -> Result<T, FieldErrors> {
    members(raw)?;
    let mut problems = Problems::default();
    let read = T::deserialize(Tracked::new(raw, &mut problems));
    read.map_err(|error| {
        let mut errors = FieldErrors::new();
        errors.schema(explain(&problems.failed.unwrap_or_default(), &error.to_string()));
        errors
    })
}

/// Decodes a stored object. It passed admission before, so unknown fields are accepted.
pub fn stored<T: DeserializeOwned>(raw: &Value) -> Result<T, serde_json::Error> {
    // Uses the same deserializer as above, so that the code of each type is compiled once.
    T::deserialize(Tracked::new(raw, &mut Problems::default()))
}

/// Paths recorded while an object is decoded.
#[derive(Default)]
struct Problems {
    /// Unknown fields.
    unknown: Vec<String>,
    /// Path at which decoding failed.
    failed: Option<String>,
}

impl Problems {
    fn add_unknown(&mut self, path: FieldPath<'_>) {
        let (FieldPath::Member(parent, _) | FieldPath::Item(parent, _)) = path else { return };
        if is_closed(parent) && self.unknown.len() < UNKNOWN_SHOWN {
            self.unknown.push(path.to_string());
        }
    }

    fn set_failed(&mut self, path: FieldPath<'_>) {
        // The innermost value reports first, then each value that contains it.
        self.failed.get_or_insert_with(|| path.to_string());
    }
}

/// Returns true if an unknown field at this path is an error. The status can have fields of other versions, and the API
/// server checks the metadata of the object. The CRDs do not check the metadata of templates, so it is checked here.
fn is_closed(path: &FieldPath<'_>) -> bool {
    match path {
        FieldPath::Root => false,
        FieldPath::Member(FieldPath::Root, key) => *key == "spec",
        FieldPath::Member(parent, _) | FieldPath::Item(parent, _) => is_closed(parent),
    }
}

/// Formats an error of the deserializer like one of the API server's schema check.
fn explain(path: &str, error: &str) -> String {
    if let Some(field) = error.strip_prefix("missing field `").and_then(|rest| rest.split('`').next()) {
        let path = if path.is_empty() { field.to_owned() } else { format!("{path}.{field}") };
        return format!("{path} in body is required");
    }
    if let Some((found, expected)) =
        error.strip_prefix("invalid type: ").and_then(|rest| rest.split_once(", expected "))
    {
        return format!("{path} in body must be of type {}: \"{}\"", expected_type(expected), found_type(found));
    }
    format!("{path} in body is not valid: {error}")
}

fn expected_type(expected: &str) -> &'static str {
    match expected {
        "a boolean" => "boolean",
        "a string" | "string" | "Quantity" | "borrowed string" => "string",
        "a sequence" => "array",
        "f64" | "f32" => "number",
        "i8" | "i16" | "i32" | "i64" | "u8" | "u16" | "u32" | "u64" => "integer",
        _ => "object",
    }
}

fn found_type(found: &str) -> &'static str {
    match found.split(' ').next().unwrap_or_default() {
        "string" | "character" => "string",
        "boolean" => "boolean",
        // The schema check reports integers as numbers, too.
        "integer" | "floating" => "number",
        "sequence" => "array",
        "null" | "unit" => "null",
        _ => "object",
    }
}

#[cfg(test)]
mod tests {
    use api::{VirtualMachine, VirtualMachineInstance};
    use serde_json::json;

    use super::*;

    fn message(raw: Value) -> String {
        let errors = object::<VirtualMachineInstance>(&raw).unwrap_err();
        errors.as_slice()[0].message.clone()
    }

    fn vmi(spec: Value) -> Value {
        json!({"apiVersion": "kubevirt.io/v1", "kind": "VirtualMachineInstance", "metadata": {"name": "a"}, "spec": spec})
    }

    #[test]
    fn well_formed_object_is_decoded() {
        assert!(object::<VirtualMachineInstance>(&vmi(json!({"domain": {"devices": {}}}))).is_ok());
    }

    #[test]
    fn schema_errors_name_the_path() {
        for (spec, want) in [
            (json!({}), "spec.domain in body is required"),
            (json!({"domain": {"devices": {"disks": [{}]}}}), "spec.domain.devices.disks[0].name in body is required"),
            (
                json!({"domain": {"devices": {}, "cpu": {"cores": "two"}}}),
                "spec.domain.cpu.cores in body must be of type integer: \"string\"",
            ),
            (
                json!({"domain": {"devices": {}, "clock": {"utc": {"offset": 3}}}}),
                "spec.domain.clock.utc.offset in body is a forbidden property",
            ),
            (
                json!({"domain": {"devices": {"interfaces": [{"name": "a", "frob": {}}]}}}),
                "spec.domain.devices.interfaces[0].frob in body is a forbidden property",
            ),
        ] {
            assert_eq!(message(vmi(spec)), want);
        }
    }

    #[test]
    fn paths_are_those_of_the_schema_check() {
        for (spec, want) in [
            (
                json!({"domain": {"devices": {}}, "nodeSelector": {"a/b": 1}}),
                "spec.nodeSelector.a/b in body must be of type string: \"number\"",
            ),
            (
                json!({"domain": {"devices": {}}, "tolerations": [{}, {"tolerationSeconds": true}]}),
                "spec.tolerations[1].tolerationSeconds in body must be of type integer: \"boolean\"",
            ),
            (json!(1), "spec in body must be of type object: \"number\""),
            (
                json!({"domain": {"devices": {}, "resources": {"requests": {"memory": true}}}}),
                "spec.domain.resources.requests.memory in body must be of type string: \"boolean\"",
            ),
        ] {
            let found = message(vmi(spec.clone()));
            assert!(found.starts_with(want), "{spec}: {found}");
        }
    }

    #[test]
    fn unknown_fields_of_the_spec_are_errors_up_to_a_limit() {
        let mut object = vmi(json!({"domain": {"devices": {}}}));
        for number in 0..20 {
            object["metadata"][format!("m{number}")] = json!({"a": {}});
        }
        object["status"] = json!({"of": "another version"});
        assert!(super::object::<VirtualMachineInstance>(&object).is_ok());
        for number in 0..20 {
            object["spec"][format!("s{number:02}")] = json!([{"a": {}}]);
        }
        let errors = super::object::<VirtualMachineInstance>(&object).unwrap_err();
        assert_eq!(errors.as_slice().len(), UNKNOWN_SHOWN);
        assert_eq!(errors.as_slice()[3].message, "spec.s03 in body is a forbidden property");
        assert!(stored::<VirtualMachineInstance>(&object).is_ok());
    }

    #[test]
    fn unknown_stored_fields_do_not_block_status_writes() {
        let vm = |status: Value| {
            with_status::<VirtualMachine>(&json!({
                "apiVersion": "kubevirt.io/v1", "kind": "VirtualMachine", "metadata": {"name": "a"},
                "spec": {"odd": 1, "template": {"metadata": {"odd": 1}, "spec": {"domain": {"devices": {}}}}},
                "status": status,
            }))
        };
        assert!(vm(json!({"ready": true, "odd": 1})).is_ok());
        let errors = vm(json!({"ready": "yes"})).unwrap_err();
        assert_eq!(errors.as_slice()[0].message, "status.ready in body must be of type boolean: \"string\"");
        assert_eq!(with_status::<VirtualMachine>(&json!([])).unwrap_err().as_slice().len(), 1);
    }

    #[test]
    fn unknown_metadata_of_a_template_is_an_error() {
        let read = |metadata: Value| {
            object::<VirtualMachine>(&json!({
                "apiVersion": "kubevirt.io/v1", "kind": "VirtualMachine", "metadata": {"name": "a", "unknown": 1},
                "spec": {"template": {"metadata": metadata, "spec": {"domain": {"devices": {}}}}},
            }))
        };
        assert!(read(json!({"labels": {"metadata": "a"}, "creationTimestamp": null})).is_ok());
        let errors = read(json!({"label": {"a": "b"}})).unwrap_err();
        let messages: Vec<&str> = errors.as_slice().iter().map(|error| error.message.as_str()).collect();
        assert_eq!(messages, ["spec.template.metadata.label in body is a forbidden property"]);
    }

    #[test]
    fn unknown_top_level_fields_are_errors() {
        assert_eq!(message(json!({"spec": {}, "extra": 1})), ".extra in body is a forbidden property");
        assert_eq!(message(json!({"metadata": {}})), "spec in body is required");
        assert_eq!(message(json!([])), "the request carries no object");
        let errors = object::<VirtualMachineInstance>(&json!({"very": 1, "spec": {"odd": 1}})).unwrap_err();
        let messages: Vec<&str> = errors.as_slice().iter().map(|error| error.message.as_str()).collect();
        assert_eq!(
            messages,
            [
                ".very in body is a forbidden property",
                "spec.odd in body is a forbidden property",
                "spec.domain in body is required",
            ]
        );
    }
}
