//! The custom resource definitions, made from the types.
//!
//! The derived schema is brought into the form the API is known by: quantities with their pattern, the few lists that
//! merge by key, the objects that never merge, closed enumerations, bounds, and the places below which unknown fields
//! are kept.

use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use serde_json::{Map, Value, json};
use thiserror::Error;

mod backup;
mod clone;
mod export;
mod instancetype;
mod kubevirt;
mod migration;
mod plugin;
mod pool;
mod preset;
mod snapshot;

/// Why a definition cannot be made.
#[derive(Debug, Error)]
pub enum CrdError {
    /// A rule names a place the schema does not have.
    #[error("{crd}: the schema has no {path}")]
    NoSuchPath {
        /// Definition at fault.
        crd: String,
        /// Path of the rule.
        path: String,
    },
    /// The definition is not of the expected form.
    #[error("cannot convert a definition")]
    Convert(#[from] serde_json::Error),
    /// The definition cannot be written as YAML.
    #[error("cannot write a definition")]
    Write(#[from] serde_yaml::Error),
}

const QUANTITY_PATTERN: &str = r"^(\+|-)?(([0-9]+(\.[0-9]*)?)|(\.[0-9]+))(([KMGTPE]i)|[numkMGTPE]|([eE](\+|-)?(([0-9]+(\.[0-9]*)?)|(\.[0-9]+))))?$";

/// Fields of Kubernetes' own types: their long descriptions are left out to keep the definitions small.
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

/// Members, sorted, of Kubernetes' own selectors and references. Who applies one owns all of it: half of the former
/// selector or reference never stays next to half of the new one. Inlining takes the names of types away, but no other
/// type of the schemas has exactly these members.
const ATOMIC: [&[&str]; 6] = [
    &["apiGroup", "kind", "name"],
    &["apiVersion", "fieldPath"],
    &["containerName", "divisor", "resource"],
    &["matchExpressions", "matchFields"],
    &["matchExpressions", "matchLabels"],
    &["nodeSelectorTerms"],
];

/// A rule on one place of a schema: a path of property names (`[]` steps into a list, `{}` into a map) and the keys
/// to set there.
type Rule = (&'static str, fn() -> Value);

/// Rules on a condition list.
const CONDITION: &[Rule] = &[
    ("conditions[].lastProbeTime", || json!({"nullable": true})),
    ("conditions[].lastTransitionTime", || json!({"nullable": true})),
];

/// A whole object's metadata inside another one: kept as it comes.
fn embedded_metadata() -> Value {
    json!({"nullable": true, "x-kubernetes-preserve-unknown-fields": true})
}

/// Makes the definitions of a group.
type Group = fn() -> Result<Vec<CustomResourceDefinition>, CrdError>;

/// All definitions of this version, in the order they are installed.
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

/// Name of the file a definition stands in.
pub fn file_name(crd: &CustomResourceDefinition) -> String {
    format!("{}.yaml", crd.spec.names.plural)
}

/// The definition as a YAML document, as it stands in the chart.
pub fn yaml(crd: &CustomResourceDefinition) -> Result<String, CrdError> {
    Ok(serde_yaml::to_string(&serde_json::to_value(crd)?)?)
}

/// A definition on its way from the derived form to the one installed.
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
            // A name that is empty when nothing is said need not be there.
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

    /// Leaves out the descriptions below a path: a type of Kubernetes' own whose long texts say nothing new.
    fn undescribed(mut self, path: &str) -> Result<Self, CrdError> {
        let name = self.name.clone();
        let node = descend(self.root()?, path).ok_or(CrdError::NoSuchPath { crd: name, path: path.to_owned() })?;
        let description = node.get("description").cloned();
        normalize(node, true);
        if let (Some(description), Some(node)) = (description, node.as_object_mut()) {
            node.insert("description".to_owned(), description);
        }
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

    /// Serves another version with the same schema, listed after those there are, with a warning to its clients.
    fn deprecated_version(mut self, name: &str, warning: &str) -> Self {
        self.add_version(name, false, Some(warning));
        self
    }

    /// Serves an older version with the same schema, listed before those there are; with a warning, if one is given.
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
        if let Some(warning) = warning {
            other["deprecated"] = json!(true);
            other["deprecationWarning"] = json!(warning);
        }
        versions.insert(if first { 0 } else { versions.len() }, other);
    }

    /// Warns the clients of a version.
    fn deprecate(mut self, name: &str, warning: &str) -> Self {
        for version in self.versions().iter_mut().filter(|version| version["name"] == json!(name)) {
            version["deprecated"] = json!(true);
            version["deprecationWarning"] = json!(warning);
        }
        self
    }

    /// Stores objects in a version other than the derived one.
    fn stored_in(mut self, name: &str) -> Self {
        for version in self.versions() {
            version["storage"] = json!(version["name"] == json!(name));
        }
        self
    }

    /// Lets objects come without a spec, as the API server sees it; admission wants one.
    fn spec_optional(mut self) -> Self {
        if let Ok(Some(root)) = self.root().map(Value::as_object_mut) {
            root.remove("required");
        }
        self
    }

    /// Says outright that versions are not converted.
    fn without_conversion(mut self) -> Self {
        self.crd["spec"]["conversion"] = json!({"strategy": "None"});
        self
    }

    /// Marks what merges as a whole, which depends on the rules, and adds the metadata.
    fn finish(mut self) -> Result<CustomResourceDefinition, CrdError> {
        for version in self.versions() {
            if let Some(schema) = version.pointer_mut("/schema/openAPIV3Schema") {
                mark_atomic(schema);
            }
        }
        self.crd["metadata"] = json!({
            "name": self.name,
            "labels": {self.label: ""},
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

/// Lets objects of a schema come without a field.
fn not_required(object: &mut Map<String, Value>, field: &str) {
    let Some(Value::Array(required)) = object.get_mut("required") else { return };
    required.retain(|name| name.as_str() != Some(field));
    if required.is_empty() {
        object.remove("required");
    }
}

/// Brings a derived schema into the form described at the top of this module. `bare` says that descriptions are
/// dropped.
fn normalize(node: &mut Value, bare: bool) {
    let Some(object) = node.as_object_mut() else { return };
    // Defaults of a schema are written by the API server into each object; serde's are ours alone.
    object.remove("default");
    object.remove("nullable");
    object.remove("title");
    if bare {
        object.remove("description");
    }
    unsigned(object);
    if object.get("type") == Some(&json!("array")) {
        // What the API server takes a list for that says nothing, said outright; rules on single lists come later.
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
                // A number or a name, or a percentage, not an amount.
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

/// Says of each selector and reference below a schema that it is replaced as a whole.
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

/// Whether an object with these properties is one of Kubernetes' own selectors or references.
fn is_atomic(properties: &Map<String, Value>) -> bool {
    let mut members: Vec<&str> = properties.keys().map(String::as_str).collect();
    members.sort_unstable();
    if members == ["name"] {
        // Other objects have nothing but a name, too; that of a reference to an object is empty when left out.
        return properties.get("name").and_then(|name| name.get("default")) == Some(&json!(""));
    }
    ATOMIC.contains(&members.as_slice())
}

/// Writes unsigned integers in the formats the API server knows.
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
