//! Volumes prepared in a scratch directory.

use api::vmi::status::SavedMemory;
use serde_json::json;

use super::{
    disk_images::{NewImage, make_raw},
    *,
};
use crate::storage::{claims::MEBIBYTE, cloud_init::TaggedDevice, iso::Files};

/// Default settings of a cluster.
const DEFAULT: Tolerance = Tolerance { lack_percent: 10, reserve: 131_072 };

struct Scratch(Paths, PathBuf);

impl Scratch {
    fn new(name: &str) -> Self {
        let root = std::env::temp_dir().join(format!("launcher-prepare-{name}-{}", std::process::id()));
        let _ = std::fs::remove_dir_all(&root);
        let paths = Paths {
            private: root.join("private"),
            sockets: root.join("sockets"),
            runtime: root.join("run"),
            ephemeral: root.join("ephemeral"),
            container_disks: root.join("images"),
            kernel_boot: root.join("kernel"),
            hotplug_disks: root.join("hotplug"),
            dev: root.join("dev"),
            ..Paths::default()
        };
        for dir in ["private/vmi-disks/data", "private/config-map/cm", "images/root/disk", "kernel/boot"] {
            std::fs::create_dir_all(root.join(dir)).unwrap();
        }
        Self(paths, root)
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.1);
    }
}

fn vmi(volume: serde_json::Value) -> VirtualMachineInstance {
    let name = volume["name"].clone();
    serde_json::from_value(json!({
        "apiVersion": "kubevirt.io/v1", "kind": "VirtualMachineInstance",
        "metadata": {"name": "vm", "namespace": "ns", "uid": "u"},
        "spec": {"domain": {"devices": {"disks": [{"name": name, "disk": {"bus": "virtio"}}]}}, "volumes": [volume]},
    }))
    .unwrap()
}

#[test]
fn a_container_disk_gets_a_layer_of_its_size() {
    let scratch = Scratch::new("layer");
    std::fs::write(scratch.1.join("images/root/disk/any.img"), vec![1; 1000]).unwrap();
    let vmi = vmi(json!({"name": "root", "containerDisk": {"image": "x"}}));
    let source = prepare(&vmi, &scratch.0, &DEFAULT, Purpose::Start).unwrap().sources.remove("root").unwrap();
    assert_eq!(source.backend, Backend::File { path: scratch.0.overlay("root"), format: ImageFormat::Qcow2 });
    assert_eq!(source.backing.unwrap().1, ImageFormat::Raw);
    assert_eq!(&std::fs::read(scratch.0.overlay("root")).unwrap()[24..32], &1024_u64.to_be_bytes());
}

#[test]
fn an_overlay_over_a_claim_ignores_the_content_of_the_disk() {
    let scratch = Scratch::new("ephemeral");
    let image = scratch.1.join("private/vmi-disks/data/disk.img");
    let vmi = vmi(json!({"name": "data", "ephemeral": {"persistentVolumeClaim": {"claimName": "c"}}}));
    for start in [b"LUKS\xba\xbe\0\x01", b"QFI\xfb\0\0\0\x03"] {
        let mut content = start.to_vec();
        content.resize(2048, 0);
        std::fs::write(&image, content).unwrap();
        let source = prepare(&vmi, &scratch.0, &DEFAULT, Purpose::Start).unwrap().sources.remove("data").unwrap();
        assert_eq!(source.backing.unwrap().1, ImageFormat::Raw);
        assert_eq!(&std::fs::read(scratch.0.overlay("data")).unwrap()[24..32], &2048_u64.to_be_bytes());
        std::fs::remove_file(scratch.0.overlay("data")).unwrap();
    }
}

#[test]
fn an_image_with_two_files_or_none_is_refused() {
    let scratch = Scratch::new("count");
    let vmi = vmi(json!({"name": "root", "containerDisk": {"image": "registry/x:1"}}));
    let error = || prepare(&vmi, &scratch.0, &DEFAULT, Purpose::Start).unwrap_err().to_string();
    let expected = |cause: &str| {
        format!(
            "volume root: image registry/x:1 has no disk: {cause}; it must contain exactly one disk image in /disk (raw or \
             qcow2, for example /disk/disk.img), or the volume must name its path"
        )
    };
    assert_eq!(error(), expected("/disk holds 0 files"));
    for name in ["a", "b"] {
        std::fs::write(scratch.1.join("images/root/disk").join(name), "x").unwrap();
    }
    assert_eq!(error(), expected("/disk holds 2 files"));
    std::fs::remove_dir_all(scratch.1.join("images/root/disk")).unwrap();
    assert!(error().starts_with("volume root: image registry/x:1 has no disk: cannot open "), "{}", error());
}

