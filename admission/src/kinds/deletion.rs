//! Deletions of VMs and VMIs with a grace period of their own (`kubectl delete --grace-period`).
//!
//! The API server keeps `deletionGracePeriodSeconds: 0` for each custom resource with a finalizer, whatever the client requests, and
//! only the first deletion changes the object. So the grace period is known in the request alone. It becomes that of the VMI, as
//! with `virtctl stop --grace-period`. A longer one than before has no effect.

use api::{VirtualMachine, VirtualMachineInstance, constants, owner};
use json_patch::{Patch, jsonptr::PointerBuf};
use serde::Deserialize;
use serde_json::{Value, json};

use crate::context::{Context, Decision, Effect, Interrupt, LookupResult, ObjectQuery, decode, patch};

const VMS: &str = "virtualmachines";
const VMIS: &str = "virtualmachineinstances";

/// The options of a deletion that are used.
#[derive(Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
struct DeleteOptions {
    grace_period_seconds: Option<i64>,
    propagation_policy: Option<String>,
    orphan_dependents: Option<bool>,
}

impl DeleteOptions {
    /// Returns true if the VMI outlives its VM.
    fn keeps_dependents(&self) -> bool {
        self.orphan_dependents == Some(true) || self.propagation_policy.as_deref() == Some("Orphan")
    }
}

/// Serves `/deletion-validate`: every deletion is allowed.
pub(crate) fn validate(context: &Context<'_>) -> Result<Decision, Interrupt> {
    let request = context.request;
    let options = DeleteOptions::deserialize(&request.options).unwrap_or_default();
    let (Some(seconds), Some(namespace)) = (options.grace_period_seconds, request.namespace.as_deref()) else {
        return Ok(context.allowed());
    };
    let vmi = match (request.resource.group.as_str(), request.resource.resource.as_str()) {
        (constants::GROUP, VMIS) => Some(&request.old_object),
        (constants::GROUP, VMS) if !options.keeps_dependents() => vmi_of(context, namespace)?,
        _ => None,
    };
    let vmi = vmi.and_then(|vmi| decode::stored::<VirtualMachineInstance>(vmi).ok());
    let mut decision = context.allowed();
    decision.effects.extend(vmi.and_then(|vmi| shorten(&vmi, namespace, seconds, request.dry_run == Some(true))));
    Ok(decision)
}

/// Returns the VMI of the deleted VM. A VMI that cannot be read must not block the deletion.
fn vmi_of<'a>(context: &Context<'a>, namespace: &str) -> Result<Option<&'a Value>, Interrupt> {
    let Ok(vm) = decode::stored::<VirtualMachine>(&context.request.old_object) else { return Ok(None) };
    let name = vm.metadata.name.as_deref().unwrap_or_default();
    let query = ObjectQuery::get(constants::GROUP, constants::VERSION, VMIS, Some(namespace), name);
    let LookupResult::Object(Some(object)) = context.lookups.result(&query)? else { return Ok(None) };
    let is_its = |vmi: VirtualMachineInstance| owner::is_controlled_by(&vmi.metadata, &vm);
    Ok(decode::stored(object).is_ok_and(is_its).then_some(object))
}

/// Returns the write that gives a VMI a shorter grace period.
fn shorten(vmi: &VirtualMachineInstance, namespace: &str, seconds: i64, dry_run: bool) -> Option<Effect> {
    // The API server replaces a negative number by one.
    let seconds = if seconds < 0 { 1 } else { seconds };
    let current = vmi.spec.termination_grace_period_seconds;
    if vmi.is_final() || seconds >= vmi.grace_seconds() {
        return None;
    }
    let path = || PointerBuf::from_tokens(["spec", "terminationGracePeriodSeconds"]);
    let uid = PointerBuf::from_tokens(["metadata", "uid"]);
    // Another VMI can have the name now, and another deletion can have shortened the time.
    let tests = [patch::test(uid, json!(vmi.metadata.uid)), patch::test(path(), json!(current))];
    Some(Effect {
        group: constants::GROUP,
        version: constants::VERSION,
        plural: VMIS,
        namespace: namespace.to_owned(),
        name: vmi.metadata.name.clone()?,
        patch: Patch(tests.into_iter().chain([patch::add(path(), json!(seconds))]).collect()),
        dry_run,
        on_failure: None,
    })
}

#[cfg(test)]
mod tests {
    use api::config::ClusterConfig;

    use super::*;
    use crate::{
        context::Lookups,
        registry::{Evaluation, Review},
    };

    fn vmi(grace: Option<i64>, phase: &str, owner: &str) -> Value {
        json!({
            "apiVersion": "kubevirt.io/v1", "kind": "VirtualMachineInstance",
            "metadata": {
                "name": "m", "namespace": "ns", "uid": "u",
                "ownerReferences": [
                    {"apiVersion": "kubevirt.io/v1", "kind": "VirtualMachine", "name": "m", "uid": owner, "controller": true},
                ],
            },
            "spec": {"terminationGracePeriodSeconds": grace, "domain": {"devices": {}}},
            "status": {"phase": phase},
        })
    }

    fn vm() -> Value {
        json!({
            "apiVersion": "kubevirt.io/v1", "kind": "VirtualMachine", "metadata": {"name": "m", "namespace": "ns", "uid": "v"},
            "spec": {"runStrategy": "Always", "template": {"spec": {"domain": {"devices": {}}}}},
        })
    }

