//! Metrics of the claims that VMs use as disks.

use std::sync::Arc;

use api::{VirtualMachine, quantity, vmi::volumes::Volume};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use kube::ResourceExt;
use prometheus::{GaugeVec, Opts, core::Collector, proto::MetricFamily};

use crate::resources::claims::CachedClaim;

const LABELS: [&str; 5] = ["name", "namespace", "persistentvolumeclaim", "volume_mode", "device"];

/// The metrics.
pub(super) struct Disks {
    sizes: GaugeVec,
}

impl Disks {
    /// Creates empty metrics.
    pub(super) fn new() -> Result<Self, prometheus::Error> {
        let sizes =
            Opts::new("kubevirt_vm_disk_allocated_size_bytes", "Requested size of a claim that a VM uses as disk");
        Ok(Self { sizes: GaugeVec::new(sizes, &LABELS)? })
    }

    /// Adds a VM. `claim_named`: returns a claim of its namespace.
    pub(super) fn vm(&self, vm: &VirtualMachine, claim_named: impl Fn(&str) -> Option<Arc<CachedClaim>>) {
        let (name, namespace) = (vm.name_any(), vm.namespace().unwrap_or_default());
        for volume in vm.spec.template.spec.iter().flat_map(|spec| &spec.volumes) {
            let Some(claim_name) = claim_of(volume) else { continue };
            let Some(claim) = claim_named(claim_name) else { continue };
            let mode = if claim.block { "Block" } else { "Filesystem" };
            let size = in_template(vm, claim_name).or(claim.requests.as_ref());
            if let Some(bytes) = size.and_then(|size| quantity::units(size).ok()) {
                let labels = [name.as_str(), &namespace, claim_name, mode, &volume.name];
                self.sizes.with_label_values(&labels).set(bytes as f64);
            }
        }
    }

    /// Returns the metrics.
    pub(super) fn families(&self) -> Vec<MetricFamily> {
        self.sizes.collect()
    }
}

/// Returns the claim of a disk. That of a memory dump is no disk.
fn claim_of(volume: &Volume) -> Option<&str> {
    let claim = volume.persistent_volume_claim.as_ref().map(|claim| claim.claim_name.as_str());
    claim.or_else(|| volume.data_volume.as_ref().map(|source| source.name.as_str()))
}

/// Returns the size in the template of a DataVolume, which is what the user asked for: the claim can be larger.
fn in_template<'v>(vm: &'v VirtualMachine, name: &str) -> Option<&'v Quantity> {
    let templates = &vm.spec.data_volume_templates;
    let spec = &templates.iter().find(|template| template.metadata.name.as_deref() == Some(name))?.spec;
    let claim = spec.pvc.as_ref().and_then(|claim| claim.resources.as_ref());
    let storage = spec.storage.as_ref().map(|storage| &storage.resources);
    claim.or(storage)?.requests.as_ref()?.get("storage")
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn claims_of_volumes_are_shown_with_their_sizes() {
        let disks = Disks::new().unwrap();
        let vm = json!({
            "apiVersion": "kubevirt.io/v1", "kind": "VirtualMachine", "metadata": {"name": "v", "namespace": "ns"},
            "spec": {
                "dataVolumeTemplates": [
                    {"metadata": {"name": "made"}, "spec": {"storage": {"resources": {"requests": {"storage": "1Gi"}}}}},
                ],
                "template": {"spec": {"domain": {"devices": {}}, "volumes": [
                    {"name": "root", "persistentVolumeClaim": {"claimName": "c"}},
                    {"name": "data", "dataVolume": {"name": "made"}},
                    {"name": "late", "persistentVolumeClaim": {"claimName": "missing"}},
                    {"name": "image", "containerDisk": {"image": "i"}},
                ]}},
            },
        });
        disks.vm(&serde_json::from_value(vm).unwrap(), |name| {
            let requests = Some(Quantity("2Gi".into()));
            let claim = CachedClaim { block: name == "made", requests, ..CachedClaim::default() };
            (name != "missing").then(|| Arc::new(claim))
        });
        let registry = prometheus::Registry::new();
        registry.register(Box::new(disks.sizes.clone())).unwrap();
        let text = String::from_utf8(daemon::ops::encode(&registry).unwrap()).unwrap();
        let lines: Vec<&str> = text.lines().filter(|line| !line.starts_with('#')).collect();
        assert_eq!(
            lines,
            [
                r#"kubevirt_vm_disk_allocated_size_bytes{device="data",name="v",namespace="ns",persistentvolumeclaim="made",volume_mode="Block"} 1073741824"#,
                r#"kubevirt_vm_disk_allocated_size_bytes{device="root",name="v",namespace="ns",persistentvolumeclaim="c",volume_mode="Filesystem"} 2147483648"#,
            ]
        );
    }
}