#[test]
fn cve_2022_1798_the_path_of_a_container_disk_stays_in_the_image() {
    let scratch = Scratch::new("cve-2022-1798");
    std::fs::write(scratch.1.join("secret"), "x").unwrap();
    for path in ["../../secret", "/disk/../../../secret"] {
        let vmi = vmi(json!({"name": "root", "containerDisk": {"image": "x", "path": path}}));
        let prepared = prepare(&vmi, &scratch.0, &DEFAULT, Purpose::Start);
        assert!(matches!(prepared, Err(DiskError::ContainerDisk { .. })), "{path}");
    }
}

#[test]
fn a_claim_without_an_image_gets_one_of_the_smaller_of_request_and_capacity() {
    let scratch = Scratch::new("claim");
    let mut vmi = vmi(json!({"name": "data", "persistentVolumeClaim": {"claimName": "c"}}));
    assert!(prepare(&vmi, &scratch.0, &DEFAULT, Purpose::Start).is_err());
    vmi.status = Some(
        serde_json::from_value(json!({"volumeStatus": [{"name": "data", "target": "", "persistentVolumeClaimInfo":
            {"capacity": {"storage": "5Mi"}, "requests": {"storage": "3500Ki"}}}]}))
        .unwrap(),
    );
    prepare(&vmi, &scratch.0, &DEFAULT, Purpose::Start).unwrap();
    let path = scratch.1.join("private/vmi-disks/data/disk.img");
    assert_eq!(std::fs::metadata(&path).unwrap().len(), 3 * MEBIBYTE);
    std::fs::write(&path, "kept").unwrap();
    prepare(&vmi, &scratch.0, &DEFAULT, Purpose::Start).unwrap();
    let image = std::fs::read(&path).unwrap();
    assert!(image.starts_with(b"kept") && image.len() as u64 == 2 * MEBIBYTE, "grown to what is left of it");
}

#[test]
fn an_image_in_a_drive_stays_as_it_is() {
    let scratch = Scratch::new("drive");
    let path = scratch.1.join("private/vmi-disks/data/disk.img");
    let mut vmi = vmi(json!({"name": "data", "persistentVolumeClaim": {"claimName": "c"}}));
    vmi.status = Some(
        serde_json::from_value(json!({"volumeStatus": [{"name": "data", "target": "", "persistentVolumeClaimInfo":
            {"capacity": {"storage": "5Mi"}, "requests": {"storage": "5Mi"}}}]}))
        .unwrap(),
    );
    for (disk, length) in [
        (json!({"name": "data", "cdrom": {"bus": "sata"}}), 2048),
        (json!({"name": "data", "disk": {"bus": "sata"}}), 4 * MEBIBYTE),
    ] {
        std::fs::write(&path, [7_u8; 2048]).unwrap();
        vmi.spec.domain.devices.disks[0] = serde_json::from_value(disk.clone()).unwrap();
        prepare(&vmi, &scratch.0, &DEFAULT, Purpose::Start).unwrap();
        assert_eq!(std::fs::metadata(&path).unwrap().len(), length, "{disk}");
    }
}

