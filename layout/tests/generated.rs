//! The generated parts of the documents are current. `make docs` renews them.

use std::{collections::BTreeMap, fmt::Write, path::Path};

use admission::{LookupResult, Lookups, Selection};
use api::{FeatureGate, config::ClusterConfig, fields, gates::State, instancetype::common};
use layout::{documents, lists, root, values};
use serde_json::{Map, Value, json};

/// Crates of the product.
const PRODUCT: &[&str] =
    &["api", "daemon", "admission", "controllers", "apiserver", "node", "launcher", "importer", "cli"];
/// Crates with metrics, and the processes that export them.
const EXPORTERS: &[(&str, &str)] = &[
    ("daemon", "virt-api, virt-controller and virt-handler"),
    ("apiserver", "virt-api"),
    ("controllers", "virt-controller"),
    ("node", "virt-handler"),
];

/// Renews a part of a document, or fails when it is stale.
fn check(document: &str, part: &str, generated: &str) -> Result<(), String> {
    let renew = std::env::var_os("RENEW").is_some();
    let current = documents::renew(&root().join(document), part, generated, renew);
    if current.map_err(|error| error.to_string())? {
        return Ok(());
    }
    Err(format!("{document}, part {part}, is stale: run `make docs`"))
}

/// Does the same for the lines between two texts.
fn check_between(file: &str, markers: (&str, &str), generated: &str) -> Result<(), String> {
    let renew = std::env::var_os("RENEW").is_some();
    let current = documents::renew_between(&root().join(file), markers, generated, renew);
    if current.map_err(|error| error.to_string())? { Ok(()) } else { Err(format!("{file} is stale: run `make docs`")) }
}

/// Returns the text of all files below a folder.
fn text_below(folder: &Path) -> std::io::Result<String> {
    let mut text = String::new();
    for entry in std::fs::read_dir(folder)? {
        let path = entry?.path();
        text += &if path.is_dir() { text_below(&path)? } else { std::fs::read_to_string(path)? };
    }
    Ok(text)
}

/// Returns a table in Markdown.
fn table<const COLUMNS: usize>(head: [&str; COLUMNS], rows: impl IntoIterator<Item = [String; COLUMNS]>) -> String {
    let mut text = String::new();
    let mut line = |cells: &[String]| {
        let cells: Vec<String> = cells.iter().map(|cell| cell.replace('|', "\\|")).collect();
        let _ = writeln!(text, "| {} |", cells.join(" | "));
    };
    line(&head.map(str::to_owned));
    line(&head.map(|_| "---".to_owned()));
    rows.into_iter().for_each(|row| line(&row));
    format!("\n{text}")
}

fn code(text: &str) -> String {
    format!("`{text}`")
}

#[test]
fn decision_records_are_complete_and_listed() {
    let records = documents::records(&root()).unwrap();
    for record in &records {
        assert!(record.missing.is_empty(), "{} lacks {:?}", record.file, record.missing);
    }
    assert!(records.len() > 30, "{} records", records.len());
    check("docs/decisions/README.md", "records", &documents::record_table(&records)).unwrap();
}

/// Returns a remark about a gate: a feature that is refused, or one that has no switch here.
fn effect(gate: FeatureGate) -> String {
    let refused = admission::kinds::kubevirt::refused_feature(gate).map(|feature| format!("refused: {feature}"));
    refused.unwrap_or_else(|| {
        let remark = match gate {
            FeatureGate::LibvirtHooksServerAndClient => {
                "no effect: virt-launcher changes the definition of a domain before it migrates, without hooks of libvirt"
            }
            FeatureGate::VmiMemoryOverheadReport => "no effect: `status.memory.memoryOverhead` is always reported",
            _ => "",
        };
        remark.to_owned()
    })
}

/// Returns the fields and annotations of a VMI that need a gate.
fn gated(gate: FeatureGate) -> String {
    let named = |field: &fields::Field| {
        let gated = field.gates.iter().find(|gated| gated.gate == gate)?;
        let uses = if gated.uses.is_empty() { String::new() } else { format!(": {}", gated.uses) };
        Some(format!("{}{uses}", code(field.path)))
    };
    let annotations = fields::GATED_ANNOTATIONS.iter().filter(|(_, gated)| gated.gate == gate);
    let annotations = annotations.map(|(key, _)| format!("annotation {}", code(key)));
    fields::FIELDS.iter().filter_map(named).chain(annotations).collect::<Vec<_>>().join("; ")
}

