//! PCI devices: `/sys/bus/pci/devices` has a directory for each function, named after its address.
//!
//! The unit of allocation is the IOMMU group: the kernel opens it for one process at a time, and that process can access
//! every function of the group.

use std::{
    collections::{BTreeMap, BTreeSet},
    path::Path,
};

use super::{Ids, Unit, names, text};
use crate::safe_dir::SafeDir;

/// Most PCI functions of a node.
const MAX_FUNCTIONS: usize = 16 * 1024;
/// Device node that gives access to every group.
const CONTAINER: &str = "vfio/vfio";

/// A function of a PCI device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Function {
    pub(super) address: String,
    pub(super) ids: Ids,
    pub(super) driver: Option<String>,
    pub(super) group: Option<u32>,
    pub(super) numa: Option<i64>,
    /// Virtual function that its driver configured as a virtual GPU.
    pub(super) virtual_gpu: bool,
}

impl Function {
    /// Returns true if its driver permits assignment to processes.
    fn is_offered(&self) -> bool {
        match self.driver.as_deref() {
            Some("vfio-pci") => true,
            Some("nvidia") => self.virtual_gpu,
            _ => false,
        }
    }
}

/// Matches `dddd:bb:ss.f`, the format of the kernel.
fn is_address(name: &str) -> bool {
    let parts: Vec<&str> = name.split([':', '.']).collect();
    let [domain, bus, slot, function] = parts.as_slice() else { return false };
    let is_number = |text: &str, least: usize, most: usize| {
        (least..=most).contains(&text.len()) && text.bytes().all(|byte| byte.is_ascii_hexdigit())
    };
    is_number(domain, 4, 8) && is_number(bus, 2, 2) && is_number(slot, 2, 2) && is_number(function, 1, 1)
}

/// Lists the functions below `sys` that a rule selects, by address.
pub(super) fn functions(sys: &Path, rules: &[(String, Ids)]) -> Vec<Function> {
    let directory = sys.join("bus/pci/devices");
    let selected: BTreeSet<Ids> = rules.iter().map(|(_, ids)| *ids).collect();
    names(&directory, MAX_FUNCTIONS, is_address)
        .into_iter()
        .filter_map(|address| function(&directory, address, &selected))
        .collect()
}

fn function(directory: &Path, address: String, selected: &BTreeSet<Ids>) -> Option<Function> {
    // A link of the kernel into its own tree.
    let directory = SafeDir::trusted(&directory.join(&address)).ok()?;
    let number = |name: &str| u16::from_str_radix(text(&directory, name)?.strip_prefix("0x")?, 16).ok();
    let ids = (number("vendor")?, number("device")?);
    if !selected.contains(&ids) {
        return None;
    }
    let link = |name: &str| Some(directory.read_link(name).ok()?.file_name()?.to_str()?.to_owned());
    let kind = text(&directory, "nvidia/current_vgpu_type").and_then(|kind| kind.parse::<u32>().ok());
    Some(Function {
        address,
        ids,
        driver: link("driver"),
        group: link("iommu_group").and_then(|group| group.parse().ok()),
        // -1 if the firmware reports no NUMA node.
        numa: text(&directory, "numa_node").and_then(|node| node.parse().ok()).filter(|node: &i64| *node >= 0),
        virtual_gpu: link("physfn").is_some() && kind.is_some_and(|kind| kind != 0),
    })
}

/// Returns the units of each resource: one per group with a function of the resource.
pub(super) fn units(
    rules: &[(String, Ids)],
    functions: &[Function],
    has_node: impl Fn(&str) -> bool,
) -> BTreeMap<String, Vec<Unit>> {
    let mut found: BTreeMap<String, Vec<Unit>> =
        rules.iter().map(|(resource, _)| (resource.clone(), Vec::new())).collect();
    let mut used = BTreeSet::new();
    for (resource, ids) in rules {
        let units = found.entry(resource.clone()).or_default();
        for function in functions.iter().filter(|function| function.ids == *ids && function.is_offered()) {
            let Some(group) = function.group else { continue };
            let id = group.to_string();
            let node = format!("vfio/{group}");
            if !used.insert(&function.address) || units.iter().any(|unit| unit.id == id) {
                continue;
            }
            units.push(Unit {
                id,
                healthy: has_node(CONTAINER) && has_node(&node),
                numa: function.numa,
                nodes: vec![CONTAINER.to_owned(), node],
                addresses: vec![function.address.clone()],
            });
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    const T4: Ids = (0x10de, 0x1eb8);
    const QAT: Ids = (0x8086, 0x37c9);

    fn bound(address: &str, ids: Ids, group: u32) -> Function {
        Function {
            address: address.into(),
            ids,
            driver: Some("vfio-pci".into()),
            group: Some(group),
            numa: None,
            virtual_gpu: false,
        }
    }

    fn ids(found: &BTreeMap<String, Vec<Unit>>) -> Vec<(&str, Vec<&str>)> {
        found.iter().map(|(name, units)| (name.as_str(), units.iter().map(|unit| unit.id.as_str()).collect())).collect()
    }

    #[test]
    fn functions_are_offered_by_group_and_driver() {
        let rules = [("v.org/gpu".to_owned(), T4), ("v.org/qat".to_owned(), QAT)];
        let loose = Function { driver: None, ..bound("0000:04:00.0", T4, 4) };
        let driven = Function { driver: Some("nvidia".into()), ..bound("0000:05:00.0", T4, 5) };
        let divided = Function {
            virtual_gpu: true,
            ..Function { address: "0000:06:00.4".into(), group: Some(6), ..driven.clone() }
        };
        let ungrouped = Function { group: None, ..bound("0000:07:00.0", T4, 7) };
        let near = Function { numa: Some(1), ..bound("0000:01:00.0", T4, 11) };
        let functions =
            [near, bound("0000:02:00.0", T4, 12), bound("0000:02:00.1", T4, 12), loose, driven, divided, ungrouped];
        let found = units(&rules, &functions, |node| node != "vfio/12");
        assert_eq!(ids(&found), [("v.org/gpu", vec!["11", "12", "6"]), ("v.org/qat", vec![])]);
        assert_eq!(
            found["v.org/gpu"][0],
            Unit {
                id: "11".into(),
                healthy: true,
                numa: Some(1),
                nodes: vec!["vfio/vfio".into(), "vfio/11".into()],
                addresses: vec!["0000:01:00.0".into()],
            }
        );
        // The second function of the group is part of the same unit.
        assert_eq!(found["v.org/gpu"][1].addresses, ["0000:02:00.0"]);
        assert!(!found["v.org/gpu"][1].healthy);
        assert!(units(&rules, &functions, |_| false).values().flatten().all(|unit| !unit.healthy));
    }

    #[test]
    fn no_function_belongs_to_two_resources() {
        let functions = [bound("0000:01:00.0", T4, 1), bound("0000:02:00.0", QAT, 2)];
        let rules = [("v.org/a".to_owned(), T4), ("v.org/b".to_owned(), T4), ("v.org/b".to_owned(), QAT)];
        assert_eq!(ids(&units(&rules, &functions, |_| true)), [("v.org/a", vec!["1"]), ("v.org/b", vec!["2"])]);
    }

    #[test]
    fn addresses_are_told_from_other_names() {
        for good in ["0000:00:1f.2", "10000:e1:00.0"] {
            assert!(is_address(good), "{good}");
        }
        for bad in ["", "..", "0000:00:1f", "0000:00:1f.22", "0000:00:1f.2.3", "0000/00:1f.2", "000g:00:1f.2"] {
            assert!(!is_address(bad), "{bad}");
        }
    }
}
