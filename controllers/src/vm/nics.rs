//! Network interfaces of a VM's template: the running VMI follows them.
//!
//! ```text
//!   added with bridge binding on a Multus network -> added to the VMI, plugged into the pod and the guest
//!   state absent -> copied -> unplugged -> out of the status -> out of the VMI's spec -> out of the template
//!   state up, down -> copied, the link of the guest follows
//!   another definition of its network -> copied if the VMI can migrate: the target pod has the other network
//!   everything else -> at the next start
//! ```
//! Interfaces are compared with the VMI by name. This does not depend on the rollout strategy.
//!
//! The network plugins choose the MAC address of a plugged interface, and the template gets it for the next start: see [`Macs`].

use std::collections::BTreeSet;

use api::{
    VirtualMachineInstance, VirtualMachineInstanceSpec, VmiPhase,
    constants::{
        annotation::{INTERFACES_CHANGED, INTERFACES_WITHOUT_MAC},
        condition::MIGRATION_REQUIRED,
    },
    nics::{DOMAIN, has_source, shown},
    vmi::network::{Interface, Network},
};

/// Networks and interfaces of a template.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Nics {
    networks: Vec<Network>,
    interfaces: Vec<Interface>,
}

/// Changes of the running VMI and of its VM's template.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Changes {
    /// Networks and interfaces for the VMI, if it has others.
    pub(super) vmi: Option<Nics>,
    /// Names of interfaces that are gone, and leave the template.
    pub(super) gone: Vec<String>,
    /// Why the next start is needed.
    pub(super) restart: Option<String>,
}

impl Nics {
    pub(super) fn of(spec: &VirtualMachineInstanceSpec) -> Self {
        Self { networks: spec.networks.clone(), interfaces: spec.domain.devices.interfaces.clone() }
    }

    /// Writes networks and interfaces into a spec.
    pub(super) fn put(self, spec: &mut VirtualMachineInstanceSpec) {
        spec.networks = self.networks;
        spec.domain.devices.interfaces = self.interfaces;
    }

    /// Marks a VMI whose guest gets or loses an interface by this change, which is not written yet: see [`api::hibernation::obstacle`].
    pub(super) fn mark(&self, vmi: &mut VirtualMachineInstance) {
        if self.of_guest() != Self::of(&vmi.spec).of_guest() {
            vmi.metadata.annotations.get_or_insert_default().insert(INTERFACES_CHANGED.to_owned(), "true".to_owned());
        }
    }

    /// Returns the names of the interfaces that the guest has.
    fn of_guest(&self) -> BTreeSet<&str> {
        let present = self.interfaces.iter().filter(|interface| !interface.is_absent());
        present.map(|interface| interface.name.as_str()).collect()
    }

    fn network(&self, name: &str) -> Option<&Network> {
        self.networks.iter().find(|network| network.name == name)
    }

    fn interface(&self, name: &str) -> Option<&Interface> {
        self.interfaces.iter().find(|interface| interface.name == name)
    }

    fn remove(&mut self, name: &str) {
        self.networks.retain(|network| network.name != name);
        self.interfaces.retain(|interface| interface.name != name);
    }

    fn is_on_secondary_network(&self, name: &str) -> bool {
        self.network(name).is_some_and(|network| network.multus.is_some() && !network.is_primary())
    }
}

/// Removes interfaces that are gone, and their networks, from the spec of a template.
pub(super) fn remove(gone: &[String], spec: &mut VirtualMachineInstanceSpec) {
    let mut nics = Nics::of(spec);
    gone.iter().for_each(|name| nics.remove(name));
    nics.put(spec);
}

