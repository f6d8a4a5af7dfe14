//! Networks and interfaces.
//!
//! This file has the rules of networks and of their mapping to interfaces; those of one interface are in `interface` and `ports`.

mod interface;
mod ports;

use std::collections::BTreeSet;

use api::{VirtualMachineInstanceSpec, config::ClusterConfig, vmi::network::Network};

pub(super) use self::interface::is_pci_address;
pub(crate) use self::interface::mac_bytes;
use crate::context::{FieldErrors, addresses};

/// Validates networks and interfaces.
pub(super) fn validate(
    root: &str,
    spec: &VirtualMachineInstanceSpec,
    config: &ClusterConfig,
    errors: &mut FieldErrors,
) {
    let interfaces = &spec.domain.devices.interfaces;
    validate_networks(root, &spec.networks, errors);
    let connected = interfaces.iter().enumerate().map(|(index, interface)| {
        (index, interface, spec.networks.iter().find(|network| network.name == interface.name))
    });
    for (index, interface, network) in connected.clone() {
        interface::validate_state(
            format_args!("{root}.domain.devices.interfaces[{index}]"),
            interface,
            network,
            errors,
        );
    }
    for (index, interface, network) in connected {
        interface::validate_binding(
            format_args!("{root}.domain.devices.interfaces[{index}]"),
            interface,
            network,
            config,
            errors,
        );
    }
    validate_duplicate_names(root, &spec.networks, errors);
    super::dra::validate_networks(root, spec, config, errors);
    validate_mapping(root, spec, errors);
    for (index, interface) in interfaces.iter().enumerate() {
        let path = format_args!("{root}.domain.devices.interfaces[{index}]");
        let primary = spec.networks.iter().find(|network| network.name == interface.name && network.is_primary());
        interface::validate_device(path, interface, errors);
        if let Some(network) = primary {
            ports::validate_ports(path, &interface.ports, network, errors);
        }
        ports::validate_port_ranges(path, interface, primary.is_some(), config, errors);
        interface::validate_dhcp(root, path, interface, errors);
    }
}

fn validate_networks(root: &str, networks: &[Network], errors: &mut FieldErrors) {
    let pods = networks.iter().filter(|network| network.pod.is_some()).count();
    let defaults =
        networks.iter().filter(|network| network.multus.as_ref().is_some_and(|multus| multus.default_)).count();
    if pods > 1 {
        errors.duplicate(
            format!("{root}.interfaces"),
            format!("more than one interface is connected to a pod network in {root}.interfaces"),
        );
    }
    if defaults > 1 {
        errors.invalid(format!("{root}.networks"), "Multus CNI should only have one default network");
    }
    if pods > 0 && defaults > 0 {
        errors.invalid(
            format!("{root}.networks"),
            "Pod network cannot be defined when Multus default network is defined",
        );
    }
    for (index, network) in networks.iter().enumerate() {
        let sources = [network.pod.is_some(), network.multus.is_some(), network.resource_claim.is_some()];
        let path = format_args!("{root}.networks[{index}]");
        match sources.iter().filter(|set| **set).count() {
            0 => errors.required(path, "should have a network type"),
            1 => {}
            _ => errors.required(path, "should have only one network type"),
        }
    }
    for (index, pod) in networks.iter().enumerate().filter_map(|(index, network)| Some((index, network.pod.as_ref()?)))
    {
        for (name, range, bits) in
            [("vmNetworkCIDR", &pod.vm_network_cidr, 32), ("vmIPv6NetworkCIDR", &pod.vm_ipv6_network_cidr, 128)]
        {
            let Some(range) = range.as_deref().filter(|range| !range.is_empty()) else { continue };
            if !is_range(range, bits) {
                let field = format!("{root}.networks[{index}].pod.{name}");
                let family = if bits == 32 { "IPv4" } else { "IPv6" };
                let message = format!("{field} '{range}' is not an {family} range with room for two hosts");
                errors.invalid(field, message);
            }
        }
    }
    let unnamed = networks
        .iter()
        .position(|network| network.multus.as_ref().is_some_and(|multus| multus.network_name.is_empty()));
    if let Some(index) = unnamed {
        errors.required(format!("{root}.networks[{index}]"), "CNI delegating plugin must have a networkName");
    }
}

/// Returns true if a text is an address range for at least guest and gateway.
fn is_range(text: &str, bits: u8) -> bool {
    let Some((start, prefix)) = addresses::range(text) else { return false };
    let family = if start.is_ipv4() { 32 } else { 128 };
    family == bits && prefix <= bits - 2
}

fn validate_duplicate_names(root: &str, networks: &[Network], errors: &mut FieldErrors) {
    let mut seen = BTreeSet::new();
    for (index, network) in networks.iter().enumerate() {
        if seen.insert(&network.name) {
            continue;
        }
        errors.duplicate(
            format!("{root}.networks[{index}].name"),
            format!("Network with name \"{}\" already exists, every network must have a unique name", network.name),
        );
    }
}

/// Validates that each network has one interface, and each interface a network.
fn validate_mapping(root: &str, spec: &VirtualMachineInstanceSpec, errors: &mut FieldErrors) {
    let interfaces = &spec.domain.devices.interfaces;
    for (index, network) in spec.networks.iter().enumerate() {
        let field = format_args!("{root}.networks[{index}].name");
        if !interfaces.iter().any(|interface| interface.name == network.name) {
            let message = format!("{field} '{}' not found. No interface has this name.", network.name);
            errors.required(field, message);
        }
    }
    let mut seen = BTreeSet::new();
    let field = |index: usize| format!("{root}.domain.devices.interfaces[{index}].name");
    for (index, interface) in interfaces.iter().enumerate() {
        if !seen.insert(&interface.name) {
            errors.duplicate(field(index), "Only one interface can be connected to one specific network");
        }
    }
    for (index, interface) in interfaces.iter().enumerate() {
        if !spec.networks.iter().any(|network| network.name == interface.name) {
            let field = field(index);
            let message = format!("{field} '{}' not found. No network has this name.", interface.name);
            errors.invalid(field, message);
        }
    }
}

#[cfg(test)]
mod tests;
