//! USB devices: `/sys/bus/usb/devices` has a directory for each device, named after its ports.
//!
//! A resource consists of sets of devices, one device per selector. A set does not change while one of its devices is
//! plugged in: kubelet may have allocated it, and a device that changed its set could be allocated twice. A restarted
//! virt-handler forms the sets in the order of the ports, so that the same devices form the same sets.

use std::{
    collections::{BTreeMap, BTreeSet},
    path::Path,
};

use super::{Ids, Unit, names, text};
use crate::safe_dir::SafeDir;

/// Most entries for devices and their interfaces.
const MAX_ENTRIES: usize = 16 * 1024;

/// A USB device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Device {
    /// Its ports: the name while it stays plugged in there.
    pub(super) port: String,
    pub(super) ids: Ids,
    pub(super) bus: u16,
    /// Number on the bus, a new one each time that it is plugged in.
    pub(super) number: u16,
}

impl Device {
    fn node(&self) -> String {
        format!("bus/usb/{:03}/{:03}", self.bus, self.number)
    }
}

/// Matches `bus-port.port...`. Interfaces contain a colon, and buses have another name.
fn is_device(name: &str) -> bool {
    let is_number = |text: &str| !text.is_empty() && text.len() <= 3 && text.bytes().all(|byte| byte.is_ascii_digit());
    name.split_once('-').is_some_and(|(bus, ports)| is_number(bus) && ports.split('.').all(is_number))
}

/// Lists the devices below `sys` by port.
pub(super) fn devices(sys: &Path) -> Vec<Device> {
    let directory = sys.join("bus/usb/devices");
    names(&directory, MAX_ENTRIES, is_device).into_iter().filter_map(|port| device(&directory, port)).collect()
}

fn device(directory: &Path, port: String) -> Option<Device> {
    // A link of the kernel into its own tree.
    let directory = SafeDir::trusted(&directory.join(&port)).ok()?;
    let id = |name: &str| u16::from_str_radix(&text(&directory, name)?, 16).ok();
    let number = |name: &str| text(&directory, name)?.parse::<u16>().ok().filter(|number| (1..=999).contains(number));
    let (ids, bus, number) = ((id("idVendor")?, id("idProduct")?), number("busnum")?, number("devnum")?);
    Some(Device { port, ids, bus, number })
}

/// Sets by resource.
#[derive(Debug, Default)]
pub(super) struct Sets(BTreeMap<String, Formed>);

#[derive(Debug)]
struct Formed {
    selectors: Vec<Ids>,
    /// Ports of the devices in the order of the selectors.
    sets: Vec<Vec<String>>,
}

impl Formed {
    /// Returns the plugged-in devices of a set in the order of the selectors.
    fn members<'a>(&self, set: &[String], devices: &'a [Device]) -> Vec<Option<&'a Device>> {
        let at = |port: &String, ids: Ids| devices.iter().find(|device| device.port == *port && device.ids == ids);
        set.iter().zip(&self.selectors).map(|(port, ids)| at(port, *ids)).collect()
    }

    fn unit(&self, set: &[String], devices: &[Device], has_node: &impl Fn(&str) -> bool) -> Unit {
        let members: Vec<&Device> = self.members(set, devices).into_iter().flatten().collect();
        let nodes: Vec<String> = members.iter().map(|device| device.node()).collect();
        Unit {
            id: set.join("+"),
            healthy: members.len() == set.len() && nodes.iter().all(|node| has_node(node)),
            numa: None,
            nodes,
            addresses: members.iter().map(|device| format!("{}:{}", device.bus, device.number)).collect(),
        }
    }
}

/// Chooses a free device for each selector.
fn choose(selectors: &[Ids], devices: &[Device], used: &BTreeSet<String>) -> Option<Vec<String>> {
    let mut set: Vec<String> = Vec::new();
    for ids in selectors {
        let is_free =
            |device: &&Device| device.ids == *ids && !used.contains(&device.port) && !set.contains(&device.port);
        let device = devices.iter().find(is_free)?;
        set.push(device.port.clone());
    }
    (!set.is_empty()).then_some(set)
}

