//! DataVolume templates of a VM.

use std::collections::BTreeSet;

use api::{
    VirtualMachineSpec,
    cdi::{annotation, data_volume::DataVolumeTemplateSpec},
};

use super::data_volume_spec::{self, DATA_SOURCE, is_clone, members, unsupported_kind};
use crate::context::FieldErrors;

/// Returns the errors of the DataVolume templates in the VM spec at `root`: the first one of each template.
pub(crate) fn validate(root: &str, spec: &VirtualMachineSpec) -> FieldErrors {
    let mut errors = FieldErrors::new();
    let volumes = spec.template.spec.as_ref().map(|spec| spec.volumes.as_slice()).unwrap_or_default();
    let used: BTreeSet<&str> = volumes
        .iter()
        .filter_map(|volume| {
            let by_name = volume.data_volume.as_ref().map(|source| source.name.as_str());
            by_name.or_else(|| volume.persistent_volume_claim.as_ref().map(|claim| claim.claim_name.as_str()))
        })
        .collect();
    let mut names = BTreeSet::new();
    for (index, template) in spec.data_volume_templates.iter().enumerate() {
        let path = format!("{root}.dataVolumeTemplate[{index}]");
        let count = errors.as_slice().len();
        validate_template(&path, template, &used, &mut errors);
        let name = template.metadata.name.as_deref().unwrap_or_default();
        if errors.as_slice().len() == count && !names.insert(name) {
            errors.duplicate(format!("{path}.name"), format!("another DataVolumeTemplate has the name {name}"));
        }
    }
    errors
}

fn validate_template(path: &str, template: &DataVolumeTemplateSpec, used: &BTreeSet<&str>, errors: &mut FieldErrors) {
    let name = template.metadata.name.as_deref().unwrap_or_default();
    let spec = &template.spec;
    if name.is_empty() {
        let message = format!("'name' field must not be empty for DataVolumeTemplate entry {path}.name.");
        errors.required(format!("{path}.name"), message);
        return;
    }
    let target = format!("{path}.PVC.Storage");
    match (&spec.pvc, &spec.storage) {
        (None, None) => return errors.invalid(target, "Missing Data volume PVC or Storage"),
        (Some(_), Some(_)) => {
            return errors.invalid(target, "Duplicate storage definition, both target storage and target pvc defined");
        }
        _ => {}
    }
    let populated = spec.is_externally_populated();
    let sourced = spec.source.is_some() || spec.source_ref.is_some();
    if populated && sourced {
        let message = "External population is incompatible with Source and SourceRef";
        return errors.invalid(format!("{path}.source"), message);
    }
    if !populated && !sourced {
        let message = "Data volume should have either Source, SourceRef, or be externally populated";
        return errors.invalid(format!("{path}.source.sourceRef"), message);
    }
    match spec.source.as_ref().map(|source| members(source).len()) {
        Some(0) => return errors.invalid(format!("{path}.source"), "Missing dataVolume valid source"),
        Some(2..) => return errors.invalid(format!("{path}.source"), "Multiple dataVolume sources"),
        _ => {}
    }
    if !used.contains(name) {
        let message =
            format!("DataVolumeTemplate entry {path} must be referenced in the VMI template's 'volumes' list");
        return errors.required(path, message);
    }
    if let Some(reference) = spec.source_ref.as_ref().filter(|reference| reference.kind != DATA_SOURCE) {
        return errors.invalid(format!("{path}.sourceRef.kind"), unsupported_kind(&reference.kind));
    }
    // With some of them CDI clones without asking for the right to it.
    let others: &[&str] = if is_clone(spec) { &annotation::SKIP_AUTHORIZATION } else { &[] };
    let mut keys = template.metadata.annotations.iter().flat_map(|annotations| annotations.keys());
    if let Some(key) = keys.find(|key| annotation::RESERVED.iter().chain(others).any(|other| *other == key.as_str())) {
        let message = format!("annotation {key} must not be set: only controllers write it");
        errors.forbidden(format!("{path}.metadata.annotations[{key}]"), message);
    }
}

/// Rejects DataVolume templates with another namespace than their VM.
pub(crate) fn validate_namespaces(root: &str, spec: &VirtualMachineSpec, namespace: &str) -> FieldErrors {
    let mut errors = FieldErrors::new();
    for (index, template) in spec.data_volume_templates.iter().enumerate() {
        let other = template.metadata.namespace.as_deref().unwrap_or_default();
        if !other.is_empty() && other != namespace {
            errors.invalid(
                format!("{root}.dataVolumeTemplates[{index}]"),
                format!("Embedded DataVolume namespace {other} differs from VM namespace {namespace}"),
            );
        }
    }
    errors
}

/// Returns warnings about templates in the VM spec at `root` that pass here, but whose DataVolumes cannot be created.
pub(crate) fn warnings(root: &str, spec: &VirtualMachineSpec) -> Vec<String> {
    let mut warnings = Vec::new();
    for (index, template) in spec.data_volume_templates.iter().enumerate() {
        let path = format!("{root}.dataVolumeTemplates[{index}].spec");
        for error in data_volume_spec::validate(&path, &template.spec).as_slice() {
            warnings.push(format!("the DataVolume cannot be created: {}: {}", error.field, error.message));
        }
    }
    warnings
}

/// Returns warnings about templates in the VM spec at `root` whose DataVolumes are refused where CDI is not installed.
pub(crate) fn warnings_without_cdi(root: &str, spec: &VirtualMachineSpec) -> Vec<String> {
    let mut warnings = Vec::new();
    for (index, template) in spec.data_volume_templates.iter().enumerate() {
        let path = format!("{root}.dataVolumeTemplates[{index}].spec");
        let mut errors = data_volume_spec::unsupported(&path, &template.spec);
        let metadata = format!("{root}.dataVolumeTemplates[{index}].metadata");
        errors.extend(data_volume_spec::unsupported_annotations(&metadata, &template.metadata));
        for error in errors.as_slice() {
            warnings.push(format!("the DataVolume cannot be created: {}", error.message));
        }
    }
    warnings
}
