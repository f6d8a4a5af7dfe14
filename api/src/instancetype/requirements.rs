//! Requirements of a preference.

use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use thiserror::Error;

use super::{
    preference::{PreferenceRequirements, VirtualMachinePreferenceSpec},
    spec::VirtualMachineInstancetypeSpec,
    topology::{self, Across, Topology},
};
use crate::{
    quantity,
    vmi::{cpu::Cpu, spec::VirtualMachineInstanceSpec},
};

const INSTANCETYPE: &str = "spec.instancetype";
const TEMPLATE: &str = "spec.template.spec";

/// A requirement that is not met.
#[derive(Clone, Debug, Eq, Error, PartialEq)]
#[error("{message}")]
pub struct Unmet {
    /// Paths of the fields with insufficient values.
    pub paths: Vec<String>,
    /// Message with the required and the actual value.
    pub message: String,
}

impl Unmet {
    fn new(path: &str, message: String) -> Self {
        Self { paths: vec![path.to_owned()], message }
    }
}

/// Checks a VM against the requirements of its preference. `spec` is the template with instance type and preference applied.
/// Returns the first requirement that is not met.
pub fn check(
    instancetype: Option<&VirtualMachineInstancetypeSpec>,
    preference: Option<&VirtualMachinePreferenceSpec>,
    spec: &VirtualMachineInstanceSpec,
) -> Result<(), Unmet> {
    let Some(requirements) = preference.and_then(|preference| preference.requirements.as_ref()) else { return Ok(()) };
    if let Some(cpu) = &requirements.cpu {
        match instancetype {
            Some(class) if class.cpu.guest < cpu.guest => {
                let message = format!(
                    "insufficient CPU resources of {} vCPU provided by instance type, preference requires {} vCPU",
                    class.cpu.guest, cpu.guest
                );
                return Err(Unmet::new(INSTANCETYPE, message));
            }
            Some(_) => {}
            None => check_cpu(cpu.guest, topology::preferred(preference), spec.domain.cpu.as_ref())?,
        }
    }
    check_memory(requirements, instancetype, spec)?;
    if let Some(wanted) = requirements.architecture.as_deref().filter(|wanted| !wanted.is_empty()) {
        let given = spec.architecture.as_deref().unwrap_or_default();
        if given != wanted {
            let message = format!("preference requires architecture {wanted} but {given} is being requested");
            return Err(Unmet::new(&format!("{TEMPLATE}.architecture"), message));
        }
    }
    Ok(())
}

fn check_cpu(required: u32, topology: Topology, cpu: Option<&Cpu>) -> Result<(), Unmet> {
    let root = format!("{TEMPLATE}.domain.cpu");
    let Some(cpu) = cpu else {
        let message = format!("no CPU resources provided by VirtualMachine, preference requires {required} vCPU");
        return Err(Unmet::new(&root, message));
    };
    let (sockets, cores, threads) = (("sockets", cpu.sockets), ("cores", cpu.cores), ("threads", cpu.threads));
    let (what, parts): (&str, &[(&str, Option<u32>)]) = match topology {
        Topology::Sockets => ("sockets", &[sockets]),
        Topology::Cores => ("cores", &[cores]),
        Topology::Threads => ("threads", &[threads]),
        Topology::Any => ("cores, sockets and threads", &[cores, sockets, threads]),
        Topology::Spread(across, _) => (
            across.name(),
            match across {
                Across::SocketsCores => &[sockets, cores],
                Across::CoresThreads => &[cores, threads],
                Across::SocketsCoresThreads => &[sockets, cores, threads],
            },
        ),
    };
    // Unset values count as 1 in a product, and as 0 alone.
    let provided = match parts {
        [(_, alone)] => alone.unwrap_or(0),
        parts => parts.iter().map(|(_, part)| part.unwrap_or(1).max(1)).fold(1, u32::saturating_mul),
    };
    if provided >= required {
        return Ok(());
    }
    Err(Unmet {
        paths: parts.iter().map(|(name, _)| format!("{root}.{name}")).collect(),
        message: format!(
            "insufficient CPU resources of {provided} vCPU provided by VirtualMachine, preference requires {required} vCPU provided as {what}"
        ),
    })
}

