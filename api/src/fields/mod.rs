//! Fields of a VMI's spec: the component that carries each of them out, or the reason for its refusal, and the effect of a
//! change on a running VMI.
//!
//! One row a field, so that no field is accepted and then ignored: a field of the schema without a row fails a test. Derived
//! from the rows are the refusals of admission and of the renderer of launcher pods, the launcher's error at Sync, admission's
//! errors for a field or an annotation whose feature gate is off, and the pages `not-yet.md`, `live-changes.md` and `feature-gates.md`.

mod annotations;
pub mod changes;
mod gated;
mod table;

use serde::Serialize;
use serde_json::{Map, Value};

pub use annotations::{ANNOTATIONS, refused_annotations};
pub use changes::{Change, Effect};
pub use gated::GATED_ANNOTATIONS;
pub use table::FIELDS;

use crate::FeatureGate;

/// Members of a JSON object.
type Object = Map<String, Value>;
/// Decides by a field's value and by the object that holds the field. A list holds its items by the object that holds the list.
type Uses = fn(&Value, &Object) -> bool;

/// Component that carries a field out.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Component {
    /// The domain's XML.
    Domain,
    /// Modules of virt-launcher that prepare disks, lease addresses, serve the console and follow credentials.
    Launcher,
    /// virt-handler, which connects the guest to the pod's networks and asks it to shut down.
    Handler,
    /// The launcher pod, and with it the scheduler and kubelet.
    Pod,
    /// virt-controller.
    Controller,
}

/// Uses of a field that are refused.
#[derive(Clone, Copy, Debug)]
pub struct Refusal {
    /// Missing feature, for the message "is not supported yet". `None`: another rule or a default of admission leaves none of
    /// these uses, and the launcher checks that.
    pub reason: Option<&'static str>,
    uses: Uses,
}

/// Condition of a field, or of some uses of it, on a feature gate.
#[derive(Clone, Copy, Debug)]
pub struct Gated {
    /// The gate.
    pub gate: FeatureGate,
    /// The uses that depend on it, for documents. Empty: all of them.
    pub uses: &'static str,
    /// Message if the gate is off, as the reference has it. `{field}` stands for the path of the field.
    pub message: &'static str,
}

/// A field and the fields below it that have no rows of their own.
#[derive(Clone, Copy, Debug)]
pub struct Field {
    /// Path below the spec. `[]` stands for an item of a list, and `.*` for everything below.
    pub path: &'static str,
    /// Component that carries out the uses that are not refused, or its part of the others.
    pub by: Option<Component>,
    /// Uses that are refused.
    pub refusal: Option<Refusal>,
    /// Effects of changes. Without any, a change waits for the next start.
    pub changes: &'static [Change],
    /// Feature gates that admission requires for it.
    pub gates: &'static [Gated],
}

impl Field {
    const fn new(path: &'static str, by: Option<Component>) -> Self {
        Self { path, by, refusal: None, changes: &[], gates: &[] }
    }

    /// Refuses these uses.
    const fn except(self, reason: &'static str, uses: Uses) -> Self {
        Self { refusal: Some(Refusal { reason: Some(reason), uses }), ..self }
    }

    /// Refuses all uses: other components lack their part.
    const fn lacks(self, reason: &'static str) -> Self {
        self.except(reason, |value, _| is_set(value))
    }

    /// Refuses these uses in the launcher. Admission has a rule or a default of its own.
    const fn checked(self, uses: Uses) -> Self {
        Self { refusal: Some(Refusal { reason: None, uses }), ..self }
    }

    const fn changes(self, changes: &'static [Change]) -> Self {
        Self { changes, ..self }
    }

    const fn gated(self, gates: &'static [Gated]) -> Self {
        Self { gates, ..self }
    }

