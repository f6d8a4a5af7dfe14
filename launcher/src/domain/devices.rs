//! Devices other than disks and network interfaces.

use api::{VirtualMachineInstance, constants::annotation, dedicated, persistent_state, vsock};

use super::{DomainError, Environment, alias, check, given, on_off, virtio_model, xml::Element};

/// Supported video adapters.
const VIDEO: [&str; 5] = ["virtio", "vga", "bochs", "cirrus", "ramfb"];

/// Name of the port through which a guest asks for metrics.
const METRICS_PORT: &str = "org.github.vhostmd.1";

/// Renders these devices.
pub(super) fn devices(
    vmi: &VirtualMachineInstance,
    env: &Environment<'_>,
    scsi_driver: Option<Element>,
) -> Result<Vec<Element>, DomainError> {
    let devices = &vmi.spec.domain.devices;
    let model = virtio_model(vmi);
    let mut list = vec![
        Element::new("channel")
            .with("type", "unix")
            .child(Element::new("target").with("type", "virtio").with("name", "org.qemu.guest_agent.0")),
        Element::new("controller").with("type", "virtio-serial").with("index", "0").with("model", model),
        Element::new("controller")
            .with("type", "usb")
            .with("index", "0")
            .with("model", if needs_usb(vmi, env) { "qemu-xhci" } else { "none" }),
    ];
    if !devices.disable_hotplug || devices.disks.iter().any(|disk| super::disks::bus(disk) == "scsi") {
        let controller = Element::new("controller").with("type", "scsi").with("index", "0").with("model", model);
        list.push(controller.children(scsi_driver));
    }
    if devices.autoattach_serial_console != Some(false) {
        list.push(
            Element::new("serial")
                .with("type", "unix")
                .child(Element::new("source").with("mode", "bind").with("path", env.serial.to_string_lossy()))
                .child(Element::new("target").with("port", "0")),
        );
    }
    list.extend(devices.downward_metrics.is_some().then(|| {
        let source = Element::new("source").with("mode", "bind").with("path", env.metrics.to_string_lossy());
        let target = Element::new("target").with("type", "virtio").with("name", METRICS_PORT);
        Element::new("channel").with("type", "unix").child(source).child(target)
    }));
    if devices.client_passthrough.is_some() {
        list.extend(env.usb_redirection.iter().map(|path| {
            Element::new("redirdev")
                .with("bus", "usb")
                .with("type", "unix")
                .child(Element::new("source").with("mode", "bind").with("path", path.to_string_lossy()))
        }));
    }
    let has_no_hole =
        super::annotation(vmi, annotation::DISABLE_PCI_HOLE64).is_some_and(|value| value.eq_ignore_ascii_case("true"));
    // The root of the machine type virt has no such setting.
    if has_no_hole && !vmi.spec.is_arm64() {
        list.push(
            Element::new("controller")
                .with("type", "pci")
                .with("index", "0")
                .with("model", "pcie-root")
                .child(Element::new("pcihole64").with("unit", "KiB").text("0")),
        );
    }
    list.extend(display(vmi, env)?);
    list.extend(inputs(vmi)?);
    list.push(balloon(vmi, env, model));
    list.extend(devices.rng.is_some().then(|| {
        let backend = Element::new("backend").with("model", "random").text("/dev/urandom");
        Element::new("rng").with("model", model).child(backend)
    }));
    if let Some(watchdog) = &devices.watchdog {
        let Some(chip) = &watchdog.i6300esb else {
            let value = watchdog.name.clone();
            return Err(DomainError::Unsupported { field: "spec.domain.devices.watchdog", value });
        };
        let action = given(&chip.action).unwrap_or("reset");
        check("spec.domain.devices.watchdog.i6300esb.action", action, &["poweroff", "reset", "shutdown"])?;
        list.push(
            Element::new("watchdog").with("model", "i6300esb").with("action", action).child(alias(&watchdog.name)),
        );
    }
    if let Some(sound) = &devices.sound {
        let card = given(&sound.model).unwrap_or("ich9");
        check("spec.domain.devices.sound.model", card, &["ich9", "ac97"])?;
        list.push(Element::new("sound").with("model", card).child(alias(&sound.name)));
    }
    if vsock::is_attached(vmi) {
        let cid = vsock::cid(vmi).ok_or(DomainError::NoCid)?;
        // Independent of `useVirtioTransitional`: vsock exists since virtio 1 and has no older form.
        list.push(
            Element::new("vsock")
                .with("model", "virtio-non-transitional")
                .child(Element::new("cid").with("auto", "no").with("address", cid.to_string())),
        );
    }
    list.extend(tpm(vmi, env));
    for panic in &devices.panic_devices {
        let kind = given(&panic.model);
        check("spec.domain.devices.panicDevices.model", kind.unwrap_or("isa"), &["isa", "hyperv", "pvpanic"])?;
        list.push(Element::new("panic").with_some("model", kind));
    }
    Ok(list)
}

