//! PodDisruptionBudgets of VMIs. Others are not kept.

use api::owner;
use k8s_openapi::{
    api::policy::v1::PodDisruptionBudget,
    apimachinery::pkg::apis::meta::v1::{ObjectMeta, OwnerReference},
};

use super::{declaration::Declaration, metadata::slim};
use crate::{cache::Watch, runtime::Kind};

/// A budget whose controller is a VMI.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct CachedBudget {
    /// Metadata, reduced.
    pub metadata: ObjectMeta,
}

impl CachedBudget {
    /// Returns its VMI.
    #[must_use]
    pub(crate) fn vmi(&self) -> Option<&OwnerReference> {
        vmi(&self.metadata)
    }
}

/// Returns the VMI that controls a budget.
fn vmi(metadata: &ObjectMeta) -> Option<&OwnerReference> {
    // Old releases, which made budgets, used several versions.
    owner::controller(metadata)
        .filter(|owner| owner.kind == "VirtualMachineInstance" && owner.api_version.starts_with("kubevirt.io/"))
}

fn is_of_vmi(metadata: &ObjectMeta) -> bool {
    vmi(metadata).is_some()
}

unindexed!(CachedBudget);

impl Declaration for CachedBudget {
    type Wire = PodDisruptionBudget;
    type Kept = Self;
    const WRITTEN: Option<Kind> = Some(Kind::DisruptionBudget);

    fn keep(object: PodDisruptionBudget) -> Option<Self> {
        is_of_vmi(&object.metadata).then(|| object.into())
    }

    fn adjust(watch: Watch<PodDisruptionBudget, Self>, _caches: &super::Caches) -> Watch<PodDisruptionBudget, Self> {
        watch.selecting(is_of_vmi)
    }
}

impl From<PodDisruptionBudget> for CachedBudget {
    fn from(budget: PodDisruptionBudget) -> Self {
        Self { metadata: slim(budget.metadata) }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn budgets_of_others_are_not_kept() {
        for (kind, api_version, controller, expected) in [
            ("VirtualMachineInstance", "kubevirt.io/v1", true, true),
            ("VirtualMachineInstance", "kubevirt.io/v1alpha3", true, true),
            ("VirtualMachineInstance", "kubevirt.io/v1", false, false),
            ("VirtualMachineInstance", "example.com/v1", true, false),
            ("VirtualMachine", "kubevirt.io/v1", true, false),
        ] {
            let owner =
                json!({"apiVersion": api_version, "kind": kind, "name": "a", "uid": "u", "controller": controller});
            let budget = json!({"metadata": {"namespace": "n", "name": "b", "uid": "b", "ownerReferences": [owner]}});
            let kept = CachedBudget::keep(serde_json::from_value(budget).unwrap());
            let vmi = kept.as_ref().and_then(CachedBudget::vmi).map(|vmi| vmi.name.as_str());
            assert_eq!(vmi, expected.then_some("a"), "{kind} {api_version} {controller}");
        }
        assert_eq!(CachedBudget::keep(PodDisruptionBudget::default()), None);
    }
}
