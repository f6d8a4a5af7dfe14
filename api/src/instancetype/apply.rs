//! Applies an instance type and a preference to a VMI spec.
//!
//! A field that both the VMI and its instance type set is a conflict. After a conflict the spec may be partially changed, so
//! callers work on a copy. A preference only sets fields that are unset.

use std::fmt;

use k8s_openapi::apimachinery::pkg::{api::resource::Quantity, apis::meta::v1::ObjectMeta};

use super::{
    prefer,
    preference::VirtualMachinePreferenceSpec,
    spec::{CpuInstancetype, MemoryInstancetype, VirtualMachineInstancetypeSpec},
    topology,
};
use crate::{
    quantity,
    vmi::{cpu::Cpu, domain::DomainSpec, spec::VirtualMachineInstanceSpec},
};

/// Fields that both a VMI and its instance type set.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub struct Conflicts(Vec<String>);

impl Conflicts {
    /// Paths of the fields.
    pub fn paths(&self) -> &[String] {
        &self.0
    }

    fn when(&mut self, conflicts: bool, root: &str, path: &str) {
        if conflicts {
            self.0.push(format!("{root}.{path}"));
        }
    }
}

impl fmt::Display for Conflicts {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(&self.0.join(", "))
    }
}

/// Applies an instance type and a preference to a VMI's spec and metadata. `root` is the path of the spec, for the paths of
/// conflicts.
pub fn apply(
    root: &str,
    instancetype: Option<&VirtualMachineInstancetypeSpec>,
    preference: Option<&VirtualMachinePreferenceSpec>,
    spec: &mut VirtualMachineInstanceSpec,
    metadata: &mut ObjectMeta,
) -> Result<(), Conflicts> {
    if let Some(instancetype) = instancetype {
        let conflicts = conflicts(root, instancetype, spec, metadata);
        if !conflicts.0.is_empty() {
            return Err(conflicts);
        }
        set(instancetype, preference, spec, metadata);
    }
    if let Some(preference) = preference {
        prefer::apply(preference, spec, metadata);
    }
    Ok(())
}

fn conflicts(
    root: &str,
    instancetype: &VirtualMachineInstancetypeSpec,
    spec: &VirtualMachineInstanceSpec,
    metadata: &ObjectMeta,
) -> Conflicts {
    let mut conflicts = Conflicts::default();
    let domain = &spec.domain;
    let both_texts = |own: &Option<String>, class: &Option<String>| is_set(own.as_deref()) && is_set(class.as_deref());
    conflicts.when(!spec.node_selector.is_empty() && !instancetype.node_selector.is_empty(), root, "nodeSelector");
    conflicts.when(both_texts(&spec.scheduler_name, &instancetype.scheduler_name), root, "schedulerName");
    cpu_conflicts(root, &instancetype.cpu, domain, &mut conflicts);
    if let Some(path) = memory_conflict(&instancetype.memory, domain) {
        conflicts.when(true, root, path);
    }
    let count = |threads: &Option<crate::vmi::domain::DiskIoThreads>| {
        threads.as_ref().is_some_and(|threads| threads.supplemental_pool_thread_count.is_some())
    };
    conflicts.when(
        count(&domain.io_threads) && count(&instancetype.io_threads),
        root,
        "domain.ioThreads.supplementalPoolThreadCount",
    );
    conflicts.when(
        both_texts(&domain.io_threads_policy, &instancetype.io_threads_policy),
        root,
        "domain.ioThreadsPolicy",
    );
    conflicts.when(
        domain.launch_security.is_some() && instancetype.launch_security.is_some(),
        root,
        "domain.launchSecurity",
    );
    conflicts.when(!domain.devices.gpus.is_empty() && !instancetype.gpus.is_empty(), root, "domain.devices.gpus");
    conflicts.when(
        !domain.devices.host_devices.is_empty() && !instancetype.host_devices.is_empty(),
        root,
        "domain.devices.hostDevices",
    );
    let held = metadata.annotations.as_ref();
    for (key, value) in &instancetype.annotations {
        if held.and_then(|held| held.get(key)).is_some_and(|held| held != value) {
            conflicts.0.push(format!("annotations.{key}"));
        }
    }
    conflicts
}

