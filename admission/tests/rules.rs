//! One row for each rule of the reference tables: a case that is accepted and one that is refused, with the type,
//! field and text of the cause.
//!
//! The tables are the files of `tests/rules/`; whoever adds a kind adds a file. A file names the webhook that is asked,
//! an object that breaks no rule (`base`), how many rules it is about in each section, and the rows:
//!
//! ```text
//! [id, type, field, message, accepted, refused]      type "": a schema error; "E400": a refusal without causes
//! [id, "never", why]                                 a rule that cannot be broken here
//! ```
//!
//! `accepted` and `refused` are merged into the base (null removes). Keys that begin with `$` are not part of the object:
//! `$config` (`spec.configuration` of the KubeVirt object), `$old` (merged into the base to make the old object),
//! `$user`, `$node` (of the user's token), `$plural` (of the request), `$operation`, `$neighbours` (objects by plural).
//! In fields and messages the words of `words` are replaced.
//!
//! What is valid but not carried out yet counts as accepted: the rule let it pass.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test ends here")]

use std::{collections::BTreeMap, fs, path::Path};

use admission::{
    handle,
    neighbours::{Ask, Neighbours, Outcome, Wanted},
};
use api::{KubeVirt, config::ClusterConfig};
use serde::Deserialize;
use serde_json::{Value, json};

#[derive(Deserialize)]
struct Table {
    webhook: String,
    #[serde(default)]
    group: Option<String>,
    #[serde(default)]
    version: Option<String>,
    plural: String,
    operation: String,
    base: Value,
    #[serde(default)]
    words: BTreeMap<String, String>,
    sections: BTreeMap<String, usize>,
    rows: Vec<Vec<Value>>,
}

/// Merges a change into an object (RFC 7386).
fn merge(into: &mut Value, change: &Value) {
    let Value::Object(change) = change else {
        *into = change.clone();
        return;
    };
    if !into.is_object() {
        *into = json!({});
    }
    let Value::Object(fields) = into else { return };
    for (key, value) in change.iter().filter(|(key, _)| !key.starts_with('$')) {
        if value.is_null() {
            fields.remove(key);
        } else {
            merge(fields.entry(key.clone()).or_insert(Value::Null), value);
        }
    }
}

fn configuration(case: &Value) -> ClusterConfig {
    let Some(configuration) = case.get("$config") else { return ClusterConfig::default() };
    let object = json!({
        "apiVersion": "kubevirt.io/v1",
        "kind": "KubeVirt",
        "metadata": {},
        "spec": {"configuration": configuration},
    });
    ClusterConfig::from_kubevirt(&serde_json::from_value::<KubeVirt>(object).unwrap()).unwrap()
}

fn known(case: &Value, wanted: &Wanted) -> Outcome {
    let found = case.pointer(&format!("/$neighbours/{}", wanted.plural));
    match (&wanted.ask, found) {
        (Ask::List { .. }, Some(items)) => Outcome::List(items.as_array().unwrap().clone()),
        (_, found) => Outcome::Object(found.cloned()),
    }
}

impl Table {
    fn request(&self, case: &Value) -> Value {
        let text = |key: &str, default: &str| case.get(key).and_then(Value::as_str).unwrap_or(default).to_owned();
        let operation = text("$operation", &self.operation);
        let mut object = self.base.clone();
        merge(&mut object, case);
        let mut old = self.base.clone();
        merge(&mut old, case.get("$old").unwrap_or(&json!({})));
        match operation.as_str() {
            "CREATE" => old = Value::Null,
            "DELETE" => object = Value::Null,
            _ => {}
        }
        let extra = match case.get("$node") {
            Some(node) => json!({"authentication.kubernetes.io/node-name": [node]}),
            None => json!({}),
        };
        json!({"request": {
            "uid": "u",
            "resource": {
                "group": self.group.as_deref().unwrap_or("kubevirt.io"),
                "version": self.version.as_deref().unwrap_or("v1"),
                "resource": text("$plural", &self.plural),
            },
            "namespace": "default",
            "operation": operation,
            "userInfo": {"username": text("$user", "jane"), "groups": [], "extra": extra},
            "object": object,
            "oldObject": old,
        }})
    }