#[test]
fn feature_gates_are_current() {
    let root = root();
    let definition = root.join("api/src/gates.rs");
    let rows = FeatureGate::ALL.iter().map(|gate| {
        let readers = lists::crates_with(&root, PRODUCT, &format!("FeatureGate::{gate:?}"), &definition).unwrap();
        let state = match gate.state() {
            State::Ga => "general availability: always on",
            State::Beta => "beta: on unless disabled",
            State::Alpha => "alpha: off unless enabled",
            State::Deprecated => "deprecated: off unless enabled",
            State::Discontinued => "discontinued",
        };
        let named = readers.iter().map(|name| code(name)).collect::<Vec<_>>().join(", ");
        let readers = if named.is_empty() { "nothing".to_owned() } else { named };
        [code(gate.name()), state.to_owned(), effect(*gate), gated(*gate), readers]
    });
    let table = table(["gate", "state", "remark", "fields that need it", "read by"], rows);
    check("docs/reference/feature-gates.md", "gates", &table).unwrap();
}

#[test]
fn unsupported_fields_are_current() {
    let root = root();
    let [vm, kinds] = admission::rules::unsupported::tables();
    let spec = fields::FIELDS.iter().filter_map(|field| {
        let gates = field.gates.iter().map(|gated| code(gated.gate.name())).collect::<Vec<_>>().join(", ");
        Some([code(field.path), field.refusal?.reason?.to_owned(), gates])
    });
    let fields = |rows: Vec<(&str, &str)>| {
        table(["field", "missing feature"], rows.into_iter().map(|(field, why)| [code(field), why.to_owned()]))
    };
    let document = "docs/reference/not-yet.md";
    check(document, "vmi", &table(["field", "missing feature", "feature gate"], spec)).unwrap();
    check(document, "vm", &fields(vm)).unwrap();
    let rows = kinds.into_iter().map(|(kind, why)| [code(kind), why.to_owned()]);
    check(document, "kinds", &table(["kind", "missing feature"], rows)).unwrap();
    let rows = admission::rules::unsupported::migrations::fields().into_iter();
    let rows = rows.map(|(field, why)| [code(&field), why.to_owned()]);
    check(document, "migrations", &table(["kind and field", "missing feature"], rows)).unwrap();
    let rows = admission::kinds::kubevirt::unsupported_fields();
    let rows = rows.into_iter().map(|(field, why)| [code(&field), why.to_owned()]);
    check(document, "kubevirt", &table(["field", "reason"], rows)).unwrap();
    let rows = admission::kinds::kubevirt::ignored_fields().into_iter();
    let rows = rows.map(|(field, instead)| [code(field), instead.to_owned()]);
    check(document, "ignored", &table(["field", "instead, or reason"], rows)).unwrap();
    let rows = fields::ANNOTATIONS.iter().map(|(key, _)| [code(key)]);
    check(document, "annotations", &table(["annotation"], rows)).unwrap();
    let refused = lists::refused_subresources(&root.join("apiserver/src/subresources")).unwrap();
    assert!(refused.len() > 5, "{refused:?}");
    let rows = refused.into_iter().map(|found| [code(&found.name), found.feature]);
    check(document, "subresources", &table(["subresource", "missing feature"], rows)).unwrap();
}

