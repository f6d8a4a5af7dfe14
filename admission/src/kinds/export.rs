//! Exports of volumes: rules.

use api::{
    FeatureGate,
    config::ClusterConfig,
    export::{VirtualMachineExport, VirtualMachineExportSpec},
};

use crate::{
    context::{Context, Decision, FieldErrors, Interrupt, Operation},
    kinds::checks,
};

const GROUP: &str = "export.kubevirt.io";

/// Sources of exports: kind, group, and the names of the kind in messages before "name" and before "API group". The group of a
/// claim is empty.
const SOURCES: [(&str, &str, &str, &str); 5] = [
    ("PersistentVolumeClaim", "", "PVC", "PVC"),
    ("VirtualMachineSnapshot", "snapshot.kubevirt.io", "VMSnapshot", "VMSnapshot"),
    ("VirtualMachine", "kubevirt.io", "Virtual Machine", "VM"),
    ("VirtualMachineBackup", "backup.kubevirt.io", "VirtualMachineBackup", "VirtualMachineBackup"),
    (TEMPLATE, "template.kubevirt.io", "VirtualMachineTemplate", "VirtualMachineTemplate"),
];
const TEMPLATE: &str = "VirtualMachineTemplate";

/// Serves `/virtualmachineexports-validate`.
pub(crate) fn validate(context: &Context<'_>) -> Result<Decision, Interrupt> {
    let request = context.request;
    checks::expect_resource(request, GROUP, "virtualmachineexports")?;
    let errors = match request.operation {
        Operation::Create => {
            let export: VirtualMachineExport = context.object()?;
            checks::or_unsupported("VirtualMachineExport", field_errors(&export.spec, context.config))
        }
        Operation::Update => checks::validate_immutable(context, |export: &VirtualMachineExport| &export.spec)?,
        _ => return Err(checks::unexpected_operation(request)),
    };
    Ok(context.decide(errors, vec![]))
}

/// Returns the errors of a new export.
pub(crate) fn field_errors(spec: &VirtualMachineExportSpec, config: &ClusterConfig) -> FieldErrors {
    let mut errors = FieldErrors::new();
    let source = &spec.source;
    let Some((kind, group, named, grouped)) = SOURCES.iter().find(|(kind, ..)| *kind == source.kind) else {
        errors.invalid("spec.source.kind", "invalid kind");
        return errors;
    };
    let has_templates =
        config.enabled(FeatureGate::OCIExport) && config.enabled(FeatureGate::Template) && config.virt_template;
    if *kind == TEMPLATE && !has_templates {
        let needed = "requires the OCIExport feature gate and virt-template deployment to be enabled";
        errors.invalid("spec.source.kind", format!("VirtualMachineTemplate source {needed}"));
        return errors;
    }
    if source.name.is_empty() {
        errors.invalid("spec.source.name", format!("{named} name must not be empty"));
    }
    if source.api_group.as_deref().unwrap_or_default() != *group {
        let must = if group.is_empty() { "missing or blank" } else { *group };
        errors.invalid("spec.source.APIGroup", format!("{grouped} API group must be {must}"));
    }
    checks::validate_duration("spec.ttlDuration", spec.ttl_duration.as_ref(), &mut errors);
    errors
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::rules::unsupported;

    /// No process serves files of a claim, so links in it lead nowhere: exports are refused. A server for exports replaces this
    /// test by one of links that lead out of the claim.
    #[test]
    fn cve_2026_9804_no_claim_is_exported() {
        let config = ClusterConfig { feature_gates: vec!["VMExport".into()], ..ClusterConfig::default() };
        for (kind, group) in [("PersistentVolumeClaim", ""), ("VirtualMachine", "kubevirt.io")] {
            let source = json!({"kind": kind, "apiGroup": group, "name": "disk"});
            let spec: VirtualMachineExportSpec = serde_json::from_value(json!({"source": source})).unwrap();
            let well_formed = field_errors(&spec, &config);
            assert!(well_formed.is_empty(), "{kind}");
            let refused = checks::or_unsupported("VirtualMachineExport", well_formed);
            assert_eq!(refused.as_slice().len(), 1, "{kind}");
            assert_eq!(refused.as_slice()[0].message, unsupported::kind("VirtualMachineExport").as_slice()[0].message);
        }
    }
}
