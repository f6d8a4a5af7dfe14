//! DataVolumes: completion, rules, and the right to clone, where the importer carries them out.
//!
//! If CDI is installed its own webhooks decide. Then nothing is refused here, and only a forged mark is removed.
//!
//! ```text
//! sourceRef ── DataSource ──> source ── of another namespace ──> SubjectAccessReview ──> mark, or denial
//! ```
//!
//! The source is fixed at creation, so that a DataSource that changes later does not lead to what its user may not read. The name of
//! the DataSource is recorded, so that the same manifest can be applied again. The mark is the annotation [`PERMITTED_CLONE`];
//! virt-controller clones from another namespace only with it. A DataVolume without it, for example one that was created while these
//! webhooks were absent, is not cloned.

use std::collections::BTreeMap;

use api::{
    VirtualMachineSpec,
    cdi::{
        DataSource, DataVolume, DataVolumeSpec, GROUP,
        annotation::{ALLOW_CLAIM_ADOPTION, PERMITTED_CLONE, POPULATED_FOR, RESOLVED_REFERENCE},
        data_volume::{DataVolumeImportSource, DataVolumeSourcePvc, DataVolumeSourceSnapshot},
    },
    owner,
};
use k8s_openapi::api::{authorization::v1::ResourceAttributes, core::v1::PersistentVolumeClaim};
use serde_json::{Value, json};

use crate::{
    context::{
        Context, Decision, FieldErrors, Interrupt, LookupError, LookupResult, Lookups, ObjectQuery, Outcome, decode,
        patch, semantic,
    },
    rules::{self, data_volume_spec as spec_rules},
};

/// Version of the kinds of CDI.
const VERSION: &str = "v1beta1";
/// Plural of DataVolumes.
pub(crate) const PLURAL: &str = "datavolumes";
/// Field of a denial, as CDI names it.
const SOURCE_NAMESPACE: &str = "spec.source.PVC.namespace";

/// Warning about DataVolumes in a cluster without them.
const NOT_SERVED: &str = "spec.dataVolumeTemplates: the cluster has no DataVolumes (datavolumes.cdi.kubevirt.io): \
    the VM waits until CDI or the importer is installed";

/// Serves `/datavolumes-mutate`.
pub(crate) fn mutate(context: &Context<'_>) -> Result<Decision, Interrupt> {
    let raw = &context.request.object;
    let mut object = raw.clone();
    let old = &context.request.old_object;
    for key in [PERMITTED_CLONE, RESOLVED_REFERENCE] {
        annotate(&mut object, key, annotated(old, key).map(str::to_owned));
    }
    if is_ours(context.lookups)? {
        if context.is_create() {
            complete(context, &mut object)?;
        } else {
            drop_resolved_reference(&mut object, old, context.namespace());
        }
    }
    Ok(Outcome::Allowed { patch: patch::between(raw, raw, &object), warnings: vec![] }.into())
}

/// Serves `/datavolumes-validate`.
pub(crate) fn validate(context: &Context<'_>) -> Result<Decision, Interrupt> {
    if !is_ours(context.lookups)? {
        return Ok(context.allowed());
    }
    let Some(old) = context.old_object::<DataVolume>()? else {
        let volume: DataVolume = context.object()?;
        let mut errors = field_errors(&volume.spec);
        // A claim that exists is taken over or waited for, and not filled.
        if errors.is_empty() && !validate_target(context, &volume, &mut errors)? {
            errors.extend(spec_rules::unsupported_annotations("metadata", &volume.metadata));
        }
        return Ok(context.decide(errors, vec![]));
    };
    let volume: DataVolume = stored(&context.request.object)?;
    Ok(context.decide(change_errors(&volume.spec, &old.spec), vec![]))
}

/// Returns true if the importer carries DataVolumes out: CDI is not installed.
fn is_ours(lookups: &Lookups) -> Result<bool, LookupError> {
    let query = cdis();
    Ok(match lookups.result(&query)? {
        // The kind is not served.
        LookupResult::Object(None) => true,
        _ => {
            lookups.list(&query)?;
            false
        }
    })
}

