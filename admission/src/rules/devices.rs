//! Devices other than disks and interfaces.

use api::{VirtualMachineInstanceSpec, config::ClusterConfig};

use super::{file_systems, gates, launch_security};
use crate::context::{FieldErrors, accepted};

/// Validates input devices.
pub(super) fn validate_inputs(root: &str, spec: &VirtualMachineInstanceSpec, errors: &mut FieldErrors) {
    for (index, input) in spec.domain.devices.inputs.iter().enumerate() {
        let path = format!("{root}.domain.devices.inputs[{index}]");
        if !["", "virtio", "usb"].contains(&input.bus.as_deref().unwrap_or_default()) {
            errors.invalid(format!("{path}.bus"), "Input device can have only virtio or usb bus.");
        }
        if input.type_ != "tablet" {
            errors.invalid(format!("{path}.type"), "Input device can have only tablet type.");
        }
    }
}

/// Validates IO threads.
pub(super) fn validate_io_threads(root: &str, spec: &VirtualMachineInstanceSpec, errors: &mut FieldErrors) {
    let Some(policy) = spec.domain.io_threads_policy.as_deref() else { return };
    match policy {
        "shared" | "auto" => {}
        "supplementalPool" => {
            let threads = spec.domain.io_threads.as_ref().and_then(|pool| pool.supplemental_pool_thread_count);
            if threads.unwrap_or(0) < 1 {
                errors.invalid(
                    format!("{root}.domain.ioThreads.count"),
                    "the number of iothreads needs to be set and positive for the dedicated policy",
                );
            }
        }
        other => {
            let message =
                format!("Invalid IOThreadsPolicy ({other}), {}", accepted(&["shared", "auto", "supplementalPool"]));
            errors.invalid(format!("{root}.domain.ioThreadsPolicy"), message);
        }
    }
}

/// Validates GPUs and host devices.
pub(super) fn validate_displays(
    root: &str,
    spec: &VirtualMachineInstanceSpec,
    config: &ClusterConfig,
    errors: &mut FieldErrors,
) {
    let devices = &spec.domain.devices;
    let displays = devices
        .gpus
        .iter()
        .filter_map(|gpu| gpu.virtual_gpu_options.as_ref()?.display.as_ref())
        .filter(|display| display.enabled.unwrap_or(true))
        .filter(|display| display.ram_fb.as_ref().is_none_or(|ram_fb| ram_fb.enabled == Some(true)))
        .count();
    if displays > 1 {
        errors.invalid(format!("{root}.GPUs"), "configuring multiple displays with ramfb is not valid ");
    }
    if !devices.host_devices.is_empty() {
        gates::are_on("domain.devices.hostDevices[].name", format_args!("{root}.HostDevices"), config, errors);
    }
}

/// Rejects devices that the configuration does not permit. The reference reports them when it creates the pod.
pub(crate) fn validate_permitted(root: &str, spec: &VirtualMachineInstanceSpec, config: &ClusterConfig) -> FieldErrors {
    let mut errors = FieldErrors::new();
    let Some(permitted) = &config.permitted_host_devices else { return errors };
    let devices = &spec.domain.devices;
    let gpus = devices.gpus.iter().map(|gpu| &gpu.device_name).enumerate();
    let hosts = devices.host_devices.iter().map(|device| &device.device_name).enumerate();
    let gpus = gpus.map(|(index, name)| ("GPU", "gpus", index, name));
    let hosts = hosts.map(|(index, name)| ("HostDevice", "hostDevices", index, name));
    for (type_, list, index, name) in gpus.chain(hosts) {
        let Some(name) = name.as_deref().filter(|name| !name.is_empty() && !permitted.permits(name)) else { continue };
        let reason = if permitted.is_mediated(name) {
            "is a mediated device, which is not supported yet"
        } else {
            "is not permitted in permittedHostDevices configuration"
        };
        errors.invalid(format!("{root}.domain.devices.{list}[{index}].deviceName"), format!("{type_} {name} {reason}"));
    }
    errors
}

