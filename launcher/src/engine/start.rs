//! Steps from a VirtualMachineInstance to a running domain.

use std::{
    path::{Path, PathBuf},
    time::Duration,
};

use api::{VirtualMachineInstance, constants::annotation};
use tokio::{sync::Semaphore, task::JoinHandle};

use super::RequestError;
use crate::{
    domain::{self, AllocatedDevices, Domain, Environment, unsupported::Unsupported},
    network,
    options::VmiArgs,
    paths::Paths,
    storage::{self, Tolerance},
    streaming::USB_CHANNELS,
};

/// Time limit of preparing the disks.
const PREPARE_DEADLINE: Duration = Duration::from_secs(60);
/// Time limit of reading the claims' sizes of a running domain: requests wait meanwhile.
const SIZE_READ_DEADLINE: Duration = Duration::from_secs(3);
/// Time after which a VMI that never ran and keeps failing to start fails for good.
const GIVE_UP_AFTER: Duration = Duration::from_secs(300);
/// Limit of concurrent reads of claims' sizes.
static SIZE_READS: Semaphore = Semaphore::const_new(1);
/// Debian's directory of UEFI firmware, in case the cluster's setting names another distribution's.
const OVMF_FALLBACK: &str = "/usr/share/OVMF";

/// Directory of QEMU's time zones.
const ZONES: &str = "/usr/share/zoneinfo";

/// Inputs of a start.
#[derive(Clone, Debug)]
pub(super) struct Start {
    pub(crate) vmi: VirtualMachineInstance,
    pub(crate) unsupported: Unsupported,
    pub(crate) options: protocol::MachineOptions,
    pub(crate) paths: Paths,
    pub(crate) args: VmiArgs,
    pub(crate) allow_emulation: bool,
    pub(crate) host_devices: AllocatedDevices,
}

/// Wraps an error that a retry may resolve: an image appears, space is freed, a claim is repaired.
fn retryable(error: impl std::fmt::Display) -> RequestError {
    RequestError::Start { message: error.to_string(), permanent: false }
}

/// Decides that a VMI without running domain fails for good: the error is permanent, or starts have failed for minutes;
/// another pod, perhaps on another node, may succeed. A domain that a former worker may have started is left running.
pub(super) fn gives_up(error: &RequestError, failing_for: Duration, adopting: bool) -> bool {
    match error {
        RequestError::Start { permanent: true, .. } | RequestError::Unsupported(_) => true,
        RequestError::Start { .. } | RequestError::Libvirt(_) => !adopting && failing_for >= GIVE_UP_AFTER,
        _ => false,
    }
}

fn refuse(unsupported: Unsupported) -> Result<(), RequestError> {
    if unsupported.is_empty() { Ok(()) } else { Err(RequestError::Unsupported(unsupported)) }
}

impl Start {
    /// Fails if the VMI has fields that no component carries out.
    pub(super) fn check_supported(&self) -> Result<(), RequestError> {
        refuse(self.unsupported.clone())
    }

    /// Fails if the spec of a running VMI has such fields.
    pub(super) fn check_spec_supported(&self) -> Result<(), RequestError> {
        refuse(self.unsupported.of_spec())
    }

    /// Prepares the disks and renders the domain's XML.
    pub(super) async fn domain(&self) -> Result<Domain, RequestError> {
        let this = self.clone();
        let work = tokio::task::spawn_blocking(move || this.domain_blocking());
        match tokio::time::timeout(PREPARE_DEADLINE, work).await {
            Ok(Ok(result)) => result,
            Ok(Err(_)) | Err(_) => Err(retryable("preparing the disks took too long")),
        }
    }

    /// Returns the possible sizes of disks in claims, by volume. Each read holds a thread, so storage that does not
    /// answer is not read again before it does.
    pub(super) async fn claim_sizes(&self) -> Vec<(String, u64)> {
        let Ok(turn) = SIZE_READS.try_acquire() else { return Vec::new() };
        let this = self.clone();
        let work = tokio::task::spawn_blocking(move || {
            let sizes = storage::claim_sizes(&this.vmi, &this.paths);
            drop(turn);
            sizes
        });
        match tokio::time::timeout(SIZE_READ_DEADLINE, work).await {
            Ok(Ok(sizes)) => sizes,
            Ok(Err(_)) | Err(_) => {
                tracing::warn!("reading the claims' sizes took too long");
                Vec::new()
            }
        }
    }

