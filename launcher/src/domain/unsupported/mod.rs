//! Finds fields of a VMI that no component carries out.
//!
//! The tables list every field that is carried out, by the component that does so. Any other field that is set makes
//! Sync fail, known to the API or not: admission is the first line, and a VMI may have been stored without it or been
//! written by a newer version. A field enters a table together with the code that carries it out.

use std::fmt;

use api::{constants::annotation, quantity};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use serde_json::{Map, Value};

/// Limit of fields named in a message.
const NAMED_LIMIT: usize = 16;
/// Limit of an object key in a message.
const KEY_LIMIT: usize = 64;

/// Rendered into the domain's XML by [`crate::domain`]. Paths are below `spec`; `.*` covers everything below a field.
const DOMAIN: &[&str] = &[
    "domain.chassis.asset",
    "domain.chassis.manufacturer",
    "domain.chassis.serial",
    "domain.chassis.sku",
    "domain.chassis.version",
    "domain.clock.timer.hpet.present",
    "domain.clock.timer.hpet.tickPolicy",
    "domain.clock.timer.hyperv.present",
    "domain.clock.timer.kvm.present",
    "domain.clock.timer.pit.present",
    "domain.clock.timer.pit.tickPolicy",
    "domain.clock.timer.rtc.present",
    "domain.clock.timer.rtc.tickPolicy",
    "domain.clock.timer.rtc.track",
    "domain.clock.timezone",
    "domain.clock.utc.offsetSeconds",
    "domain.cpu.cores",
    "domain.cpu.features.name",
    "domain.cpu.features.policy",
    "domain.cpu.maxSockets",
    "domain.cpu.model",
    "domain.cpu.sockets",
    "domain.cpu.threads",
    "domain.devices.autoattachGraphicsDevice",
    "domain.devices.autoattachMemBalloon",
    "domain.devices.autoattachSerialConsole",
    "domain.devices.autoattachVSOCK",
    "domain.devices.blockMultiQueue",
    "domain.devices.clientPassthrough",
    "domain.devices.disableHotplug",
    "domain.devices.disks.blockSize.custom.discardGranularity",
    "domain.devices.disks.blockSize.custom.logical",
    "domain.devices.disks.blockSize.custom.physical",
    "domain.devices.disks.blockSize.matchVolume.enabled",
    "domain.devices.disks.bootOrder",
    "domain.devices.disks.cache",
    "domain.devices.disks.cdrom.bus",
    "domain.devices.disks.cdrom.readonly",
    "domain.devices.disks.cdrom.tray",
    "domain.devices.disks.dedicatedIOThread",
    "domain.devices.disks.disk.bus",
    "domain.devices.disks.disk.pciAddress",
    "domain.devices.disks.disk.readonly",
    "domain.devices.disks.errorPolicy",
    "domain.devices.disks.io",
    "domain.devices.disks.lun.bus",
    "domain.devices.disks.lun.readonly",
    "domain.devices.disks.name",
    "domain.devices.disks.serial",
    "domain.devices.disks.shareable",
    "domain.devices.gpus.deviceName",
    "domain.devices.gpus.name",
    "domain.devices.hostDevices.deviceName",
    "domain.devices.hostDevices.name",
    "domain.devices.inputs.bus",
    "domain.devices.inputs.name",
    "domain.devices.inputs.type",
    "domain.devices.interfaces.acpiIndex",
    "domain.devices.interfaces.bootOrder",
    "domain.devices.interfaces.macAddress",
    "domain.devices.interfaces.model",
    "domain.devices.interfaces.name",
    "domain.devices.interfaces.pciAddress",
    "domain.devices.interfaces.state",
    "domain.devices.networkInterfaceMultiqueue",
    "domain.devices.panicDevices.model",
    "domain.devices.rng",
    "domain.devices.sound.model",
    "domain.devices.sound.name",
    "domain.devices.useVirtioTransitional",
    "domain.devices.video.type",
    "domain.devices.watchdog.i6300esb.action",
    "domain.devices.watchdog.name",
    "domain.features.acpi.enabled",
    "domain.features.apic.enabled",
    "domain.features.apic.endOfInterrupt",
    "domain.features.hyperv.evmcs.enabled",
    "domain.features.hyperv.frequencies.enabled",
    "domain.features.hyperv.ipi.enabled",
    "domain.features.hyperv.reenlightenment.enabled",
    "domain.features.hyperv.relaxed.enabled",
    "domain.features.hyperv.reset.enabled",
    "domain.features.hyperv.runtime.enabled",
    "domain.features.hyperv.spinlocks.enabled",
    "domain.features.hyperv.spinlocks.spinlocks",
    "domain.features.hyperv.synic.enabled",
    "domain.features.hyperv.synictimer.direct.enabled",
    "domain.features.hyperv.synictimer.enabled",
    "domain.features.hyperv.tlbflush.direct.enabled",
    "domain.features.hyperv.tlbflush.enabled",
    "domain.features.hyperv.tlbflush.extended.enabled",
    "domain.features.hyperv.vapic.enabled",
    "domain.features.hyperv.vendorid.enabled",
    "domain.features.hyperv.vendorid.vendorid",
    "domain.features.hyperv.vpindex.enabled",
    "domain.features.kvm.hidden",
    "domain.features.pvspinlock.enabled",
    "domain.features.smm.enabled",
    "domain.firmware.acpi.msdmNameRef",
    "domain.firmware.acpi.slicNameRef",
    "domain.firmware.bootloader.bios.useSerial",
    "domain.firmware.bootloader.efi.secureBoot",
    "domain.firmware.kernelBoot.kernelArgs",
    "domain.firmware.serial",
    "domain.firmware.uuid",
    "domain.ioThreads.supplementalPoolThreadCount",
    "domain.machine.type",
    "domain.memory.guest",
    // Admission refuses huge pages: no node of the test cluster has any.
    "domain.memory.hugepages.pageSize",
    "domain.rebootPolicy",
];

