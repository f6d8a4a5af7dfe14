//! Questions many parts of the project ask of a machine.

use super::{
    cpu::Cpu, features::FeatureState, network::Interface, spec::VirtualMachineInstance,
    status::VirtualMachineInstanceStatus,
};
use crate::{Condition, VmiPhase};

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
}
