//! Questions many parts of the project ask of a machine.

use super::{cpu::Cpu, features::FeatureState, spec::VirtualMachineInstance, status::VirtualMachineInstanceStatus};
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
