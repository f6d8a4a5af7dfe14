//! Custom resource definitions, generated from the types.
//!
//! The derived schemas are converted to the published form of the API: quantities with their pattern, lists that merge by
//! key, objects that are replaced as a whole, closed enumerations, bounds, and objects that preserve unknown fields.

use std::fmt::Write;

use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use serde_json::{Map, Value, json};
use thiserror::Error;

mod backup;
mod cdi;
mod clone;
mod export;
mod instancetype;
mod kubevirt;
mod migration;
mod plugin;
mod pool;
mod preset;
mod snapshot;

/// Reasons why a CRD cannot be generated.
#[derive(Debug, Error)]
pub enum CrdError {
    /// The path of a rule does not exist in the schema.
    #[error("{crd}: the schema has no {path}")]
    NoSuchPath {
        /// Name of the CRD.
        crd: String,
        /// Path of the rule.
        path: String,
    },
    /// The CRD is not of the expected form.
    #[error("cannot convert a definition")]
    Convert(#[from] serde_json::Error),
}

const QUANTITY_PATTERN: &str = r"^(\+|-)?(([0-9]+(\.[0-9]*)?)|(\.[0-9]+))(([KMGTPE]i)|[numkMGTPE]|([eE](\+|-)?(([0-9]+(\.[0-9]*)?)|(\.[0-9]+))))?$";

/// Fields with types of Kubernetes. Their long descriptions are left out to keep the CRDs small.
const FOREIGN: [&str; 15] = [
    "affinity",
    "dnsConfig",
    "exec",
    "fields",
    "httpGet",
    "labelSelector",
    "namespaceLabelSelector",
    "nodeLabelSelector",
    "nodeSelectorRequirementMatcher",
    "pvc",
    "selector",
    "storage",
    "tcpSocket",
    "tolerations",
    "topologySpreadConstraints",
];

/// Members, sorted, of Kubernetes' own selectors and references. An applier owns all of one: server-side apply never merges
/// halves of the old and the new one. Inlining removes type names, but no other type of the schemas has exactly these
/// members.
const ATOMIC: [&[&str]; 6] = [
    &["apiGroup", "kind", "name"],
    &["apiVersion", "fieldPath"],
    &["containerName", "divisor", "resource"],
    &["matchExpressions", "matchFields"],
    &["matchExpressions", "matchLabels"],
    &["nodeSelectorTerms"],
];

/// Old version of the kinds of kubevirt.io, which is still served.
const OLD: &str = "v1alpha3";

/// Warning for clients of the old version.
const V1ALPHA3_WARNING: &str = "kubevirt.io/v1alpha3 is now deprecated and will be removed in a future release.";

/// A rule: a path of property names (`[]` selects list items, `{}` map values), and the keys to set at this path.
type Rule = (&'static str, fn() -> Value);

/// Rules on a condition list.
const CONDITION: &[Rule] = &[
    ("conditions[].lastProbeTime", || json!({"nullable": true})),
    ("conditions[].lastTransitionTime", || json!({"nullable": true})),
];

/// Returns the schema of embedded object metadata, which is preserved unchanged.
fn embedded_metadata() -> Value {
    json!({"nullable": true, "x-kubernetes-preserve-unknown-fields": true})
}

/// Generator of the CRDs of a group.
type Group = fn() -> Result<Vec<CustomResourceDefinition>, CrdError>;

/// Returns the CRDs of the importer in the order of installation. CDI has them, too: they are neither in the chart nor in [`all`],
/// and are applied only where they are absent. Label [`DEFINITION`](crate::cdi::label::DEFINITION) marks those that are ours.
pub fn importer() -> Result<Vec<CustomResourceDefinition>, CrdError> {
    cdi::definitions()
}

/// Returns all CRDs of the chart in the order of installation.
pub fn all() -> Result<Vec<CustomResourceDefinition>, CrdError> {
    let groups: &[Group] = &[
        kubevirt::definitions,
        instancetype::definitions,
        preset::definitions,
        migration::definitions,
        pool::definitions,
        snapshot::definitions,
        export::definitions,
        clone::definitions,
        backup::definitions,
        plugin::definitions,
    ];
    let mut definitions = vec![];
    for group in groups {
        definitions.extend(group()?);
    }
    Ok(definitions)
}

/// Returns the file name of a CRD.
pub fn file_name(crd: &CustomResourceDefinition) -> String {
    format!("{}.yaml", crd.spec.names.plural)
}

/// Renders a CRD as YAML for the chart: one line for each field that has no fields of its own, and an indent of one. The Secret in
/// which Helm stores the chart is a tenth smaller than with the usual form.
pub fn yaml(crd: &CustomResourceDefinition) -> Result<String, CrdError> {
    let mut text = String::new();
    write_block(&mut text, &serde_json::to_value(crd)?, 0);
    Ok(text)
}

/// Writes an object or a list in lines with this indent. JSON is YAML, too.
fn write_block(text: &mut String, value: &Value, indent: usize) {
    let pad = " ".repeat(indent);
    let mut write = |name: &str, value: &Value| {
        if has_lines(value) {
            let _ = writeln!(text, "{pad}{name}");
            write_block(text, value, indent + 1);
        } else {
            let _ = writeln!(text, "{pad}{name} {value}");
        }
    };
    match value {
        Value::Object(fields) => fields.iter().for_each(|(key, value)| write(&format!("{}:", quoted(key)), value)),
        Value::Array(items) => items.iter().for_each(|item| write("-", item)),
        _ => {}
    }
}

/// Returns true if a value is written in lines of its own: not a scalar, and neither a schema nor a column without fields.
fn has_lines(value: &Value) -> bool {
    match value {
        Value::Object(fields) => {
            let ends = fields.get("type").is_some_and(Value::is_string) || fields.contains_key("anyOf");
            !fields.is_empty() && (!ends || has_fields(value))
        }
        Value::Array(items) => items.iter().any(Value::is_object),
        _ => false,
    }
}

fn has_fields(schema: &Value) -> bool {
    let inner = ["items", "additionalProperties"].iter().filter_map(|key| schema.get(*key));
    schema.get("properties").is_some() || inner.into_iter().any(has_fields)
}

/// Returns a key, in quotes if YAML reads it as something else.
fn quoted(key: &str) -> String {
    let plain = key.starts_with(|first: char| first.is_ascii_alphabetic())
        && key.chars().all(|c| c.is_ascii_alphanumeric() || "-_./".contains(c))
        && !["y", "n", "yes", "no", "on", "off", "true", "false", "null"].contains(&key.to_lowercase().as_str());
    if plain { key.to_owned() } else { json!(key).to_string() }
}

/// A CRD that is converted from the derived form to the installed one.
struct Definition {
    crd: Value,
    name: String,
    label: &'static str,
}

impl Definition {
    fn new(crd: &CustomResourceDefinition) -> Result<Self, CrdError> {
        let mut definition = Self {
            name: crd.metadata.name.clone().unwrap_or_default(),
            crd: serde_json::to_value(crd)?,
            label: "kubevirt.io",
        };
        normalize(definition.root()?, false);
        let root = definition.root()?;
        root["properties"]["metadata"] = json!({"type": "object"});
        Ok(definition)
    }

    fn root(&mut self) -> Result<&mut Value, CrdError> {
        let name = &self.name;
        self.crd
            .pointer_mut("/spec/versions/0/schema/openAPIV3Schema")
            .ok_or_else(|| CrdError::NoSuchPath { crd: name.clone(), path: String::new() })
    }

    fn rules(mut self, base: &str, rules: &[Rule]) -> Result<Self, CrdError> {
        let name = self.name.clone();
        for (path, keys) in rules {
            let full = if base.is_empty() { (*path).to_owned() } else { format!("{base}.{path}") };
            let node = descend(self.root()?, &full)
                .ok_or_else(|| CrdError::NoSuchPath { crd: name.clone(), path: full.clone() })?;
            let keys = keys();
            // A name with an empty default is not required.
            let may_be_absent = keys.get("default") == Some(&json!(""));
            if let (Some(node), Value::Object(keys)) = (node.as_object_mut(), keys) {
                if keys.contains_key("x-kubernetes-preserve-unknown-fields") && full.ends_with("metadata") {
                    node.remove("properties");
                }
                node.extend(keys);
            }
            if may_be_absent
                && let Some((parent, field)) = full.rsplit_once('.')
                && let Some(Value::Object(parent)) = descend(self.root()?, parent)
            {
                not_required(parent, field);
            }
        }
        Ok(self)
    }

    /// Removes the descriptions below a path: of types of Kubernetes, and of copies of what another kind describes. Helm stores
    /// the definitions in a Secret, which has at most 1 MiB.
    fn undescribed(mut self, path: &str) -> Result<Self, CrdError> {
        let name = self.name.clone();
        let node = descend(self.root()?, path).ok_or(CrdError::NoSuchPath { crd: name, path: path.to_owned() })?;
        undescribe(node);
        Ok(self)
    }

    fn without_status_subresource(mut self) -> Self {
        if let Some(version) = self.crd.pointer_mut("/spec/versions/0").and_then(Value::as_object_mut) {
            version.remove("subresources");
        }
        self
    }

    fn label(mut self, label: &'static str) -> Self {
        self.label = label;
        self
    }

    /// Serves another version with the same schema, but without descriptions, listed last, with a deprecation warning.
    fn deprecated_version(mut self, name: &str, warning: &str) -> Self {
        self.add_version(name, false, Some(warning));
        self
    }

    /// Serves an older version with the same schema, but without descriptions, listed first, with an optional deprecation warning.
    fn older_version(mut self, name: &str, warning: Option<&str>) -> Self {
        self.add_version(name, true, warning);
        self
    }

    fn versions(&mut self) -> &mut [Value] {
        self.crd.pointer_mut("/spec/versions").and_then(Value::as_array_mut).map_or(&mut [], Vec::as_mut_slice)
    }

    fn add_version(&mut self, name: &str, first: bool, warning: Option<&str>) {
        let Some(versions) = self.crd.pointer_mut("/spec/versions").and_then(Value::as_array_mut) else { return };
        let mut other = versions.iter().find(|version| version["storage"] == json!(true)).cloned().unwrap_or_default();
        other["name"] = json!(name);
        other["storage"] = json!(false);
        if let Some(schema) = other.pointer_mut("/schema/openAPIV3Schema") {
            undescribe(schema);
        }
        if let Some(warning) = warning {
            other["deprecated"] = json!(true);
            other["deprecationWarning"] = json!(warning);
        }
        versions.insert(if first { 0 } else { versions.len() }, other);
    }

    /// Adds a deprecation warning to a version.
    fn deprecate(mut self, name: &str, warning: &str) -> Self {
        for version in self.versions().iter_mut().filter(|version| version["name"] == json!(name)) {
            version["deprecated"] = json!(true);
            version["deprecationWarning"] = json!(warning);
        }
        self
    }

    /// Stores objects in another version than the derived one.
    fn stored_in(mut self, name: &str) -> Self {
        for version in self.versions() {
            version["storage"] = json!(version["name"] == json!(name));
        }
        self
    }

    /// Makes the spec optional in the schema; admission requires it.
    fn spec_optional(mut self) -> Self {
        if let Ok(Some(root)) = self.root().map(Value::as_object_mut) {
            root.remove("required");
        }
        self
    }

    /// Sets the conversion strategy to None.
    fn without_conversion(mut self) -> Self {
        self.crd["spec"]["conversion"] = json!({"strategy": "None"});
        self
    }

    /// Marks atomic objects, which depend on the rules, and adds the metadata.
    fn finish(mut self) -> Result<CustomResourceDefinition, CrdError> {
        for version in self.versions() {
            if let Some(schema) = version.pointer_mut("/schema/openAPIV3Schema") {
                mark_atomic(schema);
            }
        }
        self.crd["metadata"] = json!({
            "name": self.name,
            "labels": {self.label: ""},
            // For tools that prune what a chart had. Helm itself deletes no definition.
            "annotations": {"helm.sh/resource-policy": "keep"},
        });
        Ok(serde_json::from_value(self.crd)?)
    }
}

fn descend<'a>(mut node: &'a mut Value, path: &str) -> Option<&'a mut Value> {
    for step in path.split('.') {
        let name = step.trim_end_matches(['[', ']', '{', '}']);
        node = node.get_mut("properties")?.get_mut(name)?;
        let mut below = &step[name.len()..];
        while !below.is_empty() {
            (node, below) = if let Some(rest) = below.strip_prefix("[]") {
                (node.get_mut("items")?, rest)
            } else {
                (node.get_mut("additionalProperties")?, below.strip_prefix("{}")?)
            };
        }
    }
    Some(node)
}

