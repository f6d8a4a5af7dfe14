//! Resources of attachment pods.

use std::collections::BTreeMap;

use k8s_openapi::{api::core::v1::ResourceRequirements, apimachinery::pkg::api::resource::Quantity};

use super::ConfigError;
use crate::{constants::component, kubevirt::configuration::KubeVirtConfiguration, quantity::units};

/// The setting with the resources.
const FIELD: &str = "supportContainerResources";

/// Returns the resources of the container unless they are configured.
pub(super) fn defaults() -> ResourceRequirements {
    let amounts = |cpu: &str, memory: &str| {
        let amount = |name: &str, value: &str| (name.to_owned(), Quantity(value.to_owned()));
        Some(BTreeMap::from([amount("cpu", cpu), amount("memory", memory)]))
    };
    ResourceRequirements {
        requests: amounts("10m", "2M"),
        limits: amounts("100m", "80M"),
        ..ResourceRequirements::default()
    }
}

/// Reads the resources of a KubeVirt object: each amount replaces its default.
pub(super) fn read(from: &KubeVirtConfiguration) -> Result<ResourceRequirements, ConfigError> {
    let mut resources = defaults();
    for configured in from.support_container_resources.iter().filter(|one| one.type_ == component::HOTPLUG_DISK) {
        overlay(&mut resources.requests, &configured.resources.requests)?;
        overlay(&mut resources.limits, &configured.resources.limits)?;
    }
    Ok(resources)
}

/// Replaces the amounts of CPU and memory that are not zero.
fn overlay(to: &mut Option<BTreeMap<String, Quantity>>, from: &BTreeMap<String, Quantity>) -> Result<(), ConfigError> {
    for (name, amount) in to.iter_mut().flatten() {
        let Some(configured) = from.get(name) else { continue };
        if units(configured).map_err(|source| ConfigError::Quantity { field: FIELD, source })? != 0 {
            amount.clone_from(configured);
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn each_amount_replaces_its_default() {
        let of = |kind: &str, resources: serde_json::Value| {
            let from = json!({"supportContainerResources": [{"type": kind, "resources": resources}]});
            read(&serde_json::from_value(from).unwrap())
        };
        for (kind, resources, requests, limits) in [
            ("hotplug-disk", json!({}), ["10m", "2M"], ["100m", "80M"]),
            ("hotplug-disk", json!({"limits": {"memory": "200M"}}), ["10m", "2M"], ["100m", "200M"]),
            (
                "hotplug-disk",
                json!({"requests": {"cpu": "50m", "memory": "0"}, "limits": {"cpu": "1", "example.com/a": "1"}}),
                ["50m", "2M"],
                ["1", "80M"],
            ),
            ("container-disk", json!({"limits": {"memory": "200M"}}), ["10m", "2M"], ["100m", "80M"]),
        ] {
            let found = serde_json::to_value(of(kind, resources.clone()).unwrap()).unwrap();
            let amounts = |[cpu, memory]: [&str; 2]| json!({"cpu": cpu, "memory": memory});
            assert_eq!(found, json!({"requests": amounts(requests), "limits": amounts(limits)}), "{kind} {resources}");
        }
        assert!(of("hotplug-disk", json!({"limits": {"memory": "much"}})).is_err());
        assert_eq!(read(&KubeVirtConfiguration::default()), Ok(defaults()));
    }
}
