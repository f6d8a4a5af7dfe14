//! Reading an object as its kind, with the messages users of the API know for objects of the wrong shape.

use serde::de::DeserializeOwned;
use serde_json::Value;

use crate::causes::Causes;

/// Unknown fields named in a denial.
const UNKNOWN_SHOWN: usize = 10;

/// Reads an object; what is wrong with its shape otherwise.
pub fn object<T: DeserializeOwned>(raw: &Value) -> Result<T, Causes> {
    let mut causes = Causes::new();
    let Some(fields) = raw.as_object() else {
        causes.shape("the request carries no object");
        return Err(causes);
    };
    for key in fields.keys() {
        if !["apiVersion", "kind", "metadata", "spec", "status"].contains(&key.as_str()) {
            causes.shape(format!(".{key} in body is a forbidden property"));
        }
    }
    if !fields.contains_key("spec") {
        causes.shape("spec in body is required");
    }
    if !causes.is_empty() {
        return Err(causes);
    }

    let mut unknown = vec![];
    let mut note = |path: serde_ignored::Path<'_>| {
        if unknown.len() < UNKNOWN_SHOWN {
            unknown.push(dotted(&path.to_string()));
        }
    };
    let mut track = serde_path_to_error::Track::new();
    let tracked = serde_path_to_error::Deserializer::new(raw, &mut track);
    let read = T::deserialize(serde_ignored::Deserializer::new(tracked, &mut note));
    for path in unknown.iter().filter(|path| is_closed(path)) {
        causes.shape(format!("{path} in body is a forbidden property"));
    }
    match read {
        Ok(object) if causes.is_empty() => Ok(object),
        Ok(_) => Err(causes),
        Err(error) => {
            causes.shape(explain(&track.path().to_string(), &error.to_string()));
            Err(causes)
        }
    }
}

/// Whether unknown fields at a path are an error. The status may hold fields of other versions, and metadata is the
/// API server's.
fn is_closed(path: &str) -> bool {
    path.starts_with("spec.") && !path.contains("metadata.")
}

/// Paths of lists come as `volumes.0.name` or `volumes[0].name`; the latter is what users know. Members of optional
/// fields come as `?`.
fn dotted(path: &str) -> String {
    let mut out = String::new();
    for part in path.split('.').filter(|part| *part != "?") {
        if !part.is_empty() && part.bytes().all(|byte| byte.is_ascii_digit()) {
            out.push_str(&format!("[{part}]"));
        } else {
            if !out.is_empty() {
                out.push('.');
            }
            out.push_str(part);
        }
    }
    out
}

/// Puts an error of the reader into the form of the schema check users know.
fn explain(path: &str, error: &str) -> String {
    let path = dotted(path);
    if let Some(field) = error.strip_prefix("missing field `").and_then(|rest| rest.split('`').next()) {
        let path = if path.is_empty() || path == "." { field.to_owned() } else { format!("{path}.{field}") };
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
        "integer" => "integer",
        "floating" => "number",
        "sequence" => "array",
        "null" | "unit" => "null",
        _ => "object",
    }
}

#[cfg(test)]
mod tests {
    use api::VirtualMachineInstance;
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
    fn top_level_is_closed() {
        assert_eq!(message(json!({"spec": {}, "extra": 1})), ".extra in body is a forbidden property");
        assert_eq!(message(json!({"metadata": {}})), "spec in body is required");
        assert_eq!(message(json!([])), "the request carries no object");
    }
}
