//! Annotations and resources for the plugins that connect a pod to networks.

use api::{VirtualMachineInstance, constants::annotation, vmi::network::Interface};
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

/// Returns the networks that the pod is connected to beside its own, as Multus reads them: those of the interfaces that `connects`
/// names. `None`: there are none.
pub(crate) fn network_request(
    instance: &VirtualMachineInstance,
    connects: impl Fn(&Interface) -> bool,
) -> Option<String> {
    let namespace = instance.metadata.namespace.as_deref().unwrap_or_default();
    let interface = |name: &str| {
        let mut interfaces = instance.spec.domain.devices.interfaces.iter();
        interfaces.find(|interface| interface.name == name)
    };
    let networks = instance.spec.networks.iter().filter_map(|network| Some((network, network.multus.as_ref()?)));
    let selections: Vec<Value> = networks
        .filter(|(network, _)| !network.is_primary() && interface(&network.name).is_none_or(&connects))
        .map(|(network, multus)| {
            let (namespace, name) = multus.definition(namespace);
            let mut selection = json!({"name": name, "namespace": namespace, "interface": network.pod_link()});
            if let Some(mac) = interface(&network.name).and_then(Interface::mac) {
                selection["mac"] = mac.into();
            }
            selection
        })
        .collect();
    (!selections.is_empty()).then(|| Value::from(selections).to_string())
}

/// Returns the annotations that request a VMI's networks.
pub(super) fn annotations(instance: &VirtualMachineInstance) -> Vec<(&'static str, String)> {
    let mut annotations = Vec::new();
    let request = network_request(instance, |interface| !interface.is_absent());
    annotations.extend(request.map(|request| (annotation::NETWORKS, request)));
    if let Some((_, multus)) = connected_networks(instance).find(|(_, multus)| multus.default_) {
        annotations.push((annotation::DEFAULT_NETWORK, multus.network_name.clone()));
    }
    annotations
}
