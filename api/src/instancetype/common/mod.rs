//! The common instance types and preferences, which an installation brings along.
//!
//! Names, sizes and labels are those of KubeVirt's bundle, whose version a label names. Both kinds are generated from tables:
//! [`instancetypes`] from series and their sizes, [`preferences`] from operating systems and the parts that they have in common.

mod instancetypes;
mod preferences;

use std::collections::BTreeMap;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use serde::Serialize;
use serde_json::{Value, json};
use sha2::{Digest, Sha256};

pub use self::{instancetypes::instancetypes, preferences::preferences};

/// Label with the version of the bundle.
pub const BUNDLE_VERSION: &str = "instancetype.kubevirt.io/common-instancetypes-version";
/// Annotation with the digest of the content that virt-controller wrote. It marks the objects that virt-controller changes and
/// deletes: only while the content is the written one may it be replaced by that of another release.
pub const WRITTEN: &str = "ferrovirt.io/written-content";

/// Version of KubeVirt's bundle.
const VERSION: &str = "v1.7.0";
/// Prefix of labels and annotations that describe an instance type or preference.
pub const PREFIX: &str = "instancetype.kubevirt.io/";
/// Prefixes of all labels and annotations that describe one.
const DESCRIBING: [&str; 4] = [PREFIX, "openshift.io/", "iconClass", "tags"];
/// Bytes of a digest in the annotation.
const DIGEST_BYTES: usize = 16;

/// Returns a label or annotation of [`PREFIX`].
fn entry(name: &str, value: &(impl ToString + ?Sized)) -> (String, String) {
    (format!("{PREFIX}{name}"), value.to_string())
}

/// Returns the metadata of a common object.
fn metadata(
    name: &str,
    labels: impl IntoIterator<Item = (String, String)>,
    annotations: impl IntoIterator<Item = (String, String)>,
) -> ObjectMeta {
    let common = [
        ("app.kubernetes.io/component", "kubevirt"),
        ("app.kubernetes.io/managed-by", "virt-operator"),
        (BUNDLE_VERSION, VERSION),
    ];
    let common = common.map(|(key, value)| (key.to_owned(), value.to_owned()));
    ObjectMeta {
        name: Some(name.to_owned()),
        labels: Some(labels.into_iter().chain(common).chain([entry("vendor", "kubevirt.io")]).collect()),
        annotations: Some(annotations.into_iter().collect()),
        ..ObjectMeta::default()
    }
}

/// Adds the annotation [`WRITTEN`].
fn mark(metadata: &mut ObjectMeta, spec: &impl Serialize) {
    let spec = serde_json::to_value(spec).unwrap_or_default();
    let digest = digest(metadata, &spec);
    metadata.annotations.get_or_insert_default().insert(WRITTEN.to_owned(), digest);
}