impl Sets {
    /// Returns the units of each resource. Known sets are kept; new ones are formed of free devices.
    pub(super) fn units(
        &mut self,
        rules: &[(String, Vec<Ids>)],
        devices: &[Device],
        has_node: impl Fn(&str) -> bool,
    ) -> BTreeMap<String, Vec<Unit>> {
        self.0.retain(|resource, formed| {
            rules.iter().any(|(name, selectors)| name == resource && *selectors == formed.selectors)
        });
        for formed in self.0.values_mut() {
            let mut sets = std::mem::take(&mut formed.sets);
            sets.retain(|set| formed.members(set, devices).iter().any(Option::is_some));
            formed.sets = sets;
        }
        let mut used: BTreeSet<String> =
            self.0.values().flat_map(|formed| formed.sets.iter().flatten()).cloned().collect();
        let mut found = BTreeMap::new();
        for (resource, selectors) in rules {
            let formed = self
                .0
                .entry(resource.clone())
                .or_insert_with(|| Formed { selectors: selectors.clone(), sets: Vec::new() });
            while let Some(set) = choose(selectors, devices, &used) {
                used.extend(set.iter().cloned());
                formed.sets.push(set);
            }
            let units = formed.sets.iter().map(|set| formed.unit(set, devices, &has_node)).collect();
            found.insert(resource.clone(), units);
        }
        found
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const KEYS: Ids = (0x046d, 0xc31c);
    const MOUSE: Ids = (0x046d, 0xc077);

    fn device(port: &str, ids: Ids, number: u16) -> Device {
        Device { port: port.into(), ids, bus: 1, number }
    }

    fn shown(found: &BTreeMap<String, Vec<Unit>>, resource: &str) -> Vec<(String, bool, String)> {
        found[resource].iter().map(|unit| (unit.id.clone(), unit.healthy, unit.addresses.join(","))).collect()
    }

    fn unit(id: &str, healthy: bool, addresses: &str) -> (String, bool, String) {
        (id.to_owned(), healthy, addresses.to_owned())
    }

    #[test]
    fn each_device_is_in_one_set_of_one_resource() {
        let rules = [
            ("a.org/desk".to_owned(), vec![KEYS, MOUSE]),
            ("a.org/keys".to_owned(), vec![KEYS]),
            ("a.org/twins".to_owned(), vec![MOUSE, MOUSE]),
        ];
        let devices = [device("1-1", KEYS, 2), device("1-2", KEYS, 3), device("1-4.1", MOUSE, 5)];
        let found = Sets::default().units(&rules, &devices, |_| true);
        assert_eq!(shown(&found, "a.org/desk"), [unit("1-1+1-4.1", true, "1:2,1:5")]);
        assert_eq!(found["a.org/desk"][0].nodes, ["bus/usb/001/002", "bus/usb/001/005"]);
        assert_eq!(shown(&found, "a.org/keys"), [unit("1-2", true, "1:3")]);
        assert!(found["a.org/twins"].is_empty());
        assert!(!Sets::default().units(&rules, &devices, |node| node != "bus/usb/001/005")["a.org/desk"][0].healthy);
    }

    #[test]
    fn a_set_that_lost_a_device_is_not_mixed_with_others() {
        let rules = [("a.org/desk".to_owned(), vec![KEYS, MOUSE])];
        let all = [device("1-1", KEYS, 2), device("1-2", KEYS, 3), device("1-3", MOUSE, 4), device("1-4", MOUSE, 5)];
        let mut sets = Sets::default();
        let both = shown(&sets.units(&rules, &all, |_| true), "a.org/desk");
        assert_eq!(both, [unit("1-1+1-3", true, "1:2,1:4"), unit("1-2+1-4", true, "1:3,1:5")]);
        // Without the first keyboard, the second set does not change.
        let found = sets.units(&rules, &all[1..], |_| true);
        assert_eq!(shown(&found, "a.org/desk"), [unit("1-1+1-3", false, "1:4"), unit("1-2+1-4", true, "1:3,1:5")]);
        // The device returns with another number.
        let mut back = all.clone();
        back[0].number = 9;
        let found = sets.units(&rules, &back, |_| true);
        assert_eq!(shown(&found, "a.org/desk")[0], unit("1-1+1-3", true, "1:9,1:4"));
        // Another device at the same port is not part of the set.
        back[0].ids = MOUSE;
        assert!(!sets.units(&rules, &back, |_| true)["a.org/desk"][0].healthy);
        // All devices of the set are unplugged.
        let found = sets.units(&rules, &[all[1].clone(), all[3].clone()], |_| true);
        assert_eq!(shown(&found, "a.org/desk"), [unit("1-2+1-4", true, "1:3,1:5")]);
        // The resource has another definition.
        let other = [("a.org/desk".to_owned(), vec![MOUSE])];
        assert_eq!(shown(&sets.units(&other, &all, |_| true), "a.org/desk").len(), 2);
        assert!(sets.units(&[], &all, |_| true).is_empty());
    }

    #[test]
    fn devices_are_told_from_buses_and_interfaces() {
        for good in ["1-1", "3-10.4.2"] {
            assert!(is_device(good), "{good}");
        }
        for bad in ["usb1", "1-0:1.0", "1-1:1.0", "", "1-", "-1", "1-1.", "..", "1-1/.."] {
            assert!(!is_device(bad), "{bad}");
        }
    }
}