/// Selects the object by which CDI is installed.
fn cdis() -> ObjectQuery {
    ObjectQuery::first(GROUP, VERSION, "cdis", None, 1)
}

fn stored<T: serde::de::DeserializeOwned>(object: &Value) -> Result<T, Interrupt> {
    decode::stored(object).map_err(|error| Interrupt::failed(400, format!("cannot read the DataVolume: {error}")))
}

/// Returns the errors of a new DataVolume.
pub(crate) fn field_errors(spec: &DataVolumeSpec) -> FieldErrors {
    let errors = spec_rules::validate("spec", spec);
    errors.or_else(|errors| errors.extend(spec_rules::unsupported("spec", spec)))
}

/// Returns warnings about the templates of a VM whose DataVolumes cannot be created.
pub(crate) fn warnings_of_templates(
    spec: &VirtualMachineSpec,
    namespace: &str,
    lookups: &Lookups,
) -> Result<Vec<String>, LookupError> {
    if spec.data_volume_templates.is_empty() {
        return Ok(vec![]);
    }
    let query = ObjectQuery::first(GROUP, VERSION, PLURAL, Some(namespace), 1);
    let mut warnings = rules::data_volumes::warnings("spec", spec);
    let unsupported = rules::data_volumes::warnings_without_cdi("spec", spec);
    let is_absent = |query: &ObjectQuery| Ok::<_, LookupError>(*lookups.result(query)? == LookupResult::Object(None));
    if is_absent(&query)? {
        warnings.push(NOT_SERVED.to_owned());
    } else if !unsupported.is_empty() && is_absent(&cdis())? {
        warnings.extend(unsupported);
    }
    Ok(warnings)
}

/// Returns the errors of a change: only the checkpoints of an import may change.
fn change_errors(new: &DataVolumeSpec, old: &DataVolumeSpec) -> FieldErrors {
    let mut errors = FieldErrors::new();
    let fixed = |spec: &DataVolumeSpec| DataVolumeSpec { checkpoints: vec![], final_checkpoint: None, ..spec.clone() };
    if !semantic::equal(&fixed(new), &fixed(old)) {
        errors.invalid("spec", "Cannot update DataVolume Spec");
    } else if new.checkpoints != old.checkpoints {
        errors.extend(spec_rules::unsupported("spec", new));
    }
    errors
}

/// Rejects a DataVolume with the name of a claim that it does not take over. Returns true if there is a claim of the name.
fn validate_target(context: &Context<'_>, volume: &DataVolume, errors: &mut FieldErrors) -> Result<bool, LookupError> {
    let namespace = context.namespace();
    let Some(name) = volume.metadata.name.as_deref().filter(|name| !name.is_empty()) else { return Ok(false) };
    let query = ObjectQuery::get("", "v1", "persistentvolumeclaims", Some(namespace), name);
    let Some(claim) = context.lookups.get_as::<PersistentVolumeClaim>(&query)? else { return Ok(false) };
    let text = |annotations: &Option<BTreeMap<String, String>>, key: &str| {
        annotations.as_ref().and_then(|annotations| annotations.get(key).cloned())
    };
    let adopts = text(&volume.metadata.annotations, ALLOW_CLAIM_ADOPTION).as_deref() == Some("true");
    let populated = text(&claim.metadata.annotations, POPULATED_FOR).as_deref() == Some(name);
    // The claim of another DataVolume is waited for.
    let controlled = owner::controller_of_kind::<DataVolume>(&claim.metadata).is_some();
    if !adopts && !populated && !controlled {
        errors.duplicate("metadata.name", format!("Destination PVC {namespace}/{name} already exists"));
    }
    Ok(true)
}

fn annotated<'a>(object: &'a Value, key: &str) -> Option<&'a str> {
    object.get("metadata")?.get("annotations")?.get(key)?.as_str()
}

