//! One row for each default of the reference tables.
//!
//! The tables are the files of `tests/defaults/`: the webhook, the operation, an object (`base`), how many defaults of
//! each section, and rows `[id, change, {pointer: value}]`: the object with the change merged in (null removes) has
//! these values after the patch, null for none. Keys of the change that begin with `$` are not part of the object:
//! `$config` is `spec.configuration` of the KubeVirt object. Each patched object is sent a second time, by a component,
//! and has to come back as it is.

#![allow(clippy::unwrap_used, reason = "a test ends here")]

use std::{collections::BTreeMap, error::Error, fs, path::Path};

use admission::{LookupResult, Lookups, handle};
use api::config::ClusterConfig;
use base64::{Engine, engine::general_purpose::STANDARD};
use serde::Deserialize;
use serde_json::{Map, Value, json};

mod tables;

use tables::{configuration, merge};

#[derive(Deserialize)]
struct Table {
    webhook: String,
    plural: String,
    operation: String,
    base: Value,
    sections: BTreeMap<String, usize>,
    rows: Vec<(String, Value, Map<String, Value>)>,
}

impl Table {
    /// Returns the object after the patch of the webhook.
    fn patched(&self, object: &Value, user: &str, config: &ClusterConfig) -> Result<Value, Box<dyn Error>> {
        let body = json!({"request": {
            "uid": "u",
            "resource": {"group": "kubevirt.io", "version": "v1", "resource": self.plural},
            "namespace": "default",
            "operation": self.operation,
            "userInfo": {"username": user},
            "object": object,
            "oldObject": object,
        }})
        .to_string();
        let mut known = Lookups::new();
        let review = loop {
            match handle(&self.webhook, body.as_bytes(), config, "kubevirt", &known) {
                Ok(evaluation) => break evaluation.review,
                Err(queries) => queries.into_iter().for_each(|query| known.insert(query, LookupResult::Object(None))),
            }
        };
        if !review.response.allowed {
            return Err(format!("{:?}", review.response.status).into());
        }
        let mut object = object.clone();
        if let Some(patch) = &review.response.patch {
            let patch: json_patch::Patch = serde_json::from_slice(&STANDARD.decode(patch).unwrap()).unwrap();
            json_patch::patch(&mut object, &patch)?;
        }
        Ok(object)
    }

    fn check(&self, change: &Value, expected: &Map<String, Value>) -> Result<(), Box<dyn Error>> {
        let config = configuration(change);
        let mut object = self.base.clone();
        merge(&mut object, change);
        let once = self.patched(&object, "jane", &config)?;
        for (pointer, value) in expected {
            let found = once.pointer(pointer).unwrap_or(&Value::Null);
            // A text in angle brackets stands for any text: random identifiers.
            let any = value == "<any>" && found.as_str().is_some_and(|text| !text.is_empty());
            if found != value && !any {
                return Err(format!("{pointer} should be {value}, is {found}").into());
            }
        }
        let twice = self.patched(&once, "system:serviceaccount:kubevirt:kubevirt-controller", &config)?;
        if twice == once { Ok(()) } else { Err(format!("a second pass changes it\n    {once}\n    {twice}").into()) }
    }
}

#[test]
fn each_default_is_set_once() {
    let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/defaults");
    let mut wrong = Vec::new();
    let mut total = 0;
    for entry in fs::read_dir(directory).unwrap() {
        let file = entry.unwrap().path();
        let table: Table = serde_json::from_str(&fs::read_to_string(&file).unwrap()).unwrap();
        let mut counted: BTreeMap<String, usize> = BTreeMap::new();
        for (id, change, expected) in &table.rows {
            *counted.entry(id.split('/').next().unwrap().to_owned()).or_default() += 1;
            if let Err(message) = table.check(change, expected) {
                wrong.push(format!("{} {id}: {message}", file.display()));
            }
        }
        assert_eq!(counted, table.sections, "{}: each default of the sections has its row", file.display());
        total += table.rows.len();
    }
    println!("defaults: {total}");
    assert!(wrong.is_empty(), "{} rows:\n{}", wrong.len(), wrong.join("\n"));
}
