//! VirtualMachine: a VM with its run strategy.

pub mod lease;
pub mod spec;
pub mod status;

use self::spec::{VirtualMachine, VirtualMachineSpec};
use crate::{Condition, RunStrategy};

impl VirtualMachineSpec {
    /// Returns the effective run strategy: `running` maps to `Always` and `Halted`; the default is `Halted`.
    pub fn effective_run_strategy(&self) -> RunStrategy {
        match (self.running, &self.run_strategy) {
            (Some(true), _) => RunStrategy::Always,
            (Some(false), _) => RunStrategy::Halted,
            (None, Some(strategy)) => strategy.clone(),
            (None, None) => RunStrategy::Halted,
        }
    }
}

impl VirtualMachine {
    /// Returns the condition of a type, if present.
    pub fn condition(&self, type_: &str) -> Option<&Condition> {
        self.status.as_ref()?.conditions.iter().find(|condition| condition.type_ == type_)
    }
}