/// Validates the other devices.
pub(super) fn validate(
    root: &str,
    spec: &VirtualMachineInstanceSpec,
    config: &ClusterConfig,
    errors: &mut FieldErrors,
) {
    let domain = &spec.domain;
    let devices = &domain.devices;
    let path = |field: &str| format!("{root}.domain.devices.{field}");
    if let Some(sound) = &devices.sound {
        if !["", "ich9", "ac97"].contains(&sound.model.as_deref().unwrap_or_default()) {
            errors.invalid(format!("{root}.Sound"), "Sound device type is not supported. Options: 'ich9' or 'ac97'");
        }
        if sound.name.is_empty() {
            errors.invalid(format!("{root}.Sound"), "Sound device requires a name field.");
        }
    }
    launch_security::validate(root, spec, config, errors);
    if devices.autoattach_vsock == Some(true) {
        gates::are_on("domain.devices.autoattachVSOCK", path("autoattachVSOCK"), config, errors);
    }
    let reservation = devices.disks.iter().any(|disk| disk.lun.as_ref().is_some_and(|lun| lun.reservation));
    if reservation && !config.persistent_reservation {
        errors.invalid(path("disks.luns.reservation"), "persistent reservation is not enabled in kubevirt config");
    }
    if devices.downward_metrics.is_some() {
        gates::are_on("domain.devices.downwardMetrics", path("downwardMetrics"), config, errors);
    }
    file_systems::validate(root, spec, config, errors);
    if devices.video.is_some() && devices.autoattach_graphics_device == Some(false) {
        errors.invalid(
            format!("{root}.video"),
            "Video configuration is not allowed when autoattachGraphicsDevice is set to false",
        );
    }
    if !devices.panic_devices.is_empty() && spec.architecture.as_deref() == Some("s390x") {
        errors.invalid(path("panicDevices"), "custom panic devices are not supported on s390x architecture");
    }
    for (index, panic) in devices.panic_devices.iter().enumerate() {
        if let Some(model) = panic.model.as_deref().filter(|model| !["hyperv", "isa", "pvpanic"].contains(model)) {
            errors.invalid(path(&format!("panicDevices[{index}].model")), format!("invalid PanicDeviceModel({model})"));
        }
    }
    if let Some(watchdog) = &devices.watchdog {
        let actions = [
            ("i6300esb", watchdog.i6300esb.as_ref().and_then(|chip| chip.action.as_deref())),
            ("diag288", watchdog.diag288.as_ref().and_then(|chip| chip.action.as_deref())),
        ];
        for (chip, action) in actions {
            let action = action.unwrap_or_default();
            if !["", "poweroff", "reset", "shutdown"].contains(&action) {
                let field = path(&format!("watchdog.{chip}.action"));
                let message = format!("{field} has invalid value {action}, must be one of: [poweroff reset shutdown]");
                errors.not_supported(field, message);
            }
        }
    }
    if domain.reboot_policy.is_some() {
        gates::are_on("domain.rebootPolicy", format_args!("{root}.domain.rebootPolicy"), config, errors);
    }
    if domain.memory.as_ref().is_some_and(|memory| memory.reserved_overhead.is_some()) {
        let field = format_args!("{root}.domain.memory.reservedOverhead");
        gates::are_on("domain.memory.reservedOverhead.memLock", field, config, errors);
    }
    validate_clock(root, spec, errors);
    validate_vendor_id(root, spec, errors);
    if spec.termination_grace_period_seconds.is_some_and(|seconds| seconds < 0) {
        let field = format!("{root}.terminationGracePeriodSeconds");
        let message = format!("{field} must be greater than or equal to 0");
        errors.invalid(field, message);
    }
}

fn validate_clock(root: &str, spec: &VirtualMachineInstanceSpec, errors: &mut FieldErrors) {
    let Some(clock) = &spec.domain.clock else { return };
    let path = format!("{root}.domain.clock");
    if clock.utc.is_some() && clock.timezone.as_deref().is_some_and(|zone| !zone.is_empty()) {
        errors.invalid(path.clone(), format!("{path} must have only one of utc and timezone set"));
    }
    if let Some(zone) = clock.timezone.as_deref().filter(|zone| !zone.is_empty()) {
        let valid =
            zone.len() <= 64 && zone.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"/_+-".contains(&byte));
        if !valid {
            errors.invalid(format!("{path}.timezone"), format!("{path}.timezone '{zone}' is not a time zone name"));
        }
    }
    let Some(timer) = &clock.timer else { return };
    let policies = [
        (
            "hpet",
            timer.hpet.as_ref().and_then(|timer| timer.tick_policy.as_deref()),
            ["delay", "catchup", "merge", "discard"],
        ),
        (
            "pit",
            timer.pit.as_ref().and_then(|timer| timer.tick_policy.as_deref()),
            ["delay", "catchup", "merge", "discard"],
        ),
        (
            "rtc",
            timer.rtc.as_ref().and_then(|timer| timer.tick_policy.as_deref()),
            ["delay", "catchup", "merge", "discard"],
        ),
    ];
    for (name, policy, known) in policies {
        if let Some(policy) = policy.filter(|policy| !policy.is_empty() && !known.contains(policy)) {
            let field = format!("{path}.timer.{name}.tickPolicy");
            let message = format!("{field} has invalid value {policy}, must be one of: [{}]", known.join(" "));
            errors.not_supported(field, message);
        }
    }
    let track = timer.rtc.as_ref().and_then(|timer| timer.track.as_deref()).unwrap_or_default();
    if !["", "guest", "wall"].contains(&track) {
        let field = format!("{path}.timer.rtc.track");
        let message = format!("{field} has invalid value {track}, must be one of: [guest wall]");
        errors.not_supported(field, message);
    }
}