/// Returns the fields for which admission refuses a VM with an instance type and a preference, or the message of another refusal.
fn refused_fields(instancetype: &Value, preference: Option<&Value>) -> Vec<String> {
    let plural = |object: &Value| match object["kind"].as_str() {
        Some("VirtualMachineClusterInstancetype") => "virtualmachineclusterinstancetypes",
        _ => "virtualmachineclusterpreferences",
    };
    let vm = json!({
        "apiVersion": "kubevirt.io/v1", "kind": "VirtualMachine", "metadata": {"name": "v", "namespace": "d"},
        "spec": {
            "runStrategy": "Always", "instancetype": {"name": instancetype["metadata"]["name"]},
            "preference": preference.map(|object| json!({"name": object["metadata"]["name"]})),
            "template": {"spec": {
                "architecture": preference.map(|object| &object["spec"]["preferredArchitecture"]),
                "domain": {"devices": {"disks": [{"name": "root"}], "interfaces": [{"name": "default", "masquerade": {}}]}},
                "networks": [{"name": "default", "pod": {}}],
                "volumes": [{"name": "root", "containerDisk": {"image": "a:b"}}],
            }},
        },
    });
    let resource = json!({"group": "kubevirt.io", "version": "v1", "resource": "virtualmachines"});
    let body = json!({
        "apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview",
        "request": {
            "uid": "u", "kind": {"group": "kubevirt.io", "version": "v1", "kind": "VirtualMachine"}, "resource": resource,
            "namespace": "d", "operation": "CREATE", "userInfo": {"username": "jane"}, "object": vm,
        },
    });
    let mut lookups = Lookups::new();
    for _ in 0..8 {
        let config = ClusterConfig::default();
        let missing = match admission::handle(
            "/virtualmachines-validate",
            body.to_string().as_bytes(),
            &config,
            "kubevirt",
            &lookups,
        ) {
            Ok(evaluation) => {
                let review = json!(evaluation.review);
                let causes = review.pointer("/response/status/details/causes").and_then(Value::as_array).cloned();
                assert_eq!(causes.is_none(), review["response"]["allowed"] == true, "{review}");
                let field =
                    |cause: &Value| cause["field"].as_str().unwrap_or_default().replacen("spec.template.spec.", "", 1);
                return causes.unwrap_or_default().iter().map(field).collect();
            }
            Err(missing) => missing,
        };
        for query in missing {
            let found = [Some(instancetype), preference].into_iter().flatten();
            let is_named = |object: &Value| {
                let name = object["metadata"]["name"].as_str();
                matches!(&query.selection, Selection::Get { name: queried } if Some(queried.as_str()) == name)
            };
            let mut found = found.filter(|object| plural(object) == query.plural && is_named(object));
            lookups.insert(query.clone(), LookupResult::Object(found.next().cloned()));
        }
    }
    vec!["too many rounds of lookups".to_owned()]
}

#[test]
fn common_instance_types_and_preferences_that_are_refused_are_listed() {
    let instancetypes: Vec<Value> = common::instancetypes().into_iter().map(|object| json!(object)).collect();
    let preferences: Vec<Value> = common::preferences().into_iter().map(|object| json!(object)).collect();
    let named = |name: &str| instancetypes.iter().find(|object| object["metadata"]["name"] == name).unwrap();
    // It has enough for each preference.
    let large = named("u1.2xlarge");
    assert!(refused_fields(large, None).is_empty());
    let mut groups: BTreeMap<Vec<String>, Vec<String>> = BTreeMap::new();
    let mut add = |object: &Value, fields: Vec<String>| {
        if !fields.is_empty() {
            groups.entry(fields).or_default().push(code(object["metadata"]["name"].as_str().unwrap()));
        }
    };
    instancetypes.iter().for_each(|object| add(object, refused_fields(object, None)));
    preferences.iter().for_each(|object| add(object, refused_fields(large, Some(object))));
    let rows = groups.into_iter().map(|(fields, names)| {
        let fields: Vec<String> = fields.iter().map(|field| code(field)).collect();
        [names.join(", "), fields.join(", ")]
    });
    let head = ["instance types and preferences", "fields that are refused"];
    check("docs/reference/not-yet.md", "common", &table(head, rows)).unwrap();
}

#[test]
fn live_changes_are_current() {
    let root = root();
    let sources = ["admission/tests/rules", "controllers/src", "e2e/tests/tests/e2e"].map(|folder| root.join(folder));
    let text: String = sources.iter().map(|folder| text_below(folder).unwrap()).collect();
    let line = |field: &str, change: &fields::Change| {
        let shown = [format!("fn {}(", change.test), format!("[\"{}\"", change.test)];
        assert!(shown.iter().any(|shown| text.contains(shown.as_str())), "no test or rule {}", change.test);
        let which = if change.change.is_empty() { "any" } else { change.change };
        [field.to_owned(), which.to_owned(), change.effect.text().to_owned(), code(change.test)]
    };
    // Fields with the same effects share their lines.
    let mut groups: Vec<(&[fields::Change], Vec<String>)> = Vec::new();
    for field in fields::FIELDS.iter().filter(|field| !field.changes.is_empty()) {
        match groups.iter_mut().find(|(changes, _)| *changes == field.changes) {
            Some((_, names)) => names.push(code(field.name())),
            None => groups.push((field.changes, vec![code(field.name())])),
        }
    }
    let mut rows = Vec::new();
    for (changes, names) in groups {
        rows.extend(changes.iter().map(|change| line(&names.join(", "), change)));
    }
    rows.extend(fields::changes::OTHERS.iter().map(|(name, change)| line(name, change)));
    let head = ["field", "change", "effect on the running VMI", "shown by"];
    check("docs/reference/live-changes.md", "changes", &table(head, rows)).unwrap();
}

