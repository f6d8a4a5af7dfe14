//! One row for each rule of the reference tables: a case that is accepted and one that is refused, with type, field and
//! message of the error.
//!
//! `tests/rules/index.txt` lists the rules by the sections of the reference. A rule without a row fails the test, and so
//! does a row without a rule. The other files of `tests/rules/` hold the rows; a new kind gets a new file. A file names the
//! webhook, an object without errors (`base`), and the rows:
//!
//! ```text
//! [id, type, field, message, accepted, refused]      type "": a schema error; "E400": a failure with that code and
//!                                                    without field errors; "W": a warning, where "refused" is allowed
//! [id, "never", reason]                              a rule that cannot be broken here
//! ```
//!
//! The message is that of the status. Its cause leaves out the field at the beginning; without a field in the row it has any.
//!
//! `accepted` and `refused` are merged into the base (null removes). Keys that begin with `$` are not part of the object:
//! `$config` (`spec.configuration` of the KubeVirt object), `$old` (merged into the base to make the old object),
//! `$user`, `$node` (of the user's token), `$group`, `$version`, `$plural`, `$name` and `$namespace` (of the request), `$operation`,
//! `$lookups` (objects by plural or by plural and name, the results of patches by plural and `patch`; `{"$failed": TEXT}` if
//! the API server fails). In fields and messages the words of `words` are replaced.
//!
//! Objects that are valid but not supported yet count as accepted.
//!
//! The files of `tests/answers/` begin in the same way. Their rows hold the complete answer of the reference to a request, which
//! is merged into the base like `accepted` and `refused`:
//!
//! ```text
//! [name, request, answer]                  Ferrovirt answers like the reference
//! [name, request, answer, ours, subject]   Ferrovirt answers otherwise, and `docs/compatibility.md` has a row about the subject
//! ```
//!
//! An answer is "allowed" or the list of the causes in their order, each `[type, field, message]`. It is derived from the
//! rules of the reference, not recorded from a running one.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test ends here")]

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::Path,
};

use admission::{Evaluation, LookupResult, Lookups, ObjectQuery, Review, Selection, context::lookups::MAX_ROUNDS};
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

fn object<'a>(case: &'a Value, name: &str) -> Option<&'a Value> {
    case.get("$lookups")?.get(name)
}

fn failure(object: &Value) -> Option<&str> {
    object.get("$failed")?.as_str()
}

fn result(case: &Value, query: &ObjectQuery) -> LookupResult {
    let plural = query.plural.as_str();
    let found = match &query.selection {
        Selection::Get { name } => object(case, &format!("{plural}/{name}")).or_else(|| object(case, plural)),
        Selection::List { .. } => object(case, plural),
        Selection::AccessReview { review } => {
            let review: Value = serde_json::from_str(review).unwrap();
            let right = &review["spec"]["resourceAttributes"];
            let text = |key: &str| right[key].as_str().unwrap_or_default();
            object(case, &format!("{plural}/{}/{}/{}", text("resource"), text("namespace"), text("name")))
        }
    };
    if let Some(message) = found.and_then(failure) {
        return LookupResult::Failed { code: 500, message: message.to_owned() };
    }
    match (&query.selection, found) {
        (Selection::List { .. }, Some(items)) => LookupResult::List(items.as_array().unwrap().clone()),
        (_, found) => LookupResult::Object(found.filter(|found| !found.is_null()).cloned()),
    }
}

impl Table {
    fn read(file: &Path) -> Self {
        let text = fs::read_to_string(file).unwrap();
        serde_json::from_str(&text).unwrap_or_else(|error| panic!("{}: {error}", file.display()))
    }

    /// Returns type, field and message of each cause of an answer; none if it is "allowed".
    fn causes(&self, answer: &Value) -> Vec<[String; 3]> {
        if answer == "allowed" {
            return vec![];
        }
        let causes = answer.as_array().unwrap();
        causes.iter().map(|cause| [0_usize, 1, 2].map(|column| self.words(&cause[column]))).collect()
    }

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
            "namespace": text("$namespace", "default"),
            "operation": operation,
            "userInfo": {"username": text("$user", "jane"), "groups": [], "extra": extra},
            "object": object,
            "oldObject": old,
        }})
    }

    fn respond(&self, case: &Value) -> Value {
        let body = self.request(case).to_string();
        let config = configuration(case);
        let response = |review| serde_json::to_value(review).unwrap()["response"].clone();
        let request = match Review::parse(&self.webhook, body.as_bytes()) {
            Ok(request) => request,
            Err(review) => return response(*review),
        };
        let mut lookups = Lookups::new();
        for _ in 0..=MAX_ROUNDS {
            match request.evaluate(&config, "kubevirt", &lookups) {
                Ok(Evaluation { review, effects }) => {
                    let failed = effects.iter().find_map(|effect| {
                        let error = failure(object(case, &format!("{}/patch", effect.plural))?)?;
                        Some(request.effect_failed(effect, error, review.clone()))
                    });
                    return response(failed.unwrap_or(review));
                }
                Err(queries) => {
                    for query in queries {
                        let result = result(case, &query);
                        lookups.insert(query, result);
                    }
                }
            }
        }
        panic!("{case}: too many rounds of lookups");
    }

    fn words(&self, text: &Value) -> String {
        let mut text = text.as_str().unwrap().to_owned();
        for (word, meaning) in &self.words {
            text = text.replace(word.as_str(), meaning);
        }
        text
    }
}

