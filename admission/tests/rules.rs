//! One row for each rule of the reference tables: a case that is accepted and one that is refused, with the type,
//! field and text of the cause.
//!
//! The rules are listed in `tests/rules/index.txt`, by the sections of the reference; a rule without a row fails, and so
//! does a row without a rule. The rows are in the other files of `tests/rules/`; whoever adds a kind adds a file. A file
//! names the webhook that is asked, an object that breaks no rule (`base`), and the rows:
//!
//! ```text
//! [id, type, field, message, accepted, refused]      type "": a schema error; "E400": a refusal with that code and
//!                                                    without causes; "W": a warning, where "refused" is let through
//! [id, "never", why]                                 a rule that cannot be broken here
//! ```
//!
//! `accepted` and `refused` are merged into the base (null removes). Keys that begin with `$` are not part of the object:
//! `$config` (`spec.configuration` of the KubeVirt object), `$old` (merged into the base to make the old object),
//! `$user`, `$node` (of the user's token), `$group`, `$version`, `$plural` and `$name` (of the request), `$operation`,
//! `$neighbours` (objects by plural or by plural and name, the answers to patches by plural and `patch`;
//! `{"$failed": TEXT}` where the API server fails). In fields and messages the words of `words` are replaced.
//!
//! What is valid but not carried out yet counts as accepted: the rule let it pass.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test ends here")]

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::Path,
};

use admission::{
    handle,
    neighbours::{Ask, Neighbours, Outcome, Wanted},
};
use serde::Deserialize;
use serde_json::{Value, json};

mod tables;

use tables::{configuration, merge};

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
    rows: Vec<Vec<Value>>,
}

fn known(case: &Value, wanted: &Wanted) -> Outcome {
    let plural = wanted.plural.as_str();
    let named = match &wanted.ask {
        Ask::Get { name } => format!("{plural}/{name}"),
        Ask::Patch { .. } => format!("{plural}/patch"),
        Ask::List { .. } | Ask::DryRunCreate { .. } => plural.to_owned(),
    };
    let all = case.get("$neighbours");
    let found = all.and_then(|all| all.get(&named).or_else(|| all.get(plural)));
    if let Some(message) = found.and_then(|found| found.get("$failed")?.as_str()) {
        return Outcome::Failed { code: 500, message: message.to_owned() };
    }
    match (&wanted.ask, found) {
        (Ask::List { .. }, Some(items)) => Outcome::List(items.as_array().unwrap().clone()),
        (_, found) => Outcome::Object(found.filter(|found| !found.is_null()).cloned()),
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
                "group": text("$group", self.group.as_deref().unwrap_or("kubevirt.io")),
                "version": text("$version", self.version.as_deref().unwrap_or("v1")),
                "resource": text("$plural", &self.plural),
            },
            "name": text("$name", self.base["metadata"]["name"].as_str().unwrap_or_default()),
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
    let warned = |response: &Value, message: &str| {
        response["warnings"].as_array().is_some_and(|warnings| warnings.iter().any(|warning| warning == message))
    };
    let (field, message) = (table.words(field), table.words(message));
    if type_ == "W" {
        let answer = table.ask(refused);
        if warned(&response, &message) || !is_passed(&answer) || !warned(&answer, &message) {
            wrong.push(format!("{id}: wanted the warning {message}\n    for {refused}\n    got {answer}"));
        }
        return;
    }
    let response = table.ask(refused);
    let code = type_.as_str().and_then(|type_| type_.strip_prefix('E')?.parse::<u16>().ok());
    let found = if let Some(code) = code {
        response["status"]["code"] == code && response["status"]["message"] == message
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

/// The rules of the reference, by section, in its order.
fn rules(directory: &Path) -> Vec<String> {
    let index = fs::read_to_string(directory.join("index.txt")).unwrap();
    let lines = index.lines().map(str::trim).filter(|line| !line.is_empty() && !line.starts_with('#'));
    lines.map(str::to_owned).collect()
}

/// The rules of each section.
fn by_section<'a>(ids: impl IntoIterator<Item = &'a String>) -> BTreeMap<&'a str, usize> {
    let mut sections = BTreeMap::new();
    for id in ids {
        *sections.entry(id.split('/').next().unwrap_or_default()).or_default() += 1;
    }
    sections
}

#[test]
fn each_rule_accepts_and_refuses() {
    let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/rules");
    let rules = rules(&directory);
    let mut files: Vec<_> = fs::read_dir(directory).unwrap().map(|entry| entry.unwrap().path()).collect();
    files.sort();
    let (mut ids, mut wrong) = (BTreeSet::new(), Vec::new());
    for file in files.iter().filter(|file| file.extension().is_some_and(|extension| extension == "json")) {
        let name = file.file_name().unwrap().to_string_lossy().into_owned();
        let table: Table =
            serde_json::from_str(&fs::read_to_string(file).unwrap()).unwrap_or_else(|error| panic!("{name}: {error}"));
        for row in &table.rows {
            let id = row[0].as_str().unwrap();
            let mut found = Vec::new();
            if !ids.insert(id.to_owned()) {
                found.push(format!("{id} has a row already"));
            }
            check(&table, row, &mut found);
            wrong.extend(found.into_iter().map(|text| format!("{name} {text}")));
        }
    }
    let listed: BTreeSet<String> = rules.iter().cloned().collect();
    assert_eq!(listed.len(), rules.len(), "a rule is listed twice");
    wrong.extend(listed.difference(&ids).map(|id| format!("{id}: the rule has no row")));
    wrong.extend(ids.difference(&listed).map(|id| format!("{id}: the row is about no rule of the list")));
    println!("rules by section: {:?}", by_section(&listed));
    println!("rules: {}, rows: {}", listed.len(), ids.len());
    assert!(wrong.is_empty(), "{} rows:\n{}", wrong.len(), wrong.join("\n"));
}