    /// Returns the effects of the deletion of an object, beside the VMI that is read.
    fn deleted(plural: &str, object: &Value, options: &Value, dry_run: bool, read: LookupResult) -> Vec<Effect> {
        let body = json!({"request": {
            "uid": "r", "operation": "DELETE", "namespace": "ns", "name": "m",
            "resource": {"group": "kubevirt.io", "version": "v1", "resource": plural},
            "oldObject": object, "options": options, "dryRun": dry_run,
        }});
        let review = Review::parse("/deletion-validate", body.to_string().as_bytes()).unwrap();
        let mut lookups = Lookups::new();
        lookups.insert(ObjectQuery::get("kubevirt.io", "v1", VMIS, Some("ns"), "m"), read);
        let Evaluation { review, effects } = review.evaluate(&ClusterConfig::default(), "kubevirt", &lookups).unwrap();
        assert!(review.response.allowed, "{review:?}");
        effects
    }

    /// Returns the grace periods before and after the deletion of a VMI.
    fn shortened(effects: &[Effect]) -> Option<(Value, Value)> {
        let [effect] = effects else {
            assert!(effects.is_empty());
            return None;
        };
        assert_eq!((effect.plural, effect.namespace.as_str(), effect.name.as_str()), (VMIS, "ns", "m"));
        assert_eq!(effect.on_failure, None);
        let patch = json!(effect.patch);
        let path = "/spec/terminationGracePeriodSeconds";
        let (before, after) = (patch[1]["value"].clone(), patch[2]["value"].clone());
        assert_eq!(
            patch,
            json!([
                {"op": "test", "path": "/metadata/uid", "value": "u"},
                {"op": "test", "path": path, "value": before},
                {"op": "add", "path": path, "value": after},
            ])
        );
        Some((before, after))
    }

    #[test]
    fn shorter_grace_period_of_a_deletion_becomes_that_of_the_vmi() {
        let none = || LookupResult::Object(None);
        for (current, phase, options, expected) in [
            (Some(900), "Running", json!({"gracePeriodSeconds": 0}), Some((json!(900), json!(0)))),
            (Some(900), "Pending", json!({"gracePeriodSeconds": 1}), Some((json!(900), json!(1)))),
            (Some(900), "Running", json!({"gracePeriodSeconds": -1}), Some((json!(900), json!(1)))),
            (None, "Running", json!({"gracePeriodSeconds": 29}), Some((Value::Null, json!(29)))),
            // Not shorter.
            (None, "Running", json!({"gracePeriodSeconds": 30}), None),
            (Some(0), "Running", json!({"gracePeriodSeconds": 0}), None),
            (Some(5), "Running", json!({"gracePeriodSeconds": 900}), None),
            // Ended.
            (Some(900), "Failed", json!({"gracePeriodSeconds": 0}), None),
            // A plain deletion.
            (Some(900), "Running", json!({}), None),
            (Some(900), "Running", json!({"propagationPolicy": "Background"}), None),
            (Some(900), "Running", Value::Null, None),
            (Some(900), "Running", json!({"gracePeriodSeconds": "soon"}), None),
        ] {
            let effects = deleted(VMIS, &vmi(current, phase, "v"), &options, false, none());
            assert_eq!(shortened(&effects), expected, "{current:?} {phase} {options}");
            let read = LookupResult::Object(Some(vmi(current, phase, "v")));
            let effects = deleted(VMS, &vm(), &options, false, read);
            assert_eq!(shortened(&effects), expected, "VM: {current:?} {phase} {options}");
        }
    }

    #[test]
    fn deleted_vm_shortens_only_its_own_vmi() {
        let options = json!({"gracePeriodSeconds": 0});
        let found = |owner: &str| LookupResult::Object(Some(vmi(Some(900), "Running", owner)));
        let orphan = json!({"gracePeriodSeconds": 0, "propagationPolicy": "Orphan"});
        let orphan_before = json!({"gracePeriodSeconds": 0, "orphanDependents": true});
        for (options, read, has_effect) in [
            (&options, found("v"), true),
            (&options, found("w"), false),
            (&options, LookupResult::Object(None), false),
            (&options, LookupResult::Failed { code: 500, message: "no answer".into() }, false),
            (&orphan, found("v"), false),
            (&orphan_before, found("v"), false),
        ] {
            assert_eq!(deleted(VMS, &vm(), options, false, read).len(), usize::from(has_effect), "{options}");
        }
        assert!(deleted("virtualmachineinstancemigrations", &vm(), &options, false, found("v")).is_empty());
    }

    #[test]
    fn dry_run_stores_nothing_and_a_failed_write_is_a_warning() {
        let options = json!({"gracePeriodSeconds": 0});
        let old = vmi(Some(900), "Running", "v");
        let effects = deleted(VMIS, &old, &options, true, LookupResult::Object(None));
        assert!(effects[0].dry_run);
        let body = json!({"request": {
            "uid": "r", "operation": "DELETE", "namespace": "ns",
            "resource": {"group": "kubevirt.io", "version": "v1", "resource": VMIS}, "oldObject": old, "options": options,
        }});
        let review = Review::parse("/deletion-validate", body.to_string().as_bytes()).unwrap();
        let evaluated = review.evaluate(&ClusterConfig::default(), "kubevirt", &Lookups::new()).unwrap();
        let response = review.effect_failed(&evaluated.effects[0], "not found", evaluated.review).response;
        assert!(response.allowed);
        assert_eq!(response.warnings, ["cannot patch virtualmachineinstances.kubevirt.io \"ns/m\": not found"]);
    }
}