/// Validates the vendor ID: QEMU takes twelve characters and splits its command line at commas.
fn validate_vendor_id(root: &str, spec: &VirtualMachineInstanceSpec, errors: &mut FieldErrors) {
    let vendor = spec
        .domain
        .features
        .as_ref()
        .and_then(|features| features.hyperv.as_ref())
        .and_then(|hyperv| hyperv.vendorid.as_ref())
        .filter(|vendor| vendor.enabled.unwrap_or(true));
    if let Some(vendor) = vendor {
        let id = vendor.vendorid.as_deref().unwrap_or_default();
        if id.is_empty() || id.len() > 12 || !id.bytes().all(|byte| byte.is_ascii_graphic() && byte != b',') {
            let field = format!("{root}.domain.features.hyperv.vendorid.vendorid");
            let message = format!("{field} must be 1 to 12 printable characters without commas");
            errors.invalid(field, message);
        }
    }
}

#[cfg(test)]
mod tests {
    use api::config::ClusterConfig;
    use serde_json::{Value, json};

    use crate::rules::testing::*;

    fn devices(devices: Value) -> Value {
        json!({"domain": {"devices": devices}})
    }

    #[test]
    fn inputs_are_tablets() {
        accepts(devices(json!({"inputs": [{"name": "t", "type": "tablet", "bus": "usb"}]})));
        refuses(
            devices(json!({"inputs": [{"name": "t", "type": "mouse", "bus": "ps2"}]})),
            "spec.domain.devices.inputs[0].bus",
            "only virtio or usb bus",
        );
        refuses(
            devices(json!({"inputs": [{"name": "t", "type": "mouse"}]})),
            "spec.domain.devices.inputs[0].type",
            "only tablet type",
        );
    }

    #[test]
    fn io_thread_policy_is_known() {
        accepts(json!({"domain": {"ioThreadsPolicy": "shared"}}));
        accepts(
            json!({"domain": {"ioThreadsPolicy": "supplementalPool", "ioThreads": {"supplementalPoolThreadCount": 2}}}),
        );
        refuses(
            json!({"domain": {"ioThreadsPolicy": "many"}}),
            "spec.domain.ioThreadsPolicy",
            "Invalid IOThreadsPolicy (many)",
        );
        refuses(
            json!({"domain": {"ioThreadsPolicy": "supplementalPool"}}),
            "spec.domain.ioThreads.count",
            "needs to be set",
        );
    }

    #[test]
    fn sound_and_video_are_known() {
        accepts(devices(json!({"sound": {"name": "s", "model": "ac97"}})));
        refuses(devices(json!({"sound": {"name": "s", "model": "sb16"}})), "spec.Sound", "Options: 'ich9' or 'ac97'");
        refuses(devices(json!({"sound": {"name": ""}})), "spec.Sound", "requires a name field");
        refuses(
            devices(json!({"video": {"type": "vga"}, "autoattachGraphicsDevice": false})),
            "spec.video",
            "not allowed when autoattachGraphicsDevice is set to false",
        );
    }

