//! The definitions of the kinds, as a user of kubectl meets them.

use std::collections::BTreeSet;

use anyhow::{Context, Result, ensure};
use ferrovirt_e2e_tests::{repository, story};
use kube::api::{Patch, PatchParams};
use serde_json::{Value, json};

/// The definitions that the chart brings.
fn definitions() -> Result<Vec<Value>> {
    let folder = repository().join("charts/ferrovirt/crds");
    let mut found = vec![];
    for entry in std::fs::read_dir(&folder).with_context(|| format!("cannot list {}", folder.display()))? {
        let path = entry?.path();
        let text = std::fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))?;
        found.push(serde_yaml::from_str(&text).with_context(|| format!("{} is not YAML", path.display()))?);
    }
    Ok(found)
}

fn text<'a>(value: &'a Value, pointer: &str) -> Result<&'a str> {
    value.pointer(pointer).and_then(Value::as_str).with_context(|| format!("no {pointer}"))
}

#[test]
fn all_kinds_are_established_under_all_their_names() {
    story("definitions", async |s| {
        let definitions = definitions()?;
        ensure!(definitions.len() >= 4, "only {} definitions", definitions.len());
        let served = s.kubectl(&["api-resources", "--no-headers", "--output=name"]).await?;
        for definition in definitions {
            let name = text(&definition, "/metadata/name")?;
            let there = s.cluster_api("CustomResourceDefinition").get(name).await.with_context(|| name.to_owned())?;
            let there = serde_json::to_value(there)?;
            for type_ in ["Established", "NamesAccepted"] {
                let holds = there["status"]["conditions"]
                    .as_array()
                    .is_some_and(|all| all.iter().any(|c| c["type"] == type_ && c["status"] == "True"));
                ensure!(holds, "{name} is not {type_}: {}", there["status"]);
            }
            // The API server fills in the kind of lists.
            let mut names = there["spec"]["names"].clone();
            names["listKind"] = definition["spec"]["names"]["listKind"].clone();
            let mut wanted = definition["spec"]["names"].clone();
            wanted["listKind"] = names["listKind"].clone();
            ensure!(names == wanted, "{name} has other names: {}", there["spec"]["names"]);
            ensure!(served.lines().any(|line| line == name), "{name} is not among\n{served}");
            for short in definition["spec"]["names"]["shortNames"].as_array().into_iter().flatten() {
                let short = short.as_str().context("a short name is no text")?;
                s.kubectl(&["get", short]).await.with_context(|| format!("kubectl get {short}"))?;
            }
            // With its structure in doubt the API server would say so, and prune nothing.
            let doubts = there["status"]["conditions"].as_array().into_iter().flatten();
            let doubts: Vec<&Value> = doubts.filter(|c| c["type"] == "NonStructuralSchema").collect();
            ensure!(doubts.is_empty(), "{name}: {doubts:?}");
        }
        Ok(())
    });
}

/// Paths of all fields below a schema, as `kubectl explain --recursive` shows them: lists do not count as a level.
fn fields(schema: &Value, path: &str, found: &mut BTreeSet<String>) {
    for (name, field) in schema["properties"].as_object().into_iter().flatten() {
        let path = format!("{path}.{name}");
        fields(field, &path, found);
        found.insert(path);
    }
    if schema["items"].is_object() {
        fields(&schema["items"], path, found);
    }
    if schema["additionalProperties"].is_object() {
        fields(&schema["additionalProperties"], path, found);
    }
}

/// The same from the output: `  name<TAB><type>`, two more spaces a level.
fn explained(output: &str) -> BTreeSet<String> {
    let mut names: Vec<String> = vec![];
    let mut found = BTreeSet::new();
    for line in output.lines().skip_while(|line| !line.starts_with("FIELDS:")) {
        let Some((field, _)) = line.split_once("\t<") else { continue };
        let level = (field.len() - field.trim_start().len()) / 2;
        names.truncate(level.saturating_sub(1));
        names.push(field.trim().to_owned());
        found.insert(format!(".{}", names.join(".")));
    }
    found
}

