//! JSON schemas of options and answers, with keywords of both OpenAPI 2 and 3.

use schemars::{JsonSchema, generate::SchemaSettings};
use serde_json::{Map, Value, json};

/// Returns the schema of options: that of their type, and the fields that all objects have.
pub(crate) fn options<T: JsonSchema>() -> Value {
    let mut schema = of::<T>();
    if let Some(properties) = schema.get_mut("properties").and_then(Value::as_object_mut) {
        for name in ["kind", "apiVersion"] {
            properties.insert(name.to_owned(), json!({"type": "string"}));
        }
    }
    schema
}

/// Returns the schema of a VirtualMachine, which its definition contains.
pub(crate) fn vm() -> Value {
    json!({"type": "object", "description": "a VirtualMachine of kubevirt.io/v1"})
}

/// Returns the schema of a type without references, which could clash with definitions of other servers.
pub(crate) fn of<T: JsonSchema>() -> Value {
    let settings = SchemaSettings::openapi3().with(|settings| settings.inline_subschemas = true);
    let mut schema = settings.into_generator().into_root_schema_for::<T>().to_value();
    tidy(&mut schema);
    schema
}

/// Removes fields that OpenAPI 2 does not know and clients do not need.
fn tidy(schema: &mut Value) {
    match schema {
        Value::Object(fields) => {
            for name in ["$schema", "title", "nullable", "default", "deprecated"] {
                // A property may bear such a name; its value is a schema then.
                if fields.get(name).is_some_and(|value| name == "default" || !value.is_object()) {
                    fields.remove(name);
                }
            }
            for name in ["anyOf", "oneOf"] {
                // A property may bear such a name as well.
                if fields.get(name).is_some_and(Value::is_array)
                    && let Some(Value::Array(alternatives)) = fields.remove(name)
                {
                    merge_alternatives(fields, alternatives);
                }
            }
            fields.values_mut().for_each(tidy);
        }
        Value::Array(items) => items.iter_mut().for_each(tidy),
        _ => {}
    }
}

/// Merges alternatives into their schema, since OpenAPI 2 has none: the one that is not null, or all values of an
/// enumeration. Other alternatives are omitted.
fn merge_alternatives(schema: &mut Map<String, Value>, alternatives: Vec<Value>) {
    let null = json!({"enum": [null]});
    let mut left = alternatives;
    left.iter_mut().for_each(tidy);
    left.retain(|one| *one != null);
    if left.len() > 1 && left.iter().all(|one| one["type"] == "string" && one["enum"].is_array()) {
        let words = left.iter().filter_map(|one| one["enum"].as_array()).flatten().cloned().collect::<Vec<_>>();
        left = vec![json!({"type": "string", "enum": words})];
    }
    if let [Value::Object(only)] = left.as_mut_slice() {
        for (name, value) in std::mem::take(only) {
            schema.entry(name).or_insert(value);
        }
    }
}