/// Carried out by the modules of virt-launcher that prepare disks, lease addresses, serve the console and follow
/// credentials.
const LAUNCHER: &[&str] = &[
    "accessCredentials.sshPublicKey.propagationMethod.configDrive",
    "accessCredentials.sshPublicKey.propagationMethod.noCloud",
    "accessCredentials.sshPublicKey.propagationMethod.qemuGuestAgent.users",
    "accessCredentials.sshPublicKey.source.secret.secretName",
    "accessCredentials.userPassword.propagationMethod.qemuGuestAgent",
    "accessCredentials.userPassword.source.secret.secretName",
    "domain.devices.interfaces.dhcpOptions.bootFileName",
    "domain.devices.interfaces.dhcpOptions.ntpServers",
    "domain.devices.interfaces.dhcpOptions.privateOptions.option",
    "domain.devices.interfaces.dhcpOptions.privateOptions.value",
    "domain.devices.interfaces.dhcpOptions.tftpServerName",
    "domain.devices.interfaces.tag",
    "domain.devices.logSerialConsole",
    "domain.firmware.kernelBoot.container.initrdPath",
    "domain.firmware.kernelBoot.container.kernelPath",
    "hostname",
    "subdomain",
    "volumes.cloudInitConfigDrive.networkData",
    "volumes.cloudInitConfigDrive.networkDataBase64",
    "volumes.cloudInitConfigDrive.networkDataSecretRef.name",
    "volumes.cloudInitConfigDrive.secretRef.name",
    "volumes.cloudInitConfigDrive.userData",
    "volumes.cloudInitConfigDrive.userDataBase64",
    "volumes.cloudInitNoCloud.networkData",
    "volumes.cloudInitNoCloud.networkDataBase64",
    "volumes.cloudInitNoCloud.networkDataSecretRef.name",
    "volumes.cloudInitNoCloud.secretRef.name",
    "volumes.cloudInitNoCloud.userData",
    "volumes.cloudInitNoCloud.userDataBase64",
    "volumes.configMap.volumeLabel",
    "volumes.containerDisk.path",
    // Admission refuses DataVolumes: no controller imports them. Their claims are disks like any other.
    "volumes.dataVolume.hotpluggable",
    "volumes.dataVolume.name",
    "volumes.downwardAPI.volumeLabel",
    "volumes.emptyDisk.capacity",
    "volumes.name",
    "volumes.memoryDump.claimName",
    "volumes.memoryDump.hotpluggable",
    "volumes.memoryDump.readOnly",
    "volumes.persistentVolumeClaim.hotpluggable",
    "volumes.secret.volumeLabel",
];

/// Carried out by virt-handler, which connects the guest to the pod's networks and answers probes.
const HANDLER: &[&str] = &[
    "domain.devices.interfaces.bridge",
    "domain.devices.interfaces.masquerade",
    "domain.devices.interfaces.portRanges.end",
    "domain.devices.interfaces.portRanges.protocol",
    "domain.devices.interfaces.portRanges.start",
    "domain.devices.interfaces.ports.name",
    "domain.devices.interfaces.ports.port",
    "domain.devices.interfaces.ports.protocol",
    "networks.multus.default",
    "networks.multus.networkName",
    "networks.name",
    "networks.pod.vmIPv6NetworkCIDR",
    "networks.pod.vmNetworkCIDR",
    "terminationGracePeriodSeconds",
    "utilityVolumes.*",
];