    /// Returns the path without the mark for everything below.
    #[must_use]
    pub fn name(&self) -> &'static str {
        self.path.strip_suffix(".*").unwrap_or(self.path)
    }

    /// Returns true if the row covers everything below the field.
    #[must_use]
    pub fn covers_below(&self) -> bool {
        self.path.ends_with(".*")
    }

    /// Returns true if a launcher refuses the field with this value. `holder` is the object that holds the field.
    #[must_use]
    pub fn is_refused_by_launcher(&self, value: &Value, holder: &Object) -> bool {
        self.refusal.is_some_and(|refusal| (refusal.uses)(value, holder))
    }

    /// Returns true if no launcher pod is made for the refused uses. A pod has its part of the fields that it carries out.
    #[must_use]
    pub fn is_refused_by_pod(&self) -> bool {
        self.by != Some(Component::Pod) && self.refusal.is_some()
    }

    /// Adds the paths of the refused uses. `path` is the part of the field's path below `object`.
    fn add_refused(
        &self,
        path: &str,
        object: &Object,
        indices: &mut Vec<usize>,
        found: &mut Vec<(String, &'static str)>,
    ) {
        let Some(Refusal { reason: Some(reason), uses, .. }) = self.refusal else { return };
        let (step, below) = path.split_once('.').map_or((path, None), |(step, below)| (step, Some(below)));
        let key = step.trim_end_matches("[]");
        let value = object.get(key).unwrap_or(&Value::Null);
        let is_list = key.len() < step.len();
        let items = if is_list { value.as_array().map_or(&[][..], Vec::as_slice) } else { std::slice::from_ref(value) };
        for (index, item) in items.iter().enumerate() {
            if is_list {
                indices.push(index);
            }
            match (below, item) {
                (Some(below), Value::Object(fields)) => self.add_refused(below, fields, indices, found),
                (None, value) if uses(value, object) => found.push((self.shown(indices), reason)),
                _ => {}
            }
            if is_list {
                indices.pop();
            }
        }
    }

    /// Returns the path with the indices of list items.
    fn shown(&self, indices: &[usize]) -> String {
        indices.iter().fold(self.path.to_owned(), |path, index| path.replacen("[]", &format!("[{index}]"), 1))
    }
}

/// Returns the paths below a spec of the uses that are not supported yet, and the missing features.
#[must_use]
pub fn refused(spec: &impl Serialize) -> Vec<(String, &'static str)> {
    refused_by(spec, |_| true)
}

/// Returns those for which no launcher pod is made.
#[must_use]
pub fn refused_by_pod(spec: &impl Serialize) -> Vec<(String, &'static str)> {
    refused_by(spec, Field::is_refused_by_pod)
}

fn refused_by(spec: &impl Serialize, is_row: fn(&Field) -> bool) -> Vec<(String, &'static str)> {
    let mut found = Vec::new();
    let Ok(Value::Object(spec)) = serde_json::to_value(spec) else { return found };
    for field in FIELDS.iter().filter(|field| field.refusal.is_some() && is_row(field)) {
        field.add_refused(field.path, &spec, &mut Vec::new(), &mut found);
    }
    found
}

/// Returns the row of a path, and true if fields below it have rows. Items of lists are written `[]`.
#[must_use]
pub fn row(path: &str) -> (Option<&'static Field>, bool) {
    let rest = FIELDS.get(FIELDS.partition_point(|field| field.name() < path)..).unwrap_or_default();
    let row = rest.first().filter(|field| field.name() == path);
    let mut same_start = rest.iter().map_while(|field| field.name().strip_prefix(path));
    (row, same_start.any(|below| below.starts_with(['.', '['])))
}

/// Returns the condition of the field of a row on a feature gate.
#[must_use]
pub fn gated(path: &str, gate: FeatureGate) -> Option<&'static Gated> {
    row(path).0?.gates.iter().find(|gated| gated.gate == gate)
}

/// Distinguishes a field with a value from one that only shows its default. An empty object is a value: it marks a choice.
#[must_use]
pub fn is_set(value: &Value) -> bool {
    match value {
        Value::Null => false,
        Value::Bool(value) => *value,
        Value::Number(_) | Value::Object(_) => true,
        Value::String(text) => !text.is_empty(),
        Value::Array(items) => !items.is_empty(),
    }
}

#[cfg(test)]
mod tests;
