//! The rows.
//!
//! Sorted by path, which finds a row by halving and groups the fields of one object.

use serde_json::Value;

use super::{
    Component, Field, Object,
    changes::{CLAIM, GUEST, HOTPLUG, LINK, NETWORK, PLACEMENT, PLUGGED, SOCKETS},
    gated, is_set,
};
const CLAIMED: &str = "devices by resource claims";
const DISPLAYS: &str = "displays of virtual GPUs, which need GPUs with mediated devices";
const ENCRYPTION: &str = "encrypted guests, which need processors with SEV, SEV-SNP or TDX";
const RESERVATIONS: &str =
    "SCSI persistent reservations, which need a privileged helper on the node and SCSI disks that nodes share";
const SECOND: &str = "more than one cloud-init volume: the guest reads only one";

const IO_THREADS: [&str; 3] = ["auto", "shared", "supplementalPool"];

const fn domain(path: &'static str) -> Field {
    Field::new(path, Some(Component::Domain))
}

const fn launcher(path: &'static str) -> Field {
    Field::new(path, Some(Component::Launcher))
}

const fn handler(path: &'static str) -> Field {
    Field::new(path, Some(Component::Handler))
}

const fn pod(path: &'static str) -> Field {
    Field::new(path, Some(Component::Pod))
}

const fn controller(path: &'static str) -> Field {
    Field::new(path, Some(Component::Controller))
}

/// A field that no component carries out.
const fn refused(path: &'static str, reason: &'static str) -> Field {
    Field::new(path, None).lacks(reason)
}

/// A field that another rule of admission refuses.
const fn ruled_out(path: &'static str) -> Field {
    Field::new(path, None).checked(|value, _| is_set(value))
}

fn has(object: &Object, key: &str) -> bool {
    object.get(key).is_some_and(is_set)
}

fn is_writable(read_only: &Value, _: &Object) -> bool {
    read_only != &Value::Bool(true)
}

/// Returns true for a feature that is present and not switched off.
fn is_enabled(feature: &Value) -> bool {
    is_set(feature) && feature.get("enabled") != Some(&Value::Bool(false))
}

/// Either half of a claimed device is named as its claim.
fn is_claimed(claim: &Value, device: &Object) -> bool {
    is_set(claim) || has(device, "requestName")
}

/// cloud-init in the guest reads one volume, and only the first is made.
fn is_second_cloud_init(volume: &Value, spec: &Object) -> bool {
    let is_cloud_init = |volume: &Value| {
        ["cloudInitNoCloud", "cloudInitConfigDrive"].iter().any(|kind| volume.get(kind).is_some_and(is_set))
    };
    let mut before = spec.get("volumes").and_then(Value::as_array).into_iter().flatten();
    is_cloud_init(volume) && before.find(|other| is_cloud_init(other)).is_some_and(|first| !std::ptr::eq(first, volume))
}