#[test]
fn kubectl_explains_every_field() {
    story("explain", async |s| {
        // One wrong word of ours, and kube-apiserver has no such document for anybody.
        let document = s.kubectl(&["get", "--raw", "/openapi/v2"]).await?;
        ensure!(document.contains("subresources.kubevirt.io"), "the subresources are not in OpenAPI 2");
        let definitions = definitions()?;
        let vmi = definitions.iter().find(|d| d["spec"]["names"]["kind"] == "VirtualMachineInstance");
        let schema = vmi.context("no definition of machines")?.pointer("/spec/versions/0/schema/openAPIV3Schema");
        let domain =
            schema.and_then(|schema| schema.pointer("/properties/spec/properties/domain")).context("no domain")?;
        let mut wanted = BTreeSet::new();
        fields(domain, "", &mut wanted);
        ensure!(wanted.len() > 200, "the definition has {} fields only", wanted.len());
        let found = explained(&s.kubectl(&["explain", "vmi.spec.domain", "--recursive"]).await?);
        let missing: Vec<&String> = wanted.difference(&found).collect();
        ensure!(missing.is_empty(), "not explained: {missing:?}");
        for field in ["vmi.spec.domain.cpu.cores", "vm.spec.runStrategy", "vm.spec.template.spec.domain.memory.guest"] {
            let output = s.kubectl(&["explain", field]).await?;
            let told = output.split_once("DESCRIPTION:").map_or("", |(_, told)| told.trim());
            ensure!(!told.is_empty() && !told.starts_with("<empty>"), "{field} is not described: {output}");
        }
        Ok(())
    });
}

#[test]
fn appliers_share_lists_that_have_keys() {
    story("appliers", async |s| {
        let spread = |keys: &[&str]| -> Value {
            keys.iter()
                .map(|key| json!({"topologyKey": key, "whenUnsatisfiable": "ScheduleAnyway", "maxSkew": 1}))
                .collect()
        };
        let machine = |template: Value| {
            json!({
                "apiVersion": "kubevirt.io/v1", "kind": "VirtualMachine", "metadata": {"name": "shared"},
                "spec": {"template": {"spec": template}},
            })
        };
        let mut whole = machine(json!({
            "domain": {"memory": {"guest": "128Mi"}, "devices": {"disks": [{"name": "root", "disk": {"bus": "virtio"}}]}},
            "volumes": [{"name": "root", "containerDisk": {"image": "registry.example/web:1"}}],
            "topologySpreadConstraints": spread(&["zone"]),
        }));
        whole["spec"]["runStrategy"] = json!("Halted");
        let apply = async |who: &str, object: &Value| {
            s.api("vm").patch("shared", &PatchParams::apply(who), &Patch::Apply(object)).await
        };
        let keys = async || -> Result<Vec<String>> {
            let stored = s.get("vm", "shared").await?;
            let list = stored["spec"]["template"]["spec"]["topologySpreadConstraints"].as_array().cloned();
            Ok(list.into_iter().flatten().map(|c| c["topologyKey"].as_str().unwrap_or_default().to_owned()).collect())
        };
        apply("owner", &whole).await?;
        apply("platform", &machine(json!({"domain": {"devices": {}}, "topologySpreadConstraints": spread(&["rack"])})))
            .await?;
        ensure!(keys().await? == ["zone", "rack"], "{:?}", keys().await?);
        // Each takes back only its own.
        apply("platform", &machine(json!({"domain": {"devices": {}}}))).await?;
        ensure!(keys().await? == ["zone"], "{:?}", keys().await?);
        // Disks have no key: who is not their owner does not change them unasked.
        let disks = json!([{"name": "root", "disk": {"bus": "sata"}}]);
        let torn = apply("platform", &machine(json!({"domain": {"devices": {"disks": disks}}}))).await;
        let conflict = matches!(&torn, Err(kube::Error::Api(status)) if status.code == 409);
        ensure!(conflict, "no conflict: {torn:?}");
        Ok(())
    });
}