/// Makes a field of an object optional.
fn not_required(object: &mut Map<String, Value>, field: &str) {
    let Some(Value::Array(required)) = object.get_mut("required") else { return };
    required.retain(|name| name.as_str() != Some(field));
    if required.is_empty() {
        object.remove("required");
    }
}

/// Converts a derived schema to the form described at the top of this module. `bare` removes descriptions.
fn normalize(node: &mut Value, bare: bool) {
    let Some(object) = node.as_object_mut() else { return };
    // The API server would write defaults of a schema into each object. serde's defaults apply only in this crate.
    object.remove("default");
    object.remove("nullable");
    object.remove("title");
    if bare {
        object.remove("description");
    }
    unsigned(object);
    if object.get("type") == Some(&json!("array")) {
        // Makes the API server's default explicit; rules for single lists follow.
        object.insert("x-kubernetes-list-type".to_owned(), json!("atomic"));
    }
    if object.get("x-kubernetes-int-or-string") == Some(&Value::Bool(true)) {
        object.insert("anyOf".to_owned(), json!([{"type": "integer"}, {"type": "string"}]));
        object.insert("pattern".to_owned(), json!(QUANTITY_PATTERN));
    }
    if let Some(properties) = object.get_mut("properties").and_then(Value::as_object_mut) {
        for (name, property) in properties.iter_mut() {
            let description = property.get("description").cloned().filter(|_| !bare);
            normalize(property, bare || FOREIGN.contains(&name.as_str()));
            // The field itself keeps our description.
            if let (Some(description), Some(property)) = (description, property.as_object_mut()) {
                property.insert("description".to_owned(), description);
            }
            if ["maxUnavailable", "port", "targetPort"].contains(&name.as_str()) {
                // A number, a name or a percentage, but not a quantity.
                if let Some(port) = property.as_object_mut() {
                    port.remove("pattern");
                }
            }
        }
    }
    for key in ["items", "additionalProperties"] {
        if let Some(inner) = object.get_mut(key) {
            normalize(inner, bare);
        }
    }
}