fn cpu_conflicts(root: &str, class: &CpuInstancetype, domain: &DomainSpec, conflicts: &mut Conflicts) {
    let resources = &domain.resources;
    conflicts.when(resources.requests.contains_key("cpu"), root, "domain.resources.requests.cpu");
    conflicts.when(resources.limits.contains_key("cpu"), root, "domain.resources.limits.cpu");
    let Some(cpu) = &domain.cpu else { return };
    let set = |part: Option<u32>| part.unwrap_or(0) != 0;
    conflicts.when(set(cpu.sockets), root, "domain.cpu.sockets");
    conflicts.when(set(cpu.cores), root, "domain.cpu.cores");
    conflicts.when(set(cpu.threads), root, "domain.cpu.threads");
    conflicts.when(is_set(cpu.model.as_deref()) && class.model.is_some(), root, "domain.cpu.model");
    conflicts.when(
        cpu.dedicated_cpu_placement && class.dedicated_cpu_placement.is_some(),
        root,
        "domain.cpu.dedicatedCPUPlacement",
    );
    conflicts.when(
        cpu.isolate_emulator_thread && class.isolate_emulator_thread.is_some(),
        root,
        "domain.cpu.isolateEmulatorThread",
    );
    conflicts.when(cpu.numa.is_some() && class.numa.is_some(), root, "domain.cpu.numa");
    conflicts.when(cpu.realtime.is_some() && class.realtime.is_some(), root, "domain.cpu.realtime");
}

/// Returns the first memory field that both set. Clients expect at most one.
fn memory_conflict(class: &MemoryInstancetype, domain: &DomainSpec) -> Option<&'static str> {
    let memory = domain.memory.as_ref();
    let resources = &domain.resources;
    [
        (memory.is_some_and(|memory| memory.guest.is_some()), "domain.memory.guest"),
        (
            memory.is_some_and(|memory| memory.hugepages.is_some()) && class.hugepages.is_some(),
            "domain.memory.hugepages",
        ),
        (
            memory.is_some_and(|memory| memory.max_guest.is_some()) && class.max_guest.is_some(),
            "domain.memory.maxGuest",
        ),
        (resources.requests.contains_key("memory"), "domain.resources.requests.memory"),
        (resources.limits.contains_key("memory"), "domain.resources.limits.memory"),
    ]
    .into_iter()
    .find_map(|(conflicts, path)| conflicts.then_some(path))
}

fn set(
    instancetype: &VirtualMachineInstancetypeSpec,
    preference: Option<&VirtualMachinePreferenceSpec>,
    spec: &mut VirtualMachineInstanceSpec,
    metadata: &mut ObjectMeta,
) {
    if !instancetype.node_selector.is_empty() {
        spec.node_selector.clone_from(&instancetype.node_selector);
    }
    if is_set(instancetype.scheduler_name.as_deref()) {
        spec.scheduler_name.clone_from(&instancetype.scheduler_name);
    }
    let domain = &mut spec.domain;
    set_cpu(&instancetype.cpu, preference, domain.cpu.get_or_insert_default());
    set_memory(&instancetype.memory, domain);
    if let Some(count) = instancetype.io_threads.as_ref().and_then(|threads| threads.supplemental_pool_thread_count) {
        domain.io_threads.get_or_insert_default().supplemental_pool_thread_count = Some(count);
    }
    if is_set(instancetype.io_threads_policy.as_deref()) {
        domain.io_threads_policy.clone_from(&instancetype.io_threads_policy);
    }
    if instancetype.launch_security.is_some() {
        domain.launch_security.clone_from(&instancetype.launch_security);
    }
    if !instancetype.gpus.is_empty() {
        domain.devices.gpus.clone_from(&instancetype.gpus);
    }
    if !instancetype.host_devices.is_empty() {
        domain.devices.host_devices.clone_from(&instancetype.host_devices);
    }
    if !instancetype.annotations.is_empty() {
        let annotations = metadata.annotations.get_or_insert_default();
        annotations.extend(instancetype.annotations.iter().map(|(key, value)| (key.clone(), value.clone())));
    }
}