/// Carried out by virt-controller, which renders the launcher pod, and by the pod's scheduler and kubelet.
const CONTROLLER: &[&str] = &[
    "affinity.*",
    "dnsConfig.*",
    "dnsPolicy",
    "domain.firmware.kernelBoot.container.image",
    "domain.firmware.kernelBoot.container.imagePullPolicy",
    "domain.firmware.kernelBoot.container.imagePullSecret",
    "domain.memory.reservedOverhead.addedOverhead",
    "domain.resources.limits.*",
    "domain.resources.overcommitGuestOverhead",
    "domain.resources.requests.*",
    "evictionStrategy",
    "livenessProbe.*",
    "nodeSelector.*",
    "priorityClassName",
    "readinessProbe.*",
    "schedulerName",
    "serviceAccountName",
    "tolerations.*",
    "topologySpreadConstraints.*",
    "volumes.configMap.name",
    "volumes.configMap.optional",
    "volumes.containerDisk.image",
    "volumes.containerDisk.imagePullPolicy",
    "volumes.containerDisk.imagePullSecret",
    "volumes.downwardAPI.fields.*",
    "volumes.ephemeral.persistentVolumeClaim.claimName",
    "volumes.ephemeral.persistentVolumeClaim.readOnly",
    "volumes.persistentVolumeClaim.claimName",
    "volumes.persistentVolumeClaim.readOnly",
    "volumes.secret.optional",
    "volumes.secret.secretName",
    "volumes.serviceAccount.serviceAccountName",
    "volumes.sysprep.configMap.name",
    "volumes.sysprep.secret.name",
];

const TABLES: [&[&str]; 4] = [DOMAIN, LAUNCHER, HANDLER, CONTROLLER];

/// Decides by a field's value, given the object that holds the field, whether the field is carried out.
type Condition = fn(&Value, &Map<String, Value>) -> bool;

/// Fields that are carried out with some values only.
const CONDITIONAL: &[(&str, Condition)] = &[
    ("architecture", |value, _| value == "amd64"),
    // A default of admission adds the input device.
    ("domain.devices.autoattachInputDevice", |value, devices| {
        *value != true || devices.get("inputs").is_some_and(is_set)
    }),
    // A default of admission adds the interface.
    ("domain.devices.autoattachPodInterface", |value, devices| {
        *value != true || devices.get("interfaces").is_some_and(is_set)
    }),
    ("domain.devices.gpus.virtualGPUOptions.display", |display, _| is_disabled(display)),
    ("domain.devices.tpm", |tpm, _| is_disabled(tpm)),
    ("domain.features.hypervPassthrough", |passthrough, features| {
        is_disabled(passthrough) || !features.get("hyperv").is_some_and(is_set)
    }),
    ("domain.ioThreadsPolicy", |value, _| ["auto", "shared", "supplementalPool"].iter().any(|known| value == known)),
    // The memory device has blocks of another size then.
    ("domain.memory.maxGuest", |value, memory| {
        let bytes = |value: &Value| quantity::units(&Quantity(value.as_str()?.to_owned())).ok();
        let grows = bytes(value).is_none_or(|most| memory.get("guest").and_then(bytes) != Some(most));
        !(grows && memory.get("hugepages").is_some_and(is_set))
    }),
    ("domain.memory.reservedOverhead.memLock", |value, _| value != "Required"),
    ("startStrategy", |value, _| value == "Paused"),
];

/// Decides by the value of an annotation whether it requests a change of the domain.
type IsRequest = fn(&str) -> bool;

/// Annotations that change the domain of the reference.
const ANNOTATIONS: &[(&str, IsRequest)] = &[
    (annotation::IGNITION_DATA, |value| !value.is_empty()),
    (annotation::HOOK_SIDECARS, |value| !value.is_empty()),
    (annotation::PLACE_PCI_DEVICES_ON_ROOT_COMPLEX, |value| value == "true"),
];

/// Paths of fields that are set and that no component carries out.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Unsupported {
    annotations: Vec<String>,
    named: Vec<String>,
    more: usize,
}