/// Compares a template with its VMI. `written_alike`: users wrote the template as it was at the start, so that another version of
/// this program may have expanded it otherwise.
pub(super) fn compare(template: &Nics, vmi: &VirtualMachineInstance, written_alike: bool) -> Changes {
    let present = Nics::of(&vmi.spec);
    let mut changes = Changes::default();
    let mut wanted = present.clone();
    // The status names what the domain or the pod has.
    let is_gone = |interface: &Interface| interface.is_absent() && shown(vmi, &interface.name).is_none();
    let is_running = *vmi.phase() == VmiPhase::Running;
    if is_running {
        let gone = present.interfaces.iter().filter(|interface| is_gone(interface));
        gone.for_each(|interface| wanted.remove(&interface.name));
    }
    for interface in &template.interfaces {
        let name = &interface.name;
        match present.interface(name) {
            // It does not return before it is gone, and then with all of its settings.
            Some(known) if known.is_absent() => {}
            Some(known) => {
                match difference(template, &without_shown_mac(vmi, interface, known), &present, known) {
                    Some(Difference::Definition) if is_running && can_move(vmi, interface) => {
                        let network = wanted.networks.iter_mut().find(|network| network.name == *name);
                        if let Some((network, other)) = network.zip(template.network(name)) {
                            network.multus.clone_from(&other.multus);
                        }
                    }
                    Some(difference) if !written_alike => changes.require(name, difference.text()),
                    _ => {}
                }
                let known = wanted.interfaces.iter_mut().find(|known| known.name == *name);
                if let Some(known) = known.filter(|_| interface.sriov.is_none()) {
                    known.state.clone_from(&interface.state);
                }
            }
            None if interface.is_absent() => {
                changes.gone.extend((is_running && shown(vmi, name).is_none()).then(|| name.clone()));
            }
            None if !template.is_on_secondary_network(name) => {
                changes.require(name, "is not on a secondary network, and cannot be added");
            }
            None if interface.bridge.is_none() => changes.require(name, "has no bridge binding, and cannot be added"),
            None if present.interfaces.is_empty() => {
                changes.require(name, "is the first one, whose device the pod lacks: it cannot be added");
            }
            None => {
                wanted.interfaces.push(interface.clone());
                wanted.networks.extend(template.network(name).cloned());
            }
        }
    }
    // Interfaces of the default network are not in a template that names none.
    let names_all = !template.interfaces.is_empty();
    for interface in present.interfaces.iter().filter(|interface| !interface.is_absent()) {
        let name = &interface.name;
        if template.interface(name).is_none() && (names_all || present.is_on_secondary_network(name)) {
            changes.require(name, "was removed without state absent, and cannot be removed so");
        }
    }
    changes.vmi = (is_running && wanted != present).then_some(wanted);
    changes
}

/// MAC addresses of plugged interfaces. An annotation of the VMI names the interfaces that wait for the template to get theirs. It is
/// written with the plug and loses the name with the write to the template: a tool that takes the address out of the template
/// again has the last word.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Macs {
    /// Interfaces of the template and their addresses.
    pub(super) known: Vec<(String, String)>,
    /// Names of interfaces that wait.
    pub(super) waiting: Vec<String>,
}

impl Macs {
    /// Compares the template with the VMI and with the networks and interfaces that it gets now, if it gets others.
    pub(super) fn of(template: &Nics, vmi: &VirtualMachineInstance, wanted: Option<&Nics>) -> Self {
        let annotation = vmi.metadata.annotations.iter().flatten().find(|(key, _)| *key == INTERFACES_WITHOUT_MAC);
        let waiting = annotation.map(|(_, names)| names.as_str()).unwrap_or_default().split(',');
        let present = Nics::of(&vmi.spec);
        let is_new = |interface: &&Interface| present.interface(&interface.name).is_none();
        let plugged = wanted.iter().flat_map(|nics| &nics.interfaces).filter(is_new);
        let names: BTreeSet<&str> = waiting.chain(plugged.map(|interface| interface.name.as_str())).collect();
        let mut macs = Self::default();
        for name in names {
            let interface = template.interface(name).filter(|interface| !interface.is_absent());
            if interface.is_none_or(|interface| interface.mac().is_some()) {
                continue;
            }
            match shown(vmi, name).filter(|_| has_source(vmi, name, DOMAIN)).and_then(|shown| shown.mac.clone()) {
                Some(mac) => macs.known.push((name.to_owned(), mac)),
                None => macs.waiting.push(name.to_owned()),
            }
        }
        macs
    }

    /// Writes the addresses into the spec of a template.
    pub(super) fn put(&self, spec: &mut VirtualMachineInstanceSpec) {
        for (name, mac) in &self.known {
            let interface = spec.domain.devices.interfaces.iter_mut().find(|interface| interface.name == *name);
            if let Some(interface) = interface {
                interface.mac_address = Some(mac.clone());
            }
        }
    }

    /// Writes the names of the interfaces that wait into the VMI.
    pub(super) fn mark(&self, vmi: &mut VirtualMachineInstance) {
        let annotations = &mut vmi.metadata.annotations;
        if !self.waiting.is_empty() {
            annotations.get_or_insert_default().insert(INTERFACES_WITHOUT_MAC.to_owned(), self.waiting.join(","));
        } else if let Some(annotations) = annotations {
            annotations.remove(INTERFACES_WITHOUT_MAC);
        }
    }
}

impl Changes {
    fn require(&mut self, name: &str, what: &str) {
        self.restart.get_or_insert_with(|| format!("interface {name} {what} while the VMI runs"));
    }
}

