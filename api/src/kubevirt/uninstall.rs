//! The fate of workloads when the KubeVirt object is deleted (`spec.uninstallStrategy`).
//!
//! This is the only place of the rule. The webhook, the chart's hook and virt-controller use it.

use super::spec::KubeVirtSpec;

/// The strategy of an installation.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum UninstallStrategy {
    /// No strategy is set: the deletion is refused while VMIs exist. Stopped VMs remain.
    KeepVms,
    /// The deletion is refused while any workload exists.
    BlockIfWorkloadsExist,
    /// The deletion removes all workloads.
    RemoveWorkloads,
}

/// A kind of workload.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Workload {
    /// VirtualMachineInstances.
    Vmi,
    /// VirtualMachines.
    Vm,
    /// VirtualMachineInstanceReplicaSets.
    ReplicaSet,
}

/// All kinds, in the order in which a refusal names them.
const ALL: [Workload; 3] = [Workload::Vmi, Workload::Vm, Workload::ReplicaSet];

impl UninstallStrategy {
    /// Returns the strategy of a spec. An unknown one blocks, as in the reference.
    #[must_use]
    pub fn of(spec: &KubeVirtSpec) -> Self {
        match spec.uninstall_strategy.as_deref() {
            None | Some("") => Self::KeepVms,
            Some("RemoveWorkloads") => Self::RemoveWorkloads,
            Some(_) => Self::BlockIfWorkloadsExist,
        }
    }

    /// Returns the workloads that are handled before the KubeVirt object is gone: they block its deletion, or are removed.
    #[must_use]
    pub fn concerned(self) -> &'static [Workload] {
        match self {
            Self::KeepVms => &ALL[..1],
            Self::BlockIfWorkloadsExist | Self::RemoveWorkloads => &ALL,
        }
    }
}

impl Workload {
    /// Returns the plural of the kind, as in paths.
    #[must_use]
    pub fn plural(self) -> &'static str {
        match self {
            Self::Vmi => "virtualmachineinstances",
            Self::Vm => "virtualmachines",
            Self::ReplicaSet => "virtualmachineinstancereplicasets",
        }
    }

    /// Returns the message of a refusal because such objects exist. Clients match it.
    #[must_use]
    pub fn refusal(self) -> String {
        let name = match self {
            Self::Vmi => "Virtual Machine Instances",
            Self::Vm => "Virtual Machines",
            Self::ReplicaSet => "Virtual Machine Instance Replica Sets",
        };
        format!(
            "Rejecting the uninstall request, since there are still {name} present. Either delete all KubeVirt related \
             workloads or change the uninstall strategy before uninstalling KubeVirt."
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn strategy_selects_the_workloads() {
        for (text, strategy, concerned) in [
            (None, UninstallStrategy::KeepVms, 1),
            (Some(""), UninstallStrategy::KeepVms, 1),
            (Some("RemoveWorkloads"), UninstallStrategy::RemoveWorkloads, 3),
            (Some("BlockUninstallIfWorkloadsExist"), UninstallStrategy::BlockIfWorkloadsExist, 3),
            (Some("Unknown"), UninstallStrategy::BlockIfWorkloadsExist, 3),
        ] {
            let spec = KubeVirtSpec { uninstall_strategy: text.map(str::to_owned), ..KubeVirtSpec::default() };
            assert_eq!(UninstallStrategy::of(&spec), strategy, "{text:?}");
            assert_eq!(strategy.concerned().len(), concerned, "{text:?}");
            assert_eq!(strategy.concerned().first(), Some(&Workload::Vmi), "{text:?}");
        }
    }
}