#[test]
fn annotations_and_labels_are_current() {
    let root = root();
    let constants = root.join("api/src/constants.rs");
    let rows = |names: Vec<lists::Name>| {
        table(["name", "purpose"], names.into_iter().map(|found| [code(&found.name), found.purpose]))
    };
    for (document, module) in [("docs/reference/annotations.md", "annotation"), ("docs/reference/labels.md", "label")] {
        let mut names = lists::constants(&constants, module).unwrap();
        // The module also has a value.
        names.retain(|found| module == "label" || found.name.contains('/'));
        assert!(names.len() > 20 && names.iter().all(|name| !name.purpose.is_empty()), "{names:?}");
        check(document, module, &rows(names)).unwrap();
    }
    let mut own: Vec<lists::Name> = Vec::new();
    for name in PRODUCT {
        own.extend(lists::constants_with(&root.join(name).join("src"), "ferrovirt.io/").unwrap());
    }
    own.sort();
    check("docs/reference/annotations.md", "own", &rows(own)).unwrap();
}

#[test]
fn commands_of_virtctl_are_current() {
    let text = std::fs::read_to_string(root().join("cli/virtctl.yaml")).unwrap();
    let commands: Vec<Value> = serde_saphyr::from_str(&text).unwrap();
    let flags = |value: &Value| {
        let names = value.as_array().into_iter().flatten().filter_map(Value::as_str);
        names.map(|name| code(&format!("--{name}"))).collect::<Vec<_>>().join(" ")
    };
    let row = |command: &Value| {
        let name = command["command"].as_str().unwrap();
        let (absent, only) = (command["absent"].as_str(), command["only"].as_str());
        let lacks = command["lacks"].as_object().into_iter().flatten();
        let lacks = lacks.map(|(flag, why)| format!("`--{flag}`: {}", why.as_str().unwrap()));
        let state = match (absent, only) {
            (Some(_), _) => "virtctl only",
            (None, Some(_)) => "kubectl virt only",
            (None, None) => "both",
        };
        let notes = absent.or(only).into_iter().chain(command["note"].as_str()).map(str::to_owned).chain(lacks);
        let name = if name.is_empty() { "all commands".to_owned() } else { code(name) };
        [name, state.to_owned(), flags(&command["flags"]), flags(&command["own"]), notes.collect::<Vec<_>>().join("; ")]
    };
    let head = ["command", "in", "flags of both", "flags of kubectl virt only", "what differs"];
    check("docs/reference/virtctl.md", "commands", &table(head, commands.iter().map(row))).unwrap();
}

#[test]
fn values_of_the_chart_are_current() {
    let chart = root().join("charts/ferrovirt");
    let text = std::fs::read_to_string(chart.join("values.yaml")).unwrap();
    let defaults: Value = serde_saphyr::from_str(&text).unwrap();
    let schema: Value =
        serde_json::from_str(&std::fs::read_to_string(chart.join("values.schema.json")).unwrap()).unwrap();
    let comments = values::comments(&text);
    let mut rows = Vec::new();
    for path in values::paths(&schema) {
        let Some((parent, key)) = path.rsplit_once('.') else {
            let comment = comments.get(&path).unwrap_or_else(|| panic!("{path} has no comment in values.yaml"));
            rows.push([code(&path), default(&defaults, &path), comment.clone()]);
            continue;
        };
        // Maps whose keys the schema lists are described as a whole.
        let whole = ["overrides", "affinity", "strategy", "updateStrategy"].iter().find_map(|name| {
            let end = path.split_once(&format!(".{name}."))?.0.len() + name.len() + 1;
            path.get(..end)
        });
        let path = whole.unwrap_or(&path);
        let comment = comments.get(path).cloned().or_else(|| match key {
            "requests" | "limits" => comments.get(parent).cloned(),
            _ => None,
        });
        let comment = comment.unwrap_or_else(|| panic!("{path} has no comment in values.yaml"));
        rows.push([code(path), default(&defaults, path), comment]);
    }
    rows.dedup();
    assert!(rows.len() > 50, "{} values", rows.len());
    check("charts/ferrovirt/README.md", "values", &table(["value", "default", "content"], rows)).unwrap();
}

