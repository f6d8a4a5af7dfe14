//! Finds fields of a VMI that no component carries out, by the rows of [`api::fields`].
//!
//! Any other field that is set makes Sync fail, known to the API or not: admission is the first line, and a VMI may have been
//! stored without it or been written by a newer version.

use std::fmt;

use api::fields::{self, is_set};
use serde_json::{Map, Value};

/// Limit of fields named in a message.
const NAMED_LIMIT: usize = 16;
/// Limit of an object key in a message.
const KEY_LIMIT: usize = 64;

/// Paths of fields that are set and that no component carries out.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Unsupported {
    annotations: Vec<String>,
    named: Vec<String>,
    more: usize,
}

impl Unsupported {
    /// Finds the fields in a VMI's JSON form, which still has fields unknown to the types.
    pub(crate) fn find(vmi: &Value) -> Self {
        let mut found = Self::default();
        if let Some(spec) = vmi.get("spec").and_then(Value::as_object) {
            found.object("", "spec", spec);
        }
        let annotations = vmi.get("metadata").and_then(|metadata| metadata.get("annotations"));
        let refused = fields::refused_annotations(|key| annotations?.get(key)?.as_str());
        found.annotations.extend(refused.map(|key| format!("metadata.annotations.{key}")));
        found
    }

    pub(crate) const fn is_empty(&self) -> bool {
        self.annotations.is_empty() && self.named.is_empty()
    }

    /// Returns the fields without annotations. Users can set annotations at any time, and those here apply to the start only.
    pub(crate) fn of_spec(&self) -> Self {
        Self { annotations: Vec::new(), ..self.clone() }
    }

    fn add(&mut self, path: String) {
        if self.named.len() < NAMED_LIMIT {
            self.named.push(path);
        } else {
            self.more += 1;
        }
    }

    fn object(&mut self, field: &str, path: &str, fields: &Map<String, Value>) {
        for (key, value) in fields {
            let shown: String = key.chars().filter(|c| !c.is_control()).take(KEY_LIMIT).collect();
            let path = format!("{path}.{shown}");
            if key.contains(['.', '[']) {
                // No key of the API, but it could look like the path of one.
                self.add(path);
                continue;
            }
            let field = if field.is_empty() { key.clone() } else { format!("{field}.{key}") };
            self.value(&field, &path, value, fields);
        }
    }

    fn value(&mut self, field: &str, path: &str, value: &Value, holder: &Map<String, Value>) {
        if !is_set(value) {
            return;
        }
        let (row, has_below) = fields::row(field);
        let is_carried_out = match row {
            Some(row) if row.covers_below() => return,
            Some(row) if row.is_refused_by_launcher(value, holder) => false,
            // A row with a condition covers the fields below it.
            Some(row) if row.refusal.is_some() && !has_below => return,
            row => row.is_some() || has_below,
        };
        match value {
            Value::Object(fields) if is_carried_out => self.object(field, path, fields),
            Value::Array(items) if is_carried_out && has_below => {
                let item_field = format!("{field}[]");
                // A list of which no item is carried out is named as a whole.
                let is_refused = |item: &Value| {
                    fields::row(&item_field).0.is_some_and(|row| row.is_refused_by_launcher(item, holder))
                };
                if items.iter().all(is_refused) {
                    return self.add(path.to_owned());
                }
                for (index, item) in items.iter().enumerate() {
                    self.value(&item_field, &format!("{path}[{index}]"), item, holder);
                }
            }
            _ if is_carried_out && row.is_some() => {}
            _ => self.add(path.to_owned()),
        }
    }
}

impl fmt::Display for Unsupported {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let all: Vec<&str> = self.annotations.iter().chain(&self.named).map(String::as_str).collect();
        f.write_str(&all.join(", "))?;
        if self.more > 0 {
            write!(f, " and {} more", self.more)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests;
