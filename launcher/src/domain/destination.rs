//! The XML with which a domain arrives at the target of a migration that brings disks to other claims, threads to other CPUs, or memory to
//! other NUMA nodes. Pure.

use std::ops::Range;

use roxmltree::{Document, Node};

use super::{parse::XML_LIMIT, pinning::Pinning, xml::Element};
use crate::storage::Backend;

/// A disk that moves to another claim.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct MovedDisk {
    /// Device name.
    pub(crate) target: String,
    /// Its file or device in the pod of the target.
    pub(crate) backend: Backend,
}

/// Returns a domain's XML in which disks have the files or devices of the target. A disk keeps its size in bytes by a slice: QEMU
/// copies only between disks of the same size, and the new claim can be larger. Threads have the CPUs of the target's pod. `None` if
/// the domain has no such disk or no NUMA cells.
pub(crate) fn destination_xml(xml: &str, disks: &[(MovedDisk, u64)], pinning: Option<&Pinning>) -> Option<String> {
    let document = (xml.len() <= XML_LIMIT).then(|| Document::parse(xml).ok()).flatten()?;
    let child = |name: &str| document.root_element().children().find(|node| node.has_tag_name(name));
    let devices = child("devices")?;
    let mut changes = Vec::new();
    if let Some(pinning) = pinning {
        let at = child("cputune").map_or(devices.range().start..devices.range().start, |tuning| tuning.range());
        changes.push((at, pinning.element().to_xml().trim_end().to_owned()));
        // libvirt refuses other cells than the guest has.
        if let Some(numa) = &pinning.numa {
            let cells = child("cpu")?.children().find(|node| node.has_tag_name("numa"))?;
            changes.push((child("numatune")?.range(), numa.tune().to_xml().trim_end().to_owned()));
            changes.push((cells.range(), numa.cells().to_xml().trim_end().to_owned()));
        }
    }
    for (moved, size) in disks {
        let mut elements = devices.children().filter(|node| node.has_tag_name("disk"));
        changes.extend(changes_of(elements.find(|disk| is_target(*disk, &moved.target))?, &moved.backend, *size)?);
    }
    edited(xml, changes)
}

/// Returns the XML with other text in these ranges.
pub(super) fn edited(xml: &str, mut changes: Vec<(Range<usize>, String)>) -> Option<String> {
    // From the end, so that the other ranges stay valid.
    changes.sort_by_key(|(range, _)| std::cmp::Reverse(range.start));
    let mut xml = xml.to_owned();
    for (range, text) in changes {
        xml.get(range.clone())?;
        xml.replace_range(range, &text);
    }
    Some(xml)
}

fn is_target(disk: Node<'_, '_>, target: &str) -> bool {
    disk.children().any(|node| node.has_tag_name("target") && node.attribute("dev") == Some(target))
}