/// A difference between an interface of the template and that of the VMI.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Difference {
    /// Settings that do not change while the VMI runs.
    Settings,
    /// The definition of its network alone.
    Definition,
}

impl Difference {
    fn text(self) -> &'static str {
        match self {
            Self::Settings => "has other settings, which cannot be changed",
            Self::Definition => {
                "is on another network, to which only a migration can move it, and the VMI cannot migrate: it cannot be changed"
            }
        }
    }
}

/// Returns true if a migration can bring an interface to another network. One that waits for its migration can return.
fn can_move(vmi: &VirtualMachineInstance, interface: &Interface) -> bool {
    let moves = vmi.is_live_migratable() || vmi.has_true(MIGRATION_REQUIRED);
    moves && interface.bridge.is_some() && !interface.is_absent()
}

/// Returns the interface without the MAC address that the guest has without being given one.
fn without_shown_mac(vmi: &VirtualMachineInstance, interface: &Interface, known: &Interface) -> Interface {
    let has_mac = |mac: &String| {
        let shown = shown(vmi, &interface.name).filter(|_| has_source(vmi, &interface.name, DOMAIN));
        shown.and_then(|shown| shown.mac.as_ref()).is_some_and(|shown| shown.eq_ignore_ascii_case(mac))
    };
    let mut interface = interface.clone();
    if known.mac().is_none() && interface.mac().as_ref().is_some_and(has_mac) {
        interface.mac_address.clone_from(&known.mac_address);
    }
    interface
}

