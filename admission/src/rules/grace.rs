//! Pass-through of NVIDIA Grace GPUs, which needs a board and a placement of its own.

use api::{VirtualMachineInstanceSpec, config::ClusterConfig, constants::annotation};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;

use crate::causes::Causes;

const GATE: &str = "GraceIOVirtualization";
const VENDOR: &str = "10DE";
const DEVICES: [&str; 3] = ["2342", "2348", "2941"];

/// What a selector of the cluster's configuration means.
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

/// Devices by path, resource and what the configuration says about the resource.
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

/// What is wrong with the machine of such a device.
pub(super) fn causes(root: &str, spec: &VirtualMachineInstanceSpec, config: &ClusterConfig, causes: &mut Causes) {
    let devices = devices(root, spec, config);
    let on = config.enabled(GATE);
    for (path, name, _) in devices.iter().filter(|(_, _, selector)| on && *selector == Selector::Ambiguous) {
        causes.invalid(
            path.clone(),
            format!("{GATE} requires an exact pciVendorSelector for NVIDIA PCI host device resource \"{name}\""),
        );
    }
    let Some((path, name, _)) = devices.iter().find(|(_, _, selector)| *selector == Selector::Grace) else { return };
    if !on {
        causes.invalid(
            path.clone(),
            format!("{GATE} feature gate must be enabled for NVIDIA Grace GPU passthrough resource \"{name}\""),
        );
        return;
    }
    let architecture =
        spec.architecture.as_deref().filter(|name| !name.is_empty()).unwrap_or(config.default_architecture.as_str());
    if architecture != "arm64" {
        causes.invalid(format!("{root}.architecture"), format!("{GATE} requires arm64 architecture"));
    }
    let board = spec.domain.machine.as_ref().map(|machine| machine.type_.as_str()).filter(|board| !board.is_empty());
    if !board.unwrap_or(config.arch(architecture).machine_type.as_str()).starts_with("virt") {
        causes.invalid(format!("{root}.domain.machine.type"), format!("{GATE} requires \"virt\" machine type"));
    }
    if !spec.domain.cpu.as_ref().is_some_and(|cpu| cpu.dedicated_cpu_placement) {
        causes.required(
            format!("{root}.domain.cpu.dedicatedCpuPlacement"),
            format!("{GATE} requires dedicated CPU placement"),
        );
    }
    for gate in ["PCINUMAAwareTopology", "IOMMUFD"] {
        if !config.enabled(gate) {
            let message = format!("{gate} feature gate must be enabled when {GATE} is used");
            causes.invalid(format!("{root}.domain.devices"), message);
        }
    }
}

/// What is wrong with the annotations at `metadata` of a machine with such a device.
pub fn annotations(
    path: &str,
    metadata: &ObjectMeta,
    spec: &VirtualMachineInstanceSpec,
    config: &ClusterConfig,
) -> Causes {
    let mut causes = Causes::new();
    let used = devices("", spec, config).iter().any(|(_, _, selector)| *selector == Selector::Grace);
    if !used || !config.enabled(GATE) {
        return causes;
    }
    for (key, message) in [
        (
            annotation::PLACE_PCI_DEVICES_ON_ROOT_COMPLEX,
            "GraceIOVirtualization is not compatible with placing PCI devices on the root complex",
        ),
        (annotation::DISABLE_PCI_HOLE64, "GraceIOVirtualization requires the 64-bit PCI hole"),
    ] {
        if metadata.annotations.as_ref().and_then(|all| all.get(key)).is_some_and(|value| value == "true") {
            causes.invalid(format!("{path}.annotations[{key}]"), message);
        }
    }
    causes
}
