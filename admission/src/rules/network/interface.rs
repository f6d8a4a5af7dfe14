//! Rules of one interface: state, binding, device, DHCP options.

use std::collections::BTreeSet;

use api::{
    config::ClusterConfig,
    vmi::network::{Interface, Network},
};

use crate::{
    context::{FieldErrors, PathText, accepted, addresses, supported},
    rules::gates,
};

pub(super) const MODELS: [&str; 7] = ["e1000", "e1000e", "igb", "ne2k_pci", "pcnet", "rtl8139", "virtio"];
/// Address of the bridge inside the pod.
const BRIDGE_MAC: &str = "02:00:00:00:00:00";

pub(super) fn validate_state(
    path: PathText<'_>,
    interface: &Interface,
    network: Option<&Network>,
    errors: &mut FieldErrors,
) {
    let (name, state) = (&interface.name, interface.state.as_deref().unwrap_or_default());
    let field = format_args!("{path}.state");
    match state {
        "" => {}
        "up" | "down" if interface.sriov.is_some() => {
            errors.invalid(field, format!("\"{name}\" interface's state \"{state}\" is not supported for SR-IOV NICs"))
        }
        "up" | "down" => {}
        "absent" => {
            if interface.bridge.is_none() {
                errors.invalid(
                    field,
                    format!("\"{name}\" interface's state \"absent\" is supported only for bridge binding"),
                );
            }
            let is_default = network.is_some_and(|network| {
                network.pod.is_some() || network.multus.as_ref().is_some_and(|multus| multus.default_)
            });
            if is_default {
                errors.invalid(
                    field,
                    format!("\"{name}\" interface's state \"absent\" is not supported on default networks"),
                );
            }
        }
        other => {
            let known = accepted(&["up", "down", "absent"]);
            errors.invalid(field, format!("logical {name} interface state value is unsupported: {other}, {known}"));
        }
    }
}

pub(super) fn validate_binding(
    path: PathText<'_>,
    interface: &Interface,
    network: Option<&Network>,
    config: &ClusterConfig,
    errors: &mut FieldErrors,
) {
    let bindings = [
        interface.bridge.is_some(),
        interface.masquerade.is_some(),
        interface.sriov.is_some(),
        interface.passt_binding.is_some(),
        interface.binding.is_some(),
    ];
    if bindings.iter().filter(|set| **set).count() != 1 {
        errors.invalid(
            path,
            format!("logical {} interface must have exactly one binding method or binding plugin", interface.name),
        );
    }
    let on_pod = network.is_some_and(|network| network.pod.is_some());
    // A network that is missing has an error of its own.
    let elsewhere = network.is_some() && !on_pod;
    if interface.masquerade.is_some() {
        if elsewhere {
            errors.invalid(format!("{path}.name"), "Masquerade interface only implemented with pod network");
        }
        if interface.mac().as_deref() == Some(BRIDGE_MAC) {
            errors.invalid(
                format!("{path}.macAddress"),
                "The requested MAC address is reserved for the in-pod bridge. Please choose another one.",
            );
        }
    }
    if interface.bridge.is_some() && on_pod && !config.permit_bridge_interface_on_pod_network {
        errors.invalid(
            format!("{path}.name"),
            "Bridge on pod network configuration is not enabled under kubevirt-config",
        );
    }
    if interface.passt_binding.is_some() {
        gates::are_on("domain.devices.interfaces[].passtBinding", format_args!("{path}.name"), config, errors);
        if elsewhere {
            errors.invalid(format!("{path}.name"), "PasstBinding interface only implemented with pod network");
        }
    }
}

pub(super) fn validate_device(path: PathText<'_>, interface: &Interface, errors: &mut FieldErrors) {
    let name = format_args!("{path}.name");
    let well_formed = |text: &str| {
        !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'-' || byte == b'_')
    };
    if !well_formed(&interface.name) {
        errors.invalid(
            name,
            "Network interface name can only contain alphabetical characters, numbers, dashes (-) or underscores (_)",
        );
    }
    if let Some(model) = interface.model.as_deref().filter(|model| !model.is_empty() && !MODELS.contains(model)) {
        errors.not_supported(
            format!("{path}.model"),
            format!("interface {name} uses model {model} that is not supported. {}", supported(&MODELS)),
        );
    }
    if let Some(mac) = interface.mac_address.as_deref().filter(|mac| !mac.is_empty()) {
        let field = format!("{path}.macAddress");
        match mac_bytes(mac) {
            Some(6) => {}
            Some(_) => errors.invalid(field, format!("interface {name} has too long MAC address ({mac}).")),
            None => errors.invalid(field, format!("interface {name} has malformed MAC address ({mac}).")),
        }
    }
    if let Some(address) = interface.pci_address.as_deref().filter(|address| !address.is_empty())
        && !is_pci_address(address)
    {
        errors
            .invalid(format!("{path}.pciAddress"), format!("interface {name} has malformed PCI address ({address})."));
    }
    if interface.acpi_index.is_some_and(|index| index < 0) {
        errors.invalid(format!("{path}.acpiIndex"), format!("{path}.acpiIndex must be greater than or equal to 0"));
    }
}

/// Parses a link-layer address: 6 bytes, or more for other types of networks.
pub(crate) fn mac_bytes(text: &str) -> Option<usize> {
    let separator = text.chars().find(|c| !c.is_ascii_hexdigit())?;
    let (digits, per_group) = match separator {
        ':' | '-' => (2, 1),
        '.' => (4, 2),
        _ => return None,
    };
    let groups: Vec<&str> = text.split(separator).collect();
    let valid = groups.iter().all(|group| group.len() == digits && group.bytes().all(|b| b.is_ascii_hexdigit()));
    let bytes = groups.len() * per_group;
    (valid && [6, 8, 20].contains(&bytes)).then_some(bytes)
}

/// Returns true if a text is `dddd:bb:ss.f`.
pub(in crate::rules) fn is_pci_address(text: &str) -> bool {
    let hex = |text: &str, length: usize| text.len() == length && text.bytes().all(|byte| byte.is_ascii_hexdigit());
    let parts: Vec<&str> = text.split(':').collect();
    match parts.as_slice() {
        [domain, bus, rest] => match rest.split_once('.') {
            Some((slot, function)) => {
                hex(domain, 4)
                    && hex(bus, 2)
                    && hex(slot, 2)
                    && matches!(function.as_bytes(), [digit] if (b'0'..=b'7').contains(digit))
            }
            None => false,
        },
        _ => false,
    }
}

pub(super) fn validate_dhcp(root: &str, path: PathText<'_>, interface: &Interface, errors: &mut FieldErrors) {
    let Some(options) = &interface.dhcp_options else { return };
    let mut seen = BTreeSet::new();
    if !options.private_options.iter().all(|option| seen.insert(option.option)) {
        errors.invalid(root, "Found Duplicates: you have provided duplicate DHCPPrivateOptions");
    }
    for _ in options.private_options.iter().filter(|option| !(224..=254).contains(&option.option)) {
        errors.invalid(root, "provided DHCPPrivateOptions are out of range, must be in range 224 to 254");
    }
    for (index, server) in options.ntp_servers.iter().enumerate() {
        if addresses::address_v4(server).is_none() {
            errors.invalid(
                format!("{path}.dhcpOptions.ntpServers[{index}]"),
                "NTP servers must be a list of valid IPv4 addresses.",
            );
        }
    }
}