/// Removes the descriptions of all fields below a schema.
fn undescribe(node: &mut Value) {
    let properties = node.get_mut("properties").and_then(Value::as_object_mut).into_iter().flatten();
    for property in properties.map(|(_, property)| property) {
        undescribe(property);
        property.as_object_mut().map(|property| property.remove("description"));
    }
    for key in ["items", "additionalProperties"] {
        if let Some(inner) = node.get_mut(key).and_then(Value::as_object_mut) {
            inner.remove("description");
        }
        if let Some(inner) = node.get_mut(key) {
            undescribe(inner);
        }
    }
}

/// Marks each selector and reference below a schema as atomic.
fn mark_atomic(node: &mut Value) {
    let Some(object) = node.as_object_mut() else { return };
    if let Some(properties) = object.get_mut("properties").and_then(Value::as_object_mut) {
        let atomic = is_atomic(properties);
        for property in properties.values_mut() {
            mark_atomic(property);
        }
        if atomic {
            object.insert("x-kubernetes-map-type".to_owned(), json!("atomic"));
        }
    }
    for key in ["items", "additionalProperties"] {
        if let Some(inner) = object.get_mut(key) {
            mark_atomic(inner);
        }
    }
}

/// Returns true for an object with the properties of one of Kubernetes' selectors or references.
fn is_atomic(properties: &Map<String, Value>) -> bool {
    let mut members: Vec<&str> = properties.keys().map(String::as_str).collect();
    members.sort_unstable();
    if members == ["name"] {
        // Other objects have only a name, too. The name in a reference has an empty default.
        return properties.get("name").and_then(|name| name.get("default")) == Some(&json!(""));
    }
    ATOMIC.contains(&members.as_slice())
}

/// Converts unsigned integers to formats that the API server knows.
fn unsigned(object: &mut Map<String, Value>) {
    let format = object.get("format").and_then(Value::as_str).map(str::to_owned);
    match format.as_deref() {
        Some("uint8" | "uint16") => {
            object.insert("format".to_owned(), json!("int32"));
        }
        Some("uint32" | "uint64" | "uint") => {
            object.insert("format".to_owned(), json!("int64"));
        }
        _ => {}
    }
    for key in ["minimum", "maximum"] {
        if let Some(whole) = object.get(key).and_then(Value::as_f64).filter(|n| n.fract() == 0.0) {
            object.insert(key.to_owned(), json!(whole as i64));
        }
    }
}
