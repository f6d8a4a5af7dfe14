use api::cdi::annotation::{CHECK_STATIC_VOLUME, PRE_POPULATED};
use serde_json::{Value, json};

use super::{PERMITTED_CLONE, RESOLVED_REFERENCE};
use crate::{
    context::{LookupError, LookupResult, Lookups, ObjectQuery, Selection},
    handle,
};

const CONTROLLER: &str = "system:serviceaccount:kubevirt:kubevirt-controller";

/// Returns the answer to a query in a cluster where jane may clone from namespace `golden`.
fn answer(query: &ObjectQuery, cdi: bool) -> LookupResult {
    let object = |object: Value| LookupResult::Object(Some(object));
    match &query.selection {
        Selection::List { .. } if cdi => LookupResult::List(vec![]),
        Selection::AccessReview { review } => object(json!({"status": {"allowed": review.contains("golden")}})),
        Selection::Get { name } if name == "s" => object(json!({
            "apiVersion": "cdi.kubevirt.io/v1beta1", "kind": "DataSource",
            "metadata": {"name": "s", "namespace": "golden"},
            "spec": {"source": {"pvc": {"namespace": "", "name": "image"}}},
        })),
        _ => LookupResult::Object(None),
    }
}

/// Returns the object after `/datavolumes-mutate`.
fn mutated(user: &str, cdi: bool, object: &Value, old: &Value) -> Value {
    let body = json!({"request": {
        "uid": "u", "namespace": "ns", "operation": if old.is_null() { "CREATE" } else { "UPDATE" },
        "resource": {"group": "cdi.kubevirt.io", "version": "v1beta1", "resource": "datavolumes"},
        "userInfo": {"username": user}, "object": object, "oldObject": old,
    }});
    let mut lookups = Lookups::new();
    for _ in 0..4 {
        match handle("/datavolumes-mutate", body.to_string().as_bytes(), &Default::default(), "kubevirt", &lookups) {
            Ok(evaluation) => {
                let review = serde_json::to_value(evaluation.review).unwrap();
                assert_eq!(review["response"]["allowed"], true, "{review}");
                let mut object = object.clone();
                if let Some(patch) = review["response"]["patch"].as_str() {
                    let patch = base64::Engine::decode(&base64::engine::general_purpose::STANDARD, patch).unwrap();
                    let patch: json_patch::Patch = serde_json::from_slice(&patch).unwrap();
                    json_patch::patch(&mut object, &patch).unwrap();
                }
                return object;
            }
            Err(queries) => {
                for query in queries {
                    let answer = answer(&query, cdi);
                    lookups.insert(query, answer);
                }
            }
        }
    }
    panic!("too many rounds of lookups");
}

fn volume(annotations: Value, spec: Value) -> Value {
    json!({
        "apiVersion": "cdi.kubevirt.io/v1beta1", "kind": "DataVolume",
        "metadata": {"name": "d", "namespace": "ns", "annotations": annotations}, "spec": spec,
    })
}

fn marked(path: &str) -> Value {
    json!({PERMITTED_CLONE: path})
}

/// Returns the annotations of a DataVolume whose reference became the source in namespace `golden`.
fn resolved() -> Value {
    json!({PERMITTED_CLONE: "persistentvolumeclaims/golden/image", RESOLVED_REFERENCE: "golden/s"})
}

