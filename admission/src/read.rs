//! Reading an object as its kind, with the messages users of the API know for objects of the wrong shape.

mod tracked;

use serde::de::DeserializeOwned;
use serde_json::{Map, Value};

use self::tracked::Tracked;
use crate::{causes::Causes, place::Place};

/// Unknown fields named in a denial.
const UNKNOWN_SHOWN: usize = 10;

/// The members of an object; what is wrong with it when it is none.
pub fn members(raw: &Value) -> Result<&Map<String, Value>, Causes> {
    raw.as_object().ok_or_else(|| {
        let mut causes = Causes::new();
        causes.shape("the request carries no object");
        causes
    })
}

/// Reads an object; what is wrong with its shape otherwise.
pub fn object<T: DeserializeOwned>(raw: &Value) -> Result<T, Causes> {
    let fields = members(raw)?;
    let mut causes = Causes::new();
    for key in fields.keys() {
        if !["apiVersion", "kind", "metadata", "spec", "status"].contains(&key.as_str()) {
            causes.shape(format!(".{key} in body is a forbidden property"));
        }
    }
    if !fields.contains_key("spec") {
        causes.shape("spec in body is required");
        return Err(causes);
    }

    let mut notes = Notes::default();
    let read = T::deserialize(Tracked::new(raw, &mut notes));
    for path in notes.unknown {
        causes.shape(format!("{path} in body is a forbidden property"));
    }
    match read {
        Ok(object) if causes.is_empty() => Ok(object),
        Ok(_) => Err(causes),
        Err(error) => {
            causes.shape(explain(&notes.fault.unwrap_or_default(), &error.to_string()));
            Err(causes)
        }
    }
}

/// Reads an object of which only the status is written; what is wrong with its shape otherwise. The rest of it passed
/// admission once, so what the type does not know is let pass.
pub fn with_status<T: DeserializeOwned>(raw: &Value) -> Result<T, Causes> {
    members(raw)?;
    let mut notes = Notes::default();
    let read = T::deserialize(Tracked::new(raw, &mut notes));
    read.map_err(|error| {
        let mut causes = Causes::new();
        causes.shape(explain(&notes.fault.unwrap_or_default(), &error.to_string()));
        causes
    })
}

/// Reads an object that the API server has. It passed admission once, so what the type does not know of it is let pass.
pub fn stored<T: DeserializeOwned>(raw: &Value) -> Result<T, serde_json::Error> {
    // As above, so that there is one reader for each type.
    T::deserialize(Tracked::new(raw, &mut Notes::default()))
}

/// What is noticed while an object is read.
#[derive(Default)]
struct Notes {
    /// Fields that are an error because nobody knows them.
    unknown: Vec<String>,
    /// Where reading failed.
    fault: Option<String>,
}

impl Notes {
    fn unknown(&mut self, place: Place<'_>) {
        let (Place::Member(parent, _) | Place::Item(parent, _)) = place else { return };
        if is_closed(parent) && self.unknown.len() < UNKNOWN_SHOWN {
            self.unknown.push(place.to_string());
        }
    }

    fn failed(&mut self, place: Place<'_>) {
        // What failed tells it first, then all that it is in.
        self.fault.get_or_insert_with(|| place.to_string());
    }
}

/// Whether an unknown field in this is an error. The status may hold fields of other versions, and the object's metadata
/// is the API server's; that of a template is not, which the definitions keep as it comes.
fn is_closed(place: &Place<'_>) -> bool {
    match place {
        Place::Root => false,
        Place::Member(Place::Root, key) => *key == "spec",
        Place::Member(parent, _) | Place::Item(parent, _) => is_closed(parent),
    }
}

/// Puts an error of the reader into the form of the schema check users know.
fn explain(path: &str, error: &str) -> String {
    if let Some(field) = error.strip_prefix("missing field `").and_then(|rest| rest.split('`').next()) {
        let path = if path.is_empty() { field.to_owned() } else { format!("{path}.{field}") };
        return format!("{path} in body is required");
    }
    if let Some((found, wanted)) = error.strip_prefix("invalid type: ").and_then(|rest| rest.split_once(", expected "))
    {
        return format!("{path} in body must be of type {}: \"{}\"", wanted_type(wanted), found_type(found));
    }
    format!("{path} in body is not valid: {error}")
}