/// Sets or removes an annotation of which users have no say.
fn annotate(object: &mut Value, key: &str, value: Option<String>) {
    let Some(metadata) = object.get_mut("metadata").and_then(Value::as_object_mut) else { return };
    match value {
        Some(value) => {
            let annotations = metadata.entry("annotations").or_insert_with(|| json!({}));
            if annotations.is_null() {
                *annotations = json!({});
            }
            if let Some(annotations) = annotations.as_object_mut() {
                annotations.insert(key.to_owned(), json!(value));
            }
        }
        None => {
            if let Some(annotations) = metadata.get_mut("annotations").and_then(Value::as_object_mut) {
                annotations.remove(key);
            }
        }
    }
}

/// Replaces a `sourceRef` by the source that it names, writes omitted namespaces, and marks a clone that is permitted.
fn complete(context: &Context<'_>, object: &mut Value) -> Result<(), Interrupt> {
    let volume: DataVolume = stored(object)?;
    let (spec, own) = (volume.spec, context.namespace());
    let source = match (spec.source, spec.source_ref) {
        (Some(source), None) => with_namespace(source, own),
        (None, Some(reference)) if reference.kind == spec_rules::DATA_SOURCE => {
            let namespace = reference.namespace.as_deref().filter(|name| !name.is_empty()).unwrap_or(own);
            resolve(namespace, &reference.name, context.lookups)?
        }
        _ => return Ok(()),
    };
    let Some(path) = source.clone_path() else { return Ok(()) };
    let (namespace, name) = namespaced(&source);
    if namespace != own {
        // virt-controller has asked for the rights of the VM's service account.
        if !context.is_controller() && !may_clone(context, &source)? {
            let mut errors = FieldErrors::new();
            errors.invalid(SOURCE_NAMESPACE, denial(context, namespace, name));
            return Err(Interrupt::Denied(errors));
        }
        annotate(object, PERMITTED_CLONE, Some(path));
    }
    let reference = referenced(object, own);
    annotate(object, RESOLVED_REFERENCE, reference);
    if let Some(spec) = object.get_mut("spec").and_then(Value::as_object_mut) {
        spec.remove("sourceRef");
        spec.insert("source".to_owned(), json!(source));
    }
    Ok(())
}

fn denial(context: &Context<'_>, namespace: &str, name: &str) -> String {
    let user = context.request.user_info.username.as_deref().unwrap_or_default();
    format!(
        "User {user} has insufficient permissions in clone source namespace {namespace}: \
         needs verb create on datavolumes/source of group {GROUP} for {name}"
    )
}

fn with_namespace(mut source: DataVolumeImportSource, own: &str) -> DataVolumeImportSource {
    let pvc = source.pvc.as_mut().map(|pvc| &mut pvc.namespace);
    for namespace in pvc.into_iter().chain(source.snapshot.as_mut().map(|snapshot| &mut snapshot.namespace)) {
        if namespace.is_empty() {
            own.clone_into(namespace);
        }
    }
    source
}

fn namespaced(source: &DataVolumeImportSource) -> (&str, &str) {
    let pvc = source.pvc.as_ref().map(|pvc| (pvc.namespace.as_str(), pvc.name.as_str()));
    let snapshot = source.snapshot.as_ref().map(|snapshot| (snapshot.namespace.as_str(), snapshot.name.as_str()));
    pvc.or(snapshot).unwrap_or_default()
}

