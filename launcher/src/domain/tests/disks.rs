use super::*;

#[test]
fn the_cache_mode_follows_the_storage() {
    for (disk, expected) in [
        (json!({"name": "root", "disk": {"bus": "virtio"}}), "cache='none'"),
        (json!({"name": "slow", "disk": {"bus": "virtio"}}), "cache='writethrough'"),
        (json!({"name": "slow", "cache": "writeback", "disk": {"bus": "virtio"}}), "cache='writeback'"),
        (json!({"name": "data", "disk": {"bus": "virtio"}}), "cache='none' io='native'"),
        (json!({"name": "data", "io": "threads", "disk": {"bus": "virtio"}}), "cache='none' io='threads'"),
        (json!({"name": "data", "shareable": true, "disk": {"bus": "virtio"}}), "<shareable/>"),
        (json!({"name": "root", "shareable": true, "disk": {"bus": "virtio"}}), "cache='none'"),
    ] {
        let xml = xml(with_disk(disk.clone()));
        assert!(xml.contains(expected), "{disk}: {xml}");
    }
}

#[test]
fn disks_keep_the_targets_of_the_status() {
    let mut vmi = vmi(full());
    vmi.status = Some(serde_json::from_value(json!({"volumeStatus": [{"name": "ci", "target": "sdc"}]})).unwrap());
    let targets: Vec<(String, String)> =
        convert_with(&vmi, true).unwrap().disks.into_iter().map(|disk| (disk.volume, disk.target)).collect();
    let expected = [("root", "vda"), ("ci", "sdc"), ("data", "sda"), ("drive", "sdb")];
    assert_eq!(targets, expected.map(|(volume, target)| (volume.to_owned(), target.to_owned())));
}

/// Without an address, libvirt gives the eighth name to a second controller, of a model that many guests have no driver for.
#[test]
fn a_scsi_disk_is_a_unit_of_the_only_controller_whatever_its_name() {
    let mut vmi = vmi(with_disk(json!({"name": "data", "disk": {"bus": "scsi"}})));
    for (target, unit) in [("sda", 0), ("sdg", 6), ("sdh", 7), ("sdaa", 26)] {
        let status = json!({"volumeStatus": [{"name": "data", "target": target}]});
        vmi.status = Some(serde_json::from_value(status).unwrap());
        let xml = convert_with(&vmi, true).unwrap().xml;
        assert!(xml.contains(&format!("<target dev='{target}' bus='scsi'")), "{xml}");
        let address = format!("<address type='drive' controller='0' bus='0' unit='{unit}'/>");
        assert!(xml.contains(&address), "{address} in {xml}");
        assert_eq!(xml.matches("<controller type='scsi'").count(), 1, "{xml}");
    }
}

#[test]
fn the_eighth_name_of_a_scsi_drive_is_a_unit_of_the_only_controller() {
    let mut spec = with_disk(json!({"name": "d0", "cdrom": {"bus": "sata"}}));
    let disks = spec["domain"]["devices"]["disks"].as_array_mut().unwrap();
    disks.extend((1..7).map(|number| json!({"name": format!("d{number}"), "cdrom": {"bus": "sata"}})));
    disks.push(json!({"name": "last", "cdrom": {"bus": "scsi"}}));
    let xml = xml(spec);
    let last = xml.split("<target dev='sdh' bus='scsi'").nth(1).unwrap().split("</disk>").next().unwrap();
    assert!(last.contains("<address type='drive' controller='0' bus='0' unit='7'/>"), "{last}");
    assert_eq!(xml.matches("<controller type='scsi'").count(), 1, "{xml}");
}

#[test]
fn io_threads_follow_the_policy() {
    let spec = |policy: Value| {
        let mut spec = with_disk(json!({"name": "root", "disk": {"bus": "virtio"}}));
        spec["domain"].as_object_mut().unwrap().extend(policy.as_object().unwrap().clone());
        xml(spec)
    };
    assert!(!spec(json!({})).contains("iothread"));
    let shared = spec(json!({"ioThreadsPolicy": "shared"}));
    assert!(shared.contains("<iothreads>1</iothreads>") && shared.contains("iothread='1'"), "{shared}");
    let pool = spec(json!({"ioThreadsPolicy": "supplementalPool", "ioThreads": {"supplementalPoolThreadCount": 2}}));
    assert!(pool.contains("<iothreads>2</iothreads>") && pool.contains("<iothread id='2'/>"), "{pool}");
}

