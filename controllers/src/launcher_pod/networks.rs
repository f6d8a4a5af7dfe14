//! What the plugins that connect a pod to networks are told by annotations.

use api::{
    VirtualMachineInstance,
    constants::annotation,
    vmi::network::{MultusNetwork, Network},
};
use serde::Serialize;

use super::{Inputs, RenderError};

/// One network that the pod is connected to beside its own, as Multus reads it.
#[derive(Serialize)]
struct Selection<'a> {
    name: &'a str,
    namespace: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    mac: Option<String>,
    /// What the link is called in the pod.
    interface: String,
}

/// Networks of Multus that a machine is plugged into.
pub(super) fn plugged(instance: &VirtualMachineInstance) -> impl Iterator<Item = (&Network, &MultusNetwork)> {
    let spec = &instance.spec;
    let absent = move |name: &str| {
        let mut interfaces = spec.domain.devices.interfaces.iter();
        interfaces.any(|interface| interface.name == name && interface.state.as_deref() == Some("absent"))
    };
    spec.networks
        .iter()
        .filter(move |network| !absent(&network.name))
        .filter_map(|network| Some((network, network.multus.as_ref()?)))
}

/// Definitions of these networks, as namespace and name.
pub(super) fn definition_names(instance: &VirtualMachineInstance) -> impl Iterator<Item = (&str, &str)> {
    let namespace = instance.metadata.namespace.as_deref().unwrap_or_default();
    plugged(instance).map(move |(_, multus)| multus.definition(namespace))
}

/// Resources that a node has to have for these networks, one of each.
pub(super) fn resources(inputs: &Inputs<'_>) -> Result<Vec<String>, RenderError> {
    let Some(definitions) = inputs.definitions else { return Ok(Vec::new()) };
    let mut resources = Vec::new();
    for (namespace, name) in definition_names(inputs.instance) {
        let name = format!("{namespace}/{name}");
        match definitions.get(&name) {
            Some(definition) => resources.extend(definition.resource.clone()),
            None => return Err(RenderError::DefinitionNotFound(name)),
        }
    }
    Ok(resources)
}

/// The annotations that ask for a machine's networks.
pub(super) fn annotations(instance: &VirtualMachineInstance) -> Result<Vec<(&'static str, String)>, serde_json::Error> {
    let namespace = instance.metadata.namespace.as_deref().unwrap_or_default();
    let mac = |network: &Network| {
        let mut interfaces = instance.spec.domain.devices.interfaces.iter();
        interfaces.find(|interface| interface.name == network.name)?.mac()
    };
    let selections: Vec<Selection<'_>> = plugged(instance)
        .filter(|(network, _)| !network.is_primary())
        .map(|(network, multus)| {
            let (namespace, name) = multus.definition(namespace);
            Selection { name, namespace, mac: mac(network), interface: network.pod_link() }
        })
        .collect();
    let mut annotations = Vec::new();
    if !selections.is_empty() {
        annotations.push((annotation::NETWORKS, serde_json::to_string(&selections)?));
    }
    if let Some((_, multus)) = plugged(instance).find(|(_, multus)| multus.default_) {
        annotations.push((annotation::DEFAULT_NETWORK, multus.network_name.clone()));
    }
    Ok(annotations)
}
