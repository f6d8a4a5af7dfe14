//! Rules of ports and port ranges of an interface.

use std::collections::BTreeSet;

use api::{
    config::ClusterConfig,
    vmi::network::{Interface, Network, Port, PortRange},
};

use crate::{
    context::{FieldErrors, PathText, names},
    rules::gates,
};

const PORT_RANGES_MAX: usize = 10;

pub(super) fn validate_ports(path: PathText<'_>, ports: &[Port], network: &Network, errors: &mut FieldErrors) {
    let mut seen = BTreeSet::new();
    for (index, port) in ports.iter().enumerate() {
        let field = format_args!("{path}.ports[{index}].name");
        if let Some(name) = port.name.as_deref().filter(|name| !name.is_empty()) {
            if !seen.insert(name) {
                errors.duplicate(field, format!("Duplicate name of the port: {name}"));
            }
            if !names::is_port_name(name) {
                errors.invalid(field, format!("Invalid name of the port: {name}"));
            }
        }
    }
    for (index, port) in ports.iter().enumerate() {
        let field = |name: &str| format!("{path}.ports[{index}].{name}");
        match port.port {
            0 => errors.required(field("port"), "Port field is mandatory."),
            1..=65535 => {}
            _ => errors.invalid(field("port"), "Port field must be in range 0 < x < 65536."),
        }
        let protocol = port.protocol.as_deref().unwrap_or_default();
        // A pod can have ports of SCTP, which only the pod network excludes.
        if !["", "TCP", "UDP"].contains(&protocol) && (network.pod.is_some() || protocol != "SCTP") {
            errors.invalid(field("protocol"), "Unknown protocol, only TCP or UDP allowed");
        }
    }
}

pub(super) fn validate_port_ranges(
    path: PathText<'_>,
    interface: &Interface,
    is_primary: bool,
    config: &ClusterConfig,
    errors: &mut FieldErrors,
) {
    let ranges = &interface.port_ranges;
    if ranges.is_empty() {
        return;
    }
    let row = "domain.devices.interfaces[].portRanges[].start";
    if !gates::are_on(row, format_args!("{path}.name"), config, errors) {
        return;
    }
    if is_primary && !interface.ports.is_empty() {
        errors.invalid(format!("{path}.name"), "Cannot define both ports and portRanges on interface");
    }
    if interface.masquerade.is_none() {
        errors.invalid(format!("{path}.name"), "portRanges are only supported on masquerade interfaces");
    }
    if ranges.len() > PORT_RANGES_MAX {
        errors.invalid(format!("{path}.portRanges"), "No more than 10 portRanges are allowed");
        return;
    }
    let is_port = |port: i32| (1..=65535).contains(&port);
    for (index, range) in ranges.iter().enumerate() {
        let field = |name: &str| format!("{path}.portRanges[{index}].{name}");
        if !["TCP", "UDP"].contains(&range.protocol.as_str()) {
            errors.invalid(field("protocol"), "Unknown protocol, only TCP or UDP allowed");
        } else if !is_port(range.start) {
            errors.invalid(field("start"), "Start must be a valid port number, 0 < x < 65536");
        } else if !is_port(range.end) {
            errors.invalid(field("end"), "End must be a valid port number, 0 < x < 65536");
        } else if range.start > range.end {
            errors.invalid(field("start"), "Start must be less than or equal to end");
        }
    }
    for protocol in ["TCP", "UDP"] {
        let mut sorted: Vec<&PortRange> = ranges.iter().filter(|range| range.protocol == protocol).collect();
        sorted.sort_by_key(|range| range.start);
        for pair in sorted.windows(2) {
            if let [one, two] = pair
                && two.start <= one.end
            {
                errors.invalid(
                    format!("{path}.portRanges"),
                    format!(
                        "{protocol} portRanges [{}-{}] and [{}-{}] overlap",
                        one.start, one.end, two.start, two.end
                    ),
                );
            }
        }
    }
}
