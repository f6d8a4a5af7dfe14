//! Differences between domains.

use std::path::Path;

use protocol::ItemKind;

use super::super::{
    diff::{DeviceChange, Difference, Item, Step, diff},
    parse::parse,
};

const ACTIVE: &str = include_str!("../recorded/active.xml");
const PLAIN: &str = include_str!("../recorded/plain.xml");

/// A change of the wanted XML, and the steps and properties that follow.
type Row = (&'static str, &'static str, Vec<Step>, Vec<(Item, &'static str)>);

fn between(active: &str, wanted: &str) -> Difference {
    diff(&parse(active), &parse(wanted), &[], Path::new("/plugged"))
}

#[test]
fn a_domain_as_it_was_defined_has_no_difference() {
    assert_eq!(between(ACTIVE, PLAIN), Difference::default());
    let full = include_str!("../recorded/full.xml");
    assert_eq!(between(full, full), Difference::default());
    // Recorded from libvirt 11.3: a definition of the launcher, and the status that libvirt wrote after the start.
    let (started, active) = (include_str!("../recorded/started.xml"), include_str!("../recorded/started-active.xml"));
    assert_eq!(between(active, started), Difference::default());
    assert_eq!(parse(active).disks.len(), 5);
    assert_eq!(parse(active).devices.len(), 3);
}

#[test]
fn each_change_of_the_wanted_domain_is_a_step_or_needs_a_restart() {
    let volume = |name: &str| Item::new(ItemKind::Volume, name);
    let (nic, cpu) = (Item::new(ItemKind::Interface, "default"), Item::new(ItemKind::Cpu, ""));
    let table: [Row; 11] = [
        ("placement='static'>1<", "placement='static'>2<", vec![], vec![(cpu.clone(), "number of vCPUs")]),
        ("sockets='1'", "sockets='2'", vec![], vec![(cpu, "CPU topology")]),
        (
            "<memory unit='b'>134217728",
            "<memory unit='b'>268435456",
            vec![],
            vec![(Item::new(ItemKind::Memory, ""), "amount of memory")],
        ),
        // libvirt rounds up to MiB.
        ("<memory unit='b'>134217728", "<memory unit='b'>134217000", vec![], vec![]),
        ("ua-ci", "ua-cloud", vec![Step::Detach(volume("ci")), Step::Attach(volume("cloud"))], vec![]),
        ("<source file='/eph/ci.iso'/>", "", vec![Step::Update(volume("ci"), "medium")], vec![]),
        ("dev='vdb' bus='virtio'", "dev='sdb' bus='sata'", vec![], vec![(volume("ci"), "bus")]),
        (
            "<alias name='ua-root'/>",
            "<boot order='1'/><alias name='ua-root'/>",
            vec![],
            vec![(volume("root"), "boot order")],
        ),
        ("02:00:00:00:00:01", "02:00:00:00:00:02", vec![], vec![(nic.clone(), "MAC address")]),
        ("model type='virtio-non-transitional'", "model type='e1000'", vec![], vec![(nic, "model")]),
        (
            "</devices>",
            "<sound model='ich9'><alias name='ua-snd'/></sound></devices>",
            vec![Step::Attach(Item::new(ItemKind::Device, "snd"))],
            vec![],
        ),
    ];
    for (from, to, steps, at_restart) in table {
        let wanted = PLAIN.replacen(from, to, 1);
        assert_ne!(wanted, PLAIN, "{from}");
        assert_eq!(between(ACTIVE, &wanted), Difference { steps, at_restart }, "{from} -> {to}");
    }
}

#[test]
fn guest_grows_and_shrinks_as_far_as_its_definition_allows() {
    let domain = |vcpus: u32, memory: u64, device: &str| {
        format!(
            "<domain><maxMemory unit='b' slots='0'>{}</maxMemory><memory unit='b'>{memory}</memory>\
             <vcpu current='{vcpus}'>8</vcpu><os><type machine='q35'/></os>\
             <cpu><topology sockets='4' cores='2' threads='1'/></cpu><devices>{device}</devices></domain>",
            4_u64 << 30
        )
    };
    // libvirt counts the whole device in the memory of an active domain.
    let device = |requested: u64| {
        format!(
            "<memory model='virtio-mem'><target><size unit='KiB'>3145728</size><node>0</node>\
             <block unit='KiB'>2048</block><requested unit='KiB'>{}</requested><current unit='KiB'>0</current></target>\
             <alias name='virtiomem0'/></memory>",
            requested >> 10
        )
    };
    let (gib, cpu, memory) = (1_u64 << 30, Item::new(ItemKind::Cpu, ""), Item::new(ItemKind::Memory, ""));
    let update = |added: u64, size: u64| Step::Memory {
        change: DeviceChange::Update,
        size,
        xml: device(gib)
            .replace("<requested unit='KiB'>1048576</requested>", &format!("<requested unit='b'>{added}</requested>")),
    };
    let attach = Step::Memory {
        change: DeviceChange::Attach,
        size: 2 * gib,
        xml: format!(
            "<memory model='virtio-mem'><target><size unit='b'>{}</size><node>0</node>\
             <block unit='b'>2097152</block><requested unit='b'>{gib}</requested></target></memory>",
            3 * gib
        ),
    };
    let plain = domain(2, gib, "");
    let grown = domain(2, 4 * gib, &device(gib));
    let at_restart = |item: &Item, property| Difference { steps: vec![], at_restart: vec![(item.clone(), property)] };
    let steps = |steps| Difference { steps, at_restart: vec![] };
    for (active, vcpus, wanted, expected) in [
        (&plain, 2, gib, steps(vec![])),
        (&plain, 8, gib, steps(vec![Step::Vcpus(8)])),
        (&plain, 1, gib, at_restart(&cpu, "number of vCPUs")),
        (&plain, 2, 2 * gib, steps(vec![attach])),
        (&plain, 2, 5 * gib, at_restart(&memory, "amount of memory")),
        (&plain, 2, gib / 2, at_restart(&memory, "amount of memory")),
        (&plain, 2, gib + (1 << 20), at_restart(&memory, "amount of memory")),
        (&grown, 2, 2 * gib, steps(vec![])),
        (&grown, 4, 4 * gib, steps(vec![Step::Vcpus(4), update(3 * gib, 4 * gib)])),
        (&grown, 2, gib, steps(vec![update(0, gib)])),
        (&grown, 2, gib / 2, at_restart(&memory, "amount of memory")),
    ] {
        assert_eq!(between(active, &domain(vcpus, wanted, "")), expected, "{vcpus} {wanted} of {active}");
    }
    assert_eq!(parse(&grown).memory_requested(), Some(2 * gib));
    let uneven =
        plain.replace("<maxMemory unit='b' slots='0'>4294967296<", "<maxMemory unit='b' slots='0'>4294967297<");
    assert_eq!(between(&uneven, &domain(2, 2 * gib, "")), at_restart(&memory, "amount of memory"), "{uneven}");
    let paged = plain.replace(
        "</memory>",
        "</memory><memoryBacking><hugepages><page size='1048576' unit='KiB'/></hugepages></memoryBacking>",
    );
    let difference = between(&paged, &domain(2, 3 * gib, ""));
    assert!(
        matches!(&difference.steps[..], [Step::Memory { xml, .. }] if xml.contains("<block unit='b'>1073741824</block>")),
        "{difference:?}"
    );
    assert_eq!(between(&paged, &domain(2, gib + (2 << 20), "")), at_restart(&memory, "amount of memory"));
}

#[test]
fn a_device_whose_name_libvirt_does_not_keep_is_no_difference() {
    let wanted =
        PLAIN.replacen("</devices>", "<watchdog model='i6300esb'><alias name='ua-my.dog'/></watchdog></devices>", 1);
    let active =
        ACTIVE.replacen("</devices>", "<watchdog model='i6300esb'><alias name='watchdog0'/></watchdog></devices>", 1);
    assert_eq!(between(&active, &wanted), Difference::default());
}

#[test]
fn disks_grow_to_the_sizes_of_their_claims() {
    let active = parse(ACTIVE);
    let sizes = [("root".into(), 4096), ("unknown".into(), 1)];
    let difference = diff(&active, &active, &sizes, Path::new("/plugged"));
    let resize = Step::Resize { volume: "root".into(), target: "vda".into(), size: 4096 };
    assert_eq!(difference, Difference { steps: vec![resize], at_restart: vec![] });
    assert_eq!(difference.results(), []);
}

fn disk(name: &str, device: &str, bus: &str, source: &str) -> String {
    let source = if source.is_empty() { String::new() } else { format!("<source file='{source}'/>") };
    format!(
        "<disk type='file' device='{device}'>{source}<target dev='sdq' bus='{bus}'/><alias name='ua-{name}'/></disk>"
    )
}

#[test]
fn disks_of_hot_plugged_volumes_are_attached_detached_and_their_media_changed() {
    use DeviceChange::{Attach, Detach, Update};
    let volume = |name: &str| Item::new(ItemKind::Volume, name);
    let step = |change, xml: &str| Step::Device { change, item: volume("new"), xml: xml.to_owned() };
    let (plugged, virtio) =
        (disk("new", "disk", "scsi", "/plugged/new.img"), disk("new", "lun", "virtio", "/plugged/new"));
    let (sata, boot) = (disk("new", "disk", "sata", "/plugged/new"), disk("new", "disk", "scsi", "/else/new.img"));
    let (drive, medium) = (disk("new", "cdrom", "sata", ""), disk("new", "cdrom", "sata", "/plugged/new.img"));
    let other = disk("new", "cdrom", "sata", "/else/new.iso");
    for (active, wanted, expected) in [
        ("", plugged.as_str(), vec![step(Attach, &plugged)]),
        ("", &virtio, vec![step(Attach, &virtio)]),
        (&plugged, "", vec![step(Detach, &plugged)]),
        (&plugged, &plugged, vec![]),
        ("", &sata, vec![Step::Attach(volume("new"))]),
        ("", &boot, vec![Step::Attach(volume("new"))]),
        (&boot, "", vec![Step::Detach(volume("new"))]),
        (&drive, &medium, vec![step(Update, &medium)]),
        (&medium, &drive, vec![step(Update, &drive)]),
        (&drive, &other, vec![Step::Update(volume("new"), "medium")]),
        (&other, &drive, vec![Step::Update(volume("new"), "medium")]),
        // The drive itself comes and goes with a restart.
        ("", &drive, vec![Step::Attach(volume("new"))]),
        ("", &medium, vec![Step::Attach(volume("new"))]),
    ] {
        let with = |xml: &str, disk: &str| xml.replacen("</devices>", &format!("{disk}</devices>"), 1);
        let difference = between(&with(ACTIVE, active), &with(PLAIN, wanted));
        assert_eq!(difference, Difference { steps: expected, at_restart: vec![] }, "{active} -> {wanted}");
    }
}

#[test]
fn a_plugged_disk_is_served_by_an_io_thread_that_the_domain_has() {
    let disk = |thread: &str| {
        let driver = format!("<driver name='qemu'{thread} queues='2'/><source");
        disk("new", "disk", "virtio", "/plugged/new.img").replace("<source", &driver)
    };
    let with = |xml: &str, disk: &str| xml.replacen("</devices>", &format!("{disk}</devices>"), 1);
    for (threads, wanted, attached) in [
        ("", " iothread='2'", ""),
        ("<iothreads>1</iothreads>", " iothread='2'", " iothread='1'"),
        ("<iothreads>2</iothreads>", " iothread='2'", " iothread='2'"),
        ("<iothreads>2</iothreads>", " iothread='5'", " iothread='1'"),
        ("<iothreads>2</iothreads>", "", ""),
    ] {
        let active = ACTIVE.replacen("<devices>", &format!("{threads}<devices>"), 1);
        let (wanted, attached) = (with(PLAIN, &disk(wanted)), disk(attached));
        let item = Item::new(ItemKind::Volume, "new");
        let step = Step::Device { change: DeviceChange::Attach, item, xml: attached.clone() };
        assert_eq!(between(&active, &wanted), Difference { steps: vec![step], at_restart: vec![] }, "{wanted}");
        assert_eq!(between(&with(&active, &attached), &wanted), Difference::default(), "{wanted}");
    }
}

#[test]
fn a_drive_keeps_its_address_when_its_medium_changes() {
    let address = |controller: u32, unit: u32| {
        format!("<address type='drive' controller='{controller}' bus='0' target='0' unit='{unit}'/>")
    };
    let drive = |source: &str, address: &str| {
        disk("new", "cdrom", "scsi", source).replace("<alias", &format!("{address}<alias"))
    };
    let (medium, former, own) = ("/plugged/new.img", address(1, 0), address(0, 7));
    for (active, wanted, expected) in [
        (drive("", &former), drive(medium, &own), drive(medium, &former)),
        (drive(medium, &former), drive("", &own), drive("", &former)),
        (drive("", &own), drive(medium, &own), drive(medium, &own)),
        (drive("", &former), drive(medium, ""), drive(medium, "")),
    ] {
        let with = |xml: &str, disk: &str| xml.replacen("</devices>", &format!("{disk}</devices>"), 1);
        let step =
            Step::Device { change: DeviceChange::Update, item: Item::new(ItemKind::Volume, "new"), xml: expected };
        let difference = between(&with(ACTIVE, &active), &with(PLAIN, &wanted));
        assert_eq!(difference, Difference { steps: vec![step], at_restart: vec![] }, "{active} -> {wanted}");
    }
}

#[test]
fn a_drive_keeps_its_mode_of_discards_when_its_medium_changes() {
    let drive = |source: &str, discard: &str| {
        let driver = format!("<driver name='qemu' error_policy='stop'{discard}/>");
        disk("new", "cdrom", "sata", source).replace("<target", &format!("{driver}<target"))
    };
    let with = |xml: &str, disk: &str| xml.replacen("</devices>", &format!("{disk}</devices>"), 1);
    let (medium, unmap) = ("/plugged/new.img", " discard='unmap'");
    for (source, discard, wanted_source, wanted_discard) in
        [(medium, "", "", unmap), (medium, unmap, "", unmap), ("", unmap, medium, ""), ("", "", medium, unmap)]
    {
        let (active, wanted) = (drive(source, discard), drive(wanted_source, wanted_discard));
        let (item, xml) = (Item::new(ItemKind::Volume, "new"), drive(wanted_source, ""));
        let step = Step::Device { change: DeviceChange::Update, item, xml };
        let difference = between(&with(ACTIVE, &active), &with(PLAIN, &wanted));
        assert_eq!(difference, Difference { steps: vec![step], at_restart: vec![] }, "{active} -> {wanted}");
    }
}

#[test]
fn interfaces_come_and_go_and_their_links_change() {
    use DeviceChange::{Attach, Detach, Update};
    let lan = |link: &str| {
        format!("<interface type='ethernet'><mac address='02:00:00:00:00:07'/>{link}<alias name='ua-lan'/></interface>")
    };
    let (plain, up, down) = (lan(""), lan("<link state='up'/>"), lan("<link state='down'/>"));
    let moved = |state: &str| {
        let link = format!("<link state='{state}'/></interface>");
        plain.replace("</interface>", &link)
    };
    for (active, wanted, expected) in [
        ("", plain.as_str(), vec![(Attach, plain.clone())]),
        ("", &down, vec![(Attach, down.clone())]),
        (&plain, "", vec![(Detach, plain.clone())]),
        (&plain, &plain, vec![]),
        (&plain, &up, vec![]),
        (&plain, &down, vec![(Update, moved("down"))]),
        (&up, &down, vec![(Update, down.clone())]),
        (&down, &plain, vec![(Update, up.clone())]),
    ] {
        let with = |xml: &str, nic: &str| xml.replacen("</devices>", &format!("{nic}</devices>"), 1);
        let difference = between(&with(ACTIVE, active), &with(PLAIN, wanted));
        let item = Item::new(ItemKind::Interface, "lan");
        let steps = expected.into_iter().map(|(change, xml)| Step::Device { change, item: item.clone(), xml });
        assert_eq!(difference, Difference { steps: steps.collect(), at_restart: vec![] }, "{active} -> {wanted}");
    }
}

#[test]
fn results_name_the_item_and_what_cannot_be_changed() {
    let wanted = PLAIN.replacen("ua-ci", "ua-cloud", 1).replacen("sockets='1'", "sockets='2'", 1);
    let results: Vec<String> = between(ACTIVE, &wanted)
        .results()
        .iter()
        .map(|item| format!("{:?} {:?}: {} {}", item.kind(), item.name, item.message, item.needs_restart))
        .collect();
    let expected = [
        "Volume \"ci\": cannot be detached from the running VMI true",
        "Volume \"cloud\": cannot be attached to the running VMI true",
        "Cpu \"\": the CPU topology cannot be changed in the running VMI true",
    ];
    assert_eq!(results, expected);
}
