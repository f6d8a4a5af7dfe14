//! Rendered domains.

mod devices;
mod diff;
mod disks;
mod resources;

use std::{collections::BTreeMap, path::PathBuf};

use serde_json::{Value, json};

use super::*;
use crate::storage::{Backend, DiskSource, ImageFormat, image::BlockSizes};

fn vmi(spec: Value) -> VirtualMachineInstance {
    serde_json::from_value(json!({
        "apiVersion": "kubevirt.io/v1", "kind": "VirtualMachineInstance",
        "metadata": {"name": "vm", "namespace": "ns", "uid": "u"}, "spec": spec,
    }))
    .unwrap()
}

fn file(path: &str, format: ImageFormat) -> DiskSource {
    DiskSource {
        backend: Backend::File { path: path.into(), format },
        backing: None,
        direct_io: true,
        preallocated: false,
        made_size: 0,
    }
}

fn prepared() -> Prepared {
    let mut sources = BTreeMap::new();
    let mut root = file("/eph/root/disk.qcow2", ImageFormat::Qcow2);
    root.backing = Some(("/images/disk.img".into(), ImageFormat::Raw));
    sources.insert("root".into(), root);
    sources.insert("ci".into(), DiskSource { made_size: 4096, ..file("/eph/ci.iso", ImageFormat::Raw) });
    sources.insert("slow".into(), DiskSource { direct_io: false, ..file("/eph/slow.img", ImageFormat::Raw) });
    let block = Backend::Block { path: "/dev/data".into() };
    sources.insert("data".into(), DiskSource { backend: block, ..file("", ImageFormat::Raw) });
    let block_sizes = BTreeMap::from([("data".to_owned(), BlockSizes { logical: 512, physical: 4096, discard: 0 })]);
    let (kernel, initrd) = (Some("/k/vmlinuz".into()), Some("/k/initrd".into()));
    Prepared { sources, block_sizes, kernel, initrd, ..Prepared::default() }
}

fn options() -> protocol::VmiOptions {
    protocol::VmiOptions {
        smbios: Some(protocol::SmBios {
            manufacturer: "KubeVirt".into(),
            product: "None".into(),
            family: "KubeVirt".into(),
            ..Default::default()
        }),
        balloon_stats_period: 10,
        nics: vec![protocol::Nic {
            name: "default".into(),
            tap: "tap0".into(),
            mtu: 1450,
            mac: "02:00:00:00:00:01".into(),
            ..Default::default()
        }],
        ..protocol::VmiOptions::default()
    }
}

fn convert_with(vmi: &VirtualMachineInstance, kvm: bool) -> Result<Domain, DomainError> {
    convert_for(vmi, kvm, &options())
}

fn convert_for(vmi: &VirtualMachineInstance, kvm: bool, options: &protocol::VmiOptions) -> Result<Domain, DomainError> {
    convert_prepared(vmi, kvm, options, &prepared())
}

fn convert_prepared(
    vmi: &VirtualMachineInstance,
    kvm: bool,
    options: &protocol::VmiOptions,
    prepared: &Prepared,
) -> Result<Domain, DomainError> {
    convert_on(&four_cpus(), vmi, kvm, options, prepared)
}

