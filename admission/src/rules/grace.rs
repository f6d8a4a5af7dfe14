//! Pass-through of NVIDIA Grace GPUs, which needs a special machine type and topology.

use api::{FeatureGate, VirtualMachineInstanceSpec, config::ClusterConfig, constants::annotation};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;

use crate::context::FieldErrors;

const GATE: FeatureGate = FeatureGate::GraceIOVirtualization;
const VENDOR: &str = "10DE";
const DEVICES: [&str; 3] = ["2342", "2348", "2941"];

/// Meaning of a device selector of the cluster's configuration.
#[derive(Clone, Copy, Eq, PartialEq)]
enum Selector {
    Grace,
    Ambiguous,
    Other,
}

fn selector(text: &str) -> Selector {
    let (vendor, device) = text.split_once(':').unwrap_or((text, ""));
    if !vendor.eq_ignore_ascii_case(VENDOR) {
        Selector::Other
    } else if device.is_empty() || device.contains('*') {
        Selector::Ambiguous
    } else if DEVICES.iter().any(|known| device.eq_ignore_ascii_case(known)) {
        Selector::Grace
    } else {
        Selector::Other
    }
}

/// Devices with path, resource, and their entry in the configuration.
fn devices(root: &str, spec: &VirtualMachineInstanceSpec, config: &ClusterConfig) -> Vec<(String, String, Selector)> {
    let devices = &spec.domain.devices;
    let gpus = devices.gpus.iter().enumerate().map(|(index, gpu)| ("gpus", index, gpu.device_name.as_deref()));
    let hosts = devices
        .host_devices
        .iter()
        .enumerate()
        .map(|(index, device)| ("hostDevices", index, device.device_name.as_deref()));
    gpus.chain(hosts)
        .filter_map(|(list, index, name)| {
            let name = name?;
            let permitted = config.permitted_host_devices.as_ref()?;
            let permitted = permitted.pci_host_devices.iter().find(|known| known.resource_name == name)?;
            let path = format!("{root}.domain.devices.{list}[{index}].deviceName");
            Some((path, name.to_owned(), selector(&permitted.pci_vendor_selector)))
        })
        .collect()
}

/// Validates the spec of a VMI with such a device.
pub(super) fn validate(
    root: &str,
    spec: &VirtualMachineInstanceSpec,
    config: &ClusterConfig,
    errors: &mut FieldErrors,
) {
    let devices = devices(root, spec, config);
    let on = config.enabled(GATE);
    for (path, name, _) in devices.iter().filter(|(_, _, selector)| on && *selector == Selector::Ambiguous) {
        errors.invalid(
            path.clone(),
            format!("{GATE} requires an exact pciVendorSelector for NVIDIA PCI host device resource \"{name}\""),
        );
    }
    let Some((path, name, _)) = devices.iter().find(|(_, _, selector)| *selector == Selector::Grace) else { return };
    if !on {
        errors.invalid(
            path.clone(),
            format!("{GATE} feature gate must be enabled for NVIDIA Grace GPU passthrough resource \"{name}\""),
        );
        return;
    }
    let architecture =
        spec.architecture.as_deref().filter(|name| !name.is_empty()).unwrap_or(config.default_architecture.as_str());
    if architecture != "arm64" {
        errors.invalid(format!("{root}.architecture"), format!("{GATE} requires arm64 architecture"));
    }
    let machine_type = spec
        .domain
        .machine
        .as_ref()
        .map(|machine| machine.type_.as_str())
        .filter(|machine_type| !machine_type.is_empty());
    if !machine_type.unwrap_or(config.arch(architecture).machine_type.as_str()).starts_with("virt") {
        errors.invalid(format!("{root}.domain.machine.type"), format!("{GATE} requires \"virt\" machine type"));
    }
    if !spec.domain.cpu.as_ref().is_some_and(|cpu| cpu.dedicated_cpu_placement) {
        errors.required(
            format!("{root}.domain.cpu.dedicatedCpuPlacement"),
            format!("{GATE} requires dedicated CPU placement"),
        );
    }
    for gate in [FeatureGate::PCINUMAAwareTopology, FeatureGate::Iommufd] {
        if !config.enabled(gate) {
            let message = format!("{gate} feature gate must be enabled when {GATE} is used");
            errors.invalid(format!("{root}.domain.devices"), message);
        }
    }
}

/// Returns the errors of the annotations at `metadata` of a VMI with such a device.
pub(crate) fn validate_annotations(
    path: &str,
    metadata: &ObjectMeta,
    spec: &VirtualMachineInstanceSpec,
    config: &ClusterConfig,
) -> FieldErrors {
    let mut errors = FieldErrors::new();
    let used = devices("", spec, config).iter().any(|(_, _, selector)| *selector == Selector::Grace);
    if !used || !config.enabled(GATE) {
        return errors;
    }
    for (key, message) in [
        (
            annotation::PLACE_PCI_DEVICES_ON_ROOT_COMPLEX,
            "GraceIOVirtualization is not compatible with placing PCI devices on the root complex",
        ),
        (annotation::DISABLE_PCI_HOLE64, "GraceIOVirtualization requires the 64-bit PCI hole"),
    ] {
        if metadata.annotations.as_ref().and_then(|all| all.get(key)).is_some_and(|value| value == "true") {
            errors.invalid(format!("{path}.annotations[{key}]"), message);
        }
    }
    errors
}