fn is_accepted(response: &Value) -> bool {
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
    let response = table.respond(accepted);
    if !is_accepted(&response) {
        wrong.push(format!("{id}: expected to be accepted: {accepted}\n    {response}"));
    }
    let warned = |response: &Value, message: &str| {
        response["warnings"].as_array().is_some_and(|warnings| warnings.iter().any(|warning| warning == message))
    };
    let (field, message) = (table.words(field), table.words(message));
    if type_ == "W" {
        let allowed = table.respond(refused);
        if warned(&response, &message) || !is_accepted(&allowed) || !warned(&allowed, &message) {
            wrong.push(format!("{id}: expected the warning {message}\n    for {refused}\n    got {allowed}"));
        }
        return;
    }
    let response = table.respond(refused);
    let code = type_.as_str().and_then(|type_| type_.strip_prefix('E')?.parse::<u16>().ok());
    let found = if let Some(code) = code {
        response["status"]["code"] == code && response["status"]["message"] == message
    } else {
        let causes = response.pointer("/status/details/causes").and_then(Value::as_array).cloned().unwrap_or_default();
        let text = |cause: &Value, key: &str| cause[key].as_str().unwrap_or_default().to_owned();
        // kubectl prints `FIELD: MESSAGE`.
        for cause in &causes {
            let (field, message) = (text(cause, "field"), text(cause, "message"));
            if field.is_empty() || message.is_empty() || message.starts_with(&format!("{field} is")) {
                wrong.push(format!("{id}: a cause without a field, or that names it twice: {cause}"));
            }
        }
        let named = |cause: &Value| {
            if field.is_empty() { !text(cause, "field").is_empty() } else { text(cause, "field") == field }
        };
        // The denial of a plugin has only the first message.
        (table.webhook.contains("plugin") || text(&response["status"], "message").contains(&message))
            && causes.iter().any(|cause| {
                let shown = text(cause, "message");
                Some(text(cause, "reason").as_str()) == type_.as_str() && named(cause) && message.ends_with(&shown)
            })
    };
    if response["allowed"] != false || !found {
        wrong.push(format!("{id}: expected {type_} {field}: {message}\n    for {refused}\n    got {response}"));
    }
}

/// Returns true if a response has exactly these causes. The message of its status has each text once.
fn has_causes(response: &Value, expected: &[[String; 3]]) -> bool {
    let causes = response.pointer("/status/details/causes").and_then(Value::as_array).map_or(&[][..], Vec::as_slice);
    let mut seen = BTreeSet::new();
    let messages = expected.iter().map(|[_, _, message]| message.as_str());
    let messages: Vec<&str> = messages.filter(|message| seen.insert(*message)).collect();
    response["allowed"] == expected.is_empty()
        && response.pointer("/status/message").and_then(Value::as_str).unwrap_or_default() == messages.join(", ")
        && causes.len() == expected.len()
        && causes.iter().zip(expected).all(|(cause, [type_, field, message])| {
            cause["reason"] == type_.as_str()
                && cause["field"] == field.as_str()
                && cause["message"].as_str().is_some_and(|shown| message.ends_with(shown))
        })
}

/// Returns the rules of the reference in its order.
fn rules(directory: &Path) -> Vec<String> {
    let index = fs::read_to_string(directory.join("index.txt")).unwrap();
    let lines = index.lines().map(str::trim).filter(|line| !line.is_empty() && !line.starts_with('#'));
    lines.map(str::to_owned).collect()
}

/// Returns the number of rules of each section.
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
        let table = Table::read(file);
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

#[test]
fn answers_are_those_of_the_reference_or_documented() {
    let package = Path::new(env!("CARGO_MANIFEST_DIR"));
    let documented = fs::read_to_string(package.join("../docs/compatibility.md")).unwrap();
    let (mut names, mut wrong, mut otherwise) = (BTreeSet::new(), Vec::new(), 0);
    for file in fs::read_dir(package.join("tests/answers")).unwrap() {
        let table = Table::read(&file.unwrap().path());
        for row in &table.rows {
            let (name, request, answer, ours) = match row.as_slice() {
                [name, request, answer] => (name, request, answer, answer),
                [name, request, answer, ours, subject] => {
                    otherwise += 1;
                    if table.causes(answer) == table.causes(ours) {
                        wrong.push(format!("{name}: the answers are the same"));
                    }
                    if !documented.contains(&format!("\n| {} |", subject.as_str().unwrap())) {
                        wrong.push(format!("{name}: docs/compatibility.md has no row about {subject}"));
                    }
                    (name, request, answer, ours)
                }
                _ => panic!("{row:?}: a row has three columns or five"),
            };
            if !names.insert(name.as_str().unwrap().to_owned()) {
                wrong.push(format!("{name} has a row already"));
            }
            let (response, expected) = (table.respond(request), table.causes(ours));
            if !has_causes(&response, &expected) {
                wrong.push(format!("{name}: expected {expected:?}\n    of the reference {answer}\n    got {response}"));
            }
        }
    }
    println!("answers: {}, documented differences: {otherwise}", names.len());
    assert!(wrong.is_empty(), "{} answers:\n{}", wrong.len(), wrong.join("\n"));
}
