//! Converts libvirt's statistics to the protocol's form. Pure.

use std::collections::HashMap;

use protocol::{CpuStats, DiskStats, InterfaceStats, MemoryStats, StatsReply, VcpuStats};

/// Limit of entries of a list.
const LIST_LIMIT: u64 = 512;
/// Longest domain XML that is parsed.
const XML_LIMIT: usize = 4 * 1024 * 1024;

/// Value of one of libvirt's named parameters.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Parameter {
    Text(String),
    Number(u64),
}

/// Converts libvirt's parameters (`virDomainListGetStats`). Devices get the names of the VMI's spec if `xml`, the
/// active domain XML, has them.
pub(crate) fn stats(parameters: &[(String, Parameter)], xml: &str) -> StatsReply {
    let by_name: HashMap<&str, &Parameter> = parameters.iter().map(|(name, value)| (name.as_str(), value)).collect();
    let maybe = |name: &str| match by_name.get(name) {
        Some(Parameter::Number(number)) => Some(*number),
        _ => None,
    };
    let number = |name: &str| maybe(name).unwrap_or_default();
    let names = device_names(xml);
    let device = |name: &str| match by_name.get(name) {
        Some(Parameter::Text(device)) => names.get(device).unwrap_or(device).clone(),
        _ => String::new(),
    };
    let vcpus = (0..LIST_LIMIT.min(number("vcpu.maximum")))
        .filter_map(|i| {
            let field = |name: &str| maybe(&format!("vcpu.{i}.{name}"));
            Some(VcpuStats {
                id: u32::try_from(i).ok()?,
                state: field("state").and_then(|state| u32::try_from(state).ok())?,
                time: field("time").unwrap_or_default(),
                wait: field("wait"),
                delay: field("delay"),
            })
        })
        .collect();
    let interfaces = (0..LIST_LIMIT.min(number("net.count")))
        .map(|i| {
            let field = |name: &str| number(&format!("net.{i}.{name}"));
            InterfaceStats {
                name: device(&format!("net.{i}.name")),
                receive_bytes: field("rx.bytes"),
                receive_packets: field("rx.pkts"),
                receive_errors: field("rx.errs"),
                receive_drops: field("rx.drop"),
                transmit_bytes: field("tx.bytes"),
                transmit_packets: field("tx.pkts"),
                transmit_errors: field("tx.errs"),
                transmit_drops: field("tx.drop"),
            }
        })
        .collect();
    let disks = (0..LIST_LIMIT.min(number("block.count")))
        .map(|i| {
            let field = |name: &str| number(&format!("block.{i}.{name}"));
            DiskStats {
                name: device(&format!("block.{i}.name")),
                read_requests: field("rd.reqs"),
                read_bytes: field("rd.bytes"),
                read_time: field("rd.times"),
                write_requests: field("wr.reqs"),
                write_bytes: field("wr.bytes"),
                write_time: field("wr.times"),
                flush_requests: field("fl.reqs"),
                flush_time: field("fl.times"),
            }
        })
        .collect();
    StatsReply {
        cpu: maybe("cpu.time").map(|time| CpuStats { time, user: number("cpu.user"), system: number("cpu.system") }),
        memory: Some(MemoryStats {
            resident: maybe("balloon.rss"),
            available: maybe("balloon.available"),
            unused: maybe("balloon.unused"),
            cached: maybe("balloon.disk_caches"),
            actual_balloon: maybe("balloon.current"),
            usable: maybe("balloon.usable"),
            domain: maybe("balloon.maximum"),
            swap_in: maybe("balloon.swap_in"),
            swap_out: maybe("balloon.swap_out"),
            major_faults: maybe("balloon.major_fault"),
            minor_faults: maybe("balloon.minor_fault"),
        }),
        vcpus,
        interfaces,
        disks,
        file_systems: Vec::new(),
        load: None,
        cpu_affinity: None,
    }
}

/// Returns the number of vCPUs that the domain can have, within the limit of lists.
pub(crate) fn most_vcpus(parameters: &[(String, Parameter)]) -> usize {
    let most = parameters.iter().find_map(|(name, value)| match value {
        Parameter::Number(number) if name == "vcpu.maximum" => Some(*number),
        _ => None,
    });
    usize::try_from(most.unwrap_or_default().min(LIST_LIMIT)).unwrap_or_default()
}