#[test]
fn a_scsi_disk_with_a_thread_of_its_own_gives_one_to_the_controller() {
    let spec = |disk: Value, policy: Value| {
        let mut spec = with_disk(json!({"name": "root", "disk": {"bus": "virtio"}}));
        spec["domain"]["devices"]["disks"].as_array_mut().unwrap().push(disk);
        spec["domain"]["cpu"] = json!({"cores": 2});
        spec["domain"].as_object_mut().unwrap().extend(policy.as_object().unwrap().clone());
        xml(spec)
    };
    let dedicated = json!({"name": "data", "lun": {"bus": "scsi"}, "dedicatedIOThread": true});
    let plain = json!({"name": "data", "lun": {"bus": "scsi"}});
    let pool = json!({"ioThreadsPolicy": "supplementalPool"});
    for (disk, policy, driver) in [
        (dedicated.clone(), json!({}), Some("<driver queues='2' iothread='1'/>")),
        (dedicated.clone(), json!({"ioThreadsPolicy": "shared"}), Some("<driver queues='2' iothread='1'/>")),
        (plain, json!({"ioThreadsPolicy": "shared"}), None),
        (dedicated, pool, None),
    ] {
        let xml = spec(disk.clone(), policy.clone());
        let controller = xml.split("<controller type='scsi'").nth(1).unwrap().split("<serial").next().unwrap();
        match driver {
            Some(driver) => assert!(controller.contains(driver), "{disk} {policy}: {controller}"),
            None => assert!(!controller.contains("<driver"), "{disk} {policy}: {controller}"),
        }
    }
}

#[test]
fn a_lun_has_the_serial_number_of_its_device() {
    let serial = |kind: &str| {
        let disk = json!({"name": "data", kind: {"bus": "scsi"}, "serial": "S1"});
        xml(with_disk(disk)).contains("<serial>S1</serial>")
    };
    assert!(serial("disk") && !serial("lun"), "libvirt refuses a LUN with another serial number");
}

#[test]
fn block_sizes_are_the_disks_or_those_of_the_volume() {
    for (sizes, expected) in [
        (
            json!({"matchVolume": {}}),
            "<blockio logical_block_size='512' physical_block_size='4096' discard_granularity='0'/>",
        ),
        (
            json!({"custom": {"logical": 4096, "physical": 4096}, "matchVolume": {"enabled": false}}),
            "<blockio logical_block_size='4096' physical_block_size='4096'/>",
        ),
    ] {
        let xml = xml(with_disk(json!({"name": "data", "blockSize": sizes, "disk": {"bus": "virtio"}})));
        assert!(xml.contains(expected), "{xml}");
    }
}

#[test]
fn discard_depends_on_the_volume() {
    let convert = |disk: Value, preallocated: bool| {
        let mut vmi = vmi(with_disk(disk));
        let claim = json!({"claimName": "c", "preallocated": preallocated});
        let status = json!({"volumeStatus": [{"name": "data", "target": "", "persistentVolumeClaimInfo": claim}]});
        vmi.status = Some(serde_json::from_value(status).unwrap());
        convert_with(&vmi, true).unwrap().xml
    };
    for (disk, preallocated, hears) in [
        (json!({"name": "root", "disk": {"bus": "virtio"}}), true, true),
        (json!({"name": "data", "disk": {"bus": "virtio"}}), false, true),
        (json!({"name": "data", "lun": {"bus": "scsi"}}), false, true),
        (json!({"name": "data", "disk": {"bus": "virtio"}}), true, false),
        (json!({"name": "root", "cdrom": {"bus": "sata"}}), false, true),
        (json!({"name": "drive", "cdrom": {"bus": "sata"}}), false, true),
    ] {
        assert_eq!(convert(disk.clone(), preallocated).contains("discard='unmap'"), hears, "{disk} {preallocated}");
    }
    // A CD-ROM with an image of files; the recorded XML has another.
    let mut spec = with_disk(json!({"name": "ci", "cdrom": {"bus": "sata"}}));
    spec["volumes"].as_array_mut().unwrap().push(json!({"name": "ci", "cloudInitNoCloud": {"userData": "x"}}));
    assert!(!xml(spec).contains("discard"));
}