#[test]
fn a_domain_starts_without_a_hot_plugged_volume_that_it_cannot_open() {
    let scratch = Scratch::new("plugged");
    std::fs::create_dir_all(scratch.1.join("hotplug")).unwrap();
    let image = scratch.1.join("hotplug/data.img");
    let mut vmi = vmi(json!({"name": "data", "persistentVolumeClaim": {"claimName": "c", "hotpluggable": true}}));
    let status = json!({"volumeStatus": [{"name": "data", "target": "", "phase": "Ready", "hotplugVolume": {}}]});
    vmi.status = Some(serde_json::from_value(status).unwrap());
    // Nobody may write to it, not even root.
    std::os::unix::fs::symlink("/sys/kernel/uevent_seqnum", &image).unwrap();
    let started = prepare(&vmi, &scratch.0, &DEFAULT, Purpose::Start).unwrap();
    assert!(started.sources.is_empty() && started.left_out[0].0 == "data", "{started:?}");
    let mut continues = vmi.clone();
    continues.status.as_mut().unwrap().hibernation =
        Some(SavedMemory { phase: SavedMemoryPhase::Restoring, ..SavedMemory::default() });
    for (vmi, purpose) in [(&continues, Purpose::Start), (&vmi, Purpose::MigrationTarget)] {
        let refused = prepare(vmi, &scratch.0, &DEFAULT, purpose);
        assert!(matches!(refused, Err(DiskError::Refused { .. })), "{purpose:?} {refused:?}");
    }
    std::fs::remove_file(&image).unwrap();
    std::fs::write(&image, [0; 512]).unwrap();
    for purpose in [Purpose::Start, Purpose::MigrationTarget] {
        assert!(prepare(&vmi, &scratch.0, &DEFAULT, purpose).unwrap().sources.contains_key("data"));
    }
}

#[test]
fn the_cluster_limits_the_lack_of_a_claim() {
    let scratch = Scratch::new("tolerance");
    let directory = scratch.1.join("private/vmi-disks/data");
    let stat = rustix::fs::statvfs(&directory).unwrap();
    let free = stat.f_bavail.saturating_mul(stat.f_frsize);
    // Free space changes during the test, so the rows stay far from the limits.
    for (size, least, lack_percent, reserve, made) in [
        (free / 4, 0, 0, 0, true),
        (free / 4, 0, 0, free, false),
        (free * 2, 0, 10, 0, false),
        (free * 2, 0, 75, 0, true),
        (free * 2, 0, 100, free, true),
        // A disk that is copied into the image needs its size.
        (free / 4, free / 4, 0, 0, true),
        (free * 2, free / 4, 75, 0, true),
        (free * 2, free * 2, 75, 0, false),
    ] {
        let path = directory.join("made.img");
        let _ = std::fs::remove_file(&path);
        let tolerance = Tolerance { lack_percent, reserve };
        let result = make_raw(&path, &directory, NewImage { size, least, tolerance: &tolerance });
        assert_eq!(result.is_ok(), made, "{lack_percent} {least} {result:?}");
        assert_eq!(path.exists(), made);
    }
}

#[test]
fn cve_2025_64433_a_link_in_a_claim_is_not_followed_out_of_it() {
    let scratch = Scratch::new("cve-2025-64433");
    std::fs::write(scratch.1.join("secret"), "x").unwrap();
    std::os::unix::fs::symlink("../../../secret", scratch.1.join("private/vmi-disks/data/disk.img")).unwrap();
    let vmi = vmi(json!({"name": "data", "persistentVolumeClaim": {"claimName": "c"}}));
    assert!(matches!(prepare(&vmi, &scratch.0, &DEFAULT, Purpose::Start), Err(DiskError::File { .. })));
}

#[test]
fn a_config_map_becomes_an_image_of_its_keys() {
    let scratch = Scratch::new("config");
    let dir = scratch.1.join("private/config-map/cm");
    std::fs::create_dir_all(dir.join("..2026")).unwrap();
    std::os::unix::fs::symlink("..2026", dir.join("..data")).unwrap();
    let keys = ["key", ".dockerconfigjson"];
    for key in keys {
        std::fs::write(dir.join("..2026").join(key), "value").unwrap();
        std::os::unix::fs::symlink(format!("..data/{key}"), dir.join(key)).unwrap();
    }
    assert_eq!(config_files(&dir).unwrap(), Files::from(keys.map(|key| (key.to_owned(), b"value".to_vec()))));
    let vmi = vmi(json!({"name": "cm", "configMap": {"name": "c"}}));
    assert!(prepare(&vmi, &scratch.0, &DEFAULT, Purpose::Start).unwrap().sources["cm"].made_size > 0);
}

#[test]
fn block_sizes_are_looked_up_where_the_disk_matches_those_of_the_volume() {
    let scratch = Scratch::new("blocks");
    let mut vmi = vmi(json!({"name": "e", "emptyDisk": {"capacity": "2Mi"}}));
    assert!(prepare(&vmi, &scratch.0, &DEFAULT, Purpose::Start).unwrap().block_sizes.is_empty());
    let disk = &mut vmi.spec.domain.devices.disks[0];
    disk.block_size = serde_json::from_value(json!({"matchVolume": {}})).unwrap();
    assert!(prepare(&vmi, &scratch.0, &DEFAULT, Purpose::Start).unwrap().block_sizes["e"].logical >= 512);
}

