//! Questions many parts of the project ask of a machine.

use sha2::{Digest, Sha256};

use super::{
    cpu::Cpu,
    features::FeatureState,
    network::{Interface, MultusNetwork, Network},
    spec::VirtualMachineInstance,
    status::VirtualMachineInstanceStatus,
};
use crate::{Condition, VmiPhase};

/// Longest label of a name in DNS.
const HOST_NAME_LIMIT: usize = 63;

impl Cpu {
    /// Virtual CPUs the guest starts with: sockets × cores × threads, each counted as 1 when unset or 0.
    pub fn vcpus(&self) -> u32 {
        [self.sockets, self.cores, self.threads]
            .into_iter()
            .map(|part| part.unwrap_or(1).max(1))
            .fold(1, u32::saturating_mul)
    }
}

impl FeatureState {
    /// Whether the feature is on; an object without `enabled` means on.
    pub fn is_enabled(&self) -> bool {
        self.enabled.unwrap_or(true)
    }
}

impl Interface {
    /// The MAC address that is asked for in the one spelling that libvirt reads and guests write, `02:00:00:00:00:01`.
    /// Users may write it with hyphens, or in groups of four digits with dots as well. `None` when none is asked for.
    pub fn mac(&self) -> Option<String> {
        let text = self.mac_address.as_deref()?;
        let digits: String = text.chars().filter(char::is_ascii_hexdigit).map(|c| c.to_ascii_lowercase()).collect();
        let others = text.chars().filter(|c| !c.is_ascii_hexdigit()).all(|c| matches!(c, ':' | '-' | '.'));
        let pairs: Vec<&str> = (0..digits.len()).step_by(2).filter_map(|at| digits.get(at..at + 2)).collect();
        (others && digits.len() == 12).then(|| pairs.join(":"))
    }
}

impl Network {
    /// Whether it is the network that its pod is reached by: the pod's own, or the one that takes its place.
    pub fn is_primary(&self) -> bool {
        self.pod.is_some() || self.multus.as_ref().is_some_and(|multus| multus.default_)
    }

    /// The link of the machine's pod that leads to this network, unless the pod network's plugin names its link otherwise.
    pub fn pod_link(&self) -> String {
        if self.is_primary() {
            return "eth0".to_owned();
        }
        let digest = Sha256::digest(self.name.as_bytes());
        let hash: String = digest.iter().take(6).map(|byte| format!("{byte:02x}")).collect();
        // 14 characters: a link's name has 15 at most, and others are made of this one.
        format!("pod{}", hash.get(..11).unwrap_or(&hash))
    }
}

impl MultusNetwork {
    /// Namespace and name of the definition, seen from a machine's namespace.
    pub fn definition<'a>(&'a self, namespace: &'a str) -> (&'a str, &'a str) {
        self.network_name.split_once('/').unwrap_or((namespace, &self.network_name))
    }
}

impl VirtualMachineInstance {
    /// The phase, `Unset` before the first status.
    pub fn phase(&self) -> &VmiPhase {
        self.status.as_ref().and_then(|status| status.phase.as_ref()).unwrap_or(&VmiPhase::Unset)
    }

    /// Whether the machine is over: `Succeeded` or `Failed`.
    pub fn is_final(&self) -> bool {
        self.phase().is_final()
    }

    /// Whether deletion was asked for.
    pub fn is_deleting(&self) -> bool {
        self.metadata.deletion_timestamp.is_some()
    }

    /// The condition of a type, when there is one.
    pub fn condition(&self, type_: &str) -> Option<&Condition> {
        self.status.as_ref().and_then(|status| status.condition(type_))
    }

    /// Host name of pod and guest: the one asked for, else the machine's name up to its first dot, as far as a label of DNS
    /// can hold it.
    pub fn hostname(&self) -> String {
        if let Some(name) = self.spec.hostname.as_ref().filter(|name| !name.is_empty()) {
            return name.clone();
        }
        let name = self.metadata.name.as_deref().unwrap_or_default();
        let first = name.split('.').next().unwrap_or_default();
        first.get(..HOST_NAME_LIMIT).unwrap_or(first).trim_end_matches('-').to_owned()
    }
}

impl VirtualMachineInstanceStatus {
    /// The condition of a type, when there is one.
    pub fn condition(&self, type_: &str) -> Option<&Condition> {
        self.conditions.iter().find(|condition| condition.type_ == type_)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mac_addresses_are_spelt_in_one_way() {
        for (written, read) in [
            (Some("BE-AF-00-00-DE-AD"), Some("be:af:00:00:de:ad")),
            (Some("beaf.0000.DEAD"), Some("be:af:00:00:de:ad")),
            (Some("02:00:00:00:00:0A"), Some("02:00:00:00:00:0a")),
            (Some(""), None),
            (Some("02:00:00:00:00"), None),
            (Some("02 00 00 00 00 01"), None),
            (Some("02:00:00:00:00:01:02:03"), None),
            (None, None),
        ] {
            let interface = Interface { mac_address: written.map(ToOwned::to_owned), ..Interface::default() };
            assert_eq!(interface.mac().as_deref(), read, "{written:?}");
        }
    }

    #[test]
    fn host_names_are_labels() {
        let long = "a".repeat(62);
        let (longer, hyphen) = (format!("{long}b-c"), format!("{long}-c"));
        for (asked, name, expected) in [
            (Some("guest"), "web", "guest"),
            (Some(""), "web.example", "web"),
            (None, "web", "web"),
            (None, longer.as_str(), &longer[..63]),
            (None, hyphen.as_str(), long.as_str()),
        ] {
            let mut instance = VirtualMachineInstance::default();
            instance.metadata.name = Some(name.to_owned());
            instance.spec.hostname = asked.map(ToOwned::to_owned);
            assert_eq!(instance.hostname(), expected);
        }
    }

    #[test]
    fn links_of_networks_are_named_so_that_everybody_finds_them() {
        let network = |pod: bool, default_: Option<bool>| Network {
            name: "lan".into(),
            pod: pod.then(Default::default),
            multus: default_.map(|default_| MultusNetwork { default_, network_name: "shop/lan".into() }),
            resource_claim: None,
        };
        assert_eq!(network(true, None).pod_link(), "eth0");
        assert_eq!(network(false, Some(true)).pod_link(), "eth0");
        assert_eq!(network(false, Some(false)).pod_link(), "pod094a367b026");
    }

    #[test]
    fn definitions_are_in_the_machines_namespace_unless_another_is_named() {
        for (written, read) in [("lan", ("mine", "lan")), ("shop/lan", ("shop", "lan")), ("a/b/c", ("a", "b/c"))] {
            let multus = MultusNetwork { default_: false, network_name: written.into() };
            assert_eq!(multus.definition("mine"), read);
        }
    }
}
