//! Exports of volumes: rules.

use api::{
    config::ClusterConfig,
    export::{VirtualMachineExport, VirtualMachineExportSpec},
};

use crate::{
    causes::Causes,
    resource,
    review::{AdmissionReview, Operation},
    webhook::{Context, Stop},
};

const GROUP: &str = "export.kubevirt.io";

/// What can be exported: kind, its group, and what messages call it before "name" and before "API group". A claim's
/// group is the empty one.
const SOURCES: [(&str, &str, &str, &str); 5] = [
    ("PersistentVolumeClaim", "", "PVC", "PVC"),
    ("VirtualMachineSnapshot", "snapshot.kubevirt.io", "VMSnapshot", "VMSnapshot"),
    ("VirtualMachine", "kubevirt.io", "Virtual Machine", "VM"),
    ("VirtualMachineBackup", "backup.kubevirt.io", "VirtualMachineBackup", "VirtualMachineBackup"),
    (TEMPLATE, "template.kubevirt.io", "VirtualMachineTemplate", "VirtualMachineTemplate"),
];
const TEMPLATE: &str = "VirtualMachineTemplate";

/// Answers `/virtualmachineexports-validate`.
pub fn validate(context: &Context<'_>) -> Result<AdmissionReview, Stop> {
    let request = context.request;
    resource::expect(request, GROUP, "virtualmachineexports")?;
    let causes = match request.operation {
        Operation::Create => {
            let export: VirtualMachineExport = context.object()?;
            resource::or_unsupported("VirtualMachineExport", causes(&export.spec, context.config))
        }
        Operation::Update => resource::immutable(context, |export: &VirtualMachineExport| &export.spec)?,
        _ => return Err(resource::unexpected_operation(request)),
    };
    Ok(context.verdict(&causes, vec![]))
}

/// What is wrong with a new export.
pub fn causes(spec: &VirtualMachineExportSpec, config: &ClusterConfig) -> Causes {
    let mut causes = Causes::new();
    let source = &spec.source;
    let Some((kind, group, named, grouped)) = SOURCES.iter().find(|(kind, ..)| *kind == source.kind) else {
        causes.invalid("spec.source.kind", "invalid kind");
        return causes;
    };
    let has_templates = config.enabled("OCIExport") && config.enabled("Template") && config.virt_template;
    if *kind == TEMPLATE && !has_templates {
        let needed = "requires the OCIExport feature gate and virt-template deployment to be enabled";
        causes.invalid("spec.source.kind", format!("VirtualMachineTemplate source {needed}"));
        return causes;
    }
    if source.name.is_empty() {
        causes.invalid("spec.source.name", format!("{named} name must not be empty"));
    }
    if source.api_group.as_deref().unwrap_or_default() != *group {
        let must = if group.is_empty() { "missing or blank" } else { *group };
        causes.invalid("spec.source.APIGroup", format!("{grouped} API group must be {must}"));
    }
    resource::duration("spec.ttlDuration", spec.ttl_duration.as_ref(), &mut causes);
    causes
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::unsupported;

    /// Nothing serves the files of a claim, so no link in one leads anywhere: what would be served is refused. Whoever makes
    /// a server of exports takes its place here with a test of links out of the claim.
    #[test]
    fn cve_2026_9804_no_claim_is_exported() {
        let config = ClusterConfig { feature_gates: vec!["VMExport".into()], ..ClusterConfig::default() };
        for (kind, group) in [("PersistentVolumeClaim", ""), ("VirtualMachine", "kubevirt.io")] {
            let source = json!({"kind": kind, "apiGroup": group, "name": "disk"});
            let spec: VirtualMachineExportSpec = serde_json::from_value(json!({"source": source})).unwrap();
            let well_formed = causes(&spec, &config);
            assert!(well_formed.is_empty(), "{kind}");
            let refused = resource::or_unsupported("VirtualMachineExport", well_formed);
            assert_eq!(refused.as_slice().len(), 1, "{kind}");
            assert_eq!(refused.as_slice()[0].message, unsupported::kind("VirtualMachineExport").as_slice()[0].message);
        }
    }
}