/// Converts a VMI whose pod has these CPUs.
fn convert_on(
    cpus: &HostCpus,
    vmi: &VirtualMachineInstance,
    kvm: bool,
    options: &protocol::VmiOptions,
    prepared: &Prepared,
) -> Result<Domain, DomainError> {
    let efi = vmi.spec.domain.firmware.as_ref().and_then(|firmware| firmware.bootloader.as_ref()?.efi.as_ref());
    let secure = efi.is_some_and(|efi| efi.persistent == Some(true));
    let uefi = Uefi { code: "/ovmf/code.fd".into(), vars: "/ovmf/vars.fd".into(), secure };
    convert(
        vmi,
        &Environment {
            kvm,
            allow_emulation: true,
            serial: Path::new("/p/u/virt-serial0"),
            vnc: Path::new("/p/u/virt-vnc"),
            metrics: Path::new("/p/u/downwardmetrics.sock"),
            usb_redirection: &["/p/u/virt-usbredir-0".into(), "/p/u/virt-usbredir-1".into()],
            nvram: Path::new("/p/nvram/vm_VARS.fd"),
            tpm: Path::new("/p/swtpm.sock"),
            secrets: Path::new("/p/secret"),
            virtiofs: Path::new("/p/virtiofs"),
            prepared,
            uefi: Some(&uefi),
            zones: Path::new("/p/zoneinfo"),
            host_devices: &AllocatedDevices::new([("USB_RESOURCE_V_ORG_STICK".into(), "1:4".into())]),
            options,
            cpus: Some(cpus),
        },
    )
}

/// A cell of two cores with two threads.
fn four_cpus() -> HostCpus {
    let cpu = |id, siblings: [u32; 2]| host_topology::HostCpu { id, siblings: siblings.into() };
    let cpus = vec![cpu(0, [0, 2]), cpu(1, [1, 3]), cpu(2, [0, 2]), cpu(3, [1, 3])];
    let cells = vec![host_topology::HostCell { cpus, ..host_topology::HostCell::default() }];
    HostCpus {
        cpuset: (0..4).collect(),
        topology: host_topology::HostTopology { numa: host_topology::HostNuma { cells } },
    }
}

fn xml(spec: Value) -> String {
    convert_with(&vmi(spec), true).unwrap().xml
}

fn error(spec: Value) -> DomainError {
    convert_with(&vmi(spec), true).unwrap_err()
}

/// A spec with one disk, changed by `change`.
fn with_disk(disk: Value) -> Value {
    json!({"domain": {"memory": {"guest": "64Mi"}, "devices": {"disks": [disk]}},
        "volumes": [{"name": "root", "containerDisk": {"image": "i"}}, {"name": "slow", "emptyDisk": {"capacity": "1Mi"}},
            {"name": "data", "persistentVolumeClaim": {"claimName": "c"}}]})
}

fn with_domain(part: Value) -> Value {
    let mut domain = json!({"memory": {"guest": "64Mi"}, "devices": {}});
    domain.as_object_mut().unwrap().extend(part.as_object().unwrap().clone());
    json!({"domain": domain})
}