/// Returns the claim or snapshot that a DataSource names, or that the DataSource does to which it refers.
fn resolve(namespace: &str, name: &str, lookups: &Lookups) -> Result<DataVolumeImportSource, Interrupt> {
    let unready = |text: &str| {
        let mut errors = FieldErrors::new();
        let message = format!("DataSource {namespace}/{name} {text}: the right to clone it cannot be reviewed yet");
        errors.not_found("spec.sourceRef", message);
        Interrupt::Denied(errors)
    };
    let read = |namespace: &str, name: &str| {
        lookups.get_as::<DataSource>(&ObjectQuery::get(GROUP, VERSION, "datasources", Some(namespace), name))
    };
    let found = read(namespace, name)?.ok_or_else(|| unready("does not exist"))?;
    let source = match found.spec.source.data_source {
        None => found.spec.source,
        Some(other) if !other.namespace.is_empty() && other.namespace != namespace => {
            return Err(unready("refers to a DataSource of another namespace"));
        }
        Some(other) => {
            let found = read(namespace, &other.name)?;
            found.ok_or_else(|| unready("refers to a DataSource that does not exist"))?.spec.source
        }
    };
    let or_own = |text: &str| if text.is_empty() { namespace.to_owned() } else { text.to_owned() };
    let nothing = DataVolumeImportSource::default();
    if let Some(pvc) = source.pvc {
        let pvc = DataVolumeSourcePvc { namespace: or_own(&pvc.namespace), ..pvc };
        return Ok(DataVolumeImportSource { pvc: Some(pvc), ..nothing });
    }
    let snapshot = source.snapshot.ok_or_else(|| unready("names no source"))?;
    let snapshot = DataVolumeSourceSnapshot { namespace: or_own(&snapshot.namespace), ..snapshot };
    Ok(DataVolumeImportSource { snapshot: Some(snapshot), ..nothing })
}

/// Returns true if the user may read the source: by the explicit right, or because a pod could.
fn may_clone(context: &Context<'_>, source: &DataVolumeImportSource) -> Result<bool, LookupError> {
    let (namespace, name) = namespaced(source);
    let right = |group: &str, resource: &str, subresource: Option<&str>| {
        let right = ResourceAttributes {
            verb: Some("create".to_owned()),
            group: Some(group.to_owned()),
            resource: Some(resource.to_owned()),
            subresource: subresource.map(str::to_owned),
            namespace: Some(namespace.to_owned()),
            name: Some(name.to_owned()),
            ..ResourceAttributes::default()
        };
        ObjectQuery::access(&context.request.user_info, right)
    };
    let explicit = right(GROUP, PLURAL, Some("source"));
    let mut implicit = vec![right("", "pods", None)];
    if source.snapshot.is_some() {
        // No such resource exists: CDI means those who may do everything.
        implicit.push(right("", "pvcs", None));
    }
    context.lookups.require(std::iter::once(&explicit).chain(&implicit))?;
    let mut all = true;
    for query in &implicit {
        all &= context.lookups.is_allowed(query)?;
    }
    Ok(all || context.lookups.is_allowed(&explicit)?)
}

/// Returns namespace and name of the DataSource that a DataVolume names.
fn referenced(object: &Value, own: &str) -> Option<String> {
    let reference = object.pointer("/spec/sourceRef")?;
    let text = |key: &str| reference.get(key).and_then(Value::as_str).filter(|text| !text.is_empty());
    let name = text("name").filter(|_| text("kind") == Some(spec_rules::DATA_SOURCE))?;
    Some(format!("{}/{name}", text("namespace").unwrap_or(own)))
}

/// Replaces the `sourceRef` that a client writes again after it was resolved by the source that it became. Another one stays, and is
/// refused as a change.
fn drop_resolved_reference(object: &mut Value, old: &Value, own: &str) {
    let Some(source) = old.pointer("/spec/source").filter(|_| old.pointer("/spec/sourceRef").is_none()) else { return };
    let is_same = match annotated(old, RESOLVED_REFERENCE) {
        Some(resolved) => referenced(object, own).as_deref() == Some(resolved),
        // A release without the record resolved it, or there was none.
        None => object.pointer("/spec/source") == Some(source),
    };
    if is_same && let Some(spec) = object.get_mut("spec").and_then(Value::as_object_mut) {
        spec.remove("sourceRef");
        spec.entry("source").or_insert_with(|| source.clone());
    }
}

#[cfg(test)]
mod tests;