#[test]
fn new_data_volume_has_a_fixed_source_and_a_true_mark() {
    let claim = |namespace: &str, name: &str| json!({"source": {"pvc": {"namespace": namespace, "name": name}}});
    let image = || marked("persistentvolumeclaims/golden/image");
    let reference = || json!({"sourceRef": {"kind": "DataSource", "namespace": "golden", "name": "s"}});
    let forged = || marked("persistentvolumeclaims/other/secret");
    let blank = || json!({"source": {"blank": {}}});
    for (user, cdi, given, wanted) in [
        // A clone from another namespace is marked.
        ("jane", false, (json!({}), claim("golden", "image")), (image(), claim("golden", "image"))),
        ("jane", false, (json!({}), reference()), (resolved(), claim("golden", "image"))),
        // A record that was copied with the DataVolume is removed.
        ("jane", false, (resolved(), claim("golden", "image")), (image(), claim("golden", "image"))),
        (
            CONTROLLER,
            false,
            (json!({}), claim("other", "a")),
            (marked("persistentvolumeclaims/other/a"), claim("other", "a")),
        ),
        // One of the same namespace needs no mark.
        ("jane", false, (json!({}), claim("", "a")), (json!({}), claim("ns", "a"))),
        ("jane", false, (json!({}), blank()), (json!({}), blank())),
        // A forged mark is removed or replaced.
        ("jane", false, (forged(), blank()), (json!({}), blank())),
        ("jane", false, (forged(), claim("ns", "a")), (json!({}), claim("ns", "a"))),
        ("jane", false, (forged(), claim("golden", "image")), (image(), claim("golden", "image"))),
        ("jane", true, (forged(), claim("golden", "image")), (json!({}), claim("golden", "image"))),
        // CDI resolves what it carries out.
        ("jane", true, (json!({}), reference()), (json!({}), reference())),
    ] {
        let found = mutated(user, cdi, &volume(given.0, given.1), &Value::Null);
        assert_eq!(found, volume(wanted.0, wanted.1), "{user} {cdi}");
    }
}

#[test]
fn change_keeps_mark_and_source() {
    let spec = || json!({"source": {"pvc": {"namespace": "golden", "name": "image"}}});
    let mark = || marked("persistentvolumeclaims/golden/image");
    let old = volume(mark(), spec());
    for annotations in [json!({}), mark(), marked("persistentvolumeclaims/other/secret"), Value::Null] {
        assert_eq!(mutated("jane", false, &volume(annotations.clone(), spec()), &old), old, "{annotations}");
    }
    let unmarked = volume(json!({}), json!({"source": {"blank": {}}}));
    assert_eq!(mutated("jane", false, &volume(mark(), json!({"source": {"blank": {}}})), &unmarked), unmarked);
    // Applied again from a file.
    let mut applied = spec();
    applied["sourceRef"] = json!({"kind": "DataSource", "namespace": "golden", "name": "s"});
    assert_eq!(mutated("jane", false, &volume(mark(), applied), &old), old);
}

#[test]
fn manifest_with_a_resolved_reference_can_be_written_again() {
    let source = || json!({"pvc": {"namespace": "golden", "name": "image"}});
    let old = volume(resolved(), json!({"source": source()}));
    let reference = |namespace: &str, name: &str| json!({"kind": "DataSource", "namespace": namespace, "name": name});
    let forged = || json!({RESOLVED_REFERENCE: "other/t"});
    for (annotations, reference, is_same) in [
        (json!({}), reference("golden", "s"), true),
        (resolved(), reference("golden", "s"), true),
        (forged(), reference("golden", "s"), true),
        (json!({}), reference("golden", "t"), false),
        (json!({}), reference("", "s"), false),
        (forged(), reference("other", "t"), false),
        (json!({}), json!({"kind": "Other", "namespace": "golden", "name": "s"}), false),
    ] {
        // Replaced, and applied.
        for mut spec in [json!({}), json!({"source": source()})] {
            spec["sourceRef"] = reference.clone();
            let found = mutated("jane", false, &volume(annotations.clone(), spec.clone()), &old);
            // A rule refuses the change of the spec.
            let expected = if is_same { old.clone() } else { volume(resolved(), spec) };
            assert_eq!(found, expected, "{annotations} {reference}");
        }
    }
    // Another source stays, and is refused as well.
    let other = json!({"source": {"blank": {}}, "sourceRef": reference("golden", "s")});
    let found = mutated("jane", false, &volume(json!({}), other), &old);
    assert_eq!(found, volume(resolved(), json!({"source": {"blank": {}}})));
}