fn set_cpu(class: &CpuInstancetype, preference: Option<&VirtualMachinePreferenceSpec>, cpu: &mut Cpu) {
    if class.model.is_some() {
        cpu.model.clone_from(&class.model);
    }
    if let Some(dedicated) = class.dedicated_cpu_placement {
        cpu.dedicated_cpu_placement = dedicated;
    }
    if let Some(isolated) = class.isolate_emulator_thread {
        cpu.isolate_emulator_thread = isolated;
    }
    if class.numa.is_some() {
        cpu.numa.clone_from(&class.numa);
    }
    if class.realtime.is_some() {
        cpu.realtime.clone_from(&class.realtime);
    }
    if class.max_sockets.is_some() {
        cpu.max_sockets = class.max_sockets;
    }
    let (sockets, cores, threads) = topology::parts(class.guest, topology::preferred(preference));
    cpu.sockets = Some(sockets);
    cpu.cores = Some(cores);
    cpu.threads = Some(threads);
}

fn set_memory(class: &MemoryInstancetype, domain: &mut DomainSpec) {
    let memory = domain.memory.get_or_insert_default();
    memory.guest = Some(class.guest.clone());
    if class.hugepages.is_some() {
        memory.hugepages.clone_from(&class.hugepages);
    }
    if class.max_guest.is_some() {
        memory.max_guest.clone_from(&class.max_guest);
    }
    if let Some(request) = overcommitted(&class.guest, class.overcommit_percent) {
        domain.resources.requests.insert("memory".to_owned(), request);
    }
}

/// Returns the memory request of the pod for overcommitted memory.
fn overcommitted(guest: &Quantity, percent: i32) -> Option<Quantity> {
    if percent <= 0 {
        return None;
    }
    let guest = quantity::units(guest).ok()?;
    // The same floating point precision as in the reference gives the same bytes.
    #[expect(clippy::cast_possible_truncation, clippy::cast_precision_loss, reason = "see above")]
    let request = (guest as f32 * (1.0 - percent as f32 / 100.0)) as i64;
    Some(quantity::bytes(request))
}

