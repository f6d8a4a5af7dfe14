//! Annotations and resources for the plugins that connect a pod to networks.

use api::{VirtualMachineInstance, constants::annotation, vmi::network::Network};
use serde_json::{Value, json};

use super::{Inputs, RenderError};
use crate::resources::vmis::{connected_networks, network_names};

/// Returns the resources of a node that these networks need, one of each.
pub(super) fn resources(inputs: &Inputs<'_>) -> Result<Vec<String>, RenderError> {
    let Some(definitions) = inputs.definitions else { return Ok(Vec::new()) };
    let mut resources = Vec::new();
    for (namespace, name) in network_names(inputs.instance) {
        let name = format!("{namespace}/{name}");
        match definitions.get(&name) {
            Some(definition) => resources.extend(definition.resource.clone()),
            None => return Err(RenderError::DefinitionNotFound(name)),
        }
    }
    Ok(resources)
}

/// Returns the annotations that request a VMI's networks.
pub(super) fn annotations(instance: &VirtualMachineInstance) -> Vec<(&'static str, String)> {
    let namespace = instance.metadata.namespace.as_deref().unwrap_or_default();
    let mac = |network: &Network| {
        let mut interfaces = instance.spec.domain.devices.interfaces.iter();
        interfaces.find(|interface| interface.name == network.name)?.mac()
    };
    // The networks that the pod is connected to beside its own, as Multus reads them.
    let selections: Vec<Value> = connected_networks(instance)
        .filter(|(network, _)| !network.is_primary())
        .map(|(network, multus)| {
            let (namespace, name) = multus.definition(namespace);
            let mut selection = json!({"name": name, "namespace": namespace, "interface": network.pod_link()});
            if let Some(mac) = mac(network) {
                selection["mac"] = mac.into();
            }
            selection
        })
        .collect();
    let mut annotations = Vec::new();
    if !selections.is_empty() {
        annotations.push((annotation::NETWORKS, Value::from(selections).to_string()));
    }
    if let Some((_, multus)) = connected_networks(instance).find(|(_, multus)| multus.default_) {
        annotations.push((annotation::DEFAULT_NETWORK, multus.network_name.clone()));
    }
    annotations
}
