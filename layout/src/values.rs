//! The values of the chart: their comments, their paths and their schema.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::Value;

/// Returns the comments of `values.yaml` by the path of the key that follows them, such as `image.tag`. An example, which two
/// spaces indent behind its `#`, is no comment.
#[must_use]
pub fn comments(text: &str) -> BTreeMap<String, String> {
    let mut found = BTreeMap::new();
    let mut keys: Vec<(usize, &str)> = Vec::new();
    let mut comment: Vec<&str> = Vec::new();
    for line in text.lines() {
        let trimmed = line.trim_start();
        if let Some(words) = trimmed.strip_prefix('#') {
            if !words.starts_with("  ") {
                comment.push(words.trim());
            }
            continue;
        }
        let indent = line.len() - trimmed.len();
        let key = trimmed.split_once(':').map(|(key, _)| key).filter(|key| is_key(key));
        if let Some(key) = key {
            keys.retain(|(outer, _)| *outer < indent);
            keys.push((indent, key));
            if !comment.is_empty() {
                let path: Vec<&str> = keys.iter().map(|(_, key)| *key).collect();
                found.insert(path.join("."), comment.join(" "));
            }
        }
        comment.clear();
    }
    found
}

fn is_key(text: &str) -> bool {
    !text.is_empty() && text.chars().all(|c| c.is_ascii_alphanumeric() || "-_".contains(c))
}

/// Returns the paths of all values that the schema has: properties without properties of their own.
#[must_use]
pub fn paths(schema: &Value) -> BTreeSet<String> {
    let mut found = BTreeSet::new();
    add_paths(schema, schema, "", &mut found);
    found
}

fn add_paths(schema: &Value, part: &Value, path: &str, found: &mut BTreeSet<String>) {
    let part = resolved(schema, part);
    match part["properties"].as_object() {
        Some(properties) => {
            for (key, part) in properties {
                let path = if path.is_empty() { key.clone() } else { format!("{path}.{key}") };
                add_paths(schema, part, &path, found);
            }
        }
        None => {
            found.insert(path.to_owned());
        }
    }
}

fn resolved<'a>(schema: &'a Value, part: &'a Value) -> &'a Value {
    let reference = part["$ref"].as_str().and_then(|reference| reference.strip_prefix('#'));
    reference.and_then(|pointer| schema.pointer(pointer)).unwrap_or(part)
}

/// Returns the value at a path.
#[must_use]
pub fn at<'a>(values: &'a Value, path: &str) -> Option<&'a Value> {
    path.split('.').try_fold(values, |value, key| value.get(key))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn comments_belong_to_the_key_that_follows() {
        let text = "# Of nothing.\n\n# One\n# and more.\na:\n  # Two.\n  b: 1\n  c: [x]\n  #  example: 2\n  # Three.\n  d:\n    - e: 1\n# Four.\nf: {}\n";
        let found = comments(text);
        let found: Vec<(&str, &str)> = found.iter().map(|(path, text)| (path.as_str(), text.as_str())).collect();
        assert_eq!(found, [("a", "One and more."), ("a.b", "Two."), ("a.d", "Three."), ("f", "Four.")]);
    }

    #[test]
    fn paths_end_at_values() {
        let schema = json!({
            "definitions": {"part": {"type": "object", "properties": {"x": {"type": "string"}}}},
            "properties": {"a": {"$ref": "#/definitions/part"}, "b": {"type": "object"}},
        });
        assert_eq!(paths(&schema), ["a.x".to_owned(), "b".to_owned()].into());
        assert_eq!(at(&json!({"a": {"x": 1}}), "a.x"), Some(&json!(1)));
        assert_eq!(at(&json!({"a": {}}), "a.x"), None);
    }
}