/// Returns the ranges of a disk's element that change, with their new text.
fn changes_of(disk: Node<'_, '_>, backend: &Backend, size: u64) -> Option<[(Range<usize>, String); 2]> {
    let kind = disk.attribute_node("type")?.range_value();
    let source = disk.children().find(|node| node.has_tag_name("source"))?.range();
    let (type_, attribute, path) = match backend {
        Backend::File { path, .. } => ("file", "file", path),
        Backend::Block { path } => ("block", "dev", path),
    };
    let slice = Element::new("slice").with("type", "storage").with("offset", "0").with("size", size.to_string());
    let element =
        Element::new("source").with(attribute, path.to_string_lossy()).child(Element::new("slices").child(slice));
    Some([(kind, type_.to_owned()), (source, element.to_xml().trim_end().to_owned())])
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        domain::{
            diff::diff,
            host_topology::{HostCell, HostCpu},
            numa::Numa,
            parse::parse,
        },
        storage::ImageFormat,
    };

    fn file(path: &str) -> Backend {
        Backend::File { path: path.into(), format: ImageFormat::Raw }
    }

    fn block(path: &str) -> Backend {
        Backend::Block { path: path.into() }
    }

    fn moved(target: &str, backend: Backend, size: u64) -> (MovedDisk, u64) {
        (MovedDisk { target: target.into(), backend }, size)
    }

    fn disk(kind: &str, source: &str) -> String {
        format!(
            "<disk type='{kind}' device='disk'><driver name='qemu' type='raw'/>{source}<backingStore/>\
             <target dev='vdb' bus='virtio'/><alias name='ua-data'/></disk>"
        )
    }

    fn domain(disk: &str) -> String {
        let root = "<disk type='file' device='disk'><source file='/eph/root.qcow2' index='2'/><backingStore type='file'>\
                    <source file='/images/disk.img'/></backingStore><target dev='vda' bus='virtio'/></disk>";
        format!(
            "<domain type='kvm'><devices>{root}{disk}<serial type='unix'><source path='/s'/></serial></devices></domain>"
        )
    }

    fn is_equal(one: &str, other: &str) -> bool {
        let words = |text: &str| text.split_whitespace().collect::<String>();
        words(one) == words(other)
    }

    #[test]
    fn a_moved_disk_has_its_new_source_and_keeps_its_size() {
        let sliced = |attributes: &str, size: u64| {
            format!("<source {attributes}><slices><slice type='storage' offset='0' size='{size}'/></slices></source>")
        };
        let known = sliced("dev='/dev/data' index='1'", 4096);
        for (disk, backend, expected) in [
            (("file", "<source file='/c/disk.img' index='1'/>"), block("/dev/data"), ("block", "dev='/dev/data'")),
            (("block", "<source dev='/dev/data' index='1'/>"), file("/c/disk.img"), ("file", "file='/c/disk.img'")),
            (("file", "<source file='/c/disk.img'/>"), file("/c/disk.img"), ("file", "file='/c/disk.img'")),
            (("block", "<source dev='/dev/data'></source>"), block("/dev/data"), ("block", "dev='/dev/data'")),
            // It was moved before, and has kept its size since.
            (("block", known.as_str()), file("/c/disk.img"), ("file", "file='/c/disk.img'")),
            (
                ("file", "<source file='/c/disk.img'/>"),
                block("/dev/a'&amp;b"),
                ("block", "dev='/dev/a&apos;&amp;amp;b'"),
            ),
        ] {
            let (before, (kind, attribute)) = (self::disk(disk.0, disk.1), expected);
            let after = destination_xml(&domain(&before), &[moved("vdb", backend.clone(), 8192)], None).unwrap();
            let expected = domain(&self::disk(kind, &sliced(attribute, 8192)));
            assert!(is_equal(&after, &expected), "{before}: {after}");
            let parsed = parse(&after);
            assert_eq!(parsed.disks[0].source.as_ref().unwrap().backend, backend);
            assert!(parsed.disks[0].is_slice);
        }
    }

    #[test]
    fn a_domain_without_the_disk_has_no_destination() {
        let xml = domain(&disk("file", "<source file='/c/disk.img'/>"));
        for (xml, target) in
            [(xml.as_str(), "vdc"), ("<domain/>", "vdb"), ("", "vdb"), (&domain(&disk("file", "")), "vdb")]
        {
            assert_eq!(destination_xml(xml, &[moved(target, block("/dev/data"), 1)], None), None, "{target} {xml}");
        }
        assert_eq!(destination_xml(&xml, &[], None), Some(xml.clone()));
    }

    #[test]
    fn threads_have_the_cpus_of_the_target() {
        let pinning = Pinning { vcpus: vec![5], ..Pinning::default() };
        let new = "<cputune><vcpupin vcpu='0' cpuset='5'/></cputune>";
        for tuning in ["<cputune><shares>9</shares><vcpupin vcpu='0' cpuset='1'/></cputune>", "<cputune/>", ""] {
            let domain = |tuning: &str| format!("<domain><vcpu>1</vcpu>{tuning}<devices><disk/></devices></domain>");
            let after = destination_xml(&domain(tuning), &[], Some(&pinning)).unwrap();
            assert!(is_equal(&after, &domain(new)), "{tuning}: {after}");
        }
    }

    #[test]
    fn guest_has_its_memory_in_the_nodes_of_the_target() {
        let cell = HostCell { id: 3, cpus: vec![HostCpu { id: 5, siblings: vec![5] }], distances: Vec::new() };
        let numa = Some(Numa::new(&[cell], &[5], 1, 4 << 20, 2 << 20).unwrap());
        let pinning = Pinning { vcpus: vec![5], numa, ..Pinning::default() };
        let domain = |cpu: u32, node: u32, memory: &str| {
            format!(
                "<domain><cputune><vcpupin vcpu='0' cpuset='{cpu}'/></cputune><numatune><memory mode='strict' nodeset='{node}'/>\
                 <memnode cellid='0' mode='strict' nodeset='{node}'/></numatune><cpu><numa><cell id='0' cpus='0' {memory}/>\
                 </numa></cpu><devices/></domain>"
            )
        };
        let before = domain(1, 0, "memory='4096' unit='KiB'");
        let after = destination_xml(&before, &[], Some(&pinning)).unwrap();
        assert!(is_equal(&after, &domain(5, 3, "memory='4194304' unit='b'")), "{after}");
    }

    #[test]
    fn disks_of_a_recorded_domain_move_and_the_rest_stays() {
        let active = include_str!("recorded/active.xml");
        let disks = [moved("vda", block("/dev/root"), 1 << 30), moved("vdb", file("/c/disk.img"), 512)];
        let after = destination_xml(active, &disks, None).unwrap();
        let (before, after) = (parse(active), parse(&after));
        let backends: Vec<Backend> = after.disks.iter().map(|disk| disk.source.clone().unwrap().backend).collect();
        assert_eq!(backends, [block("/dev/root"), file("/c/disk.img")]);
        // The domain that has arrived is not reported as changed.
        let difference = diff(&after, &before, &[], std::path::Path::new("/plugged"));
        assert_eq!(difference, crate::domain::diff::Difference::default());
    }
}
