//! The differences between a clone and its source, as patches of the restore.

use std::collections::BTreeMap;

use api::{
    clone::VirtualMachineCloneSpec, constants::annotation, snapshot::content::SourceVirtualMachine,
    vmi::spec::VirtualMachineInstanceTemplateSpec,
};
use serde_json::{Value, json};

use crate::restore::DROPPED;

/// Path of the template.
const TEMPLATE: &str = "/spec/template";
/// Annotations that a clone keeps whatever the filters are: the guest knows its hardware by them.
const KEPT: [&str; 2] = annotation::PCI_TOPOLOGY;

/// Returns the patches of the restore.
pub(super) fn of(clone: &VirtualMachineCloneSpec, source: &SourceVirtualMachine) -> Vec<String> {
    let mut patches = Vec::new();
    if let Some(spec) = &source.spec {
        hardware(clone, &spec.template, &mut patches);
        let (template, filters) = (&spec.template.metadata, &clone.template);
        let path = |map: &str| format!("{TEMPLATE}/metadata/{map}");
        filter(&filters.label_filters, template.labels.as_ref(), &path("labels"), &mut patches);
        filter(&filters.annotation_filters, template.annotations.as_ref(), &path("annotations"), &mut patches);
    }
    filter(&clone.label_filters, source.metadata.labels.as_ref(), "/metadata/labels", &mut patches);
    let mut annotations = source.metadata.annotations.clone().unwrap_or_default();
    annotations.retain(|key, _| !DROPPED.contains(&key.as_str()));
    filter(&clone.annotation_filters, Some(&annotations), "/metadata/annotations", &mut patches);
    patches.iter().map(Value::to_string).chain(clone.patches.iter().cloned()).collect()
}

/// Gives the clone MAC addresses, a serial and a UUID of its own. Those that are removed are generated.
fn hardware(clone: &VirtualMachineCloneSpec, template: &VirtualMachineInstanceTemplateSpec, patches: &mut Vec<Value>) {
    let Some(domain) = template.spec.as_ref().map(|spec| &spec.domain) else { return };
    for (index, interface) in domain.devices.interfaces.iter().enumerate() {
        let path = format!("{TEMPLATE}/spec/domain/devices/interfaces/{index}/macAddress");
        match clone.new_mac_addresses.get(&interface.name).filter(|mac| !mac.is_empty()) {
            Some(mac) => patches.push(json!({"op": "replace", "path": path, "value": mac})),
            None if interface.mac_address.is_some() => patches.push(json!({"op": "remove", "path": path})),
            None => {}
        }
    }
    let path = format!("{TEMPLATE}/spec/domain/firmware");
    let firmware = domain.firmware.as_ref();
    match (&clone.new_smbios_serial, firmware) {
        (Some(serial), None) => patches.push(json!({"op": "add", "path": path, "value": {"serial": serial}})),
        (Some(serial), Some(_)) => {
            patches.push(json!({"op": "replace", "path": format!("{path}/serial"), "value": serial}));
        }
        (None, Some(firmware)) if firmware.serial.is_some() => {
            patches.push(json!({"op": "remove", "path": format!("{path}/serial")}));
        }
        (None, _) => {}
    }
    if firmware.is_some_and(|firmware| firmware.uuid.is_some()) {
        patches.push(json!({"op": "remove", "path": format!("{path}/uuid")}));
    }
}

/// Removes the keys that filters do not select.
fn filter(filters: &[String], map: Option<&BTreeMap<String, String>>, path: &str, patches: &mut Vec<Value>) {
    for key in map.into_iter().flatten().map(|(key, _)| key) {
        if !KEPT.contains(&key.as_str()) && !selects(filters, key) {
            let token = key.replace('~', "~0").replace('/', "~1");
            patches.push(json!({"op": "remove", "path": format!("{path}/{token}")}));
        }
    }
}

/// Returns true if filters select a key: one of them, or all if each only excludes, and none excludes it.
fn selects(filters: &[String], key: &str) -> bool {
    let matches = |filter: &str| match filter.strip_suffix('*') {
        Some(prefix) => key.starts_with(prefix),
        None => filter == key,
    };
    let (excluding, including): (Vec<&str>, Vec<&str>) =
        filters.iter().map(String::as_str).partition(|filter| filter.starts_with('!'));
    let is_included = including.is_empty() || including.into_iter().any(matches);
    is_included && !excluding.iter().any(|filter| matches(&filter[1..]))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn filters_select_keys_and_prefixes() {
        for (filters, selected) in [
            (&[][..], &["app", "a.io/x", "a.io/y"][..]),
            (&["*"], &["app", "a.io/x", "a.io/y"]),
            (&["a.io/*"], &["a.io/x", "a.io/y"]),
            (&["app"], &["app"]),
            // No regular expressions, as those of the reference.
            (&["ap."], &[]),
            (&["pp"], &[]),
            (&["*", "!a.io/*"], &["app"]),
            (&["!a.io/x"], &["app", "a.io/y"]),
            (&["a.io/*", "!a.io/x"], &["a.io/y"]),
        ] {
            let filters: Vec<String> = filters.iter().map(|filter| (*filter).to_owned()).collect();
            let keys = ["app", "a.io/x", "a.io/y"].into_iter();
            assert_eq!(keys.filter(|key| selects(&filters, key)).collect::<Vec<_>>(), selected, "{filters:?}");
        }
    }
}
