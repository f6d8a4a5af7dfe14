//! The definitions of the kinds, as kubectl shows them.

use std::collections::BTreeSet;

use anyhow::{Context, Result, ensure};
use ferrovirt_e2e_tests::{is_true, repository, story};
use kube::api::{Patch, PatchParams};
use serde_json::{Value, json};

use crate::endpoints::merged_document;

/// Returns the definitions of the chart.
fn definitions() -> Result<Vec<Value>> {
    let folder = repository().join("charts/ferrovirt/crds");
    let mut found = vec![];
    for entry in std::fs::read_dir(&folder).with_context(|| format!("cannot list {}", folder.display()))? {
        let path = entry?.path();
        let text = std::fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))?;
        found.push(serde_saphyr::from_str(&text).with_context(|| format!("{} is not YAML", path.display()))?);
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
                ensure!(is_true(&there, type_), "{name} is not {type_}: {}", there["status"]);
            }
            // The API server defaults the kind of lists.
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
            // The API server reports a schema that is not structural, and prunes nothing.
            let doubts = there["status"]["conditions"].as_array().into_iter().flatten();
            let doubts: Vec<&Value> = doubts.filter(|c| c["type"] == "NonStructuralSchema").collect();
            ensure!(doubts.is_empty(), "{name}: {doubts:?}");
        }
        Ok(())
    });
}

/// Collects the paths of all fields below a schema, as `kubectl explain --recursive` shows them: lists are not a level.
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

/// Returns the same paths from the output: `  name<TAB><type>`, two spaces per level.
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
        // A mistake in our document would remove the merged document for all users.
        let document = merged_document(s).await?;
        ensure!(document.contains("subresources.kubevirt.io"), "the subresources are not in OpenAPI 2");
        let definitions = definitions()?;
        let vmi = definitions.iter().find(|d| d["spec"]["names"]["kind"] == "VirtualMachineInstance");
        let schema = vmi.context("no definition of VMIs")?.pointer("/spec/versions/0/schema/openAPIV3Schema");
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
            let description = output.split_once("DESCRIPTION:").map_or("", |(_, description)| description.trim());
            ensure!(
                !description.is_empty() && !description.starts_with("<empty>"),
                "{field} is not described: {output}"
            );
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
        let vm = |template: Value| {
            json!({
                "apiVersion": "kubevirt.io/v1", "kind": "VirtualMachine", "metadata": {"name": "shared"},
                "spec": {"template": {"spec": template}},
            })
        };
        let mut whole = vm(json!({
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
        apply("platform", &vm(json!({"domain": {"devices": {}}, "topologySpreadConstraints": spread(&["rack"])})))
            .await?;
        ensure!(keys().await? == ["zone", "rack"], "{:?}", keys().await?);
        // Each applier removes only its own entry.
        apply("platform", &vm(json!({"domain": {"devices": {}}}))).await?;
        ensure!(keys().await? == ["zone"], "{:?}", keys().await?);
        // Disks have no key: another applier needs force to change them.
        let disks = json!([{"name": "root", "disk": {"bus": "sata"}}]);
        let refused = apply("platform", &vm(json!({"domain": {"devices": {"disks": disks}}}))).await;
        let conflict = matches!(&refused, Err(kube::Error::Api(status)) if status.code == 409);
        ensure!(conflict, "no conflict: {refused:?}");
        Ok(())
    });
}
