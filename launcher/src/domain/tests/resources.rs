use super::*;

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

/// A NUMA cell: its number, CPUs, and distances to cells.
type Cell<'a> = (u32, &'a [u32], &'a [(u32, u32)]);

/// Distances of two cells.
const FIRST: &[(u32, u32)] = &[(0, 10), (1, 21)];
const SECOND: &[(u32, u32)] = &[(0, 21), (1, 10)];
/// Two cells of two cores.
const TWO_CELLS: &[Cell<'_>] = &[(0, &[0, 2], FIRST), (1, &[1, 3], SECOND)];

/// Returns the CPUs of a pod, each a core.
fn host(cells: &[Cell<'_>]) -> HostCpus {
    let cell = |(id, cpus, distances): &Cell<'_>| host_topology::HostCell {
        id: *id,
        cpus: cpus.iter().map(|id| host_topology::HostCpu { id: *id, siblings: vec![*id] }).collect(),
        distances: distances.iter().map(|(id, value)| host_topology::HostDistance { id: *id, value: *value }).collect(),
    };
    HostCpus {
        cpuset: cells.iter().flat_map(|(_, cpus, _)| cpus.iter().copied()).collect(),
        topology: host_topology::HostTopology {
            numa: host_topology::HostNuma { cells: cells.iter().map(cell).collect() },
        },
    }
}

/// Cells of the source and of the target, and sockets at the target; CPUs of the vCPUs there, nodes of their memory, and true if the
/// guest keeps its cells.
type Arrival<'a> = (&'a [Cell<'a>], &'a [Cell<'a>], u32, &'a str, &'a str, bool);

/// libvirt refuses a migration that changes the cells of the guest.
#[test]
fn guest_with_nodes_of_the_host_arrives_in_those_of_the_target() {
    let spec = |sockets: u32| mapped("66Mi", json!({"sockets": sockets, "maxSockets": 4}));
    let arriving = |sockets: u32, cpus: &HostCpus| {
        let (cpus, topology) = cpus.report();
        let status = json!({"migrationState": {"targetCPUSet": cpus, "targetNodeTopology": topology}});
        let mut vmi = vmi(spec(sockets));
        vmi.status = Some(serde_json::from_value(status).unwrap());
        vmi
    };
    let values = |xml: &str, element: &str, attribute: &str| {
        let document = roxmltree::Document::parse(xml).unwrap();
        let elements = document.descendants().filter(|node| node.has_tag_name(element));
        elements.filter_map(|node| node.attribute(attribute)).collect::<Vec<_>>().join(" ")
    };
    let cells = |xml: &str| {
        let of_cells = [("cell", "id"), ("cell", "cpus"), ("cell", "memory"), ("sibling", "id"), ("sibling", "value")];
        of_cells.map(|(element, attribute)| values(xml, element, attribute))
    };
    let one: &[Cell<'_>] = &[(0, &[0, 1, 2], &[])];
    let cases: &[Arrival<'_>] = &[
        // Other CPUs of the same nodes, and other nodes beside one in which the pod has none.
        (TWO_CELLS, &[(0, &[4, 6], FIRST), (1, &[5], SECOND)], 3, "4 6 5", "0 1", true),
        (
            TWO_CELLS,
            &[(2, &[8, 9], &[(0, 31), (2, 10), (3, 21)]), (3, &[12, 13], &[(0, 31), (2, 21), (3, 10)])],
            3,
            "8 9 12",
            "2 3",
            true,
        ),
        // Another division, fewer nodes, more of them, other distances.
        (TWO_CELLS, &[(0, &[0], FIRST), (1, &[1, 3], SECOND)], 3, "0 1 3", "0 1", false),
        (TWO_CELLS, one, 3, "0 1 2", "0", false),
        (one, TWO_CELLS, 3, "0 2 1", "0 1", false),
        (TWO_CELLS, &[(0, &[0, 2], &[(0, 10), (1, 31)]), (1, &[1], &[(0, 31), (1, 10)])], 3, "0 2 1", "0 1", false),
        // A socket that is plugged by the migration was in the first cell before.
        (TWO_CELLS, TWO_CELLS, 4, "0 2 1 3", "0 1", false),
        (one, &[(5, &[7, 8, 9, 10], &[])], 4, "7 8 9 10", "5", true),
    ];
    for (source, target, sockets, cpus, nodes, keeps) in cases {
        let before = convert_on(&host(source), &vmi(spec(3)), true, &options(), &prepared()).unwrap().xml;
        let pinning = pinning_of_target(&arriving(*sockets, &host(target))).unwrap();
        let after = destination::destination_xml(&before, &[], pinning.as_ref()).unwrap();
        assert_eq!(values(&after, "vcpupin", "cpuset"), *cpus, "{target:?}");
        assert_eq!(values(&after, "memnode", "nodeset"), *nodes, "{target:?}");
        assert_eq!(cells(&before) == cells(&after), *keeps, "{source:?} {target:?}");
    }
    for (cpus, missing) in [
        (host(&[(0, &[0], FIRST), (1, &[1], SECOND)]), 1),
        // The report names CPUs of no node.
        (HostCpus { cpuset: [9].into(), ..host(TWO_CELLS) }, 3),
    ] {
        let expected = PinningError::CrossesCells(missing);
        assert_eq!(pinning_of_target(&arriving(3, &cpus)), Err(DomainError::Pinning(expected)), "{cpus:?}");
    }
}

/// Huge pages in two NUMA nodes of the host, file systems in them, a TPM that is lost, and a watchdog with an action of its own.
#[test]
fn vmi_with_nodes_of_the_host_becomes_the_recorded_xml() {
    let spec = json!({
        "volumes": [{"name": "settings", "configMap": {"name": "c"}}],
        "domain": {
            "memory": {"guest": "66Mi", "hugepages": {"pageSize": "2Mi"}},
            "cpu": {"sockets": 3, "maxSockets": 5, "dedicatedCpuPlacement": true, "realtime": {},
                "numa": {"guestMappingPassthrough": {}}},
            "features": {"acpi": {}},
            "devices": {
                "autoattachPodInterface": false,
                "filesystems": [{"name": "settings", "virtiofs": {}}],
                "tpm": {},
                "watchdog": {"name": "dog", "i6300esb": {"action": "shutdown"}},
            },
        },
    });
    let domain = convert_on(&host(TWO_CELLS), &vmi(spec), true, &options(), &prepared()).unwrap();
    for part in [
        "<vcpupin vcpu='2' cpuset='1'/>",
        "<cell id='0' cpus='0,1,3,4' memory='35651584' unit='b'>",
        "<cell id='1' cpus='2' memory='33554432' unit='b'>",
        "<memnode cellid='1' mode='strict' nodeset='1'/>",
    ] {
        assert!(domain.xml.contains(part), "{part} in {}", domain.xml);
    }
    assert_recorded("mapped", &domain.xml);
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