    #[test]
    fn panic_and_watchdog_values_are_known() {
        accepts(devices(
            json!({"panicDevices": [{"model": "isa"}], "watchdog": {"name": "w", "i6300esb": {"action": "poweroff"}}}),
        ));
        refuses(
            devices(json!({"panicDevices": [{"model": "scream"}]})),
            "spec.domain.devices.panicDevices[0].model",
            "invalid PanicDeviceModel(scream)",
        );
        refuses(
            devices(json!({"watchdog": {"name": "w", "i6300esb": {"action": "bark"}}})),
            "spec.domain.devices.watchdog.i6300esb.action",
            "has invalid value bark",
        );
    }

    #[test]
    fn gated_devices_need_their_gate() {
        refuses(devices(json!({"autoattachVSOCK": true})), "spec.domain.devices.autoattachVSOCK", "VSOCK feature gate");
        refuses(
            devices(json!({"hostDevices": [{"name": "h", "deviceName": "d/e"}]})),
            "spec.HostDevices",
            "Host Devices feature gate",
        );
        refuses(
            devices(json!({"downwardMetrics": {}})),
            "spec.domain.devices.downwardMetrics",
            "DownwardMetrics feature gate",
        );
        refuses(
            json!({"domain": {"memory": {"reservedOverhead": {}}}}),
            "spec.domain.memory.reservedOverhead",
            "feature gate is not enabled",
        );
    }

    #[test]
    fn clock_follows_one_base() {
        let clock = |clock: Value| json!({"domain": {"clock": clock}});
        accepts(clock(
            json!({"timezone": "Europe/Berlin", "timer": {"hpet": {"present": false}, "rtc": {"tickPolicy": "catchup", "track": "guest"}}}),
        ));
        refuses(clock(json!({"timezone": "UTC", "utc": {}})), "spec.domain.clock", "only one of utc and timezone");
        refuses(clock(json!({"timezone": "../etc"})), "spec.domain.clock.timezone", "is not a time zone name");
        refuses(
            clock(json!({"timer": {"pit": {"tickPolicy": "skip"}}})),
            "spec.domain.clock.timer.pit.tickPolicy",
            "invalid value skip",
        );
        refuses(
            clock(json!({"timer": {"rtc": {"track": "moon"}}})),
            "spec.domain.clock.timer.rtc.track",
            "invalid value moon",
        );
    }

    #[test]
    fn vendor_id_fits_the_register() {
        let vendor = |id: &str| json!({"domain": {"features": {"hyperv": {"vendorid": {"vendorid": id}}}}});
        accepts(vendor("ferrovirt"));
        refuses(vendor("much too long an id"), "spec.domain.features.hyperv.vendorid.vendorid", "1 to 12");
        refuses(vendor("a,b"), "spec.domain.features.hyperv.vendorid.vendorid", "without commas");
    }

    #[test]
    fn grace_period_is_not_negative() {
        accepts(json!({"terminationGracePeriodSeconds": 0}));
        refuses(
            json!({"terminationGracePeriodSeconds": -1}),
            "spec.terminationGracePeriodSeconds",
            "greater than or equal to 0",
        );
    }

    #[test]
    fn devices_are_of_resources_that_are_permitted() {
        let config = |permitted: Value| ClusterConfig {
            permitted_host_devices: serde_json::from_value(permitted).unwrap(),
            ..ClusterConfig::default()
        };
        let asked = devices(json!({
            "gpus": [{"name": "g", "deviceName": "v.org/gpu"}, {"name": "c", "claimName": "c", "requestName": "r"}],
            "hostDevices": [{"name": "a", "deviceName": "v.org/stick"}, {"name": "b", "deviceName": "v.org/card"}],
        }));
        let stick = json!([{"resourceName": "v.org/stick", "selectors": [{"vendor": "1", "product": "2"}]}]);
        let card =
            json!([{"pciVendorSelector": "1:2", "resourceName": "v.org/card", "externalResourceProvider": true}]);
        for (permitted, refused) in [
            // The configuration lists no devices.
            (Value::Null, vec![]),
            (json!({}), vec!["gpus[0]", "hostDevices[0]", "hostDevices[1]"]),
            (json!({"usb": stick, "pciHostDevices": card}), vec!["gpus[0]"]),
        ] {
            let errors = super::validate_permitted("spec", &vmi_spec(asked.clone()), &config(permitted.clone()));
            let fields: Vec<&str> = errors.as_slice().iter().map(|error| error.field.as_str()).collect();
            let refused: Vec<String> =
                refused.iter().map(|device| format!("spec.domain.devices.{device}.deviceName")).collect();
            assert_eq!(fields, refused, "{permitted}");
        }
    }
}
