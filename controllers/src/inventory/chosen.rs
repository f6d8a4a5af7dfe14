//! CPU and memory of VMs with an instance type or a preference.

use std::{borrow::Cow, cell::RefCell, collections::HashMap, rc::Rc};

use api::{
    VirtualMachine, VirtualMachineInstanceSpec,
    instancetype::{
        VirtualMachineInstancetypeSpec, VirtualMachinePreferenceSpec, apply, expand,
        matcher::{Role, Source, source},
        revision::{self, ContentError},
    },
    vmi::domain::DomainSpec,
};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::ResourceExt;
use serde_json::Value;

use crate::{
    cache::Key,
    resources::{Caches, vms::instancetype_key},
};

/// Specs by the JSON of their objects. Each VM keeps a copy of its instance type, and these copies are the same text: it is
/// parsed once, not once a VM.
struct Specs<T> {
    parse: fn(&Value) -> Result<T, ContentError>,
    known: RefCell<HashMap<Box<str>, Option<Rc<T>>>>,
}

impl<T> Specs<T> {
    fn new(parse: fn(&Value) -> Result<T, ContentError>) -> Self {
        Self { parse, known: RefCell::default() }
    }

    fn get(&self, json: &str) -> Option<Rc<T>> {
        if let Some(known) = self.known.borrow().get(json) {
            return known.clone();
        }
        let object = serde_json::from_str(json).ok();
        let spec = object.and_then(|object| (self.parse)(&object).ok()).map(Rc::new);
        self.known.borrow_mut().insert(json.into(), spec.clone());
        spec
    }
}

/// The instance types and preferences of one scrape.
pub(super) struct Chosen<'a> {
    caches: &'a Caches,
    instancetypes: Specs<VirtualMachineInstancetypeSpec>,
    preferences: Specs<VirtualMachinePreferenceSpec>,
}

impl<'a> Chosen<'a> {
    /// Looks objects up in `caches`.
    pub(super) fn new(caches: &'a Caches) -> Self {
        Self {
            caches,
            instancetypes: Specs::new(revision::instancetype),
            preferences: Specs::new(revision::preference),
        }
    }

    /// Returns CPU, memory and resources of the template of a VM, with its instance type and preference applied. Those that do
    /// not exist or cannot be applied are left out, as in the reference.
    pub(super) fn domain<'v>(&self, vm: &'v VirtualMachine) -> Option<Cow<'v, DomainSpec>> {
        let domain = &vm.spec.template.spec.as_ref()?.domain;
        let class = self.spec(vm, Role::Instancetype, &self.instancetypes);
        let preference = self.spec(vm, Role::Preference, &self.preferences);
        if class.is_none() && preference.is_none() {
            return Some(Cow::Borrowed(domain));
        }
        // Nothing else of the spec has an influence on the metrics.
        let mut spec = VirtualMachineInstanceSpec {
            domain: DomainSpec {
                cpu: domain.cpu.clone(),
                memory: domain.memory.clone(),
                resources: domain.resources.clone(),
                ..DomainSpec::default()
            },
            ..VirtualMachineInstanceSpec::default()
        };
        let mut metadata = ObjectMeta::default();
        match apply(expand::TEMPLATE, class.as_deref(), preference.as_deref(), &mut spec, &mut metadata) {
            Ok(()) => Some(Cow::Owned(spec.domain)),
            Err(_) => Some(Cow::Borrowed(domain)),
        }
    }

    fn spec<T>(&self, vm: &VirtualMachine, role: Role, specs: &Specs<T>) -> Option<Rc<T>> {
        let namespace = vm.namespace().unwrap_or_default();
        match source(vm, role)?.ok()? {
            Source::Revision(name) => specs.get(&self.caches.revisions.get(&Key::new(namespace, name))?.object),
            Source::Object(kind, name) => {
                let key = instancetype_key(kind, &namespace, name);
                specs.get(&self.caches.instancetypes(kind).get(&key)?.object)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::resources::instancetype_revisions::InstancetypeRevision;

    fn vm(spec: Value) -> VirtualMachine {
        serde_json::from_value(json!({
            "apiVersion": "kubevirt.io/v1", "kind": "VirtualMachine", "metadata": {"name": "v", "namespace": "ns"},
            "spec": spec,
        }))
        .unwrap()
    }

    #[test]
    fn instance_types_give_cpu_and_memory_unless_they_are_missing_or_conflict() {
        let caches = Caches::default();
        for name in ["one", "two"] {
            let object = json!({
                "apiVersion": "instancetype.kubevirt.io/v1beta1", "kind": "VirtualMachineInstancetype",
                "spec": {"cpu": {"guest": 4}, "memory": {"guest": "2Gi"}},
            });
            let metadata = ObjectMeta {
                name: Some(name.into()),
                namespace: Some("ns".into()),
                resource_version: Some("1".into()),
                ..ObjectMeta::default()
            };
            caches.revisions.observe(InstancetypeRevision {
                metadata,
                object: object.to_string().into(),
                former: None,
            });
        }
        let chosen = Chosen::new(&caches);
        let named = |revision: &str, domain: Value| {
            vm(
                json!({"instancetype": {"name": "x", "revisionName": revision}, "template": {"spec": {"domain": domain}}}),
            )
        };
        for (revision, domain, sockets, guest) in [
            ("one", json!({"devices": {}}), Some(4), Some("2Gi")),
            ("two", json!({"devices": {}}), Some(4), Some("2Gi")),
            ("missing", json!({"devices": {}}), None, None),
            ("one", json!({"devices": {}, "memory": {"guest": "1Gi"}}), None, Some("1Gi")),
        ] {
            let vm = named(revision, domain);
            let domain = chosen.domain(&vm).unwrap();
            assert_eq!(domain.cpu.as_ref().and_then(|cpu| cpu.sockets), sockets, "{revision}");
            let memory = domain.memory.as_ref().and_then(|memory| memory.guest.as_ref());
            assert_eq!(memory.map(|guest| guest.0.as_str()), guest, "{revision}");
        }
        assert_eq!(chosen.instancetypes.known.borrow().len(), 1, "copies of one object are parsed once");
        let plain = vm(json!({"template": {"spec": {"domain": {"devices": {}, "cpu": {"cores": 3}}}}}));
        assert!(matches!(chosen.domain(&plain), Some(Cow::Borrowed(domain)) if domain.cpu.is_some()));
    }
}
