//! Architecture of a VM from the DataSource of its first disk: golden images have a label for it.

use api::VirtualMachine;
use serde_json::Value;

use crate::{
    context::{LookupError, LookupResult, Lookups, ObjectQuery},
    defaults::is_empty,
};

const LABEL: &str = "template.kubevirt.io/architecture";
const KNOWN: [&str; 3] = ["amd64", "arm64", "s390x"];
const KIND: &str = "DataSource";

/// Sets the architecture of a VM without one from the first of its DataVolume templates with a DataSource. A DataSource that
/// cannot be read or has no label leaves the cluster's default.
pub(crate) fn set_architecture(vm: &mut VirtualMachine, namespace: &str, lookups: &Lookups) -> Result<(), LookupError> {
    let Some(spec) = vm.spec.template.spec.as_mut().filter(|spec| is_empty(spec.architecture.as_ref())) else {
        return Ok(());
    };
    let references = vm.spec.data_volume_templates.iter().filter_map(|template| template.spec.source_ref.as_ref());
    let Some(source) = references.into_iter().find(|source| source.kind.eq_ignore_ascii_case(KIND)) else {
        return Ok(());
    };
    let own = source.namespace.as_deref().filter(|name| !name.is_empty()).unwrap_or(namespace);
    let Some(found) = read(own, &source.name, lookups)? else { return Ok(()) };
    let mut architecture = label(found);
    if architecture.is_none()
        && let Some(reference) = found.pointer("/spec/source/dataSource")
    {
        let text = |field: &str| reference.get(field).and_then(Value::as_str).filter(|text| !text.is_empty());
        if let Some(name) = text("name") {
            architecture = read(text("namespace").unwrap_or(own), name, lookups)?.and_then(label);
        }
    }
    if let Some(architecture) = architecture {
        spec.architecture = Some(architecture.to_owned());
    }
    Ok(())
}

fn read<'a>(namespace: &str, name: &str, lookups: &'a Lookups) -> Result<Option<&'a Value>, LookupError> {
    let query = ObjectQuery::get("cdi.kubevirt.io", "v1beta1", "datasources", Some(namespace), name);
    Ok(match lookups.result(&query)? {
        LookupResult::Object(object) => object.as_ref(),
        LookupResult::List(_) | LookupResult::Failed { .. } => None,
    })
}

fn label(object: &Value) -> Option<&str> {
    let label = object.get("metadata")?.get("labels")?.get(LABEL)?.as_str();
    label.filter(|architecture| KNOWN.contains(architecture))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    /// Returns the architecture of a VM in namespace `ns` with a DataSource.
    fn set(architecture: &str, reference: Value, sources: &[(&str, LookupResult)]) -> String {
        let mut vm: VirtualMachine = serde_json::from_value(json!({
            "apiVersion": "kubevirt.io/v1", "kind": "VirtualMachine", "metadata": {"name": "v"},
            "spec": {
                "dataVolumeTemplates": [
                    {"metadata": {"name": "a"}, "spec": {"source": {"blank": {}}}},
                    {"metadata": {"name": "b"}, "spec": {"sourceRef": reference}},
                ],
                "template": {"spec": {"architecture": architecture, "domain": {"devices": {}}}},
            },
        }))
        .unwrap();
        let mut lookups = Lookups::new();
        for _ in 0..3 {
            match set_architecture(&mut vm, "ns", &lookups) {
                Ok(()) => return vm.spec.template.spec.unwrap().architecture.unwrap_or_default(),
                Err(LookupError::Failed(message)) => panic!("{message}"),
                Err(LookupError::Missing(queries)) => {
                    for query in queries {
                        let at = query.to_string();
                        let known = sources.iter().find(|(name, _)| at.contains(&format!("\"{name}\"")));
                        lookups.insert(query, known.map_or(LookupResult::Object(None), |(_, known)| known.clone()));
                    }
                }
            }
        }
        panic!("too many rounds of lookups");
    }

    fn labelled(architecture: &str) -> LookupResult {
        LookupResult::Object(Some(json!({"metadata": {"labels": {LABEL: architecture}}})))
    }

    fn refers(reference: Value) -> LookupResult {
        LookupResult::Object(Some(json!({"metadata": {}, "spec": {"source": {"dataSource": reference}}})))
    }

    #[test]
    fn architecture_follows_the_label_of_the_golden_image() {
        let here = || json!({"kind": "DataSource", "name": "d"});
        let there = || json!({"kind": "datasource", "name": "d", "namespace": "images"});
        let failed = LookupResult::Failed { code: 403, message: "no".to_owned() };
        let nested = refers(json!({"name": "e"}));
        /// Architecture of the VM, reference, lookups, expected architecture.
        type Row = (&'static str, Value, Vec<(&'static str, LookupResult)>, &'static str);
        let table: Vec<Row> = vec![
            ("", here(), vec![("ns/d", labelled("arm64"))], "arm64"),
            ("", there(), vec![("images/d", labelled("s390x"))], "s390x"),
            ("amd64", here(), vec![("ns/d", labelled("arm64"))], "amd64"),
            ("", here(), vec![("ns/d", labelled("vax"))], ""),
            ("", here(), vec![], ""),
            ("", here(), vec![("ns/d", failed)], ""),
            ("", json!({"kind": "Image", "name": "d"}), vec![("ns/d", labelled("arm64"))], ""),
            ("", there(), vec![("images/d", nested.clone()), ("images/e", labelled("arm64"))], "arm64"),
            (
                "",
                here(),
                vec![("ns/d", refers(json!({"name": "e", "namespace": "o"}))), ("o/e", labelled("arm64"))],
                "arm64",
            ),
            // Only one nested DataSource is followed.
            ("", here(), vec![("ns/d", nested.clone()), ("ns/e", nested)], ""),
        ];
        for (architecture, reference, sources, want) in table {
            assert_eq!(set(architecture, reference.clone(), &sources), want, "{architecture} {reference} {sources:?}");
        }
    }
}