#[test]
fn tags_of_devices_are_written_to_a_config_drive_only() {
    let scratch = Scratch::new("roles");
    let device = TaggedDevice { kind: "nic", bus: "pci".into(), tags: ["backup".into()], ..TaggedDevice::default() };
    for (kind, tagged) in [("cloudInitConfigDrive", true), ("cloudInitNoCloud", false)] {
        let vmi = vmi(json!({"name": "ci", kind: {"userData": "x"}}));
        let before = prepare(&vmi, &scratch.0, &DEFAULT, Purpose::Start).unwrap().sources["ci"].made_size;
        let after = write_tags(&vmi, &scratch.0, vec![device.clone()], Purpose::Start).unwrap();
        assert_eq!(after.is_some_and(|(volume, size)| volume == "ci" && size >= before), tagged, "{kind}");
        let image = std::fs::read(scratch.0.cloud_init("ci")).unwrap();
        let has_tag = image.windows(8).any(|text| text == b"\"backup\"");
        assert_eq!(has_tag, tagged, "{kind}");
    }
}

/// QEMU has opened the image before.
#[test]
fn tags_of_a_domain_that_arrives_are_written_in_place_unless_the_image_is_copied() {
    let scratch = Scratch::new("tags-arrival");
    let device = TaggedDevice { kind: "nic", bus: "pci".into(), tags: ["backup".into()], ..TaggedDevice::default() };
    for (device_of, tagged) in [
        (json!({"name": "ci", "cdrom": {"bus": "sata"}}), true),
        (json!({"name": "ci", "disk": {"bus": "virtio", "readonly": true}}), true),
        (json!({"name": "ci", "disk": {"bus": "virtio"}}), false),
    ] {
        let mut vmi = vmi(json!({"name": "ci", "cloudInitConfigDrive": {"userData": "x"}}));
        vmi.spec.domain.devices.disks = vec![serde_json::from_value(device_of.clone()).unwrap()];
        prepare(&vmi, &scratch.0, &DEFAULT, Purpose::MigrationTarget).unwrap();
        let mut opened = std::fs::File::open(scratch.0.cloud_init("ci")).unwrap();
        let written = write_tags(&vmi, &scratch.0, vec![device.clone()], Purpose::MigrationTarget).unwrap();
        assert_eq!(written.is_some(), tagged, "{device_of}");
        let mut image = Vec::new();
        std::io::Read::read_to_end(&mut opened, &mut image).unwrap();
        assert_eq!(image.windows(8).any(|text| text == b"\"backup\""), tagged, "{device_of}");
    }
}

#[test]
fn an_empty_disk_below_one_mebibyte_is_refused() {
    let scratch = Scratch::new("empty");
    let vmi = vmi(json!({"name": "e", "emptyDisk": {"capacity": "1000Ki"}}));
    assert!(matches!(prepare(&vmi, &scratch.0, &DEFAULT, Purpose::Start), Err(DiskError::TooSmall(_))));
}

/// The file is the node's: the launcher neither creates it nor follows a link out of its directory.
#[test]
fn cve_2025_64324_a_host_disk_is_a_file_that_exists_in_its_directory() {
    let scratch = Scratch::new("cve-2025-64324");
    std::fs::write(scratch.1.join("secret"), "kept").unwrap();
    let directory = scratch.1.join("private/vmi-disks/data");
    let source = json!({"path": "/data/disk.img", "type": "DiskOrCreate", "capacity": "4Mi"});
    let vmi = vmi(json!({"name": "data", "hostDisk": source}));
    let prepare = || prepare(&vmi, &scratch.0, &DEFAULT, Purpose::Start);
    assert!(matches!(prepare(), Err(DiskError::File { .. })));
    for target in ["../../../secret", "../../../absent", "gone"] {
        std::os::unix::fs::symlink(target, directory.join("disk.img")).unwrap();
        let made = prepare();
        assert!(matches!(made, Err(DiskError::File { .. })), "{target}: {made:?}");
        std::fs::remove_file(directory.join("disk.img")).unwrap();
    }
    assert_eq!(std::fs::read(scratch.1.join("secret")).unwrap(), b"kept");
    assert!(!scratch.1.join("absent").exists() && !directory.join("gone").exists());
    std::fs::write(directory.join("disk.img"), [0; 1024]).unwrap();
    let Backend::File { path, format } = &prepare().unwrap().sources["data"].backend else { panic!() };
    assert_eq!((path, *format), (&directory.join("disk.img"), ImageFormat::Raw));
}

