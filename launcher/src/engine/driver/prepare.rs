//! Preparation of a domain: disks and XML, on blocking threads with time limits.

use std::{
    collections::{BTreeMap, BTreeSet},
    path::{Path, PathBuf},
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use api::{VirtualMachineInstance, constants::annotation, dedicated, hotplug};
use tokio::sync::Semaphore;

use super::sizes::ClaimReads;
use crate::{
    domain::{
        self, AllocatedDevices, Domain, DomainError, Environment,
        parse::{DomainConfig, parse},
    },
    engine::model::{JobInput, RequestError, Wanted},
    host_cpus,
    options::VmiArgs,
    paths::Paths,
    storage::{self, Access, Backend, DiskSource, ImageFormat, Prepared, Purpose, Tolerance, image::BlockSizes},
    streaming::USB_CHANNELS,
    virtiofs,
    vm_state::VmState,
};

/// Time limit of preparing the disks.
const PREPARE_DEADLINE: Duration = Duration::from_secs(60);
/// Time limit of opening volumes for a running domain.
const OPEN_DEADLINE: Duration = Duration::from_secs(3);
/// Time limits of reading the sizes of claims of a running domain, and of rendering it. Storage or a host that is slow for once makes no
/// failed item of a Sync.
const SIZES_DEADLINE: Duration = Duration::from_secs(8);
const RENDER_DEADLINE: Duration = Duration::from_secs(6);
/// Error of a volume that cannot be opened.
const NOT_READABLE: &str = "the volume cannot be opened in the pod of virt-launcher yet";
/// Error of a volume whose claim does not answer.
const NOT_MEASURED: &str = "the size of its claim cannot be read yet";
/// Debian's directory of UEFI firmware, in case the cluster's setting names another distribution's.
const OVMF_FALLBACK: &str = "/usr/share/OVMF";
/// The same for guests of arm64.
const AAVMF_FALLBACK: &str = "/usr/share/AAVMF";
/// Directory of QEMU's time zones.
const ZONES: &str = "/usr/share/zoneinfo";

/// Facts of the pod that do not change.
#[derive(Clone, Debug)]
pub(super) struct Pod {
    pub(super) paths: Paths,
    /// Identity and options of the VMI.
    pub(super) args: VmiArgs,
    /// Host devices allocated to the pod.
    pub(super) host_devices: AllocatedDevices,
    /// TPM and UEFI variables.
    pub(super) vm_state: VmState,
    /// The turn to work on disks: storage that does not answer holds one thread, not one for each attempt.
    pub(super) disks: Arc<Semaphore>,
    /// Reads of the sizes of claims.
    pub(super) claims: ClaimReads,
    /// The turn to render the domain of a Sync.
    pub(super) rendering: Arc<Semaphore>,
}

/// Preparation of a VMI's domain.
#[derive(Clone, Debug)]
pub(super) struct Preparation {
    pod: Arc<Pod>,
    wanted: Arc<Wanted>,
    allow_emulation: bool,
}

impl Preparation {
    pub(super) const fn new(pod: Arc<Pod>, wanted: Arc<Wanted>, allow_emulation: bool) -> Self {
        Self { pod, wanted, allow_emulation }
    }

    /// Prepares the disks and renders the domain's XML.
    pub(super) async fn domain(self) -> Result<Box<Domain>, RequestError> {
        self.serve_file_systems().await?;
        in_time("preparing the disks", self.pod.disks.clone(), move || {
            self.domain_blocking(Purpose::Start, None).map(Box::new)
        })
        .await
    }

    /// Prepares the disks of a domain that arrives from another launcher and renders its XML. The XML is not used: libvirt gets
    /// that of the source.
    pub(super) async fn target(self, migration: String) -> Result<Box<Domain>, RequestError> {
        self.serve_file_systems().await?;
        in_time("preparing the disks", self.pod.disks.clone(), move || {
            let mut domain = self.domain_blocking(Purpose::MigrationTarget, Some(&migration))?;
            let matched = storage::match_sizes(&self.wanted.vmi, &self.pod.paths).map_err(RequestError::retryable)?;
            // The target of the next migration needs them, too.
            for (volume, size) in matched {
                domain.disks.iter_mut().filter(|disk| disk.volume == volume).for_each(|disk| disk.size = size);
            }
            Ok(Box::new(domain))
        })
        .await
    }

    async fn serve_file_systems(&self) -> Result<(), RequestError> {
        virtiofs::serve(&self.wanted.vmi, &self.pod.paths).await.map_err(RequestError::retryable)
    }

    fn domain_blocking(&self, purpose: Purpose, migration: Option<&str>) -> Result<Domain, RequestError> {
        let Pod { paths, args, vm_state, .. } = &*self.pod;
        let tolerance = Tolerance::of(&self.wanted.options);
        let prepared =
            storage::prepare(&self.wanted.vmi, paths, &tolerance, purpose).map_err(RequestError::retryable)?;
        std::fs::create_dir_all(paths.domain(&args.uid))
            .map_err(|error| RequestError::retryable(format!("cannot create the domain's directory: {error}")))?;
        vm_state.prepare(&self.wanted.vmi, migration).map_err(RequestError::retryable)?;
        let domain = self
            .render(&prepared)
            .map_err(|error| RequestError::Start { permanent: error.is_permanent(), message: error.to_string() })?;
        // Before QEMU starts, whose threads libvirt places elsewhere.
        if !domain.housekeeping.is_empty() {
            host_cpus::confine(&domain.housekeeping);
        }
        Ok(domain)
    }

    fn render(&self, prepared: &Prepared) -> Result<Domain, DomainError> {
        let Pod { paths, args, host_devices, .. } = &*self.pod;
        let vmi = &self.wanted.vmi;
        let fallback = if vmi.spec.is_arm64() { AAVMF_FALLBACK } else { OVMF_FALLBACK };
        let uefi = domain::select_uefi(vmi, &[args.ovmf_path.as_path(), Path::new(fallback)], Path::exists);
        let usb_redirection: Vec<PathBuf> =
            (0..USB_CHANNELS).map(|channel| paths.usb_redirection(&args.uid, channel)).collect();
        let cpus = dedicated::is_dedicated(&vmi.spec.domain).then(|| host_cpus::read(paths)).transpose()?;
        let environment = Environment {
            kvm: kvm_usable(&paths.dev),
            allow_emulation: self.allow_emulation,
            serial: &paths.serial(&args.uid),
            vnc: &paths.vnc(&args.uid),
            metrics: &paths.metrics_socket(&args.uid),
            usb_redirection: &usb_redirection,
            nvram: &VmState::variables(vmi, paths),
            tpm: &paths.tpm_socket(),
            secrets: &paths.private.join("secret"),
            virtiofs: &paths.virtiofs(),
            prepared,
            uefi: uefi.as_ref(),
            zones: Path::new(ZONES),
            host_devices,
            options: &self.wanted.options,
            cpus: cpus.as_ref(),
        };
        domain::convert(vmi, &environment)
    }

    /// Reads what a running domain is compared with: the claims' sizes and the wanted domain. No disk is prepared.
    pub(super) async fn compare(self, active: Arc<DomainConfig>) -> JobInput {
        let ((sizes, silent), (plugged, mut left_out)) =
            tokio::join!(self.claim_sizes(&active), self.plugged_sources(&active));
        if !silent.is_empty() {
            tracing::warn!(?silent, "the claims of these volumes do not answer");
        }
        left_out.extend(silent.into_iter().map(|volume| (volume, NOT_MEASURED.to_owned())));
        let wanted = self.wanted_config(active, plugged).await;
        JobInput::Compared { sizes, wanted, left_out }
    }

    /// Renders the wanted domain with the disks of the active one.
    async fn wanted_config(
        self,
        active: Arc<DomainConfig>,
        plugged: Vec<(String, Plugged)>,
    ) -> Result<Box<DomainConfig>, DomainError> {
        let turn = self.pod.rendering.clone().try_acquire_owned().map_err(|_| DomainError::Late)?;
        let work = tokio::task::spawn_blocking(move || {
            let domain = self.render(&disks_of(&self.wanted.vmi, &active, plugged));
            drop(turn);
            domain.map(|domain| Box::new(parse(&domain.xml)))
        });
        match tokio::time::timeout(RENDER_DEADLINE, work).await {
            Ok(Ok(result)) => result,
            Ok(Err(_)) | Err(_) => {
                tracing::warn!("rendering the wanted domain took too long");
                Err(DomainError::Late)
            }
        }
    }

    /// Opens the hot-plugged volumes that the pod has and the domain has not. Returns the volumes that cannot be opened in
    /// time: storage that does not answer delays no other volume, and is not opened again before it answers.
    async fn plugged_sources(&self, active: &DomainConfig) -> (Vec<(String, Plugged)>, Vec<(String, String)>) {
        let mut opened = tokio::task::JoinSet::new();
        let mut left_out = BTreeMap::new();
        for volume in handed_over(&self.wanted.vmi, active) {
            left_out.insert(volume.clone(), NOT_READABLE.to_owned());
            let Some(turn) = Turn::take(&volume) else { continue };
            let this = self.clone();
            opened.spawn_blocking(move || {
                let plugged = open_plugged(&volume, &this.wanted.vmi, &this.pod.paths);
                drop(turn);
                (volume, plugged)
            });
        }
        let mut sources = Vec::new();
        let limit = tokio::time::Instant::now() + OPEN_DEADLINE;
        while let Ok(Some(result)) = tokio::time::timeout_at(limit, opened.join_next()).await {
            match result {
                Ok((volume, Ok(plugged))) => {
                    left_out.remove(&volume);
                    sources.push((volume, plugged));
                }
                Ok((volume, Err(message))) => drop(left_out.insert(volume, message)),
                Err(_) => {}
            }
        }
        opened.detach_all();
        (sources, left_out.into_iter().collect())
    }

    /// Returns the possible sizes of the domain's disks in claims, by volume, and the volumes whose claims do not answer.
    async fn claim_sizes(&self, active: &DomainConfig) -> (Vec<(String, u64)>, BTreeSet<String>) {
        let slices = active.disks.iter().filter(|disk| disk.is_slice).map(|disk| disk.name.clone());
        let slices: BTreeSet<String> = slices.collect();
        let is_active = |volume: &String| active.disks.iter().any(|disk| disk.name == *volume);
        let volumes = storage::growable(&self.wanted.vmi).into_iter().filter(is_active).collect();
        let this = self.clone();
        let read = move |volume: &str| {
            storage::possible_size(volume, &this.wanted.vmi, &this.pod.paths, slices.contains(volume))
        };
        let (sizes, silent) = self.pod.claims.each(volumes, SIZES_DEADLINE, read).await;
        (sizes.into_iter().filter_map(|(volume, size)| Some((volume, size?))).collect(), silent)
    }

    /// Writes the tags of devices to the cloud-init image. Returns its volume and size if the data source can hold
    /// tags.
    pub(super) async fn write_tags(
        self,
        definition: String,
        purpose: Purpose,
    ) -> Result<Option<(String, u64)>, RequestError> {
        in_time("writing the tags of devices", self.pod.disks.clone(), move || {
            let devices = domain::tagged_devices(&self.wanted.vmi, &definition);
            storage::write_tags(&self.wanted.vmi, &self.pod.paths, devices, purpose).map_err(RequestError::retryable)
        })
        .await
    }
}

/// Does work on a blocking thread in its turn, within the time limit.
async fn in_time<T: Send + 'static>(
    what: &str,
    turns: Arc<Semaphore>,
    work: impl FnOnce() -> Result<T, RequestError> + Send + 'static,
) -> Result<T, RequestError> {
    let done = async {
        let turn = turns.acquire_owned().await.ok()?;
        let done = tokio::task::spawn_blocking(move || {
            let result = work();
            drop(turn);
            result
        });
        done.await.ok()
    };
    match tokio::time::timeout(PREPARE_DEADLINE, done).await {
        Ok(Some(result)) => result,
        Ok(None) | Err(_) => Err(RequestError::retryable(format!("{what} took too long"))),
    }
}