/// Returns the digest of the content of a common object. Labels and annotations with other prefixes do not count: tools add some to
/// every object.
pub fn digest(metadata: &ObjectMeta, spec: &Value) -> String {
    let ours = |map: &Option<BTreeMap<String, String>>| -> BTreeMap<String, String> {
        let describes = |key: &String| DESCRIBING.iter().any(|prefix| key.starts_with(prefix));
        let entries = map.iter().flatten().filter(|(key, _)| describes(key));
        entries.map(|(key, value)| (key.clone(), value.clone())).collect()
    };
    let content = json!([ours(&metadata.labels), ours(&metadata.annotations), spec]);
    let digest = Sha256::digest(content.to_string());
    digest.iter().take(DIGEST_BYTES).map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;
    use crate::instancetype::{apply, topology};

    #[test]
    fn bundle_is_complete_and_each_name_is_used_once() {
        let names = |found: Vec<ObjectMeta>| found.into_iter().filter_map(|meta| meta.name).collect::<BTreeSet<_>>();
        let types = names(instancetypes().into_iter().map(|object| object.metadata).collect());
        let preferences = names(preferences().into_iter().map(|object| object.metadata).collect());
        assert_eq!((types.len(), preferences.len()), (65, 54));
        for name in ["u1.nano", "o1.8xlarge", "d1.2xmedium", "cx1.medium1gi", "m1.large1gi", "n1.medium", "rt1.micro"] {
            assert!(types.contains(name), "{name}");
        }
        for name in ["alpine", "rhel.9.realtime", "windows.11.virtio", "windows.xp", "linux.virtiotransitional"] {
            assert!(preferences.contains(name), "{name}");
        }
    }

    #[test]
    fn labels_describe_the_spec() {
        for object in instancetypes() {
            let labels = object.metadata.labels.clone().unwrap();
            let label = |name: &str| labels.get(&format!("{PREFIX}{name}")).map(String::as_str);
            let spec = &object.spec.0;
            let name = object.metadata.name.as_deref().unwrap();
            assert_eq!(label("cpu"), Some(spec.cpu.guest.to_string().as_str()), "{name}");
            assert_eq!(label("memory"), Some(spec.memory.guest.0.as_str()), "{name}");
            assert_eq!(label("size"), name.split_once('.').map(|(_, size)| size), "{name}");
            let pages = spec.memory.hugepages.as_ref().and_then(|pages| pages.page_size.as_deref());
            assert_eq!(label("hugepages"), pages, "{name}");
            for (key, is_set) in [
                ("dedicatedCPUPlacement", spec.cpu.dedicated_cpu_placement.is_some()),
                ("isolateEmulatorThread", spec.cpu.isolate_emulator_thread.is_some()),
                ("numa", spec.cpu.numa.is_some()),
                ("realtime", spec.cpu.realtime.is_some()),
            ] {
                assert_eq!(label(key), is_set.then_some("true"), "{name} {key}");
            }
        }
        for object in preferences() {
            let labels = object.metadata.labels.clone().unwrap();
            let label = |name: &str| labels.get(&format!("{PREFIX}{name}")).cloned();
            let needs = object.spec.0.requirements.clone().unwrap_or_default();
            assert_eq!(label("required-cpu"), needs.cpu.map(|cpu| cpu.guest.to_string()));
            assert_eq!(label("required-memory"), needs.memory.map(|memory| memory.guest.0));
            assert_eq!(label("required-architecture"), needs.architecture);
            assert_eq!(label("preferred-architecture"), object.spec.0.preferred_architecture);
        }
    }

    #[test]
    fn each_instance_type_and_preference_applies_to_a_vm_that_sets_nothing() {
        let types = instancetypes();
        for object in &types {
            let mut spec = serde_json::from_value(json!({"domain": {"devices": {}}})).unwrap();
            apply("spec", Some(&object.spec.0), None, &mut spec, &mut ObjectMeta::default()).unwrap();
        }
        // The spreads of vCPUs fit the larger sizes.
        let large = types.iter().find(|object| object.metadata.name.as_deref() == Some("u1.2xlarge")).unwrap();
        for object in preferences() {
            let message = topology::spread_error(Some(&large.spec.0), Some(&object.spec.0));
            assert_eq!(message, None, "{:?}", object.metadata.name);
        }
    }

    #[test]
    fn digest_changes_with_the_content_and_not_with_entries_of_others() {
        let object = instancetypes().swap_remove(0);
        let spec = serde_json::to_value(&object.spec).unwrap();
        let written = object.metadata.annotations.as_ref().unwrap()[WRITTEN].clone();
        let of = |change: fn(&mut ObjectMeta)| {
            let mut metadata = object.metadata.clone();
            change(&mut metadata);
            digest(&metadata, &spec)
        };
        assert_eq!(of(|_| {}), written);
        let add = |metadata: &mut ObjectMeta, key: &str| {
            metadata.labels.as_mut().unwrap().insert(key.to_owned(), "x".to_owned());
        };
        assert_eq!(
            {
                let mut metadata = object.metadata.clone();
                add(&mut metadata, "app.kubernetes.io/part-of");
                digest(&metadata, &spec)
            },
            written
        );
        assert_ne!(
            of(|metadata| drop(metadata.labels.as_mut().unwrap().remove("instancetype.kubevirt.io/vendor"))),
            written
        );
        let mut edited = spec.clone();
        edited["memory"]["guest"] = json!("3Gi");
        assert_ne!(digest(&object.metadata, &edited), written);
    }
}