/// Returns the part of a JSON Schema that refuses unknown keys. Types are those of the definition, which the API server checks.
fn keys(schema: &Value) -> Value {
    if schema["x-kubernetes-preserve-unknown-fields"] == true {
        return json!({});
    }
    if let Some(properties) = schema["properties"].as_object() {
        let properties: Map<String, Value> = properties.iter().map(|(key, part)| (key.clone(), keys(part))).collect();
        return json!({"additionalProperties": false, "properties": properties});
    }
    let inner = ["items", "additionalProperties"].iter().find_map(|key| {
        let inner = schema.get(*key).map(keys).filter(|inner| *inner != json!({}))?;
        Some(json!({*key: inner}))
    });
    inner.unwrap_or_else(|| json!({}))
}

#[test]
fn keys_of_the_configuration_in_the_schema_of_values_are_current() {
    let definition = api::crds::all().unwrap().into_iter().find(|found| found.spec.names.kind == "KubeVirt").unwrap();
    let definition = serde_json::to_value(definition).unwrap();
    let schema = "/spec/versions/0/schema/openAPIV3Schema/properties/spec/properties/configuration";
    let schema = keys(definition.pointer(schema).unwrap());
    let lines: Vec<String> = schema["properties"]
        .as_object()
        .unwrap()
        .iter()
        .map(|(key, part)| format!("        {}: {part}", json!(key)))
        .collect();
    assert!(lines.len() > 40, "{} keys", lines.len());
    let generated = format!(
        "      \"type\": \"object\",\n      \"additionalProperties\": false,\n      \"properties\": {{\n{}\n      }}",
        lines.join(",\n")
    );
    let markers = ("\n    \"configuration\": {", "\n    },\n");
    check_between("charts/ferrovirt/values.schema.json", markers, &generated).unwrap();
}

#[test]
fn definitions_in_the_metadata_of_the_chart_are_current() {
    let rows = api::crds::all().unwrap().into_iter().map(|found| {
        let spec = serde_json::to_value(&found.spec).unwrap();
        let version = spec["versions"].as_array().unwrap().iter().find(|version| version["storage"] == true).unwrap();
        let description = version["schema"]["openAPIV3Schema"]["description"].as_str().unwrap();
        let kind = &found.spec.names.kind;
        let name = found.metadata.name.unwrap();
        format!(
            "    - kind: {kind}\n      version: {}\n      name: {name}\n      displayName: {kind}\n      description: {}\n",
            version["name"].as_str().unwrap(),
            json!(description),
        )
    });
    let markers = ("    # Definitions (make docs).", "  artifacthub.io/");
    check_between("charts/ferrovirt/Chart.yaml", markers, &rows.collect::<String>()).unwrap();
}

/// Returns the default of a value of the chart. One that is missing fails, since `values.yaml` lists all values.
fn default(defaults: &Value, path: &str) -> String {
    let value = values::at(defaults, path);
    assert!(value.is_some(), "{path} is not in values.yaml");
    code(&value.map(Value::to_string).unwrap_or_default())
}

#[test]
fn metrics_are_current() {
    let root = root();
    let mut text = String::new();
    for (name, process) in EXPORTERS {
        let metrics = lists::metrics(&root.join(name).join("src")).unwrap();
        assert!(!metrics.is_empty(), "{name} has no metrics");
        let rows = metrics.into_iter().map(|metric| [code(&metric.name), metric.help]);
        let _ = write!(text, "\n## {}\n{}", heading(process), table(["metric", "help"], rows));
    }
    check("docs/reference/metrics.md", "metrics", &text).unwrap();
}

/// Returns the heading of a table of metrics.
fn heading(process: &str) -> String {
    format!("Exported by {process}")
}