/// A hot-plugged volume that can become a disk.
#[derive(Clone, Debug)]
struct Plugged {
    source: DiskSource,
    block_sizes: Option<BlockSizes>,
}

/// Volumes that are being opened.
static OPENING: Mutex<BTreeSet<String>> = Mutex::new(BTreeSet::new());

/// The turn to open a volume.
struct Turn(String);

impl Turn {
    fn take(volume: &str) -> Option<Self> {
        let mut opening = OPENING.lock().unwrap_or_else(PoisonError::into_inner);
        opening.insert(volume.to_owned()).then(|| Self(volume.to_owned()))
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        OPENING.lock().unwrap_or_else(PoisonError::into_inner).remove(&self.0);
    }
}

/// Returns the hot-plugged volumes with a disk that the pod has and the domain has not.
fn handed_over(vmi: &VirtualMachineInstance, active: &DomainConfig) -> Vec<String> {
    let has_disk = |name: &str| vmi.spec.domain.devices.disks.iter().any(|disk| disk.name == name);
    let is_active = |name: &str| active.disks.iter().any(|disk| disk.name == name && disk.source.is_some());
    let volumes = vmi.spec.volumes.iter().filter(|volume| hotplug::is_hotplugged(vmi, volume));
    let volumes = volumes.filter(|volume| hotplug::status_of(vmi, &volume.name).is_some_and(hotplug::is_handed_over));
    volumes.map(|volume| volume.name.clone()).filter(|name| has_disk(name) && !is_active(name)).collect()
}