/// All fields.
pub const FIELDS: &[Field] = &[
    launcher("accessCredentials[].sshPublicKey.propagationMethod.configDrive"),
    launcher("accessCredentials[].sshPublicKey.propagationMethod.noCloud"),
    launcher("accessCredentials[].sshPublicKey.propagationMethod.qemuGuestAgent.users[]"),
    launcher("accessCredentials[].sshPublicKey.source.secret.secretName"),
    launcher("accessCredentials[].userPassword.propagationMethod.qemuGuestAgent"),
    launcher("accessCredentials[].userPassword.source.secret.secretName"),
    pod("affinity.*").changes(PLACEMENT),
    pod("architecture")
        .except("CPU architectures other than amd64 and arm64", |value, _| {
            is_set(value) && value != "amd64" && value != "arm64"
        })
        .gated(gated::ARCHITECTURE),
    pod("dnsConfig.*"),
    pod("dnsPolicy"),
    domain("domain.chassis.asset"),
    domain("domain.chassis.manufacturer"),
    domain("domain.chassis.serial"),
    domain("domain.chassis.sku"),
    domain("domain.chassis.version"),
    domain("domain.clock.timer.hpet.present"),
    domain("domain.clock.timer.hpet.tickPolicy"),
    domain("domain.clock.timer.hyperv.present"),
    domain("domain.clock.timer.kvm.present"),
    domain("domain.clock.timer.pit.present"),
    domain("domain.clock.timer.pit.tickPolicy"),
    domain("domain.clock.timer.rtc.present"),
    domain("domain.clock.timer.rtc.tickPolicy"),
    domain("domain.clock.timer.rtc.track"),
    domain("domain.clock.timezone"),
    domain("domain.clock.utc.offsetSeconds"),
    domain("domain.cpu.cores"),
    domain("domain.cpu.dedicatedCpuPlacement"),
    domain("domain.cpu.features[].name"),
    domain("domain.cpu.features[].policy"),
    domain("domain.cpu.isolateEmulatorThread"),
    domain("domain.cpu.maxSockets"),
    domain("domain.cpu.model"),
    domain("domain.cpu.numa").gated(gated::NUMA),
    domain("domain.cpu.numa.guestMappingPassthrough"),
    domain("domain.cpu.realtime.mask"),
    domain("domain.cpu.sockets").changes(SOCKETS),
    domain("domain.cpu.threads"),
    domain("domain.devices.autoattachGraphicsDevice"),
    domain("domain.devices.autoattachInputDevice").checked(|value, devices| *value == true && !has(devices, "inputs")),
    domain("domain.devices.autoattachMemBalloon"),
    handler("domain.devices.autoattachPodInterface")
        .checked(|value, devices| *value == true && !has(devices, "interfaces")),
    domain("domain.devices.autoattachSerialConsole"),
    domain("domain.devices.autoattachVSOCK").gated(gated::VSOCK),
    domain("domain.devices.blockMultiQueue"),
    domain("domain.devices.clientPassthrough"),
    domain("domain.devices.disableHotplug"),
    domain("domain.devices.disks[].blockSize.custom.discardGranularity"),
    domain("domain.devices.disks[].blockSize.custom.logical"),
    domain("domain.devices.disks[].blockSize.custom.physical"),
    domain("domain.devices.disks[].blockSize.matchVolume.enabled"),
    domain("domain.devices.disks[].bootOrder"),
    domain("domain.devices.disks[].cache"),
    domain("domain.devices.disks[].cdrom.bus").gated(gated::EMPTY_CDROM),
    domain("domain.devices.disks[].cdrom.readonly"),
    domain("domain.devices.disks[].cdrom.tray"),
    refused("domain.devices.disks[].changedBlockTracking", "incremental backup"),
    domain("domain.devices.disks[].dedicatedIOThread"),
    domain("domain.devices.disks[].disk.bus"),
    domain("domain.devices.disks[].disk.pciAddress"),
    domain("domain.devices.disks[].disk.readonly"),
    domain("domain.devices.disks[].errorPolicy"),
    domain("domain.devices.disks[].io"),
    domain("domain.devices.disks[].lun.bus"),
    domain("domain.devices.disks[].lun.readonly"),
    refused("domain.devices.disks[].lun.reservation", RESERVATIONS),
    domain("domain.devices.disks[].name"),
    domain("domain.devices.disks[].serial"),
    domain("domain.devices.disks[].shareable"),
    launcher("domain.devices.disks[].tag"),
    launcher("domain.devices.downwardMetrics").gated(gated::METRICS_DEVICE),
    pod("domain.devices.filesystems[].name").gated(gated::FILE_SYSTEM),
    domain("domain.devices.filesystems[].virtiofs"),
    pod("domain.devices.gpus[].claimName").except(CLAIMED, is_claimed).gated(gated::GPU_CLAIM),
    domain("domain.devices.gpus[].deviceName"),
    domain("domain.devices.gpus[].name"),
    ruled_out("domain.devices.gpus[].requestName"),
    launcher("domain.devices.gpus[].tag"),
    domain("domain.devices.gpus[].virtualGPUOptions.display").except(DISPLAYS, |display, _| is_enabled(display)),
    pod("domain.devices.hostDevices[].claimName").except(CLAIMED, is_claimed).gated(gated::HOST_DEVICE_CLAIM),
    domain("domain.devices.hostDevices[].deviceName"),
    domain("domain.devices.hostDevices[].name").gated(gated::HOST_DEVICE),
    ruled_out("domain.devices.hostDevices[].requestName"),
    launcher("domain.devices.hostDevices[].tag"),
    domain("domain.devices.inputs[].bus"),
    domain("domain.devices.inputs[].name"),
    domain("domain.devices.inputs[].type"),
    domain("domain.devices.interfaces[].acpiIndex"),
    refused("domain.devices.interfaces[].binding", "binding plugins"),
    domain("domain.devices.interfaces[].bootOrder"),
    handler("domain.devices.interfaces[].bridge").changes(PLUGGED),
    launcher("domain.devices.interfaces[].dhcpOptions.bootFileName"),
    launcher("domain.devices.interfaces[].dhcpOptions.ntpServers[]"),
    launcher("domain.devices.interfaces[].dhcpOptions.privateOptions[].option"),
    launcher("domain.devices.interfaces[].dhcpOptions.privateOptions[].value"),
    launcher("domain.devices.interfaces[].dhcpOptions.tftpServerName"),
    domain("domain.devices.interfaces[].macAddress"),
    ruled_out("domain.devices.interfaces[].macvtap"),
    handler("domain.devices.interfaces[].masquerade"),
    domain("domain.devices.interfaces[].model"),
    domain("domain.devices.interfaces[].name"),
    ruled_out("domain.devices.interfaces[].passt"),
    refused("domain.devices.interfaces[].passtBinding", "passt").gated(gated::PASST),
    domain("domain.devices.interfaces[].pciAddress"),
    handler("domain.devices.interfaces[].portRanges[].end").gated(gated::PORT_RANGES),
    handler("domain.devices.interfaces[].portRanges[].protocol").gated(gated::PORT_RANGES),
    handler("domain.devices.interfaces[].portRanges[].start").gated(gated::PORT_RANGES),
    handler("domain.devices.interfaces[].ports[].name"),
    handler("domain.devices.interfaces[].ports[].port"),
    handler("domain.devices.interfaces[].ports[].protocol"),
    ruled_out("domain.devices.interfaces[].slirp"),
    refused("domain.devices.interfaces[].sriov", "SR-IOV, which needs network cards with virtual functions"),
    domain("domain.devices.interfaces[].state").changes(LINK),
    launcher("domain.devices.interfaces[].tag"),
    launcher("domain.devices.logSerialConsole"),
    domain("domain.devices.networkInterfaceMultiqueue"),
    domain("domain.devices.panicDevices[].model"),
    domain("domain.devices.rng"),
    domain("domain.devices.sound.model"),
    domain("domain.devices.sound.name"),
    domain("domain.devices.tpm.enabled"),
    domain("domain.devices.tpm.persistent"),
    domain("domain.devices.useVirtioTransitional"),
    domain("domain.devices.video.type"),
    ruled_out("domain.devices.watchdog.diag288"),
    domain("domain.devices.watchdog.i6300esb.action"),
    domain("domain.devices.watchdog.name"),
    domain("domain.features.acpi.enabled"),
    domain("domain.features.apic.enabled"),
    domain("domain.features.apic.endOfInterrupt"),
    domain("domain.features.hyperv.evmcs.enabled"),
    domain("domain.features.hyperv.frequencies.enabled"),
    domain("domain.features.hyperv.ipi.enabled"),
    domain("domain.features.hyperv.reenlightenment.enabled"),
    domain("domain.features.hyperv.relaxed.enabled"),
    domain("domain.features.hyperv.reset.enabled"),
    domain("domain.features.hyperv.runtime.enabled"),
    domain("domain.features.hyperv.spinlocks.enabled"),
    domain("domain.features.hyperv.spinlocks.spinlocks"),
    domain("domain.features.hyperv.synic.enabled"),
    domain("domain.features.hyperv.synictimer.direct.enabled"),
    domain("domain.features.hyperv.synictimer.enabled"),
    domain("domain.features.hyperv.tlbflush.direct.enabled"),
    domain("domain.features.hyperv.tlbflush.enabled"),
    domain("domain.features.hyperv.tlbflush.extended.enabled"),
    domain("domain.features.hyperv.vapic.enabled"),
    domain("domain.features.hyperv.vendorid.enabled"),
    domain("domain.features.hyperv.vendorid.vendorid"),
    domain("domain.features.hyperv.vpindex.enabled"),
    domain("domain.features.hypervPassthrough").checked(|value, features| is_enabled(value) && has(features, "hyperv")),
    domain("domain.features.kvm.hidden"),
    domain("domain.features.pvspinlock.enabled"),
    domain("domain.features.smm.enabled"),
    domain("domain.firmware.acpi.msdmNameRef"),
    domain("domain.firmware.acpi.slicNameRef"),
    domain("domain.firmware.bootloader.bios.useSerial"),
    domain("domain.firmware.bootloader.efi.persistent"),
    domain("domain.firmware.bootloader.efi.secureBoot"),
    pod("domain.firmware.kernelBoot.container.image"),
    pod("domain.firmware.kernelBoot.container.imagePullPolicy"),
    pod("domain.firmware.kernelBoot.container.imagePullSecret"),
    launcher("domain.firmware.kernelBoot.container.initrdPath"),
    launcher("domain.firmware.kernelBoot.container.kernelPath"),
    domain("domain.firmware.kernelBoot.kernelArgs"),
    domain("domain.firmware.serial"),
    domain("domain.firmware.uuid"),
    domain("domain.ioThreads.supplementalPoolThreadCount"),
    domain("domain.ioThreadsPolicy").checked(|policy, _| !IO_THREADS.iter().any(|known| policy == known)),
    pod("domain.launchSecurity").lacks(ENCRYPTION).gated(gated::LAUNCH_SECURITY),
    domain("domain.machine.type"),
    domain("domain.memory.guest").changes(GUEST),
    domain("domain.memory.hugepages.pageSize"),
    domain("domain.memory.maxGuest"),
    pod("domain.memory.reservedOverhead.addedOverhead").gated(gated::RESERVED_OVERHEAD),
    handler("domain.memory.reservedOverhead.memLock").gated(gated::RESERVED_OVERHEAD),
    domain("domain.rebootPolicy").gated(gated::REBOOT_POLICY),
    pod("domain.resources.limits.*"),
    pod("domain.resources.overcommitGuestOverhead"),
    pod("domain.resources.requests.*"),
    controller("evictionStrategy"),
    launcher("hostname"),
    pod("livenessProbe.*"),
    handler("networks[].multus.default"),
    handler("networks[].multus.networkName").changes(NETWORK),
    handler("networks[].name"),
    handler("networks[].pod.vmIPv6NetworkCIDR"),
    handler("networks[].pod.vmNetworkCIDR"),
    refused("networks[].resourceClaim", CLAIMED).gated(gated::NETWORK_CLAIM),
    pod("nodeSelector.*").changes(PLACEMENT),
    pod("priorityClassName"),
    pod("readinessProbe.*"),
    pod("resourceClaims[]").lacks(CLAIMED),
    pod("schedulerName"),
    pod("serviceAccountName"),
    domain("startStrategy").checked(|value, _| value != "Paused"),
    launcher("subdomain"),
    handler("terminationGracePeriodSeconds"),
    pod("tolerations.*").changes(PLACEMENT),
    pod("topologySpreadConstraints.*"),
    handler("utilityVolumes.*").gated(gated::UTILITY_VOLUMES),
    pod("volumes[]").except(SECOND, is_second_cloud_init),
    launcher("volumes[].cloudInitConfigDrive.networkData"),
    launcher("volumes[].cloudInitConfigDrive.networkDataBase64"),
    launcher("volumes[].cloudInitConfigDrive.networkDataSecretRef.name"),
    launcher("volumes[].cloudInitConfigDrive.secretRef.name"),
    launcher("volumes[].cloudInitConfigDrive.userData"),
    launcher("volumes[].cloudInitConfigDrive.userDataBase64"),
    launcher("volumes[].cloudInitNoCloud.networkData"),
    launcher("volumes[].cloudInitNoCloud.networkDataBase64"),
    launcher("volumes[].cloudInitNoCloud.networkDataSecretRef.name"),
    launcher("volumes[].cloudInitNoCloud.secretRef.name"),
    launcher("volumes[].cloudInitNoCloud.userData"),
    launcher("volumes[].cloudInitNoCloud.userDataBase64"),
    pod("volumes[].configMap.name"),
    pod("volumes[].configMap.optional"),
    launcher("volumes[].configMap.volumeLabel"),
    pod("volumes[].containerDisk.image"),
    pod("volumes[].containerDisk.imagePullPolicy"),
    pod("volumes[].containerDisk.imagePullSecret"),
    launcher("volumes[].containerDisk.path"),
    launcher("volumes[].containerPath.path").gated(gated::CONTAINER_PATH),
    launcher("volumes[].containerPath.readOnly")
        .except("paths of the launcher pod that the guest may write to", is_writable),
    launcher("volumes[].dataVolume.hotpluggable").changes(HOTPLUG),
    launcher("volumes[].dataVolume.name").changes(CLAIM),
    pod("volumes[].downwardAPI.fields.*"),
    launcher("volumes[].downwardAPI.volumeLabel"),
    launcher("volumes[].downwardMetrics").gated(gated::METRICS_DISK),
    launcher("volumes[].emptyDisk.capacity"),
    pod("volumes[].ephemeral.persistentVolumeClaim.claimName"),
    pod("volumes[].ephemeral.persistentVolumeClaim.readOnly"),
    handler("volumes[].hostDisk.capacity").gated(gated::HOST_DISK),
    pod("volumes[].hostDisk.path").gated(gated::HOST_DISK),
    handler("volumes[].hostDisk.shared").gated(gated::HOST_DISK),
    pod("volumes[].hostDisk.type").gated(gated::HOST_DISK),
    launcher("volumes[].memoryDump.claimName"),
    launcher("volumes[].memoryDump.hotpluggable"),
    launcher("volumes[].memoryDump.readOnly"),
    launcher("volumes[].name"),
    pod("volumes[].persistentVolumeClaim.claimName").changes(CLAIM),
    launcher("volumes[].persistentVolumeClaim.hotpluggable").changes(HOTPLUG),
    pod("volumes[].persistentVolumeClaim.readOnly"),
    pod("volumes[].secret.optional"),
    pod("volumes[].secret.secretName"),
    launcher("volumes[].secret.volumeLabel"),
    pod("volumes[].serviceAccount.serviceAccountName"),
    pod("volumes[].sysprep.configMap.name"),
    pod("volumes[].sysprep.secret.name"),
];