fn wanted_type(wanted: &str) -> &'static str {
    match wanted {
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
        // Whole numbers are told as the others are.
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
        let causes = object::<VirtualMachineInstance>(&raw).unwrap_err();
        causes.as_slice()[0].message.clone()
    }

    fn machine(spec: Value) -> Value {
        json!({"apiVersion": "kubevirt.io/v1", "kind": "VirtualMachineInstance", "metadata": {"name": "a"}, "spec": spec})
    }

    #[test]
    fn well_formed_object_reads() {
        assert!(object::<VirtualMachineInstance>(&machine(json!({"domain": {"devices": {}}}))).is_ok());
    }

    #[test]
    fn wrong_shapes_are_named_by_path() {
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
            assert_eq!(message(machine(spec)), want);
        }
    }

    #[test]
    fn places_are_told_as_users_know_them() {
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
            let told = message(machine(spec.clone()));
            assert!(told.starts_with(want), "{spec}: {told}");
        }
    }

    #[test]
    fn unknown_fields_count_in_the_spec_only_and_some_are_shown() {
        let mut object = machine(json!({"domain": {"devices": {}}}));
        for number in 0..20 {
            object["metadata"][format!("m{number}")] = json!({"a": {}});
        }
        object["status"] = json!({"of": "another version"});
        assert!(super::object::<VirtualMachineInstance>(&object).is_ok());
        for number in 0..20 {
            object["spec"][format!("s{number:02}")] = json!([{"a": {}}]);
        }
        let causes = super::object::<VirtualMachineInstance>(&object).unwrap_err();
        assert_eq!(causes.as_slice().len(), UNKNOWN_SHOWN);
        assert_eq!(causes.as_slice()[3].message, "spec.s03 in body is a forbidden property");
        assert!(stored::<VirtualMachineInstance>(&object).is_ok());
    }

    #[test]
    fn what_was_stored_does_not_hold_up_the_status() {
        let vm = |status: Value| {
            with_status::<VirtualMachine>(&json!({
                "apiVersion": "kubevirt.io/v1", "kind": "VirtualMachine", "metadata": {"name": "a"},
                "spec": {"odd": 1, "template": {"metadata": {"odd": 1}, "spec": {"domain": {"devices": {}}}}},
                "status": status,
            }))
        };
        assert!(vm(json!({"ready": true, "odd": 1})).is_ok());
        let causes = vm(json!({"ready": "yes"})).unwrap_err();
        assert_eq!(causes.as_slice()[0].message, "status.ready in body must be of type boolean: \"string\"");
        assert_eq!(with_status::<VirtualMachine>(&json!([])).unwrap_err().as_slice().len(), 1);
    }

    #[test]
    fn metadata_of_a_template_is_closed() {
        let read = |metadata: Value| {
            object::<VirtualMachine>(&json!({
                "apiVersion": "kubevirt.io/v1", "kind": "VirtualMachine", "metadata": {"name": "a", "unknown": 1},
                "spec": {"template": {"metadata": metadata, "spec": {"domain": {"devices": {}}}}},
            }))
        };
        assert!(read(json!({"labels": {"metadata": "a"}, "creationTimestamp": null})).is_ok());
        let causes = read(json!({"label": {"a": "b"}})).unwrap_err();
        let messages: Vec<&str> = causes.as_slice().iter().map(|cause| cause.message.as_str()).collect();
        assert_eq!(messages, ["spec.template.metadata.label in body is a forbidden property"]);
    }

    #[test]
    fn top_level_is_closed() {
        assert_eq!(message(json!({"spec": {}, "extra": 1})), ".extra in body is a forbidden property");
        assert_eq!(message(json!({"metadata": {}})), "spec in body is required");
        assert_eq!(message(json!([])), "the request carries no object");
        let causes = object::<VirtualMachineInstance>(&json!({"very": 1, "spec": {"odd": 1}})).unwrap_err();
        let messages: Vec<&str> = causes.as_slice().iter().map(|cause| cause.message.as_str()).collect();
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
