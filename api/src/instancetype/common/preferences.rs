//! Common preferences: operating systems and the parts of their settings.

use k8s_openapi::apimachinery::pkg::api::resource::Quantity;

use super::{entry, mark, metadata};
use crate::{
    instancetype::preference::{
        ClockOffset, ClockPreferences, CpuPreferenceRequirement, CpuPreferences, DevicePreferences, FeaturePreferences,
        FirmwarePreferences, MemoryPreferenceRequirement, PreferenceRequirements, SpreadOptions,
        VirtualMachineClusterPreference, VirtualMachineClusterPreferenceSpec, VirtualMachinePreferenceSpec,
    },
    vmi::{
        clock::{ClockOffsetUtc, HpetTimer, HypervTimer, PitTimer, RtcTimer, Timer},
        devices::{Rng, TpmDevice},
        features::{FeatureApic, FeatureHyperv, FeatureSpinlocks, FeatureState, SynicTimer, TlbFlush},
        firmware::Efi,
    },
};

/// A part of the settings of an operating system. Later parts of a list override earlier ones.
#[derive(Clone, Copy)]
enum Part {
    /// Linux with virtio drivers.
    Linux,
    /// The network interface of an old guest with a SATA disk.
    Interface(&'static str),
    /// virtio devices of a guest that needs drivers for them.
    Virtio,
    /// virtio devices of the transitional form.
    Transitional,
    /// A virtio tablet.
    Tablet,
    /// An IO thread for each disk.
    IoThread,
    /// UEFI without secure boot.
    Efi,
    /// UEFI with secure boot.
    SecureBoot,
    /// UEFI with secure boot and variables that persist, and a TPM whose state does.
    Tpm,
    /// The architecture.
    Arch(&'static str),
    /// vCPUs over sockets, cores and threads in this ratio; multiple queues of interfaces.
    Spread(Option<u32>),
    /// No devices that disturb realtime applications.
    Realtime,
    /// Enlightenments, clock and devices of Windows.
    Windows,
    /// No PCI addresses above 4 GiB.
    LowPci,
}

use Part::{Arch, Efi as Uefi, Interface, IoThread, Linux, LowPci, SecureBoot, Spread, Tablet, Tpm, Windows};

const AMD64: Part = Arch("amd64");
const ARM64: Part = Arch("arm64");
const S390X: Part = Arch("s390x");

/// Name, title, icon, required vCPUs and memory, parts.
type Row = (&'static str, &'static str, &'static str, Option<(u32, &'static str)>, &'static [Part]);

const RHEL: Option<(u32, &str)> = Some((1, "1.5Gi"));
const DPDK: Option<(u32, &str)> = Some((8, "1.5Gi"));
const TWO_GIB: Option<(u32, &str)> = Some((1, "2Gi"));
const HALF_GIB: Option<(u32, &str)> = Some((1, "512Mi"));

const LINUX: &[Row] = &[
    ("alpine", "Alpine", "alpine", HALF_GIB, &[Linux]),
    ("centos.stream9", "CentOS Stream 9", "centos", RHEL, &[Linux, IoThread]),
    ("centos.stream9.desktop", "CentOS Stream 9 Desktop", "centos", RHEL, &[Linux, IoThread, Tablet]),
    ("centos.stream9.dpdk", "CentOS Stream 9 DPDK", "centos", DPDK, &[Linux, IoThread, Spread(Some(4))]),
    ("centos.stream10", "CentOS Stream 10", "centos", RHEL, &[Linux, IoThread]),
    ("centos.stream10.desktop", "CentOS Stream 10 Desktop", "centos", RHEL, &[Linux, IoThread, Tablet]),
    ("cirros", "CirrOS", "cirros", Some((1, "256Mi")), &[Linux]),
    ("debian", "Debian", "debian", HALF_GIB, &[Linux, Uefi]),
    ("fedora", "Fedora (amd64)", "fedora", TWO_GIB, &[Linux, SecureBoot, AMD64]),
    ("fedora.arm64", "Fedora (arm64)", "fedora", TWO_GIB, &[Linux, ARM64]),
    ("fedora.s390x", "Fedora (s390x)", "fedora", TWO_GIB, &[Linux, S390X]),
    ("linux", "Linux", "linux", None, &[Linux]),
    ("linux.efi", "Linux (EFI)", "linux", None, &[Linux, Uefi]),
    ("linux.virtiotransitional", "Linux (virtio-transitional)", "linux", None, &[Linux, Part::Transitional]),
    ("opensuse.leap", "openSUSE Leap", "opensuse-leap", TWO_GIB, &[Linux]),
    ("opensuse.tumbleweed", "openSUSE Tumbleweed", "opensuse-tumbleweed", TWO_GIB, &[Linux]),
    ("oraclelinux", "Oracle Linux", "oraclelinux", Some((2, "4Gi")), &[Linux, Uefi]),
    ("rhel.7", "Red Hat Enterprise Linux 7", "rhel", Some((1, "1Gi")), &[Linux]),
    ("rhel.7.desktop", "Red Hat Enterprise Linux 7 Desktop", "rhel", Some((1, "1Gi")), &[Linux, Tablet]),
    ("rhel.8", "Red Hat Enterprise Linux 8", "rhel", RHEL, &[Linux]),
    ("rhel.8.desktop", "Red Hat Enterprise Linux 8 Desktop", "rhel", RHEL, &[Linux, Tablet]),
    ("rhel.8.dpdk", "Red Hat Enterprise Linux 8 DPDK", "rhel", DPDK, &[Linux, Spread(Some(4))]),
    ("rhel.9", "Red Hat Enterprise Linux 9 (amd64)", "rhel", RHEL, &[Linux, IoThread, SecureBoot, AMD64]),
    ("rhel.9.arm64", "Red Hat Enterprise Linux 9 (arm64)", "rhel", RHEL, &[Linux, IoThread, ARM64]),
    ("rhel.9.s390x", "Red Hat Enterprise Linux 9 (s390x)", "rhel", RHEL, &[Linux, IoThread, S390X]),
    (
        "rhel.9.desktop",
        "Red Hat Enterprise Linux 9 Desktop (amd64)",
        "rhel",
        RHEL,
        &[Linux, IoThread, SecureBoot, AMD64, Tablet],
    ),
    (
        "rhel.9.dpdk",
        "Red Hat Enterprise Linux 9 DPDK (amd64)",
        "rhel",
        DPDK,
        &[Linux, IoThread, SecureBoot, AMD64, Spread(Some(4))],
    ),
    (
        "rhel.9.realtime",
        "Red Hat Enterprise Linux 9 Realtime (amd64)",
        "rhel",
        Some((4, "4Gi")),
        &[Linux, IoThread, SecureBoot, AMD64, Spread(None), Part::Realtime],
    ),
    ("rhel.10", "Red Hat Enterprise Linux 10 (amd64)", "rhel", RHEL, &[Linux, IoThread, SecureBoot, AMD64]),
    ("rhel.10.arm64", "Red Hat Enterprise Linux 10 (arm64)", "rhel", RHEL, &[Linux, IoThread, ARM64]),
    ("rhel.10.s390x", "Red Hat Enterprise Linux 10 (s390x)", "rhel", RHEL, &[Linux, IoThread, S390X]),
    ("sles", "SUSE Linux Enterprise Server", "sles", TWO_GIB, &[Linux]),
    ("ubuntu", "Ubuntu", "ubuntu", TWO_GIB, &[Linux]),
];

/// Each of these has a variant `.virtio`.
const WINDOWS: &[Row] = &[
    ("windows.7", "Microsoft Windows 7", "windows", TWO_GIB, &[Windows]),
    ("windows.10", "Microsoft Windows 10", "windows", TWO_GIB, &[Windows, SecureBoot]),
    ("windows.11", "Microsoft Windows 11", "windows", Some((2, "4Gi")), &[Windows, SecureBoot, Tpm]),
    ("windows.2k8", "Microsoft Windows Server 2008", "windows", HALF_GIB, &[Windows, Interface("e1000")]),
    ("windows.2k12", "Microsoft Windows Server 2012", "windows", HALF_GIB, &[Windows]),
    ("windows.2k16", "Microsoft Windows Server 2016", "windows", TWO_GIB, &[Windows, SecureBoot]),
    ("windows.2k19", "Microsoft Windows Server 2019", "windows", TWO_GIB, &[Windows, SecureBoot]),
    ("windows.2k22", "Microsoft Windows Server 2022", "windows", TWO_GIB, &[Windows, SecureBoot, Tpm]),
    ("windows.2k25", "Microsoft Windows Server 2025", "windows", TWO_GIB, &[Windows, SecureBoot, Tpm]),
];

const OLD_WINDOWS: &[Row] = &[
    (
        "windows.2k3",
        "Microsoft Windows Server 2003",
        "windows",
        Some((1, "256Mi")),
        &[Windows, LowPci, Interface("rtl8139")],
    ),
    ("windows.xp", "Microsoft Windows XP", "windows", Some((1, "128Mi")), &[Windows, LowPci]),
];

const LEGACY: Row = ("legacy", "Legacy Guest", "other", None, &[Interface("e1000")]);

/// Returns the common preferences.
pub fn preferences() -> Vec<VirtualMachineClusterPreference> {
    let mut all = vec![preference(&LEGACY, "legacy", "")];
    all.extend(LINUX.iter().map(|row| preference(row, "linux", "")));
    all.extend(WINDOWS.iter().chain(OLD_WINDOWS).map(|row| preference(row, "windows", "")));
    all.extend(WINDOWS.iter().map(|row| preference(row, "windows", ".virtio")));
    all
}

fn preference((name, title, icon, needs, parts): &Row, os: &str, variant: &str) -> VirtualMachineClusterPreference {
    let mut spec = VirtualMachinePreferenceSpec::default();
    spec.annotations.insert("vm.kubevirt.io/os".to_owned(), os.to_owned());
    parts.iter().for_each(|part| part.add(&mut spec));
    let mut title = (*title).to_owned();
    if variant == ".virtio" {
        Part::Virtio.add(&mut spec);
        title.push_str(" (virtio)");
    }
    if let Some((cpus, memory)) = *needs {
        let requirements = spec.requirements.get_or_insert_default();
        requirements.cpu = Some(CpuPreferenceRequirement { guest: cpus });
        requirements.memory = Some(MemoryPreferenceRequirement { guest: Quantity(memory.to_owned()) });
    }
    let mut labels = vec![entry("os-type", os)];
    labels.extend(
        needs.iter().flat_map(|(cpus, memory)| [entry("required-cpu", cpus), entry("required-memory", memory)]),
    );
    if let Some(architecture) = &spec.preferred_architecture {
        labels.extend(["arch", "preferred-architecture", "required-architecture"].map(|key| entry(key, architecture)));
    }
    let text = |key: &str, value: String| (key.to_owned(), value);
    let annotations = [
        text("iconClass", format!("icon-{icon}")),
        text("openshift.io/display-name", title),
        text("tags", format!("hidden,kubevirt,{icon}")),
    ];
    let mut metadata = metadata(&format!("{name}{variant}"), labels, annotations);
    mark(&mut metadata, &spec);
    VirtualMachineClusterPreference { metadata, spec: VirtualMachineClusterPreferenceSpec(spec) }
}

fn buses(devices: &mut DevicePreferences, disk: &str, interface: &str) {
    devices.preferred_disk_bus = Some(disk.to_owned());
    devices.preferred_interface_model = Some(interface.to_owned());
}

fn tablet(devices: &mut DevicePreferences) {
    devices.preferred_autoattach_input_device = Some(true);
    devices.preferred_input_bus = Some("virtio".to_owned());
    devices.preferred_input_type = Some("tablet".to_owned());
}

impl Part {
    fn add(self, spec: &mut VirtualMachinePreferenceSpec) {
        let devices = spec.devices.get_or_insert_default();
        match self {
            Self::Linux => {
                buses(devices, "virtio", "virtio");
                devices.preferred_rng = Some(Rng::default());
            }
            Self::Interface(model) => buses(devices, "sata", model),
            Self::Virtio => {
                buses(devices, "virtio", "virtio");
                tablet(devices);
                devices.preferred_video_type = Some("virtio".to_owned());
            }
            Self::Transitional => devices.preferred_use_virtio_transitional = Some(true),
            Self::Tablet => tablet(devices),
            Self::IoThread => devices.preferred_disk_dedicated_io_thread = Some(true),
            Self::Efi => firmware(spec, Efi { secure_boot: Some(false), persistent: None }),
            Self::SecureBoot => {
                firmware(spec, Efi { secure_boot: Some(true), persistent: None });
                spec.features.get_or_insert_default().preferred_smm = Some(FeatureState::default());
            }
            Self::Tpm => {
                devices.preferred_tpm = Some(TpmDevice { persistent: Some(true), ..TpmDevice::default() });
                firmware(spec, Efi { secure_boot: Some(true), persistent: Some(true) });
            }
            Self::Arch(name) => {
                spec.preferred_architecture = Some(name.to_owned());
                let requirements = spec.requirements.get_or_insert_with(PreferenceRequirements::default);
                requirements.architecture = Some(name.to_owned());
            }
            Self::Spread(ratio) => {
                devices.preferred_network_interface_multi_queue = Some(true);
                let options = SpreadOptions { across: Some("SocketsCoresThreads".to_owned()), ratio };
                topology(spec, "spread").spread_options = Some(options);
            }
            Self::Realtime => {
                devices.preferred_autoattach_graphics_device = Some(false);
                devices.preferred_autoattach_mem_balloon = Some(false);
                devices.preferred_autoattach_serial_console = Some(true);
            }
            Self::Windows => windows(spec),
            Self::LowPci => {
                spec.annotations.insert("kubevirt.io/disablePCIHole64".to_owned(), "true".to_owned());
            }
        }
    }
}

fn firmware(spec: &mut VirtualMachinePreferenceSpec, efi: Efi) {
    spec.firmware = Some(FirmwarePreferences { preferred_efi: Some(efi), ..FirmwarePreferences::default() });
}

fn topology<'a>(spec: &'a mut VirtualMachinePreferenceSpec, name: &str) -> &'a mut CpuPreferences {
    let cpu = spec.cpu.get_or_insert_default();
    cpu.preferred_cpu_topology = Some(name.to_owned());
    cpu
}