#[test]
fn ignition_data_of_an_annotation_is_written_to_a_file() {
    let scratch = Scratch::new("ignition");
    let mut vmi = vmi(json!({"name": "e", "emptyDisk": {"capacity": "2Mi"}}));
    for (data, written) in [(None, None), (Some(""), None), (Some("{\"ignition\": {}}"), Some("{\"ignition\": {}}"))] {
        let key = "kubevirt.io/ignitiondata".to_owned();
        vmi.metadata.annotations = data.map(|data| [(key, data.to_owned())].into());
        let path = prepare(&vmi, &scratch.0, &DEFAULT, Purpose::MigrationTarget).unwrap().ignition;
        assert_eq!(path.map(|path| std::fs::read_to_string(path).unwrap()).as_deref(), written);
    }
}

#[test]
fn the_disk_with_metrics_is_made_for_its_volume() {
    let scratch = Scratch::new("metrics");
    let vmi = vmi(json!({"name": "m", "downwardMetrics": {}}));
    let Backend::File { path, .. } = &prepare(&vmi, &scratch.0, &DEFAULT, Purpose::Start).unwrap().sources["m"].backend
    else {
        panic!()
    };
    assert_eq!((path, std::fs::metadata(path).unwrap().len()), (&scratch.0.metrics_disk(), 262_144));
}

#[test]
fn a_domain_that_arrives_leaves_the_claims_as_they_are() {
    let scratch = Scratch::new("arrival");
    let image = scratch.1.join("private/vmi-disks/data/disk.img");
    let mut vmi = vmi(json!({"name": "data", "persistentVolumeClaim": {"claimName": "c"}}));
    let claim = json!({"capacity": {"storage": "5Mi"}, "requests": {"storage": "5Mi"}, "filesystemOverhead": "0"});
    let status = |migrated: serde_json::Value| {
        let volumes = json!([{"name": "data", "target": "", "persistentVolumeClaimInfo": claim}]);
        serde_json::from_value(json!({"volumeStatus": volumes, "migratedVolumes": migrated})).unwrap()
    };
    vmi.status = Some(status(json!([])));
    assert!(prepare(&vmi, &scratch.0, &DEFAULT, Purpose::MigrationTarget).is_err(), "it is the source's to create");
    std::fs::write(&image, [0; 1024]).unwrap();
    prepare(&vmi, &scratch.0, &DEFAULT, Purpose::MigrationTarget).unwrap();
    assert_eq!(std::fs::metadata(&image).unwrap().len(), 1024, "the source writes to it");
    // The claim to which a volume is copied.
    std::fs::remove_file(&image).unwrap();
    vmi.status = Some(status(json!([{"volumeName": "data"}])));
    prepare(&vmi, &scratch.0, &DEFAULT, Purpose::MigrationTarget).unwrap();
    assert_eq!(std::fs::metadata(&image).unwrap().len(), 5 << 20);
}