/// Renders the TPM, whose emulator the launcher runs: the state of one that persists can be where libvirt would not migrate it.
fn tpm(vmi: &VirtualMachineInstance, env: &Environment<'_>) -> Option<Element> {
    // QEMU for arm64 has no CRB.
    let is_crb = persistent_state::keeps_tpm(&vmi.spec) && !vmi.spec.is_arm64();
    let model = if is_crb { "tpm-crb" } else { "tpm-tis" };
    let socket = env.tpm.to_string_lossy();
    let source = Element::new("source").with("type", "unix").with("mode", "connect").with("path", socket);
    let backend = Element::new("backend").with("type", "external").child(source);
    persistent_state::has_tpm(&vmi.spec).then(|| Element::new("tpm").with("model", model).child(backend))
}

fn needs_usb(vmi: &VirtualMachineInstance, env: &Environment<'_>) -> bool {
    let devices = &vmi.spec.domain.devices;
    if vmi.spec.is_arm64() {
        return true;
    }
    let mut of_host = devices.host_devices.iter().filter_map(|device| device.device_name.as_deref());
    of_host.any(|resource| env.host_devices.has_usb(resource))
        || devices.client_passthrough.is_some()
        || devices.inputs.iter().any(|input| input.bus.as_deref().is_none_or(|bus| bus.is_empty() || bus == "usb"))
        || devices.disks.iter().any(|disk| super::disks::bus(disk) == "usb")
}

fn display(vmi: &VirtualMachineInstance, env: &Environment<'_>) -> Result<Vec<Element>, DomainError> {
    let devices = &vmi.spec.domain.devices;
    if devices.autoattach_graphics_device == Some(false) {
        return Ok(Vec::new());
    }
    let efi = vmi
        .spec
        .domain
        .firmware
        .as_ref()
        .and_then(|firmware| firmware.bootloader.as_ref())
        .is_some_and(|bootloader| bootloader.efi.is_some());
    let asked = devices.video.as_ref().and_then(|video| video.type_.as_deref()).filter(|t| !t.is_empty());
    let usual = match (vmi.spec.is_arm64(), efi && !env.options.vga_for_efi) {
        (true, _) => "virtio",
        (false, true) => "bochs",
        (false, false) => "vga",
    };
    let kind = asked.unwrap_or(usual);
    check("spec.domain.devices.video.type", kind, &VIDEO)?;
    // An explicit adapter gets the memory whatever its type.
    let vram = (asked.is_some() || kind == "vga").then_some("16384");
    let mut list = vec![
        Element::new("graphics")
            .with("type", "vnc")
            .child(Element::new("listen").with("type", "socket").with("socket", env.vnc.to_string_lossy())),
        Element::new("video")
            .child(Element::new("model").with("type", kind).with_some("vram", vram).with("heads", "1")),
    ];
    // The machine type virt has neither a keyboard nor a mouse of its own.
    if vmi.spec.is_arm64() {
        let input = |kind| Element::new("input").with("type", kind).with("bus", "usb");
        list.extend(devices.inputs.is_empty().then(|| input("tablet")));
        list.push(input("keyboard"));
    }
    Ok(list)
}

fn inputs(vmi: &VirtualMachineInstance) -> Result<Vec<Element>, DomainError> {
    vmi.spec
        .domain
        .devices
        .inputs
        .iter()
        .map(|input| {
            let bus = given(&input.bus).unwrap_or("usb");
            check("spec.domain.devices.inputs.bus", bus, &["usb", "virtio"])?;
            check("spec.domain.devices.inputs.type", &input.type_, &["tablet"])?;
            // Input devices have no transitional form.
            let model = (bus == "virtio").then_some("virtio");
            Ok(Element::new("input")
                .with("type", "tablet")
                .with("bus", bus)
                .with_some("model", model)
                .child(alias(&input.name)))
        })
        .collect()
}

fn balloon(vmi: &VirtualMachineInstance, env: &Environment<'_>, model: &str) -> Element {
    let domain = &vmi.spec.domain;
    if domain.devices.autoattach_mem_balloon == Some(false) {
        return Element::new("memballoon").with("model", "none");
    }
    // Reports cost time, which guests with CPUs or pages of their own have not.
    let off = env.options.free_page_reporting_disabled
        || dedicated::is_dedicated(domain)
        || domain.memory.as_ref().is_some_and(|memory| memory.hugepages.is_some())
        || super::annotation(vmi, annotation::FREE_PAGE_REPORTING_DISABLED).is_some_and(|value| value == "true");
    let period = env.options.balloon_stats_period;
    Element::new("memballoon")
        .with("model", model)
        .with("freePageReporting", on_off(!off))
        .children((period != 0).then(|| Element::new("stats").with("period", period.to_string())))
}