/// Returns the number of processors in the maps of vCPUs.
pub(crate) fn pairs(maps: &[u8]) -> u64 {
    maps.iter().map(|byte| u64::from(byte.count_ones())).sum()
}

/// Returns the user's names of devices, by target (`vda`, `tap0`).
fn device_names(xml: &str) -> HashMap<String, String> {
    let Some(document) = (xml.len() <= XML_LIMIT).then(|| roxmltree::Document::parse(xml).ok()).flatten() else {
        return HashMap::new();
    };
    let devices = document.root_element().children().find(|node| node.has_tag_name("devices"));
    devices
        .into_iter()
        .flat_map(|devices| devices.children())
        .filter_map(|device| {
            let child = |name: &str| device.children().find(|node| node.has_tag_name(name));
            let name = child("alias")?.attribute("name")?.strip_prefix("ua-")?;
            Some((child("target")?.attribute("dev")?.to_owned(), name.to_owned()))
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const XML: &str = "<domain><devices><disk><target dev='vda'/><alias name='ua-root'/></disk>\
        <interface><target dev='tap0'/><alias name='ua-default'/></interface></devices></domain>";

    fn parameters(list: &[(&str, u64)], names: &[(&str, &str)]) -> Vec<(String, Parameter)> {
        let numbers = list.iter().map(|(name, value)| ((*name).to_owned(), Parameter::Number(*value)));
        let texts = names.iter().map(|(name, value)| ((*name).to_owned(), Parameter::Text((*value).to_owned())));
        numbers.chain(texts).collect()
    }

    #[test]
    fn devices_have_the_names_of_the_spec() {
        let reply = stats(
            &parameters(
                &[
                    ("cpu.time", 5_000_000_000),
                    ("cpu.user", 1),
                    ("balloon.current", 1024),
                    ("vcpu.maximum", 2),
                    ("vcpu.0.state", 1),
                    ("vcpu.0.time", 7),
                    ("vcpu.0.delay", 3),
                    ("net.count", 1),
                    ("net.0.rx.bytes", 10),
                    ("net.0.tx.drop", 2),
                    ("block.count", 2),
                    ("block.0.rd.reqs", 4),
                    ("block.1.fl.times", 6),
                ],
                &[("net.0.name", "tap0"), ("block.0.name", "vda"), ("block.1.name", "vdb")],
            ),
            XML,
        );
        assert_eq!(reply.cpu, Some(CpuStats { time: 5_000_000_000, user: 1, system: 0 }));
        let memory = reply.memory.unwrap();
        assert_eq!((memory.actual_balloon, memory.unused), (Some(1024), None));
        assert_eq!(reply.vcpus, [VcpuStats { id: 0, state: 1, time: 7, wait: None, delay: Some(3) }]);
        assert_eq!((reply.interfaces[0].name.as_str(), reply.interfaces[0].receive_bytes), ("default", 10));
        assert_eq!(reply.disks.iter().map(|disk| disk.name.as_str()).collect::<Vec<_>>(), ["root", "vdb"]);
    }

    #[test]
    fn affinity_is_the_number_of_pairs() {
        assert_eq!(pairs(&[]), 0);
        assert_eq!(pairs(&[0b0000_0101, 0, 0b0000_1111, 1]), 7);
        assert_eq!(most_vcpus(&parameters(&[("vcpu.current", 2), ("vcpu.maximum", 4)], &[])), 4);
        assert_eq!(most_vcpus(&parameters(&[("vcpu.maximum", u64::MAX)], &[])), 512);
        assert_eq!(most_vcpus(&[]), 0);
    }

    #[test]
    fn counts_are_bounded() {
        let reply = stats(&parameters(&[("net.count", u64::MAX), ("vcpu.maximum", u64::MAX)], &[]), "<domain");
        assert_eq!(reply.interfaces.len(), 512);
        assert_eq!(reply.vcpus, []);
    }
}