fn full() -> Value {
    json!({
        "startStrategy": "Paused",
        "networks": [{"name": "default", "pod": {}}],
        "volumes": [
            {"name": "root", "containerDisk": {"image": "i"}},
            {"name": "ci", "cloudInitNoCloud": {"userData": "x"}},
            {"name": "data", "persistentVolumeClaim": {"claimName": "c"}},
            {"name": "tables", "secret": {"secretName": "s"}},
        ],
        "domain": {
            "machine": {"type": "pc-q35-9.2"},
            "rebootPolicy": "Terminate",
            "memory": {"guest": "1Gi"},
            "cpu": {"sockets": 2, "cores": 2, "threads": 1, "model": "Skylake-Server",
                "features": [{"name": "vmx", "policy": "require"}, {"name": "pcid"}]},
            "chassis": {"manufacturer": "m", "asset": "a"},
            "ioThreadsPolicy": "auto",
            "resources": {"requests": {"cpu": "2"}},
            "clock": {"utc": {"offsetSeconds": 60}, "timer": {"rtc": {"tickPolicy": "catchup", "track": "guest"},
                "pit": {"tickPolicy": "delay"}, "hpet": {"present": false}, "hyperv": {}, "kvm": {}}},
            "features": {"acpi": {}, "apic": {"endOfInterrupt": true}, "smm": {}, "kvm": {"hidden": true}, "pvspinlock": {},
                "hyperv": {"relaxed": {}, "vapic": {}, "vpindex": {}, "synic": {}, "spinlocks": {"spinlocks": 8191},
                    "synictimer": {"direct": {}}, "vendorid": {"vendorid": "me & you"}, "tlbflush": {}, "ipi": {},
                    "frequencies": {}, "reenlightenment": {}, "reset": {}, "runtime": {}, "evmcs": {"enabled": false}}},
            "firmware": {"uuid": "5d307ca9-b3ef-428c-8861-06e72d69f223", "serial": "S<1>",
                "bootloader": {"efi": {"secureBoot": false}}, "acpi": {"slicNameRef": "tables"},
                "kernelBoot": {"kernelArgs": "console=ttyS0 a='b'", "container": {"image": "k", "kernelPath": "/k"}}},
            "devices": {
                "blockMultiQueue": true, "networkInterfaceMultiqueue": true, "rng": {},
                "watchdog": {"name": "dog", "i6300esb": {"action": "poweroff"}},
                "sound": {"name": "snd", "model": "ac97"},
                "panicDevices": [{"model": "isa"}],
                "inputs": [{"name": "t", "type": "tablet", "bus": "usb"}, {"name": "v", "type": "tablet", "bus": "virtio"}],
                "interfaces": [{"name": "default", "masquerade": {}, "bootOrder": 2, "acpiIndex": 3, "pciAddress": "0000:03:00.0"}],
                "disks": [
                    {"name": "root", "disk": {"bus": "virtio"}, "bootOrder": 1, "serial": "root", "dedicatedIOThread": true},
                    {"name": "ci", "cdrom": {"bus": "sata", "tray": "closed"}},
                    {"name": "data", "lun": {"bus": "scsi"}, "shareable": true, "errorPolicy": "report",
                        "blockSize": {"custom": {"logical": 512, "physical": 4096}}},
                    {"name": "drive", "cdrom": {"bus": "sata"}},
                ],
            },
        },
    })
}

/// A guest as the preference `windows.11.virtio` makes it.
fn windows() -> Value {
    let timers = json!({"hpet": {"present": false}, "hyperv": {}, "pit": {"tickPolicy": "delay"},
        "rtc": {"tickPolicy": "catchup"}});
    json!({
        "networks": [{"name": "default", "pod": {}}],
        "volumes": [{"name": "root", "persistentVolumeClaim": {"claimName": "c"}}],
        "domain": {
            "memory": {"guest": "4Gi"},
            "cpu": {"sockets": 2, "cores": 1, "threads": 1},
            "clock": {"utc": {}, "timer": timers},
            "features": {"acpi": {}, "apic": {}, "smm": {}, "hyperv": {"relaxed": {}, "vapic": {}, "vpindex": {},
                "synic": {}, "spinlocks": {"spinlocks": 8191}, "synictimer": {"direct": {}}, "tlbflush": {}, "ipi": {},
                "frequencies": {}, "reenlightenment": {}, "reset": {}, "runtime": {}}},
            "firmware": {"uuid": "5d307ca9-b3ef-428c-8861-06e72d69f223",
                "bootloader": {"efi": {"secureBoot": true, "persistent": true}}},
            "devices": {
                "tpm": {"persistent": true},
                "inputs": [{"name": "t", "type": "tablet", "bus": "virtio"}],
                "interfaces": [{"name": "default", "masquerade": {}}],
                "disks": [{"name": "root", "disk": {"bus": "virtio"}}],
            },
        },
    })
}

#[test]
fn emulated_guests_start_without_enlightenments_of_hyperv() {
    for (kvm, shown) in [(true, 2), (false, 0)] {
        let domain = convert_with(&vmi(windows()), kvm).unwrap();
        assert_eq!(domain.xml.matches("<hyperv>").count() + domain.xml.matches("hypervclock").count(), shown, "{kvm}");
    }
    let passthrough =
        json!({"domain": {"memory": {"guest": "64Mi"}, "devices": {}, "features": {"hypervPassthrough": {}}}});
    for kvm in [true, false] {
        let domain = convert_with(&vmi(passthrough.clone()), kvm).unwrap();
        assert_eq!(domain.xml.contains("mode='passthrough'"), kvm);
    }
}

