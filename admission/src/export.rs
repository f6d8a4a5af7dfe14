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
