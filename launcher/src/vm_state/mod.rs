//! State of the VMI beside its disks: its TPM and its UEFI variables. `claim` is the claim in which it outlives the pod, `emulator`
//! the process of the TPM.
//!
//! ```text
//!   prepare a start:     settle the claim -> make the TPM if there is none -> start the emulator
//!   prepare an arrival:  an empty directory -> start the emulator; QEMU's stream brings the state
//!   the guest leaves:    mark a claim that has the state of both ends -> release the guest at the target -> mark a claim of its own
//!                        -> end the emulator -> remove the own state
//! ```
//! QEMU ends the emulator when it ends, and cannot connect to another one. An emulator that ends is started again for the next
//! QEMU, which arrives in post-copy; one that ends alone takes the VMI with it.

mod claim;
mod emulator;

use std::{
    io::ErrorKind,
    path::{Path, PathBuf},
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use api::{VirtualMachineInstance, persistent_state};
use protocol::{LauncherState, MigrationStep};
use thiserror::Error;
use tokio::{
    sync::{Notify, Semaphore, mpsc},
    time::{Instant, sleep, timeout},
};

use self::claim::StateClaim;
use crate::{paths::Paths, tasks::Tasks};

/// Time for QEMU to end together with its emulator.
const GRACE: Duration = Duration::from_secs(3);
/// Shortest time between two starts of the emulator.
const RESTART_PAUSE: Duration = Duration::from_secs(1);
/// Time limit of recording in the claim that the guest has left: it stands still meanwhile.
const MARK_DEADLINE: Duration = Duration::from_secs(5);
/// Time limit of writing out the state before a freeze, and of the end.
const DEADLINE: Duration = Duration::from_secs(20);
/// Limit of concurrent writes of the marker: storage may not answer.
static MARKING: Semaphore = Semaphore::const_new(1);
/// The same of writing out the state.
static SYNCING: Semaphore = Semaphore::const_new(1);

/// Failure to prepare the state of a VMI.
#[derive(Debug, Error)]
pub(crate) enum VmStateError {
    /// The launcher pod has no claim for it.
    #[error("the pod has no claim for the state of the VMI")]
    NoClaim,
    /// The state of a TPM is found by the firmware's UUID.
    #[error("VMI has no valid firmware UUID, by which the state of its TPM is found")]
    NoUuid,
    /// Another preparation was faster.
    #[error("the TPM is in use: QEMU runs already")]
    Runs,
    /// A program of the emulator has failed.
    #[error("{program} has failed: {message}")]
    Program { program: String, message: String },
    /// The emulator did not do this in time.
    #[error("the TPM emulator did not {0} in time")]
    Late(&'static str),
    /// The claim or the pod's files do not work.
    #[error("cannot prepare the state of the VMI: {0}")]
    Io(#[from] std::io::Error),
}

/// State of the pod's VMI. Cheap to clone.
#[derive(Clone, Debug)]
pub(crate) struct VmState {
    paths: Paths,
    /// File with the process ID of QEMU.
    guest: PathBuf,
    /// True once the launcher ends. Held while the emulator is started or ended.
    ending: Arc<Mutex<bool>>,
    started: Arc<Notify>,
}

impl VmState {
    /// Creates the state of a pod, and the receiver of the reason for which its VMI is lost.
    pub(crate) fn new(paths: Paths, guest: PathBuf, tasks: &Tasks) -> (Self, mpsc::Receiver<String>) {
        let (sender, receiver) = mpsc::channel(1);
        let state = Self { paths, guest, ending: Arc::default(), started: Arc::default() };
        tasks.keep("TPM emulator", state.clone().watch(sender));
        (state, receiver)
    }

    /// Returns the file of the VMI's UEFI variables.
    pub(crate) fn variables(vmi: &VirtualMachineInstance, paths: &Paths) -> PathBuf {
        let kept = persistent_state::keeps_variables(&vmi.spec);
        let directory = if kept { paths.vm_state.join(persistent_state::NVRAM) } else { paths.nvram() };
        directory.join(format!("{}_VARS.fd", vmi.metadata.name.as_deref().unwrap_or_default()))
    }

    /// Prepares the state of a VMI that starts, or that arrives by the migration. Blocks.
    pub(crate) fn prepare(&self, vmi: &VirtualMachineInstance, migration: Option<&str>) -> Result<(), VmStateError> {
        if persistent_state::keeps_variables(&vmi.spec) {
            self.claim()?.variables()?;
            remove_empty(&Self::variables(vmi, &self.paths))?;
        }
        if !persistent_state::has_tpm(&vmi.spec) {
            return Ok(());
        }
        let ending = self.ending.lock().unwrap_or_else(PoisonError::into_inner);
        if *ending {
            return Err(VmStateError::Late("start"));
        }
        // A preparation that storage has held up must not take the TPM from the guest that another one has started.
        if emulator::is_qemu(&self.guest) {
            return Err(VmStateError::Runs);
        }
        emulator::end(&self.paths)?;
        let state = self.tpm(vmi, migration)?;
        emulator::start(&state, &self.paths)?;
        self.started.notify_one();
        Ok(())
    }

    /// Returns the directory with the state of the VMI's TPM, which is made.
    fn tpm(&self, vmi: &VirtualMachineInstance, migration: Option<&str>) -> Result<PathBuf, VmStateError> {
        let name = vmi.metadata.name.as_deref().unwrap_or_default();
        if !persistent_state::keeps_tpm(&vmi.spec) {
            let directory = self.paths.volatile_tpm();
            claim::remove(&directory)?;
            claim::make_directory(&directory)?;
            if migration.is_none() {
                emulator::make(&directory, None, &self.paths, name)?;
            }
            return Ok(directory);
        }
        let firmware = vmi.spec.domain.firmware.as_ref();
        let uuid =
            firmware.and_then(|firmware| canonical_uuid(firmware.uuid.as_deref()?)).ok_or(VmStateError::NoUuid)?;
        let claim = self.claim()?;
        if let Some(migration) = migration {
            return Ok(claim.arrive(&uuid, migration)?);
        }
        let directory = claim.settle(&uuid)?;
        let local_ca = claim.local_ca()?;
        claim.make_tpm(&uuid, |new| emulator::make(new, Some(&local_ca), &self.paths, &format!("{name}:{uuid}")))?;
        Ok(directory)
    }

    fn claim(&self) -> Result<StateClaim, VmStateError> {
        StateClaim::of(&self.paths).ok_or(VmStateError::NoClaim)
    }

    /// Records in a claim that has the TPM's state of both ends that the guest leaves by this migration. The target does not run it
    /// yet.
    pub(crate) async fn leaving(&self, migration: &str) {
        self.mark(migration, true).await;
    }

    /// Records in the claim that the guest has left by this migration: its state is in the claim of the target.
    pub(crate) async fn left(&self, migration: &str) {
        self.mark(migration, false).await;
    }

    /// Records that the guest has arrived, if the claim has the TPM's state of both ends.
    pub(crate) async fn arrived(&self, migration: &str) {
        self.mark(migration, true).await;
    }

    /// Marks the claim; `beside`: only if it has the state of both ends. Storage that does not answer is left after a time limit, since
    /// the guest stands still.
    async fn mark(&self, migration: &str, beside: bool) {
        let Ok(turn) = MARKING.try_acquire() else {
            tracing::error!(
                migration,
                "cannot record in the claim of the state that the guest has left: an earlier record hangs"
            );
            return;
        };
        let (migration, paths) = (migration.to_owned(), self.paths.clone());
        let marked = tokio::task::spawn_blocking(move || {
            let marked = mark(&paths, &migration, beside);
            drop(turn);
            marked
        });
        match timeout(MARK_DEADLINE, marked).await {
            Ok(Ok(Ok(()))) => {}
            Ok(Ok(Err(error))) => {
                tracing::error!(%error, "cannot record in the claim of the state that the guest has left")
            }
            _ => tracing::error!("recording in the claim of the state that the guest has left takes too long"),
        }
    }

    /// Writes out what the claim holds, before a snapshot.
    pub(crate) async fn sync(&self) -> std::io::Result<()> {
        let path = self.paths.vm_state.clone();
        let written = async {
            let turn = SYNCING.acquire().await.ok()?;
            let written = tokio::task::spawn_blocking(move || {
                let written = write_out(&path);
                drop(turn);
                written
            });
            written.await.ok()
        };
        match timeout(DEADLINE, written).await {
            Ok(Some(written)) => written,
            _ => Err(std::io::Error::other("the claim with the state of the VMI does not answer")),
        }
    }

    /// Ends the emulator for good, and tidies the claim up.
    pub(crate) async fn end(self, state: &LauncherState) {
        let end = End::of(state);
        let ended = tokio::task::spawn_blocking(move || {
            *self.ending.lock().unwrap_or_else(PoisonError::into_inner) = true;
            emulator::end(&self.paths)?;
            self.tidy_up(end)
        });
        match timeout(DEADLINE, ended).await {
            Ok(Ok(Ok(()))) => {}
            Ok(Ok(Err(error))) => tracing::warn!(%error, "cannot tidy the state of the VMI up, the next start does"),
            _ => tracing::warn!("tidying the state of the VMI up takes too long, the next start does it"),
        }
    }

    fn tidy_up(&self, end: End) -> Result<(), VmStateError> {
        let (Some(claim), Ok(own)) = (StateClaim::of(&self.paths), std::fs::read_link(self.paths.tpm_state())) else {
            return Ok(());
        };
        match (end, claim.name_of(&own)) {
            (End::Left, _) => claim.leave(&own)?,
            (End::Here { arrived }, Some((uuid, name))) => {
                // The directory of a guest that has not arrived is not the state, and the source uses another one.
                let is_of = |migration: &str| arrived.as_deref() == Some(migration);
                if claim::suffix(uuid, name).is_none_or(is_of) {
                    claim.keep(uuid, name)?;
                }
            }
            (End::Here { .. }, None) | (End::Unknown, _) => {}
        }
        Ok(())
    }

    /// Keeps an emulator running, and reports one that has ended while its QEMU runs.
    async fn watch(self, lost: mpsc::Sender<String>) {
        loop {
            let Some(process) = emulator::running(&self.paths) else {
                self.started.notified().await;
                continue;
            };
            let began = Instant::now();
            if let Err(error) = emulator::ended(process).await {
                tracing::error!(%error, "cannot watch the TPM emulator");
                sleep(RESTART_PAUSE).await;
            }
            let guest = emulator::process_in(&self.guest);
            sleep(RESTART_PAUSE.saturating_sub(began.elapsed())).await;
            self.start_again().await;
            let Some((pid, guest)) = guest else { continue };
            if timeout(GRACE, emulator::ended(guest)).await.is_err() && !emulator::is_ending(pid) {
                let _ = lost.send("the TPM emulator of the guest has ended".to_owned()).await;
            }
        }
    }

    async fn start_again(&self) {
        let this = self.clone();
        let started = tokio::task::spawn_blocking(move || {
            let ending = this.ending.lock().unwrap_or_else(PoisonError::into_inner);
            if *ending { Ok(()) } else { emulator::start_again(&this.paths) }
        });
        if let Ok(Err(error)) = started.await {
            tracing::error!(%error, "cannot start the TPM emulator again");
        }
    }
}

/// The place of the guest when its launcher ends.
#[derive(Clone, Debug, PartialEq, Eq)]
enum End {
    /// It has left.
    Left,
    /// It has ended here, or has never been here.
    Here {
        /// The migration by which it has come.
        arrived: Option<String>,
    },
    Unknown,
}

impl End {
    fn of(state: &LauncherState) -> Self {
        match &state.migration {
            _ if state.reason == "migrated" => Self::Left,
            None => Self::Here { arrived: None },
            Some(report) if report.step() == MigrationStep::Moved => {
                Self::Here { arrived: Some(report.migration.clone()) }
            }
            Some(_) => Self::Unknown,
        }
    }
}

/// Writes out the file system of a claim, if there is one. Blocks.
fn write_out(claim: &Path) -> std::io::Result<()> {
    match std::fs::File::open(claim) {
        Ok(claim) => Ok(rustix::fs::syncfs(claim)?),
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(()),
        Err(error) => Err(error),
    }
}

/// Marks the claim of a pod, if it has one; `beside`: only if it has the state of both ends. Blocks.
fn mark(paths: &Paths, migration: &str, beside: bool) -> std::io::Result<()> {
    let Some(claim) = StateClaim::of(paths) else { return Ok(()) };
    let is_due = !beside
        || match std::fs::read_link(paths.tpm_state()) {
            Ok(own) => claim.has_state_of(&own, migration)?,
            Err(_) => false,
        };
    if is_due { claim.mark(migration) } else { Ok(()) }
}

/// Returns a UUID in the form in which libvirt names directories.
fn canonical_uuid(text: &str) -> Option<String> {
    let digits: String = text.trim().chars().filter(|c| *c != '-').collect::<String>().to_ascii_lowercase();
    let is_uuid = digits.len() == 32 && digits.bytes().all(|byte| byte.is_ascii_hexdigit());
    let part = |range| digits.get(range);
    let parts = [part(0..8)?, part(8..12)?, part(12..16)?, part(16..20)?, part(20..32)?];
    is_uuid.then(|| parts.join("-"))
}

/// Removes a file without content, with which QEMU does not start: libvirt makes it anew.
fn remove_empty(path: &Path) -> std::io::Result<()> {
    match std::fs::symlink_metadata(path) {
        Ok(metadata) if metadata.is_file() && metadata.len() == 0 => std::fs::remove_file(path),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests;
