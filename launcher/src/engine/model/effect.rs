//! Inputs and effects of a decision. A result names the job to which it belongs.

use std::{path::PathBuf, sync::Arc};

use protocol::{AccessCredentials, GuestPanic, MemoryFile, MigrateRequest};
use serde::{Deserialize, Serialize};

use super::{
    migration::MigrationRecord,
    request::{Answer, JobName, Request, RequestError, RequestId, Wanted},
};
use crate::{
    domain::{Domain, DomainError, diff::DeviceChange, parse::DomainConfig},
    guest_agent::GuestFacts,
    hypervisor::{DomainFacts, HypervisorError, MigrateWay, Progress, RebootWay},
    migration::{BaseImage, ChannelMode},
};

/// An event, a request or the result of an effect.
#[derive(Debug)]
pub(crate) enum Input {
    /// The worker has started.
    Begin {
        /// A former worker started a domain in this pod.
        adopting: bool,
        /// The daemon can start ahead of Hello.
        start_daemon: bool,
        /// The pod is to fail, for tests.
        simulate_crash: bool,
        /// The last migration of a former worker.
        migration: Option<Box<MigrationRecord>>,
        /// The save of the memory that a former worker began.
        save: Option<SaveRecord>,
    },
    Request(RequestId, Request),
    /// A time that the state names has come.
    Timer,
    /// A domain event.
    DomainChanged {
        /// The connection has ended.
        closed: bool,
        /// The guest's kernel has crashed since the last event.
        crashed: bool,
    },
    /// The guest agent's facts have changed.
    GuestFacts(Box<GuestFacts>),
    /// The status of credentials has changed.
    Credentials(Option<AccessCredentials>),
    /// Result of [`Effect::StartDaemon`].
    DaemonStarted(Option<RequestId>, Result<(), RequestError>),
    /// Result of [`Effect::Connect`]: false if the daemon does not listen yet.
    Connected(Result<bool, HypervisorError>),
    /// Result of [`DomainCall::Read`], with the state of the guest agent's connection if an event reported it.
    Read(Result<DomainFacts, HypervisorError>, Option<bool>),
    /// Result of [`Effect::ReadCrash`].
    Crash(GuestPanic),
    /// Result of [`DomainCall::Act`].
    Acted(RequestId, Result<(), HypervisorError>),
    /// Result of [`DomainCall::Destroy`].
    Destroyed(Result<(), HypervisorError>),
    /// Result of [`DomainCall::SetClock`].
    ClockSet,
    /// The domain cannot go on, for this reason.
    Lost(String),
    /// Result of work for a job.
    Job(JobName, JobInput),
}