    fn ask(&self, case: &Value) -> Value {
        let body = self.request(case).to_string();
        let config = configuration(case);
        let mut neighbours = Neighbours::new();
        for _ in 0..=admission::neighbours::MAX_ROUNDS {
            match handle(&self.webhook, body.as_bytes(), &config, "kubevirt", &neighbours) {
                Ok(review) => return serde_json::to_value(review).unwrap()["response"].clone(),
                Err(wanted) => {
                    for wanted in wanted {
                        let outcome = known(case, &wanted);
                        neighbours.insert(wanted, outcome);
                    }
                }
            }
        }
        panic!("{case}: too many rounds");
    }

    fn words(&self, text: &Value) -> String {
        let mut text = text.as_str().unwrap().to_owned();
        for (word, meaning) in &self.words {
            text = text.replace(word.as_str(), meaning);
        }
        text
    }
}

fn is_passed(response: &Value) -> bool {
    let causes = response.pointer("/status/details/causes").and_then(Value::as_array);
    response["allowed"] == true
        || causes.is_some_and(|causes| {
            causes.iter().all(|cause| cause["message"].as_str().is_some_and(|text| text.contains("not supported yet")))
        })
}

fn check(table: &Table, row: &[Value], wrong: &mut Vec<String>) {
    let [id, type_, field, message, accepted, refused] = row else {
        if row.get(1) != Some(&json!("never")) || row.len() != 3 {
            wrong.push(format!("{}: a row has six columns", row[0]));
        }
        return;
    };
    let response = table.ask(accepted);
    if !is_passed(&response) {
        wrong.push(format!("{id}: should be accepted: {accepted}\n    {response}"));
    }
    let response = table.ask(refused);
    let (field, message) = (table.words(field), table.words(message));
    let found = if type_ == "E400" {
        response["status"]["code"] == 400 && response["status"]["message"] == message
    } else {
        let causes = response.pointer("/status/details/causes").and_then(Value::as_array).cloned().unwrap_or_default();
        causes.iter().any(|cause| {
            let text = |key: &str| cause.get(key).and_then(Value::as_str).unwrap_or_default();
            Some(text("reason")) == type_.as_str() && text("field") == field && text("message") == message
        })
    };
    if response["allowed"] != false || !found {
        wrong.push(format!("{id}: wanted {type_} {field}: {message}\n    for {refused}\n    got {response}"));
    }
}

#[test]
fn each_rule_accepts_and_refuses() {
    let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/rules");
    let mut files: Vec<_> = fs::read_dir(directory).unwrap().map(|entry| entry.unwrap().path()).collect();
    files.sort();
    let mut sections: BTreeMap<String, usize> = BTreeMap::new();
    let mut wrong = Vec::new();
    for file in files.iter().filter(|file| file.extension().is_some_and(|extension| extension == "json")) {
        let name = file.file_name().unwrap().to_string_lossy().into_owned();
        let table: Table =
            serde_json::from_str(&fs::read_to_string(file).unwrap()).unwrap_or_else(|error| panic!("{name}: {error}"));
        let mut counted: BTreeMap<String, usize> = BTreeMap::new();
        let mut ids = std::collections::BTreeSet::new();
        for row in &table.rows {
            let id = row[0].as_str().unwrap();
            assert!(ids.insert(id), "{name}: {id} is there twice");
            let section = id.split('/').next().unwrap();
            *counted.entry(section.to_owned()).or_default() += 1;
            let mut found = Vec::new();
            check(&table, row, &mut found);
            wrong.extend(found.into_iter().map(|text| format!("{name} {text}")));
        }
        assert_eq!(counted, table.sections, "{name}: each rule of the sections has its row");
        for (section, count) in counted {
            *sections.entry(section).or_default() += count;
        }
    }
    println!("rules by section: {sections:?}");
    println!("rules: {}", sections.values().sum::<usize>());
    assert!(wrong.is_empty(), "{} rows:\n{}", wrong.len(), wrong.join("\n"));
}