/// `make domains` checks the recorded XML with the libvirt of the launcher image.
#[test]
fn vmis_become_the_recorded_xml() {
    let plain = json!({"domain": {"memory": {"guest": "128Mi"}, "features": {"acpi": {}},
            "devices": {"interfaces": [{"name": "default", "masquerade": {}}],
                "disks": [{"name": "root", "disk": {"bus": "virtio"}}, {"name": "ci", "disk": {"bus": "virtio"}}]}},
        "networks": [{"name": "default", "pod": {}}],
        "volumes": [{"name": "root", "containerDisk": {"image": "i"}}, {"name": "ci", "cloudInitNoCloud": {"userData": "x"}}]});
    let mut pinned = plain.clone();
    pinned["domain"]["cpu"] = json!({"sockets": 1, "cores": 1, "threads": 2, "maxSockets": 2, "dedicatedCpuPlacement": true,
        "isolateEmulatorThread": true, "realtime": {}});
    pinned["domain"]["ioThreadsPolicy"] = json!("supplementalPool");
    pinned["domain"]["ioThreads"] = json!({"supplementalPoolThreadCount": 1});
    let shared = json!({"domain": {"memory": {"guest": "128Mi", "maxGuest": "1Gi"}, "features": {"acpi": {}},
            "devices": {"filesystems": [{"name": "data", "virtiofs": {}}, {"name": "settings", "virtiofs": {}}]}},
        "volumes": [{"name": "data", "persistentVolumeClaim": {"claimName": "c"}},
            {"name": "settings", "configMap": {"name": "c"}}]});
    let arm64 = json!({"architecture": "arm64", "domain": {"memory": {"guest": "256Mi"}, "features": {"acpi": {}},
            "machine": {"type": "virt"}, "cpu": {"model": "host-passthrough", "cores": 2},
            "firmware": {"bootloader": {"efi": {"secureBoot": false}},
                "kernelBoot": {"kernelArgs": "console=ttyAMA0", "container": {"image": "k", "kernelPath": "/vmlinuz"}}},
            "devices": {"tpm": {"persistent": true}, "rng": {}, "panicDevices": [{"model": "pvpanic"}],
                "interfaces": [{"name": "default", "masquerade": {}}],
                "disks": [{"name": "root", "disk": {"bus": "virtio"}}, {"name": "ci", "disk": {"bus": "scsi"}}]}},
        "networks": [{"name": "default", "pod": {}}],
        "volumes": [{"name": "root", "containerDisk": {"image": "i"}}, {"name": "ci", "cloudInitNoCloud": {"userData": "x"}}]});
    for (name, spec, kvm) in [
        ("arm64", &arm64, true),
        ("plain", &plain, true),
        ("plain-emulated", &plain, false),
        ("full", &full(), true),
        ("windows", &windows(), true),
        ("shared", &shared, false),
        ("pinned", &pinned, true),
    ] {
        let xml = convert_with(&vmi(spec.clone()), kvm).unwrap().xml;
        assert_recorded(name, &xml);
    }
}

/// Compares XML with that of a file, or records it.
fn assert_recorded(name: &str, xml: &str) {
    let path = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join(format!("src/domain/recorded/{name}.xml"));
    if std::env::var_os("RECORD").is_some() {
        std::fs::write(&path, xml).unwrap();
    }
    assert_eq!(xml, std::fs::read_to_string(&path).unwrap(), "{name}; run with RECORD=1 to record anew");
}