    fn domain_blocking(&self) -> Result<Domain, RequestError> {
        let prepared = storage::prepare(&self.vmi, &self.paths, &Tolerance::of(&self.options)).map_err(retryable)?;
        let efi = self
            .vmi
            .spec
            .domain
            .firmware
            .as_ref()
            .and_then(|firmware| firmware.bootloader.as_ref())
            .and_then(|bootloader| bootloader.efi.as_ref());
        let uefi = efi.and_then(|efi| {
            let directories = [self.args.ovmf_path.as_path(), Path::new(OVMF_FALLBACK)];
            domain::select_uefi(&directories, efi.secure_boot.unwrap_or(true), Path::exists)
        });
        let serial = self.paths.serial(&self.args.uid);
        let vnc = self.paths.vnc(&self.args.uid);
        let usb_redirection: Vec<PathBuf> =
            (0..USB_CHANNELS).map(|channel| self.paths.usb_redirection(&self.args.uid, channel)).collect();
        let nvram = self.paths.nvram().join(format!("{}_VARS.fd", self.args.name));
        std::fs::create_dir_all(self.paths.domain(&self.args.uid))
            .map_err(|error| retryable(format!("cannot create the domain's directory: {error}")))?;
        let environment = Environment {
            kvm: kvm_usable(&self.paths.dev),
            allow_emulation: self.allow_emulation,
            serial: &serial,
            vnc: &vnc,
            usb_redirection: &usb_redirection,
            nvram: &nvram,
            secrets: &self.paths.private.join("secret"),
            prepared: &prepared,
            uefi: uefi.as_ref(),
            zones: Path::new(ZONES),
            host_devices: &self.host_devices,
            options: &self.options,
        };
        domain::convert(&self.vmi, &environment)
            .map_err(|error| RequestError::Start { permanent: error.is_permanent(), message: error.to_string() })
    }

    /// Reports tagged interfaces.
    pub(super) fn has_tagged_interfaces(&self) -> bool {
        let mut tags = self.vmi.spec.domain.devices.interfaces.iter().filter_map(|interface| interface.tag.as_deref());
        tags.any(|tag| !tag.is_empty())
    }

    /// Writes the tags of interfaces to the cloud-init image. Returns its volume and size if the data source can hold
    /// tags.
    pub(super) async fn write_interface_tags(&self, definition: String) -> Result<Option<(String, u64)>, RequestError> {
        let this = self.clone();
        let work = tokio::task::spawn_blocking(move || {
            let interfaces = domain::tagged_interfaces(&this.vmi, &definition);
            storage::write_interface_tags(&this.vmi, &this.paths, interfaces).map_err(retryable)
        });
        match tokio::time::timeout(PREPARE_DEADLINE, work).await {
            Ok(Ok(result)) => result,
            Ok(Err(_)) | Err(_) => Err(retryable("writing the interfaces' tags took too long")),
        }
    }

    /// Starts DHCP servers on the bridges of the VMI's interfaces.
    pub(super) fn serve_dhcp(&self) -> Result<Vec<JoinHandle<()>>, RequestError> {
        network::serve(&self.vmi, &self.options.nics).map_err(retryable)
    }
}

/// Reports usable hardware virtualization: the device plugin gives /dev/kvm only to pods that request it, on nodes
/// where it works.
pub(super) fn kvm_usable(dev: &Path) -> bool {
    let path: PathBuf = dev.join("kvm");
    std::fs::OpenOptions::new().read(true).write(true).open(path).is_ok()
}

/// Reports the annotation that pauses probes of the guest agent.
pub(super) fn pauses_probes(vmi: &VirtualMachineInstance) -> bool {
    let annotations = vmi.metadata.annotations.as_ref();
    let asked = annotations.and_then(|all| all.get(annotation::PAUSE_GUEST_AGENT_PROBES));
    asked.is_some_and(|value| matches!(value.as_str(), "1" | "t" | "T" | "true" | "True" | "TRUE"))
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;

    #[test]
    fn a_start_that_keeps_failing_is_given_up() {
        let start = |permanent| RequestError::Start { message: "no kernel".into(), permanent };
        let libvirt = || RequestError::Libvirt(crate::hypervisor::libvirt::Error::NoDomain);
        for (error, seconds, adopting, expected) in [
            (start(true), 0, false, true),
            (start(true), 0, true, true),
            (RequestError::Unsupported(Unsupported::default()), 0, false, true),
            (start(false), 0, false, false),
            (start(false), 299, false, false),
            (start(false), 300, false, true),
            (libvirt(), 300, false, true),
            (start(false), 3000, true, false),
            (libvirt(), 3000, true, false),
            (RequestError::Ending, 3000, false, false),
            (RequestError::NoHello, 3000, false, false),
        ] {
            let given_up = gives_up(&error, Duration::from_secs(seconds), adopting);
            assert_eq!(given_up, expected, "{error:?} {seconds} {adopting}");
        }
    }

    #[test]
    fn an_annotation_pauses_probes_of_the_guest_agent() {
        let no = ["false", "0", "tRUE", "yes", "invalid", ""].map(|value| (value, false));
        for (value, paused) in ["true", "True", "TRUE", "t", "T", "1"].map(|value| (value, true)).into_iter().chain(no)
        {
            let mut vmi = VirtualMachineInstance::default();
            let name = annotation::PAUSE_GUEST_AGENT_PROBES.to_owned();
            vmi.metadata.annotations = Some(BTreeMap::from([(name, value.to_owned())]));
            assert_eq!(pauses_probes(&vmi), paused, "{value}");
        }
        assert!(!pauses_probes(&VirtualMachineInstance::default()));
    }
}