#[test]
fn claim_to_which_a_volume_moves_holds_the_disk_or_is_refused() {
    let scratch = Scratch::new("destination");
    let image = scratch.1.join("private/vmi-disks/data/disk.img");
    let mut vmi = vmi(json!({"name": "data", "persistentVolumeClaim": {"claimName": "c"}}));
    let claim = |capacity: &str, request: &str, mode: &str| {
        json!({
            "capacity": {"storage": capacity}, "requests": {"storage": request}, "volumeMode": mode,
            "filesystemOverhead": "0.25",
        })
    };
    let small = "volume data: the claim to which it moves holds a disk of ";
    // Size of the former claim and its mode, capacity and request of the new one, MiB of its image; MiB that the image has then.
    for (size, mode, capacity, request, present, expected) in [
        ("4Mi", "Block", "8Mi", "8Mi", None, Ok(8)),
        ("4Mi", "Filesystem", "8Mi", "8Mi", None, Ok(8)),
        ("8Mi", "Block", "8Mi", "8Mi", None, Ok(8)),
        ("8Mi", "Block", "16Mi", "4Mi", None, Ok(8)),
        ("8Mi", "Block", "4Mi", "4Mi", None, Err("4194304 B, its present one has at least 8388608 B")),
        // The image of a file system can be smaller than its claim: QEMU compares the sizes.
        ("8Mi", "Filesystem", "4Mi", "4Mi", None, Ok(4)),
        ("4Mi", "Block", "8Mi", "8Mi", Some(1), Ok(6)),
        ("4Mi", "Block", "4Mi", "4Mi", Some(1), Err("3145728 B, its present one has at least 4194304 B")),
        ("4Mi", "Filesystem", "4Mi", "4Mi", Some(1), Ok(3)),
        ("4Mi", "Block", "8Mi", "8Mi", Some(9), Ok(9)),
    ] {
        let _ = std::fs::remove_file(&image);
        if let Some(mebibytes) = present {
            std::fs::File::create(&image).unwrap().set_len(mebibytes << 20).unwrap();
        }
        let (former, new) = (claim(size, size, mode), claim(capacity, request, "Filesystem"));
        vmi.status = Some(
            serde_json::from_value(json!({
                "volumeStatus": [{"name": "data", "target": "vda", "persistentVolumeClaimInfo": new}],
                "migratedVolumes": [{"volumeName": "data", "sourcePVCInfo": former, "destinationPVCInfo": new}],
            }))
            .unwrap(),
        );
        let row = format!("{size} {mode} -> {capacity} {request} {present:?}");
        let prepared = prepare(&vmi, &scratch.0, &DEFAULT, Purpose::MigrationTarget);
        match (prepared, expected) {
            (Ok(prepared), Ok(mebibytes)) => {
                let (meta, source) = (std::fs::metadata(&image).unwrap(), &prepared.sources["data"]);
                assert_eq!(meta.len(), mebibytes << 20, "{row}");
                assert_eq!(source.backend, claim_backend("data", false, &scratch.0), "{row}");
            }
            (Err(error), Err(text)) => assert_eq!(error.to_string(), format!("{small}{text}"), "{row}"),
            (prepared, _) => panic!("{row}: {prepared:?}"),
        }
        assert!(present.is_some() || image.exists() == expected.is_ok(), "{row}");
    }
    // The source's launcher names the image.
    std::fs::rename(&image, image.with_file_name("other.img")).unwrap();
    std::os::unix::fs::symlink("other.img", &image).unwrap();
    let error = prepare(&vmi, &scratch.0, &DEFAULT, Purpose::MigrationTarget).unwrap_err().to_string();
    assert!(error.contains("must not be a symbolic link"), "{error}");
    assert!(prepare(&vmi, &scratch.0, &DEFAULT, Purpose::Start).is_ok());
}

#[test]
fn copied_images_have_the_recorded_size_and_drives_their_own() {
    let scratch = Scratch::new("sizes");
    std::fs::write(scratch.1.join("private/config-map/cm/key"), "value").unwrap();
    for (device, resized) in [
        (json!({"disk": {"bus": "virtio"}}), true),
        (json!({"disk": {"bus": "virtio", "readonly": true}}), false),
        (json!({"cdrom": {"bus": "sata"}}), false),
    ] {
        let mut vmi = vmi(json!({"name": "cm", "configMap": {"name": "c"}}));
        let mut disk = json!({"name": "cm"});
        disk.as_object_mut().unwrap().extend(device.as_object().unwrap().clone());
        vmi.spec.domain.devices.disks = vec![serde_json::from_value(disk).unwrap()];
        vmi.status = Some(
            serde_json::from_value(json!({"volumeStatus": [{"name": "cm", "target": "", "size": 1 << 20}]})).unwrap(),
        );
        prepare(&vmi, &scratch.0, &DEFAULT, Purpose::MigrationTarget).unwrap();
        let matched = match_sizes(&vmi, &scratch.0).unwrap();
        assert_eq!(matched, Vec::from_iter(resized.then(|| ("cm".to_owned(), 1_u64 << 20))), "{device}");
        let size = std::fs::metadata(scratch.0.config_disk("cm")).unwrap().len();
        assert_eq!(size == 1 << 20, resized, "{device}: {size}");
    }
}