impl Unsupported {
    /// Finds the fields in a VMI's JSON form, which still has fields unknown to the types.
    pub(crate) fn find(vmi: &Value) -> Self {
        let mut found = Self::default();
        if let Some(spec) = vmi.get("spec").and_then(Value::as_object) {
            found.object("", "spec", spec);
            found.second_cloud_init(spec);
        }
        for (key, is_request) in ANNOTATIONS {
            let value = vmi.get("metadata").and_then(|metadata| metadata.get("annotations")?.get(key)?.as_str());
            if value.is_some_and(is_request) {
                found.annotations.push(format!("metadata.annotations.{key}"));
            }
        }
        found
    }

    pub(crate) const fn is_empty(&self) -> bool {
        self.annotations.is_empty() && self.named.is_empty()
    }

    /// Returns the fields without annotations. Users can set annotations at any time, and those here apply to the start only.
    pub(crate) fn of_spec(&self) -> Self {
        Self { annotations: Vec::new(), ..self.clone() }
    }

    fn add(&mut self, path: String) {
        if self.named.len() < NAMED_LIMIT {
            self.named.push(path);
        } else {
            self.more += 1;
        }
    }

    fn object(&mut self, field: &str, path: &str, fields: &Map<String, Value>) {
        for (key, value) in fields {
            let shown: String = key.chars().filter(|c| !c.is_control()).take(KEY_LIMIT).collect();
            let path = format!("{path}.{shown}");
            let field = if field.is_empty() { key.clone() } else { format!("{field}.{key}") };
            self.value(&field, &path, value, fields);
        }
    }

    fn value(&mut self, field: &str, path: &str, value: &Value, holder: &Map<String, Value>) {
        if !is_set(value) || covers_below(field) {
            return;
        }
        if let Some((_, is_carried_out)) = CONDITIONAL.iter().find(|(name, _)| *name == field) {
            if !is_carried_out(value, holder) {
                self.add(path.to_owned());
            }
            return;
        }
        let (listed, leads_to_listed) = (is_listed(field), leads_to_listed(field));
        match value {
            Value::Object(fields) if leads_to_listed || (listed && !fields.is_empty()) => {
                self.object(field, path, fields);
            }
            Value::Array(items) if leads_to_listed || listed => {
                for (index, item) in items.iter().enumerate() {
                    self.value(field, &format!("{path}[{index}]"), item, holder);
                }
            }
            _ if listed => {}
            _ => self.add(path.to_owned()),
        }
    }

    /// cloud-init in the guest reads one volume, and only the first is made.
    fn second_cloud_init(&mut self, spec: &Map<String, Value>) {
        let volumes = spec.get("volumes").and_then(Value::as_array);
        let is_cloud_init = |volume: &Value| {
            ["cloudInitNoCloud", "cloudInitConfigDrive"].iter().any(|kind| volume.get(kind).is_some_and(is_set))
        };
        let cloud_init = volumes.into_iter().flatten().enumerate().filter(|(_, volume)| is_cloud_init(volume));
        for (index, _) in cloud_init.skip(1) {
            self.add(format!("spec.volumes[{index}]"));
        }
    }
}

impl fmt::Display for Unsupported {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let all: Vec<&str> = self.annotations.iter().chain(&self.named).map(String::as_str).collect();
        f.write_str(&all.join(", "))?;
        if self.more > 0 {
            write!(f, " and {} more", self.more)?;
        }
        Ok(())
    }
}

/// Distinguishes a field with a value from one that only shows its default. An empty object is a value: it marks a choice.
fn is_set(value: &Value) -> bool {
    match value {
        Value::Null => false,
        Value::Bool(value) => *value,
        Value::Number(_) | Value::Object(_) => true,
        Value::String(text) => !text.is_empty(),
        Value::Array(items) => !items.is_empty(),
    }
}

fn is_disabled(feature: &Value) -> bool {
    feature.get("enabled") == Some(&Value::Bool(false))
}

fn listed() -> impl Iterator<Item = &'static str> {
    TABLES.into_iter().flatten().copied()
}

fn is_listed(field: &str) -> bool {
    listed().any(|name| name == field)
}

fn covers_below(field: &str) -> bool {
    listed().any(|name| name.strip_suffix(".*") == Some(field))
}

fn leads_to_listed(field: &str) -> bool {
    let below = |name: &str| name.strip_prefix(field).is_some_and(|rest| rest.starts_with('.'));
    listed().chain(CONDITIONAL.iter().map(|(name, _)| *name)).any(below)
}

#[cfg(test)]
mod tests;
