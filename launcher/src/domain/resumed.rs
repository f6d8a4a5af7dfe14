//! The XML with which a domain continues from saved memory: that of this pod, with the machine type, the CPU model and the vCPUs of
//! the saved guest, which libvirt compares. Pure.
//!
//! Users can write to the claim with the memory, and the file holds the XML of the former domain. No path, device or address of it is
//! used, so that the file can name nothing that this pod's domain would not have.

use std::ops::Range;

use roxmltree::{Document, Node};

use super::{destination::edited, parse::XML_LIMIT, xml::Element};

/// Elements and attributes of CPU and vCPUs.
const ELEMENTS: [&str; 15] = [
    "cpu",
    "vcpus",
    "vcpu",
    "model",
    "vendor",
    "topology",
    "feature",
    "cache",
    "maxphysaddr",
    "numa",
    "cell",
    "distances",
    "sibling",
    "interconnects",
    "latency",
];
const ATTRIBUTES: [&str; 29] = [
    "enabled",
    "hotpluggable",
    "order",
    "mode",
    "match",
    "check",
    "migratable",
    "fallback",
    "vendor_id",
    "sockets",
    "dies",
    "clusters",
    "cores",
    "threads",
    "policy",
    "name",
    "level",
    "bits",
    "limit",
    "id",
    "cpus",
    "memory",
    "unit",
    "memAccess",
    "discard",
    "value",
    "initiator",
    "target",
    "type",
];
/// Deepest element of a CPU.
const DEPTH: usize = 5;

/// Returns the XML for a domain with this definition. `None`: the saved XML is not that of a domain.
pub(crate) fn resumed_xml(definition: &str, saved: &str) -> Option<String> {
    let parse = |xml| Document::parse(xml).ok();
    let (own, former) = ([definition, saved].iter().all(|xml| xml.len() <= XML_LIMIT))
        .then(|| Some((parse(definition)?, parse(saved)?)))
        .flatten()?;
    let mut changes: Vec<(Range<usize>, String)> = Vec::new();
    let machine = machine(&former)?.value();
    // The value is escaped in neither document.
    if !machine.bytes().all(|byte| byte.is_ascii_alphanumeric() || b".-_".contains(&byte)) {
        return None;
    }
    changes.push((self::machine(&own)?.range_value(), machine.to_owned()));
    let devices = child(own.root_element(), "devices")?.range().start;
    for name in ["cpu", "vcpus"] {
        let Some(saved) = child(former.root_element(), name) else { continue };
        let at = child(own.root_element(), name).map_or(devices..devices, |known| known.range());
        changes.push((at, copy(saved, 0)?.to_xml().trim_end().to_owned()));
    }
    edited(definition, changes)
}

fn child<'a, 'input>(node: Node<'a, 'input>, name: &str) -> Option<Node<'a, 'input>> {
    node.children().find(|child| child.has_tag_name(name))
}

fn machine<'a, 'input>(document: &'a Document<'input>) -> Option<roxmltree::Attribute<'a, 'input>> {
    child(child(document.root_element(), "os")?, "type")?.attribute_node("machine")
}

/// Copies an element of a CPU. `None` if it has parts that are not known.
fn copy(node: Node<'_, '_>, depth: usize) -> Option<Element> {
    let known = |list: &'static [&'static str], name: &str| list.iter().copied().find(|known| *known == name);
    let mut element = Element::new(known(&ELEMENTS, node.tag_name().name()).filter(|_| depth < DEPTH)?);
    for attribute in node.attributes() {
        element = element.with(known(&ATTRIBUTES, attribute.name())?, attribute.value());
    }
    for child in node.children().filter(Node::is_element) {
        element = element.child(copy(child, depth + 1)?);
    }
    let text = node.text().map(str::trim).filter(|text| !text.is_empty());
    Some(match text {
        Some(text) => element.text(text),
        None => element,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const OWN: &str = "<domain type='kvm'><name>own</name><os><type arch='x86_64' machine='pc-q35-10.0'>hvm</type></os>\
                       <cpu mode='host-model' check='partial'/><devices><serial type='unix'><source path='/own'/></serial>\
                       </devices></domain>";

    fn saved(machine: &str, cpu: &str) -> String {
        format!(
            "<domain type='kvm'><name>former</name><os><type arch='x86_64' machine='{machine}'>hvm</type></os>{cpu}\
             <devices><emulator>/former</emulator><serial type='unix'><source path='/former'/></serial></devices></domain>"
        )
    }

    #[test]
    fn machine_and_cpu_are_those_of_the_saved_guest_and_nothing_else() {
        let cpu = "<cpu mode='custom' match='exact' check='full'>\n<model fallback='forbid'>EPYC</model>\n\
                   <feature policy='require' name='x2apic'/><numa><cell id='0' cpus='0' memory='1' unit='KiB'/></numa></cpu>";
        let xml = resumed_xml(OWN, &saved("pc-q35-9.2", cpu)).unwrap();
        let document = Document::parse(&xml).unwrap();
        let found = child(document.root_element(), "cpu").unwrap();
        assert_eq!((machine(&document).unwrap().value(), found.attribute("mode")), ("pc-q35-9.2", Some("custom")));
        assert_eq!(child(found, "model").unwrap().text().map(str::trim), Some("EPYC"));
        assert_eq!(child(found, "feature").unwrap().attribute("name"), Some("x2apic"));
        assert!(child(child(found, "numa").unwrap(), "cell").is_some());
        let plugged = "<vcpus><vcpu id='1' enabled='yes' hotpluggable='yes' order='2'/></vcpus>";
        let xml = resumed_xml(OWN, &saved("pc-q35-9.2", plugged)).unwrap();
        assert!(xml.contains("hotpluggable=\"yes\"") || xml.contains("hotpluggable='yes'"), "{xml}");
        assert!(xml.contains("/own") && !xml.contains("former"), "{xml}");
        // A domain without CPU keeps its own.
        assert!(resumed_xml(OWN, &saved("pc-q35-9.2", "")).unwrap().contains("host-model"));
    }

    #[test]
    fn what_is_not_known_is_refused() {
        for saved in [
            saved("a&apos; x=&apos;", ""),
            saved("pc", "<cpu><script path='/x'/></cpu>"),
            saved("pc", "<cpu path='/x'/>"),
            "<domain/>".to_owned(),
            String::new(),
        ] {
            assert_eq!(resumed_xml(OWN, &saved), None, "{saved}");
        }
    }
}
