//! DataVolume templates of a VM.

use std::collections::BTreeSet;

use api::{
    VirtualMachineSpec,
    cdi::data_volume::{DataVolumeImportSource, DataVolumeTemplateSpec},
};

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
    for (index, template) in spec.data_volume_templates.iter().enumerate() {
        validate_template(&format!("{root}.dataVolumeTemplate[{index}]"), template, &used, &mut errors);
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
    let populated = spec.pvc.as_ref().is_some_and(|pvc| pvc.data_source.is_some() || pvc.data_source_ref.is_some())
        || spec
            .storage
            .as_ref()
            .is_some_and(|storage| storage.data_source.is_some() || storage.data_source_ref.is_some());
    let sourced = spec.source.is_some() || spec.source_ref.is_some();
    if populated && sourced {
        let message = "External population is incompatible with Source and SourceRef";
        return errors.invalid(format!("{path}.source"), message);
    }
    if !populated && !sourced {
        let message = "Data volume should have either Source, SourceRef, or be externally populated";
        return errors.invalid(format!("{path}.source.sourceRef"), message);
    }
    match spec.source.as_ref().map(members) {
        Some(0) => return errors.invalid(format!("{path}.source"), "Missing dataVolume valid source"),
        Some(2..) => return errors.invalid(format!("{path}.source"), "Multiple dataVolume sources"),
        _ => {}
    }
    if !used.contains(name) {
        let message =
            format!("DataVolumeTemplate entry {path} must be referenced in the VMI template's 'volumes' list");
        errors.required(path, message);
    }
}

fn members(source: &DataVolumeImportSource) -> usize {
    [
        source.blank.is_some(),
        source.gcs.is_some(),
        source.http.is_some(),
        source.imageio.is_some(),
        source.pvc.is_some(),
        source.registry.is_some(),
        source.s3.is_some(),
        source.snapshot.is_some(),
        source.upload.is_some(),
        source.vddk.is_some(),
    ]
    .into_iter()
    .filter(|set| *set)
    .count()
}

/// Rejects DataVolume templates with another namespace than their VM.
pub(crate) fn validate_namespaces(spec: &VirtualMachineSpec, namespace: &str) -> FieldErrors {
    let mut errors = FieldErrors::new();
    for (index, template) in spec.data_volume_templates.iter().enumerate() {
        let other = template.metadata.namespace.as_deref().unwrap_or_default();
        if !other.is_empty() && other != namespace {
            errors.invalid(
                format!("spec.dataVolumeTemplates[{index}]"),
                format!("Embedded DataVolume namespace {other} differs from VM namespace {namespace}"),
            );
        }
    }
    errors
}
