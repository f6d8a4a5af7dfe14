//! Deletes PodDisruptionBudgets of VMIs, as old releases of KubeVirt made them. They would block drains, about which the webhook
//! for evictions decides.

use std::sync::Arc;

use api::constants::event;
use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;

use crate::{
    resources::{Caches, Resource, budgets::CachedBudget, needs},
    runtime::{Attempt, Controller, Decision, Effect, Failures, Kind, Needs, Wake},
};

/// The controller of these budgets.
pub(crate) struct DisruptionBudgets;

/// Everything that a decision about a budget depends on.
pub(crate) struct Observed {
    budget: Arc<CachedBudget>,
    failures: Failures,
    now: Timestamp,
}

impl Controller for DisruptionBudgets {
    const NAME: &'static str = "disruption-budget";
    const NEEDS: Needs = needs(&[Resource::Budgets]);
    type Caches = Caches;
    type Observed = Observed;

    fn watch(&self, caches: &Arc<Caches>, wake: &Wake) {
        wake.objects_of(&caches.budgets);
    }

    fn observe(&self, caches: &Caches, attempt: &Attempt<'_>) -> Option<Observed> {
        let budget = caches.budgets.get(attempt.key)?;
        Some(Observed { budget, failures: attempt.failures.clone(), now: attempt.now })
    }

    fn subject<'a>(&self, observed: &'a Observed) -> Option<&'a ObjectMeta> {
        Some(&observed.budget.metadata)
    }

    fn decide(&self, observed: &Observed) -> Result<Decision, serde_json::Error> {
        Ok(decide(observed))
    }
}

fn decide(observed: &Observed) -> Decision {
    let mut decision = Decision::settled();
    let budget = &observed.budget.metadata;
    let vmi = observed.budget.vmi().filter(|_| budget.deletion_timestamp.is_none());
    let Some(vmi) = vmi else { return decision };
    if decision.must_wait(&observed.failures, event::FAILED_DELETE, observed.now) {
        return decision;
    }
    let name = budget.name.as_deref().unwrap_or_default();
    let vmi = ObjectMeta {
        name: Some(vmi.name.clone()),
        namespace: budget.namespace.clone(),
        uid: Some(vmi.uid.clone()),
        ..ObjectMeta::default()
    };
    decision.push(Effect::delete(Kind::DisruptionBudget, budget).reported(
        Kind::Instance.reference(&vmi),
        (event::SUCCESSFUL_DELETE, format!("Deleted PodDisruptionBudget {name}")),
        (event::FAILED_DELETE, format!("Error deleting the PodDisruptionBudget {name}: {{error}}")),
    ));
    decision
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use serde_json::json;

    use super::*;
    use crate::runtime::Failure;

    fn now() -> Timestamp {
        "2030-01-01T00:00:00Z".parse().unwrap()
    }

    fn decision(deleted: Option<&str>, failure: Option<Failure>) -> Decision {
        let vmi = json!({
            "apiVersion": "kubevirt.io/v1", "kind": "VirtualMachineInstance", "name": "a", "uid": "u", "controller": true,
        });
        let metadata = json!({
            "namespace": "n", "name": "b", "uid": "1", "ownerReferences": [vmi], "deletionTimestamp": deleted,
        });
        let budget = Arc::new(CachedBudget { metadata: serde_json::from_value(metadata).unwrap() });
        decide(&Observed { budget, failures: failure.into(), now: now() })
    }

    #[test]
    fn budget_of_a_vmi_is_deleted_with_an_event_of_the_vmi() {
        let effects = decision(None, None).effects;
        let [Effect::Delete { kind: Kind::DisruptionBudget, namespace, name, uid, options, .. }] = &effects[..] else {
            panic!("{effects:?}");
        };
        let named = (namespace.as_deref(), name.as_str(), uid.as_deref());
        assert_eq!(named, (Some("n"), "b", Some("1")));
        let event = options.success.as_ref().unwrap();
        assert_eq!((event.reason, event.message.as_str()), ("SuccessfulDelete", "Deleted PodDisruptionBudget b"));
        let regarding = (event.regarding.kind.as_deref(), event.regarding.name.as_deref());
        assert_eq!(regarding, (Some("VirtualMachineInstance"), Some("a")));
        assert_eq!(event.regarding.uid.as_deref(), Some("u"));
        assert_eq!(options.failure.as_ref().unwrap().reason, "FailedDelete");
    }

    #[test]
    fn deletion_is_not_repeated_at_once() {
        assert_eq!(decision(Some("2030-01-01T00:00:00Z"), None), Decision::settled());
        let refused = Failure {
            reason: event::FAILED_DELETE,
            message: "no".to_owned(),
            retry_at: now() + Duration::from_secs(5),
            attempts: 1,
        };
        let waits = decision(None, Some(refused));
        assert_eq!((waits.effects.len(), waits.wake_after), (0, Some(Duration::from_secs(5))));
    }
}
