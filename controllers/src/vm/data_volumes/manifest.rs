//! The DataVolume that a template of a VM describes.

use api::{
    VirtualMachine,
    cdi::{DataVolume, annotation},
    constants::label,
};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;

use crate::runtime::Kind;

/// Returns the DataVolume of this name. A reference to a DataSource stays: it is resolved at the creation.
pub(super) fn of(vm: &VirtualMachine, name: &str) -> Option<DataVolume> {
    let mut templates = vm.spec.data_volume_templates.iter();
    let template = templates.find(|template| template.metadata.name.as_deref() == Some(name))?;
    let mut labels = template.metadata.labels.clone().unwrap_or_default();
    labels.insert(label::CREATED_BY.to_owned(), vm.metadata.uid.clone().unwrap_or_default());
    let mut annotations = template.metadata.annotations.clone().unwrap_or_default();
    // A proof of the right to clone is CDI's to give.
    for token in [annotation::CLONE_TOKEN, annotation::EXTENDED_CLONE_TOKEN] {
        annotations.remove(token);
    }
    annotations.insert(annotation::ALLOW_CLAIM_ADOPTION.to_owned(), "true".to_owned());
    let mut spec = template.spec.clone();
    if spec.priority_class_name.as_ref().is_none_or(String::is_empty) {
        spec.priority_class_name = vm.spec.template.spec.as_ref().and_then(|spec| spec.priority_class_name.clone());
    }
    Some(DataVolume {
        metadata: ObjectMeta {
            name: Some(name.to_owned()),
            namespace: vm.metadata.namespace.clone(),
            labels: Some(labels),
            annotations: Some(annotations),
            owner_references: Some(vec![Kind::VirtualMachine.owner_reference(&vm.metadata)]),
            ..ObjectMeta::default()
        },
        spec,
        status: None,
    })
}

/// Returns the service account whose rights decide what the VM can clone.
pub(super) fn service_account(vm: &VirtualMachine) -> String {
    let spec = vm.spec.template.spec.as_ref();
    let named = spec.and_then(|spec| spec.service_account_name.as_ref()).filter(|name| !name.is_empty());
    let of_volume =
        || spec?.volumes.iter().find_map(|volume| volume.service_account.as_ref()?.service_account_name.as_ref());
    named.or_else(of_volume).filter(|name| !name.is_empty()).map_or_else(|| "default".to_owned(), Clone::clone)
}