/// Returns what differs between an interface of the template and that of the VMI.
fn difference(template: &Nics, interface: &Interface, present: &Nics, known: &Interface) -> Option<Difference> {
    let without_state = |interface: &Interface| Interface { state: None, ..interface.clone() };
    let network = |nics: &Nics| {
        let mut network = nics.network(&interface.name).cloned();
        let multus = network.as_mut().and_then(|network| network.multus.as_mut());
        let definition = multus.map(|multus| std::mem::take(&mut multus.network_name));
        (network, definition)
    };
    let ((network, definition), (known_network, known_definition)) = (network(template), network(present));
    if without_state(interface) != without_state(known) || network != known_network {
        return Some(Difference::Settings);
    }
    (definition != known_definition).then_some(Difference::Definition)
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn nics(interfaces: &Value, networks: &Value) -> Nics {
        Nics {
            interfaces: serde_json::from_value(interfaces.clone()).unwrap(),
            networks: serde_json::from_value(networks.clone()).unwrap(),
        }
    }

    /// Returns the interface `default` and these, each on a network of its own.
    fn with(more: &[Value]) -> Nics {
        let (mut interfaces, mut networks) =
            (vec![json!({"name": "default", "masquerade": {}})], vec![json!({"name": "default", "pod": {}})]);
        for interface in more {
            networks.push(json!({"name": interface["name"], "multus": {"networkName": "n"}}));
            interfaces.push(interface.clone());
        }
        nics(&json!(interfaces), &json!(networks))
    }

    fn vmi(nics: &Nics, shown: &[&str], phase: &str) -> VirtualMachineInstance {
        let shown: Vec<Value> = shown.iter().map(|name| json!({"name": name, "infoSource": "domain"})).collect();
        let mut vmi: VirtualMachineInstance = serde_json::from_value(json!({
            "apiVersion": "kubevirt.io/v1", "kind": "VirtualMachineInstance", "metadata": {"name": "m"},
            "spec": {"domain": {"devices": {}}}, "status": {"phase": phase, "interfaces": shown},
        }))
        .unwrap();
        nics.clone().put(&mut vmi.spec);
        vmi
    }

    #[test]
    fn running_vmi_follows_the_interfaces_of_the_template() {
        let lan = |state: &str| json!({"name": "lan", "bridge": {}, "state": state});
        let (plain, up) = (json!({"name": "lan", "bridge": {}}), lan("up"));
        let (alone, both, absent) = (with(&[]), with(std::slice::from_ref(&plain)), with(&[lan("absent")]));
        let (default, shown) = (&["default"][..], &["default", "lan"][..]);
        let to = |nics: &Nics| Changes { vmi: Some(nics.clone()), ..Changes::default() };
        let gone = || Changes { gone: vec!["lan".to_owned()], ..Changes::default() };
        let restart = |text: &str| Changes { restart: Some(text.to_owned()), ..Changes::default() };
        // Interfaces of the template and of the VMI, and those in the status.
        for (template, present, status, expected) in [
            (&both, &both, shown, Changes::default()),
            (&both, &alone, default, to(&both)),
            (&with(&[lan("down")]), &both, shown, to(&with(&[lan("down")]))),
            (&with(&[up]), &with(&[lan("down")]), shown, to(&with(&[lan("up")]))),
            (&absent, &both, shown, to(&absent)),
            // It does not return before it is gone.
            (&both, &absent, shown, Changes::default()),
            (&absent, &absent, shown, Changes::default()),
            (&absent, &absent, default, to(&alone)),
            (&absent, &alone, default, gone()),
            (&absent, &alone, shown, Changes::default()),
            (&alone, &alone, default, Changes::default()),
            (&alone, &absent, shown, Changes::default()),
            // A template without interfaces has the default one.
            (&Nics::default(), &alone, default, Changes::default()),
            (
                &alone,
                &both,
                shown,
                restart("interface lan was removed without state absent, and cannot be removed so while the VMI runs"),
            ),
            (
                &Nics::default(),
                &both,
                shown,
                restart("interface lan was removed without state absent, and cannot be removed so while the VMI runs"),
            ),
            (
                &with(&[json!({"name": "lan", "bridge": {}, "model": "e1000"})]),
                &both,
                shown,
                restart("interface lan has other settings, which cannot be changed while the VMI runs"),
            ),
            (
                &nics(&json!([{"name": "lan", "bridge": {}}]), &json!([{"name": "lan", "pod": {}}])),
                &nics(&json!([]), &json!([])),
                &[],
                restart("interface lan is not on a secondary network, and cannot be added while the VMI runs"),
            ),
            (
                &with(&[json!({"name": "lan", "sriov": {}})]),
                &alone,
                default,
                restart("interface lan has no bridge binding, and cannot be added while the VMI runs"),
            ),
            (
                &nics(&json!([plain]), &json!([{"name": "lan", "multus": {"networkName": "n"}}])),
                &nics(&json!([]), &json!([])),
                &[],
                restart(
                    "interface lan is the first one, whose device the pod lacks: it cannot be added while the VMI runs",
                ),
            ),
        ] {
            let changes = compare(template, &vmi(present, status, "Running"), false);
            assert_eq!(changes, expected, "{template:?} {present:?}");
            // Before, the pod is being made.
            assert_eq!(compare(template, &vmi(present, status, "Scheduling"), false).vmi, None);
        }
    }

    #[test]
    fn vmi_whose_guest_gets_or_loses_an_interface_is_marked() {
        let lan = |state: Option<&str>| with(&[json!({"name": "lan", "bridge": {}, "state": state})]);
        let alone = || with(&[]);
        for (present, wanted, is_marked) in [
            (alone(), lan(None), true),
            (lan(None), lan(Some("absent")), true),
            (lan(None), lan(Some("down")), false),
            // It was unplugged before, or the guest never had it.
            (lan(Some("absent")), alone(), false),
            (alone(), alone(), false),
        ] {
            let mut vmi = vmi(&present, &[], "Running");
            wanted.mark(&mut vmi);
            let annotations = vmi.metadata.annotations.unwrap_or_default();
            assert_eq!(annotations.contains_key(INTERFACES_CHANGED), is_marked, "{present:?} {wanted:?}");
        }
    }

    #[test]
    fn mac_address_that_the_guest_has_is_no_change() {
        let present = with(&[]);
        let mac = |mac: &str| {
            let interfaces = json!([{"name": "default", "masquerade": {}, "macAddress": mac}]);
            nics(&interfaces, &json!([{"name": "default", "pod": {}}]))
        };
        let mut vmi = vmi(&present, &["default"], "Running");
        vmi.status.as_mut().unwrap().interfaces[0].mac = Some("02:00:00:00:00:0a".into());
        for (template, required) in [(mac("02:00:00:00:00:0A"), false), (mac("02:00:00:00:00:0b"), true)] {
            let changes = compare(&template, &vmi, false);
            assert_eq!((changes.restart.is_some(), changes.vmi), (required, None), "{template:?}");
        }
        vmi.status.as_mut().unwrap().interfaces[0].info_source = Some("guest-agent".into());
        assert!(compare(&mac("02:00:00:00:00:0a"), &vmi, false).restart.is_some(), "the domain does not have it");
    }

    #[test]
    fn template_gets_the_mac_address_of_a_plugged_interface_once() {
        const MAC: &str = "02:00:00:00:00:0a";
        let lan = |settings: &Value| {
            let mut interface = json!({"name": "lan", "bridge": {}});
            json_patch::merge(&mut interface, settings);
            with(&[interface])
        };
        let (alone, plain) = (with(&[]), lan(&json!({})));
        let known = || Macs { known: vec![("lan".to_owned(), MAC.to_owned())], ..Macs::default() };
        let waiting = || Macs { waiting: vec!["lan".to_owned()], ..Macs::default() };
        // Template and VMI, the names that wait, the sources of the status.
        for (template, present, annotation, sources, expected) in [
            (&plain, &alone, "", "", waiting()),
            (&plain, &alone, "lan", "", waiting()),
            (&lan(&json!({"macAddress": MAC})), &alone, "", "", Macs::default()),
            (&plain, &plain, "lan", "multus-status", waiting()),
            (&plain, &plain, "lan", "domain, multus-status", known()),
            // The guest alone reports it.
            (&plain, &plain, "lan", "guest-agent", waiting()),
            // It was there at the start, or was written before.
            (&plain, &plain, "", "domain, multus-status", Macs::default()),
            (&lan(&json!({"macAddress": MAC})), &plain, "lan", "domain", Macs::default()),
            (&lan(&json!({"state": "absent"})), &plain, "lan", "domain", Macs::default()),
            (&alone, &plain, "lan", "domain", Macs::default()),
        ] {
            let mut vmi = vmi(present, &["default"], "Running");
            vmi.metadata.annotations = Some([(INTERFACES_WITHOUT_MAC.to_owned(), annotation.to_owned())].into());
            let shown = json!({"name": "lan", "infoSource": sources, "mac": MAC});
            vmi.status.get_or_insert_default().interfaces.push(serde_json::from_value(shown).unwrap());
            let wanted = compare(template, &vmi, false).vmi;
            assert_eq!(Macs::of(template, &vmi, wanted.as_ref()), expected, "{template:?} {annotation:?} {sources}");
        }
    }

    #[test]
    fn written_mac_address_is_no_change_while_the_interface_is_unplugged() {
        let lan =
            |mac: Option<&str>| with(&[json!({"name": "lan", "bridge": {}, "state": "absent", "macAddress": mac})]);
        for shown in [&["default", "lan"][..], &["default"]] {
            let vmi = vmi(&lan(None), shown, "Running");
            assert_eq!(compare(&lan(Some("02:00:00:00:00:0a")), &vmi, false).restart, None, "{shown:?}");
        }
    }

    #[test]
    fn another_network_needs_a_migration_and_another_release_nothing() {
        let both = with(&[json!({"name": "lan", "bridge": {}})]);
        let mut moved = both.clone();
        moved.networks[1].multus.as_mut().unwrap().network_name = "other".to_owned();
        let vmi = vmi(&both, &["default", "lan"], "Running");
        let text = compare(&moved, &vmi, false).restart.unwrap();
        assert!(
            text.starts_with("interface lan is on another network, to which only a migration can move it"),
            "{text}"
        );
        assert_eq!(compare(&moved, &vmi, true), Changes::default());
    }

    #[test]
    fn interface_of_a_vmi_that_can_migrate_moves_to_another_network() {
        let both = with(&[json!({"name": "lan", "bridge": {}})]);
        let mut moved = both.clone();
        moved.networks[1].multus.as_mut().unwrap().network_name = "other".to_owned();
        let with_condition = |nics: &Nics, type_: &str| {
            let mut vmi = vmi(nics, &["default", "lan"], "Running");
            let condition = json!({"type": type_, "status": "True"});
            vmi.status.get_or_insert_default().conditions = vec![serde_json::from_value(condition).unwrap()];
            vmi
        };
        let to = |nics: &Nics| Changes { vmi: Some(nics.clone()), ..Changes::default() };
        for written_alike in [false, true] {
            assert_eq!(compare(&moved, &with_condition(&both, "LiveMigratable"), written_alike), to(&moved));
            // The way back from a change that waits for its migration.
            assert_eq!(compare(&both, &with_condition(&moved, "MigrationRequired"), written_alike), to(&both));
        }
        let mut pending = with_condition(&both, "LiveMigratable");
        pending.status.get_or_insert_default().phase = Some(VmiPhase::Scheduled);
        assert_eq!(compare(&moved, &pending, false).vmi, None);
        // Only bridges move.
        let sriov = with(&[json!({"name": "lan", "sriov": {}})]);
        let mut elsewhere = sriov.clone();
        elsewhere.networks[1].multus.as_mut().unwrap().network_name = "other".to_owned();
        assert!(compare(&elsewhere, &with_condition(&sriov, "LiveMigratable"), false).restart.is_some());
    }
}