fn is_set(text: Option<&str>) -> bool {
    text.is_some_and(|text| !text.is_empty())
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn class(change: Value) -> VirtualMachineInstancetypeSpec {
        let mut spec = json!({"cpu": {"guest": 2}, "memory": {"guest": "1Gi"}});
        merge(&mut spec, change);
        serde_json::from_value(spec).unwrap()
    }

    fn merge(into: &mut Value, from: Value) {
        match (into, from) {
            (Value::Object(into), Value::Object(from)) => {
                for (key, value) in from {
                    merge(into.entry(key).or_insert(Value::Null), value);
                }
            }
            (into, from) => *into = from,
        }
    }

    fn vmi_spec(change: Value) -> VirtualMachineInstanceSpec {
        let mut spec = json!({"domain": {"devices": {}}});
        merge(&mut spec, change);
        serde_json::from_value(spec).unwrap()
    }

    #[test]
    fn fields_that_both_set_are_conflicts_at_their_paths() {
        let sev = json!({"sev": {}});
        let gpu = json!([{"name": "g", "deviceName": "d"}]);
        // instance type, VMI, path
        let table = [
            (json!({"nodeSelector": {"a": "b"}}), json!({"nodeSelector": {"c": "d"}}), "nodeSelector"),
            (json!({"schedulerName": "s"}), json!({"schedulerName": "t"}), "schedulerName"),
            (json!({}), json!({"domain": {"resources": {"requests": {"cpu": "1"}}}}), "domain.resources.requests.cpu"),
            (json!({}), json!({"domain": {"resources": {"limits": {"cpu": "1"}}}}), "domain.resources.limits.cpu"),
            (json!({}), json!({"domain": {"cpu": {"sockets": 1}}}), "domain.cpu.sockets"),
            (json!({}), json!({"domain": {"cpu": {"cores": 1}}}), "domain.cpu.cores"),
            (json!({}), json!({"domain": {"cpu": {"threads": 1}}}), "domain.cpu.threads"),
            (json!({"cpu": {"model": "m"}}), json!({"domain": {"cpu": {"model": "n"}}}), "domain.cpu.model"),
            (
                json!({"cpu": {"dedicatedCPUPlacement": false}}),
                json!({"domain": {"cpu": {"dedicatedCpuPlacement": true}}}),
                "domain.cpu.dedicatedCPUPlacement",
            ),
            (
                json!({"cpu": {"isolateEmulatorThread": true}}),
                json!({"domain": {"cpu": {"isolateEmulatorThread": true}}}),
                "domain.cpu.isolateEmulatorThread",
            ),
            (json!({"cpu": {"numa": {}}}), json!({"domain": {"cpu": {"numa": {}}}}), "domain.cpu.numa"),
            (json!({"cpu": {"realtime": {}}}), json!({"domain": {"cpu": {"realtime": {}}}}), "domain.cpu.realtime"),
            (json!({}), json!({"domain": {"memory": {"guest": "1Gi"}}}), "domain.memory.guest"),
            (
                json!({"memory": {"hugepages": {"pageSize": "2Mi"}}}),
                json!({"domain": {"memory": {"hugepages": {"pageSize": "2Mi"}}}}),
                "domain.memory.hugepages",
            ),
            (
                json!({"memory": {"maxGuest": "2Gi"}}),
                json!({"domain": {"memory": {"maxGuest": "2Gi"}}}),
                "domain.memory.maxGuest",
            ),
            (
                json!({}),
                json!({"domain": {"resources": {"requests": {"memory": "1Gi"}}}}),
                "domain.resources.requests.memory",
            ),
            (
                json!({}),
                json!({"domain": {"resources": {"limits": {"memory": "1Gi"}}}}),
                "domain.resources.limits.memory",
            ),
            (
                json!({"ioThreads": {"supplementalPoolThreadCount": 2}}),
                json!({"domain": {"ioThreads": {"supplementalPoolThreadCount": 2}}}),
                "domain.ioThreads.supplementalPoolThreadCount",
            ),
            (
                json!({"ioThreadsPolicy": "auto"}),
                json!({"domain": {"ioThreadsPolicy": "auto"}}),
                "domain.ioThreadsPolicy",
            ),
            (json!({"launchSecurity": sev}), json!({"domain": {"launchSecurity": sev}}), "domain.launchSecurity"),
            (json!({"gpus": gpu}), json!({"domain": {"devices": {"gpus": gpu}}}), "domain.devices.gpus"),
            (
                json!({"hostDevices": gpu}),
                json!({"domain": {"devices": {"hostDevices": gpu}}}),
                "domain.devices.hostDevices",
            ),
        ];
        for (of_class, of_vmi, path) in table {
            let mut spec = vmi_spec(of_vmi.clone());
            let before = spec.clone();
            let class = class(of_class.clone());
            let found = apply("spec.template.spec", Some(&class), None, &mut spec, &mut ObjectMeta::default());
            assert_eq!(found.unwrap_err().paths(), [format!("spec.template.spec.{path}")], "{of_class} {of_vmi}");
            assert_eq!(spec, before, "{path}");
        }
    }

    #[test]
    fn all_conflicts_are_reported_but_one_of_memory() {
        let mut spec = vmi_spec(json!({"domain": {
            "cpu": {"cores": 2, "sockets": 1},
            "memory": {"guest": "1Gi"},
            "resources": {"requests": {"memory": "1Gi"}},
        }}));
        let conflicts =
            apply("spec", Some(&class(json!({}))), None, &mut spec, &mut ObjectMeta::default()).unwrap_err();
        assert_eq!(conflicts.to_string(), "spec.domain.cpu.sockets, spec.domain.cpu.cores, spec.domain.memory.guest");
    }

    #[test]
    fn annotation_with_another_value_is_a_conflict() {
        let class = class(json!({"annotations": {"a": "1", "b": "2"}}));
        let mut meta = ObjectMeta {
            annotations: Some([("a".to_owned(), "1".to_owned()), ("c".to_owned(), "3".to_owned())].into()),
            ..ObjectMeta::default()
        };
        apply("spec", Some(&class), None, &mut vmi_spec(json!({})), &mut meta).unwrap();
        assert_eq!(serde_json::to_value(&meta.annotations).unwrap(), json!({"a": "1", "b": "2", "c": "3"}));
        meta.annotations.as_mut().unwrap().insert("b".to_owned(), "other".to_owned());
        let conflicts = apply("spec", Some(&class), None, &mut vmi_spec(json!({})), &mut meta).unwrap_err();
        assert_eq!(conflicts.paths(), ["annotations.b"]);
    }

    #[test]
    fn all_fields_of_an_instance_type_are_applied() {
        let class = class(json!({
            "cpu": {
                "guest": 4, "model": "m", "dedicatedCPUPlacement": true, "isolateEmulatorThread": true,
                "numa": {"guestMappingPassthrough": {}}, "realtime": {"mask": "0"}, "maxSockets": 8,
            },
            "memory": {"guest": "1Gi", "hugepages": {"pageSize": "2Mi"}, "maxGuest": "2Gi"},
            "ioThreads": {"supplementalPoolThreadCount": 3}, "ioThreadsPolicy": "supplementalPool",
            "launchSecurity": {"sev": {}}, "gpus": [{"name": "g"}], "hostDevices": [{"name": "h"}],
            "nodeSelector": {"a": "b"}, "schedulerName": "s",
        }));
        let mut spec = vmi_spec(json!({"domain": {"cpu": {"maxSockets": 2}}}));
        apply("spec", Some(&class), None, &mut spec, &mut ObjectMeta::default()).unwrap();
        assert_eq!(
            serde_json::to_value(&spec).unwrap(),
            json!({
                "domain": {
                    "cpu": {
                        "sockets": 4, "cores": 1, "threads": 1, "maxSockets": 8, "model": "m",
                        "dedicatedCpuPlacement": true, "isolateEmulatorThread": true,
                        "numa": {"guestMappingPassthrough": {}}, "realtime": {"mask": "0"},
                    },
                    "devices": {"gpus": [{"name": "g"}], "hostDevices": [{"name": "h"}]},
                    "ioThreads": {"supplementalPoolThreadCount": 3}, "ioThreadsPolicy": "supplementalPool",
                    "launchSecurity": {"sev": {}},
                    "memory": {"guest": "1Gi", "hugepages": {"pageSize": "2Mi"}, "maxGuest": "2Gi"},
                    "resources": {},
                },
                "nodeSelector": {"a": "b"}, "schedulerName": "s",
            })
        );
    }

    #[test]
    fn overcommitted_memory_is_requested_in_part() {
        for (guest, percent, want) in
            [("1Gi", 0, None), ("1Gi", 50, Some("512Mi")), ("128Mi", 15, Some("114085072")), ("1Gi", 100, Some("0"))]
        {
            let class = class(json!({"memory": {"guest": guest, "overcommitPercent": percent}}));
            let mut spec = vmi_spec(json!({}));
            apply("spec", Some(&class), None, &mut spec, &mut ObjectMeta::default()).unwrap();
            let request = spec.domain.resources.requests.get("memory").map(|request| request.0.as_str());
            assert_eq!(request, want, "{guest} {percent}");
            assert_eq!(spec.domain.memory.unwrap().guest.unwrap().0, guest);
        }
    }
}
