//! VirtualMachine: a machine with its run strategy, whether it runs or not.

pub mod data_volume;
pub mod spec;
pub mod status;

use self::spec::{VirtualMachine, VirtualMachineSpec};
use crate::{Condition, RunStrategy};

impl VirtualMachineSpec {
    /// The run strategy in force: `running` stands for `Always` and `Halted`, nothing for `Halted`.
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
    /// The condition of a type, when there is one.
    pub fn condition(&self, type_: &str) -> Option<&Condition> {
        self.status.as_ref()?.conditions.iter().find(|condition| condition.type_ == type_)
    }
}
