//! Finds the guest addresses of tagged interfaces.

use api::VirtualMachineInstance;

use crate::storage::cloud_init::TaggedInterface;

/// Longest domain XML that is parsed.
const XML_LIMIT: usize = 4 * 1024 * 1024;

/// Returns the VMI's tagged interfaces with their addresses in the domain's XML. Interfaces without an address are left
/// out.
pub(crate) fn tagged_interfaces(vmi: &VirtualMachineInstance, definition: &str) -> Vec<TaggedInterface> {
    let parsed = (definition.len() <= XML_LIMIT).then(|| roxmltree::Document::parse(definition).ok()).flatten();
    let Some(document) = parsed else { return Vec::new() };
    let interfaces = &vmi.spec.domain.devices.interfaces;
    interfaces
        .iter()
        .filter_map(|interface| {
            let tag = interface.tag.as_deref().filter(|tag| !tag.is_empty())?;
            let alias = format!("ua-{}", interface.name);
            let device = document.descendants().filter(|node| node.has_tag_name("interface")).find(|node| {
                let mut children = node.children();
                children.any(|child| child.has_tag_name("alias") && child.attribute("name") == Some(alias.as_str()))
            })?;
            let child = |name: &str| device.children().find(|node| node.has_tag_name(name));
            let address = child("address").filter(|address| address.attribute("type") == Some("pci"))?;
            let part = |name: &str| address.attribute(name)?.strip_prefix("0x");
            Some(TaggedInterface {
                address: format!("{}:{}:{}.{}", part("domain")?, part("bus")?, part("slot")?, part("function")?),
                mac: child("mac")?.attribute("address")?.to_owned(),
                tag: tag.to_owned(),
            })
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn tagged_interfaces_are_found_by_their_aliases() {
        let interfaces = json!([
            {"name": "plain", "masquerade": {}},
            {"name": "lan", "bridge": {}, "tag": "backup"},
            {"name": "lost", "bridge": {}, "tag": "gone"},
        ]);
        let spec = json!({"domain": {"devices": {"interfaces": interfaces}}});
        let vmi: VirtualMachineInstance =
            serde_json::from_value(json!({"metadata": {"name": "m"}, "spec": spec})).unwrap();
        let definition = "<domain><devices>\
            <interface type='ethernet'><mac address='02:00:00:00:00:01'/><alias name='ua-plain'/>\
              <address type='pci' domain='0x0000' bus='0x01' slot='0x00' function='0x0'/></interface>\
            <interface type='ethernet'><mac address='02:00:00:00:00:02'/><alias name='ua-lan'/>\
              <address type='pci' domain='0x0000' bus='0x02' slot='0x00' function='0x0'/></interface>\
            </devices></domain>";
        let expected =
            TaggedInterface { address: "0000:02:00.0".into(), mac: "02:00:00:00:00:02".into(), tag: "backup".into() };
        assert_eq!(tagged_interfaces(&vmi, definition), [expected]);
        assert!(tagged_interfaces(&vmi, "<domain").is_empty());
    }
}