/// An input of a job: an event, or the result of its [`Work`] or [`DomainCall`].
#[derive(Debug)]
pub(crate) enum JobInput {
    /// A time that the job names may have come.
    Timer,
    /// The connection was made, and the domain was read through it.
    Connected,
    /// The read for which the job waits has ended.
    Read,
    /// A read has shown the domain, with this number, in the published state.
    Seen(Option<u32>),
    /// A read has shown that the domain has ended or is gone, with the reason.
    Gone(&'static str),
    /// A request to abort the job.
    Abort(RequestId),
    /// Result of [`Work::Prepare`] or [`Work::PrepareTarget`].
    Prepared(Result<Box<Domain>, RequestError>),
    Served(Result<(), RequestError>),
    Defined(Result<(), HypervisorError>),
    /// Result of [`Work::WriteTags`]: volume and size of the image.
    TagsWritten(Result<Option<(String, u64)>, RequestError>),
    /// Result of [`DomainCall::Create`] or [`DomainCall::RestoreMemory`].
    Created(Result<(), HypervisorError>),
    /// Result of [`Work::Compare`].
    Compared {
        /// Possible sizes in bytes of disks in claims, by volume.
        sizes: Vec<(String, u64)>,
        wanted: Result<Box<DomainConfig>, DomainError>,
        /// Hot-plugged volumes without a disk in the wanted domain, and why they cannot be opened yet; also volumes whose claims do not
        /// answer.
        left_out: Vec<(String, String)>,
    },
    /// Result of [`DomainCall::GrowDisk`]: false if the disk already has the size.
    DiskGrown(Result<bool, HypervisorError>),
    VcpusPlugged(Result<(), HypervisorError>),
    DeviceChanged(Result<(), HypervisorError>),
    MemoryDumped(Result<(), HypervisorError>),
    /// Result of [`Work::RecordSave`] with a record.
    SaveRecorded(Result<(), String>),
    MemorySaved(Result<(), HypervisorError>),
    MemoryKept(Result<(), String>),
    MemoryDiscarded(Result<(), String>),
    /// Result of [`Work::MarkMemory`]: false if the file was marked before.
    MemoryMarked(Result<bool, String>),
    MemoryUnmarked(Result<(), String>),
    ShutdownRequested(Result<(), HypervisorError>),
    MigrationOpened(Result<(), RequestError>),
    /// Result of [`Work::CompareImages`].
    ImagesCompared {
        /// Name of the migration.
        migration: String,
        result: Result<(), String>,
    },
    Migrated(Result<(), HypervisorError>),
    Departed(Result<(), String>),
    /// Result of [`DomainCall::ReadProgress`]: `None` if no migration is in progress.
    ProgressRead(Result<Option<Progress>, HypervisorError>),
    MigrationAborted(Result<(), HypervisorError>),
    Paused(Result<(), HypervisorError>),
    PostCopyStarted(Result<(), HypervisorError>),
    Resumed(Result<(), HypervisorError>),
    /// Result of [`Work::Release`]: false if the target has no domain.
    Released(Result<bool, String>),
}

/// The file to which the memory of a guest is saved, as a restarted worker finds it.
#[derive(Clone, Debug, Deserialize, PartialEq, Eq, Serialize)]
pub(crate) struct SaveRecord {
    pub(crate) volume: String,
    /// Its name in the claim.
    pub(crate) file: String,
}

impl SaveRecord {
    /// Returns the report of a save that has not ended.
    pub(crate) fn report(&self) -> MemoryFile {
        MemoryFile { volume: self.volume.clone(), file: self.file.clone(), ..MemoryFile::default() }
    }
}

/// Call for an action on the guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum GuestCall {
    /// Pause the CPUs.
    Suspend,
    /// Resume the CPUs.
    Resume,
    /// Press the reset button.
    Reset,
    /// Request a reboot.
    Reboot(RebootWay),
}

/// Work of the driver. Each effect that names no result ends without input.
#[derive(Clone, Debug)]
pub(crate) enum Effect {
    Answer(RequestId, Answer),
    /// Start libvirt's daemon, after writing the cache if there is one.
    StartDaemon {
        /// The node's capabilities cache.
        cache: Option<Vec<protocol::CacheFile>>,
        /// The Hello that waits for it.
        request: Option<RequestId>,
    },
    /// Connect to the daemon if it listens.
    Connect,
    /// Drop the connection.
    Disconnect,
    /// Read the crash of the guest's kernel from QEMU's log.
    ReadCrash,
    /// Log the end of QEMU's log, since the pod and that log are deleted soon.
    LogLastLines,
    /// Pass the state of the connection and of the guest to the guest agent.
    AttendGuestAgent {
        /// The guest agent is connected.
        connected: bool,
        /// The guest runs.
        runs: bool,
        /// The domain has changed.
        changed: bool,
    },
    /// Write the record of a migration and pass these channels on.
    SaveMigration(Box<MigrationRecord>, ChannelMode),
    /// Call libvirt, for a job if it is named.
    Call(Option<JobName>, DomainCall),
    Work(JobName, Work),
}

