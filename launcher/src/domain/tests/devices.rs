use super::*;

#[test]
fn an_explicit_adapter_has_its_own_memory() {
    for (video, model) in [
        (json!({}), "<model type='vga' vram='16384' heads='1'/>"),
        (json!({"video": {"type": "virtio"}}), "<model type='virtio' vram='16384' heads='1'/>"),
    ] {
        assert!(xml(with_domain(json!({"devices": video}))).contains(model), "{model}");
    }
}

#[test]
fn usb_redirection_has_its_channels_and_a_controller() {
    let xml = xml(json!({"domain": {"memory": {"guest": "64Mi"}, "devices": {"clientPassthrough": {}}}}));
    for part in [
        "<redirdev bus=\"usb\" type=\"unix\">",
        "<source mode=\"bind\" path=\"/p/u/virt-usbredir-0\"/>",
        "path=\"/p/u/virt-usbredir-1\"",
        "<controller type=\"usb\" index=\"0\" model=\"qemu-xhci\"/>",
    ] {
        assert!(xml.replace('\'', "\"").contains(part), "{part} is not in {xml}");
    }
}

#[test]
fn a_vsock_device_has_the_context_id_of_the_status() {
    let mut object = vmi(with_domain(json!({"devices": {"autoattachVSOCK": true, "useVirtioTransitional": true}})));
    for cid in [None, Some(2), Some(u32::MAX)] {
        object.status.get_or_insert_default().vsock_cid = cid;
        assert_eq!(convert_with(&object, true).unwrap_err(), DomainError::NoCid, "{cid:?}");
    }
    object.status.get_or_insert_default().vsock_cid = Some(77);
    let domain = convert_with(&object, true).unwrap().xml;
    let device = "<vsock model='virtio-non-transitional'>\n      <cid auto='no' address='77'/>\n    </vsock>";
    assert!(domain.contains(device), "{domain}");
    assert!(!xml(with_domain(json!({}))).contains("vsock"));
}

#[test]
fn a_usb_device_of_the_host_has_a_controller() {
    let device = json!({"name": "stick", "deviceName": "v.org/stick"});
    let xml = xml(json!({"domain": {"memory": {"guest": "64Mi"}, "devices": {"hostDevices": [device]}}}));
    assert!(xml.contains("<controller type='usb' index='0' model='qemu-xhci'/>"), "{xml}");
    assert!(xml.contains("<address bus='1' device='4'/>"), "{xml}");
}

#[test]
fn the_cluster_and_annotations_choose_hardware() {
    let convert = |options: &protocol::VmiOptions, annotations: Value| {
        let mut vmi = vmi(with_domain(json!({"firmware": {"bootloader": {"efi": {"secureBoot": false}}}})));
        vmi.metadata.annotations = serde_json::from_value(annotations).unwrap();
        convert_for(&vmi, true, options).unwrap().xml
    };
    let plain = convert(&options(), json!({}));
    assert!(plain.contains("freePageReporting='on'") && plain.contains("type='bochs'") && !plain.contains("pcihole64"));
    let changed = protocol::VmiOptions { free_page_reporting_disabled: true, vga_for_efi: true, ..options() };
    let changed = convert(&changed, json!({"kubevirt.io/disablePCIHole64": "True"}));
    assert!(changed.contains("freePageReporting='off'") && changed.contains("<model type='vga'"));
    assert!(changed.contains("<pcihole64 unit='KiB'>0</pcihole64>"));
    let annotated = convert(&options(), json!({"kubevirt.io/free-page-reporting-disabled": "true"}));
    assert!(annotated.contains("freePageReporting='off'"));
}

#[test]
fn interfaces_keep_their_order_with_one_tap_device_each() {
    let nic = |name: &str, tap: &str, mac: &str| protocol::Nic {
        name: name.into(),
        tap: tap.into(),
        mac: mac.into(),
        ..Default::default()
    };
    // virt-handler may list them in another order.
    let nics = vec![nic("lan", "tap094a367b026", "0a:58:00:00:00:07"), nic("default", "tap0", "02:00:00:00:00:01")];
    let options = protocol::VmiOptions { nics, ..options() };
    let mut spec = with_domain(json!({"devices": {"interfaces": [
        {"name": "default", "masquerade": {}},
        {"name": "lan", "bridge": {}},
        {"name": "gone", "bridge": {}, "state": "absent"},
    ]}}));
    spec["networks"] = json!([{"name": "default", "pod": {}}, {"name": "lan", "multus": {"networkName": "lan"}}]);
    let xml = convert_for(&vmi(spec), true, &options).unwrap().xml;
    let places: Vec<usize> =
        ["dev='tap0'", "alias name='ua-default'", "0a:58:00:00:00:07", "dev='tap094a367b026'", "ua-lan"]
            .iter()
            .map(|text| xml.find(text).unwrap_or_else(|| panic!("{text} in {xml}")))
            .collect();
    assert!(places.is_sorted(), "{xml}");
    assert_eq!(xml.matches("<interface ").count() - xml.matches("'placeholder-").count(), 2, "{xml}");
}

#[test]
fn the_mac_address_is_written_as_libvirt_reads_it() {
    for (asked, expected) in [("BE-AF-00-00-DE-AD", "be:af:00:00:de:ad"), ("", "02:00:00:00:00:01")] {
        let interface = json!({"name": "default", "masquerade": {}, "macAddress": asked});
        let mut spec = with_domain(json!({"devices": {"interfaces": [interface]}}));
        spec["networks"] = json!([{"name": "default", "pod": {}}]);
        assert!(xml(spec).contains(&format!("<mac address='{expected}'")), "{asked}");
    }
}

#[test]
fn the_model_of_a_tpm_depends_on_its_state() {
    let backend = "<backend type='external'>\n        <source type='unix' mode='connect' path='/p/swtpm.sock'/>";
    for (tpm, model) in [
        (json!({}), Some("tpm-tis")),
        (json!({"enabled": true}), Some("tpm-tis")),
        (json!({"persistent": false}), Some("tpm-tis")),
        (json!({"persistent": true}), Some("tpm-crb")),
        (json!({"persistent": true, "enabled": false}), None),
        (json!({"enabled": false}), None),
    ] {
        let xml = xml(with_domain(json!({"devices": {"tpm": tpm}})));
        let expected = model.map(|model| format!("<tpm model='{model}'>\n      {backend}"));
        assert_eq!(xml.contains("<tpm"), model.is_some(), "{tpm}");
        assert!(expected.is_none_or(|expected| xml.contains(&expected)), "{tpm}: {xml}");
    }
}