/// Ignition, metrics of the node, and devices on the root complex.
#[test]
fn annotations_and_metrics_become_the_recorded_xml() {
    let spec = json!({
        "networks": [{"name": "default", "pod": {}}],
        "volumes": [{"name": "root", "containerDisk": {"image": "i"}}, {"name": "slow", "downwardMetrics": {}}],
        "domain": {
            "memory": {"guest": "128Mi"},
            "features": {"acpi": {}},
            "devices": {
                "downwardMetrics": {}, "rng": {}, "autoattachVSOCK": true,
                "watchdog": {"name": "dog", "i6300esb": {}},
                "sound": {"name": "snd", "model": "ich9"},
                "inputs": [{"name": "v", "type": "tablet", "bus": "virtio"}],
                "interfaces": [{"name": "default", "masquerade": {}, "tag": "lan"}],
                "disks": [
                    {"name": "root", "disk": {"bus": "virtio", "pciAddress": "0000:00:05.0"}, "tag": "os"},
                    {"name": "slow", "disk": {"bus": "virtio"}},
                ],
            },
        },
    });
    let mut vmi = vmi(spec);
    vmi.status = serde_json::from_value(json!({"VSOCKCID": 5})).unwrap();
    let key = "kubevirt.io/placePCIDevicesOnRootComplex".to_owned();
    vmi.metadata.annotations = Some([(key, "true".to_owned())].into());
    let prepared =
        Prepared { ignition: Some("/p/ignition-data/data.ign".into()), kernel: None, initrd: None, ..prepared() };
    let domain = convert_prepared(&vmi, true, &options(), &prepared).unwrap();
    assert!(!domain.ports.any(), "no device can be plugged in on the root complex");
    assert_recorded("root-complex", &domain.xml);
}

#[test]
fn without_kvm_emulation_must_be_allowed() {
    let vmi = vmi(with_domain(json!({})));
    let prepared = Prepared::default();
    let options = protocol::VmiOptions::default();
    let allocated = AllocatedDevices::default();
    let environment = Environment {
        kvm: false,
        allow_emulation: false,
        serial: Path::new(""),
        vnc: Path::new(""),
        metrics: Path::new(""),
        usb_redirection: &[],
        nvram: Path::new(""),
        tpm: Path::new(""),
        secrets: Path::new(""),
        virtiofs: Path::new(""),
        prepared: &prepared,
        uefi: None,
        zones: Path::new(""),
        host_devices: &allocated,
        options: &options,
        cpus: None,
    };
    assert_eq!(convert(&vmi, &environment), Err(DomainError::NoKvm));
    let domain = convert(&vmi, &Environment { allow_emulation: true, ..environment }).unwrap();
    assert!(domain.xml.starts_with("<domain type='qemu'>") && domain.xml.contains("<cpu mode='maximum'>"));
}

#[test]
fn unknown_values_are_errors() {
    for none in [json!({"cache": "none"}), json!({"shareable": true}), json!({"shareable": true, "cache": "none"})] {
        let mut disk = json!({"name": "slow", "disk": {"bus": "virtio"}});
        disk.as_object_mut().unwrap().extend(none.as_object().unwrap().clone());
        assert!(matches!(error(with_disk(disk)), DomainError::DirectIo(_)), "{none}");
    }
    assert!(matches!(
        error(with_disk(json!({"name": "root", "shareable": true, "cache": "writeback", "disk": {}}))),
        DomainError::ShareableCache(_)
    ));
    assert!(matches!(error(with_disk(json!({"name": "gone", "disk": {"bus": "virtio"}}))), DomainError::NoVolume(_)));
    assert!(matches!(
        error(with_disk(json!({"name": "root", "disk": {"bus": "sata", "pciAddress": "0000:01:00.0"}}))),
        DomainError::PciAddressOfDisk(_)
    ));
    for (disk, field) in [
        (json!({"name": "root", "disk": {"bus": "ide"}}), "spec.domain.devices.disks.bus"),
        (json!({"name": "root", "io": "fast", "disk": {}}), "spec.domain.devices.disks.io"),
        (json!({"name": "root", "errorPolicy": "cry", "disk": {}}), "spec.domain.devices.disks.errorPolicy"),
    ] {
        assert!(matches!(error(with_disk(disk)), DomainError::Unsupported { field: f, .. } if f == field));
    }
    for (devices, field) in [
        (json!({"video": {"type": "qxl"}}), "spec.domain.devices.video.type"),
        (json!({"inputs": [{"name": "a", "type": "mouse"}]}), "spec.domain.devices.inputs.type"),
        (json!({"watchdog": {"name": "d", "diag288": {}}}), "spec.domain.devices.watchdog"),
        (json!({"interfaces": [{"name": "default", "model": "ne1000"}]}), "spec.domain.devices.interfaces.model"),
    ] {
        let error = error(with_domain(json!({"devices": devices})));
        assert!(matches!(error, DomainError::Unsupported { field: f, .. } if f == field), "{error}");
    }
    let interface = json!({"devices": {"interfaces": [{"name": "other"}]}});
    assert_eq!(error(with_domain(interface)), DomainError::NoNic("other".into()));
    let firmware = json!({"firmware": {"bootloader": {"efi": {}}}});
    assert_eq!(error(with_domain(firmware)), DomainError::NoFirmware(true));
    let control = json!({"firmware": {"serial": "a\u{1}"}});
    assert_eq!(error(with_domain(control)), DomainError::ControlCharacter);
}