fn check_memory(
    requirements: &PreferenceRequirements,
    instancetype: Option<&VirtualMachineInstancetypeSpec>,
    spec: &VirtualMachineInstanceSpec,
) -> Result<(), Unmet> {
    let Some(required) = requirements.memory.as_ref().map(|memory| &memory.guest) else { return Ok(()) };
    let memory_path = format!("{TEMPLATE}.domain.memory");
    let (provided, by, path) = match instancetype {
        Some(class) => (Some(&class.memory.guest), "instance type", INSTANCETYPE),
        None => {
            let guest = spec.domain.memory.as_ref().and_then(|memory| memory.guest.as_ref());
            (guest, "VirtualMachine", memory_path.as_str())
        }
    };
    let none = Quantity("0".to_owned());
    let provided = provided.unwrap_or(&none);
    // Validation rejects invalid quantities elsewhere.
    let (Ok(has), Ok(needs)) = (quantity::units(provided), quantity::units(required)) else { return Ok(()) };
    if has >= needs {
        return Ok(());
    }
    let (provided, required) = (quantity::canonical(provided), quantity::canonical(required));
    let message =
        format!("insufficient Memory resources of {provided} provided by {by}, preference requires {required}");
    Err(Unmet::new(path, message))
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn checked(instancetype: Option<Value>, preference: Value, vmi_spec: Value) -> Result<(), Unmet> {
        let instancetype = instancetype.map(|spec| serde_json::from_value(spec).unwrap());
        let preference = serde_json::from_value(preference).unwrap();
        check(instancetype.as_ref(), Some(&preference), &serde_json::from_value(vmi_spec).unwrap())
    }

    #[test]
    fn requirements_on_an_instance_type() {
        let class = json!({"cpu": {"guest": 2}, "memory": {"guest": "1Gi"}});
        let vmi_spec = json!({"domain": {"devices": {}}});
        for (requirements, want) in [
            (json!({"cpu": {"guest": 2}, "memory": {"guest": "1Gi"}}), None),
            (
                json!({"cpu": {"guest": 3}}),
                Some("insufficient CPU resources of 2 vCPU provided by instance type, preference requires 3 vCPU"),
            ),
            (
                json!({"memory": {"guest": "2Gi"}}),
                Some("insufficient Memory resources of 1Gi provided by instance type, preference requires 2Gi"),
            ),
        ] {
            let found = checked(Some(class.clone()), json!({"requirements": requirements}), vmi_spec.clone());
            match want {
                None => assert_eq!(found, Ok(()), "{requirements}"),
                Some(message) => {
                    assert_eq!(found, Err(Unmet::new("spec.instancetype", message.to_owned())), "{requirements}");
                }
            }
        }
    }

    #[test]
    fn vcpus_of_a_vm_are_counted_as_preferred() {
        let cpu = json!({"sockets": 2, "cores": 2, "threads": 2});
        // topology, spread, required, expected
        for (topology, across, required, want) in [
            ("sockets", "", 2, None),
            ("sockets", "", 3, Some(("2", "sockets", vec!["sockets"]))),
            ("cores", "", 3, Some(("2", "cores", vec!["cores"]))),
            ("threads", "", 3, Some(("2", "threads", vec!["threads"]))),
            ("any", "", 8, None),
            ("any", "", 9, Some(("8", "cores, sockets and threads", vec!["cores", "sockets", "threads"]))),
            ("spread", "SocketsCores", 5, Some(("4", "SocketsCores", vec!["sockets", "cores"]))),
            ("spread", "CoresThreads", 5, Some(("4", "CoresThreads", vec!["cores", "threads"]))),
            ("spread", "SocketsCoresThreads", 8, None),
            (
                "spread",
                "SocketsCoresThreads",
                9,
                Some(("8", "SocketsCoresThreads", vec!["sockets", "cores", "threads"])),
            ),
        ] {
            let preference = json!({
                "cpu": {"preferredCPUTopology": topology, "spreadOptions": {"across": across}},
                "requirements": {"cpu": {"guest": required}},
            });
            let found = checked(None, preference, json!({"domain": {"devices": {}, "cpu": cpu}}));
            match want {
                None => assert_eq!(found, Ok(()), "{topology} {across}"),
                Some((provided, what, parts)) => {
                    let unmet = found.unwrap_err();
                    let message = format!(
                        "insufficient CPU resources of {provided} vCPU provided by VirtualMachine, preference requires {required} vCPU provided as {what}"
                    );
                    assert_eq!(unmet.message, message);
                    let paths: Vec<_> =
                        parts.iter().map(|part| format!("spec.template.spec.domain.cpu.{part}")).collect();
                    assert_eq!(unmet.paths, paths);
                }
            }
        }
    }

    #[test]
    fn requirements_on_a_vm_without_instance_type() {
        for (requirements, vmi_spec, path, message) in [
            (
                json!({"cpu": {"guest": 1}}),
                json!({"domain": {"devices": {}}}),
                "spec.template.spec.domain.cpu",
                "no CPU resources provided by VirtualMachine, preference requires 1 vCPU",
            ),
            (
                json!({"memory": {"guest": "1Gi"}}),
                json!({"domain": {"devices": {}, "memory": {"guest": "524288Ki"}}}),
                "spec.template.spec.domain.memory",
                "insufficient Memory resources of 512Mi provided by VirtualMachine, preference requires 1Gi",
            ),
            (
                json!({"memory": {"guest": "1Gi"}}),
                json!({"domain": {"devices": {}}}),
                "spec.template.spec.domain.memory",
                "insufficient Memory resources of 0 provided by VirtualMachine, preference requires 1Gi",
            ),
            (
                json!({"architecture": "arm64"}),
                json!({"architecture": "amd64", "domain": {"devices": {}}}),
                "spec.template.spec.architecture",
                "preference requires architecture arm64 but amd64 is being requested",
            ),
        ] {
            let found = checked(None, json!({"requirements": requirements}), vmi_spec);
            assert_eq!(found, Err(Unmet::new(path, message.to_owned())));
        }
        let enough = json!({"architecture": "arm64", "domain": {"devices": {}}});
        assert_eq!(checked(None, json!({"requirements": {"architecture": "arm64"}}), enough), Ok(()));
    }
}
