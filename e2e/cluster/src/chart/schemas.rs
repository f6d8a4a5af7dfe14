//! JSON Schemas of kinds, from the OpenAPI document of Kubernetes and from custom resource definitions.
//!
//! They are strict: an object has no properties but those of the schema.

use std::collections::BTreeSet;

use serde_json::{Map, Value, json};

/// Template of the path of a schema in the language of kubeconform.
pub(super) const TEMPLATE: &str = "{{ .Group }}_{{ .ResourceKind }}_{{ .ResourceAPIVersion }}.json";

/// Keys that the schemas do not need.
const LEFT_OUT: &[&str] = &["description", "format", "default", "x-kubernetes-validations"];

/// Returns the path of a schema as kubeconform computes it.
fn file_name(group: &str, kind: &str, version: &str) -> String {
    // The template has the version in the place of an empty group.
    let group = if group.is_empty() { version } else { group };
    format!("{group}_{}_{version}.json", kind.to_lowercase())
}

/// Returns the schemas of all kinds of an OpenAPI document, by their file names.
pub(super) fn of_kubernetes(document: &Value) -> Vec<(String, Value)> {
    let Some(definitions) = document["definitions"].as_object() else { return Vec::new() };
    let mut found = Vec::new();
    for (name, definition) in definitions {
        // Kinds of requests, such as DeleteOptions, are in many groups.
        let Some([kind]) = definition["x-kubernetes-group-version-kind"].as_array().map(Vec::as_slice) else {
            continue;
        };
        let text = |key: &str| kind[key].as_str().unwrap_or_default();
        let mut used = BTreeSet::new();
        collect(definitions, name, &mut used);
        let used: Map<String, Value> = used
            .into_iter()
            .map(|name| (name.to_owned(), special(name).unwrap_or_else(|| strict(&definitions[name]))))
            .collect();
        let schema = json!({"$ref": format!("#/definitions/{name}"), "definitions": used});
        found.push((file_name(text("group"), text("kind"), text("version")), schema));
    }
    found
}

/// Collects a definition and all that it refers to.
fn collect<'a>(definitions: &'a Map<String, Value>, name: &'a str, used: &mut BTreeSet<&'a str>) {
    let Some(definition) = definitions.get(name) else { return };
    if used.insert(name) {
        references(definition, &mut |name| collect(definitions, name, used));
    }
}

fn references<'a>(value: &'a Value, visit: &mut impl FnMut(&'a str)) {
    match value {
        Value::Object(fields) => {
            let reference = fields.get("$ref").and_then(Value::as_str);
            if let Some(name) = reference.and_then(|reference| reference.strip_prefix("#/definitions/")) {
                visit(name);
            }
            fields.values().for_each(|value| references(value, visit));
        }
        Value::Array(items) => items.iter().for_each(|value| references(value, visit)),
        _ => {}
    }
}

/// Returns the schema of a definition whose JSON differs from what the document says.
fn special(name: &str) -> Option<Value> {
    match name {
        "io.k8s.apimachinery.pkg.util.intstr.IntOrString" => Some(json!({"type": ["integer", "string"]})),
        "io.k8s.apimachinery.pkg.api.resource.Quantity" => Some(json!({"type": ["number", "string"]})),
        _ => None,
    }
}

/// Returns the schemas of all versions of a custom resource definition, by their file names.
pub(super) fn of_definition(definition: &Value) -> Vec<(String, Value)> {
    let spec = &definition["spec"];
    let (group, kind) =
        (spec["group"].as_str().unwrap_or_default(), spec["names"]["kind"].as_str().unwrap_or_default());
    let versions = spec["versions"].as_array().map(Vec::as_slice).unwrap_or_default();
    let schemas = versions.iter().map(|version| {
        let mut schema = strict(&version["schema"]["openAPIV3Schema"]);
        // The API server adds them.
        for key in ["apiVersion", "kind", "metadata"] {
            let type_ = if key == "metadata" { "object" } else { "string" };
            schema["properties"][key] = json!({"type": type_});
        }
        (file_name(group, kind, version["name"].as_str().unwrap_or_default()), schema)
    });
    schemas.collect()
}