/// Work for a job beside libvirt, for a VMI or a migration.
#[derive(Clone, Debug)]
pub(crate) enum Work {
    /// Prepare the disks and render the domain's XML.
    Prepare(Arc<Wanted>),
    /// Prepare the disks of a domain that arrives from another launcher by the migration of this name, and render its XML.
    PrepareTarget(Arc<Wanted>, String),
    /// Start DHCP, console and credentials unless they run.
    Serve(Arc<Wanted>),
    /// Write the tags of interfaces, with the addresses that libvirt assigned, to the cloud-init image.
    WriteTags(Arc<Wanted>),
    /// The same for a domain that arrives from another launcher. Without result.
    TagTarget(Arc<Wanted>),
    /// Read the claims' sizes and render the wanted domain with the disks of the active one.
    Compare(Arc<Wanted>),
    /// Write the record of a migration and open its channels.
    OpenMigration(Box<MigrationRecord>, ChannelMode),
    /// Compare images beneath disks with those of the target. Without result once the channels are closed.
    CompareImages {
        /// Name of the migration.
        migration: String,
        images: Vec<BaseImage>,
    },
    /// Write the record of a save of the memory, or remove it without result.
    RecordSave(Option<SaveRecord>),
    /// Fail unless this file holds the whole memory of a guest, and write it to its storage.
    KeepMemory(PathBuf),
    /// Empty the file for the memory of a guest that goes on.
    DiscardMemory(PathBuf),
    /// Mark the memory in this file as resumed.
    MarkMemory(PathBuf),
    /// Take the mark back.
    UnmarkMemory(PathBuf),
    /// Free the space of memory that is marked. Without result.
    FreeMemory(PathBuf),
    /// Wait until libvirt has decided that the guest has left, and end QEMU. Without result once the channels are closed.
    AwaitDeparture,
    /// Report the end of the domain to the target, and record in the claim of its state that the guest has left.
    Release {
        /// Name of the migration.
        migration: String,
        /// The user has paused the guest.
        paused: bool,
    },
}

/// A call to libvirt.
#[derive(Clone, Debug)]
pub(crate) enum DomainCall {
    /// Make the daemon read its caches ahead of a start. Without result.
    WarmUp,
    /// Read the domain's state and XML.
    Read,
    /// Define the domain, with free ports.
    Define(Box<Domain>),
    /// Start QEMU.
    Create {
        /// Without running the guest.
        paused: bool,
    },
    /// Resize a disk.
    GrowDisk {
        /// Its device name.
        target: String,
        /// Its size in bytes.
        size: u64,
    },
    /// Plug vCPUs into the running domain, up to this number.
    PlugVcpus(u32),
    /// Change a device of the running domain.
    ChangeDevice(DeviceChange, String),
    /// Write the guest's memory to this file.
    DumpMemory(PathBuf),
    /// Write the guest's memory to this file and end the domain.
    SaveMemory(PathBuf),
    /// Start the defined domain from the memory in this file, without running the guest.
    RestoreMemory(PathBuf),
    /// Move the domain to another launcher.
    Migrate {
        request: Arc<MigrateRequest>,
        /// Device names of the disks that are copied.
        copied: Vec<String>,
        /// How the guest leaves.
        way: MigrateWay,
    },
    /// Let the guest of the migration leave before all of its memory is copied.
    StartPostCopy,
    /// Read the progress of the migration.
    ReadProgress,
    AbortMigration,
    /// Set the longest time in milliseconds for which no guest runs. Without result.
    SetMaxDowntime(u64),
    /// Pause the guest for a job.
    Pause,
    /// Resume the guest for a job.
    Resume,
    Act(RequestId, GuestCall),
    /// Request a shutdown of the guest.
    Shutdown,
    /// End QEMU.
    Destroy {
        /// With SIGTERM only.
        gently: bool,
    },
    /// Set the guest's clock, which stood still during a pause.
    SetClock,
}
