//! The VM of a number: name, and names of the objects that it does not share with other VMs of its pool.

use std::collections::BTreeMap;

use api::{
    VirtualMachine, VirtualMachinePool, VirtualMachineSpec,
    constants::{annotation, finalizer, label},
    vmi::volumes::Volume,
};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;

use super::preservation::preserves;
use crate::{owned_vmis::template_annotations, resources::pool_revisions::PoolTemplate, runtime::Kind};

/// Returns the name of the VM with a number.
pub(super) fn name(pool: &VirtualMachinePool, index: u32) -> String {
    format!("{}-{index}", pool.metadata.name.as_deref().unwrap_or_default())
}

/// Returns the number of a VM. `None`: the pool gives no such names.
pub(super) fn index(pool: &VirtualMachinePool, vm: &VirtualMachine) -> Option<u32> {
    let found = vm.metadata.name.as_deref()?;
    let index = found.rsplit_once('-')?.1.parse().ok()?;
    (name(pool, index) == found).then_some(index)
}

/// Returns a new VM.
pub(super) fn vm(pool: &VirtualMachinePool, index: u32, revision: &str) -> VirtualMachine {
    let template = &pool.spec.virtual_machine_template.metadata;
    let mut labels = template.labels.clone().unwrap_or_default();
    labels.insert(label::POOL_REVISION.to_owned(), revision.to_owned());
    VirtualMachine {
        metadata: ObjectMeta {
            name: Some(name(pool, index)),
            namespace: pool.metadata.namespace.clone(),
            labels: Some(labels),
            annotations: template_annotations(template),
            owner_references: Some(vec![Kind::Pool.owner_reference(&pool.metadata)]),
            finalizers: preserves(&pool.spec).then(|| vec![finalizer::POOL.to_owned()]),
            ..ObjectMeta::default()
        },
        spec: spec(pool, index, revision),
        status: None,
    }
}

/// Returns a VM changed to the present template. `former` is the template that it has, if that is known: what users and controllers
/// added stays, and so does what the guest knows its hardware by.
pub(super) fn changed(
    pool: &VirtualMachinePool,
    vm: &VirtualMachine,
    index: u32,
    revision: &str,
    former: Option<&PoolTemplate>,
) -> VirtualMachine {
    let template = &pool.spec.virtual_machine_template.metadata;
    let mut changed = VirtualMachine { spec: spec(pool, index, revision), ..vm.clone() };
    let labels = changed.metadata.labels.get_or_insert_default();
    labels.retain(|key, _| !former.is_some_and(|former| former.labels.contains(key)));
    labels.extend(template.labels.clone().unwrap_or_default());
    labels.insert(label::POOL_REVISION.to_owned(), revision.to_owned());
    let mut annotations = changed.metadata.annotations.take().unwrap_or_default();
    annotations.retain(|key, _| !former.is_some_and(|former| former.annotations.contains(key)));
    annotations.extend(template_annotations(template).unwrap_or_default());
    changed.metadata.annotations = (!annotations.is_empty()).then_some(annotations);
    keep_hardware(&mut changed.spec, &vm.spec);
    changed
}

/// Keeps the identity of the hardware, defaults of the platform that the template leaves open, and the layout of the PCI bus.
fn keep_hardware(spec: &mut VirtualMachineSpec, former: &VirtualMachineSpec) {
    if let (Some(known), Some(vmi)) = (&former.template.spec, &mut spec.template.spec) {
        vmi.architecture = vmi.architecture.take().or(known.architecture.clone());
        vmi.domain.machine = vmi.domain.machine.take().or(known.domain.machine.clone());
        let identity = known.domain.firmware.as_ref().filter(|known| known.uuid.is_some() || known.serial.is_some());
        if let Some(known) = identity {
            let firmware = vmi.domain.firmware.get_or_insert_default();
            firmware.uuid = known.uuid.clone().or(firmware.uuid.take());
            firmware.serial = known.serial.clone().or(firmware.serial.take());
        }
    }
    for key in annotation::PCI_TOPOLOGY {
        if let Some(value) = former.template.metadata.annotations.as_ref().and_then(|all| all.get(key)) {
            let annotations = spec.template.metadata.annotations.get_or_insert_default();
            annotations.entry(key.to_owned()).or_insert_with(|| value.clone());
        }
    }
}

/// Returns the spec of the VM with a number.
fn spec(pool: &VirtualMachinePool, index: u32, revision: &str) -> VirtualMachineSpec {
    let mut spec = pool.spec.virtual_machine_template.spec.clone().unwrap_or_default();
    let labels: &mut BTreeMap<String, String> = spec.template.metadata.labels.get_or_insert_default();
    labels.insert(label::POOL_REVISION.to_owned(), revision.to_owned());
    let mut templated = Vec::new();
    for template in &mut spec.data_volume_templates {
        if let Some(name) = &mut template.metadata.name {
            templated.push(name.clone());
            append(name, index);
        }
    }
    let names = pool.spec.name_generation.as_ref();
    let config_maps = names.and_then(|names| names.append_index_to_config_map_refs) == Some(true);
    let secrets = names.and_then(|names| names.append_index_to_secret_refs) == Some(true);
    for volume in spec.template.spec.iter_mut().flat_map(|spec| &mut spec.volumes) {
        claims(volume).filter(|name| templated.contains(name)).for_each(|name| append(name, index));
        if config_maps && let Some(source) = &mut volume.config_map {
            append(&mut source.name, index);
        }
        if secrets {
            secret_names(volume).for_each(|name| append(name, index));
        }
    }
    spec
}

fn append(name: &mut String, index: u32) {
    if !name.is_empty() {
        name.push_str(&format!("-{index}"));
    }
}

/// Returns the names of the claims behind a volume.
fn claims(volume: &mut Volume) -> impl Iterator<Item = &mut String> {
    let claim = volume.persistent_volume_claim.as_mut().map(|claim| &mut claim.claim_name);
    let data_volume = volume.data_volume.as_mut().map(|source| &mut source.name);
    let beneath = volume.ephemeral.as_mut().and_then(|source| source.persistent_volume_claim.as_mut());
    claim.into_iter().chain(data_volume).chain(beneath.map(|claim| &mut claim.claim_name))
}

/// Returns the names of the Secrets of a volume. Those of sysprep are shared, as in the reference.
fn secret_names(volume: &mut Volume) -> impl Iterator<Item = &mut String> {
    let secret = volume.secret.as_mut().and_then(|source| source.secret_name.as_mut());
    let drive = volume
        .cloud_init_config_drive
        .as_mut()
        .map(|source| [&mut source.secret_ref, &mut source.network_data_secret_ref]);
    let no_cloud =
        volume.cloud_init_no_cloud.as_mut().map(|source| [&mut source.secret_ref, &mut source.network_data_secret_ref]);
    let references = drive.into_iter().chain(no_cloud).flatten().flatten();
    secret.into_iter().chain(references.map(|reference| &mut reference.name))
}
