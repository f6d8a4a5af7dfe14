//! Tests of decisions about VMs, by behaviour. Here are the objects that they share.

mod changes;
mod data_volumes;
mod former_disks;
mod hibernation;
mod instancetypes;
mod lease;
mod lifecycle;
mod restores;
mod writes;

use k8s_openapi::api::apps::v1::ControllerRevision;
use serde_json::{Value, json};

use super::*;
use crate::runtime::Failure;

static NO_CLAIMS: BTreeMap<String, Arc<CachedClaim>> = BTreeMap::new();

fn now() -> Timestamp {
    "2030-01-01T00:01:00Z".parse().unwrap()
}

fn vm(spec: &Value, status: &Value) -> VirtualMachine {
    let mut vm = json!({
        "apiVersion": "kubevirt.io/v1", "kind": "VirtualMachine",
        "metadata": {
            "name": "v", "namespace": "d", "uid": "vm-uid", "resourceVersion": "3", "generation": 2,
            "finalizers": ["kubevirt.io/virtualMachineControllerFinalize"],
        },
        "spec": {"template": {
            "metadata": {"labels": {"app": "x"}},
            "spec": {"domain": {"devices": {}}, "volumes": [{"name": "cd", "containerDisk": {"image": "i"}}]},
        }},
    });
    json_patch::merge(&mut vm["spec"], spec);
    if !status.is_null() {
        vm["status"] = status.clone();
    }
    serde_json::from_value(vm).unwrap()
}

fn with_strategy(strategy: &str, status: &Value) -> VirtualMachine {
    vm(&json!({"runStrategy": strategy}), status)
}

fn started(vm: &VirtualMachine, paused: bool) -> VirtualMachineInstance {
    start::instance(vm, &Chosen::default(), &ClusterConfig::default(), paused, None).unwrap()
}

fn instance(vm: &VirtualMachine, phase: &str) -> VirtualMachineInstance {
    let mut instance = started(vm, false);
    instance.metadata.uid = Some("vmi-uid".to_owned());
    instance.metadata.resource_version = Some("9".to_owned());
    let record = revision::name(vm);
    instance.status = serde_json::from_value(json!({"phase": phase, "virtualMachineRevisionName": record})).unwrap();
    instance
}

/// Returns the record of a VMI's start, without its template.
fn record_of(vmi: &VirtualMachineInstance) -> Arc<StartRevision> {
    let name = vmi.status.as_ref().and_then(|status| status.virtual_machine_revision_name.clone());
    let metadata = serde_json::from_value(json!({"name": name, "namespace": "d"})).unwrap();
    Arc::new(StartRevision { metadata, template: None, data_volumes: Vec::new() })
}

fn observed(
    vm: &VirtualMachine,
    instance: Option<&VirtualMachineInstance>,
    failure: Option<&Failure>,
    config: &ClusterConfig,
) -> Observed {
    Observed {
        vm: Arc::new(vm.clone()),
        instance: instance.cloned().map(Arc::new),
        claims: NO_CLAIMS.clone(),
        data_volumes: BTreeMap::new(),
        serves_data_volumes: true,
        sources: BTreeMap::new(),
        instancetype: Lookup::Unnamed,
        preference: Lookup::Unnamed,
        starts: instance.into_iter().map(record_of).collect(),
        named_start: None,
        snapshot_classes: BTreeMap::new(),
        state_claim: None,
        hibernation_claim: None,
        is_migrated: false,
        restores: Vec::new(),
        destinations: crate::data_volumes::DataVolumes::default(),
        config: Arc::new(config.clone()),
        failures: failure.cloned().into(),
        now: now(),
    }
}

fn decided_with(vm: &VirtualMachine, instance: Option<&VirtualMachineInstance>, failure: Option<&Failure>) -> Decision {
    decide(&observed(vm, instance, failure, &ClusterConfig::default())).unwrap()
}

fn decided(vm: &VirtualMachine, instance: Option<&VirtualMachineInstance>) -> Decision {
    decided_with(vm, instance, None)
}

fn creates(decision: &Decision) -> bool {
    decision.effects.iter().any(|effect| matches!(effect, Effect::Create { kind: Kind::Instance, .. }))
}

fn deletes(decision: &Decision) -> bool {
    decision.effects.iter().any(|effect| matches!(effect, Effect::Delete { kind: Kind::Instance, .. }))
}

fn status_patch(decision: &Decision) -> Value {
    let patch = decision.effects.iter().find_map(|effect| match effect {
        Effect::Patch { subresource: Some("status"), patch, .. } => Some(patch["status"].clone()),
        _ => None,
    });
    patch.unwrap_or(Value::Null)
}

/// Returns the records of starts that a decision creates.
fn records(decision: &Decision) -> Vec<Arc<StartRevision>> {
    let objects = decision.effects.iter().filter_map(|effect| match effect {
        Effect::Create { kind: Kind::ControllerRevision, object, .. } => Some(object),
        _ => None,
    });
    let records = objects.filter(|object| !object["metadata"]["labels"]["ferrovirt.io/start-revision"].is_null());
    let record = |object: &Value| serde_json::from_value::<ControllerRevision>(object.clone()).unwrap();
    records.map(|object| Arc::new(StartRevision::from(record(object)))).collect()
}