#[test]
fn a_value_cannot_add_elements() {
    let xml = xml(with_domain(json!({"firmware": {"serial": "</entry><entry name='x'>",
        "kernelBoot": {"kernelArgs": "a & b < c"}}})));
    assert!(xml.contains("&lt;/entry&gt;&lt;entry name='x'&gt;"), "{xml}");
    assert!(xml.contains("<cmdline>a &amp; b &lt; c</cmdline>"), "{xml}");
}

#[test]
fn without_features_there_is_no_acpi_and_the_reboot_policy_applies() {
    assert!(!xml(with_domain(json!({}))).contains("<acpi/>"));
    assert!(!convert_with(&vmi(with_domain(json!({}))), true).unwrap().acpi);
    let rebooting = xml(with_domain(json!({"rebootPolicy": "Reboot"})));
    assert!(rebooting.contains("<on_reboot>restart</on_reboot>"));
}

#[test]
fn files_of_a_domain_have_names_that_fit() {
    assert_eq!(domain_name("ns", "vm"), "ns_vm");
    for (namespace, length) in [(1, 1), (63, 63), (63, 169), (63, 183), (63, 184), (2, 253), (63, 253)] {
        let (namespace, name) = ("n".repeat(namespace), "v".repeat(length));
        let domain = domain_name(&namespace, &name);
        assert!(format!("{domain}.xml.new").len() <= 255, "{domain}");
        let fits = namespace.len() + 1 + name.len() <= 247;
        assert_eq!(domain == format!("{namespace}_{name}"), fits, "{domain}");
    }
}

