//! Derived properties of VMIs.

use sha2::{Digest, Sha256};

use super::{
    cpu::Cpu,
    features::FeatureState,
    network::{Interface, MultusNetwork, Network},
    spec::{VirtualMachineInstance, VirtualMachineInstanceSpec},
    status::VirtualMachineInstanceStatus,
};
use crate::{Condition, VmiPhase, constants::condition::LIVE_MIGRATABLE};

/// Maximum length of a DNS label.
const HOST_NAME_LIMIT: usize = 63;
/// Grace period in seconds of a guest whose specification names none.
const DEFAULT_GRACE: i64 = 30;

impl Cpu {
    /// Returns the number of vCPUs at start: sockets × cores × threads, each counted as 1 if unset or 0.
    pub fn vcpus(&self) -> u32 {
        [self.sockets, self.cores, self.threads]
            .into_iter()
            .map(|part| part.unwrap_or(1).max(1))
            .fold(1, u32::saturating_mul)
    }
}

impl FeatureState {
    /// Returns true if the feature is on. An object without `enabled` means on.
    pub fn is_enabled(&self) -> bool {
        self.enabled.unwrap_or(true)
    }
}

impl Interface {
    /// Returns the requested MAC address in the form of libvirt and guests, `02:00:00:00:00:01`. Users may also write it with
    /// hyphens, or as groups of four digits with dots. Returns `None` if it is unset or invalid.
    pub fn mac(&self) -> Option<String> {
        let text = self.mac_address.as_deref()?;
        let digits: String = text.chars().filter(char::is_ascii_hexdigit).map(|c| c.to_ascii_lowercase()).collect();
        let others = text.chars().filter(|c| !c.is_ascii_hexdigit()).all(|c| matches!(c, ':' | '-' | '.'));
        let pairs: Vec<&str> = (0..digits.len()).step_by(2).filter_map(|at| digits.get(at..at + 2)).collect();
        (others && digits.len() == 12).then(|| pairs.join(":"))
    }
}

impl Network {
    /// Returns true for the primary network of the pod: the pod network or its replacement.
    pub fn is_primary(&self) -> bool {
        self.pod.is_some() || self.multus.as_ref().is_some_and(|multus| multus.default_)
    }

    /// Returns the default name of the pod's link to this network. The plugin of the pod network may use another name.
    pub fn pod_link(&self) -> String {
        if self.is_primary() {
            return "eth0".to_owned();
        }
        let digest = Sha256::digest(self.name.as_bytes());
        let hash: String = digest.iter().take(6).map(|byte| format!("{byte:02x}")).collect();
        // A link name has at most 15 characters, and one more is needed for derived names.
        format!("pod{}", hash.get(..11).unwrap_or(&hash))
    }
}

impl MultusNetwork {
    /// Returns namespace and name of the NetworkAttachmentDefinition for a VMI in `namespace`.
    pub fn definition<'a>(&'a self, namespace: &'a str) -> (&'a str, &'a str) {
        self.network_name.split_once('/').unwrap_or((namespace, &self.network_name))
    }
}

impl VirtualMachineInstanceSpec {
    /// Returns true for a guest of arm64, which QEMU emulates: nodes and images are of amd64.
    pub fn is_arm64(&self) -> bool {
        self.architecture.as_deref() == Some("arm64")
    }
}

impl VirtualMachineInstance {
    /// Returns the phase, `Unset` before the first status.
    pub fn phase(&self) -> &VmiPhase {
        self.status.as_ref().and_then(|status| status.phase.as_ref()).unwrap_or(&VmiPhase::Unset)
    }

    /// Returns true for phases `Succeeded` and `Failed`.
    pub fn is_final(&self) -> bool {
        self.phase().is_final()
    }

    /// Returns true if the VMI is being deleted.
    pub fn is_deleting(&self) -> bool {
        self.metadata.deletion_timestamp.is_some()
    }

    /// Returns the seconds that the guest has to shut down.
    pub fn grace_seconds(&self) -> i64 {
        self.spec.termination_grace_period_seconds.unwrap_or(DEFAULT_GRACE).max(0)
    }

    /// Returns the condition of a type, if present.
    pub fn condition(&self, type_: &str) -> Option<&Condition> {
        self.status.as_ref().and_then(|status| status.condition(type_))
    }

    /// Returns true if the condition of a type is True.
    pub fn has_true(&self, type_: &str) -> bool {
        self.condition(type_).is_some_and(Condition::is_true)
    }

    /// Returns true if the VMI can migrate now.
    pub fn is_live_migratable(&self) -> bool {
        self.has_true(LIVE_MIGRATABLE)
    }

    /// Returns true while a migration moves the guest: from its start to its end.
    pub fn is_migrating(&self) -> bool {
        let state = self.status.as_ref().and_then(|status| status.migration_state.as_ref());
        state.is_some_and(|state| state.start_timestamp.is_some() && state.end_timestamp.is_none())
    }

    /// Returns true from the hand-off of a migration to virt-handler until its outcome is recorded.
    pub fn is_handed_off(&self) -> bool {
        let state = self.status.as_ref().and_then(|status| status.migration_state.as_ref());
        state.is_some_and(|state| state.migration_uid.is_some() && !state.completed && !state.failed)
    }

    /// Returns the host name of pod and guest: the requested one, else the name of the VMI up to its first dot,
    /// truncated to the length of a DNS label.
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
    /// Returns the condition of a type, if present.
    pub fn condition(&self, type_: &str) -> Option<&Condition> {
        self.conditions.iter().find(|condition| condition.type_ == type_)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn migration_is_in_progress_between_its_timestamps() {
        let vmi = |state: serde_json::Value| -> VirtualMachineInstance {
            let status = serde_json::json!({"migrationState": state});
            let vmi = serde_json::json!({"metadata": {}, "spec": {"domain": {"devices": {}}}, "status": status});
            serde_json::from_value(vmi).unwrap()
        };
        let at = "2030-01-01T00:00:00Z";
        // State; handed off, migrating.
        for (state, expected) in [
            (serde_json::json!(null), (false, false)),
            (serde_json::json!({"migrationUid": "u"}), (true, false)),
            (serde_json::json!({"migrationUid": "u", "startTimestamp": at}), (true, true)),
            (serde_json::json!({"migrationUid": "u", "startTimestamp": at, "endTimestamp": at}), (true, false)),
            (serde_json::json!({"migrationUid": "u", "endTimestamp": at, "completed": true}), (false, false)),
            (serde_json::json!({"migrationUid": "u", "failed": true}), (false, false)),
        ] {
            let vmi = vmi(state.clone());
            assert_eq!((vmi.is_handed_off(), vmi.is_migrating()), expected, "{state}");
        }
    }

    #[test]
    fn mac_addresses_are_normalized() {
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
    fn pod_links_have_deterministic_names() {
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
    fn network_definitions_default_to_the_namespace_of_the_vmi() {
        for (written, read) in [("lan", ("mine", "lan")), ("shop/lan", ("shop", "lan")), ("a/b/c", ("a", "b/c"))] {
            let multus = MultusNetwork { default_: false, network_name: written.into() };
            assert_eq!(multus.definition("mine"), read);
        }
    }
}