#[test]
fn annotation_about_a_static_volume_is_refused() {
    let annotated = |key: &str| json!({"name": "d", "annotations": {key: ""}});
    let restored = json!({"name": "d", "annotations": {CHECK_STATIC_VOLUME: "", PRE_POPULATED: "d"}});
    for (metadata, is_refused) in [
        (json!({"name": "d"}), false),
        (restored, false),
        (annotated("cdi.kubevirt.io/allowClaimAdoption"), false),
        (annotated(CHECK_STATIC_VOLUME), true),
    ] {
        let errors =
            super::spec_rules::unsupported_annotations("metadata", &serde_json::from_value(metadata.clone()).unwrap());
        let fields: Vec<&str> = errors.as_slice().iter().map(|error| error.field.as_str()).collect();
        let expected = "metadata.annotations[cdi.kubevirt.io/storage.checkStaticVolume]";
        assert_eq!(fields, if is_refused { vec![expected] } else { vec![] }, "{metadata}");
        // The VM is accepted.
        let blank = json!({"blank": {}});
        let warnings = warned_about(&metadata, &blank, &["datavolumes"]);
        assert_eq!(warnings.iter().any(|warning| warning.contains(expected)), is_refused, "{metadata}");
        assert!(warned_about(&metadata, &blank, &["datavolumes", "cdis"]).is_empty(), "{metadata}");
    }
}

fn warned(source: &Value, served: &[&str]) -> Vec<String> {
    warned_about(&json!({"name": "d"}), source, served)
}

/// Returns the warnings about a template with this source. `served` are the kinds of CDI that the cluster has.
fn warned_about(metadata: &Value, source: &Value, served: &[&str]) -> Vec<String> {
    let storage = json!({"resources": {"requests": {"storage": "1Gi"}}});
    let template = json!({"metadata": metadata, "spec": {"source": source, "storage": storage}});
    let vm = json!({"dataVolumeTemplates": [template], "template": {"spec": {"domain": {"devices": {}}}}});
    let spec: api::VirtualMachineSpec = serde_json::from_value(vm).unwrap();
    let mut lookups = Lookups::new();
    for _ in 0..3 {
        match super::warnings_of_templates(&spec, "ns", &lookups) {
            Ok(warnings) => return warnings,
            Err(LookupError::Missing(queries)) => {
                for query in queries {
                    let is_served = served.contains(&query.plural.as_str());
                    let answer = if is_served { LookupResult::List(vec![]) } else { LookupResult::Object(None) };
                    lookups.insert(query, answer);
                }
            }
            Err(error) => panic!("{error}"),
        }
    }
    panic!("too many rounds of lookups");
}

#[test]
fn templates_that_need_cdi_get_a_warning_where_it_is_missing() {
    let nothing: &[&str] = &[];
    let (without, with) = (&["datavolumes"][..], &["datavolumes", "cdis"][..]);
    let bucket = json!({"gcs": {"url": "gs://bucket/disk"}});
    let stream = json!({"registry": {"imageStream": "linux"}});
    let image = json!({"registry": {"url": "docker://registry.example/disk"}});
    for (source, served, expected) in [
        (&bucket, without, Some("source.gcs is not supported yet: imports that need CDI")),
        (&stream, without, Some("source.registry.imageStream is not supported yet: imports that need CDI")),
        (&image, without, None),
        (&bucket, with, None),
        (&stream, with, None),
        (&bucket, nothing, Some("the cluster has no DataVolumes")),
    ] {
        let warnings = warned(source, served);
        assert_eq!(warnings.len(), usize::from(expected.is_some()), "{source} {served:?}: {warnings:?}");
        let is_found = expected.is_none_or(|text| warnings.iter().any(|warning| warning.contains(text)));
        assert!(is_found, "{source} {served:?}: {warnings:?}");
    }
}
