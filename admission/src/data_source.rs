//! The architecture of a VM by what its first disk is made from: golden images say what they are for.

use api::VirtualMachine;
use serde_json::Value;

use crate::{
    defaults::is_empty,
    neighbours::{Needs, Neighbours, Outcome, Wanted},
};

const LABEL: &str = "template.kubevirt.io/architecture";
const KNOWN: [&str; 3] = ["amd64", "arm64", "s390x"];
const KIND: &str = "DataSource";

/// Sets the architecture of a VM that names none from the first of its DataVolume templates that is made from a
/// DataSource. One that cannot be read, or says nothing, leaves it to the cluster's default.
pub(crate) fn set_architecture(vm: &mut VirtualMachine, namespace: &str, neighbours: &Neighbours) -> Result<(), Needs> {
    let Some(spec) = vm.spec.template.spec.as_mut().filter(|spec| is_empty(spec.architecture.as_ref())) else {
        return Ok(());
    };
    let references = vm.spec.data_volume_templates.iter().filter_map(|template| template.spec.source_ref.as_ref());
    let Some(source) = references.into_iter().find(|source| source.kind.eq_ignore_ascii_case(KIND)) else {
        return Ok(());
    };
    let own = source.namespace.as_deref().filter(|name| !name.is_empty()).unwrap_or(namespace);
    let Some(found) = read(own, &source.name, neighbours)? else { return Ok(()) };
    let mut architecture = label(found);
    if architecture.is_none()
        && let Some(reference) = found.pointer("/spec/source/dataSource")
    {
        let text = |field: &str| reference.get(field).and_then(Value::as_str).filter(|text| !text.is_empty());
        if let Some(name) = text("name") {
            architecture = read(text("namespace").unwrap_or(own), name, neighbours)?.and_then(label);
        }
    }
    if let Some(architecture) = architecture {
        spec.architecture = Some(architecture.to_owned());
    }
    Ok(())
}

fn read<'a>(namespace: &str, name: &str, neighbours: &'a Neighbours) -> Result<Option<&'a Value>, Needs> {
    let wanted = Wanted::get("cdi.kubevirt.io", "v1beta1", "datasources", Some(namespace), name);
    Ok(match neighbours.outcome(&wanted)? {
        Outcome::Object(object) => object.as_ref(),
        Outcome::List(_) | Outcome::Failed { .. } => None,
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

    /// The architecture of a VM in namespace `ns` made from a DataSource, where there are these.
    fn set(given: &str, reference: Value, sources: &[(&str, Outcome)]) -> String {
        let mut vm: VirtualMachine = serde_json::from_value(json!({
            "apiVersion": "kubevirt.io/v1", "kind": "VirtualMachine", "metadata": {"name": "v"},
            "spec": {
                "dataVolumeTemplates": [
                    {"metadata": {"name": "a"}, "spec": {"source": {"blank": {}}}},
                    {"metadata": {"name": "b"}, "spec": {"sourceRef": reference}},
                ],
                "template": {"spec": {"architecture": given, "domain": {"devices": {}}}},
            },
        }))
        .unwrap();
        let mut neighbours = Neighbours::new();
        for _ in 0..3 {
            match set_architecture(&mut vm, "ns", &neighbours) {
                Ok(()) => return vm.spec.template.spec.unwrap().architecture.unwrap_or_default(),
                Err(Needs::Failed(message)) => panic!("{message}"),
                Err(Needs::Reads(wanted)) => {
                    for wanted in wanted {
                        let at = wanted.to_string();
                        let known = sources.iter().find(|(place, _)| at.contains(&format!("\"{place}\"")));
                        neighbours.insert(wanted, known.map_or(Outcome::Object(None), |(_, known)| known.clone()));
                    }
                }
            }
        }
        panic!("asks for more and more");
    }

    fn labelled(architecture: &str) -> Outcome {
        Outcome::Object(Some(json!({"metadata": {"labels": {LABEL: architecture}}})))
    }

    fn refers(reference: Value) -> Outcome {
        Outcome::Object(Some(json!({"metadata": {}, "spec": {"source": {"dataSource": reference}}})))
    }

    #[test]
    fn golden_images_say_what_they_are_for() {
        let here = || json!({"kind": "DataSource", "name": "d"});
        let there = || json!({"kind": "datasource", "name": "d", "namespace": "images"});
        let failed = Outcome::Failed { code: 403, message: "no".to_owned() };
        let nested = refers(json!({"name": "e"}));
        /// Architecture given, reference, what is read, architecture wanted.
        type Row = (&'static str, Value, Vec<(&'static str, Outcome)>, &'static str);
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
            // Only one step.
            ("", here(), vec![("ns/d", nested.clone()), ("ns/e", nested)], ""),
        ];
        for (given, reference, sources, want) in table {
            assert_eq!(set(given, reference.clone(), &sources), want, "{given} {reference} {sources:?}");
        }
    }
}
