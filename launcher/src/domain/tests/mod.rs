//! Rendered domains.

mod devices;
mod diff;
mod disks;

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
            cpus: Some(&four_cpus()),
        },
    )
}

/// A cell of two cores with two threads.
fn four_cpus() -> HostCpus {
    let cpu = |id, siblings: [u32; 2]| pinning::HostCpu { id, siblings: siblings.into() };
    let cpus = vec![cpu(0, [0, 2]), cpu(1, [1, 3]), cpu(2, [0, 2]), cpu(3, [1, 3])];
    let cells = vec![pinning::HostCell { cpus, ..pinning::HostCell::default() }];
    HostCpus { cpuset: (0..4).collect(), topology: pinning::HostTopology { numa: pinning::HostNuma { cells } } }
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
    let directory = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("src/domain/recorded");
    let shared = json!({"domain": {"memory": {"guest": "128Mi", "maxGuest": "1Gi"}, "features": {"acpi": {}},
            "devices": {"filesystems": [{"name": "data", "virtiofs": {}}, {"name": "settings", "virtiofs": {}}]}},
        "volumes": [{"name": "data", "persistentVolumeClaim": {"claimName": "c"}},
            {"name": "settings", "configMap": {"name": "c"}}]});
    for (name, spec, kvm) in [
        ("plain", &plain, true),
        ("plain-emulated", &plain, false),
        ("full", &full(), true),
        ("windows", &windows(), true),
        ("shared", &shared, false),
        ("pinned", &pinned, true),
    ] {
        let xml = convert_with(&vmi(spec.clone()), kvm).unwrap().xml;
        let path = directory.join(format!("{name}.xml"));
        if std::env::var_os("RECORD").is_some() {
            std::fs::write(&path, &xml).unwrap();
        }
        assert_eq!(xml, std::fs::read_to_string(&path).unwrap(), "{name}; run with RECORD=1 to record anew");
    }
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
    let path = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("src/domain/recorded/root-complex.xml");
    if std::env::var_os("RECORD").is_some() {
        std::fs::write(&path, &domain.xml).unwrap();
    }
    assert_eq!(domain.xml, std::fs::read_to_string(&path).unwrap(), "run with RECORD=1 to record anew");
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
fn memory_comes_from_guest_then_request_then_limit() {
    for (domain, expected) in [
        (json!({"memory": {"guest": "1Gi"}, "resources": {"requests": {"memory": "2Gi"}}}), "1073741824"),
        (
            json!({"memory": {}, "resources": {"requests": {"memory": "2Gi"}, "limits": {"memory": "3Gi"}}}),
            "2147483648",
        ),
        (json!({"memory": {}, "resources": {"limits": {"memory": "64M"}}}), "64000000"),
    ] {
        assert!(xml(with_domain(domain)).contains(&format!("<memory unit='b'>{expected}</memory>")));
    }
    assert_eq!(error(with_domain(json!({"memory": {}}))), DomainError::NoMemory);
    assert_eq!(error(with_domain(json!({"memory": {"guest": "-1Gi"}}))), DomainError::Memory("-1Gi".into()));
}

#[test]
fn processors_come_from_the_topology_or_the_cpu_quantity() {
    for (domain, vcpus, topology) in [
        (json!({}), 1, "sockets='1' cores='1' threads='1'"),
        (json!({"cpu": {"cores": 2, "threads": 2}}), 4, "sockets='1' cores='2' threads='2'"),
        (json!({"resources": {"limits": {"cpu": "2500m"}}}), 3, "sockets='3' cores='1' threads='1'"),
        (json!({"resources": {"requests": {"cpu": "2"}}}), 2, "sockets='2' cores='1' threads='1'"),
    ] {
        let xml = xml(with_domain(domain));
        assert!(xml.contains(&format!("<vcpu placement='static'>{vcpus}</vcpu>")), "{xml}");
        assert!(xml.contains(topology), "{xml}");
    }
}

#[test]
fn domain_can_grow_to_its_maximums() {
    let grown = xml(with_domain(json!({
        "cpu": {"sockets": 2, "cores": 2, "maxSockets": 4}, "memory": {"guest": "1Gi", "maxGuest": "4Gi"},
    })));
    for part in [
        "<maxMemory unit='b' slots='0'>4294967296</maxMemory>\n  <memory unit='b'>1073741824</memory>",
        "<vcpu placement='static' current='4'>8</vcpu>",
        "sockets='4' cores='2' threads='1'",
        "<cell id='0' cpus='0-7' memory='1073741824' unit='b'/>",
    ] {
        assert!(grown.contains(part), "{part} in {grown}");
    }
    let same = json!({"cpu": {"sockets": 2, "maxSockets": 2}, "memory": {"guest": "1Gi", "maxGuest": "1024Mi"}});
    let same = xml(with_domain(same));
    assert!(same.contains("<vcpu placement='static'>2</vcpu>"), "{same}");
    assert!(!same.contains("maxMemory") && !same.contains("<numa>"), "{same}");
}

/// A guest in huge pages that sees the NUMA nodes of its CPUs.
fn mapped(guest: &str, cpu: Value) -> Value {
    let mut cpu = cpu;
    cpu["dedicatedCpuPlacement"] = json!(true);
    cpu["numa"] = json!({"guestMappingPassthrough": {}});
    with_domain(json!({"cpu": cpu, "memory": {"guest": guest, "hugepages": {"pageSize": "2Mi"}}}))
}

#[test]
fn guest_has_the_numa_nodes_of_its_cpus() {
    let found = xml(mapped("64Mi", json!({"sockets": 2, "maxSockets": 4})));
    for part in [
        "<allocation mode='immediate'/>",
        "<memory mode='strict' nodeset='0'/>",
        "<memnode cellid='0' mode='strict' nodeset='0'/>",
        "<cell id='0' cpus='0,1,2,3' memory='67108864' unit='b'/>",
    ] {
        assert!(found.contains(part), "{part} in {found}");
    }
    assert!(!found.contains("nosharepages"), "{found}");
    let error = error(mapped("63Mi", json!({"cores": 1})));
    assert!(error.is_permanent());
    assert_eq!(
        error.to_string(),
        "cannot map the NUMA nodes of the host: 66060288 bytes of memory are no multiple of huge pages of 2097152 bytes"
    );
}

#[test]
fn huge_pages_back_the_guest() {
    let rendered = |memory: Value, annotations: Value| {
        let mut vmi = vmi(with_domain(json!({"memory": memory})));
        vmi.metadata.annotations = serde_json::from_value(annotations).unwrap();
        convert_with(&vmi, true)
    };
    let small = json!({"guest": "64Mi", "hugepages": {"pageSize": "2Mi"}});
    let grown = json!({"guest": "2Gi", "maxGuest": "4Gi", "hugepages": {"pageSize": "1Gi"}});
    let of = |size: &str| format!("<hugepages><page size='{size}' unit='b'/></hugepages>");
    for (memory, annotations, expected) in [
        (json!({"guest": "64Mi"}), json!({}), None),
        (small.clone(), json!({}), Some(of("2097152") + "<source type='memfd'/>")),
        (small.clone(), json!({"kubevirt.io/memfd": "true"}), Some(of("2097152") + "<source type='memfd'/>")),
        (small, json!({"kubevirt.io/memfd": "false"}), Some(of("2097152"))),
        (grown, json!({}), Some(of("1073741824") + "<source type='memfd'/><allocation mode='immediate'/>")),
    ] {
        let xml: String = rendered(memory.clone(), annotations).unwrap().xml.lines().map(str::trim).collect();
        let backing =
            xml.split_once("<memoryBacking>").and_then(|(_, rest)| Some(rest.split_once("</memoryBacking>")?.0));
        assert_eq!(backing, expected.as_deref(), "{memory}");
    }
    let nothing = rendered(json!({"guest": "64Mi", "hugepages": {"pageSize": "0"}}), json!({}));
    assert_eq!(nothing.unwrap_err(), DomainError::PageSize("0".into()));
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
    let debian = [
        "/usr/share/OVMF/OVMF_CODE_4M.secboot.fd",
        "/usr/share/OVMF/OVMF_VARS_4M.ms.fd",
        "/usr/share/OVMF/OVMF_CODE_4M.fd",
        "/usr/share/OVMF/OVMF_VARS_4M.fd",
    ];
    let debian: &'static [&str] = Box::leak(Box::new(debian));
    assert_eq!(select_uefi(&directories, true, has(debian)).unwrap().code, Path::new(debian[0]));
    assert_eq!(select_uefi(&directories, false, has(debian)).unwrap().vars, Path::new(debian[3]));
    let fedora: &'static [&str] = &["/usr/share/edk2/ovmf/OVMF_CODE.secboot.fd", "/usr/share/edk2/ovmf/OVMF_VARS.fd"];
    assert!(select_uefi(&directories, true, has(fedora)).is_none());
    assert_eq!(select_uefi(&directories, false, has(fedora)).unwrap().code, Path::new(fedora[0]));
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
        let clock = features::clock(&vmi, Path::new("")).unwrap().map(|clock| clock.to_xml()).unwrap_or_default();
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
        let clock = features::clock(&vmi, &zones);
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

#[test]
fn threads_of_dedicated_cpus_are_pinned() {
    let pinned = |cpu: Value, more: Value| {
        let mut cpu = cpu;
        cpu["dedicatedCpuPlacement"] = json!(true);
        let mut domain = json!({"cpu": cpu});
        domain.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        with_domain(domain)
    };
    let tuned = |spec: Value| {
        let rendered = convert_with(&vmi(spec), true).unwrap();
        let xml = roxmltree::Document::parse(&rendered.xml).unwrap();
        let tuning = xml.descendants().find(|node| node.has_tag_name("cputune")).unwrap();
        let pins = tuning.children().filter(|node| node.is_element()).map(|pin| {
            let whose = pin.attribute("vcpu").or(pin.attribute("iothread")).unwrap_or_default();
            format!("{}{whose}={}", pin.tag_name().name(), pin.attribute("cpuset").unwrap())
        });
        (pins.collect::<Vec<_>>().join(" "), rendered.housekeeping)
    };
    let pool = json!({"ioThreadsPolicy": "supplementalPool", "ioThreads": {"supplementalPoolThreadCount": 1}});
    for (cpu, more, expected, housekeeping) in [
        (json!({"cores": 1, "threads": 2}), json!({}), "vcpupin0=0 vcpupin1=2", vec![]),
        // vCPUs that can be plugged have no CPU yet.
        (json!({"sockets": 1, "maxSockets": 4}), json!({}), "vcpupin0=0", vec![]),
        (json!({"cores": 2}), pool, "vcpupin0=0 vcpupin1=2 iothreadpin1=1", vec![]),
        (
            json!({"cores": 2, "isolateEmulatorThread": true}),
            json!({"ioThreadsPolicy": "shared"}),
            "vcpupin0=0 vcpupin1=2 emulatorpin=1 iothreadpin1=1",
            vec![1],
        ),
        (json!({"cores": 2}), json!({"ioThreadsPolicy": "shared"}), "vcpupin0=0 vcpupin1=2 iothreadpin1=0,2", vec![]),
    ] {
        assert_eq!(tuned(pinned(cpu.clone(), more)), (expected.to_owned(), housekeeping), "{cpu}");
    }
    for (realtime, list) in [(json!({}), "0-1"), (json!({"mask": "0,^1"}), "0,^1")] {
        let xml = xml(pinned(json!({"cores": 2, "realtime": realtime}), json!({})));
        assert!(xml.contains(&format!("<vcpusched vcpus='{list}' scheduler='fifo' priority='1'/>")), "{xml}");
        assert!(xml.contains("<pmu state='off'/>"), "{xml}");
    }
    let unreadable = error(pinned(json!({"realtime": {"mask": "all"}}), json!({})));
    assert_eq!(unreadable, DomainError::Pinning(PinningError::Mask("all".into())));
    let refused = error(pinned(json!({"cores": 5}), json!({})));
    assert!(refused.is_permanent());
    assert_eq!(
        refused.to_string(),
        "cannot pin the CPUs of the VMI: not enough exclusive threads provided, could not fit 1 core(s)"
    );
    let plain = xml(with_domain(json!({"cpu": {"cores": 2}})));
    assert!(!plain.contains("cputune") && !plain.contains("hint-dedicated"), "{plain}");
    for (kvm, hints) in [(true, true), (false, false)] {
        let xml = convert_with(&vmi(pinned(json!({}), json!({}))), kvm).unwrap().xml;
        assert_eq!(xml.contains("<hint-dedicated state='on'/>"), hints, "{xml}");
    }
}