#[test]
fn firmware_is_found_under_the_names_of_several_distributions() {
    let has = |files: &'static [&str]| move |path: &Path| files.iter().any(|f| Path::new(f) == path);
    let directories = [Path::new("/usr/share/edk2/ovmf"), Path::new("/usr/share/OVMF")];
    let debian: &'static [&str] = &[
        "/usr/share/OVMF/OVMF_CODE_4M.secboot.fd",
        "/usr/share/OVMF/OVMF_VARS_4M.ms.fd",
        "/usr/share/OVMF/OVMF_CODE_4M.fd",
        "/usr/share/OVMF/OVMF_VARS_4M.fd",
    ];
    let booted = |architecture: &str, efi: Value| {
        vmi(json!({"architecture": architecture, "domain": {"firmware": {"bootloader": {"efi": efi}}, "devices": {}}}))
    };
    let secure = booted("amd64", json!({}));
    let plain = booted("amd64", json!({"secureBoot": false}));
    assert_eq!(select_uefi(&secure, &directories, has(debian)).unwrap().code, Path::new(debian[0]));
    assert_eq!(select_uefi(&plain, &directories, has(debian)).unwrap().vars, Path::new(debian[3]));
    // The image of the launcher has all names, as links to Debian's files.
    for (guest, end) in [(&secure, "secboot.fd"), (&plain, "fd")] {
        let found = select_uefi(guest, &directories, |path| path.starts_with(directories[1])).unwrap();
        let [code, vars] = ["CODE", "VARS"].map(|kind| directories[1].join(format!("OVMF_{kind}.{end}")));
        assert_eq!((found.code, found.vars), (code, vars));
    }
    let fedora: &'static [&str] = &["/usr/share/edk2/ovmf/OVMF_CODE.secboot.fd", "/usr/share/edk2/ovmf/OVMF_VARS.fd"];
    assert!(select_uefi(&secure, &directories, has(fedora)).is_none());
    assert_eq!(select_uefi(&plain, &directories, has(fedora)).unwrap().code, Path::new(fedora[0]));
    assert!(select_uefi(&vmi(json!({"domain": {"devices": {}}})), &directories, |_| true).is_none());

    let directories = [Path::new("/usr/share/AAVMF")];
    let found = select_uefi(&booted("arm64", json!({"secureBoot": false})), &directories, |_| true).unwrap();
    assert_eq!((found.code, found.secure), (PathBuf::from("/usr/share/AAVMF/AAVMF_CODE.fd"), false));
    assert!(select_uefi(&booted("arm64", json!({})), &directories, |_| true).is_none());
}

#[test]
fn a_guest_with_a_tsc_frequency_gets_a_timer() {
    let invtsc = json!({"features": [{"name": "invtsc", "policy": "require"}]});
    for (part, hint, timer) in [
        (json!({"cpu": invtsc}), Some(2_000_000_000), true),
        (json!({"cpu": invtsc, "clock": {"utc": {}}}), Some(2_000_000_000), true),
        (
            json!({"cpu": invtsc, "clock": {"utc": {}, "timer": {"hpet": {"present": false}}}}),
            Some(2_000_000_000),
            true,
        ),
        (json!({"cpu": invtsc}), None, false),
        (json!({}), Some(2_000_000_000), false),
    ] {
        let mut vmi = vmi(with_domain(part.clone()));
        let status = vmi.status.get_or_insert_default();
        status.topology_hints.get_or_insert_default().tsc_frequency = hint;
        let clock = features::clock(&vmi, Path::new(""), true).unwrap().map(|clock| clock.to_xml()).unwrap_or_default();
        assert_eq!(clock.contains("<timer name='tsc' frequency='2000000000'/>"), timer, "{part}: {clock}");
    }
}

#[test]
fn a_clock_needs_an_existing_time_zone() {
    let zones = std::env::temp_dir().join(format!("launcher-zones-{}", std::process::id()));
    std::fs::create_dir_all(zones.join("Europe")).unwrap();
    std::fs::write(zones.join("Europe/Berlin"), "TZif").unwrap();
    std::fs::write(zones.join("../launcher-zones-outside"), "TZif").unwrap();
    for (zone, known) in [
        ("Europe/Berlin", true),
        ("Mars/Olympus", false),
        ("Europe", false),
        ("../launcher-zones-outside", false),
        ("/etc/passwd", false),
    ] {
        let vmi = vmi(with_domain(json!({"clock": {"timezone": zone}})));
        let clock = features::clock(&vmi, &zones, true);
        if known {
            assert!(clock.unwrap().unwrap().to_xml().contains("timezone='Europe/Berlin'"));
        } else {
            let field = "spec.domain.clock.timezone";
            assert_eq!(clock.err(), Some(DomainError::Unsupported { field, value: zone.to_owned() }));
        }
    }
    std::fs::remove_dir_all(&zones).unwrap();
    std::fs::remove_file(std::env::temp_dir().join("launcher-zones-outside")).unwrap();
}