/// Returns a schema that refuses unknown properties.
fn strict(schema: &Value) -> Value {
    let Value::Object(fields) = schema else { return schema.clone() };
    let mut found = Map::new();
    for (key, value) in fields.iter().filter(|(key, _)| !LEFT_OUT.contains(&key.as_str())) {
        let value = match key.as_str() {
            "properties" => value
                .as_object()
                .map(|properties| properties.iter().map(|(name, schema)| (name.clone(), strict(schema))).collect())
                .map_or_else(|| value.clone(), Value::Object),
            "items" | "additionalProperties" => strict(value),
            // Conditions name some properties of the schema around them.
            _ => value.clone(),
        };
        found.insert(key.clone(), value);
    }
    let is = |key: &str| fields.get(key) == Some(&Value::Bool(true));
    if found.contains_key("properties")
        && !found.contains_key("additionalProperties")
        && !is("x-kubernetes-preserve-unknown-fields")
    {
        found.insert("additionalProperties".into(), Value::Bool(false));
    }
    if is("x-kubernetes-int-or-string") {
        found.insert("type".into(), json!(["integer", "string"]));
    }
    if is("nullable")
        && let Some(Value::String(type_)) = fields.get("type")
    {
        found.insert("type".into(), json!([type_, "null"]));
    }
    Value::Object(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kinds_of_kubernetes_have_the_definitions_that_they_use() {
        let document = json!({"definitions": {
            "a.Pod": {
                "x-kubernetes-group-version-kind": [{"group": "", "kind": "Pod", "version": "v1"}],
                "properties": {"spec": {"$ref": "#/definitions/a.Spec", "description": "d"}},
            },
            "a.Spec": {"properties": {
                "port": {"$ref": "#/definitions/io.k8s.apimachinery.pkg.util.intstr.IntOrString"},
                "again": {"items": {"$ref": "#/definitions/a.Spec"}},
            }},
            "a.Other": {"properties": {}},
            "a.Options": {"x-kubernetes-group-version-kind": [
                {"group": "", "kind": "Options", "version": "v1"},
                {"group": "x", "kind": "Options", "version": "v1"},
            ]},
            "io.k8s.apimachinery.pkg.util.intstr.IntOrString": {"type": "string", "format": "int-or-string"},
        }});
        let found = of_kubernetes(&document);
        assert_eq!(found.len(), 1);
        let (name, schema) = &found[0];
        assert_eq!(name, "v1_pod_v1.json");
        assert_eq!(schema["$ref"], "#/definitions/a.Pod");
        let definitions = schema["definitions"].as_object().unwrap();
        assert_eq!(definitions.len(), 3);
        assert_eq!(definitions["a.Pod"]["additionalProperties"], false);
        assert!(definitions["a.Pod"]["properties"]["spec"].get("description").is_none());
        let number = &definitions["io.k8s.apimachinery.pkg.util.intstr.IntOrString"];
        assert_eq!(number["type"], json!(["integer", "string"]));
    }

    #[test]
    fn custom_resources_are_strict_where_their_definition_is() {
        let definition = json!({"spec": {"group": "g.io", "names": {"kind": "Thing"}, "versions": [
            {"name": "v1", "schema": {"openAPIV3Schema": {"type": "object", "properties": {
                "spec": {"type": "object", "properties": {
                    "description": {"type": "string", "nullable": true, "description": "d"},
                    "count": {"x-kubernetes-int-or-string": true, "anyOf": [{"type": "integer"}, {"type": "string"}]},
                    "any": {"type": "object", "properties": {}, "x-kubernetes-preserve-unknown-fields": true},
                    "map": {"type": "object", "additionalProperties": {"type": "object", "properties": {}}},
                }},
            }}}},
        ]}});
        let found = of_definition(&definition);
        assert_eq!(found.len(), 1);
        let (name, schema) = &found[0];
        assert_eq!(name, "g.io_thing_v1.json");
        assert_eq!(schema["additionalProperties"], false);
        assert_eq!(schema["properties"]["metadata"], json!({"type": "object"}));
        let spec = &schema["properties"]["spec"];
        assert_eq!(spec["additionalProperties"], false);
        // A property may have the name of a key that is left out.
        assert_eq!(spec["properties"]["description"], json!({"type": ["string", "null"], "nullable": true}));
        assert_eq!(spec["properties"]["count"]["type"], json!(["integer", "string"]));
        assert!(spec["properties"]["any"].get("additionalProperties").is_none());
        assert_eq!(spec["properties"]["map"]["additionalProperties"]["additionalProperties"], false);
    }
}