/// Opens a hot-plugged volume, or returns why it cannot be opened.
fn open_plugged(volume: &str, vmi: &VirtualMachineInstance, paths: &Paths) -> Result<Plugged, String> {
    let disk = vmi.spec.domain.devices.disks.iter().find(|disk| disk.name == volume).ok_or(NOT_READABLE)?;
    let source = storage::hotplugged_source(volume, paths).ok_or(NOT_READABLE)?;
    storage::check_access(&source.backend, Access::of(disk.is_read_only())).map_err(|refusal| refusal.to_string())?;
    let matched = disk.cdrom.is_none() && storage::matches_volume(disk);
    let block_sizes = matched.then(|| storage::image::block_sizes(&source.backend)).transpose();
    Ok(Plugged { source, block_sizes: block_sizes.map_err(|_| NOT_READABLE)? })
}

/// Returns the sources of a running domain's disks. A volume that the domain lacks gets an arbitrary one: only its presence
/// is compared. A hot-plugged volume that the domain lacks needs its own.
fn disks_of(vmi: &VirtualMachineInstance, active: &DomainConfig, plugged: Vec<(String, Plugged)>) -> Prepared {
    let unknown = || DiskSource::new(Backend::File { path: "/".into(), format: ImageFormat::Raw }, true);
    let mut prepared = Prepared::default();
    for (volume, Plugged { source, block_sizes }) in plugged {
        prepared.block_sizes.extend(block_sizes.map(|sizes| (volume.clone(), sizes)));
        prepared.sources.insert(volume, source);
    }
    for volume in &vmi.spec.volumes {
        let known = active.disks.iter().find(|disk| disk.name == volume.name).and_then(|disk| disk.source.clone());
        let known = known.or_else(|| (!hotplug::is_hotplugged(vmi, volume)).then(unknown));
        prepared.sources.extend(known.map(|source| (volume.name.clone(), source)));
    }
    prepared.targets = active.disks.iter().map(|disk| (disk.name.clone(), disk.target.clone())).collect();
    prepared
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
    let value = annotations.and_then(|all| all.get(annotation::PAUSE_GUEST_AGENT_PROBES));
    value.is_some_and(|value| api::is_true(value))
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn disks_that_do_not_answer_hold_one_thread() {
        let turns = Arc::new(Semaphore::new(1));
        let hangs = turns.clone().acquire_owned().await.unwrap();
        assert!(in_time("it", turns.clone(), || Ok(())).await.is_err());
        drop(hangs);
        assert!(in_time("it", turns.clone(), || Ok(())).await.is_ok());
        assert!(in_time("it", turns, || Ok(())).await.is_ok());
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