fn windows(spec: &mut VirtualMachinePreferenceSpec) {
    let devices = spec.devices.get_or_insert_default();
    buses(devices, "sata", "e1000e");
    devices.preferred_autoattach_input_device = Some(true);
    topology(spec, "sockets");
    spec.preferred_termination_grace_period_seconds = Some(3600);
    let on = || Some(FeatureState::default());
    spec.features = Some(FeaturePreferences {
        preferred_acpi: on(),
        preferred_apic: Some(FeatureApic::default()),
        preferred_hyperv: Some(FeatureHyperv {
            frequencies: on(),
            ipi: on(),
            reenlightenment: on(),
            relaxed: on(),
            reset: on(),
            runtime: on(),
            spinlocks: Some(FeatureSpinlocks { spinlocks: Some(8191), ..FeatureSpinlocks::default() }),
            synic: on(),
            synictimer: Some(SynicTimer { direct: on(), ..SynicTimer::default() }),
            tlbflush: Some(TlbFlush::default()),
            vapic: on(),
            vpindex: on(),
            ..FeatureHyperv::default()
        }),
        ..FeaturePreferences::default()
    });
    let policy = |name: &str| Some(name.to_owned());
    spec.clock = Some(ClockPreferences {
        preferred_clock_offset: Some(ClockOffset { utc: Some(ClockOffsetUtc::default()), ..ClockOffset::default() }),
        preferred_timer: Some(Timer {
            hpet: Some(HpetTimer { present: Some(false), ..HpetTimer::default() }),
            hyperv: Some(HypervTimer::default()),
            pit: Some(PitTimer { tick_policy: policy("delay"), ..PitTimer::default() }),
            rtc: Some(RtcTimer { tick_policy: policy("catchup"), ..RtcTimer::default() }),
            ..Timer::default()
        }),
    });
}
